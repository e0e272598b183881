// The numerical source of the CPU backend, included by one thin file for each instruction set,
// after its vec_*.h and with FLASH_KDA_CPU_NAMESPACE set. Everything is fp32; bf16 and fp16 appear
// only in loads and stores.
//
// A head is worked on in chunks of kChunk tokens (chunk.inl has the mathematics), kGroup chunks at
// a time: prepare what all columns share, then for each panel of columns, chunk by chunk, read the
// state, solve, update (panel.inl). A panel stays in the first-level cache for a whole group.
// Counted in passes of K * V multiply-adds a token this is 2 for reading and 1 + 1/kChunk for
// updating, against 4 for token by token.

#include "constants.h"
#include "cpu/chunk.inl"
#include "cpu/kernels.h"
#include "cpu/panel.inl"
#include "cpu/rows.inl"

namespace flash_kda::cpu {
namespace FLASH_KDA_CPU_NAMESPACE {
namespace {

// Chunks that are prepared together.
inline constexpr int kGroup = 4;
inline constexpr int kGroupTokens = kGroup * kChunk;
static_assert(kCheckpointStep % kGroupTokens == 0, "checkpoints fall between groups");

// One head's scratch memory, and where it is in the head.
class Head {
 public:
  Head(const HeadTask& task, std::byte* scratch);

  // Bytes of scratch.
  static std::size_t bytes(int keys, int columns);

  void load();
  void store_to(const OutputRows& to, std::int64_t offset);
  // Consumes up to kGroupTokens tokens from token t on.
  void step(std::int64_t t);

 private:
  static int floats_of_rows(int pitch) {
    return (3 * kChunk + 1 + kGroup * (3 * kChunk + 1)) * pitch;
  }

  void prefetch(std::int64_t t) const;

  const HeadTask& task_;
  Workspace workspace_;
  float* state_;  // [panel][pitch][kPanel]
  float* tile_;   // [kWidth, pitch]
  float* said_;   // [2 * kChunk, kPanel]
  float* y_;      // [kChunk, kPanel]
  Chunk chunks_[kGroup];
};

std::size_t Head::bytes(int keys, int columns) {
  const int pitch = round_up(keys, kWidth);
  const int floats =
      floats_of_rows(pitch) + (round_up(columns, kPanel) + kWidth) * pitch + 3 * kChunk * kPanel;
  return static_cast<std::size_t>(round_up(floats * 4, static_cast<int>(kScratchAlignment)));
}

Head::Head(const HeadTask& task, std::byte* scratch) : task_(task) {
  const int pitch = round_up(task.key_dim, kWidth);
  float* next = reinterpret_cast<float*>(scratch);
  const auto take = [&next](int floats) {
    float* taken = next;
    next += floats;
    return taken;
  };
  workspace_.pitch = pitch;
  workspace_.q = take(kChunk * pitch);
  workspace_.k = take(kChunk * pitch);
  workspace_.d = take(kChunk * pitch);
  workspace_.bias = take(pitch);
  for (Chunk& chunk : chunks_) {
    chunk.read = take(2 * kChunk * pitch);
    chunk.write = take(kChunk * pitch);
    chunk.decay = take(pitch);
  }
  state_ = take(round_up(task.columns, kPanel) * pitch);
  tile_ = take(kWidth * pitch);
  said_ = take(2 * kChunk * kPanel);
  y_ = take(kChunk * kPanel);

  __builtin_memset(workspace_.bias, 0, sizeof(float) * static_cast<std::size_t>(pitch));
  if (task.gate.bias != nullptr) {
    const std::size_t size = sizeof(float) * static_cast<std::size_t>(task.key_dim);
    __builtin_memcpy(workspace_.bias, task.gate.bias, size);
  }
}

void Head::load() {
  load_state(task_.initial_state, task_.key_dim, task_.columns, workspace_.pitch, tile_, state_);
}

void Head::store_to(const OutputRows& to, std::int64_t offset) {
  store_state(to, offset, task_.key_dim, task_.columns, workspace_.pitch, tile_, state_);
}

// Asks for the rows of the group that begins at token t: the rows of one head lie in different
// pages, where the hardware does not look ahead.
void Head::prefetch(std::int64_t t) const {
  const std::int64_t left = task_.tokens - t;
  const std::int64_t n = left < kGroupTokens ? left : kGroupTokens;
  const auto touch = [&](const auto& rows, int elements) {
    const int bytes = elements * bytes_of(rows.element);
    for (std::int64_t i = t; i < t + n; ++i) {
      for (int b = 0; b < bytes; b += 64) __builtin_prefetch(rows.data + i * rows.stride + b, 0, 2);
    }
  };
  touch(task_.q, task_.key_dim);
  touch(task_.k, task_.key_dim);
  touch(task_.g, task_.key_dim);
  touch(task_.v, task_.columns);
  touch(task_.beta, 1);
  touch(task_.out, task_.columns);
}

void Head::step(std::int64_t t) {
  const int pitch = workspace_.pitch;
  const int keys = task_.key_dim;
  const int tokens =
      task_.tokens - t < kGroupTokens ? static_cast<int>(task_.tokens - t) : kGroupTokens;
  const auto length = [tokens](int chunk) {
    const int left = tokens - chunk * kChunk;
    return left < kChunk ? left : kChunk;
  };
  prefetch(t + kGroupTokens);
  for (int i = 0; length(i) > 0 && i < kGroup; ++i) {
    prepare(task_, t + i * kChunk, length(i), workspace_, chunks_[i]);
  }
  for (int first = 0; first < task_.columns; first += kPanel) {
    float* panel = state_ + static_cast<std::ptrdiff_t>(first) * pitch;
    for (int i = 0; length(i) > 0 && i < kGroup; ++i) {
      const Chunk& chunk = chunks_[i];
      const int n = length(i);
      read_state(chunk.read, n, pitch, panel, keys, said_);
      read_state(chunk.read + kChunk * pitch, n, pitch, panel, keys, said_ + kChunk * kPanel);
      with_element(task_.v.element, [&]<Element E>() {
        solve<E>(task_, chunk, t + i * kChunk, n, first, said_, y_);
      });
      update_state(chunk, n, pitch, y_, panel);
    }
  }
}

void run(const HeadTask& task, std::byte* scratch) {
  Head head(task, scratch);
  head.load();
  std::int64_t mark = 0;
  for (std::int64_t t = 0;; t += kGroupTokens) {
    for (;
         mark < task.checkpoint_count && (task.checkpoints[mark].position <= t || t >= task.tokens);
         ++mark) {
      head.store_to(task.checkpoint, task.checkpoints[mark].offset);
    }
    if (t >= task.tokens) break;
    head.step(t);
  }
  if (task.final_state.data != nullptr) head.store_to(task.final_state, 0);
}

std::size_t scratch_bytes(int key_dim, int columns) { return Head::bytes(key_dim, columns); }

constexpr Kernels kernels(const char* name) { return {name, kPanel, scratch_bytes, run}; }

}  // namespace
}  // namespace FLASH_KDA_CPU_NAMESPACE
}  // namespace flash_kda::cpu
