#include "cpu/backend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/schedule.h"

namespace flash_kda::cpu {
namespace {

Element element_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return Element::kBFloat16;
    case DType::kFloat16:
      return Element::kFloat16;
    default:
      return Element::kFloat32;
  }
}

std::int64_t int_at(const TensorView& view, std::int64_t i) {
  const std::int64_t offset = view.shape[0] == 1 ? 0 : i * view.stride[0];
  if (view.dtype == DType::kInt32) return static_cast<const std::int32_t*>(view.data)[offset];
  return static_cast<const std::int64_t*>(view.data)[offset];
}

// Element i, in row-major order of the index, of an fp32 array of any shape.
const float* float_at(const TensorView& view, std::int64_t i) {
  std::int64_t offset = 0;
  for (int axis = view.rank; axis-- > 0;) {
    const auto a = static_cast<std::size_t>(axis);
    offset += i % view.shape[a] * view.stride[a];
    i /= view.shape[a];
  }
  return static_cast<const float*>(view.data) + offset;
}

// Rows along the token axis of [B, T, heads, X], from one token and column on; beta is [B, T,
// heads].
template <class Rows>
Rows token_rows(const TensorView& x, std::int64_t batch, std::int64_t token, std::int64_t head,
                std::int64_t column = 0) {
  const std::int64_t size = size_of(x.dtype);
  const std::int64_t offset =
      batch * x.stride[0] + token * x.stride[1] + head * x.stride[2] + column;
  return {static_cast<std::byte*>(x.data) + offset * size, x.stride[1] * size, element_of(x.dtype)};
}

// Rows along the V axis of [slots, HV, V, K].
template <class Rows>
Rows state_rows(const TensorView& x, std::int64_t slot, std::int64_t head, std::int64_t column) {
  if (!x.defined() || slot < 0) return {nullptr, 0, Element::kFloat32};
  const std::int64_t size = size_of(x.dtype);
  const std::int64_t offset = slot * x.stride[0] + head * x.stride[1] + column * x.stride[2];
  return {static_cast<std::byte*>(x.data) + offset * size, x.stride[2] * size, element_of(x.dtype)};
}

struct Sequence {
  std::int64_t batch, begin, length;
  std::int64_t initial_slot, final_slot;  // negative: none
  std::int64_t first_checkpoint, checkpoints;
};

// The call in the order in which its pieces are worked on.
class Call {
 public:
  Call(const ForwardArgs& args, const ForwardPlan& plan) : args_(args), plan_(plan) {
    read_sequences();
    read_checkpoints();
    std::stable_sort(sequences_.begin(), sequences_.end(),
                     [](const Sequence& a, const Sequence& b) { return a.length > b.length; });
    scale_ =
        static_cast<float>(args.scale.value_or(1.0 / std::sqrt(static_cast<double>(plan.key_dim))));
  }

  std::vector<std::int64_t> lengths() const {
    std::vector<std::int64_t> lengths;
    lengths.reserve(sequences_.size());
    for (const Sequence& sequence : sequences_) lengths.push_back(sequence.length);
    return lengths;
  }

  // Columns [column, column + columns) of value head hv of the i-th longest sequence.
  HeadTask task(std::int64_t i, std::int64_t hv, std::int64_t column, int columns) const {
    const Sequence& sequence = sequences_[static_cast<std::size_t>(i)];
    const std::int64_t h = hv / (plan_.value_heads / plan_.key_heads);
    const std::int64_t b = sequence.batch;
    const std::int64_t t = sequence.begin;
    HeadTask task{};
    task.q = token_rows<InputRows>(args_.q, b, t, h);
    task.k = token_rows<InputRows>(args_.k, b, t, h);
    task.v = token_rows<InputRows>(args_.v, b, t, hv, column);
    task.g = token_rows<InputRows>(args_.g, b, t, hv);
    task.beta = token_rows<InputRows>(args_.beta, b, t, hv);
    task.out = token_rows<OutputRows>(args_.out, b, t, hv, column);
    task.initial_state =
        state_rows<InputRows>(args_.initial_state, sequence.initial_slot, hv, column);
    task.final_state = state_rows<OutputRows>(args_.final_state, sequence.final_slot, hv, column);
    task.checkpoint = state_rows<OutputRows>(args_.checkpoint_states, 0, hv, column);
    task.checkpoints = checkpoints_.data() + sequence.first_checkpoint;
    task.checkpoint_count = sequence.checkpoints;
    task.tokens = sequence.length;
    task.key_dim = static_cast<int>(plan_.key_dim);
    task.columns = columns;
    task.l2norm = args_.l2norm;
    task.scale = scale_;
    task.gate = gate(hv);
    task.strength = {args_.beta_kind != BetaKind::kProbability,
                     args_.beta_kind == BetaKind::kDoubledLogit ? 2.0F : 1.0F};
    return task;
  }

 private:
  void read_sequences() {
    sequences_.reserve(static_cast<std::size_t>(plan_.sequences));
    for (std::int64_t n = 0; n < plan_.sequences; ++n) {
      Sequence sequence{n, 0, plan_.tokens, -1, -1, 0, 0};
      if (args_.cu_seqlens.defined()) {
        const std::int64_t begin = int_at(args_.cu_seqlens, n);
        sequence.batch = 0;
        sequence.begin = begin;
        sequence.length = int_at(args_.cu_seqlens, n + 1) - begin;
      }
      if (args_.initial_state.defined()) {
        const TensorView& indices = args_.initial_state_indices;
        sequence.initial_slot = indices.defined() ? int_at(indices, n) : n;
      }
      if (args_.final_state.defined()) {
        const TensorView& indices = args_.final_state_indices;
        sequence.final_slot = indices.defined() ? int_at(indices, n) : n;
      }
      sequences_.push_back(sequence);
    }
  }

  // Gathers each sequence's checkpoints, by position. Runs while sequences_ is still in the
  // caller's order.
  void read_checkpoints() {
    if (!args_.checkpoint_states.defined()) return;
    const std::int64_t slot_bytes =
        args_.checkpoint_states.stride[0] * size_of(args_.checkpoint_states.dtype);
    struct Entry {
      std::int64_t sequence;
      Checkpoint checkpoint;
    };
    std::vector<Entry> entries;
    for (std::int64_t m = 0; m < args_.checkpoint_slots.shape[0]; ++m) {
      const std::int64_t slot = int_at(args_.checkpoint_slots, m);
      if (slot < 0) continue;
      entries.push_back({int_at(args_.checkpoint_sequences, m),
                         {int_at(args_.checkpoint_positions, m), slot * slot_bytes}});
    }
    std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return a.sequence != b.sequence ? a.sequence < b.sequence
                                      : a.checkpoint.position < b.checkpoint.position;
    });
    for (const Entry& entry : entries) {
      Sequence& sequence = sequences_[static_cast<std::size_t>(entry.sequence)];
      if (sequence.checkpoints++ == 0) {
        sequence.first_checkpoint = static_cast<std::int64_t>(checkpoints_.size());
      }
      checkpoints_.push_back(entry.checkpoint);
    }
  }

  Gate gate(std::int64_t hv) const {
    Gate gate{};
    gate.lower_bound = static_cast<float>(args_.lower_bound);
    switch (args_.gate) {
      case GateKind::kLowerBound:
        gate.form = GateForm::kLowerBound;
        break;
      case GateKind::kSoftplus:
        gate.form = GateForm::kSoftplus;
        break;
      case GateKind::kLogDecay:
        gate.form = GateForm::kLogDecay;
        return gate;
    }
    gate.log_rate = args_.A_log.defined() ? *float_at(args_.A_log, hv) : 0.0F;
    // Finite and not 0, so that rate * 0 is 0 and rate * inf is inf: a zero argument always gives
    // the middle of the gate's range. A gate with |A_log| above 88 is saturated either way. NaN
    // stays.
    const double rate = std::exp(static_cast<double>(gate.log_rate));
    using Limits = std::numeric_limits<float>;
    gate.rate = std::isnan(rate)
                    ? Limits::quiet_NaN()
                    : static_cast<float>(std::clamp<double>(rate, Limits::min(), Limits::max()));
    if (args_.dt_bias.defined()) gate.bias = float_at(args_.dt_bias, hv * plan_.key_dim);
    return gate;
  }

  const ForwardArgs& args_;
  const ForwardPlan& plan_;
  float scale_ = 1;
  std::vector<Sequence> sequences_;  // longest first
  std::vector<Checkpoint> checkpoints_;
};

// Below this many state elements times tokens a thread costs more to start than it saves.
constexpr std::int64_t kWorkOfThread = std::int64_t{1} << 20;

int useful_threads(const ForwardPlan& plan) {
  const std::int64_t rows = plan.batch * plan.tokens * plan.value_heads + plan.sequences;
  const std::int64_t wanted = 1 + rows * plan.key_dim * plan.value_dim / kWorkOfThread;
  return static_cast<int>(std::min<std::int64_t>(std::max(plan.threads, 1), wanted));
}

}  // namespace

void forward(const ForwardArgs& args, const ForwardPlan& plan, const Kernels& kernels) {
  const Call call(args, plan);
  const int values = static_cast<int>(plan.value_dim);
  const int panels = (values + kernels.panel - 1) / kernels.panel;
  const int wanted = useful_threads(plan);
  const Shares shares = share(call.lengths(), plan.value_heads, panels, kHeadBlock, wanted);
  const int columns = (panels + shares.parts - 1) / shares.parts * kernels.panel;
  const std::int64_t blocks = (plan.value_heads + shares.heads - 1) / shares.heads;
  const std::int64_t items = plan.sequences * blocks * shares.parts;
  const int threads = static_cast<int>(std::min<std::int64_t>(wanted, items));
  if (items == 0) return;

  struct Free {
    void operator()(std::byte* p) const {
      ::operator delete(p, std::align_val_t{kScratchAlignment});
    }
  };
  const std::size_t bytes = kernels.scratch_bytes(static_cast<int>(plan.key_dim),
                                                  std::min(columns, values), shares.heads);
  const std::unique_ptr<std::byte, Free> scratch(static_cast<std::byte*>(::operator new(
      bytes* static_cast<std::size_t>(threads), std::align_val_t{kScratchAlignment})));

  parallel_for(items, threads, [&](std::int64_t item, int worker) {
    const std::int64_t part = item % shares.parts;
    const std::int64_t block = item / shares.parts % blocks;
    const std::int64_t sequence = item / shares.parts / blocks;
    const int first = static_cast<int>(part) * columns;
    HeadTask tasks[kHeadBlock];
    int count = 0;
    for (std::int64_t head = block * shares.heads; count < shares.heads && head < plan.value_heads;
         ++head) {
      tasks[count++] = call.task(sequence, head, first, std::min(columns, values - first));
    }
    kernels.run(tasks, count, scratch.get() + bytes * static_cast<std::size_t>(worker));
  });
}

void forward(const ForwardArgs& args, const ForwardPlan& plan) {
  forward(args, plan, chosen_kernels());
}

}  // namespace flash_kda::cpu
