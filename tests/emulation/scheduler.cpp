#include "emulation/scheduler.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>

namespace flash_kda::emulation {

namespace {

// Mean number of operations between two changes of thread that nothing asked for.
constexpr int kPreemptionPeriod = 48;
// Mean number of thread switches between two steps of the copy engine.
constexpr int kProgressPeriod = 64;
// Entries that have run before the unseeded queue is cut.
constexpr std::size_t kLongestQueue = 4096;

// Set while a block runs: a fiber's entry finds its scheduler by it. One block runs at a time.
Scheduler* running = nullptr;

// Unwinds the stack of a thread that will not go on.
struct Cancelled : std::exception {};

std::string describe_gather(const Thread& thread) { return thread.operation; }

}  // namespace

std::string format(const char* text, ...) {
  va_list arguments;
  va_start(arguments, text);
  char buffer[512];
  std::vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

Scheduler::Scheduler(int block, int threads, std::uint64_t seed, const FiberStacks& stacks)
    : block_(block),
      seeded_(seed != 0),
      random_state_(seed * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(block)) {
  if (threads <= 0 || threads > kMaxThreads || threads % kWarpSize != 0) {
    throw std::invalid_argument(
        format("threads: expected a multiple of 32 up to 1024, got %d", threads));
  }
  threads_.resize(static_cast<std::size_t>(threads));
  warps_.resize(static_cast<std::size_t>(threads / kWarpSize));
  for (int i = 0; i < threads; ++i) {
    Thread& thread = threads_[static_cast<std::size_t>(i)];
    thread.index = i;
    thread.fiber.start(stacks.stack(i), FiberStacks::stack_bytes(), &Scheduler::thread_entry,
                       &thread);
    ready_.push_back(&thread);
  }
  live_ = threads;
}

std::uint64_t Scheduler::random() {
  random_state_ += 0x9E3779B97F4A7C15u;
  std::uint64_t z = random_state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

void Scheduler::thread_entry(void* argument) {
  auto& thread = *static_cast<Thread*>(argument);
  Scheduler& scheduler = *running;
  thread.started = true;
  try {
    (*scheduler.body_)();
    scheduler.live_ -= 1;
    (*scheduler.thread_done_)();
  } catch (const Cancelled&) {
    thread.operation = "cancelled";  // somebody else's failure ends the run
  } catch (...) {
    scheduler.failure_ = std::current_exception();
  }
  thread.done = true;
  thread.fiber.suspend();
}

void Scheduler::run(const std::function<void()>& body, const std::function<bool(bool)>& progress,
                    const std::function<void()>& thread_done) {
  struct Running {
    explicit Running(Scheduler* scheduler) : outer(running) { running = scheduler; }
    ~Running() { running = outer; }
    Scheduler* outer;
  } guard(this);
  body_ = &body;
  thread_done_ = &thread_done;
  try {
    while (live_ > 0 && !failure_) step(progress);
  } catch (...) {
    failure_ = std::current_exception();
  }
  if (failure_) {
    cancel();
    std::rethrow_exception(failure_);
  }
}

// Runs one thread until it waits, or lets the copy engine do something.
void Scheduler::step(const std::function<bool(bool)>& progress) {
  if (next_ready_ == ready_.size()) {
    ready_.clear();
    next_ready_ = 0;
    if (!progress(true)) deadlock();
    return;
  }
  if (seeded_) {
    if (random() % kProgressPeriod == 0) progress(false);
    std::swap(ready_[random() % ready_.size()], ready_.back());
    current_ = ready_.back();
    ready_.pop_back();
  } else {
    current_ = ready_[next_ready_++];
    if (next_ready_ > kLongestQueue) {
      ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(next_ready_));
      next_ready_ = 0;
    }
  }
  current_->fiber.resume();
}

void Scheduler::cancel() {
  const std::exception_ptr failure = failure_;
  cancelled_ = true;
  for (Thread& thread : threads_) {
    if (!thread.started || thread.done) continue;
    current_ = &thread;
    thread.fiber.resume();
  }
  failure_ = failure;  // not what destructors may have thrown on the way
}

void Scheduler::suspend() {
  current_->fiber.suspend();
  if (cancelled_) throw Cancelled();
}

void Scheduler::wait(const char* operation, std::string (*describe)(const Thread&),
                     std::int64_t object, std::int64_t value) {
  Thread& thread = *current_;
  thread.operation = operation;
  thread.describe_wait = describe;
  thread.wait_object = object;
  thread.wait_value = value;
  suspend();
}

void Scheduler::wake(Thread& thread) { ready_.push_back(&thread); }

void Scheduler::preempt() {
  until_preemption_ = 1 + static_cast<int>(random() % (2 * kPreemptionPeriod));
  ready_.push_back(current_);
  suspend();
}

bool Scheduler::join(const char* operation, void* arguments) {
  Thread& thread = *current_;
  Warp& warp = warps_[static_cast<std::size_t>(thread.warp())];
  if (warp.arrived > 0 && std::strcmp(warp.operation, operation) != 0) {
    fail(format("%s, while other lanes of the warp are in %s", operation, warp.operation));
  }
  warp.operation = operation;
  warp.arguments[thread.lane()] = arguments;
  if (++warp.arrived == kWarpSize) return true;
  warp.waiting[thread.lane()] = &thread;
  wait(operation, &describe_gather, 0, 0);
  return false;
}

void Scheduler::release(Warp& warp) {
  warp.arrived = 0;
  for (Thread*& thread : warp.waiting) {
    if (thread != nullptr) wake(*thread);
    thread = nullptr;
  }
}

std::string Scheduler::place() const {
  return format("block %d, thread %d (warp %d, lane %d): ", block_, current_->index,
                current_->warp(), current_->lane());
}

void Scheduler::fail(const std::string& what) const { throw Error(place() + what); }

void Scheduler::deadlock() const {
  // Waits that print alike are one line: "threads 0-127: sync_named 1 of 256".
  std::map<std::string, std::vector<int>> waits;
  for (const Thread& thread : threads_) {
    if (!thread.done) waits[thread.describe_wait(thread)].push_back(thread.index);
  }
  std::string text = format("block %d: deadlock, %d threads wait", block_, live_);
  for (const auto& [what, indices] : waits) {
    text += "\n  " + what + ": threads";
    for (std::size_t i = 0; i < indices.size();) {
      std::size_t end = i + 1;
      while (end < indices.size() && indices[end] == indices[end - 1] + 1) ++end;
      text +=
          end == i + 1 ? format(" %d", indices[i]) : format(" %d-%d", indices[i], indices[end - 1]);
      i = end;
    }
  }
  throw Error(text);
}

}  // namespace flash_kda::emulation
