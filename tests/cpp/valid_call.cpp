#include "valid_call.h"

#include <cstddef>
#include <functional>
#include <vector>

#include "flash_kda/flash_kda.h"
#include "recurrence.h"

namespace flash_kda::testing {

CaseSpec valid_spec() {
  CaseSpec spec;
  spec.lengths = {70, 0, 130};
  spec.padding = 3;
  spec.key_heads = 2;
  spec.value_heads = 4;
  spec.keys = 16;
  spec.values = 8;
  spec.initial_slots = {4, -1, 2};
  spec.final_slots = {0, 5, -1};
  spec.final = DType::kBFloat16;
  spec.marks = {{0, 64, 1}, {2, 128, 0}, {0, 0, -1}};
  return spec;
}

void expect_good(Case& c, const ForwardArgs& args) {
  c.poison();
  forward(args, plan_forward(args), nullptr, nullptr);
  for (const HeadError& e : head_errors(args, recurrence(args))) {
    EXPECT_LE(e.out, 2.5e-3) << "sequence " << e.sequence << ", head " << e.head;
    EXPECT_LE(e.state, 2.5e-3) << "sequence " << e.sequence << ", head " << e.head;
    EXPECT_LE(e.checkpoint, 2e-5) << "sequence " << e.sequence << ", head " << e.head;
  }
}

void expect_value_error(const WrongCall& wrong) {
  Case good(valid_spec());
  const ForwardArgs good_args = good.args;
  const ForwardPlan plan = plan_forward(good_args);
  Case c(valid_spec());
  c.poison();
  const std::vector<std::byte> out_before = c.out.bytes();
  wrong.spoil(c);
  const auto expect_message = [&](const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "no exception";
    } catch (const ValueError& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.rfind(std::string(wrong.argument) + ": expected ", 0), 0U) << text;
      EXPECT_NE(text.find(wrong.says), std::string::npos) << text;
      EXPECT_NE(text.find(", got "), std::string::npos) << text;
    }
  };
  expect_message([&] { plan_forward(c.args); });
  expect_message([&] { forward(c.args, plan, nullptr, nullptr); });
  EXPECT_EQ(c.out.bytes(), out_before);
  expect_good(good, good_args);
}

}  // namespace flash_kda::testing
