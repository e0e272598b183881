#include "plan_cache.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace flash_kda::python {

PlanKey::PlanKey(const ForwardArgs& args, const PlanOptions& options) {
  for (const TensorView* view :
       {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.out, &args.A_log, &args.dt_bias,
        &args.initial_state, &args.final_state, &args.initial_state_indices,
        &args.final_state_indices, &args.cu_seqlens, &args.checkpoint_states,
        &args.checkpoint_sequences, &args.checkpoint_positions, &args.checkpoint_slots}) {
    add(*view);
  }
  add(static_cast<std::int64_t>(args.gate) << 32 | static_cast<std::int64_t>(args.beta_kind) << 16 |
      (args.l2norm ? 1 : 0));
  add(std::bit_cast<std::int64_t>(args.lower_bound));
  add(args.scale.has_value() ? 1 : 0);
  add(std::bit_cast<std::int64_t>(args.scale.value_or(0.0)));
  add(options.threads);
  add(options.value_split);
  add((options.sequence_split ? 1 : 0) | (options.check_cu_seqlens ? 2 : 0));

  std::uint64_t hash = 0x9E3779B97F4A7C15u;
  for (std::size_t i = 0; i < count_; ++i) {
    hash = (hash ^ static_cast<std::uint64_t>(words_[i])) * 0xFF51AFD7ED558CCDu;
    hash ^= hash >> 32;
  }
  hash_ = static_cast<std::size_t>(hash);
}

void PlanKey::add(const TensorView& view) {
  if (!view.defined()) {
    add(std::int64_t{-1});
    return;
  }
  add(static_cast<std::int64_t>(view.device.index) << 32 |
      static_cast<std::int64_t>(view.device.type) << 16 |
      static_cast<std::int64_t>(view.dtype) << 8 | view.rank);
  for (int d = 0; d < view.rank; ++d) add(view.shape[static_cast<std::size_t>(d)]);
}

bool PlanKey::matches(const std::vector<std::int64_t>& words) const {
  return words.size() == count_ && std::equal(words.begin(), words.end(), words_.begin());
}

std::vector<std::int64_t> PlanKey::words() const {
  return {words_.begin(), words_.begin() + static_cast<std::ptrdiff_t>(count_)};
}

std::shared_ptr<const ForwardPlan> PlanCache::get(const ForwardArgs& args,
                                                  const PlanOptions& options) {
  const PlanKey key(args, options);
  Place& place = places_[key.hash() % kPlaces];
  {
    const std::scoped_lock lock(mutex_);
    if (place.plan != nullptr && key.matches(place.key)) return place.plan;
  }
  auto plan = std::make_shared<const ForwardPlan>(plan_forward(args, options));
  const std::scoped_lock lock(mutex_);
  place.key = key.words();
  place.plan = plan;
  return plan;
}

}  // namespace flash_kda::python
