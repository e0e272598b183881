// The seam between the backend and the numerical source, which is compiled once for each
// instruction set.
//
// Plain data and raw pointers only: an inline function of a library header that a kernel file
// compiles with AVX-512 could be the copy that the linker keeps for everybody.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flash_kda::cpu {

// Tokens of one step. Checkpoints and sequence ends cut a step short; a multiple of kChunk never
// does.
inline constexpr int kChunk = 8;

enum class Element : std::uint8_t { kBFloat16, kFloat16, kFloat32 };

// Row t starts at data + t * stride; strides in this file are in bytes. Elements of a row are
// dense.
struct InputRows {
  const std::byte* data;
  std::int64_t stride;
  Element element;
};

struct OutputRows {
  std::byte* data;  // null: not wanted
  std::int64_t stride;
  Element element;
};

enum class GateForm : std::uint8_t { kLowerBound, kSoftplus, kLogDecay };

// Log decay of a channel from its raw gate g; x = g + bias.
struct Gate {
  GateForm form;
  float lower_bound;
  float rate;         // exp(A_log), clamped to the finite positive range of fp32
  float log_rate;     // A_log
  const float* bias;  // [K], or null for 0
};

// Writing strength: beta, or multiplier * sigmoid(beta).
struct Strength {
  bool logit;
  float multiplier;
};

struct Checkpoint {
  std::int64_t position;  // tokens consumed
  std::int64_t offset;    // of its slot from HeadTask::checkpoint
};

// One value head of one sequence, or some of its columns.
struct HeadTask {
  InputRows q, k;  // [tokens, K]
  InputRows v;     // [tokens, columns]
  InputRows g;     // [tokens, K]
  InputRows beta;  // [tokens, 1]
  OutputRows out;  // [tokens, columns]

  InputRows initial_state;        // [columns, K]; null data: zeros
  OutputRows final_state;         // [columns, K]; may be the initial state's storage
  OutputRows checkpoint;          // [columns, K] of slot 0
  const Checkpoint* checkpoints;  // by position
  std::int64_t checkpoint_count;

  std::int64_t tokens;
  int key_dim;  // K
  int columns;  // of V
  bool l2norm;
  float scale;
  Gate gate;
  Strength strength;
};

// Heads that one call of Kernels::run may take: the states of four (256 KB at K = V = 128) leave
// room in a second-level cache of 1 MB, those of eight do not.
inline constexpr int kHeadBlock = 4;

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  int panel;  // columns of a panel: the unit in which a head's columns may be shared out
  std::size_t (*scratch_bytes)(int key_dim, int columns, int heads);
  // Runs `count` heads, at most kHeadBlock, of one sequence, and the same columns of each.
  // `scratch` is aligned to kScratchAlignment; its contents mean nothing before and after.
  void (*run)(const HeadTask* tasks, int count, std::byte* scratch);
};

inline constexpr std::size_t kScratchAlignment = 64;

extern const Kernels kGenericKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace flash_kda::cpu
