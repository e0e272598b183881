// What a call keeps in its workspace, and where.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/sm90/segments.h"
#include "flash_kda/forward.h"

namespace flash_kda::sm90 {

// The most that the schedule of a call can hold, known from its sizes alone. The rule is a pure
// function of a sequence's length, so that for a packed batch bounds follow from N and T.
struct Workspace {
  bool scheduled = false;   // lists of spans on the device: a packed batch with work to share out
  std::int64_t splits = 0;  // sequences that may be split
  std::int64_t inner = 0;   // inner segments
  std::int64_t rest = 0;    // spans of Queue::kRest
  std::int64_t slots = 0;   // S, R, P: [HV, 128, 128] fp32 each

  // Byte offsets; the schedule is at 0.
  std::size_t first_at = 0, inner_at = 0, rest_at = 0, chains_at = 0, slots_at = 0;
  std::size_t bytes = 0;
};

// The rule that the plan of a call follows; one that splits nothing where it was switched off.
SegmentRule segment_rule(const ForwardPlan& plan);

// Reads sizes, options and multiprocessors of the plan, and `scheduled`, its choice.
Workspace workspace_of(const ForwardPlan& plan, bool scheduled);

}  // namespace flash_kda::sm90
