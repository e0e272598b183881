#include "emulation/shared_memory.h"

#include <cstring>

namespace flash_kda::emulation {

namespace {

constexpr int kGranuleBytes = 2;

// A granule's state: one of these, or "stored": the bit, the writer's fence count, the writer.
constexpr std::uint32_t kUnwritten = 0;
constexpr std::uint32_t kInFlight = 1;
constexpr std::uint32_t kBarrier = 2;
constexpr std::uint32_t kDelivered = 3;
constexpr std::uint32_t kStored = 1u << 31;
constexpr int kThreadBits = 10;
static_assert(kMaxThreads <= 1 << kThreadBits);
constexpr std::uint32_t kFenceMask = (1u << (31 - kThreadBits)) - 1;

std::uint32_t stored_by(int thread, std::uint32_t fences) {
  return kStored | ((fences & kFenceMask) << kThreadBits) | static_cast<std::uint32_t>(thread);
}

int writer(std::uint32_t state) { return static_cast<int>(state & ((1u << kThreadBits) - 1)); }

}  // namespace

SharedMemory::SharedMemory(Scheduler& scheduler, std::size_t bytes)
    : scheduler_(scheduler), fences_(static_cast<std::size_t>(scheduler.threads())) {
  if (bytes > kSharedCapacity) {
    throw std::invalid_argument(
        format("shared_bytes: expected at most %zu, got %zu", kSharedCapacity, bytes));
  }
  bytes = (bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
  bytes_.assign(bytes, std::byte{0xff});
  states_.assign(bytes / kGranuleBytes, kUnwritten);
}

std::size_t SharedMemory::check(const char* operation, SharedAddress a, int bytes,
                                int alignment) const {
  if (a % static_cast<unsigned>(alignment) != 0) {
    scheduler_.fail(
        format("%s: shared address 0x%x is not a multiple of %d", operation, a, alignment));
  }
  if (a < kSharedBase || a - kSharedBase + static_cast<std::size_t>(bytes) > bytes_.size()) {
    scheduler_.fail(
        format("%s: %d bytes at shared address 0x%x are outside the block's [0x%x, "
               "0x%zx)",
               operation, bytes, a, kSharedBase, kSharedBase + bytes_.size()));
  }
  return a - kSharedBase;
}

void SharedMemory::bad_read(const char* operation, SharedAddress a, std::uint32_t state) const {
  const char* why = state == kUnwritten  ? "has not been written"
                    : state == kInFlight ? "is being written by a tensor_load"
                                         : "is a barrier";
  scheduler_.fail(
      format("%s: shared address 0x%x (base + %u) %s", operation, a, a - kSharedBase, why));
}

void SharedMemory::load(const char* operation, SharedAddress a, void* to, int bytes,
                        int alignment) {
  const std::size_t offset = check(operation, a, bytes, alignment);
  for (int i = 0; i < bytes; i += kGranuleBytes) {
    const std::uint32_t state = states_[(offset + static_cast<std::size_t>(i)) / kGranuleBytes];
    if (state < kDelivered) {
      bad_read(operation, a + static_cast<SharedAddress>(i), state);
    }
  }
  std::memcpy(to, &bytes_[offset], static_cast<std::size_t>(bytes));
}

void SharedMemory::store(const char* operation, SharedAddress a, const void* from, int bytes,
                         int alignment) {
  const std::size_t offset = check(operation, a, bytes, alignment);
  const int thread = scheduler_.current().index;
  const std::uint32_t mine = stored_by(thread, fences_[static_cast<std::size_t>(thread)]);
  for (int i = 0; i < bytes; i += kGranuleBytes) {
    std::uint32_t& state = states_[(offset + static_cast<std::size_t>(i)) / kGranuleBytes];
    if (state == kInFlight || state == kBarrier) {
      bad_read(operation, a + static_cast<SharedAddress>(i), state);
    }
    state = mine;
  }
  std::memcpy(&bytes_[offset], from, static_cast<std::size_t>(bytes));
}

void SharedMemory::fence_async_proxy() {
  fences_[static_cast<std::size_t>(scheduler_.current().index)] += 1;
}

void SharedMemory::load_async(const char* operation, SharedAddress a, void* to, int bytes) {
  const std::size_t offset = check(operation, a, bytes, kGranuleBytes);
  for (int i = 0; i < bytes; i += kGranuleBytes) {
    const std::uint32_t state = states_[(offset + static_cast<std::size_t>(i)) / kGranuleBytes];
    if (state == kDelivered) continue;
    const auto at = a + static_cast<SharedAddress>(i);
    if (state < kDelivered) bad_read(operation, at, state);
    const int thread = writer(state);
    if (state == stored_by(thread, fences_[static_cast<std::size_t>(thread)])) {
      scheduler_.fail(
          format("%s: shared address 0x%x (base + %u) was stored by thread %d, which "
                 "has not called fence_async_proxy since",
                 operation, at, at - kSharedBase, thread));
    }
  }
  std::memcpy(to, &bytes_[offset], static_cast<std::size_t>(bytes));
}

bool SharedMemory::same_async(SharedAddress a, const void* as, int bytes) const {
  const std::size_t offset = a - kSharedBase;
  for (int i = 0; i < bytes; i += kGranuleBytes) {
    if (states_[(offset + static_cast<std::size_t>(i)) / kGranuleBytes] == kInFlight) return false;
  }
  return std::memcmp(&bytes_[offset], as, static_cast<std::size_t>(bytes)) == 0;
}

void SharedMemory::begin_store_async(const char* operation, SharedAddress a, int bytes) {
  const std::size_t offset = check(operation, a, bytes, kGranuleBytes);
  for (int i = 0; i < bytes; i += kGranuleBytes) {
    std::uint32_t& state = states_[(offset + static_cast<std::size_t>(i)) / kGranuleBytes];
    const auto at = a + static_cast<SharedAddress>(i);
    if (state == kInFlight || state == kBarrier) bad_read(operation, at, state);
    if ((state & kStored) != 0) {
      const int thread = writer(state);
      if (state == stored_by(thread, fences_[static_cast<std::size_t>(thread)])) {
        scheduler_.fail(
            format("%s: would overwrite shared address 0x%x (base + %u), which thread "
                   "%d stored without fence_async_proxy after it",
                   operation, at, at - kSharedBase, thread));
      }
    }
    state = kInFlight;
  }
}

void SharedMemory::store_async(SharedAddress a, const void* from, int bytes) {
  const std::size_t offset = a - kSharedBase;
  for (int i = 0; i < bytes; i += kGranuleBytes) {
    states_[(offset + static_cast<std::size_t>(i)) / kGranuleBytes] = kDelivered;
  }
  std::memcpy(&bytes_[offset], from, static_cast<std::size_t>(bytes));
}

void SharedMemory::make_barrier(SharedAddress a) {
  const std::size_t offset = check("barrier_init", a, 8, 8);
  for (std::size_t i = 0; i < 8; i += kGranuleBytes) {
    std::uint32_t& state = states_[(offset + i) / kGranuleBytes];
    if (state == kInFlight || state == kBarrier) bad_read("barrier_init", a, state);
    state = kBarrier;
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
