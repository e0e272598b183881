#include "memory_overlap.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <utility>

namespace flash_kda {
namespace {

using Wide = __int128;  // products of two 64-bit numbers

// Addresses [first, last] in bytes.
struct Range {
  Wide first = 0;
  Wide last = -1;
};

Range range_of(const TensorView& view) {
  const auto base = static_cast<Wide>(reinterpret_cast<std::uintptr_t>(view.data));
  Range range{base, base + size_of(view.dtype) - 1};
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.shape[axis] == 0) return {};
    const Wide reach =
        static_cast<Wide>(view.shape[axis] - 1) * view.stride[axis] * size_of(view.dtype);
    (reach < 0 ? range.first : range.last) += reach;
  }
  return range;
}

// sum(step * x) over 0 <= x <= bound.
struct Term {
  std::int64_t step = 0;
  std::int64_t bound = 0;
};

// Largest step first. Insertion, as there are few terms.
void sort_down(std::span<Term> terms) {
  for (std::size_t i = 1; i < terms.size(); ++i) {
    for (std::size_t j = i; j > 0 && terms[j - 1].step < terms[j].step; --j) {
      std::swap(terms[j - 1], terms[j]);
    }
  }
}

// The dimensions of two views, and the bytes of an element of each.
constexpr std::size_t kMaxTerms = 2 * static_cast<std::size_t>(TensorView::kMaxRank + 1);

// A bounded linear Diophantine equation: is there x with sum(step_i * x_i) == target, 0 <= x_i <=
// bound_i?
class Equation {
 public:
  void add(std::int64_t step, std::int64_t bound) {
    if (step == 0 || bound == 0) return;
    for (std::size_t i = 0; i < size_; ++i) {
      if (terms_[i].step == step) {  // the common case: both views step through the same rows
        terms_[i].bound += bound;
        return;
      }
    }
    terms_[size_++] = {step, bound};
  }

  bool solvable(Wide target) {
    sort_down({terms_.data(), size_});
    Wide reach = 0;
    std::int64_t divisor = 0;
    for (std::size_t i = size_; i-- > 0;) {
      reach += static_cast<Wide>(terms_[i].step) * terms_[i].bound;
      divisor = std::gcd(divisor, terms_[i].step);
      reach_[i] = reach;
      divisor_[i] = divisor;
    }
    return search(0, target);
  }

 private:
  // Largest step first: what the smaller ones can reach leaves few values of x, one or two in a
  // nested layout.
  bool search(std::size_t i, Wide target) {
    if (target == 0 || ++steps_ > kMaxSteps) return true;
    if (i == size_ || target < 0 || target > reach_[i] || target % divisor_[i] != 0) return false;
    const Term term = terms_[i];
    const Wide rest = i + 1 < size_ ? reach_[i + 1] : 0;
    const Wide most = std::min<Wide>(term.bound, target / term.step);
    const Wide least = target > rest ? (target - rest + term.step - 1) / term.step : 0;
    for (Wide x = most; x >= least; --x) {
      if (search(i + 1, target - x * term.step)) return true;
    }
    return false;
  }

  static constexpr int kMaxSteps = 100'000;

  std::array<Term, kMaxTerms> terms_{};
  std::array<Wide, kMaxTerms> reach_{};
  std::array<std::int64_t, kMaxTerms> divisor_{};
  std::size_t size_ = 0;
  int steps_ = 0;
};

}  // namespace

bool addressable(const TensorView& view) {
  constexpr Wide kMax = std::numeric_limits<std::int64_t>::max();
  Wide elements = 1;
  Wide reach = 0;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    const std::int64_t extent = view.shape[axis];
    if (extent == 0) return true;
    const Wide step = (extent - 1) * static_cast<Wide>(view.stride[axis]);
    elements *= extent;
    reach += step < 0 ? -step : step;
    if (elements > kMax || reach > kMax) return false;
  }
  const Range range = range_of(view);
  return elements * size_of(view.dtype) <= kMax && range.last - range.first < kMax &&
         range.first >= 0 &&
         range.last <= static_cast<Wide>(std::numeric_limits<std::uintptr_t>::max());
}

bool distinct_elements(const TensorView& view) {
  std::array<Term, TensorView::kMaxRank> dims{};
  std::size_t size = 0;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.shape[axis] == 0) return true;
    if (view.shape[axis] > 1) {
      dims[size++] = {std::abs(view.stride[axis]), view.shape[axis] - 1};
    }
  }
  sort_down({dims.data(), size});
  Wide inner = 0;  // the largest offset that the smaller strides reach
  for (std::size_t i = size; i-- > 0;) {
    if (dims[i].step <= inner) return false;
    inner += static_cast<Wide>(dims[i].step) * dims[i].bound;
  }
  return true;
}

bool overlap(const TensorView& a, const TensorView& b) {
  const Range ra = range_of(a);
  const Range rb = range_of(b);
  if (ra.last < ra.first || rb.last < rb.first) return false;
  if (ra.last < rb.first || rb.last < ra.first) return false;
  // a.first + (offset in a) + (byte in a) == b.first + (offset in b) + (byte in b). With every step
  // made positive and b's offsets counted down from b's end, all terms stand on one side:
  //   sum over a and over b of step * x == b.last - a.first.
  Equation equation;
  for (const TensorView* view : {&a, &b}) {
    const std::int64_t size = size_of(view->dtype);
    for (std::size_t axis = 0; axis < static_cast<std::size_t>(view->rank); ++axis) {
      if (view->shape[axis] > 1) {
        equation.add(std::abs(view->stride[axis]) * size, view->shape[axis] - 1);
      }
    }
    equation.add(1, size - 1);
  }
  return equation.solvable(rb.last - ra.first);
}

bool same_layout(const TensorView& a, const TensorView& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.device != b.device || a.rank != b.rank)
    return false;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(a.rank); ++axis) {
    if (axis > 0 && a.shape[axis] != b.shape[axis]) return false;
    const bool matters = a.shape[axis] > 1 && b.shape[axis] > 1;
    if (matters && a.stride[axis] != b.stride[axis]) return false;
  }
  return true;
}

}  // namespace flash_kda
