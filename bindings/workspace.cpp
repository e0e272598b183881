#include "workspace.h"

#include <cstdint>
#include <string>

namespace flash_kda::python {
namespace {

void* align_up(void* data, std::size_t alignment) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  return reinterpret_cast<void*>((address + alignment - 1) / alignment * alignment);
}

[[noreturn]] void raise_memory_error(std::size_t bytes, Device device, const std::string& reason) {
  const std::string text = "workspace: could not take " + std::to_string(bytes) + " bytes on " +
                           to_string(device) + ": " + reason;
  PyErr_SetString(PyExc_MemoryError, text.c_str());
  throw nb::python_error();
}

}  // namespace

Workspace::Workspace(ArrayReader& arrays, const ForwardPlan& plan, Device device,
                     nb::handle fallback) {
  if (plan.workspace_bytes == 0) return;
  // No allocator promises our alignment, so we ask for room to align ourselves.
  const std::size_t bytes = plan.workspace_bytes + plan.workspace_alignment - 1;
  const ArrayType type = arrays.leader_type();
  if (type.exchange != nullptr && type.exchange->allocate != nullptr) {
    take_exchange(*type.exchange, bytes, device);
  } else {
    array_ = fallback(arrays.leader(), bytes);
    data_ = arrays.data_of_bytes(array_);
  }
  data_ = align_up(data_, plan.workspace_alignment);
}

void Workspace::take_exchange(const dlpack::ExchangeApi& api, std::size_t bytes, Device device) {
  auto size = static_cast<std::int64_t>(bytes);
  dlpack::Tensor prototype{};
  prototype.device = {device.type == DeviceType::kCuda ? dlpack::kCuda : dlpack::kCpu,
                      device.index};
  prototype.ndim = 1;
  prototype.dtype = {dlpack::kUInt, 8, 1};
  prototype.shape = &size;

  std::string reason;
  const auto set_error = [](void* context, const char* kind, const char* message) {
    *static_cast<std::string*>(context) = std::string(kind) + ": " + message;
  };
  if (api.allocate(&prototype, &managed_, &reason, set_error) != 0 || managed_ == nullptr) {
    managed_ = nullptr;
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    raise_memory_error(bytes, device, reason);
  }
  data_ = static_cast<std::byte*>(managed_->tensor.data) + managed_->tensor.byte_offset;
}

// Work that is queued may still use the memory: the library's allocator reuses it in the stream's
// order.
Workspace::~Workspace() {
  if (managed_ != nullptr && managed_->deleter != nullptr) managed_->deleter(managed_);
}

}  // namespace flash_kda::python
