// Load role: one warp moves everything between global and shared memory.
//
//   q, k, g of chunk n       -> stage n % 6, as soon as chunk n - 6 is released
//   O of chunk n - 6         <- value slot (n - 6) % 3, written by the state role in V's place
//   V of chunk n - 3         -> the same slot, once that store has read it
//
// The last, partial chunk of a sequence is loaded whole (rows past the end are masked by their
// readers; past the array they read as zero) but stored row by row, so that nothing past the
// sequence is written.
#pragma once

#include "cuda/sm90/stream.h"

namespace flash_kda::sm90 {

// Six boxes of a chunk: g of a value head, k and q of its key head, by halves of channels.
template <class Block>
FLASH_KDA_DEVICE void load_chunk(const TensorMaps& maps, SharedAddress stage, SharedAddress barrier,
                                 int head, int key_head, int token, int batch) {
  FLASH_KDA_UNROLL
  for (int half = 0; half < 2; ++half) {
    const SharedAddress to = stage + half * Block::kChannelHalfBytes;
    tensor_load(to + Block::kTileG, &maps.g, barrier, 64 * half, head, token, batch);
    tensor_load(to + Block::kTileK, &maps.k, barrier, 64 * half, key_head, token, batch);
    tensor_load(to + Block::kTileQ, &maps.q, barrier, 64 * half, key_head, token, batch);
  }
}

template <class Block>
struct LoadRole {
  using Layout = SharedLayout<Block>;

  const ForwardParams& params;
  const TensorMaps& maps;
  SharedAddress base;
  int lane;

  // V is loaded this many chunks after q, k, g.
  static constexpr int kValueLag = Block::kStages - Block::kValueSlots;

  FLASH_KDA_DEVICE int batch(const ChunkDescriptor& d) const {
    return params.cu_seqlens != nullptr ? 0 : d.sequence;
  }
  FLASH_KDA_DEVICE static int head(const ChunkDescriptor& d) {
    return d.head_block / Block::kItemsPerHead;
  }
  FLASH_KDA_DEVICE static int value_column(const ChunkDescriptor& d) {
    return d.head_block % Block::kItemsPerHead * (Block::kStateGroups * kGroupValues);
  }
  FLASH_KDA_DEVICE SharedAddress value_tile(int group, int n) const {
    return base + Layout::kValueAt +
           (group * Block::kValueSlots + n % Block::kValueSlots) * kTileBytes;
  }
  FLASH_KDA_DEVICE static int slot_barrier(int group, int n) {
    return 8 * (group * Block::kValueSlots + n % Block::kValueSlots);
  }

  FLASH_KDA_DEVICE void load_stage(const ChunkDescriptor& d,
                                   const StreamPosition<Block>& at) const {
    const SharedAddress barrier = base + Layout::kLoaded + 8 * at.stage;
    if (d.stop() || d.rows() == 0) {
      barrier_arrive(barrier);
      return;
    }
    barrier_arrive_expect(barrier, Block::kStageBytes);
    load_chunk<Block>(maps, base + Layout::kStageAt + at.stage * Block::kStageBytes, barrier,
                      head(d), d.key_head, d.token, batch(d));
  }

  // The state that a span starts from, on its way to L2 before the state role asks for it.
  FLASH_KDA_DEVICE void announce_state(const ChunkDescriptor& d) const {
    if (!d.first() || d.stop() || d.initial < kCallersState) return;
    const bool callers = d.initial == kCallersState;
    const StateParams& s = callers ? params.initial_state : params.slots;
    if (s.data == nullptr || s.row_stride != kKeyDim) return;
    constexpr int kElements = Block::kStateGroups * kGroupValues * kKeyDim;
    const int size = s.bf16 ? 2 : 4;
    const char* from = static_cast<const char*>(s.data) +
                       size * ((callers ? d.sequence : d.initial) * s.slot_stride +
                               head(d) * s.head_stride + value_column(d) * s.row_stride);
    if (reinterpret_cast<std::uintptr_t>(from) % 16 == 0) prefetch_to_l2(from, size * kElements);
  }

  FLASH_KDA_DEVICE void load_values(const ChunkDescriptor& d, int n) const {
    FLASH_KDA_UNROLL
    for (int group = 0; group < Block::kStateGroups; ++group) {
      const SharedAddress barrier = base + Layout::kValueLoaded + slot_barrier(group, n);
      if (d.rows() == 0 || (Block::kMaps && d.from_identity())) {  // P has no values
        barrier_arrive(barrier);
        continue;
      }
      barrier_arrive_expect(barrier, kTileBytes);
      tensor_load(value_tile(group, n), &maps.v, barrier, value_column(d) + group * kGroupValues,
                  head(d), d.token, batch(d));
    }
  }

  // O of a partial chunk: 8 lanes a row.
  FLASH_KDA_DEVICE void store_rows(const ChunkDescriptor& d, int group, int n) const {
    char* out = static_cast<char*>(params.out.data) +
                2 * (batch(d) * params.out.batch_stride + head(d) * params.out.head_stride +
                     value_column(d) + group * kGroupValues + 8 * (lane & 7));
    for (int row = lane >> 3; row < d.rows(); row += 4) {
      const uint4 x =
          load_u32x4(value_tile(group, n) + row * kRowBytes + (((lane & 7) ^ (row & 7)) << 4));
      *reinterpret_cast<uint4*>(out + 2 * (d.token + row) * params.out.token_stride) = x;
    }
    fence_async_proxy();  // the slot is about to be overwritten by the copy engine
  }

  FLASH_KDA_DEVICE void store_output(const ChunkDescriptor& d, int n) const {
    FLASH_KDA_UNROLL
    for (int group = 0; group < Block::kStateGroups; ++group) {
      barrier_wait(base + Layout::kOutputReady + slot_barrier(group, n),
                   (n / Block::kValueSlots) & 1);
      fence_async_proxy();  // the state role's writes, before the copy engine reads them: here it
                            // holds up nobody
      if (Block::kMaps && d.map()) {  // there is none
      } else if (d.partial()) {
        store_rows(d, group, n);
      } else if (lane == 0) {
        tensor_store(value_tile(group, n), &maps.out, value_column(d) + group * kGroupValues,
                     head(d), d.token, batch(d));
      }
    }
    if (lane == 0) {
      tensor_store_commit();
      tensor_store_wait_read<0>();
    }
    sync_warp();
  }

  FLASH_KDA_DEVICE void run() {
    lane = lane_index();
    WorkCursor<Block> work(params);
    StreamPosition<Block> at(0);
    int stops = 0;
    int end = -1;  // number of real chunks, once known
    FLASH_KDA_NO_UNROLL
    for (; end < 0 || at.n < end + Block::kStages; at.advance(1)) {
      const int n = at.n;
      const int done =
          n -
          Block::kStages;  // the state role has left this chunk behind once its stage is released
      const bool finished = done >= 0 && (end < 0 || done < end);
      ChunkDescriptor incoming = {};
      if (stops < kStopChunks) incoming = work.next(lane);  // before the wait, not after it
      if (finished) barrier_wait(base + Layout::kReleased + 8 * at.stage, at.parity ^ 1);
      // First what the ring waits for; the descriptor of `done` is still there (kTableSlots).
      if (stops < kStopChunks) {
        if (lane == 0) {
          write_descriptor<Layout>(base, n, incoming);
          load_stage(incoming, at);
          announce_state(incoming);
        }
        if (incoming.stop()) {
          if (end < 0) end = n;
          ++stops;
        }
      }
      sync_warp();
      if (finished) store_output(read_descriptor<Layout>(base, done), done);
      const int value = n - kValueLag;
      if (lane == 0 && value >= 0 && (end < 0 || value < end))
        load_values(read_descriptor<Layout>(base, value), value);
    }
    if (lane == 0) tensor_store_wait_all();
  }
};

}  // namespace flash_kda::sm90
