#include <algorithm>

#include "cuda/check.h"
#include "cuda/sm90/chain.h"
#include "cuda/sm90/launch.h"

namespace flash_kda::sm90 {
namespace {

template <int kTiles>
__global__ void __launch_bounds__(ChainBlock<kTiles>::kThreads, 1)
    chain_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  const int thread = thread_index();
  ChainBlock<kTiles>{params, shared_address(shared), warp_uniform(thread / kWarp), lane_index()}
      .run();
}

template <int kTiles>
void launch(const ForwardParams& params, std::int64_t head_chains, int multiprocessors,
            cudaStream_t stream) {
  using Block = ChainBlock<kTiles>;
  cuda::allow_shared_memory<chain_kernel<kTiles>>(Block::kBytes);
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(
      std::min<std::int64_t>(head_chains * Block::kRowBlocks, multiprocessors)));
  config.blockDim = dim3(Block::kThreads);
  config.dynamicSmemBytes = Block::kBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  FLASH_KDA_CUDA_CHECK(cudaLaunchKernelEx(&config, chain_kernel<kTiles>, params));
}

}  // namespace

void launch_chain(const ForwardParams& params, std::int64_t head_chains, int multiprocessors,
                  cudaStream_t stream) {
  // As few rows a block as still fit at once: a step's time hardly depends on them.
  if (head_chains * ChainBlock<1>::kRowBlocks <= multiprocessors) {
    launch<1>(params, head_chains, multiprocessors, stream);
  } else if (head_chains * ChainBlock<2>::kRowBlocks <= multiprocessors) {
    launch<2>(params, head_chains, multiprocessors, stream);
  } else {
    launch<4>(params, head_chains, multiprocessors, stream);
  }
}

}  // namespace flash_kda::sm90
