// Longest first: the order in which a packed batch's sequences are handed to the blocks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_kda::sm90 {

// Writes to order[0..n) the sequences by falling length (equal to within one part in eight: any
// order) and sets *counter to 0. cu_seqlens has n + 1 elements with this stride; nothing else is
// read. Throws DeviceError.
void launch_order_sequences(const void* cu_seqlens, bool int64, std::int64_t stride, int n,
                            std::int32_t* order, std::int32_t* counter, cudaStream_t stream);

}  // namespace flash_kda::sm90
