#include "fma_peak.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace flash_kda::benchmarks {
namespace {

#if defined(__x86_64__)

// Twelve independent chains hide a latency of 4 cycles at 2 instructions a cycle. Assembly, since
// the compiler would keep the sums in memory or drop the loop.
#define FLASH_KDA_FMA_CHAINS                                                   \
  "vfmadd213ps %12,%13,%0\n vfmadd213ps %12,%13,%1\n vfmadd213ps %12,%13,%2\n" \
  "vfmadd213ps %12,%13,%3\n vfmadd213ps %12,%13,%4\n vfmadd213ps %12,%13,%5\n" \
  "vfmadd213ps %12,%13,%6\n vfmadd213ps %12,%13,%7\n vfmadd213ps %12,%13,%8\n" \
  "vfmadd213ps %12,%13,%9\n vfmadd213ps %12,%13,%10\n vfmadd213ps %12,%13,%11\n"
constexpr int kChains = 12;

__attribute__((target("avx512f"))) void fma_avx512(std::int64_t rounds) {
  const __m512 x = _mm512_set1_ps(0.999F);
  const __m512 y = _mm512_set1_ps(1e-3F);
  __m512 a = y, b = y, c = y, d = y, e = y, f = y, g = y, h = y, i = y, j = y, k = y, l = y;
  for (; rounds > 0; --rounds) {
    asm volatile(FLASH_KDA_FMA_CHAINS
                 : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h), "+v"(i),
                   "+v"(j), "+v"(k), "+v"(l)
                 : "v"(y), "v"(x));
  }
}

__attribute__((target("avx2,fma"))) void fma_avx2(std::int64_t rounds) {
  const __m256 x = _mm256_set1_ps(0.999F);
  const __m256 y = _mm256_set1_ps(1e-3F);
  __m256 a = y, b = y, c = y, d = y, e = y, f = y, g = y, h = y, i = y, j = y, k = y, l = y;
  for (; rounds > 0; --rounds) {
    asm volatile(FLASH_KDA_FMA_CHAINS
                 : "+x"(a), "+x"(b), "+x"(c), "+x"(d), "+x"(e), "+x"(f), "+x"(g), "+x"(h), "+x"(i),
                   "+x"(j), "+x"(k), "+x"(l)
                 : "x"(y), "x"(x));
  }
}

#undef FLASH_KDA_FMA_CHAINS

struct FmaKernel {
  void (*run)(std::int64_t rounds) = nullptr;
  int lanes = 0;
};

FmaKernel fma_kernel() {
  if (__builtin_cpu_supports("avx512f")) return {fma_avx512, 16};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {fma_avx2, 8};
  return {};
}

#else

constexpr int kChains = 0;
struct FmaKernel {
  void (*run)(std::int64_t rounds) = nullptr;
  int lanes = 0;
};
FmaKernel fma_kernel() { return {}; }

#endif

}  // namespace

double fma_peak_gflops(int threads) {
  const FmaKernel kernel = fma_kernel();
  if (kernel.run == nullptr) return 0;
  using Clock = std::chrono::steady_clock;
  constexpr std::int64_t kRounds = 4'000'000;
  double best = 0;
  for (int attempt = 0; attempt < 7; ++attempt) {
    std::atomic<int> waiting = threads;
    std::vector<double> seconds(static_cast<std::size_t>(threads));
    {
      std::vector<std::jthread> pool;
      for (int i = 0; i < threads; ++i) {
        pool.emplace_back([&, i] {
          waiting--;
          while (waiting > 0) std::this_thread::yield();
          const auto start = Clock::now();
          kernel.run(kRounds);
          seconds[static_cast<std::size_t>(i)] =
              std::chrono::duration<double>(Clock::now() - start).count();
        });
      }
    }
    const double slowest = *std::max_element(seconds.begin(), seconds.end());
    const double flops = 2.0 * kernel.lanes * kChains * static_cast<double>(kRounds) * threads;
    best = std::max(best, flops / slowest * 1e-9);
  }
  return best;
}

}  // namespace flash_kda::benchmarks
