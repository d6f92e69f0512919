// The only file, with the other headers of this folder, for inline PTX and for everything else that only a GPU has:
// thread and block indices, shared memory, barriers, shuffles, atomics. Kernels call these functions and contain none
// of it themselves, so the same kernels also compile as plain C++ for the CPU: CUFLASH_EMULATION then names a header
// with the same functions.
//
// One instruction per function. Each says its scope (thread, warp, block) and its section of the PTX ISA manual (9.7).
// Shared-memory addresses are u32 offsets of the shared window.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// A tag of the element type chooses the instruction; 16-bit elements are passed as bits.
struct Float16 {};
struct BFloat16 {};
struct Float32 {};
struct Float64 {};
struct Float8E4M3 {};
struct Float8E5M2 {};

struct alignas(16) Bytes16 {
  u32 word[4];
};

#ifdef CUFLASH_EMULATION
#include CUFLASH_EMULATION
#else

#define CUFLASH_DEVICE __device__ __forceinline__

// The compute capability whose instructions are used, 75 for 7.5: that of the device, or an earlier one.
static_assert(CUFLASH_ARCH >= 70, "kernels use instructions of 7.0");

// Programmatic dependent launch (PDL): the blocks of a kernel that overlaps the previous one may start before that one
// has ended. They wait here until it has ended and all that it wrote can be seen. Every thread of every kernel does so
// first, hence all kernels before the previous one have ended as well.
#if CUFLASH_OVERLAPS_PREVIOUS
#define CUFLASH_WAIT_FOR_PREVIOUS asm volatile("griddepcontrol.wait;" ::: "memory");
#else
#define CUFLASH_WAIT_FOR_PREVIOUS
#endif

// Defines the kernel `name`: `body(params)`, `threads` threads a block, at least `min_blocks` blocks an SM.
#define CUFLASH_DEFINE_KERNEL(name, Params, threads, min_blocks, body)                                       \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) name(const __grid_constant__ Params params) { \
    CUFLASH_WAIT_FOR_PREVIOUS                                                                           \
    body(params);                                                                                            \
  }

// The same of kernels whose blocks come in clusters, one block an SM.
#define CUFLASH_DEFINE_CLUSTER_KERNEL(name, Params, threads, blocks, body)                                   \
  extern "C" __global__ void __cluster_dims__(blocks, 1, 1) __launch_bounds__(threads, 1)                            \
      name(const __grid_constant__ Params params) {                                                            \
    CUFLASH_WAIT_FOR_PREVIOUS                                                                           \
    body(params);                                                                                            \
  }

namespace ptx {

// ---- Indices ------------------------------------------------------------------------------------------------------
CUFLASH_DEVICE u32 thread_index() { return threadIdx.x; }
CUFLASH_DEVICE u32 block_index() { return blockIdx.x; }
CUFLASH_DEVICE u32 num_blocks() { return gridDim.x; }

// ---- Shared memory ------------------------------------------------------------------------------------------------
// Address of the block's dynamic shared memory, aligned to 1024 bytes.
CUFLASH_DEVICE u32 dynamic_shared() {
  extern __shared__ __align__(1024) u8 storage[];
  return (u32)__cvta_generic_to_shared(storage);
}

// Thread. ld.shared / st.shared (9.7.9.8, 9.7.9.11); the address is aligned to the size of the access.
CUFLASH_DEVICE void load_shared_f32x4(u32 address, float (&value)[4]) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
               : "r"(address)
               : "memory");
}
CUFLASH_DEVICE void store_shared_f32x4(u32 address, const float (&value)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value[0]), "f"(value[1]), "f"(value[2]),
               "f"(value[3])
               : "memory");
}
CUFLASH_DEVICE void load_shared(u32 address, float& value) {
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
}
CUFLASH_DEVICE void load_shared(u32 address, double& value) {
  asm volatile("ld.shared.f64 %0, [%1];" : "=d"(value) : "r"(address) : "memory");
}
CUFLASH_DEVICE u16 load_shared_b16(u32 address) {
  u16 value;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
  return value;
}
CUFLASH_DEVICE u32 load_shared_b32(u32 address) {
  u32 value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
CUFLASH_DEVICE Bytes16 load_shared_b128(u32 address) {
  Bytes16 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "r"(address)
               : "memory");
  return value;
}
CUFLASH_DEVICE void store_shared_b128(u32 address, const Bytes16& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.word[0]), "r"(value.word[1]),
               "r"(value.word[2]), "r"(value.word[3])
               : "memory");
}
// Neighbours, aligned to their common size.
CUFLASH_DEVICE void load_shared_x2(u32 address, float (&value)[2]) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value[0]), "=f"(value[1]) : "r"(address) : "memory");
}
CUFLASH_DEVICE void load_shared_x2(u32 address, double (&value)[2]) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(value[0]), "=d"(value[1]) : "r"(address) : "memory");
}
CUFLASH_DEVICE void store_shared_x2(u32 address, const float (&value)[2]) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value[0]), "f"(value[1]) : "memory");
}
CUFLASH_DEVICE void store_shared_x2(u32 address, const double (&value)[2]) {
  asm volatile("st.shared.v2.f64 [%0], {%1, %2};" ::"r"(address), "d"(value[0]), "d"(value[1]) : "memory");
}
CUFLASH_DEVICE void store_shared_b16(u32 address, u16 value) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}
CUFLASH_DEVICE void store_shared_b32(u32 address, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// ---- Barriers and shuffles ----------------------------------------------------------------------------------------
// Block. barrier.sync 0 (9.7.13.1): every thread arrives at the same call.
CUFLASH_DEVICE void sync_block() { __syncthreads(); }

// Warp. bar.warp.sync (9.7.13.2): what a lane did before it is visible to the others after it.
CUFLASH_DEVICE void sync_warp() { __syncwarp(); }

// Warp. barrier.sync / barrier.arrive (9.7.13.1) with an identifier from 1 to 15 (0 is sync_block) and the number of
// threads that take part, those that only arrive included. Both order shared memory.
CUFLASH_DEVICE void sync_named(u32 identifier, u32 threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(identifier), "r"(threads) : "memory");
}
CUFLASH_DEVICE void arrive_named(u32 identifier, u32 threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(identifier), "r"(threads) : "memory");
}

// Warp. barrier.red.or (9.7.13.1): sync_named, after which every thread knows whether `predicate` held in any.
CUFLASH_DEVICE bool sync_named_any(u32 identifier, u32 threads, bool predicate) {
  u32 any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\n"
      "barrier.cta.red.or.pred.aligned q, %1, %2, p;\n"
      "selp.b32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(identifier), "r"(threads), "r"((u32)predicate)
      : "memory");
  return any != 0;
}

// Warp. shfl.sync.bfly (9.7.9.6): the value of the lane whose index differs in the bits of `lane_mask`.
CUFLASH_DEVICE float shuffle_xor(float value, u32 lane_mask) { return __shfl_xor_sync(0xffffffffu, value, lane_mask); }
CUFLASH_DEVICE double shuffle_xor(double value, u32 lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

// Warp. shfl.sync.idx (9.7.9.6): the value of lane `lane` modulo 32.
CUFLASH_DEVICE float shuffle(float value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
CUFLASH_DEVICE double shuffle(double value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane); }
CUFLASH_DEVICE u32 shuffle(u32 value, u32 lane) { return __shfl_sync(0xffffffffu, value, lane); }

// Warp. vote.sync.any (9.7.13.9): whether `predicate` holds in any lane.
CUFLASH_DEVICE bool any_lane(bool predicate) { return __any_sync(0xffffffffu, predicate); }
// Warp. vote.sync.ballot (9.7.13.9): bit i says whether `predicate` holds in lane i.
CUFLASH_DEVICE u32 ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
// Warp. match.any.sync (9.7.13.10): bit i says whether lane i has the same value.
CUFLASH_DEVICE u32 match_any(u32 value) { return __match_any_sync(0xffffffffu, value); }

// ---- Asynchronous copies ------------------------------------------------------------------------------------------
// Thread. cp.async (9.7.9.25.3.1): `bytes` (4, 8 or 16) to shared memory, the first `source_bytes` of them read from
// global memory at `source` + `offset` bytes, the rest zeros. With 0 source bytes nothing is read. Both addresses are
// aligned to `bytes`. The offset is part of the instruction and takes no register. Before sm_80, a load by way of
// registers and a store: loads of several copies are under way at a time, since none is ordered after a store.
template <int bytes, int offset>
CUFLASH_DEVICE void copy_async(u32 destination, const void* source, u32 source_bytes) {
#if CUFLASH_ARCH >= 80
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1 + %2], 16, %3;" ::"r"(destination), "l"(source), "n"(offset),
                 "r"(source_bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1 + %2], %3, %4;" ::"r"(destination), "l"(source), "n"(offset),
                 "n"(bytes), "r"(source_bytes)
                 : "memory");
#else
  const u8* from = (const u8*)source + offset;
  u32 word[bytes / 4] = {};
  if (source_bytes == bytes) {
    if constexpr (bytes == 16) {
      const uint4 all = __ldg((const uint4*)from);
      word[0] = all.x, word[1] = all.y, word[2] = all.z, word[3] = all.w;
    } else if constexpr (bytes == 8) {
      const uint2 all = __ldg((const uint2*)from);
      word[0] = all.x, word[1] = all.y;
    } else {
      word[0] = __ldg((const u32*)from);
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < bytes; ++i)
      if (i < source_bytes) word[i / 4] |= (u32)__ldg(from + i) << i % 4 * 8;
  }
  if constexpr (bytes == 16)
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(destination), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3]));
  else if constexpr (bytes == 8)
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(destination), "r"(word[0]), "r"(word[1]));
  else
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(destination), "r"(word[0]));
#endif
}
// Thread. cp.async.commit_group (9.7.9.25.3.2): closes the group of the copies issued since the last one.
CUFLASH_DEVICE void copy_async_commit() {
#if CUFLASH_ARCH >= 80
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Thread. cp.async.wait_group (9.7.9.25.3.3): until at most `pending` of this thread's newest groups are in flight.
template <int pending>
CUFLASH_DEVICE void copy_async_wait() {
#if CUFLASH_ARCH >= 80
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// ---- Matrix fragments ---------------------------------------------------------------------------------------------
// Warp. ldmatrix (9.7.14.5.15): four 8x8 matrices of 16-bit elements; lane 8i + r passes the address of row r of matrix
// i (16-byte aligned) and receives in fragment[i] the elements (lane / 4, 2 (lane % 4)) and the one right of it. Before
// sm_75, lanes learn the addresses of rows from one another.
CUFLASH_DEVICE void load_matrix_x4(u32 (&fragment)[4], u32 address) {
#if CUFLASH_ARCH >= 75
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
#else
  const u32 lane = thread_index() % 32;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    float pair;
    load_shared(shuffle(address, 8 * i + lane / 4) + lane % 4 * 4, pair);
    fragment[i] = __float_as_uint(pair);
  }
#endif
}
// The same with each matrix transposed.
CUFLASH_DEVICE void load_matrix_x4_transposed(u32 (&fragment)[4], u32 address) {
#if CUFLASH_ARCH >= 75
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
#else
  const u32 lane = thread_index() % 32, column = lane / 4 * 2;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = 8 * i + lane % 4 * 2;
    fragment[i] = load_shared_b16(shuffle(address, row) + column) |
                  (u32)load_shared_b16(shuffle(address, row + 1) + column) << 16;
  }
#endif
}

// Warp. mma.sync.m16n8k16 (9.7.14.5.8): d += a b, float32 accumulation. With g = lane / 4 and t = lane % 4:
// a[0..3] hold rows g, g+8, g, g+8 at columns 2t, 2t, 2t+8, 2t+8; b0, b1 hold rows 2t, 2t+8 (k) of column g;
// d[0..3] are (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1). Of float16 before sm_80, two m16n8k8.
CUFLASH_DEVICE void mma_m16n8k16(Float16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if CUFLASH_ARCH >= 80
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const u32 b[2] = {b0, b1};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[i]));
#endif
}
CUFLASH_DEVICE void mma_m16n8k16(BFloat16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Warp. mma.sync.m16n8k8 (9.7.14.5.6, 9.7.14.5.7): d += a b. a[0..3] hold rows g, g+8, g, g+8 at columns t, t, t+4,
// t+4; b0, b1 hold rows t, t+4 (k) of column g; d as above. TF32 operands are float32 bits, of which the first 19
// count; sums are float32, cut off rather than rounded.
CUFLASH_DEVICE void mma_m16n8k8(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
// Warp. mma.sync.m16n8k16 of float64 (9.7.14.5): a[i] and b[i] hold columns and rows 8 i to 8 i + 7, each as above.
// Every product is rounded. Before sm_90, eight m8n8k4.
CUFLASH_DEVICE void mma_m16n8k16(double (&d)[4], const double (&a)[2][4], const double (&b)[2][2]) {
#if CUFLASH_ARCH >= 90
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
      "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0][0]), "d"(a[0][1]), "d"(a[0][2]), "d"(a[0][3]), "d"(a[1][0]), "d"(a[1][1]), "d"(a[1][2]),
        "d"(a[1][3]), "d"(b[0][0]), "d"(b[0][1]), "d"(b[1][0]), "d"(b[1][1]));
#else
#pragma unroll
  for (int i = 0; i < 8; ++i)
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(d[i % 2 * 2]), "+d"(d[i % 2 * 2 + 1])
                 : "d"(a[i / 4][i % 4]), "d"(b[i / 4][i / 2 % 2]));
#endif
}

}  // namespace ptx

#include "ptx/arithmetic.cuh"

namespace ptx {

// ---- Reductions in global memory ----------------------------------------------------------------------------------
// Thread. red.global.add.f32 (9.7.13.7): order between threads is not defined; subnormal numbers become zeros.
CUFLASH_DEVICE void reduce_add(float* address, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}
CUFLASH_DEVICE void reduce_add(double* address, double value) {
  asm volatile("red.global.add.f64 [%0], %1;" ::"l"(address), "d"(value) : "memory");
}
// Thread. red.global.add.u64 and red.global.max.u64 (9.7.13.7).
CUFLASH_DEVICE void reduce_add(u64* address, u64 value) {
  asm volatile("red.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
CUFLASH_DEVICE void reduce_max(u64* address, u64 value) {
  asm volatile("red.global.max.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
// Thread. red.global.add.v4.f32 (9.7.13.7): four neighbours, aligned to 16 bytes; before sm_90, four reductions.
CUFLASH_DEVICE void reduce_add_x4(float* address, const float (&value)[4]) {
#if CUFLASH_ARCH >= 90
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(value[0]), "f"(value[1]),
               "f"(value[2]), "f"(value[3])
               : "memory");
#else
  for (int i = 0; i < 4; ++i) reduce_add(address + i, value[i]);
#endif
}

// Thread. At least so many cycles of its SM's clock (10, %clock).
template <u32 cycles>
CUFLASH_DEVICE void pause() {
  if constexpr (cycles > 0) {
    u32 start, now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(start)::"memory");
    do asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    while (now - start < cycles);
  }
}

// ---- Counts and turns of blocks -----------------------------------------------------------------------------------
// A block may wait only for blocks with a lower index. Devices start blocks in the order of their index, so those run
// or are done. The first of them waits for no other, and so all of them end.

// Thread. ld.acquire.gpu (9.7.9.8) until so many threads have counted: what they stored before is in memory.
CUFLASH_DEVICE void wait_for_count(const u32* counter, u32 count) {
  u32 counted;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(counted) : "l"(counter) : "memory");
  while (counted != count);
}
// Thread. red.release.gpu.add (9.7.13.7): after all that this thread, and those it has met at a barrier, stored.
CUFLASH_DEVICE void add_to_count(u32* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Floating-point sums that several blocks add to depend on the order of the blocks. Where they must not, blocks take
// turns: a counter says how many have added, and one thread of each block counts.
CUFLASH_DEVICE void wait_for_turn(const u32* turns, u32 turn) { wait_for_count(turns, turn); }
CUFLASH_DEVICE void end_turn(u32* turns) { add_to_count(turns); }

// ---- Results that blocks leave for one another ----------------------------------------------------------------------
// A block stores results and counts its arrival. One that has counted after it may load them. These functions are
// ordinary accesses; with them the emulator checks whether arrivals order them.

// Thread. st.global (9.7.9.11) and ld.global (9.7.9.8), aligned to the size of the access.
CUFLASH_DEVICE void store_for_blocks_x2(float* address, const float (&value)[2]) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(value[0]), "f"(value[1]) : "memory");
}
CUFLASH_DEVICE void store_for_blocks_x2(double* address, const double (&value)[2]) {
  asm volatile("st.global.v2.f64 [%0], {%1, %2};" ::"l"(address), "d"(value[0]), "d"(value[1]) : "memory");
}
CUFLASH_DEVICE void load_of_blocks_x2(const float* address, float (&value)[2]) {
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(value[0]), "=f"(value[1]) : "l"(address) : "memory");
}
CUFLASH_DEVICE void load_of_blocks_x2(const double* address, double (&value)[2]) {
  asm volatile("ld.global.v2.f64 {%0, %1}, [%2];" : "=d"(value[0]), "=d"(value[1]) : "l"(address) : "memory");
}
CUFLASH_DEVICE void load_of_blocks_x4(const float* address, float (&value)[4]) {
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
               : "l"(address)
               : "memory");
}
// The same of numbers of which an access takes two.
CUFLASH_DEVICE void load_of_blocks_x4(const double* address, double (&value)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    double pair[2];
    load_of_blocks_x2(address + i, pair);
    value[i] = pair[0], value[i + 1] = pair[1];
  }
}

// Thread. ld.relaxed.gpu (9.7.9.8): the count, or an earlier one.
CUFLASH_DEVICE u64 load_arrivals(const u64* counter) {
  u64 value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
  return value;
}
// Thread. atom.relaxed.gpu.cas (9.7.13.6): sets the count, unless it is another than `expected` by now.
CUFLASH_DEVICE void replace_arrivals(u64* counter, u64 expected, u64 value) {
  asm volatile("atom.relaxed.gpu.global.cas.b64 _, [%0], %1, %2;" ::"l"(counter), "l"(expected), "l"(value) : "memory");
}
// Thread. atom.acq_rel.gpu.add (9.7.13.6): adds 1 and returns the count before. It releases what this thread, and those
// of a barrier before it, have stored so far, and acquires, for them and for those of a barrier after it, what earlier
// arrivals have released.
CUFLASH_DEVICE u64 count_arrival(u64* counter) {
  u64 before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(counter) : "memory");
  return before;
}

}  // namespace ptx

#endif  // CUFLASH_EMULATION
