// Inputs on which every step is exactly representable: the result must equal the recurrence bit for
// bit, on every instruction set. No norm, signed one-hot keys and queries, small integers,
// strengths 0, 1/2, 1, decays 0 and 1.
#include <cmath>
#include <limits>

#include "cpu_check.h"

namespace flash_kda::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Exact {
  GateKind gate = GateKind::kLowerBound;
  BetaKind beta = BetaKind::kLogit;
  DType state = DType::kFloat32;
  std::int64_t keys = 128, values = 128;
};

void make_exact(Case& c, const Exact& exact) {
  Random random(c.spec.seed);
  const auto pick = [&random](std::int64_t n) {
    return static_cast<std::int64_t>(random.uniform() * static_cast<double>(n));
  };
  const auto one_hot = [&](Array& x) {
    x.fill(0);
    for (std::int64_t t = 0; t < x.view().shape[1]; ++t) {
      for (std::int64_t h = 0; h < x.view().shape[2]; ++h) {
        // Few channels, so that keys repeat within a chunk.
        x.set(pick(2) == 0 ? 1 : -1, 0, t, h, pick(std::min<std::int64_t>(exact.keys, 5)));
      }
    }
  };
  one_hot(c.q);
  one_hot(c.k);
  c.v.generate([&] { return static_cast<double>(8 * (pick(9) - 4)); });
  c.initial.generate([&] { return static_cast<double>(8 * (pick(5) - 2)); });
  // At most one strength of 1/2 in 16 tokens, so that no value runs out of bits.
  std::int64_t count = 0;
  c.beta.generate([&] {
    if (++count % 16 == 0) return exact.beta == BetaKind::kProbability ? 0.5 : 0.0;
    const bool one = pick(2) == 0;
    if (exact.beta == BetaKind::kProbability) return one ? 1.0 : 0.0;
    return one ? kInf : -kInf;
  });
  switch (exact.gate) {
    case GateKind::kLowerBound:
      c.g.fill(-kInf);  // decay exactly 1
      break;
    case GateKind::kSoftplus:
    case GateKind::kLogDecay: {
      const double keep = exact.gate == GateKind::kSoftplus ? -kInf : 0.0;
      c.g.generate([&] { return pick(12) == 0 ? -keep - (keep == 0.0 ? kInf : 0.0) : keep; });
      break;
    }
  }
}

TEST(CpuExact, EqualsTheRecurrenceBitForBit) {
  std::uint64_t seed = 10;
  int cases = 0;
  for (const GateKind gate : {GateKind::kLowerBound, GateKind::kSoftplus, GateKind::kLogDecay}) {
    for (const BetaKind beta :
         {BetaKind::kLogit, BetaKind::kDoubledLogit, BetaKind::kProbability}) {
      for (const std::int64_t size : {16, 100, 128, 256}) {
        Exact exact{gate, beta, DType::kFloat32, size, size};
        CaseSpec spec;
        spec.lengths = {63, 1, 0, 17, 64};
        spec.value_heads = 2;
        spec.keys = spec.values = size;
        spec.dtype = spec.gate_dtype = spec.beta_dtype = DType::kFloat32;
        spec.gate = gate;
        spec.beta = beta;
        spec.l2norm = false;
        spec.scale = 0.25;
        spec.bias = false;
        spec.marks = {{4, 64, 0}};
        spec.seed = ++seed;
        Case c(spec);
        make_exact(c, exact);
        const RecurrenceResult want = recurrence(c.args);
        for (const double x : want.out) ASSERT_TRUE(std::isfinite(x));
        for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
          run(c, *kernels, 2);
          EXPECT_EQ(c.out.values(), want.out) << kernels->name << " " << seed;
          EXPECT_EQ(c.final.values(), want.final_state) << kernels->name << " " << seed;
          ++cases;
        }
      }
    }
  }
  RecordProperty("cases", cases);
}

// The strength is exactly 1/2 at logit 0, the gate exactly lower_bound / 2 at argument 0, whatever
// A_log.
TEST(CpuExact, MiddleOfTheSigmoids) {
  for (const double rate : {-90.0, 0.0, 88.0, 89.0, 100.0, 3000.0}) {
    CaseSpec spec;
    spec.lengths = {1};
    spec.keys = spec.values = 1;
    spec.l2norm = false;
    spec.bias = false;
    spec.dtype = DType::kFloat32;
    spec.scale = 1.0;
    spec.lower_bound = -2.0;
    Case c(spec);
    c.rate.set(rate, 0);
    c.g.fill(0);
    c.beta.fill(0);
    c.initial.fill(4);
    c.k.fill(1);
    c.q.fill(1);
    c.v.fill(0);
    for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
      run(c, *kernels, 1);
      const double decayed = 4 * std::exp(-1.0);
      EXPECT_NEAR(c.out.get(0, 0, 0, 0), decayed - 0.5 * decayed, 2e-7)
          << kernels->name << " " << rate;
    }
  }
}

}  // namespace
}  // namespace flash_kda::testing
