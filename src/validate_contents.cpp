// Rules about what integer arrays hold. All arrays here are in host memory and have passed the
// rules on shape and dtype.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "constants.h"
#include "validate.h"

namespace flash_kda {
namespace {

std::int64_t int_at(const TensorView& view, std::int64_t i) {
  const std::int64_t offset = view.shape[0] > 1 ? i * view.stride[0] : 0;
  if (view.dtype == DType::kInt32) return static_cast<const std::int32_t*>(view.data)[offset];
  return static_cast<const std::int64_t*>(view.data)[offset];
}

[[noreturn]] void reject(const char* argument, const std::string& expected, std::int64_t got,
                         std::int64_t position) {
  throw ValueError(std::string(argument) + ": expected " + expected + ", got " +
                   std::to_string(got) + " at position " + std::to_string(position));
}

// A slot of a pool and the entry of the index array that names it.
struct Use {
  std::int64_t slot = 0;
  std::int64_t entry = 0;

  friend auto operator<=>(const Use&, const Use&) = default;
};

// The non-negative entries, sorted by slot; entry i uses slot i where there is no index array.
std::vector<Use> uses_of(const TensorView& state, const TensorView& indices) {
  std::vector<Use> uses;
  const std::int64_t entries = indices.defined() ? indices.shape[0] : state.shape[0];
  uses.reserve(static_cast<std::size_t>(entries));
  for (std::int64_t i = 0; i < entries; ++i) {
    const std::int64_t slot = indices.defined() ? int_at(indices, i) : i;
    if (slot >= 0) uses.push_back({slot, i});
  }
  std::sort(uses.begin(), uses.end());
  return uses;
}

void check_slots(const char* argument, const std::vector<Use>& uses, std::int64_t slots) {
  if (!uses.empty() && uses.back().slot >= slots) {
    reject(argument, "indices below the " + std::to_string(slots) + " slots of the pool",
           uses.back().slot, uses.back().entry);
  }
}

void check_written_once(const char* argument, const std::vector<Use>& uses) {
  const auto twice = std::adjacent_find(
      uses.begin(), uses.end(), [](const Use& a, const Use& b) { return a.slot == b.slot; });
  if (twice != uses.end()) {
    reject(argument, "each slot at most once, as each is written", twice->slot, (twice + 1)->entry);
  }
}

// Throws if a slot of `written` is also one of `other`, unless `same_entry_allowed` and the same
// entry uses it.
void check_apart(const char* argument, const std::vector<Use>& written, const char* other_argument,
                 const std::vector<Use>& other, bool same_entry_allowed) {
  auto at = other.begin();
  for (const Use& use : written) {
    while (at != other.end() && at->slot < use.slot) ++at;
    for (auto same = at; same != other.end() && same->slot == use.slot; ++same) {
      if (same_entry_allowed && same->entry == use.entry) continue;
      reject(argument,
             std::string("slots apart from those of ") + other_argument + " in the same storage",
             use.slot, use.entry);
    }
  }
}

bool share_storage(const TensorView& a, const TensorView& b) {
  return a.defined() && b.defined() && a.data == b.data && a.numel() > 0 && b.numel() > 0;
}

std::int64_t length_of(const ForwardArgs& args, std::int64_t sequence) {
  if (!args.cu_seqlens.defined()) return args.q.shape[1];
  return int_at(args.cu_seqlens, sequence + 1) - int_at(args.cu_seqlens, sequence);
}

void check_checkpoint_entries(const ForwardArgs& args, const Sizes& sizes) {
  const std::int64_t entries = args.checkpoint_slots.shape[0];
  for (std::int64_t i = 0; i < entries; ++i) {
    if (int_at(args.checkpoint_slots, i) < 0) continue;  // skipped, whatever the rest says
    const std::int64_t sequence = int_at(args.checkpoint_sequences, i);
    if (sequence < 0 || sequence >= sizes.sequences) {
      reject("checkpoint_sequences",
             "sequences from 0 to N - 1 = " + std::to_string(sizes.sequences - 1), sequence, i);
    }
    const std::int64_t position = int_at(args.checkpoint_positions, i);
    const std::int64_t length = length_of(args, sequence);
    if (position < 0 || position > length || position % kCheckpointStep != 0) {
      reject("checkpoint_positions",
             "multiples of " + std::to_string(kCheckpointStep) + " from 0 to the length " +
                 std::to_string(length) + " of sequence " + std::to_string(sequence),
             position, i);
    }
  }
}

}  // namespace

void validate_cu_seqlens(const TensorView& cu_seqlens, std::int64_t tokens) {
  const std::int64_t last = cu_seqlens.shape[0] - 1;
  std::int64_t previous = int_at(cu_seqlens, 0);
  if (previous != 0) reject("cu_seqlens", "0 as the first offset", previous, 0);
  for (std::int64_t i = 1; i <= last; ++i) {
    const std::int64_t offset = int_at(cu_seqlens, i);
    if (offset < previous) {
      reject("cu_seqlens",
             "offsets that do not decrease (" + std::to_string(previous) + " comes before)", offset,
             i);
    }
    previous = offset;
  }
  if (previous > tokens) {
    reject("cu_seqlens", "offsets up to T = " + std::to_string(tokens), previous, last);
  }
}

void validate_contents(const ForwardArgs& args, const Sizes& sizes) {
  if (args.cu_seqlens.defined()) validate_cu_seqlens(args.cu_seqlens, sizes.tokens);

  // Plain states need none of the lists: sequence n owns slot n.
  const bool pools = args.initial_state_indices.defined() || args.final_state_indices.defined();
  if (!pools && !args.checkpoint_states.defined()) return;

  std::vector<Use> read, written, kept;
  if (args.initial_state.defined()) {
    read = uses_of(args.initial_state, args.initial_state_indices);
    check_slots("initial_state_indices", read, args.initial_state.shape[0]);
  }
  if (args.final_state.defined()) {
    written = uses_of(args.final_state, args.final_state_indices);
    check_slots("final_state_indices", written, args.final_state.shape[0]);
    check_written_once("final_state_indices", written);
  }
  if (args.checkpoint_states.defined()) {
    kept = uses_of(args.checkpoint_states, args.checkpoint_slots);
    check_slots("checkpoint_slots", kept, args.checkpoint_states.shape[0]);
    check_written_once("checkpoint_slots", kept);
    check_checkpoint_entries(args, sizes);
  }
  // A sequence may write the slot that it started from; another's would race with that one's
  // reading.
  if (share_storage(args.final_state, args.initial_state)) {
    check_apart("final_state_indices", written, "other sequences' initial_state_indices", read,
                true);
  }
  if (share_storage(args.checkpoint_states, args.initial_state)) {
    check_apart("checkpoint_slots", kept, "initial_state_indices", read, false);
  }
  if (share_storage(args.checkpoint_states, args.final_state)) {
    check_apart("checkpoint_slots", kept, "final_state_indices", written, false);
  }
}

}  // namespace flash_kda
