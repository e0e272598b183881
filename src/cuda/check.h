// Every CUDA call is checked; a failure becomes a DeviceError that says what CUDA reported and
// where.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
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

// Lets `kernel` use `bytes` of dynamic shared memory on the current device: once for each kernel
// and device (of the first 64), since the call costs more than a launch may.
template <auto kKernel>
void allow_shared_memory(int bytes) {
  static std::atomic<std::uint64_t> done{0};
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice", __FILE__, __LINE__);
  const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if ((done.load(std::memory_order_acquire) & bit) != 0) return;
  check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "cudaFuncSetAttribute", __FILE__, __LINE__);
  done.fetch_or(bit, std::memory_order_release);
}

}  // namespace flash_kda::cuda

#define FLASH_KDA_CUDA_CHECK(call) ::flash_kda::cuda::check((call), #call, __FILE__, __LINE__)
