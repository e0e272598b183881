#include "cpu/vec_avx2.h"

#define FLASH_KDA_CPU_NAMESPACE avx2
#include "cpu/kernels.inl"

namespace flash_kda::cpu {

const Kernels kAvx2Kernels = avx2::kernels("avx2");

}  // namespace flash_kda::cpu
