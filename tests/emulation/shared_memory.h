// The block's shared memory, and what is known of every four bytes of it: unwritten, being
// delivered by the copy engine, a barrier, or by whom and how it was written last, and who has read
// it since.
//
// Two accesses of which one writes and that no barrier orders are a race, and reported, in whatever
// order they happened to run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "emulation/clocks.h"
#include "emulation/scheduler.h"

namespace flash_kda::emulation {

// The window starts above 0, as on the device, and where 128-byte swizzle patterns start.
inline constexpr SharedAddress kSharedBase = 1024;
inline constexpr std::size_t kSharedCapacity = 227 * 1024;

// 128-byte swizzle: the 16-byte chunk index of an address, xor the index of its 128-byte row mod 8.
inline constexpr int kSwizzleRowBytes = 128;
inline constexpr int kSwizzlePatternBytes = 1024;
inline constexpr int kChunkBytes = 16;
inline SharedAddress swizzle(SharedAddress a) { return a ^ (((a >> 7) & 7u) << 4); }

class SharedMemory {
 public:
  SharedMemory(Scheduler& scheduler, Clocks& clocks, std::size_t bytes);

  // Accesses of a thread. `bytes` is a multiple of 4; the access must be aligned to `alignment`.
  // `operation` names it in reports.
  void load(const char* operation, int thread, SharedAddress a, void* to, int bytes, int alignment);
  void store(const char* operation, int thread, SharedAddress a, const void* from, int bytes,
             int alignment);

  // Reads by the asynchronous units, issued with the knowledge `by`: what threads stored must be
  // known and have passed a fence. They happen at some moment between start and finish; false from
  // finish: the bytes are not what start gave. From finish on, `as` has read them.
  void start_read(const char* operation, const Clocks::Knowledge& by, SharedAddress a, void* to,
                  int bytes);
  bool finish_read(const char* operation, const Clocks::Knowledge& by, Epoch as, SharedAddress a,
                   const void* expected, int bytes);
  // Writes by the copy engine, issued by the current thread; they count as `as`. Between start and
  // finish nobody may touch the bytes.
  void start_write(const char* operation, Epoch as, SharedAddress a, int bytes);
  void finish_write(SharedAddress a, const void* from, int bytes);

  // Eight bytes become a barrier, which no load or store may touch.
  void make_barrier(SharedAddress a);

  // Host pointers, for code that takes the address of shared memory. Accesses through them are
  // not seen.
  void* pointer(SharedAddress a);
  SharedAddress address(const void* pointer) const;
  std::size_t bytes() const { return bytes_.size(); }

 private:
  enum class State : std::uint8_t { kUnwritten, kInFlight, kBarrier, kDelivered, kStored };
  struct Granule {
    State state = State::kUnwritten;
    Epoch written;
  };
  // Reads since the last write: a few, or one clock for each actor.
  struct Reads {
    static constexpr std::size_t kFew = 12;
    std::size_t count = 0;
    Epoch few[kFew];
    std::unique_ptr<Clocks::Vector> many;
  };

  std::size_t check(const char* operation, SharedAddress a, int bytes, int alignment) const;
  [[noreturn]] void bad_state(const char* operation, std::size_t granule) const;
  [[noreturn]] void race(const char* operation, std::size_t granule, const char* other,
                         int actor) const;
  void check_fenced(const char* operation, std::size_t granule, const Clocks::Knowledge& by) const;
  // That the last write, or the last reads, are ordered before what `by` knows.
  void check_write(const char* operation, std::size_t granule, const Clocks::Knowledge& by) const {
    const Epoch e = granules_[granule].written;
    if (!by.knows(e)) race(operation, granule, "a write by", e.actor);
  }
  void check_reads(const char* operation, std::size_t granule, const Clocks::Knowledge& by) const;
  void add_read(std::size_t granule, Epoch e);
  void clear_reads(std::size_t granule);

  Scheduler& scheduler_;
  Clocks& clocks_;
  std::vector<std::byte> bytes_;
  std::vector<Granule> granules_;
  std::vector<Reads> reads_;
};

}  // namespace flash_kda::emulation
