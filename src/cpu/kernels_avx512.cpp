#if defined(__GNUC__) && !defined(__clang__)
// GCC bug 105593: its own intrinsics start from an undefined vector.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "cpu/vec_avx512.h"

#define FLASH_KDA_CPU_NAMESPACE avx512
#include "cpu/kernels.inl"

namespace flash_kda::cpu {

const Kernels kAvx512Kernels = avx512::kernels("avx512");

}  // namespace flash_kda::cpu
