// Named barriers (bar.sync) and barriers in shared memory (mbarrier) of one block.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "emulation/scheduler.h"
#include "emulation/shared_memory.h"

namespace flash_kda::emulation {

class NamedBarriers {
 public:
  explicit NamedBarriers(Scheduler& scheduler) : scheduler_(scheduler) {}

  void sync_block();
  void sync(int id, int threads);
  // A thread that has returned no longer counts for sync_block.
  void thread_done();

 private:
  static constexpr int kBarriers = 16;
  struct Barrier {
    int threads = 0;
    std::vector<Thread*> waiting;
  };

  void release(Barrier& barrier);

  Scheduler& scheduler_;
  std::array<Barrier, kBarriers> barriers_;
};

class TransactionBarriers {
 public:
  TransactionBarriers(Scheduler& scheduler, SharedMemory& memory)
      : scheduler_(scheduler), memory_(memory) {}

  void init(SharedAddress a, int arrivals);
  void fence_init();
  void arrive(SharedAddress a);
  void arrive_expect(SharedAddress a, int bytes);
  void wait(SharedAddress a, int parity);

  // The copy engine: `bytes` are under way for this barrier; they have come.
  void announce(const char* operation, SharedAddress a, int bytes);
  void deliver(SharedAddress a, int bytes);

 private:
  struct Barrier {
    int arrivals = 0;            // of a phase
    int pending = 0;             // arrivals still to come
    std::int64_t expected = 0;   // bytes still to come
    std::int64_t announced = 0;  // of which under way
    std::int64_t phase = 0;      // the one that is not complete
    int initialiser = 0;
    bool visible = false;  // to the copy engine
    std::vector<Thread*> waiting;
    std::vector<Thread*> woken;  // by the last phase, not run since
  };

  Barrier& find(const char* operation, SharedAddress a);
  void arrive(const char* operation, SharedAddress a, Barrier& barrier);
  void complete_if_due(SharedAddress a, Barrier& barrier);

  Scheduler& scheduler_;
  SharedMemory& memory_;
  std::map<SharedAddress, Barrier> barriers_;
};

}  // namespace flash_kda::emulation
