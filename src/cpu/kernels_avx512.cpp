#define FLASH_KDA_CPU_NAMESPACE avx512
#include "cpu/kernels.inl"

namespace flash_kda::cpu {
const Kernels kAvx512Kernels = avx512::kernels("avx512");
}  // namespace flash_kda::cpu
