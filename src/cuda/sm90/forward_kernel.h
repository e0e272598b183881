// The forward pass in one kernel. A block works through a stream of 32-token chunks (stream.h);
// four roles, each in warps of its own, hand a chunk from one to the next through barriers in
// shared memory:
//
// | role    | warps          | work                                                | file         |
// |---------|----------------|-----------------------------------------------------|--------------|
// | load    | 1              | q, k, g, V in; O out                                | load.h       |
// | prepare | 8 or 12        | gate, running decay, norms; K1, Q1, K2; A_qk        | prepare.h    |
// | solve   | 3              | A_kk, the triangular inverse: X, r                  | solve.h      |
// | state   | 4 or 8         | the recurrence; 64 V columns a warpgroup            | recurrence.h |
//
// Block::kStateGroups = 2: a block computes all 128 V columns of a head. Block::kStateGroups = 1:
// two blocks share a head and each repeats the preparation; the same bits come out, since columns
// of V never meet.
//
// Barriers, per stage n % 6 of chunk n:
//   loaded -> prepared -> solved -> released -> loaded again, by chunk n + 6
// and per value slot n % 3:
//   value loaded -> output ready -> stored, then loaded again
//
// Shared memory with two state groups, KiB: stages 144, X and r 16, A_qk 24, V and O 24, tables and
// barriers 19.
#pragma once

#include "cuda/sm90/load.h"
#include "cuda/sm90/prepare.h"
#include "cuda/sm90/recurrence.h"
#include "cuda/sm90/solve.h"

namespace flash_kda::sm90 {

template <class Block>
FLASH_KDA_DEVICE void initialize_shared(SharedAddress base, int thread) {
  using Layout = SharedLayout<Block>;
  using Blocks = Roles<Block>;
  // The blocks above the diagonal of X and A_qk stay zero from here on.
  for (int at = Layout::kSolutionAt + 16 * thread; at < Layout::kValueAt;
       at += 16 * Blocks::kThreads) {
    store_u32x4(base + at, uint4{0, 0, 0, 0});
  }
  if constexpr (Block::kMaps) {  // read for maps as well, which nobody writes them for
    constexpr int kEnd = Layout::kQueryScaleAt + kTableSlots * kRowTableBytes;
    for (int at = Layout::kQueryScaleAt + 16 * thread; at < kEnd; at += 16 * Blocks::kThreads) {
      store_u32x4(base + at, uint4{0, 0, 0, 0});
    }
  }
  if (thread == 0) {
    for (int i = 0; i < Block::kStages; ++i) {
      barrier_init(base + Layout::kLoaded + 8 * i, 1);
      barrier_init(base + Layout::kPrepared + 8 * i, kWarpgroup / kWarp);
      barrier_init(base + Layout::kSolved + 8 * i, 1);
      barrier_init(base + Layout::kReleased + 8 * i, Block::kStateGroups * kWarpgroup / kWarp);
    }
    for (int i = 0; i < kSolverWarps; ++i) {
      barrier_init(base + Layout::kReloaded + 8 * i, 1);
      store_u32(base + Layout::kReloadParityAt + 4 * i, 0);
    }
    for (int i = 0; i < Block::kStateGroups * Block::kValueSlots; ++i) {
      barrier_init(base + Layout::kValueLoaded + 8 * i, 1);
      barrier_init(base + Layout::kOutputReady + 8 * i, kWarpgroup / kWarp);
    }
    fence_barrier_init();
  }
  fence_async_proxy();
  sync_block();
}

// The body of the kernel; `base` is the start of the block's shared memory, on a border of 1024
// bytes.
template <class Block>
FLASH_KDA_DEVICE void forward_block(const ForwardParams& params, const TensorMaps& maps,
                                    SharedAddress base) {
  using Blocks = Roles<Block>;
  const int thread = thread_index();
  initialize_shared<Block>(base, thread);
  wait_for_previous_grid();
  const int warpgroup = warp_uniform(thread / kWarpgroup);
  const int warp = warp_uniform(thread / kWarp % (kWarpgroup / kWarp));
  if (warpgroup < Block::kStateGroups) {
    grow_registers<Blocks::kStateRegisters>();
    StateRole<Block>(params, base, warpgroup, warp, lane_index()).run();
  } else if (warpgroup < Block::kStateGroups + Blocks::kPrepareGroups) {
    shrink_registers<Blocks::kPrepareRegisters>();
    PrepareRole<Block>{params, base, warpgroup - Block::kStateGroups, warp, lane_index()}.run();
  } else {
    shrink_registers<Blocks::kSolveRegisters>();
    if (warp < kSolverWarps) {
      SolveRole<Block>{params, maps, base, warp, lane_index()}.run();
    } else {
      LoadRole<Block>{params, maps, base, lane_index()}.run();
    }
  }
}

}  // namespace flash_kda::sm90
