// Host side of the SM90 backend: parameters and launches.
#include "cuda/sm90/forward.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/check.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/plan.h"
#include "cuda/sm90/schedule.h"
#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/traits.h"
#include "cuda/sm90/workspace.h"
#include "validate.h"

namespace flash_kda::sm90 {
namespace {

bool pairs_allowed(const TensorView& state) {
  const std::int64_t pair = 2 * size_of(state.dtype);
  bool allowed =
      reinterpret_cast<std::uintptr_t>(state.data) % static_cast<std::uintptr_t>(pair) == 0;
  for (std::size_t axis = 0; axis < 3; ++axis)
    allowed = allowed && (state.shape[axis] == 1 || state.stride[axis] % 2 == 0);
  return allowed;
}

StateParams state_params(const TensorView& state) {
  if (!state.defined()) return {};
  return {state.data,
          state.stride[0],
          state.stride[1],
          state.stride[2],
          state.dtype == DType::kBFloat16,
          pairs_allowed(state)};
}

// Strides of the first three dimensions; that of a dimension of one element counts for nothing.
RowParams row_params(const TensorView& view) {
  const auto stride = [&](std::size_t axis) {
    return view.shape[axis] > 1 ? view.stride[axis] : 0;
  };
  return {view.data, stride(0), stride(1), stride(2)};
}

BetaMap beta_map(BetaKind kind) {
  switch (kind) {
    case BetaKind::kLogit:
      return BetaMap::kSigmoid;
    case BetaKind::kDoubledLogit:
      return BetaMap::kDoubledSigmoid;
    case BetaKind::kProbability:
      break;
  }
  return BetaMap::kIdentity;
}

ForwardParams make_params(const ForwardArgs& args, const ForwardPlan& plan) {
  ForwardParams p;
  p.beta = row_params(args.beta);
  p.out = row_params(args.out);
  p.initial_state = state_params(args.initial_state);
  p.final_state = state_params(args.final_state);
  if (args.A_log.defined()) p.a_log = static_cast<const float*>(args.A_log.data);
  if (args.dt_bias.defined()) {
    p.dt_bias = static_cast<const float*>(args.dt_bias.data);
    p.dt_bias_head_stride =
        args.dt_bias.rank == 2 && plan.value_heads > 1 ? args.dt_bias.stride[0] : kKeyDim;
  }
  if (plan.varlen) {
    p.cu_seqlens = args.cu_seqlens.data;
    p.cu_stride = args.cu_seqlens.stride[0];
    p.cu_int64 = args.cu_seqlens.dtype == DType::kInt64;
  }
  p.sequences = static_cast<std::int32_t>(plan.sequences);
  p.heads = static_cast<std::int32_t>(plan.value_heads);
  p.heads_per_key = static_cast<std::int32_t>(plan.value_heads / plan.key_heads);
  p.tokens = static_cast<std::int32_t>(plan.tokens);
  p.lower_bound = static_cast<float>(args.lower_bound);
  p.scale =
      static_cast<float>(args.scale.value_or(1.0 / std::sqrt(static_cast<double>(plan.key_dim))));
  p.beta_map = beta_map(args.beta_kind);
  p.beta_fp32 = args.beta.dtype == DType::kFloat32;
  p.l2norm = args.l2norm;
  return p;
}

// The plan's choice, read off the space that it asked for: a packed batch that is not scheduled
// needs none.
bool scheduled(const ForwardPlan& plan) { return plan.varlen && plan.workspace_bytes > 0; }

void place_workspace(const ForwardPlan& plan, const Workspace& w, char* workspace,
                     ForwardParams& params) {
  if (w.scheduled) {
    params.schedule = reinterpret_cast<Schedule*>(workspace);
    params.spans[static_cast<int>(Queue::kFirst)] = reinterpret_cast<Span*>(workspace + w.first_at);
    params.spans[static_cast<int>(Queue::kInner)] = reinterpret_cast<Span*>(workspace + w.inner_at);
    params.spans[static_cast<int>(Queue::kRest)] = reinterpret_cast<Span*>(workspace + w.rest_at);
    params.chains = reinterpret_cast<Chain*>(workspace + w.chains_at);
  }
  if (w.splits > 0) {
    constexpr std::int64_t kElements = std::int64_t{kKeyDim} * kValueDim;
    params.slots = {
        workspace + w.slots_at, plan.value_heads * kElements, kElements, kKeyDim, false, true};
  }
}

void launch_all(const ForwardPlan& plan, ForwardParams& params, const TensorMaps& maps,
                cudaStream_t stream) {
  const Workspace w = workspace_of(plan, scheduled(plan));
  if (!plan.varlen) params.segments = segment_rule(plan).segments(plan.tokens);
  if (w.scheduled) {
    const ScheduleRoom room = {static_cast<std::int32_t>(w.splits),
                               static_cast<std::int32_t>(w.inner)};
    launch_schedule(params, segment_rule(plan), room, stream);
  }
  bool after_kernel = w.scheduled;
  if (w.splits > 0) {
    const std::int64_t items = (w.splits + 2 * w.inner) * plan.value_heads;
    launch_forward_kernel<FirstLaunch>(
        params, maps, static_cast<int>(std::min<std::int64_t>(items, plan.multiprocessors)),
        after_kernel, stream);
    launch_chain(params, w.splits * plan.value_heads, plan.multiprocessors, stream);
    after_kernel = true;
  }
  const int grid = static_cast<int>(plan.grid);
  if (plan.value_split == 2) {
    launch_forward_kernel<HalfHead>(params, maps, grid, after_kernel, stream);
  } else {
    launch_forward_kernel<WholeHead>(params, maps, grid, after_kernel, stream);
  }
}

void check_on_host(const ForwardArgs& args, const ForwardPlan& plan, cudaStream_t stream) {
  const TensorView& device = args.cu_seqlens;
  std::vector<std::int64_t> host(static_cast<std::size_t>(plan.sequences) + 1);
  const auto width = static_cast<std::size_t>(size_of(device.dtype));
  TensorView copy = TensorView::dense(host.data(), device.dtype, {device.shape[0]});
  // Element by element: the stride may be anything, and this path is for debugging.
  for (std::size_t i = 0; i < host.size(); ++i) {
    const auto at =
        static_cast<std::int64_t>(width) * device.stride[0] * static_cast<std::int64_t>(i);
    FLASH_KDA_CUDA_CHECK(cudaMemcpyAsync(static_cast<char*>(copy.data) + width * i,
                                         static_cast<const char*>(device.data) + at, width,
                                         cudaMemcpyDeviceToHost, stream));
  }
  FLASH_KDA_CUDA_CHECK(cudaStreamSynchronize(stream));
  validate_cu_seqlens(copy, plan.tokens);
}

}  // namespace

void forward(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
             cudaStream_t stream) {
  check_call(args, plan);
  if (plan.options.check_cu_seqlens && plan.varlen) check_on_host(args, plan, stream);
  if (plan.tokens == 0 && !args.final_state.defined()) return;
  ForwardParams params = make_params(args, plan);
  TensorMaps maps = {};
  if (plan.tokens > 0) {
    maps.q = make_tensor_map("q", args.q);
    maps.k = make_tensor_map("k", args.k);
    maps.v = make_tensor_map("v", args.v);
    maps.g = make_tensor_map("g", args.g);
    maps.out = make_tensor_map("out", args.out);
  }
  place_workspace(plan, workspace_of(plan, scheduled(plan)), static_cast<char*>(workspace), params);
  launch_all(plan, params, maps, stream);
}

}  // namespace flash_kda::sm90
