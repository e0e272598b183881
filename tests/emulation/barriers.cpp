#include "emulation/barriers.h"

#include <algorithm>

namespace flash_kda::emulation {

namespace {

constexpr std::int64_t kMaxTransactionBytes = (1 << 20) - 1;

std::string describe_block(const Thread& /*thread*/) { return "sync_block"; }

std::string describe_named(const Thread& thread) {
  return format("sync_named(%d, %d)", static_cast<int>(thread.wait_object),
                static_cast<int>(thread.wait_value));
}

std::string describe_transaction(const Thread& thread) {
  return format(
      "barrier_wait(0x%x = base + %u, parity %d)", static_cast<unsigned>(thread.wait_object),
      static_cast<unsigned>(thread.wait_object) - kSharedBase, static_cast<int>(thread.wait_value));
}

}  // namespace

void NamedBarriers::release(Barrier& barrier, const Thread* last) {
  std::vector<int> threads;
  for (Thread* thread : barrier.waiting) {
    threads.push_back(thread->index);
    scheduler_.wake(*thread);
  }
  if (last != nullptr) threads.push_back(last->index);
  clocks_.meet(threads);
  barrier.waiting.clear();
}

void NamedBarriers::sync_block() {
  Barrier& barrier = barriers_[0];
  if (static_cast<int>(barrier.waiting.size()) + 1 == scheduler_.live()) {
    release(barrier, &scheduler_.current());
    scheduler_.maybe_preempt();
    return;
  }
  barrier.waiting.push_back(&scheduler_.current());
  scheduler_.wait("sync_block", &describe_block, 0, 0);
}

void NamedBarriers::thread_done() {
  Barrier& barrier = barriers_[0];
  if (!barrier.waiting.empty() && static_cast<int>(barrier.waiting.size()) == scheduler_.live()) {
    release(barrier, nullptr);
  }
}

void NamedBarriers::sync(int id, int threads) {
  if (id < 1 || id >= kBarriers) {
    scheduler_.fail(format("sync_named: id: expected 1 to 15, got %d", id));
  }
  if (threads <= 0 || threads % kWarpSize != 0 || threads > scheduler_.threads()) {
    scheduler_.fail(
        format("sync_named: threads: expected a multiple of 32 up to the block's %d, "
               "got %d",
               scheduler_.threads(), threads));
  }
  Barrier& barrier = barriers_[static_cast<std::size_t>(id)];
  if (!barrier.waiting.empty() && barrier.threads != threads) {
    scheduler_.fail(format("sync_named(%d, %d), while others wait there for %d threads", id,
                           threads, barrier.threads));
  }
  barrier.threads = threads;
  if (static_cast<int>(barrier.waiting.size()) + 1 == threads) {
    release(barrier, &scheduler_.current());
    scheduler_.maybe_preempt();
    return;
  }
  barrier.waiting.push_back(&scheduler_.current());
  scheduler_.wait("sync_named", &describe_named, id, threads);
}

void TransactionBarriers::init(SharedAddress a, int arrivals) {
  if (arrivals < 1 || arrivals > kMaxThreads) {
    scheduler_.fail(
        format("barrier_init: arrivals: expected 1 to %d, got %d", kMaxThreads, arrivals));
  }
  memory_.make_barrier(a);  // fails if it already is one
  Barrier barrier;
  barrier.arrivals = barrier.pending = arrivals;
  barrier.index = static_cast<int>(barriers_.size());
  if (barrier.index >= Clocks::kMaxBarriers) {
    scheduler_.fail(
        format("barrier_init: the emulation has room for %d barriers", Clocks::kMaxBarriers));
  }
  barrier.initialiser = scheduler_.current().index;
  barrier.initialised = clocks_.now(barrier.initialiser);
  barriers_[a] = barrier;
}

void TransactionBarriers::fence_init() {
  for (auto& [a, barrier] : barriers_) {
    if (barrier.initialiser == scheduler_.current().index) barrier.visible = true;
  }
}

TransactionBarriers::Barrier& TransactionBarriers::find(const char* operation, SharedAddress a) {
  const auto found = barriers_.find(a);
  if (found == barriers_.end()) {
    scheduler_.fail(format("%s: shared address 0x%x (base + %u) is not a barrier", operation, a,
                           a - kSharedBase));
  }
  if (!clocks_.of(scheduler_.current().index).knows(found->second.initialised)) {
    scheduler_.fail(format("%s: no barrier orders the barrier_init of 0x%x (base + %u) before this",
                           operation, a, a - kSharedBase));
  }
  return found->second;
}

void TransactionBarriers::arrive(const char* operation, SharedAddress a, Barrier& barrier) {
  if (barrier.pending == 0) {
    scheduler_.fail(format("%s: barrier 0x%x (base + %u) already has the %d arrivals of its phase",
                           operation, a, a - kSharedBase, barrier.arrivals));
  }
  barrier.pending -= 1;
  clocks_.release(scheduler_.current().index, barrier.arrived);
  complete_if_due(a, barrier);
}

void TransactionBarriers::arrive(SharedAddress a) {
  arrive("barrier_arrive", a, find("barrier_arrive", a));
  scheduler_.maybe_preempt();
}

void TransactionBarriers::arrive_expect(SharedAddress a, int bytes) {
  Barrier& barrier = find("barrier_arrive_expect", a);
  barrier.expected += bytes;
  if (bytes < 0 || barrier.expected > kMaxTransactionBytes) {
    scheduler_.fail(format("barrier_arrive_expect: bytes: expected 0 to %lld in all, got %d",
                           static_cast<long long>(kMaxTransactionBytes), bytes));
  }
  arrive("barrier_arrive_expect", a, barrier);
  scheduler_.maybe_preempt();
}

void TransactionBarriers::complete_if_due(SharedAddress a, Barrier& barrier) {
  if (barrier.pending > 0 || barrier.expected > 0) return;
  // A thread that waits by parity sees two completed phases as none.
  if (!barrier.woken.empty()) {
    scheduler_.fail(
        format("barrier 0x%x (base + %u): phase %lld completes before thread %d has "
               "seen that phase %lld did",
               a, a - kSharedBase, static_cast<long long>(barrier.phase),
               barrier.woken.front()->index, static_cast<long long>(barrier.phase - 1)));
  }
  barrier.phase += 1;
  clocks_.join(barrier.completed, barrier.arrived);
  barrier.arrived = {};
  barrier.completed.known[static_cast<std::size_t>(Clocks::deliveries(barrier.index))] =
      static_cast<std::uint32_t>(barrier.phase);
  barrier.pending = barrier.arrivals;
  for (Thread* thread : barrier.waiting) scheduler_.wake(*thread);
  barrier.woken.swap(barrier.waiting);
}

void TransactionBarriers::wait(SharedAddress a, int parity) {
  Barrier& barrier = find("barrier_wait", a);
  if (parity != 0 && parity != 1) {
    scheduler_.fail(format("barrier_wait: parity: expected 0 or 1, got %d", parity));
  }
  Thread& thread = scheduler_.current();
  if ((barrier.phase & 1) != parity) {
    clocks_.acquire(thread.index, barrier.completed);
    scheduler_.maybe_preempt();
    return;
  }
  barrier.waiting.push_back(&thread);
  scheduler_.wait("barrier_wait", &describe_transaction, a, parity);
  barrier.woken.erase(std::find(barrier.woken.begin(), barrier.woken.end(), &thread));
  clocks_.acquire(thread.index, barrier.completed);
}

Epoch TransactionBarriers::announce(const char* operation, SharedAddress a, int bytes) {
  Barrier& barrier = find(operation, a);
  if (!barrier.visible) {
    scheduler_.fail(
        format("%s: barrier 0x%x (base + %u) was initialised without "
               "fence_barrier_init after it",
               operation, a, a - kSharedBase));
  }
  barrier.announced += bytes;
  if (barrier.announced > barrier.expected) {
    scheduler_.fail(
        format("%s: %d bytes more for barrier 0x%x (base + %u), which expects %lld and "
               "has %lld under way",
               operation, bytes, a, a - kSharedBase, static_cast<long long>(barrier.expected),
               static_cast<long long>(barrier.announced - bytes)));
  }
  return {static_cast<std::uint16_t>(Clocks::deliveries(barrier.index)),
          static_cast<std::uint32_t>(barrier.phase + 1)};
}

void TransactionBarriers::deliver(SharedAddress a, int bytes) {
  Barrier& barrier = barriers_.at(a);
  barrier.announced -= bytes;
  barrier.expected -= bytes;
  complete_if_due(a, barrier);
}

}  // namespace flash_kda::emulation
