#include "xla_ffi.h"

#include <bit>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "call.h"
#include "flash_kda/error.h"
#include "plan_cache.h"
#include "xla_ffi_abi.h"

namespace flash_kda::python {
namespace {

constexpr std::size_t kWords = 14;

xla::Error* make_error(const xla::Api& api, xla::ErrorCode code, const char* message) {
  xla::ErrorCreateArgs args{sizeof args, nullptr, message, code};
  return api.error_create(&args);
}

// An error that an XLA function returned has to be given back; what failed says enough.
void check(const xla::Api& api, xla::Error* error, const char* what) {
  if (error == nullptr) return;
  xla::ErrorDestroyArgs args{sizeof args, nullptr, error};
  api.error_destroy(&args);
  throw Error(std::string("XLA: ") + what + " failed");
}

const std::int32_t* call_words(const xla::Attributes& attributes) {
  for (std::int64_t i = 0; i < attributes.size; ++i) {
    const xla::ByteSpan& name = *attributes.names[i];
    if (std::string_view(name.data, name.size) != "call") continue;
    const auto* array = static_cast<const xla::ArrayAttribute*>(attributes.values[i]);
    if (attributes.types[i] == xla::kArrayAttribute && array->dtype == xla::kS32 &&
        array->size == kWords) {
      return static_cast<const std::int32_t*>(array->data);
    }
  }
  throw ValueError("call: expected an attribute of " + std::to_string(kWords) + " int32");
}

DType dtype_of(xla::DataType dtype) {
  switch (dtype) {
    case xla::kBF16:
      return DType::kBFloat16;
    case xla::kF16:
      return DType::kFloat16;
    case xla::kF32:
      return DType::kFloat32;
    case xla::kF64:
      return DType::kFloat64;
    case xla::kS32:
      return DType::kInt32;
    case xla::kS64:
      return DType::kInt64;
    default:
      return DType::kOther;
  }
}

// XLA hands over dense row-major buffers.
TensorView view_of(const char* name, const xla::Buffer& buffer, Device device) {
  if (buffer.rank > TensorView::kMaxRank) {
    throw ValueError(std::string(name) + ": expected at most " +
                     std::to_string(TensorView::kMaxRank) + " dimensions, got " +
                     std::to_string(buffer.rank));
  }
  TensorView view;
  view.data = buffer.data;
  view.dtype = dtype_of(buffer.dtype);
  view.device = device;
  view.rank = static_cast<std::int32_t>(buffer.rank);
  std::int64_t dense = 1;
  for (std::int64_t d = buffer.rank - 1; d >= 0; --d) {
    const auto i = static_cast<std::size_t>(d);
    view.shape[i] = buffer.dims[d];
    view.stride[i] = dense;
    dense *= buffer.dims[d];
  }
  return view;
}

void read_buffers(const xla::Buffers& buffers, std::int32_t mask, Device device,
                  ForwardArgs& args) {
  std::int64_t next = 0;
  for (std::size_t i = 0; i < kArrayCount; ++i) {
    if ((mask >> i & 1) == 0) continue;
    if (next == buffers.size) throw ValueError("call: expected as many arrays as its mask has");
    const ArrayArgument& argument = kArrayArguments[i];
    args.*argument.view = view_of(argument.name, *buffers.buffers[next++], device);
  }
}

double number(const std::int32_t* words) {
  double value = 0;
  std::memcpy(&value, words, sizeof value);
  return value;
}

void read_options(const std::int32_t* words, ForwardArgs& args, PlanOptions& options) {
  args.gate = static_cast<GateKind>(words[2]);
  args.beta_kind = static_cast<BetaKind>(words[3]);
  args.l2norm = words[4] != 0;
  options.threads = words[5];
  options.sequence_split = words[6] != 0;
  options.check_cu_seqlens = words[7] != 0;
  options.value_split = words[8];
  args.lower_bound = number(words + 9);
  if (words[11] != 0) args.scale = number(words + 12);
}

// Device memory for the length of a call. XLA's allocator reuses it in the stream's order.
class Scratch {
 public:
  Scratch(const xla::CallFrame& frame, const ForwardPlan& plan) : frame_(frame) {
    if (plan.workspace_bytes == 0) return;
    size_ = plan.workspace_bytes + plan.workspace_alignment - 1;
    xla::MemoryAllocateArgs args{sizeof args, nullptr, frame.context, size_, 1, nullptr};
    check(*frame.api, frame.api->memory_allocate(&args), "allocating the workspace");
    data_ = args.data;
    aligned_ = data_;
    std::size_t space = size_;
    std::align(plan.workspace_alignment, plan.workspace_bytes, aligned_, space);
  }
  ~Scratch() {
    if (data_ == nullptr) return;
    xla::MemoryFreeArgs args{sizeof args, nullptr, frame_.context, size_, data_};
    xla::Error* error = frame_.api->memory_free(&args);
    if (error == nullptr) return;
    xla::ErrorDestroyArgs destroy{sizeof destroy, nullptr, error};
    frame_.api->error_destroy(&destroy);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() const { return aligned_; }

 private:
  const xla::CallFrame& frame_;
  std::size_t size_ = 0;
  void* data_ = nullptr;
  void* aligned_ = nullptr;
};

Device cuda_device(const xla::CallFrame& frame) {
  if (frame.api->struct_size < sizeof(xla::Api)) {
    throw NotImplementedError(
        "JAX: this jaxlib does not tell a foreign function its device; use a "
        "newer one");
  }
  xla::DeviceOrdinalArgs args{sizeof args, nullptr, frame.context, 0};
  check(*frame.api, frame.api->device_ordinal_get(&args), "asking for the device");
  return {DeviceType::kCuda, args.ordinal};
}

PlanCache& plans() {
  static PlanCache cache;
  return cache;
}

void run_on_cpu(const ForwardArgs& args, const PlanOptions& options) {
  const std::shared_ptr<const ForwardPlan> plan = plans().get(args, options);
  std::vector<std::byte> workspace(plan->workspace_bytes + plan->workspace_alignment);
  void* data = workspace.data();
  std::size_t space = workspace.size();
  std::align(plan->workspace_alignment, plan->workspace_bytes, data, space);
  forward(args, *plan, plan->workspace_bytes > 0 ? data : nullptr, nullptr);
}

void run_on_cuda(const xla::CallFrame& frame, const ForwardArgs& args, const PlanOptions& options) {
  const std::shared_ptr<const ForwardPlan> plan = plans().get(args, options);
  xla::StreamGetArgs stream{sizeof stream, nullptr, frame.context, nullptr};
  check(*frame.api, frame.api->stream_get(&stream), "asking for the stream");
  const Scratch scratch(frame, *plan);
  forward(args, *plan, scratch.data(), stream.stream);
}

// XLA asks each handler for its version before it uses it. What is read here has not changed within
// the major version, so that ours is whatever XLA speaks.
bool answer_metadata(const xla::CallFrame& frame) {
  if (frame.extensions == nullptr || frame.extensions->type != xla::kMetadata) return false;
  xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(frame.extensions)->metadata;
  metadata.version = {sizeof(xla::Version), nullptr, xla::kMajorVersion, frame.api->version.minor};
  metadata.traits = 0;
  return true;
}

template <DeviceType kDevice>
xla::Error* handle(xla::CallFrame* frame) {
  if (answer_metadata(*frame) || frame->stage != xla::kExecute) return nullptr;
  try {
    const std::int32_t* words = call_words(frame->attributes);
    Device device;
    if constexpr (kDevice == DeviceType::kCuda) device = cuda_device(*frame);
    ForwardArgs args;
    PlanOptions options;
    read_options(words, args, options);
    read_buffers(frame->operands, words[0], device, args);
    read_buffers(frame->results, words[1], device, args);
    if constexpr (kDevice == DeviceType::kCuda) {
      run_on_cuda(*frame, args, options);
    } else {
      run_on_cpu(args, options);
    }
    return nullptr;
  } catch (const ValueError& error) {
    return make_error(*frame->api, xla::kInvalidArgument, error.what());
  } catch (const NotImplementedError& error) {
    return make_error(*frame->api, xla::kUnimplemented, error.what());
  } catch (const std::exception& error) {
    return make_error(*frame->api, xla::kInternal, error.what());
  }
}

}  // namespace

nb::object xla_handler(const std::string& platform) {
  xla::Handler* handler = nullptr;
  if (platform == "cpu") handler = handle<DeviceType::kCpu>;
  if (platform == "cuda") handler = handle<DeviceType::kCuda>;
  if (handler == nullptr) throw ValueError("platform: expected cpu or cuda, got " + platform);
  PyObject* capsule = PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr);
  if (capsule == nullptr) throw nb::python_error();
  return nb::steal(capsule);
}

}  // namespace flash_kda::python
