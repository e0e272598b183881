// Runs a Case on the CPU backend with given kernels and holds the result to the fp64 recurrence.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cpu/backend.h"
#include "cpu/dispatch.h"
#include "cpu_case.h"
#include "recurrence.h"

namespace flash_kda::testing {

// Relative RMS error that fp32 arithmetic and one rounding to `dtype` at the end may leave.
inline double bound_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return 2.5e-3;  // uniform rounding error of 8 significant bits: 1.7e-3
    case DType::kFloat16:
      return 3.2e-4;
    default:
      return 3e-6;
  }
}

// Everything that a call wrote, gaps included.
struct Written {
  std::vector<std::byte> out, final_state, checkpoints;
  friend bool operator==(const Written&, const Written&) = default;
};

inline Written run(Case& c, const cpu::Kernels& kernels, int threads) {
  c.poison();
  cpu::forward(c.args, c.plan(threads), kernels);
  return {c.out.bytes(), c.final.bytes(), c.marks.bytes()};
}

inline std::string describe(const HeadError& e) {
  return "sequence " + std::to_string(e.sequence) + ", head " + std::to_string(e.head);
}

// Runs `spec` with all kernels of this machine; `change` may edit the case first. `slack`
// multiplies the bounds.
template <class F>
void expect_close(const CaseSpec& spec, F&& change, double slack = 1.0) {
  Case c(spec);
  change(c);
  const RecurrenceResult want = recurrence(c.args);
  for (const cpu::Kernels* kernels : cpu::usable_kernels()) {
    SCOPED_TRACE(kernels->name);
    run(c, *kernels, 2);
    for (const HeadError& e : head_errors(c.args, want)) {
      EXPECT_LE(e.out, slack * bound_of(spec.dtype)) << describe(e);
      EXPECT_LE(e.state, slack * bound_of(spec.final.value_or(DType::kFloat32))) << describe(e);
      EXPECT_LE(e.checkpoint, slack * bound_of(spec.mark_dtype)) << describe(e);
    }
    EXPECT_TRUE(c.out.gaps_untouched());
    EXPECT_TRUE(!spec.final || c.final.gaps_untouched());
  }
}

inline void expect_close(const CaseSpec& spec, double slack = 1.0) {
  expect_close(spec, [](Case& /*unchanged*/) {}, slack);
}

}  // namespace flash_kda::testing
