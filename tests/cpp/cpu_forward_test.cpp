// The CPU backend against the fp64 recurrence: every option, every size class, every instruction
// set.
#include <cmath>
#include <limits>

#include "cpu_check.h"

namespace flash_kda::testing {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(CpuForward, EveryGateBetaAndNorm) {
  std::uint64_t seed = 1;
  for (const GateKind gate : {GateKind::kLowerBound, GateKind::kSoftplus, GateKind::kLogDecay}) {
    for (const BetaKind beta :
         {BetaKind::kLogit, BetaKind::kDoubledLogit, BetaKind::kProbability}) {
      for (const bool l2norm : {true, false}) {
        CaseSpec spec;
        spec.lengths = {61, 9};
        spec.key_heads = 2;
        spec.value_heads = 4;
        spec.gate = gate;
        spec.beta = beta;
        spec.l2norm = l2norm;
        spec.gate_mean = gate == GateKind::kSoftplus ? -3 : 0;
        spec.seed = ++seed;
        SCOPED_TRACE(::testing::Message()
                     << "gate " << int(gate) << " beta " << int(beta) << " l2norm " << l2norm);
        expect_close(spec);
      }
    }
  }
}

TEST(CpuForward, EveryDtype) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const DType other : {dtype, DType::kFloat32, DType::kBFloat16}) {
      for (const DType initial : {DType::kBFloat16, DType::kFloat32}) {
        CaseSpec spec;
        spec.lengths = {43};
        spec.dtype = dtype;
        spec.gate_dtype = spec.beta_dtype = other;
        spec.initial = initial;
        spec.final = initial == DType::kFloat32 ? DType::kBFloat16 : DType::kFloat32;
        spec.index_dtype = initial == DType::kFloat32 ? DType::kInt32 : DType::kInt64;
        SCOPED_TRACE(name(dtype));
        expect_close(spec);
      }
    }
  }
}

TEST(CpuForward, EveryHeadSize) {
  const std::int64_t sizes[] = {1, 3, 17, 64, 100, 128, 200, 256};
  for (const std::int64_t keys : sizes) {
    for (const std::int64_t values : sizes) {
      CaseSpec spec;
      spec.lengths = {19, 8};
      spec.keys = keys;
      spec.values = values;
      spec.gap = keys % 7;
      SCOPED_TRACE(::testing::Message() << "K " << keys << " V " << values);
      spec.dtype = DType::kFloat32;
      expect_close(spec);
      // Over few elements the edge's rounding can come near its largest, 2^-8.
      spec.dtype = DType::kBFloat16;
      expect_close(spec, values < 16 ? 1.6 : 1.0);
    }
  }
}

TEST(CpuForward, EveryLength) {
  CaseSpec spec;
  spec.lengths.clear();
  for (std::int64_t length = 0; length <= 130; ++length) spec.lengths.push_back(length);
  spec.keys = 40;
  spec.values = 24;
  spec.padding = 5;
  expect_close(spec);
  spec.dtype = DType::kFloat32;
  expect_close(spec);
}

TEST(CpuForward, DenseBatchAndGroupedHeads) {
  CaseSpec spec;
  spec.lengths = {35, 35, 35};
  spec.packed = false;
  spec.key_heads = 3;
  spec.value_heads = 9;
  spec.keys = 32;
  spec.values = 48;
  expect_close(spec);
}

TEST(CpuForward, StridedRows) {
  CaseSpec spec;
  spec.lengths = {30, 11};
  spec.value_heads = 3;
  spec.gap = 5;
  spec.beta_pitch = 6288;
  expect_close(spec);
}

// The stride of a dimension of size 1 means nothing, whatever stands there.
TEST(CpuForward, StridesOfSizeOneDimensions) {
  CaseSpec spec;
  spec.lengths = {21};
  spec.packed = false;
  const std::int64_t odd = std::int64_t{1} << 60;
  expect_close(spec, [odd](Case& c) {
    for (TensorView* x : {&c.args.q, &c.args.k, &c.args.v, &c.args.g, &c.args.out, &c.args.beta}) {
      x->stride[0] = odd;
      x->stride[2] = odd;
    }
    for (TensorView* x : {&c.args.initial_state, &c.args.final_state})
      x->stride[0] = x->stride[1] = odd;
    c.args.A_log.stride[0] = odd;
    c.args.dt_bias.stride[0] = odd;
  });
}

TEST(CpuForward, WithoutOptionalArguments) {
  for (const GateKind gate : {GateKind::kLowerBound, GateKind::kSoftplus}) {
    CaseSpec spec;
    spec.gate = gate;
    spec.rate = spec.bias = false;
    spec.initial.reset();
    expect_close(spec);
    spec.final.reset();
    expect_close(spec);
    spec.scale = 0.37;
    spec.bias = true;
    expect_close(spec);
  }
}

// Shapes of A_log and dt_bias that the contract allows.
TEST(CpuForward, ShapesOfGateParameters) {
  CaseSpec spec;
  spec.value_heads = 6;
  spec.keys = 20;
  expect_close(spec, [](Case& c) {
    c.args.A_log = TensorView::dense(c.rate.view().data, DType::kFloat32, {1, 2, 1, 3});
    c.args.dt_bias = TensorView::dense(c.bias.view().data, DType::kFloat32, {120});
  });
}

TEST(CpuForward, PoolsWithNegativeIndices) {
  CaseSpec spec;
  spec.lengths = {20, 0, 33, 7};
  spec.value_heads = 2;
  spec.keys = 48;
  spec.values = 40;
  spec.gap = 3;
  spec.initial_slots = {5, -1, 2, -7};
  spec.final_slots = {0, 6, -1, 3};
  for (const DType index : {DType::kInt32, DType::kInt64}) {
    spec.index_dtype = index;
    expect_close(spec);
    // Slots that no sequence owns keep their bytes.
    Case c(spec);
    for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
      run(c, *kernels, 2);
      for (const std::int64_t slot : {1, 2, 4, 5}) {
        EXPECT_TRUE(std::isnan(c.final.get(slot, 1, 39, 47))) << slot;
      }
      for (std::int64_t k = 0; k < spec.keys; ++k) {  // sequence 1 is empty and starts from zero
        EXPECT_EQ(c.final.get(6, 0, k % spec.values, k), 0.0);
      }
    }
  }
}

TEST(CpuForward, Checkpoints) {
  CaseSpec spec;
  spec.lengths = {130, 64, 0, 200};
  spec.value_heads = 2;
  spec.keys = 33;
  spec.values = 65;
  spec.marks = {{3, 192, 4}, {0, 64, 7}, {0, 0, 1},   {1, 64, 0},
                {0, 128, 2}, {2, 0, 3},  {3, 64, -1}, {3, 0, 6}};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    spec.mark_dtype = dtype;
    expect_close(spec);
  }
  Case c(spec);
  run(c, *cpu::usable_kernels().front(), 2);
  EXPECT_TRUE(std::isnan(c.marks.get(5, 0, 0, 0))) << "a slot that was not asked for";
}

// Identical keys and strengths near 1: updates nearly cancel (T1).
TEST(CpuForward, IdenticalKeys) {
  CaseSpec spec;
  spec.lengths = {2048};
  spec.keys = spec.values = 128;
  spec.initial.reset();
  spec.rate = spec.bias = false;
  const auto change = [](Case& c) {
    for (std::int64_t t = 0; t < 2048; ++t) {
      for (std::int64_t k = 0; k < 128; ++k) {
        c.q.set(c.k.get(0, 0, 0, k), 0, t, 0, k);
        c.k.set(c.k.get(0, 0, 0, k), 0, t, 0, k);
        c.g.set(-12, 0, t, 0, k);
        c.v.set(c.v.get(0, t % 16, 0, k), 0, t, 0, k);
      }
      c.beta.set(8, 0, t, 0);
    }
  };
  // fp32's own share: 2e-5 of the state, against 3.6e-2 where updates are rounded to bf16.
  spec.dtype = DType::kFloat32;
  expect_close(spec, change, 10.0);
}

// Saturated, alternating and vanishing gates (T3, T5), per head.
TEST(CpuForward, ExtremeGates) {
  for (const double lower_bound : {-5.0, -1e-3, 0.0}) {
    CaseSpec spec;
    spec.lengths = {400};
    spec.value_heads = 5;
    spec.bias = spec.rate = false;
    spec.lower_bound = lower_bound;
    expect_close(
        spec,
        [](Case& c) {
          for (std::int64_t t = 0; t < 400; ++t) {
            for (std::int64_t k = 0; k < 64; ++k) {
              c.g.set(20, 0, t, 0, k);
              c.g.set(k % 2 == 0 ? 20 : -60, 0, t, 1, k);
              c.g.set(t / 16 % 2 == 0 ? 20 : -60, 0, t, 2, k);
              c.g.set(k % 3 == 0 ? kInf : -kInf, 0, t, 3, k);
            }
          }
        },
        lower_bound == 0.0 ? 2.0 : 1.0);
  }
}

// Log decays far below the range of fp32's exponential, and exactly minus infinity, with a large
// state.
TEST(CpuForward, DecayToExactlyZero) {
  CaseSpec spec;
  spec.lengths = {50};
  spec.gate = GateKind::kLogDecay;
  spec.gate_deviation = 60;
  expect_close(spec, [](Case& c) {
    for (std::int64_t t = 0; t < 50; ++t) {
      for (std::int64_t k = 0; k < 64; ++k) {
        if ((t + k) % 5 == 0) c.g.set(-kInf, 0, t, 0, k);
      }
    }
    for (std::int64_t i = 0; i < 64; ++i) {
      for (std::int64_t k = 0; k < 64; ++k)
        c.initial.set(1e30 * (static_cast<double>(i) - 31.5), 0, 0, i, k);
    }
    for (std::int64_t k = 0; k < 64; ++k) c.g.set(-kInf, 0, 0, 0, k);
  });
}

// exp(A_log) beyond fp32, arguments of exactly 0, strengths of exactly 0 and 1 (T6).
TEST(CpuForward, ExtremeRates) {
  for (const GateKind gate : {GateKind::kLowerBound, GateKind::kSoftplus}) {
    CaseSpec spec;
    spec.lengths = {300};
    spec.value_heads = 8;
    spec.gate = gate;
    spec.keys = spec.values = 32;
    expect_close(spec, [](Case& c) {
      const double rates[] = {-80, -30, 0, 10, 30, 80, 88, 100};
      const double biases[] = {-50, 0, 50};
      const double logits[] = {-kInf, -80, 0, 80, kInf};
      for (std::int64_t h = 0; h < 8; ++h) {
        c.rate.set(rates[h], h);
        for (std::int64_t k = 0; k < 32; ++k) c.bias.set(biases[(h + k) % 3], h, k);
        for (std::int64_t t = 0; t < 300; ++t) {
          c.beta.set(logits[(t + h) % 5], 0, t, h);
          for (std::int64_t k = 0; k < 32; ++k) {
            if ((t + k) % 4 == 0) c.g.set(-c.bias.get(h, k), 0, t, h, k);
          }
        }
      }
    });
  }
}

// A tiny softplus times a huge rate is a moderate decay (R13), also where exp of the argument
// underflows fp32.
TEST(CpuForward, SoftplusTail) {
  const double arguments[][2] = {{-18, 8},  {-16.9, 8}, {-17.1, 8}, {-30, 20},
                                 {-90, 80}, {-100, 88}, {-105, 100}};
  for (const auto& [x, rate] : arguments) {
    SCOPED_TRACE(::testing::Message() << "argument " << x << " A_log " << rate);
    CaseSpec spec;
    spec.lengths = {600};
    spec.keys = spec.values = 32;
    spec.gate = GateKind::kSoftplus;
    spec.gate_dtype = DType::kFloat32;
    spec.gate_mean = x;
    spec.gate_deviation = 1.0;
    spec.bias = false;
    // The argument's own fp32 rounding, up to 4e-6 of the decay's logarithm, is inherent.
    expect_close(spec, [rate = rate](Case& c) { c.rate.set(rate, 0); }, 10.0);
  }
}

// Decay that bf16 would round to 1 (R14): after 4096 tokens of 0.99992 the first state counts for
// 0.72.
TEST(CpuForward, SlowDecay) {
  CaseSpec spec;
  spec.lengths = {4096};
  spec.keys = spec.values = 24;
  spec.gate = GateKind::kLogDecay;
  spec.gate_dtype = DType::kFloat32;
  expect_close(
      spec,
      [](Case& c) {
        c.g.fill(std::log(0.99992));
        c.beta.generate([value = 0]() mutable { return value++ % 64 == 0 ? 0.0 : -90.0; });
      },
      10.0);
}

// The epsilon stands on the sum of squares (R17), zero rows give zeros (R18).
TEST(CpuForward, TinyAndZeroRows) {
  CaseSpec spec;
  spec.lengths = {128};
  spec.value_heads = 2;
  spec.key_heads = 2;
  const auto change = [](Case& c) {
    for (std::int64_t t = 0; t < 128; ++t) {
      for (std::int64_t k = 0; k < 64; ++k) {
        c.q.set(1e-4 * c.q.get(0, t, 0, k), 0, t, 0, k);
        c.k.set(1e-4 * c.k.get(0, t, 0, k), 0, t, 0, k);
        if (t % 5 == 0) c.k.set(0, 0, t, 1, k);
        if (t % 7 == 0) c.q.set(0, 0, t, 1, k);
      }
    }
  };
  expect_close(spec, change);
  Case c(spec);
  change(c);
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    run(c, *kernels, 1);
    for (std::int64_t t = 0; t < 128; t += 7)
      EXPECT_EQ(c.out.get(0, t, 1, 13), 0.0) << kernels->name;
  }
}

}  // namespace
}  // namespace flash_kda::testing
