// The device operations that the kernels are written in, each behind a named function.
//
// On the device they are CUTLASS's own atoms wherever those exist. In tests the same kernel source
// compiles for the host (FLASH_KDA_EMULATION) against tests/emulation/primitives.h, which has the
// same names and meanings.
//
// Shared memory is addressed by 32-bit offsets of its window (SharedAddress): one register, and
// every access is a volatile statement, so the compiler keeps accesses and barriers in the order
// they are written in.
#pragma once

#include <cstdint>

#ifdef FLASH_KDA_EMULATION
#include "emulation/primitives.h"
#else

#include <cuda.h>
#include <cuda_runtime.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#define FLASH_KDA_DEVICE __device__ __forceinline__
#define FLASH_KDA_UNROLL _Pragma("unroll")
#define FLASH_KDA_NO_UNROLL _Pragma("unroll 1")

namespace flash_kda::sm90 {

using SharedAddress = std::uint32_t;
using TensorMap = CUtensorMap;

// ---- threads -----------------------------------------------------------------------------------
FLASH_KDA_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
// This thread's lane, read anew: what is derived from it stays out of registers between two calls.
FLASH_KDA_DEVICE int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
// x, by a way that the compiler does not see through: what is derived from it is computed anew and
// takes no register meanwhile.
FLASH_KDA_DEVICE int read_anew(int x) {
  int y;
  asm volatile("mov.u32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
FLASH_KDA_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
FLASH_KDA_DEVICE int grid_size() { return static_cast<int>(gridDim.x); }
FLASH_KDA_DEVICE void sync_block() { __syncthreads(); }
FLASH_KDA_DEVICE void sync_warp() { __syncwarp(); }
// Waits until `threads` threads have reached barrier `id` (1..15).
FLASH_KDA_DEVICE void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
FLASH_KDA_DEVICE float shuffle(float x, int lane) { return __shfl_sync(~0u, x, lane); }
FLASH_KDA_DEVICE int shuffle(int x, int lane) { return __shfl_sync(~0u, x, lane); }
FLASH_KDA_DEVICE bool any_in_warp(bool x) { return __any_sync(~0u, x) != 0; }
// A value that is the same in the whole warp, in a uniform register.
FLASH_KDA_DEVICE int warp_uniform(int x) { return __shfl_sync(~0u, x, 0); }
template <int kRegisters>
FLASH_KDA_DEVICE void grow_registers() {
  cutlass::arch::warpgroup_reg_alloc<kRegisters>();
}
template <int kRegisters>
FLASH_KDA_DEVICE void shrink_registers() {
  cutlass::arch::warpgroup_reg_dealloc<kRegisters>();
}
// Programmatic dependent launch: wait for the kernel before this one.
// (CUTLASS's function of this purpose is empty unless a macro is set.)
FLASH_KDA_DEVICE void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- numbers -----------------------------------------------------------------------------------
FLASH_KDA_DEVICE std::uint32_t bits(float x) { return __float_as_uint(x); }
FLASH_KDA_DEVICE float from_bits(std::uint32_t x) { return __uint_as_float(x); }
// 2^x, relative error about 2^-22; 2^-inf = 0, 2^0 = 1 exactly.
FLASH_KDA_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x, at most 1 unit in the last place; exact for powers of two.
FLASH_KDA_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / sqrt(x), relative error about 2^-22.
FLASH_KDA_DEVICE float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
FLASH_KDA_DEVICE float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
// Two floats, rounded to nearest even, as a pair of bf16; `low` in the low half.
FLASH_KDA_DEVICE std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
FLASH_KDA_DEVICE float bf16_low(std::uint32_t pair) { return __uint_as_float(pair << 16); }
FLASH_KDA_DEVICE float bf16_high(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
// An operand of mma_tf32, which drops the bits below tf32's ten of the mantissa: a quarter to half
// a unit more first, so that on average little is lost, at most three quarters of a unit. Numbers
// of ten bits stay exact. One instruction; cvt.rna.tf32.f32 becomes three, for NaN's sake.
FLASH_KDA_DEVICE std::uint32_t tf32_operand(float x) {
  return __float_as_uint(x * 1.000244140625f);
}

// ---- shared memory -----------------------------------------------------------------------------
FLASH_KDA_DEVICE SharedAddress shared_address(const void* p) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(p));
}
// CUTLASS's atoms take generic pointers and turn them back; the pair of conversions costs nothing.
FLASH_KDA_DEVICE void* generic(SharedAddress a) { return __cvta_shared_to_generic(a); }

FLASH_KDA_DEVICE float load_f32(SharedAddress a) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(a) : "memory");
  return x;
}
FLASH_KDA_DEVICE float2 load_f32x2(SharedAddress a) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(a) : "memory");
  return x;
}
FLASH_KDA_DEVICE float4 load_f32x4(SharedAddress a) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(a)
               : "memory");
  return x;
}
FLASH_KDA_DEVICE std::uint32_t load_u32(SharedAddress a) {
  std::uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(a) : "memory");
  return x;
}
FLASH_KDA_DEVICE uint4 load_u32x4(SharedAddress a) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(a)
               : "memory");
  return x;
}
FLASH_KDA_DEVICE void store_f32(SharedAddress a, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x) : "memory");
}
FLASH_KDA_DEVICE void store_f32x2(SharedAddress a, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(x), "f"(y) : "memory");
}
FLASH_KDA_DEVICE void store_u32(SharedAddress a, std::uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(x) : "memory");
}
FLASH_KDA_DEVICE void store_u32x4(SharedAddress a, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}
// Four 8x8 blocks of 16-bit elements; lane l gives the address of row l % 8 of block l / 8.
// Register i of lane 4g + t holds the elements (g, 2t) and (g, 2t + 1) of block i; with
// `transposed`, of its transpose.
FLASH_KDA_DEVICE void load_matrix(SharedAddress row, std::uint32_t (&r)[4]) {
  cute::SM75_U32x4_LDSM_N::copy(*static_cast<cute::uint128_t*>(generic(row)), r[0], r[1], r[2],
                                r[3]);
}
FLASH_KDA_DEVICE void load_matrix_transposed(SharedAddress row, std::uint32_t (&r)[4]) {
  cute::SM75_U16x8_LDSM_T::copy(*static_cast<cute::uint128_t*>(generic(row)), r[0], r[1], r[2],
                                r[3]);
}
FLASH_KDA_DEVICE void store_matrix(SharedAddress row, std::uint32_t r0, std::uint32_t r1,
                                   std::uint32_t r2, std::uint32_t r3) {
  cute::SM90_U32x4_STSM_N::copy(r0, r1, r2, r3, *static_cast<cute::uint128_t*>(generic(row)));
}
FLASH_KDA_DEVICE void store_matrix_transposed(SharedAddress row, std::uint32_t r0, std::uint32_t r1,
                                              std::uint32_t r2, std::uint32_t r3) {
  cute::SM90_U16x8_STSM_T::copy(r0, r1, r2, r3, *static_cast<cute::uint128_t*>(generic(row)));
}
// Makes this thread's ordinary writes to shared memory visible to wgmma and to the bulk copy
// engine.
FLASH_KDA_DEVICE void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- barriers in shared memory (64 bit, with a transaction count) ------------------------------
FLASH_KDA_DEVICE void barrier_init(SharedAddress barrier, int arrivals) {
  cutlass::arch::ClusterBarrier::init(static_cast<std::uint64_t*>(generic(barrier)),
                                      static_cast<std::uint32_t>(arrivals));
}
FLASH_KDA_DEVICE void fence_barrier_init() { cutlass::arch::fence_barrier_init(); }
FLASH_KDA_DEVICE void barrier_arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival, and `bytes` more that the copy engine will deliver.
FLASH_KDA_DEVICE void barrier_arrive_expect(SharedAddress barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Waits until the phase of this parity has completed.
FLASH_KDA_DEVICE void barrier_wait(SharedAddress barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- bulk tensor copies: boxes of [rows] x 64 bf16 in 128-byte rows, 128-byte swizzle ----------
// Coordinates: channel, head, token, batch. Reads outside the tensor give zero; writes outside are
// dropped.
FLASH_KDA_DEVICE void tensor_load(SharedAddress to, const TensorMap* map, SharedAddress barrier,
                                  int channel, int head, int token, int batch) {
  cute::SM90_TMA_LOAD_4D::copy(map, static_cast<std::uint64_t*>(generic(barrier)),
                               static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
                               generic(to), channel, head, token, batch);
}
FLASH_KDA_DEVICE void tensor_store(SharedAddress from, const TensorMap* map, int channel, int head,
                                   int token, int batch) {
  cute::SM90_TMA_STORE_4D::copy(map, generic(from), channel, head, token, batch);
}
FLASH_KDA_DEVICE void tensor_store_commit() { cute::tma_store_arrive(); }
// Waits until all but the newest `kPending` groups of stores have read their shared memory.
template <int kPending>
FLASH_KDA_DEVICE void tensor_store_wait_read() {
  cute::tma_store_wait<kPending>();
}
// Waits until all stores of this thread are complete in memory.
FLASH_KDA_DEVICE void tensor_store_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// `bytes` (a multiple of 16) as they lie, from global to shared memory.
FLASH_KDA_DEVICE void bulk_load(SharedAddress to, const void* from, int bytes,
                                SharedAddress barrier) {
  cute::SM90_BULK_COPY_G2S::copy(from, static_cast<std::uint64_t*>(generic(barrier)), generic(to),
                                 bytes);
}
// A hint: these bytes (a multiple of 16, from a border of 16) will be read soon.
FLASH_KDA_DEVICE void prefetch_to_l2(const void* from, int bytes) {
  cute::SM90_BULK_COPY_G2S::PREFETCH::copy(from, bytes);
}

// ---- global memory -----------------------------------------------------------------------------
template <class T>
FLASH_KDA_DEVICE T load_global(const T* p) {
  return __ldg(p);
}
FLASH_KDA_DEVICE int atomic_add(int* p, int x) { return atomicAdd(p, x); }

// ---- matrix products ---------------------------------------------------------------------------
// Warp: c[16, 8] += a[16, 16] b[16, 8], bf16. Lane 4g + t: c = (g, 2t), (g, 2t+1), (g+8, 2t), (g+8,
// 2t+1); a = rows g, g+8, g, g+8 with columns 2t.. in a[0], a[1] and 2t+8.. in a[2], a[3]; b = rows
// 2t.., 2t+8.. of column g.
FLASH_KDA_DEVICE void mma_bf16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                               std::uint32_t b1) {
  cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1,
                                            c[0], c[1], c[2], c[3]);
}
// Warp: c[16, 8] += a[16, 8] b[8, 8], tf32. a = (g, t), (g+8, t), (g, t+4), (g+8, t+4); b = (t, g),
// (t+4, g).
FLASH_KDA_DEVICE void mma_tf32(float (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                               std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(c[0], c[1], c[2], c[3], a0, a1, a2, a3, b0, b1, c[0],
                                           c[1], c[2], c[3]);
}

// Warpgroup, asynchronous: d[64, N] (+)= a[64, 16] b[16, N], a in registers, b in shared memory.
// Row 16w + g (and + 8) of warp w, columns 8j + 2t (and + 1): d[4j], d[4j+1], d[4j+2], d[4j+3]; a
// as in mma_bf16.
namespace detail {
template <class Atom, std::size_t... kI, std::size_t kN>
FLASH_KDA_DEVICE void wgmma(float (&d)[kN], const std::uint32_t* a, std::uint64_t b,
                            bool accumulate, std::index_sequence<kI...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, d[kI]...,
            accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}
template <std::size_t... kI>
FLASH_KDA_DEVICE void wgmma_n64(float (&d0)[16], float (&d1)[16], const std::uint32_t* a,
                                std::uint64_t b, bool accumulate, std::index_sequence<kI...>) {
  using cute::SM90::GMMA::Major;
  cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<Major::K, Major::K>::fma(
      a[0], a[1], a[2], a[3], b, d0[kI]..., d1[kI]...,
      accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}
}  // namespace detail
// b: N rows of 16 elements ("K-major": element (k, n) at row n). Columns 0..31 in d0, 32..63 in d1.
FLASH_KDA_DEVICE void wgmma_n64(float (&d0)[16], float (&d1)[16], const std::uint32_t* a,
                                std::uint64_t b, bool accumulate) {
  detail::wgmma_n64(d0, d1, a, b, accumulate, std::make_index_sequence<16>());
}
FLASH_KDA_DEVICE void wgmma_n32(float (&d)[16], const std::uint32_t* a, std::uint64_t b,
                                bool accumulate) {
  using cute::SM90::GMMA::Major;
  detail::wgmma<cute::SM90::GMMA::MMA_64x32x16_F32BF16BF16_RS<Major::K, Major::K> >(
      d, a, b, accumulate, std::make_index_sequence<16>());
}
// b: 16 rows of 128 elements ("MN-major": element (k, n) at row k).
FLASH_KDA_DEVICE void wgmma_n128_rows(float (&d)[64], const std::uint32_t* a, std::uint64_t b,
                                      bool accumulate) {
  using cute::SM90::GMMA::Major;
  detail::wgmma<cute::SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<Major::K, Major::MN> >(
      d, a, b, accumulate, std::make_index_sequence<64>());
}
FLASH_KDA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FLASH_KDA_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
FLASH_KDA_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of accumulators across an asynchronous product.
template <std::size_t kN>
FLASH_KDA_DEVICE void wgmma_touch(float (&d)[kN]) {
  FLASH_KDA_UNROLL
  for (float& x : d) cute::warpgroup_fence_operand(x);
}
// The descriptor of an operand in shared memory with 128-byte swizzle. K-major: `group_stride`
// bytes between groups of 8 rows. MN-major: `group_stride` between groups of 8 rows,
// `column_stride` between blocks of 64 columns.
FLASH_KDA_DEVICE std::uint64_t matrix_descriptor(SharedAddress a, int column_stride,
                                                 int group_stride) {
  return static_cast<std::uint64_t>((a >> 4) & 0x3fff) |
         (static_cast<std::uint64_t>(column_stride >> 4) << 16) |
         (static_cast<std::uint64_t>(group_stride >> 4) << 32) | (1ull << 62);
}

}  // namespace flash_kda::sm90
#endif  // FLASH_KDA_EMULATION
