// One chunk for one panel of columns: read the state, solve for the updates, write the outputs, update the state.
// A panel of 128 keys (16 KB with AVX-512) stays in the first-level cache through all of it.

namespace flash_kda::cpu {
namespace FLASH_KDA_CPU_NAMESPACE {
namespace {

// to[m, c] = sum_k rows[m, k] * state[k, c] for M rows. The order of the sum does not depend on M.
template <int M>
void read_tile(const float* rows, int pitch, const float* state, int keys, float* to) {
  Vec sum[M][kTileVecs];
  for (int m = 0; m < M; ++m) {
    for (int j = 0; j < kTileVecs; ++j) sum[m][j] = splat(0);
  }
  for (int k = 0; k < keys; ++k, state += kPanel) {
    Vec s[kTileVecs];
    for (int j = 0; j < kTileVecs; ++j) s[j] = load(state + j * kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Vec x = splat(rows[m * pitch + k]);
      for (int j = 0; j < kTileVecs; ++j) sum[m][j] = fma(x, s[j], sum[m][j]);
    }
  }
  for (int m = 0; m < M; ++m) {
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

// state[k, c] = decay[k] * state[k, c] + sum_j write[j, k] * u[j, c].
void update_state(const Chunk& c, int n, const float* u, float* state) {
  for (int first = 0; first < c.pitch; first += kTileRows, state += kTileRows * kPanel) {
    Vec sum[kTileRows][kTileVecs];
    for (int r = 0; r < kTileRows; ++r) {
      const Vec decay = splat(c.decay[first + r]);
      for (int j = 0; j < kTileVecs; ++j) sum[r][j] = decay * load(state + r * kPanel + j * kWidth);
    }
    const float* write = c.write + first;
    for (int i = 0; i < n; ++i, write += c.pitch) {
      Vec x[kTileVecs];
      for (int j = 0; j < kTileVecs; ++j) x[j] = load(u + i * kPanel + j * kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < kTileRows; ++r) {
        const Vec w = splat(write[r]);
        for (int j = 0; j < kTileVecs; ++j) sum[r][j] = fma(w, x[j], sum[r][j]);
      }
    }
    for (int r = 0; r < kTileRows; ++r) {
      for (int j = 0; j < kTileVecs; ++j) store(state + r * kPanel + j * kWidth, sum[r][j]);
    }
  }
}

// The unit lower triangular system, by forward substitution, and the outputs:
//   u_i = b_i * (v_i - S_0 read_k[i] - sum_{j < i} kk[i, j] u_j)
//   o_i = scale * (S_0 read_q[i] + sum_{j <= i} qk[i, j] u_j)
// `said`: S_0 read_k, then S_0 read_q; [2 * kChunk, kPanel].
template <Element E>
void solve(const HeadTask& task, const Chunk& c, std::int64_t t, int n, int first, const float* said, float* u) {
  const std::byte* v = task.v.data + t * task.v.stride + first * bytes_of(E);
  std::byte* out = task.out.data + t * task.out.stride + first * bytes_of(E);
  int valid[kTileVecs];
  for (int j = 0; j < kTileVecs; ++j) {
    const int left = task.columns - first - j * kWidth;
    valid[j] = left < 0 ? 0 : left < kWidth ? left : kWidth;
  }
  for (int i = 0; i < n; ++i, v += task.v.stride, out += task.out.stride) {
    Vec error[kTileVecs];
    Vec sum[kTileVecs];
    for (int j = 0; j < kTileVecs; ++j) {
      const float* from = said + i * kPanel + j * kWidth;
      error[j] = load_part<E>(v + j * kWidth * bytes_of(E), valid[j]) - load(from);
      sum[j] = load(from + kChunk * kPanel);
    }
    for (int p = 0; p < i; ++p) {
      const Vec kk = splat(c.pairs[i * kChunk + p]);
      const Vec qk = splat(c.pairs[p * kChunk + i]);
      for (int j = 0; j < kTileVecs; ++j) {
        const Vec x = load(u + p * kPanel + j * kWidth);
        error[j] = fnma(kk, x, error[j]);
        sum[j] = fma(qk, x, sum[j]);
      }
    }
    for (int j = 0; j < kTileVecs; ++j) {
      const Vec x = splat(c.strength[i]) * error[j];
      store(u + i * kPanel + j * kWidth, x);
      const Vec o = splat(task.scale) * fma(splat(c.pairs[i * kChunk + i]), x, sum[j]);
      store_part<E>(out + j * kWidth * bytes_of(E), valid[j], o);
    }
  }
}

}  // namespace
}  // namespace FLASH_KDA_CPU_NAMESPACE
}  // namespace flash_kda::cpu
