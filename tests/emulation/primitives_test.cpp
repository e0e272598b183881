// Threads, numbers, shared memory and barriers of the emulated block.
#include <algorithm>
#include <cmath>
#include <limits>

#include "emulation/test_kernels.h"

namespace flash_kda::testing {
namespace {

using namespace sm90;  // NOLINT: the primitives are what this file is about

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(EmulatedGrid, ThreadsBlocksAndAtomics) {
  for (const std::uint64_t seed : kSeeds) {
    std::vector<int> seen(3 * 768);
    int counter = 0;
    std::vector<int> tickets;
    run_grid({.blocks = 3, .threads = 768, .shared_bytes = 16, .seed = seed},
             [&](SharedAddress base) {
               EXPECT_EQ(grid_size(), 3);
               EXPECT_EQ(base, shared_base());
               seen[static_cast<std::size_t>(768 * block_index() + thread_index())] += 1;
               if (thread_index() % 32 == 0) tickets.push_back(atomic_add(&counter, 2));
             });
    EXPECT_EQ(seen, std::vector<int>(3 * 768, 1));
    std::sort(tickets.begin(), tickets.end());
    for (std::size_t i = 0; i < tickets.size(); ++i) EXPECT_EQ(tickets[i], 2 * static_cast<int>(i));
  }
}

TEST(EmulatedGrid, BadLaunches) {
  const auto body = [](SharedAddress) {};
  EXPECT_THROW(run_grid({.threads = 33}, body), std::invalid_argument);
  EXPECT_THROW(run_grid({.threads = 2048}, body), std::invalid_argument);
  EXPECT_THROW(run_grid({.shared_bytes = 227 * 1024 + 1}, body), std::invalid_argument);
  EXPECT_THROW(thread_index(), std::logic_error);
}

TEST(EmulatedGrid, AKernelsOwnExceptionPasses) {
  EXPECT_THROW(run(64, 1,
                   [](SharedAddress) {
                     if (thread_index() == 40) throw std::out_of_range("mine");
                     sync_block();
                   }),
               std::out_of_range);
}

TEST(EmulatedWarp, ShufflesVotesAndUniformValues) {
  run(64, 3, [](SharedAddress) {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    EXPECT_EQ(shuffle(100 * warp + lane, (lane + 5) % 32), 100 * warp + (lane + 5) % 32);
    EXPECT_EQ(shuffle(0.5f * static_cast<float>(lane), 31 - lane),
              0.5f * static_cast<float>(31 - lane));
    EXPECT_EQ(any_in_warp(warp == 1 && lane == 17), warp == 1);
    EXPECT_EQ(warp_uniform(warp), warp);
  });
  EXPECT_ERROR("warp_uniform", 32, 1, [](SharedAddress) { warp_uniform(thread_index() / 16); });
  EXPECT_ERROR("while other lanes", 32, 1, [](SharedAddress) {
    thread_index() < 16 ? static_cast<void>(shuffle(1, 0)) : sync_warp();
  });
}

TEST(EmulatedRegisters, GrowingWaitsForWhatOthersGive) {
  for (const std::uint64_t seed : kSeeds) {
    EXPECT_NO_THROW(run(512, seed, [](SharedAddress) {  // 128 each
      thread_index() < 128 ? grow_registers<248>() : shrink_registers<88>();
    }));
  }
  EXPECT_ERROR("grow_registers(256): threads", 512, 1, [](SharedAddress) {
    thread_index() < 128 ? grow_registers<256>() : shrink_registers<88>();
  });
  EXPECT_ERROR("grow_registers: to 120 from 128", 512, 1,
               [](SharedAddress) { grow_registers<120>(); });
  EXPECT_ERROR("shrink_registers: to 136 from 128", 512, 1,
               [](SharedAddress) { shrink_registers<136>(); });
}

TEST(EmulatedNumbers, FollowTheInstructions) {
  const float smallest = std::numeric_limits<float>::min();
  EXPECT_EQ(exp2_approx(-kInfinity), 0.0f);
  EXPECT_EQ(exp2_approx(3.0f), 8.0f);
  EXPECT_EQ(exp2_approx(-126.0f), smallest);
  EXPECT_EQ(exp2_approx(-127.0f), 0.0f);
  EXPECT_EQ(exp2_approx(128.0f), kInfinity);
  EXPECT_EQ(reciprocal_approx(-4.0f), -0.25f);
  EXPECT_EQ(reciprocal_approx(smallest / 2), kInfinity);
  EXPECT_EQ(reciprocal_approx(std::ldexp(1.0f, 127)), 0.0f);
  EXPECT_EQ(rsqrt_approx(16.0f), 0.25f);
  EXPECT_EQ(rsqrt_approx(0.0f), kInfinity);
  EXPECT_TRUE(std::isnan(rsqrt_approx(-1.0f)));
  // Ties: 1 + 2^-8 lies between bf16 1 and 1 + 2^-7; 1 + 3 2^-8 between 1 + 2^-7 and 1 + 2^-6.
  EXPECT_EQ(pack_bf16(1.00390625f, 1.01171875f), 0x3f823f80u);
  EXPECT_EQ(pack_bf16(kNan, -kInfinity), 0xff807fffu);
  EXPECT_EQ(pack_bf16(std::numeric_limits<float>::max(), -0.0f), 0x80007f80u);
  EXPECT_EQ(bf16_low(0xc0003f80u), 1.0f);
  EXPECT_EQ(bf16_high(0xc0003f80u), -2.0f);
  // What mma_tf32 sees of an operand: numbers of ten bits as they are, others to three quarters of
  // a unit.
  const auto seen = [](float x) { return from_bits(tf32_operand(x) & 0xffffe000u); };
  for (int i = 1024; i < 2048; ++i) {
    const float unit = 0x1p-10f, x = static_cast<float>(i) * unit;
    EXPECT_EQ(seen(x), x);
    EXPECT_EQ(seen(-x), -x);
    for (int part = 1; part < 8; ++part) {
      const float between = x + static_cast<float>(part) * unit / 8;
      EXPECT_LE(std::fabs(seen(between) - between), 0.75f * unit) << between;
    }
  }
  EXPECT_EQ(seen(0.0f), 0.0f);
  EXPECT_EQ(seen(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(seen(kNan)));
  EXPECT_EQ(fused_multiply_add(1.0f + 0x1p-12f, 1.0f - 0x1p-12f, -1.0f), -0x1p-24f);
}

TEST(EmulatedShared, KeepsWhatIsStored) {
  run(32, 1, [](SharedAddress base) {
    const auto mine = base + 64u * static_cast<unsigned>(thread_index());
    store_u32x4(mine, {1, 2, 3, 0x40000000u});
    store_f32x2(mine + 16, 5.0f, 6.0f);
    store_f32(mine + 24, 7.0f);
    store_u32(mine + 28, 0x41000000u);
    EXPECT_EQ(load_u32x4(mine).z, 3u);
    EXPECT_EQ(load_f32(mine + 12), 2.0f);
    EXPECT_EQ(load_f32x4(mine + 16).y, 6.0f);
    EXPECT_EQ(load_f32x4(mine + 16).w, 8.0f);
    EXPECT_EQ(load_f32x2(mine + 24).x, 7.0f);
    EXPECT_EQ(load_u32(mine + 20), bits(6.0f));
    EXPECT_EQ(shared_address(generic(mine + 20)), mine + 20);
  });
}

TEST(EmulatedShared, ReportsBadAccesses) {
  EXPECT_ERROR(
      "block 0, thread 37 (warp 1, lane 5): load_f32: shared address 0x420 (base + 32) has not "
      "been written",
      64, 0, [](SharedAddress base) {
        if (thread_index() == 0) store_f32(base, 1.0f);
        if (thread_index() == 37) load_f32(base + 32);
      });
  EXPECT_ERROR("has not been written", 32, 0, [](SharedAddress base) {
    store_f32x2(base, 0, 0);
    load_u32x4(base);  // its second half
  });
  EXPECT_ERROR("not a multiple of 16", 32, 0,
               [](SharedAddress base) { store_u32x4(base + 8, {0, 0, 0, 0}); });
  EXPECT_ERROR("outside the block's", 32, 0,
               [](SharedAddress base) { store_f32(base + 64 * 1024, 0); });
  EXPECT_ERROR("outside the block's", 32, 0, [](SharedAddress base) { store_f32(base - 4, 0); });
  EXPECT_ERROR("is a barrier", 32, 0, [](SharedAddress base) {
    if (thread_index() == 0) barrier_init(base, 1);
    store_f32(base + 4, 0);
  });
}

TEST(EmulatedNamedBarriers, SeparateGroups) {
  for (const std::uint64_t seed : kSeeds) {
    run(256, seed, [](SharedAddress base) {
      const int group = thread_index() / 128, in_group = thread_index() % 128;
      const auto values = base + static_cast<unsigned>(1024 * group);
      for (int round = 0; round < 5; ++round) {
        store_u32(values + static_cast<unsigned>(4 * in_group),
                  static_cast<unsigned>(1000 * round + in_group));
        sync_named(1 + group, 128);
        const int other = (in_group + 77) % 128;
        EXPECT_EQ(load_u32(values + static_cast<unsigned>(4 * other)),
                  static_cast<unsigned>(1000 * round + other));
        sync_named(1 + group, 128);
      }
    });
  }
}

TEST(EmulatedNamedBarriers, ReportMisuse) {
  EXPECT_ERROR("expected 1 to 15, got 0", 32, 0, [](SharedAddress) { sync_named(0, 32); });
  EXPECT_ERROR("multiple of 32", 64, 0, [](SharedAddress) { sync_named(1, 48); });
  EXPECT_ERROR("while others wait there for 64", 64, 0,
               [](SharedAddress) { sync_named(1, thread_index() < 32 ? 64 : 32); });
  // Who waits for what.
  const std::string text = error_of(128, 2, [](SharedAddress base) {
    if (thread_index() == 0) barrier_init(base + 8, 2);
    sync_block();
    if (thread_index() < 64) sync_named(3, 96);
    if (thread_index() == 127) {
      barrier_arrive(base + 8);
      barrier_wait(base + 8, 0);
    }
  });
  EXPECT_TRUE(contains(text, "deadlock, 65 threads wait")) << text;
  EXPECT_TRUE(contains(text, "sync_named(3, 96): threads 0-63")) << text;
  EXPECT_TRUE(contains(text, "barrier_wait(0x408 = base + 8, parity 0): threads 127")) << text;
}

TEST(EmulatedNamedBarriers, ThreadsThatReturnedDoNotCount) {
  run(96, 4, [](SharedAddress) {
    if (thread_index() >= 64) return;
    sync_block();
  });
}

// The order in which threads get past a barrier is the seed's, and the same each time.
TEST(EmulatedGrid, SeedsGiveDifferentOrders) {
  const auto order = [](std::uint64_t seed) {
    std::vector<int> threads;
    run(64, seed, [&threads](SharedAddress) {
      sync_block();
      threads.push_back(thread_index());
    });
    return threads;
  };
  for (const std::uint64_t seed : kSeeds) {
    EXPECT_EQ(order(seed), order(seed));
    EXPECT_NE(order(seed), order(seed + 1));
  }
}

// A producer and two consumers on a ring of two slots.
TEST(EmulatedBarriers, PhasesOfARing) {
  for (const std::uint64_t seed : kSeeds) {
    run(96, seed, [](SharedAddress base) {
      const SharedAddress full = base + 512, empty = base + 528;
      const int warp = thread_index() / 32, lane = thread_index() % 32;
      if (thread_index() == 0) {
        for (unsigned slot = 0; slot < 2; ++slot) {
          barrier_init(full + 8 * slot, 32);
          barrier_init(empty + 8 * slot, 2);
        }
        fence_barrier_init();
      }
      sync_block();
      for (int n = 0; n < 20; ++n) {
        const auto slot = static_cast<unsigned>(n % 2);
        const SharedAddress at = base + 128 * slot + 4 * static_cast<unsigned>(lane);
        const int parity = n / 2 % 2;
        if (warp == 0) {
          barrier_wait(empty + 8 * slot, parity ^ 1);
          store_u32(at, static_cast<unsigned>(100 * n + lane));
          barrier_arrive(full + 8 * slot);
        } else {
          barrier_wait(full + 8 * slot, parity);
          EXPECT_EQ(load_u32(at), static_cast<unsigned>(100 * n + lane));
          sync_warp();
          if (lane == 0) barrier_arrive(empty + 8 * slot);
        }
      }
    });
  }
}

TEST(EmulatedBarriers, ReportMisuse) {
  const auto with_barrier = [](int arrivals, const std::function<void(SharedAddress)>& then) {
    return [=](SharedAddress base) {
      if (thread_index() == 0) {
        barrier_init(base, arrivals);
        fence_barrier_init();
      }
      sync_block();
      then(base);
    };
  };
  EXPECT_ERROR("is not a barrier", 32, 0, [](SharedAddress base) { barrier_arrive(base); });
  EXPECT_ERROR("is a barrier", 32, 0,
               with_barrier(1, [](SharedAddress base) { barrier_init(base, 1); }));
  EXPECT_ERROR("arrivals: expected", 32, 0, [](SharedAddress base) { barrier_init(base, 0); });
  EXPECT_ERROR("parity: expected 0 or 1, got 2", 32, 0,
               with_barrier(1, [](SharedAddress base) { barrier_wait(base, 2); }));
  // More arrivals than the phase has, while bytes are still to come.
  EXPECT_ERROR("already has the 2 arrivals", 32, 0, with_barrier(2, [](SharedAddress base) {
                 if (thread_index() == 0) barrier_arrive_expect(base, 128);
                 if (thread_index() == 1 || thread_index() == 2) barrier_arrive(base);
               }));
  EXPECT_ERROR("bytes: expected 0 to 1048575", 32, 0,
               with_barrier(1, [](SharedAddress base) { barrier_arrive_expect(base, 1 << 20); }));
  // A second phase passes a thread that waits for the first.
  EXPECT_ERROR("completes before thread", 64, 0, with_barrier(1, [](SharedAddress base) {
                 if (thread_index() < 32) return barrier_wait(base, 0);
                 if (thread_index() > 32) return;
                 barrier_arrive(base);
                 barrier_arrive(base);
               }));
  // An arrival too few.
  EXPECT_ERROR("deadlock", 64, 5, with_barrier(33, [](SharedAddress base) {
                 if (thread_index() < 32) barrier_arrive(base);
                 if (thread_index() >= 32) barrier_wait(base, 0);
               }));
}

}  // namespace
}  // namespace flash_kda::testing
