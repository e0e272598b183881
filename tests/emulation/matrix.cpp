#include "emulation/matrix.h"

#include <bit>
#include <cstring>

#include "emulation/fragments.h"

namespace flash_kda::emulation {

namespace {

constexpr int kMatrixRows = 8;
constexpr int kMatrixRowBytes = 16;

struct MatrixArguments {
  SharedAddress row;
  std::uint32_t* r;
};

// Element (row, column) of block i as the fragments hold it.
std::uint16_t fragment_element(MatrixArguments* const (&lanes)[kWarpSize], int i, int row,
                               int column) {
  const std::uint32_t pair = lanes[4 * row + column / 2]->r[i];
  return static_cast<std::uint16_t>(pair >> (16 * (column % 2)));
}

int thread_of(Scheduler& scheduler, int lane) {
  return kWarpSize * scheduler.current().warp() + lane;
}

}  // namespace

void load_matrix(Scheduler& scheduler, SharedMemory& memory, SharedAddress row, bool transposed,
                 std::uint32_t (&r)[4]) {
  const char* name = transposed ? "load_matrix_transposed" : "load_matrix";
  MatrixArguments mine{row, r};
  scheduler.gather(name, mine, [&](MatrixArguments* const(&lanes)[kWarpSize]) {
    for (int i = 0; i < 4; ++i) {
      std::uint16_t block[kMatrixRows][8];
      for (int g = 0; g < kMatrixRows; ++g) {
        memory.load(name, thread_of(scheduler, kMatrixRows * i + g),
                    lanes[kMatrixRows * i + g]->row, block[g], kMatrixRowBytes, kMatrixRowBytes);
      }
      for (int lane = 0; lane < kWarpSize; ++lane) {
        const int g = fragment_group(lane), t = fragment_in_group(lane);
        const std::uint16_t low = transposed ? block[2 * t][g] : block[g][2 * t];
        const std::uint16_t high = transposed ? block[2 * t + 1][g] : block[g][2 * t + 1];
        lanes[lane]->r[i] = low | static_cast<std::uint32_t>(high) << 16;
      }
    }
  });
}

void store_matrix(Scheduler& scheduler, SharedMemory& memory, SharedAddress row, bool transposed,
                  const std::uint32_t (&r)[4]) {
  const char* name = transposed ? "store_matrix_transposed" : "store_matrix";
  std::uint32_t copy[4] = {r[0], r[1], r[2], r[3]};
  MatrixArguments mine{row, copy};
  scheduler.gather(name, mine, [&](MatrixArguments* const(&lanes)[kWarpSize]) {
    std::uint16_t rows[kWarpSize][8];
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const int i = lane / kMatrixRows, g = lane % kMatrixRows;
      for (int c = 0; c < 8; ++c) {
        rows[lane][c] =
            transposed ? fragment_element(lanes, i, c, g) : fragment_element(lanes, i, g, c);
      }
      // A row may be given twice, with the same contents.
      bool again = false;
      for (int other = 0; other < lane && !again; ++other) {
        again = lanes[other]->row == lanes[lane]->row &&
                std::memcmp(rows[other], rows[lane], kMatrixRowBytes) == 0;
      }
      if (again) continue;
      memory.store(name, thread_of(scheduler, lane), lanes[lane]->row, rows[lane], kMatrixRowBytes,
                   kMatrixRowBytes);
    }
  });
}

namespace {

struct MmaArguments {
  float* c;
  const std::uint32_t* a;
  std::uint32_t b[2];
};

// c[16, 8] += a[16, K] b[K, 8], where the inner loop runs over columns.
template <int kInner>
void accumulate_fragments(MmaArguments* const (&lanes)[kWarpSize], const float (&a)[16][kInner],
                          const float (&b)[kInner][8]) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = fragment_group(lane), t = fragment_in_group(lane);
    for (int i = 0; i < 4; ++i) {
      const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
      float sum = lanes[lane]->c[i];
      for (int k = 0; k < kInner; ++k) sum += a[row][k] * b[k][column];
      lanes[lane]->c[i] = sum;
    }
  }
}

}  // namespace

void mma_bf16(Scheduler& scheduler, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
              std::uint32_t b1) {
  MmaArguments mine{c, a, {b0, b1}};
  scheduler.gather("mma_bf16", mine, [](MmaArguments* const(&lanes)[kWarpSize]) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < kWarpSize; ++lane) {
      unpack_a(lanes[lane]->a, lane, left);
      for (int i = 0; i < 2; ++i) {
        for (int e = 0; e < 2; ++e) {
          right[2 * fragment_in_group(lane) + e + 8 * i][fragment_group(lane)] =
              from_bf16((lanes[lane]->b[i] >> (16 * e)) & 0xffff);
        }
      }
    }
    accumulate_fragments(lanes, left, right);
  });
}

void mma_tf32(Scheduler& scheduler, float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
              std::uint32_t b1) {
  MmaArguments mine{c, a, {b0, b1}};
  scheduler.gather("mma_tf32", mine, [](MmaArguments* const(&lanes)[kWarpSize]) {
    // The unit does not see the low 13 bits.
    const auto value = [](std::uint32_t bits) { return std::bit_cast<float>(bits & ~0x1fffu); };
    float left[16][8], right[8][8];
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const int g = fragment_group(lane), t = fragment_in_group(lane);
      for (int i = 0; i < 4; ++i) left[g + 8 * (i % 2)][t + 4 * (i / 2)] = value(lanes[lane]->a[i]);
      for (int i = 0; i < 2; ++i) right[t + 4 * i][g] = value(lanes[lane]->b[i]);
    }
    accumulate_fragments(lanes, left, right);
  });
}

}  // namespace flash_kda::emulation
