// Named barriers (bar.sync) and barriers in shared memory (mbarrier) of one block.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "emulation/clocks.h"
#include "emulation/scheduler.h"
#include "emulation/shared_memory.h"

namespace flash_kda::emulation {

class NamedBarriers {
 public:
  NamedBarriers(Scheduler& scheduler, Clocks& clocks) : scheduler_(scheduler), clocks_(clocks) {}

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

  // All who wait, and `last` unless it is null, go on.
  void release(Barrier& barrier, const Thread* last);

  Scheduler& scheduler_;
  Clocks& clocks_;
  std::array<Barrier, kBarriers> barriers_;
};

class TransactionBarriers {
 public:
  TransactionBarriers(Scheduler& scheduler, Clocks& clocks, SharedMemory& memory)
      : scheduler_(scheduler), clocks_(clocks), memory_(memory) {}

  void init(SharedAddress a, int arrivals);
  void fence_init();
  void arrive(SharedAddress a);
  void arrive_expect(SharedAddress a, int bytes);
  void wait(SharedAddress a, int parity);

  // The copy engine: `bytes` are under way for this barrier, and will have been written at the
  // epoch that announce gives; they have come.
  Epoch announce(const char* operation, SharedAddress a, int bytes);
  void deliver(SharedAddress a, int bytes);

 private:
  struct Barrier {
    int arrivals = 0;            // of a phase
    int pending = 0;             // arrivals still to come
    std::int64_t expected = 0;   // bytes still to come
    std::int64_t announced = 0;  // of which under way
    std::int64_t phase = 0;      // the one that is not complete
    int index = 0;               // in the order of initialisation
    int initialiser = 0;
    Epoch initialised;
    bool visible = false;           // to the copy engine
    Clocks::Knowledge arrived{};    // what those who arrived in this phase knew
    Clocks::Knowledge completed{};  // the same of all complete phases
    std::vector<Thread*> waiting;
    std::vector<Thread*> woken;  // by the last phase, not run since
  };

  Barrier& find(const char* operation, SharedAddress a);
  void arrive(const char* operation, SharedAddress a, Barrier& barrier);
  void complete_if_due(SharedAddress a, Barrier& barrier);

  Scheduler& scheduler_;
  Clocks& clocks_;
  SharedMemory& memory_;
  std::map<SharedAddress, Barrier> barriers_;
};

}  // namespace flash_kda::emulation
