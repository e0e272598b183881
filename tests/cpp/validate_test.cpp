// Each rule about one argument's presence, shape, dtype, strides, device and range: the right type
// of error, the argument's name, no output touched, and a good call right afterwards.
#include "validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "flash_kda/flash_kda.h"
#include "valid_call.h"

namespace flash_kda::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

class Validate : public ::testing::TestWithParam<WrongCall> {};

TEST_P(Validate, NamesTheArgument) { expect_value_error(GetParam()); }

// Swaps two dimensions of a view, strides included.
void transpose(TensorView& view, std::size_t a, std::size_t b) {
  std::swap(view.shape[a], view.shape[b]);
  std::swap(view.stride[a], view.stride[b]);
}

std::vector<WrongCall> wrong_presence() {
  return {
      {"QMissing", "q", "[B, T, H, K]", [](Case& c) { c.args.q = {}; }},
      {"KMissing", "k", "[B, T, H, K]", [](Case& c) { c.args.k = {}; }},
      {"VMissing", "v", "got nothing", [](Case& c) { c.args.v = {}; }},
      {"GMissing", "g", "[B, T, HV, K]", [](Case& c) { c.args.g = {}; }},
      {"BetaMissing", "beta", "[B, T, HV]", [](Case& c) { c.args.beta = {}; }},
      {"OutMissing", "out", "[B, T, HV, V]", [](Case& c) { c.args.out = {}; }},
      {"QNull", "q", "null", [](Case& c) { c.args.q.data = nullptr; }},
      {"OutNull", "out", "null", [](Case& c) { c.args.out.data = nullptr; }},
      {"CuSeqlensNull", "cu_seqlens", "null", [](Case& c) { c.args.cu_seqlens.data = nullptr; }},
      {"InitialIndicesWithoutState", "initial_state_indices", "nothing without initial_state",
       [](Case& c) { c.args.initial_state = {}; }},
      {"FinalIndicesWithoutState", "final_state_indices", "nothing without final_state",
       [](Case& c) { c.args.final_state = {}; }},
      {"CheckpointsWithoutStates", "checkpoint_sequences", "nothing without checkpoint_states",
       [](Case& c) { c.args.checkpoint_states = {}; }},
      {"CheckpointSequencesMissing", "checkpoint_sequences", "checkpoint_states",
       [](Case& c) { c.args.checkpoint_sequences = {}; }},
      {"CheckpointPositionsMissing", "checkpoint_positions", "[M]",
       [](Case& c) { c.args.checkpoint_positions = {}; }},
      {"CheckpointSlotsMissing", "checkpoint_slots", "[M]",
       [](Case& c) { c.args.checkpoint_slots = {}; }},
  };
}

std::vector<WrongCall> wrong_shapes() {
  return {
      {"QRank", "q", "[B, T, H, K]", [](Case& c) { c.args.q.rank = 3; }},
      {"QRankTooLarge", "q", "[B, T, H, K]", [](Case& c) { c.args.q.rank = 9; }},
      {"QNegativeExtent", "q", "extents of 0 or more", [](Case& c) { c.args.q.shape[1] = -1; }},
      {"QNoHead", "q", "at least one head", [](Case& c) { c.args.q.shape[2] = 0; }},
      {"KHeads", "k", "= [1, 203, 2, 16]", [](Case& c) { c.args.k.shape[2] = 1; }},
      {"KTokens", "k", "[1, 202, 2, 16]", [](Case& c) { c.args.k.shape[1] = 202; }},
      {"KeyDimZero", "q", "K from 1 to 256",
       [](Case& c) { c.args.q.shape[3] = c.args.k.shape[3] = c.args.g.shape[3] = 0; }},
      {"KeyDimTooLarge", "q", "K from 1 to 256", [](Case& c) { c.args.q.shape[3] = 257; }},
      {"ValueDimZero", "v", "V from 1 to 256", [](Case& c) { c.args.v.shape[3] = 0; }},
      {"ValueDimTooLarge", "v", "V from 1 to 256", [](Case& c) { c.args.v.shape[3] = 257; }},
      {"ValueHeadsNoMultiple", "v", "multiple of q's H = 2",
       [](Case& c) { c.args.v.shape[2] = 3; }},
      {"ValueHeadsZero", "v", "multiple of q's H = 2", [](Case& c) { c.args.v.shape[2] = 0; }},
      {"VTokens", "v", "[1, 203, 4, 8]", [](Case& c) { c.args.v.shape[1] = 100; }},
      {"VHeadsFirst", "v", "[B, T, HV, V]", [](Case& c) { transpose(c.args.v, 1, 2); }},
      {"GHeads", "g", "= [1, 203, 4, 16]", [](Case& c) { c.args.g.shape[2] = 2; }},
      {"GPerHeadOnly", "g", "[B, T, HV, K]", [](Case& c) { c.args.g.rank = 3; }},
      {"BetaHeadsFirst", "beta", "= [1, 203, 4]", [](Case& c) { transpose(c.args.beta, 1, 2); }},
      {"BetaRank", "beta", "[B, T, HV]", [](Case& c) { c.args.beta.rank = 2; }},
      {"OutShape", "out", "= [1, 203, 4, 8]", [](Case& c) { c.args.out.shape[3] = 7; }},
      {"ALogElements", "A_log", "HV = 4 elements", [](Case& c) { c.args.A_log.shape[0] = 2; }},
      {"DtBiasPerHead", "dt_bias", "[HV, K] = [4, 16]",
       [](Case& c) {
         c.args.dt_bias = TensorView::dense(c.bias.view().data, DType::kFloat32, {4});
       }},
      {"DtBiasTransposed", "dt_bias", "[HV * K]", [](Case& c) { transpose(c.args.dt_bias, 0, 1); }},
      {"CuSeqlensRank", "cu_seqlens", "[N + 1]", [](Case& c) { c.args.cu_seqlens.rank = 2; }},
      {"CuSeqlensEmpty", "cu_seqlens", "at least one element",
       [](Case& c) { c.args.cu_seqlens.shape[0] = 0; }},
      {"InitialStateRank", "initial_state", "[N, HV, V, K]",
       [](Case& c) { c.args.initial_state.rank = 3; }},
      {"InitialStateTransposed", "initial_state", "[slots, HV, V, K] = [5, 4, 8, 16]",
       [](Case& c) {
         c.args.initial_state =
             TensorView::dense(c.initial.view().data, DType::kFloat32, {5, 4, 16, 8});
       }},
      {"FinalStateHeads", "final_state", "[6, 4, 8, 16]",
       [](Case& c) { c.args.final_state.shape[1] = 3; }},
      {"InitialStateOneMore", "initial_state", "[N, HV, V, K] = [3, 4, 8, 16]",
       [](Case& c) {
         c.args.initial_state_indices = {};
         c.args.initial_state.shape[0] = 4;
       }},
      {"FinalStateOneLess", "final_state", "[N, HV, V, K] = [3, 4, 8, 16]",
       [](Case& c) {
         c.args.final_state_indices = {};
         c.args.final_state.shape[0] = 2;
       }},
      {"InitialIndicesLength", "initial_state_indices", "[N] = [3]",
       [](Case& c) { c.args.initial_state_indices.shape[0] = 2; }},
      {"FinalIndicesRank", "final_state_indices", "[N]",
       [](Case& c) { c.args.final_state_indices.rank = 2; }},
      {"CheckpointStatesHeads", "checkpoint_states", "[3, 4, 8, 16]",
       [](Case& c) { c.args.checkpoint_states.shape[1] = 2; }},
      {"CheckpointPositionsLength", "checkpoint_positions", "= [3]",
       [](Case& c) { c.args.checkpoint_positions.shape[0] = 2; }},
      {"CheckpointSlotsLength", "checkpoint_slots", "= [3]",
       [](Case& c) { c.args.checkpoint_slots.shape[0] = 4; }},
      {"PackedBatchOfTwo", "cu_seqlens", "B = 1",
       [](Case& c) {
         for (TensorView* x : {&c.args.q, &c.args.k, &c.args.v}) x->shape[0] = 2;
       }},
      {"SizeOverflow", "q", "64-bit",
       [](Case& c) { c.args.q.shape[0] = c.args.q.shape[1] = std::int64_t{1} << 40; }},
      {"StrideOverflow", "q", "64-bit",
       [](Case& c) { c.args.q.stride[1] = std::int64_t{1} << 62; }},
      {"NegativeStrideOverflow", "k", "64-bit",
       [](Case& c) { c.args.k.stride[1] = std::numeric_limits<std::int64_t>::min(); }},
  };
}

std::vector<WrongCall> wrong_dtypes_strides_devices() {
  return {
      {"QFloat64", "q", "bfloat16, float16 or float32",
       [](Case& c) { c.args.q.dtype = DType::kFloat64; }},
      {"QInt32", "q", "got int32[1, 203, 2, 16]", [](Case& c) { c.args.q.dtype = DType::kInt32; }},
      {"QOther", "q", "a floating-point or integer dtype",
       [](Case& c) { c.args.q.dtype = DType::kOther; }},
      {"KUnlikeQ", "k", "bfloat16 as q", [](Case& c) { c.args.k.dtype = DType::kFloat16; }},
      {"VUnlikeQ", "v", "bfloat16 as q, got float16",
       [](Case& c) { c.args.v.dtype = DType::kFloat16; }},
      {"OutUnlikeQ", "out", "bfloat16 as q", [](Case& c) { c.args.out.dtype = DType::kFloat16; }},
      {"GFloat16", "g", "bfloat16 or float32", [](Case& c) { c.args.g.dtype = DType::kFloat16; }},
      {"BetaFloat64", "beta", "got float64", [](Case& c) { c.args.beta.dtype = DType::kFloat64; }},
      {"ALogBFloat16", "A_log", "float32", [](Case& c) { c.args.A_log.dtype = DType::kBFloat16; }},
      {"DtBiasBFloat16", "dt_bias", "float32",
       [](Case& c) { c.args.dt_bias.dtype = DType::kBFloat16; }},
      {"InitialStateFloat16", "initial_state", "bfloat16 or float32",
       [](Case& c) { c.args.initial_state.dtype = DType::kFloat16; }},
      {"FinalStateFloat64", "final_state", "bfloat16 or float32",
       [](Case& c) { c.args.final_state.dtype = DType::kFloat64; }},
      {"CheckpointStatesInt32", "checkpoint_states", "bfloat16 or float32",
       [](Case& c) { c.args.checkpoint_states.dtype = DType::kInt32; }},
      {"CuSeqlensFloat", "cu_seqlens", "int32 or int64",
       [](Case& c) { c.args.cu_seqlens.dtype = DType::kFloat32; }},
      {"InitialIndicesFloat", "initial_state_indices", "int32 or int64",
       [](Case& c) { c.args.initial_state_indices.dtype = DType::kFloat64; }},
      {"FinalIndicesOther", "final_state_indices", "a floating-point or integer dtype",
       [](Case& c) { c.args.final_state_indices.dtype = DType::kOther; }},
      {"CheckpointSlotsFloat", "checkpoint_slots", "int32 or int64",
       [](Case& c) { c.args.checkpoint_slots.dtype = DType::kFloat32; }},
      {"QColumnsStrided", "q", "dense last dimension", [](Case& c) { c.args.q.stride[3] = 2; }},
      {"KColumnsBroadcast", "k", "dense last dimension", [](Case& c) { c.args.k.stride[3] = 0; }},
      {"VColumnsStrided", "v", "dense last dimension", [](Case& c) { c.args.v.stride[3] = 2; }},
      {"GColumnsStrided", "g", "strides", [](Case& c) { c.args.g.stride[3] = -1; }},
      {"BetaColumnsStrided", "beta", "dense last dimension",
       [](Case& c) { c.args.beta.stride[2] = 2; }},
      {"OutColumnsStrided", "out", "dense last dimension",
       [](Case& c) { c.args.out.stride[3] = 2; }},
      {"ALogStrided", "A_log", "dense", [](Case& c) { c.args.A_log.stride[0] = 2; }},
      {"DtBiasStrided", "dt_bias", "dense last dimension",
       [](Case& c) { c.args.dt_bias.stride[1] = 2; }},
      {"InitialStateColumns", "initial_state", "dense last dimension",
       [](Case& c) { c.args.initial_state.stride[3] = 2; }},
      {"QMisaligned", "q", "aligned",
       [](Case& c) { c.args.q.data = static_cast<std::byte*>(c.args.q.data) + 1; }},
      {"KOtherDevice", "k", "on cpu", [](Case& c) { c.args.k.device = {DeviceType::kCuda, 0}; }},
      {"StateOtherDevice", "final_state", "got bfloat16[6, 4, 8, 16] on cuda:1",
       [](Case& c) { c.args.final_state.device = {DeviceType::kCuda, 1}; }},
      {"CuSeqlensOtherDevice", "cu_seqlens", "on cpu, where q is",
       [](Case& c) { c.args.cu_seqlens.device = {DeviceType::kCuda, 0}; }},
      {"ALogOtherDevice", "A_log", "on cpu",
       [](Case& c) { c.args.A_log.device = {DeviceType::kCuda, 0}; }},
      {"IndicesOtherDevice", "initial_state_indices", "on cpu",
       [](Case& c) { c.args.initial_state_indices.device = {DeviceType::kCuda, 0}; }},
      {"CheckpointsOtherDevice", "checkpoint_positions", "on cpu",
       [](Case& c) { c.args.checkpoint_positions.device = {DeviceType::kCuda, 0}; }},
      {"DeviceUnknown", "q", "CUDA device", [](Case& c) { c.args.q.device.type = DeviceType{7}; }},
  };
}

std::vector<WrongCall> wrong_options() {
  return {
      {"LowerBoundNan", "lower_bound", "[-5, 0], got nan",
       [](Case& c) { c.args.lower_bound = kNan; }},
      {"LowerBoundPositive", "lower_bound", "got 1", [](Case& c) { c.args.lower_bound = 1; }},
      {"LowerBoundTiny", "lower_bound", "got 1e-300", [](Case& c) { c.args.lower_bound = 1e-300; }},
      {"LowerBoundTooLow", "lower_bound", "got -6", [](Case& c) { c.args.lower_bound = -6; }},
      {"LowerBoundJustTooLow", "lower_bound", "got -5.000000000000001",
       [](Case& c) { c.args.lower_bound = std::nextafter(-5.0, -6.0); }},
      {"LowerBoundInfinite", "lower_bound", "got -inf",
       [](Case& c) { c.args.lower_bound = -kInf; }},
      {"ScaleNan", "scale", "finite", [](Case& c) { c.args.scale = kNan; }},
      {"ScaleInfinite", "scale", "got inf", [](Case& c) { c.args.scale = kInf; }},
      {"ScaleBeyondFloat32", "scale", "got 1e+39", [](Case& c) { c.args.scale = 1e39; }},
      {"GateUnknown", "gate", "got 9", [](Case& c) { c.args.gate = GateKind{9}; }},
      {"BetaKindUnknown", "beta_kind", "got 3", [](Case& c) { c.args.beta_kind = BetaKind{3}; }},
      {"ALogWithLogDecay", "A_log", "nothing",
       [](Case& c) {
         c.args.gate = GateKind::kLogDecay;
         c.args.dt_bias = {};
       }},
      {"DtBiasWithLogDecay", "dt_bias", "nothing",
       [](Case& c) {
         c.args.gate = GateKind::kLogDecay;
         c.args.A_log = {};
       }},
  };
}

INSTANTIATE_TEST_SUITE_P(Presence, Validate, ::testing::ValuesIn(wrong_presence()), test_name);
INSTANTIATE_TEST_SUITE_P(Shape, Validate, ::testing::ValuesIn(wrong_shapes()), test_name);
INSTANTIATE_TEST_SUITE_P(Kind, Validate, ::testing::ValuesIn(wrong_dtypes_strides_devices()),
                         test_name);
INSTANTIATE_TEST_SUITE_P(Option, Validate, ::testing::ValuesIn(wrong_options()), test_name);

TEST(ValidateAccepts, TheBoundsThemselves) {
  for (const double bound : {-5.0, -0.0, 0.0}) {
    Case c(valid_spec());
    c.args.lower_bound = bound;
    expect_good(c, c.args);
  }
}

// lower_bound means nothing to the other gates.
TEST(ValidateAccepts, AnyLowerBoundWithSoftplus) {
  Case c(valid_spec());
  c.args.gate = GateKind::kSoftplus;
  c.args.lower_bound = kNan;
  expect_good(c, c.args);
}

TEST(ValidateAccepts, StridesOfSizeOneDimensions) {
  CaseSpec spec;
  spec.lengths = {40};
  spec.values = 1;
  Case c(spec);
  const std::int64_t odd = -7;
  for (TensorView* x : {&c.args.q, &c.args.k, &c.args.v, &c.args.g, &c.args.out}) {
    x->stride[0] = x->stride[2] = odd;
  }
  c.args.v.stride[3] = c.args.out.stride[3] = odd;
  c.args.beta.stride[0] = c.args.beta.stride[2] = odd;
  for (TensorView* x : {&c.args.initial_state, &c.args.final_state}) {
    x->stride[0] = x->stride[1] = x->stride[2] = odd;
  }
  c.args.A_log.stride[0] = c.args.dt_bias.stride[0] = odd;
  expect_good(c, c.args);
}

TEST(ValidateAccepts, FlatBiasAndShapedALog) {
  Case c(valid_spec());
  c.args.dt_bias = TensorView::dense(c.bias.view().data, DType::kFloat32, {64});
  c.args.A_log = TensorView::dense(c.rate.view().data, DType::kFloat32, {1, 1, 4, 1});
  expect_good(c, c.args);
}

TEST(ValidateAccepts, BroadcastInputs) {
  Case c(valid_spec());
  c.args.k.stride[1] = 0;  // one key for all tokens
  c.args.v.stride[2] = 0;  // one value for all heads
  expect_good(c, c.args);
}

TEST(ValidateAccepts, ReversedTokens) {
  Case c(valid_spec());
  const std::int64_t last = c.args.q.shape[1] - 1;
  c.args.q.data = static_cast<std::uint16_t*>(c.args.q.data) + last * c.args.q.stride[1];
  c.args.q.stride[1] = -c.args.q.stride[1];
  expect_good(c, c.args);
}

TEST(ValidateAccepts, NullWhereThereAreNoElements) {
  const TensorView none = TensorView::dense(nullptr, DType::kBFloat16, {2, 0, 3, 8});
  ForwardArgs args;
  args.q = args.k = args.v = args.g = args.out = none;
  args.beta = TensorView::dense(nullptr, DType::kFloat32, {2, 0, 3});
  const ForwardPlan plan = plan_forward(args);
  EXPECT_EQ(plan.sequences, 2);
  EXPECT_NO_THROW(forward(args, plan, nullptr, nullptr));
}

// Arrays on a device are never dereferenced, index arrays included: these pointers lead nowhere.
TEST(ValidateOnCuda, ReadsNoDeviceMemory) {
  Case c(valid_spec());
  ForwardArgs& a = c.args;
  std::uintptr_t address = std::uintptr_t{1} << 40;
  for (TensorView* x : {&a.q, &a.k, &a.v, &a.g, &a.beta, &a.out, &a.A_log, &a.dt_bias,
                        &a.initial_state, &a.final_state, &a.initial_state_indices,
                        &a.final_state_indices, &a.cu_seqlens, &a.checkpoint_states,
                        &a.checkpoint_sequences, &a.checkpoint_positions, &a.checkpoint_slots}) {
    x->device = {DeviceType::kCuda, 1};
    x->data = reinterpret_cast<void*>(address);  // NOLINT: deliberately invalid
    address += std::uintptr_t{1} << 30;
  }
  const Sizes sizes = validate(a);
  EXPECT_EQ(sizes.sequences, 3);
  EXPECT_EQ(sizes.value_heads, 4);
  EXPECT_TRUE(sizes.varlen);
}

TEST(ValidateOnCuda, WiderDtypesAreNotServed) {
  const Device device{DeviceType::kCuda, 0};
  const auto at = [&](std::uintptr_t page, std::initializer_list<std::int64_t> shape) {
    return TensorView::dense(reinterpret_cast<void*>(page << 32), DType::kFloat32, shape,
                             device);  // NOLINT
  };
  ForwardArgs args;
  args.q = at(1, {1, 203, 2, 16});
  args.k = at(2, {1, 203, 2, 16});
  args.v = at(3, {1, 203, 4, 8});
  args.g = at(4, {1, 203, 4, 16});
  args.beta = at(5, {1, 203, 4});
  args.out = at(6, {1, 203, 4, 8});
  try {
    validate(args);
    FAIL() << "no exception";
  } catch (const NotImplementedError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("q: expected bfloat16 on cuda:0, got float32[1, 203, 2, 16]"),
              std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace flash_kda::testing
