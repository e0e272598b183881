// What a chunk of n <= kChunk tokens needs that does not depend on the column of V.
//
// With d_i = exp(g_i), raw keys and queries k_i, q_i, and products of decays D(a..b) = d_a * ... *
// d_b, by channel:
//
//   read_k[i]  = k_i * D(0..i)        S_0 read_k[i] is what the state at the chunk's start says to
//   key i read_q[i]  = q_i * D(0..i) write[j]   = k_j * D(j+1..n-1)    what u_j adds to the state
//   at the chunk's end decay      = D(0..n-1) kk[i, j]   = sum_K k_i * k_j * D(j+1..i)    j < i
//   qk[i, j]   = sum_K q_i * k_j * D(j+1..i)    j <= i
//
// Only products of decays, never a quotient: each factor is at most 1, so nothing overflows
// whatever the gate, a decay of exactly 0 or 1 stays exact, and there is no reference point to
// choose. At 8 tokens a chunk the pair products are some 3% of the work.
//
// The l2norm is a factor for each token and is left out of all of these; panel.inl puts it back in
// three places.
#pragma once

#include <utility>

#include "constants.h"
#include "cpu/kernels.h"
#include "cpu/math.inl"
#include "cpu/rows.inl"

namespace flash_kda::cpu {
namespace FLASH_KDA_CPU_NAMESPACE {
namespace {

inline constexpr int kPairs = kChunk * kChunk;
// Numbers of one chunk's tokens, padded to whole vectors.
inline constexpr int kTokenPad = kChunk > kWidth ? kChunk : kWidth;
static_assert(kPairs % kWidth == 0 && kTokenPad % kWidth == 0);

// Rows of `pitch` floats: K, padded with zeros to whole vectors.
struct Chunk {
  float* read;   // [2 * kChunk, pitch]: read_k, read_q
  float* write;  // [kChunk, pitch]
  float* decay;  // [pitch]
  // kk[i, j] at i * kChunk + j, qk[i, j] at j * kChunk + i: together they fill the square.
  alignas(64) float pairs[kPairs];
  alignas(64) float strength[kTokenPad];     // b_i
  alignas(64) float key_scale[kTokenPad];    // 1 / norm of k_i, or 1
  alignas(64) float query_scale[kTokenPad];  // scale / norm of q_i, or scale
};

// Rows that only prepare() uses; they stay in the first-level cache from chunk to chunk.
struct Workspace {
  float* q;  // [kChunk, pitch]; zeros from token n on
  float* k;  // [kChunk, pitch]; zeros from token n on
  float* d;  // [kChunk, pitch]; 1 from token n on
  int pitch;
};

// Raw gates in w.d become decays. c.decay is the exponential of the summed log decays, which over a
// long sequence strays less than a product of n rounded factors.
template <GateForm F>
void decays(const Workspace& w, const Chunk& c, const Gate gate, const float* bias_row, int n) {
  static_assert(kChunk % kSideBySide == 0);
  const int pitch = w.pitch;
  for (int column = 0; column < pitch; column += kWidth) {
    const Vec bias = load(bias_row + column);
    Vec log_sum = splat(0);
    float* d = w.d + column;
    for (int first = 0; first < n; first += kSideBySide, d += kSideBySide * pitch) {
      Vecs<kSideBySide> x;  // rows from n on hold anything
#pragma GCC unroll 8
      for (int i = 0; i < kSideBySide; ++i) x.v[i] = load(d + i * pitch) + bias;
      const auto g = log_decay<F>(gate, x);
      for (int i = 0; i < kSideBySide && first + i < n; ++i) log_sum = log_sum + g.v[i];
      const auto decay = exp(g);
#pragma GCC unroll 8
      for (int i = 0; i < kSideBySide; ++i) store(d + i * pitch, decay.v[i]);
    }
    for (int i = n; i < kChunk; ++i) store(w.d + column + i * pitch, splat(1));
    store(c.decay + column, exp(Vecs<1>{log_sum}).v[0]);
  }
}

void read_and_write_rows(const Workspace& w, const Chunk& c, int n) {
  const int pitch = w.pitch;
  for (int column = 0; column < pitch; column += kWidth) {
    const float* q = w.q + column;
    const float* k = w.k + column;
    const float* d = w.d + column;
    float* read = c.read + column;
    float* write = c.write + column;
    Vec product = splat(1);
    for (int i = 0; i < n; ++i) {
      product = product * load(d + i * pitch);
      store(read + i * pitch, load(k + i * pitch) * product);
      store(read + (kChunk + i) * pitch, load(q + i * pitch) * product);
    }
    product = splat(1);
    for (int j = n - 1; j >= 0; --j) {
      store(write + j * pitch, load(k + j * pitch) * product);
      product = product * load(d + j * pitch);
    }
  }
}

// Vectors still to be summed: the pairs, then squares of keys and of queries.
struct Partial {
  Vec pairs[kPairs];
  Vec keys[kTokenPad];
  Vec queries[kTokenPad];
};

// Column J of kk and qk.
template <int J>
void pair_column(const Workspace& w, Partial& partial) {
  Vec kk[kChunk];
  Vec qk[kChunk];
#pragma GCC unroll 8
  for (int i = J; i < kChunk; ++i) kk[i] = qk[i] = splat(0);
  Vec q_squares = splat(0);
  const int pitch = w.pitch;
  for (int column = 0; column < pitch; column += kWidth) {
    const float* q = w.q + column;
    const float* k = w.k + column;
    const float* d = w.d + column;
    const Vec q_j = load(q + J * pitch);
    Vec x = load(k + J * pitch);
    kk[J] = fma(x, x, kk[J]);
    qk[J] = fma(x, q_j, qk[J]);
    q_squares = fma(q_j, q_j, q_squares);
#pragma GCC unroll 8
    for (int i = J + 1; i < kChunk; ++i) {
      x = x * load(d + i * pitch);
      kk[i] = fma(x, load(k + i * pitch), kk[i]);
      qk[i] = fma(x, load(q + i * pitch), qk[i]);
    }
  }
  partial.keys[J] = kk[J];
  partial.queries[J] = q_squares;
  partial.pairs[J * kChunk + J] = qk[J];
#pragma GCC unroll 8
  for (int i = J + 1; i < kChunk; ++i) {
    partial.pairs[i * kChunk + J] = kk[i];
    partial.pairs[J * kChunk + i] = qk[i];
  }
}

template <int... J>
void products(const HeadTask& task, const Workspace& w, Chunk& c,
              std::integer_sequence<int, J...> /*columns*/) {
  Partial partial;
  for (int i = kChunk; i < kTokenPad; ++i) partial.keys[i] = partial.queries[i] = splat(0);
  (pair_column<J>(w, partial), ...);
  for (int r = 0; r < kPairs; r += kWidth) store(c.pairs + r, row_sums(partial.pairs + r));
  const Vec scale = splat(task.scale);
  for (int i = 0; i < kTokenPad; i += kWidth) {
    if (task.l2norm) {
      const Vec epsilon = splat(kL2NormEpsilon);
      store(c.key_scale + i, splat(1) / sqrt(row_sums(partial.keys + i) + epsilon));
      store(c.query_scale + i, scale / sqrt(row_sums(partial.queries + i) + epsilon));
    } else {
      store(c.key_scale + i, splat(1));
      store(c.query_scale + i, scale);
    }
  }
}

void strengths(const HeadTask& task, std::int64_t t, int n, float* strength) {
  alignas(64) float rows[kChunk * kWidth];
  load_rows(task.beta, t, n, 1, rows, kWidth);
  for (int i = 0; i < kTokenPad; ++i) strength[i] = 0;
  for (int i = 0; i < n; ++i) strength[i] = rows[i * kWidth];
  if (!task.strength.logit) return;
  for (int i = 0; i < kTokenPad; i += kWidth) {
    store(strength + i,
          splat(task.strength.multiplier) * sigmoid(Vecs<1>{load(strength + i)}).v[0]);
  }
}

// `bias`: the gate's, padded to the pitch.
void prepare(const HeadTask& task, const float* bias, std::int64_t t, int n, const Workspace& w,
             Chunk& c) {
  const std::size_t blank = sizeof(float) * static_cast<std::size_t>((kChunk - n) * w.pitch);
  load_rows(task.q, t, n, task.key_dim, w.q, w.pitch);
  load_rows(task.k, t, n, task.key_dim, w.k, w.pitch);
  load_rows(task.g, t, n, task.key_dim, w.d, w.pitch);
  if (blank != 0) {
    __builtin_memset(w.q + n * w.pitch, 0, blank);
    __builtin_memset(w.k + n * w.pitch, 0, blank);
  }
  switch (task.gate.form) {
    case GateForm::kLowerBound:
      decays<GateForm::kLowerBound>(w, c, task.gate, bias, n);
      break;
    case GateForm::kSoftplus:
      decays<GateForm::kSoftplus>(w, c, task.gate, bias, n);
      break;
    case GateForm::kLogDecay:
      decays<GateForm::kLogDecay>(w, c, task.gate, bias, n);
      break;
  }
  read_and_write_rows(w, c, n);
  products(task, w, c, std::make_integer_sequence<int, kChunk>());
  strengths(task, t, n, c.strength);
}

}  // namespace
}  // namespace FLASH_KDA_CPU_NAMESPACE
}  // namespace flash_kda::cpu
