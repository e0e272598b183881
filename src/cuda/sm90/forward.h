// The SM90 backend: what it serves, its plan, its launch.
#pragma once

#include <cuda_runtime.h>

#include "flash_kda/forward.h"

namespace flash_kda::sm90 {

// Fills the CUDA part of `plan` for a device with this many multiprocessors. Needs no GPU.
// Throws NotImplementedError for what the kernels do not serve, ValueError for strides they cannot
// read.
void plan(const ForwardArgs& args, int multiprocessors, ForwardPlan& plan);

// Queues the pass on the current device. Throws DeviceError.
void forward(const ForwardArgs& args, const ForwardPlan& plan, void* workspace,
             cudaStream_t stream);

}  // namespace flash_kda::sm90
