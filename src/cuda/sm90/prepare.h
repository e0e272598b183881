// Prepare role: from raw q, k, g to the operands of the products, in place.
//
// With x the running log decay of a channel inside the chunk and m its value at the chunk's middle (after row 15):
//
//   K1 = -k exp(x - m)    Q1 = q exp(x - m)    K2 = k exp(m - x)        bf16, |x - m| <= 80 nats
//
// so that -K1 K2^T = A_kk, Q1 K2^T = A_qk, and S K1^T, S Q1^T, U K2 need no other factor once S is held relative to
// the middle. The same tiles serve every product.
//
// A chunk is the work of four warps: 16 rows (above or below the middle) x 64 channels each; a lane owns two
// channels and walks away from the middle, so the running sum starts at zero and is exact there.
// Rounding: gate, sum and exponentials in fp32; K1, Q1, K2 to bf16.
#pragma once

#include "cuda/sm90/stream.h"

namespace flash_kda::sm90 {

// The gate of one head for a lane's two channels: log2 decay = lower_bound * log2(e) * sigmoid(a * (g + bias)).
struct BoundedGate {
  float slope;                   // -a log2(e)
  float bias[2];                 // dt_bias
  float offset[2];               // slope * bias
  float inverse_bound;           // 1 / (lower_bound log2(e))
  bool plain;                    // slope * g + offset is accurate

  FLASH_KDA_DEVICE void open(const ForwardParams& p, int head, int channel) {
    const float a = p.a_log != nullptr ? expf(load_global(p.a_log + head)) : 1.0f;
    // A finite slope: a gate argument of exactly 0 must stay 0 however large A_log is. NaN passes.
    slope = -(a > 1e30f ? 1e30f : a) * kLog2e;
    bool small = fabsf(slope) < 1e6f;
    FLASH_KDA_UNROLL
    for (int i = 0; i < 2; ++i) {
      bias[i] =
          p.dt_bias != nullptr ? load_global(p.dt_bias + head * p.dt_bias_head_stride + channel + i) : 0.0f;
      offset[i] = slope * bias[i];
      // slope * bias is rounded before g joins: where it is large and g cancels it, the sum comes first instead.
      small = small && fabsf(offset[i]) < 1024.0f;
    }
    plain = small;
    inverse_bound = 1.0f / (fminf(p.lower_bound, -1e-30f) * kLog2e);
  }

  // Log2 decay of channel i. The reciprocal carries the bound: 1 / (ib + ib e) = bound / (1 + e).
  template <bool kPlain>
  FLASH_KDA_DEVICE float log2_decay(float g, int i) const {
    const float argument = kPlain ? fused_multiply_add(g, slope, offset[i]) : (g + bias[i]) * slope;
    return reciprocal_approx(fused_multiply_add(exp2_approx(argument), inverse_bound, inverse_bound));
  }
};

template <int kStateGroups>
struct PrepareRole {
  using Layout = SharedLayout<kStateGroups>;
  static constexpr int kValueBlocks = kValueDim / (kStateGroups * kGroupValues);
  static constexpr int kRowsAtOnce = Roles<kStateGroups>::kPrepareRows;

  const ForwardParams& params;
  SharedAddress base;
  int group;  // which of the prepare warpgroups
  int warp;   // in the warpgroup
  int lane;

  FLASH_KDA_DEVICE int side() const { return warp >> 1; }          // 0: rows 0..15, 1: rows 16..31
  FLASH_KDA_DEVICE int channel_half() const { return warp & 1; }
  FLASH_KDA_DEVICE int channel() const { return 64 * channel_half() + 2 * lane; }

  // Squared norms of this side's 16 rows of k (first warp of the pair) or q (second), as the diagonal of X X^T; from
  // them the output scale of a q row, and the power of two that brings an extreme row back to norm 1.
  FLASH_KDA_DEVICE void row_norms(SharedAddress stage, int table) const {
    const int row = lane & 15;
    const SharedAddress rows = stage + (channel_half() == 0 ? kTileK : kTileQ) + (kHalf * side() + row) * kRowBytes;
    float low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
    FLASH_KDA_UNROLL
    for (int step = 0; step < kKeyDim / 16; ++step) {
      std::uint32_t a[4];
      load_matrix(rows + (step >> 2) * kChannelHalfBytes + (((2 * (step & 3) + (lane >> 4)) ^ (row & 7)) << 4), a);
      mma_bf16(low, a, a[0], a[2]);
      mma_bf16(high, a, a[1], a[3]);
    }
    const int g = lane >> 2, t = lane & 3;
    if (t == (g >> 1)) {  // the lane that holds the diagonal elements of rows g and g + 8
      write_row_scales((g & 1) != 0 ? low[1] : low[0], kHalf * side() + g, table);
      write_row_scales((g & 1) != 0 ? high[3] : high[2], kHalf * side() + g + 8, table);
    }
  }

  FLASH_KDA_DEVICE void write_row_scales(float squared_norm, int row, int table) const {
    const bool extreme = (squared_norm < kPlainNormLow || squared_norm > kPlainNormHigh) && squared_norm > 0.0f;
    const int half_exponent = (static_cast<int>(bits(squared_norm) >> 23) - 127) >> 1;
    const float shift = extreme ? from_bits(static_cast<std::uint32_t>(127 - half_exponent) << 23) : 1.0f;
    const SharedAddress at = base + table * kRowTableBytes + row * 4;
    if (channel_half() == 0) {
      store_f32(at + Layout::kKeyShiftAt, shift);
      return;
    }
    const float unshift = extreme ? from_bits(static_cast<std::uint32_t>(127 + half_exponent) << 23) : 1.0f;
    const float norm = params.l2norm ? rsqrt_approx(squared_norm + kNormEpsilon) : 1.0f;
    store_f32(at + Layout::kQueryShiftAt, shift);
    store_f32(at + Layout::kQueryScaleAt, norm * unshift * (params.scale * kValueUnscale));
  }

  // True where some row of this side has been given a power of two.
  FLASH_KDA_DEVICE bool any_row_shifted(int table) const {
    const SharedAddress at = base + (lane < 16 ? Layout::kKeyShiftAt : Layout::kQueryShiftAt) + table * kRowTableBytes;
    return any_in_warp(load_f32(at + (kHalf * side() + (lane & 15)) * 4) != 1.0f);
  }

  // The products of this warp's rows. kUpper: rows 16..31, downwards from the middle; else rows 15..0, upwards.
  // kPlain: whole chunk, no shifted rows, well-conditioned gate. Leaves the log2 decay of the side in `total`.
  template <bool kUpper, bool kPlain>
  FLASH_KDA_DEVICE void products(SharedAddress tile, const BoundedGate& gate, int valid_rows, int table,
                                 float (&total)[2]) const {
    float sum[2] = {0.0f, 0.0f};
    FLASH_KDA_NO_UNROLL
    for (int block = 0; block < kHalf / kRowsAtOnce; ++block) {
      const int first = kUpper ? kRowsAtOnce * block : kHalf - kRowsAtOnce * (block + 1);  // in this side
      const SharedAddress rows = (tile ^ static_cast<SharedAddress>((first & 7) << 4)) + first * kRowBytes;
      std::uint32_t g[kRowsAtOnce], k[kRowsAtOnce], q[kRowsAtOnce];
      FLASH_KDA_UNROLL
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const SharedAddress at = (rows ^ static_cast<SharedAddress>(i << 4)) + i * kRowBytes;
        g[i] = load_u32(at + kTileG);
        k[i] = load_u32(at + kTileK);
        q[i] = load_u32(at + kTileQ);
      }
      float decay[kRowsAtOnce][2];
      FLASH_KDA_UNROLL
      for (int i = 0; i < kRowsAtOnce; ++i) {
        decay[i][0] = gate.template log2_decay<kPlain>(bf16_low(g[i]), 0);
        decay[i][1] = gate.template log2_decay<kPlain>(bf16_high(g[i]), 1);
      }
      FLASH_KDA_UNROLL
      for (int step = 0; step < kRowsAtOnce; ++step) {
        const int i = kUpper ? step : kRowsAtOnce - 1 - step;
        const int row = (kUpper ? kHalf : 0) + first + i;
        const bool valid = kPlain || row < valid_rows;
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
        float k0 = bf16_low(k[i]), k1 = bf16_high(k[i]), q0 = bf16_low(q[i]), q1 = bf16_high(q[i]);
        if (!kPlain) {
          const SharedAddress shift = base + table * kRowTableBytes + row * 4;
          const float key_shift = load_f32(shift + Layout::kKeyShiftAt);
          const float query_shift = load_f32(shift + Layout::kQueryShiftAt);
          k0 = valid ? k0 * key_shift : 0.0f;
          k1 = valid ? k1 * key_shift : 0.0f;
          q0 = valid ? q0 * query_shift : 0.0f;
          q1 = valid ? q1 * query_shift : 0.0f;
        }
        const SharedAddress at = (rows ^ static_cast<SharedAddress>(i << 4)) + i * kRowBytes;
        store_u32(at + kTileG, pack_bf16(k0 * against0, k1 * against1));
        store_u32(at + kTileK, pack_bf16(-k0 * with0, -k1 * with1));
        store_u32(at + kTileQ, pack_bf16(q0 * with0, q1 * with1));
      }
    }
    total[0] = kUpper ? sum[0] : -sum[0];
    total[1] = kUpper ? sum[1] : -sum[1];
  }

  FLASH_KDA_DEVICE void prepare_chunk(const ChunkDescriptor& d, const BoundedGate& gate, int stage_index,
                                      int table) const {
    const SharedAddress stage = base + Layout::kStageAt + stage_index * kStageBytes;
    row_norms(stage, table);
    sync_named(1 + 2 * group + side(), 2 * kWarp);  // both warps of the pair have read k and q whole
    const SharedAddress tile = stage + channel_half() * kChannelHalfBytes + side() * kHalf * kRowBytes +
                               ((lane >> 2) << 4) + ((lane & 3) << 2);
    const bool plain = !d.partial() && !any_in_warp(!gate.plain) && !any_row_shifted(table);
    float total[2];
    if (side() != 0) {
      plain ? products<true, true>(tile, gate, kChunk, table, total)
            : products<true, false>(tile, gate, d.rows(), table, total);
    } else {
      plain ? products<false, true>(tile, gate, kChunk, table, total)
            : products<false, false>(tile, gate, d.rows(), table, total);
    }
    const SharedAddress factors = base + (side() != 0 ? Layout::kLeaveAt : Layout::kEnterAt) + table * kFactorBytes;
    store_f32x2(factors + (lane & 3) * kFactorPitchBytes + (8 * channel_half() + (lane >> 2)) * 8,
                exp2_approx(total[0]), exp2_approx(total[1]));
  }

  FLASH_KDA_DEVICE void run() {
    BoundedGate gate = {};
    int open_head = -1, open_sequence = -1;
    StreamPosition at(group);
    FLASH_KDA_NO_UNROLL
    for (;; at.advance(kPrepareGroups)) {
      barrier_wait(base + Layout::kLoaded + 8 * at.stage, at.parity);
      const ChunkDescriptor d = read_descriptor<Layout>(base, at.n);
      if (!d.stop()) {
        // Each group sees every second chunk, so the second chunk of an item may be the first that it sees.
        if (d.head_block != open_head || d.sequence != open_sequence) {
          open_head = d.head_block;
          open_sequence = d.sequence;
          gate.open(params, d.head_block / kValueBlocks, channel());
        }
        if (d.rows() > 0) prepare_chunk(d, gate, at.stage, at.table());
        fence_async_proxy();
      }
      sync_warp();
      if (lane == 0) barrier_arrive(base + Layout::kPrepared + 8 * at.stage);
      if (d.stop() && (d.rows_flags & 63) < kPrepareGroups) break;  // fewer end marks follow than groups
    }
  }
};

}  // namespace flash_kda::sm90
