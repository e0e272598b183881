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

// Hands out the scratch memory piece by piece.
class Arena {
 public:
  explicit Arena(std::byte* scratch) : next_(reinterpret_cast<float*>(scratch)) {}

  float* take(int count) {
    float* taken = next_;
    next_ += count;
    return taken;
  }

 private:
  float* next_;
};

// What the heads use by turns.
struct Shared {
  Shared(int pitch, Arena& arena)
      : tile(arena.take(kWidth * pitch)),
        said(arena.take(2 * kChunk * kPanel)),
        y(arena.take(kChunk * kPanel)) {
    rows.pitch = pitch;
    rows.q = arena.take(kChunk * pitch);
    rows.k = arena.take(kChunk * pitch);
    rows.d = arena.take(kChunk * pitch);
    for (Chunk& chunk : chunks) {
      chunk.read = arena.take(2 * kChunk * pitch);
      chunk.write = arena.take(kChunk * pitch);
      chunk.decay = arena.take(pitch);
    }
  }

  static int size(int pitch) {
    return (3 * kChunk + kGroup * (3 * kChunk + 1) + kWidth) * pitch + 3 * kChunk * kPanel;
  }

  Workspace rows;
  Chunk chunks[kGroup];
  float* tile;  // [kWidth, pitch]
  float* said;  // [2 * kChunk, kPanel]
  float* y;     // [kChunk, kPanel]
};

// One head on its way through the sequence.
class Head {
 public:
  Head() = default;
  Head(const HeadTask& task, int pitch, Arena& arena);

  static int size(int pitch, int columns) { return (round_up(columns, kPanel) + 1) * pitch; }

  void load(Shared& shared);
  void store_to(const OutputRows& to, std::int64_t offset, Shared& shared) const;
  // Consumes up to kGroupTokens tokens from token t on.
  void step(std::int64_t t, Shared& shared);

 private:
  void fetch_ahead(std::int64_t t, int part, int parts) const;

  const HeadTask* task_;
  float* state_;  // [panel][pitch][kPanel]
  float* bias_;   // [pitch]
};

Head::Head(const HeadTask& task, int pitch, Arena& arena)
    : task_(&task),
      state_(arena.take(round_up(task.columns, kPanel) * pitch)),
      bias_(arena.take(pitch)) {
  __builtin_memset(bias_, 0, sizeof(float) * static_cast<std::size_t>(pitch));
  if (task.gate.bias != nullptr) {
    const std::size_t size = sizeof(float) * static_cast<std::size_t>(task.key_dim);
    __builtin_memcpy(bias_, task.gate.bias, size);
  }
}

void Head::load(Shared& shared) {
  const HeadTask& task = *task_;
  load_state(task.initial_state, task.key_dim, task.columns, shared.rows.pitch, shared.tile,
             state_);
}

void Head::store_to(const OutputRows& to, std::int64_t offset, Shared& shared) const {
  store_state(to, offset, task_->key_dim, task_->columns, shared.rows.pitch, shared.tile, state_);
}

// Brings the chunk from token t on closer: its share `part` of `parts`, by arrays.
void Head::fetch_ahead(std::int64_t t, int part, int parts) const {
  const HeadTask& task = *task_;
  struct Array {
    const std::byte* data;
    std::int64_t stride;
    int bytes;
  };
  const auto array = [](const auto& rows, int n) {
    return Array{rows.data, rows.stride, n * bytes_of(rows.element)};
  };
  constexpr int kArrays = 5;
  const Array arrays[kArrays] = {array(task.q, task.key_dim), array(task.k, task.key_dim),
                                 array(task.g, task.key_dim), array(task.v, task.columns),
                                 array(task.out, task.columns)};
  const std::int64_t end = t + kChunk < task.tokens ? t + kChunk : task.tokens;
  for (int a = kArrays * part / parts; a < kArrays * (part + 1) / parts; ++a) {
    const Array& x = arrays[a];
    // Rows lie in different pages. A prefetch of a page whose address is not yet translated may be
    // dropped (and is, on Zen 4), a load is not.
    for (std::int64_t i = t; i < end; ++i) {
      static_cast<void>(*reinterpret_cast<const volatile char*>(x.data + i * x.stride));
    }
    for (std::int64_t i = t; i < end; ++i) {
      for (int b = 0; b < x.bytes; b += 64) __builtin_prefetch(x.data + i * x.stride + b);
    }
  }
}

void Head::step(std::int64_t t, Shared& shared) {
  const HeadTask& task = *task_;
  const int pitch = shared.rows.pitch;
  const int tokens =
      task.tokens - t < kGroupTokens ? static_cast<int>(task.tokens - t) : kGroupTokens;
  const int chunks = (tokens + kChunk - 1) / kChunk;
  const auto length = [tokens](int chunk) {
    const int left = tokens - chunk * kChunk;
    return left < kChunk ? left : kChunk;
  };
  for (int i = 0; i < chunks; ++i) {
    prepare(task, bias_, t + i * kChunk, length(i), shared.rows, shared.chunks[i]);
  }
  const int panels = round_up(task.columns, kPanel) / kPanel;
  for (int first = 0; first < task.columns; first += kPanel) {
    float* panel = state_ + static_cast<std::ptrdiff_t>(first) * pitch;
    for (int i = 0; i < chunks; ++i) {
      const Chunk& chunk = shared.chunks[i];
      const int n = length(i);
      // A little in each turn: the processor can wait for few lines at a time.
      fetch_ahead(t + kGroupTokens + i * kChunk, first / kPanel, panels);
      read_state(chunk.read, n, pitch, panel, task.key_dim, shared.said);
      read_state(chunk.read + kChunk * pitch, n, pitch, panel, task.key_dim,
                 shared.said + kChunk * kPanel);
      with_element(task.v.element, [&]<Element E>() {
        solve<E>(task, chunk, t + i * kChunk, n, first, shared.said, shared.y);
      });
      update_state(chunk, n, pitch, shared.y, panel);
    }
  }
}

// The heads advance together, a group of tokens at a time. Rows of neighbouring heads share a page,
// whose address is then translated once for all of them and whose next lines the hardware fetches
// ahead; one head after the other takes a tenth longer.
void run(const HeadTask* tasks, int count, std::byte* scratch) {
  const HeadTask& any = tasks[0];
  const int pitch = round_up(any.key_dim, kWidth);
  Arena arena(scratch);
  Shared shared(pitch, arena);
  Head heads[kHeadBlock];
  for (int i = 0; i < count; ++i) {
    heads[i] = Head(tasks[i], pitch, arena);
    heads[i].load(shared);
  }
  std::int64_t mark = 0;
  for (std::int64_t t = 0;; t += kGroupTokens) {
    for (; mark < any.checkpoint_count && (any.checkpoints[mark].position <= t || t >= any.tokens);
         ++mark) {
      for (int i = 0; i < count; ++i) {
        heads[i].store_to(tasks[i].checkpoint, any.checkpoints[mark].offset, shared);
      }
    }
    if (t >= any.tokens) break;
    for (int i = 0; i < count; ++i) heads[i].step(t, shared);
  }
  for (int i = 0; i < count; ++i) {
    if (tasks[i].final_state.data != nullptr) heads[i].store_to(tasks[i].final_state, 0, shared);
  }
}

std::size_t scratch_bytes(int key_dim, int columns, int heads) {
  const int pitch = round_up(key_dim, kWidth);
  const int floats = Shared::size(pitch) + heads * Head::size(pitch, columns);
  return static_cast<std::size_t>(round_up(floats * 4, static_cast<int>(kScratchAlignment)));
}

constexpr Kernels kernels(const char* name) { return {name, kPanel, scratch_bytes, run}; }

}  // namespace
}  // namespace FLASH_KDA_CPU_NAMESPACE
}  // namespace flash_kda::cpu
