// Vec: 16 floats of AVX-512 (F, BW, VL, DQ). See vec_generic.h for what each function promises.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace flash_kda::cpu {
namespace avx512 {
namespace {

inline constexpr int kWidth = 16;
// Rows of a register tile: kTileRows x kTileVecs accumulators out of 32 registers.
inline constexpr int kTileRows = 8;
// Vectors whose exponentials are computed side by side.
inline constexpr int kSideBySide = 8;

struct Vec {
  __m512 m;
};

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.m); }
inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.m, b.m)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.m, b.m)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.m, b.m)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.m, b.m)}; }
inline Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.m)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.m, b.m, c.m)}; }
inline Vec fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.m, b.m, c.m)}; }
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.m, b.m, _CMP_LT_OQ), y.m, x.m)};
}
inline Vec exp_argument(Vec x) {
  // A NaN is the second operand, which is what min and max then give.
  return {_mm512_min_ps(_mm512_set1_ps(200), _mm512_max_ps(_mm512_set1_ps(-200), x.m))};
}
inline Vec exp_result(Vec p, Vec n, Vec /*shifted*/, Vec /*x*/) {
  return {_mm512_scalef_ps(p.m, n.m)};
}

inline Vec load_bf16(const std::byte* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}

inline void store_bf16(std::byte* p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x.m);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.m, x.m, _CMP_UNORD_Q);
  // A NaN keeps its upper half; one that would become an infinity gets the quiet bit.
  const __mmask16 bare = _mm512_mask_testn_epi32_mask(nan, bits, _mm512_set1_epi32(0x7F0000));
  rounded = _mm512_mask_mov_epi32(rounded, nan, bits);
  rounded = _mm512_mask_or_epi32(rounded, bare, rounded, _mm512_set1_epi32(0x400000));
  const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}

inline Vec load_fp16(const std::byte* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

inline void store_fp16(std::byte* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x.m, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline Vec row_sums(const Vec* rows) {
  Vec quads[4];  // quads[i], 128-bit part p: the sums of part p of rows 4i..4i+3
  for (int i = 0; i < 4; ++i) {
    const Vec* r = rows + 4 * i;
    const Vec ab =
        Vec{_mm512_unpacklo_ps(r[0].m, r[1].m)} + Vec{_mm512_unpackhi_ps(r[0].m, r[1].m)};
    const Vec cd =
        Vec{_mm512_unpacklo_ps(r[2].m, r[3].m)} + Vec{_mm512_unpackhi_ps(r[2].m, r[3].m)};
    quads[i] = Vec{_mm512_shuffle_ps(ab.m, cd.m, 0x44)} + Vec{_mm512_shuffle_ps(ab.m, cd.m, 0xEE)};
  }
  Vec pairs[2];
  for (int i = 0; i < 2; ++i) {
    const __m512 a = quads[2 * i].m;
    const __m512 b = quads[2 * i + 1].m;
    pairs[i] = Vec{_mm512_shuffle_f32x4(a, b, 0x88)} + Vec{_mm512_shuffle_f32x4(a, b, 0xDD)};
  }
  return Vec{_mm512_shuffle_f32x4(pairs[0].m, pairs[1].m, 0x88)} +
         Vec{_mm512_shuffle_f32x4(pairs[0].m, pairs[1].m, 0xDD)};
}

inline void transpose(const float* from, std::ptrdiff_t from_stride, float* to,
                      std::ptrdiff_t to_stride) {
  __m512 a[16];
  __m512 b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(from + i * from_stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xEE);
    a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
  }
  // a[4r + c], part p: column 4p + c of rows 4r..4r+3.
  for (int c = 0; c < 4; ++c) {
    b[c] = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88);
    b[4 + c] = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xDD);
    b[8 + c] = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88);
    b[12 + c] = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xDD);
  }
  for (int c = 0; c < 4; ++c) {
    _mm512_storeu_ps(to + c * to_stride, _mm512_shuffle_f32x4(b[c], b[8 + c], 0x88));
    _mm512_storeu_ps(to + (4 + c) * to_stride, _mm512_shuffle_f32x4(b[4 + c], b[12 + c], 0x88));
    _mm512_storeu_ps(to + (8 + c) * to_stride, _mm512_shuffle_f32x4(b[c], b[8 + c], 0xDD));
    _mm512_storeu_ps(to + (12 + c) * to_stride, _mm512_shuffle_f32x4(b[4 + c], b[12 + c], 0xDD));
  }
}

}  // namespace
}  // namespace avx512
}  // namespace flash_kda::cpu
