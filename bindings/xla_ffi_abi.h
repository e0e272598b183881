// The parts of XLA's C ABI for foreign functions that the bindings use (XLA FFI, major version 0:
// https://github.com/openxla/xla/blob/main/xla/ffi/api/c_api.h).
//
// Only layouts and function types, under our own names, so that no header of jaxlib is needed to
// build. XLA only adds at the end of a struct within a major version, and says how much it knows in
// `struct_size`; what is read here that not every minor version had is checked against it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flash_kda::xla {

inline constexpr int kMajorVersion = 0;

enum DataType : std::int32_t {  // values of xla::PrimitiveType
  kS32 = 4,
  kS64 = 5,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kBF16 = 16,
};

enum ErrorCode : std::int32_t { kInvalidArgument = 3, kUnimplemented = 12, kInternal = 13 };
enum ExtensionType : std::int32_t { kMetadata = 1 };
enum AttributeType : std::int32_t { kArrayAttribute = 1 };
enum Stage : std::int32_t { kExecute = 3 };

struct Extension {
  std::size_t struct_size;
  ExtensionType type;
  Extension* next;
};

struct Version {
  std::size_t struct_size;
  Extension* extensions;
  int major;
  int minor;
};

struct Metadata {
  std::size_t struct_size;
  Version version;  // out
  std::uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Buffer {
  std::size_t struct_size;
  Extension* extensions;
  DataType dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};

// Operands or results.
struct Buffers {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  std::int32_t* types;  // 1: a buffer
  Buffer** buffers;
};

struct ByteSpan {
  const char* data;
  std::size_t size;
};

struct ArrayAttribute {
  DataType dtype;
  std::size_t size;
  void* data;
};

struct Attributes {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  AttributeType* types;
  ByteSpan** names;
  void** values;
};

struct Error;    // made by XLA, owned by whom it is returned to
struct Context;  // of one call

struct ErrorCreateArgs {
  std::size_t struct_size;
  Extension* extensions;
  const char* message;
  ErrorCode code;
};

struct ErrorDestroyArgs {
  std::size_t struct_size;
  Extension* extensions;
  Error* error;
};

struct StreamGetArgs {
  std::size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;  // out
};

struct MemoryAllocateArgs {
  std::size_t struct_size;
  Extension* extensions;
  Context* context;
  std::size_t size;
  std::size_t alignment;
  void* data;  // out
};

struct MemoryFreeArgs {
  std::size_t struct_size;
  Extension* extensions;
  Context* context;
  std::size_t size;
  void* data;
};

struct DeviceOrdinalArgs {
  std::size_t struct_size;
  Extension* extensions;
  Context* context;
  std::int32_t ordinal;  // out
};

using Unused = void (*)();

struct Api {
  std::size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*error_create)(ErrorCreateArgs*);
  Unused error_get_message;
  void (*error_destroy)(ErrorDestroyArgs*);
  Unused handler_register;
  Error* (*stream_get)(StreamGetArgs*);
  Unused type_register, context_get, state_set, state_get;
  Error* (*memory_allocate)(MemoryAllocateArgs*);
  Error* (*memory_free)(MemoryFreeArgs*);
  Unused pool_schedule, pool_threads, future_create, future_available, future_error, run_id_get;
  Error* (*device_ordinal_get)(DeviceOrdinalArgs*);
};

struct CallFrame {
  std::size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  Stage stage;
  Buffers operands;
  Buffers results;
  Attributes attributes;
};

using Handler = Error*(CallFrame*);

}  // namespace flash_kda::xla
