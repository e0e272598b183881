// Remembers plans, so that a call of a known shape does not plan again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "flash_kda/forward.h"

namespace flash_kda::python {

// Everything that a plan depends on: for each array its presence, dtype, device and shape; and all
// options. Strides, pointers and contents are not in it (see ForwardPlan).
class PlanKey {
 public:
  PlanKey(const ForwardArgs& args, const PlanOptions& options);

  std::size_t hash() const { return hash_; }
  bool matches(const std::vector<std::int64_t>& words) const;
  std::vector<std::int64_t> words() const;

 private:
  void add(const TensorView& view);
  void add(std::int64_t word) { words_[count_++] = word; }

  static constexpr std::size_t kArrays = 17;
  static constexpr std::size_t kMostWords = kArrays * (1 + TensorView::kMaxRank) + 8;
  std::array<std::int64_t, kMostWords> words_;  // the first count_ are set
  std::size_t count_ = 0;
  std::size_t hash_ = 0;
};

// A fixed number of places, chosen by hash; a newcomer takes the place. Safe for any number of
// threads.
class PlanCache {
 public:
  // Plans if the key is new. Throws what plan_forward throws; a failure is not remembered.
  std::shared_ptr<const ForwardPlan> get(const ForwardArgs& args, const PlanOptions& options);

 private:
  struct Place {
    std::vector<std::int64_t> key;
    std::shared_ptr<const ForwardPlan> plan;
  };
  static constexpr std::size_t kPlaces = 256;

  std::mutex mutex_;
  std::array<Place, kPlaces> places_;
};

}  // namespace flash_kda::python
