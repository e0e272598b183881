// How sequences are cut into segments, and whether the workspace that the plan asks for holds what
// the schedule kernel then writes: both without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "arrays.h"
#include "cuda/sm90/segments.h"
#include "cuda/sm90/workspace.h"

namespace flash_kda::sm90 {
namespace {

constexpr std::int32_t kCards[] = {132, 114, 78};  // multiprocessors: H200, H100 PCIe, H20
constexpr std::int64_t kMostHeads = 33;            // that 132 multiprocessors split

// Lengths around every border that the rule could have, and long ones.
std::vector<std::int64_t> lengths() {
  std::vector<std::int64_t> all;
  for (std::int64_t n = 0; n <= 340 * kChunk; n += 31) all.push_back(n);
  for (std::int64_t n = 0; n <= 340; ++n) {
    all.push_back(n * kChunk);
    all.push_back(n * kChunk + 1);
  }
  for (const std::int64_t n : {65536, 100003, 131072, 1048576, 2147483647 - 65}) all.push_back(n);
  return all;
}

ForwardPlan packed(std::int64_t sequences, std::int64_t tokens, std::int64_t heads,
                   std::int32_t multiprocessors) {
  ForwardPlan plan;
  plan.batch = 1;
  plan.sequences = sequences;
  plan.tokens = tokens;
  plan.key_heads = plan.value_heads = heads;
  plan.varlen = true;
  plan.multiprocessors = multiprocessors;
  return plan;
}

// The shortest length that the rule cuts, in chunks; 0: none up to `limit`.
std::int64_t shortest_cut(const SegmentRule& rule, std::int64_t limit) {
  for (std::int64_t chunks = 1; chunks <= limit; ++chunks)
    if (rule.segments(chunks * kChunk).count > 1) return chunks;
  return 0;
}

TEST(Sm90Segments, AQuarterAsManyHeadsAsMultiprocessorsIsEnoughAlready) {
  for (const std::int32_t card : kCards) {
    for (std::int64_t heads = 1; heads <= 200; ++heads) {
      SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(card));
      EXPECT_EQ(shortest_cut(SegmentRule::of(heads, card), 1024) > 0, 4 * heads <= card);
    }
  }
  for (std::int64_t heads = 34; heads <= 200; ++heads)
    for (const std::int64_t tokens : lengths())
      ASSERT_EQ(SegmentRule::of(heads, 132).segments(tokens).count, 1) << heads << " " << tokens;
}

// Segments tile the sequence; the first one is the longest, the others differ by a chunk at most;
// none is empty; and the two launches are worth it.
TEST(Sm90Segments, TileTheSequence) {
  std::int64_t cut = 0;
  for (const std::int32_t card : kCards) {
    for (std::int64_t heads = 1; heads <= kMostHeads + 1; ++heads) {
      const SegmentRule rule = SegmentRule::of(heads, card);
      for (const std::int64_t tokens : lengths()) {
        SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(heads) + " heads");
        const Segments s = rule.segments(tokens);
        ASSERT_EQ(s.chunks, (tokens + kChunk - 1) / kChunk);
        if (s.count == 1) continue;
        ++cut;
        ASSERT_GE(s.count, 3);
        ASSERT_LE(heads * (s.count - 1), card) << "more segments than fit at once";
        ASSERT_GE(s.chunks, SegmentRule::kFewestChunks);
        ASSERT_EQ(s.begin(0), 0);
        ASSERT_EQ(s.begin(1), s.first);
        ASSERT_EQ(s.begin(s.count), s.chunks);
        std::int32_t shortest = s.chunks, longest = 0;
        for (std::int32_t j = 1; j < s.count; ++j) {
          const std::int32_t size = s.begin(j + 1) - s.begin(j);
          shortest = std::min(shortest, size);
          longest = std::max(longest, size);
        }
        ASSERT_GE(shortest, 1);
        ASSERT_LE(longest, shortest + 1);
        ASSERT_GE(s.first, longest);
        ASSERT_LE(s.first + longest, s.chunks * 3 / 4) << "slower than in one piece";
      }
    }
  }
  EXPECT_GT(cut, 10000);
}

// What each launch reads and writes, followed through as the device does: every token computed
// once, every slot written before it is read, and the whole a chain from the caller's state to the
// caller's state.
void check_spans(const Segments& s, std::int32_t sequence, std::int32_t token, std::int32_t tokens,
                 std::int32_t slot) {
  const auto at = [&](std::int32_t which) { return static_cast<std::size_t>(which - slot); };
  // What a slot of this sequence holds: nothing, the state before a segment, or R or P of one.
  enum Kind : std::int32_t { kNothing, kState, kSum, kMap };
  struct Held {
    Kind kind = kNothing;
    std::int32_t segment = 0;
    bool operator==(const Held&) const = default;
  };
  std::vector<Held> held(static_cast<std::size_t>(s.slots()));
  const auto put = [&](std::int32_t which, Held value) {
    ASSERT_GE(which, slot);
    ASSERT_LT(which, slot + s.slots());
    ASSERT_EQ(held[at(which)].kind, kNothing) << "slot " << which - slot << " serves twice";
    held[at(which)] = value;
  };

  const Span first = segment_span(s, 0, sequence, token, tokens, slot);
  ASSERT_EQ(first.sequence, sequence);
  ASSERT_EQ(first.begin, token);
  ASSERT_EQ(first.end, token + s.first * kChunk);
  ASSERT_EQ(first.initial, kCallersState);
  ASSERT_EQ(first.map, kNoState);
  ASSERT_NO_FATAL_FAILURE(put(first.final, {kState, 1}));
  for (std::int32_t j = 1; j <= s.inner(); ++j) {
    const Span map = map_span(s, j, sequence, token, tokens, slot);
    const Span full = segment_span(s, j, sequence, token, tokens, slot);
    ASSERT_EQ(map.sequence, sequence);
    ASSERT_EQ(map.begin, full.begin);
    ASSERT_EQ(map.end, full.end);
    ASSERT_EQ(map.initial, kNoState);
    ASSERT_NO_FATAL_FAILURE(put(map.final, {kSum, j}));
    ASSERT_NO_FATAL_FAILURE(put(map.map, {kMap, j}));
  }
  for (const Held& h : held) ASSERT_NE(h.kind, kNothing) << "a slot that nobody uses";

  const Chain chain{slot, s.inner()};
  ASSERT_EQ(held[at(chain.state)], (Held{kState, 1}));
  for (std::int32_t j = 1; j <= chain.inner; ++j) {
    ASSERT_EQ(held[at(chain.state + j - 1)], (Held{kState, j}));
    ASSERT_EQ(held[at(chain.map(j))], (Held{kMap, j}));
    ASSERT_EQ(held[at(chain.state + j)], (Held{kSum, j}));
    held[at(chain.state + j)] = {kState, j + 1};
  }

  std::int32_t end = first.end;
  for (std::int32_t j = 1; j < s.count; ++j) {
    const Span span = segment_span(s, j, sequence, token, tokens, slot);
    ASSERT_EQ(span.sequence, sequence);
    ASSERT_EQ(span.begin, end);
    ASSERT_EQ((span.begin - token) % kChunk, 0);
    ASSERT_GT(span.end, span.begin);
    ASSERT_EQ(held[at(span.initial)], (Held{kState, j}));
    ASSERT_EQ(span.final, j + 1 == s.count ? kCallersState : kNoState);
    ASSERT_EQ(span.map, kNoState);
    end = span.end;
  }
  ASSERT_EQ(end, token + tokens);
}

TEST(Sm90Segments, SpansAndSlotsFollowTheChain) {
  for (const std::int64_t heads : {1, 3, 4, 8, 16, 32, 33}) {
    const SegmentRule rule = SegmentRule::of(heads, 132);
    int cut = 0;
    for (const std::int64_t tokens : lengths()) {
      const Segments s = rule.segments(tokens);
      if (s.count == 1 || tokens > 1 << 21) continue;
      SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(heads) + " heads");
      ++cut;
      ASSERT_NO_FATAL_FAILURE(check_spans(s, 5, 77, static_cast<std::int32_t>(tokens), 12));
    }
    EXPECT_GT(cut, 50);
  }
}

TEST(Sm90Segments, ASequenceInOnePieceIsTheCallers) {
  const Segments s = SegmentRule::of(96, 132).segments(8190);
  const Span span = segment_span(s, 0, 3, 100, 8190, 0);
  EXPECT_EQ(span.begin, 100);
  EXPECT_EQ(span.end, 8290);
  EXPECT_EQ(span.initial, kCallersState);
  EXPECT_EQ(span.final, kCallersState);
  const Span empty = segment_span(SegmentRule::of(4, 132).segments(0), 0, 3, 100, 0, 0);
  EXPECT_EQ(empty.begin, 100);
  EXPECT_EQ(empty.end, 100);
}

// Where the sequence stands in the batch, and which slots it got, moves spans and slots and nothing
// else; the rule itself is told only the length.
TEST(Sm90Segments, NeighboursChangeNothing) {
  const Segments s = SegmentRule::of(4, 132).segments(8000);
  ASSERT_GT(s.count, 3);
  for (std::int32_t j = 0; j < s.count; ++j) {
    const Span alone = segment_span(s, j, 0, 0, 8000, 0);
    const Span among = segment_span(s, j, 7, 1234, 8000, 100);
    EXPECT_EQ(among.begin - 1234, alone.begin);
    EXPECT_EQ(among.end - 1234, alone.end);
    EXPECT_EQ(among.initial >= 0, alone.initial >= 0);
    EXPECT_EQ(among.final >= 0, alone.final >= 0);
  }
}

// A batch and a packed batch of the same sequences ask for room for the same segments.
TEST(Sm90Segments, BatchAndPackedAgree) {
  for (const std::int64_t tokens : {1024, 2048, 8192, 65536}) {
    for (const std::int64_t heads : {1, 4, 16, 33, 34}) {
      ForwardPlan batch = packed(3, tokens, heads, 132);
      batch.batch = 3;
      batch.varlen = false;
      const Workspace exact = workspace_of(batch, false);
      const Segments s = SegmentRule::of(heads, 132).segments(tokens);
      EXPECT_EQ(exact.splits, s.count > 1 ? 3 : 0);
      EXPECT_EQ(exact.inner, s.count > 1 ? 3 * s.inner() : 0);
      EXPECT_EQ(exact.rest, s.count > 1 ? 3 * (s.count - 1) : 3);
      EXPECT_EQ(exact.slots, s.count > 1 ? 3 * s.slots() : 0);
      EXPECT_EQ(exact.bytes, static_cast<std::size_t>(exact.slots * heads) * 65536);
      const Workspace bound = workspace_of(packed(3, 3 * tokens, heads, 132), true);
      EXPECT_GE(bound.splits, exact.splits);
      EXPECT_GE(bound.inner, exact.inner);
      EXPECT_GE(bound.rest, exact.rest);
      EXPECT_GE(bound.slots, exact.slots);
    }
  }
}

// One sequence of T tokens: room for a split if and only if a length up to T is cut. This is the
// search for the shortest such length, against all lengths one by one.
TEST(Sm90Workspace, FindsTheShortestLengthThatIsCut) {
  for (const std::int32_t card : kCards) {
    for (std::int64_t heads = 1; heads <= kMostHeads; ++heads) {
      SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(card));
      const std::int64_t chunks = shortest_cut(SegmentRule::of(heads, card), 4096);
      if (chunks == 0) {
        EXPECT_EQ(workspace_of(packed(1, 4096 * kChunk, heads, card), true).splits, 0);
        continue;
      }
      const std::int64_t tokens = (chunks - 1) * kChunk + 1;
      EXPECT_EQ(workspace_of(packed(1, tokens, heads, card), true).splits, 1);
      EXPECT_EQ(workspace_of(packed(1, tokens - 1, heads, card), true).splits, 0);
      EXPECT_EQ(workspace_of(packed(9, 2 * tokens - 1, heads, card), true).splits, 1);
      EXPECT_EQ(workspace_of(packed(9, 2 * tokens, heads, card), true).splits, 2);
    }
  }
}

// As the schedule kernel counts.
struct Counts {
  std::int64_t splits = 0, inner = 0, rest = 0, slots = 0;
};
Counts schedule(const SegmentRule& rule, const std::vector<std::int64_t>& lengths) {
  Counts c;
  for (const std::int64_t tokens : lengths) {
    const Segments s = rule.segments(tokens);
    c.rest += s.count > 1 ? s.count - 1 : 1;
    if (s.count == 1) continue;
    ++c.splits;
    c.inner += s.inner();
    c.slots += s.slots();
  }
  return c;
}

void expect_room(const std::vector<std::int64_t>& lengths, std::int64_t tail, std::int64_t heads,
                 std::int32_t card) {
  std::int64_t tokens = tail;
  for (const std::int64_t n : lengths) tokens += n;
  const auto n = static_cast<std::int64_t>(lengths.size());
  const Workspace w = workspace_of(packed(n, tokens, heads, card), true);
  const Counts c = schedule(SegmentRule::of(heads, card), lengths);
  ASSERT_LE(c.splits, w.splits);
  ASSERT_LE(c.inner, w.inner);
  ASSERT_LE(c.rest, w.rest);
  ASSERT_LE(c.slots, w.slots);
  // The lists lie one behind the other, as long as the counts say.
  ASSERT_GE(w.first_at, sizeof(Schedule));
  ASSERT_GE(w.inner_at, w.first_at + static_cast<std::size_t>(w.splits) * sizeof(Span));
  ASSERT_GE(w.rest_at, w.inner_at + static_cast<std::size_t>(w.inner) * sizeof(Span));
  ASSERT_GE(w.chains_at, w.rest_at + static_cast<std::size_t>(w.rest) * sizeof(Span));
  ASSERT_GE(w.slots_at, w.chains_at + static_cast<std::size_t>(w.splits) * sizeof(Chain));
  ASSERT_GE(w.bytes, w.slots_at + static_cast<std::size_t>(w.slots * heads) * 65536);
  for (const std::size_t at : {w.first_at, w.inner_at, w.rest_at, w.chains_at, w.slots_at})
    ASSERT_EQ(at % 256, 0U);
}

TEST(Sm90Workspace, HoldsTheScheduleOfAnyPackedBatch) {
  testing::Random random(11);
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random.bits() % static_cast<std::uint64_t>(n));
  };
  std::int64_t split_batches = 0;
  for (int round = 0; round < 20000; ++round) {
    const std::int32_t card = kCards[below(3)];
    const std::int64_t heads = 1 + below(kMostHeads);
    const std::int64_t count = 1 + below(12);
    const std::int64_t longest = std::int64_t{64} << below(12);
    std::vector<std::int64_t> lengths(static_cast<std::size_t>(count));
    for (std::int64_t& n : lengths) n = below(4) == 0 ? below(3) : 1 + below(longest);
    const std::int64_t tail = below(3) == 0 ? below(100) : 0;
    split_batches += schedule(SegmentRule::of(heads, card), lengths).splits > 0 ? 1 : 0;
    ASSERT_NO_FATAL_FAILURE(expect_room(lengths, tail, heads, card)) << round;
  }
  EXPECT_GT(split_batches, 5000);
}

// Batches that use the bounds up: equal sequences, one token into their last chunk, at every length
// in chunks; also with one that takes what is left.
TEST(Sm90Workspace, HoldsTheScheduleOfTightBatches) {
  std::int64_t full = 0;
  for (const std::int32_t card : kCards) {
    for (std::int64_t heads = 1; heads <= kMostHeads; ++heads) {
      const SegmentRule rule = SegmentRule::of(heads, card);
      for (std::int64_t chunks = 40; chunks <= 400; ++chunks) {
        SCOPED_TRACE(std::to_string(chunks) + " chunks, " + std::to_string(heads) + " heads");
        const std::int64_t tokens = (chunks - 1) * kChunk + 1;
        for (const std::size_t count : {1, 2, 7, 50}) {
          std::vector<std::int64_t> lengths(count, tokens);
          ASSERT_NO_FATAL_FAILURE(expect_room(lengths, 0, heads, card));
          const std::int64_t splits = schedule(rule, lengths).splits;
          const auto n = static_cast<std::int64_t>(count);
          if (splits > 0 && splits == workspace_of(packed(n, n * tokens, heads, card), true).splits)
            ++full;
          lengths.push_back(chunks * kChunk * 3);
          ASSERT_NO_FATAL_FAILURE(expect_room(lengths, 31, heads, card));
        }
      }
    }
  }
  EXPECT_GT(full, 100) << "no batch uses its bound up: the test asks too little";
}

TEST(Sm90Workspace, NothingForSplitsThatAreOff) {
  ForwardPlan plan = packed(3, 30000, 4, 132);
  ASSERT_GT(workspace_of(plan, true).splits, 0);
  plan.options.sequence_split = false;
  const Workspace w = workspace_of(plan, true);
  EXPECT_EQ(w.splits, 0);
  EXPECT_EQ(w.slots, 0);
  EXPECT_EQ(w.rest, 3);
  plan.varlen = false;
  EXPECT_EQ(workspace_of(plan, false).bytes, 0U);
}

}  // namespace
}  // namespace flash_kda::sm90
