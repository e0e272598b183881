// Devices: what they are, and making one current for the length of a scope.
#pragma once

#include <string>

namespace flash_kda::cuda {

struct DeviceProperties {
  int multiprocessors = 0;
  int major = 0, minor = 0;  // compute capability
  bool is_sm90() const { return major == 9 && minor == 0; }
};

// Reads a device's properties once and remembers them. Throws DeviceError.
const DeviceProperties& device_properties(int device);

// Number of devices; 0 without a driver, and then `why` says what CUDA reported. Never throws.
int device_count(std::string* why);

// Makes `device` current; the one before comes back at the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to restore
};

}  // namespace flash_kda::cuda
