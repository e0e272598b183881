// Tensor maps for the bulk copies; tensor_map_layout.h says what they hold.
#pragma once

#include <cuda.h>

#include "flash_kda/tensor.h"

namespace flash_kda::sm90 {

// The map of a view, encoded or remembered (tensor_map_cache.h); no work is queued. Throws what
// check_tensor_map throws, and DeviceError.
CUtensorMap make_tensor_map(const char* argument, const TensorView& view);

}  // namespace flash_kda::sm90
