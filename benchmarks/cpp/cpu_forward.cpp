// The forward pass on the CPU: cases by name, with threads as the argument.
//
//   flash_kda_benchmark --benchmark_filter=mixed --benchmark_repetitions=5
//
// Counters: token/s (all heads of a token count once); GFLOP/s, counting the recurrence's own
// 6 * K * V floating-point operations a token and head whatever the algorithm spends; peak, the FMA
// rate in GFLOP/s measured on as many threads in the same process; of_peak, the ratio of the two.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "flash_kda/flash_kda.h"
#include "fma_peak.h"

namespace flash_kda::benchmarks {
namespace {

struct Workload {
  std::string name;
  std::vector<std::int64_t> lengths;
  std::int64_t heads;
  std::int64_t head_dim = 128;
  DType dtype = DType::kBFloat16;
};

const std::vector<Workload>& workloads() {
  static const std::vector<Workload> all = {
      {"mixed", {1300, 547, 2048, 963, 271, 3063}, 96},
      {"1x8192", {8192}, 64},
      {"8x1024", std::vector<std::int64_t>(8, 1024), 96},
      {"short", std::vector<std::int64_t>(256, 32), 32},
      {"decode", std::vector<std::int64_t>(64, 1), 32},
      {"one_head", {8192}, 1},
      {"head_dim_64", {8192}, 96, 64},
      {"fp32", {2048}, 96, 128, DType::kFloat32},
  };
  return all;
}

// Owns the arrays of one call: uniform values of about unit variance, fp32 states in and out.
class Call {
 public:
  explicit Call(const Workload& w) {
    tokens = std::accumulate(w.lengths.begin(), w.lengths.end(), std::int64_t{0});
    const auto sequences = static_cast<std::int64_t>(w.lengths.size());
    const auto rows = [&](std::int64_t last) {
      return fill(w.dtype, {1, tokens, w.heads, last}, 1.7F);
    };
    args.q = rows(w.head_dim);
    args.k = rows(w.head_dim);
    args.v = rows(w.head_dim);
    args.g = rows(w.head_dim);
    args.out = rows(w.head_dim);
    args.beta = fill(w.dtype, {1, tokens, w.heads}, 1.7F);
    args.A_log = fill(DType::kFloat32, {w.heads}, 0.5F);
    args.dt_bias = fill(DType::kFloat32, {w.heads, w.head_dim}, 0.2F);
    args.initial_state = fill(DType::kFloat32, {sequences, w.heads, w.head_dim, w.head_dim}, 1.7F);
    args.final_state = fill(DType::kFloat32, {sequences, w.heads, w.head_dim, w.head_dim}, 0.0F);
    offsets_.push_back(0);
    for (const std::int64_t length : w.lengths) offsets_.push_back(offsets_.back() + length);
    args.cu_seqlens = TensorView::dense(offsets_.data(), DType::kInt64, {sequences + 1});
    flops = 6.0 * static_cast<double>(tokens * w.heads * w.head_dim * w.head_dim);
  }

  ForwardArgs args;
  double flops = 0;
  std::int64_t tokens = 0;

 private:
  TensorView fill(DType dtype, std::initializer_list<std::int64_t> shape, float limit) {
    TensorView view = TensorView::dense(nullptr, dtype, shape);
    const auto n = static_cast<std::size_t>(view.numel());
    const auto size = static_cast<std::size_t>(size_of(dtype));
    std::vector<std::byte>& bytes = storage_.emplace_back(n * size);
    for (std::size_t i = 0; i < n; ++i) {
      state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
      const float x = limit * (static_cast<float>(state_ >> 40) * 0x1p-23F - 1.0F);
      std::uint32_t bits;
      std::memcpy(&bits, &x, sizeof(bits));
      const auto upper = static_cast<std::uint16_t>(bits >> 16);
      if (dtype == DType::kBFloat16) std::memcpy(bytes.data() + 2 * i, &upper, 2);
      if (dtype == DType::kFloat32) std::memcpy(bytes.data() + 4 * i, &bits, 4);
    }
    view.data = bytes.data();
    return view;
  }

  std::uint64_t state_ = 1;
  std::vector<std::vector<std::byte>> storage_;
  std::vector<std::int64_t> offsets_;
};

double peak_of(int threads) {
  static std::map<int, double> known;
  if (const auto found = known.find(threads); found != known.end()) return found->second;
  return known[threads] = fma_peak_gflops(threads);
}

void run(benchmark::State& state, const Workload& workload) {
  const int threads = static_cast<int>(state.range(0));
  const Call call(workload);
  const ForwardPlan plan = plan_forward(call.args, {.threads = threads});
  forward(call.args, plan, nullptr, nullptr);  // touches the outputs' pages
  const auto start = std::chrono::steady_clock::now();
  for (auto _ : state) forward(call.args, plan, nullptr, nullptr);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  const double calls_a_second = static_cast<double>(state.iterations()) / taken.count();
  const double gflops = call.flops * 1e-9 * calls_a_second;
  state.counters["token/s"] = static_cast<double>(call.tokens) * calls_a_second;
  state.counters["GFLOP/s"] = gflops;
  if (const double peak = peak_of(threads); peak > 0) {
    state.counters["peak"] = peak;
    state.counters["of_peak"] = gflops / peak;
  }
}

}  // namespace
}  // namespace flash_kda::benchmarks

int main(int argc, char** argv) {
  namespace fb = flash_kda::benchmarks;
  benchmark::Initialize(&argc, argv);
  for (const flash_kda::BackendInfo& info : flash_kda::backends()) {
    benchmark::AddCustomContext(info.name, info.detail);
  }
  const int all_threads = flash_kda::plan_forward(fb::Call({"one token", {1}, 1, 1}).args).threads;
  for (const auto& workload : fb::workloads()) {
    auto* b = benchmark::RegisterBenchmark(
        workload.name.c_str(), [&workload](benchmark::State& state) { fb::run(state, workload); });
    b->ArgName("threads")->Arg(1)->UseRealTime()->Unit(benchmark::kMillisecond);
    if (all_threads > 1) b->Arg(all_threads);
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
