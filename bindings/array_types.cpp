#include "array_types.h"

#include <string>
#include <string_view>

namespace flash_kda::python {
namespace {

// Programs use a handful of array types; one that makes types without end must not fill memory.
constexpr std::size_t kMostTypes = 64;

const dlpack::ExchangeApi* exchange_api(nb::handle type) {
  nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_CheckExact(capsule.ptr())) return nullptr;
  auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) PyErr_Clear();
  while (api != nullptr && api->version.major > dlpack::kMajorVersion) api = api->previous;
  if (api == nullptr || api->version.major != dlpack::kMajorVersion) return nullptr;
  // Older tables of the same major version may lack the borrowing export; __dlpack__ serves these.
  return api->export_borrowed != nullptr && api->current_stream != nullptr ? api : nullptr;
}

std::string module_of(nb::handle type) {
  nb::object module = nb::getattr(type, "__module__", nb::none());
  return nb::isinstance<nb::str>(module) ? nb::cast<std::string>(module) : std::string();
}

// True when `module` is `package` or lies inside it.
bool inside(std::string_view module, std::string_view package) {
  return module.starts_with(package) &&
         (module.size() == package.size() || module[package.size()] == '.');
}

// The attribute, or null where there is none.
nb::object attribute(nb::handle owner, const char* name) {
  nb::object found = nb::getattr(owner, name, nb::none());
  return found.is_none() ? nb::object() : found;
}

// The class `name` of an already imported module, or null. Never imports anything.
nb::object loaded_class(const char* module, const char* name) {
  const nb::object modules = nb::module_::import_("sys").attr("modules");
  const nb::object found = modules.attr("get")(module);
  return found.is_none() ? nb::object() : attribute(found, name);
}

bool is_subclass(nb::handle type, const nb::object& base) {
  if (!base.is_valid()) return false;
  const int answer = PyObject_IsSubclass(type.ptr(), base.ptr());
  if (answer < 0) throw nb::python_error();
  return answer == 1;
}

}  // namespace

ArrayTypes::ArrayTypes() : requires_grad_(nb::steal(PyUnicode_InternFromString("requires_grad"))) {}

const ArrayType& ArrayTypes::of(nb::handle object, ArrayType& scratch) {
  const nb::handle type = object.type();
  if (last_ != nullptr && last_->type.is(type)) return *last_;  // one call, one type: the rule
  const auto found = types_.find(type.ptr());
  if (found != types_.end()) {
    last_ = &found->second;
    return *last_;
  }
  scratch = classify(type);  // runs Python code, which may well call us
  if (types_.size() < kMostTypes) types_.emplace(type.ptr(), scratch);
  return scratch;
}

bool ArrayTypes::is_bfloat16(nb::handle dtype) {
  if (bfloat16_.is_valid() && bfloat16_.is(dtype)) return true;
  if (nb::cast<std::string>(nb::str(dtype)) != "bfloat16") return false;
  bfloat16_ = nb::borrow(dtype);
  return true;
}

ArrayType ArrayTypes::classify(nb::handle type) {
  ArrayType entry;
  entry.type = nb::borrow(type);
  const std::string module = module_of(type);

  const nb::object tensor = loaded_class("torch", "Tensor");
  if (is_subclass(type, tensor)) {
    entry.family = Family::kTorch;
    load_torch();
    const nb::object parameter = loaded_class("torch.nn", "Parameter");
    if (!type.is(tensor) && !(parameter.is_valid() && type.is(parameter))) {
      entry.protocol = Protocol::kDispatch;
      return entry;
    }
    entry.exchange = exchange_api(type);
    entry.protocol = entry.exchange != nullptr ? Protocol::kExchange : Protocol::kDlpack;
    return entry;
  }
  // Neither has plain memory, whatever its methods say.
  if (is_subclass(type, loaded_class("numpy.ma", "MaskedArray")) ||
      is_subclass(type, loaded_class("jax.core", "Tracer"))) {
    return entry;
  }
  if (is_subclass(type, loaded_class("numpy", "ndarray"))) {
    entry.protocol = Protocol::kArrayStruct;
    return entry;
  }
  if (inside(module, "cupy") || inside(module, "cupy_backends")) entry.family = Family::kCupy;
  if (inside(module, "jax") || inside(module, "jaxlib")) entry.family = Family::kJax;
  entry.exchange = exchange_api(type);
  if (entry.exchange != nullptr) {
    entry.protocol = Protocol::kExchange;
  } else if (nb::hasattr(type, "__dlpack__")) {
    entry.protocol = Protocol::kDlpack;
  } else if (nb::hasattr(type, "__array_struct__")) {
    entry.protocol = Protocol::kArrayStruct;
  }
  return entry;
}

void ArrayTypes::load_torch() {
  if (torch_.is_grad_enabled.is_valid()) return;
  const nb::object torch = nb::module_::import_("torch");
  const nb::object internals = torch.attr("_C");
  // These are torch's private names; a torch without them loses only the modes they tell of. (The
  // wrappers of torch.func need no question: they have no memory to export, which is an error.)
  for (const char* name : {"_len_torch_dispatch_stack", "_is_tracing"}) {
    nb::object hook = attribute(internals, name);
    if (hook.is_valid()) torch_.interpreters.push_back(std::move(hook));
  }
  torch_.increment_version = attribute(internals, "_increment_version");
  if (!torch_.increment_version.is_valid()) {
    torch_.increment_version = torch.attr("autograd").attr("graph").attr("increment_version");
  }
  try {
    torch_.increment_version(nb::list());
    torch_.increments_lists = true;
  } catch (nb::python_error&) {
    torch_.increments_lists = false;  // an older torch, which takes a tensor
  }
  torch_.is_grad_enabled = torch.attr("is_grad_enabled");
}

}  // namespace flash_kda::python
