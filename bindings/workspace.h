// Scratch memory for one call, from the allocator of the caller's array library.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

#include "arrays.h"
#include "flash_kda/forward.h"

namespace flash_kda::python {

class Workspace {
 public:
  // Takes plan.workspace_bytes on `device`; nothing if 0. Throws what the allocator raised, or
  // MemoryError. `fallback(leader, bytes)` returns a uint8 array; it serves libraries without the
  // exchange API.
  Workspace(ArrayReader& arrays, const ForwardPlan& plan, Device device, nb::handle fallback);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return data_; }

 private:
  void take_exchange(const dlpack::ExchangeApi& api, std::size_t bytes, Device device);

  void* data_ = nullptr;
  dlpack::ManagedTensorVersioned* managed_ = nullptr;
  nb::object array_;
};

}  // namespace flash_kda::python
