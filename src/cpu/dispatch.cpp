#include "cpu/dispatch.h"

#include <cstdlib>

#include "cpu/backend.h"
#include "flash_kda/error.h"

namespace flash_kda::cpu {
namespace {

struct Choice {
  const Kernels* kernels;
  std::string error;  // empty if the forced name, if any, could be served
};

Choice choose() {
  const std::vector<const Kernels*> usable = usable_kernels();
  const char* forced = std::getenv(kIsaVariable);
  if (forced == nullptr || *forced == '\0') return {usable.front(), {}};
  if (const Kernels* found = find_kernels(forced)) return {found, {}};
  std::string names;
  for (const Kernels* kernels : usable) {
    if (!names.empty()) names += ", ";
    names += kernels->name;
  }
  return {usable.front(), std::string(kIsaVariable) + ": expected one of " + names +
                              " (what this build and machine have), got '" + forced + "'"};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512) usable.push_back(&kAvx512Kernels);
  if (avx2) usable.push_back(&kAvx2Kernels);
#endif
  usable.push_back(&kGenericKernels);
  return usable;
}

const Kernels* find_kernels(std::string_view name) {
  for (const Kernels* kernels : usable_kernels()) {
    if (name == kernels->name) return kernels;
  }
  return nullptr;
}

const Kernels& chosen_kernels() {
  if (!choice().error.empty()) throw ValueError(choice().error);
  return *choice().kernels;
}

const char* instruction_set() { return choice().kernels->name; }

}  // namespace flash_kda::cpu
