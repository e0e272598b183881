// What a chunk of n <= kChunk tokens needs that does not depend on the column of V.
//
// With d_i = exp(g_i) and products of decays written D(a..b) = d_a * ... * d_b, by channel:
//
//   read_k[i]  = k_i * D(0..i)        S_0 read_k[i] is what the state at the chunk's start says to key i
//   read_q[i]  = q_i * D(0..i)
//   write[j]   = k_j * D(j+1..n-1)    what u_j adds to the state at the chunk's end
//   decay      = D(0..n-1)
//   kk[i, j]   = sum_K k_i * k_j * D(j+1..i)    j < i
//   qk[i, j]   = sum_K q_i * k_j * D(j+1..i)    j <= i
//
// Only products of decays, never a quotient: each factor is at most 1, so nothing overflows whatever the gate, a decay
// of exactly 0 or 1 stays exact, and there is no reference point to choose. At 8 tokens a chunk these pair products are
// some 3% of the work.

namespace flash_kda::cpu {
namespace FLASH_KDA_CPU_NAMESPACE {
namespace {

inline constexpr int kPairs = kChunk * kChunk;
// Row sums are taken kWidth rows at a time.
inline constexpr int kNorms = 2 * kChunk > kWidth ? 2 * kChunk : kWidth;
static_assert(kPairs % kWidth == 0 && kNorms % kWidth == 0);

struct Chunk {
  float* q;      // [2 * kChunk, pitch]: queries, then keys; zeros from token n on
  float* k;      // = q + kChunk * pitch
  float* d;      // [kChunk, pitch]; 1 from token n on
  float* read;   // [2 * kChunk, pitch]: read_k, read_q
  float* write;  // [kChunk, pitch]
  float* decay;  // [pitch]
  float* bias;   // [pitch]
  // kk[i, j] at i * kChunk + j, qk[i, j] at j * kChunk + i: together they fill the square.
  alignas(64) float pairs[kPairs];
  alignas(64) float strength[kNorms];
  int pitch;  // K, padded to whole vectors
};

void normalize(const Chunk& c) {
  alignas(64) float inverse[kNorms];
  Vec sums[kNorms];
  for (int r = 0; r < kNorms; ++r) {
    sums[r] = splat(0);
    if (r >= 2 * kChunk) continue;
    const float* row = c.q + r * c.pitch;
    for (int k = 0; k < c.pitch; k += kWidth) sums[r] = fma(load(row + k), load(row + k), sums[r]);
  }
  for (int r = 0; r < kNorms; r += kWidth) {
    store(inverse + r, splat(1) / sqrt(row_sums(sums + r) + splat(kL2NormEpsilon)));
  }
  for (int r = 0; r < 2 * kChunk; ++r) {
    float* row = c.q + r * c.pitch;
    const Vec factor = splat(inverse[r]);
    for (int k = 0; k < c.pitch; k += kWidth) store(row + k, load(row + k) * factor);
  }
}

// Raw gates in c.d become decays; c.decay is the exponential of the summed log decays, which over a long sequence
// strays less than a product of n rounded factors.
template <GateForm F>
void decays(const Chunk& c, const Gate& gate, int n) {
  for (int k = 0; k < c.pitch; k += kWidth) {
    const Vec bias = load(c.bias + k);
    Vec sum = splat(0);
    float* d = c.d + k;
    for (int i = 0; i < n; ++i, d += c.pitch) {
      const Vec g = log_decay<F>(gate, load(d) + bias);
      sum = sum + g;
      store(d, exp(g));
    }
    for (int i = n; i < kChunk; ++i, d += c.pitch) store(d, splat(1));
    store(c.decay + k, exp(sum));
  }
}

void read_and_write_rows(const Chunk& c, int n) {
  const int pitch = c.pitch;
  for (int k = 0; k < pitch; k += kWidth) {
    Vec product = splat(1);
    for (int i = 0; i < n; ++i) {
      product = product * load(c.d + i * pitch + k);
      store(c.read + i * pitch + k, load(c.k + i * pitch + k) * product);
      store(c.read + (kChunk + i) * pitch + k, load(c.q + i * pitch + k) * product);
    }
    product = splat(1);
    for (int j = n - 1; j >= 0; --j) {
      store(c.write + j * pitch + k, load(c.k + j * pitch + k) * product);
      product = product * load(c.d + j * pitch + k);
    }
  }
}

// Column j of kk and qk, as vectors still to be summed.
template <int J>
void pair_column(const Chunk& c, Vec* partial) {
  Vec kk[kChunk];
  Vec qk[kChunk];
  for (int i = J; i < kChunk; ++i) kk[i] = qk[i] = splat(0);
  const int pitch = c.pitch;
  for (int k = 0; k < pitch; k += kWidth) {
    Vec w = load(c.k + J * pitch + k);
    qk[J] = fma(w, load(c.q + J * pitch + k), qk[J]);
#pragma GCC unroll 8
    for (int i = J + 1; i < kChunk; ++i) {
      w = w * load(c.d + i * pitch + k);
      kk[i] = fma(w, load(c.k + i * pitch + k), kk[i]);
      qk[i] = fma(w, load(c.q + i * pitch + k), qk[i]);
    }
  }
  partial[J * kChunk + J] = qk[J];
  for (int i = J + 1; i < kChunk; ++i) {
    partial[i * kChunk + J] = kk[i];
    partial[J * kChunk + i] = qk[i];
  }
}

template <int... J>
void pair_columns(Chunk& c, std::integer_sequence<int, J...> /*columns*/) {
  Vec partial[kPairs];
  (pair_column<J>(c, partial), ...);
  for (int r = 0; r < kPairs; r += kWidth) store(c.pairs + r, row_sums(partial + r));
}

void strengths(const HeadTask& task, std::int64_t t, int n, float* strength) {
  alignas(64) float rows[kChunk * kWidth];
  load_rows(task.beta, t, n, 1, rows, kWidth);
  for (int i = 0; i < kNorms; ++i) strength[i] = 0;
  for (int i = 0; i < n; ++i) strength[i] = rows[i * kWidth];
  if (!task.strength.logit) return;
  for (int i = 0; i < kNorms; i += kWidth) {
    store(strength + i, splat(task.strength.multiplier) * sigmoid(load(strength + i)));
  }
}

void prepare(const HeadTask& task, std::int64_t t, int n, Chunk& c) {
  const std::size_t blank = sizeof(float) * static_cast<std::size_t>((kChunk - n) * c.pitch);
  load_rows(task.q, t, n, task.key_dim, c.q, c.pitch);
  load_rows(task.k, t, n, task.key_dim, c.k, c.pitch);
  __builtin_memset(c.q + n * c.pitch, 0, blank);
  __builtin_memset(c.k + n * c.pitch, 0, blank);
  load_rows(task.g, t, n, task.key_dim, c.d, c.pitch);
  switch (task.gate.form) {
    case GateForm::kLowerBound:
      decays<GateForm::kLowerBound>(c, task.gate, n);
      break;
    case GateForm::kSoftplus:
      decays<GateForm::kSoftplus>(c, task.gate, n);
      break;
    case GateForm::kLogDecay:
      decays<GateForm::kLogDecay>(c, task.gate, n);
      break;
  }
  if (task.l2norm) normalize(c);
  strengths(task, t, n, c.strength);
  read_and_write_rows(c, n);
  pair_columns(c, std::make_integer_sequence<int, kChunk>());
}

}  // namespace
}  // namespace FLASH_KDA_CPU_NAMESPACE
}  // namespace flash_kda::cpu
