// The stream of chunks that a block works through, and the rings it travels in.
//
// The load role turns items of work (span, head, block of V columns) into a numbered stream of
// chunks and writes a descriptor for each. Every other role walks the same numbers. A sequence
// without tokens is one chunk of 0 rows.
#pragma once

#include "cuda/sm90/params.h"
#include "cuda/sm90/primitives.h"
#include "cuda/sm90/traits.h"

namespace flash_kda::sm90 {

constexpr int kIdentityState = -3;  // the start of P

struct ChunkDescriptor {
  static constexpr int kFirst = 64, kLast = 128, kStop = 256;  // flags above the row count
  static constexpr int kMap = 512, kFromIdentity = 1024;       // R or P; P

  int sequence;
  int head_block;  // head * value blocks + value block
  int token;       // first token, counted in its batch entry
  int rows_flags;  // tokens in the chunk (0..32) | flags; of an end mark: end marks that follow |
                   // kStop
  int initial = kNoState,
      final = kNoState;  // of the span: kCallersState, kIdentityState, or a slot
  int key_head = 0;      // for the load role alone

  FLASH_KDA_DEVICE int rows() const { return rows_flags & 63; }
  FLASH_KDA_DEVICE bool first() const { return (rows_flags & kFirst) != 0; }
  FLASH_KDA_DEVICE bool last() const { return (rows_flags & kLast) != 0; }
  FLASH_KDA_DEVICE bool stop() const { return (rows_flags & kStop) != 0; }
  FLASH_KDA_DEVICE bool map() const { return (rows_flags & kMap) != 0; }
  FLASH_KDA_DEVICE bool from_identity() const { return (rows_flags & kFromIdentity) != 0; }
  FLASH_KDA_DEVICE bool partial() const { return rows() < kChunk; }
};

// Position n of the stream: its stage and the parity of the stage's barriers.
template <class Block>
struct StreamPosition {
  int n;
  int stage;
  int parity;

  FLASH_KDA_DEVICE explicit StreamPosition(int start)
      : n(start), stage(start), parity(0) {}  // start < Block::kStages
  FLASH_KDA_DEVICE void advance(int steps) {
    n += steps;
    stage += steps;
    if (stage >= Block::kStages) {
      stage -= Block::kStages;
      parity ^= 1;
    }
  }
  // The position `back` < Block::kStages chunks earlier.
  FLASH_KDA_DEVICE int stage_before(int back) const {
    return stage >= back ? stage - back : stage + Block::kStages - back;
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
// The states of the span that chunk n belongs to.
struct SpanStates {
  int initial, final;
};
template <class Layout>
FLASH_KDA_DEVICE SpanStates read_span_states(SharedAddress base, int n) {
  const float2 x = load_f32x2(descriptor_address<Layout>(base, n) + 16);
  return {static_cast<int>(bits(x.x)), static_cast<int>(bits(x.y))};
}
template <class Layout>
FLASH_KDA_DEVICE void write_descriptor(SharedAddress base, int n, const ChunkDescriptor& d) {
  store_u32x4(
      descriptor_address<Layout>(base, n),
      uint4{static_cast<std::uint32_t>(d.sequence), static_cast<std::uint32_t>(d.head_block),
            static_cast<std::uint32_t>(d.token), static_cast<std::uint32_t>(d.rows_flags)});
  store_f32x2(descriptor_address<Layout>(base, n) + 16,
              from_bits(static_cast<std::uint32_t>(d.initial)),
              from_bits(static_cast<std::uint32_t>(d.final)));
}

// Walks the items that fall to this block, chunk by chunk. Those of a first launch are the segments
// 0 in full, then R and P of the inner segments.
template <class Block>
class WorkCursor {
 public:
  FLASH_KDA_DEVICE explicit WorkCursor(const ForwardParams& p) : params_(p), item_(block_index()) {
    full_items_ =
        spans(Block::kMaps ? Queue::kFirst : Queue::kRest) * params_.heads * Block::kItemsPerHead;
    items_ = full_items_ + (Block::kMaps ? spans(Queue::kInner) * params_.heads * 2 : 0);
  }

  // The next chunk of the stream; end marks once the work is done.
  FLASH_KDA_DEVICE ChunkDescriptor next(int lane) {
    if (remaining_ < 0) {  // take an item
      if (!asked_) ask(lane);
      if (!first_item_) item_ = item_after();
      first_item_ = false;
      if (item_ >= items_) return {0, 0, 0, --stops_left_ | ChunkDescriptor::kStop};
      open_item();
    }
    ChunkDescriptor d;
    d.sequence = sequence_;
    d.head_block = head_block_;
    d.token = token_;
    const int rows = remaining_ < kChunk ? remaining_ : kChunk;
    d.rows_flags = rows | (first_ ? ChunkDescriptor::kFirst : 0) |
                   (remaining_ <= kChunk ? ChunkDescriptor::kLast : 0) | kind_;
    d.initial = initial_;
    d.final = final_;
    d.key_head = key_head_;
    first_ = false;
    token_ += rows;
    remaining_ = remaining_ <= kChunk ? -1 : remaining_ - kChunk;
    if (!asked_ && remaining_ <= 2 * kChunk) ask(lane);
    return d;
  }

 private:
  // Without a schedule: spans of a queue that each sequence has.
  FLASH_KDA_DEVICE int spans_each(Queue queue) const {
    const int n = params_.segments.count;
    if (queue == Queue::kFirst) return 1;
    return queue == Queue::kInner ? n - 2 : (n > 1 ? n - 1 : 1);
  }
  FLASH_KDA_DEVICE int spans(Queue queue) const {
    return params_.schedule != nullptr ? params_.schedule->spans[static_cast<int>(queue)]
                                       : params_.sequences * spans_each(queue);
  }
  FLASH_KDA_DEVICE std::int64_t offset(int i) const {
    const std::int64_t at = i * params_.cu_stride;
    const std::int64_t x = params_.cu_int64
                               ? static_cast<const std::int64_t*>(params_.cu_seqlens)[at]
                               : static_cast<const std::int32_t*>(params_.cu_seqlens)[at];
    return x < 0 ? 0
                 : (x > params_.tokens ? params_.tokens
                                       : x);  // whatever it holds, stay inside the arrays
  }
  FLASH_KDA_DEVICE Span span(Queue queue, int rank) const {
    if (params_.schedule != nullptr) return params_.spans[static_cast<int>(queue)][rank];
    Span s;
    if (params_.cu_seqlens != nullptr) {  // in one piece
      const std::int64_t begin = offset(rank), end = offset(rank + 1);
      s.sequence = rank;
      s.begin = static_cast<int>(begin);
      s.end = static_cast<int>(end > begin ? end : begin);
      return s;
    }
    const Segments& segments = params_.segments;
    const int each = spans_each(queue), sequence = rank / each;
    const int slot = sequence * segments.slots();
    int j = rank - sequence * each;
    if (queue != Queue::kFirst && segments.count > 1) ++j;
    return queue == Queue::kInner ? map_span(segments, j, sequence, 0, params_.tokens, slot)
                                  : segment_span(segments, j, sequence, 0, params_.tokens, slot);
  }
  // The next item's number is asked for two chunks before it is needed: early enough to hide the
  // latency, late enough that blocks take turns by the work they have left.
  FLASH_KDA_DEVICE void ask(int lane) {
    asked_ = true;
    if (params_.schedule != nullptr && lane == 0)
      taken_ = atomic_add(&params_.schedule->taken[Block::kMaps ? 1 : 0], 1);
  }
  FLASH_KDA_DEVICE int item_after() const {
    const int blocks = grid_size();
    if (params_.schedule != nullptr) return blocks + shuffle(taken_, 0);
    if (!Block::kMaps || full_items_ >= blocks) return item_ + blocks;
    // Segments 0 are the longest items: their blocks do nothing else.
    return item_ < full_items_ ? items_ : item_ + blocks - full_items_;
  }
  FLASH_KDA_DEVICE void open_item() {
    const bool map = Block::kMaps && item_ >= full_items_;
    const int item = map ? item_ - full_items_ : item_;
    const int per_span = params_.heads * (map ? 2 : Block::kItemsPerHead);
    const int rank = item / per_span;
    head_block_ = item - rank * per_span;
    const Span s = span(map ? Queue::kInner : (Block::kMaps ? Queue::kFirst : Queue::kRest), rank);
    sequence_ = s.sequence;
    token_ = s.begin;
    remaining_ = s.end - s.begin;
    initial_ = s.initial;
    final_ = s.final;
    kind_ = 0;
    if (map) {
      kind_ = ChunkDescriptor::kMap;
      if (head_block_ % 2 != 0) {
        kind_ |= ChunkDescriptor::kFromIdentity;
        initial_ = kIdentityState;
        final_ = s.map;
      }
      head_block_ /= 2;
    }
    key_head_ = head_block_ / Block::kItemsPerHead / params_.heads_per_key;
    first_ = true;
    asked_ = false;
  }

  const ForwardParams& params_;
  int item_;  // the one that is open
  int full_items_, items_;
  int taken_ = 0;  // lane 0: the number asked for
  bool asked_ = true, first_item_ = true;
  int sequence_ = 0, head_block_ = 0, key_head_ = 0, token_ = 0, initial_ = 0, final_ = 0,
      kind_ = 0;
  int remaining_ = -1;  // tokens left of the open item; -1: none is open
  bool first_ = false;
  int stops_left_ = kStopChunks;
};

}  // namespace flash_kda::sm90
