// The threads of one block: which runs, which waits for what, and what ends the run.
//
// One operating-system thread; a fiber runs until it waits (or, with a seed, until a random
// moment). Seed 0: in order of the threads. Any other seed: a random order, the same for the same
// seed.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulation/fiber.h"

namespace flash_kda::emulation {

using SharedAddress = std::uint32_t;

inline constexpr int kWarpSize = 32;
inline constexpr int kWarpgroupWarps = 4;
inline constexpr int kMaxThreads = 1024;

// A fault of the emulated kernel. The text names block, thread, operation and place.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string format(const char* text, ...);

struct Thread {
  int warp() const { return index / kWarpSize; }
  int lane() const { return index % kWarpSize; }

  int index = 0;
  Fiber fiber;
  bool started = false, done = false;
  std::string (*describe_wait)(const Thread&) = nullptr;
  const char* operation = "";
  std::int64_t wait_object = 0, wait_value = 0;  // what describe_wait prints
};

class Scheduler {
 public:
  Scheduler(int block, int threads, std::uint64_t seed, const FiberStacks& stacks);

  // Runs `body` in every thread until all have returned; rethrows what ended a thread early.
  // `progress(forced)` lets the copy engine do one thing; false: it had nothing to do. It is forced
  // when no thread can run.
  void run(const std::function<void()>& body, const std::function<bool(bool)>& progress,
           const std::function<void()>& thread_done);

  Thread& current() { return *current_; }
  int block() const { return block_; }
  int threads() const { return static_cast<int>(threads_.size()); }
  int warps() const { return threads() / kWarpSize; }
  int live() const { return live_; }
  std::uint64_t random();  // uniform 64 bits
  bool seeded() const { return seeded_; }

  // Stops the current thread until wake(). `operation` and the two numbers are for the report.
  void wait(const char* operation, std::string (*describe)(const Thread&), std::int64_t object,
            std::int64_t value);
  void wake(Thread& thread);
  // Lets another thread go first at random moments.
  void maybe_preempt() {
    if (seeded_ && --until_preemption_ <= 0) preempt();
  }
  // Throws Error with the current thread's place in front.
  [[noreturn]] void fail(const std::string& what) const;

  // All 32 lanes call it with the same `operation`; the last one runs together(arguments by lane).
  template <class Arguments, class Function>
  void gather(const char* operation, Arguments& mine, Function&& together) {
    if (!join(operation, &mine)) return;
    Warp& warp = warps_[static_cast<std::size_t>(current_->warp())];
    Arguments* all[kWarpSize];
    for (int lane = 0; lane < kWarpSize; ++lane) {
      all[lane] = static_cast<Arguments*>(warp.arguments[lane]);
    }
    together(static_cast<Arguments* const(&)[kWarpSize]>(all));
    release(warp);
  }

 private:
  struct Warp {
    int arrived = 0;
    const char* operation = nullptr;
    void* arguments[kWarpSize] = {};
    Thread* waiting[kWarpSize] = {};
  };

  static void thread_entry(void* thread);
  void step(const std::function<bool(bool)>& progress);
  void suspend();
  // Unwinds the stacks of all threads that have started and not returned.
  void cancel();
  bool join(const char* operation, void* arguments);
  void release(Warp& warp);
  void preempt();
  [[noreturn]] void deadlock() const;
  std::string place() const;

  int block_;
  bool seeded_;
  std::uint64_t random_state_;
  int until_preemption_ = 0;
  int live_ = 0;
  Thread* current_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<Thread*> ready_;
  std::size_t next_ready_ = 0;  // of the unseeded queue: entries before it have run
  std::exception_ptr failure_;
  bool cancelled_ = false;
  const std::function<void()>* body_ = nullptr;
  const std::function<void()>* thread_done_ = nullptr;
};

}  // namespace flash_kda::emulation
