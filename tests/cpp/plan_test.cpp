// plan_forward: what it decides, that it depends on nothing but shapes, dtypes, devices and
// options, and its text.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "flash_kda/flash_kda.h"
#include "valid_call.h"

namespace flash_kda::testing {
namespace {

TEST(Plan, HoldsTheSizes) {
  const Case c(valid_spec());
  const ForwardPlan plan = plan_forward(c.args);
  EXPECT_EQ(plan.backend, Backend::kCpu);
  EXPECT_EQ(plan.batch, 1);
  EXPECT_EQ(plan.tokens, 203);
  EXPECT_EQ(plan.sequences, 3);
  EXPECT_EQ(plan.key_heads, 2);
  EXPECT_EQ(plan.value_heads, 4);
  EXPECT_EQ(plan.key_dim, 16);
  EXPECT_EQ(plan.value_dim, 8);
  EXPECT_TRUE(plan.varlen);
  EXPECT_EQ(plan.workspace_bytes, 0U);
  EXPECT_GE(plan.threads, 1);
}

TEST(Plan, DescribesItself) {
  const Case c(valid_spec());
  PlanOptions options;
  options.threads = 3;
  const std::string text = plan_forward(c.args, options).describe();
  EXPECT_NE(text.find("flash_kda forward on cpu\n"), std::string::npos) << text;
  EXPECT_NE(text.find("B = 1, T = 203, N = 3 (packed), H = 2, HV = 4, K = 16, V = 8\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("threads: 3\n"), std::string::npos) << text;
  EXPECT_NE(text.find("workspace: 0 bytes\n"), std::string::npos) << text;
  EXPECT_NE(text.find("reason: q is in host memory"), std::string::npos) << text;
}

TEST(Plan, DescribesABatch) {
  CaseSpec spec;
  spec.packed = false;
  spec.lengths = {5, 5};
  const Case c(spec);
  EXPECT_NE(plan_forward(c.args).describe().find("B = 2, T = 5, N = 2, H = 1"), std::string::npos);
}

// The same plan whatever the data, the strides and the array contents.
TEST(Plan, IsPure) {
  CaseSpec spec = valid_spec();
  const Case a(spec);
  spec.seed = 99;
  spec.gap = 7;
  spec.lengths = {1, 100, 99};
  spec.marks = {};
  spec.final_slots = {5, -1, 2};
  const Case b(spec);
  EXPECT_EQ(plan_forward(a.args).describe(), plan_forward(b.args).describe());
}

TEST(Plan, RefusesWrongOptions) {
  const Case c(valid_spec());
  const auto message = [&](const PlanOptions& options) -> std::string {
    try {
      plan_forward(c.args, options);
    } catch (const ValueError& error) {
      return error.what();
    }
    return "no exception";
  };
  PlanOptions threads, split;
  threads.threads = -1;
  split.value_split = -2;
  EXPECT_EQ(message(threads), "threads: expected 0 or more, got -1");
  EXPECT_EQ(message(split), "value_split: expected 0 or more, got -2");
}

// In a build or on a machine without a GPU: the argument, the device and the reason.
TEST(Plan, NamesWhatIsNotServed) {
  Case c(valid_spec());
  for (const BackendInfo& backend : backends()) {
    if (backend.name == "cuda-sm90" && backend.available) GTEST_SKIP() << "this machine has a GPU";
  }
  ForwardArgs& a = c.args;
  for (TensorView* x : {&a.q, &a.k, &a.v, &a.g, &a.beta, &a.out, &a.A_log, &a.dt_bias,
                        &a.initial_state, &a.final_state, &a.initial_state_indices,
                        &a.final_state_indices, &a.cu_seqlens, &a.checkpoint_states,
                        &a.checkpoint_sequences, &a.checkpoint_positions, &a.checkpoint_slots}) {
    x->device = {DeviceType::kCuda, 0};
  }
  try {
    plan_forward(a);
    FAIL() << "no exception";
  } catch (const NotImplementedError& error) {
    EXPECT_NE(std::string(error.what()).find("cuda"), std::string::npos) << error.what();
  }
  Case good(valid_spec());
  expect_good(good, good.args);
}

TEST(Version, MatchesTheHeader) {
  const std::string want = std::to_string(FLASH_KDA_VERSION_MAJOR) + "." +
                           std::to_string(FLASH_KDA_VERSION_MINOR) + "." +
                           std::to_string(FLASH_KDA_VERSION_PATCH);
  EXPECT_EQ(version(), want);
  EXPECT_EQ(want, FLASH_KDA_CMAKE_VERSION);
}

TEST(Version, ListsEveryBackend) {
  const std::vector<BackendInfo> all = backends();
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(all[0].name, "cpu");
  EXPECT_TRUE(all[0].available);
  EXPECT_NE(all[0].detail.find("thread"), std::string::npos) << all[0].detail;
  EXPECT_EQ(all[1].name, "cuda-sm90");
  EXPECT_FALSE(all[1].detail.empty());
}

}  // namespace
}  // namespace flash_kda::testing
