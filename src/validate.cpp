#include "validate.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>

#include "constants.h"
#include "memory_overlap.h"

namespace flash_kda {
namespace {

[[noreturn]] void reject(const char* argument, const std::string& expected,
                         const std::string& got) {
  throw ValueError(std::string(argument) + ": expected " + expected + ", got " + got);
}

[[noreturn]] void reject(const char* argument, const std::string& expected, const TensorView& got) {
  reject(argument, expected, to_string(got));
}

std::string strides(const TensorView& view) {
  std::string text = to_string(view) + " with strides (";
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    text += (axis > 0 ? ", " : "") + std::to_string(view.stride[axis]);
  }
  return text + ")";
}

// Shortest text that reads back as the same number.
std::string number(double x) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), x).ptr};
}

bool is_index(DType dtype) { return dtype == DType::kInt32 || dtype == DType::kInt64; }

bool has_shape(const TensorView& view, std::initializer_list<std::int64_t> shape) {
  if (view.rank != static_cast<std::int32_t>(shape.size())) return false;
  std::size_t axis = 0;
  for (const std::int64_t extent : shape) {
    if (view.shape[axis++] != extent) return false;
  }
  return true;
}

// `symbols` names the dimensions: "[B, T, H, K]".
void require_shape(const char* argument, const TensorView& view, const char* symbols,
                   std::initializer_list<std::int64_t> shape) {
  if (has_shape(view, shape)) return;
  std::string values;
  for (const std::int64_t extent : shape)
    values += (values.empty() ? "" : ", ") + std::to_string(extent);
  reject(argument, std::string("shape ") + symbols + " = [" + values + "]", view);
}

// Rules for any array, given or not; `rank` -1 leaves the rank free.
void require_array(const char* argument, const TensorView& view, int rank, const char* symbols,
                   Device device) {
  if (!view.defined() || view.rank > TensorView::kMaxRank || (rank >= 0 && view.rank != rank)) {
    reject(argument, std::string("shape ") + symbols, view);
  }
  bool empty = false;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.shape[axis] < 0) reject(argument, "extents of 0 or more", view);
    empty = empty || view.shape[axis] == 0;
  }
  if (view.device != device) {
    reject(argument, "an array on " + to_string(device) + ", where q is", view);
  }
  if (size_of(view.dtype) == 0) reject(argument, "a floating-point or integer dtype", view);
  if (!addressable(view)) {
    reject(argument, "elements and strides that 64-bit addresses reach", strides(view));
  }
  if (empty) return;
  if (view.data == nullptr) reject(argument, "a data pointer", "null for " + to_string(view));
  if (reinterpret_cast<std::uintptr_t>(view.data) %
          static_cast<std::uintptr_t>(size_of(view.dtype)) !=
      0) {
    reject(argument,
           "data aligned to its " + std::to_string(size_of(view.dtype)) + "-byte elements",
           to_string(view) + " at an address that is not");
  }
}

void require_dense_last(const char* argument, const TensorView& view) {
  if (view.rank == 0 || view.numel() == 0) return;
  const auto last = static_cast<std::size_t>(view.rank - 1);
  if (view.shape[last] > 1 && view.stride[last] != 1) {
    reject(argument, "a dense last dimension (stride 1)", strides(view));
  }
}

Sizes sizes_of(const ForwardArgs& args) {
  const Device device = args.q.device;
  if (device.type != DeviceType::kCpu && device.type != DeviceType::kCuda) {
    reject("q", "an array on the CPU or on a CUDA device", args.q);
  }
  require_array("q", args.q, 4, "[B, T, H, K]", device);
  require_array("k", args.k, 4, "[B, T, H, K]", device);
  require_array("v", args.v, 4, "[B, T, HV, V]", device);
  Sizes s;
  s.batch = args.q.shape[0];
  s.tokens = args.q.shape[1];
  s.key_heads = args.q.shape[2];
  s.key_dim = args.q.shape[3];
  s.value_heads = args.v.shape[2];
  s.value_dim = args.v.shape[3];
  s.sequences = s.batch;
  if (s.key_heads < 1) reject("q", "at least one head in [B, T, H, K]", args.q);
  const std::string limit = " from 1 to " + std::to_string(kMaxHeadDim);
  if (s.key_dim < 1 || s.key_dim > kMaxHeadDim) reject("q", "a key head size K" + limit, args.q);
  if (s.value_dim < 1 || s.value_dim > kMaxHeadDim)
    reject("v", "a value head size V" + limit, args.v);
  require_shape("k", args.k, "[B, T, H, K] of q", {s.batch, s.tokens, s.key_heads, s.key_dim});
  require_shape("v", args.v, "[B, T, HV, V]", {s.batch, s.tokens, s.value_heads, s.value_dim});
  if (s.value_heads < 1 || s.value_heads % s.key_heads != 0) {
    reject(
        "v",
        "a number of value heads HV that is a multiple of q's H = " + std::to_string(s.key_heads),
        args.v);
  }
  const TensorView& cu = args.cu_seqlens;
  if (cu.defined()) {
    require_array("cu_seqlens", cu, 1, "[N + 1]", device);
    if (!is_index(cu.dtype)) reject("cu_seqlens", "int32 or int64", cu);
    if (cu.shape[0] < 1) reject("cu_seqlens", "shape [N + 1] with at least one element", cu);
    if (s.batch != 1) reject("cu_seqlens", "B = 1 in a packed batch", "q = " + to_string(args.q));
    s.varlen = true;
    s.sequences = cu.shape[0] - 1;
  }
  return s;
}

void check_dtypes(const ForwardArgs& args) {
  const DType dtype = args.q.dtype;
  const bool cuda = args.q.device.type == DeviceType::kCuda;
  if (dtype != DType::kBFloat16 && dtype != DType::kFloat16 && dtype != DType::kFloat32) {
    reject("q", cuda ? "bfloat16" : "bfloat16, float16 or float32", args.q);
  }
  if (cuda && dtype != DType::kBFloat16) {
    throw NotImplementedError("q: expected bfloat16 on " + to_string(args.q.device) + ", got " +
                              to_string(args.q) + " (float16 and float32 are served on the CPU)");
  }
  const auto as_q = [&](const char* argument, const TensorView& view) {
    if (view.dtype != dtype) reject(argument, std::string(name(dtype)) + " as q", view);
  };
  as_q("k", args.k);
  as_q("v", args.v);
  as_q("out", args.out);
  const auto as_q_or_wide = [&](const char* argument, const TensorView& view) {
    if (view.dtype != DType::kBFloat16 && view.dtype != DType::kFloat32 && view.dtype != dtype) {
      reject(argument,
             dtype == DType::kFloat16 ? "bfloat16, float32 or float16 as q" : "bfloat16 or float32",
             view);
    }
  };
  as_q_or_wide("g", args.g);
  as_q_or_wide("beta", args.beta);
}

void check_tokens(const ForwardArgs& args, const Sizes& s) {
  const Device device = args.q.device;
  require_array("g", args.g, 4, "[B, T, HV, K]", device);
  require_shape("g", args.g, "[B, T, HV, K]", {s.batch, s.tokens, s.value_heads, s.key_dim});
  require_array("beta", args.beta, 3, "[B, T, HV]", device);
  require_shape("beta", args.beta, "[B, T, HV]", {s.batch, s.tokens, s.value_heads});
  require_array("out", args.out, 4, "[B, T, HV, V]", device);
  require_shape("out", args.out, "[B, T, HV, V]", {s.batch, s.tokens, s.value_heads, s.value_dim});
  require_dense_last("q", args.q);
  require_dense_last("k", args.k);
  require_dense_last("v", args.v);
  require_dense_last("g", args.g);
  require_dense_last("beta", args.beta);
  require_dense_last("out", args.out);
  check_dtypes(args);
}

void check_gate(const ForwardArgs& args, const Sizes& s) {
  const Device device = args.q.device;
  switch (args.gate) {
    case GateKind::kLowerBound:
      // Written so that NaN fails.
      if (!(args.lower_bound >= kMinLowerBound && args.lower_bound <= 0.0)) {
        reject("lower_bound", "a number in [-5, 0]", number(args.lower_bound));
      }
      break;
    case GateKind::kSoftplus:
      break;
    case GateKind::kLogDecay:
      for (const auto& [argument, view] :
           {std::pair{"A_log", &args.A_log}, std::pair{"dt_bias", &args.dt_bias}}) {
        if (view->defined()) reject(argument, "nothing, as g already is the log decay", *view);
      }
      break;
    default:
      reject("gate", "a GateKind", std::to_string(static_cast<int>(args.gate)));
  }
  const std::string heads = std::to_string(s.value_heads);
  if (const TensorView& a = args.A_log; a.defined()) {
    require_array("A_log", a, -1, "[HV]", device);
    if (a.numel() != s.value_heads) reject("A_log", "HV = " + heads + " elements", a);
    if (a.dtype != DType::kFloat32) reject("A_log", "float32", a);
    std::int64_t pitch = 1;
    for (auto axis = static_cast<std::size_t>(a.rank); axis-- > 0; pitch *= a.shape[axis]) {
      if (a.shape[axis] > 1 && a.stride[axis] != pitch)
        reject("A_log", "a dense array", strides(a));
    }
  }
  if (const TensorView& bias = args.dt_bias; bias.defined()) {
    require_array("dt_bias", bias, -1, "[HV, K] or [HV * K]", device);
    if (!has_shape(bias, {s.value_heads, s.key_dim}) &&
        !has_shape(bias, {s.value_heads * s.key_dim})) {
      const std::string keys = std::to_string(s.key_dim);
      reject("dt_bias", "shape [HV, K] = [" + heads + ", " + keys + "] or [HV * K]", bias);
    }
    if (bias.dtype != DType::kFloat32) reject("dt_bias", "float32", bias);
    require_dense_last("dt_bias", bias);
  }
}

void check_options(const ForwardArgs& args) {
  switch (args.beta_kind) {
    case BetaKind::kLogit:
    case BetaKind::kDoubledLogit:
    case BetaKind::kProbability:
      break;
    default:
      reject("beta_kind", "a BetaKind", std::to_string(static_cast<int>(args.beta_kind)));
  }
  if (args.scale.has_value() && !std::isfinite(*args.scale)) {
    reject("scale", "a finite number", number(*args.scale));
  }
  // The arithmetic is fp32: a scale that overflows there would be an infinity.
  if (args.scale.has_value() && std::abs(*args.scale) > std::numeric_limits<float>::max()) {
    reject("scale", "a number that float32 holds", number(*args.scale));
  }
}

void check_index_array(const char* argument, const TensorView& view, const char* symbols,
                       std::int64_t length, Device device) {
  require_array(argument, view, 1, symbols, device);
  if (!is_index(view.dtype)) reject(argument, "int32 or int64", view);
  require_shape(argument, view, symbols, {length});
}

void check_state_layout(const char* argument, const TensorView& state, Device device) {
  require_array(argument, state, 4, "[N, HV, V, K]", device);
  if (state.dtype != DType::kBFloat16 && state.dtype != DType::kFloat32) {
    reject(argument, "bfloat16 or float32", state);
  }
  require_dense_last(argument, state);
}

void check_state(const char* argument, const TensorView& state, const char* indices_argument,
                 const TensorView& indices, const Sizes& s, Device device) {
  if (!state.defined()) {
    if (indices.defined())
      reject(indices_argument, std::string("nothing without ") + argument, indices);
    return;
  }
  check_state_layout(argument, state, device);
  if (indices.defined()) {
    check_index_array(indices_argument, indices, "[N]", s.sequences, device);
    require_shape(argument, state, "[slots, HV, V, K]",
                  {state.shape[0], s.value_heads, s.value_dim, s.key_dim});
  } else {
    require_shape(argument, state, "[N, HV, V, K]",
                  {s.sequences, s.value_heads, s.value_dim, s.key_dim});
  }
}

void check_checkpoints(const ForwardArgs& args, const Sizes& s) {
  const Device device = args.q.device;
  const TensorView& states = args.checkpoint_states;
  const std::array<std::pair<const char*, const TensorView*>, 3> arrays{
      {{"checkpoint_sequences", &args.checkpoint_sequences},
       {"checkpoint_positions", &args.checkpoint_positions},
       {"checkpoint_slots", &args.checkpoint_slots}}};
  if (!states.defined()) {
    for (const auto& [argument, view] : arrays) {
      if (view->defined()) reject(argument, "nothing without checkpoint_states", *view);
    }
    return;
  }
  check_state_layout("checkpoint_states", states, device);
  require_shape("checkpoint_states", states, "[slots, HV, V, K]",
                {states.shape[0], s.value_heads, s.value_dim, s.key_dim});
  for (const auto& [argument, view] : arrays) {
    require_array(argument, *view, 1, "[M], as checkpoint_states is given", device);
    check_index_array(argument, *view, "[M] of checkpoint_sequences",
                      args.checkpoint_sequences.shape[0], device);
  }
}

struct Named {
  const char* argument;
  const TensorView* view;
};

[[noreturn]] void reject_overlap(const Named& output, const Named& other) {
  reject(output.argument, std::string("memory apart from ") + other.argument,
         strides(*output.view) + " that overlaps " + strides(*other.view));
}

// Outputs have memory of their own, but for states that share one pool: there the slots decide
// (validate_contents).
void check_memory(const ForwardArgs& args) {
  constexpr std::size_t kFirstState = 13, kFirstOutput = 14, kOut = 16;
  const std::array<Named, 17> arrays{{{"q", &args.q},
                                      {"k", &args.k},
                                      {"v", &args.v},
                                      {"g", &args.g},
                                      {"beta", &args.beta},
                                      {"A_log", &args.A_log},
                                      {"dt_bias", &args.dt_bias},
                                      {"cu_seqlens", &args.cu_seqlens},
                                      {"initial_state_indices", &args.initial_state_indices},
                                      {"final_state_indices", &args.final_state_indices},
                                      {"checkpoint_sequences", &args.checkpoint_sequences},
                                      {"checkpoint_positions", &args.checkpoint_positions},
                                      {"checkpoint_slots", &args.checkpoint_slots},
                                      {"initial_state", &args.initial_state},
                                      {"final_state", &args.final_state},
                                      {"checkpoint_states", &args.checkpoint_states},
                                      {"out", &args.out}}};
  // Nearly always whole ranges lie apart, so each is computed once and the exact question is seldom
  // asked.
  std::array<ByteRange, arrays.size()> ranges;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    if (arrays[i].view->defined()) ranges[i] = byte_range(*arrays[i].view);
  }
  for (std::size_t o = kFirstOutput; o < arrays.size(); ++o) {
    const TensorView& output = *arrays[o].view;
    if (!output.defined()) continue;
    if (!distinct_elements(output)) {
      reject(arrays[o].argument, "memory of its own for every element", strides(output));
    }
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      if (i == o || !ranges[o].meets(ranges[i])) continue;
      const bool pool =
          i >= kFirstState && i != kOut && o != kOut && same_layout(output, *arrays[i].view);
      if (!pool && overlap(output, *arrays[i].view)) reject_overlap(arrays[o], arrays[i]);
    }
  }
}

}  // namespace

Sizes validate(const ForwardArgs& args) {
  const Sizes sizes = sizes_of(args);
  check_tokens(args, sizes);
  check_gate(args, sizes);
  check_options(args);
  check_state("initial_state", args.initial_state, "initial_state_indices",
              args.initial_state_indices, sizes, args.q.device);
  check_state("final_state", args.final_state, "final_state_indices", args.final_state_indices,
              sizes, args.q.device);
  check_checkpoints(args, sizes);
  check_memory(args);
  if (args.q.device.type == DeviceType::kCpu) validate_contents(args, sizes);
  return sizes;
}

void validate(const PlanOptions& options) {
  if (options.threads < 0) reject("threads", "0 or more", std::to_string(options.threads));
  if (options.value_split < 0)
    reject("value_split", "0 or more", std::to_string(options.value_split));
}

void validate_fit(const ForwardArgs& args, const Sizes& sizes, const ForwardPlan& plan,
                  const void* workspace) {
  const Sizes planned{plan.batch,       plan.tokens,  plan.sequences, plan.key_heads,
                      plan.value_heads, plan.key_dim, plan.value_dim, plan.varlen};
  const bool cpu = args.q.device.type == DeviceType::kCpu;
  if (planned != sizes || cpu != (plan.backend == Backend::kCpu)) {
    reject("plan",
           "a plan for these arguments (q = " + to_string(args.q) + ", v = " + to_string(args.v) +
               ", " + std::to_string(sizes.sequences) + " sequences)",
           plan.describe());
  }
  if (plan.workspace_bytes == 0) return;
  const std::string need = std::to_string(plan.workspace_bytes) + " bytes aligned to " +
                           std::to_string(plan.workspace_alignment);
  if (workspace == nullptr) reject("workspace", need, "null");
  if (reinterpret_cast<std::uintptr_t>(workspace) % plan.workspace_alignment != 0) {
    reject("workspace", need, "an address that is not aligned");
  }
}

}  // namespace flash_kda
