// The SM90 backend's launch; plan.h has what it serves and its plan.
#pragma once

#include <cuda_runtime.h>

#include "flash_kda/forward.h"

namespace flash_kda::sm90 {

// Queues the pass on the current device. Throws what check_call throws, ValueError where
// cu_seqlens is to be checked and is wrong, DeviceError.
void forward(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
             cudaStream_t stream);

}  // namespace flash_kda::sm90
