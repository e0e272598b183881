// forward(): numbers done by hand, the fit of plan and workspace, calls with nothing to do.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "flash_kda/flash_kda.h"
#include "recurrence.h"
#include "valid_call.h"

namespace flash_kda::testing {
namespace {

std::string message_of(const ForwardArgs& args, const ForwardPlan& plan, void* workspace) {
  try {
    forward(args, plan, workspace, nullptr);
  } catch (const ValueError& error) {
    return error.what();
  }
  return "no exception";
}

// One step, K = 2, V = 1, every number exact in fp32:
//   S = [8, 4], decay exp(ln 1/2) and exp(0), k = [1, 1], v = 3, beta = 1/2, q = [1, 2], scale = 1.
//   Decay first:        S = [4, 4]     (only its first channel halves)
//   error against that: u = 1/2 * (3 - (4 + 4)) = -2.5
//   update:             S = [1.5, 1.5]
//   read:               o = 1.5 + 2 * 1.5 = 4.5
// With the error taken before the decay u would be 1/2 * (3 - 12) = -4.5, and o would be -1.5.
TEST(Forward, DecayComesFirst) {
  Array q(DType::kFloat32, {1, 1, 1, 2}), k(DType::kFloat32, {1, 1, 1, 2}),
      g(DType::kFloat32, {1, 1, 1, 2});
  Array v(DType::kFloat32, {1, 1, 1, 1}), out(DType::kFloat32, {1, 1, 1, 1}),
      beta(DType::kFloat32, {1, 1, 1});
  Array state(DType::kFloat32, {1, 1, 1, 2}), final(DType::kFloat32, {1, 1, 1, 2});
  q.set(1, 0, 0, 0, 0);
  q.set(2, 0, 0, 0, 1);
  k.fill(1);
  v.fill(3);
  beta.fill(0.5);
  g.set(std::log(0.5), 0, 0, 0, 0);
  g.set(0, 0, 0, 0, 1);
  state.set(8, 0, 0, 0, 0);
  state.set(4, 0, 0, 0, 1);
  ForwardArgs args;
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
  args.g = g.view();
  args.beta = beta.view();
  args.out = out.view();
  args.initial_state = state.view();
  args.final_state = final.view();
  args.gate = GateKind::kLogDecay;
  args.beta_kind = BetaKind::kProbability;
  args.l2norm = false;
  args.scale = 1.0;
  forward(args, plan_forward(args), nullptr, nullptr);
  EXPECT_NEAR(out.get(0, 0, 0, 0), 4.5, 1e-5);
  EXPECT_NEAR(final.get(0, 0, 0, 0), 1.5, 1e-6);
  EXPECT_NEAR(final.get(0, 0, 0, 1), 1.5, 1e-6);
  EXPECT_EQ(state.get(0, 0, 0, 0), 8);
}

// The library's formulas of gate, beta and norm at points where they are known: K = V = 1, two
// tokens.
//   Token 0 writes v = 2 under beta = sigmoid(0) = 1/2, k = 3 / sqrt(9 + 1e-6): S = 1 * k.
//   Token 1 has v = 0, beta = sigmoid(-inf) = 0: it only decays, by exp(-4 * sigmoid(2 * (0.25 +
//   0.25))).
TEST(Forward, GateBetaAndNorm) {
  Array q(DType::kFloat32, {1, 2, 1, 1}), k(DType::kFloat32, {1, 2, 1, 1}),
      g(DType::kFloat32, {1, 2, 1, 1});
  Array v(DType::kFloat32, {1, 2, 1, 1}), out(DType::kFloat32, {1, 2, 1, 1}),
      beta(DType::kFloat32, {1, 2, 1});
  Array rate(DType::kFloat32, {1}), bias(DType::kFloat32, {1, 1});
  q.fill(-5);
  k.fill(3);
  g.fill(0.25);
  bias.fill(0.25);
  rate.fill(std::log(2.0));
  v.set(2, 0, 0, 0, 0);
  v.set(0, 0, 1, 0, 0);
  beta.set(0, 0, 0, 0);
  beta.set(-INFINITY, 0, 1, 0);
  ForwardArgs args;
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
  args.g = g.view();
  args.beta = beta.view();
  args.out = out.view();
  args.A_log = rate.view();
  args.dt_bias = bias.view();
  args.lower_bound = -4.0;
  forward(args, plan_forward(args), nullptr, nullptr);
  const double decay = std::exp(-4.0 / (1.0 + std::exp(-1.0)));
  EXPECT_NEAR(out.get(0, 0, 0, 0), -1.0, 1e-6);
  EXPECT_NEAR(out.get(0, 1, 0, 0), -decay, 1e-6);
}

TEST(Forward, UsesEachHeadsOwnKeyHead) {
  CaseSpec spec;
  spec.lengths = {9};
  spec.key_heads = 3;
  spec.value_heads = 6;
  Case c(spec);
  expect_good(c, c.args);
  // Key head 1 serves value heads 2 and 3: a change there changes these alone.
  const std::vector<double> before = c.out.values();
  c.k.set(7.0, 0, 2, 1, 5);
  forward(c.args, plan_forward(c.args), nullptr, nullptr);
  for (std::int64_t hv = 0; hv < 6; ++hv) {
    const double old = before[static_cast<std::size_t>(((2 * 6) + hv) * 64)];
    EXPECT_EQ(c.out.get(0, 2, hv, 0) != old, hv == 2 || hv == 3) << hv;
  }
}

TEST(Forward, PlanIsUsedAgainForOtherContents) {
  CaseSpec spec = valid_spec();
  const ForwardPlan plan = plan_forward(Case(spec).args);
  spec.lengths = {1, 0, 199};
  spec.marks = {};
  spec.seed = 5;
  Case other(spec);
  forward(other.args, plan, nullptr, nullptr);
  for (const HeadError& e : head_errors(other.args, recurrence(other.args)))
    EXPECT_LE(e.out, 2.5e-3);
}

TEST(Forward, RefusesAPlanThatDoesNotFit) {
  Case c(valid_spec());
  CaseSpec longer = valid_spec();
  longer.lengths = {70, 0, 131};
  const ForwardPlan other = plan_forward(Case(longer).args);
  const std::string text = message_of(c.args, other, nullptr);
  EXPECT_EQ(text.rfind("plan: expected a plan for these arguments", 0), 0U) << text;
  EXPECT_NE(text.find("T = 204"), std::string::npos) << text;

  ForwardPlan cuda = plan_forward(c.args);
  cuda.backend = Backend::kCudaSm90;
  EXPECT_EQ(message_of(c.args, cuda, nullptr).rfind("plan: ", 0), 0U);
  EXPECT_EQ(message_of(c.args, ForwardPlan{}, nullptr).rfind("plan: ", 0), 0U);
  expect_good(c, c.args);
}

TEST(Forward, ChecksTheWorkspace) {
  Case c(valid_spec());
  ForwardPlan plan = plan_forward(c.args);
  plan.workspace_bytes = 512;  // the CPU needs none; the rule is the same for every backend
  alignas(256) std::array<std::byte, 1024> workspace{};
  EXPECT_EQ(message_of(c.args, plan, nullptr),
            "workspace: expected 512 bytes aligned to 256, got null");
  EXPECT_EQ(message_of(c.args, plan, workspace.data() + 64),
            "workspace: expected 512 bytes aligned to 256, got an address that is not aligned");
  EXPECT_EQ(message_of(c.args, plan, workspace.data()), "no exception");
}

TEST(Forward, NoSequence) {
  Case c(valid_spec());
  c.args.cu_seqlens.shape[0] = 1;
  c.args.initial_state_indices.shape[0] = c.args.final_state_indices.shape[0] = 0;
  c.args.checkpoint_states = c.args.checkpoint_sequences = c.args.checkpoint_positions =
      c.args.checkpoint_slots = {};
  c.poison();
  const std::vector<std::byte> out = c.out.bytes(), final = c.final.bytes();
  const ForwardPlan plan = plan_forward(c.args);
  EXPECT_EQ(plan.sequences, 0);
  forward(c.args, plan, nullptr, nullptr);
  EXPECT_EQ(c.out.bytes(), out);
  EXPECT_EQ(c.final.bytes(), final);
}

TEST(Forward, NoBatch) {
  ForwardArgs args;
  args.q = args.k = args.g = TensorView::dense(nullptr, DType::kBFloat16, {0, 7, 2, 8});
  args.v = args.out = TensorView::dense(nullptr, DType::kBFloat16, {0, 7, 2, 4});
  args.beta = TensorView::dense(nullptr, DType::kBFloat16, {0, 7, 2});
  args.initial_state = args.final_state = TensorView::dense(nullptr, DType::kFloat32, {0, 2, 4, 8});
  EXPECT_NO_THROW(forward(args, plan_forward(args), nullptr, nullptr));
}

// No token at all: the final state is the initial one, bit for bit, NaN payloads and all, or zeros.
TEST(Forward, NoToken) {
  CaseSpec spec;
  spec.lengths = {0, 0, 0, 0};
  spec.key_heads = spec.value_heads = 2;
  Case c(spec);
  c.initial.set(NAN, 1, 1, 2, 3);
  c.initial.set(-0.0, 1, 1, 2, 4);
  c.poison();
  forward(c.args, plan_forward(c.args), nullptr, nullptr);
  EXPECT_EQ(c.final.bytes(), c.initial.bytes());
  c.args.initial_state = {};
  c.poison();
  forward(c.args, plan_forward(c.args), nullptr, nullptr);
  const std::vector<std::byte> bytes = c.final.bytes();
  EXPECT_TRUE(
      std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; }));
}

}  // namespace
}  // namespace flash_kda::testing
