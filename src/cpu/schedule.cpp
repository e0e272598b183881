#include "cpu/schedule.h"

#include <algorithm>
#include <atomic>
#include <queue>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/backend.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace flash_kda::cpu {

void parallel_for(std::int64_t items, int threads,
                  const std::function<void(std::int64_t item, int worker)>& work) {
  std::atomic<std::int64_t> next = 0;
  const auto drain = [&](int worker) {
    for (;;) {
      const std::int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= items) return;
      work(item, worker);
    }
  };
  const int helpers = static_cast<int>(std::min<std::int64_t>(threads, items)) - 1;
  std::vector<std::jthread> pool;  // joins on the way out
  if (helpers > 0) pool.reserve(static_cast<std::size_t>(helpers));
  for (int i = 0; i < helpers; ++i) {
    try {
      pool.emplace_back(drain, i + 1);
    } catch (const std::system_error&) {
      break;  // out of threads: those that run do the work
    }
  }
  drain(0);
}

namespace {

// When the longest item is at most one in this many of a thread's share, longest first leaves
// little idle time at the end.
constexpr std::int64_t kItemsEnough = 8;

// When the last thread ends, with items of `parts` parts of single heads started longest first.
double end_of(std::span<const std::int64_t> lengths, std::int64_t heads, int panels, int parts,
              int threads) {
  // What a part repeats (gates, norms, products of keys), in units of one panel's own work.
  constexpr double kSharedWork = 0.6;
  const int width = (panels + parts - 1) / parts;
  const double work = width + kSharedWork;
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
  for (int i = 0; i < threads; ++i) free_at.push(0);
  double end = 0;
  std::int64_t left = 4096;  // the shortest of very many items fill the gaps, whatever their order
  for (const std::int64_t length : lengths) {
    for (std::int64_t item = 0; item < heads * parts; ++item) {
      if (left-- == 0) return end;
      const double done = free_at.top() + static_cast<double>(length) * work;
      free_at.pop();
      free_at.push(done);
      end = std::max(end, done);
    }
  }
  return end;
}

}  // namespace

Shares share(std::span<const std::int64_t> lengths, std::int64_t heads, int panels, int most_heads,
             int threads) {
  std::int64_t tokens = 0;
  for (const std::int64_t length : lengths) tokens += length;
  const auto most = static_cast<int>(std::min<std::int64_t>(heads, most_heads));
  if (threads <= 1 || tokens == 0) return {most, 1};
  const std::int64_t even = tokens * heads / (threads * kItemsEnough * lengths.front());
  if (even >= 1) return {static_cast<int>(std::min<std::int64_t>(even, most)), 1};

  Shares best;
  double best_end = end_of(lengths, heads, panels, 1, threads);
  for (int parts = 2; parts <= panels; ++parts) {
    const int width = (panels + parts - 1) / parts;
    if ((panels + width - 1) / width != parts) continue;  // the same cut as fewer parts
    const double end = end_of(lengths, heads, panels, parts, threads);
    if (end < best_end) {
      best.parts = parts;
      best_end = end;
    }
  }
  return best;
}

int max_threads() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace flash_kda::cpu
