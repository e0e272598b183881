// How each Python array type hands over its memory; found once a type.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>  // for every file here: without it a cast to std::string compiles, and fails

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "dlpack_abi.h"

namespace flash_kda::python {

namespace nb = nanobind;

// Where an object's pointer, shape and strides come from.
enum class Protocol : std::uint8_t {
  kNone,         // not an array
  kExchange,     // DLPack's C exchange API: no Python code runs
  kArrayStruct,  // NumPy's __array_struct__: also serves bfloat16 and read-only arrays, which
                 // NumPy's DLPack refuses
  kDlpack,       // __dlpack__()
  kDispatch,     // a torch.Tensor subclass: only torch's dispatcher knows what it means
};

// Whose current stream a CUDA call goes to, beyond what the exchange API tells.
enum class Family : std::uint8_t { kOther, kTorch, kCupy, kJax };

struct ArrayType {
  Protocol protocol = Protocol::kNone;
  Family family = Family::kOther;
  const dlpack::ExchangeApi* exchange = nullptr;
  nb::object type;  // keeps the type alive: its address is the table's key
};

// torch's own state that a call must respect; filled when the first torch type is seen.
struct TorchHooks {
  nb::object is_grad_enabled;            // () -> bool
  nb::object increment_version;          // (list of tensors), or (tensor)
  bool increments_lists = false;         // which of them: torch before 2.6 takes one tensor
  std::vector<nb::object> interpreters;  // () -> truthy while something must see every operation
};

// Holds what was learnt of the types seen so far. Used under the GIL.
class ArrayTypes {
 public:
  ArrayTypes();

  // The answer lies in the table, for good, or (when that is full) in `scratch`.
  const ArrayType& of(nb::handle object, ArrayType& scratch);

  // Whether a NumPy dtype is ml_dtypes' bfloat16 (an opaque two-byte type to NumPy, told by its
  // name).
  bool is_bfloat16(nb::handle dtype);

  const TorchHooks& torch() const { return torch_; }
  // The attribute name "requires_grad", interned.
  nb::handle requires_grad() const { return requires_grad_; }

 private:
  ArrayType classify(nb::handle type);
  void load_torch();

  std::unordered_map<PyObject*, ArrayType> types_;  // only grows, to a limit: entries stay put
  const ArrayType* last_ = nullptr;
  TorchHooks torch_;
  nb::object requires_grad_;
  nb::object bfloat16_;  // the dtype once seen; asking for its name takes microseconds
};

}  // namespace flash_kda::python
