// The SM90 forward kernel on the emulated block, for arguments in host memory.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "cuda/sm90/forward_kernel.h"
#include "emulation/launch.h"
#include "flash_kda/forward.h"

namespace flash_kda::testing {

struct EmulatedLaunch {
  int state_groups = 2;             // warpgroups of the state role: 2, or 1 with two blocks a head
  int grid = 2;                     // blocks
  bool counter = false;             // blocks take items from a counter in global memory
  std::vector<std::int32_t> order;  // of the sequences; empty: as they come
  std::uint64_t seed = 0;
};

namespace internal {

inline std::int64_t bytes(const TensorView& view, std::size_t dimension) {
  // The stride of a size-1 dimension means nothing, but a tensor map must hold a legal one.
  return view.shape[dimension] == 1 ? 16 : view.stride[dimension] * size_of(view.dtype);
}

// [B, T, heads, channels] to channel, head, token, batch.
inline emulation::TensorMap map_of(const TensorView& view) {
  return emulation::make_tensor_map(
      view.data, {view.shape[3], view.shape[2], view.shape[1], view.shape[0]},
      {size_of(view.dtype), bytes(view, 2), bytes(view, 1), bytes(view, 0)},
      {sm90::kGroupValues, 1, sm90::kChunk, 1});
}

inline sm90::RowParams rows_of(const TensorView& view) {
  return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}

inline sm90::StateParams state_of(const TensorView& view) {
  if (!view.defined()) return {};
  const bool pairs = (view.stride[0] | view.stride[1] | view.stride[2]) % 2 == 0 &&
                     reinterpret_cast<std::uintptr_t>(view.data) %
                             (2 * static_cast<std::size_t>(size_of(view.dtype))) ==
                         0;
  return {view.data, view.stride[0], view.stride[1], view.stride[2], view.dtype == DType::kBFloat16,
          pairs};
}

inline sm90::ForwardParams params_of(const ForwardArgs& args, int value_blocks) {
  sm90::ForwardParams p;
  p.beta = rows_of(args.beta);
  p.out = rows_of(args.out);
  p.initial_state = state_of(args.initial_state);
  p.final_state = state_of(args.final_state);
  if (args.A_log.defined()) p.a_log = static_cast<const float*>(args.A_log.data);
  if (args.dt_bias.defined()) {
    p.dt_bias = static_cast<const float*>(args.dt_bias.data);
    p.dt_bias_head_stride = args.dt_bias.rank == 2 ? args.dt_bias.stride[0] : args.q.shape[3];
  }
  if (args.cu_seqlens.defined()) {
    p.cu_seqlens = args.cu_seqlens.data;
    p.cu_stride = args.cu_seqlens.stride[0];
    p.cu_int64 = args.cu_seqlens.dtype == DType::kInt64;
  }
  const std::int64_t sequences =
      args.cu_seqlens.defined() ? args.cu_seqlens.shape[0] - 1 : args.v.shape[0];
  p.sequences = static_cast<std::int32_t>(sequences);
  p.heads = static_cast<std::int32_t>(args.v.shape[2]);
  p.heads_per_key = static_cast<std::int32_t>(args.v.shape[2] / args.q.shape[2]);
  p.tokens = static_cast<std::int32_t>(args.v.shape[1]);
  p.items = sequences * args.v.shape[2] * value_blocks;
  p.lower_bound = static_cast<float>(args.lower_bound);
  p.scale = static_cast<float>(args.scale.value_or(1.0 / std::sqrt(double(args.q.shape[3]))));
  p.beta_map = args.beta_kind == BetaKind::kLogit          ? sm90::BetaMap::kSigmoid
               : args.beta_kind == BetaKind::kDoubledLogit ? sm90::BetaMap::kDoubledSigmoid
                                                           : sm90::BetaMap::kIdentity;
  p.beta_fp32 = args.beta.dtype == DType::kFloat32;
  p.l2norm = args.l2norm;
  return p;
}

template <int kStateGroups>
void emulate(const sm90::ForwardParams& params, const sm90::TensorMaps& maps,
             const EmulatedLaunch& launch) {
  emulation::run_grid(
      {.blocks = launch.grid,
       .threads = sm90::Roles<kStateGroups>::kThreads,
       .shared_bytes = sm90::SharedLayout<kStateGroups>::kBytes,
       .seed = launch.seed},
      [&](sm90::SharedAddress base) { sm90::forward_block<kStateGroups>(params, maps, base); });
}

}  // namespace internal

// Throws emulation::Error for a fault of the kernel.
inline void emulate_forward(const ForwardArgs& args, const EmulatedLaunch& launch) {
  sm90::ForwardParams params = internal::params_of(args, launch.state_groups == 1 ? 2 : 1);
  std::int32_t counter = 0;
  if (launch.counter) params.counter = &counter;
  if (!launch.order.empty()) params.order = launch.order.data();
  const sm90::TensorMaps maps = {internal::map_of(args.q), internal::map_of(args.k),
                                 internal::map_of(args.g), internal::map_of(args.v),
                                 internal::map_of(args.out)};
  if (launch.state_groups == 1) {
    internal::emulate<1>(params, maps, launch);
  } else {
    internal::emulate<2>(params, maps, launch);
  }
}

}  // namespace flash_kda::testing
