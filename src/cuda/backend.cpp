// The CUDA backend's answers to plan, forward and info: which architecture serves the call.
#include "cuda/backend.h"

#include <string>

#include "cuda/check.h"
#include "cuda/device.h"
#include "cuda/sm90/forward.h"
#include "cuda/sm90/plan.h"

namespace flash_kda::cuda {
namespace {

std::string architecture(const DeviceProperties& p) {
  return "sm_" + std::to_string(p.major) + std::to_string(p.minor);
}

}  // namespace

void plan(const ForwardArgs& args, ForwardPlan& plan) {
  const DeviceProperties& p = device_properties(args.q.device.index);
  if (!p.is_sm90()) {
    throw NotImplementedError(
        "q is on " + to_string(args.q.device) + ", an " + architecture(p) +
        " device; the CUDA kernels of this build are for sm_90 (H100, H200, H20)");
  }
  sm90::plan(args, p.multiprocessors, plan);
}

void forward(const ForwardArgs& args, const ForwardPlan& plan, void* workspace, void* stream) {
  const DeviceGuard guard(args.q.device.index);
  sm90::forward(args, plan, workspace, static_cast<cudaStream_t>(stream));
}

BackendInfo info() {
  BackendInfo result{"cuda-sm90", false, ""};
  std::string why;
  const int count = device_count(&why);
  if (count == 0) {
    result.detail = "no usable CUDA device: " + (why.empty() ? std::string("none found") : why);
    return result;
  }
  for (int i = 0; i < count; ++i) {
    try {
      const DeviceProperties& p = device_properties(i);
      result.available = result.available || p.is_sm90();
      result.detail += (i > 0 ? "; " : "") + to_string(Device{DeviceType::kCuda, i}) + " " +
                       architecture(p) + ", " + std::to_string(p.multiprocessors) +
                       " multiprocessors" +
                       (p.is_sm90() ? "" : " (unsupported: the kernels are for sm_90)");
    } catch (const Error& error) {
      result.detail += std::string(i > 0 ? "; " : "") + error.what();
    }
  }
  return result;
}

}  // namespace flash_kda::cuda
