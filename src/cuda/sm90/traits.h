// Sizes and the shared-memory map of the SM90 forward kernel. Everything that is counted in tokens,
// bytes or slots is written here and nowhere else.
#pragma once

#include <cstdint>

namespace flash_kda::sm90 {

constexpr int kKeyDim = 128;
constexpr int kValueDim = 128;
constexpr int kChunk = 32;        // tokens a step
constexpr int kHalf = 16;         // tokens on each side of a chunk's reference point, its middle
constexpr int kGroupValues = 64;  // V columns a warpgroup of the state role holds

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;

// ---- rings -------------------------------------------------------------------------------------
constexpr int kTableSlots = 8;  // per-chunk tables and descriptors; a power of two above the stages
constexpr int kSolutionSlots = 4;  // chunks of X and r

constexpr int kSolverWarps = 3;  // warps of the solve role; they take every third chunk
constexpr int kStopChunks = 3;   // end marks in the stream: one for each solver warp

// ---- numbers -----------------------------------------------------------------------------------
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNormEpsilon = 1e-6f;
// The step from one chunk's reference to the next may lose 160 nats, more than fp32 holds. The
// factor is applied times 2^96, and 2^-96 follows when the first product has taken its copy.
constexpr float kBoost = 79228162514264337593543950336.0f;           // 2^96
constexpr float kUnboost = 1.0f / 79228162514264337593543950336.0f;  // exact
// Values, states and updates are held times 2^-8: a value written 16 tokens after the reference is
// e^80 times larger in the state's basis, and this moves room from where fp32 has it to where it is
// needed.
constexpr float kValueScale = 1.0f / 256.0f;
constexpr float kValueUnscale = 256.0f;
// A chunk with a row of k or q of a larger squared norm is prepared again, its rows scaled by
// powers of two: with the e^80 of a saturated gate its products could overflow.
constexpr float kPlainSquaredNorm = 1048576.0f;

// ---- shared memory, bytes ----------------------------------------------------------------------
// A tile is 32 rows of 128 bytes (64 bf16), 128-byte swizzle.
constexpr int kRowBytes = 128;
constexpr int kTileBytes = kChunk * kRowBytes;
constexpr int kRowGroupBytes = 8 * kRowBytes;  // 8 rows: the unit of a swizzled layout
// Per-channel factors: channel 8j + 2t + p at word 36t + 2j + p, so that four lanes read four banks
// apart.
constexpr int kFactorPitchBytes = 144;
constexpr int kFactorBytes = 4 * kFactorPitchBytes;
constexpr int kRowTableBytes = kChunk * 4;
constexpr int kDescriptorBytes = 32;

// P of a segment in the workspace: bf16, then what that leaves; 128 rows each, whose units of 16
// bytes are permuted so that ldmatrix finds eight rows in different banks.
constexpr int kMapRowBytes = 2 * kKeyDim;
constexpr int kMapPartBytes = kKeyDim * kMapRowBytes;
constexpr int kMapBytes = 2 * kMapPartBytes;

// ---- what a block does --------------------------------------------------------------------------
enum class Task {
  kForward,  // spans in full: states and O
  kMixed,    // that, and maps: what a span does to a state, S' = S P + R; R from zero, P from the
             // identity
};

template <int kStateGroups_, Task kTask_>
struct BlockShape {
  static constexpr int kStateGroups = kStateGroups_;  // state warpgroups, 64 rows of S each
  static constexpr bool kMaps = kTask_ == Task::kMixed;
  // Items of work for each span and head: blocks of V columns.
  static constexpr int kItemsPerHead = kValueDim / (kStateGroups * kGroupValues);
  static_assert(!kMaps || kItemsPerHead == 1);

  // Chunks of q, k, g between the load and the last product that reads them.
  static constexpr int kStages = 6;
  static constexpr int kValueSlots = 3;  // chunks of V, which become O
  static_assert(kStages < kTableSlots);

  // A stage has two halves of 64 channels, each three tiles: k, q, g as loaded; K1, Q1, K2 in their
  // places.
  static constexpr int kTileK = 0;
  static constexpr int kTileQ = kTileBytes;
  static constexpr int kTileG = 2 * kTileBytes;
  static constexpr int kChannelHalfBytes = 3 * kTileBytes;
  static constexpr int kStageBytes = 2 * kChannelHalfBytes;
};
using WholeHead = BlockShape<2, Task::kForward>;  // a block computes all 128 V columns of a head
using HalfHead = BlockShape<1, Task::kForward>;   // two blocks share a head
using FirstLaunch = BlockShape<2, Task::kMixed>;  // of a call that splits sequences

template <class Block>
struct SharedLayout {
  static constexpr int kStages = Block::kStages, kStateGroups = Block::kStateGroups;
  static constexpr int kValueSlots = Block::kValueSlots;
  static constexpr int kStageAt = 0;
  // X of a chunk, in the second 64 bytes of its rows, as the swizzle goes; r in the first 64 of
  // rows 0 and 1.
  static constexpr int kSolutionAt = kStageAt + kStages * Block::kStageBytes;
  // A_qk by stage: its bf16 and what the rounding left, 64 bytes of a row each.
  static constexpr int kQueryScoreAt = kSolutionAt + kSolutionSlots * kTileBytes;
  static constexpr int kValueAt = kQueryScoreAt + kStages * kTileBytes;
  // Per-channel decays: start -> middle, middle -> end, middle of the chunk before -> middle (times
  // 2^96).
  static constexpr int kEnterAt = kValueAt + kStateGroups * kValueSlots * kTileBytes;
  static constexpr int kLeaveAt = kEnterAt + kTableSlots * kFactorBytes;
  static constexpr int kStepAt = kLeaveAt + kTableSlots * kFactorBytes;
  // Per-row numbers: |q|^2 by halves of channels, output scale, update scale.
  static constexpr int kQueryNormAt = kStepAt + kTableSlots * kFactorBytes;
  static constexpr int kQueryScaleAt = kQueryNormAt + 2 * kTableSlots * kRowTableBytes;
  static constexpr int kUpdateScaleAt = kQueryScaleAt + kTableSlots * kRowTableBytes;
  static constexpr int kDescriptorAt = kUpdateScaleAt + kTableSlots * kRowTableBytes;
  static constexpr int kBarrierAt = kDescriptorAt + kTableSlots * kDescriptorBytes;

  // Barriers, 8 bytes each.
  static constexpr int kLoaded = kBarrierAt;  // q, k, g of a stage have arrived
  static constexpr int kPrepared =
      kLoaded + 8 * kStages;  // K1, Q1, K2, A_qk and the tables are written
  static constexpr int kSolved =
      kPrepared + 8 * kStages;  // X, r, scales and the step factor are written
  static constexpr int kReleased = kSolved + 8 * kStages;  // the state role is done with the stage
  static constexpr int kValueLoaded = kReleased + 8 * kStages;  // [group][slot]
  static constexpr int kOutputReady =
      kValueLoaded + 8 * kStateGroups * kValueSlots;  // [group][slot]
  static constexpr int kReloaded =
      kOutputReady + 8 * kStateGroups * kValueSlots;             // [solver warp], rare
  static constexpr int kShiftAt = kReloaded + 8 * kSolverWarps;  // [solver warp][k, q][row], rare
  static constexpr int kReloadParityAt = kShiftAt + kSolverWarps * 2 * kRowTableBytes;  // there too
  static constexpr int kBytes = kReloadParityAt + kSolverWarps * 4;
};
static_assert(SharedLayout<WholeHead>::kBytes <= 232448,
              "more shared memory than a block may have");

// ---- roles: warpgroups in this order: state, prepare, and one of three solver warps and the load
// warp
template <class Block>
struct Roles {
  static constexpr int kStateGroups = Block::kStateGroups;
  static constexpr int kPrepareGroups = kStateGroups == 2 ? 2 : 3;  // they take chunks by turns
  static constexpr int kWarpgroups = kStateGroups + kPrepareGroups + 1;
  static constexpr int kThreads = kWarpgroups * kWarpgroup;
  // Registers a thread after the roles have parted. The pool is what the launch took: all threads
  // times the most that the register file of 64 K allows each, in steps of 8. Asking for more than
  // the pool holds waits for ever.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kStateRegisters = kStateGroups == 2 ? 168 : 216;
  static constexpr int kPrepareRegisters = kStateGroups == 2 ? 40 : 56;
  static constexpr int kSolveRegisters = kStateGroups == 2 ? 64 : 96;
  static_assert(kStateGroups * kStateRegisters + kPrepareGroups * kPrepareRegisters +
                    kSolveRegisters <=
                kWarpgroups * kLaunchRegisters);
  static_assert(kPrepareRegisters <= kLaunchRegisters && kSolveRegisters <= kLaunchRegisters,
                "these two only shrink");
  static_assert(kPrepareGroups <= kStopChunks, "every group has to see an end mark");
  // A parity tells a barrier's phase only to those who waited for the phase before.
  static_assert(Block::kStages % kPrepareGroups == 0, "a group has to meet the same stages again");
};

}  // namespace flash_kda::sm90
