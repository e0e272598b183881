// Runs kernels on the host, block after block.
//
//   run_grid({.blocks = 2, .threads = 512, .shared_bytes = 200 * 1024},
//            [&](sm90::SharedAddress base) { forward_body<...>(params, maps, base); });
//
// The blocks run one after another: they may meet in global memory (atomics) but not wait for each
// other. Throws emulation::Error for a fault of the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "emulation/bulk_copy.h"
#include "emulation/scheduler.h"

namespace flash_kda::emulation {

struct Launch {
  int blocks = 1;
  int threads = 128;  // a multiple of 32, up to 1024
  std::size_t shared_bytes = 0;
  // 0: threads run in order and loads arrive as late as they can. Others: random orders; a kernel
  // must give the same bits with each.
  std::uint64_t seed = 0;
};

// `body` runs in every thread, with the address of the block's shared memory (a multiple of 1024).
void run_grid(const Launch& launch, const std::function<void(SharedAddress base)>& body);

}  // namespace flash_kda::emulation
