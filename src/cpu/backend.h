// What the rest of the library may ask of the CPU backend.
//
// Algorithm: chunks of kChunk tokens, fp32 throughout; see kernels.inl and docs/cpu.md. Work items
// are (sequence, value heads), longest first; a head's columns of V are shared out when there are
// fewer items than threads. A result never depends on the number of threads, on the split, or on
// other sequences and heads.
#pragma once

#include "cpu/kernels.h"
#include "flash_kda/forward.h"

namespace flash_kda::cpu {

// Runs the pass on `plan.threads` threads and returns when it is done. `args` passed validation and
// `plan` fits it. Throws ValueError if FLASH_KDA_CPU_ISA names no instruction set that this machine
// has, std::bad_alloc without room for the scratch (0.35 MB a thread at K = V = 128).
void forward(const ForwardArgs& args, const ForwardPlan& plan);

// As above, with given kernels: for tests and benchmarks.
void forward(const ForwardArgs& args, const ForwardPlan& plan, const Kernels& kernels);

// "avx512", "avx2" or "generic": what forward() uses. Never throws.
const char* instruction_set();

// Threads that this process may use (its CPU affinity), at least 1.
int max_threads();

}  // namespace flash_kda::cpu
