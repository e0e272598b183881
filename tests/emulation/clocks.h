// Vector clocks: which accesses of a block are ordered by its barriers, whatever order they ran in.
//
// An actor is a thread, the matrix unit of a warp (reads by wgmma), or the deliveries announced to
// a barrier in shared memory. Each has a clock; a thread knows the others' up to its last
// synchronisation with them. An access is ordered before what a thread does now if the thread knows
// of the access's clock.
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
  static constexpr int kActors = kMaxThreads + kMaxWarps + kMaxBarriers;
  using Vector = std::array<std::uint32_t, kActors>;

  explicit Clocks(int threads);

  static int matrix_unit(int warp) { return kMaxThreads + warp; }
  static int deliveries(int barrier) { return kMaxThreads + kMaxWarps + barrier; }
  // "thread 5", "a wgmma of warp 2", "a tensor_load".
  static std::string describe(int actor);

  Epoch now(int thread) const;
  const Vector& known(int thread) const { return known_[static_cast<std::size_t>(thread)]; }
  bool ordered(Epoch e, int thread) const { return e.clock <= known(thread)[e.actor]; }
  // What the 32 threads of a warp know together.
  Vector known_to_warp(int warp) const;

  // All of them wait for all of them.
  void meet(const std::vector<int>& threads);
  void meet_warp(int warp);
  // What `thread` has done so far is known to whoever acquires `to` later.
  void release(int thread, Vector& to);
  void acquire(int thread, const Vector& from) {
    join(known_[static_cast<std::size_t>(thread)], from);
  }
  static void join(Vector& to, const Vector& from);
  // The matrix unit of a warp has finished reads, and the warp's threads have waited for them. The
  // epoch that the reads get.
  Epoch matrix_reads_done(int warp);

  // The thread's fence_async_proxy: returns nothing, but fences(thread) grows.
  void fence(int thread);
  std::uint32_t fences(int thread) const {
    return static_cast<std::uint32_t>(fence_clocks_[static_cast<std::size_t>(thread)].size());
  }
  // Whether `thread` has fenced since it had done so `fences` times, and `by` knows of it.
  bool fenced(int thread, std::uint32_t fences, const Vector& by) const;

 private:
  std::vector<Vector> known_;
  std::vector<std::vector<std::uint32_t>> fence_clocks_;
};

}  // namespace flash_kda::emulation
