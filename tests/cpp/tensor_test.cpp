// Views and their text.
#include "flash_kda/tensor.h"

#include <gtest/gtest.h>

#include "arrays.h"
#include "flash_kda/error.h"

namespace flash_kda::testing {
namespace {

TEST(TensorView, DenseIsRowMajor) {
  float data[24] = {};
  const TensorView view = TensorView::dense(data, DType::kFloat32, {2, 3, 4});
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.numel(), 24);
  EXPECT_EQ(view.stride[0], 12);
  EXPECT_EQ(view.stride[1], 4);
  EXPECT_EQ(view.stride[2], 1);
  EXPECT_TRUE(view.defined());
  EXPECT_FALSE(TensorView{}.defined());
  EXPECT_EQ(TensorView::dense(data, DType::kFloat32, {}).numel(), 1);
  EXPECT_EQ(TensorView::dense(data, DType::kFloat32, {5, 0, 7}).numel(), 0);
  EXPECT_THROW(TensorView::dense(data, DType::kFloat32, {1, 1, 1, 1, 1, 1, 1, 1, 1}), ValueError);
}

TEST(TensorView, SixtyFourBitSizes) {
  const TensorView view = TensorView::dense(nullptr, DType::kBFloat16, {1, 262144, 96, 128});
  EXPECT_EQ(view.numel(), std::int64_t{262144} * 96 * 128);
  EXPECT_EQ(view.stride[0], view.numel());
}

TEST(TensorView, Text) {
  EXPECT_EQ(to_string(TensorView::dense(nullptr, DType::kBFloat16, {1, 8192, 96, 128})),
            "bfloat16[1, 8192, 96, 128] on cpu");
  EXPECT_EQ(to_string(TensorView::dense(nullptr, DType::kInt64, {}, {DeviceType::kCuda, 3})),
            "int64[] on cuda:3");
  EXPECT_EQ(to_string(TensorView{}), "nothing");
}

TEST(DTypes, NamesAndSizes) {
  EXPECT_STREQ(name(DType::kFloat16), "float16");
  EXPECT_STREQ(name(DType::kOther), "unsupported dtype");
  EXPECT_EQ(size_of(DType::kBFloat16), 2);
  EXPECT_EQ(size_of(DType::kFloat64), 8);
  EXPECT_EQ(size_of(DType::kOther), 0);
}

// The tests' own conversions, which everything else here leans on: every bit pattern there and
// back, and ties to even.
TEST(TestArrays, HalfPrecisionConversions) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    if (std::isnan(from_bf16_bits(half))) {
      EXPECT_TRUE(std::isnan(from_bf16_bits(to_bf16_bits(from_bf16_bits(half)))));
    } else {
      EXPECT_EQ(to_bf16_bits(from_bf16_bits(half)), half);
    }
    if (std::isnan(from_fp16_bits(half))) {
      EXPECT_TRUE(std::isnan(from_fp16_bits(to_fp16_bits(from_fp16_bits(half)))));
    } else {
      EXPECT_EQ(to_fp16_bits(from_fp16_bits(half)), half);
    }
  }
  EXPECT_EQ(from_bf16_bits(to_bf16_bits(1.0F + 0x1p-8F)), 1.0F);
  EXPECT_EQ(from_bf16_bits(to_bf16_bits(1.0F + 0x3p-8F)), 1.0F + 0x1p-6F);
  EXPECT_EQ(from_fp16_bits(to_fp16_bits(1.0F + 0x1p-11F)), 1.0F);
  EXPECT_EQ(from_fp16_bits(to_fp16_bits(1.0F + 0x3p-11F)), 1.0F + 0x1p-9F);
  EXPECT_EQ(to_fp16_bits(65519.0F), 0x7BFF);
  EXPECT_EQ(to_fp16_bits(65520.0F), 0x7C00);
  EXPECT_EQ(to_fp16_bits(0x1p-25F), 0);
  EXPECT_EQ(to_fp16_bits(0x3p-25F), 2);
  EXPECT_EQ(to_bf16_bits(3.4e38F), 0x7F80);
}

}  // namespace
}  // namespace flash_kda::testing
