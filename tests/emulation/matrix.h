// Warp operations on matrices: ldmatrix, stmatrix and mma. All 32 lanes call them.
#pragma once

#include <cstdint>

#include "emulation/scheduler.h"
#include "emulation/shared_memory.h"

namespace flash_kda::emulation {

void load_matrix(Scheduler& scheduler, SharedMemory& memory, SharedAddress row, bool transposed,
                 std::uint32_t (&r)[4]);
void store_matrix(Scheduler& scheduler, SharedMemory& memory, SharedAddress row, bool transposed,
                  const std::uint32_t (&r)[4]);
void mma_bf16(Scheduler& scheduler, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
              std::uint32_t b1);
void mma_tf32(Scheduler& scheduler, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
              std::uint32_t b1);

}  // namespace flash_kda::emulation
