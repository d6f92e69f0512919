// The functions of kernels/ptx/tma.cuh and kernels/ptx/wgmma.cuh on the CPU: see ptx_emulated.h, which includes this.
#pragma once
#include "runtime/interface_sm90.h"

struct TensorMap;

namespace ptx {

// ---- Barriers in shared memory ------------------------------------------------------------------------------------
CUFLASH_DEVICE void barrier_init(u32 barrier, u32 count, Site site = Site::here()) {
  ::emulator::barrier_init(barrier, count, site);
}
CUFLASH_DEVICE void fence_barrier_init(Site site = Site::here()) { ::emulator::fence_barrier_init(site); }
CUFLASH_DEVICE void barrier_arrive(u32 barrier, Site site = Site::here()) {
  ::emulator::barrier_arrive(barrier, 0, site);
}
CUFLASH_DEVICE void barrier_arrive_expect(u32 barrier, u32 bytes, Site site = Site::here()) {
  ::emulator::barrier_arrive(barrier, bytes, site);
}
CUFLASH_DEVICE void barrier_wait(u32 barrier, u32 parity, Site site = Site::here()) {
  ::emulator::barrier_wait(barrier, parity, site);
}

// ---- Copies by TMA ------------------------------------------------------------------------------------
CUFLASH_DEVICE void fence_async_proxy(Site site = Site::here()) { ::emulator::fence_async_proxy(site); }
CUFLASH_DEVICE void load_tensor(u32 destination, const TensorMap& map, u32 barrier, i32 column, i32 row, i32 head,
                                i32 batch, Site site = Site::here()) {
  ::emulator::load_tensor(destination, &map, barrier, {column, row, head, batch}, site);
}
CUFLASH_DEVICE void store_tensor(const TensorMap& map, u32 source, i32 column, i32 row, i32 head, i32 batch,
                                 Site site = Site::here()) {
  ::emulator::store_tensor(&map, source, {column, row, head, batch}, site);
}
CUFLASH_DEVICE void add_tensor(const TensorMap& map, u32 source, i32 column, i32 row, i32 head, i32 batch,
                               Site site = Site::here()) {
  ::emulator::add_tensor(&map, source, {column, row, head, batch}, site);
}
CUFLASH_DEVICE void load_bulk(u32 destination, const void* source, u32 bytes, u32 barrier, Site site = Site::here()) {
  ::emulator::load_bulk(destination, source, bytes, barrier, site);
}
CUFLASH_DEVICE void bulk_commit(Site site = Site::here()) { ::emulator::bulk_commit(site); }
template <int pending>
CUFLASH_DEVICE void bulk_wait(Site site = Site::here()) {
  static_assert(pending >= 0, "a count of groups");
  ::emulator::bulk_wait(pending, site);
}
template <int pending>
CUFLASH_DEVICE void bulk_wait_read(Site site = Site::here()) {
  static_assert(pending >= 0, "a count of groups");
  ::emulator::bulk_wait_read(pending, site);
}

// ---- Clusters -----------------------------------------------------------------------------------------------------
template <int blocks>
CUFLASH_DEVICE u32 cluster_rank() {
  return block_index() % blocks;
}
template <int blocks>
CUFLASH_DEVICE void sync_cluster(Site site = Site::here()) {
  if constexpr (blocks == 1)
    ::emulator::sync_block(site);
  else
    ::emulator::sync_cluster(site);
}
template <int blocks>
CUFLASH_DEVICE void barrier_arrive_in_cluster(u32 barrier, Site site = Site::here()) {
  if constexpr (blocks == 1)
    barrier_arrive(barrier, site);
  else
    for (u32 rank = 0; rank < blocks; ++rank)
      ::emulator::barrier_arrive(::emulator::address_in(rank, barrier), 0, site);
}
CUFLASH_DEVICE u32 distance_in_cluster(u32 rank) {
  const u32 here = ::emulator::dynamic_shared();
  return ::emulator::address_in(rank, here) - here;
}
CUFLASH_DEVICE void barrier_arrive_remote(u32 barrier, Site site = Site::here()) {
  ::emulator::barrier_arrive(barrier, 0, site);
}
CUFLASH_DEVICE void store_remote_f32x4(u32 address, const float (&value)[4], u32 barrier, Site site = Site::here()) {
  ::emulator::store_remote(address, value, sizeof value, barrier, site);
}
template <int blocks, int slice_rows>
CUFLASH_DEVICE void load_tensor_by_cluster(u32 destination, const TensorMap& map, u32 barrier, i32 column, i32 row,
                                           i32 head, i32 batch, Site site = Site::here()) {
  const u32 share = cluster_rank<blocks>();
  if constexpr (blocks == 1)
    load_tensor(destination, map, barrier, column, row, head, batch, site);
  else
    for (u32 rank = 0; rank < blocks; ++rank)
      ::emulator::load_tensor(::emulator::address_in(rank, destination + share * slice_rows * 128), &map,
                              ::emulator::address_in(rank, barrier),
                              {column, row + (i32)share * slice_rows, head, batch}, site);
}

// ---- Warps and their registers --------------------------------------------------------------------------------------
CUFLASH_DEVICE bool elect_lane(Site site = Site::here()) { return ::emulator::elect_lane(site); }
template <int registers>
CUFLASH_DEVICE void decrease_registers(Site site = Site::here()) {
  ::emulator::decrease_registers(registers, site);
}
template <int registers>
CUFLASH_DEVICE void increase_registers(Site site = Site::here()) {
  ::emulator::increase_registers(registers, site);
}
CUFLASH_DEVICE u32 uniform(u32 value, Site site = Site::here()) { return ::emulator::uniform(value, site); }
CUFLASH_DEVICE u32 to_uniform_register(u32 value, Site site = Site::here()) {
  return ::emulator::to_uniform_register(value, site);
}
CUFLASH_DEVICE void keep_before(float value, u32 scratch, Site site = Site::here()) {
  ::emulator::keep_before(value, scratch, site);
}
CUFLASH_DEVICE void store_matrix_x4(u32 address, const u32 (&fragment)[4], Site site = Site::here()) {
  ::emulator::store_matrix(address, fragment, site);
}

// ---- Products of a warpgroup ----------------------------------------------------------------------------------------
CUFLASH_DEVICE void wgmma_fence(Site site = Site::here()) { ::emulator::wgmma_fence(site); }
CUFLASH_DEVICE void wgmma_commit(Site site = Site::here()) { ::emulator::wgmma_commit(site); }
template <int pending>
CUFLASH_DEVICE void wgmma_wait(Site site = Site::here()) {
  static_assert(pending >= 0 && pending <= 7, "a count of groups");
  ::emulator::wgmma_wait(pending, site);
}
template <int n_tiles>
CUFLASH_DEVICE void fence_operand(float (&)[n_tiles][4]) {}

// An operand `a` in registers is kept by its address until wgmma_wait, as the accumulator is: both must live as long.
template <class Type, int n_tiles>
static inline void issue_product(float (&d)[n_tiles][4], const u32* a_registers, u64 a, u64 b, bool a_transposed,
                                 bool b_transposed, bool accumulate, Site site) {
  static_assert(n_tiles % 2 == 0 && n_tiles >= 2 && n_tiles <= 32, "16, 32, ..., 256 columns");
  constexpr Element type = element_of(Type{});
  ::emulator::wgmma({type, type, n_tiles, d[0], a_registers, a, b, a_transposed, b_transposed, accumulate}, site);
}
template <bool a_transposed, bool b_transposed, class Type, int n_tiles>
CUFLASH_DEVICE void wgmma(Type, float (&d)[n_tiles][4], u64 a, u64 b, bool accumulate, Site site = Site::here()) {
  issue_product<Type>(d, nullptr, a, b, a_transposed, b_transposed, accumulate, site);
}
template <bool b_transposed, class Type, int n_tiles>
CUFLASH_DEVICE void wgmma(Type, float (&d)[n_tiles][4], const u32 (&a)[4], u64 b, bool accumulate,
                          Site site = Site::here()) {
  issue_product<Type>(d, a, 0, b, false, b_transposed, accumulate, site);
}
template <class A, class B, int n_tiles>
CUFLASH_DEVICE void wgmma_k32(A, B, float (&d)[n_tiles][4], u64 a, u64 b, bool accumulate, Site site = Site::here()) {
  ::emulator::wgmma({element_of(A{}), element_of(B{}), n_tiles, d[0], nullptr, a, b, false, false, accumulate}, site);
}
template <class A, class B, int n_tiles>
CUFLASH_DEVICE void wgmma_k32(A, B, float (&d)[n_tiles][4], const u32 (&a)[4], u64 b, bool accumulate,
                              Site site = Site::here()) {
  ::emulator::wgmma({element_of(A{}), element_of(B{}), n_tiles, d[0], a, 0, b, false, false, accumulate}, site);
}

}  // namespace ptx
