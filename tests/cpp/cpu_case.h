// One call of the CPU backend for tests: arrays with gaps between their rows, filled from a seed,
// outputs poisoned.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "arrays.h"
#include "flash_kda/forward.h"

namespace flash_kda::testing {

struct CaseSpec {
  std::vector<std::int64_t> lengths = {37};  // of the sequences; a dense batch needs equal ones
  bool packed = true;                        // one row of a batch with cu_seqlens
  std::int64_t padding = 0;                  // rows past the last sequence (packed)
  std::int64_t key_heads = 1, value_heads = 1;
  std::int64_t keys = 64, values = 64;
  DType dtype = DType::kBFloat16, gate_dtype = DType::kBFloat16, beta_dtype = DType::kBFloat16;
  DType index_dtype = DType::kInt64;
  GateKind gate = GateKind::kLowerBound;
  BetaKind beta = BetaKind::kLogit;
  bool l2norm = true;
  double lower_bound = -5.0;
  std::optional<double> scale;
  bool rate = true, bias = true;  // A_log, dt_bias
  std::optional<DType> initial = DType::kFloat32, final = DType::kFloat32;
  std::vector<std::int64_t> initial_slots, final_slots;  // empty: no pool
  struct Mark {
    std::int64_t sequence, position, slot;
  };
  std::vector<Mark> marks;  // checkpoints
  DType mark_dtype = DType::kFloat32;
  std::int64_t gap = 0;         // elements between neighbouring rows of every array
  std::int64_t beta_pitch = 0;  // elements from one token's beta to the next (0: dense + gap)
  double gate_mean = 0.0, gate_deviation = 1.0;
  std::uint64_t seed = 1;
};

// Owns the arrays that `args` points into.
struct Case {
  explicit Case(const CaseSpec& spec);
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  // What plan_forward would give; the backend is tested without it.
  ForwardPlan plan(int threads) const;
  // Fills out, final_state and checkpoint_states with NaN again.
  void poison();

  CaseSpec spec;
  Array q, k, v, g, beta, out, rate, bias, initial, final, marks;
  Array initial_slots, final_slots, cu_seqlens, mark_sequences, mark_positions, mark_slots;
  ForwardArgs args;
};

namespace internal {

// Strides of `shape` with `gap` elements after each row of the last dimension.
inline Dims gapped(const Dims& shape, std::int64_t gap) {
  Dims stride(shape.size(), 1);
  std::int64_t step = shape.back() + gap;
  for (std::size_t a = shape.size() - 1; a-- > 0;) {
    stride[a] = step;
    step *= shape[a];
  }
  return stride;
}

}  // namespace internal

inline Case::Case(const CaseSpec& s) : spec(s) {
  const auto n = static_cast<std::int64_t>(s.lengths.size());
  std::int64_t total = s.padding;
  std::vector<std::int64_t> offsets = {0};
  for (const std::int64_t length : s.lengths) {
    total += length;
    offsets.push_back(offsets.back() + length);
  }
  const std::int64_t batch = s.packed ? 1 : n;
  const std::int64_t tokens = s.packed ? total : s.lengths.at(0);
  Random random(s.seed);
  const auto normal = [&](double mean, double deviation) {
    return [&random, mean, deviation] { return random.normal(mean, deviation); };
  };
  const auto make = [&](DType dtype, const Dims& shape) {
    return Array(dtype, shape, internal::gapped(shape, s.gap));
  };

  q = make(s.dtype, {batch, tokens, s.key_heads, s.keys});
  k = make(s.dtype, {batch, tokens, s.key_heads, s.keys});
  v = make(s.dtype, {batch, tokens, s.value_heads, s.values});
  out = make(s.dtype, {batch, tokens, s.value_heads, s.values});
  g = make(s.gate_dtype, {batch, tokens, s.value_heads, s.keys});
  const std::int64_t pitch = s.beta_pitch > 0 ? s.beta_pitch : s.value_heads + s.gap;
  beta = Array(s.beta_dtype, {batch, tokens, s.value_heads}, {tokens * pitch, pitch, 1});
  // Without the norm, keys of about unit length keep the recurrence stable.
  const double size = s.l2norm ? 1.0 : 1.0 / std::sqrt(static_cast<double>(s.keys));
  q.generate(normal(0, size));
  k.generate(normal(0, size));
  v.generate(normal(0, 1));
  if (s.gate == GateKind::kLogDecay) {
    g.generate([&] { return -std::fabs(random.normal(s.gate_mean, s.gate_deviation)); });
  } else {
    g.generate(normal(s.gate_mean, s.gate_deviation));
  }
  if (s.beta == BetaKind::kProbability) {
    beta.generate([&] { return random.uniform(); });
  } else {
    beta.generate(normal(0, 1));
  }
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
  args.g = g.view();
  args.beta = beta.view();
  args.out = out.view();

  if (s.rate && s.gate != GateKind::kLogDecay) {
    rate = Array(DType::kFloat32, {s.value_heads});
    rate.generate([&] { return 0.5 * random.uniform(); });
    args.A_log = rate.view();
  }
  if (s.bias && s.gate != GateKind::kLogDecay) {
    bias = make(DType::kFloat32, {s.value_heads, s.keys});
    bias.generate(normal(0, 0.1));
    args.dt_bias = bias.view();
  }
  const auto slots_of = [&](const std::vector<std::int64_t>& slots) {
    std::int64_t most = n;
    for (const std::int64_t slot : slots) most = std::max(most, slot + 1);
    return most;
  };
  if (s.initial) {
    initial = make(*s.initial, {slots_of(s.initial_slots), s.value_heads, s.values, s.keys});
    initial.generate(normal(0, 1));
    args.initial_state = initial.view();
  }
  if (s.final) {
    final = make(*s.final, {slots_of(s.final_slots), s.value_heads, s.values, s.keys});
    args.final_state = final.view();
  }
  if (!s.initial_slots.empty()) {
    initial_slots = Array::ints(s.index_dtype, s.initial_slots);
    args.initial_state_indices = initial_slots.view();
  }
  if (!s.final_slots.empty()) {
    final_slots = Array::ints(s.index_dtype, s.final_slots);
    args.final_state_indices = final_slots.view();
  }
  if (!s.marks.empty()) {
    std::vector<std::int64_t> sequences, positions, slots;
    for (const CaseSpec::Mark& mark : s.marks) {
      sequences.push_back(mark.sequence);
      positions.push_back(mark.position);
      slots.push_back(mark.slot);
    }
    marks = make(s.mark_dtype, {slots_of(slots), s.value_heads, s.values, s.keys});
    mark_sequences = Array::ints(s.index_dtype, sequences);
    mark_positions = Array::ints(s.index_dtype, positions);
    mark_slots = Array::ints(s.index_dtype, slots);
    args.checkpoint_states = marks.view();
    args.checkpoint_sequences = mark_sequences.view();
    args.checkpoint_positions = mark_positions.view();
    args.checkpoint_slots = mark_slots.view();
  }
  if (s.packed) {
    cu_seqlens = Array::ints(s.index_dtype, offsets);
    args.cu_seqlens = cu_seqlens.view();
  }
  args.gate = s.gate;
  args.beta_kind = s.beta;
  args.l2norm = s.l2norm;
  args.lower_bound = s.lower_bound;
  args.scale = s.scale;
}

inline ForwardPlan Case::plan(int threads) const {
  ForwardPlan plan;
  plan.batch = args.v.shape[0];
  plan.tokens = args.v.shape[1];
  plan.sequences = static_cast<std::int64_t>(spec.lengths.size());
  plan.key_heads = spec.key_heads;
  plan.value_heads = spec.value_heads;
  plan.key_dim = spec.keys;
  plan.value_dim = spec.values;
  plan.varlen = spec.packed;
  plan.threads = threads;
  return plan;
}

inline void Case::poison() {
  out.poison();
  if (final.defined()) final.poison();
  if (marks.defined()) marks.poison();
}

}  // namespace flash_kda::testing
