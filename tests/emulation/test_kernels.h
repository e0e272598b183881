// What the tests of the emulated primitives share.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cuda/sm90/primitives.h"
#include "emulation/launch.h"

namespace flash_kda::testing {

using emulation::Coordinates;
using emulation::make_tensor_map;
using emulation::run_grid;
using sm90::SharedAddress;

// Seeds that every test of a right kernel runs with.
inline const std::vector<std::uint64_t> kSeeds = {0, 1, 2, 3, 4, 5, 6, 7};

inline void run(int threads, std::uint64_t seed,
                const std::function<void(SharedAddress base)>& body) {
  run_grid({.blocks = 1, .threads = threads, .shared_bytes = 64 * 1024, .seed = seed}, body);
}

// The text of the Error that the kernel ends with; fails the test if it ends well.
inline std::string error_of(int threads, std::uint64_t seed,
                            const std::function<void(SharedAddress base)>& body) {
  try {
    run(threads, seed, body);
  } catch (const emulation::Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no error with seed " << seed;
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

#define EXPECT_ERROR(part, threads, seed, ...)                                 \
  do {                                                                         \
    const std::string text = error_of(threads, seed, __VA_ARGS__);             \
    EXPECT_TRUE(contains(text, part)) << "expected: " << part << "\n" << text; \
  } while (false)

// Small integers and halves: exact in bf16, and so are sums of their products in fp32.
inline std::vector<float> random_matrix(int rows, int columns, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<float> m(static_cast<std::size_t>(rows * columns));
  for (float& x : m) x = (static_cast<float>(generator() % 33) - 16.0f) / 2.0f;
  return m;
}

inline std::uint16_t bf16(float x) { return static_cast<std::uint16_t>(sm90::bits(x) >> 16); }
inline std::uint32_t pair(float low, float high) {
  return bf16(low) | static_cast<std::uint32_t>(bf16(high)) << 16;
}

// Where 128-byte swizzle puts element `column` < 64 of row `row` of a tile, by its definition:
// within 8 rows, the 16-byte chunk c of row r lies at c xor r.
inline SharedAddress swizzled(SharedAddress tile, int row, int column) {
  const int chunk = (column / 8) ^ (row % 8);
  return tile + static_cast<SharedAddress>(row * 128 + chunk * 16 + column % 8 * 2);
}

}  // namespace flash_kda::testing
