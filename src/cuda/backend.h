// What the rest of the library may ask of the CUDA backend. In a build without CUDA,
// unavailable.cpp answers.
#pragma once

#include "flash_kda/forward.h"
#include "flash_kda/version.h"

namespace flash_kda::cuda {

// Fills the CUDA part of `plan`, whose shapes are set and whose arguments passed validation.
// Throws NotImplementedError for a legal call that the kernels, this build or this device do not
// serve.
void plan(const ForwardArgs& args, ForwardPlan& plan);

// Queues the pass on `stream` (a cudaStream_t). Throws DeviceError.
void forward(const ForwardArgs& args, const ForwardPlan& plan, void* workspace, void* stream);

// Never throws; works without a driver.
BackendInfo info();

}  // namespace flash_kda::cuda
