// One block sorts the sequences into bins by length, longest bin first. Which of two sequences of a
// bin comes first depends on timing; results do not, since every sequence is computed on its own.
#include "cuda/check.h"
#include "cuda/sm90/order_sequences.h"

namespace flash_kda::sm90 {
namespace {

constexpr int kThreads = 1024;
// A length's bin: its exponent and the three bits below, like a tiny float; falls as the length
// grows.
constexpr int kBins = 256;

__device__ int bin_of(std::int64_t length) {
  const auto x =
      static_cast<unsigned>(length < 0 ? 0 : (length > 0x7fffffff ? 0x7fffffff : length));
  int key = static_cast<int>(x);  // 0..7 exactly
  if (x >= 8) {
    const int exponent = 31 - __clz(static_cast<int>(x));  // 3..30
    key = 8 * (exponent - 2) + static_cast<int>((x >> (exponent - 3)) & 7u);
  }
  return kBins - 1 - key;  // key < 8 * 29
}

__device__ std::int64_t length_of(const void* cu_seqlens, bool int64, std::int64_t stride, int i) {
  if (int64) {
    const auto* p = static_cast<const std::int64_t*>(cu_seqlens) + i * stride;
    return p[stride] - p[0];
  }
  const auto* p = static_cast<const std::int32_t*>(cu_seqlens) + i * stride;
  return static_cast<std::int64_t>(p[stride]) - p[0];
}

__global__ void __launch_bounds__(kThreads)
    order_sequences(const void* cu_seqlens, bool int64, std::int64_t stride, int n,
                    std::int32_t* order, std::int32_t* counter) {
  __shared__ int next[kBins];  // where the next sequence of a bin goes
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kBins) next[thread] = 0;
  __syncthreads();
  for (int i = thread; i < n; i += kThreads)
    atomicAdd(&next[bin_of(length_of(cu_seqlens, int64, stride, i))], 1);
  __syncthreads();
  if (thread < 32) {  // exclusive sums: a lane takes kBins / 32 neighbours
    constexpr int kEach = kBins / 32;
    int total = 0;
    for (int b = 0; b < kEach; ++b) total += next[kEach * thread + b];
    int before = total;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, before, step);
      if (thread >= step) before += other;
    }
    before -= total;
    for (int b = 0; b < kEach; ++b) {
      const int count = next[kEach * thread + b];
      next[kEach * thread + b] = before;
      before += count;
    }
  }
  __syncthreads();
  for (int i = thread; i < n; i += kThreads) {
    order[atomicAdd(&next[bin_of(length_of(cu_seqlens, int64, stride, i))], 1)] = i;
  }
  if (thread == 0) *counter = 0;
}

}  // namespace

void launch_order_sequences(const void* cu_seqlens, bool int64, std::int64_t stride, int n,
                            std::int32_t* order, std::int32_t* counter, cudaStream_t stream) {
  order_sequences<<<1, kThreads, 0, stream>>>(cu_seqlens, int64, stride, n, order, counter);
  FLASH_KDA_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash_kda::sm90
