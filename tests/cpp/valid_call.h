// A small call that uses every argument at once, for tests that spoil one thing at a time.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>

#include "cpu_case.h"
#include "flash_kda/flash_kda.h"
#include "recurrence.h"

namespace flash_kda::testing {

// B = 1, T = 203 (3 rows of padding), sequences of 70, 0, 130; H = 2, HV = 4, K = 16, V = 8; pools
// of 5 and 6 slots.
inline CaseSpec valid_spec() {
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

// The call still works: poisons the outputs, runs and compares with the recurrence.
inline void expect_good(Case& c, const ForwardArgs& args) {
  c.poison();
  forward(args, plan_forward(args), nullptr, nullptr);
  for (const HeadError& e : head_errors(args, recurrence(args))) {
    EXPECT_LE(e.out, 2.5e-3) << "sequence " << e.sequence << ", head " << e.head;
    EXPECT_LE(e.state, 2.5e-3) << "sequence " << e.sequence << ", head " << e.head;
    EXPECT_LE(e.checkpoint, 2e-5) << "sequence " << e.sequence << ", head " << e.head;
  }
}

// One wrong call: what is spoilt, and what the message must say.
struct WrongCall {
  std::string name;                  // of the test
  std::string argument;              // that the message names first
  std::string says;                  // text that it contains
  std::function<void(Case&)> spoil;  // changes Case::args or the arrays behind them
};

inline void PrintTo(const WrongCall& wrong, std::ostream* out) { *out << wrong.name; }

// Runs one wrong call through plan_forward and through forward with the good call's plan, then the
// good call again.
inline void expect_value_error(const WrongCall& wrong) {
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
      EXPECT_EQ(text.rfind(wrong.argument + ": expected ", 0), 0U) << text;
      EXPECT_NE(text.find(wrong.says), std::string::npos) << text;
      EXPECT_NE(text.find(", got "), std::string::npos) << text;
    }
  };
  expect_message([&] { plan_forward(c.args); });
  expect_message([&] { forward(c.args, plan, nullptr, nullptr); });
  EXPECT_EQ(c.out.bytes(), out_before);
  expect_good(good, good_args);
}

inline std::string test_name(const ::testing::TestParamInfo<WrongCall>& info) {
  return info.param.name;
}

}  // namespace flash_kda::testing
