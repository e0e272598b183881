// One call of the forward pass on the CPU: a packed batch of two sequences, read in one go and then
// again in two pieces that carry the state. Prints the plan and the largest difference between the
// two, which is 0.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include "flash_kda/flash_kda.h"

namespace {

using flash_kda::DType;
using flash_kda::TensorView;

constexpr std::int64_t kTokens = 192, kHeads = 2, kDim = 64;  // K = V = kDim

std::vector<float> normal(std::int64_t size, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<std::size_t>(size));
  std::generate(values.begin(), values.end(), [&] { return distribution(engine); });
  return values;
}

// Tokens [begin, end) of [1, T, heads, dim].
TensorView tokens(std::vector<float>& x, std::int64_t begin, std::int64_t end, std::int64_t dim) {
  float* first = x.data() + begin * kHeads * dim;
  return TensorView::dense(first, DType::kFloat32, {1, end - begin, kHeads, dim});
}

void run() {
  const std::int64_t size = kTokens * kHeads * kDim;
  std::vector<float> q = normal(size, 1), k = normal(size, 2), v = normal(size, 3),
                     g = normal(size, 4);
  std::vector<float> beta = normal(kTokens * kHeads, 5);
  std::vector<float> out(static_cast<std::size_t>(size)), out_pieces(out);

  const auto call = [&](std::int64_t begin, std::int64_t end, std::vector<float>& to) {
    flash_kda::ForwardArgs args;
    args.q = tokens(q, begin, end, kDim);
    args.k = tokens(k, begin, end, kDim);
    args.v = tokens(v, begin, end, kDim);
    args.g = tokens(g, begin, end, kDim);
    args.beta =
        TensorView::dense(beta.data() + begin * kHeads, DType::kFloat32, {1, end - begin, kHeads});
    args.out = tokens(to, begin, end, kDim);
    return args;
  };

  // Packed: tokens 0..127 are one sequence, 128..191 another. Both start from an empty state.
  std::vector<std::int32_t> offsets{0, 128, kTokens};
  flash_kda::ForwardArgs packed = call(0, kTokens, out);
  packed.cu_seqlens = TensorView::dense(offsets.data(), DType::kInt32, {3});
  const flash_kda::ForwardPlan plan = flash_kda::plan_forward(packed);
  std::printf("%s", plan.describe().c_str());
  std::vector<char> workspace(plan.workspace_bytes);
  flash_kda::forward(packed, plan, workspace.data(), nullptr);

  // The first sequence again, 64 tokens a call; the state is read from and written to the same
  // place.
  std::vector<float> state(static_cast<std::size_t>(kHeads * kDim * kDim), 0.0F);
  for (std::int64_t begin = 0; begin < 128; begin += 64) {
    flash_kda::ForwardArgs piece = call(begin, begin + 64, out_pieces);
    piece.initial_state = TensorView::dense(state.data(), DType::kFloat32, {1, kHeads, kDim, kDim});
    piece.final_state = piece.initial_state;
    flash_kda::forward(piece, flash_kda::plan_forward(piece), nullptr, nullptr);
  }

  float difference = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(128 * kHeads * kDim); ++i) {
    difference = std::max(difference, std::abs(out[i] - out_pieces[i]));
  }
  std::printf("one go and two pieces differ by at most %g\n", static_cast<double>(difference));
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
