// How the matrix instructions spread a matrix over the lanes of a warp: lane 4g + t.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace flash_kda::emulation {

inline int fragment_group(int lane) { return lane / 4; }     // g
inline int fragment_in_group(int lane) { return lane % 4; }  // t

inline float from_bf16(std::uint32_t bits) { return std::bit_cast<float>(bits << 16); }

// Nearest, ties to even; any NaN becomes 0x7fff, as cvt.rn.bf16x2 does it.
inline std::uint32_t to_bf16(float x) {
  if (std::isnan(x)) return 0x7fff;
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

// One lane's registers of a 16 x 16 A operand of bf16.
inline void unpack_a(const std::uint32_t* a, int lane, float (&to)[16][16]) {
  const int g = fragment_group(lane), t = fragment_in_group(lane);
  for (int i = 0; i < 4; ++i) {
    for (int e = 0; e < 2; ++e) {
      to[g + 8 * (i % 2)][2 * t + e + 8 * (i / 2)] = from_bf16((a[i] >> (16 * e)) & 0xffff);
    }
  }
}

}  // namespace flash_kda::emulation
