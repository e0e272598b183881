// The extension module flash_kda._C. Thin: it collects arguments and maps errors; call.cpp does the
// work.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "call.h"
#include "flash_kda/flash_kda.h"
#include "xla_ffi.h"

namespace flash_kda::python {
namespace {

using nb::handle;

// The library's exceptions as Python's.
void translate(const std::exception_ptr& error, void* /*unused*/) {
  try {
    std::rethrow_exception(error);
  } catch (const TypeError& e) {
    PyErr_SetString(PyExc_TypeError, e.what());
  } catch (const ValueError& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const NotImplementedError& e) {
    PyErr_SetString(PyExc_NotImplementedError, e.what());
  } catch (const Error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
}

// An argument that takes any object, None too: our own checks name the argument, nanobind's would
// not.
auto any(const char* name) { return nb::arg(name).none(); }

template <std::size_t kCount>
std::array<handle, kCount> unpack(const char* name, const nb::tuple& tuple) {
  if (tuple.size() != kCount) {
    throw TypeError(std::string(name) + ": expected a tuple of " + std::to_string(kCount) +
                    ", got " + std::to_string(tuple.size()));
  }
  std::array<handle, kCount> objects;
  for (std::size_t i = 0; i < kCount; ++i) {
    objects[i] = PyTuple_GetItem(tuple.ptr(), static_cast<Py_ssize_t>(i));  // borrowed
  }
  return objects;
}

GateKind gate_kind(int gate) {
  if (gate < 0 || gate > static_cast<int>(GateKind::kLogDecay)) {
    throw ValueError("gate: expected 0, 1 or 2, got " + std::to_string(gate));
  }
  return static_cast<GateKind>(gate);
}

BetaKind beta_kind_of(int kind) {
  if (kind < 0 || kind > static_cast<int>(BetaKind::kProbability)) {
    throw ValueError("beta_kind: expected 0, 1 or 2, got " + std::to_string(kind));
  }
  return static_cast<BetaKind>(kind);
}

// The order is that of `_Options` in _C.pyi.
CallOptions options_of(const nb::tuple& tuple) {
  const auto [gate, beta_kind, l2norm, lower_bound, scale, threads, sequence_split,
              check_cu_seqlens, value_split] = unpack<9>("options", tuple);
  CallOptions options;
  options.gate = gate_kind(read_int("gate", gate));
  options.beta_kind = beta_kind_of(read_int("beta_kind", beta_kind));
  options.l2norm = read_bool("use_qk_l2norm_in_kernel", l2norm);
  options.lower_bound = lower_bound;
  options.scale = scale;
  options.plan.threads = read_int("threads", threads);
  options.plan.sequence_split = read_bool("sequence_split", sequence_split);
  options.plan.check_cu_seqlens = read_bool("check_cu_seqlens", check_cu_seqlens);
  options.plan.value_split = read_int("value_split", value_split);
  return options;
}

void bind_plan(nb::module_& m) {
  nb::class_<ForwardPlan>(m, "Plan", "What runs for arguments of certain shapes and options.")
      .def_prop_ro(
          "backend",
          [](const ForwardPlan& p) { return p.backend == Backend::kCpu ? "cpu" : "cuda-sm90"; })
      .def_ro("batch", &ForwardPlan::batch)
      .def_ro("tokens", &ForwardPlan::tokens)
      .def_ro("sequences", &ForwardPlan::sequences)
      .def_ro("key_heads", &ForwardPlan::key_heads)
      .def_ro("value_heads", &ForwardPlan::value_heads)
      .def_ro("key_dim", &ForwardPlan::key_dim)
      .def_ro("value_dim", &ForwardPlan::value_dim)
      .def_ro("varlen", &ForwardPlan::varlen)
      .def_ro("chunk", &ForwardPlan::chunk)
      .def_ro("threads", &ForwardPlan::threads)
      .def_ro("value_split", &ForwardPlan::value_split)
      .def_ro("sequence_segments", &ForwardPlan::sequence_segments)
      .def_ro("grid", &ForwardPlan::grid)
      .def_ro("multiprocessors", &ForwardPlan::multiprocessors)
      .def_ro("workspace_bytes", &ForwardPlan::workspace_bytes)
      .def_ro("reason", &ForwardPlan::reason)
      .def("describe", &ForwardPlan::describe)
      .def("__str__", &ForwardPlan::describe);
}

void bind_calls(nb::module_& m, const std::shared_ptr<ModuleState>& state) {
  // The fixed call of flash-linear-attention's backend: bounded gate, beta as logits, l2norm on.
  m.def(
      "fwd",
      [state](handle q, handle k, handle v, handle g, handle beta, handle scale, handle out,
              handle A_log, handle dt_bias, handle lower_bound, handle initial_state,
              handle final_state, handle cu_seqlens) {
        const handle none = Py_None;
        CallOptions options;
        options.lower_bound = lower_bound;
        options.scale = scale;
        return run(*state,
                   {q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, none, none,
                    cu_seqlens, none, none, none, none},
                   options);
      },
      any("q"), any("k"), any("v"), any("g"), any("beta"), any("scale"), any("out"), any("A_log"),
      any("dt_bias"), any("lower_bound"), any("initial_state"), any("final_state"),
      any("cu_seqlens"));
  m.def("forward",
        [state](const nb::tuple& arrays, const nb::tuple& options, bool inside_dispatcher) {
          CallOptions read = options_of(options);
          read.inside_dispatcher = inside_dispatcher;
          return run(*state, unpack<kArrayCount>("arrays", arrays), read);
        });
  m.def("plan", [state](const nb::tuple& arrays, const nb::tuple& options) {
    return std::const_pointer_cast<ForwardPlan>(
        plan(*state, unpack<kArrayCount>("arrays", arrays), options_of(options)));
  });
  m.def("set_workspace_allocator",
        [state](nb::callable allocate) { state->allocate_workspace = std::move(allocate); });
  m.def("xla_handler", &xla_handler);
}

}  // namespace
}  // namespace flash_kda::python

NB_MODULE(_C, m) {
  using namespace flash_kda::python;  // NOLINT(google-build-using-namespace)
  nb::register_exception_translator(translate);
  bind_plan(m);
  bind_calls(m, std::make_shared<ModuleState>());

  nb::class_<flash_kda::BackendInfo>(m, "BackendInfo", "A backend and whether it can run here.")
      .def_ro("name", &flash_kda::BackendInfo::name)
      .def_ro("available", &flash_kda::BackendInfo::available)
      .def_ro("detail", &flash_kda::BackendInfo::detail)
      .def("__repr__", [](const flash_kda::BackendInfo& info) {
        return info.name + (info.available ? ": " : " (unavailable): ") + info.detail;
      });
  m.def("backends", [] {
    nb::list infos;
    for (flash_kda::BackendInfo& info : flash_kda::backends())
      infos.append(nb::cast(std::move(info)));
    return infos;
  });
  m.def("version", [] { return std::string(flash_kda::version()); });

  using flash_kda::BetaKind;
  using flash_kda::GateKind;
  m.attr("GATE_LOWER_BOUND") = static_cast<int>(GateKind::kLowerBound);
  m.attr("GATE_SOFTPLUS") = static_cast<int>(GateKind::kSoftplus);
  m.attr("GATE_LOG_DECAY") = static_cast<int>(GateKind::kLogDecay);
  m.attr("BETA_LOGIT") = static_cast<int>(BetaKind::kLogit);
  m.attr("BETA_DOUBLED_LOGIT") = static_cast<int>(BetaKind::kDoubledLogit);
  m.attr("BETA_PROBABILITY") = static_cast<int>(BetaKind::kProbability);
}
