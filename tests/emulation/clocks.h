// Vector clocks: which accesses of a block are ordered by its barriers, whatever order they ran in.
//
// An actor is a thread, the matrix unit of a warp (reads by wgmma), or the deliveries announced to
// a barrier in shared memory. Each has a clock; a thread knows the others' up to its last
// synchronisation with them. An access is ordered before what a thread does now if the thread knows
// of the access's clock.
//
// Beside that goes what was known when a fence between the proxies was last passed: threads' stores
// reach the asynchronous units only if some thread on the way, the writer, the one that issues the
// asynchronous operation or any between, has called fence_async_proxy after it knew of the store.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "emulation/scheduler.h"

namespace flash_kda::emulation {

struct Epoch {
  std::uint16_t actor = 0;
  std::uint32_t clock = 0;  // 0: before everything
};

class Clocks {
 public:
  static constexpr int kMaxWarps = kMaxThreads / kWarpSize;
  static constexpr int kMaxBarriers = 64;
  static constexpr int kActors = kMaxBarriers + kMaxWarps + kMaxThreads;
  using Vector = std::array<std::uint32_t, kActors>;  // by actor
  struct Knowledge {
    bool knows(Epoch e) const { return e.clock <= known[e.actor]; }
    bool fence_passed(Epoch e) const { return e.clock <= fenced[e.actor]; }

    Vector known{};
    Vector fenced{};
  };

  explicit Clocks(int threads);

  static int deliveries(int barrier) { return barrier; }
  static int matrix_unit(int warp) { return kMaxBarriers + warp; }
  static int actor_of(int thread) { return kMaxBarriers + kMaxWarps + thread; }
  static bool is_thread(int actor) { return actor >= actor_of(0); }
  // "thread 5", "a wgmma of warp 2", "a tensor_load".
  static std::string describe(int actor);
  // Actors from here on do not exist in this block.
  int actors() const { return actor_of(static_cast<int>(threads_.size())); }

  Epoch now(int thread) const;
  const Knowledge& of(int thread) const { return threads_[static_cast<std::size_t>(thread)]; }
  // What the 32 threads of a warp know together. Valid until one of them learns more.
  const Knowledge& of_warp(int warp);

  // All of them wait for all of them.
  void meet(const std::vector<int>& threads);
  void meet_warp(int warp);
  // What `thread` has done so far is known to whoever acquires `to` later.
  void release(int thread, Knowledge& to);
  void acquire(int thread, const Knowledge& from) { join(change(thread), from); }
  void join(Knowledge& to, const Knowledge& from) const;
  // The matrix unit of a warp has finished reads, and the warp's threads have waited for them. The
  // epoch that the reads get.
  Epoch matrix_reads_done(int warp);
  void fence_async_proxy(int thread);

 private:
  // Asked for once and again by a series of products.
  struct Warp {
    bool current = false;
    Knowledge together;
  };

  Knowledge& change(int thread) {
    warps_[static_cast<std::size_t>(thread / kWarpSize)].current = false;
    return threads_[static_cast<std::size_t>(thread)];
  }
  void tick(int thread) { change(thread).known[static_cast<std::size_t>(actor_of(thread))] += 1; }

  std::vector<Knowledge> threads_;
  std::vector<Warp> warps_;
};

}  // namespace flash_kda::emulation
