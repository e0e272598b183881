#include "cuda/sm90/forward_kernel.cuh"
template void flash_kda::sm90::launch_forward_kernel<flash_kda::sm90::FirstLaunch>(
    const ForwardParams&, const TensorMaps&, int, bool, cudaStream_t);
