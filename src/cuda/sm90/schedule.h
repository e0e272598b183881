// Shares out a packed batch: cuts its sequences by the rule and lists the spans, longest first.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/params.h"

namespace flash_kda::sm90 {

// Fills params.schedule and the lists beside it from cu_seqlens; spans of one queue whose lengths
// agree to within one part in eight come in any order. Throws DeviceError.
void launch_schedule(const ForwardParams& params, const SegmentRule& rule, cudaStream_t stream);

}  // namespace flash_kda::sm90
