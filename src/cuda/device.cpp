#include "cuda/device.h"

#include <array>
#include <mutex>

#include "cuda/check.h"

namespace flash_kda::cuda {

const DeviceProperties& device_properties(int device) {
  constexpr int kMaxDevices = 64;
  static std::array<DeviceProperties, kMaxDevices> known;  // written once each, never changed
  static std::array<std::once_flag, kMaxDevices> read;
  if (device < 0 || device >= kMaxDevices) {
    throw DeviceError("CUDA device " + std::to_string(device) + " is outside 0.." +
                      std::to_string(kMaxDevices - 1));
  }
  const auto i = static_cast<std::size_t>(device);
  std::call_once(read[i], [&] {
    DeviceProperties p;
    FLASH_KDA_CUDA_CHECK(
        cudaDeviceGetAttribute(&p.multiprocessors, cudaDevAttrMultiProcessorCount, device));
    FLASH_KDA_CUDA_CHECK(
        cudaDeviceGetAttribute(&p.major, cudaDevAttrComputeCapabilityMajor, device));
    FLASH_KDA_CUDA_CHECK(
        cudaDeviceGetAttribute(&p.minor, cudaDevAttrComputeCapabilityMinor, device));
    known[i] = p;
  });
  return known[i];
}

int device_count(std::string* why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess) return count;
  cudaGetLastError();
  if (why != nullptr) *why = cudaGetErrorString(error);
  return 0;
}

DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  FLASH_KDA_CUDA_CHECK(cudaGetDevice(&current));
  if (current == device) return;
  FLASH_KDA_CUDA_CHECK(cudaSetDevice(device));
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace flash_kda::cuda
