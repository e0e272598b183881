// Remembers encoded tensor maps. A map is a pure function of an address and a layout (it holds the
// address, not what lies there), so a remembered one is right as long as the key is equal, whatever
// was freed or allocated in between. Needs no CUDA: `Map` is any type that can be copied.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cuda/sm90/tensor_map_layout.h"

namespace flash_kda::sm90 {

// Places are chosen by hash; a newcomer takes the place. Not for several threads: a thread has its
// own. Trivial, so that a thread that never uses it pays nothing.
template <typename Map>
class TensorMapCache {
 public:
  // The map for `layout` at `data` (not null): a remembered one, or what `encode()` returns. What
  // it throws leaves the cache as it was.
  template <typename Encode>
  const Map& get(const void* data, const TensorMapLayout& layout, Encode encode) {
    Place& place = places_[place_of(data, layout)];
    if (place.data != data || place.layout != layout) {
      place.map = encode();
      place.layout = layout;
      place.data = data;
    }
    return place.map;
  }

  static constexpr std::size_t kPlaces = 32;

  static std::size_t place_of(const void* data, const TensorMapLayout& layout) {
    std::uint64_t hash = reinterpret_cast<std::uintptr_t>(data);
    const auto mix = [&hash](std::uint64_t word) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    };
    for (const std::uint64_t extent : layout.extents) mix(extent);
    for (const std::uint64_t stride : layout.strides) mix(stride);
    for (const std::uint32_t size : layout.box) mix(size);
    return static_cast<std::size_t>(hash >> 40) % kPlaces;
  }

 private:
  struct Place {
    const void* data;  // null: free
    TensorMapLayout layout;
    Map map;
  };
  std::array<Place, kPlaces> places_;
};

}  // namespace flash_kda::sm90
