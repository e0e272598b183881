// Tensor views: a pointer with dtype, device, shape and strides. No ownership, no framework.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace flash_kda {

enum class DType : std::uint8_t {
  kBFloat16,
  kFloat16,
  kFloat32,
  kFloat64,  // never accepted; here so that an error can name what came
  kInt32,
  kInt64,
  kOther,  // any type outside this list; never accepted
};

// "bfloat16", "float32", ...
const char* name(DType dtype);
// Bytes of one element; 0 for kOther.
std::int64_t size_of(DType dtype);

enum class DeviceType : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  std::int32_t index = 0;  // CUDA device ordinal; 0 on the CPU

  friend bool operator==(const Device&, const Device&) = default;
};

// "cpu", "cuda:0", ...
std::string to_string(Device device);

// A strided view of memory that somebody else owns. `rank < 0` means "not given".
// Strides count elements, are 64-bit, and may be zero; the stride of a size-1 dimension means
// nothing.
struct TensorView {
  static constexpr int kMaxRank = 8;

  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device;
  std::int32_t rank = -1;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> stride{};

  bool defined() const { return rank >= 0; }
  // Product of the shape; 1 for rank 0. Must not be called on an undefined view.
  std::int64_t numel() const;

  // A row-major view of `shape` at `data`.
  static TensorView dense(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                          Device device = {});
};

// "bfloat16[1, 8192, 96, 128] on cpu", for messages.
std::string to_string(const TensorView& view);

}  // namespace flash_kda
