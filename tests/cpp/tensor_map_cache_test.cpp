// The memory of tensor maps, with stand-ins for the driver's maps: no CUDA.
#include "cuda/sm90/tensor_map_cache.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <vector>

namespace flash_kda::sm90 {
namespace {

using Cache = TensorMapCache<std::uint64_t>;

const void* at(std::uintptr_t address) { return reinterpret_cast<const void*>(address); }

TensorMapLayout layout_of(std::uint64_t heads, std::uint64_t tokens) {
  return {{128, heads, tokens, 1}, {256, 256 * heads, 256 * heads * tokens}, {64, 1, 32, 1}};
}

TEST(Sm90TensorMapCache, RemembersWhatIsEqualInEveryPart) {
  Cache cache{};
  std::uint64_t encoded = 0;
  const auto get = [&](const void* data, const TensorMapLayout& layout) {
    return cache.get(data, layout, [&] { return ++encoded; });
  };
  const TensorMapLayout layout = layout_of(4, 100);
  EXPECT_EQ(get(at(0x1000), layout), 1U);
  EXPECT_EQ(get(at(0x1000), layout), 1U);
  EXPECT_EQ(get(at(0x1010), layout), 2U);
  std::vector<TensorMapLayout> others;
  for (std::size_t i = 0; i < 4; ++i) {
    others.push_back(layout);
    others.back().extents[i] += 8;
    others.push_back(layout);
    others.back().box[i] += 1;
  }
  for (std::size_t i = 0; i < 3; ++i) {
    others.push_back(layout);
    others.back().strides[i] += 16;
  }
  for (const TensorMapLayout& other : others) {
    const std::uint64_t before = encoded;
    EXPECT_EQ(get(at(0x1000), other), before + 1) << "taken for another layout";
  }
}

// Far more keys than places, in an order that comes back to each: a right answer always.
TEST(Sm90TensorMapCache, NeverGivesAnotherKeysMap) {
  Cache cache{};
  std::map<std::tuple<std::uintptr_t, std::uint64_t>, std::uint64_t> truth;
  std::uint64_t next = 0;
  std::uint64_t draw = 1;
  for (int round = 0; round < 20000; ++round) {
    draw = draw * 6364136223846793005u + 1442695040888963407u;
    const std::uintptr_t address = 0x7f0000000000u + 512 * (draw >> 33 & 63);
    const std::uint64_t tokens = 1 + (draw >> 45 & 15);
    auto [entry, is_new] = truth.try_emplace({address, tokens}, 0);
    if (is_new) entry->second = ++next;
    const std::uint64_t got =
        cache.get(at(address), layout_of(4, tokens), [&] { return entry->second; });
    ASSERT_EQ(got, entry->second);
  }
  EXPECT_GT(truth.size(), 4 * Cache::kPlaces);
}

TEST(Sm90TensorMapCache, AnErrorIsNotRemembered) {
  Cache cache{};
  const TensorMapLayout layout = layout_of(2, 7);
  const auto fail = []() -> std::uint64_t { throw std::runtime_error("refused"); };
  EXPECT_THROW(cache.get(at(16), layout, fail), std::runtime_error);
  EXPECT_EQ(cache.get(at(16), layout, [] { return std::uint64_t{5}; }), 5U);
  EXPECT_EQ(cache.get(at(16), layout, fail), 5U);
}

// The five arrays of a call, one after the other in memory, seldom share a place.
TEST(Sm90TensorMapCache, NeighboursSpread) {
  std::set<std::size_t> places;
  for (std::uintptr_t i = 0; i < 64; ++i) {
    places.insert(Cache::place_of(at(0x7f0000000000u + (i << 21)), layout_of(96, 8192)));
  }
  EXPECT_GT(places.size(), Cache::kPlaces / 2);
}

static_assert(std::is_trivially_destructible_v<Cache>);
static_assert(std::is_trivially_default_constructible_v<Cache>);

}  // namespace
}  // namespace flash_kda::sm90
