// The machine's own limit, measured: fp32 multiply-adds from registers alone.
#pragma once

namespace flash_kda::benchmarks {

// GFLOP/s of `threads` threads at once, with the widest vectors that the machine has; an FMA counts
// two. 0 where no kernel is written for the processor.
double fma_peak_gflops(int threads);

}  // namespace flash_kda::benchmarks
