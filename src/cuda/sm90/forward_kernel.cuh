// The __global__ function around forward_block, and their launch. Included by one file for each
// instantiation.
#pragma once

#include "cuda/check.h"
#include "cuda/sm90/forward_kernel.h"
#include "cuda/sm90/launch.h"

namespace flash_kda::sm90 {

template <class Block>
__global__ void __launch_bounds__(Roles<Block>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params,
                   const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  forward_block<Block>(params, maps, shared_address(shared));
}

template <class Block>
void launch_forward_kernel(const ForwardParams& params, const TensorMaps& maps, int grid,
                           bool after_kernel, cudaStream_t stream) {
  constexpr int kBytes = SharedLayout<Block>::kBytes;
  cuda::allow_shared_memory<forward_kernel<Block>>(kBytes);
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(Roles<Block>::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = after_kernel ? 1 : 0;  // only our own kernels let us start early
  FLASH_KDA_CUDA_CHECK(cudaLaunchKernelEx(&config, forward_kernel<Block>, params, maps));
}

}  // namespace flash_kda::sm90
