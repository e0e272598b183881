// Rules about what integer arrays hold, and about states and slots that share storage.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "flash_kda/flash_kda.h"
#include "recurrence.h"
#include "valid_call.h"

namespace flash_kda::testing {
namespace {

class Contents : public ::testing::TestWithParam<WrongCall> {};

TEST_P(Contents, NamesTheArgument) { expect_value_error(GetParam()); }

std::vector<WrongCall> wrong_contents() {
  return {
      {"CuSeqlensStart", "cu_seqlens", "0 as the first offset, got 3 at position 0",
       [](Case& c) { c.cu_seqlens.set(3, 0); }},
      {"CuSeqlensNegative", "cu_seqlens", "got -1", [](Case& c) { c.cu_seqlens.set(-1, 0); }},
      {"CuSeqlensDecreasing", "cu_seqlens", "(70 comes before), got 5 at position 2",
       [](Case& c) { c.cu_seqlens.set(5, 2); }},
      {"CuSeqlensPastTheEnd", "cu_seqlens", "T = 203, got 204",
       [](Case& c) { c.cu_seqlens.set(204, 3); }},
      {"CuSeqlensHuge", "cu_seqlens", "T = 203", [](Case& c) { c.cu_seqlens.set(0x1p60, 3); }},
      {"InitialIndexTooLarge", "initial_state_indices", "5 slots of the pool, got 5 at position 1",
       [](Case& c) { c.initial_slots.set(5, 1); }},
      {"FinalIndexTooLarge", "final_state_indices", "6 slots of the pool, got 6 at position 0",
       [](Case& c) { c.final_slots.set(6, 0); }},
      {"FinalIndexTwice", "final_state_indices",
       "at most once, as each is written, got 5 at position 1",
       [](Case& c) { c.final_slots.set(5, 0); }},
      {"CheckpointSlotTooLarge", "checkpoint_slots", "3 slots",
       [](Case& c) { c.mark_slots.set(3, 1); }},
      {"CheckpointSlotTwice", "checkpoint_slots", "at most once",
       [](Case& c) { c.mark_slots.set(1, 1); }},
      {"CheckpointSequenceTooLarge", "checkpoint_sequences", "N - 1 = 2, got 3",
       [](Case& c) { c.mark_sequences.set(3, 0); }},
      {"CheckpointSequenceNegative", "checkpoint_sequences", "got -1",
       [](Case& c) { c.mark_sequences.set(-1, 0); }},
      {"CheckpointPositionUneven", "checkpoint_positions", "multiples of 64",
       [](Case& c) { c.mark_positions.set(70, 0); }},
      {"CheckpointPositionTooLarge", "checkpoint_positions", "length 70 of sequence 0, got 128",
       [](Case& c) { c.mark_positions.set(128, 0); }},
      {"CheckpointPositionNegative", "checkpoint_positions", "got -64",
       [](Case& c) { c.mark_positions.set(-64, 0); }},
      {"CheckpointOfEmptySequence", "checkpoint_positions", "length 0 of sequence 1, got 64",
       [](Case& c) { c.mark_sequences.set(1, 0); }},
  };
}

void share(TensorView& a, const TensorView& with) {
  const std::int64_t slots = a.shape[0];
  a = with;
  a.shape[0] = std::max(slots, with.shape[0]);
}

// Both states in the final state's storage (6 slots, bfloat16).
void share_states(Case& c, double initial0, double initial1, double initial2) {
  share(c.args.initial_state, c.final.view());
  c.initial_slots.set(initial0, 0);
  c.initial_slots.set(initial1, 1);
  c.initial_slots.set(initial2, 2);
}

std::vector<WrongCall> wrong_memory() {
  return {
      {"OutIsV", "out", "apart from v", [](Case& c) { c.args.out = c.args.v; }},
      {"OutStartsAtQ", "out", "apart from q", [](Case& c) { c.args.out.data = c.args.q.data; }},
      {"OutOverlapsVByOneToken", "out", "apart from v",
       [](Case& c) {
         c.v = Array(DType::kBFloat16, {1, 405, 4, 8});
         c.args.v.data = c.v.view().data;
         c.args.out.data = static_cast<std::uint16_t*>(c.args.v.data) + 202 * c.args.v.stride[1];
       }},
      {"OutBroadcast", "out", "of its own", [](Case& c) { c.args.out.stride[1] = 0; }},
      {"OutWindows", "out", "of its own", [](Case& c) { c.args.out.stride[1] = 7; }},
      {"FinalStateBroadcast", "final_state", "of its own",
       [](Case& c) { c.args.final_state.stride[0] = 0; }},
      {"FinalStateIsG", "final_state", "apart from g",
       [](Case& c) { c.args.final_state.data = c.args.g.data; }},
      {"FinalStateIsOut", "final_state", "apart from out",
       [](Case& c) { c.args.final_state.data = c.args.out.data; }},
      {"FinalStateOnIndices", "final_state", "apart from final_state_indices",
       [](Case& c) { c.args.final_state_indices.data = c.args.final_state.data; }},
      {"CheckpointsAreInput", "checkpoint_states", "apart from dt_bias",
       [](Case& c) { c.args.dt_bias.data = c.args.checkpoint_states.data; }},
      {"StatesShiftedByASlot", "final_state", "apart from initial_state",
       [](Case& c) {
         share_states(c, 0, -1, -1);
         c.args.initial_state.shape[0] = 5;
         c.args.initial_state.data =
             static_cast<std::uint16_t*>(c.final.view().data) + c.final.view().stride[0];
       }},
      {"StatesOfTwoDtypes", "final_state", "apart from initial_state",
       [](Case& c) { c.args.final_state.data = c.args.initial_state.data; }},
      {"StatesOfTwoStrides", "final_state", "apart from initial_state",
       [](Case& c) {
         share_states(c, 0, -1, -1);
         c.args.initial_state.shape[0] = 3;
         c.args.initial_state.stride[0] *= 2;
       }},
      {"AnothersInitialSlot", "final_state_indices",
       "initial_state_indices in the same storage, got 5 at position 1",
       [](Case& c) { share_states(c, 0, -1, 5); }},
      {"AnothersInitialSlotShared", "final_state_indices", "got 0 at position 0",
       [](Case& c) { share_states(c, 0, 0, -1); }},
      {"CheckpointInInitialSlot", "checkpoint_slots", "apart from those of initial_state_indices",
       [](Case& c) {
         share(c.args.checkpoint_states, c.initial.view());
         c.mark_slots.set(4, 0);
       }},
      {"CheckpointInFinalSlot", "checkpoint_slots", "apart from those of final_state_indices",
       [](Case& c) {
         share(c.args.checkpoint_states, c.final.view());
         c.mark_slots.set(5, 0);
       }},
  };
}

INSTANTIATE_TEST_SUITE_P(Values, Contents, ::testing::ValuesIn(wrong_contents()), test_name);
INSTANTIATE_TEST_SUITE_P(Memory, Contents, ::testing::ValuesIn(wrong_memory()), test_name);

// The final state of a call whose states share the final state's storage, against the recurrence
// run beforehand.
void expect_good_shared(Case& c) {
  c.final.generate([n = 0]() mutable { return 0.25 * (n++ % 13) - 1.5; });
  c.out.poison();
  c.marks.poison();
  const RecurrenceResult want = recurrence(c.args);
  forward(c.args, plan_forward(c.args), nullptr, nullptr);
  for (const HeadError& e : head_errors(c.args, want)) {
    EXPECT_LE(e.out, 2.5e-3);
    EXPECT_LE(e.state, 2.5e-3);
    EXPECT_LE(e.checkpoint, c.args.checkpoint_states.dtype == DType::kFloat32 ? 2e-5 : 2.5e-3);
  }
}

TEST(ContentsAccept, OnePoolReadFromOneSlotAndWrittenToAnother) {
  Case c(valid_spec());
  share_states(c, 1, -1, 2);  // final slots 0, 5, none
  expect_good_shared(c);
}

TEST(ContentsAccept, TheSequencesOwnSlot) {
  Case c(valid_spec());
  share_states(c, 0, 5, 3);
  expect_good_shared(c);
}

// Several sequences may start from one slot that nobody writes: a shared prefix.
TEST(ContentsAccept, ASharedPrefix) {
  Case c(valid_spec());
  share_states(c, 4, 4, 4);
  expect_good_shared(c);
}

TEST(ContentsAccept, StatesAndCheckpointsInOnePool) {
  Case c(valid_spec());
  share_states(c, 0, -1, 4);
  share(c.args.checkpoint_states, c.final.view());
  c.mark_slots.set(2, 1);
  expect_good_shared(c);
}

TEST(ContentsAccept, StridedIndexArrays) {
  Case c(valid_spec());
  const auto spread = [](const Array& dense) {
    Array strided(dense.view().dtype, {dense.view().shape[0]}, {3});
    for (std::int64_t i = 0; i < dense.view().shape[0]; ++i) strided.set(dense.get(i), i);
    return strided;
  };
  const Array cu = spread(c.cu_seqlens), initial = spread(c.initial_slots),
              final = spread(c.final_slots);
  const Array sequences = spread(c.mark_sequences), positions = spread(c.mark_positions),
              slots = spread(c.mark_slots);
  c.args.cu_seqlens = cu.view();
  c.args.initial_state_indices = initial.view();
  c.args.final_state_indices = final.view();
  c.args.checkpoint_sequences = sequences.view();
  c.args.checkpoint_positions = positions.view();
  c.args.checkpoint_slots = slots.view();
  expect_good(c, c.args);
}

// A skipped checkpoint may hold anything else.
TEST(ContentsAccept, RubbishInSkippedCheckpoints) {
  Case c(valid_spec());
  c.mark_sequences.set(99, 2);
  c.mark_positions.set(-5, 2);
  expect_good(c, c.args);
}

TEST(ContentsAccept, ColumnBlocksOfOneMatrix) {
  Case c(valid_spec());
  // q | k | v | out of each token side by side, with beta's pitch as odd as a fused projection
  // makes it.
  const std::int64_t tokens = 203, pitch = 2 * 32 + 2 * 32 + 3;
  Array fused(DType::kBFloat16, {tokens, pitch});
  const auto block = [&](std::int64_t column, std::int64_t heads, std::int64_t dim) {
    TensorView view =
        TensorView::dense(fused.view().data, DType::kBFloat16, {1, tokens, heads, dim});
    view.data = static_cast<std::uint16_t*>(view.data) + column;
    view.stride = {tokens * pitch, pitch, dim, 1};
    return view;
  };
  Random random(3);
  c.args.q = block(0, 2, 16);
  c.args.k = block(32, 2, 16);
  c.args.v = block(64, 4, 8);
  c.args.out = block(96, 4, 8);
  for (const TensorView* x : {&c.args.q, &c.args.k, &c.args.v}) {
    for_each_offset(*x, [&](std::int64_t o) { store(*x, o, random.normal()); });
  }
  expect_good(c, c.args);
  c.args.out.data = static_cast<std::uint16_t*>(c.args.out.data) - 1;  // one column into v
  EXPECT_THROW(plan_forward(c.args), ValueError);
}

}  // namespace
}  // namespace flash_kda::testing
