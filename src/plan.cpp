// From arguments and options to a ForwardPlan, and the plan's words. Nothing here depends on array
// contents.
#include <cstdint>
#include <string>

#include "cpu/backend.h"
#include "cuda/backend.h"
#include "flash_kda/forward.h"
#include "validate.h"

namespace flash_kda {
namespace {

const char* name(Backend backend) {
  switch (backend) {
    case Backend::kCpu:
      return "cpu";
    case Backend::kCudaSm90:
      return "cuda-sm90";
  }
  return "unknown backend";
}

std::string entry(const char* symbol, std::int64_t value) {
  return std::string(symbol) + " = " + std::to_string(value);
}

// A line for each clause.
std::string in_lines(std::string text, const std::string& indent) {
  for (std::size_t at = 0; (at = text.find("; ", at)) != std::string::npos; at += indent.size())
    text.replace(at + 1, 1, "\n" + indent);
  return text;
}

// "1 thread", "2 threads".
std::string count(std::int64_t n, const char* what) {
  return std::to_string(n) + " " + what + (n == 1 ? "" : "s");
}

void plan_cpu(const PlanOptions& options, ForwardPlan& plan) {
  plan.backend = Backend::kCpu;
  plan.threads = options.threads > 0 ? options.threads : cpu::max_threads();
  plan.chunk = cpu::kChunk;
  plan.workspace_bytes = 0;
  plan.reason = std::string("q is in host memory; ") + cpu::instruction_set() + " kernels, " +
                count(plan.sequences * plan.value_heads, "head") + " of work over " +
                count(plan.threads, "thread");
}

}  // namespace

ForwardPlan plan_forward(const ForwardArgs& args, const PlanOptions& options) {
  const Sizes sizes = validate(args);
  validate(options);
  ForwardPlan plan;
  plan.batch = sizes.batch;
  plan.tokens = sizes.tokens;
  plan.sequences = sizes.sequences;
  plan.key_heads = sizes.key_heads;
  plan.value_heads = sizes.value_heads;
  plan.key_dim = sizes.key_dim;
  plan.value_dim = sizes.value_dim;
  plan.varlen = sizes.varlen;
  plan.options = options;
  if (args.q.device.type == DeviceType::kCpu) {
    plan_cpu(options, plan);
  } else {
    plan.backend = Backend::kCudaSm90;
    cuda::plan(args, plan);
  }
  return plan;
}

std::string ForwardPlan::describe() const {
  std::string text = "flash_kda forward on " + std::string(name(backend)) + "\n";
  text += "  shapes: " + entry("B", batch) + ", " + entry("T", tokens) + ", " +
          entry("N", sequences) + (varlen ? " (packed)" : "") + ", " + entry("H", key_heads) +
          ", " + entry("HV", value_heads) + ", " + entry("K", key_dim) + ", " +
          entry("V", value_dim) + "\n";
  text += "  chunk: " + count(chunk, "token") + "\n";
  if (backend == Backend::kCpu) {
    text += "  threads: " + std::to_string(threads) + "\n";
  } else {
    text += "  grid: " + count(grid, "block") + " on " + count(multiprocessors, "multiprocessor") +
            ", " + count(value_split, "block") + " a head, up to " +
            count(sequence_segments, "segment") + " a sequence\n";
  }
  text += "  workspace: " + count(static_cast<std::int64_t>(workspace_bytes), "byte") + "\n";
  text += "  reason: " + in_lines(reason, "          ") + "\n";
  return text;
}

}  // namespace flash_kda
