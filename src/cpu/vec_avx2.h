// Vec: 8 floats of AVX2 with FMA and F16C. See vec_generic.h for what each function promises.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace flash_kda::cpu {
namespace avx2 {
namespace {

inline constexpr int kWidth = 8;
// Rows of a register tile: kTileRows x kTileVecs accumulators out of 16 registers.
inline constexpr int kTileRows = 4;
// Vectors whose exponentials are computed side by side.
inline constexpr int kSideBySide = 2;

struct Vec {
  __m256 m;
};

inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.m); }
inline Vec splat(float x) { return {_mm256_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.m, b.m)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.m, b.m)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.m, b.m)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.m, b.m)}; }
inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.m)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.m, b.m, c.m)}; }
inline Vec fnma(Vec a, Vec b, Vec c) { return {_mm256_fnmadd_ps(a.m, b.m, c.m)}; }
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return {_mm256_blendv_ps(y.m, x.m, _mm256_cmp_ps(a.m, b.m, _CMP_LT_OQ))};
}
inline Vec exp_argument(Vec x) { return x; }
inline Vec exp_result(Vec p, Vec /*n*/, Vec shifted, Vec x) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted.m), 23);
  const Vec inside = {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p.m), exponent))};
  const Vec upper = select_less(x, splat(88), inside, x + splat(__builtin_inff()));
  return select_less(x, splat(-87), splat(0), upper);
}

inline Vec load_bf16(const std::byte* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}

inline void store_bf16(std::byte* p, Vec x) {
  const __m256i bits = _mm256_castps_si256(x.m);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  // A NaN keeps its upper half; one that would become an infinity gets the quiet bit.
  const __m256i payload = _mm256_and_si256(bits, _mm256_set1_epi32(0x7F0000));
  const __m256i bare = _mm256_cmpeq_epi32(payload, _mm256_setzero_si256());
  const __m256i kept = _mm256_or_si256(bits, _mm256_and_si256(bare, _mm256_set1_epi32(0x400000)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.m, x.m, _CMP_UNORD_Q));
  const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, kept, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

inline Vec load_fp16(const std::byte* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

inline void store_fp16(std::byte* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(x.m, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

inline Vec row_sums(const Vec* rows) {
  Vec quads[2];  // quads[i], 128-bit part p: the sums of part p of rows 4i..4i+3
  for (int i = 0; i < 2; ++i) {
    const Vec* r = rows + 4 * i;
    const Vec ab =
        Vec{_mm256_unpacklo_ps(r[0].m, r[1].m)} + Vec{_mm256_unpackhi_ps(r[0].m, r[1].m)};
    const Vec cd =
        Vec{_mm256_unpacklo_ps(r[2].m, r[3].m)} + Vec{_mm256_unpackhi_ps(r[2].m, r[3].m)};
    quads[i] = Vec{_mm256_shuffle_ps(ab.m, cd.m, 0x44)} + Vec{_mm256_shuffle_ps(ab.m, cd.m, 0xEE)};
  }
  return Vec{_mm256_permute2f128_ps(quads[0].m, quads[1].m, 0x20)} +
         Vec{_mm256_permute2f128_ps(quads[0].m, quads[1].m, 0x31)};
}

inline void transpose(const float* from, std::ptrdiff_t from_stride, float* to,
                      std::ptrdiff_t to_stride) {
  __m256 a[8];
  __m256 b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(from + i * from_stride);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
  }
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(to + c * to_stride, _mm256_permute2f128_ps(a[c], a[4 + c], 0x20));
    _mm256_storeu_ps(to + (4 + c) * to_stride, _mm256_permute2f128_ps(a[c], a[4 + c], 0x31));
  }
}

}  // namespace
}  // namespace avx2
}  // namespace flash_kda::cpu
