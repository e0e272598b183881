// The SM90 forward kernel on the emulated block, for arguments in host memory.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "cuda/sm90/chain.h"
#include "cuda/sm90/forward_kernel.h"
#include "emulation/launch.h"
#include "flash_kda/forward.h"

namespace flash_kda::testing {

struct EmulatedLaunch {
  int state_groups = 2;  // warpgroups of the state role: 2, or 1 with two blocks a head
  int grid = 2;          // blocks
  // Spans come from lists, items from counters, as the schedule kernel leaves them; packed only.
  bool scheduled = false;
  std::vector<int> order = {};  // of the sequences in the lists; empty: as they come
  int chain_tiles = 1;          // 16-row tiles of a block of the chain: 1, 2, 4
  std::uint64_t seed = 0;
  // How a sequence of so many tokens is cut; none: not at all.
  std::function<sm90::Segments(std::int64_t)> segments = nullptr;
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

inline sm90::ForwardParams params_of(const ForwardArgs& args) {
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
  p.lower_bound = static_cast<float>(args.lower_bound);
  p.scale = static_cast<float>(args.scale.value_or(1.0 / std::sqrt(double(args.q.shape[3]))));
  p.beta_map = args.beta_kind == BetaKind::kLogit          ? sm90::BetaMap::kSigmoid
               : args.beta_kind == BetaKind::kDoubledLogit ? sm90::BetaMap::kDoubledSigmoid
                                                           : sm90::BetaMap::kIdentity;
  p.beta_fp32 = args.beta.dtype == DType::kFloat32;
  p.l2norm = args.l2norm;
  return p;
}

// The lists of the schedule kernel, and room for the states between segments.
struct EmulatedWorkspace {
  sm90::Schedule schedule = {};
  std::vector<sm90::Span> spans[3];
  std::vector<sm90::Chain> chains;
  std::vector<float> slots;
  bool splits = false;

  void open(sm90::ForwardParams& p, const EmulatedLaunch& launch) {
    std::int32_t slots_taken = 0;
    const auto cut = [&](std::int64_t tokens) {
      sm90::Segments whole;
      whole.chunks = whole.first =
          static_cast<std::int32_t>((tokens + sm90::kChunk - 1) / sm90::kChunk);
      return launch.segments ? launch.segments(tokens) : whole;
    };
    const auto list = [&](sm90::Queue queue) -> auto& { return spans[static_cast<int>(queue)]; };
    if (p.cu_seqlens == nullptr) {
      p.segments = cut(p.tokens);
      splits = p.segments.count > 1;
      if (splits) slots_taken = p.sequences * p.segments.slots();
    } else {
      const auto offset = [&](int i) {
        return p.cu_int64 ? static_cast<const std::int64_t*>(p.cu_seqlens)[i * p.cu_stride]
                          : static_cast<const std::int32_t*>(p.cu_seqlens)[i * p.cu_stride];
      };
      for (int rank = 0; launch.scheduled && rank < p.sequences; ++rank) {
        const int i = launch.order.empty() ? rank : launch.order[static_cast<std::size_t>(rank)];
        const auto begin = static_cast<int>(offset(i)),
                   tokens = static_cast<int>(offset(i + 1)) - begin;
        const sm90::Segments s = cut(tokens);
        if (s.count == 1) {
          list(sm90::Queue::kRest).push_back(segment_span(s, 0, i, begin, tokens, 0));
          continue;
        }
        list(sm90::Queue::kFirst).push_back(segment_span(s, 0, i, begin, tokens, slots_taken));
        for (int j = 1; j < s.count; ++j) {
          list(sm90::Queue::kRest).push_back(segment_span(s, j, i, begin, tokens, slots_taken));
          if (j + 1 < s.count)
            list(sm90::Queue::kInner).push_back(map_span(s, j, i, begin, tokens, slots_taken));
        }
        chains.push_back({slots_taken, s.inner()});
        slots_taken += s.slots();
      }
      splits = !chains.empty();
    }
    if (launch.scheduled && p.cu_seqlens != nullptr) {
      for (int queue = 0; queue < 3; ++queue) {
        schedule.spans[queue] = static_cast<std::int32_t>(spans[queue].size());
        p.spans[queue] = spans[queue].data();
      }
      schedule.chains = static_cast<std::int32_t>(chains.size());
      p.schedule = &schedule;
      p.chains = chains.data();
    }
    constexpr std::int64_t kElements = std::int64_t{sm90::kKeyDim} * sm90::kValueDim;
    slots.assign(static_cast<std::size_t>(slots_taken * p.heads * kElements),
                 std::numeric_limits<float>::quiet_NaN());
    p.slots = {slots.data(), p.heads * kElements, kElements, sm90::kKeyDim, false, true};
  }
};

template <class Block>
void emulate(const sm90::ForwardParams& params, const sm90::TensorMaps& maps,
             const EmulatedLaunch& launch) {
  emulation::run_grid(
      {.blocks = launch.grid,
       .threads = sm90::Roles<Block>::kThreads,
       .shared_bytes = sm90::SharedLayout<Block>::kBytes,
       .seed = launch.seed},
      [&](sm90::SharedAddress base) { sm90::forward_block<Block>(params, maps, base); });
}

template <int kTiles>
void emulate_chain(const sm90::ForwardParams& params, const EmulatedLaunch& launch) {
  using Block = sm90::ChainBlock<kTiles>;
  emulation::run_grid({.blocks = launch.grid,
                       .threads = Block::kThreads,
                       .shared_bytes = Block::kBytes,
                       .seed = launch.seed},
                      [&](sm90::SharedAddress base) {
                        const int thread = sm90::thread_index();
                        Block{params, base, thread / sm90::kWarp, thread % sm90::kWarp}.run();
                      });
}

}  // namespace internal

// Throws emulation::Error for a fault of the kernel.
inline void emulate_forward(const ForwardArgs& args, const EmulatedLaunch& launch) {
  sm90::ForwardParams params = internal::params_of(args);
  internal::EmulatedWorkspace workspace;
  workspace.open(params, launch);
  const sm90::TensorMaps maps = {internal::map_of(args.q), internal::map_of(args.k),
                                 internal::map_of(args.g), internal::map_of(args.v),
                                 internal::map_of(args.out)};
  if (workspace.splits) {
    internal::emulate<sm90::FirstLaunch>(params, maps, launch);
    if (launch.chain_tiles == 1) internal::emulate_chain<1>(params, launch);
    if (launch.chain_tiles == 2) internal::emulate_chain<2>(params, launch);
    if (launch.chain_tiles == 4) internal::emulate_chain<4>(params, launch);
  }
  if (launch.state_groups == 1) {
    internal::emulate<sm90::HalfHead>(params, maps, launch);
  } else {
    internal::emulate<sm90::WholeHead>(params, maps, launch);
  }
}

}  // namespace flash_kda::testing
