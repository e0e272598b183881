// Rows of any element type to and from fp32. Nothing past a row's end is read or written.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels.h"

namespace flash_kda::cpu {
namespace FLASH_KDA_CPU_NAMESPACE {
namespace {

inline constexpr int kTileVecs = 2;
// Columns of the state that are worked on together.
inline constexpr int kPanel = kTileVecs * kWidth;

constexpr int round_up(int n, int step) { return (n + step - 1) / step * step; }

constexpr int bytes_of(Element element) { return element == Element::kFloat32 ? 4 : 2; }

template <Element E>
Vec load_elements(const std::byte* p) {
  if constexpr (E == Element::kBFloat16) return load_bf16(p);
  if constexpr (E == Element::kFloat16) return load_fp16(p);
  return load(reinterpret_cast<const float*>(p));
}

template <Element E>
void store_elements(std::byte* p, Vec x) {
  if constexpr (E == Element::kBFloat16) return store_bf16(p, x);
  if constexpr (E == Element::kFloat16) return store_fp16(p, x);
  return store(reinterpret_cast<float*>(p), x);
}

// n <= kWidth elements, then zeros.
template <Element E>
Vec load_part(const std::byte* p, int n) {
  if (n == kWidth) return load_elements<E>(p);
  alignas(64) std::byte buffer[sizeof(Vec)] = {};
  __builtin_memcpy(buffer, p, static_cast<std::size_t>(n * bytes_of(E)));
  return load_elements<E>(buffer);
}

template <Element E>
void store_part(std::byte* p, int n, Vec x) {
  if (n == kWidth) return store_elements<E>(p, x);
  alignas(64) std::byte buffer[sizeof(Vec)];
  store_elements<E>(buffer, x);
  __builtin_memcpy(p, buffer, static_cast<std::size_t>(n * bytes_of(E)));
}

// Calls f with the element type as a compile-time constant.
template <class F>
void with_element(Element element, F&& f) {
  switch (element) {
    case Element::kBFloat16:
      return f.template operator()<Element::kBFloat16>();
    case Element::kFloat16:
      return f.template operator()<Element::kFloat16>();
    case Element::kFloat32:
      return f.template operator()<Element::kFloat32>();
  }
}

// The loops are functions of their own: through a lambda's captures the compiler would load every
// variable anew after each store.
template <Element E>
void load_rows_of(const std::byte* row, std::int64_t stride, int count, int n, float* to,
                  int pitch) {
  for (int r = 0; r < count; ++r, row += stride, to += pitch) {
    int i = 0;
    for (; i + kWidth <= n; i += kWidth) store(to + i, load_elements<E>(row + i * bytes_of(E)));
    if (i < n) {
      store(to + i, load_part<E>(row + i * bytes_of(E), n - i));
      i += kWidth;
    }
    for (; i < pitch; i += kWidth) store(to + i, splat(0));
  }
}

template <Element E>
void store_rows_of(std::byte* row, std::int64_t stride, int count, int n, const float* from,
                   int pitch) {
  for (int r = 0; r < count; ++r, row += stride, from += pitch) {
    for (int i = 0; i < n; i += kWidth) {
      store_part<E>(row + i * bytes_of(E), n - i < kWidth ? n - i : kWidth, load(from + i));
    }
  }
}

// `count` rows from row `first` on, n elements each, into to[count][pitch]; zeros up to the pitch.
void load_rows(const InputRows& rows, std::int64_t first, int count, int n, float* to, int pitch) {
  with_element(rows.element, [&]<Element E>() {
    load_rows_of<E>(rows.data + first * rows.stride, rows.stride, count, n, to, pitch);
  });
}

// The state is kept as panels [panel][K, padded][kPanel]: a column of S^T in each lane, so that
// columns never meet. `tile`: room for kWidth rows of `pitch` floats.
void load_state(const InputRows& from, int keys, int columns, int pitch, float* tile,
                float* state) {
  for (int first = 0; first < round_up(columns, kPanel); first += kWidth) {
    const int valid = columns - first < kWidth ? columns - first : kWidth;
    const bool any = from.data != nullptr && valid > 0;
    if (any) load_rows(from, first, valid, keys, tile, pitch);
    for (int i = (any ? valid : 0) * pitch; i < kWidth * pitch; i += kWidth)
      store(tile + i, splat(0));
    float* to = state + first / kPanel * kPanel * pitch + first % kPanel;
    for (int k = 0; k < pitch; k += kWidth) transpose(tile + k, pitch, to + k * kPanel, kPanel);
  }
}

void store_state(const OutputRows& to, std::int64_t offset, int keys, int columns, int pitch,
                 float* tile, const float* state) {
  for (int first = 0; first < columns; first += kWidth) {
    const int valid = columns - first < kWidth ? columns - first : kWidth;
    const float* from = state + first / kPanel * kPanel * pitch + first % kPanel;
    for (int k = 0; k < pitch; k += kWidth) transpose(from + k * kPanel, kPanel, tile + k, pitch);
    with_element(to.element, [&]<Element E>() {
      std::byte* row = to.data + offset + first * to.stride;
      store_rows_of<E>(row, to.stride, valid, keys, tile, pitch);
    });
  }
}

}  // namespace
}  // namespace FLASH_KDA_CPU_NAMESPACE
}  // namespace flash_kda::cpu
