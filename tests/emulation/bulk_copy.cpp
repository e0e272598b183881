#include "emulation/bulk_copy.h"

#include <cstring>

namespace flash_kda::emulation {

namespace {

constexpr int kElementBytes = 2;
constexpr int kRowElements = kSwizzleRowBytes / kElementBytes;
constexpr int kMaxBox = 256;

// Calls f(row of the box, pointer to its first channel, how many of its channels from which lie
// inside the tensor); a row that is outside has none.
template <class Function>
void for_each_row(const TensorMap& map, const Coordinates& at, Function f) {
  int row = 0;
  for (int b = 0; b < map.box[3]; ++b) {
    for (int t = 0; t < map.box[2]; ++t) {
      for (int h = 0; h < map.box[1]; ++h, ++row) {
        const std::array<std::int64_t, 3> index = {at[1] + std::int64_t{h}, at[2] + std::int64_t{t},
                                                   at[3] + std::int64_t{b}};
        bool inside = true;
        std::int64_t offset = 0;
        for (std::size_t d = 0; d < 3; ++d) {
          inside = inside && index[d] >= 0 && index[d] < map.sizes[d + 1];
          offset += index[d] * map.strides[d + 1];
        }
        f(row, inside ? static_cast<std::byte*>(map.data) + offset : nullptr);
      }
    }
  }
}

// Elements [first, last) of a row of the box whose channels exist.
std::pair<int, int> channels_inside(const TensorMap& map, int channel) {
  const std::int64_t first = std::max<std::int64_t>(0, -std::int64_t{channel});
  const std::int64_t last =
      std::min<std::int64_t>(kRowElements, map.sizes[0] - std::int64_t{channel});
  return {static_cast<int>(first), static_cast<int>(std::max(first, last))};
}

}  // namespace

TensorMap make_tensor_map(const void* data, const std::array<std::int64_t, 4>& sizes,
                          const std::array<std::int64_t, 4>& strides,
                          const std::array<int, 4>& box) {
  if (reinterpret_cast<std::uintptr_t>(data) % kChunkBytes != 0) {
    throw std::invalid_argument("data: expected an address that is a multiple of 16");
  }
  for (std::size_t d = 0; d < 4; ++d) {
    const int dimension = static_cast<int>(d);
    if (sizes[d] < 1 || sizes[d] > (std::int64_t{1} << 32)) {
      throw std::invalid_argument(format("sizes[%d]: expected 1 to 2^32, got %lld", dimension,
                                         static_cast<long long>(sizes[d])));
    }
    if (d > 0 && (strides[d] % kChunkBytes != 0 || strides[d] < 0 ||
                  strides[d] >= (std::int64_t{1} << 40))) {
      throw std::invalid_argument(
          format("strides[%d]: expected a multiple of 16 under 2^40, "
                 "got %lld",
                 dimension, static_cast<long long>(strides[d])));
    }
    if (box[d] < 1 || box[d] > kMaxBox) {
      throw std::invalid_argument(
          format("box[%d]: expected 1 to %d, got %d", dimension, kMaxBox, box[d]));
    }
  }
  if (strides[0] != kElementBytes || box[0] != kRowElements) {
    throw std::invalid_argument(format("channels: expected stride %d and box %d, got %lld and %d",
                                       kElementBytes, kRowElements,
                                       static_cast<long long>(strides[0]), box[0]));
  }
  return {const_cast<void*>(data), sizes, strides, box};
}

CopyEngine::CopyEngine(Scheduler& scheduler, Clocks& clocks, SharedMemory& memory,
                       TransactionBarriers& barriers)
    : scheduler_(scheduler),
      clocks_(clocks),
      memory_(memory),
      barriers_(barriers),
      stores_(static_cast<std::size_t>(scheduler.threads())) {}

void CopyEngine::check(const char* operation, SharedAddress a, const TensorMap* map) const {
  if (map == nullptr || map->data == nullptr) {
    scheduler_.fail(format("%s: map: expected a tensor map, got none", operation));
  }
  if (a % kSwizzlePatternBytes != 0) {
    scheduler_.fail(format("%s: shared address 0x%x (base + %u) is not a multiple of %d", operation,
                           a, a - kSharedBase, kSwizzlePatternBytes));
  }
}

void CopyEngine::load(SharedAddress to, const TensorMap* map, SharedAddress barrier,
                      const Coordinates& at) {
  check("tensor_load", to, map);
  const int bytes = map->rows() * kSwizzleRowBytes;
  const Epoch arrival = barriers_.announce("tensor_load", barrier, bytes);
  memory_.start_write("tensor_load", arrival, to, bytes);
  loads_.push_back({to, barrier, map, at});
  scheduler_.maybe_preempt();
}

void CopyEngine::load_bytes(SharedAddress to, const void* from, int bytes, SharedAddress barrier) {
  if (to % kChunkBytes != 0 || reinterpret_cast<std::uintptr_t>(from) % kChunkBytes != 0 ||
      bytes <= 0 || bytes % kChunkBytes != 0) {
    scheduler_.fail(
        format("bulk_load: %d bytes from %p to shared address 0x%x (base + %u): not in "
               "multiples of %d",
               bytes, from, to, to - kSharedBase, kChunkBytes));
  }
  const Epoch arrival = barriers_.announce("bulk_load", barrier, bytes);
  memory_.start_write("bulk_load", arrival, to, bytes);
  loads_.push_back({to, barrier, nullptr, {}, static_cast<const std::byte*>(from), bytes});
  scheduler_.maybe_preempt();
}

bool CopyEngine::progress(bool forced) {
  if (loads_.empty()) return false;
  if (!scheduler_.seeded()) {
    if (forced) deliver(0);
    return true;
  }
  if (forced || scheduler_.random() % 4 == 0) deliver(scheduler_.random() % loads_.size());
  return true;
}

void CopyEngine::deliver(std::size_t index) {
  const Load load = loads_[index];
  loads_.erase(loads_.begin() + static_cast<std::ptrdiff_t>(index));
  if (load.map == nullptr) {
    for (int byte = 0; byte < load.bytes; byte += kChunkBytes) {
      memory_.finish_write(load.to + static_cast<SharedAddress>(byte), load.from + byte,
                           kChunkBytes);
    }
    barriers_.deliver(load.barrier, load.bytes);
    return;
  }
  const auto [first, last] = channels_inside(*load.map, load.at[0]);
  for_each_row(*load.map, load.at, [&](int row, const std::byte* source) {
    std::byte contents[kSwizzleRowBytes] = {};
    if (source != nullptr && last > first) {
      std::memcpy(contents + first * kElementBytes,
                  source + (std::int64_t{load.at[0]} + first) * kElementBytes,
                  static_cast<std::size_t>(last - first) * kElementBytes);
    }
    for (int byte = 0; byte < kSwizzleRowBytes; byte += kChunkBytes) {
      const auto a = load.to + static_cast<SharedAddress>(row * kSwizzleRowBytes + byte);
      memory_.finish_write(swizzle(a), contents + byte, kChunkBytes);
    }
  });
  barriers_.deliver(load.barrier, load.map->rows() * kSwizzleRowBytes);
}

void CopyEngine::store(SharedAddress from, const TensorMap* map, const Coordinates& at) {
  check("tensor_store", from, map);
  Store store{from, map, at, {}};
  store.contents.resize(static_cast<std::size_t>(map->rows()) * kSwizzleRowBytes);
  const int thread = scheduler_.current().index;
  memory_.start_read("tensor_store", clocks_.of(thread), from, store.contents.data(),
                     static_cast<int>(store.contents.size()));
  stores_[static_cast<std::size_t>(thread)].open.push_back(std::move(store));
  scheduler_.maybe_preempt();
}

void CopyEngine::commit() {
  ThreadStores& mine = stores_[static_cast<std::size_t>(scheduler_.current().index)];
  mine.committed.push_back(std::move(mine.open));
  mine.open.clear();
}

void CopyEngine::wait_read(const char* operation, int pending) {
  scheduler_.maybe_preempt();
  ThreadStores& mine = stores_[static_cast<std::size_t>(scheduler_.current().index)];
  while (static_cast<int>(mine.committed.size()) > pending) {
    for (const Store& store : mine.committed.front()) finish(operation, store);
    mine.committed.erase(mine.committed.begin());
  }
}

void CopyEngine::finish(const char* operation, const Store& store) {
  const int thread = scheduler_.current().index;
  if (!memory_.finish_read("tensor_store", clocks_.of(thread), clocks_.now(thread), store.from,
                           store.contents.data(), static_cast<int>(store.contents.size()))) {
    scheduler_.fail(
        format("%s: shared memory at 0x%x (base + %u) has changed since the "
               "tensor_store that reads it was issued",
               operation, store.from, store.from - kSharedBase));
  }
  const auto [first, last] = channels_inside(*store.map, store.at[0]);
  for_each_row(*store.map, store.at, [&](int row, std::byte* target) {
    if (target == nullptr) return;
    for (int element = first; element < last; ++element) {
      const auto offset =
          static_cast<SharedAddress>(row * kSwizzleRowBytes + element * kElementBytes);
      std::memcpy(target + (std::int64_t{store.at[0]} + element) * kElementBytes,
                  &store.contents[swizzle(store.from + offset) - store.from], kElementBytes);
    }
  });
}

void CopyEngine::thread_done() {
  const ThreadStores& mine = stores_[static_cast<std::size_t>(scheduler_.current().index)];
  if (!mine.open.empty() || !mine.committed.empty()) {
    scheduler_.fail(
        format("the thread returns with %zu tensor_stores not committed and %zu groups "
               "not waited for",
               mine.open.size(), mine.committed.size()));
  }
}

void CopyEngine::block_done() {
  if (loads_.empty()) return;
  throw Error(format(
      "block %d ends with %zu tensor_loads under way; the first is to shared "
      "address 0x%x (base + %u)",
      scheduler_.block(), loads_.size(), loads_.front().to, loads_.front().to - kSharedBase));
}

}  // namespace flash_kda::emulation
