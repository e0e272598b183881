#include "cuda/sm90/plan.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "cuda/sm90/tensor_map_layout.h"
#include "cuda/sm90/traits.h"
#include "cuda/sm90/workspace.h"

namespace flash_kda::sm90 {
namespace {

[[noreturn]] void not_served(const std::string& what) {
  throw NotImplementedError(what +
                            " is not served by the CUDA kernels of this build (backend cuda-sm90); "
                            "the CPU backend serves it");
}

void check_sizes(const ForwardPlan& plan) {
  if (plan.key_dim != kKeyDim || plan.value_dim != kValueDim) {
    not_served("head size K = " + std::to_string(plan.key_dim) +
               ", V = " + std::to_string(plan.value_dim) + " (q, v; only 128, 128)");
  }
  // The kernels count tokens, sequences and heads in 32 bits, and look up to two chunks ahead.
  constexpr std::int64_t kLimit = std::numeric_limits<std::int32_t>::max() - 2 * kChunk;
  if (plan.tokens > kLimit) {
    not_served("T = " + std::to_string(plan.tokens) + " (q; above 2^31 - 65)");
  }
  // Items of work: spans times heads times two; there are at most as many more spans as chunks.
  if (plan.value_heads > kLimit / 4 ||
      plan.sequences + plan.tokens / kChunk >
          kLimit / 4 / std::max<std::int64_t>(plan.value_heads, 1)) {
    not_served("N = " + std::to_string(plan.sequences) +
               ", H = " + std::to_string(plan.value_heads) + " (N H above 2^29)");
  }
}

void check_kinds(const ForwardArgs& args) {
  if (args.gate != GateKind::kLowerBound) {
    not_served("a gate without lower_bound (gate kinds softplus and log_decay)");
  }
  for (const auto& [argument, view] :
       {std::pair{"q", &args.q}, {"k", &args.k}, {"v", &args.v}, {"g", &args.g}}) {
    if (view->dtype != DType::kBFloat16) {
      not_served(std::string(argument) + " of type " + name(view->dtype) + " (only bfloat16)");
    }
  }
  if (args.beta.dtype != DType::kBFloat16 && args.beta.dtype != DType::kFloat32) {
    not_served(std::string("beta of type ") + name(args.beta.dtype) +
               " (only bfloat16 and float32)");
  }
  if (args.initial_state_indices.defined()) {
    not_served("a pool of states (initial_state_indices)");
  }
  if (args.final_state_indices.defined()) not_served("a pool of states (final_state_indices)");
  if (args.checkpoint_states.defined()) not_served("checkpoints (checkpoint_states)");
}

std::string count(std::int64_t n, const char* what) {
  return std::to_string(n) + " " + what + (n == 1 ? "" : "s");
}

// Why sequences are cut, and into what; or why not.
std::string split_reason(const ForwardPlan& plan, const SegmentRule& rule, bool may_split) {
  if (!plan.options.sequence_split) return "sequences in one piece, as asked";
  if (!rule.splits()) return "sequences in one piece: heads enough for the device";
  if (!may_split) return "sequences in one piece: too short for segments";
  if (plan.varlen) {
    return "few heads: sequences long enough for it in up to " +
           count(plan.sequence_segments, "segment");
  }
  const Segments s = rule.segments(plan.tokens);
  const std::int32_t rest = s.chunks - s.first, shortest = rest / (s.count - 1);
  return "few heads: sequences in " + count(s.count, "segment") + ": one of " +
         count(s.first, "chunk") + ", " + std::to_string(s.count - 1) + " of " +
         std::to_string(shortest) +
         (rest % (s.count - 1) == 0 ? "" : " or " + std::to_string(shortest + 1));
}

std::string launches(bool scheduled, bool may_split) {
  if (!may_split) return scheduled ? "2 launches (schedule, pass)" : "1 launch";
  return std::string(scheduled ? "4 launches (schedule, " : "3 launches (") +
         "first segments and maps of inner ones, chain of states, other segments)";
}

}  // namespace

void check_call(const ForwardArgs& args, const ForwardPlan& plan) {
  check_sizes(plan);
  check_kinds(args);
  if (plan.tokens == 0) return;  // no row is read or written
  check_tensor_map("q", args.q);
  check_tensor_map("k", args.k);
  check_tensor_map("v", args.v);
  check_tensor_map("g", args.g);
  check_tensor_map("out", args.out);
}

void plan(const ForwardArgs& args, int multiprocessors, ForwardPlan& plan) {
  check_call(args, plan);
  const int split = plan.options.value_split;
  if (split != 0 && split != 1 && split != 2) {
    throw NotImplementedError("value_split = " + std::to_string(split) +
                              " is not served by the CUDA kernels of this build (0, 1 or 2)");
  }
  plan.chunk = kChunk;
  plan.multiprocessors = multiprocessors;
  const SegmentRule rule = segment_rule(plan);
  const Workspace whole = workspace_of(plan, false);
  const bool may_split = whole.splits > 0;
  // More tokens, more segments: of a packed batch this is the most.
  plan.sequence_segments = may_split ? rule.segments(plan.tokens).count : 1;

  const std::int64_t heads = whole.rest * plan.value_heads;  // of spans
  const bool halves_fit = 2 * heads <= multiprocessors;
  plan.value_split = split != 0 ? split : (halves_fit ? 2 : 1);
  const std::int64_t items = heads * plan.value_split;
  plan.grid = std::min<std::int64_t>(items, multiprocessors);
  const bool scheduled = plan.varlen && (may_split || items > plan.grid);
  plan.workspace_bytes = workspace_of(plan, scheduled).bytes;
  plan.reason =
      count(plan.sequences * plan.value_heads, "head") + " of work on " +
      count(multiprocessors, "multiprocessor") + "; " + split_reason(plan, rule, may_split) + "; " +
      (split != 0 ? "value_split as asked"
                  : (halves_fit ? "two blocks a head still fit at once" : "one block a head")) +
      (scheduled ? "; blocks take sequences as they get free, longest first" : "") + "; " +
      launches(scheduled, may_split);
}

}  // namespace flash_kda::sm90
