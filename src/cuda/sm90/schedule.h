// Shares out a packed batch: cuts its sequences by the rule and lists the spans, longest first.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/params.h"

namespace flash_kda::sm90 {

// What the lists and the slots behind them hold; offsets that do not decrease never ask for more.
struct ScheduleRoom {
  std::int32_t splits, inner;
};

// Fills params.schedule and the lists beside it from cu_seqlens; spans of one queue whose lengths
// agree to within one part in eight come in any order. Throws DeviceError.
void launch_schedule(const ForwardParams& params, const SegmentRule& rule, const ScheduleRoom& room,
                     cudaStream_t stream);

}  // namespace flash_kda::sm90
