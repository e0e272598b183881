// Address arithmetic against a count of every byte.
#include "memory_overlap.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>

#include "arrays.h"

namespace flash_kda::testing {
namespace {

constexpr std::uintptr_t kBase = std::uintptr_t{1} << 32;

TensorView view_at(std::uintptr_t address, DType dtype, const Dims& shape, const Dims& stride) {
  TensorView view;
  view.data = reinterpret_cast<void*>(address);  // NOLINT: never dereferenced
  view.dtype = dtype;
  view.rank = static_cast<std::int32_t>(shape.size());
  for (std::size_t a = 0; a < shape.size(); ++a) {
    view.shape[a] = shape[a];
    view.stride[a] = stride[a];
  }
  return view;
}

// The addresses of all bytes; `collisions` counts elements whose first byte was there before.
std::set<std::uintptr_t> bytes_of(const TensorView& view, int* collisions = nullptr) {
  std::set<std::uintptr_t> bytes;
  for_each_offset(view, [&](std::int64_t offset) {
    const auto first = reinterpret_cast<std::uintptr_t>(view.data) +
                       static_cast<std::uintptr_t>(offset * size_of(view.dtype));
    for (std::uintptr_t b = 0; b < static_cast<std::uintptr_t>(size_of(view.dtype)); ++b) {
      if (!bytes.insert(first + b).second && b == 0 && collisions != nullptr) ++*collisions;
    }
  });
  return bytes;
}

TensorView random_view(Random& random) {
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(random.bits() % static_cast<std::uint64_t>(n));
  };
  const DType dtypes[] = {DType::kBFloat16, DType::kFloat32, DType::kInt64};
  const DType dtype = dtypes[below(3)];
  Dims shape, stride;
  const std::int64_t rank = below(5);
  for (std::int64_t a = 0; a < rank; ++a) {
    shape.push_back(below(20) == 0 ? 0 : 1 + below(4));
    stride.push_back(below(40) - 8);
  }
  return view_at(kBase + static_cast<std::uintptr_t>(below(200)), dtype, shape, stride);
}

TEST(MemoryOverlap, AgreesWithACountOfEveryByte) {
  Random random(7);
  int overlapping = 0;
  constexpr int kPairs = 20000;
  for (int i = 0; i < kPairs; ++i) {
    const TensorView a = random_view(random);
    const TensorView b = random_view(random);
    const std::set<std::uintptr_t> bytes = bytes_of(a);
    bool want = false;
    for (const std::uintptr_t byte : bytes_of(b)) want = want || bytes.contains(byte);
    ASSERT_EQ(overlap(a, b), want) << i;
    ASSERT_EQ(overlap(b, a), want) << i;
    overlapping += want ? 1 : 0;
  }
  EXPECT_GT(overlapping, kPairs / 10);
  EXPECT_LT(overlapping, kPairs * 9 / 10);
}

// distinct_elements may refuse a harmless layout that no slicing gives; it must never pass a
// harmful one.
TEST(MemoryOverlap, DistinctElementsNeverCollide) {
  Random random(8);
  int passed = 0;
  for (int i = 0; i < 20000; ++i) {
    const TensorView a = random_view(random);
    if (!distinct_elements(a)) continue;
    int collisions = 0;
    bytes_of(a, &collisions);
    ASSERT_EQ(collisions, 0) << i;
    ++passed;
  }
  EXPECT_GT(passed, 2000);
}

TEST(MemoryOverlap, SlicesOfDenseArraysAreDistinct) {
  // [B, T, H, K] taken from [T, B, H, 3 * K] by permuting and slicing, every second token,
  // backwards.
  const Dims strides{4 * 96, -2 * 2 * 4 * 96, 96, 1};
  EXPECT_TRUE(distinct_elements(view_at(kBase << 4, DType::kBFloat16, {2, 50, 4, 32}, strides)));
}

// Real sizes: 96 heads of q, k, v, out as blocks of one row, 262144 rows (far more than 2^31
// elements). Must be quick.
TEST(MemoryOverlap, LargeInterleavedBlocks) {
  const std::int64_t pitch = 4 * 96 * 128 + 96, tokens = 262144;
  const auto block = [&](std::int64_t column, std::int64_t dims) {
    return view_at(kBase + static_cast<std::uintptr_t>(2 * column), DType::kBFloat16,
                   {1, tokens, 96, dims}, {tokens * pitch, pitch, 128, 1});
  };
  EXPECT_FALSE(overlap(block(0, 128), block(96 * 128, 128)));
  EXPECT_TRUE(overlap(block(0, 128), block(96 * 128 - 1, 128)));
  EXPECT_FALSE(overlap(block(0, 64), block(64, 64)));  // halves of each head
  EXPECT_TRUE(overlap(block(0, 65), block(64, 64)));
  // The last element alone.
  const std::int64_t last = (tokens - 1) * pitch + 96 * 128 - 1;
  EXPECT_TRUE(overlap(block(0, 128), view_at(kBase + static_cast<std::uintptr_t>(2 * last),
                                             DType::kInt32, {1}, {1})));
  EXPECT_FALSE(overlap(block(0, 128), view_at(kBase + static_cast<std::uintptr_t>(2 * last + 2),
                                              DType::kInt32, {1}, {1})));
}

TEST(MemoryOverlap, Addressable) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 62;
  EXPECT_TRUE(addressable(view_at(kBase, DType::kFloat32, {262144, 96, 128}, {1 << 20, 128, 1})));
  EXPECT_FALSE(addressable(view_at(kBase, DType::kFloat32, {kLarge, 4}, {0, 0})));
  EXPECT_FALSE(addressable(view_at(kBase, DType::kFloat32, {3}, {kLarge})));
  EXPECT_FALSE(
      addressable(view_at(kBase, DType::kFloat32, {2}, {-static_cast<std::int64_t>(kBase)})));
  EXPECT_TRUE(addressable(view_at(0, DType::kFloat32, {0, 5}, {1, 1})));
}

TEST(MemoryOverlap, SameLayout) {
  const TensorView pool = view_at(kBase, DType::kFloat32, {8, 2, 4, 4}, {64, 16, 4, 1});
  TensorView other = pool;
  other.shape[0] = 3;
  EXPECT_TRUE(same_layout(pool, other));
  other.stride[0] = 128;
  EXPECT_FALSE(same_layout(pool, other));
  other.shape[0] = 1;  // then its stride means nothing
  EXPECT_TRUE(same_layout(pool, other));
  other.shape[1] = 1;
  EXPECT_FALSE(same_layout(pool, other));
}

}  // namespace
}  // namespace flash_kda::testing
