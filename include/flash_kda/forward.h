// The forward pass of Kimi Delta Attention (KDA).
//
// Per sequence and value head hv (its key head is hv / (HV / H)), with state S of shape [V, K]:
//
//   q_t, k_t <- x / sqrt(sum(x * x) + 1e-6)                      if l2norm
//   g_t [K]  <- log decay, see GateKind
//   b_t      <- see BetaKind
//   S        <- S * exp(g_t)[None, :]                            decay first
//   u_t [V]  <- b_t * (v_t - S k_t)                              then the error, against that
//   S        <- S + u_t k_t^T
//   o_t [V]  <- scale * S q_t
//
// Source: Kimi Linear technical report (arXiv:2510.26692); the delta rule with a decay for each
// channel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "flash_kda/error.h"
#include "flash_kda/tensor.h"

namespace flash_kda {

// How `g` becomes the log decay of a channel. x = g + dt_bias (0 if absent), a = exp(A_log) (1 if
// absent).
enum class GateKind : std::uint8_t {
  kLowerBound,  // lower_bound * sigmoid(a * x), lower_bound in [-5, 0]
  kSoftplus,    // -a * softplus(x), unbounded below
  kLogDecay,    // g already is the log decay (<= 0); A_log and dt_bias must be absent
};

// How `beta` becomes the writing strength.
enum class BetaKind : std::uint8_t {
  kLogit,         // sigmoid(beta)
  kDoubledLogit,  // 2 * sigmoid(beta): allows negative eigenvalues
  kProbability,   // beta as given
};

// B batch, T tokens, N sequences (N = B without cu_seqlens), H query/key heads, HV value heads (a
// multiple of H), K key head size, V value head size. The last dimension of every array is dense;
// other strides are free.
struct ForwardArgs {
  TensorView q;     // [B, T, H, K]   bf16 | fp16 | fp32 (CUDA: bf16)
  TensorView k;     // [B, T, H, K]   as q
  TensorView v;     // [B, T, HV, V]  as q
  TensorView g;     // [B, T, HV, K]  bf16 | fp32, or as q
  TensorView beta;  // [B, T, HV]     bf16 | fp32, or as q
  TensorView out;   // [B, T, HV, V]  as q; written. Rows at or past cu_seqlens[-1] are not touched.

  TensorView A_log;    // optional; HV elements, fp32
  TensorView dt_bias;  // optional; [HV, K] or [HV * K], fp32

  // [N, HV, V, K], or with indices a pool [slots, HV, V, K]; bf16 | fp32, each on its own. Both
  // optional. The slot stride may exceed the dense one; [HV, V, K] inside a slot may be strided
  // too, K dense. The two may be the same storage, with equal strides: then a sequence may write
  // the slot that it started from, but not one that another sequence starts from.
  TensorView initial_state;
  TensorView final_state;  // written
  // [N], int32 | int64, negative = start from zero / do not store. Only with the state of the same
  // name. No slot is written twice.
  TensorView initial_state_indices;
  TensorView final_state_indices;

  TensorView cu_seqlens;  // optional; [N + 1], int32 | int64, on the arrays' device; then B == 1

  // Checkpoints, optional, all four or none: after checkpoint_positions[i] tokens of sequence
  // checkpoint_sequences[i] the state goes to checkpoint_states[checkpoint_slots[i]]. Positions are
  // multiples of 64 (0 = the initial state) and at most the sequence's length. A negative slot is
  // skipped.
  TensorView checkpoint_states;     // [slots, HV, V, K], bf16 | fp32; written
  TensorView checkpoint_sequences;  // [M], int32 | int64
  TensorView checkpoint_positions;  // [M], int32 | int64
  TensorView checkpoint_slots;      // [M], int32 | int64

  GateKind gate = GateKind::kLowerBound;
  BetaKind beta_kind = BetaKind::kLogit;
  bool l2norm = true;
  double lower_bound = -5.0;    // only read by GateKind::kLowerBound
  std::optional<double> scale;  // K ** -0.5 if absent
};

enum class Backend : std::uint8_t { kCpu, kCudaSm90 };

// What the caller may ask of the plan; the defaults are right for nearly everybody.
struct PlanOptions {
  // CPU: number of threads, 0 = all that the process may use. Never changes results.
  int threads = 0;
  // CUDA: one long sequence may be cut into segments (changes rounding only).
  bool sequence_split = true;
  // CUDA: read cu_seqlens back and check it (synchronises; for debugging).
  bool check_cu_seqlens = false;
  // CUDA: blocks a head, 0 = the plan decides. Never changes results.
  int value_split = 0;
};

// What runs for arguments of these shapes, dtypes, devices and options. Holds no pointer: it may be
// kept and used again for any arguments that differ in data, strides and array contents alone.
struct ForwardPlan {
  Backend backend = Backend::kCpu;
  std::int64_t batch = 0, tokens = 0, sequences = 0;  // B, T, N
  std::int64_t key_heads = 0, value_heads = 0;        // H, HV
  std::int64_t key_dim = 0, value_dim = 0;            // K, V
  bool varlen = false;
  std::int64_t chunk = 0;     // tokens a step of the chunked algorithm
  int threads = 1;            // CPU
  int value_split = 1;        // CUDA: blocks that share a head, by columns of V
  int sequence_segments = 1;  // CUDA: the most segments that a sequence is cut into
  std::int64_t grid = 0;      // CUDA: thread blocks
  int multiprocessors = 0;    // CUDA: of the device that the plan is for
  std::size_t workspace_bytes = 0;
  std::size_t workspace_alignment = 256;
  PlanOptions options;
  std::string reason;  // one line: why this and not another choice

  // Several lines for people: shapes, backend, tiles, workspace, reason.
  std::string describe() const;
};

// Checks `args` (shapes, dtypes, strides, devices, ranges; and the contents of cu_seqlens and of
// index arrays where they are in host memory) and decides what runs. Touches no tensor data on a
// GPU, launches nothing. Throws ValueError or NotImplementedError.
ForwardPlan plan_forward(const ForwardArgs& args, const PlanOptions& options = {});

// Runs the pass. `plan` comes from plan_forward for arguments of the same shapes, dtypes, devices
// and options; `workspace` has plan.workspace_bytes bytes (null if 0), aligned to
// plan.workspace_alignment, on the arrays' device. `stream` is a cudaStream_t (null = the default
// stream); ignored on the CPU, where the call returns when done. No allocation on the device, no
// host synchronisation. T == 0 and N == 0 return without a launch. Throws ValueError,
// NotImplementedError or DeviceError.
void forward(const ForwardArgs& args, const ForwardPlan& plan, void* workspace, void* stream);

}  // namespace flash_kda
