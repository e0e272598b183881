// What the SM90 kernels are launched with. Plain data: pointers, strides in elements, switches.
#pragma once

#include <cstdint>

#include "cuda/sm90/segments.h"

#ifdef FLASH_KDA_EMULATION
#include "cuda/sm90/primitives.h"
#else
#include <cuda.h>
#endif

namespace flash_kda::sm90 {

#ifndef FLASH_KDA_EMULATION
using TensorMap = CUtensorMap;
#endif

struct TensorMaps {
  TensorMap q, k, g, v, out;
};

// States of one array: element (slot, head, v, k) at slot * slot_stride + head * head_stride + v *
// row_stride + k.
struct StateParams {
  void* data = nullptr;  // null: not given
  std::int64_t slot_stride = 0, head_stride = 0, row_stride = 0;
  bool bf16 = false;
  bool pairs = false;  // two neighbours may be read or written at once
};

struct RowParams {
  void* data = nullptr;
  std::int64_t batch_stride = 0, token_stride = 0, head_stride = 0;
};

// How beta becomes the writing strength: multiplier * sigmoid(beta), or beta itself.
enum class BetaMap : std::int32_t { kSigmoid, kDoubledSigmoid, kIdentity };

struct ForwardParams {
  RowParams beta;  // [B, T, HV]
  RowParams out;   // [B, T, HV, V], for the rows of a last, partial chunk
  StateParams initial_state, final_state;
  const float* a_log = nullptr;    // [HV]; null: its exponential is 1
  const float* dt_bias = nullptr;  // [HV, K]; null: 0
  std::int64_t dt_bias_head_stride = 0;
  const void* cu_seqlens = nullptr;  // [N + 1]; null: a batch of equal lengths
  std::int64_t cu_stride = 0;

  // Null: the spans follow from `segments`, the items of a block from its number (WorkCursor).
  Schedule* schedule = nullptr;
  const Span* spans[3] = {};      // by Queue, longest first
  const Chain* chains = nullptr;  // of split sequences
  Segments segments;              // of every sequence of a batch
  StateParams slots;              // workspace: S, R and P of segments, [slot, HV, 128, 128] fp32

  std::int32_t sequences = 0, heads = 0, tokens = 0;  // N, HV, T
  std::int32_t heads_per_key = 1;                     // HV / H
  float lower_bound = -5.0f, scale = 1.0f;
  BetaMap beta_map = BetaMap::kSigmoid;
  bool beta_fp32 = false;
  bool cu_int64 = false;
  bool l2norm = true;
};

}  // namespace flash_kda::sm90
