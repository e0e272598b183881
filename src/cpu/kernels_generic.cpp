#include "cpu/vec_generic.h"

#define FLASH_KDA_CPU_NAMESPACE generic
#include "cpu/kernels.inl"

namespace flash_kda::cpu {

const Kernels kGenericKernels = generic::kernels("generic");

}  // namespace flash_kda::cpu
