// Bit for bit: any number of threads, any neighbours, any batch; NaN stays where it is.
#include <cstring>
#include <limits>

#include "cpu_check.h"

namespace flash_kda::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

CaseSpec mixed() {
  CaseSpec spec;
  spec.lengths = {75, 0, 1, 130, 33, 64};
  spec.key_heads = 2;
  spec.value_heads = 4;
  spec.keys = 72;
  spec.values = 150;
  spec.marks = {{3, 64, 0}, {3, 128, 1}, {5, 64, 2}};
  return spec;
}

// Row t of head h of out, as bytes.
std::vector<std::byte> out_rows(const Case& c, std::int64_t begin, std::int64_t end,
                                std::int64_t head) {
  std::vector<std::byte> bytes;
  const TensorView& out = c.args.out;
  const auto size = static_cast<std::size_t>(out.shape[3] * size_of(out.dtype));
  for (std::int64_t t = begin; t < end; ++t) {
    const auto* row = static_cast<const std::byte*>(out.data) +
                      offset_of(out, 0, t, head, 0) * size_of(out.dtype);
    bytes.insert(bytes.end(), row, row + size);
  }
  return bytes;
}

std::vector<double> state_of(const Case& c, std::int64_t slot, std::int64_t head) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < c.spec.values; ++i) {
    for (std::int64_t k = 0; k < c.spec.keys; ++k) values.push_back(c.final.get(slot, head, i, k));
  }
  return values;
}

TEST(CpuIsolation, AnyNumberOfThreads) {
  std::vector<CaseSpec> specs(3, mixed());
  specs[1].lengths = {90};  // fewer items than threads: heads are split by columns
  specs[1].marks = {{0, 64, 0}};
  specs[1].key_heads = specs[1].value_heads = 1;
  specs[1].values = 256;
  specs[2].lengths = {300, 2};
  specs[2].marks = {};
  specs[2].key_heads = specs[2].value_heads = 1;
  specs[2].keys = 256;
  specs[2].values = 131;
  for (const CaseSpec& spec : specs) {
    Case c(spec);
    for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
      SCOPED_TRACE(kernels->name);
      const Written one = run(c, *kernels, 1);
      for (const int threads : {2, 3, 7, 64}) EXPECT_EQ(run(c, *kernels, threads), one) << threads;
    }
  }
}

TEST(CpuIsolation, TheFirstCallIsTheThousandth) {
  Case c(mixed());
  const cpu::Kernels& kernels = *cpu::usable_kernels().front();
  const Written first = run(c, kernels, 2);
  for (int i = 0; i < 20; ++i) ASSERT_EQ(run(c, kernels, 2), first) << i;
}

// Each sequence alone gives the bits that it gives in the pack.
TEST(CpuIsolation, BatchComposition) {
  const CaseSpec spec = mixed();
  Case pack(spec);
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    run(pack, *kernels, 2);
    std::int64_t begin = 0;
    for (std::size_t n = 0; n < spec.lengths.size(); ++n) {
      CaseSpec single = spec;
      single.lengths = {spec.lengths[n]};
      single.marks.clear();
      Case c(single);
      const auto s = static_cast<std::int64_t>(n);
      for (std::int64_t h = 0; h < spec.value_heads; ++h) {
        c.rate.set(pack.rate.get(h), h);
        for (std::int64_t k = 0; k < spec.keys; ++k) c.bias.set(pack.bias.get(h, k), h, k);
        for (std::int64_t i = 0; i < spec.values; ++i) {
          for (std::int64_t k = 0; k < spec.keys; ++k) {
            c.initial.set(pack.initial.get(s, h, i, k), 0, h, i, k);
          }
        }
        for (std::int64_t t = 0; t < spec.lengths[n]; ++t) {
          c.beta.set(pack.beta.get(0, begin + t, h), 0, t, h);
          for (std::int64_t i = 0; i < spec.values; ++i)
            c.v.set(pack.v.get(0, begin + t, h, i), 0, t, h, i);
          for (std::int64_t k = 0; k < spec.keys; ++k) {
            c.g.set(pack.g.get(0, begin + t, h, k), 0, t, h, k);
            if (h >= spec.key_heads) continue;
            c.q.set(pack.q.get(0, begin + t, h, k), 0, t, h, k);
            c.k.set(pack.k.get(0, begin + t, h, k), 0, t, h, k);
          }
        }
      }
      run(c, *kernels, 1);
      for (std::int64_t h = 0; h < spec.value_heads; ++h) {
        EXPECT_EQ(out_rows(c, 0, spec.lengths[n], h),
                  out_rows(pack, begin, begin + spec.lengths[n], h));
        EXPECT_EQ(state_of(c, 0, h), state_of(pack, s, h));
      }
      begin += spec.lengths[n];
    }
  }
}

// Calls check(name of the poison, is (sequence, head) its victim) after each kind of poison.
struct Poison {
  const char* name;
  void (*put)(Case&);
  bool (*hits)(std::int64_t sequence, std::int64_t head);
};

TEST(CpuIsolation, NanStaysInItsHead) {
  const CaseSpec spec = mixed();
  constexpr std::int64_t kToken = 100;  // of sequence 3, which begins at 76
  const Poison poisons[] = {
      {"v", [](Case& c) { c.v.set(kNan, 0, kToken, 1, 5); },
       [](std::int64_t n, std::int64_t h) { return n == 3 && h == 1; }},
      {"g", [](Case& c) { c.g.set(kNan, 0, kToken, 2, 7); },
       [](std::int64_t n, std::int64_t h) { return n == 3 && h == 2; }},
      {"beta", [](Case& c) { c.beta.set(kNan, 0, kToken, 3); },
       [](std::int64_t n, std::int64_t h) { return n == 3 && h == 3; }},
      {"k", [](Case& c) { c.k.set(kNan, 0, kToken, 1, 0); },
       [](std::int64_t n, std::int64_t h) { return n == 3 && h >= 2; }},
      {"infinite q",
       [](Case& c) { c.q.set(std::numeric_limits<double>::infinity(), 0, kToken, 0, 3); },
       [](std::int64_t n, std::int64_t h) { return n == 3 && h < 2; }},
      {"initial_state", [](Case& c) { c.initial.set(kNan, 0, 2, 9, 9); },
       [](std::int64_t n, std::int64_t h) { return n == 0 && h == 2; }},
      {"dt_bias", [](Case& c) { c.bias.set(kNan, 1, 70); },
       [](std::int64_t /*n*/, std::int64_t h) { return h == 1; }},
      {"A_log", [](Case& c) { c.rate.set(kNan, 3); },
       [](std::int64_t /*n*/, std::int64_t h) { return h == 3; }},
  };
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    Case clean(spec);
    run(clean, *kernels, 2);
    for (const Poison& poison : poisons) {
      SCOPED_TRACE(::testing::Message() << kernels->name << ", NaN in " << poison.name);
      Case c(spec);
      poison.put(c);
      run(c, *kernels, 2);
      std::int64_t begin = 0;
      bool reached = false;
      for (std::int64_t n = 0; n < 6; ++n) {
        const std::int64_t end = begin + spec.lengths[static_cast<std::size_t>(n)];
        for (std::int64_t h = 0; h < 4; ++h) {
          if (poison.hits(n, h)) {
            reached = reached || out_rows(c, begin, end, h) != out_rows(clean, begin, end, h);
            // What came before the poison in its own sequence is not touched either.
            if (n == 3 && poison.hits(3, h) && !poison.hits(0, h)) {
              EXPECT_EQ(out_rows(c, begin, kToken, h), out_rows(clean, begin, kToken, h));
            }
            continue;
          }
          EXPECT_EQ(out_rows(c, begin, end, h), out_rows(clean, begin, end, h)) << n << ", " << h;
          EXPECT_EQ(state_of(c, n, h), state_of(clean, n, h)) << n << ", " << h;
        }
        begin = end;
      }
      EXPECT_TRUE(reached) << "the poison had no effect at all";
    }
  }
}

// Rows past the last sequence hold NaN (their first fill) and are neither read nor written (T13).
TEST(CpuIsolation, RowsPastTheEnd) {
  CaseSpec spec = mixed();
  spec.padding = 9;
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    Case c(spec);
    const std::int64_t end = 75 + 1 + 130 + 33 + 64;
    for (std::int64_t t = end; t < end + 9; ++t) {
      for (std::int64_t h = 0; h < 4; ++h) {
        c.beta.set(kNan, 0, t, h);
        for (std::int64_t k = 0; k < spec.keys; ++k) c.g.set(kNan, 0, t, h, k);
        for (std::int64_t k = 0; k < spec.keys; ++k) c.k.set(kNan, 0, t, h / 2, k);
        for (std::int64_t i = 0; i < spec.values; ++i) c.v.set(kNan, 0, t, h, i);
      }
    }
    const RecurrenceResult want = recurrence(c.args);
    run(c, *kernels, 2);
    for (const HeadError& e : head_errors(c.args, want))
      EXPECT_LE(e.out, bound_of(spec.dtype)) << describe(e);
    for (std::int64_t h = 0; h < 4; ++h) {
      for (const std::byte b : out_rows(c, end, end + 9, h)) ASSERT_EQ(b, std::byte{0xFF});
    }
  }
}

TEST(CpuIsolation, InPlaceEqualsOutOfPlace) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    CaseSpec spec = mixed();
    spec.initial = spec.final = dtype;
    spec.initial_slots = spec.final_slots = {4, 0, 7, 2, 1, 3};
    for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
      for (const int threads : {1, 7}) {
        Case apart(spec);
        run(apart, *kernels, threads);
        Case together(spec);
        together.args.final_state = together.args.initial_state;
        together.poison();
        cpu::forward(together.args, together.plan(threads), *kernels);
        EXPECT_EQ(together.out.bytes(), apart.out.bytes());
        for (const std::int64_t slot : {0, 1, 2, 3, 4, 7}) {
          for (std::int64_t h = 0; h < 4; ++h) {
            for (std::int64_t k = 0; k < spec.keys; ++k) {
              ASSERT_EQ(together.initial.get(slot, h, 149, k), apart.final.get(slot, h, 149, k));
            }
          }
        }
      }
    }
  }
}

// An empty sequence hands its state on bit for bit, NaN payloads and subnormals included.
TEST(CpuIsolation, EmptySequencesKeepEveryBit) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    CaseSpec spec;
    spec.lengths = {0, 0, 0};
    spec.value_heads = 2;
    spec.keys = 37;
    spec.values = 19;
    spec.initial = spec.final = dtype;
    spec.packed = true;
    Case c(spec);
    // All exponents and both signs, signalling NaNs among them.
    Random random(3);
    for_each_offset(c.args.initial_state, [&](std::int64_t offset) {
      const std::uint64_t bits = random.bits();
      std::memcpy(static_cast<std::byte*>(c.args.initial_state.data) + offset * size_of(dtype),
                  &bits, static_cast<std::size_t>(size_of(dtype)));
    });
    for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
      run(c, *kernels, 2);
      EXPECT_EQ(c.final.bytes(), c.initial.bytes()) << kernels->name;
    }
  }
}

// fp32 to bf16 over random bits: nearest, ties to even, and every NaN stays one, whatever its
// payload.
TEST(CpuIsolation, NarrowedStatesAreRoundedOnce) {
  CaseSpec spec;
  spec.lengths = {0};
  spec.keys = 256;
  spec.values = 256;
  spec.final = DType::kBFloat16;
  Case c(spec);
  Random random(5);
  auto* const bits = static_cast<std::uint32_t*>(c.args.initial_state.data);
  for (std::int64_t i = 0; i < 65536; ++i) {
    bits[i] = static_cast<std::uint32_t>(random.bits());
    if (i % 16 == 0) bits[i] = bits[i] << 16 | 0x8000U;  // a tie
    if (i % 16 == 1) bits[i] |= 0x7F800000U;             // NaN
    if (i % 64 == 2) bits[i] = 0xFFFFFFFFU;              // NaN that rounding would carry into zero
    if (i % 64 == 3) bits[i] = 0x7F800001U;              // NaN that cutting would make infinite
    if (i % 64 == 4) bits[i] = 0x7F7FFFFFU;              // rounds up to infinity
  }
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    SCOPED_TRACE(kernels->name);
    run(c, *kernels, 1);
    const auto* const narrow = static_cast<const std::uint16_t*>(c.args.final_state.data);
    for (std::int64_t i = 0; i < 65536; ++i) {
      float wide;
      std::memcpy(&wide, bits + i, sizeof(wide));
      if (std::isnan(wide)) {
        ASSERT_TRUE(std::isnan(from_bf16_bits(narrow[i]))) << std::hex << bits[i];
      } else {
        ASSERT_EQ(narrow[i], to_bf16_bits(wide)) << std::hex << bits[i];
      }
    }
  }
}

// 96 tokens in one go, and as 32 + 64 with the fp32 state carried over, are the same bits (T16).
TEST(CpuIsolation, PiecesOnChunkBordersAreTheSameBits) {
  CaseSpec whole;
  whole.lengths = {96};
  CaseSpec pieces = whole;
  pieces.lengths = {32, 64};
  pieces.initial_slots = {0, 2};
  pieces.final_slots = {2, 1};
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    Case one(whole);
    run(one, *kernels, 1);
    // One piece a call: the second starts from what the first left.
    Case two(whole);
    two.poison();
    two.cu_seqlens = Array::ints(DType::kInt64, {0, 32});
    two.args.cu_seqlens = two.cu_seqlens.view();
    cpu::forward(two.args, two.plan(1), *kernels);
    two.args.initial_state = two.args.final_state;
    for (TensorView* x :
         {&two.args.q, &two.args.k, &two.args.v, &two.args.g, &two.args.beta, &two.args.out}) {
      x->data = static_cast<std::byte*>(x->data) + 32 * x->stride[1] * size_of(x->dtype);
    }
    two.cu_seqlens = Array::ints(DType::kInt64, {0, 64});
    two.args.cu_seqlens = two.cu_seqlens.view();
    cpu::forward(two.args, two.plan(1), *kernels);
    EXPECT_EQ(two.out.bytes(), one.out.bytes());
    EXPECT_EQ(two.final.bytes(), one.final.bytes());
  }
}

}  // namespace
}  // namespace flash_kda::testing
