// The library's version and what this build and machine offer.
#pragma once

#include <string>
#include <vector>

#define FLASH_KDA_VERSION_MAJOR 0
#define FLASH_KDA_VERSION_MINOR 1
#define FLASH_KDA_VERSION_PATCH 0

namespace flash_kda {

// "0.1.0"
const char* version();

struct BackendInfo {
  std::string name;    // "cpu", "cuda-sm90"
  bool available;      // can run here and now
  std::string detail;  // CPU: instruction set and threads. CUDA: devices, or why it is unavailable.
};

// Every backend the library knows, available or not. Never throws; works without a driver.
std::vector<BackendInfo> backends();

}  // namespace flash_kda
