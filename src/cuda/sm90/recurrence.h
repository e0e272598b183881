// State role: the recurrence over chunks. A warpgroup holds S^T-rows of 64 V columns: S [64, 128]
// fp32 in wgmma accumulators, relative to the middle of the chunk before.
//
//   S   <- S diag(step)                     step: decay from middle to middle, times 2^96
//   [P | O] = S [K1; Q1]^T                  S rounded to bf16; K1 is negated, so P = -S K^T
//   S   <- S 2^-96                          while that product runs
//   Y   = V^T X^T + (P diag(r)) X^T         V as it came; P r rounded to bf16; r carries 2^-96
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

template <class Block>
struct StateRole {
  using Layout = SharedLayout<Block>;

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
        values_at_lane(shared + Layout::kValueAt + which * Block::kValueSlots * kTileBytes +
                       (((l >> 4) << 3) + (l & 7)) * kRowBytes +
                       (((2 * warp_in_group + ((l >> 3) & 1)) ^ (l & 7)) << 4)),
        factors_at_lane(shared + (l & 3) * kFactorPitchBytes) {}

  FLASH_KDA_DEVICE int g() const { return lane >> 2; }
  FLASH_KDA_DEVICE int t() const { return lane & 3; }

  FLASH_KDA_DEVICE SharedAddress slot_barrier(int kind, int n) const {
    return base + kind + 8 * (group * Block::kValueSlots + n % Block::kValueSlots);
  }
  // ldmatrix / stmatrix row of this lane in a value tile: blocks (tokens 0..7 | 8..15) x (columns
  // 0..7 | 8..15) of the warp's 16 columns; transposed, they are a wgmma A operand's registers.
  FLASH_KDA_DEVICE SharedAddress value_row(int n) const {
    return values_at_lane + n % Block::kValueSlots * kTileBytes;
  }

  // ---- states in global memory: this lane's rows g and g + 8 of the warp's 16, channels 8j + 2t
  // and + 1 ----
  FLASH_KDA_DEVICE int state_row(const ChunkDescriptor& d) const {
    const int block = d.head_block % Block::kItemsPerHead;
    return block * (Block::kStateGroups * kGroupValues) + group * kGroupValues + 16 * warp + g();
  }
  FLASH_KDA_DEVICE std::int64_t state_offset(const StateParams& s, const ChunkDescriptor& d,
                                             int slot) const {
    return slot * s.slot_stride + d.head_block / Block::kItemsPerHead * s.head_stride +
           state_row(d) * s.row_stride + 2 * t();
  }
  // The array that holds the state called `which`.
  FLASH_KDA_DEVICE const StateParams& states(const StateParams& callers, int which) const {
    return which == kCallersState ? callers : params.slots;
  }

  FLASH_KDA_DEVICE void load_state(const ChunkDescriptor& d, int n, float (&state)[64]) const {
    const int initial = read_span_states<Layout>(base, n).initial;
    const StateParams& s = states(params.initial_state, initial);
    if (initial == kNoState || initial == kIdentityState || s.data == nullptr) {
      const int diagonal = initial == kIdentityState ? state_row(d) - 2 * t() : -1;
      FLASH_KDA_UNROLL
      for (int i = 0; i < 64; ++i)
        state[i] = diagonal == 8 * (i >> 2) + (i & 1) - 8 * (i >> 1 & 1) ? 1.0f : 0.0f;
      return;
    }
    const std::int64_t at = state_offset(s, d, initial == kCallersState ? d.sequence : initial);
    if (!s.bf16) {
      const float* p = static_cast<const float*>(s.data) + at;
      s.pairs ? load_rows<float2>(p, s.row_stride, state)
              : load_rows<float>(p, s.row_stride, state);
    } else {
      const std::uint16_t* p = static_cast<const std::uint16_t*>(s.data) + at;
      s.pairs ? load_rows<std::uint32_t>(p, s.row_stride, state)
              : load_rows<std::uint16_t>(p, s.row_stride, state);
    }
  }
  // This lane's part of a state, read by pairs or by single elements; all reads before their first
  // use.
  template <class Unit, class Element>
  FLASH_KDA_DEVICE static void load_rows(const Element* p, std::int64_t row_stride,
                                         float (&state)[64]) {
    FLASH_KDA_UNROLL
    for (int i = 0; i < 32; ++i) {  // row i & 1, channels 8 (i >> 1) + 2t
      const Element* from = p + (i & 1) * 8 * row_stride + 8 * (i >> 1);
      if constexpr (sizeof(Unit) == 2 * sizeof(Element)) {
        const Unit x = *reinterpret_cast<const Unit*>(from);
        if constexpr (sizeof(Element) == 4) {
          state[2 * i] = x.x, state[2 * i + 1] = x.y;
        } else {
          state[2 * i] = bf16_low(x), state[2 * i + 1] = bf16_high(x);
        }
      } else if constexpr (sizeof(Element) == 4) {
        state[2 * i] = from[0], state[2 * i + 1] = from[1];
      } else {
        state[2 * i] = bf16_low(from[0]), state[2 * i + 1] = bf16_low(from[1]);
      }
    }
  }

  // `rounded`: the values are bf16 already (an untouched state passes bit for bit).
  FLASH_KDA_DEVICE void store_state(const ChunkDescriptor& d, int n, const float (&state)[64],
                                    bool rounded) const {
    const int final = read_span_states<Layout>(base, n).final;
    const StateParams& s = states(params.final_state, final);
    if (final == kNoState || s.data == nullptr) return;
    const std::int64_t at = state_offset(s, d, final == kCallersState ? d.sequence : final);
    if (!s.bf16) {
      float* p = static_cast<float*>(s.data) + at;
      FLASH_KDA_UNROLL
      for (int i = 0; i < 32; ++i) {
        float* to = p + (i & 1) * 8 * s.row_stride + 8 * (i >> 1);
        if (s.pairs) {
          *reinterpret_cast<float2*>(to) = {state[2 * i], state[2 * i + 1]};
        } else {
          to[0] = state[2 * i], to[1] = state[2 * i + 1];
        }
      }
      return;
    }
    std::uint16_t* p = static_cast<std::uint16_t*>(s.data) + at;
    FLASH_KDA_UNROLL
    for (int i = 0; i < 32; ++i) {
      std::uint16_t* to = p + (i & 1) * 8 * s.row_stride + 8 * (i >> 1);
      const float x = state[2 * i], y = state[2 * i + 1];
      const std::uint32_t pair =
          rounded ? bits(x) >> 16 | (bits(y) & 0xffff0000u) : pack_bf16(x, y);
      if (s.pairs) {
        *reinterpret_cast<std::uint32_t*>(to) = pair;
      } else {
        to[0] = static_cast<std::uint16_t>(pair), to[1] = static_cast<std::uint16_t>(pair >> 16);
      }
    }
  }

  // P in the form that the chain reads (kMapBytes).
  FLASH_KDA_DEVICE void store_map(const ChunkDescriptor& d, int n, const float (&state)[64]) const {
    const StateParams& s = params.slots;
    const int row = state_row(d);
    char* p = reinterpret_cast<char*>(static_cast<float*>(s.data) +
                                      read_span_states<Layout>(base, n).final * s.slot_stride +
                                      d.head_block / Block::kItemsPerHead * s.head_stride);
    FLASH_KDA_UNROLL
    for (int i = 0; i < 32; ++i) {
      const float x = state[2 * i], y = state[2 * i + 1];
      const std::uint32_t high = pack_bf16(x, y);
      char* to = p + (row + (i & 1) * 8) * kMapRowBytes + map_unit(row, i >> 1) + 4 * t();
      *reinterpret_cast<std::uint32_t*>(to) = high;
      *reinterpret_cast<std::uint32_t*>(to + kMapPartBytes) =
          pack_bf16(x - bf16_low(high), y - bf16_high(high));
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
    if (Block::kMaps && rows == 0) {
      FLASH_KDA_UNROLL
      for (int i = 0; i < 8; ++i) v[i] = 0;
      return;
    }
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

  // S <- S diag(step), and what bf16 holds of it.
  FLASH_KDA_DEVICE void rescale(float (&state)[64], std::uint32_t (&s)[32], int table) const {
    FLASH_KDA_UNROLL
    for (int pair = 0; pair < 8; ++pair) {
      float* x = state + 8 * pair;
      scale_pair(x, factors(Layout::kStepAt, table, pair));
      FLASH_KDA_UNROLL
      for (int i = 0; i < 4; ++i) s[4 * pair + i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    }
  }

  // One chunk: S moves on (of a map too: its O, of whatever q holds, goes nowhere), `output`
  // receives the packed O of this chunk after `pending` was handed over.
  FLASH_KDA_DEVICE void chunk(float (&state)[64], std::uint32_t (&output)[8], bool pending,
                              int rows, const StreamPosition<Block>& at) const {
    const SharedAddress stage = base + Layout::kStageAt + at.stage * Block::kStageBytes;
    const int slot = at.n & (kSolutionSlots - 1);
    const std::uint64_t keys_queries = matrix_descriptor(stage + Block::kTileK, 16, kRowGroupBytes);
    const std::uint64_t key_rows =
        matrix_descriptor(stage + Block::kTileG, Block::kChannelHalfBytes, kRowGroupBytes);
    const std::uint64_t solution =
        matrix_descriptor(base + Layout::kSolutionAt + slot * kTileBytes, 16, kRowGroupBytes);
    const std::uint64_t query_scores =
        matrix_descriptor(base + Layout::kQueryScoreAt + at.stage * kTileBytes, 16, kRowGroupBytes);

    std::uint32_t s[32];
    rescale(state, s, at.table());
    float p[16], o[16];
    wgmma_touch(p);
    wgmma_touch(o);
    wgmma_fence();
    FLASH_KDA_UNROLL
    for (int k = 0; k < 8; ++k) {
      wgmma_n64(p, o, s + 4 * k,
                keys_queries + (k >> 2) * (Block::kChannelHalfBytes >> 4) + (k & 3) * 2, k > 0);
    }
    wgmma_commit();
    if (pending) hand_over_output(output, at.n - 1);
    FLASH_KDA_UNROLL
    for (float& x : state) x *= kUnboost;
    wgmma_touch(
        state);  // here, in the product's shadow, not where the compiler would rather have it
    barrier_wait(slot_barrier(Layout::kValueLoaded, at.n), (at.n / Block::kValueSlots) & 1);
    std::uint32_t operand[8];
    load_values(at.n, rows, operand);
    const SharedAddress scales = base + at.table() * kRowTableBytes + 8 * t();
    float2 rate[4];  // of tokens 8j + 2t and + 1
    FLASH_KDA_UNROLL
    for (int j = 0; j < 4; ++j) {
      rate[j] = load_f32x2(base + Layout::kSolutionAt + slot * kTileBytes + (j >> 1) * kRowBytes +
                           32 * (j & 1) + 8 * t());
    }
    wgmma_wait<0>();
    wgmma_touch(p);
    wgmma_touch(o);
    std::uint32_t packed[8];
    FLASH_KDA_UNROLL
    for (int i = 0; i < 8; ++i)
      packed[i] = pack_bf16(p[2 * i] * rate[i >> 1].x, p[2 * i + 1] * rate[i >> 1].y);
    float y[16];
    wgmma_touch(y);
    wgmma_fence();
    // V X^T could start with the first product; its accumulators would be sixteen registers too
    // many.
    FLASH_KDA_UNROLL
    for (int k = 0; k < 2; ++k) wgmma_n32(y, operand + 4 * k, solution + 4 + k * 2, k > 0);
    FLASH_KDA_UNROLL
    for (int k = 0; k < 2; ++k) wgmma_n32(y, packed + 4 * k, solution + 4 + k * 2, true);
    wgmma_commit();
    float2 scale[4];  // of tokens 8j + 2t and + 1
    FLASH_KDA_UNROLL
    for (int j = 0; j < 4; ++j) scale[j] = load_f32x2(scales + Layout::kUpdateScaleAt + 32 * j);
    wgmma_wait<0>();
    wgmma_touch(y);
    FLASH_KDA_UNROLL
    for (int i = 0; i < 8; ++i) {  // W
      y[2 * i] *= scale[i >> 1].x, y[2 * i + 1] *= scale[i >> 1].y;
      operand[i] = pack_bf16(y[2 * i], y[2 * i + 1]);
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
    for (int k = 0; k < 2; ++k) wgmma_n32(inner, operand + 4 * k, query_scores + 4 + k * 2, true);
    wgmma_commit();
    wgmma_touch(y);
    FLASH_KDA_UNROLL
    for (int i = 0; i < 8; ++i)  // what bf16 left of W, under the products with the rest of it
      packed[i] = pack_bf16(y[2 * i] - bf16_low(operand[i]), y[2 * i + 1] - bf16_high(operand[i]));
    wgmma_fence();
    FLASH_KDA_UNROLL
    for (int k = 0; k < 2; ++k) wgmma_n32(inner, packed + 4 * k, query_scores + k * 2, true);
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

  FLASH_KDA_DEVICE void finish(const ChunkDescriptor& d, int n, float (&state)[64]) const {
    const int table = n & (kTableSlots - 1);
    if (d.rows() == 0) {  // a sequence without tokens
      store_state(d, n, state, true);
      return;
    }
    FLASH_KDA_UNROLL
    for (int pair = 0; pair < 8; ++pair)
      scale_pair(state + 8 * pair, factors(Layout::kLeaveAt, table, pair));
    FLASH_KDA_UNROLL
    for (float& x : state) x *= kValueUnscale;
    if (Block::kMaps && d.from_identity()) {
      store_map(d, n, state);
    } else {
      store_state(d, n, state, false);
    }
  }

  FLASH_KDA_DEVICE void run() {
    float state[64];
    std::uint32_t output[8] = {};
    StreamPosition<Block> at(0);
    FLASH_KDA_NO_UNROLL
    for (;; at.advance(1)) {
      barrier_wait(base + Layout::kSolved + 8 * at.stage, at.parity);
      const ChunkDescriptor d = read_descriptor<Layout>(base, at.n);
      if (d.stop()) break;
      if (d.first()) load_state(d, at.n, state);
      if (d.rows() > 0) {
        if (d.first()) {
          FLASH_KDA_UNROLL
          for (float& x : state) x *= kValueScale;
        }
        // P has no values: none of its rows' count.
        chunk(state, output, at.n > 0, Block::kMaps && d.from_identity() ? 0 : d.rows(), at);
      } else {
        if (at.n > 0) hand_over_output(output, at.n - 1);
        barrier_wait(slot_barrier(Layout::kValueLoaded, at.n), (at.n / Block::kValueSlots) & 1);
        release(at.stage);
      }
      // Read anew: there are no registers to keep it in.
      if (d.last()) finish(read_descriptor<Layout>(base, read_anew(at.n)), at.n, state);
    }
    if (at.n > 0) hand_over_output(output, at.n - 1);
  }
};

}  // namespace flash_kda::sm90
