#include "cuda/sm90/tensor_map.h"

#include <cstdint>
#include <string>

#include "cuda/check.h"
#include "cuda/sm90/traits.h"

namespace flash_kda::sm90 {
namespace {

constexpr int kAlignment = 16;        // bytes
constexpr std::int64_t kElement = 2;  // bytes of a bf16

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver is not linked: a build imports on machines without one.
Encode encode_function() {
  static const Encode function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = {};
    constexpr unsigned kSinceCuda = 12000;
    FLASH_KDA_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                          kSinceCuda, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess || entry == nullptr) {
      throw DeviceError(
          "CUDA: the driver has no cuTensorMapEncodeTiled; CUDA 12 or newer is needed");
    }
    return reinterpret_cast<Encode>(entry);
  }();
  return function;
}

}  // namespace

void check_tensor_map(const char* argument, const TensorView& view) {
  if (reinterpret_cast<std::uintptr_t>(view.data) % kAlignment != 0) {
    throw ValueError(
        std::string(argument) +
        ": expected an address that is a multiple of 16 bytes on CUDA, got one that is " +
        std::to_string(reinterpret_cast<std::uintptr_t>(view.data) % kAlignment) +
        " bytes past it");
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

CUtensorMap make_tensor_map(const char* argument, const TensorView& view) {
  // Innermost first. The stride of a dimension of one element is never used but must be legal.
  const cuuint64_t extents[4] = {
      static_cast<cuuint64_t>(view.shape[3]), static_cast<cuuint64_t>(view.shape[2]),
      static_cast<cuuint64_t>(view.shape[1]), static_cast<cuuint64_t>(view.shape[0])};
  cuuint64_t strides[3];
  for (std::size_t i = 0; i < 3; ++i) {
    const std::size_t axis = 2 - i;
    strides[i] = view.shape[axis] > 1 ? static_cast<cuuint64_t>(view.stride[axis] * kElement)
                                      : static_cast<cuuint64_t>(view.shape[3] * kElement);
  }
  const cuuint32_t box[4] = {kRowBytes / kElement, 1, kChunk, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode_function()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, view.data, extents, strides, box,
                        element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw DeviceError("CUDA: cuTensorMapEncodeTiled refused " + std::string(argument) + " = " +
                      to_string(view) + " (CUresult " + std::to_string(static_cast<int>(result)) +
                      ")");
  }
  return map;
}

}  // namespace flash_kda::sm90
