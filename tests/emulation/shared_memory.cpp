#include "emulation/shared_memory.h"

#include <cstring>

namespace flash_kda::emulation {

namespace {

constexpr std::size_t kGranuleBytes = 4;

}  // namespace

SharedMemory::SharedMemory(Scheduler& scheduler, Clocks& clocks, std::size_t bytes)
    : scheduler_(scheduler), clocks_(clocks) {
  if (bytes > kSharedCapacity) {
    throw std::invalid_argument(
        format("shared_bytes: expected at most %zu, got %zu", kSharedCapacity, bytes));
  }
  bytes = (bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
  bytes_.assign(bytes, std::byte{0xff});
  granules_.resize(bytes / kGranuleBytes);
  reads_.resize(bytes / kGranuleBytes);
}

std::size_t SharedMemory::check(const char* operation, SharedAddress a, int bytes,
                                int alignment) const {
  if (a % static_cast<unsigned>(alignment) != 0) {
    scheduler_.fail(
        format("%s: shared address 0x%x is not a multiple of %d", operation, a, alignment));
  }
  if (a < kSharedBase || a - kSharedBase + static_cast<std::size_t>(bytes) > bytes_.size()) {
    scheduler_.fail(
        format("%s: %d bytes at shared address 0x%x are outside the block's [0x%x, 0x%zx)",
               operation, bytes, a, kSharedBase, kSharedBase + bytes_.size()));
  }
  return a - kSharedBase;
}

// "shared address 0x420 (base + 32)"
static std::string where(std::size_t granule) {
  const std::size_t offset = granule * kGranuleBytes;
  return format("shared address 0x%zx (base + %zu)", kSharedBase + offset, offset);
}

void SharedMemory::bad_state(const char* operation, std::size_t granule) const {
  const State state = granules_[granule].state;
  const char* why = state == State::kUnwritten  ? "has not been written"
                    : state == State::kInFlight ? "is being written by a tensor_load"
                                                : "is a barrier";
  scheduler_.fail(format("%s: %s %s", operation, where(granule).c_str(), why));
}

void SharedMemory::race(const char* operation, std::size_t granule, const char* other,
                        int actor) const {
  scheduler_.fail(format("%s: %s: race with %s %s, which no barrier orders before", operation,
                         where(granule).c_str(), other, Clocks::describe(actor).c_str()));
}

void SharedMemory::check_reads(const char* operation, std::size_t granule,
                               const Clocks::Knowledge& by) const {
  const Reads& reads = reads_[granule];
  for (std::size_t i = 0; i < reads.count; ++i) {
    const Epoch e = reads.few[i];
    if (!by.knows(e)) race(operation, granule, "a read by", e.actor);
  }
  if (reads.many == nullptr) return;
  const auto actors = static_cast<std::size_t>(clocks_.actors());
  for (std::size_t actor = 0; actor < actors; ++actor) {
    if ((*reads.many)[actor] > by.known[actor]) {
      race(operation, granule, "a read by", static_cast<int>(actor));
    }
  }
}

void SharedMemory::add_read(std::size_t granule, Epoch e) {
  Reads& reads = reads_[granule];
  if (reads.many != nullptr && reads.count == 0) {
    (*reads.many)[e.actor] = e.clock;
    return;
  }
  for (std::size_t i = 0; i < reads.count; ++i) {
    if (reads.few[i].actor == e.actor) {
      reads.few[i].clock = e.clock;
      return;
    }
  }
  if (reads.count < Reads::kFew) {
    reads.few[reads.count++] = e;
    return;
  }
  reads.many = std::make_unique<Clocks::Vector>();
  reads.many->fill(0);
  for (std::size_t i = 0; i < reads.count; ++i)
    (*reads.many)[reads.few[i].actor] = reads.few[i].clock;
  (*reads.many)[e.actor] = e.clock;
  reads.count = 0;
}

void SharedMemory::clear_reads(std::size_t granule) {
  reads_[granule].count = 0;
  reads_[granule].many.reset();
}

void SharedMemory::load(const char* operation, int thread, SharedAddress a, void* to, int bytes,
                        int alignment) {
  const std::size_t offset = check(operation, a, bytes, alignment);
  const Clocks::Knowledge& by = clocks_.of(thread);
  const Epoch now = clocks_.now(thread);
  const std::size_t end = (offset + static_cast<std::size_t>(bytes)) / kGranuleBytes;
  for (std::size_t i = offset / kGranuleBytes; i < end; ++i) {
    if (granules_[i].state < State::kDelivered) bad_state(operation, i);
    check_write(operation, i, by);
    add_read(i, now);
  }
  std::memcpy(to, &bytes_[offset], static_cast<std::size_t>(bytes));
}

void SharedMemory::store(const char* operation, int thread, SharedAddress a, const void* from,
                         int bytes, int alignment) {
  const std::size_t offset = check(operation, a, bytes, alignment);
  const Clocks::Knowledge& by = clocks_.of(thread);
  const Granule stored{State::kStored, clocks_.now(thread)};
  const std::size_t end = (offset + static_cast<std::size_t>(bytes)) / kGranuleBytes;
  for (std::size_t i = offset / kGranuleBytes; i < end; ++i) {
    const State state = granules_[i].state;
    if (state == State::kInFlight || state == State::kBarrier) bad_state(operation, i);
    check_write(operation, i, by);
    check_reads(operation, i, by);
    clear_reads(i);
    granules_[i] = stored;
  }
  std::memcpy(&bytes_[offset], from, static_cast<std::size_t>(bytes));
}

void SharedMemory::check_fenced(const char* operation, std::size_t granule,
                                const Clocks::Knowledge& by) const {
  const Granule& g = granules_[granule];
  if (g.state != State::kStored || by.fence_passed(g.written)) return;
  scheduler_.fail(format("%s: %s was stored by %s, and no fence_async_proxy stands between",
                         operation, where(granule).c_str(),
                         Clocks::describe(g.written.actor).c_str()));
}

void SharedMemory::start_read(const char* operation, const Clocks::Knowledge& by, SharedAddress a,
                              void* to, int bytes) {
  const std::size_t offset = check(operation, a, bytes, kGranuleBytes);
  const std::size_t end = (offset + static_cast<std::size_t>(bytes)) / kGranuleBytes;
  for (std::size_t i = offset / kGranuleBytes; i < end; ++i) {
    if (granules_[i].state < State::kDelivered) bad_state(operation, i);
    check_write(operation, i, by);
    check_fenced(operation, i, by);
  }
  std::memcpy(to, &bytes_[offset], static_cast<std::size_t>(bytes));
}

bool SharedMemory::finish_read(const char* operation, const Clocks::Knowledge& by, Epoch as,
                               SharedAddress a, const void* expected, int bytes) {
  const std::size_t offset = a - kSharedBase;
  const std::size_t end = (offset + static_cast<std::size_t>(bytes)) / kGranuleBytes;
  for (std::size_t i = offset / kGranuleBytes; i < end; ++i) {
    if (granules_[i].state == State::kInFlight) return false;
    check_write(operation, i, by);
    add_read(i, as);
  }
  return std::memcmp(&bytes_[offset], expected, static_cast<std::size_t>(bytes)) == 0;
}

void SharedMemory::start_write(const char* operation, Epoch as, SharedAddress a, int bytes) {
  const std::size_t offset = check(operation, a, bytes, kGranuleBytes);
  const Clocks::Knowledge& by = clocks_.of(scheduler_.current().index);
  const std::size_t end = (offset + static_cast<std::size_t>(bytes)) / kGranuleBytes;
  for (std::size_t i = offset / kGranuleBytes; i < end; ++i) {
    const State state = granules_[i].state;
    if (state == State::kInFlight || state == State::kBarrier) bad_state(operation, i);
    check_write(operation, i, by);
    check_reads(operation, i, by);
    check_fenced(operation, i, by);
    clear_reads(i);
    granules_[i] = {State::kInFlight, as};
  }
}

void SharedMemory::finish_write(SharedAddress a, const void* from, int bytes) {
  const std::size_t offset = a - kSharedBase;
  const std::size_t end = (offset + static_cast<std::size_t>(bytes)) / kGranuleBytes;
  for (std::size_t i = offset / kGranuleBytes; i < end; ++i) granules_[i].state = State::kDelivered;
  std::memcpy(&bytes_[offset], from, static_cast<std::size_t>(bytes));
}

void SharedMemory::make_barrier(SharedAddress a) {
  const std::size_t offset = check("barrier_init", a, 8, 8);
  const std::size_t first = offset / kGranuleBytes;
  for (std::size_t i = first; i < first + 8 / kGranuleBytes; ++i) {
    const State state = granules_[i].state;
    if (state == State::kInFlight || state == State::kBarrier) bad_state("barrier_init", i);
    granules_[i].state = State::kBarrier;
  }
}

void* SharedMemory::pointer(SharedAddress a) { return &bytes_[check("generic", a, 1, 1)]; }

SharedAddress SharedMemory::address(const void* pointer) const {
  const auto offset = static_cast<const std::byte*>(pointer) - bytes_.data();
  if (offset < 0 || static_cast<std::size_t>(offset) >= bytes_.size()) {
    scheduler_.fail("shared_address: the pointer is not into shared memory");
  }
  return kSharedBase + static_cast<SharedAddress>(offset);
}

}  // namespace flash_kda::emulation
