// Vec: 4 floats of whatever the target has (GCC's and Clang's vector extension: SSE2, NEON, plain
// code). The other vec_*.h give the same functions; the comments here hold for all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace flash_kda::cpu {
namespace generic {
namespace {

inline constexpr int kWidth = 4;
// Rows of a register tile: kTileRows x kTileVecs accumulators out of 16 registers.
inline constexpr int kTileRows = 4;
// Vectors whose exponentials are computed side by side.
inline constexpr int kSideBySide = 2;

using Floats = float __attribute__((vector_size(16)));
using Bits = std::uint32_t __attribute__((vector_size(16)));

struct Vec {
  Floats m;
};

inline Bits bits_of(Vec x) { return reinterpret_cast<Bits>(x.m); }
inline Vec of_bits(Bits x) { return {reinterpret_cast<Floats>(x)}; }

inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x.m, p, sizeof(x.m));
  return x;
}
inline void store(float* p, Vec x) { std::memcpy(p, &x.m, sizeof(x.m)); }
inline Vec splat(float x) { return {Floats{x, x, x, x}}; }
inline Vec operator+(Vec a, Vec b) { return {a.m + b.m}; }
inline Vec operator-(Vec a, Vec b) { return {a.m - b.m}; }
inline Vec operator*(Vec a, Vec b) { return {a.m * b.m}; }
inline Vec operator/(Vec a, Vec b) { return {a.m / b.m}; }
inline Vec sqrt(Vec a) {
  for (int i = 0; i < kWidth; ++i) a.m[i] = __builtin_sqrtf(a.m[i]);
  return a;
}
// a * b + c and c - a * b, fused where the target can.
inline Vec fma(Vec a, Vec b, Vec c) { return {a.m * b.m + c.m}; }
inline Vec fnma(Vec a, Vec b, Vec c) { return {c.m - a.m * b.m}; }
// a < b ? x : y; y where a or b is NaN.
inline Vec select_less(Vec a, Vec b, Vec x, Vec y) { return {a.m < b.m ? x.m : y.m}; }
// For exp() in math.inl. exp_argument may bring x closer to 0 as long as exp_result stays the same.
inline Vec exp_argument(Vec x) { return x; }
// p * 2^n, p near 1; 0 and infinity where x lies outside of (-87, 88); NaN where x is. `shifted`
// has the integer n in its low bits.
inline Vec exp_result(Vec p, Vec /*n*/, Vec shifted, Vec x) {
  const Vec inside = of_bits(bits_of(p) + (bits_of(shifted) << 23));
  const Vec upper = select_less(x, splat(88), inside, x + splat(__builtin_inff()));
  return select_less(x, splat(-87), splat(0), upper);
}

inline Vec load_bf16(const std::byte* p) {
  std::uint16_t half[kWidth];
  std::memcpy(half, p, sizeof(half));
  return of_bits(Bits{half[0], half[1], half[2], half[3]} << 16);
}

// Nearest, ties to even. A NaN keeps its upper half, so that bf16 -> fp32 -> bf16 changes no bit.
inline void store_bf16(std::byte* p, Vec x) {
  std::uint16_t half[kWidth];
  for (int i = 0; i < kWidth; ++i) {
    const std::uint32_t bits = bits_of(x)[i];
    if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
      half[i] = static_cast<std::uint16_t>(bits >> 16);
      if ((half[i] & 0x7FU) == 0) half[i] |= 0x40U;  // must not become an infinity
    } else {
      half[i] = static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
    }
  }
  std::memcpy(p, half, sizeof(half));
}

inline float of_fp16(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t exponent = half >> 10 & 31U;
  const std::uint32_t mantissa = half & 1023U;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t bits = exponent == 31 ? sign | 0x7F800000U | mantissa << 13
                                            : sign | (exponent + 112) << 23 | mantissa << 13;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline std::uint16_t to_fp16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(x));
  const std::uint32_t sign = bits >> 16 & 0x8000U;
  bits &= 0x7FFFFFFFU;
  if (bits > 0x7F800000U) {
    return static_cast<std::uint16_t>(sign | 0x7E00U | (bits >> 13 & 0x3FFU));
  }
  if (bits >= 0x477FF000U) return static_cast<std::uint16_t>(sign | 0x7C00U);  // 65520 and more
  if (bits < 0x38800000U) {  // subnormal: the fp32 adder rounds at the right bit
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof(magnitude));
    magnitude += 0.5F;
    std::memcpy(&bits, &magnitude, sizeof(magnitude));
    return static_cast<std::uint16_t>(sign | (bits - 0x3F000000U));
  }
  bits += 0xFFFU + (bits >> 13 & 1U) - 0x38000000U;
  return static_cast<std::uint16_t>(sign | bits >> 13);
}

inline Vec load_fp16(const std::byte* p) {
  std::uint16_t half[kWidth];
  std::memcpy(half, p, sizeof(half));
  return {Floats{of_fp16(half[0]), of_fp16(half[1]), of_fp16(half[2]), of_fp16(half[3])}};
}

inline void store_fp16(std::byte* p, Vec x) {
  std::uint16_t half[kWidth];
  for (int i = 0; i < kWidth; ++i) half[i] = to_fp16(x.m[i]);
  std::memcpy(p, half, sizeof(half));
}

// Element i of the result: the sum of the elements of rows[i], i < kWidth.
inline Vec row_sums(const Vec* rows) {
  Vec sums;
  for (int i = 0; i < kWidth; ++i) {
    const Floats r = rows[i].m;
    sums.m[i] = (r[0] + r[2]) + (r[1] + r[3]);
  }
  return sums;
}

// to[j][i] = from[i][j] for a block of kWidth x kWidth; strides in elements.
inline void transpose(const float* from, std::ptrdiff_t from_stride, float* to,
                      std::ptrdiff_t to_stride) {
  for (int i = 0; i < kWidth; ++i) {
    for (int j = 0; j < kWidth; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
}

}  // namespace
}  // namespace generic
}  // namespace flash_kda::cpu
