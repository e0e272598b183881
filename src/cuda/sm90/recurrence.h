// State role: the recurrence over chunks. A warpgroup holds S^T-rows of 64 V columns: S [64, 128]
// fp32 in wgmma accumulators, relative to the middle of the chunk before.
//
//   S   <- S diag(step)                     step: decay from middle to middle, times 2^96
//   [P | O] = S [K1; Q1]^T                  S rounded to bf16; K1 is negated, so P = -S K^T
//   S   <- S 2^-96                          while that product runs
//   Y   = V^T X^T + P M^T                   V as it came; P rounded to bf16; M carries 2^-96
//   W   = Y diag(update scale)              fp32, then rounded to bf16
//   S   <- S + W K2
//   O   <- (O + W A_qk^T) diag(query scale) W, A_qk in two bf16 parts; A_qk carries 2^96, the scale
//                                           takes it back
//
// At the end of a sequence S times the decay from the middle to the end is the final state.
// Rounding besides what is named: O to bf16. All sums fp32. O takes V's place in shared memory and
// is written out by the load role.
#pragma once

#include "cuda/sm90/stream.h"

namespace flash_kda::sm90 {

template <int kStateGroups>
struct StateRole {
  using Layout = SharedLayout<kStateGroups>;
  static constexpr int kValueBlocks = kValueDim / (kStateGroups * kGroupValues);

  const ForwardParams& params;
  SharedAddress base;
  int group;  // which 64 columns of the block
  int warp;   // in the warpgroup
  int lane;
  SharedAddress values_at_lane;   // see value_row
  SharedAddress factors_at_lane;  // this lane's part of the first table of factors

  FLASH_KDA_DEVICE StateRole(const ForwardParams& p, SharedAddress shared, int which,
                             int warp_in_group, int l)
      : params(p),
        base(shared),
        group(which),
        warp(warp_in_group),
        lane(l),
        values_at_lane(shared + Layout::kValueAt + which * kValueSlots * kTileBytes +
                       (((l >> 4) << 3) + (l & 7)) * kRowBytes +
                       (((2 * warp_in_group + ((l >> 3) & 1)) ^ (l & 7)) << 4)),
        factors_at_lane(shared + (l & 3) * kFactorPitchBytes) {}

  FLASH_KDA_DEVICE int g() const { return lane >> 2; }
  FLASH_KDA_DEVICE int t() const { return lane & 3; }

  FLASH_KDA_DEVICE SharedAddress slot_barrier(int kind, int n) const {
    return base + kind + 8 * (group * kValueSlots + n % kValueSlots);
  }
  // ldmatrix / stmatrix row of this lane in a value tile: blocks (tokens 0..7 | 8..15) x (columns
  // 0..7 | 8..15) of the warp's 16 columns; transposed, they are a wgmma A operand's registers.
  FLASH_KDA_DEVICE SharedAddress value_row(int n) const {
    return values_at_lane + n % kValueSlots * kTileBytes;
  }

  // ---- states in global memory: this lane's rows g and g + 8 of the warp's 16, channels 8j + 2t
  // and + 1 ----
  FLASH_KDA_DEVICE std::int64_t state_offset(const StateParams& s, const ChunkDescriptor& d) const {
    const int row = d.head_block % kValueBlocks * (kStateGroups * kGroupValues) +
                    group * kGroupValues + 16 * warp + g();
    return d.sequence * s.slot_stride + d.head_block / kValueBlocks * s.head_stride +
           row * s.row_stride + 2 * t();
  }

  FLASH_KDA_DEVICE void load_state(const ChunkDescriptor& d, float (&state)[64]) const {
    const StateParams& s = params.initial_state;
    if (s.data == nullptr) {
      FLASH_KDA_UNROLL
      for (float& x : state) x = 0.0f;
      return;
    }
    const std::int64_t at = state_offset(s, d);
    FLASH_KDA_UNROLL
    for (int i = 0; i < 32; ++i) {  // row i & 1, channels 8 (i >> 1) + 2t
      const std::int64_t from = at + (i & 1) * 8 * s.row_stride + 8 * (i >> 1);
      float2 x;
      if (s.bf16) {
        const std::uint16_t* p = static_cast<const std::uint16_t*>(s.data) + from;
        const std::uint32_t pair = s.pairs ? *reinterpret_cast<const std::uint32_t*>(p)
                                           : p[0] | static_cast<std::uint32_t>(p[1]) << 16;
        x = {bf16_low(pair), bf16_high(pair)};
      } else {
        const float* p = static_cast<const float*>(s.data) + from;
        x = s.pairs ? *reinterpret_cast<const float2*>(p) : float2{p[0], p[1]};
      }
      state[2 * i] = x.x;
      state[2 * i + 1] = x.y;
    }
  }

  // `rounded`: the values are bf16 already (an untouched state passes bit for bit).
  FLASH_KDA_DEVICE void store_state(const ChunkDescriptor& d, const float (&state)[64],
                                    bool rounded) const {
    const StateParams& s = params.final_state;
    if (s.data == nullptr) return;
    const std::int64_t at = state_offset(s, d);
    FLASH_KDA_UNROLL
    for (int i = 0; i < 32; ++i) {
      const std::int64_t to = at + (i & 1) * 8 * s.row_stride + 8 * (i >> 1);
      const float x = state[2 * i], y = state[2 * i + 1];
      if (s.bf16) {
        std::uint16_t* p = static_cast<std::uint16_t*>(s.data) + to;
        const std::uint32_t pair =
            rounded ? bits(x) >> 16 | (bits(y) & 0xffff0000u) : pack_bf16(x, y);
        if (s.pairs) {
          *reinterpret_cast<std::uint32_t*>(p) = pair;
        } else {
          p[0] = static_cast<std::uint16_t>(pair);
          p[1] = static_cast<std::uint16_t>(pair >> 16);
        }
      } else {
        float* p = static_cast<float*>(s.data) + to;
        if (s.pairs) {
          *reinterpret_cast<float2*>(p) = {x, y};
        } else {
          p[0] = x;
          p[1] = y;
        }
      }
    }
  }

  // The factor of this lane's channels 8j + 2t, 8j + 2t + 1 and the next j's, from a per-channel
  // table.
  FLASH_KDA_DEVICE float4 factors(int table_at, int table, int pair) const {
    return load_f32x4(factors_at_lane + table * kFactorBytes + table_at + 16 * pair);
  }
  // s <- s * factor for 8j.. and 8(j+1)..; `pair` = j / 2.
  FLASH_KDA_DEVICE static void scale_pair(float* s, const float4& f) {
    s[0] *= f.x, s[1] *= f.y, s[2] *= f.x, s[3] *= f.y;
    s[4] *= f.z, s[5] *= f.w, s[6] *= f.z, s[7] *= f.w;
  }

  // The O of a chunk, packed, to V's place.
  FLASH_KDA_DEVICE void hand_over_output(const std::uint32_t (&o)[8], int n) const {
    const SharedAddress at = value_row(n);
    store_matrix_transposed(at, o[0], o[1], o[2], o[3]);
    store_matrix_transposed(at + kHalf * kRowBytes, o[4], o[5], o[6], o[7]);
    sync_warp();
    if (lane == 0) barrier_arrive(slot_barrier(Layout::kOutputReady, n));
  }

  FLASH_KDA_DEVICE void load_values(int n, int rows, std::uint32_t* v) const {
    std::uint32_t r[4];
    FLASH_KDA_UNROLL
    for (int step = 0; step < 2; ++step) {
      load_matrix_transposed(value_row(n) + step * kHalf * kRowBytes, r);
      FLASH_KDA_UNROLL
      for (int i = 0; i < 4; ++i) v[4 * step + i] = r[i];
    }
    if (rows == kChunk) return;
    FLASH_KDA_UNROLL
    for (int i = 0; i < 8;
         ++i) {  // tokens 16 (i / 4) + 8 (i / 2 % 2) + 2t and + 1; rows past the end are not ours
      const int token = 16 * (i >> 2) + 8 * ((i >> 1) & 1) + 2 * t();
      if (token >= rows) v[i] &= 0xffff0000u;
      if (token + 1 >= rows) v[i] &= 0x0000ffffu;
    }
  }

  // One chunk: S moves on, `output` receives the packed O of this chunk after `pending` was handed
  // over.
  FLASH_KDA_DEVICE void chunk(float (&state)[64], std::uint32_t (&output)[8], bool pending,
                              int rows, const StreamPosition& at) const {
    const SharedAddress stage = base + Layout::kStageAt + at.stage * kStageBytes;
    const int slot = at.n & (kSolutionSlots - 1);
    const std::uint64_t keys_queries = matrix_descriptor(stage + kTileK, 16, kRowGroupBytes);
    const std::uint64_t key_rows =
        matrix_descriptor(stage + kTileG, kChannelHalfBytes, kRowGroupBytes);
    const std::uint64_t solution =
        matrix_descriptor(base + Layout::kSolutionAt + slot * kTileBytes, 16, kRowGroupBytes);
    const std::uint64_t query_scores =
        matrix_descriptor(base + Layout::kQueryScoreAt + at.stage * kTileBytes, 16, kRowGroupBytes);

    std::uint32_t s[32];
    FLASH_KDA_UNROLL
    for (int pair = 0; pair < 8; ++pair) {
      float* x = state + 8 * pair;
      scale_pair(x, factors(Layout::kStepAt, at.table(), pair));
      FLASH_KDA_UNROLL
      for (int i = 0; i < 4; ++i) s[4 * pair + i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    }
    float p[16], o[16];
    wgmma_touch(p);
    wgmma_touch(o);
    wgmma_fence();
    FLASH_KDA_UNROLL
    for (int k = 0; k < 8; ++k) {
      wgmma_n64(p, o, s + 4 * k, keys_queries + (k >> 2) * (kChannelHalfBytes >> 4) + (k & 3) * 2,
                k > 0);
    }
    wgmma_commit();
    if (pending) hand_over_output(output, at.n - 1);
    FLASH_KDA_UNROLL
    for (float& x : state) x *= kUnboost;
    wgmma_touch(
        state);  // here, in the product's shadow, not where the compiler would rather have it
    barrier_wait(slot_barrier(Layout::kValueLoaded, at.n), (at.n / kValueSlots) & 1);
    std::uint32_t operand[8];
    load_values(at.n, rows, operand);
    const SharedAddress scales = base + at.table() * kRowTableBytes + 8 * t();
    wgmma_wait<0>();
    wgmma_touch(p);
    wgmma_touch(o);
    std::uint32_t packed[8];
    FLASH_KDA_UNROLL
    for (int i = 0; i < 8; ++i) packed[i] = pack_bf16(p[2 * i], p[2 * i + 1]);
    float y[16];
    wgmma_touch(y);
    wgmma_fence();
    // V X^T could start with the first product; its accumulators would be sixteen registers too
    // many.
    FLASH_KDA_UNROLL
    for (int k = 0; k < 2; ++k) wgmma_n32(y, operand + 4 * k, solution + 4 + k * 2, k > 0);
    FLASH_KDA_UNROLL
    for (int k = 0; k < 2; ++k) wgmma_n32(y, packed + 4 * k, solution + k * 2, true);
    wgmma_commit();
    float2 scale[4];  // of tokens 8j + 2t and + 1
    FLASH_KDA_UNROLL
    for (int j = 0; j < 4; ++j) scale[j] = load_f32x2(scales + Layout::kUpdateScaleAt + 32 * j);
    wgmma_wait<0>();
    wgmma_touch(y);
    FLASH_KDA_UNROLL
    for (int i = 0; i < 8; ++i) {  // W, and in `packed` what bf16 leaves of it
      const float w0 = y[2 * i] * scale[i >> 1].x, w1 = y[2 * i + 1] * scale[i >> 1].y;
      operand[i] = pack_bf16(w0, w1);
      packed[i] = pack_bf16(w0 - bf16_low(operand[i]), w1 - bf16_high(operand[i]));
    }
    float inner[16];  // W A_qk^T; added to o later: o lives in the upper half of a product's
                      // accumulators
    wgmma_touch(state);
    wgmma_touch(inner);
    wgmma_fence();
    FLASH_KDA_UNROLL
    for (int k = 0; k < 2; ++k) {
      wgmma_n128_rows(state, operand + 4 * k, key_rows + k * (kHalf * kRowBytes >> 4), true);
    }
    wgmma_commit();
    // Nearly parallel keys make W_j alternate in size while O is their sum: W and A_qk count with
    // both of their parts here.
    FLASH_KDA_UNROLL
    for (int k = 0; k < 2; ++k) wgmma_n32(inner, operand + 4 * k, query_scores + k * 2, k > 0);
    FLASH_KDA_UNROLL
    for (int k = 0; k < 2; ++k) wgmma_n32(inner, packed + 4 * k, query_scores + k * 2, true);
    FLASH_KDA_UNROLL
    for (int k = 0; k < 2; ++k) wgmma_n32(inner, operand + 4 * k, query_scores + 4 + k * 2, true);
    wgmma_commit();
    FLASH_KDA_UNROLL
    for (int j = 0; j < 4; ++j) scale[j] = load_f32x2(scales + Layout::kQueryScaleAt + 32 * j);
    wgmma_wait<0>();
    wgmma_touch(state);
    wgmma_touch(inner);
    release(at.stage);  // nothing of the stage is read from here on
    FLASH_KDA_UNROLL
    for (int i = 0; i < 8; ++i) {
      output[i] = pack_bf16((o[2 * i] + inner[2 * i]) * scale[i >> 1].x,
                            (o[2 * i + 1] + inner[2 * i + 1]) * scale[i >> 1].y);
    }
  }

  FLASH_KDA_DEVICE void release(int stage) const {
    sync_warp();
    if (lane == 0) barrier_arrive(base + Layout::kReleased + 8 * stage);
  }

  FLASH_KDA_DEVICE void finish(const ChunkDescriptor& d, float (&state)[64], int table) const {
    if (d.rows() == 0) {  // a sequence without tokens
      store_state(d, state, true);
      return;
    }
    FLASH_KDA_UNROLL
    for (int pair = 0; pair < 8; ++pair)
      scale_pair(state + 8 * pair, factors(Layout::kLeaveAt, table, pair));
    FLASH_KDA_UNROLL
    for (float& x : state) x *= kValueUnscale;
    store_state(d, state, false);
  }

  FLASH_KDA_DEVICE void run() {
    float state[64];
    std::uint32_t output[8] = {};
    StreamPosition at(0);
    FLASH_KDA_NO_UNROLL
    for (;; at.advance(1)) {
      barrier_wait(base + Layout::kSolved + 8 * at.stage, at.parity);
      const ChunkDescriptor d = read_descriptor<Layout>(base, at.n);
      if (d.stop()) break;
      if (d.first()) load_state(d, state);
      if (d.rows() > 0) {
        if (d.first()) {
          FLASH_KDA_UNROLL
          for (float& x : state) x *= kValueScale;
        }
        chunk(state, output, at.n > 0, d.rows(), at);
      } else {
        if (at.n > 0) hand_over_output(output, at.n - 1);
        barrier_wait(slot_barrier(Layout::kValueLoaded, at.n), (at.n / kValueSlots) & 1);
        release(at.stage);
      }
      if (d.last()) finish(d, state, at.table());
    }
    if (at.n > 0) hand_over_output(output, at.n - 1);
  }
};

}  // namespace flash_kda::sm90
