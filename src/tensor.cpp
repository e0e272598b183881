#include "flash_kda/tensor.h"

#include <stdexcept>

#include "flash_kda/error.h"

namespace flash_kda {

const char* name(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kOther:
      break;
  }
  return "unsupported dtype";
}

std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kOther:
      break;
  }
  return 0;
}

std::string to_string(Device device) {
  if (device.type == DeviceType::kCpu) return "cpu";
  return "cuda:" + std::to_string(device.index);
}

std::int64_t TensorView::numel() const {
  std::int64_t product = 1;
  for (int axis = 0; axis < rank; ++axis) product *= shape[static_cast<std::size_t>(axis)];
  return product;
}

TensorView TensorView::dense(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                             Device device) {
  if (shape.size() > static_cast<std::size_t>(kMaxRank)) {
    throw ValueError("TensorView::dense: expected at most " + std::to_string(kMaxRank) +
                     " dimensions, got " + std::to_string(shape.size()));
  }
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<std::int32_t>(shape.size());
  std::size_t axis = 0;
  for (const std::int64_t extent : shape) view.shape[axis++] = extent;
  std::int64_t pitch = 1;
  for (axis = shape.size(); axis-- > 0;) {
    view.stride[axis] = pitch;
    pitch *= view.shape[axis];
  }
  return view;
}

std::string to_string(const TensorView& view) {
  if (!view.defined()) return "nothing";
  std::string text = name(view.dtype);
  text += '[';
  for (int axis = 0; axis < view.rank && axis < TensorView::kMaxRank; ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(view.shape[static_cast<std::size_t>(axis)]);
  }
  return text + "] on " + to_string(view.device);
}

}  // namespace flash_kda
