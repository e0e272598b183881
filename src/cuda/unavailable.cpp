// The CUDA backend of a build without CUDA.
#include "cuda/backend.h"

namespace flash_kda::cuda {
namespace {
constexpr char kReason[] =
    "this build of flash_kda has no CUDA kernels (built with FLASH_KDA_CUDA=OFF or without nvcc)";
}

void plan(const ForwardArgs& args, ForwardPlan& /*plan*/) {
  throw NotImplementedError("q is on " + to_string(args.q.device) + ", but " + kReason);
}

void forward(const ForwardArgs& args, const ForwardPlan& /*plan*/, void* /*workspace*/,
             void* /*stream*/) {
  throw NotImplementedError("q is on " + to_string(args.q.device) + ", but " + kReason);
}

BackendInfo info() { return {"cuda-sm90", false, kReason}; }

}  // namespace flash_kda::cuda
