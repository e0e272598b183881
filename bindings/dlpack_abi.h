// The parts of DLPack's C ABI that the bindings read (DLPack 1.x, https://github.com/dmlc/dlpack).
//
// Only layouts and function types, under our own names: the header itself is not needed, and
// nothing here is exported. Every struct is fixed by DLPack's major version 1; `Version::major` is
// checked before use.
#pragma once

#include <cstdint>

namespace flash_kda::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr std::uint32_t kMinorVersion = 1;  // the newest minor whose flags we read

enum DeviceCode : std::int32_t {
  kCpu = 1,
  kCuda = 2,
  kCudaHost = 3,  // pinned host memory
  kCudaManaged = 13,
};

enum TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

struct DeviceId {
  std::int32_t type;  // DeviceCode
  std::int32_t index;
};

struct DataType {
  std::uint8_t code;  // TypeCode
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  DeviceId device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null = row-major
  std::uint64_t byte_offset;
};

// What a capsule named "dltensor" holds.
struct ManagedTensor {
  Tensor tensor;
  void* manager;
  void (*deleter)(ManagedTensor*);
};

// What a capsule named "dltensor_versioned" holds.
struct ManagedTensorVersioned {
  Version version;
  void* manager;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

inline constexpr std::uint64_t kFlagReadOnly = 1;

// The function table behind the type attribute `__dlpack_c_exchange_api__` (capsule
// "dlpack_exchange_api"). None of its functions synchronises a stream. Python errors: non-zero
// return with an exception set.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(Tensor* prototype, ManagedTensorVersioned** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  int (*export_managed)(void* object, ManagedTensorVersioned** out);
  int (*import_managed)(ManagedTensorVersioned* tensor, void** out_object);
  int (*export_borrowed)(void* object, Tensor* out);  // may be null; `out` points into `object`
  int (*current_stream)(std::int32_t device_type, std::int32_t device_index, void** out_stream);
};

}  // namespace flash_kda::dlpack
