// Turns Python array objects into tensor views. The only file that knows array protocols.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "array_types.h"
#include "dlpack_abi.h"
#include "flash_kda/tensor.h"

namespace flash_kda::python {

enum class Access : std::uint8_t { kRead, kWrite };

// Reads the arrays of one call. Views stay valid while the reader and the Python objects live.
class ArrayReader {
 public:
  // `leader` is the argument whose library's current stream and allocator serve the call.
  // `inside_dispatcher`: torch's subclasses, modes and gradients were dealt with; read plain
  // memory.
  ArrayReader(ArrayTypes& types, nb::handle leader, bool inside_dispatcher)
      : types_(types), leader_(leader), inside_dispatcher_(inside_dispatcher) {}
  ArrayReader(const ArrayReader&) = delete;
  ArrayReader& operator=(const ArrayReader&) = delete;

  // `name` is the argument's, for messages. None leaves `view` undefined if `optional`.
  // Throws TypeError (not an array), ValueError (dtype, strides, read-only), NotImplementedError
  // (device, gradient).
  void read(const char* name, nb::handle object, Access access, bool optional, TensorView& view);

  // True when an argument, or a mode that is active, belongs to torch's dispatcher: the views read
  // so far are then incomplete, and the call must go through torch.ops.
  bool needs_dispatcher() const { return needs_dispatcher_; }

  // The stream that the call's work goes to: the leader's current one on `device`; null on the CPU.
  void* stream(Device device);

  // The data pointer of an array of bytes (uint8).
  void* data_of_bytes(nb::handle array);

  // Tells torch's autograd that the arrays read with Access::kWrite have changed.
  void mark_written();

  nb::handle leader() const { return leader_; }
  ArrayType leader_type();

 private:
  void read_array_struct(const char* name, nb::handle object, Access access, TensorView& view);
  const dlpack::Tensor& export_dlpack(const char* name, nb::handle object, const ArrayType& type,
                                      Access access);
  void check_torch(const char* name, nb::handle object);
  void check_sign(const char* name, nb::handle object, const TensorView& view);

  ArrayTypes& types_;
  nb::handle leader_;
  bool inside_dispatcher_;
  std::vector<nb::object> keep_alive_;  // capsules
  std::vector<nb::handle> written_;     // torch tensors
  bool torch_seen_ = false;
  bool grad_enabled_ = false;
  bool needs_dispatcher_ = false;
  bool stream_known_ = false;
  void* stream_ = nullptr;
};

}  // namespace flash_kda::python
