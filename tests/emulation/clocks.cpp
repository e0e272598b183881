#include "emulation/clocks.h"

#include <algorithm>

namespace flash_kda::emulation {

Clocks::Clocks(int threads)
    : known_(static_cast<std::size_t>(threads)), fence_clocks_(static_cast<std::size_t>(threads)) {
  for (std::size_t i = 0; i < known_.size(); ++i) {
    known_[i].fill(0);
    known_[i][i] = 1;
  }
}

std::string Clocks::describe(int actor) {
  if (actor < kMaxThreads) return format("thread %d", actor);
  if (actor < kMaxThreads + kMaxWarps) return format("a wgmma of warp %d", actor - kMaxThreads);
  return "a tensor_load";
}

Epoch Clocks::now(int thread) const {
  return {static_cast<std::uint16_t>(thread), known(thread)[static_cast<std::size_t>(thread)]};
}

void Clocks::join(Vector& to, const Vector& from) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = std::max(to[i], from[i]);
}

Clocks::Vector Clocks::known_to_warp(int warp) const {
  Vector all = known(kWarpSize * warp);
  for (int lane = 1; lane < kWarpSize; ++lane) join(all, known(kWarpSize * warp + lane));
  return all;
}

void Clocks::meet(const std::vector<int>& threads) {
  Vector all = known(threads.front());
  for (const int thread : threads) join(all, known(thread));
  for (const int thread : threads) {
    Vector& mine = known_[static_cast<std::size_t>(thread)];
    mine = all;
    mine[static_cast<std::size_t>(thread)] += 1;
  }
}

void Clocks::meet_warp(int warp) {
  const Vector all = known_to_warp(warp);
  for (int i = kWarpSize * warp; i < kWarpSize * (warp + 1); ++i) {
    known_[static_cast<std::size_t>(i)] = all;
    known_[static_cast<std::size_t>(i)][static_cast<std::size_t>(i)] += 1;
  }
}

void Clocks::release(int thread, Vector& to) {
  Vector& mine = known_[static_cast<std::size_t>(thread)];
  join(to, mine);
  mine[static_cast<std::size_t>(thread)] += 1;
}

Epoch Clocks::matrix_reads_done(int warp) {
  const auto actor = static_cast<std::size_t>(matrix_unit(warp));
  const std::uint32_t clock = known(kWarpSize * warp)[actor] + 1;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    known_[static_cast<std::size_t>(kWarpSize * warp + lane)][actor] = clock;
  }
  return {static_cast<std::uint16_t>(actor), clock};
}

void Clocks::fence(int thread) {
  // A clock of its own, so that a release before the fence does not pass for one after it.
  std::uint32_t& mine = known_[static_cast<std::size_t>(thread)][static_cast<std::size_t>(thread)];
  mine += 1;
  fence_clocks_[static_cast<std::size_t>(thread)].push_back(mine);
}

bool Clocks::fenced(int thread, std::uint32_t fences, const Vector& by) const {
  const std::vector<std::uint32_t>& clocks = fence_clocks_[static_cast<std::size_t>(thread)];
  return fences < clocks.size() && clocks[fences] <= by[static_cast<std::size_t>(thread)];
}

}  // namespace flash_kda::emulation
