#include "cuda/sm90/tensor_map_layout.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/sm90/traits.h"
#include "flash_kda/error.h"

namespace flash_kda::sm90 {
namespace {

constexpr int kAlignment = 16;        // bytes
constexpr std::int64_t kElement = 2;  // bytes of a bf16

}  // namespace

void check_tensor_map(const char* argument, const TensorView& view) {
  const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(view.data) % kAlignment;
  if (past != 0) {
    throw ValueError(std::string(argument) +
                     ": expected an address aligned to 16 bytes on CUDA, got one that is " +
                     std::to_string(past) + " bytes past it");
  }
  for (std::size_t axis = 0; axis + 1 < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.shape[axis] <= 1) continue;
    const std::int64_t stride = view.stride[axis];
    constexpr std::int64_t kLimit = std::int64_t{1} << 39;  // elements
    if (stride <= 0 || stride >= kLimit || stride % (kAlignment / kElement) != 0) {
      throw ValueError(std::string(argument) +
                       ": expected strides on CUDA that are positive multiples of 8 elements, " +
                       "below 2^39, got stride " + std::to_string(stride) + " in dimension " +
                       std::to_string(axis) + " of " + to_string(view));
    }
  }
}

TensorMapLayout tensor_map_layout(const TensorView& view) {
  TensorMapLayout layout{};
  for (std::size_t i = 0; i < 4; ++i) {
    layout.extents[i] = static_cast<std::uint64_t>(view.shape[3 - i]);
  }
  for (std::size_t i = 0; i < 3; ++i) {
    const std::size_t axis = 2 - i;
    // The stride of a dimension of one element is never used but must be legal.
    const std::int64_t stride = view.shape[axis] > 1 ? view.stride[axis] : view.shape[3];
    layout.strides[i] = static_cast<std::uint64_t>(stride * kElement);
  }
  layout.box = {static_cast<std::uint32_t>(kRowBytes / kElement), 1, kChunk, 1};
  return layout;
}

}  // namespace flash_kda::sm90
