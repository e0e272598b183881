#include "cuda/sm90/workspace.h"

#include <algorithm>

namespace flash_kda::sm90 {
namespace {

constexpr std::size_t kAlignment = 256;

}  // namespace

SegmentRule segment_rule(const ForwardPlan& plan) {
  return plan.options.sequence_split ? SegmentRule::of(plan.value_heads, plan.multiprocessors)
                                     : SegmentRule{};
}

Workspace workspace_of(const ForwardPlan& plan, bool scheduled) {
  Workspace w;
  const SegmentRule rule = segment_rule(plan);
  w.scheduled = scheduled;
  if (!plan.varlen) {
    const Segments segments = rule.segments(plan.tokens);
    if (segments.count > 1) {
      w.splits = plan.sequences;
      w.inner = plan.sequences * segments.inner();
      w.slots = plan.sequences * segments.slots();
    }
    w.rest = plan.sequences * std::max(segments.count - 1, 1);
  } else {
    w.rest = plan.sequences;
    const std::int64_t chunks = plan.tokens / kChunk + 1;
    if (rule.splits() && rule.fewest <= chunks) {
      // A sequence of c chunks has at most c / kSegmentChunks segments, and it has more than
      // 32 (c - 1) tokens.
      w.splits =
          std::min(plan.sequences, plan.tokens / ((std::int64_t{rule.fewest} - 1) * kChunk + 1));
      w.inner = std::min(w.splits * (rule.most - 2),
                         (plan.tokens / kChunk + w.splits) / SegmentRule::kSegmentChunks);
      w.slots = 2 * w.inner + w.splits;
      w.rest += w.inner;
    }
  }
  const auto place = [&](std::int64_t count, std::size_t size) {
    const std::size_t at = w.bytes;
    w.bytes =
        (at + static_cast<std::size_t>(count) * size + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  if (w.scheduled) {
    place(1, sizeof(Schedule));
    w.first_at = place(w.splits, sizeof(Span));
    w.inner_at = place(w.inner, sizeof(Span));
    w.rest_at = place(w.rest, sizeof(Span));
    w.chains_at = place(w.splits, sizeof(Chain));
  }
  w.slots_at = place(w.slots * plan.value_heads, kKeyDim * kValueDim * sizeof(float));
  return w;
}

}  // namespace flash_kda::sm90
