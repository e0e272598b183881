// The copy engine: boxes of a tensor in global memory to shared memory and back, asynchronously.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "emulation/barriers.h"
#include "emulation/scheduler.h"
#include "emulation/shared_memory.h"

namespace flash_kda::emulation {

// What a tensor map of the driver says, for bf16 elements and 128-byte swizzle. Dimensions from the
// innermost: channel, head, token, batch.
struct TensorMap {
  void* data = nullptr;
  std::array<std::int64_t, 4> sizes{};    // elements
  std::array<std::int64_t, 4> strides{};  // bytes; the first is 2
  std::array<int, 4> box{};               // elements; the first is 64

  int rows() const { return box[1] * box[2] * box[3]; }
};

// Throws std::invalid_argument where cuTensorMapEncodeTiled would refuse.
TensorMap make_tensor_map(const void* data, const std::array<std::int64_t, 4>& sizes,
                          const std::array<std::int64_t, 4>& strides,
                          const std::array<int, 4>& box);

using Coordinates = std::array<int, 4>;

class CopyEngine {
 public:
  CopyEngine(Scheduler& scheduler, Clocks& clocks, SharedMemory& memory,
             TransactionBarriers& barriers);

  void load(SharedAddress to, const TensorMap* map, SharedAddress barrier, const Coordinates& at);
  // Bytes as they lie; addresses and count are multiples of 16.
  void load_bytes(SharedAddress to, const void* from, int bytes, SharedAddress barrier);
  void store(SharedAddress from, const TensorMap* map, const Coordinates& at);
  // The current thread's stores since the last commit become a group.
  void commit();
  // Until at most `pending` groups of the current thread have not been read.
  void wait_read(const char* operation, int pending);

  // Delivers one load: any if `forced`, else perhaps none. False: none is under way.
  bool progress(bool forced);
  // The current thread returns: its stores must have read their shared memory.
  void thread_done();
  // The block ends: nothing may be under way.
  void block_done();

 private:
  struct Load {
    SharedAddress to, barrier;
    const TensorMap* map;  // null: plain bytes
    Coordinates at;
    const std::byte* from = nullptr;
    int bytes = 0;
  };
  struct Store {
    SharedAddress from;
    const TensorMap* map;
    Coordinates at;
    std::vector<std::byte> contents;  // when it was issued
  };
  using Group = std::vector<Store>;
  struct ThreadStores {
    Group open;
    std::vector<Group> committed;  // oldest first
  };

  void check(const char* operation, SharedAddress a, const TensorMap* map) const;
  void deliver(std::size_t index);
  void finish(const char* operation, const Store& store);

  Scheduler& scheduler_;
  Clocks& clocks_;
  SharedMemory& memory_;
  TransactionBarriers& barriers_;
  std::vector<Load> loads_;
  std::vector<ThreadStores> stores_;  // by thread
};

}  // namespace flash_kda::emulation
