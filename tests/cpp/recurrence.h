// The operator as its definition says, token by token in fp64: what every C++ test is held to.
// Shares no code with the library; reads the rounded inputs through the views of a ForwardArgs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "arrays.h"
#include "flash_kda/forward.h"

namespace flash_kda::testing {

// Dense, row-major, fp64. Entries that the call does not define are NaN.
struct RecurrenceResult {
  std::vector<double> out;          // [B, T, HV, V]; NaN at or past cu_seqlens[-1]
  std::vector<double> final_state;  // [N, HV, V, K]; one a sequence, whatever the indices
  std::vector<double> checkpoints;  // [M, HV, V, K]; one an entry, whatever the slots
};

namespace internal {

inline double sigmoid(double x) {
  return x >= 0 ? 1.0 / (1.0 + std::exp(-x)) : std::exp(x) / (1.0 + std::exp(x));
}

inline double softplus(double x) {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}

inline std::int64_t int_at(const TensorView& view, std::int64_t i) {
  return static_cast<std::int64_t>(at(view, i));
}

// One value head of one sequence.
class Head {
 public:
  Head(const ForwardArgs& args, std::int64_t batch, std::int64_t hv)
      : args_(args), batch_(batch), hv_(hv), h_(hv / (args.v.shape[2] / args.q.shape[2])) {
    keys_ = args.q.shape[3];
    values_ = args.v.shape[3];
    state.assign(static_cast<std::size_t>(keys_ * values_), 0.0);
    // Element hv of A_log in row-major order, whatever its shape.
    if (args.A_log.defined()) {
      std::int64_t position = 0;
      for_each_offset(args.A_log, [&](std::int64_t o) {
        if (position++ == hv) a_ = std::exp(load(args.A_log, o));
      });
    }
    scale_ = args.scale.value_or(1.0 / std::sqrt(static_cast<double>(keys_)));
  }

  void load_state(std::int64_t slot) {
    for (std::int64_t i = 0; i < values_; ++i) {
      for (std::int64_t j = 0; j < keys_; ++j) s(i, j) = at(args_.initial_state, slot, hv_, i, j);
    }
  }

  // Consumes token t of the batch row and writes o_t [V].
  void step(std::int64_t t, double* o) {
    const std::vector<double> q = row(args_.q, t);
    const std::vector<double> k = row(args_.k, t);
    const double b = strength(t);
    for (std::int64_t j = 0; j < keys_; ++j) {
      const double decay = std::exp(log_decay(t, j));
      for (std::int64_t i = 0; i < values_; ++i) s(i, j) *= decay;
    }
    for (std::int64_t i = 0; i < values_; ++i) {
      double read = 0;
      for (std::int64_t j = 0; j < keys_; ++j) read += s(i, j) * k[static_cast<std::size_t>(j)];
      const double u = b * (at(args_.v, batch_, t, hv_, i) - read);
      double sum = 0;
      for (std::int64_t j = 0; j < keys_; ++j) {
        s(i, j) += u * k[static_cast<std::size_t>(j)];
        sum += s(i, j) * q[static_cast<std::size_t>(j)];
      }
      o[i] = scale_ * sum;
    }
  }

  std::vector<double> state;  // [V, K]

 private:
  double& s(std::int64_t i, std::int64_t j) {
    return state[static_cast<std::size_t>(i * keys_ + j)];
  }

  std::vector<double> row(const TensorView& x, std::int64_t t) const {
    std::vector<double> r(static_cast<std::size_t>(keys_));
    double squares = 0;
    for (std::int64_t j = 0; j < keys_; ++j) {
      const double value = at(x, batch_, t, h_, j);
      r[static_cast<std::size_t>(j)] = value;
      squares += value * value;
    }
    if (args_.l2norm) {
      for (double& value : r) value /= std::sqrt(squares + 1e-6);
    }
    return r;
  }

  double log_decay(std::int64_t t, std::int64_t j) const {
    const double g = at(args_.g, batch_, t, hv_, j);
    double bias = 0;
    if (args_.dt_bias.defined()) {
      bias =
          args_.dt_bias.rank == 2 ? at(args_.dt_bias, hv_, j) : at(args_.dt_bias, hv_ * keys_ + j);
    }
    switch (args_.gate) {
      case GateKind::kLowerBound:
        return args_.lower_bound * sigmoid(a_ * (g + bias));
      case GateKind::kSoftplus:
        return -a_ * softplus(g + bias);
      case GateKind::kLogDecay:
        return g;
    }
    return std::numeric_limits<double>::quiet_NaN();
  }

  double strength(std::int64_t t) const {
    const double beta = at(args_.beta, batch_, t, hv_);
    switch (args_.beta_kind) {
      case BetaKind::kLogit:
        return sigmoid(beta);
      case BetaKind::kDoubledLogit:
        return 2.0 * sigmoid(beta);
      case BetaKind::kProbability:
        return beta;
    }
    return std::numeric_limits<double>::quiet_NaN();
  }

  const ForwardArgs& args_;
  std::int64_t batch_, hv_, h_;
  std::int64_t keys_ = 0, values_ = 0;
  double a_ = 1.0, scale_ = 1.0;
};

}  // namespace internal

// `args` must be valid and in host memory. Call it before the library's forward if states are in
// place. `heads`: the value heads to run (all if empty); the entries of the others are NaN.
inline RecurrenceResult recurrence(const ForwardArgs& args,
                                   const std::vector<std::int64_t>& heads = {}) {
  const std::int64_t batches = args.v.shape[0], tokens = args.v.shape[1];
  const std::int64_t value_heads = args.v.shape[2], values = args.v.shape[3],
                     keys = args.q.shape[3];
  const bool varlen = args.cu_seqlens.defined();
  const std::int64_t sequences = varlen ? args.cu_seqlens.shape[0] - 1 : batches;
  const std::int64_t entries =
      args.checkpoint_states.defined() ? args.checkpoint_slots.shape[0] : 0;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::int64_t state_size = values * keys;

  RecurrenceResult result;
  result.out.assign(static_cast<std::size_t>(batches * tokens * value_heads * values), nan);
  result.final_state.assign(static_cast<std::size_t>(sequences * value_heads * state_size), nan);
  result.checkpoints.assign(static_cast<std::size_t>(entries * value_heads * state_size), nan);

  for (std::int64_t n = 0; n < sequences; ++n) {
    const std::int64_t batch = varlen ? 0 : n;
    const std::int64_t begin = varlen ? internal::int_at(args.cu_seqlens, n) : 0;
    const std::int64_t end = varlen ? internal::int_at(args.cu_seqlens, n + 1) : tokens;
    std::int64_t slot = args.initial_state.defined() ? n : -1;
    if (args.initial_state_indices.defined())
      slot = internal::int_at(args.initial_state_indices, n);
    for (std::int64_t hv = 0; hv < value_heads; ++hv) {
      if (!heads.empty() && std::find(heads.begin(), heads.end(), hv) == heads.end()) continue;
      internal::Head head(args, batch, hv);
      if (slot >= 0) head.load_state(slot);
      const auto keep = [&](std::vector<double>& to, std::int64_t row) {
        std::copy(head.state.begin(), head.state.end(),
                  to.begin() + (row * value_heads + hv) * state_size);
      };
      const auto keep_checkpoints = [&](std::int64_t position) {
        for (std::int64_t m = 0; m < entries; ++m) {
          if (internal::int_at(args.checkpoint_sequences, m) == n &&
              internal::int_at(args.checkpoint_positions, m) == position) {
            keep(result.checkpoints, m);
          }
        }
      };
      keep_checkpoints(0);
      for (std::int64_t t = begin; t < end; ++t) {
        const std::int64_t at_row = ((batch * tokens + t) * value_heads + hv) * values;
        head.step(t, result.out.data() + at_row);
        keep_checkpoints(t - begin + 1);
      }
      keep(result.final_state, n);
    }
  }
  return result;
}

// Relative RMS error of `got` against `want`, the measure of every bound: sqrt(sum (got-want)^2 /
// sum want^2). An oracle of all zeros must be met exactly (0, else infinity). NaN or infinity in
// `got` alone gives NaN or infinity.
inline double relative_rms(const std::vector<double>& got, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    error += (got.at(i) - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  if (norm == 0) return error == 0 ? 0.0 : std::numeric_limits<double>::infinity();
  return std::sqrt(error / norm);
}

// Errors of `args` after the library's forward, against `want`, for each (sequence, head).
struct HeadError {
  std::int64_t sequence = 0, head = 0;
  double out = 0;         // 0 if the sequence has no token
  double state = 0;       // 0 if no final state was asked for, or its index is negative
  double checkpoint = 0;  // worst of the sequence's checkpoints
};

namespace internal {

inline double state_error(const TensorView& states, std::int64_t slot, std::int64_t hv,
                          const std::vector<double>& want, std::int64_t row) {
  const std::int64_t heads = states.shape[1], values = states.shape[2], keys = states.shape[3];
  std::vector<double> got;
  for (std::int64_t i = 0; i < values; ++i) {
    for (std::int64_t j = 0; j < keys; ++j) got.push_back(at(states, slot, hv, i, j));
  }
  const auto first = want.begin() + (row * heads + hv) * values * keys;
  return relative_rms(got, {first, first + values * keys});
}

}  // namespace internal

inline std::vector<HeadError> head_errors(const ForwardArgs& args, const RecurrenceResult& want,
                                          const std::vector<std::int64_t>& heads = {}) {
  const std::int64_t tokens = args.v.shape[1], value_heads = args.v.shape[2],
                     values = args.v.shape[3];
  const bool varlen = args.cu_seqlens.defined();
  const std::int64_t sequences = varlen ? args.cu_seqlens.shape[0] - 1 : args.v.shape[0];
  std::vector<HeadError> errors;
  for (std::int64_t n = 0; n < sequences; ++n) {
    const std::int64_t batch = varlen ? 0 : n;
    const std::int64_t begin = varlen ? internal::int_at(args.cu_seqlens, n) : 0;
    const std::int64_t end = varlen ? internal::int_at(args.cu_seqlens, n + 1) : tokens;
    for (std::int64_t hv = 0; hv < value_heads; ++hv) {
      if (!heads.empty() && std::find(heads.begin(), heads.end(), hv) == heads.end()) continue;
      HeadError e{n, hv};
      std::vector<double> got, expected;
      for (std::int64_t t = begin; t < end; ++t) {
        for (std::int64_t i = 0; i < values; ++i) {
          got.push_back(at(args.out, batch, t, hv, i));
          const std::int64_t row = (batch * tokens + t) * value_heads + hv;
          expected.push_back(want.out[static_cast<std::size_t>(row * values + i)]);
        }
      }
      e.out = relative_rms(got, expected);
      if (args.final_state.defined()) {
        const bool pool = args.final_state_indices.defined();
        const std::int64_t slot = pool ? internal::int_at(args.final_state_indices, n) : n;
        if (slot >= 0)
          e.state = internal::state_error(args.final_state, slot, hv, want.final_state, n);
      }
      if (args.checkpoint_states.defined()) {
        for (std::int64_t m = 0; m < args.checkpoint_slots.shape[0]; ++m) {
          const std::int64_t slot = internal::int_at(args.checkpoint_slots, m);
          if (internal::int_at(args.checkpoint_sequences, m) != n || slot < 0) continue;
          const double error =
              internal::state_error(args.checkpoint_states, slot, hv, want.checkpoints, m);
          if (!(error <= e.checkpoint)) e.checkpoint = error;
        }
      }
      errors.push_back(e);
    }
  }
  return errors;
}

}  // namespace flash_kda::testing
