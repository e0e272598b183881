// The emulated matrix operations against plain products, and every misuse of the asynchronous ones.
#include <cmath>

#include "emulation/test_kernels.h"

namespace flash_kda::testing {
namespace {

using namespace sm90;  // NOLINT: the primitives are what this file is about

// Rows by columns, row-major.
struct Matrix {
  Matrix(int r, int c, unsigned seed) : rows(r), columns(c), x(random_matrix(r, c, seed)) {}
  float operator()(int r, int c) const { return x[static_cast<std::size_t>(r * columns + c)]; }
  float& operator()(int r, int c) { return x[static_cast<std::size_t>(r * columns + c)]; }

  int rows, columns;
  std::vector<float> x;
};

Matrix product(const Matrix& a, const Matrix& b, const Matrix& c) {
  Matrix d = c;
  for (int i = 0; i < a.rows; ++i) {
    for (int j = 0; j < b.columns; ++j) {
      for (int k = 0; k < a.columns; ++k) d(i, j) += a(i, k) * b(k, j);
    }
  }
  return d;
}

int lane() { return thread_index() % 32; }
int g() { return lane() / 4; }
int t() { return lane() % 4; }

// The A operand of this lane: rows `row`.., 16 columns from `column`.
void fragment_a(const Matrix& a, int row, int column, std::uint32_t (&r)[4]) {
  for (int i = 0; i < 4; ++i) {
    const int at = row + g() + 8 * (i & 1), from = column + 2 * t() + 8 * (i >> 1);
    r[i] = pair(a(at, from), a(at, from + 1));
  }
}

TEST(EmulatedMatrices, LoadAndStoreBlocks) {
  const Matrix m(16, 16, 1);  // blocks (0, 0), (1, 0), (0, 1), (1, 1), rows of 48 bytes
  const auto at = [](SharedAddress base, int row, int column) {
    return base + static_cast<unsigned>(48 * row + 2 * column);
  };
  for (const std::uint64_t seed : kSeeds) {
    run(32, seed, [&](SharedAddress base) {
      const int row = 8 * (lane() / 8 % 2) + lane() % 8, column = 8 * (lane() / 16);
      std::uint32_t a[4], back[4];
      fragment_a(m, 0, 0, a);
      store_matrix(at(base, row, column), a[0], a[1], a[2], a[3]);
      sync_warp();
      for (int c = 0; c < 16; c += 2) {
        EXPECT_EQ(load_u32(at(base, lane() / 2, c)), pair(m(lane() / 2, c), m(lane() / 2, c + 1)));
      }
      load_matrix(at(base, row, column), back);
      for (int i = 0; i < 4; ++i) EXPECT_EQ(back[i], a[i]);
      load_matrix_transposed(at(base, row, column), back);
      for (int i = 0; i < 4; ++i) {
        const int r = 8 * (i % 2) + 2 * t(), c = 8 * (i / 2) + g();
        EXPECT_EQ(back[i], pair(m(r, c), m(r + 1, c)));
      }
      sync_warp();
      store_matrix_transposed(at(base + 1024, row, column), back[0], back[1], back[2], back[3]);
      sync_warp();
      for (int c = 0; c < 16; c += 2) {
        EXPECT_EQ(load_u32(at(base + 1024, lane() / 2, c)),
                  pair(m(lane() / 2, c), m(lane() / 2, c + 1)));
      }
    });
  }
  EXPECT_ERROR("load_matrix: shared address 0x410 (base + 16) has not been written", 32, 0,
               [](SharedAddress base) {
                 if (lane() < 4) store_u32(base + 4 * static_cast<unsigned>(lane()), 0);
                 sync_warp();
                 std::uint32_t r[4];
                 load_matrix(base + 16 * static_cast<unsigned>(lane()), r);
               });
}

TEST(EmulatedMatrices, WarpProducts) {
  const Matrix a(16, 16, 2), b(16, 8, 3), c(16, 8, 4);
  const Matrix want = product(a, b, c);
  Matrix left(16, 8, 5), right(8, 8, 6);
  const Matrix want_tf32 = product(left, right, c);
  run(32, 2, [&](SharedAddress) {
    float d[4], e[4];
    for (int i = 0; i < 4; ++i) d[i] = e[i] = c(g() + 8 * (i / 2), 2 * t() + i % 2);
    std::uint32_t r[4];
    fragment_a(a, 0, 0, r);
    mma_bf16(d, r, pair(b(2 * t(), g()), b(2 * t() + 1, g())),
             pair(b(2 * t() + 8, g()), b(2 * t() + 9, g())));
    // The low 13 bits are not seen.
    const auto noisy = [](float x) { return bits(x) | 0x1fffu; };
    mma_tf32(e, noisy(left(g(), t())), noisy(left(g() + 8, t())), noisy(left(g(), t() + 4)),
             noisy(left(g() + 8, t() + 4)), noisy(right(t(), g())), noisy(right(t() + 4, g())));
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(d[i], want(g() + 8 * (i / 2), 2 * t() + i % 2));
      EXPECT_EQ(e[i], want_tf32(g() + 8 * (i / 2), 2 * t() + i % 2));
    }
  });
}

// ---- wgmma
// ---------------------------------------------------------------------------------------

constexpr int kInner = 128;               // two tiles of 64 columns
constexpr unsigned kTileGap = 24 * 1024;  // between them

// b^T in two K-major tiles: row n, 64 elements of k each.
void place_by_columns(SharedAddress base, const Matrix& b) {
  for (int n = thread_index(); n < b.columns; n += 128) {
    for (int k = 0; k < b.rows; k += 2) {
      store_u32(swizzled(base + kTileGap * static_cast<unsigned>(k / 64), n, k % 64),
                pair(b(k, n), b(k + 1, n)));
    }
  }
}

// b in two tiles of 64 columns: row k.
void place_by_rows(SharedAddress base, const Matrix& b) {
  for (int k = thread_index(); k < b.rows; k += 128) {
    for (int n = 0; n < b.columns; n += 2) {
      store_u32(swizzled(base + kTileGap * static_cast<unsigned>(n / 64), k, n % 64),
                pair(b(k, n), b(k, n + 1)));
    }
  }
}

void publish() {
  fence_async_proxy();
  sync_block();
}

// Element i of a thread's accumulators.
int accumulator_row(int i) { return 16 * (thread_index() / 32 % 4) + g() + 8 * (i / 2 % 2); }
int accumulator_column(int i) { return 8 * (i / 4) + 2 * t() + i % 2; }

template <std::size_t kN>
void fill(float (&d)[kN], const Matrix& c, int first_column) {
  for (int i = 0; i < static_cast<int>(kN); ++i) {
    d[i] = c(accumulator_row(i), first_column + accumulator_column(i));
  }
}

template <std::size_t kN>
void expect_equal(const float (&d)[kN], const Matrix& want, int first_column) {
  for (int i = 0; i < static_cast<int>(kN); ++i) {
    EXPECT_EQ(d[i], want(accumulator_row(i), first_column + accumulator_column(i)));
  }
}

// d (+)= a b with b in K-major tiles; columns 32 i.. in d[i].
template <int kParts, class Issue>
void check_k_major(Issue issue) {
  constexpr int kColumns = 32 * kParts;
  const Matrix a(64, kInner, 7), b(kInner, kColumns, 8), c(64, kColumns, 9);
  Matrix zero = c;
  for (float& x : zero.x) x = 0;
  for (const bool accumulate : {false, true}) {
    const Matrix want = product(a, b, accumulate ? c : zero);
    for (const std::uint64_t seed : kSeeds) {
      run(128, seed, [&](SharedAddress base) {
        place_by_columns(base, b);
        publish();
        float d[kParts][16];
        for (int i = 0; i < kParts; ++i) fill(d[i], c, 32 * i);
        const std::uint64_t descriptor = matrix_descriptor(base, 16, 1024);
        std::uint32_t r[kInner / 16][4];
        for (int k = 0; k < kInner; k += 16)
          fragment_a(a, 16 * (thread_index() / 32), k, r[k / 16]);
        wgmma_fence();
        for (unsigned k = 0; k < kInner / 16; ++k) {
          issue(d, r[k], descriptor + k / 4 * (kTileGap >> 4) + k % 4 * 2, accumulate || k > 0);
        }
        EXPECT_TRUE(std::isnan(d[0][0]));  // not to be used before the wait
        wgmma_commit();
        wgmma_wait<0>();
        for (int i = 0; i < kParts; ++i) expect_equal(d[i], want, 32 * i);
      });
    }
  }
}

TEST(EmulatedWgmma, KMajor64) {
  check_k_major<2>([](float (&d)[2][16], const std::uint32_t* a, std::uint64_t b, bool accumulate) {
    wgmma_n64(d[0], d[1], a, b, accumulate);
  });
}

TEST(EmulatedWgmma, KMajor32) {
  check_k_major<1>([](float (&d)[1][16], const std::uint32_t* a, std::uint64_t b, bool accumulate) {
    wgmma_n32(d[0], a, b, accumulate);
  });
}

TEST(EmulatedWgmma, RowMajor128) {
  const Matrix a(64, 32, 10), b(32, 128, 11), c(64, 128, 12);
  const Matrix want = product(a, b, c);
  for (const std::uint64_t seed : kSeeds) {
    run(256, seed, [&](SharedAddress base) {  // the second warpgroup multiplies
      if (thread_index() < 128) place_by_rows(base, b);
      publish();
      if (thread_index() < 128) return;
      float d[64];
      fill(d, c, 0);
      const std::uint64_t descriptor = matrix_descriptor(base, kTileGap, 1024);
      wgmma_fence();
      for (unsigned k = 0; k < 2; ++k) {
        std::uint32_t r[4];
        fragment_a(a, 16 * (thread_index() / 32 % 4), static_cast<int>(16 * k), r);
        wgmma_n128_rows(d, r, descriptor + k * (2048 >> 4), true);
      }
      wgmma_commit();
      wgmma_wait<0>();
      expect_equal(d, want, 0);
    });
  }
}

TEST(EmulatedWgmma, GroupsCompleteInOrder) {
  const Matrix a(64, 16, 13), b(kInner, 32, 14);
  run(128, 6, [&](SharedAddress base) {
    place_by_columns(base, b);
    publish();
    const std::uint64_t descriptor = matrix_descriptor(base, 16, 1024);
    std::uint32_t r[4];
    fragment_a(a, 16 * (thread_index() / 32), 0, r);
    float first[16] = {}, second[16] = {};
    wgmma_fence();
    wgmma_n32(first, r, descriptor, false);
    wgmma_commit();
    wgmma_n32(second, r, descriptor, false);
    wgmma_commit();
    wgmma_wait<1>();
    EXPECT_FALSE(std::isnan(first[0]));
    EXPECT_TRUE(std::isnan(second[0]));
    wgmma_wait<0>();
    for (int i = 0; i < 16; ++i) EXPECT_EQ(first[i], second[i]);
  });
}

// One product of each warpgroup over a prepared B, with something done between its issue and wait.
std::function<void(SharedAddress)> with_product(
    const std::function<void(SharedAddress, float (&)[16])>& between) {
  return [=](SharedAddress base) {
    place_by_columns(base, Matrix(kInner, 32, 15));
    publish();
    std::uint32_t r[4] = {1, 2, 3, 4};
    float d[16] = {};
    wgmma_fence();
    wgmma_n32(d, r, matrix_descriptor(base, 16, 1024), false);
    wgmma_commit();
    between(base, d);
    wgmma_wait<0>();
  };
}

TEST(EmulatedWgmma, OperandsMustStayUntilTheWait) {
  EXPECT_NO_THROW(run(128, 1, with_product([](SharedAddress, float (&)[16]) {})));
  // Row 5, elements 0 and 1 of k: part of the operand. Warp 2 writes, so its own product sees it.
  EXPECT_ERROR("race with", 128, 0, with_product([](SharedAddress base, float (&)[16]) {
                 if (thread_index() == 64) store_u32(swizzled(base, 5, 0), 0x12345678);
               }));
  EXPECT_ERROR("has changed since the wgmma_n32", 32 * 4, 0,
               with_product([](SharedAddress base, float (&)[16]) {
                 sync_block();
                 if (thread_index() == 64) store_u32(swizzled(base, 5, 0), 0x12345678);
                 sync_block();
               }));
  // Elements 16 and 17: not part of it.
  EXPECT_NO_THROW(run(128, 1, with_product([](SharedAddress base, float (&)[16]) {
                        if (thread_index() == 64) store_u32(swizzled(base, 5, 16), 0x12345678);
                      })));
  EXPECT_ERROR("wrote element 3 of an accumulator", 128, 0,
               with_product([](SharedAddress, float (&d)[16]) {
                 if (thread_index() == 70) d[3] = 1.0f;
               }));
}

TEST(EmulatedWgmma, ReportsMisuse) {
  const auto product_of = [](int rows_placed, bool fenced, bool proxy, std::uint64_t change) {
    return [=](SharedAddress base) {
      Matrix b(kInner, 32, 16);
      b.columns = rows_placed;  // the first rows of the tile only
      place_by_columns(base, b);
      proxy ? publish() : sync_block();
      std::uint32_t r[4] = {};
      float d[16] = {};
      if (fenced) wgmma_fence();
      wgmma_n32(d, r, matrix_descriptor(base, 16, 1024) ^ change, false);
      wgmma_commit();
      wgmma_wait<0>();
    };
  };
  EXPECT_NO_THROW(run(128, 1, product_of(32, true, true, 0)));
  EXPECT_ERROR("has not been written", 128, 1, product_of(31, true, true, 0));
  EXPECT_ERROR("no wgmma_fence", 128, 1, product_of(32, false, true, 0));
  EXPECT_ERROR("and no fence_async_proxy", 128, 1, product_of(32, true, false, 0));
  EXPECT_ERROR("expected a start at 0, 32, 64 or 96", 128, 1, product_of(32, true, true, 1));
  EXPECT_ERROR("expected 128-byte swizzle", 128, 1, product_of(32, true, true, 1ull << 63));
  EXPECT_ERROR("bits outside the fields", 128, 1, product_of(32, true, true, 1ull << 49));
  EXPECT_ERROR("1 products are not committed", 128, 0, [](SharedAddress base) {
    place_by_columns(base, Matrix(kInner, 32, 17));
    publish();
    std::uint32_t r[4] = {};
    float d[16] = {};
    wgmma_fence();
    wgmma_n32(d, r, matrix_descriptor(base, 16, 1024), false);
    wgmma_wait<0>();
  });
}

TEST(EmulatedWgmma, TheWarpsOfAWarpgroupMustAgree) {
  const auto divergent = [](int which) {
    return [=](SharedAddress base) {
      place_by_columns(base, Matrix(kInner, 32, 18));
      publish();
      const bool odd_one = thread_index() / 32 == 2;
      std::uint32_t r[4] = {};
      float d[16] = {};
      wgmma_fence();
      wgmma_n32(d, r, matrix_descriptor(base, 16, 1024) + (odd_one && which == 0 ? 2 : 0),
                odd_one && which == 1);
      wgmma_commit();
      wgmma_wait<0>();
      if (odd_one && which == 2) wgmma_fence();
    };
  };
  EXPECT_ERROR("another warp of the warpgroup did wgmma_n32", 128, 3, divergent(0));
  EXPECT_ERROR("another warp of the warpgroup did wgmma_n32", 128, 3, divergent(1));
  EXPECT_ERROR("warp 2 did 5 wgmma operations, warp 0 of its warpgroup 4", 128, 3, divergent(2));
}

}  // namespace
}  // namespace flash_kda::testing
