// Which memory do strided views touch? Pure address arithmetic; no memory is read.
#pragma once

#include <cstdint>

#include "flash_kda/tensor.h"

namespace flash_kda {

// The bytes from the first to the last that belong to elements of a view, gaps included. Empty:
// last < first.
struct ByteRange {
  std::uintptr_t first = 1;
  std::uintptr_t last = 0;

  bool meets(const ByteRange& other) const {
    return first <= last && other.first <= other.last && first <= other.last && other.first <= last;
  }
};

// True if the bytes from the first to the last element of the view have 64-bit addresses and sizes.
// The functions below require it, and non-negative extents.
bool addressable(const TensorView& view);

ByteRange byte_range(const TensorView& view);

// True if every element has memory of its own. False for a zero stride on a dimension of size > 1;
// false as well for a layout that no slicing or permuting of a dense array gives and that is not
// nested (windows that overlap).
bool distinct_elements(const TensorView& view);

// True if some byte belongs to an element of both views. Column blocks of one matrix whose address
// ranges interleave do not overlap. Exact, but for contrived strides whose search is cut short;
// then true.
bool overlap(const TensorView& a, const TensorView& b);

// True if an element has the same address in both views wherever both have that index: equal
// pointer, dtype, device and rank, equal extents but for the first, equal strides where an extent
// exceeds 1.
bool same_layout(const TensorView& a, const TensorView& b);

}  // namespace flash_kda
