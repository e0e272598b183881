// The pass as a foreign function of XLA, for JAX: inside jax.jit, and on GPUs, where only XLA may
// allocate results and knows the stream.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace flash_kda::python {

// A capsule with the handler for `platform`, "cpu" or "cuda", as jax.ffi.register_ffi_target takes
// it. Throws ValueError.
//
// The handler reads the int32 array attribute "call", written by flash_kda._jax:
//   0 operands: bit i set: argument i (call.h's order) is the next operand
//   1 results: likewise
//   2.. gate, beta_kind, l2norm, threads, sequence_split, check_cu_seqlens, value_split
//   9, 10 lower_bound as a double's two words; 11 whether scale is given; 12, 13 scale
nanobind::object xla_handler(const std::string& platform);

}  // namespace flash_kda::python
