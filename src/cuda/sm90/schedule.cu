// One block sorts the spans of each queue into bins by length, longest bin first. Which of two
// spans of a bin comes first, and which slots a sequence gets, depends on timing; results do not,
// since every span is computed on its own.
#include "cuda/check.h"
#include "cuda/sm90/schedule.h"

namespace flash_kda::sm90 {
namespace {

constexpr int kThreads = 1024;
// A length's bin: its exponent and the three bits below, like a tiny float; falls as the length
// grows.
constexpr int kBins = 256;
constexpr int kQueues = 3;
constexpr int kAhead = 4;  // sequences that a thread fetches before it looks at the first

__device__ int bin_of(int length) {
  int key = length;  // 0..7 exactly
  if (length >= 8) {
    const int exponent = 31 - __clz(length);  // 3..30
    key = 8 * (exponent - 2) + ((length >> (exponent - 3)) & 7);
  }
  return kBins - 1 - key;  // key < 8 * 29
}

// Where sequence i begins; whatever the array holds, inside [0, T].
__device__ int offset(const ForwardParams& p, int i) {
  const std::int64_t at = i * p.cu_stride;
  const std::int64_t x = p.cu_int64 ? static_cast<const std::int64_t*>(p.cu_seqlens)[at]
                                    : static_cast<const std::int32_t*>(p.cu_seqlens)[at];
  return static_cast<int>(x < 0 ? 0 : (x > p.tokens ? p.tokens : x));
}

// Calls visit(sequence, first token, tokens) for this thread's share of the sequences.
template <class Visit>
__device__ void for_each_sequence(const ForwardParams& p, const Visit& visit) {
  for (int start = static_cast<int>(threadIdx.x); start < p.sequences; start += kAhead * kThreads) {
    int begin[kAhead], end[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int i = start + a * kThreads;
      begin[a] = i < p.sequences ? offset(p, i) : 0;
      end[a] = i < p.sequences ? offset(p, i + 1) : 0;
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int i = start + a * kThreads;
      if (i < p.sequences) visit(i, begin[a], end[a] > begin[a] ? end[a] - begin[a] : 0);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    schedule_kernel(const __grid_constant__ ForwardParams p, SegmentRule rule, ScheduleRoom room,
                    Span* first, Span* inner, Span* rest, Chain* chains) {
  __shared__ int next[kQueues][kBins];  // where the next span of a bin goes
  __shared__ int splits, slots;
  const int thread = static_cast<int>(threadIdx.x);
  // Inner and last segments of a sequence differ by a chunk at most: one bin for all.
  const auto usual = [](const Segments& s) {
    return (s.chunks - s.first) / (s.count - 1) * kChunk;
  };
  constexpr int kFirst = static_cast<int>(Queue::kFirst), kInner = static_cast<int>(Queue::kInner),
                kRest = static_cast<int>(Queue::kRest);
  // Offsets that go back and forth may ask for more than there is room for: then nothing is cut.
  const auto counted = [&] {
    for (int i = thread; i < kQueues * kBins; i += kThreads) next[i / kBins][i % kBins] = 0;
    if (thread == 0) splits = slots = 0;
    __syncthreads();
    int cut = 0, maps = 0;  // of this thread's sequences
    for_each_sequence(p, [&](int, int, int tokens) {
      const Segments s = rule.segments(tokens);
      if (s.count == 1) {
        atomicAdd(&next[kRest][bin_of(tokens)], 1);
      } else {
        atomicAdd(&next[kFirst][bin_of(s.first * kChunk)], 1);
        atomicAdd(&next[kInner][bin_of(usual(s))], s.inner());
        atomicAdd(&next[kRest][bin_of(usual(s))], s.count - 1);
        ++cut, maps += s.inner();
      }
    });
    if (cut > 0) atomicAdd(&splits, cut), atomicAdd(&slots, maps);
    __syncthreads();
    const bool there_is_room = splits <= room.splits && slots <= room.inner;
    __syncthreads();
    if (thread == 0) splits = slots = 0;
    __syncthreads();
    return there_is_room;
  };
  if (!counted()) {
    rule = SegmentRule{};
    counted();
  }
  if (thread <
      32 * kQueues) {  // exclusive sums, a warp a queue: a lane takes kBins / 32 neighbours
    constexpr int kEach = kBins / 32;
    int (&counts)[kBins] = next[thread / 32];
    const int lane = thread % 32;
    int total = 0;
    for (int b = 0; b < kEach; ++b) total += counts[kEach * lane + b];
    int before = total;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, before, step);
      if (lane >= step) before += other;
    }
    if (lane == 31) {
      p.schedule->spans[thread / 32] = before;
    }
    before -= total;
    for (int b = 0; b < kEach; ++b) {
      const int count = counts[kEach * lane + b];
      counts[kEach * lane + b] = before;
      before += count;
    }
  }
  __syncthreads();
  for_each_sequence(p, [&](int i, int begin, int tokens) {
    const Segments s = rule.segments(tokens);
    if (s.count == 1) {
      rest[atomicAdd(&next[kRest][bin_of(tokens)], 1)] = segment_span(s, 0, i, begin, tokens, 0);
      return;
    }
    const int slot = atomicAdd(&slots, s.slots());
    chains[atomicAdd(&splits, 1)] = {slot, s.inner()};
    first[atomicAdd(&next[kFirst][bin_of(s.first * kChunk)], 1)] =
        segment_span(s, 0, i, begin, tokens, slot);
    const int inner_at = atomicAdd(&next[kInner][bin_of(usual(s))], s.inner());
    const int rest_at = atomicAdd(&next[kRest][bin_of(usual(s))], s.count - 1);
    for (int j = 1; j < s.count; ++j) {
      rest[rest_at + j - 1] = segment_span(s, j, i, begin, tokens, slot);
      if (j + 1 < s.count) inner[inner_at + j - 1] = map_span(s, j, i, begin, tokens, slot);
    }
  });
  __syncthreads();
  if (thread == 0) p.schedule->chains = splits;
  if (thread < 2) p.schedule->taken[thread] = 0;
}

}  // namespace

void launch_schedule(const ForwardParams& p, const SegmentRule& rule, const ScheduleRoom& room,
                     cudaStream_t stream) {
  const auto list = [&](Queue queue) {
    return const_cast<Span*>(p.spans[static_cast<int>(queue)]);
  };
  schedule_kernel<<<1, kThreads, 0, stream>>>(p, rule, room, list(Queue::kFirst),
                                              list(Queue::kInner), list(Queue::kRest),
                                              const_cast<Chain*>(p.chains));
  FLASH_KDA_CUDA_CHECK(cudaGetLastError());
}

}  // namespace flash_kda::sm90
