// Races that must be reported whatever the order of threads, and orders that must be accepted.
#include "emulation/test_kernels.h"

namespace flash_kda::testing {
namespace {

using namespace sm90;  // NOLINT: the primitives are what this file is about

#define EXPECT_ERROR_WITH_EACH_SEED(part, threads, ...)                                     \
  do {                                                                                      \
    for (const std::uint64_t seed : kSeeds) EXPECT_ERROR(part, threads, seed, __VA_ARGS__); \
  } while (false)

SharedAddress word(SharedAddress base, int i) { return base + 4 * static_cast<unsigned>(i); }

TEST(EmulatedRaces, WriteAfterReadWithoutABarrier) {
  EXPECT_ERROR_WITH_EACH_SEED("race with", 256, [](SharedAddress base) {
    for (unsigned round = 0; round < 2; ++round) {
      store_u32(word(base, thread_index()), round);
      sync_block();
      load_u32(word(base, (thread_index() + 99) % 256));
    }
  });
}

TEST(EmulatedRaces, ReadAfterWriteBetweenLanes) {
  for (const bool sync : {true, false}) {
    const auto body = [sync](SharedAddress base) {
      store_u32(word(base, thread_index()), 0);
      sync_warp();
      store_u32(word(base, thread_index()), 1);
      if (sync) sync_warp();
      load_u32(word(base, 31 - thread_index()));
    };
    if (sync) {
      for (const std::uint64_t seed : kSeeds) EXPECT_NO_THROW(run(32, seed, body));
    } else {
      EXPECT_ERROR_WITH_EACH_SEED("race with a", 32, body);
    }
  }
}

TEST(EmulatedRaces, TwoWriters) {
  EXPECT_ERROR_WITH_EACH_SEED("race with a write by thread", 64,
                              [](SharedAddress base) { store_u32(base, 1); });
}

// A shuffle waits for the lanes but orders no memory.
TEST(EmulatedRaces, ShufflesAreNoBarriers) {
  EXPECT_ERROR_WITH_EACH_SEED("race with a write by thread 0", 32, [](SharedAddress base) {
    if (thread_index() == 0) store_u32(base, 1);
    shuffle(1, 0);
    load_u32(base);
  });
}

// One lane arrives for its warp: the others must have been waited for.
TEST(EmulatedRaces, ArrivalForAWarp) {
  for (const bool sync : {true, false}) {
    const auto body = [sync](SharedAddress base) {
      const SharedAddress barrier = base + 1024;
      if (thread_index() == 0) {
        barrier_init(barrier, 1);
        fence_barrier_init();
      }
      sync_block();
      if (thread_index() < 32) {
        store_u32(word(base, thread_index()), 1);
        if (sync) sync_warp();
        if (thread_index() == 0) barrier_arrive(barrier);
      } else {
        barrier_wait(barrier, 0);
        load_u32(word(base, thread_index() - 32));
      }
    };
    if (sync) {
      for (const std::uint64_t seed : kSeeds) EXPECT_NO_THROW(run(64, seed, body));
    } else {
      // Either the reader finds no value yet, or one that nothing orders.
      for (const std::uint64_t seed : kSeeds) {
        const std::string text = error_of(64, seed, body);
        EXPECT_TRUE(contains(text, "race with") || contains(text, "not been written")) << text;
      }
    }
  }
}

// What arrives in the next phase is not known to those who waited for this one.
TEST(EmulatedRaces, LaterArrivalsDoNotCount) {
  EXPECT_ERROR("race with a write by thread 32", 96, 0, [](SharedAddress base) {
    const SharedAddress first = base + 1024, second = base + 1032;
    if (thread_index() == 0) {
      barrier_init(first, 1);
      barrier_init(second, 2);
    }
    sync_block();
    if (thread_index() == 1) barrier_arrive(first);
    if (thread_index() == 32) {
      barrier_wait(first, 0);
      store_u32(base, 1);
      barrier_arrive(second);  // its phase stays open
    }
    if (thread_index() == 64) {
      barrier_wait(first, 0);
      load_u32(base);
    }
  });
}

TEST(EmulatedRaces, BarriersMustBeInitialisedBefore) {
  EXPECT_ERROR("no barrier orders the barrier_init", 64, 0, [](SharedAddress base) {
    if (thread_index() == 0) barrier_init(base, 64);
    barrier_arrive(base);
  });
}

// A fence on the way of a store to the asynchronous reader: by the writer before it releases, or by
// the reader after it acquired.
TEST(EmulatedRaces, FencesBetweenProxies) {
  alignas(16) static std::uint16_t data[8 * 64];
  const TensorMap map = make_tensor_map(data, {64, 1, 8, 1}, {2, 128, 128, 1024}, {64, 1, 8, 1});
  enum Where { kWriter, kReader, kWriterTooLate, kReaderTooEarly, kBystander };
  for (const Where where : {kWriter, kReader, kWriterTooLate, kReaderTooEarly, kBystander}) {
    const auto body = [&map, where](SharedAddress base) {
      const bool writer = thread_index() < 64, reader = thread_index() == 64;
      if (where == kReaderTooEarly && reader) fence_async_proxy();
      for (int i = thread_index(); writer && i < 256; i += 64) store_u32(word(base, i), 0);
      if (where == kWriter && writer) fence_async_proxy();
      sync_block();
      if (where == kWriterTooLate && writer) fence_async_proxy();
      if (where == kReader && reader) fence_async_proxy();
      if (where == kBystander && thread_index() == 65) fence_async_proxy();
      if (!reader) return;
      tensor_store(base, &map, 0, 0, 0, 0);
      tensor_store_commit();
      tensor_store_wait_all();
    };
    if (where <= kReader) {
      for (const std::uint64_t seed : kSeeds) EXPECT_NO_THROW(run(96, seed, body));
    } else {
      EXPECT_ERROR_WITH_EACH_SEED("no fence_async_proxy stands between", 96, body);
    }
  }
}

// The operand of one warp's product is overwritten by another that did not wait for it.
TEST(EmulatedRaces, OverwritingAnOperand) {
  for (const bool wait : {true, false}) {
    const auto body = [wait](SharedAddress base) {
      for (int i = thread_index(); i < 32 * 32; i += 256) store_u32(word(base, i), 0);
      fence_async_proxy();
      sync_block();
      if (thread_index() < 128) {
        std::uint32_t a[4] = {};
        float d[16] = {};
        wgmma_fence();
        wgmma_n32(d, a, matrix_descriptor(base, 16, 1024), false);
        wgmma_commit();
        wgmma_wait<0>();
      }
      if (wait) sync_block();
      if (thread_index() == 200) store_u32(base, 0);  // the value that is there already
    };
    if (wait) {
      for (const std::uint64_t seed : kSeeds) EXPECT_NO_THROW(run(256, seed, body));
    } else {
      EXPECT_ERROR_WITH_EACH_SEED("race with", 256, body);
    }
  }
}

// A slot of a ring is loaded again: its readers must have arrived.
TEST(EmulatedRaces, LoadingOverReaders) {
  alignas(16) static std::uint16_t data[8 * 64];
  const TensorMap map = make_tensor_map(data, {64, 1, 8, 1}, {2, 128, 128, 1024}, {64, 1, 8, 1});
  for (const bool released : {true, false}) {
    const auto body = [&map, released](SharedAddress base) {
      const SharedAddress full = base + 2048, empty = base + 2056;
      if (thread_index() == 0) {
        barrier_init(full, 1);
        barrier_init(empty, 32);
        fence_barrier_init();
      }
      sync_block();
      if (thread_index() == 0) {
        for (int n = 0; n < 2; ++n) {
          if (n > 0) barrier_wait(released ? empty : full, 0);
          barrier_arrive_expect(full, 1024);
          tensor_load(base, &map, full, 0, 0, 0, 0);
        }
        barrier_wait(full, 1);
      } else if (thread_index() >= 32) {
        barrier_wait(full, 0);
        load_u32(word(base, thread_index()));
        barrier_arrive(empty);
      }
    };
    if (released) {
      for (const std::uint64_t seed : kSeeds) EXPECT_NO_THROW(run(64, seed, body));
    } else {
      for (const std::uint64_t seed : kSeeds) {
        const std::string text = error_of(64, seed, body);
        EXPECT_TRUE(contains(text, "race with") || contains(text, "is being written") ||
                    contains(text, "before thread"))
            << text;
      }
    }
  }
}

}  // namespace
}  // namespace flash_kda::testing
