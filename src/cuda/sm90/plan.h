// What the SM90 kernels serve, and how a call is laid over the device. Pure: needs no CUDA.
#pragma once

#include "flash_kda/forward.h"

namespace flash_kda::sm90 {

// Throws NotImplementedError for what the kernels do not serve, ValueError for addresses and
// strides that they cannot read. `plan` holds the sizes. Every call asks, since a plan may be used
// again for arguments of other strides.
void check_call(const ForwardArgs& args, const ForwardPlan& plan);

// Checks the call and fills the CUDA part of `plan` for a device with this many multiprocessors.
void plan(const ForwardArgs& args, int multiprocessors, ForwardPlan& plan);

}  // namespace flash_kda::sm90
