// Plain token-by-token form; to be replaced by the chunked one.
#include <cmath>
#include <cstring>

#include "constants.h"
#include "cpu/kernels.h"

namespace flash_kda::cpu {
namespace FLASH_KDA_CPU_NAMESPACE {
namespace {

float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000U) << 16;
  const std::uint32_t exponent = (h >> 10) & 31U;
  const std::uint32_t mantissa = h & 1023U;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t bits = exponent == 31 ? sign | 0x7F800000U | mantissa << 13
                                            : sign | (exponent + 112) << 23 | mantissa << 13;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

std::uint16_t float_to_half(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const std::uint32_t sign = bits >> 16 & 0x8000U;
  bits &= 0x7FFFFFFFU;
  if (bits > 0x7F800000U) return static_cast<std::uint16_t>(sign | 0x7E00U | (bits >> 13 & 0x3FFU));
  if (bits >= 0x47800000U) return static_cast<std::uint16_t>(sign | 0x7C00U);
  if (bits < 0x38800000U) {  // subnormal: let the fp32 adder round
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5F;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<std::uint16_t>(sign | (bits - 0x3F000000U));
  }
  bits += 0xFFFU + (bits >> 13 & 1U) - 0x38000000U;
  return static_cast<std::uint16_t>(sign | bits >> 13);
}

float load(const std::byte* p, Element e, int i) {
  if (e == Element::kFloat32) {
    float x;
    std::memcpy(&x, p + 4 * i, 4);
    return x;
  }
  std::uint16_t h;
  std::memcpy(&h, p + 2 * i, 2);
  if (e == Element::kFloat16) return half_to_float(h);
  const std::uint32_t bits = static_cast<std::uint32_t>(h) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

void store(std::byte* p, Element e, int i, float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (e == Element::kFloat32) {
    std::memcpy(p + 4 * i, &bits, 4);
    return;
  }
  std::uint16_t h;
  if (e == Element::kFloat16) {
    h = float_to_half(x);
  } else if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
    h = static_cast<std::uint16_t>(bits >> 16);
    if ((h & 0x7FU) == 0) h |= 0x40U;  // a NaN must not become an infinity
  } else {
    h = static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
  }
  std::memcpy(p + 2 * i, &h, 2);
}

float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

float log_decay(const Gate& gate, float x) {
  switch (gate.form) {
    case GateForm::kLowerBound:
      return gate.lower_bound * sigmoid(gate.rate * x);
    case GateForm::kSoftplus:
      if (x < -17.0F) return -std::exp(x + gate.log_rate);
      return -gate.rate * ((x > 0 ? x : 0.0F) + std::log1p(std::exp(x > 0 ? -x : x)));
    case GateForm::kLogDecay:
      break;
  }
  return x;
}

void load_row(const InputRows& rows, std::int64_t t, int n, bool l2norm, float* to) {
  float sum = 0;
  for (int i = 0; i < n; ++i) {
    to[i] = load(rows.data + t * rows.stride, rows.element, i);
    sum += to[i] * to[i];
  }
  if (!l2norm) return;
  const float inverse = 1.0F / std::sqrt(sum + kL2NormEpsilon);
  for (int i = 0; i < n; ++i) to[i] *= inverse;
}

void store_state(const OutputRows& to, std::int64_t offset, const float* state, int keys, int columns) {
  for (int c = 0; c < columns; ++c) {
    for (int k = 0; k < keys; ++k) {
      store(to.data + offset + c * to.stride, to.element, k, state[k * columns + c]);
    }
  }
}

void run(const HeadTask& task, std::byte* scratch) {
  const int keys = task.key_dim;
  const int columns = task.columns;
  float* state = reinterpret_cast<float*>(scratch);  // [K, columns]
  float* u = state + static_cast<std::int64_t>(keys) * columns;
  float* o = u + columns;
  float* q = o + columns;
  float* k = q + keys;
  float* d = k + keys;
  for (int c = 0; c < columns; ++c) {
    for (int i = 0; i < keys; ++i) {
      const InputRows& from = task.initial_state;
      state[i * columns + c] = from.data ? load(from.data + c * from.stride, from.element, i) : 0.0F;
    }
  }
  std::int64_t next = 0;
  for (std::int64_t t = 0;; ++t) {
    for (; next < task.checkpoint_count && task.checkpoints[next].position == t; ++next) {
      store_state(task.checkpoint, task.checkpoints[next].offset, state, keys, columns);
    }
    if (t == task.tokens) break;
    load_row(task.q, t, keys, task.l2norm, q);
    load_row(task.k, t, keys, task.l2norm, k);
    load_row(task.g, t, keys, false, d);
    for (int i = 0; i < keys; ++i) {
      const float x = task.gate.bias ? d[i] + task.gate.bias[i] : d[i];
      d[i] = std::exp(log_decay(task.gate, x));
    }
    float beta = load(task.beta.data + t * task.beta.stride, task.beta.element, 0);
    if (task.strength.logit) beta = task.strength.multiplier * sigmoid(beta);
    for (int c = 0; c < columns; ++c) u[c] = o[c] = 0;
    for (int i = 0; i < keys; ++i) {
      float* s = state + i * columns;
      for (int c = 0; c < columns; ++c) {
        s[c] *= d[i];
        u[c] += s[c] * k[i];
      }
    }
    for (int c = 0; c < columns; ++c) {
      u[c] = beta * (load(task.v.data + t * task.v.stride, task.v.element, c) - u[c]);
    }
    for (int i = 0; i < keys; ++i) {
      float* s = state + i * columns;
      for (int c = 0; c < columns; ++c) {
        s[c] += u[c] * k[i];
        o[c] += s[c] * q[i];
      }
    }
    for (int c = 0; c < columns; ++c) {
      store(task.out.data + t * task.out.stride, task.out.element, c, task.scale * o[c]);
    }
  }
  if (task.final_state.data) store_state(task.final_state, 0, state, keys, columns);
}

std::size_t scratch_bytes(int key_dim, int columns) {
  const std::size_t floats = static_cast<std::size_t>(key_dim) * columns + 2 * columns + 3 * key_dim;
  return (floats * sizeof(float) + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

constexpr Kernels kernels(const char* name) { return {name, 32, scratch_bytes, run}; }

}  // namespace
}  // namespace FLASH_KDA_CPU_NAMESPACE
}  // namespace flash_kda::cpu
