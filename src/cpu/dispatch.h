// Chooses the kernels for this machine.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cpu/kernels.h"

namespace flash_kda::cpu {

// The environment variable that forces an instruction set ("generic", "avx2", "avx512"); read once.
inline constexpr const char* kIsaVariable = "FLASH_KDA_CPU_ISA";

// Kernels that this machine can run, best first; never empty.
std::vector<const Kernels*> usable_kernels();

// The kernels of that name, or null if this build or machine lacks them.
const Kernels* find_kernels(std::string_view name);

// The forced ones, or the best. Throws ValueError if what is forced is unknown or not served here.
const Kernels& chosen_kernels();

}  // namespace flash_kda::cpu
