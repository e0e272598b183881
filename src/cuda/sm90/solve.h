// Solve role: the triangular system of a chunk. One warp a chunk, three chunks in flight.
//
// With raw keys in A (A_kk[i][j] = sum_c k_i k_j exp(x_i - x_j), j < i), r_i = 1 / sqrt(|k_i|^2 + eps), b_i the writing
// strength, w_i = b_i r_i^2 and W_i = u_i r_i, the delta rule of a chunk is
//
//   (I + diag(w) A_kk) W = diag(b r) V - diag(w) (S K^T)^T    =>    W = Mv V + M (-S K1^T)^T
//   X = (I + diag(w) A_kk)^-1        M = X diag(w)        Mv = X diag(b r)
//
// |k_i|^2 is the diagonal of A_kk. X by fp32 substitution in 8x8 blocks, merged 8 -> 16 -> 32 by tf32 products with
// fp32 sums: with N = -diag(w) A_kk (strictly lower) and X = I + N X, the block below the diagonal is X11 N10 X00.
// No power series anywhere: nearly parallel keys make N large, and the inverse is benign all the same.
//
// Blocks live in accumulator layout: lane 4g + t holds elements (g, 2t) and (g, 2t + 1) of an 8x8 block. A product
// takes its left operand so, and its right operand so when that is given transposed.
// Rounding: N and X to tf32 between merges; M, Mv, A_qk to bf16.
#pragma once

#include "cuda/sm90/stream.h"

namespace flash_kda::sm90 {

struct Block8 {  // an 8x8 block in accumulator layout
  float x0, x1;
};

FLASH_KDA_DEVICE Block8 transposed(const Block8& b, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const int from = 8 * t + (g >> 1);  // the lane that holds element (2t, g)
  const float a0 = shuffle(b.x0, from), a1 = shuffle(b.x1, from);
  const float b0 = shuffle(b.x0, from + 4), b1 = shuffle(b.x1, from + 4);
  return {(g & 1) != 0 ? a1 : a0, (g & 1) != 0 ? b1 : b0};
}

// c += [upper left; lower left] right: two stacked 8x8 blocks times one, whose transpose is given.
FLASH_KDA_DEVICE void multiply_add(float (&c)[4], const Block8& upper, const Block8& lower,
                                   const Block8& right_transposed) {
  mma_tf32(c, round_tf32(upper.x0), round_tf32(lower.x0), round_tf32(upper.x1), round_tf32(lower.x1),
           round_tf32(right_transposed.x0), round_tf32(right_transposed.x1));
}

template <int kStateGroups>
struct SolveRole {
  using Layout = SharedLayout<kStateGroups>;
  static constexpr int kValueBlocks = kValueDim / (kStateGroups * kGroupValues);

  const ForwardParams& params;
  SharedAddress base;
  int warp;  // 0 .. kSolverWarps - 1
  int lane;

  FLASH_KDA_DEVICE int g() const { return lane >> 2; }
  FLASH_KDA_DEVICE int t() const { return lane & 3; }

  // beta of row `lane` of the chunk; 0 strength past the end.
  FLASH_KDA_DEVICE float strength(const ChunkDescriptor& d) const {
    if (lane >= d.rows()) return 0.0f;
    const int batch = params.cu_seqlens != nullptr ? 0 : d.sequence;
    const std::int64_t at = batch * params.beta.batch_stride + (d.token + lane) * params.beta.token_stride +
                            d.head_block / kValueBlocks * params.beta.head_stride;
    const float x = params.beta_fp32
                        ? load_global(static_cast<const float*>(params.beta.data) + at)
                        : bf16_low(load_global(static_cast<const std::uint16_t*>(params.beta.data) + at));
    if (params.beta_map == BetaMap::kIdentity) return x;
    const float sigmoid = reciprocal_approx(1.0f + exp2_approx(-kLog2e * x));
    return params.beta_map == BetaMap::kDoubledSigmoid ? 2.0f * sigmoid : sigmoid;
  }

  // The lower triangle of X1 K2^T in 16x16 blocks: (0,0), (1,0), (1,1), each as two accumulators of 8 columns.
  // `left` is the offset of the left tile in the stage.
  FLASH_KDA_DEVICE void score_blocks(SharedAddress stage, int left, float (&c)[3][2][4]) const {
    FLASH_KDA_UNROLL
    for (int i = 0; i < 24; ++i) c[i / 8][i / 4 % 2][i % 4] = 0.0f;
    const int row = lane & 15;  // of a 16-row block, for the left operand
    const int column = (lane & 7) + ((lane >> 4) << 3);  // key row, for the right operand
    const SharedAddress left_row = stage + left + row * kRowBytes;
    const SharedAddress right_row = stage + kTileG + column * kRowBytes;
    FLASH_KDA_UNROLL
    for (int step = 0; step < kKeyDim / 16; ++step) {
      const int half = (step >> 2) * kChannelHalfBytes;
      const SharedAddress left_at = left_row + half + (((2 * (step & 3) + (lane >> 4)) ^ (row & 7)) << 4);
      const SharedAddress right_at =
          right_row + half + (((2 * (step & 3) + ((lane >> 3) & 1)) ^ (column & 7)) << 4);
      std::uint32_t b0[4], b1[4], a[4];
      load_matrix(right_at, b0);                          // key rows 0..15
      load_matrix(right_at + kHalf * kRowBytes, b1);      // key rows 16..31
      load_matrix(left_at, a);
      mma_bf16(c[0][0], a, b0[0], b0[1]);
      mma_bf16(c[0][1], a, b0[2], b0[3]);
      load_matrix(left_at + kHalf * kRowBytes, a);
      mma_bf16(c[1][0], a, b0[0], b0[1]);
      mma_bf16(c[1][1], a, b0[2], b0[3]);
      mma_bf16(c[2][0], a, b1[0], b1[1]);
      mma_bf16(c[2][1], a, b1[2], b1[3]);
    }
  }

  // Where lane 8i + r writes row r of the i-th of four 8x8 blocks (row and column in units of 8): stmatrix addresses
  // inside a tile whose rows start with 16-byte unit `unit`.
  FLASH_KDA_DEVICE SharedAddress block_row(SharedAddress tile, int unit, int block_row_index, int block_column) const {
    const int row = 8 * block_row_index + (lane & 7);
    return tile + row * kRowBytes + (((unit + block_column) ^ (row & 7)) << 4);
  }

  // Writes the ten blocks of a lower triangle; those above it were zeroed once and stay.
  // values(r, c, row_half...) gives block (r, c) packed to bf16 pairs.
  template <class Packed>
  FLASH_KDA_DEVICE void store_lower(SharedAddress tile, int unit, const Packed& packed) const {
    const int i = lane >> 3;
    // (0,0) (1,0) (1,1) (2,0) | (2,1) (2,2) (3,0) (3,1) | (3,2) (3,3) and once more
    store_matrix(block_row(tile, unit, (i + 1) >> 1, i == 2 ? 1 : 0), packed(0, 0), packed(1, 0), packed(1, 1),
                 packed(2, 0));
    store_matrix(block_row(tile, unit, i < 2 ? 2 : 3, i == 0 || i == 3 ? 1 : (i == 1 ? 2 : 0)), packed(2, 1),
                 packed(2, 2), packed(3, 0), packed(3, 1));
    store_matrix(block_row(tile, unit, 3, (i & 1) != 0 ? 3 : 2), packed(3, 2), packed(3, 3), packed(3, 2),
                 packed(3, 3));
  }

  // Element pair (row block r, column block c) of the blocks of score_blocks.
  FLASH_KDA_DEVICE static Block8 score(const float (&c)[3][2][4], int r, int col) {
    const float(&x)[4] = c[r < 2 ? 0 : (col < 2 ? 1 : 2)][col & 1];
    return (r & 1) != 0 ? Block8{x[2], x[3]} : Block8{x[0], x[1]};
  }

  FLASH_KDA_DEVICE void write_query_scores(SharedAddress stage, SharedAddress solution) const {
    float c[3][2][4];
    score_blocks(stage, kTileQ, c);
    store_lower(solution, 4, [&](int r, int col) {
      const Block8 b = score(c, r, col);
      // Rows attend to themselves and to earlier rows; on the diagonal block, to columns up to their own.
      const bool diagonal = r == col;
      return pack_bf16(!diagonal || 2 * t() <= g() ? b.x0 : 0.0f, !diagonal || 2 * t() + 1 <= g() ? b.x1 : 0.0f);
    });
  }

  // N = -diag(w) A_kk in `n` -> X, both lower triangular in 8x8 blocks; index r (r + 1) / 2 + c.
  FLASH_KDA_DEVICE static constexpr int lower(int r, int c) { return r * (r + 1) / 2 + c; }
  FLASH_KDA_DEVICE void invert(Block8 (&n)[10]) const {
    Block8 x[4];  // inverses of the diagonal blocks, row by row: X[g] = e_g + sum_{m < g} N[g][m] X[m]
    FLASH_KDA_UNROLL
    for (int b = 0; b < 4; ++b) x[b] = {2 * t() == g() ? 1.0f : 0.0f, 2 * t() + 1 == g() ? 1.0f : 0.0f};
    FLASH_KDA_UNROLL
    for (int m = 0; m < 7; ++m) {
      FLASH_KDA_UNROLL
      for (int b = 0; b < 4; ++b) {
        const Block8& d = n[lower(b, b)];
        const float factor = shuffle((m & 1) != 0 ? d.x1 : d.x0, (lane & 28) + (m >> 1));
        const float row0 = shuffle(x[b].x0, 4 * m + t()), row1 = shuffle(x[b].x1, 4 * m + t());
        x[b].x0 = fused_multiply_add(factor, row0, x[b].x0);
        x[b].x1 = fused_multiply_add(factor, row1, x[b].x1);
      }
    }
    merge_8_to_16(n, x);
    merge_16_to_32(n, x);
    FLASH_KDA_UNROLL
    for (int b = 0; b < 4; ++b) n[lower(b, b)] = x[b];
  }

  // Blocks (1,0) and (3,2), two problems in the two halves of each product.
  FLASH_KDA_DEVICE void merge_8_to_16(Block8 (&n)[10], const Block8 (&x)[4]) const {
    Block8& low = n[lower(1, 0)];
    Block8& high = n[lower(3, 2)];
    const Block8 left0 = transposed(x[0], lane), left1 = transposed(x[2], lane);
    float p0[4] = {0, 0, 0, 0}, p1[4] = {0, 0, 0, 0};  // (N10 X00)^T = X00^T N10^T
    multiply_add(p0, left0, left1, low);
    multiply_add(p1, left0, left1, high);
    float y0[4] = {0, 0, 0, 0}, y1[4] = {0, 0, 0, 0};
    multiply_add(y0, x[1], x[3], {p0[0], p0[1]});
    multiply_add(y1, x[1], x[3], {p1[2], p1[3]});
    low = {y0[0], y0[1]};
    high = {y1[2], y1[3]};
  }

  // Blocks (2..3, 0..1).
  FLASH_KDA_DEVICE void merge_16_to_32(Block8 (&n)[10], const Block8 (&x)[4]) const {
    const Block8 left00 = transposed(x[0], lane), left01 = transposed(n[lower(1, 0)], lane);
    const Block8 left11 = transposed(x[1], lane);
    float p[2][4];  // (N10 X00)^T, by 8 rows of N10
    FLASH_KDA_UNROLL
    for (int j = 0; j < 2; ++j) {
      FLASH_KDA_UNROLL
      for (int i = 0; i < 4; ++i) p[j][i] = 0.0f;
      multiply_add(p[j], left00, Block8{0.0f, 0.0f}, n[lower(2 + j, 0)]);
      multiply_add(p[j], left01, left11, n[lower(2 + j, 1)]);
    }
    FLASH_KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      float y[4] = {0, 0, 0, 0};
      multiply_add(y, x[2], n[lower(3, 2)], {p[0][2 * i], p[0][2 * i + 1]});
      multiply_add(y, Block8{0.0f, 0.0f}, x[3], {p[1][2 * i], p[1][2 * i + 1]});
      n[lower(2, i)] = {y[0], y[1]};
      n[lower(3, i)] = {y[2], y[3]};
    }
  }

  FLASH_KDA_DEVICE void write_solution(SharedAddress stage, SharedAddress solution, SharedAddress value_factor,
                                       int value_unit, int table, float beta) const {
    Block8 n[10];
    float weight[4], value_weight[4];  // w and b r of row 8 i + g
    {
      float c[3][2][4];  // -A_kk: K1 is stored negated
      score_blocks(stage, kTileK, c);
      const SharedAddress shifts = base + Layout::kKeyShiftAt + table * kRowTableBytes;
      FLASH_KDA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const Block8 d = score(c, i, i);
        const float norm = -shuffle((g() & 1) != 0 ? d.x1 : d.x0, (lane & 28) + (g() >> 1));
        const float shift = load_f32(shifts + (8 * i + g()) * 4);
        const float r = params.l2norm ? rsqrt_approx(norm + kNormEpsilon * shift * shift) : reciprocal_approx(shift);
        value_weight[i] = shuffle(beta, 8 * i + g()) * r;
        weight[i] = value_weight[i] * r;
      }
      FLASH_KDA_UNROLL
      for (int r = 0; r < 4; ++r) {
        FLASH_KDA_UNROLL
        for (int col = 0; col <= r; ++col) {
          Block8 b = score(c, r, col);
          b = {b.x0 * weight[r], b.x1 * weight[r]};
          if (r == col) b = {2 * t() < g() ? b.x0 : 0.0f, 2 * t() + 1 < g() ? b.x1 : 0.0f};
          n[lower(r, col)] = b;
        }
      }
    }
    invert(n);
    FLASH_KDA_UNROLL
    for (int which = 0; which < 2; ++which) {  // M = X diag(w), Mv = X diag(b r); columns 8c + 2t and + 1
      float column[4][2];
      FLASH_KDA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float row = which == 0 ? weight[i] * kUnboost : value_weight[i] * kValueScale;
        column[i][0] = shuffle(row, 8 * t());
        column[i][1] = shuffle(row, 8 * t() + 4);
      }
      store_lower(which == 0 ? solution : value_factor, which == 0 ? 0 : value_unit, [&](int r, int col) {
        const Block8& b = n[lower(r, col)];
        return pack_bf16(b.x0 * column[col][0], b.x1 * column[col][1]);
      });
    }
  }

  // From the middle of the chunk before to the middle of this one, times 2^96.
  FLASH_KDA_DEVICE void write_step(bool first, int n) const {
    const int table = n & (kTableSlots - 1), before = (n - 1) & (kTableSlots - 1);
    FLASH_KDA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int at = t() * kFactorPitchBytes + (8 * half + g()) * 8;
      const float2 enter = load_f32x2(base + Layout::kEnterAt + table * kFactorBytes + at);
      float2 leave = {1.0f, 1.0f};
      if (!first) leave = load_f32x2(base + Layout::kLeaveAt + before * kFactorBytes + at);
      store_f32x2(base + Layout::kStepAt + table * kFactorBytes + at, enter.x * kBoost * leave.x,
                  enter.y * kBoost * leave.y);
    }
  }

  FLASH_KDA_DEVICE void run() {
    StreamPosition at(warp);
    FLASH_KDA_NO_UNROLL
    for (;; at.advance(kSolverWarps)) {
      barrier_wait(base + Layout::kPrepared + 8 * at.stage, at.parity);
      const ChunkDescriptor d = read_descriptor<Layout>(base, at.n);
      if (!d.stop() && d.rows() > 0) {
        const float beta = strength(d);
        const SharedAddress stage = base + Layout::kStageAt + at.stage * kStageBytes;
        const int slot = at.n & (kSolutionSlots - 1);
        const SharedAddress solution = base + Layout::kSolutionAt + slot * kTileBytes;
        if (at.n >= kSolutionSlots) {
          barrier_wait(base + Layout::kReleased + 8 * at.stage_before(kSolutionSlots),
                       at.parity_before(kSolutionSlots));
        }
        write_query_scores(stage, solution);
        write_solution(stage, solution, base + Layout::kValueFactorAt + (slot >> 1) * kTileBytes, 4 * (slot & 1),
                       at.table(), beta);
      }
      // The chunk before may still be in another warp's hands; its tables are complete once it is solved.
      if (at.n > 0) barrier_wait(base + Layout::kSolved + 8 * at.stage_before(1), at.parity_before(1));
      if (!d.stop() && d.rows() > 0) {
        write_step(d.first(), at.n);
        fence_async_proxy();
      }
      sync_warp();
      if (lane == 0) barrier_arrive(base + Layout::kSolved + 8 * at.stage);
      if (d.stop()) break;
    }
  }
};

}  // namespace flash_kda::sm90
