// Every rule about arguments, with its message; the only place that rejects input.
//
// Messages read "<argument>: expected <rule>, got <what came>". Everything throws ValueError,
// except a legal call that the arrays' device does not serve: NotImplementedError.
#pragma once

#include <cstdint>

#include "flash_kda/forward.h"

namespace flash_kda {

// The sizes that validated arguments agree on.
struct Sizes {
  std::int64_t batch = 0, tokens = 0, sequences = 0;  // B, T, N
  std::int64_t key_heads = 0, value_heads = 0;        // H, HV
  std::int64_t key_dim = 0, value_dim = 0;            // K, V
  bool varlen = false;

  friend bool operator==(const Sizes&, const Sizes&) = default;
};

// Checks everything: presence, shapes, dtypes, strides, devices, options, memory that overlaps and,
// if the arrays are in host memory, the contents of cu_seqlens and of the index arrays. Never reads
// device memory.
Sizes validate(const ForwardArgs& args);

void validate(const PlanOptions& options);

// Checks that `plan` was made for arguments like these and that the workspace is what the plan asks
// for.
void validate_fit(const ForwardArgs& args, const Sizes& sizes, const ForwardPlan& plan,
                  const void* workspace);

// The part of validate() that reads integer arrays; all views are in host memory. The first serves
// a backend that has copied cu_seqlens to the host: [N + 1] offsets, first 0, non-decreasing, last
// <= tokens.
void validate_cu_seqlens(const TensorView& cu_seqlens, std::int64_t tokens);
void validate_contents(const ForwardArgs& args, const Sizes& sizes);

}  // namespace flash_kda
