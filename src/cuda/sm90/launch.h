// What the host side of the backend may launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/sm90/params.h"

namespace flash_kda::sm90 {

// FirstLaunch: segments 0 of split sequences in full, and the maps of their inner segments.
// WholeHead, HalfHead: all that runs after that, or at all. `after_kernel`: the kernel before in
// the stream is ours, and this one may be set up while it ends. These throw DeviceError.
template <class Block>
void launch_forward_kernel(const ForwardParams& params, const TensorMaps& maps, int grid,
                           bool after_kernel, cudaStream_t stream);

// S_2 .. S_(n-1) of every split sequence, from S_1 and the maps; after launch_forward_kernel.
// `head_chains`: split sequences times heads, at most.
void launch_chain(const ForwardParams& params, std::int64_t head_chains, int multiprocessors,
                  cudaStream_t stream);

}  // namespace flash_kda::sm90
