// A small call that uses every argument at once, for tests that spoil one thing at a time.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "cpu_case.h"

namespace flash_kda::testing {

// B = 1, T = 203 (3 rows of padding), sequences of 70, 0, 130; H = 2, HV = 4, K = 16, V = 8; pools
// of 5 and 6 slots.
CaseSpec valid_spec();

// The call still works: poisons the outputs, runs and compares with the recurrence.
void expect_good(Case& c, const ForwardArgs& args);

// One wrong call: what is spoilt, and what the message must say. Plain pointers: there are many,
// and they compile fast.
struct WrongCall {
  const char* name;      // of the test
  const char* argument;  // that the message names first
  const char* says;      // text that it contains
  void (*spoil)(Case&);  // changes Case::args or the arrays behind them
};

inline void PrintTo(const WrongCall& wrong, std::ostream* out) { *out << wrong.name; }

// Runs one wrong call through plan_forward and through forward with the good call's plan, then the
// good call again.
void expect_value_error(const WrongCall& wrong);

inline std::string test_name(const ::testing::TestParamInfo<WrongCall>& test) {
  return test.param.name;
}

}  // namespace flash_kda::testing
