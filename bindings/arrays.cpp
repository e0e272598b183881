#include "arrays.h"

#include <cstring>
#include <string>

#include "flash_kda/error.h"

namespace flash_kda::python {
namespace {

// What `__array_struct__` points to (NumPy's array interface, version 3, C side).
struct ArrayStruct {
  int two;
  int nd;
  char kind;
  int itemsize;
  int flags;
  Py_intptr_t* shape;
  Py_intptr_t* strides;  // in bytes
  void* data;
  PyObject* descr;
};
constexpr int kNativeByteOrder = 0x200;
constexpr int kWriteable = 0x400;

// DLPack's name for the legacy default stream; a null stream is ambiguous there.
constexpr int kDlpackDefaultStream = 1;

std::string class_name(nb::handle object) {
  return nb::cast<std::string>(nb::getattr(object.type(), "__name__"));
}

std::string text_of(nb::handle object) { return nb::cast<std::string>(nb::str(object)); }

[[noreturn]] void throw_dtype(const char* name, const std::string& came) {
  throw ValueError(std::string(name) +
                   ": expected dtype bfloat16, float16, float32, int32 or int64, got " + came);
}

[[noreturn]] void throw_read_only(const char* name) {
  throw ValueError(std::string(name) +
                   ": expected an array that can be written, got a read-only one");
}

[[noreturn]] void throw_unreadable(const char* name, nb::handle object, const std::string& text) {
  throw ValueError(std::string(name) + ": expected an array with plain strided memory, but this " +
                   class_name(object) + " does not give it: " + text);
}

// The first line of the Python error that is set (torch adds its C++ stack below); clears it.
std::string take_error() {
  const nb::python_error error;
  const std::string text = text_of(error.value());
  return text.substr(0, text.find('\n'));
}

DType dtype_of(const char* name, dlpack::DataType type) {
  if (type.lanes == 1) {
    if (type.code == dlpack::kBfloat && type.bits == 16) return DType::kBFloat16;
    if (type.code == dlpack::kFloat && type.bits == 16) return DType::kFloat16;
    if (type.code == dlpack::kFloat && type.bits == 32) return DType::kFloat32;
    if (type.code == dlpack::kFloat && type.bits == 64) return DType::kFloat64;
    if (type.code == dlpack::kInt && type.bits == 32) return DType::kInt32;
    if (type.code == dlpack::kInt && type.bits == 64) return DType::kInt64;
  }
  static constexpr const char* kNames[] = {"int", "uint", "float", "handle", "bfloat", "complex"};
  std::string came = type.code == dlpack::kBool ? "bool"
                     : type.code < std::size(kNames)
                         ? kNames[type.code] + std::to_string(type.bits)
                         : "DLPack type code " + std::to_string(type.code) + " of " +
                               std::to_string(type.bits) + " bits";
  if (type.lanes != 1) came += " x " + std::to_string(type.lanes);
  throw_dtype(name, came);
}

Device device_of(const char* name, dlpack::DeviceId id) {
  switch (id.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      return {DeviceType::kCpu, 0};
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      return {DeviceType::kCuda, id.index};
    default:
      throw NotImplementedError(
          std::string(name) +
          ": expected an array on the CPU or a CUDA device, got DLPack device type " +
          std::to_string(id.type) + ":" + std::to_string(id.index) +
          ", which no backend of this build serves");
  }
}

void check_rank(const char* name, std::int64_t rank) {
  if (rank > TensorView::kMaxRank) {
    throw ValueError(std::string(name) + ": expected at most " +
                     std::to_string(TensorView::kMaxRank) + " dimensions, got " +
                     std::to_string(rank));
  }
}

void fill(const char* name, const dlpack::Tensor& tensor, TensorView& view) {
  check_rank(name, tensor.ndim);
  view.dtype = dtype_of(name, tensor.dtype);
  view.device = device_of(name, tensor.device);
  view.rank = tensor.ndim;
  std::int64_t dense = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    const auto d = static_cast<std::size_t>(i);
    view.shape[d] = tensor.shape[i];
    view.stride[d] = tensor.strides != nullptr ? tensor.strides[i] : dense;
    dense *= tensor.shape[i];
  }
  view.data =
      tensor.data == nullptr ? nullptr : static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
}

}  // namespace

void ArrayReader::read(const char* name, nb::handle object, Access access, bool optional,
                       TensorView& view) {
  if (needs_dispatcher_ || (optional && object.is_none())) return;
  ArrayType scratch;
  const ArrayType& type = types_.of(object, scratch);
  if (type.family == Family::kTorch) {
    if (!inside_dispatcher_) check_torch(name, object);
    if (access == Access::kWrite) written_.push_back(object);
  }
  if (type.family == Family::kJax && access == Access::kWrite) throw_read_only(name);

  Protocol protocol = type.protocol;
  if (protocol == Protocol::kDispatch) {
    needs_dispatcher_ |= !inside_dispatcher_;
    protocol = Protocol::kDlpack;
  }
  if (needs_dispatcher_) return;
  switch (protocol) {
    case Protocol::kExchange: {
      dlpack::Tensor tensor{};
      if (type.exchange->export_borrowed(object.ptr(), &tensor) != 0) {
        throw_unreadable(name, object, take_error());
      }
      fill(name, tensor, view);
      if (type.family == Family::kTorch) check_sign(name, object, view);
      return;
    }
    case Protocol::kArrayStruct:
      read_array_struct(name, object, access, view);
      return;
    case Protocol::kDlpack:
      // CuPy's bfloat16 is ml_dtypes', which its DLPack does not know; its bits pass for another
      // type's.
      if (type.family == Family::kCupy && types_.is_bfloat16(nb::getattr(object, "dtype"))) {
        const nb::object bits = object.attr("view")("float16");
        fill(name, export_dlpack(name, bits, type, access), view);
        view.dtype = DType::kBFloat16;
        return;
      }
      fill(name, export_dlpack(name, object, type, access), view);
      if (type.family == Family::kTorch) check_sign(name, object, view);
      return;
    default:
      throw TypeError(std::string(name) +
                      ": expected an array (torch.Tensor, numpy.ndarray, or any other that speaks "
                      "DLPack)" +
                      (optional ? " or None" : "") + ", got " +
                      (object.is_none() ? "None" : class_name(object)));
  }
}

// torch.imag of a conjugated tensor is a view whose elements stand for their negatives; DLPack has
// no word for that. Its strides are even, so that only a last dimension of one element passes for
// dense; and there is no complex bfloat16.
void ArrayReader::check_sign(const char* name, nb::handle object, const TensorView& view) {
  if (view.dtype == DType::kBFloat16) return;
  if (view.rank > 0 && view.shape[static_cast<std::size_t>(view.rank - 1)] > 1) return;
  if (nb::cast<bool>(object.attr("is_neg")())) {
    throw ValueError(std::string(name) +
                     ": expected plain memory, got a negated view; call resolve_neg() on it");
  }
}

// Modes are asked once a call, gradients for each argument.
void ArrayReader::check_torch(const char* name, nb::handle object) {
  const TorchHooks& torch = types_.torch();
  if (!torch_seen_) {
    torch_seen_ = true;
    grad_enabled_ = nb::cast<bool>(torch.is_grad_enabled());
    for (const nb::object& active : torch.interpreters) {
      const int truth = PyObject_IsTrue(active().ptr());
      if (truth < 0) throw nb::python_error();
      needs_dispatcher_ |= truth == 1;
    }
  }
  if (!grad_enabled_) return;
  const nb::object wanted = nb::getattr(object, types_.requires_grad());
  if (wanted.ptr() == Py_True) {
    throw NotImplementedError(
        std::string(name) + ": expected a tensor without requires_grad (flash_kda computes the " +
        "forward pass only), got one with it; call under torch.no_grad() or pass " + name +
        ".detach()");
  }
}

void ArrayReader::read_array_struct(const char* name, nb::handle object, Access access,
                                    TensorView& view) {
  nb::object capsule = nb::getattr(object, "__array_struct__");
  const auto* array = static_cast<const ArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
  if (array == nullptr) throw nb::python_error();
  if (array->two != 2) throw_unreadable(name, object, "__array_struct__ has an unknown version");
  check_rank(name, array->nd);

  const bool is_float = array->kind == 'f' && array->itemsize >= 2;  // one byte: ml_dtypes' float8
  if ((is_float || array->kind == 'i') && array->itemsize <= 8) {
    const dlpack::TypeCode code = is_float ? dlpack::kFloat : dlpack::kInt;
    view.dtype = dtype_of(name, {code, static_cast<std::uint8_t>(array->itemsize * 8), 1});
  } else if (array->itemsize == 2 && types_.is_bfloat16(object.attr("dtype"))) {
    view.dtype = DType::kBFloat16;
  } else {
    throw_dtype(name, text_of(object.attr("dtype")));
  }
  if (array->itemsize > 1 && (array->flags & kNativeByteOrder) == 0) {
    throw ValueError(std::string(name) + ": expected the machine's byte order, got dtype " +
                     text_of(object.attr("dtype")));
  }
  if (access == Access::kWrite && (array->flags & kWriteable) == 0) throw_read_only(name);
  view.rank = array->nd;
  for (int i = 0; i < array->nd; ++i) {
    const auto d = static_cast<std::size_t>(i);
    view.shape[d] = array->shape[i];
    view.stride[d] = array->strides[i] / array->itemsize;
    if (array->shape[i] > 1 && array->strides[i] % array->itemsize != 0) {
      throw ValueError(std::string(name) + ": expected strides in whole elements of " +
                       std::to_string(array->itemsize) + " bytes, got a stride of " +
                       std::to_string(array->strides[i]) + " bytes in dimension " +
                       std::to_string(i));
    }
  }
  view.data = array->data;
  if (reinterpret_cast<std::uintptr_t>(view.data) % static_cast<unsigned>(array->itemsize) != 0) {
    throw ValueError(std::string(name) + ": expected data aligned to its elements of " +
                     std::to_string(array->itemsize) + " bytes, got an unaligned pointer");
  }
  keep_alive_.push_back(std::move(capsule));
}

const dlpack::Tensor& ArrayReader::export_dlpack(const char* name, nb::handle object,
                                                 const ArrayType& type, Access access) {
  nb::object capsule;
  try {
    const auto where = nb::cast<nb::tuple>(object.attr("__dlpack_device__")());
    const Device device = device_of(
        name,
        {static_cast<std::int32_t>(nb::cast<int>(nb::int_(where[0]))), nb::cast<int>(where[1])});
    // JAX computes in the background, on the CPU too, where no stream is there to wait.
    if (type.family == Family::kJax && device.type == DeviceType::kCpu) {
      object.attr("block_until_ready")();
    }
    nb::dict options;
    options["max_version"] = nb::make_tuple(dlpack::kMajorVersion, dlpack::kMinorVersion);
    if (device.type == DeviceType::kCuda) {
      // The producer makes this stream wait for what it has queued on its own.
      void* target = stream(device);
      options["stream"] = target == nullptr
                              ? nb::object(nb::int_(kDlpackDefaultStream))
                              : nb::object(nb::int_(reinterpret_cast<std::uintptr_t>(target)));
    }
    // What asks for a gradient was dealt with; torch's __dlpack__ refuses it in any mode.
    nb::object source = nb::borrow(object);
    if (type.family == Family::kTorch && nb::cast<bool>(object.attr("requires_grad"))) {
      source = object.attr("detach")();
    }
    const nb::object exporter = source.attr("__dlpack__");
    try {
      capsule = exporter(**options);
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      nb::del(options["max_version"]);  // a producer from before DLPack 1.0
      capsule = exporter(**options);
    }
  } catch (nb::python_error& error) {
    throw_unreadable(name, object, text_of(error.value()));
  }

  // The capsule keeps its name, so its own destructor frees the export when the reader goes.
  const dlpack::Tensor* tensor = nullptr;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned") != 0) {
    const auto* managed = static_cast<const dlpack::ManagedTensorVersioned*>(
        PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version.major != dlpack::kMajorVersion) {
      throw_unreadable(name, object,
                       "DLPack major version " + std::to_string(managed->version.major));
    }
    if (access == Access::kWrite && (managed->flags & dlpack::kFlagReadOnly) != 0) {
      throw_read_only(name);
    }
    tensor = &managed->tensor;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0) {
    tensor =
        &static_cast<const dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))
             ->tensor;
  } else {
    throw_unreadable(name, object, "__dlpack__ returned no DLPack capsule");
  }
  keep_alive_.push_back(std::move(capsule));
  return *tensor;
}

void* ArrayReader::data_of_bytes(nb::handle array) {
  ArrayType scratch;
  const ArrayType& type = types_.of(array, scratch);
  if (type.protocol == Protocol::kArrayStruct) {
    const nb::object capsule = nb::getattr(array, "__array_struct__");
    return static_cast<const ArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr))->data;
  }
  const dlpack::Tensor& tensor = export_dlpack("workspace", array, type, Access::kWrite);
  return static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
}

void ArrayReader::mark_written() {
  if (written_.empty()) return;
  const TorchHooks& torch = types_.torch();
  if (!torch.increments_lists) {
    for (const nb::handle tensor : written_) {  // inference tensors have no version
      if (!nb::cast<bool>(tensor.attr("is_inference")())) torch.increment_version(tensor);
    }
    return;
  }
  nb::list tensors;
  for (const nb::handle tensor : written_) tensors.append(tensor);
  torch.increment_version(tensors);
}

ArrayType ArrayReader::leader_type() {
  ArrayType scratch;
  return types_.of(leader_, scratch);
}

void* ArrayReader::stream(Device device) {
  if (stream_known_ || device.type != DeviceType::kCuda) return stream_;
  const ArrayType type = leader_type();
  if (type.exchange != nullptr) {
    if (type.exchange->current_stream(dlpack::kCuda, device.index, &stream_) != 0) {
      throw nb::python_error();
    }
  } else if (type.family == Family::kTorch) {
    const nb::object cuda = nb::module_::import_("torch").attr("cuda");
    const nb::object current = cuda.attr("current_stream")(device.index);
    stream_ = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(current.attr("cuda_stream")));
  } else if (type.family == Family::kCupy) {
    const nb::object cuda = nb::module_::import_("cupy").attr("cuda");
    const nb::object current = cuda.attr("get_current_stream")(device.index);
    stream_ = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(current.attr("ptr")));
  }  // others have no notion of a current stream: the default one
  stream_known_ = true;
  return stream_;
}

}  // namespace flash_kda::python
