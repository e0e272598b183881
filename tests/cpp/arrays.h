// Owned, strided, poisoned arrays for tests, with element access as double.
//
// Conversions are written here a second time on purpose: tests must not lean on the library's own.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "flash_kda/tensor.h"

namespace flash_kda::testing {

using Dims = std::vector<std::int64_t>;

// Nearest, ties to even; NaN stays NaN; too large becomes infinity.
inline std::uint16_t to_bf16_bits(float x) {
  auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  bits += 0x7FFFU + ((bits >> 16) & 1U);
  return static_cast<std::uint16_t>(bits >> 16);
}

inline float from_bf16_bits(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline std::uint16_t to_fp16_bits(float x) {
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return sign | 0x7E00;
  const double magnitude = std::fabs(static_cast<double>(x));
  if (magnitude >= 65520.0) return sign | 0x7C00;
  // One unit is 2^(e-10) for a normal number of exponent e, never less than 2^-24.
  const int exponent = magnitude == 0 ? -14 : std::max(std::ilogb(magnitude), -14);
  const double units = std::nearbyint(std::ldexp(magnitude, 10 - exponent));  // ties to even
  const auto bits =
      static_cast<std::int64_t>(units) + (static_cast<std::int64_t>(exponent + 14) << 10);
  return static_cast<std::uint16_t>(sign | bits);
}

inline float from_fp16_bits(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  double value = 0;
  if (exponent == 31) {
    value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, -24);
  } else {
    value = std::ldexp(1024 + mantissa, exponent - 25);
  }
  return static_cast<float>((bits & 0x8000) != 0 ? -value : value);
}

inline double load(const TensorView& view, std::int64_t offset) {
  const auto at = [&]<class T>(T* /*tag*/) {
    T value;
    std::memcpy(&value, static_cast<const T*>(view.data) + offset, sizeof(T));
    return value;
  };
  switch (view.dtype) {
    case DType::kBFloat16:
      return from_bf16_bits(at(static_cast<std::uint16_t*>(nullptr)));
    case DType::kFloat16:
      return from_fp16_bits(at(static_cast<std::uint16_t*>(nullptr)));
    case DType::kFloat32:
      return at(static_cast<float*>(nullptr));
    case DType::kFloat64:
      return at(static_cast<double*>(nullptr));
    case DType::kInt32:
      return at(static_cast<std::int32_t*>(nullptr));
    case DType::kInt64:
      return static_cast<double>(at(static_cast<std::int64_t*>(nullptr)));
    case DType::kOther:
      break;
  }
  throw std::invalid_argument("load: dtype");
}

inline void store(const TensorView& view, std::int64_t offset, double x) {
  const auto put = [&]<class T>(T value) {
    std::memcpy(static_cast<T*>(view.data) + offset, &value, sizeof(T));
  };
  switch (view.dtype) {
    case DType::kBFloat16:
      return put(to_bf16_bits(static_cast<float>(x)));
    case DType::kFloat16:
      return put(to_fp16_bits(static_cast<float>(x)));
    case DType::kFloat32:
      return put(static_cast<float>(x));
    case DType::kFloat64:
      return put(x);
    case DType::kInt32:
      return put(static_cast<std::int32_t>(x));
    case DType::kInt64:
      return put(static_cast<std::int64_t>(x));
    case DType::kOther:
      break;
  }
  throw std::invalid_argument("store: dtype");
}

// Element offset of an index; the number of indices is the view's rank.
template <class... I>
std::int64_t offset_of(const TensorView& view, I... index) {
  if (static_cast<int>(sizeof...(I)) != view.rank) throw std::invalid_argument("offset_of: rank");
  std::int64_t offset = 0;
  int axis = 0;
  ((offset += static_cast<std::int64_t>(index) * view.stride[static_cast<std::size_t>(axis++)]),
   ...);
  return offset;
}

template <class... I>
double at(const TensorView& view, I... index) {
  return load(view, offset_of(view, index...));
}

// Calls f(offset) for every element of the view, in row-major order of its index.
template <class F>
void for_each_offset(const TensorView& view, F&& f) {
  std::vector<std::int64_t> index(static_cast<std::size_t>(view.rank), 0);
  for (std::int64_t left = view.numel(); left > 0; --left) {
    std::int64_t offset = 0;
    for (std::size_t a = 0; a < index.size(); ++a) offset += index[a] * view.stride[a];
    f(offset);
    for (std::size_t a = index.size(); a-- > 0;) {
      if (++index[a] < view.shape[a]) break;
      index[a] = 0;
    }
  }
}

// Owns the storage of one view. Every byte starts as 0xFF: NaN in every float dtype, -1 in the
// integers.
class Array {
 public:
  Array() = default;
  Array(DType dtype, const Dims& shape) : Array(dtype, shape, row_major(shape)) {}
  // `stride` in elements, all >= 0; `offset` elements precede the view in its storage.
  Array(DType dtype, const Dims& shape, const Dims& stride, std::int64_t offset = 0) {
    view_.dtype = dtype;
    view_.rank = static_cast<std::int32_t>(shape.size());
    std::int64_t last = 0;
    bool empty = false;
    for (std::size_t a = 0; a < shape.size(); ++a) {
      view_.shape[a] = shape[a];
      view_.stride[a] = stride[a];
      empty = empty || shape[a] == 0;
      last += (shape[a] - 1) * stride[a];
    }
    const std::int64_t elements = offset + (empty ? 0 : last + 1);
    bytes_ = static_cast<std::size_t>(elements * size_of(dtype));
    const std::size_t allocated = (bytes_ / kAlign + 1) * kAlign;
    storage_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlign, allocated)));
    std::memset(storage_.get(), 0xFF, allocated);
    view_.data = storage_.get() + offset * size_of(dtype);
  }

  static Array ints(DType dtype, const std::vector<std::int64_t>& values) {
    Array array(dtype, {static_cast<std::int64_t>(values.size())});
    for (std::size_t i = 0; i < values.size(); ++i) {
      store(array.view_, static_cast<std::int64_t>(i), static_cast<double>(values[i]));
    }
    return array;
  }

  static Dims row_major(const Dims& shape) {
    Dims stride(shape.size(), 1);
    for (std::size_t a = shape.size(); a-- > 1;) stride[a - 1] = stride[a] * shape[a];
    return stride;
  }

  // Undefined when default-constructed.
  const TensorView& view() const { return view_; }
  bool defined() const { return view_.defined(); }

  template <class... I>
  double get(I... index) const {
    return at(view_, index...);
  }
  template <class... I>
  void set(double x, I... index) {
    store(view_, offset_of(view_, index...), x);
  }

  // f() gives the next element, in row-major order of the index.
  template <class F>
  void generate(F&& f) {
    for_each_offset(view_, [&](std::int64_t offset) { store(view_, offset, f()); });
  }
  void fill(double x) {
    generate([x] { return x; });
  }
  void poison() { std::memset(storage_.get(), 0xFF, bytes_); }

  // The elements in row-major order of the index.
  std::vector<double> values() const {
    std::vector<double> out;
    if (defined()) for_each_offset(view_, [&](std::int64_t o) { out.push_back(load(view_, o)); });
    return out;
  }
  // The whole storage, gaps between rows included: for "unchanged, bit for bit".
  std::vector<std::byte> bytes() const {
    return {storage_.get(), storage_.get() + (defined() ? bytes_ : 0)};
  }
  // True if every byte that belongs to no element still holds the first poison.
  bool gaps_untouched() const {
    std::vector<bool> used(bytes_, false);
    const auto size = static_cast<std::size_t>(size_of(view_.dtype));
    const auto base =
        static_cast<std::size_t>(static_cast<std::byte*>(view_.data) - storage_.get());
    for_each_offset(view_, [&](std::int64_t offset) {
      for (std::size_t b = 0; b < size; ++b)
        used[base + static_cast<std::size_t>(offset) * size + b] = true;
    });
    for (std::size_t b = 0; b < bytes_; ++b) {
      if (!used[b] && storage_[b] != std::byte{0xFF}) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kAlign = 64;
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }  // NOLINT: pairs with aligned_alloc
  };
  std::unique_ptr<std::byte[], Free> storage_;  // NOLINT: over-aligned
  std::size_t bytes_ = 0;
  TensorView view_;
};

// splitmix64 (Steele, Lea, Flood 2014); tests/README.md says how values are drawn from it.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits() {
    state_ += 0x9E3779B97F4A7C15ULL;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }
  // In [0, 1), 53 bits.
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  // Standard normal, Box-Muller, two draws a value.
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return radius * std::cos(6.283185307179586476925 * uniform());
  }
  double normal(double mean, double deviation) { return mean + deviation * normal(); }

 private:
  std::uint64_t state_;
};

}  // namespace flash_kda::testing
