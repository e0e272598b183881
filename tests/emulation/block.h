// All of one emulated block, and the one that is running.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "emulation/barriers.h"
#include "emulation/bulk_copy.h"
#include "emulation/clocks.h"
#include "emulation/registers.h"
#include "emulation/scheduler.h"
#include "emulation/shared_memory.h"
#include "emulation/warpgroup_products.h"

namespace flash_kda::emulation {

struct Block {
  Block(int index, int grid_blocks, int threads, std::size_t shared_bytes, std::uint64_t seed,
        const FiberStacks& stacks);

  // Runs `body` in every thread. Throws Error, or what a thread threw.
  void run(const std::function<void()>& body);

  int grid_blocks;
  Scheduler scheduler;
  Clocks clocks;
  RegisterPool registers;
  SharedMemory memory;
  NamedBarriers named_barriers;
  TransactionBarriers barriers;
  CopyEngine copies;
  WarpgroupProducts products;
};

// The block whose thread is running. The primitives are free functions, as on the device, so they
// find their block by this. Throws std::logic_error outside a block.
Block& this_block();

}  // namespace flash_kda::emulation
