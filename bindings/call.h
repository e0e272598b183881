// One call of the forward pass, from Python objects to the core library.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <memory>

#include "array_types.h"
#include "arrays.h"
#include "flash_kda/forward.h"
#include "plan_cache.h"

namespace flash_kda::python {

// What the module keeps between calls: only what saves time, nothing that changes a result.
struct ModuleState {
  ArrayTypes types;
  PlanCache plans;
  nb::object allocate_workspace;  // (like, bytes) -> uint8 array; set by flash_kda._arrays
};

// The arrays of a call by position; the order is that of kArrayArguments and of every signature in
// _C.pyi.
inline constexpr std::size_t kArrayCount = 17;
using ArrayObjects = std::array<nb::handle, kArrayCount>;

struct ArrayArgument {
  const char* name;
  TensorView ForwardArgs::* view;
  Access access;
  bool optional;
};

inline constexpr std::array<ArrayArgument, kArrayCount> kArrayArguments = {{
    {"q", &ForwardArgs::q, Access::kRead, false},
    {"k", &ForwardArgs::k, Access::kRead, false},
    {"v", &ForwardArgs::v, Access::kRead, false},
    {"g", &ForwardArgs::g, Access::kRead, false},
    {"beta", &ForwardArgs::beta, Access::kRead, false},
    {"out", &ForwardArgs::out, Access::kWrite, false},
    {"A_log", &ForwardArgs::A_log, Access::kRead, true},
    {"dt_bias", &ForwardArgs::dt_bias, Access::kRead, true},
    {"initial_state", &ForwardArgs::initial_state, Access::kRead, true},
    {"final_state", &ForwardArgs::final_state, Access::kWrite, true},
    {"initial_state_indices", &ForwardArgs::initial_state_indices, Access::kRead, true},
    {"final_state_indices", &ForwardArgs::final_state_indices, Access::kRead, true},
    {"cu_seqlens", &ForwardArgs::cu_seqlens, Access::kRead, true},
    {"checkpoint_states", &ForwardArgs::checkpoint_states, Access::kWrite, true},
    {"checkpoint_sequences", &ForwardArgs::checkpoint_sequences, Access::kRead, true},
    {"checkpoint_positions", &ForwardArgs::checkpoint_positions, Access::kRead, true},
    {"checkpoint_slots", &ForwardArgs::checkpoint_slots, Access::kRead, true},
}};

// The arguments of a call that are no arrays.
struct CallOptions {
  GateKind gate = GateKind::kLowerBound;
  BetaKind beta_kind = BetaKind::kLogit;
  bool l2norm = true;
  nb::handle lower_bound;  // number; None only if the gate kind does not read it
  nb::handle scale;        // number or None
  PlanOptions plan;
  bool inside_dispatcher = false;  // torch's dispatcher has seen the call already
};

// Runs the pass. False: nothing was done, since torch's dispatcher must see the call (see
// ArrayReader).
bool run(ModuleState& state, const ArrayObjects& objects, const CallOptions& options);

// Only plans. Null where run() would return false.
std::shared_ptr<const ForwardPlan> plan(ModuleState& state, const ArrayObjects& objects,
                                        const CallOptions& options);

// The int, or TypeError that names the argument (ValueError if it does not fit).
int read_int(const char* name, nb::handle object);
// The bool (also NumPy's), or TypeError that names the argument.
bool read_bool(const char* name, nb::handle object);

}  // namespace flash_kda::python
