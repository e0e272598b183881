// Compares the CUDA backend with the CPU backend on small cases of every path, and times the
// headline cases. No test framework, so that it runs as it is on a GPU machine and under
// compute-sanitizer.
//
//   cuda_check              the comparisons; exit status 1 if one fails
//   cuda_check small        the smallest of them only (for the sanitizers)
//   cuda_check time [reps] [CASE...]   median of CUDA-graph replays, L2 flushed before each;
//   default: the
//                           six headline cases
//   cuda_check run CASE [runs]         one case, plainly launched (for a profiler)
//
// CASE: KIND-TOKENS-hHEADS, then +v1 or +v2 for blocks a head, +whole for sequences in one piece,
// +bf16 for such states, +none for no states. KIND: fixed, mixed (TOKENS is their sum: 8192);
// COUNTxLENGTH for TOKENS makes a packed batch: uniform-128x64-h32+bf16
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/check.h"
#include "flash_kda/flash_kda.h"

namespace {

using flash_kda::Device;
using flash_kda::DeviceType;
using flash_kda::DType;
using flash_kda::ForwardArgs;
using flash_kda::TensorView;

constexpr std::int64_t kDim = 128;
constexpr Device kGpu{DeviceType::kCuda, 0};

std::uint16_t to_bf16(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  return static_cast<std::uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
float from_bf16(std::uint16_t x) {
  const std::uint32_t u = static_cast<std::uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &u, 4);
  return y;
}

// Standard normal numbers from a table: the timed arrays have hundreds of millions of them.
class Normal {
 public:
  explicit Normal(std::uint64_t seed) : state_(seed | 1) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (float& x : table_) x = normal(random);
  }
  float operator()() {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return table_[(state_ >> 20) % table_.size()];
  }

 private:
  std::uint64_t state_;
  std::array<float, 65536> table_;
};

struct Case {
  std::string name;
  std::vector<std::int64_t> lengths;  // of a packed batch; or {T} with batch > 0
  std::int64_t batch = 0;             // 0: packed
  std::int64_t heads = 1;
  int split = 0;
  bool whole = false;                                        // sequences in one piece
  DType initial = DType::kFloat32, final = DType::kFloat32;  // kOther: absent
  float gate_mean = 0.0f, gate_spread = 1.0f;
  float key_scale = 1.0f, value_scale = 1.0f;
  float parallel = 0.0f;  // 1: all keys of a head are one row, else blended with it
  float beta_mean = 0.0f;
  double lower_bound = -5.0;
  bool l2norm = true;
  float a_log = 0.3f, bias = 0.1f;
  DType beta = DType::kBFloat16;
  double out_bound = 1e-2, state_bound = 1e-2;
  std::int64_t tail_rows = 0;  // rows past cu_seqlens[-1], NaN
};

// An array in host memory with a twin on the GPU.
struct Array {
  std::vector<std::uint8_t> host;
  void* device = nullptr;
  Array() = default;
  explicit Array(std::size_t bytes, int fill = 0) : host(bytes, static_cast<std::uint8_t>(fill)) {
    FLASH_KDA_CUDA_CHECK(cudaMalloc(&device, std::max<std::size_t>(bytes, 16)));
  }
  ~Array() { cudaFree(device); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  void upload() const {
    FLASH_KDA_CUDA_CHECK(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice));
  }
  std::vector<std::uint8_t> download() const {
    std::vector<std::uint8_t> x(host.size());
    FLASH_KDA_CUDA_CHECK(cudaMemcpy(x.data(), device, x.size(), cudaMemcpyDeviceToHost));
    return x;
  }
};

struct Problem {
  Case c;
  std::int64_t b, t, n;
  std::vector<std::int64_t> offsets;
  Array q, k, v, g, beta, out, a_log, bias, initial, final, cu;

  static std::size_t bytes(std::int64_t count, DType d) {
    return static_cast<std::size_t>(count * flash_kda::size_of(d));
  }
  static std::int64_t total(const Case& c) {
    std::int64_t t = c.tail_rows;
    for (const std::int64_t x : c.lengths) t += x;
    return t;
  }

  explicit Problem(const Case& cc)
      : c(cc),
        b(c.batch > 0 ? c.batch : 1),
        t(c.batch > 0 ? c.lengths[0] : total(c)),
        n(c.batch > 0 ? c.batch : static_cast<std::int64_t>(c.lengths.size())),
        q(rows() * 2),
        k(rows() * 2),
        v(rows() * 2),
        g(rows() * 2),
        beta(bytes(b * t * c.heads, c.beta)),
        out(rows() * 2, 0xff),
        a_log(static_cast<std::size_t>(c.heads) * 4),
        bias(static_cast<std::size_t>(c.heads * kDim) * 4),
        initial(state_bytes(c.initial)),
        final(state_bytes(c.final), 0xff),
        cu((static_cast<std::size_t>(n) + 1) * 4) {
    fill();
    for (const Array* a : {&q, &k, &v, &g, &beta, &out, &a_log, &bias, &initial, &final, &cu})
      a->upload();
  }
  std::size_t rows() const { return static_cast<std::size_t>(b * t * c.heads * kDim); }
  std::size_t state_bytes(DType d) const {
    return d == DType::kOther ? 0 : bytes(n * c.heads * kDim * kDim, d);
  }

  void fill() {
    const auto source = std::make_unique<Normal>(std::hash<std::string>()(c.name));
    Normal& normal = *source;
    auto* pq = reinterpret_cast<std::uint16_t*>(q.host.data());
    auto* pk = reinterpret_cast<std::uint16_t*>(k.host.data());
    auto* pv = reinterpret_cast<std::uint16_t*>(v.host.data());
    auto* pg = reinterpret_cast<std::uint16_t*>(g.host.data());
    std::vector<float> common(static_cast<std::size_t>(c.heads * kDim));
    for (float& x : common) x = normal();
    offsets.assign(1, 0);
    for (const std::int64_t x : c.lengths) offsets.push_back(offsets.back() + x);
    const std::int64_t valid = c.batch > 0 ? b * t : offsets.back();
    for (std::int64_t i = 0; i < b * t; ++i) {
      for (std::int64_t h = 0; h < c.heads; ++h) {
        for (std::int64_t d = 0; d < kDim; ++d) {
          const auto at = static_cast<std::size_t>((i * c.heads + h) * kDim + d);
          const float own = normal();
          const float shared = common[static_cast<std::size_t>(h * kDim + d)];
          pk[at] = to_bf16(c.key_scale *
                           (c.parallel * shared + std::sqrt(1 - c.parallel * c.parallel) * own));
          pq[at] = to_bf16(c.key_scale * normal());
          pv[at] = to_bf16(c.value_scale * normal());
          pg[at] = to_bf16(c.gate_mean + c.gate_spread * normal());
          if (i >= valid) pq[at] = pk[at] = pv[at] = pg[at] = 0x7fc0;
        }
        const float logit = c.beta_mean + normal();
        const auto at = static_cast<std::size_t>(i * c.heads + h);
        if (c.beta == DType::kFloat32) {
          reinterpret_cast<float*>(beta.host.data())[at] = logit;
        } else {
          reinterpret_cast<std::uint16_t*>(beta.host.data())[at] = to_bf16(logit);
        }
      }
    }
    for (std::int64_t h = 0; h < c.heads; ++h) {
      reinterpret_cast<float*>(a_log.host.data())[h] = c.a_log * static_cast<float>(h % 3);
      for (std::int64_t d = 0; d < kDim; ++d) {
        reinterpret_cast<float*>(bias.host.data())[h * kDim + d] = c.bias * normal();
      }
    }
    for (std::size_t i = 0; i < initial.host.size() / (c.initial == DType::kFloat32 ? 4 : 2); ++i) {
      const float x = c.value_scale * normal();
      if (c.initial == DType::kFloat32) {
        reinterpret_cast<float*>(initial.host.data())[i] = x;
      } else {
        reinterpret_cast<std::uint16_t*>(initial.host.data())[i] = to_bf16(x);
      }
    }
    for (std::size_t i = 0; i < offsets.size() && c.batch == 0; ++i) {
      reinterpret_cast<std::int32_t*>(cu.host.data())[i] = static_cast<std::int32_t>(offsets[i]);
    }
  }

  ForwardArgs args(bool gpu, std::vector<std::uint8_t>* host_out = nullptr,
                   std::vector<std::uint8_t>* host_final = nullptr) {
    const Device device = gpu ? kGpu : Device{};
    const auto at = [&](Array& a) { return gpu ? a.device : static_cast<void*>(a.host.data()); };
    ForwardArgs x;
    const auto row = [&](Array& a) {
      return TensorView::dense(at(a), DType::kBFloat16, {b, t, c.heads, kDim}, device);
    };
    x.q = row(q), x.k = row(k), x.v = row(v), x.g = row(g), x.out = row(out);
    x.beta = TensorView::dense(at(beta), c.beta, {b, t, c.heads}, device);
    x.A_log = TensorView::dense(at(a_log), DType::kFloat32, {c.heads}, device);
    x.dt_bias = TensorView::dense(at(bias), DType::kFloat32, {c.heads, kDim}, device);
    if (c.initial != DType::kOther) {
      x.initial_state = TensorView::dense(at(initial), c.initial, {n, c.heads, kDim, kDim}, device);
    }
    if (c.final != DType::kOther) {
      x.final_state = TensorView::dense(at(final), c.final, {n, c.heads, kDim, kDim}, device);
    }
    if (c.batch == 0) x.cu_seqlens = TensorView::dense(at(cu), DType::kInt32, {n + 1}, device);
    x.lower_bound = c.lower_bound;
    x.l2norm = c.l2norm;
    if (!gpu) {
      x.out.data = host_out->data();
      if (x.final_state.defined()) x.final_state.data = host_final->data();
    }
    return x;
  }
};

float element(const std::vector<std::uint8_t>& x, std::size_t i, DType d) {
  if (d == DType::kFloat32) {
    float y;
    std::memcpy(&y, x.data() + 4 * i, 4);
    return y;
  }
  std::uint16_t y;
  std::memcpy(&y, x.data() + 2 * i, 2);
  return from_bf16(y);
}

// Worst relative RMS error over (sequence, head). An untouched (NaN) or non-finite element counts
// as infinite.
struct Worst {
  double out = 0, state = 0;
};
double ratio(double error, double reference) {
  if (!(error >= 0)) return std::numeric_limits<double>::infinity();
  return reference > 0 ? std::sqrt(error / reference)
                       : (error > 0 ? std::numeric_limits<double>::infinity() : 0);
}
Worst compare(const Problem& p, const std::vector<std::uint8_t>& out,
              const std::vector<std::uint8_t>& final, const std::vector<std::uint8_t>& out_ref,
              const std::vector<std::uint8_t>& final_ref) {
  Worst worst;
  const std::int64_t heads = p.c.heads;
  for (std::int64_t s = 0; s < p.n; ++s) {
    const std::int64_t begin = p.c.batch > 0 ? s * p.t : p.offsets[static_cast<std::size_t>(s)];
    const std::int64_t end =
        p.c.batch > 0 ? (s + 1) * p.t : p.offsets[static_cast<std::size_t>(s) + 1];
    for (std::int64_t h = 0; h < heads; ++h) {
      double e = 0, r = 0;
      for (std::int64_t i = begin; i < end; ++i) {
        for (std::int64_t d = 0; d < kDim; ++d) {
          const auto at = static_cast<std::size_t>((i * heads + h) * kDim + d);
          const double want = element(out_ref, at, DType::kBFloat16),
                       got = element(out, at, DType::kBFloat16);
          e += (got - want) * (got - want), r += want * want;
        }
      }
      worst.out = std::max(worst.out, ratio(e, r));
      if (p.c.final == DType::kOther) continue;
      e = r = 0;
      for (std::int64_t i = 0; i < kDim * kDim; ++i) {
        const auto at = static_cast<std::size_t>((s * heads + h) * kDim * kDim + i);
        const double want = element(final_ref, at, p.c.final), got = element(final, at, p.c.final);
        e += (got - want) * (got - want), r += want * want;
      }
      worst.state = std::max(worst.state, ratio(e, r));
    }
  }
  return worst;
}

flash_kda::ForwardPlan plan_of(Problem& p) {
  flash_kda::PlanOptions options;
  options.value_split = p.c.split;
  options.sequence_split = !p.c.whole;
  return flash_kda::plan_forward(p.args(true), options);
}

void run_gpu(Problem& p, cudaStream_t stream, void* workspace_override = nullptr) {
  const ForwardArgs args = p.args(true);
  const flash_kda::ForwardPlan plan = plan_of(p);
  void* workspace = workspace_override;
  if (workspace == nullptr && plan.workspace_bytes > 0) {
    FLASH_KDA_CUDA_CHECK(cudaMallocAsync(&workspace, plan.workspace_bytes, stream));
  }
  flash_kda::forward(args, plan, workspace, stream);
  if (workspace_override == nullptr && workspace != nullptr)
    FLASH_KDA_CUDA_CHECK(cudaFreeAsync(workspace, stream));
}

bool check(const Case& c) {
  Problem p(c);
  std::vector<std::uint8_t> out_ref(p.out.host), final_ref(p.final.host);
  const ForwardArgs host_args = p.args(false, &out_ref, &final_ref);
  flash_kda::forward(host_args, flash_kda::plan_forward(host_args), nullptr, nullptr);
  run_gpu(p, nullptr);
  FLASH_KDA_CUDA_CHECK(cudaDeviceSynchronize());
  const auto out = p.out.download(), final = p.final.download();
  bool same = true;
  for (int round = 0; round < 2; ++round) {
    p.out.upload(), p.final.upload();  // poisoned again
    run_gpu(p, nullptr);
    same = same && p.out.download() == out && p.final.download() == final;
  }
  bool untouched = true;  // rows past the end keep their poison
  const std::size_t live = static_cast<std::size_t>((p.b * p.t - c.tail_rows) * c.heads * kDim) * 2;
  for (std::size_t i = live; i < out.size(); ++i) untouched = untouched && out[i] == 0xff;
  const Worst w = compare(p, out, final, out_ref, final_ref);
  const bool good = w.out <= c.out_bound && w.state <= c.state_bound && same && untouched;
  std::printf("%-34s out %.2e  state %.2e  repeat %s%s  %s\n", c.name.c_str(), w.out, w.state,
              same ? "same bits" : "DIFFERENT", untouched ? "" : "  WROTE PAST THE END",
              good ? "ok" : "FAILED");
  std::fflush(stdout);
  return good;
}

std::vector<Case> small_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::vector<std::int64_t> lengths, std::int64_t batch,
                       auto&& change) {
    Case c;
    c.name = name;
    c.lengths = std::move(lengths);
    c.batch = batch;
    change(c);
    for (const int split : {1, 2}) {
      c.split = split;
      cases.push_back(c);
      cases.back().name += split == 1 ? " /v128" : " /v64";
    }
  };
  add("one chunk", {32}, 1, [](Case&) {});
  add("three chunks, 2 heads", {96}, 1, [](Case& c) { c.heads = 2; });
  add("tail 1, batch 2", {65}, 2, [](Case& c) { c.initial = DType::kBFloat16; });
  add("packed, empty and short", {0, 1, 31, 33, 0, 7, 100, 0}, 0, [](Case& c) {
    c.heads = 3;
    c.tail_rows = 5;
    c.final = DType::kBFloat16;
    c.initial = DType::kBFloat16;
  });
  // The shortest that is split: first launch, chain, second launch; by arithmetic and by lists.
  add("split", {1536}, 1, [](Case& c) { c.lower_bound = -0.05; });
  add("split, packed", {7, 1505}, 0, [](Case& c) { c.lower_bound = -0.05; });
  add("no states", {70, 130}, 0, [](Case& c) { c.initial = c.final = DType::kOther; });
  return cases;
}

std::vector<Case> more_cases() {
  std::vector<Case> cases;
  const auto add = [&](const char* name, std::int64_t tokens, auto&& change) {
    Case c;
    c.name = name;
    c.lengths = {tokens};
    c.batch = 1;
    c.heads = 3;
    change(c);
    cases.push_back(c);
  };
  add("default 512", 512, [](Case&) {});
  add("default 2048", 2048, [](Case&) {});
  add("default 2048 v64", 2048, [](Case& c) { c.split = 2; });
  add("gate saturated", 1024, [](Case& c) { c.gate_mean = 20; });
  add("gate wide", 1024, [](Case& c) { c.gate_spread = 20; });
  add("slow decay", 4096, [](Case& c) { c.gate_mean = -10, c.a_log = 0; });
  add("no decay", 2048, [](Case& c) { c.gate_mean = -100, c.beta_mean = -3; });
  add("lower bound 0", 2048, [](Case& c) { c.lower_bound = 0, c.beta_mean = -3; });
  add("near-parallel keys", 2048,
      [](Case& c) { c.parallel = 0.95f, c.gate_mean = -6, c.beta_mean = 4; });
  add("identical keys", 2048, [](Case& c) {
    c.parallel = 1, c.gate_mean = -12, c.gate_spread = 0, c.a_log = 0, c.bias = 0, c.beta_mean = 8;
    c.out_bound = 5e-2, c.state_bound = 8e-2;
  });
  add("small keys", 512, [](Case& c) { c.key_scale = 1e-4f; });
  add("small keys, gate saturated", 512, [](Case& c) { c.key_scale = 1e-3f, c.gate_mean = 20; });
  add("large keys, gate saturated", 512, [](Case& c) { c.key_scale = 1e4f, c.gate_mean = 20; });
  add("large values, gate saturated", 512, [](Case& c) { c.value_scale = 3e4f, c.gate_mean = 20; });
  add("small values, gate saturated", 512,
      [](Case& c) { c.value_scale = 1e-3f, c.gate_mean = 20; });
  add("no l2norm", 512, [](Case& c) { c.l2norm = false, c.key_scale = 0.05f; });
  add("fp32 beta, large A_log and bias", 512,
      [](Case& c) { c.beta = DType::kFloat32, c.a_log = 5, c.bias = 50; });
  // Long enough to be split on a card of 132 multiprocessors.
  const auto split = [&](const char* name, std::int64_t tokens, auto&& change) {
    add(name, tokens, [&](Case& c) {
      c.lower_bound = -0.05;  // what a segment leaves behind counts to the end
      change(c);
    });
  };
  split("split, 2048", 2048, [](Case&) {});
  split("split, 5000, v64", 5000, [](Case& c) { c.split = 2; });
  split("split, batch 2", 3001, [](Case& c) { c.batch = 2; });
  split("split, slow decay", 8192, [](Case& c) { c.gate_mean = -10, c.a_log = 0, c.heads = 1; });
  split("split, no decay", 4096, [](Case& c) { c.gate_mean = -100, c.beta_mean = -3; });
  split("split, saturated", 4096, [](Case& c) { c.gate_mean = 20, c.lower_bound = -5; });
  split("split, near-parallel keys", 4096,
        [](Case& c) { c.parallel = 0.95f, c.gate_mean = -6, c.beta_mean = 4, c.lower_bound = -5; });
  split("split, identical keys", 2048, [](Case& c) {
    c.parallel = 1, c.gate_mean = -12, c.gate_spread = 0, c.a_log = 0, c.bias = 0, c.beta_mean = 8;
    c.out_bound = 5e-2, c.state_bound = 8e-2, c.lower_bound = -5;
  });
  split("split, packed", 0, [](Case& c) {
    c.batch = 0;
    c.lengths = {3000, 5, 0, 40, 2000, 900, 1, 4096, 1536, 33};
    c.tail_rows = 11;
    c.initial = c.final = DType::kBFloat16;
  });
  add("packed, many", 0, [](Case& c) {
    c.batch = 0;
    c.lengths.clear();
    for (int i = 0; i < 60; ++i) c.lengths.push_back(i * 7 % 131);
    c.heads = 7;
    c.tail_rows = 33;
  });
  return cases;
}

// ---- timing ------------------------------------------------------------------------------------

double median_ms(const Case& c, int repeats) {
  Problem p(c);
  cudaStream_t stream;
  FLASH_KDA_CUDA_CHECK(cudaStreamCreate(&stream));
  void* workspace;
  FLASH_KDA_CUDA_CHECK(
      cudaMalloc(&workspace, std::max<std::size_t>(plan_of(p).workspace_bytes, 1)));
  void* scratch;
  constexpr std::size_t kFlush = 256u << 20;
  FLASH_KDA_CUDA_CHECK(cudaMalloc(&scratch, kFlush));
  run_gpu(p, stream, workspace);
  FLASH_KDA_CUDA_CHECK(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  FLASH_KDA_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  run_gpu(p, stream, workspace);
  FLASH_KDA_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  FLASH_KDA_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin, end;
  FLASH_KDA_CUDA_CHECK(cudaEventCreate(&begin));
  FLASH_KDA_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < repeats + 3; ++i) {
    FLASH_KDA_CUDA_CHECK(cudaMemsetAsync(scratch, i, kFlush, stream));
    FLASH_KDA_CUDA_CHECK(cudaEventRecord(begin, stream));
    FLASH_KDA_CUDA_CHECK(cudaGraphLaunch(exec, stream));
    FLASH_KDA_CUDA_CHECK(cudaEventRecord(end, stream));
    FLASH_KDA_CUDA_CHECK(cudaEventSynchronize(end));
    float ms;
    FLASH_KDA_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaFree(workspace);
  cudaFree(scratch);
  cudaStreamDestroy(stream);
  return times[times.size() / 2];
}

Case named_case(const std::string& name) {
  Case c;
  c.name = name;
  const auto after = [&](const std::string& mark) {
    const std::size_t at = name.find(mark);
    if (at == std::string::npos) throw std::runtime_error("no " + mark + " in " + name);
    return name.substr(at + mark.size());
  };
  c.heads = std::stoll(after("-h"));
  const std::string kind = name.substr(0, name.find('-')), tokens = after("-");
  const std::size_t times = tokens.substr(0, tokens.find('-')).find('x');
  const std::int64_t first = std::stoll(tokens);
  if (kind == "fixed") {
    c.lengths = {first}, c.batch = 1;
  } else if (kind == "mixed") {
    c.lengths = {1300, 547, 2048, 963, 271, 3063};
  } else if (times != std::string::npos) {
    c.lengths = std::vector<std::int64_t>(static_cast<std::size_t>(first),
                                          std::stoll(tokens.substr(times + 1)));
  } else {
    throw std::runtime_error("what is " + name + "?");
  }
  const auto has = [&](const char* option) { return name.find(option) != std::string::npos; };
  c.split = has("+v1") ? 1 : (has("+v2") ? 2 : 0);
  c.whole = has("+whole");
  if (has("+bf16")) c.initial = c.final = DType::kBFloat16;
  if (has("+none")) c.initial = c.final = DType::kOther;
  return c;
}

void time_cases(int repeats, std::vector<std::string> names) {
  if (names.empty()) {
    for (const char* heads : {"96", "64"}) {
      for (const char* kind : {"fixed-8192-h", "mixed-8192-h", "uniform-8x1024-h"})
        names.push_back(kind + std::string(heads));
    }
  }
  for (const std::string& name : names) {
    const Case c = named_case(name);
    const double ms = median_ms(c, repeats);
    std::int64_t tokens = 0;
    for (const std::int64_t x : c.lengths) tokens += x;
    const double bytes = static_cast<double>(tokens * c.heads) * (5 * 256 + 2);
    std::printf("%-32s %.4f ms  %.2f TB/s\n", c.name.c_str(), ms, bytes / ms * 1e-9);
    std::fflush(stdout);
  }
}

void run_one(const std::string& name, int runs) {
  Problem p(named_case(name));
  for (int i = 0; i < runs; ++i) run_gpu(p, nullptr);
  FLASH_KDA_CUDA_CHECK(cudaDeviceSynchronize());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  try {
    if (mode == "time") {
      time_cases(argc > 2 ? std::atoi(argv[2]) : 20,
                 std::vector<std::string>(argv + std::min(argc, 3), argv + argc));
      return 0;
    }
    if (mode == "run" && argc >= 3) {
      run_one(argv[2], argc > 3 ? std::atoi(argv[3]) : 3);
      return 0;
    }
    int failed = 0;
    for (const Case& c : small_cases()) failed += check(c) ? 0 : 1;
    if (mode != "small") {
      for (const Case& c : more_cases()) failed += check(c) ? 0 : 1;
    }
    std::printf("%d failed\n", failed);
    return failed == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  }
}
