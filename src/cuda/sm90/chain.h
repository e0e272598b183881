// The true states between the segments of split sequences: S_(j+1) = S_j P_j + R_j, one after the
// other. Rows of S are independent: a block takes 16 rows of one head, or a few times as many where
// heads abound; a warp takes 16 of the columns.
//
// S and P enter as bf16 and what that leaves, three products of the four: relative error 2^-16, a
// hundredth of what the segments' own rounding is. Sums fp32; S_(j+1) takes R_j's place. The maps
// arrive by bulk copies, one or two steps ahead.
#pragma once

#include "cuda/sm90/params.h"
#include "cuda/sm90/primitives.h"
#include "cuda/sm90/traits.h"

namespace flash_kda::sm90 {

// kTiles: 16-row tiles of a block.
template <int kTiles>
struct ChainBlock {
  static constexpr int kThreads = 256;
  static constexpr int kRows = 16 * kTiles;
  static constexpr int kRowBlocks = kValueDim / kRows;
  static constexpr int kSteps = kKeyDim / 16;

  // Shared memory: maps; two buffers of S, each in two parts, 16 bytes more a row, so that eight
  // rows lie in different banks; barriers.
  static constexpr int kMapBuffers = kTiles <= 2 ? 3 : 2;
  static constexpr int kPitch = 2 * kKeyDim + 16;
  static constexpr int kPartBytes = kRows * kPitch;
  static constexpr int kStateAt = kMapBuffers * kMapBytes;
  static constexpr int kBarrierAt = kStateAt + 4 * kPartBytes;
  static constexpr int kBytes = kBarrierAt + 8 * kMapBuffers;
  static_assert(kBytes <= 232448);

  using Tile = float[2][4];  // this lane's elements of 16 rows of S: columns 16 warp + 8n

  const ForwardParams& params;
  SharedAddress base;
  int warp, lane;
  int loaded = 0;  // maps asked for so far, by the first thread
  int used = 0;

  FLASH_KDA_DEVICE int g() const { return lane >> 2; }
  FLASH_KDA_DEVICE int t() const { return lane & 3; }

  FLASH_KDA_DEVICE float* slot(int which, int head) const {
    return static_cast<float*>(params.slots.data) + which * params.slots.slot_stride +
           head * params.slots.head_stride;
  }
  // Rows g and g + 8 (i odd) of a tile, columns 16 warp + 8 (i / 2) + 2t and + 1.
  FLASH_KDA_DEVICE float* own(float* rows, int tile, int i) const {
    return rows + (16 * tile + g() + 8 * (i & 1)) * kKeyDim + 16 * warp + 8 * (i >> 1) + 2 * t();
  }
  FLASH_KDA_DEVICE void load(float* rows, Tile (&c)[kTiles]) const {
    FLASH_KDA_UNROLL
    for (int i = 0; i < 4 * kTiles; ++i) {
      const float2 x = *reinterpret_cast<const float2*>(own(rows, i >> 2, i & 3));
      float (&to)[4] = c[i >> 2][(i >> 1) & 1];
      to[2 * (i & 1)] = x.x, to[2 * (i & 1) + 1] = x.y;
    }
  }
  FLASH_KDA_DEVICE void store(float* rows, const Tile (&c)[kTiles]) const {
    FLASH_KDA_UNROLL
    for (int i = 0; i < 4 * kTiles; ++i) {
      const float (&from)[4] = c[i >> 2][(i >> 1) & 1];
      *reinterpret_cast<float2*>(own(rows, i >> 2, i & 3)) = {from[2 * (i & 1)],
                                                              from[2 * (i & 1) + 1]};
    }
  }
  // Both parts of S, for every warp's next product.
  FLASH_KDA_DEVICE void share(SharedAddress buffer, const Tile (&c)[kTiles]) const {
    FLASH_KDA_UNROLL
    for (int i = 0; i < 4 * kTiles; ++i) {
      const float (&from)[4] = c[i >> 2][(i >> 1) & 1];
      const float x = from[2 * (i & 1)], y = from[2 * (i & 1) + 1];
      const std::uint32_t high = pack_bf16(x, y);
      const SharedAddress at = buffer + (16 * (i >> 2) + g() + 8 * (i & 1)) * kPitch +
                               2 * (16 * warp + 8 * ((i >> 1) & 1) + 2 * t());
      store_u32(at, high);
      store_u32(at + kPartBytes, pack_bf16(x - bf16_low(high), y - bf16_high(high)));
    }
  }

  FLASH_KDA_DEVICE void ask_for_map(const Chain& chain, int head, int j) {
    if (j > chain.inner) return;
    if (warp == 0 && lane == 0) {
      const SharedAddress barrier = base + kBarrierAt + 8 * (loaded % kMapBuffers);
      barrier_arrive_expect(barrier, kMapBytes);
      bulk_load(base + loaded % kMapBuffers * kMapBytes, slot(chain.map(j), head), kMapBytes,
                barrier);
    }
    ++loaded;
  }

  // c += S P for this warp's columns.
  FLASH_KDA_DEVICE void multiply(SharedAddress state, SharedAddress map, Tile (&c)[kTiles]) const {
    // Blocks (rows 0..7 | 8..15) x (columns 0..7 | 8..15) of P; transposed, they are right
    // operands.
    const int map_row = (lane & 7) + ((lane >> 3) & 1) * 8;
    const SharedAddress map_at =
        map + map_row * kMapRowBytes + map_unit(map_row, 2 * warp + (lane >> 4));
    const SharedAddress state_at = state + (lane & 15) * kPitch + (lane >> 4) * 16;
    float small[kTiles][2][4] = {};  // products with what bf16 leaves: a second chain of sums
    FLASH_KDA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      std::uint32_t high[4], low[4];
      load_matrix_transposed(map_at + 16 * step * kMapRowBytes, high);
      load_matrix_transposed(map_at + kMapPartBytes + 16 * step * kMapRowBytes, low);
      FLASH_KDA_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        std::uint32_t a[4], rest[4];
        load_matrix(state_at + 16 * tile * kPitch + 32 * step, a);
        load_matrix(state_at + 16 * tile * kPitch + kPartBytes + 32 * step, rest);
        FLASH_KDA_UNROLL
        for (int n = 0; n < 2; ++n) {
          mma_bf16(c[tile][n], a, high[2 * n], high[2 * n + 1]);
          mma_bf16(small[tile][n], a, low[2 * n], low[2 * n + 1]);
          mma_bf16(small[tile][n], rest, high[2 * n], high[2 * n + 1]);
        }
      }
    }
    FLASH_KDA_UNROLL
    for (int i = 0; i < 8 * kTiles; ++i)
      c[i / 8][i / 4 % 2][i % 4] += small[i / 8][i / 4 % 2][i % 4];
  }

  FLASH_KDA_DEVICE void item(const Chain& chain, int head, int row_block) {
    const int rows_at = row_block * kRows * kKeyDim;
    FLASH_KDA_UNROLL
    for (int j = 1; j < kMapBuffers; ++j) ask_for_map(chain, head, j);
    Tile c[kTiles];
    load(slot(chain.state, head) + rows_at, c);
    FLASH_KDA_NO_UNROLL
    for (int j = 1; j <= chain.inner; ++j) {
      const SharedAddress state = base + kStateAt + (j & 1) * 2 * kPartBytes;
      share(state, c);
      float* rows = slot(chain.state + j, head) + rows_at;
      load(rows, c);
      sync_block();  // S is there, and nobody reads the map of the step before any more
      ask_for_map(chain, head, j + kMapBuffers - 1);
      const int buffer = used % kMapBuffers;
      barrier_wait(base + kBarrierAt + 8 * buffer, (used / kMapBuffers) & 1);
      ++used;
      multiply(state, base + buffer * kMapBytes, c);
      store(rows, c);
    }
    sync_block();  // the next item's maps and S go to the same buffers
  }

  FLASH_KDA_DEVICE void run() {
    if (warp == 0 && lane == 0) {
      FLASH_KDA_UNROLL
      for (int i = 0; i < kMapBuffers; ++i) barrier_init(base + kBarrierAt + 8 * i, 1);
      fence_barrier_init();
    }
    sync_block();
    wait_for_previous_grid();
    const int chains = params.schedule != nullptr ? params.schedule->chains : params.sequences;
    const int per_chain = params.heads * kRowBlocks;
    const std::int64_t items = static_cast<std::int64_t>(chains) * per_chain;
    FLASH_KDA_NO_UNROLL
    for (std::int64_t i = block_index(); i < items; i += grid_size()) {
      const int which = static_cast<int>(i / per_chain);
      const int rest = static_cast<int>(i - static_cast<std::int64_t>(which) * per_chain);
      Chain chain;
      if (params.schedule != nullptr) {
        chain = params.chains[which];
      } else {
        chain = {which * params.segments.slots(), params.segments.inner()};
      }
      item(chain, rest / kRowBlocks, rest % kRowBlocks);
    }
  }
};

}  // namespace flash_kda::sm90
