#include "cuda/sm90/tensor_map.h"

#include <string>

#include "cuda/check.h"
#include "cuda/sm90/tensor_map_cache.h"
#include "cuda/sm90/tensor_map_layout.h"

namespace flash_kda::sm90 {
namespace {

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

CUtensorMap encode(const char* argument, const TensorView& view, const TensorMapLayout& layout) {
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode_function()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, view.data, layout.extents.data(),
                        layout.strides.data(), layout.box.data(), element_strides,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw DeviceError("CUDA: cuTensorMapEncodeTiled refused " + std::string(argument) + " = " +
                      to_string(view) + " (CUresult " + std::to_string(static_cast<int>(result)) +
                      ")");
  }
  return map;
}

}  // namespace

CUtensorMap make_tensor_map(const char* argument, const TensorView& view) {
  check_tensor_map(argument, view);  // a kept plan says nothing of this call's addresses
  static thread_local TensorMapCache<CUtensorMap> cache;
  const TensorMapLayout layout = tensor_map_layout(view);
  return cache.get(view.data, layout, [&] { return encode(argument, view, layout); });
}

}  // namespace flash_kda::sm90
