// Numbers of the contract that more than one file needs.
#pragma once

#include <cstdint>

namespace flash_kda {

// K and V may be anything from 1 to this.
inline constexpr std::int64_t kMaxHeadDim = 256;

// Checkpoint positions are multiples of this many tokens.
inline constexpr std::int64_t kCheckpointStep = 64;

// lower_bound lies in [kMinLowerBound, 0]. 16 tokens of -5 are 80 nats, inside fp32's and bf16's
// exponents.
inline constexpr double kMinLowerBound = -5.0;

// q and k are divided by sqrt(sum of squares + this).
inline constexpr float kL2NormEpsilon = 1e-6F;

}  // namespace flash_kda
