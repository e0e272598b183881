// How a sequence is cut into segments, and what a block is told of one. Plain functions of numbers,
// the same on the host and on the device.
//
// A sequence of few heads leaves most multiprocessors idle: its chunks depend on each other. The
// state after a segment is an affine function of the state before it, S' = S P + R, so the inner
// segments' P and R can be computed side by side, the true states follow from a short chain of
// products, and then all segments run at once:
//
//   first launch    segment 0, in full                 R and P of segments 1 .. n - 2
//   chain           S_(j+1) = S_j P_j + R_j, j = 1 .. n - 2      (S_1: state after segment 0)
//   second launch   segments 1 .. n - 1, in full, from S_1 .. S_(n-1)
//
// No history is dropped, whatever the decay. The rule looks at the sequence's length, the number of
// heads and the card alone, so that a sequence's bits do not depend on its neighbours.
#pragma once

#include <cstdint>

#include "cuda/sm90/traits.h"

#ifdef __CUDACC__
#define FLASH_KDA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASH_KDA_HOST_DEVICE inline
#endif

namespace flash_kda::sm90 {

// Equal segments but for the first, which is longer: it runs in full while each of the others has
// R and P computed, two tasks.
struct Segments {
  std::int32_t count = 1;
  std::int32_t chunks = 0;  // of the sequence
  std::int32_t first = 0;   // of segment 0

  // First chunk of segment j, 0 <= j <= count.
  FLASH_KDA_HOST_DEVICE std::int32_t begin(std::int32_t j) const {
    if (j == 0) return 0;
    return first + static_cast<std::int32_t>(static_cast<std::int64_t>(chunks - first) * (j - 1) /
                                             (count - 1));
  }
  FLASH_KDA_HOST_DEVICE std::int32_t inner() const { return count - 2; }  // segments with P and R
  // Slots of the workspace that a sequence takes: S_1 .. S_(n-1), then P_1 .. P_(n-2).
  FLASH_KDA_HOST_DEVICE std::int32_t slots() const { return 2 * count - 3; }
};

// The rule for one number of heads on one card.
struct SegmentRule {
  std::int32_t most = 1;    // segments; 1: nothing is split
  std::int32_t fewest = 0;  // chunks of a sequence that is split, at least

  static FLASH_KDA_HOST_DEVICE SegmentRule of(std::int64_t heads, std::int32_t multiprocessors) {
    SegmentRule rule;
    // With fewer than four blocks a head two launches take longer than one with half a head a
    // block.
    if (heads <= 0 || 4 * heads > multiprocessors) return rule;
    rule.most = static_cast<std::int32_t>(multiprocessors / heads) + 1;
    // Shorter ones gain little (8 heads: 2048 tokens, 16: 4096, 32: 8192), and the workspace of a
    // packed batch has to hold the maps of as many as there may be.
    rule.fewest = static_cast<std::int32_t>(8 * heads);
    rule.fewest = rule.fewest > kFewestChunks ? rule.fewest : kFewestChunks;
    return rule;
  }

  FLASH_KDA_HOST_DEVICE bool splits() const { return most > 1; }

  FLASH_KDA_HOST_DEVICE Segments segments(std::int64_t tokens) const {
    Segments s;
    s.chunks = static_cast<std::int32_t>((tokens + kChunk - 1) / kChunk);
    s.first = s.chunks;
    if (!splits() || s.chunks < fewest) return s;
    const std::int32_t count = s.chunks / kSegmentChunks;
    s.count = count < most ? count : most;
    s.first = weighted_first(s.chunks, s.count);
    return s;
  }

  static constexpr std::int32_t kFewestChunks = 48;  // below: one launch is as fast
  static constexpr std::int32_t kSegmentChunks = 8;  // no segment is shorter on average
  static_assert(kFewestChunks / kSegmentChunks >= 3, "two segments gain nothing");

 private:
  // R and P of a segment together weigh kWeight / 8 of the segment in full.
  static constexpr std::int32_t kWeight = 14;
  static FLASH_KDA_HOST_DEVICE std::int32_t weighted_first(std::int32_t chunks,
                                                           std::int32_t count) {
    const std::int64_t parts = 8 * static_cast<std::int64_t>(count - 1) + kWeight;
    return static_cast<std::int32_t>((static_cast<std::int64_t>(chunks) * kWeight + parts - 1) /
                                     parts);
  }
};

// Where a state comes from or goes to, if not a slot (>= 0) of the workspace.
constexpr std::int32_t kCallersState = -1;
constexpr std::int32_t kNoState = -2;  // zeros; not stored

// A run of chunks of one sequence that a block computes for one head.
struct alignas(16) Span {
  std::int32_t sequence = 0;
  std::int32_t begin = 0, end = 0;  // tokens, counted in the batch entry
  std::int32_t initial = kCallersState, final = kCallersState;
  std::int32_t map = kNoState;  // slot of P, of an inner segment; its R goes to `final`
  std::int32_t unused[2] = {0, 0};
};

// The chain of one split sequence: S_1 lies in slot `state`, S_(j+1) replaces R_j in slot state +
// j.
struct Chain {
  std::int32_t state = 0;
  std::int32_t inner = 0;  // steps
  FLASH_KDA_HOST_DEVICE std::int32_t map(std::int32_t j) const { return state + inner + j; }
};

// Where unit `unit` (8 channels) of a row of P lies in the row, in bytes.
FLASH_KDA_HOST_DEVICE std::int32_t map_unit(std::int32_t row, std::int32_t unit) {
  return (unit ^ (row & 7)) * 16;
}

// Segment j of a sequence as it runs in full. `token`: where the sequence begins; `slot`: the first
// of its slots.
FLASH_KDA_HOST_DEVICE Span segment_span(const Segments& s, std::int32_t j, std::int32_t sequence,
                                        std::int32_t token, std::int32_t tokens,
                                        std::int32_t slot) {
  Span span;
  span.sequence = sequence;
  span.begin = token + s.begin(j) * kChunk;
  span.end = j + 1 == s.count ? token + tokens : token + s.begin(j + 1) * kChunk;
  if (s.count > 1) {
    span.initial = j == 0 ? kCallersState : slot + j - 1;
    span.final = j == 0 ? slot : (j + 1 == s.count ? kCallersState : kNoState);
  }
  return span;
}

// The same for R and P of an inner segment.
FLASH_KDA_HOST_DEVICE Span map_span(const Segments& s, std::int32_t j, std::int32_t sequence,
                                    std::int32_t token, std::int32_t tokens, std::int32_t slot) {
  Span span = segment_span(s, j, sequence, token, tokens, slot);
  span.initial = kNoState;
  span.final = slot + j;
  span.map = Chain{slot, s.inner()}.map(j);
  return span;
}

// What the schedule kernel found out about a packed batch, in device memory; lists of spans beside
// it.
struct Schedule {
  std::int32_t spans[3];  // by Queue
  std::int32_t taken[2];  // items that blocks took beyond their first ones: second launch, first
  std::int32_t chains;    // split sequences
};
// The spans that a launch works through.
enum class Queue : std::int32_t {
  kFirst,  // segments 0 of split sequences
  kInner,  // their inner segments, for R and P
  kRest,   // all other segments, and sequences in one piece
};

}  // namespace flash_kda::sm90
