// One kernel for each function of ptx/tma.cuh and ptx/wgmma.cuh, as conformance.cu has for those of ptx/base.cuh.
#include "ptx/wgmma.cuh"

#ifndef ELEMENT
#define ELEMENT Float16
#endif
using Type = ELEMENT;

// Input and output of every kernel: a tensor map of one of the arrays, arrays of whatever it says, numbers.
struct Params {
  TensorMap map;
  const void* source;
  const void* second_source;
  void* destination;
  u32 count;
  i32 column, row, head, batch;
  u32 padding[5];
};

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kLineBytes = 128;

template <class T>
CUFLASH_DEVICE const T* source_of(const Params& params) {
  return (const T*)params.source;
}
template <class T>
CUFLASH_DEVICE T* destination_of(const Params& params) {
  return (T*)params.destination;
}

// The threads of a block copy `words` to or from shared memory.
CUFLASH_DEVICE void fill_shared(u32 shared, const u32* source, u32 words, u32 threads) {
  for (u32 i = ptx::thread_index(); i < words; i += threads) ptx::store_shared_b32(shared + 4 * i, source[i]);
}
CUFLASH_DEVICE void drain_shared(u32* destination, u32 shared, u32 words, u32 threads) {
  for (u32 i = ptx::thread_index(); i < words; i += threads)
    destination[i] = ptx::load_shared_b32(shared + 4 * i);
}

// ---- Barriers in shared memory --------------------------------------------------------------------------------------

// Warp 0 fills the stages of a ring, `count` times in all; warps 1 to 3 read each of them.
CUFLASH_DEVICE void pass_through_ring(const Params& params) {
  constexpr u32 kStages = 3, kStageBytes = 2 * kWarp, kReaders = 3;
  const u32 shared = ptx::dynamic_shared(), full = shared + kStages * kStageBytes, empty = full + 8 * kStages;
  const u32 warp = ptx::thread_index() / kWarp, lane = ptx::thread_index() % kWarp;
  if (ptx::thread_index() == 0)
    for (u32 stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(full + 8 * stage, kWarp);
      ptx::barrier_init(empty + 8 * stage, kReaders);
    }
  ptx::fence_barrier_init();
  ptx::sync_block();
  for (u32 i = 0; i < params.count; ++i) {
    const u32 stage = i % kStages, parity = i / kStages & 1, place = shared + stage * kStageBytes;
    if (warp == 0) {
      ptx::barrier_wait(empty + 8 * stage, parity ^ 1);
      ptx::store_shared_b16(place + 2 * lane, source_of<u16>(params)[i * kWarp + lane]);
      ptx::barrier_arrive(full + 8 * stage);
    } else {
      ptx::barrier_wait(full + 8 * stage, parity);
      const u16 value = ptx::load_shared_b16(place + 2 * (lane ^ warp));
      destination_of<u16>(params)[(i * kReaders + warp - 1) * kWarp + lane] = value;
      ptx::any_lane(false);  // all lanes have read
      if (lane == 0) ptx::barrier_arrive(empty + 8 * stage);
    }
  }
}
CUFLASH_DEFINE_KERNEL(barrier_ring, Params, kWarpgroup, 1, pass_through_ring)

// ---- Copies by TMA --------------------------------------------------------------------------------------

// `count` bytes by two loads on one barrier, the second part first.
CUFLASH_DEVICE void load_neighbours(const Params& params) {
  const u32 shared = ptx::dynamic_shared(), barrier = shared + params.count, half = params.count / 2;
  if (ptx::thread_index() == 0) {
    ptx::barrier_init(barrier, 1);
    ptx::fence_barrier_init();
    ptx::barrier_arrive_expect(barrier, params.count);
    ptx::load_bulk(shared + half, source_of<u8>(params) + half, params.count - half, barrier);
    ptx::load_bulk(shared, params.source, half, barrier);
  }
  ptx::sync_block();
  ptx::barrier_wait(barrier, 0);
  drain_shared(destination_of<u32>(params), shared, params.count / 4, kWarpgroup);
}
CUFLASH_DEFINE_KERNEL(bulk_load, Params, kWarpgroup, 1, load_neighbours)

// The image in shared memory of the box of `count` bytes; the bytes behind it stay all ones.
CUFLASH_DEVICE void load_box(const Params& params) {
  constexpr u32 kBehind = 1024;
  const u32 shared = ptx::dynamic_shared(), words = (params.count + kBehind) / 4, barrier = shared + 4 * words;
  for (u32 i = ptx::thread_index(); i < words; i += kWarpgroup) ptx::store_shared_b32(shared + 4 * i, 0xffffffff);
  if (ptx::thread_index() == 0) ptx::barrier_init(barrier, 1);
  ptx::fence_async_proxy();
  ptx::sync_block();
  if (ptx::thread_index() == 0) {
    ptx::barrier_arrive_expect(barrier, params.count);
    ptx::load_tensor(shared, params.map, barrier, params.column, params.row, params.head, params.batch);
  }
  ptx::barrier_wait(barrier, 0);
  drain_shared(destination_of<u32>(params), shared, words, kWarpgroup);
}
CUFLASH_DEFINE_KERNEL(tensor_load, Params, kWarpgroup, 1, load_box)

// Two blocks bring `count` boxes to both of them, half of each, one after another to the same place. Each block writes
// down all of them.
CUFLASH_DEVICE void load_boxes_together(const Params& params) {
  constexpr u32 kShareRows = 8, kBytes = 2 * kShareRows * kLineBytes;
  const u32 shared = ptx::dynamic_shared(), full = shared + kBytes, empty = full + 8;
  const bool is_first = ptx::thread_index() == 0;
  if (is_first) {
    ptx::barrier_init(full, 1);
    ptx::barrier_init(empty, 2);
    ptx::fence_barrier_init();
  }
  ptx::sync_cluster<2>();
  for (u32 i = 0; i < params.count; ++i) {
    if (is_first) {
      ptx::barrier_wait(empty, i & 1 ^ 1);
      ptx::barrier_arrive_expect(full, kBytes);
      ptx::load_tensor_by_cluster<2, kShareRows>(shared, params.map, full, 0, 0, i, 0);
    }
    ptx::barrier_wait(full, i & 1);
    drain_shared(destination_of<u32>(params) + (2 * i + ptx::cluster_rank<2>()) * kBytes / 4, shared, kBytes / 4,
                 kWarpgroup);
    ptx::fence_async_proxy();
    ptx::sync_named(1, kWarpgroup);
    if (is_first) ptx::barrier_arrive_in_cluster<2>(empty);
  }
  ptx::sync_cluster<2>();
}
CUFLASH_DEFINE_CLUSTER_KERNEL(cluster_load, Params, kWarpgroup, 2, load_boxes_together)

// Two blocks send each other 16 bytes a thread, `count` times, and keep what they get.
CUFLASH_DEVICE void exchange_parts(const Params& params) {
  const u32 thread = ptx::thread_index(), rank = ptx::cluster_rank<2>();
  const u32 place = ptx::dynamic_shared() + 16 * thread, full = ptx::dynamic_shared() + 16 * kWarpgroup;
  const u32 empty = full + 8, other = ptx::distance_in_cluster(rank ^ 1);
  if (thread == 0) {
    ptx::barrier_init(full, 1);
    ptx::barrier_init(empty, kWarpgroup);
    ptx::fence_barrier_init();
  }
  ptx::sync_cluster<2>();
  for (u32 i = 0; i < params.count; ++i) {
    const u32 first = ((2 * i + rank) * kWarpgroup + thread) * 4;
    float part[4];
    for (u32 j = 0; j < 4; ++j) part[j] = source_of<float>(params)[first + j];
    ptx::barrier_wait(empty, i & 1 ^ 1);
    if (thread == 0) ptx::barrier_arrive_expect(full, 16 * kWarpgroup);
    ptx::store_remote_f32x4(place + other, part, full + other);
    ptx::barrier_wait(full, i & 1);
    ptx::load_shared_f32x4(place, part);
    ptx::fence_async_proxy();
    ptx::barrier_arrive_remote(empty + other);
    for (u32 j = 0; j < 4; ++j) destination_of<float>(params)[first + j] = part[j];
  }
  ptx::sync_cluster<2>();
}
CUFLASH_DEFINE_CLUSTER_KERNEL(exchanged, Params, kWarpgroup, 2, exchange_parts)

// The way back: `count` bytes of image to the box.
template <bool adds>
CUFLASH_DEVICE void write_box(const Params& params) {
  const u32 shared = ptx::dynamic_shared();
  fill_shared(shared, source_of<u32>(params), params.count / 4, kWarpgroup);
  ptx::fence_async_proxy();
  ptx::sync_block();
  if (ptx::thread_index() == 0) {
    if constexpr (adds)
      ptx::add_tensor(params.map, shared, params.column, params.row, params.head, params.batch);
    else
      ptx::store_tensor(params.map, shared, params.column, params.row, params.head, params.batch);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
    ptx::bulk_wait<0>();
  }
}
CUFLASH_DEFINE_KERNEL(tensor_store, Params, kWarpgroup, 1, write_box<false>)
CUFLASH_DEFINE_KERNEL(tensor_addition, Params, kWarpgroup, 1, write_box<true>)

// ---- Warps and their registers --------------------------------------------------------------------------------------

// Which lanes were elected, twice, the value of the first lane, and one that is the same in all lanes.
CUFLASH_DEVICE void store_elected(const Params& params) {
  const u32 thread = ptx::thread_index();
  u32* destination = destination_of<u32>(params) + 4 * thread;
  destination[0] = ptx::elect_lane();
  destination[1] = ptx::elect_lane();
  destination[2] = ptx::uniform(7 * thread);
  destination[3] = ptx::to_uniform_register(7 * (thread / 32));
}
CUFLASH_DEFINE_KERNEL(elected, Params, kWarpgroup, 1, store_elected)

// What the scratch word holds stays.
CUFLASH_DEVICE void keep_values(const Params& params) {
  const u32 thread = ptx::thread_index(), scratch = ptx::dynamic_shared() + 4 * thread;
  ptx::store_shared_b32(scratch, thread);
  ptx::keep_before(source_of<float>(params)[thread], scratch);
  destination_of<u16>(params)[thread] = ptx::load_shared_b16(scratch);
}
CUFLASH_DEFINE_KERNEL(kept, Params, kWarpgroup, 1, keep_values)

// Lane 8 i + r stores row r of matrix i as row (5 (8 i + r)) % 32.
CUFLASH_DEVICE void store_fragments(const Params& params) {
  const u32 lane = ptx::thread_index(), shared = ptx::dynamic_shared();
  u32 fragment[4];
  for (u32 i = 0; i < 4; ++i) fragment[i] = source_of<u32>(params)[4 * lane + i];
  const u32 address = shared + 16 * (5 * lane % kWarp);
  ptx::store_matrix_x4(address, fragment);
  ptx::sync_block();
  drain_shared(destination_of<u32>(params), shared, 4 * kWarp, kWarp);
}
CUFLASH_DEFINE_KERNEL(store_matrix, Params, kWarp, 1, store_fragments)

// The first warpgroup gives back what the others take.
CUFLASH_DEVICE void move_registers(const Params& params) {
  const u32 thread = ptx::thread_index();
  if (thread < kWarpgroup)
    ptx::decrease_registers<24>();
  else
    ptx::increase_registers<240>();
  destination_of<u32>(params)[thread] = thread;
}
CUFLASH_DEFINE_KERNEL(registers, Params, 3 * kWarpgroup, 1, move_registers)

// ---- Products of a warpgroup ----------------------------------------------------------------------------------------

// Operands are two chunks of lines of 128 bytes wide: the elements of k along the lines, or transposed those of m or n.
constexpr u32 kSteps = 8;
constexpr u32 kStepBytes = 32;

// Lines of the source to shared memory, swizzled as TMA would.
CUFLASH_DEVICE void load_lines(u32 shared, const u8* source, u32 lines) {
  for (u32 i = ptx::thread_index(); i < lines * 8; i += kWarpgroup)
    ptx::copy_async<16, 0>(shared + 16 * (i ^ (i / 8 % 8)), source + 16 * i, 16);
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
}

// The operand for one step along k: of `rows` rows, or transposed of all 16 kSteps lines for each 64 of them.
CUFLASH_DEVICE u64 operand(u32 tile, u32 rows, bool transposed, u32 step) {
  if (transposed) return ptx::descriptor(tile + step * 16 * kLineBytes, 16 * kSteps * kLineBytes, 8 * kLineBytes);
  return ptx::descriptor(tile + step / 4 * rows * kLineBytes + step % 4 * kStepBytes, 16, 8 * kLineBytes);
}

// The registers of operand a for one step, from its lines in global memory.
CUFLASH_DEVICE void load_a(u32 (&a)[4], const u8* lines, u32 step) {
  const u32 thread = ptx::thread_index(), row = thread / 32 * 16 + thread % 32 / 4;
  const u8* chunk = lines + step / 4 * 64 * kLineBytes + step % 4 * kStepBytes + thread % 4 * 4;
  for (u32 i = 0; i < 4; ++i) a[i] = *(const u32*)(chunk + (row + i % 2 * 8) * kLineBytes + i / 2 * 16);
}

// destination[64][n] (+)= a b, of so many lines; it is added to if `count` is not 0. For each step along k,
// issue(d, a, a_tile, b_tile, step, accumulate) issues a product, with `a` in registers or in its tile.
template <int n, class Issue>
CUFLASH_DEVICE void multiply_lines(const Params& params, u32 lines_a, u32 lines_b, Issue issue) {
  const u32 thread = ptx::thread_index(), row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  const u32 a_tile = ptx::dynamic_shared(), b_tile = a_tile + lines_a * kLineBytes;
  load_lines(a_tile, source_of<u8>(params), lines_a);
  load_lines(b_tile, (const u8*)params.second_source, lines_b);
  ptx::fence_async_proxy();
  ptx::sync_block();

  float* destination = destination_of<float>(params);
  float d[n / 8][4];
  u32 a[kSteps][4];
#pragma unroll
  for (int piece = 0; piece < n / 8; ++piece)
#pragma unroll
    for (int i = 0; i < 4; ++i) d[piece][i] = destination[(row + i / 2 * 8) * n + 8 * piece + column + i % 2];
#pragma unroll
  for (u32 step = 0; step < kSteps; ++step) load_a(a[step], source_of<u8>(params), step);
  ptx::fence_operand(d);
  ptx::wgmma_fence();
#pragma unroll
  for (u32 step = 0; step < kSteps; ++step) issue(d, a[step], a_tile, b_tile, step, step > 0 || params.count != 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::fence_operand(d);
#pragma unroll
  for (int piece = 0; piece < n / 8; ++piece)
#pragma unroll
    for (int i = 0; i < 4; ++i) destination[(row + i / 2 * 8) * n + 8 * piece + column + i % 2] = d[piece][i];
}

template <int n, bool a_in_registers, bool a_transposed, bool b_transposed>
CUFLASH_DEVICE void multiply_tiles(const Params& params) {
  constexpr u32 kLinesA = a_transposed ? 16 * kSteps : 2 * 64;
  constexpr u32 kLinesB = b_transposed ? (n + 63) / 64 * 16 * kSteps : 2 * n;
  multiply_lines<n>(params, kLinesA, kLinesB,
                    [](float(&d)[n / 8][4], const u32(&a)[4], u32 a_tile, u32 b_tile, u32 step, bool accumulate) {
                      const u64 in_shared = operand(a_tile, 64, a_transposed, step);
                      const u64 b = operand(b_tile, n, b_transposed, step);
                      if constexpr (a_in_registers)
                        ptx::wgmma<b_transposed>(Type{}, d, a, b, accumulate);
                      else
                        ptx::wgmma<a_transposed, b_transposed>(Type{}, d, in_shared, b, accumulate);
                    });
}

#define PRODUCTS(n)                                                                                        \
  CUFLASH_DEFINE_KERNEL(product_shared_##n, Params, kWarpgroup, 1, (multiply_tiles<n, false, false, false>)) \
  CUFLASH_DEFINE_KERNEL(product_registers_##n, Params, kWarpgroup, 1, (multiply_tiles<n, true, false, false>))
PRODUCTS(16) PRODUCTS(32) PRODUCTS(48) PRODUCTS(64) PRODUCTS(80) PRODUCTS(96) PRODUCTS(112) PRODUCTS(128)
PRODUCTS(144) PRODUCTS(160) PRODUCTS(176) PRODUCTS(192) PRODUCTS(208) PRODUCTS(224) PRODUCTS(240) PRODUCTS(256)

#define TRANSPOSED_PRODUCTS(n)                                                                                    \
  CUFLASH_DEFINE_KERNEL(product_shared_##n##_b, Params, kWarpgroup, 1, (multiply_tiles<n, false, false, true>))     \
  CUFLASH_DEFINE_KERNEL(product_shared_##n##_a, Params, kWarpgroup, 1, (multiply_tiles<n, false, true, false>))     \
  CUFLASH_DEFINE_KERNEL(product_shared_##n##_ab, Params, kWarpgroup, 1, (multiply_tiles<n, false, true, true>))     \
  CUFLASH_DEFINE_KERNEL(product_registers_##n##_b, Params, kWarpgroup, 1, (multiply_tiles<n, true, false, true>))
TRANSPOSED_PRODUCTS(32) TRANSPOSED_PRODUCTS(64) TRANSPOSED_PRODUCTS(96) TRANSPOSED_PRODUCTS(256)

// The same of fp8 elements, whose k are along the lines.
template <int n, class A, class B, bool a_in_registers>
CUFLASH_DEVICE void multiply_bytes(const Params& params) {
  multiply_lines<n>(params, 2 * 64, 2 * n,
                    [](float(&d)[n / 8][4], const u32(&a)[4], u32 a_tile, u32 b_tile, u32 step, bool accumulate) {
                      const u64 in_shared = operand(a_tile, 64, false, step), b = operand(b_tile, n, false, step);
                      if constexpr (a_in_registers)
                        ptx::wgmma_k32(A{}, B{}, d, a, b, accumulate);
                      else
                        ptx::wgmma_k32(A{}, B{}, d, in_shared, b, accumulate);
                    });
}

#define FP8_MATMULS(n)                                                                                   \
  CUFLASH_DEFINE_KERNEL(bytes_shared_e4m3_e4m3_##n, Params, kWarpgroup, 1,                                     \
                        (multiply_bytes<n, Float8E4M3, Float8E4M3, false>))                                    \
  CUFLASH_DEFINE_KERNEL(bytes_shared_e5m2_e5m2_##n, Params, kWarpgroup, 1,                                     \
                        (multiply_bytes<n, Float8E5M2, Float8E5M2, false>))                                    \
  CUFLASH_DEFINE_KERNEL(bytes_registers_e4m3_e4m3_##n, Params, kWarpgroup, 1,                                  \
                        (multiply_bytes<n, Float8E4M3, Float8E4M3, true>))                                     \
  CUFLASH_DEFINE_KERNEL(bytes_registers_e4m3_e5m2_##n, Params, kWarpgroup, 1,                                  \
                        (multiply_bytes<n, Float8E4M3, Float8E5M2, true>))
FP8_MATMULS(8) FP8_MATMULS(40) FP8_MATMULS(64) FP8_MATMULS(72) FP8_MATMULS(96)
FP8_MATMULS(104) FP8_MATMULS(128) FP8_MATMULS(136)

// Tiles by TMA: a and b are rows of 64 elements of one array, `a` its first 64 rows and `b` the 64 behind
// them. Two products in flight: a b and then b b; the first is stored while the second runs.
CUFLASH_DEVICE void multiply_loaded(const Params& params) {
  constexpr u32 kTileBytes = 64 * kLineBytes;
  const u32 thread = ptx::thread_index(), row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  const u32 a_tile = ptx::dynamic_shared(), b_tile = a_tile + kTileBytes, barrier = b_tile + kTileBytes;
  if (thread == 0) {
    ptx::barrier_init(barrier, 1);
    ptx::fence_barrier_init();
  }
  ptx::sync_block();
  if (thread < kWarp && ptx::elect_lane()) {
    ptx::barrier_arrive_expect(barrier, 2 * kTileBytes);
    ptx::load_tensor(a_tile, params.map, barrier, 0, 0, 0, 0);
    ptx::load_tensor(b_tile, params.map, barrier, 0, 64, 0, 0);
  }
  ptx::barrier_wait(barrier, 0);
  float first[8][4], second[8][4];
  ptx::wgmma_fence();
#pragma unroll
  for (u32 step = 0; step < 4; ++step)
    ptx::wgmma<false, false>(Float16{}, first, operand(a_tile, 64, false, step),
                                      operand(b_tile, 64, false, step), step > 0);
  ptx::wgmma_commit();
#pragma unroll
  for (u32 step = 0; step < 4; ++step)
    ptx::wgmma<false, false>(Float16{}, second, operand(b_tile, 64, false, step),
                                      operand(b_tile, 64, false, step), step > 0);
  ptx::wgmma_commit();
  float* destination = destination_of<float>(params);
  ptx::wgmma_wait<1>();
  ptx::fence_operand(first);
#pragma unroll
  for (int piece = 0; piece < 8; ++piece)
#pragma unroll
    for (int i = 0; i < 4; ++i) destination[(row + i / 2 * 8) * 64 + 8 * piece + column + i % 2] = first[piece][i];
  ptx::wgmma_wait<0>();
  ptx::fence_operand(second);
#pragma unroll
  for (int piece = 0; piece < 8; ++piece)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      destination[(64 + row + i / 2 * 8) * 64 + 8 * piece + column + i % 2] = second[piece][i];
}
CUFLASH_DEFINE_KERNEL(product_loaded, Params, kWarpgroup, 1, multiply_loaded)
