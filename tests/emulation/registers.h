// The block's pool of registers, which warps give to and take from (setmaxnreg).
#pragma once

#include <vector>

#include "emulation/scheduler.h"

namespace flash_kda::emulation {

class RegisterPool {
 public:
  // Every thread starts with `each` registers; the pool is empty.
  RegisterPool(Scheduler& scheduler, int each)
      : scheduler_(scheduler), held_(static_cast<std::size_t>(scheduler.threads()), each) {}

  // What a launch gives each thread if nothing limits it further: the register file of 64 K, in
  // steps of 8.
  static int of_launch(int threads);

  void shrink(int registers);
  // Waits until the pool holds what is missing.
  void grow(int registers);

 private:
  int& held() { return held_[static_cast<std::size_t>(scheduler_.current().index)]; }

  Scheduler& scheduler_;
  std::vector<int> held_;  // by thread
  int free_ = 0;
  std::vector<Thread*> waiting_;
};

}  // namespace flash_kda::emulation
