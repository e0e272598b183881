// The emulated copy engine: contents against a plain loop, and every misuse of it.
#include <array>
#include <cstring>
#include <memory>

#include "emulation/test_kernels.h"

namespace flash_kda::testing {
namespace {

using namespace sm90;  // NOLINT: the primitives are what this file is about

// [batches, tokens, heads, channels] of distinct bf16 numbers, with gaps between rows.
struct Tensor {
  static constexpr std::int64_t kBatches = 2, kTokens = 37, kHeads = 3, kChannels = 72;
  static constexpr std::int64_t kPitch = 80;  // elements

  Tensor() : storage(static_cast<std::size_t>(kBatches * kTokens * kHeads * kPitch + 8)) {
    void* p = storage.data();
    std::size_t space = 2 * storage.size();
    data = static_cast<std::uint16_t*>(std::align(16, 2 * (storage.size() - 8), p, space));
    for (std::size_t i = 0; i < storage.size() - 8; ++i)
      data[i] = static_cast<std::uint16_t>(i + 1);
    map = make_tensor_map(data, {kChannels, kHeads, kTokens, kBatches},
                          {2, 2 * kPitch, 2 * kPitch * kHeads, 2 * kPitch * kHeads * kTokens},
                          {64, 1, 16, 1});
  }
  // Null outside the tensor.
  std::uint16_t* at(std::int64_t c, std::int64_t h, std::int64_t t, std::int64_t b) const {
    const bool inside = c >= 0 && c < kChannels && h >= 0 && h < kHeads && t >= 0 && t < kTokens &&
                        b >= 0 && b < kBatches;
    return inside ? data + ((b * kTokens + t) * kHeads + h) * kPitch + c : nullptr;
  }

  std::vector<std::uint16_t> storage;
  std::uint16_t* data;
  TensorMap map;
};

constexpr int kBoxRows = 16;
constexpr int kBoxBytes = kBoxRows * 128;
constexpr unsigned kBarrierAt = 32 * 1024;

void init_barrier(SharedAddress base) {
  if (thread_index() == 0) {
    barrier_init(base + kBarrierAt, 1);
    fence_barrier_init();
  }
  sync_block();
}

std::uint16_t shared_element(SharedAddress tile, int row, int column) {
  const SharedAddress a = swizzled(tile, row, column);
  return static_cast<std::uint16_t>(load_u32(a & ~3u) >> (8 * (a & 2)));
}

TEST(EmulatedCopies, LoadsBoxesInsideAndAcrossTheBorders) {
  const Tensor tensor;
  // channel, head, token, batch
  const std::array<Coordinates, 6> places = {
      {{0, 0, 0, 0}, {8, 2, 7, 1}, {16, 1, 30, 0}, {-8, 1, -3, 1}, {0, 3, 0, 0}, {0, 0, 100, 1}}};
  for (const std::uint64_t seed : kSeeds) {
    run(64, seed, [&](SharedAddress base) {
      init_barrier(base);
      const SharedAddress barrier = base + kBarrierAt;
      if (thread_index() == 40) {
        barrier_arrive_expect(barrier, static_cast<int>(places.size()) * kBoxBytes);
        for (std::size_t i = 0; i < places.size(); ++i) {
          const Coordinates& c = places[i];
          tensor_load(base + static_cast<unsigned>(i) * kBoxBytes, &tensor.map, barrier, c[0], c[1],
                      c[2], c[3]);
        }
      }
      barrier_wait(barrier, 0);
      for (std::size_t i = 0; i < places.size(); ++i) {
        const Coordinates& c = places[i];
        for (int row = thread_index(); row < kBoxRows; row += 64) {
          for (int column = 0; column < 64; ++column) {
            const std::uint16_t* want = tensor.at(c[0] + column, c[1], c[2] + row, c[3]);
            ASSERT_EQ(shared_element(base + static_cast<unsigned>(i) * kBoxBytes, row, column),
                      want != nullptr ? *want : 0)
                << "box " << i << " row " << row << " column " << column;
          }
        }
      }
    });
  }
}

TEST(EmulatedCopies, StoresBoxesAndDropsWhatIsOutside) {
  for (const std::uint64_t seed : kSeeds) {
    const Tensor before, after;
    const std::array<Coordinates, 3> places = {{{8, 2, 7, 1}, {16, 1, 30, 0}, {-8, 0, -3, 0}}};
    run(64, seed, [&](SharedAddress base) {
      for (std::size_t i = 0; i < places.size(); ++i) {
        for (int row = thread_index(); row < kBoxRows; row += 64) {
          for (int column = 0; column < 64; column += 2) {
            const auto x = static_cast<std::uint32_t>(0x8000 + 1024 * i) +
                           static_cast<std::uint32_t>(64 * row + column);
            store_u32(swizzled(base + static_cast<unsigned>(i) * kBoxBytes, row, column),
                      x | (x + 1) << 16);
          }
        }
      }
      fence_async_proxy();
      sync_block();
      if (thread_index() == 3) {
        for (std::size_t i = 0; i < places.size(); ++i) {
          const Coordinates& c = places[i];
          tensor_store(base + static_cast<unsigned>(i) * kBoxBytes, &after.map, c[0], c[1], c[2],
                       c[3]);
          tensor_store_commit();
        }
        tensor_store_wait_read<1>();
        tensor_store_wait_all();
      }
    });
    for (std::size_t i = 0; i < places.size(); ++i) {
      const Coordinates& c = places[i];
      for (int row = 0; row < kBoxRows; ++row) {
        for (int column = 0; column < 64; ++column) {
          std::uint16_t* want = before.at(c[0] + column, c[1], c[2] + row, c[3]);
          if (want != nullptr)
            *want = static_cast<std::uint16_t>(0x8000 + 1024 * i + 64 * row + column);
        }
      }
    }
    const std::size_t bytes = 2 * (before.storage.size() - 8);
    EXPECT_EQ(std::memcmp(before.data, after.data, bytes), 0);
  }
}

TEST(EmulatedCopies, DataThatWasNotWaitedForIsReported) {
  const Tensor tensor;
  for (const bool write : {false, true}) {
    EXPECT_ERROR("is being written by a tensor_load", 32, 0, [&](SharedAddress base) {
      init_barrier(base);
      if (thread_index() != 0) return;
      barrier_arrive_expect(base + kBarrierAt, kBoxBytes);
      tensor_load(base, &tensor.map, base + kBarrierAt, 0, 0, 0, 0);
      write ? store_u32(base, 1) : static_cast<void>(load_u32(base));
    });
  }
  EXPECT_ERROR("ends with 1 tensor_loads under way", 32, 0, [&](SharedAddress base) {
    init_barrier(base);
    if (thread_index() != 0) return;
    barrier_arrive_expect(base + kBarrierAt, kBoxBytes);
    tensor_load(base, &tensor.map, base + kBarrierAt, 0, 0, 0, 0);
  });
}

TEST(EmulatedCopies, BytesMustBeExpected) {
  const Tensor tensor;
  EXPECT_ERROR("2048 bytes more for barrier", 32, 0, [&](SharedAddress base) {
    init_barrier(base);
    if (thread_index() != 0) return;
    barrier_arrive_expect(base + kBarrierAt, kBoxBytes - 16);
    tensor_load(base, &tensor.map, base + kBarrierAt, 0, 0, 0, 0);
  });
  EXPECT_ERROR("deadlock", 32, 1, [&](SharedAddress base) {  // bytes that never come
    init_barrier(base);
    if (thread_index() == 0) {
      barrier_arrive_expect(base + kBarrierAt, kBoxBytes + 16);
      tensor_load(base, &tensor.map, base + kBarrierAt, 0, 0, 0, 0);
    }
    barrier_wait(base + kBarrierAt, 0);
  });
  EXPECT_ERROR("without fence_barrier_init", 32, 0, [&](SharedAddress base) {
    if (thread_index() != 0) return;
    barrier_init(base + kBarrierAt, 1);
    barrier_arrive_expect(base + kBarrierAt, kBoxBytes);
    tensor_load(base, &tensor.map, base + kBarrierAt, 0, 0, 0, 0);
  });
}

TEST(EmulatedCopies, ProxiesAndAlignment) {
  const Tensor tensor;
  const auto fill = [](SharedAddress base, bool fence) {
    for (unsigned i = 0; i < kBoxBytes / 4; i += 32) {
      store_u32(base + 4 * (i + static_cast<unsigned>(thread_index())), i);
    }
    if (fence || thread_index() != 9) fence_async_proxy();
    sync_block();
  };
  EXPECT_ERROR("stored by thread 9, and no fence_async_proxy", 32, 0, [&](SharedAddress base) {
    fill(base, false);
    if (thread_index() == 0) tensor_store(base, &tensor.map, 0, 0, 0, 0);
  });
  EXPECT_ERROR("stored by thread 9, and no fence_async_proxy", 32, 0, [&](SharedAddress base) {
    init_barrier(base);
    fill(base, false);
    if (thread_index() != 0) return;
    barrier_arrive_expect(base + kBarrierAt, kBoxBytes);
    tensor_load(base, &tensor.map, base + kBarrierAt, 0, 0, 0, 0);
  });
  EXPECT_ERROR("has not been written", 32, 0, [&](SharedAddress base) {
    if (thread_index() == 0) tensor_store(base, &tensor.map, 0, 0, 0, 0);
  });
  EXPECT_ERROR("not a multiple of 1024", 32, 0, [&](SharedAddress base) {
    if (thread_index() == 0) tensor_store(base + 512, &tensor.map, 0, 0, 0, 0);
  });
}

TEST(EmulatedCopies, StoresReadLate) {
  const Tensor tensor;
  const auto store = [&](SharedAddress base) {
    for (unsigned i = 0; i < kBoxBytes; i += 4) store_u32(base + i, i);
    fence_async_proxy();
    tensor_store(base, &tensor.map, 0, 0, 0, 0);
  };
  EXPECT_ERROR("has changed since the tensor_store", 32, 0, [&](SharedAddress base) {
    if (thread_index() != 0) return;
    store(base);
    tensor_store_commit();
    store_u32(base + 1024, 7);
    tensor_store_wait_read<0>();
  });
  EXPECT_ERROR("1 tensor_stores not committed", 32, 0, [&](SharedAddress base) {
    if (thread_index() == 0) store(base);
  });
  EXPECT_ERROR("1 groups not waited for", 32, 0, [&](SharedAddress base) {
    if (thread_index() != 0) return;
    store(base);
    tensor_store_commit();
    tensor_store_wait_read<1>();
  });
}

TEST(EmulatedCopies, MapsThatTheDriverRefuses) {
  alignas(16) static std::uint16_t data[64];
  const auto make = [&](std::int64_t tokens, std::int64_t pitch, int channels, int rows) {
    return make_tensor_map(data, {64, 1, tokens, 1}, {2, pitch, pitch, pitch},
                           {channels, 1, rows, 1});
  };
  EXPECT_NO_THROW(make(1, 128, 64, 32));
  EXPECT_THROW(make(0, 128, 64, 32), std::invalid_argument);
  EXPECT_THROW(make(1, 136, 64, 32), std::invalid_argument);
  EXPECT_THROW(make(1, 128, 32, 32), std::invalid_argument);
  EXPECT_THROW(make(1, 128, 64, 257), std::invalid_argument);
  EXPECT_THROW(make_tensor_map(data + 1, {8, 1, 1, 1}, {2, 16, 16, 16}, {64, 1, 1, 1}),
               std::invalid_argument);
}

}  // namespace
}  // namespace flash_kda::testing
