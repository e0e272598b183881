// The SM90 forward kernel's own source, on the emulated block, against the fp64 recurrence; and the
// promises of the contract bit for bit: over schedules, grids and splits of V, beside NaN, in
// place.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "cpu_case.h"
#include "emulation/forward_harness.h"
#include "recurrence.h"

namespace flash_kda::testing {
namespace {

constexpr double kOrdinaryBound = 5e-3;  // out and state, relative RMS of a (sequence, head)
constexpr double kStressBound = 1e-2;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

CaseSpec spec(const std::vector<std::int64_t>& lengths, std::int64_t heads = 1) {
  CaseSpec s;
  s.lengths = lengths;
  s.key_heads = s.value_heads = heads;
  s.keys = s.values = 128;
  return s;
}

struct Result {
  std::vector<std::byte> out, state;
  bool operator==(const Result&) const = default;
};

// The in-place state is restored before the call; outputs are poisoned.
Result run(Case& c, const EmulatedLaunch& launch) {
  c.poison();
  emulate_forward(c.args, launch);
  return {c.out.bytes(), c.final.defined() ? c.final.bytes() : std::vector<std::byte>{}};
}

const std::vector<EmulatedLaunch>& launches() {
  static const std::vector<EmulatedLaunch> all = {
      {.state_groups = 2, .grid = 1, .scheduled = false, .seed = 0},
      {.state_groups = 1, .grid = 3, .scheduled = true, .seed = 2},
#if !defined(__SANITIZE_ADDRESS__)  // ten times slower
      {.state_groups = 2, .grid = 3, .scheduled = true, .seed = 1},
      {.state_groups = 1, .grid = 2, .scheduled = false, .seed = 0},
      {.state_groups = 2, .grid = 2, .scheduled = false, .seed = 3},
#endif
  };
  return all;
}

// As launches(), with every sequence of `count` chunks or more cut into as many segments.
std::vector<EmulatedLaunch> split_launches(std::int32_t count) {
  std::vector<EmulatedLaunch> all = launches();
  for (EmulatedLaunch& launch : all) {
    launch.chain_tiles = 1 << (&launch - all.data()) % 3;
    launch.segments = [count](std::int64_t tokens) {
      sm90::Segments s;
      s.chunks = s.first = static_cast<std::int32_t>((tokens + sm90::kChunk - 1) / sm90::kChunk);
      if (s.chunks < count) return s;
      s.count = count;
      s.first = (s.chunks + count - 1) / count;
      return s;
    };
  }
  return all;
}

std::vector<EmulatedLaunch> scheduled(std::vector<EmulatedLaunch> all) {
  for (EmulatedLaunch& launch : all) launch.scheduled = true;
  return all;
}

std::string describe(const EmulatedLaunch& l) {
  return "state_groups " + std::to_string(l.state_groups) + ", grid " + std::to_string(l.grid) +
         (l.scheduled ? ", scheduled" : "") + ", seed " + std::to_string(l.seed);
}

// Every launch meets the bounds and gives the first one's bits. Checks that inputs stay as they
// were and that nothing is written between the rows of out.
void check(Case& c, double bound, const std::vector<EmulatedLaunch>& all = launches()) {
  const RecurrenceResult want = recurrence(c.args);
  const std::vector<const Array*> inputs = {&c.q,    &c.k,    &c.v,    &c.g,
                                            &c.beta, &c.rate, &c.bias, &c.initial};
  std::vector<std::vector<std::byte>> before;
  for (const Array* input : inputs) before.push_back(input->bytes());
  Result first;
  for (const EmulatedLaunch& launch : all) {
    SCOPED_TRACE(describe(launch));
    const Result result = run(c, launch);
    if (&launch == &all.front()) {
      first = result;
      for (const HeadError& e : head_errors(c.args, want)) {
        EXPECT_LE(e.out, bound) << "sequence " << e.sequence << " head " << e.head;
        EXPECT_LE(e.state, bound) << "sequence " << e.sequence << " head " << e.head;
      }
    }
    EXPECT_TRUE(result.out == first.out);
    EXPECT_TRUE(result.state == first.state);
    EXPECT_TRUE(c.out.gaps_untouched());
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(inputs[i]->bytes() == before[i]) << i;
}

TEST(EmulatedForward, EveryTailLength) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t n = 1; n <= 34; ++n) lengths.push_back(n);
  Case c(spec(lengths));
  check(c, kStressBound);  // a single token's error is that of a few roundings
}

TEST(EmulatedForward, SeveralHeadsAndChunks) {
  Case c(spec({100, 1, 333, 64}, 3));
  check(c, kOrdinaryBound);
}

// A packed batch is split by lists, an equal batch by arithmetic.
TEST(EmulatedForward, SplitSequences) {
  for (const std::int32_t count : {3, 4, 6}) {
    SCOPED_TRACE(count);
    CaseSpec s = spec({97, 31, 300, 0, 192}, 2);
    s.lower_bound = -0.05;
    Case packed(s);
    check(packed, kOrdinaryBound, scheduled(split_launches(count)));
    s = spec({197, 197}, 2);
    s.packed = false;
    s.initial = DType::kBFloat16;
    Case batch(s);
    check(batch, kOrdinaryBound, split_launches(count));
  }
}

// The same bits whatever else is in the batch and however the sequence arrives.
TEST(EmulatedForward, SplitIsTheSequencesOwn) {
  CaseSpec s = spec({200});
  s.lower_bound = -0.05;  // what a segment leaves behind counts to the end
  Case packed(s);
  s.packed = false;
  Case batch(s);
  const Result want = run(batch, split_launches(4)[0]);
  EXPECT_FALSE(run(batch, launches()[0]) == want) << "was it split?";
  for (const EmulatedLaunch& launch : scheduled(split_launches(4)))
    EXPECT_TRUE(run(packed, launch) == want) << describe(launch);
}

TEST(EmulatedForward, MoreValueHeadsThanKeyHeads) {
  CaseSpec s = spec({40, 70}, 2);
  s.value_heads = 6;
  Case c(s);
  check(c, kOrdinaryBound);
}

TEST(EmulatedForward, EqualBatch) {
  CaseSpec s = spec({150, 150, 150}, 2);
  s.packed = false;
  s.gap = 8;
  s.beta_pitch = 6288;
  Case c(s);
  check(c, kOrdinaryBound);
}

TEST(EmulatedForward, LongSequence) {
  Case c(spec({1024}));
  check(c, kOrdinaryBound);
  check(c, kOrdinaryBound, scheduled(split_launches(9)));
}

TEST(EmulatedForward, OrderOfSequencesDoesNotMatter) {
  Case c(spec({70, 10, 200, 33}, 2));
  const Result first = run(c, launches()[0]);
  EmulatedLaunch launch = launches()[1];
  launch.order = {2, 0, 3, 1};
  EXPECT_TRUE(run(c, launch) == first);
}

TEST(EmulatedForward, StateTypes) {
  using Type = std::optional<DType>;
  const Type types[] = {std::nullopt, DType::kBFloat16, DType::kFloat32};
  for (const Type& initial : types) {
    for (const Type& final : types) {
      SCOPED_TRACE(std::string("initial ") + (initial ? name(*initial) : "none") + ", final " +
                   (final ? name(*final) : "none"));
      CaseSpec s = spec({45, 32, 0, 96});
      s.initial = initial;
      s.final = final;
      s.gap = 8;
      Case c(s);
      check(c, kOrdinaryBound);
    }
  }
}

TEST(EmulatedForward, StatesInPlace) {
  for (const DType type : {DType::kBFloat16, DType::kFloat32}) {
    CaseSpec s = spec({45, 0, 64}, 2);
    s.initial = s.final = type;
    Case c(s);
    const Result apart = run(c, launches()[0]);
    for (const EmulatedLaunch& launch : launches()) {
      Case again(s);
      again.args.final_state = again.args.initial_state;
      again.poison();
      emulate_forward(again.args, launch);
      EXPECT_TRUE(again.out.bytes() == apart.out) << describe(launch);
      EXPECT_TRUE(again.initial.bytes() == apart.state) << describe(launch);
    }
    Case split(s);
    split.args.final_state = split.args.initial_state;
    split.poison();
    emulate_forward(split.args, scheduled(split_launches(2 + 1))[0]);
    EXPECT_TRUE(split.out.bytes() == apart.out);  // too short for three segments
    EXPECT_TRUE(split.initial.bytes() == apart.state);
  }
}

TEST(EmulatedForward, EmptySequencesPassTheirState) {
  for (const bool given : {true, false}) {
    CaseSpec s = spec({0, 40, 0, 0, 7, 0}, 2);
    if (!given) s.initial = std::nullopt;
    Case c(s);
    check(c, kOrdinaryBound);
    for (const std::int64_t n : {0, 2, 3, 5}) {
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t i = 0; i < 128; i += 13) {
          for (std::int64_t j = 0; j < 128; j += 7) {
            EXPECT_EQ(c.final.get(n, h, i, j), given ? c.initial.get(n, h, i, j) : 0.0);
          }
        }
      }
    }
  }
}

TEST(EmulatedForward, BetaGateAndNormKinds) {
  for (int variant = 0; variant < 6; ++variant) {
    SCOPED_TRACE("variant " + std::to_string(variant));
    CaseSpec s = spec({130});
    s.index_dtype = variant % 2 == 0 ? DType::kInt32 : DType::kInt64;
    if (variant == 0) s.beta = BetaKind::kDoubledLogit;
    if (variant == 1) s.beta = BetaKind::kProbability;
    if (variant == 2) s.beta_dtype = DType::kFloat32;
    if (variant == 3) s.l2norm = false;
    if (variant == 4) s.rate = s.bias = false, s.scale = 0.5;
    if (variant == 5) s.lower_bound = -1.5, s.bias = false;
    Case c(s);
    check(c, kOrdinaryBound);
  }
}

// Head 0: always -5; 1: channels by turns -5 and no decay; 2: sixteen tokens each; 3: no decay.
TEST(EmulatedForward, SaturatedGates) {
  CaseSpec s = spec({300}, 4);
  s.rate = s.bias = false;
  Case c(s);
  for (std::int64_t t = 0; t < 300; ++t) {
    for (std::int64_t j = 0; j < 128; ++j) {
      c.g.set(20, 0, t, 0, j);
      c.g.set(j % 2 == 0 ? 20 : -60, 0, t, 1, j);
      c.g.set(t / 16 % 2 == 0 ? 20 : -60, 0, t, 2, j);
      c.g.set(-60, 0, t, 3, j);
    }
  }
  check(c, kStressBound);
  check(c, kStressBound, scheduled(split_launches(3)));
}

TEST(EmulatedForward, LowerBoundsNearZero) {
  for (const double bound : {0.0, -1e-3}) {
    CaseSpec s = spec({256});
    s.lower_bound = bound;
    Case c(s);
    for (std::int64_t t = 0; t < 256; ++t) c.beta.set(c.beta.get(0, t, 0) - 3, 0, t, 0);
    check(c, kStressBound);
    check(c, kStressBound, scheduled(split_launches(3)));
  }
}

TEST(EmulatedForward, ExtremeRates) {
  const double rates[] = {-80, -30, 0, 10, 30, 80, 88, 100};
  const double biases[] = {-50, 0, 50};
  const double betas[] = {-kInfinity, -80, 0, 80, kInfinity};
  CaseSpec s = spec({100}, 8);
  Case c(s);
  for (std::int64_t h = 0; h < 8; ++h) {
    c.rate.set(rates[h], h);
    for (std::int64_t j = 0; j < 128; ++j) c.bias.set(biases[j % 3], h, j);
    for (std::int64_t t = 0; t < 100; ++t) {
      c.beta.set(betas[(t + h) % 5], 0, t, h);
      for (std::int64_t j = 0; j < 128; j += 11) c.g.set(-biases[j % 3], 0, t, h, j);
    }
  }
  check(c, kStressBound);
  check(c, kStressBound, scheduled(split_launches(3)));
}

// Head 0: q and k tiny; 1: huge, some keys near the end of the range; 2: zero rows.
TEST(EmulatedForward, ExtremeNorms) {
  Case c(spec({200}, 3));
  for (std::int64_t t = 0; t < 200; ++t) {
    for (std::int64_t j = 0; j < 128; ++j) {
      for (std::int64_t h = 0; h < 2; ++h) {
        const double factor = h == 0 ? 1e-4 : 1e15;
        c.q.set(c.q.get(0, t, h, j) * factor, 0, t, h, j);
        c.k.set(c.k.get(0, t, h, j) * factor, 0, t, h, j);
      }
      if (t % 11 == 3) c.k.set(c.k.get(0, t, 1, j) < 0 ? -2e38 : 2e38, 0, t, 1, j);  // above 2^127
      if (t % 5 == 0) c.k.set(0, 0, t, 2, j);
      if (t % 7 == 0) c.q.set(0, 0, t, 2, j);
    }
  }
  check(c, kStressBound);
  check(c, kStressBound, scheduled(split_launches(3)));
  for (std::int64_t t = 0; t < 200; t += 7) {
    for (std::int64_t i = 0; i < 128; ++i) EXPECT_EQ(c.out.get(0, t, 2, i), 0.0);
  }
}

// Updates nearly cancel: identical keys, no decay, full writing strength. Of keys whose 1 / norm
// lies just above the middle between two numbers of bf16, so that it and its product with the
// writing strength round apart: whatever is rounded after that product does not cancel.
TEST(EmulatedForward, IdenticalKeys) {
  const double strength = 1 / (1 + std::exp(-8.0));
  const auto rounded = [](double x) {
    return sm90::bf16_low(sm90::pack_bf16(static_cast<float>(x), 0.0f));
  };
  std::vector<double> elements;  // of a key, up to the sign
  for (int m = 128; m < 256; ++m) {
    const double element = m / 128.0, rate = 1 / std::sqrt(128 * element * element + 1e-6);
    if (rounded(rate) != rounded(rate * strength)) elements.push_back(element);
  }
  ASSERT_GE(elements.size(), 3U);
  elements.resize(3);
  CaseSpec s = spec({512}, 3);
  s.rate = s.bias = false;
  s.initial = std::nullopt;
  Case c(s);
  for (std::int64_t t = 0; t < 512; ++t) {
    for (std::int64_t h = 0; h < 3; ++h) {
      c.beta.set(8, 0, t, h);
      for (std::int64_t j = 0; j < 128; ++j) {
        const double sign = c.k.get(0, 0, h, j) < 0 ? -1 : 1;
        const double x = sign * elements[static_cast<std::size_t>(h)];
        c.k.set(x, 0, t, h, j);
        c.q.set(x, 0, t, h, j);
        c.g.set(-12, 0, t, h, j);
        c.v.set(c.v.get(0, t % 16, h, j), 0, t, h, j);
      }
    }
  }
  check(c, 3e-2);
  check(c, 3e-2, scheduled(split_launches(5)));
}

// Every step is exact in bf16, so the result is too: signed one-hot keys and queries with repeats,
// no decay, writing strengths 0, 1/2 and 1, values that are multiples of 8 and at most three
// halvings.
TEST(EmulatedForward, ExactInputsGiveExactResults) {
  constexpr std::int64_t kTokens = 200, kPlaces = 12;
  CaseSpec s = spec({77, 0, 123}, 2);
  s.l2norm = false;
  s.rate = s.bias = false;
  s.scale = 0.5;
  s.final = DType::kBFloat16;
  Case c(s);
  Random random(5);
  const auto below = [&random](std::uint64_t n) {
    return static_cast<std::int64_t>(random.bits() % n);
  };
  c.q.fill(0);
  c.k.fill(0);
  c.g.fill(-1e4);
  c.v.generate([&] { return static_cast<double>(8 * (below(17) - 8)); });
  c.initial.generate([&] { return static_cast<double>(8 * (below(17) - 8)); });
  for (std::int64_t h = 0; h < 2; ++h) {
    int halvings[kPlaces] = {};  // since the place was last written whole
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const std::int64_t place = below(kPlaces);
      int& count = halvings[place];
      const auto kind = below(4);  // nothing, half, whole, whole
      const bool half = kind == 1 && count < 3;
      count = half ? count + 1 : (kind == 0 ? count : 0);
      c.beta.set(half ? 0.0 : (kind == 0 ? -kInfinity : kInfinity), 0, t, h);
      c.k.set(below(2) == 0 ? 1 : -1, 0, t, h, 10 * place);
      c.q.set(below(2) == 0 ? 1 : -1, 0, t, h, 10 * below(kPlaces));
    }
  }
  check(c, 0.0);
  check(c, 0.0, scheduled(split_launches(3)));
}

// NaN in a row of a state, in a value of the first segment and in one of an inner segment.
TEST(EmulatedForward, NanStaysInItsRowsAcrossSegments) {
  CaseSpec s = spec({200, 200}, 2);
  Case clean(s), dirty(s);
  dirty.initial.set(kNan, 0, 0, 3, 9);
  dirty.v.set(kNan, 0, 10, 1, 4);
  dirty.v.set(kNan, 0, 300, 0, 7);
  const std::vector<EmulatedLaunch> all = scheduled(split_launches(4));
  run(clean, all[0]);
  run(dirty, all[0]);
  for (std::int64_t t = 0; t < 400; ++t) {
    for (std::int64_t h = 0; h < 2; ++h) {
      for (std::int64_t i = 0; i < 128; ++i) {
        // From the chunk on that holds it.
        const bool lost =
            t < 200 ? (h == 0 && i == 3) || (h == 1 && i == 4) : h == 0 && i == 7 && t >= 296;
        if (lost) {
          ASSERT_TRUE(std::isnan(dirty.out.get(0, t, h, i))) << t << " " << h << " " << i;
        } else {
          ASSERT_EQ(dirty.out.get(0, t, h, i), clean.out.get(0, t, h, i))
              << t << " " << h << " " << i;
        }
      }
    }
  }
}

// NaN in a state and in a value; `foreign` in every row past the last sequence, which shares the
// last chunk's loads.
void check_isolation(double foreign) {
  SCOPED_TRACE(foreign);
  CaseSpec s = spec({40, 60, 50}, 3);
  s.padding = 20;
  Case clean(s), dirty(s);
  dirty.initial.set(kNan, 1, 2, 5, 6);
  dirty.v.set(kNan, 0, 3, 1, 4);  // sequence 0, head 1
  for (std::int64_t t = 150; t < 170; ++t) {
    for (std::int64_t h = 0; h < 3; ++h) {
      dirty.beta.set(foreign, 0, t, h);
      for (std::int64_t j = 0; j < 128; ++j) {
        for (Array* x : {&dirty.q, &dirty.k, &dirty.v, &dirty.g}) x->set(foreign, 0, t, h, j);
      }
    }
  }
  run(clean, launches()[0]);
  const std::int64_t starts[] = {0, 40, 100, 150};
  for (const EmulatedLaunch& launch : launches()) {
    SCOPED_TRACE(describe(launch));
    run(dirty, launch);
    EXPECT_TRUE(std::isnan(dirty.final.get(1, 2, 5, 6)));
    EXPECT_TRUE(std::isnan(dirty.out.get(0, 3, 1, 4)));
    for (std::int64_t n = 0; n < 3; ++n) {
      for (std::int64_t h = 0; h < 3; ++h) {
        if ((n == 1 && h == 2) || (n == 0 && h == 1)) continue;
        for (std::int64_t t = starts[n]; t < starts[n + 1]; ++t) {
          for (std::int64_t i = 0; i < 128; ++i) {
            ASSERT_EQ(dirty.out.get(0, t, h, i), clean.out.get(0, t, h, i)) << n << h << t << i;
          }
        }
        for (std::int64_t i = 0; i < 128; ++i) {
          for (std::int64_t j = 0; j < 128; ++j) {
            ASSERT_EQ(dirty.final.get(n, h, i, j), clean.final.get(n, h, i, j)) << n << h << i << j;
          }
        }
      }
    }
    for (std::int64_t t = 150; t < 170; ++t) {  // not written
      for (std::int64_t i = 0; i < 128; ++i) ASSERT_TRUE(std::isnan(dirty.out.get(0, t, 1, i)));
    }
  }
}

TEST(EmulatedForward, NanStaysInItsSequenceHeadAndRows) {
  // Finite but huge: must not be mistaken for a row of extreme norm.
  for (const double foreign :
       {static_cast<double>(kNan), 3e38, -std::numeric_limits<double>::infinity()}) {
    check_isolation(foreign);
  }
}

TEST(EmulatedForward, BatchAndSingleAgree) {
  Case all(spec({70, 33, 129}, 2));
  run(all, launches()[0]);
  const std::int64_t starts[] = {0, 70, 103};
  const std::int64_t lengths[] = {70, 33, 129};
  for (std::int64_t n = 0; n < 3; ++n) {
    Case one(spec({lengths[n]}, 2));
    const auto copy = [&](Array& to, const Array& from, std::int64_t width) {
      for (std::int64_t t = 0; t < lengths[n]; ++t) {
        for (std::int64_t h = 0; h < 2; ++h) {
          for (std::int64_t j = 0; j < width; ++j)
            to.set(from.get(0, starts[n] + t, h, j), 0, t, h, j);
        }
      }
    };
    for (const auto& [to, from] :
         {std::pair{&one.q, &all.q}, {&one.k, &all.k}, {&one.v, &all.v}, {&one.g, &all.g}}) {
      copy(*to, *from, 128);
    }
    for (std::int64_t h = 0; h < 2; ++h) {
      one.rate.set(all.rate.get(h), h);
      for (std::int64_t t = 0; t < lengths[n]; ++t) {
        one.beta.set(all.beta.get(0, starts[n] + t, h), 0, t, h);
      }
      for (std::int64_t i = 0; i < 128; ++i) {
        one.bias.set(all.bias.get(h, i), h, i);
        for (std::int64_t j = 0; j < 128; ++j) {
          one.initial.set(all.initial.get(n, h, i, j), 0, h, i, j);
        }
      }
    }
    run(one, launches()[1]);
    for (std::int64_t h = 0; h < 2; ++h) {
      for (std::int64_t i = 0; i < 128; ++i) {
        for (std::int64_t t = 0; t < lengths[n]; ++t) {
          ASSERT_EQ(one.out.get(0, t, h, i), all.out.get(0, starts[n] + t, h, i));
        }
        for (std::int64_t j = 0; j < 128; ++j) {
          ASSERT_EQ(one.final.get(0, h, i, j), all.final.get(n, h, i, j));
        }
      }
    }
  }
}

}  // namespace
}  // namespace flash_kda::testing
