// Every CUDA call is checked; a failure becomes a DeviceError that says what CUDA reported and
// where.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "flash_kda/error.h"

namespace flash_kda::cuda {

inline void check(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a launch error must not be reported a second time by somebody else's call
  throw DeviceError(std::string("CUDA: ") + cudaGetErrorString(error) + " (" +
                    cudaGetErrorName(error) + ") in " + call + " at " + file + ":" +
                    std::to_string(line));
}

}  // namespace flash_kda::cuda

#define FLASH_KDA_CUDA_CHECK(call) ::flash_kda::cuda::check((call), #call, __FILE__, __LINE__)
