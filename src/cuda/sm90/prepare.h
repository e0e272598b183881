// Prepare role: from raw q, k, g to the operands of the products, in place.
//
// With x the running log decay of a channel inside the chunk and m its value at the chunk's middle
// (after row 15):
//
//   K1 = -k exp(x - m)    Q1 = q exp(x - m)    K2 = k exp(m - x)        bf16, |x - m| <= 80 nats
//
// so that -K1 K2^T = A_kk, Q1 K2^T = A_qk, and S K1^T, S Q1^T, U K2 need no other factor once S is
// held relative to the middle. The same tiles serve every product.
//
// A chunk is the work of four warps: 16 rows (above or below the middle) x 64 channels each; a lane
// owns two channels and walks away from the middle, so the running sum starts at zero and is exact
// there. When the four are done, three of them compute A_qk, which needs nothing but their
// products.
//
// The writes need a proxy fence before wgmma reads them; it is the solve role's, on the path from
// here to there. Rounding: gate, sum and exponentials in fp32; K1, Q1, K2 to bf16, A_qk to two.
#pragma once

#include "cuda/sm90/stream.h"

namespace flash_kda::sm90 {

// The gate of one head for a lane's two channels: log2 decay = lower_bound * log2(e) * sigmoid(a *
// (g + bias)).
struct BoundedGate {
  float slope;          // -a log2(e)
  float inverse_bound;  // 1 / (lower_bound log2(e))
  float constant[2];    // plain: slope * bias; else bias itself

  // Reads the parameters of a head. True ("plain") if slope * g + slope * bias is accurate: the
  // second product is rounded before g joins, so where it is large and g cancels it, g + bias has
  // to come first.
  FLASH_KDA_DEVICE bool open(const ForwardParams& p, int head, int channel, bool allow_plain) {
    const float a = p.a_log != nullptr ? expf(load_global(p.a_log + head)) : 1.0f;
    // A finite slope: a gate argument of exactly 0 must stay 0 however large A_log is. NaN passes.
    slope = -(a > 1e30f ? 1e30f : a) * kLog2e;
    inverse_bound = 1.0f / (fminf(p.lower_bound, -1e-30f) * kLog2e);
    bool plain = allow_plain && fabsf(slope) < 1e6f;
    FLASH_KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      constant[i] = p.dt_bias != nullptr
                        ? load_global(p.dt_bias + head * p.dt_bias_head_stride + channel + i)
                        : 0.0f;
      plain = plain && fabsf(slope * constant[i]) < 1024.0f;
    }
    plain = !any_in_warp(!plain);
    if (plain) constant[0] *= slope, constant[1] *= slope;
    return plain;
  }

  // Log2 decay of channel i. The reciprocal carries the bound: 1 / (ib + ib e) = bound / (1 + e).
  template <bool kPlain>
  FLASH_KDA_DEVICE float log2_decay(float g, int i) const {
    const float argument =
        kPlain ? fused_multiply_add(g, slope, constant[i]) : (g + constant[i]) * slope;
    return reciprocal_approx(
        fused_multiply_add(exp2_approx(argument), inverse_bound, inverse_bound));
  }
};

// How a warp's rows are to be read: whole, or with rows past the end, or with rows scaled by powers
// of two.
enum class RowKind { kPlain, kMasked, kShifted };

template <class Block>
struct PrepareRole {
  using Layout = SharedLayout<Block>;
  static constexpr int kRowsAtOnce = 2;

  const ForwardParams& params;
  SharedAddress base;
  int group;  // which of the prepare warpgroups
  int warp;   // in the warpgroup
  int lane;   // read again for every chunk: there are no registers to keep what follows from it

  FLASH_KDA_DEVICE int side() const { return warp >> 1; }  // 0: rows 0..15, 1: rows 16..31
  FLASH_KDA_DEVICE int channel_half() const { return warp & 1; }
  FLASH_KDA_DEVICE int channel() const { return 64 * channel_half() + 2 * lane; }

  // This half's share of the squared norms of this side's 16 rows of q: the diagonal of Q Q^T.
  FLASH_KDA_DEVICE void query_norms(SharedAddress stage, int table) const {
    // Left operand: rows 0..7 | 8..15 of units u, then of u + 1. Right: units u, u + 1 of rows
    // 0..7, then of 8..15.
    const int r = lane & 7;
    const SharedAddress rows = stage + channel_half() * Block::kChannelHalfBytes + Block::kTileQ +
                               side() * kHalf * kRowBytes;
    const SharedAddress left = rows + (lane & 15) * kRowBytes + (((lane >> 4) ^ r) << 4);
    const SharedAddress right =
        rows + ((lane >> 4) * 8 + r) * kRowBytes + ((((lane >> 3) & 1) ^ r) << 4);
    float low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
    FLASH_KDA_UNROLL
    for (int step = 0; step < 4; ++step) {
      std::uint32_t a[4], b[4];
      load_matrix(left ^ (step << 5), a);
      load_matrix(right ^ (step << 5), b);
      mma_bf16(low, a, b[0], b[1]);
      mma_bf16(high, a, b[2], b[3]);
    }
    const int g = lane >> 2;
    if ((lane & 3) == (g >> 1)) {  // the lane that holds the diagonal elements of rows g and g + 8
      const SharedAddress at = base + Layout::kQueryNormAt +
                               (2 * table + channel_half()) * kRowTableBytes +
                               (side() * kHalf + g) * 4;
      store_f32(at, (g & 1) != 0 ? low[1] : low[0]);
      store_f32(at + 32, (g & 1) != 0 ? high[3] : high[2]);
    }
    sync_warp();  // every lane has read q before any lane writes Q1 over it
  }

  // `block` counts away from the middle; the address of its row i (of rising rows) is
  // row_address(..., i).
  template <bool kUpper>
  FLASH_KDA_DEVICE static SharedAddress block_address(SharedAddress tile, int block) {
    const int first = kUpper ? kRowsAtOnce * block : kHalf - kRowsAtOnce * (block + 1);
    return (tile ^ static_cast<SharedAddress>((first & 7) << 4)) + first * kRowBytes;
  }
  FLASH_KDA_DEVICE static SharedAddress row_address(SharedAddress block, int i) {
    return (block ^ static_cast<SharedAddress>(i << 4)) + i * kRowBytes;
  }
  // The products of this warp's rows. kUpper: rows 16..31, downwards from the middle; else
  // rows 15..0, upwards. kPlainGate: slope * g + offset is accurate. `shifts`: powers of two of the
  // rows of k, then q (kShifted). Leaves the log2 decay of the side in `total`.
  template <bool kUpper, bool kPlainGate, RowKind kKind, bool kQueries>
  FLASH_KDA_DEVICE void products(SharedAddress tile, const BoundedGate& gate, int valid_rows,
                                 SharedAddress shifts, float (&total)[2]) const {
    float sum[2] = {0.0f, 0.0f};
    constexpr int kBlocks = kHalf / kRowsAtOnce;
    std::uint32_t g[kRowsAtOnce], k[kRowsAtOnce], q[kRowsAtOnce];
    FLASH_KDA_UNROLL
    for (int i = 0; i < kRowsAtOnce; ++i)
      g[i] = load_u32(row_address(block_address<kUpper>(tile, 0), i) + Block::kTileG);
    FLASH_KDA_NO_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      const SharedAddress here = block_address<kUpper>(tile, block);
      FLASH_KDA_UNROLL
      for (int i = 0; i < kRowsAtOnce; ++i) {
        k[i] = load_u32(row_address(here, i) + Block::kTileK);
        q[i] = kQueries ? load_u32(row_address(here, i) + Block::kTileQ) : 0;
      }
      float decay[kRowsAtOnce][2];
      FLASH_KDA_UNROLL
      for (int i = 0; i < kRowsAtOnce; ++i) {
        decay[i][0] = gate.template log2_decay<kPlainGate>(bf16_low(g[i]), 0);
        decay[i][1] = gate.template log2_decay<kPlainGate>(bf16_high(g[i]), 1);
      }
      if (block + 1 < kBlocks) {  // the next gates, fetched under this block's arithmetic
        FLASH_KDA_UNROLL
        for (int i = 0; i < kRowsAtOnce; ++i) {
          g[i] = load_u32(row_address(block_address<kUpper>(tile, block + 1), i) + Block::kTileG);
        }
      }
      FLASH_KDA_UNROLL
      for (int step = 0; step < kRowsAtOnce; ++step) {
        const int i = kUpper ? step : kRowsAtOnce - 1 - step;
        const int row =
            kUpper ? kHalf + kRowsAtOnce * block + i : kHalf - kRowsAtOnce * (block + 1) + i;
        const bool valid = kKind == RowKind::kPlain || row < valid_rows;
        if (!valid) decay[i][0] = decay[i][1] = 0.0f;
        if (kUpper) {
          sum[0] += decay[i][0];
          sum[1] += decay[i][1];
        }
        const float with0 = exp2_approx(sum[0]), with1 = exp2_approx(sum[1]);
        const float against0 = exp2_approx(-sum[0]), against1 = exp2_approx(-sum[1]);
        if (!kUpper) {  // walking up: the sum is minus the decay from the row to the middle
          sum[0] -= decay[i][0];
          sum[1] -= decay[i][1];
        }
        float k0 = bf16_low(k[i]), k1 = bf16_high(k[i]);
        float q0 = bf16_low(q[i]), q1 = bf16_high(q[i]);
        if (kKind == RowKind::kShifted) {
          const float key_shift = load_f32(shifts + row * 4),
                      query_shift = load_f32(shifts + kRowTableBytes + row * 4);
          k0 *= key_shift, k1 *= key_shift, q0 *= query_shift, q1 *= query_shift;
        }
        if (!valid) k0 = k1 = q0 = q1 = 0.0f;
        const SharedAddress at = row_address(here, i);
        store_u32(at + Block::kTileG, pack_bf16(k0 * against0, k1 * against1));
        store_u32(at + Block::kTileK, pack_bf16(-k0 * with0, -k1 * with1));
        if constexpr (kQueries) {
          store_u32(at + Block::kTileQ, pack_bf16(q0 * with0, q1 * with1));
        }
      }
    }
    total[0] = kUpper ? sum[0] : -sum[0];
    total[1] = kUpper ? sum[1] : -sum[1];
  }

  // Everything a warp writes of a chunk but the norms.
  template <bool kPlainGate, RowKind kKind, bool kQueries = true>
  FLASH_KDA_DEVICE void write_products(SharedAddress stage, const BoundedGate& gate, int valid_rows,
                                       SharedAddress shifts, int table) const {
    const SharedAddress tile = stage + channel_half() * Block::kChannelHalfBytes +
                               side() * kHalf * kRowBytes + ((lane >> 2) << 4) + ((lane & 3) << 2);
    float total[2];
    if (side() != 0) {
      products<true, kPlainGate, kKind, kQueries>(tile, gate, valid_rows, shifts, total);
    } else {
      products<false, kPlainGate, kKind, kQueries>(tile, gate, valid_rows, shifts, total);
    }
    const SharedAddress factors =
        base + (side() != 0 ? Layout::kLeaveAt : Layout::kEnterAt) + table * kFactorBytes;
    store_f32x2(factors + (lane & 3) * kFactorPitchBytes + (8 * channel_half() + (lane >> 2)) * 8,
                exp2_approx(total[0]), exp2_approx(total[1]));
  }

  // A_qk, lower triangle, times 2^96 as the products of the state that it is added to; as bf16 and
  // what that leaves. Warp 0: rows 0..15; warps 1 and 2: rows 16..31, columns 0..15 and 16..31.
  FLASH_KDA_DEVICE void query_scores(SharedAddress stage, int stage_index) const {
    const int row_half = warp == 0 ? 0 : 1, column_half = warp == 2 ? 1 : 0;
    const int r = lane & 7, g = lane >> 2, t = lane & 3;
    SharedAddress left = stage + Block::kTileQ + (row_half * kHalf + (lane & 15)) * kRowBytes +
                         (((lane >> 4) ^ r) << 4);
    SharedAddress right = stage + Block::kTileG +
                          (column_half * kHalf + ((lane >> 4) << 3) + r) * kRowBytes +
                          ((((lane >> 3) & 1) ^ r) << 4);
    float c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
    FLASH_KDA_NO_UNROLL
    for (int half = 0; half < 2; ++half) {
      FLASH_KDA_UNROLL
      for (int step = 0; step < 4; ++step) {
        std::uint32_t a[4], b[4];
        load_matrix(left ^ (step << 5), a);
        load_matrix(right ^ (step << 5), b);
        mma_bf16(c[0], a, b[0], b[1]);
        mma_bf16(c[1], a, b[2], b[3]);
      }
      left += Block::kChannelHalfBytes;
      right += Block::kChannelHalfBytes;
    }
    // A row sees itself and earlier rows: on a diagonal block, columns up to its own.
    const bool whole = row_half != column_half;
    std::uint32_t high[4], low[4];  // blocks (0, 0), (1, 0), (0, 1), (1, 1) of 8x8
    FLASH_KDA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * (i & 1) + g, column = 8 * (i >> 1) + 2 * t;
      float x = c[i >> 1][2 * (i & 1)] * kBoost, y = c[i >> 1][2 * (i & 1) + 1] * kBoost;
      x = whole || column <= row ? x : 0.0f;
      y = whole || column + 1 <= row ? y : 0.0f;
      high[i] = pack_bf16(x, y);
      low[i] = pack_bf16(x - bf16_low(high[i]), y - bf16_high(high[i]));
    }
    const SharedAddress tile = base + Layout::kQueryScoreAt + stage_index * kTileBytes +
                               (row_half * kHalf + (lane & 15)) * kRowBytes +
                               (((2 * column_half + (lane >> 4)) ^ r) << 4);
    store_matrix(tile, high[0], high[1], high[2], high[3]);
    store_matrix(tile ^ 64, low[0], low[1], low[2], low[3]);
  }

  FLASH_KDA_DEVICE void run() {
    BoundedGate gate = {};
    bool plain_gate = false;
    int open_head = -1;
    StreamPosition<Block> at(group);
    FLASH_KDA_NO_UNROLL
    for (;; at.advance(Roles<Block>::kPrepareGroups)) {
      barrier_wait(base + Layout::kLoaded + 8 * at.stage, at.parity);
      lane = lane_index();
      const ChunkDescriptor d = read_descriptor<Layout>(base, at.n);
      if (!d.stop() && d.rows() > 0) {
        // A group sees every second or third chunk: the first that it sees of an item may not be
        // the item's first.
        if (d.head_block != open_head) {
          open_head = d.head_block;
          plain_gate = gate.open(params, d.head_block / Block::kItemsPerHead, channel(), true);
        }
        const SharedAddress stage = base + Layout::kStageAt + at.stage * Block::kStageBytes;
        const bool queries = !Block::kMaps || !d.map();
        if (queries) query_norms(stage, at.table());
        if (Block::kMaps && !queries && plain_gate) {  // never partial
          write_products<true, RowKind::kPlain, false>(stage, gate, kChunk, 0, at.table());
        } else if (plain_gate && !d.partial()) {
          write_products<true, RowKind::kPlain>(stage, gate, kChunk, 0, at.table());
        } else if (plain_gate) {
          write_products<true, RowKind::kMasked>(stage, gate, d.rows(), 0, at.table());
        } else {
          write_products<false, RowKind::kMasked>(stage, gate, d.rows(), 0, at.table());
        }
        if (queries) {
          sync_named(1 + group, kWarpgroup);
          if (warp < 3) query_scores(stage, at.stage);
        }
      }
      sync_warp();
      if (lane == 0) barrier_arrive(base + Layout::kPrepared + 8 * at.stage);
      if (d.stop() && (d.rows_flags & 63) < Roles<Block>::kPrepareGroups)
        break;  // fewer end marks follow than groups
    }
  }
};

}  // namespace flash_kda::sm90
