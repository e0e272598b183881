// Exponential, sigmoid, softplus and the gates, each to about one unit of fp32.
#pragma once

#include "cpu/kernels.h"

namespace flash_kda::cpu {
namespace FLASH_KDA_CPU_NAMESPACE {
namespace {

// N vectors, worked on side by side: one exponential is a chain of some 50 cycles, and a core
// cannot look far enough ahead to overlap chains that follow one another.
template <int N>
struct Vecs {
  Vec v[N];
};

// f applied to the n-th vectors of its arguments.
template <int N, class F>
inline Vecs<N> map(const Vecs<N>& a, F f) {
  Vecs<N> r;
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) r.v[i] = f(a.v[i]);
  return r;
}
template <int N, class F>
inline Vecs<N> map(const Vecs<N>& a, const Vecs<N>& b, F f) {
  Vecs<N> r;
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) r.v[i] = f(a.v[i], b.v[i]);
  return r;
}

// exp(0) = 1, exp(-inf) = 0, NaN stays. Subnormal results may be 0, those from e^88 on infinity.
template <int N>
inline Vecs<N> exp(const Vecs<N>& argument) {
  const auto x = map(argument, [](Vec a) { return exp_argument(a); });
  const Vec magic = splat(0x1.8p23F);  // adding it leaves the nearest integer in the low bits
  const auto shifted = map(x, [&](Vec a) { return fma(a, splat(0x1.715476p0F), magic); });
  const auto n = map(shifted, [&](Vec a) { return a - magic; });
  // ln 2 in two parts, the first short enough for n * ln 2 to be exact (Cody and Waite).
  auto r = map(n, x, [](Vec a, Vec b) { return fnma(a, splat(0x1.62e4p-1F), b); });
  r = map(n, r, [](Vec a, Vec b) { return fnma(a, splat(0x1.7f7d1cp-20F), b); });
  // Polynomial of Cephes' expf (S. Moshier).
  auto p = map(r, [](Vec a) { return fma(splat(1.9875691500e-4F), a, splat(1.3981999507e-3F)); });
  for (const float c : {8.3334519073e-3F, 4.1665795894e-2F, 1.6666665459e-1F, 5.0000001201e-1F}) {
    p = map(p, r, [c](Vec a, Vec b) { return fma(a, b, splat(c)); });
  }
  p = map(p, r, [](Vec a, Vec b) { return fma(b * b, a, b) + splat(1); });
  Vecs<N> result;
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) result.v[i] = exp_result(p.v[i], n.v[i], shifted.v[i], x.v[i]);
  return result;
}

// Exactly 0, 1/2, 1 at -inf, 0, inf. Relative error stays small where the result is.
template <int N>
inline Vecs<N> sigmoid(const Vecs<N>& x) {
  const auto e = exp(map(x, [](Vec a) { return splat(0) - a; }));
  return map(e, [](Vec a) { return splat(1) / (splat(1) + a); });
}

// log(1 + y), y in [0, 1], by atanh: 2 (s + s^3/3 + ...), s = y / (2 + y) <= 1/3.
template <int N>
inline Vecs<N> log1p_unit(const Vecs<N>& y) {
  const auto s = map(y, [](Vec a) { return a / (splat(2) + a); });
  const auto z = map(s, [](Vec a) { return a * a; });
  auto p = map(z, [](Vec a) { return fma(splat(2.0F / 17), a, splat(2.0F / 15)); });
  for (const float c : {2.0F / 13, 2.0F / 11, 2.0F / 9, 2.0F / 7, 2.0F / 5, 2.0F / 3}) {
    p = map(p, z, [c](Vec a, Vec b) { return fma(a, b, splat(c)); });
  }
  p = map(p, z, [](Vec a, Vec b) { return a * b; });
  return map(p, s, [](Vec a, Vec b) { return fma(a, b, b + b); });
}

template <int N>
inline Vecs<N> softplus(const Vecs<N>& x) {
  const Vec zero = splat(0);
  const auto minus_size = map(x, [&](Vec a) { return select_less(a, zero, a, zero - a); });
  const auto tail = log1p_unit(exp(minus_size));
  return map(x, tail, [&](Vec a, Vec b) { return select_less(a, zero, zero, a) + b; });
}

template <GateForm F, int N>
inline Vecs<N> log_decay(const Gate& gate, const Vecs<N>& x) {
  if constexpr (F == GateForm::kLowerBound) {
    const auto y = sigmoid(map(x, [&](Vec a) { return splat(gate.rate) * a; }));
    return map(y, [&](Vec a) { return splat(gate.lower_bound) * a; });
  } else if constexpr (F == GateForm::kSoftplus) {
    // Far below zero softplus(x) is exp(x): one exponential of the sum, since exp(x) alone can
    // underflow where exp(A_log) is huge.
    const auto small = exp(map(x, [&](Vec a) { return a + splat(gate.log_rate); }));
    const auto usual = map(softplus(x), [&](Vec a) { return splat(gate.rate) * a; });
    Vecs<N> g;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      g.v[i] = splat(0) - select_less(x.v[i], splat(-17), small.v[i], usual.v[i]);
    }
    return g;
  } else {
    return x;
  }
}

}  // namespace
}  // namespace FLASH_KDA_CPU_NAMESPACE
}  // namespace flash_kda::cpu
