// Solve role: the triangular system of a chunk. One warp a chunk, three chunks in flight.
//
// With raw keys in A (A_kk[i][j] = sum_c k_i k_j exp(x_i - x_j), j < i), r_i = 1 / sqrt(|k_i|^2 +
// eps), b_i the writing strength and W_i = u_i r_i the update that goes with the raw key, the delta
// rule of a chunk is, for Y_i = W_i / (b_i r_i),
//
//   (I + diag(r) A_kk diag(b r)) Y = V - diag(r) (S K^T)^T    =>    Y = X (V + diag(r) (-S K1^T)^T)
//   X = (I + diag(r) A_kk diag(b r))^-1        W = diag(b r) Y
//
// X has a unit diagonal, so that a token's own value passes without rounding; r and b r are applied
// in fp32. One X serves both terms: of nearly parallel keys its rows sum to nearly nothing, while
// those of X diag(r), rounded by itself, need not, and O adds up what they leave (identical keys:
// 6e-2 instead of 9e-3). |k_i|^2 is the diagonal of A_kk. X by fp32 substitution in 8x8 blocks,
// merged 8 -> 16 -> 32 by tf32 products with fp32 sums: with N = -diag(r) A_kk diag(b r) (strictly
// lower) and X = I + N X, the block below the diagonal is X11 N10 X00. No power series anywhere:
// nearly parallel keys make N large, and the inverse is benign all the same.
//
// Blocks live in accumulator layout: lane 4g + t holds elements (g, 2t) and (g, 2t + 1) of an 8x8
// block. A product takes its left operand so, and its right operand so when that is given
// transposed. Rounding: N and X to tf32 between merges; X to bf16.
//
// Rows of extreme norm: the prepare role works on raw rows. Where a squared norm turns out above
// kPlainSquaredNorm (or not finite) the solver loads the chunk again, gives every row of k and q a
// power of two that brings its norm near 1, prepares the chunk itself, and takes the powers out of
// r and of the output scale. Rare, slow, exact.
#pragma once

#include "cuda/sm90/load.h"
#include "cuda/sm90/prepare.h"
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
  mma_tf32(c, tf32_operand(upper.x0), tf32_operand(lower.x0), tf32_operand(upper.x1),
           tf32_operand(lower.x1), tf32_operand(right_transposed.x0),
           tf32_operand(right_transposed.x1));
}

template <class Block>
struct SolveRole {
  using Layout = SharedLayout<Block>;

  const ForwardParams& params;
  const TensorMaps& maps;
  SharedAddress base;
  int warp;  // 0 .. kSolverWarps - 1
  int lane;

  FLASH_KDA_DEVICE int g() const { return lane >> 2; }
  FLASH_KDA_DEVICE int t() const { return lane & 3; }

  // beta of row `lane` of the chunk as it stands in memory, fp32 or bf16; asked for well before it
  // is used. Past the end: anything.
  FLASH_KDA_DEVICE std::uint32_t load_beta(const ChunkDescriptor& d) const {
    if (lane >= d.rows()) return 0;
    const int batch = params.cu_seqlens != nullptr ? 0 : d.sequence;
    const std::int64_t at = batch * params.beta.batch_stride +
                            (d.token + lane) * params.beta.token_stride +
                            d.head_block / Block::kItemsPerHead * params.beta.head_stride;
    return params.beta_fp32 ? load_global(static_cast<const std::uint32_t*>(params.beta.data) + at)
                            : load_global(static_cast<const std::uint16_t*>(params.beta.data) + at);
  }

  // Writing strength of row `lane`; 0 past the end.
  FLASH_KDA_DEVICE float strength(std::uint32_t beta, int rows) const {
    const float x = params.beta_fp32 ? from_bits(beta) : bf16_low(beta);
    const float sigmoid = reciprocal_approx(1.0f + exp2_approx(-kLog2e * x));
    const float b = params.beta_map == BetaMap::kIdentity
                        ? x
                        : (params.beta_map == BetaMap::kDoubledSigmoid ? 2.0f * sigmoid : sigmoid);
    return lane < rows ? b : 0.0f;
  }

  // The lower triangle of K1 K2^T = -A_kk in 16x16 blocks: (0,0), (1,0), (1,1), each as two
  // accumulators of 8 columns.
  FLASH_KDA_DEVICE void score_blocks(SharedAddress stage, float (&c)[3][2][4]) const {
    FLASH_KDA_UNROLL
    for (int i = 0; i < 24; ++i) c[i / 8][i / 4 % 2][i % 4] = 0.0f;
    const int r = lane & 7;
    SharedAddress left_at =
        stage + Block::kTileK + (lane & 15) * kRowBytes + (((lane >> 4) ^ r) << 4);
    SharedAddress right_at = stage + Block::kTileG + (r + ((lane >> 4) << 3)) * kRowBytes +
                             ((((lane >> 3) & 1) ^ r) << 4);
    FLASH_KDA_NO_UNROLL
    for (int half = 0; half < 2; ++half) {
      FLASH_KDA_UNROLL
      for (int step = 0; step < 4; ++step) {
        const SharedAddress right_step = right_at ^ (step << 5), left_step = left_at ^ (step << 5);
        std::uint32_t b0[4], b1[4], a[4];
        load_matrix(right_step, b0);                      // key rows 0..15
        load_matrix(right_step + kHalf * kRowBytes, b1);  // key rows 16..31
        load_matrix(left_step, a);
        mma_bf16(c[0][0], a, b0[0], b0[1]);
        mma_bf16(c[0][1], a, b0[2], b0[3]);
        load_matrix(left_step + kHalf * kRowBytes, a);
        mma_bf16(c[1][0], a, b0[0], b0[1]);
        mma_bf16(c[1][1], a, b0[2], b0[3]);
        mma_bf16(c[2][0], a, b1[0], b1[1]);
        mma_bf16(c[2][1], a, b1[2], b1[3]);
      }
      left_at += Block::kChannelHalfBytes;
      right_at += Block::kChannelHalfBytes;
    }
  }

  // Writes the ten blocks of a lower triangle with three stmatrix; those above it were zeroed once
  // and stay. packed(r, c) is this lane's pair of block (r, c). Lane 8i + j gives the address of
  // row j of an instruction's i-th block.
  template <class Packed>
  FLASH_KDA_DEVICE void store_lower(SharedAddress tile, int unit, const Packed& packed) const {
    const int i = lane >> 3, j = lane & 7;
    const auto row = [&](int block_row, int block_column) {
      return tile + (8 * block_row + j) * kRowBytes + (((unit + block_column) ^ j) << 4);
    };
    store_matrix(row((i + 1) >> 1, i == 2 ? 1 : 0), packed(0, 0), packed(1, 0), packed(1, 1),
                 packed(2, 0));
    store_matrix(row(i < 2 ? 2 : 3, i == 0 || i == 3 ? 1 : (i == 1 ? 2 : 0)), packed(2, 1),
                 packed(2, 2), packed(3, 0), packed(3, 1));
    store_matrix(row(3, (i & 1) != 0 ? 3 : 2), packed(3, 2), packed(3, 3), packed(3, 2),
                 packed(3, 3));
  }

  // Element pair (row block r, column block c) of the blocks of score_blocks.
  FLASH_KDA_DEVICE static Block8 score(const float (&c)[3][2][4], int r, int col) {
    const float (&x)[4] = c[r < 2 ? 0 : (col < 2 ? 1 : 2)][col & 1];
    return (r & 1) != 0 ? Block8{x[2], x[3]} : Block8{x[0], x[1]};
  }

  // N in `n` -> X, both lower triangular in 8x8 blocks; index r (r + 1) / 2 + c.
  FLASH_KDA_DEVICE static constexpr int lower(int r, int c) { return r * (r + 1) / 2 + c; }
  FLASH_KDA_DEVICE void invert(Block8 (&n)[10]) const {
    Block8
        x[4];  // inverses of the diagonal blocks, row by row: X[g] = e_g + sum_{m < g} N[g][m] X[m]
    FLASH_KDA_UNROLL
    for (int b = 0; b < 4; ++b)
      x[b] = {2 * t() == g() ? 1.0f : 0.0f, 2 * t() + 1 == g() ? 1.0f : 0.0f};
    // Rolled up: the roles' code has to share an instruction cache of 32 KB. The eighth step adds
    // zeros.
    FLASH_KDA_NO_UNROLL
    for (int m = 0; m < 8; m += 2) {
      FLASH_KDA_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        FLASH_KDA_UNROLL
        for (int b = 0; b < 4; ++b) {
          const Block8& d = n[lower(b, b)];
          const float factor = shuffle(odd != 0 ? d.x1 : d.x0, (lane & 28) + (m >> 1));
          const int row = 4 * (m + odd) + t();
          const float row0 = shuffle(x[b].x0, row), row1 = shuffle(x[b].x1, row);
          x[b].x0 = fused_multiply_add(factor, row0, x[b].x0);
          x[b].x1 = fused_multiply_add(factor, row1, x[b].x1);
        }
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

  // Squared norm of k of row 8i + g: the diagonal of -A_kk (K1 is stored negated).
  FLASH_KDA_DEVICE float key_norm(const float (&c)[3][2][4], int i) const {
    const Block8 d = score(c, i, i);
    return -shuffle((g() & 1) != 0 ? d.x1 : d.x0, (lane & 28) + (g() >> 1));
  }

  // Output scale of row `lane`; its squared norm of q is returned.
  FLASH_KDA_DEVICE float write_query_scale(int table, float shift) const {
    const SharedAddress norms = base + Layout::kQueryNormAt + 2 * table * kRowTableBytes + lane * 4;
    const float norm = load_f32(norms) + load_f32(norms + kRowTableBytes);
    // The norm is of the raw row, the product of the shifted one.
    const float scale =
        (params.l2norm ? rsqrt_approx(norm + kNormEpsilon) : 1.0f) * reciprocal_approx(shift);
    store_f32(base + Layout::kQueryScaleAt + table * kRowTableBytes + lane * 4,
              scale * (params.scale * (kValueUnscale * kUnboost)));
    return norm;
  }

  // X and r of a chunk from its scores, and the scale of its updates. `c`: -A_kk; `shifts`: powers
  // of two of the rows of k, or 0.
  FLASH_KDA_DEVICE void write_solution(const float (&c)[3][2][4], SharedAddress shifts, float beta,
                                       SharedAddress solution,
                                       const StreamPosition<Block>& at) const {
    Block8 n[10];
    float rate[4];  // r of row 8i + g
    {
      float weight[4][2];  // b r of columns 8i + 2t and + 1
      FLASH_KDA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float shift = shifts != 0 ? load_f32(shifts + (8 * i + g()) * 4) : 1.0f;
        rate[i] = params.l2norm ? rsqrt_approx(key_norm(c, i) + kNormEpsilon * shift * shift)
                                : reciprocal_approx(shift);
        const float row = shuffle(beta, 8 * i + g()) * rate[i];
        if (t() == 0) {
          store_f32(base + Layout::kUpdateScaleAt + at.table() * kRowTableBytes + (8 * i + g()) * 4,
                    row * kValueScale);
        }
        weight[i][0] = shuffle(row, 8 * t());
        weight[i][1] = shuffle(row, 8 * t() + 4);
      }
      FLASH_KDA_UNROLL
      for (int r = 0; r < 4; ++r) {
        FLASH_KDA_UNROLL
        for (int col = 0; col <= r; ++col) {
          Block8 b = score(c, r, col);
          b = {b.x0 * rate[r] * weight[col][0], b.x1 * rate[r] * weight[col][1]};
          if (r == col) b = {2 * t() < g() ? b.x0 : 0.0f, 2 * t() + 1 < g() ? b.x1 : 0.0f};
          n[lower(r, col)] = b;
        }
      }
    }
    invert(n);
    if (at.n >= kSolutionSlots) {  // only now is the slot needed
      barrier_wait(base + Layout::kReleased + 8 * at.stage_before(kSolutionSlots),
                   at.parity_before(kSolutionSlots));
    }
    store_lower(solution, 4, [&](int r, int col) {
      const Block8& b = n[lower(r, col)];
      return pack_bf16(b.x0, b.x1);
    });
    // r beside X, in the half of rows 0 and 1 that X leaves free; the products of the state are
    // times 2^96 2^-8.
    if (t() == 0) {
      FLASH_KDA_UNROLL
      for (int i = 0; i < 4; ++i) {
        store_f32(solution + (i >> 1) * kRowBytes + (8 * (i & 1) + g()) * 4,
                  rate[i] * (kUnboost * kValueUnscale));
      }
    }
  }

  FLASH_KDA_DEVICE void solve_chunk(const ChunkDescriptor& d,
                                    const StreamPosition<Block>& at) const {
    const SharedAddress stage = base + Layout::kStageAt + at.stage * Block::kStageBytes;
    const int slot = at.n & (kSolutionSlots - 1), table = at.table();
    const SharedAddress solution = base + Layout::kSolutionAt + slot * kTileBytes;
    const std::uint32_t beta = load_beta(d);
    float c[3][2][4];
    score_blocks(stage, c);
    // Rows past the end are not ours to judge (those of k are zero by now).
    bool extreme = false;
    if (!Block::kMaps || !d.map()) {
      extreme = !(write_query_scale(table, 1.0f) <= kPlainSquaredNorm) && lane < d.rows();
    }
    FLASH_KDA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float norm = key_norm(c, i);  // by the whole warp, whatever a lane has found before
      extreme = extreme || !(norm <= kPlainSquaredNorm);
    }
    SharedAddress shifts = 0;
    if (any_in_warp(extreme)) {
      shifts = base + Layout::kShiftAt + 2 * warp * kRowTableBytes;
      prepare_shifted(d, at);
      if (!Block::kMaps || !d.map()) {
        write_query_scale(table, load_f32(shifts + kRowTableBytes + lane * 4));
      }
      score_blocks(stage, c);
    }
    write_solution(c, shifts, strength(beta, d.rows()), solution, at);
  }

  // ---- rows of extreme norm ----

  // The power of two for each of 32 rows of `tile` (k or q), from the largest element of the row.
  FLASH_KDA_DEVICE void write_shifts(SharedAddress tile, SharedAddress shifts) const {
    std::uint32_t largest = 0;  // of row `lane`, as bits of a magnitude
    for (int unit = 0; unit < 16; ++unit) {
      const uint4 x = load_u32x4(tile + (unit >> 3) * Block::kChannelHalfBytes + lane * kRowBytes +
                                 (((unit & 7) ^ (lane & 7)) << 4));
      for (const std::uint32_t pair : {x.x, x.y, x.z, x.w}) {
        largest = largest > (pair & 0x7fff0000u) ? largest : pair & 0x7fff0000u;
        largest = largest > (pair << 16 & 0x7fff0000u) ? largest : pair << 16 & 0x7fff0000u;
      }
    }
    const int exponent = static_cast<int>(largest >> 23);  // biased
    const bool shifts_help = exponent > 127 && exponent < 255;
    const int power = exponent < 254 ? 254 - exponent : 1;  // biased; no smaller normal number
    store_f32(shifts + lane * 4,
              shifts_help ? from_bits(static_cast<std::uint32_t>(power) << 23) : 1.0f);
  }

  FLASH_KDA_DEVICE void prepare_shifted(const ChunkDescriptor& d,
                                        const StreamPosition<Block>& at) const {
    const SharedAddress stage = base + Layout::kStageAt + at.stage * Block::kStageBytes;
    const SharedAddress barrier = base + Layout::kReloaded + 8 * warp;
    fence_async_proxy();  // the copy engine overwrites what the prepare role wrote
    sync_warp();
    if (lane == 0) {
      const int batch = params.cu_seqlens != nullptr ? 0 : d.sequence;
      barrier_arrive_expect(barrier, Block::kStageBytes);
      load_chunk<Block>(maps, stage, barrier, d.head_block / Block::kItemsPerHead,
                        d.head_block / Block::kItemsPerHead / params.heads_per_key, d.token, batch);
    }
    const SharedAddress parity_at = base + Layout::kReloadParityAt + 4 * warp;
    const std::uint32_t parity = load_u32(parity_at);
    barrier_wait(barrier, static_cast<int>(parity));
    sync_warp();
    if (lane == 0) store_u32(parity_at, parity ^ 1);
    const SharedAddress shifts = base + Layout::kShiftAt + 2 * warp * kRowTableBytes;
    write_shifts(stage + Block::kTileK, shifts);
    write_shifts(stage + Block::kTileQ, shifts + kRowTableBytes);
    sync_warp();
    FLASH_KDA_NO_UNROLL
    for (int part = 0; part < kWarpgroup / kWarp;
         ++part) {  // the four warps' work, one after the other
      const PrepareRole<Block> prepare{params, base, 0, part, lane};
      BoundedGate gate = {};
      gate.open(params, d.head_block / Block::kItemsPerHead, prepare.channel(), false);
      prepare.template write_products<false, RowKind::kShifted>(stage, gate, d.rows(), shifts,
                                                                at.table());
    }
    sync_warp();
    if (!Block::kMaps || !d.map()) {
      for (int part = 0; part < 3; ++part) {
        PrepareRole<Block>{params, base, 0, part, lane}.query_scores(stage, at.stage);
      }
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
    StreamPosition<Block> at(warp);
    FLASH_KDA_NO_UNROLL
    for (;; at.advance(kSolverWarps)) {
      barrier_wait(base + Layout::kPrepared + 8 * at.stage, at.parity);
      lane = lane_index();
      const ChunkDescriptor d = read_descriptor<Layout>(base, at.n);
      const bool work = !d.stop() && d.rows() > 0;
      if (work) solve_chunk(d, at);
      // The chunk before may still be in another warp's hands; its tables are complete once it is
      // solved.
      if (at.n > 0)
        barrier_wait(base + Layout::kSolved + 8 * at.stage_before(1), at.parity_before(1));
      if (work) {
        write_step(d.first(), at.n);
        fence_async_proxy();  // for what this warp wrote, and for K1, Q1, K2 of the prepare role
      }
      const bool stop = !work && read_descriptor<Layout>(base, read_anew(at.n)).stop();
      sync_warp();
      if (lane == 0) barrier_arrive(base + Layout::kSolved + 8 * at.stage);
      if (stop) break;
    }
  }
};

}  // namespace flash_kda::sm90
