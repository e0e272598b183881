// The whole call: check, shortcut, backend.
#include "flash_kda/forward.h"

#include "cpu/backend.h"
#include "cuda/backend.h"
#include "validate.h"

namespace flash_kda {

void forward(const ForwardArgs& args, const ForwardPlan& plan, void* workspace, void* stream) {
  const Sizes sizes = validate(args);
  validate_fit(args, sizes, plan, workspace);
  if (sizes.sequences == 0) return;  // nothing to write: no row of out, no state
  switch (plan.backend) {
    case Backend::kCpu:
      cpu::forward(args, plan);
      return;
    case Backend::kCudaSm90:
      cuda::forward(args, plan, workspace, stream);
      return;
  }
}

}  // namespace flash_kda
