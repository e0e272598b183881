#include "call.h"

#include <limits>
#include <optional>
#include <string>

#include "flash_kda/error.h"
#include "workspace.h"

namespace flash_kda::python {
namespace {

[[noreturn]] void throw_type(const char* name, const char* expected, nb::handle object) {
  const std::string came =
      object.is_none() ? "None" : nb::cast<std::string>(nb::getattr(object.type(), "__name__"));
  throw TypeError(std::string(name) + ": expected " + expected + ", got " + came);
}

// A Python or NumPy real number. Arrays are refused: reading one could wait for a device.
double read_number(const char* name, const char* expected, nb::handle object) {
  const bool plain =
      (PyFloat_Check(object.ptr()) || PyLong_Check(object.ptr())) && !PyBool_Check(object.ptr());
  if (!plain) {
    const nb::object real = nb::module_::import_("numbers").attr("Real");
    if (PyBool_Check(object.ptr()) || !nb::isinstance(object, real)) {
      throw_type(name, expected, object);
    }
  }
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred() != nullptr) throw nb::python_error();
  return value;
}

// Fills everything but the arrays.
void read_options(const CallOptions& options, ForwardArgs& args) {
  args.gate = options.gate;
  args.beta_kind = options.beta_kind;
  args.l2norm = options.l2norm;
  if (!options.lower_bound.is_none()) {
    args.lower_bound = read_number("lower_bound", "a number", options.lower_bound);
  } else if (args.gate == GateKind::kLowerBound) {
    throw ValueError(
        "lower_bound: expected a number in [-5, 0] for the bounded gate, got None; the unbounded "
        "(softplus) gate is chunk_kda's with use_gate_in_kernel=True and lower_bound=None");
  }
  if (!options.scale.is_none()) {
    args.scale = read_number("scale", "a number or None", options.scale);
  }
}

// The array whose library's stream and allocator serve the call: q, but for JAX, which has no
// current stream and lends no memory; then `out`, which is another library's.
nb::handle leader_of(ModuleState& state, const ArrayObjects& objects) {
  ArrayType scratch;
  const ArrayType& type = state.types.of(objects[0], scratch);
  return type.family == Family::kJax ? objects[5] : objects[0];
}

void read_arrays(ArrayReader& reader, const ArrayObjects& objects, ForwardArgs& args) {
  for (std::size_t i = 0; i < kArrayCount; ++i) {
    const ArrayArgument& argument = kArrayArguments[i];
    if (argument.optional && objects[i].is_none()) continue;
    reader.read(argument.name, objects[i], argument.access, argument.optional, args.*argument.view);
    if (reader.needs_dispatcher()) return;
  }
}

}  // namespace

bool run(ModuleState& state, const ArrayObjects& objects, const CallOptions& options) {
  ForwardArgs args;
  read_options(options, args);
  ArrayReader reader(state.types, leader_of(state, objects), options.inside_dispatcher);
  read_arrays(reader, objects, args);
  if (reader.needs_dispatcher()) return false;

  const std::shared_ptr<const ForwardPlan> plan = state.plans.get(args, options.plan);
  const Device device = args.q.device;
  const Workspace workspace(reader, *plan, device, state.allocate_workspace);
  void* stream = reader.stream(device);
  if (device.type == DeviceType::kCpu || options.plan.check_cu_seqlens) {
    const nb::gil_scoped_release others_may_run;
    forward(args, *plan, workspace.data(), stream);
  } else {
    forward(args, *plan, workspace.data(), stream);  // a launch is shorter than a turn of the GIL
  }
  reader.mark_written();
  return true;
}

std::shared_ptr<const ForwardPlan> plan(ModuleState& state, const ArrayObjects& objects,
                                        const CallOptions& options) {
  ForwardArgs args;
  read_options(options, args);
  ArrayReader reader(state.types, leader_of(state, objects), options.inside_dispatcher);
  read_arrays(reader, objects, args);
  if (reader.needs_dispatcher()) return nullptr;
  return state.plans.get(args, options.plan);
}

int read_int(const char* name, nb::handle object) {
  if (PyBool_Check(object.ptr()) || PyIndex_Check(object.ptr()) == 0) {
    throw_type(name, "an int", object);
  }
  const Py_ssize_t value = PyNumber_AsSsize_t(object.ptr(), PyExc_ValueError);
  if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max()) {
    throw ValueError(std::string(name) + ": expected an int of 32 bits, got " +
                     std::to_string(value));
  }
  return static_cast<int>(value);
}

bool read_bool(const char* name, nb::handle object) {
  if (object.ptr() == Py_True) return true;
  if (object.ptr() == Py_False) return false;
  const std::string type = nb::cast<std::string>(nb::getattr(object.type(), "__name__"));
  if (type != "bool" && type != "bool_") throw_type(name, "a bool", object);
  return PyObject_IsTrue(object.ptr()) == 1;
}

}  // namespace flash_kda::python
