// One chunk for one panel of columns: read the state, solve for the updates, write the outputs,
// update the state. A panel of 128 keys (16 KB with AVX-512) stays in the first-level cache through
// all of it.
#pragma once

#include "cpu/chunk.inl"
#include "cpu/kernels.h"
#include "cpu/rows.inl"

namespace flash_kda::cpu {
namespace FLASH_KDA_CPU_NAMESPACE {
namespace {

// to[m, c] = sum_k rows[m, k] * state[k, c] for M rows. The order of the sum does not depend on M.
template <int M>
void read_tile(const float* rows, int pitch, const float* state, int keys, float* to) {
  Vec sum[M][kTileVecs];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int j = 0; j < kTileVecs; ++j) sum[m][j] = splat(0);
  }
  for (int k = 0; k < keys; ++k, state += kPanel) {
    Vec s[kTileVecs];
#pragma GCC unroll 8
    for (int j = 0; j < kTileVecs; ++j) s[j] = load(state + j * kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec x = splat(rows[m * pitch + k]);
#pragma GCC unroll 8
      for (int j = 0; j < kTileVecs; ++j) sum[m][j] = fma(x, s[j], sum[m][j]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int j = 0; j < kTileVecs; ++j) store(to + m * kPanel + j * kWidth, sum[m][j]);
  }
}

template <int M>
void read_rest(int rest, const float* rows, int pitch, const float* state, int keys, float* to) {
  if constexpr (M > 0) {
    if (rest == M) return read_tile<M>(rows, pitch, state, keys, to);
    read_rest<M - 1>(rest, rows, pitch, state, keys, to);
  }
}

void read_state(const float* rows, int count, int pitch, const float* state, int keys, float* to) {
  int r = 0;
  for (; r + kTileRows <= count; r += kTileRows) {
    read_tile<kTileRows>(rows + r * pitch, pitch, state, keys, to + r * kPanel);
  }
  read_rest<kTileRows - 1>(count - r, rows + r * pitch, pitch, state, keys, to + r * kPanel);
}

// state[k, c] = decay[k] * state[k, c] + sum_j write[j, k] * y[j, c].
void update_state(const Chunk& c, int n, int pitch, const float* y, float* state) {
  for (int first = 0; first < pitch; first += kTileRows, state += kTileRows * kPanel) {
    Vec sum[kTileRows][kTileVecs];
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) {
      const Vec decay = splat(c.decay[first + r]);
#pragma GCC unroll 8
      for (int j = 0; j < kTileVecs; ++j) sum[r][j] = decay * load(state + r * kPanel + j * kWidth);
    }
    const float* write = c.write + first;
    for (int i = 0; i < n; ++i, write += pitch) {
      Vec x[kTileVecs];
#pragma GCC unroll 8
      for (int j = 0; j < kTileVecs; ++j) x[j] = load(y + i * kPanel + j * kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < kTileRows; ++r) {
        const Vec w = splat(write[r]);
#pragma GCC unroll 8
        for (int j = 0; j < kTileVecs; ++j) sum[r][j] = fma(w, x[j], sum[r][j]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 8
      for (int j = 0; j < kTileVecs; ++j) store(state + r * kPanel + j * kWidth, sum[r][j]);
    }
  }
}

// The unit lower triangular system, by forward substitution, and the outputs. With y_j =
// key_scale[j] * u_j:
//   y_i = key_scale[i] * b_i * (v_i - key_scale[i] * (S_0 read_k[i] + sum_{j < i} kk[i, j] y_j))
//   o_i = query_scale[i] * (S_0 read_q[i] + sum_{j <= i} qk[i, j] y_j)
// `said`: S_0 read_k, then S_0 read_q; [2 * kChunk, kPanel].
template <Element E>
void solve(const HeadTask& task, const Chunk& c, std::int64_t t, int n, int first,
           const float* said, float* y) {
  const std::byte* v = task.v.data + t * task.v.stride + first * bytes_of(E);
  std::byte* out = task.out.data + t * task.out.stride + first * bytes_of(E);
  int valid[kTileVecs];
#pragma GCC unroll 8
  for (int j = 0; j < kTileVecs; ++j) {
    const int left = task.columns - first - j * kWidth;
    valid[j] = left < 0 ? 0 : left < kWidth ? left : kWidth;
  }
  Vec known[kChunk][kTileVecs];
#pragma GCC unroll 8
  for (int i = 0; i < kChunk; ++i) {
    if (i >= n) break;
    Vec key_sum[kTileVecs];
    Vec query_sum[kTileVecs];
#pragma GCC unroll 8
    for (int j = 0; j < kTileVecs; ++j) {
      key_sum[j] = load(said + i * kPanel + j * kWidth);
      query_sum[j] = load(said + (kChunk + i) * kPanel + j * kWidth);
    }
#pragma GCC unroll 8
    for (int p = 0; p < i; ++p) {
      const Vec kk = splat(c.pairs[i * kChunk + p]);
      const Vec qk = splat(c.pairs[p * kChunk + i]);
#pragma GCC unroll 8
      for (int j = 0; j < kTileVecs; ++j) {
        key_sum[j] = fma(kk, known[p][j], key_sum[j]);
        query_sum[j] = fma(qk, known[p][j], query_sum[j]);
      }
    }
    const Vec key_scale = splat(c.key_scale[i]);
    const Vec gain = splat(c.key_scale[i] * c.strength[i]);
#pragma GCC unroll 8
    for (int j = 0; j < kTileVecs; ++j) {
      const Vec value = load_part<E>(v + j * kWidth * bytes_of(E), valid[j]);
      known[i][j] = gain * fnma(key_scale, key_sum[j], value);
      store(y + i * kPanel + j * kWidth, known[i][j]);
      const Vec sum = fma(splat(c.pairs[i * kChunk + i]), known[i][j], query_sum[j]);
      store_part<E>(out + j * kWidth * bytes_of(E), valid[j], splat(c.query_scale[i]) * sum);
    }
    v += task.v.stride;
    out += task.out.stride;
  }
}

}  // namespace
}  // namespace FLASH_KDA_CPU_NAMESPACE
}  // namespace flash_kda::cpu
