// Tensor maps for the bulk copies; tensor_map_layout.h says what they hold.
#pragma once

#include <cuda.h>

#include "flash_kda/tensor.h"

namespace flash_kda::sm90 {

// Encodes the map of a view that passed check_tensor_map; no work is queued. Throws DeviceError.
CUtensorMap make_tensor_map(const char* argument, const TensorView& view);

}  // namespace flash_kda::sm90
