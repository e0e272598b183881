// What a tensor map for the bulk copies holds: [B, T, H, D] bf16 arrays, boxes of 32 tokens x 64
// channels of one head. Pure: needs no CUDA.
#pragma once

#include <array>
#include <cstdint>

#include "flash_kda/tensor.h"

namespace flash_kda::sm90 {

// Innermost dimension first, as the driver wants it: D, H, T, B.
struct TensorMapLayout {
  std::array<std::uint64_t, 4> extents;  // elements
  std::array<std::uint64_t, 3> strides;  // bytes, of H, T and B
  std::array<std::uint32_t, 4> box;      // elements of one copy

  friend bool operator==(const TensorMapLayout&, const TensorMapLayout&) = default;
};

// Throws ValueError naming `argument` where the array's address or strides do not suit the copy
// engine: the address and the strides of B, T and H have to be multiples of 16 bytes (8 elements),
// as they are in any dense array whose last dimension is a multiple of 8 and in most slices of a
// fused projection.
void check_tensor_map(const char* argument, const TensorView& view);

// The layout of a view that passed the check.
TensorMapLayout tensor_map_layout(const TensorView& view);

}  // namespace flash_kda::sm90
