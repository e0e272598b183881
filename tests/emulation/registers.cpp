#include "emulation/registers.h"

#include <algorithm>

namespace flash_kda::emulation {

namespace {

constexpr int kRegisterFile = 65536;
constexpr int kStep = 8;
constexpr int kMost = 256;

std::string describe(const Thread& thread) {
  return format("grow_registers(%d)", static_cast<int>(thread.wait_value));
}

}  // namespace

int RegisterPool::of_launch(int threads) {
  return std::min(kRegisterFile / threads / kStep * kStep, kMost);
}

void RegisterPool::shrink(int registers) {
  int whole_warp = 0;
  scheduler_.gather("shrink_registers", whole_warp, [](auto& /*lanes*/) {});
  if (registers > held()) {
    scheduler_.fail(format("shrink_registers: to %d from %d", registers, held()));
  }
  free_ += held() - registers;
  held() = registers;
  for (Thread* thread : waiting_) scheduler_.wake(*thread);
  waiting_.clear();
}

void RegisterPool::grow(int registers) {
  int whole_warp = 0;
  scheduler_.gather("grow_registers", whole_warp, [](auto& /*lanes*/) {});
  if (registers < held()) {
    scheduler_.fail(format("grow_registers: to %d from %d", registers, held()));
  }
  while (free_ < registers - held()) {
    waiting_.push_back(&scheduler_.current());
    scheduler_.wait("grow_registers", &describe, 0, registers);
  }
  free_ -= registers - held();
  held() = registers;
}

}  // namespace flash_kda::emulation
