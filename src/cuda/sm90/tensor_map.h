// Tensor maps for the bulk copies: [B, T, H, D] bf16 arrays, boxes of 32 tokens x 64 channels of
// one head.
#pragma once

#include <cuda.h>

#include "flash_kda/tensor.h"

namespace flash_kda::sm90 {

// Throws ValueError naming `argument` where the array's address or strides do not suit the copy
// engine: the address and the strides of B, T and H have to be multiples of 16 bytes (8 elements),
// as they are in any dense array whose last dimension is a multiple of 8 and in most slices of a
// fused projection.
void check_tensor_map(const char* argument, const TensorView& view);

// Encodes the map; no work is queued. Throws DeviceError.
CUtensorMap make_tensor_map(const char* argument, const TensorView& view);

}  // namespace flash_kda::sm90
