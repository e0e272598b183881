// Every case of tests/cases.json through the public API, against the fp64 recurrence.
#include "case_table.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "flash_kda/flash_kda.h"
#include "recurrence.h"

namespace flash_kda::testing {
namespace {

// Arithmetic is fp32 inside, so what is left is the rounding of what is stored: relative RMS error
// of one rounding to nearest, with a margin. The contract's own bound, 5e-3, is looser.
double bound(DType stored) {
  switch (stored) {
    case DType::kBFloat16:
      return 2.5e-3;
    case DType::kFloat16:
      return 4e-4;
    default:
      return 2e-5;
  }
}

std::vector<TableCase> all_cases() { return read_cases(FLASH_KDA_CASES_JSON); }

class CaseTable : public ::testing::TestWithParam<TableCase> {};

TEST_P(CaseTable, MeetsTheRecurrence) {
  const TableCase& table_case = GetParam();
  Case c(table_case.spec);
  if (table_case.in_place) {
    // One pool that has room for both.
    if (c.final.view().shape[0] > c.initial.view().shape[0]) {
      c.final.generate([n = 0]() mutable { return 0.1 * (n++ % 17) - 0.8; });
      c.args.initial_state = c.args.final_state;
    } else {
      c.args.final_state = c.args.initial_state;
    }
  }
  const RecurrenceResult want = recurrence(c.args);
  const std::vector<Array*> inputs{&c.q,
                                   &c.k,
                                   &c.v,
                                   &c.g,
                                   &c.beta,
                                   &c.rate,
                                   &c.bias,
                                   &c.initial_slots,
                                   &c.final_slots,
                                   &c.cu_seqlens,
                                   &c.mark_sequences,
                                   &c.mark_positions,
                                   &c.mark_slots};
  std::vector<std::vector<std::byte>> before;
  for (const Array* input : inputs) before.push_back(input->bytes());
  const std::vector<std::byte> initial_before = c.initial.bytes();
  c.out.poison();
  if (!table_case.in_place) c.poison();

  const ForwardPlan plan = plan_forward(c.args);
  ASSERT_EQ(plan.backend, Backend::kCpu);
  forward(c.args, plan, nullptr, nullptr);

  for (const HeadError& e : head_errors(c.args, want)) {
    SCOPED_TRACE("sequence " + std::to_string(e.sequence) + ", head " + std::to_string(e.head));
    EXPECT_LE(e.out, bound(table_case.spec.dtype));
    EXPECT_LE(e.state, bound(c.args.final_state.dtype));
    EXPECT_LE(e.checkpoint, bound(table_case.spec.mark_dtype));
  }
  for (std::size_t i = 0; i < inputs.size(); ++i)
    EXPECT_EQ(inputs[i]->bytes(), before[i]) << "input " << i;
  if (!table_case.in_place) {
    EXPECT_EQ(c.initial.bytes(), initial_before);
  }
  for (const Array* output : {&c.out, &c.final, &c.marks}) {
    EXPECT_TRUE(!output->defined() || output->gaps_untouched());
  }
}

// Slots that nothing names and rows past the last sequence keep the poison, bit for bit.
TEST_P(CaseTable, WritesNothingElse) {
  const TableCase& table_case = GetParam();
  if (table_case.in_place) return;
  Case c(table_case.spec);
  forward(c.args, plan_forward(c.args), nullptr, nullptr);

  const CaseSpec& spec = table_case.spec;
  const auto untouched = [](const TensorView& view, std::int64_t slot) {
    for (std::int64_t h = 0; h < view.shape[1]; ++h) {
      for (std::int64_t i = 0; i < view.shape[2]; ++i) {
        for (std::int64_t j = 0; j < view.shape[3]; ++j) {
          const auto size = static_cast<std::size_t>(size_of(view.dtype));
          const auto* at = static_cast<const std::byte*>(view.data) +
                           static_cast<std::size_t>(offset_of(view, slot, h, i, j)) * size;
          for (std::size_t b = 0; b < size; ++b) {
            if (at[b] != std::byte{0xFF}) return false;
          }
        }
      }
    }
    return true;
  };
  if (!spec.final_slots.empty()) {
    const std::set<std::int64_t> named(spec.final_slots.begin(), spec.final_slots.end());
    for (std::int64_t slot = 0; slot < c.args.final_state.shape[0]; ++slot) {
      EXPECT_EQ(untouched(c.args.final_state, slot), !named.contains(slot)) << "slot " << slot;
    }
  }
  if (spec.packed && spec.padding > 0) {
    // Seen as [T, HV, V, 1] so that a token is a slot.
    const TensorView& out = c.args.out;
    TensorView rows = out;
    rows.shape = {out.shape[1], out.shape[2], out.shape[3], 1};
    rows.stride = {out.stride[1], out.stride[2], out.stride[3], 1};
    for (std::int64_t t = out.shape[1] - spec.padding; t < out.shape[1]; ++t) {
      EXPECT_TRUE(untouched(rows, t)) << "row " << t;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Json, CaseTable, ::testing::ValuesIn(all_cases()),
                         [](const auto& test) { return test.param.name; });

TEST(CaseTableFile, NamesAreUnique) {
  std::set<std::string> names;
  for (const TableCase& c : all_cases()) EXPECT_TRUE(names.insert(c.name).second) << c.name;
  EXPECT_GE(names.size(), 50U);
}

}  // namespace
}  // namespace flash_kda::testing
