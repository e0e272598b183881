// Exponential, sigmoid, softplus and the gates, each to about one unit of fp32.

namespace flash_kda::cpu {
namespace FLASH_KDA_CPU_NAMESPACE {
namespace {

// exp(0) = 1, exp(-inf) = 0, NaN stays. Subnormal results may be 0, those from e^88 on infinity.
inline Vec exp(Vec argument) {
  const Vec x = exp_argument(argument);
  const Vec magic = splat(0x1.8p23F);  // adding it leaves the nearest integer in the low bits
  const Vec shifted = fma(x, splat(0x1.715476p0F), magic);
  const Vec n = shifted - magic;
  // ln 2 in two parts, the first short enough for n * ln 2 to be exact (Cody and Waite).
  Vec r = fnma(n, splat(0x1.62e4p-1F), x);
  r = fnma(n, splat(0x1.7f7d1cp-20F), r);
  // Polynomial of Cephes' expf (S. Moshier).
  Vec p = splat(1.9875691500e-4F);
  p = fma(p, r, splat(1.3981999507e-3F));
  p = fma(p, r, splat(8.3334519073e-3F));
  p = fma(p, r, splat(4.1665795894e-2F));
  p = fma(p, r, splat(1.6666665459e-1F));
  p = fma(p, r, splat(5.0000001201e-1F));
  p = fma(r * r, p, r) + splat(1);
  return exp_result(p, n, shifted, x);
}

// Exactly 0, 1/2, 1 at -inf, 0, inf. Relative error stays small where the result is.
inline Vec sigmoid(Vec x) { return splat(1) / (splat(1) + exp(splat(0) - x)); }

// log(1 + y), y in [0, 1], by atanh: 2 (s + s^3/3 + ...), s = y / (2 + y) <= 1/3.
inline Vec log1p_unit(Vec y) {
  const Vec s = y / (splat(2) + y);
  const Vec z = s * s;
  Vec p = splat(2.0F / 17);
  p = fma(p, z, splat(2.0F / 15));
  p = fma(p, z, splat(2.0F / 13));
  p = fma(p, z, splat(2.0F / 11));
  p = fma(p, z, splat(2.0F / 9));
  p = fma(p, z, splat(2.0F / 7));
  p = fma(p, z, splat(2.0F / 5));
  p = fma(p, z, splat(2.0F / 3));
  return fma(s * z, p, s + s);
}

inline Vec softplus(Vec x) {
  const Vec zero = splat(0);
  const Vec positive = select_less(x, zero, zero, x);  // NaN stays
  const Vec magnitude = select_less(x, zero, zero - x, x);
  return positive + log1p_unit(exp(zero - magnitude));
}

template <GateForm F>
Vec log_decay(const Gate& gate, Vec x) {
  if constexpr (F == GateForm::kLowerBound) {
    return splat(gate.lower_bound) * sigmoid(splat(gate.rate) * x);
  } else if constexpr (F == GateForm::kSoftplus) {
    // Far below zero softplus(x) is exp(x): one exponential of the sum, since exp(x) alone can underflow where
    // exp(A_log) is huge.
    const Vec small = exp(x + splat(gate.log_rate));
    const Vec usual = splat(gate.rate) * softplus(x);
    return splat(0) - select_less(x, splat(-17), small, usual);
  } else {
    return x;
  }
}

}  // namespace
}  // namespace FLASH_KDA_CPU_NAMESPACE
}  // namespace flash_kda::cpu
