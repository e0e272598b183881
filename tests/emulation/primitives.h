// The host half of src/cuda/sm90/primitives.h: the same names, signatures and meanings, on the
// emulated block. Misuse that the device would answer with a hang, a fault or wrong numbers throws
// emulation::Error, with thread and address.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "emulation/block.h"
#include "emulation/fragments.h"
#include "emulation/matrix.h"

#define FLASH_KDA_DEVICE inline
#define FLASH_KDA_UNROLL
#define FLASH_KDA_NO_UNROLL

// CUDA's vector types, where the kernels expect them.
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace flash_kda::sm90 {

using SharedAddress = emulation::SharedAddress;
using TensorMap = emulation::TensorMap;

namespace detail {

inline emulation::Block& block() { return emulation::this_block(); }
inline int thread_index() { return block().scheduler.current().index; }

template <class T>
T load_shared(const char* operation, SharedAddress a) {
  T x;
  block().memory.load(operation, thread_index(), a, &x, sizeof x, sizeof x);
  block().scheduler.maybe_preempt();
  return x;
}

template <class T>
void store_shared(const char* operation, SharedAddress a, const T& x) {
  block().memory.store(operation, thread_index(), a, &x, sizeof x, sizeof x);
  block().scheduler.maybe_preempt();
}

template <class T>
T shuffle(const char* operation, T x, int lane) {
  struct Exchange {
    T from;
    int lane;
    T to;
  } mine{x, lane, x};
  block().scheduler.gather(operation, mine, [](Exchange* const(&lanes)[emulation::kWarpSize]) {
    for (Exchange* e : lanes) e->to = lanes[e->lane & (emulation::kWarpSize - 1)]->from;
  });
  return mine.to;
}

// As the .ftz instructions treat arguments and results.
inline float flush(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

}  // namespace detail

// ---- threads
// -------------------------------------------------------------------------------------
inline int thread_index() { return detail::thread_index(); }
inline int lane_index() { return detail::thread_index() % emulation::kWarpSize; }
inline int read_anew(int x) { return x; }
inline int block_index() { return detail::block().scheduler.block(); }
inline int grid_size() { return detail::block().grid_blocks; }
inline void sync_block() { detail::block().named_barriers.sync_block(); }
inline void sync_warp() {
  int none = 0;
  detail::block().scheduler.gather("sync_warp", none, [](auto& /*lanes*/) {
    detail::block().clocks.meet_warp(detail::thread_index() / emulation::kWarpSize);
  });
}
inline void sync_named(int id, int threads) { detail::block().named_barriers.sync(id, threads); }
inline float shuffle(float x, int lane) { return detail::shuffle("shuffle(float)", x, lane); }
inline int shuffle(int x, int lane) { return detail::shuffle("shuffle(int)", x, lane); }
inline bool any_in_warp(bool x) {
  bool result = x;
  detail::block().scheduler.gather("any_in_warp", result,
                                   [](bool* const(&lanes)[emulation::kWarpSize]) {
                                     bool any = false;
                                     for (const bool* lane : lanes) any = any || *lane;
                                     for (bool* lane : lanes) *lane = any;
                                   });
  return result;
}
inline int warp_uniform(int x) {
  const int first = detail::shuffle("warp_uniform", x, 0);
  if (first != x) {
    detail::block().scheduler.fail(
        emulation::format("warp_uniform: %d here, %d in lane 0", x, first));
  }
  return first;
}
template <int kRegisters>
inline void grow_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  detail::block().registers.grow(kRegisters);
}
template <int kRegisters>
inline void shrink_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  detail::block().registers.shrink(kRegisters);
}
// Grids run one after another.
inline void wait_for_previous_grid() {}

// ---- numbers
// -------------------------------------------------------------------------------------
inline std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }
inline float from_bits(std::uint32_t x) { return std::bit_cast<float>(x); }
inline float exp2_approx(float x) { return detail::flush(std::exp2(detail::flush(x))); }
inline float reciprocal_approx(float x) { return detail::flush(1.0f / detail::flush(x)); }
inline float rsqrt_approx(float x) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(detail::flush(x))));
}
inline float fused_multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline std::uint32_t pack_bf16(float low, float high) {
  return emulation::to_bf16(low) | emulation::to_bf16(high) << 16;
}
inline float bf16_low(std::uint32_t pair) { return from_bits(pair << 16); }
inline float bf16_high(std::uint32_t pair) { return from_bits(pair & 0xffff0000u); }
// To nearest, ties away from zero; any NaN becomes 0x7fffffff.
inline std::uint32_t tf32_operand(float x) { return bits(x * 1.000244140625f); }

// ---- shared memory
// -------------------------------------------------------------------------------
inline SharedAddress shared_base() { return emulation::kSharedBase; }
inline SharedAddress shared_address(const void* p) { return detail::block().memory.address(p); }
inline void* generic(SharedAddress a) { return detail::block().memory.pointer(a); }

inline float load_f32(SharedAddress a) { return detail::load_shared<float>("load_f32", a); }
inline float2 load_f32x2(SharedAddress a) { return detail::load_shared<float2>("load_f32x2", a); }
inline float4 load_f32x4(SharedAddress a) { return detail::load_shared<float4>("load_f32x4", a); }
inline std::uint32_t load_u32(SharedAddress a) {
  return detail::load_shared<std::uint32_t>("load_u32", a);
}
inline uint4 load_u32x4(SharedAddress a) { return detail::load_shared<uint4>("load_u32x4", a); }
inline void store_f32(SharedAddress a, float x) { detail::store_shared("store_f32", a, x); }
inline void store_f32x2(SharedAddress a, float x, float y) {
  detail::store_shared("store_f32x2", a, float2{x, y});
}
inline void store_u32(SharedAddress a, std::uint32_t x) { detail::store_shared("store_u32", a, x); }
inline void store_u32x4(SharedAddress a, uint4 x) { detail::store_shared("store_u32x4", a, x); }
inline void load_matrix(SharedAddress row, std::uint32_t (&r)[4]) {
  emulation::load_matrix(detail::block().scheduler, detail::block().memory, row, false, r);
}
inline void load_matrix_transposed(SharedAddress row, std::uint32_t (&r)[4]) {
  emulation::load_matrix(detail::block().scheduler, detail::block().memory, row, true, r);
}
inline void store_matrix(SharedAddress row, std::uint32_t r0, std::uint32_t r1, std::uint32_t r2,
                         std::uint32_t r3) {
  emulation::store_matrix(detail::block().scheduler, detail::block().memory, row, false,
                          {r0, r1, r2, r3});
}
inline void store_matrix_transposed(SharedAddress row, std::uint32_t r0, std::uint32_t r1,
                                    std::uint32_t r2, std::uint32_t r3) {
  emulation::store_matrix(detail::block().scheduler, detail::block().memory, row, true,
                          {r0, r1, r2, r3});
}
inline void fence_async_proxy() {
  detail::block().clocks.fence_async_proxy(detail::thread_index());
  detail::block().scheduler.maybe_preempt();
}

// ---- barriers in shared memory
// -------------------------------------------------------------------
inline void barrier_init(SharedAddress barrier, int arrivals) {
  detail::block().barriers.init(barrier, arrivals);
}
inline void fence_barrier_init() { detail::block().barriers.fence_init(); }
inline void barrier_arrive(SharedAddress barrier) { detail::block().barriers.arrive(barrier); }
inline void barrier_arrive_expect(SharedAddress barrier, int bytes) {
  detail::block().barriers.arrive_expect(barrier, bytes);
}
inline void barrier_wait(SharedAddress barrier, int parity) {
  detail::block().barriers.wait(barrier, parity);
}

// ---- bulk tensor copies
// --------------------------------------------------------------------------
inline void tensor_load(SharedAddress to, const TensorMap* map, SharedAddress barrier, int channel,
                        int head, int token, int batch) {
  detail::block().copies.load(to, map, barrier, {channel, head, token, batch});
}
inline void tensor_store(SharedAddress from, const TensorMap* map, int channel, int head, int token,
                         int batch) {
  detail::block().copies.store(from, map, {channel, head, token, batch});
}
inline void tensor_store_commit() { detail::block().copies.commit(); }
template <int kPending>
inline void tensor_store_wait_read() {
  detail::block().copies.wait_read("tensor_store_wait_read", kPending);
}
inline void tensor_store_wait_all() {
  detail::block().copies.wait_read("tensor_store_wait_all", 0);
}
inline void bulk_load(SharedAddress to, const void* from, int bytes, SharedAddress barrier) {
  detail::block().copies.load_bytes(to, from, bytes, barrier);
}
inline void prefetch_to_l2(const void* from, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0 || bytes <= 0 || bytes % 16 != 0) {
    detail::block().scheduler.fail(
        emulation::format("prefetch_to_l2: %p, %d bytes: not in multiples of 16", from, bytes));
  }
}

// ---- global memory
// -------------------------------------------------------------------------------
template <class T>
inline T load_global(const T* p) {
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(T) != 0) {
    detail::block().scheduler.fail(emulation::format("load_global: %p is not a multiple of %zu",
                                                     static_cast<const void*>(p), sizeof(T)));
  }
  return *p;
}
inline int atomic_add(int* p, int x) {
  const int before = *p;
  *p += x;
  detail::block().scheduler.maybe_preempt();
  return before;
}

// ---- matrix products
// -----------------------------------------------------------------------------
inline void mma_bf16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                     std::uint32_t b1) {
  emulation::mma_bf16(detail::block().scheduler, c, a, b0, b1);
}
inline void mma_tf32(float (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                     std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  emulation::mma_tf32(detail::block().scheduler, c, {a0, a1, a2, a3}, b0, b1);
}
inline void wgmma_n64(float (&d0)[16], float (&d1)[16], const std::uint32_t* a, std::uint64_t b,
                      bool accumulate) {
  // Two products of half the columns: the descriptor's address field moves on by four groups of 8
  // rows.
  const std::uint64_t rows_32 = 4 * ((b >> 32) & 0x3fff);
  detail::block().products.issue("wgmma_n64", d0, 32, a, b, emulation::WarpgroupProducts::Major::kK,
                                 accumulate);
  detail::block().products.issue("wgmma_n64", d1, 32, a, b + rows_32,
                                 emulation::WarpgroupProducts::Major::kK, accumulate);
}
inline void wgmma_n32(float (&d)[16], const std::uint32_t* a, std::uint64_t b, bool accumulate) {
  detail::block().products.issue("wgmma_n32", d, 32, a, b, emulation::WarpgroupProducts::Major::kK,
                                 accumulate);
}
inline void wgmma_n128_rows(float (&d)[64], const std::uint32_t* a, std::uint64_t b,
                            bool accumulate) {
  detail::block().products.issue("wgmma_n128_rows", d, 128, a, b,
                                 emulation::WarpgroupProducts::Major::kRows, accumulate);
}
inline void wgmma_fence() { detail::block().products.fence(); }
inline void wgmma_commit() { detail::block().products.commit(); }
template <int kPending>
inline void wgmma_wait() {
  detail::block().products.wait(kPending);
}
template <std::size_t kN>
inline void wgmma_touch(float (&)[kN]) {}
inline std::uint64_t matrix_descriptor(SharedAddress a, int column_stride, int group_stride) {
  return static_cast<std::uint64_t>((a >> 4) & 0x3fff) |
         (static_cast<std::uint64_t>(column_stride >> 4) << 16) |
         (static_cast<std::uint64_t>(group_stride >> 4) << 32) | (1ull << 62);
}

}  // namespace flash_kda::sm90
