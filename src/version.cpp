#include "flash_kda/version.h"

#include "cpu/backend.h"
#include "cuda/backend.h"

#define FLASH_KDA_QUOTE(x) #x
#define FLASH_KDA_TEXT(x) FLASH_KDA_QUOTE(x)

namespace flash_kda {

const char* version() {
  return FLASH_KDA_TEXT(FLASH_KDA_VERSION_MAJOR) "." FLASH_KDA_TEXT(
      FLASH_KDA_VERSION_MINOR) "." FLASH_KDA_TEXT(FLASH_KDA_VERSION_PATCH);
}

std::vector<BackendInfo> backends() {
  const int threads = cpu::max_threads();
  BackendInfo cpu{"cpu", true, cpu::instruction_set()};
  cpu.detail += ", up to " + std::to_string(threads) + (threads == 1 ? " thread" : " threads");
  return {cpu, cuda::info()};
}

}  // namespace flash_kda
