#include "emulation/clocks.h"

#include <algorithm>

namespace flash_kda::emulation {

Clocks::Clocks(int threads)
    : threads_(static_cast<std::size_t>(threads)),
      warps_(static_cast<std::size_t>(threads / kWarpSize)) {
  for (int i = 0; i < threads; ++i) tick(i);
}

std::string Clocks::describe(int actor) {
  if (is_thread(actor)) return format("thread %d", actor - actor_of(0));
  if (actor >= matrix_unit(0)) return format("a wgmma of warp %d", actor - matrix_unit(0));
  return "a tensor_load";
}

Epoch Clocks::now(int thread) const {
  const int actor = actor_of(thread);
  return {static_cast<std::uint16_t>(actor), of(thread).known[static_cast<std::size_t>(actor)]};
}

void Clocks::join(Knowledge& to, const Knowledge& from) const {
  const auto count = static_cast<std::size_t>(actors());
  for (std::size_t i = 0; i < count; ++i) to.known[i] = std::max(to.known[i], from.known[i]);
  for (std::size_t i = 0; i < count; ++i) to.fenced[i] = std::max(to.fenced[i], from.fenced[i]);
}

const Clocks::Knowledge& Clocks::of_warp(int warp) {
  Warp& cache = warps_[static_cast<std::size_t>(warp)];
  if (!cache.current) {
    cache.together = of(kWarpSize * warp);
    for (int lane = 1; lane < kWarpSize; ++lane) join(cache.together, of(kWarpSize * warp + lane));
    cache.current = true;
  }
  return cache.together;
}

void Clocks::meet(const std::vector<int>& threads) {
  Knowledge all = of(threads.front());
  for (const int thread : threads) join(all, of(thread));
  for (const int thread : threads) {
    join(change(thread), all);
    tick(thread);
  }
}

void Clocks::meet_warp(int warp) {
  const Knowledge all = of_warp(warp);
  for (int thread = kWarpSize * warp; thread < kWarpSize * (warp + 1); ++thread) {
    join(change(thread), all);
    tick(thread);
  }
}

void Clocks::release(int thread, Knowledge& to) {
  join(to, of(thread));
  tick(thread);
}

Epoch Clocks::matrix_reads_done(int warp) {
  const auto actor = static_cast<std::size_t>(matrix_unit(warp));
  const std::uint32_t clock = of(kWarpSize * warp).known[actor] + 1;
  for (int lane = 0; lane < kWarpSize; ++lane) change(kWarpSize * warp + lane).known[actor] = clock;
  return {static_cast<std::uint16_t>(actor), clock};
}

void Clocks::fence_async_proxy(int thread) {
  change(thread).fenced = of(thread).known;
  tick(thread);  // later stores have a later clock
}

}  // namespace flash_kda::emulation
