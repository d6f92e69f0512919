// Inline PTX that compute capability 9.0 brought: barriers in shared memory, bulk and tensor copies, proxy fences,
// registers moved between warpgroups. Under the same rules as ptx/base.cuh; the products are in ptx/wgmma.cuh.
#pragma once
#include "ptx/base.cuh"

// Describes an array in global memory to TMA (cuTensorMapEncodeTiled fills it).
struct alignas(64) TensorMap {
  u64 opaque[16];
};

#ifndef CUFLASH_EMULATION  // else the functions come with those of ptx/base.cuh

namespace ptx {

// ---- Barriers in shared memory ------------------------------------------------------------------------------------
// A barrier is 8 bytes that count down the arrivals, and the bytes announced, of one phase after another. A wait names
// the parity of the phase: it returns once that phase is over. Parity 1 of a fresh barrier is over at once.

// Thread. mbarrier.init (9.7.13.15.9): `count` arrivals end a phase.
CUFLASH_DEVICE void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Thread. fence.mbarrier_init (9.7.13.4): barriers that this thread made are visible to TMA.
CUFLASH_DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Thread. mbarrier.arrive (9.7.13.15.13).
CUFLASH_DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Thread. mbarrier.arrive.expect_tx (9.7.13.15.13): arrives and announces bytes that copies will bring.
CUFLASH_DEVICE void barrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Thread. mbarrier.try_wait.parity (9.7.13.15.16) until the phase of this parity is over.
CUFLASH_DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nwait_loop:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait_loop;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- Copies by TMA ------------------------------------------------------------------------------------
// Thread. fence.proxy.async (9.7.13.4): what this thread wrote to shared memory is visible to TMA and to
// wgmma, once other threads learn of it through a barrier.
CUFLASH_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Thread. cp.async.bulk.tensor.4d (9.7.9.27.5.2), global to shared: the box of `map` whose first element has these
// coordinates (column, row, head, batch), none of them negative; zeros outside of the array. The bytes of the whole box
// count on `barrier`. `destination` is aligned to 1024 bytes for the 128-byte swizzle.
CUFLASH_DEVICE void load_tensor(u32 destination, const TensorMap& map, u32 barrier, i32 column, i32 row, i32 head,
                                i32 batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
// Thread. The way back: no coordinate is negative, and what lies outside of the array is left out. Part of a bulk
// group.
CUFLASH_DEVICE void store_tensor(const TensorMap& map, u32 source, i32 column, i32 row, i32 head, i32 batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
// Thread. cp.reduce.async.bulk.tensor.4d (9.7.9.27.5.3): the same, but adds float32 to what is in the array. Subnormal
// numbers count (measured on an H200), unlike those of red.
CUFLASH_DEVICE void add_tensor(const TensorMap& map, u32 source, i32 column, i32 row, i32 head, i32 batch) {
  asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
                   "l"(&map),
               "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
               : "memory");
}
// Thread. cp.async.bulk (9.7.9.25.4.1), global to shared: `bytes` neighbours; addresses and size are multiples of 16.
CUFLASH_DEVICE void load_bulk(u32 destination, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   destination),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}
// Thread. cp.async.bulk.commit_group (9.7.9.25.3.2): closes the group of the stores since the last one.
CUFLASH_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Thread. cp.async.bulk.wait_group (9.7.9.25.3.3): until at most `pending` groups of this thread are unfinished; with
// `.read`, until they have read shared memory.
template <int pending>
CUFLASH_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}
template <int pending>
CUFLASH_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// ---- Clusters -----------------------------------------------------------------------------------------------------
// `blocks` blocks of neighbouring indices make a cluster, and reach each other's shared memory. One block is one too.

// Thread. %cluster_ctarank (10.13): which block of its cluster this is.
template <int blocks>
CUFLASH_DEVICE u32 cluster_rank() {
  u32 rank = 0;
  if constexpr (blocks > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Cluster. barrier.cluster (9.7.13.4): a barrier of all threads of its blocks.
template <int blocks>
CUFLASH_DEVICE void sync_cluster() {
  if constexpr (blocks == 1)
    sync_block();
  else
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Thread. mbarrier.arrive (9.7.13.15.13) in all blocks of the cluster, whose barriers have the same address (mapa,
// 9.7.9.24).
template <int blocks>
CUFLASH_DEVICE void barrier_arrive_in_cluster(u32 barrier) {
  if constexpr (blocks == 1) {
    barrier_arrive(barrier);
  } else {
#pragma unroll
    for (u32 rank = 0; rank < blocks; ++rank)
      asm volatile(
          "{\n.reg .b32 mapped;\nmapa.shared::cluster.u32 mapped, %0, %1;\n"
          "mbarrier.arrive.shared::cluster.b64 _, [mapped];\n}" ::"r"(barrier),
          "r"(rank)
          : "memory");
  }
}
// Thread. mapa (9.7.9.24): what is to be added to an address of this block's shared memory to make it that of the same
// location in block `rank` of the cluster.
CUFLASH_DEVICE u32 distance_in_cluster(u32 rank) {
  const u32 here = dynamic_shared();
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  return there - here;
}
// Thread. mbarrier.arrive at a barrier of any block of the cluster.
CUFLASH_DEVICE void barrier_arrive_remote(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Thread. st.async (9.7.9.12): 16 bytes to an address in another block of the cluster. They count on `barrier`, of that
// block.
CUFLASH_DEVICE void store_remote_f32x4(u32 address, const float (&value)[4], u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3]), "r"(barrier)
      : "memory");
}
// Thread. load_tensor of a box to all blocks of the cluster, each of which calls this and brings its slice: so many
// rows of 128 bytes from the row of its rank on (cp.async.bulk.tensor with .multicast::cluster). Bytes count on the
// barrier of the same address in each block.
template <int blocks, int slice_rows>
CUFLASH_DEVICE void load_tensor_by_cluster(u32 destination, const TensorMap& map, u32 barrier, i32 column, i32 row,
                                           i32 head, i32 batch) {
  if constexpr (blocks == 1) {
    load_tensor(destination, map, barrier, column, row, head, batch);
  } else {
    const u32 rank = cluster_rank<blocks>();
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%3, %4, %5, %6}], [%2], %7;" ::"r"(destination + rank * slice_rows * 128),
        "l"(&map), "r"(barrier), "r"(column), "r"(row + (i32)rank * slice_rows), "r"(head), "r"(batch),
        "h"((u16)((1 << blocks) - 1))
        : "memory");
  }
}

// ---- Warps and their registers --------------------------------------------------------------------------------------
// Warp. elect.sync (9.7.13.14): true in one lane.
CUFLASH_DEVICE bool elect_lane() {
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}
// Warpgroup. setmaxnreg (9.7.20.5): this warpgroup's threads give registers back, or wait for more; a multiple of 8.
template <int registers>
CUFLASH_DEVICE void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
CUFLASH_DEVICE void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
// Thread. The lane 0 value in every lane, so that the compiler knows it to be the same (shfl.sync.idx, 9.7.9.6).
CUFLASH_DEVICE u32 uniform(u32 value) { return __shfl_sync(0xffffffffu, value, 0); }
// Warp. A value that is the same in all lanes, moved to a uniform register: the result of redux.sync (9.7.13.12) is in
// one, and no thread keeps it in a register of its own.
CUFLASH_DEVICE u32 to_uniform_register(u32 value) { return __reduce_max_sync(0xffffffffu, value); }

// Thread. Keeps what `value` depends on before the next wait; the assembler would sink it past that. It is a store that
// never happens, of a value that is never negative. `scratch` is the address of 4 bytes of shared memory.
CUFLASH_DEVICE void keep_before(float value, u32 scratch) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p st.volatile.shared.u32 [%1], 0;\n}" ::"f"(value),
               "r"(scratch)
               : "memory");
}

// Warp. stmatrix (9.7.14.5.16): the reverse of load_matrix_x4.
CUFLASH_DEVICE void store_matrix_x4(u32 address, const u32 (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

}  // namespace ptx

#endif  // CUFLASH_EMULATION
