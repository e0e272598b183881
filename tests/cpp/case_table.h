// Reads tests/cases.json, the table of calls that the Python tests read as well. tests/README.md
// explains its keys.
#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_case.h"

namespace flash_kda::testing {

struct TableCase {
  std::string name;
  CaseSpec spec;
  bool in_place = false;  // the final state is the initial state's storage
};

inline void PrintTo(const TableCase& c, std::ostream* out) { *out << c.name; }

namespace internal {

template <class T>
T choice(const nlohmann::json& value, const std::map<std::string, T>& choices) {
  const auto found = choices.find(value.get<std::string>());
  if (found == choices.end()) throw std::invalid_argument("cases.json: " + value.dump());
  return found->second;
}

inline DType dtype_of(const nlohmann::json& value) {
  return choice<DType>(value, {{"bfloat16", DType::kBFloat16},
                               {"float16", DType::kFloat16},
                               {"float32", DType::kFloat32},
                               {"int32", DType::kInt32},
                               {"int64", DType::kInt64}});
}

inline std::optional<DType> optional_dtype_of(const nlohmann::json& value) {
  return value.is_null() ? std::nullopt : std::optional(dtype_of(value));
}

inline TableCase case_of(const nlohmann::json& c) {
  TableCase result{c.at("name"), {}, c.at("in_place")};
  CaseSpec& spec = result.spec;
  spec.lengths = c.at("seq_lens").get<std::vector<std::int64_t>>();
  spec.packed = c.at("packed");
  spec.padding = c.at("padding");
  spec.key_heads = c.at("H");
  spec.value_heads = c.at("HV");
  spec.keys = c.at("K");
  spec.values = c.at("V");
  spec.dtype = dtype_of(c.at("dtype"));
  spec.gate_dtype = dtype_of(c.at("g_dtype"));
  spec.beta_dtype = dtype_of(c.at("beta_dtype"));
  spec.index_dtype = dtype_of(c.at("index_dtype"));
  spec.gate = choice<GateKind>(c.at("gate"), {{"lower_bound", GateKind::kLowerBound},
                                              {"softplus", GateKind::kSoftplus},
                                              {"log_decay", GateKind::kLogDecay}});
  spec.beta = choice<BetaKind>(c.at("beta_kind"), {{"logit", BetaKind::kLogit},
                                                   {"doubled_logit", BetaKind::kDoubledLogit},
                                                   {"probability", BetaKind::kProbability}});
  spec.l2norm = c.at("l2norm");
  spec.lower_bound = c.at("lower_bound");
  if (!c.at("scale").is_null()) spec.scale = c.at("scale").get<double>();
  spec.rate = c.at("A_log");
  spec.bias = c.at("dt_bias");
  spec.initial = optional_dtype_of(c.at("initial_state"));
  spec.final = optional_dtype_of(c.at("final_state"));
  spec.initial_slots = c.at("initial_state_indices").get<std::vector<std::int64_t>>();
  spec.final_slots = c.at("final_state_indices").get<std::vector<std::int64_t>>();
  for (const nlohmann::json& mark : c.at("checkpoints")) {
    spec.marks.push_back({mark.at(0), mark.at(1), mark.at(2)});
  }
  spec.mark_dtype = dtype_of(c.at("checkpoint_dtype"));
  spec.gap = c.at("row_gap");
  spec.beta_pitch = c.at("beta_pitch");
  spec.gate_mean = c.at("g_mean");
  spec.gate_deviation = c.at("g_std");
  spec.seed = c.at("seed");
  return result;
}

}  // namespace internal

inline std::vector<TableCase> read_cases(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot open " + path);
  const nlohmann::json table = nlohmann::json::parse(file);
  std::vector<TableCase> cases;
  for (const nlohmann::json& own : table.at("cases")) {
    nlohmann::json merged = table.at("defaults");
    for (const auto& [key, value] : own.items()) {
      if (key != "name" && !merged.contains(key)) {
        throw std::invalid_argument("cases.json: unknown key " + key);
      }
      merged[key] = value;
    }
    cases.push_back(internal::case_of(merged));
  }
  return cases;
}

}  // namespace flash_kda::testing
