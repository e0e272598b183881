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
  const std::int64_t size = size_of(view.dtype);
  std::int64_t bytes = size;  // of all elements, were they dense
  std::int64_t below = 0;     // bytes from the first element down and up to the others
  std::int64_t above = size - 1;
  bool overflow = false;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    const std::int64_t extent = view.shape[axis];
    if (extent == 0) return true;
    std::int64_t reach = 0;
    overflow |= __builtin_mul_overflow(bytes, extent, &bytes);
    overflow |= __builtin_mul_overflow(extent - 1, view.stride[axis], &reach);
    overflow |= __builtin_mul_overflow(reach, size, &reach);
    std::int64_t& side = reach < 0 ? below : above;
    overflow |= __builtin_add_overflow(side, reach, &side);
  }
  std::int64_t span = 0;
  overflow |= __builtin_sub_overflow(above, below, &span);
  const auto base = reinterpret_cast<std::uintptr_t>(view.data);
  const std::uintptr_t room_above = std::numeric_limits<std::uintptr_t>::max() - base;
  return !overflow && static_cast<std::uintptr_t>(above) <= room_above &&
         std::uintptr_t{0} - static_cast<std::uintptr_t>(below) <= base;
}

ByteRange byte_range(const TensorView& view) {
  const std::int64_t size = size_of(view.dtype);
  ByteRange range;
  range.first = reinterpret_cast<std::uintptr_t>(view.data);
  range.last = range.first + static_cast<std::uintptr_t>(size - 1);
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    if (view.shape[axis] == 0) return {};
    if (view.shape[axis] == 1) continue;
    const std::int64_t reach = (view.shape[axis] - 1) * view.stride[axis] * size;
    (reach < 0 ? range.first : range.last) += static_cast<std::uintptr_t>(reach);
  }
  return range;
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
  const ByteRange ra = byte_range(a);
  const ByteRange rb = byte_range(b);
  if (!ra.meets(rb)) return false;
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
  return equation.solvable(static_cast<Wide>(rb.last) - static_cast<Wide>(ra.first));
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
