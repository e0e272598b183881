// The host decisions of the SM90 backend without a GPU: what is served, the grid, the workspace,
// tensor maps. The arrays are views of device memory that is never touched.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/sm90/plan.h"
#include "cuda/sm90/segments.h"
#include "cuda/sm90/tensor_map_layout.h"
#include "cuda/sm90/traits.h"
#include "flash_kda/flash_kda.h"
#include "validate.h"

namespace flash_kda::sm90 {
namespace {

constexpr Device kGpu{DeviceType::kCuda, 0};
constexpr int kH200 = 132;  // multiprocessors

// Device addresses for arrays that nobody reads, far enough apart not to overlap.
void* address(std::int64_t array) {
  return reinterpret_cast<void*>(std::uintptr_t{0x7f0000000000} +
                                 (static_cast<std::uintptr_t>(array) << 40));
}

struct Sizes4 {
  std::int64_t batch = 1, tokens = 100, heads = 2, dim = 128;
};

// A call of this size; packed if `sequences` > 0.
ForwardArgs call(Sizes4 s, std::int64_t sequences = 0) {
  ForwardArgs args;
  std::int64_t next = 1;
  for (TensorView* view : {&args.q, &args.k, &args.v, &args.g, &args.out}) {
    *view = TensorView::dense(address(next++), DType::kBFloat16,
                              {s.batch, s.tokens, s.heads, s.dim}, kGpu);
  }
  args.beta =
      TensorView::dense(address(next++), DType::kBFloat16, {s.batch, s.tokens, s.heads}, kGpu);
  const std::int64_t n = sequences > 0 ? sequences : s.batch;
  args.final_state =
      TensorView::dense(address(next++), DType::kFloat32, {n, s.heads, s.dim, s.dim}, kGpu);
  if (sequences > 0) {
    args.cu_seqlens = TensorView::dense(address(next++), DType::kInt64, {sequences + 1}, kGpu);
  }
  return args;
}

// What plan_forward hands to the backend's plan.
ForwardPlan sized(const ForwardArgs& args) {
  const Sizes sizes = validate(args);
  ForwardPlan result;
  result.backend = Backend::kCudaSm90;
  result.batch = sizes.batch;
  result.tokens = sizes.tokens;
  result.sequences = sizes.sequences;
  result.key_heads = sizes.key_heads;
  result.value_heads = sizes.value_heads;
  result.key_dim = sizes.key_dim;
  result.value_dim = sizes.value_dim;
  result.varlen = sizes.varlen;
  return result;
}

// As plan_forward does, with a device that is not there.
ForwardPlan planned(const ForwardArgs& args, int multiprocessors = kH200, int value_split = 0) {
  ForwardPlan result = sized(args);
  result.options.value_split = value_split;
  plan(args, multiprocessors, result);
  return result;
}

template <class Error>
std::string message(const ForwardArgs& args, int value_split = 0) {
  try {
    planned(args, kH200, value_split);
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no such exception";
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Sm90Plan, OneBlockAHeadWhenTheyFillTheDevice) {
  const ForwardPlan p = planned(call({1, 8192, 96, 128}));
  EXPECT_EQ(p.chunk, kChunk);
  EXPECT_EQ(p.value_split, 1);
  EXPECT_EQ(p.grid, 96);
  EXPECT_EQ(p.workspace_bytes, 0U);
  EXPECT_EQ(p.sequence_segments, 1);
}

TEST(Sm90Plan, TwoBlocksAHeadWhileTheyFitAtOnce) {
  EXPECT_EQ(planned(call({1, 8192, 66, 128})).value_split, 2);
  EXPECT_EQ(planned(call({1, 8192, 66, 128})).grid, 132);
  EXPECT_EQ(planned(call({1, 8192, 67, 128})).value_split, 1);
  EXPECT_EQ(planned(call({1, 8192, 67, 128})).grid, 67);
  EXPECT_EQ(planned(call({1, 8192, 66, 128}), 131).value_split, 1);
  EXPECT_EQ(planned(call({3, 64, 22, 128})).grid, 132);
}

TEST(Sm90Plan, TakesTheSplitThatIsAskedFor) {
  EXPECT_EQ(planned(call({1, 64, 2, 128}), kH200, 1).grid, 2);
  EXPECT_EQ(planned(call({1, 64, 96, 128}), kH200, 2).grid, 132);
  EXPECT_TRUE(contains(planned(call({1, 64, 96, 128}), kH200, 2).reason, "as asked"));
  EXPECT_TRUE(contains(message<NotImplementedError>(call({}), 3), "value_split = 3"));
}

TEST(Sm90Plan, PackedBatchesAreBalancedWhenBlocksTakeTurns) {
  // 6 x 96 items on 132 blocks: the schedule's counters, and a list of 6 spans; each rounded up.
  const ForwardPlan mixed = planned(call({1, 8192, 96, 128}, 6));
  EXPECT_EQ(mixed.grid, 132);
  EXPECT_EQ(mixed.workspace_bytes, 256U + 256U);
  EXPECT_TRUE(contains(mixed.reason, "longest first")) << mixed.reason;
  EXPECT_EQ(planned(call({1, 4096, 96, 128}, 4096)).workspace_bytes, 256U + 4096U * sizeof(Span));
  // All at once: nothing to balance.
  EXPECT_EQ(planned(call({1, 8192, 44, 128}, 3)).workspace_bytes, 0U);
  // A batch of equal lengths needs no list.
  EXPECT_EQ(planned(call({6, 1000, 96, 128})).workspace_bytes, 0U);
}

// Heads that fill the device are not cut, whatever their sequences: the six published cases.
TEST(Sm90Plan, TheHeadlineCasesStayInOnePiece) {
  for (const std::int64_t heads : {64, 96}) {
    for (const ForwardPlan& p :
         {planned(call({1, 8192, heads, 128})), planned(call({1, 8192, heads, 128}, 6)),
          planned(call({8, 1024, heads, 128}))}) {
      EXPECT_EQ(p.sequence_segments, 1);
      EXPECT_LE(p.workspace_bytes, std::size_t{64} << 20);
      EXPECT_FALSE(contains(p.reason, "segments of")) << p.reason;
      EXPECT_TRUE(contains(p.reason, p.varlen ? "2 launches" : "1 launch")) << p.reason;
    }
  }
}

TEST(Sm90Plan, FewHeadsAreCutIntoSegments) {
  // 8 heads take 8 of 132 multiprocessors; 16 segments of each fit at once, and one more.
  const ForwardPlan p = planned(call({1, 8192, 8, 128}));
  const Segments s = SegmentRule::of(8, kH200).segments(8192);
  EXPECT_EQ(s.count, 17);
  EXPECT_EQ(p.sequence_segments, 17);
  EXPECT_EQ(p.value_split, 1);
  EXPECT_EQ(p.grid, 8 * 16);
  EXPECT_EQ(p.workspace_bytes, static_cast<std::size_t>(8 * s.slots()) * 65536U);
  const std::string words = std::to_string(s.first) + " chunks, 16 of ";
  EXPECT_TRUE(contains(p.reason, "17 segments: one of " + words)) << p.reason;
  EXPECT_TRUE(contains(p.reason, "3 launches")) << p.reason;
  EXPECT_TRUE(contains(p.describe(), "up to 17 segments a sequence")) << p.describe();

  // A packed batch has its lengths on the device: what they can be is what the plan knows.
  const ForwardPlan packed = planned(call({1, 8192, 8, 128}, 3));
  EXPECT_EQ(packed.sequence_segments, 17);
  EXPECT_GT(packed.workspace_bytes, p.workspace_bytes);
  EXPECT_TRUE(contains(packed.reason, "4 launches")) << packed.reason;
  EXPECT_TRUE(contains(packed.reason, "up to 17 segments")) << packed.reason;
}

TEST(Sm90Plan, SaysWhyASequenceStaysInOnePiece) {
  EXPECT_TRUE(contains(planned(call({1, 8192, 34, 128})).reason, "heads enough"));
  EXPECT_TRUE(contains(planned(call({1, 512, 4, 128})).reason, "too short"));
  EXPECT_TRUE(contains(planned(call({1, 512, 4, 128}, 3)).reason, "too short"));
}

TEST(Sm90Plan, NoSplitWhenItIsSwitchedOff) {
  ForwardArgs args = call({1, 8192, 8, 128});
  ForwardPlan off = sized(args);
  off.options.sequence_split = false;
  plan(args, kH200, off);
  EXPECT_EQ(off.sequence_segments, 1);
  EXPECT_EQ(off.value_split, 2);
  EXPECT_EQ(off.grid, 16);
  EXPECT_EQ(off.workspace_bytes, 0U);
  EXPECT_TRUE(contains(off.reason, "in one piece, as asked")) << off.reason;
  EXPECT_TRUE(contains(off.reason, "1 launch")) << off.reason;
}

// Each sequence of a batch is cut as it would be alone.
TEST(Sm90Plan, ABatchIsCutAsOneSequenceIs) {
  const ForwardPlan one = planned(call({1, 8192, 8, 128})), six = planned(call({6, 8192, 8, 128}));
  EXPECT_EQ(six.sequence_segments, one.sequence_segments);
  EXPECT_EQ(six.workspace_bytes, 6 * one.workspace_bytes);
  EXPECT_EQ(six.grid, kH200);
}

// Work is counted by value heads.
TEST(Sm90Plan, MoreValueHeadsThanKeyHeads) {
  ForwardArgs args = call({1, 100, 12, 128}, 4);
  const ForwardPlan equal = planned(args);
  for (TensorView* view : {&args.q, &args.k}) {
    *view = TensorView::dense(view->data, DType::kBFloat16, {1, 100, 3, 128}, kGpu);
  }
  const ForwardPlan grouped = planned(args);
  EXPECT_EQ(grouped.key_heads, 3);
  EXPECT_EQ(grouped.value_heads, 12);
  EXPECT_EQ(grouped.grid, equal.grid);
  EXPECT_EQ(grouped.value_split, equal.value_split);
}

TEST(Sm90Plan, EmptyCalls) {
  EXPECT_EQ(planned(call({1, 0, 96, 128})).grid, 96);
  EXPECT_EQ(planned(call({0, 64, 96, 128})).grid, 0);
}

TEST(Sm90Plan, IsPure) {
  ForwardArgs args = call({1, 500, 64, 128}, 5);
  const std::string before = planned(args).describe();
  args.q.data = address(40);
  args.beta.stride[1] = 6288;
  EXPECT_EQ(planned(args).describe(), before);
}

TEST(Sm90Plan, NamesWhatIsNotServed) {
  EXPECT_TRUE(contains(message<NotImplementedError>(call({1, 64, 2, 64})), "K = 64"));
  ForwardArgs args = call({});
  args.gate = GateKind::kSoftplus;
  args.A_log = TensorView::dense(address(20), DType::kFloat32, {2}, kGpu);
  EXPECT_TRUE(contains(message<NotImplementedError>(args), "softplus"));
  args = call({});
  args.gate = GateKind::kLogDecay;
  EXPECT_TRUE(contains(message<NotImplementedError>(args), "log_decay"));
  args = call({});
  args.g.dtype = DType::kFloat32;
  EXPECT_TRUE(contains(message<NotImplementedError>(args), "g of type float32"));
  args = call({});
  for (TensorView* view : {&args.q, &args.k, &args.v, &args.out}) view->dtype = DType::kFloat16;
  EXPECT_TRUE(contains(message<NotImplementedError>(args), "q: expected bfloat16 on cuda:0"));
  args = call({});
  args.final_state_indices = TensorView::dense(address(20), DType::kInt64, {1}, kGpu);
  EXPECT_TRUE(contains(message<NotImplementedError>(args), "final_state_indices"));
  args = call({});
  args.checkpoint_states = TensorView::dense(address(20), DType::kFloat32, {1, 2, 128, 128}, kGpu);
  for (TensorView* view :
       {&args.checkpoint_sequences, &args.checkpoint_positions, &args.checkpoint_slots}) {
    *view = TensorView::dense(address(21), DType::kInt64, {1}, kGpu);
  }
  EXPECT_TRUE(contains(message<NotImplementedError>(args), "checkpoint_states"));
}

TEST(Sm90Plan, ServesEitherBeta) {
  ForwardArgs args = call({});
  args.beta.dtype = DType::kFloat32;
  EXPECT_EQ(planned(args).grid, 4);
}

// A plan may come from a call with other strides and kinds: each call is checked by itself.
TEST(Sm90Plan, ChecksEachCallWhateverPlanItComesWith) {
  const ForwardPlan good = planned(call({}));
  ForwardArgs args = call({});
  EXPECT_NO_THROW(check_call(args, good));
  args.v.data = static_cast<char*>(args.v.data) + 2;
  EXPECT_THROW(check_call(args, good), ValueError);
  args = call({});
  args.gate = GateKind::kSoftplus;
  EXPECT_THROW(check_call(args, good), NotImplementedError);
}

TEST(Sm90TensorMap, NamesTheArgumentAndWhatCame) {
  struct Wrong {
    const char* name;
    TensorView ForwardArgs::* view;
  };
  for (const Wrong& w :
       {Wrong{"q", &ForwardArgs::q}, Wrong{"k", &ForwardArgs::k}, Wrong{"v", &ForwardArgs::v},
        Wrong{"g", &ForwardArgs::g}, Wrong{"out", &ForwardArgs::out}}) {
    ForwardArgs args = call({});
    TensorView& view = args.*w.view;
    view.data = static_cast<char*>(view.data) + 2;
    EXPECT_EQ(message<ValueError>(args).rfind(std::string(w.name) + ": expected ", 0), 0U);
    EXPECT_TRUE(contains(message<ValueError>(args),
                         "aligned to 16 bytes on CUDA, got one that is 2 bytes past"));
    args = call({});
    (args.*w.view).stride[1] = 260;
    EXPECT_TRUE(contains(message<ValueError>(args), "stride 260 in dimension 1"));
    EXPECT_EQ(message<ValueError>(args).rfind(std::string(w.name) + ": expected ", 0), 0U);
  }
}

TEST(Sm90TensorMap, StridesAtTheirEnds) {
  TensorView view = call({2, 100, 2, 128}).q;
  view.stride = {(std::int64_t{1} << 39) - 8, 264, 128, 1};
  EXPECT_NO_THROW(check_tensor_map("q", view));
  view.stride[0] += 8;
  EXPECT_THROW(check_tensor_map("q", view), ValueError);
  view.stride[0] = 0;
  EXPECT_THROW(check_tensor_map("q", view), ValueError);
  view.stride[0] = -256;
  EXPECT_THROW(check_tensor_map("q", view), ValueError);
  // The stride of a dimension of one element means nothing.
  view.shape[0] = 1;
  for (const std::int64_t stride : {-1, 0, 3}) {
    view.stride[0] = stride;
    EXPECT_NO_THROW(check_tensor_map("q", view));
  }
}

TEST(Sm90TensorMap, Layout) {
  // Columns 256..511 of a projection of 1024: 2 heads, T = 50, B = 3.
  TensorView view = call({3, 50, 2, 128}).q;
  view.stride = {50 * 1024, 1024, 128, 1};
  const TensorMapLayout layout = tensor_map_layout(view);
  EXPECT_EQ(layout.extents, (std::array<std::uint64_t, 4>{128, 2, 50, 3}));
  EXPECT_EQ(layout.strides, (std::array<std::uint64_t, 3>{256, 2048, 102400}));
  EXPECT_EQ(layout.box, (std::array<std::uint32_t, 4>{64, 1, 32, 1}));
}

TEST(Sm90TensorMap, LayoutOfSizeOneDimensions) {
  TensorView view = call({1, 50, 1, 128}).q;
  view.stride = {-7, 640, 0, 1};
  EXPECT_EQ(tensor_map_layout(view).strides, (std::array<std::uint64_t, 3>{256, 1280, 256}));
}

TEST(Sm90TensorMap, LayoutPastTwoToThe32) {
  TensorView view = call({2, 1 << 20, 64, 128}).q;
  view.stride = {std::int64_t{1} << 38, std::int64_t{1} << 17, std::int64_t{1} << 10, 1};
  const TensorMapLayout layout = tensor_map_layout(view);
  EXPECT_EQ(layout.strides,
            (std::array<std::uint64_t, 3>{1 << 11, 1 << 18, std::uint64_t{1} << 39}));
}

}  // namespace
}  // namespace flash_kda::sm90
