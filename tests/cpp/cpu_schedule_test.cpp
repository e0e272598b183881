// Threads, shares of work, choice of the instruction set.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cpu/backend.h"
#include "cpu/dispatch.h"
#include "cpu/schedule.h"
#include "flash_kda/error.h"

namespace flash_kda::cpu {
namespace {

TEST(CpuSchedule, EveryItemOnce) {
  for (const int threads : {1, 2, 7, 64}) {
    for (const std::int64_t items : {0, 1, 5, 1000}) {
      std::vector<std::atomic<int>> calls(static_cast<std::size_t>(items));
      std::mutex mutex;
      std::set<int> workers;
      parallel_for(items, threads, [&](std::int64_t item, int worker) {
        calls[static_cast<std::size_t>(item)]++;
        const std::lock_guard lock(mutex);
        workers.insert(worker);
      });
      for (const auto& n : calls) EXPECT_EQ(n, 1);
      for (const int worker : workers) EXPECT_LT(worker, threads);
    }
  }
}

TEST(CpuSchedule, SplitsColumnsOnlyWhenItemsAreFew) {
  const std::vector<std::int64_t> one = {1000};
  const auto parts = [&](std::int64_t heads, int panels, int threads) {
    return share(one, heads, panels, 4, threads).parts;
  };
  EXPECT_EQ(parts(1, 8, 1), 1);  // one thread
  EXPECT_EQ(parts(1, 1, 8), 1);  // one panel
  EXPECT_EQ(parts(1, 8, 8), 8);  // a panel for each thread
  EXPECT_EQ(parts(1, 8, 2), 2);
  EXPECT_EQ(parts(2, 8, 2), 1);   // a head for each thread
  EXPECT_EQ(parts(96, 8, 8), 1);  // items enough
  EXPECT_EQ(parts(3, 8, 2), 2);   // 3 halves each beat 2 and 1 whole ones
  EXPECT_EQ(share({}, 4, 8, 4, 8).parts, 1);
}

// A sequence that outlasts all others together is split, although there are many items.
TEST(CpuSchedule, SplitsForOneLongSequence) {
  std::vector<std::int64_t> lengths(1000, 10);
  lengths[0] = 100000;
  const Shares shares = share(lengths, 1, 8, 4, 4);
  EXPECT_GT(shares.parts, 1);
  EXPECT_EQ(shares.heads, 1);
}

TEST(CpuSchedule, HeadsGoTogetherWhenItemsAreMany) {
  const std::vector<std::int64_t> mixed = {3063, 2048, 1300, 963, 547, 271};
  EXPECT_EQ(share(mixed, 96, 4, 4, 1).heads, 4);
  EXPECT_EQ(share(mixed, 96, 4, 4, 2).heads, 4);
  EXPECT_EQ(share(mixed, 96, 4, 4, 64).heads, 1);
  EXPECT_EQ(share(mixed, 3, 4, 4, 1).heads, 3);
  EXPECT_EQ(share(std::vector<std::int64_t>(500, 0), 12, 4, 4, 2).heads, 4);
}

TEST(CpuDispatch, GenericIsAlwaysThere) {
  const std::vector<const Kernels*> usable = usable_kernels();
  ASSERT_FALSE(usable.empty());
  EXPECT_STREQ(usable.back()->name, "generic");
  for (const Kernels* kernels : usable) EXPECT_EQ(find_kernels(kernels->name), kernels);
  EXPECT_EQ(find_kernels("sse9"), nullptr);
  EXPECT_GE(max_threads(), 1);
}

// The variable is read once a process: each value in a process of its own.
TEST(CpuDispatchDeathTest, TheVariableForces) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const Kernels* kernels : usable_kernels()) {
    EXPECT_EXIT(
        {
          setenv(kIsaVariable, kernels->name, 1);
          std::exit(&chosen_kernels() == kernels && std::string(instruction_set()) == kernels->name
                        ? 0
                        : 1);
        },
        ::testing::ExitedWithCode(0), "");
  }
  EXPECT_EXIT(
      {
        setenv(kIsaVariable, "sse9", 1);
        try {
          chosen_kernels();
        } catch (const ValueError& error) {
          const std::string text = error.what();
          const bool good = text.find(kIsaVariable) != std::string::npos &&
                            text.find("generic") != std::string::npos &&
                            text.find("'sse9'") != std::string::npos;
          std::exit(good ? 0 : 1);
        }
        std::exit(2);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace flash_kda::cpu
