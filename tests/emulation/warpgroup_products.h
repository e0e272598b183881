// The asynchronous matrix products of a warpgroup (wgmma).
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <vector>

#include "emulation/scheduler.h"
#include "emulation/shared_memory.h"

namespace flash_kda::emulation {

// wgmma, a warp at a time: each warp of a warpgroup issues its own 16 rows, since nothing makes one
// wait for the others. B is read when the product is issued and must be the same when it has been
// waited for: the device may read it at any moment between. Until then the accumulators hold a NaN
// and must not be touched.
class WarpgroupProducts {
 public:
  WarpgroupProducts(Scheduler& scheduler, Clocks& clocks, SharedMemory& memory);

  enum class Major { kK, kRows };  // element (k, n) of B at row n, or at row k

  // d: 4 floats for every 8 of the `columns`; a: 4 registers. As the device half's wgmma_* say.
  void issue(const char* operation, float* d, int columns, const std::uint32_t* a,
             std::uint64_t descriptor, Major major, bool accumulate);
  void fence();
  void commit();
  void wait(int pending);
  // The block ends: nothing may be in flight, and the warps of a warpgroup have done the same.
  void block_done() const;

 private:
  static constexpr int kRows = 16, kInner = 16, kMaxColumns = 128;

  // An accumulator fragment in flight.
  struct Accumulator {
    float* lanes[kWarpSize];
    int columns;
    int products;  // not waited for
    float values[kRows][kMaxColumns];
  };
  struct Product {
    const char* operation;
    std::uint64_t descriptor;
    int columns;
    Major major;
    Accumulator* accumulator;
    std::uint16_t b[kInner * kMaxColumns];  // in the order of for_each_chunk
  };
  struct WarpState {
    bool fenced = false;
    std::size_t steps = 0;                // of the warpgroup's program that this warp has done
    std::list<Accumulator> accumulators;  // products point into it
    std::deque<Product> products;         // in flight, oldest first
    std::vector<std::size_t> groups;      // sizes of the committed ones among them, oldest first
    std::size_t open = 0;                 // products not committed
  };
  // What the first warp of a warpgroup to come this far did.
  struct Step {
    const char* operation;
    std::uint64_t descriptor;
    bool accumulate;
    int pending;
  };
  struct Arguments {
    float* d;
    const std::uint32_t* a;
    std::uint64_t descriptor;
    bool accumulate;
  };

  template <class Function>
  static void for_each_chunk(const Product& product, Function f);
  void check_descriptor(const Product& product) const;
  void follow(const Step& step);
  void issue_warp(Product& product, Arguments* const (&lanes)[kWarpSize]);
  Accumulator& accumulator(WarpState& warp, const char* operation, int columns, bool accumulate,
                           Arguments* const (&lanes)[kWarpSize]);
  void finish_oldest(WarpState& warp, const Clocks::Knowledge& by, Epoch as);
  void retire(Accumulator& accumulator);
  WarpState& current_warp();

  Scheduler& scheduler_;
  Clocks& clocks_;
  SharedMemory& memory_;
  std::vector<WarpState> warps_;
  std::vector<std::deque<Step>> programs_;   // by warpgroup
  std::vector<std::size_t> program_starts_;  // steps that were dropped from the front
};

}  // namespace flash_kda::emulation
