// The numerical source of the CPU backend, included by one thin file for each instruction set, after its vec_*.h and
// with FLASH_KDA_CPU_NAMESPACE set. Everything is fp32; bf16 and fp16 appear only in loads and stores.
//
// A head is worked on in chunks of kChunk tokens; chunk.inl has the mathematics. For each chunk: prepare what all
// columns share, then for each panel of columns read, solve, update (panel.inl). Counted in vector operations of K * V
// elements a token this is 2 for reading, 1 + 1/8 for updating, against 4 for token by token.

#include <utility>  // integer_sequence; emits no code

#include "constants.h"
#include "cpu/kernels.h"

#include "cpu/rows.inl"

#include "cpu/math.inl"

#include "cpu/chunk.inl"

#include "cpu/panel.inl"

namespace flash_kda::cpu {
namespace FLASH_KDA_CPU_NAMESPACE {
namespace {

// Floats of scratch, in the order in which run() takes them.
struct Layout {
  int pitch;
  std::size_t rows, state, tile, said, u;

  Layout(int keys, int columns)
      : pitch(round_up(keys, kWidth)),
        rows(static_cast<std::size_t>(6 * kChunk + 2) * pitch),
        state(static_cast<std::size_t>(round_up(columns, kPanel)) * pitch),
        tile(static_cast<std::size_t>(kWidth) * pitch),
        said(2 * kChunk * kPanel),
        u(kChunk * kPanel) {}

  std::size_t bytes() const {
    return round_up(static_cast<int>((rows + state + tile + said + u) * sizeof(float)), kScratchAlignment);
  }
};

std::size_t scratch_bytes(int key_dim, int columns) { return Layout(key_dim, columns).bytes(); }

// Asks for the rows of the chunk that begins at token t. The rows of one head lie in different pages, where the
// hardware does not look ahead.
void prefetch(const HeadTask& task, std::int64_t t) {
  if (t + kChunk > task.tokens) return;
  const auto touch = [t](const auto& rows, int n) {
    const int bytes = n * bytes_of(rows.element);
    for (int i = 0; i < kChunk; ++i) {
      for (int b = 0; b < bytes; b += 64) __builtin_prefetch(rows.data + (t + i) * rows.stride + b);
    }
  };
  touch(task.q, task.key_dim);
  touch(task.k, task.key_dim);
  touch(task.g, task.key_dim);
  touch(task.v, task.columns);
  touch(task.beta, 1);
}

void run(const HeadTask& task, std::byte* scratch) {
  const Layout layout(task.key_dim, task.columns);
  const int pitch = layout.pitch;
  Chunk c;
  c.pitch = pitch;
  c.q = reinterpret_cast<float*>(scratch);
  c.k = c.q + kChunk * pitch;
  c.d = c.k + kChunk * pitch;
  c.read = c.d + kChunk * pitch;
  c.write = c.read + 2 * kChunk * pitch;
  c.decay = c.write + kChunk * pitch;
  c.bias = c.decay + pitch;
  float* state = c.bias + pitch;
  float* tile = state + layout.state;
  float* said = tile + layout.tile;
  float* u = said + layout.said;

  __builtin_memset(c.bias, 0, sizeof(float) * static_cast<std::size_t>(pitch));
  if (task.gate.bias != nullptr) {
    __builtin_memcpy(c.bias, task.gate.bias, sizeof(float) * static_cast<std::size_t>(task.key_dim));
  }
  load_state(task.initial_state, task.key_dim, task.columns, pitch, tile, state);

  std::int64_t mark = 0;
  for (std::int64_t t = 0;; t += kChunk) {
    for (; mark < task.checkpoint_count && task.checkpoints[mark].position <= t; ++mark) {
      store_state(task.checkpoint, task.checkpoints[mark].offset, task.key_dim, task.columns, pitch, tile, state);
    }
    if (t >= task.tokens) break;
    const int n = task.tokens - t < kChunk ? static_cast<int>(task.tokens - t) : kChunk;
    prefetch(task, t + kChunk);
    prepare(task, t, n, c);
    for (int first = 0; first < task.columns; first += kPanel) {
      float* panel = state + static_cast<std::ptrdiff_t>(first) * pitch;
      read_state(c.read, n, pitch, panel, task.key_dim, said);
      read_state(c.read + kChunk * pitch, n, pitch, panel, task.key_dim, said + kChunk * kPanel);
      with_element(task.v.element, [&]<Element E>() { solve<E>(task, c, t, n, first, said, u); });
      update_state(c, n, u, panel);
    }
  }
  if (task.final_state.data != nullptr) {
    store_state(task.final_state, 0, task.key_dim, task.columns, pitch, tile, state);
  }
}

constexpr Kernels kernels(const char* name) { return {name, kPanel, scratch_bytes, run}; }

}  // namespace
}  // namespace FLASH_KDA_CPU_NAMESPACE
}  // namespace flash_kda::cpu
