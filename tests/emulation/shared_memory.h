// The block's shared memory, and what is known of every two bytes of it: unwritten, being delivered
// by the copy engine, a barrier, or by whom and how it was written last.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulation/scheduler.h"

namespace flash_kda::emulation {

// The window starts above 0, as on the device, and where 128-byte swizzle patterns start.
inline constexpr SharedAddress kSharedBase = 1024;
inline constexpr std::size_t kSharedCapacity = 227 * 1024;

// 128-byte swizzle: the 16-byte chunk index of an address, xor the index of its 128-byte row
// modulo 8.
inline constexpr int kSwizzleRowBytes = 128;
inline constexpr int kSwizzlePatternBytes = 1024;
inline constexpr int kChunkBytes = 16;
inline SharedAddress swizzle(SharedAddress a) { return a ^ (((a >> 7) & 7u) << 4); }

class SharedMemory {
 public:
  SharedMemory(Scheduler& scheduler, std::size_t bytes);

  // A thread's own accesses. `bytes` is even and the access must be aligned to `alignment`.
  // `operation` names it in reports.
  void load(const char* operation, SharedAddress a, void* to, int bytes, int alignment);
  void store(const char* operation, SharedAddress a, const void* from, int bytes, int alignment);
  // From here on this thread's earlier stores may be read by the asynchronous units.
  void fence_async_proxy();

  // Reads by wgmma and by the copy engine: what a thread stored must have been fenced by it.
  void load_async(const char* operation, SharedAddress a, void* to, int bytes);
  // Whether the bytes still are what load_async gave, and not being overwritten.
  bool same_async(SharedAddress a, const void* as, int bytes) const;
  // Between begin and store nobody may touch the bytes.
  void begin_store_async(const char* operation, SharedAddress a, int bytes);
  void store_async(SharedAddress a, const void* from, int bytes);

  // Eight bytes become a barrier, which no load or store may touch.
  void make_barrier(SharedAddress a);

  // Host pointers, for code that takes the address of shared memory. Accesses through them are
  // not seen.
  void* pointer(SharedAddress a);
  SharedAddress address(const void* pointer) const;
  std::size_t bytes() const { return bytes_.size(); }

 private:
  std::size_t check(const char* operation, SharedAddress a, int bytes, int alignment) const;
  [[noreturn]] void bad_read(const char* operation, SharedAddress a, std::uint32_t state) const;

  Scheduler& scheduler_;
  std::vector<std::byte> bytes_;
  std::vector<std::uint32_t> states_;  // one for each granule; see shared_memory.cpp
  std::vector<std::uint32_t> fences_;  // how often each thread has fenced
};

}  // namespace flash_kda::emulation
