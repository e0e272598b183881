// The stream of chunks that a block works through, and the rings it travels in.
//
// The load role turns items of work (sequence, head, block of V columns) into a numbered stream of
// chunks and writes a descriptor for each. Every other role walks the same numbers. A sequence
// without tokens is one chunk of 0 rows.
#pragma once

#include "cuda/sm90/params.h"
#include "cuda/sm90/primitives.h"
#include "cuda/sm90/traits.h"

namespace flash_kda::sm90 {

struct ChunkDescriptor {
  static constexpr int kFirst = 64, kLast = 128, kStop = 256;  // flags above the row count

  int sequence;
  int head_block;  // head * value blocks + value block
  int token;       // first token, counted in its batch entry
  int rows_flags;  // tokens in the chunk (0..32) | flags; of an end mark: end marks that follow |
                   // kStop

  FLASH_KDA_DEVICE int rows() const { return rows_flags & 63; }
  FLASH_KDA_DEVICE bool first() const { return (rows_flags & kFirst) != 0; }
  FLASH_KDA_DEVICE bool last() const { return (rows_flags & kLast) != 0; }
  FLASH_KDA_DEVICE bool stop() const { return (rows_flags & kStop) != 0; }
  FLASH_KDA_DEVICE bool partial() const { return rows() < kChunk; }
};

// Position n of the stream: its stage and the parity of the stage's barriers.
struct StreamPosition {
  int n;
  int stage;
  int parity;

  FLASH_KDA_DEVICE explicit StreamPosition(int start)
      : n(start), stage(start), parity(0) {}  // start < kStages
  FLASH_KDA_DEVICE void advance(int steps) {
    n += steps;
    stage += steps;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
  }
  // The position `back` < kStages chunks earlier.
  FLASH_KDA_DEVICE int stage_before(int back) const {
    return stage >= back ? stage - back : stage + kStages - back;
  }
  FLASH_KDA_DEVICE int parity_before(int back) const { return stage >= back ? parity : parity ^ 1; }
  FLASH_KDA_DEVICE int table() const { return n & (kTableSlots - 1); }
};

template <class Layout>
FLASH_KDA_DEVICE SharedAddress descriptor_address(SharedAddress base, int n) {
  return base + Layout::kDescriptorAt + (n & (kTableSlots - 1)) * kDescriptorBytes;
}
template <class Layout>
FLASH_KDA_DEVICE ChunkDescriptor read_descriptor(SharedAddress base, int n) {
  const uint4 x = load_u32x4(descriptor_address<Layout>(base, n));
  return {static_cast<int>(x.x), static_cast<int>(x.y), static_cast<int>(x.z),
          static_cast<int>(x.w)};
}
template <class Layout>
FLASH_KDA_DEVICE void write_descriptor(SharedAddress base, int n, const ChunkDescriptor& d) {
  store_u32x4(
      descriptor_address<Layout>(base, n),
      uint4{static_cast<std::uint32_t>(d.sequence), static_cast<std::uint32_t>(d.head_block),
            static_cast<std::uint32_t>(d.token), static_cast<std::uint32_t>(d.rows_flags)});
}

// Walks the items that fall to this block, chunk by chunk.
class WorkCursor {
 public:
  FLASH_KDA_DEVICE WorkCursor(const ForwardParams& p, int value_blocks)
      : params_(p), value_blocks_(value_blocks), item_(block_index()) {}

  // The next chunk of the stream; end marks once the work is done.
  FLASH_KDA_DEVICE ChunkDescriptor next(int lane) {
    if (remaining_ < 0) {  // take an item
      if (item_ >= params_.items) return {0, 0, 0, --stops_left_ | ChunkDescriptor::kStop};
      open_item();
      take_next_item(lane);
    }
    ChunkDescriptor d;
    d.sequence = sequence_;
    d.head_block = head_block_;
    d.token = token_;
    const int rows = remaining_ < kChunk ? remaining_ : kChunk;
    d.rows_flags = rows | (first_ ? ChunkDescriptor::kFirst : 0) |
                   (remaining_ <= kChunk ? ChunkDescriptor::kLast : 0);
    first_ = false;
    token_ += rows;
    remaining_ = remaining_ <= kChunk ? -1 : remaining_ - kChunk;
    return d;
  }

 private:
  FLASH_KDA_DEVICE std::int64_t offset(int i) const {
    const std::int64_t at = i * params_.cu_stride;
    const std::int64_t x = params_.cu_int64
                               ? static_cast<const std::int64_t*>(params_.cu_seqlens)[at]
                               : static_cast<const std::int32_t*>(params_.cu_seqlens)[at];
    return x < 0 ? 0
                 : (x > params_.tokens ? params_.tokens
                                       : x);  // whatever it holds, stay inside the arrays
  }
  FLASH_KDA_DEVICE void open_item() {
    const int per_sequence = params_.heads * value_blocks_;
    const int rank = static_cast<int>(item_ / per_sequence);
    head_block_ = static_cast<int>(item_ - static_cast<std::int64_t>(rank) * per_sequence);
    sequence_ = params_.order != nullptr ? params_.order[rank] : rank;
    token_ = 0;
    remaining_ = params_.tokens;
    if (params_.cu_seqlens != nullptr) {
      const std::int64_t begin = offset(sequence_), end = offset(sequence_ + 1);
      token_ = static_cast<int>(begin);
      remaining_ = end > begin ? static_cast<int>(end - begin) : 0;
    }
    first_ = true;
  }
  FLASH_KDA_DEVICE void take_next_item(int lane) {
    if (params_.counter == nullptr) {
      item_ += grid_size();
      return;
    }
    int taken = 0;
    if (lane == 0) taken = atomic_add(params_.counter, 1);
    item_ = static_cast<std::int64_t>(grid_size()) + shuffle(taken, 0);
  }

  const ForwardParams& params_;
  int value_blocks_;
  std::int64_t item_;
  int sequence_ = 0, head_block_ = 0, token_ = 0;
  int remaining_ = -1;  // tokens left of the open item; -1: none is open
  bool first_ = false;
  int stops_left_ = kStopChunks;
};

}  // namespace flash_kda::sm90
