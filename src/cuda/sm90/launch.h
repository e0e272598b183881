// What the host side of the backend may launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/sm90/params.h"

namespace flash_kda::sm90 {

template <int kStateGroups>
void launch_forward_kernel(const ForwardParams& params, const TensorMaps& maps, int grid,
                           bool after_kernel, cudaStream_t stream);

}  // namespace flash_kda::sm90
