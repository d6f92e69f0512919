// Kernels with one mistake each in the use of ptx/tma.cuh or ptx/wgmma.cuh, as in planted_bugs.cu
// (test_emulator_sm90.py).
#include "ptx/wgmma.cuh"

struct Params {
  TensorMap map;  // of `destination`: rows of 64 16-bit elements, boxes of 8 rows
  const void* source;
  void* destination;
  u32 count;
  u32 padding[11];
};

constexpr u32 kWarp = 32;
constexpr u32 kWarpgroup = 128;
constexpr u32 kBoxBytes = 1024;

// Shared memory of every kernel: a box, tiles of 64 lines for products, barriers, space.
struct Shared {
  u32 box, a, b, barrier, other_barrier, space;

  CUFLASH_DEVICE Shared() {
    box = ptx::dynamic_shared();
    a = box + kBoxBytes;
    b = a + 64 * 128;
    barrier = b + 64 * 128;
    other_barrier = barrier + 8;
    space = other_barrier + 8;
  }
};

CUFLASH_DEVICE void make_barrier(u32 barrier, u32 count) {
  if (ptx::thread_index() == 0) {
    ptx::barrier_init(barrier, count);
    ptx::fence_barrier_init();
  }
  ptx::sync_block();
}
CUFLASH_DEVICE void load_box(const Params& params, const Shared& shared) {
  if (ptx::thread_index() == 0) {
    ptx::barrier_arrive_expect(shared.barrier, kBoxBytes);
    ptx::load_tensor(shared.box, params.map, shared.barrier, 0, 0, 0, 0);
  }
}
CUFLASH_DEVICE void fill_box(const Shared& shared) {
  for (u32 i = ptx::thread_index(); i < kBoxBytes / 4; i += kWarpgroup) ptx::store_shared_b32(shared.box + 4 * i, 0);
}
CUFLASH_DEVICE u16 read_box(const Shared& shared) { return ptx::load_shared_b16(shared.box + 2 * ptx::thread_index()); }
CUFLASH_DEVICE void keep(const Params& params, u16 value) { ((u16*)params.destination)[ptx::thread_index()] = value; }

// ---- Barriers in shared memory --------------------------------------------------------------------------------------

CUFLASH_DEVICE void use_no_barrier(const Params&) {
  Shared shared;
  ptx::barrier_arrive(shared.barrier);  // caught: barrier_without_init
}
CUFLASH_DEFINE_KERNEL(barrier_without_init, Params, kWarpgroup, 1, use_no_barrier)

CUFLASH_DEVICE void make_barrier_again(const Params&) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  if (ptx::thread_index() == 0) ptx::barrier_init(shared.barrier, 1);  // caught: barrier_made_twice
}
CUFLASH_DEFINE_KERNEL(barrier_made_twice, Params, kWarpgroup, 1, make_barrier_again)

CUFLASH_DEVICE void use_barrier_at_once(const Params&) {
  Shared shared;
  if (ptx::thread_index() == 0) ptx::barrier_init(shared.barrier, kWarpgroup);
  ptx::barrier_arrive(shared.barrier);  // caught: barrier_used_at_once
}
CUFLASH_DEFINE_KERNEL(barrier_used_at_once, Params, kWarpgroup, 1, use_barrier_at_once)

CUFLASH_DEVICE void write_over_barrier(const Params&) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  if (ptx::thread_index() != 0) return;
  ptx::store_shared_b32(shared.barrier, 0);
  ptx::barrier_arrive(shared.barrier);  // caught: barrier_written_over
}
CUFLASH_DEFINE_KERNEL(barrier_written_over, Params, kWarpgroup, 1, write_over_barrier)

CUFLASH_DEVICE void arrive_too_often(const Params& params) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  if (ptx::thread_index() != 0) return;
  ptx::barrier_arrive_expect(shared.barrier, 16);
  ptx::barrier_arrive(shared.barrier);  // caught: too_many_arrivals
  ptx::load_bulk(shared.box, params.source, 16, shared.barrier);
}
CUFLASH_DEFINE_KERNEL(too_many_arrivals, Params, kWarpgroup, 1, arrive_too_often)

CUFLASH_DEVICE void arrive_too_seldom(const Params&) {
  Shared shared;
  make_barrier(shared.barrier, 4);
  if (ptx::thread_index() % kWarp == 0 && ptx::thread_index() != 0) ptx::barrier_arrive(shared.barrier);
  ptx::barrier_wait(shared.barrier, 0);  // caught: missing_arrival
}
CUFLASH_DEFINE_KERNEL(missing_arrival, Params, kWarpgroup, 1, arrive_too_seldom)

CUFLASH_DEVICE void read_without_arrival(const Params& params) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  ptx::store_shared_b16(shared.space + 2 * ptx::thread_index(), 1);
  if (ptx::thread_index() == 0) ptx::barrier_arrive(shared.barrier);
  ptx::barrier_wait(shared.barrier, 0);
  // What the others wrote did not happen before the arrival of thread 0.
  keep(params, ptx::load_shared_b16(shared.space + 2 * (ptx::thread_index() ^ 64)));
}
CUFLASH_DEFINE_KERNEL(arrival_of_one, Params, kWarpgroup, 1, read_without_arrival)

// ---- Named barriers -------------------------------------------------------------------------------------------------

CUFLASH_DEVICE void disagree_on_threads(const Params&) {
  if (ptx::thread_index() < 64)
    ptx::sync_named(1, 128);
  else
    ptx::sync_named(1, 64);
}
CUFLASH_DEFINE_KERNEL(named_counts_differ, Params, kWarpgroup, 1, disagree_on_threads)

CUFLASH_DEVICE void sync_half_a_warp(const Params&) {
  if (ptx::thread_index() % kWarp < 16) ptx::sync_named(1, 64);  // caught: named_half_warps
}
CUFLASH_DEFINE_KERNEL(named_half_warps, Params, kWarpgroup, 1, sync_half_a_warp)

CUFLASH_DEVICE void arrive_twice(const Params&) {
  if (ptx::thread_index() < kWarp) {
    ptx::arrive_named(3, 96);
    ptx::arrive_named(3, 96);  // caught: named_arrival_repeated
  }
}
CUFLASH_DEFINE_KERNEL(named_arrival_repeated, Params, kWarpgroup, 1, arrive_twice)

CUFLASH_DEVICE void wait_for_nobody(const Params&) {
  if (ptx::thread_index() < 64) ptx::sync_named(2, 128);  // caught: named_deadlock
}
CUFLASH_DEFINE_KERNEL(named_deadlock, Params, kWarpgroup, 1, wait_for_nobody)

CUFLASH_DEVICE void use_named_barrier_0(const Params&) {
  ptx::sync_named(0, 128);  // caught: named_zero
}
CUFLASH_DEFINE_KERNEL(named_zero, Params, kWarpgroup, 1, use_named_barrier_0)

CUFLASH_DEVICE void ask_some(const Params&) {
  if (ptx::thread_index() < 64)
    ptx::sync_named_any(1, 128, true);
  else
    ptx::sync_named(1, 128);
}
CUFLASH_DEFINE_KERNEL(named_any_of_some, Params, kWarpgroup, 1, ask_some)

CUFLASH_DEVICE void read_after_arriving(const Params& params) {
  const u32 thread = ptx::thread_index();
  Shared shared;
  ptx::store_shared_b16(shared.space + 2 * thread, 1);
  if (thread < 64)
    ptx::sync_named(1, 128);
  else
    ptx::arrive_named(1, 128);
  // Only those that waited may.
  keep(params, ptx::load_shared_b16(shared.space + 2 * (thread ^ 64)));
}
CUFLASH_DEFINE_KERNEL(read_after_arrival, Params, kWarpgroup, 1, read_after_arriving)

// ---- Loads ----------------------------------------------------------------------------------------------------------

CUFLASH_DEVICE void wait_for_wrong_parity(const Params& params) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  load_box(params, shared);
  ptx::barrier_wait(shared.barrier, 1);
  keep(params, read_box(shared));
}
CUFLASH_DEFINE_KERNEL(wrong_parity, Params, kWarpgroup, 1, wait_for_wrong_parity)

CUFLASH_DEVICE void leave_wait_to_others(const Params& params) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  load_box(params, shared);
  if (ptx::thread_index() < kWarp) ptx::barrier_wait(shared.barrier, 0);
  keep(params, read_box(shared));
}
CUFLASH_DEFINE_KERNEL(missing_barrier_wait, Params, kWarpgroup, 1, leave_wait_to_others)

CUFLASH_DEVICE void load_unannounced(const Params& params) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  if (ptx::thread_index() == 0) {
    ptx::load_tensor(shared.box, params.map, shared.barrier, 0, 0, 0, 0);
    ptx::barrier_arrive(shared.barrier);  // caught: unannounced_bytes
  }
  ptx::barrier_wait(shared.barrier, 0);
}
CUFLASH_DEFINE_KERNEL(unannounced_bytes, Params, kWarpgroup, 1, load_unannounced)

CUFLASH_DEVICE void announce(const Params& params, u32 bytes) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  if (ptx::thread_index() == 0) {
    ptx::barrier_arrive_expect(shared.barrier, bytes);
    ptx::load_tensor(shared.box, params.map, shared.barrier, 0, 0, 0, 0);
  }
  ptx::barrier_wait(shared.barrier, 0);
}
CUFLASH_DEVICE void announce_too_few(const Params& params) { announce(params, kBoxBytes - 16); }
CUFLASH_DEFINE_KERNEL(too_few_bytes, Params, kWarpgroup, 1, announce_too_few)
CUFLASH_DEVICE void announce_too_many(const Params& params) { announce(params, kBoxBytes + 16); }
CUFLASH_DEFINE_KERNEL(too_many_bytes, Params, kWarpgroup, 1, announce_too_many)

CUFLASH_DEVICE void load_on_invisible_barrier(const Params& params) {
  Shared shared;
  if (ptx::thread_index() == 0) ptx::barrier_init(shared.barrier, 1);
  ptx::sync_block();
  if (ptx::thread_index() == 0) {
    ptx::barrier_arrive_expect(shared.barrier, 16);
    ptx::load_bulk(shared.box, params.source, 16, shared.barrier);  // caught: missing_fence_barrier_init
  }
  ptx::barrier_wait(shared.barrier, 0);
}
CUFLASH_DEFINE_KERNEL(missing_fence_barrier_init, Params, kWarpgroup, 1, load_on_invisible_barrier)

template <class Between>
CUFLASH_DEVICE void load_twice(const Params& params, Between between) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  load_box(params, shared);
  ptx::barrier_wait(shared.barrier, 0);
  const u16 value = read_box(shared);
  between();
  load_box(params, shared);
  ptx::barrier_wait(shared.barrier, 1);
  keep(params, value);
}
CUFLASH_DEVICE void load_over_tile_in_use(const Params& params) {
  load_twice(params, [] { ptx::fence_async_proxy(); });
}
CUFLASH_DEFINE_KERNEL(tile_in_use, Params, kWarpgroup, 1, load_over_tile_in_use)

// All threads have come past their reads, which may still be under way.
CUFLASH_DEVICE void load_over_reads(const Params& params) {
  load_twice(params, [] { ptx::sync_block(); });
}
CUFLASH_DEFINE_KERNEL(missing_fence_after_reads, Params, kWarpgroup, 1, load_over_reads)

// Each warp's first lane frees the tile, but only half of the warps wait for their other lanes first.
CUFLASH_DEVICE void free_tile_early(const Params& params) {
  Shared shared;
  if (ptx::thread_index() == 0) ptx::barrier_init(shared.other_barrier, 4);
  make_barrier(shared.barrier, 1);
  load_box(params, shared);
  ptx::barrier_wait(shared.barrier, 0);
  const u16 value = read_box(shared);
  ptx::fence_async_proxy();
  if (ptx::thread_index() < 64) ptx::any_lane(false);
  if (ptx::thread_index() % kWarp == 0) ptx::barrier_arrive(shared.other_barrier);
  if (ptx::thread_index() == 0) {
    ptx::barrier_wait(shared.other_barrier, 0);
    load_box(params, shared);
  }
  ptx::barrier_wait(shared.barrier, 1);
  keep(params, value);
}
CUFLASH_DEFINE_KERNEL(tile_freed_early, Params, kWarpgroup, 1, free_tile_early)

CUFLASH_DEVICE void load_over_unfenced(const Params& params) {
  Shared shared;
  fill_box(shared);
  make_barrier(shared.barrier, 1);
  load_box(params, shared);
  ptx::barrier_wait(shared.barrier, 0);
}
CUFLASH_DEFINE_KERNEL(missing_fence_before_load, Params, kWarpgroup, 1, load_over_unfenced)

CUFLASH_DEVICE void exit_with_load(const Params& params) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  if (ptx::thread_index() == 0) {
    ptx::barrier_arrive_expect(shared.barrier, 32);
    ptx::load_bulk(shared.box, params.source, 16, shared.barrier);  // caught: load_left
    ptx::load_bulk(shared.box + 16, params.source, 16, shared.barrier);
  }
}
CUFLASH_DEFINE_KERNEL(load_left, Params, kWarpgroup, 1, exit_with_load)

CUFLASH_DEVICE void load_past_source(const Params& params) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  if (ptx::thread_index() == 0) {
    ptx::barrier_arrive_expect(shared.barrier, 4096);
    ptx::load_bulk(shared.box, params.source, 4096, shared.barrier);  // caught: load_overrun
  }
  ptx::barrier_wait(shared.barrier, 0);
}
CUFLASH_DEFINE_KERNEL(load_overrun, Params, kWarpgroup, 1, load_past_source)

CUFLASH_DEVICE void load_to_misaligned(const Params& params) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  ptx::load_tensor(shared.box + 64, params.map, shared.barrier, 0, 0, 0, 0);  // caught: load_misaligned
}
CUFLASH_DEFINE_KERNEL(load_misaligned, Params, kWarpgroup, 1, load_to_misaligned)

CUFLASH_DEVICE void load_odd_column(const Params& params) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  ptx::load_tensor(shared.box, params.map, shared.barrier, 4, 0, 0, 0);  // caught: load_of_odd_column
}
CUFLASH_DEFINE_KERNEL(load_of_odd_column, Params, kWarpgroup, 1, load_odd_column)

CUFLASH_DEVICE void load_without_map(const Params& params) {
  Shared shared;
  make_barrier(shared.barrier, 1);
  ptx::load_tensor(shared.box, *(const TensorMap*)params.source, shared.barrier, 0, 0, 0, 0);  // caught: no_tensor_map
}
CUFLASH_DEFINE_KERNEL(no_tensor_map, Params, kWarpgroup, 1, load_without_map)

// ---- Stores ---------------------------------------------------------------------------------------------------------

CUFLASH_DEVICE void store_unfenced(const Params& params) {
  Shared shared;
  fill_box(shared);
  ptx::sync_block();
  if (ptx::thread_index() != 0) return;
  ptx::fence_async_proxy();                       // of the reader alone
  ptx::store_tensor(params.map, shared.box, 0, 0, 0, 0);  // caught: missing_fence_before_store
  ptx::bulk_commit();
  ptx::bulk_wait<0>();
}
CUFLASH_DEFINE_KERNEL(missing_fence_before_store, Params, kWarpgroup, 1, store_unfenced)

CUFLASH_DEVICE void store_unsynchronised(const Params& params) {
  Shared shared;
  fill_box(shared);
  ptx::fence_async_proxy();
  if (ptx::thread_index() == 64) {
    ptx::store_tensor(params.map, shared.box, 0, 0, 0, 0);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}
CUFLASH_DEFINE_KERNEL(missing_barrier_before_store, Params, kWarpgroup, 1, store_unsynchronised)

CUFLASH_DEVICE void store_negative(const Params& params) {
  Shared shared;
  if (ptx::thread_index() != 0) return;
  ptx::store_tensor(params.map, shared.box, 0, -1, 0, 0);  // caught: store_to_negative
}
CUFLASH_DEFINE_KERNEL(store_to_negative, Params, kWarpgroup, 1, store_negative)

template <class Finish>
CUFLASH_DEVICE void store_box(const Params& params, Finish finish) {
  Shared shared;
  fill_box(shared);
  ptx::fence_async_proxy();
  ptx::sync_block();
  if (ptx::thread_index() == 0) {
    ptx::store_tensor(params.map, shared.box, 0, 0, 0, 0);  // caught: store_left
    finish();
  }
  ptx::sync_block();
}
CUFLASH_DEVICE void change_source_of_store(const Params& params) {
  store_box(params, []() { ptx::bulk_commit(); });
  ptx::store_shared_b32(Shared().box, 0);  // caught: store_source_changed
}
CUFLASH_DEFINE_KERNEL(store_source_changed, Params, kWarpgroup, 1, change_source_of_store)

CUFLASH_DEVICE void wait_for_too_few_stores(const Params& params) {
  store_box(params, []() {
    ptx::bulk_commit();
    ptx::bulk_wait_read<1>();
  });
  ptx::store_shared_b32(Shared().box, 0);  // caught: store_wait_too_short
}
CUFLASH_DEFINE_KERNEL(store_wait_too_short, Params, kWarpgroup, 1, wait_for_too_few_stores)

CUFLASH_DEVICE void exit_with_store(const Params& params) {
  store_box(params, []() { ptx::bulk_commit(); });
}
CUFLASH_DEFINE_KERNEL(store_left, Params, kWarpgroup, 1, exit_with_store)

CUFLASH_DEVICE void exit_with_uncommitted_store(const Params& params) {
  store_box(params, []() { ptx::bulk_wait<0>(); });
}
CUFLASH_DEFINE_KERNEL(store_uncommitted, Params, kWarpgroup, 1, exit_with_uncommitted_store)

CUFLASH_DEVICE void add_to_16_bits(const Params& params) {
  Shared shared;
  if (ptx::thread_index() == 0) ptx::add_tensor(params.map, shared.box, 0, 0, 0, 0);  // caught: addition_of_16_bits
}
CUFLASH_DEFINE_KERNEL(addition_of_16_bits, Params, kWarpgroup, 1, add_to_16_bits)

// ---- Products -------------------------------------------------------------------------------------------------------

struct Tiles {
  Shared shared;
  u64 a, b;

  CUFLASH_DEVICE explicit Tiles(bool fenced = true) {
    for (u32 i = ptx::thread_index(); i < 2 * 64 * 128 / 4; i += kWarpgroup)
      ptx::store_shared_b32(shared.a + 4 * i, 0x3c003c00);
    if (fenced) ptx::fence_async_proxy();
    ptx::sync_block();
    a = ptx::descriptor(shared.a, 16, 1024);
    b = ptx::descriptor(shared.b, 16, 1024);
  }
};
CUFLASH_DEVICE void store_sum(const Params& params, const float (&d)[2][4]) {
  ((float*)params.destination)[ptx::thread_index()] = d[0][0] + d[1][3];
}

// Issues one product, then does `between`, waits and does `after`.
template <class Between, class After>
CUFLASH_DEVICE void multiply(const Params& params, Between between, After after) {
  Tiles tiles;
  float d[2][4];
  ptx::wgmma_fence();
  ptx::wgmma<false, false>(Float16{}, d, tiles.a, tiles.b, false);  // caught: accumulator_written
  ptx::wgmma_commit();
  between(tiles, d);
  ptx::wgmma_wait<0>();
  after(tiles, d);
  store_sum(params, d);
}
template <class Between>
CUFLASH_DEVICE void multiply(const Params& params, Between between) {
  multiply(params, between, [](const Tiles&, float (&)[2][4]) {});
}

CUFLASH_DEVICE void multiply_rightly(const Params& params) {
  multiply(params, [](const Tiles&, float (&)[2][4]) {});
}
CUFLASH_DEFINE_KERNEL(no_mistake, Params, kWarpgroup, 1, multiply_rightly)

CUFLASH_DEVICE void multiply_unfenced_tiles(const Params& params) {
  Tiles tiles(false);
  float d[2][4];
  ptx::wgmma_fence();
  ptx::wgmma<false, false>(Float16{}, d, tiles.a, tiles.b, false);  // caught: missing_fence_before_product
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  store_sum(params, d);
}
CUFLASH_DEFINE_KERNEL(missing_fence_before_product, Params, kWarpgroup, 1, multiply_unfenced_tiles)

CUFLASH_DEVICE void multiply_in_flight_tile(const Params& params) {
  Tiles tiles;
  float d[2][4];
  make_barrier(tiles.shared.barrier, 1);
  if (ptx::thread_index() == 0) {
    ptx::barrier_arrive_expect(tiles.shared.barrier, 1024);
    ptx::load_bulk(tiles.shared.b, params.source, 1024, tiles.shared.barrier);
  }
  ptx::wgmma_fence();
  ptx::wgmma<false, false>(Float16{}, d, tiles.a, tiles.b, false);  // caught: missing_wait_before_product
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::barrier_wait(tiles.shared.barrier, 0);
}
CUFLASH_DEFINE_KERNEL(missing_wait_before_product, Params, kWarpgroup, 1, multiply_in_flight_tile)

CUFLASH_DEVICE void overwrite_operand(const Params& params) {
  multiply(params, [](const Tiles& tiles, float (&)[2][4]) {
    ptx::sync_block();
    ptx::store_shared_b32(tiles.shared.b + 4 * ptx::thread_index(), 0);  // caught: operand_overwritten
  });
}
CUFLASH_DEFINE_KERNEL(operand_overwritten, Params, kWarpgroup, 1, overwrite_operand)

CUFLASH_DEVICE void load_over_operand(const Params& params) {
  Tiles tiles;
  float d[2][4];
  make_barrier(tiles.shared.barrier, 1);
  ptx::wgmma_fence();
  ptx::wgmma<false, false>(Float16{}, d, tiles.a, tiles.b, false);
  ptx::wgmma_commit();
  ptx::sync_block();
  if (ptx::thread_index() == 0) {
    ptx::barrier_arrive_expect(tiles.shared.barrier, 1024);
    ptx::load_bulk(tiles.shared.b, params.source, 1024, tiles.shared.barrier);  // caught: load_over_operand
  }
  ptx::wgmma_wait<0>();
  ptx::barrier_wait(tiles.shared.barrier, 0);
}
CUFLASH_DEFINE_KERNEL(load_over_operand, Params, kWarpgroup, 1, load_over_operand)

CUFLASH_DEVICE void write_accumulator(const Params& params) {
  multiply(params, [](const Tiles&, float (&d)[2][4]) { d[1][2] *= 2.0f; });
}
CUFLASH_DEFINE_KERNEL(accumulator_written, Params, kWarpgroup, 1, write_accumulator)

CUFLASH_DEVICE void read_accumulator(const Params& params) {
  multiply(params, [](const Tiles&, float (&d)[2][4]) {
    ptx::wgmma_wait<1>();
    ptx::shuffle_xor(d[0][1] * 2.0f, 1);  // caught: accumulator_read
  });
}
CUFLASH_DEFINE_KERNEL(accumulator_read, Params, kWarpgroup, 1, read_accumulator)

CUFLASH_DEVICE void multiply_into_overlap(const Params& params) {
  Tiles tiles;
  float d[4][4];
  float(&lower)[2][4] = *(float(*)[2][4])d[0];
  float(&middle)[2][4] = *(float(*)[2][4])d[1];
  ptx::wgmma_fence();
  ptx::wgmma<false, false>(Float16{}, lower, tiles.a, tiles.b, false);
  ptx::wgmma<false, false>(Float16{}, middle, tiles.a, tiles.b, false);  // caught: accumulators_overlap
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  store_sum(params, lower);
}
CUFLASH_DEFINE_KERNEL(accumulators_overlap, Params, kWarpgroup, 1, multiply_into_overlap)

CUFLASH_DEVICE void exit_with_product(const Params&) {
  Tiles tiles;
  float d[2][4];
  ptx::wgmma_fence();
  ptx::wgmma<false, false>(Float16{}, d, tiles.a, tiles.b, false);  // caught: product_left
  ptx::wgmma_wait<0>();
}
CUFLASH_DEFINE_KERNEL(product_left, Params, kWarpgroup, 1, exit_with_product)

CUFLASH_DEVICE void multiply_without_fence(const Params& params) {
  Tiles tiles;
  float d[2][4] = {};
  ptx::wgmma<false, false>(Float16{}, d, tiles.a, tiles.b, true);  // caught: missing_fence_products
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  store_sum(params, d);
}
CUFLASH_DEFINE_KERNEL(missing_fence_products, Params, kWarpgroup, 1, multiply_without_fence)

CUFLASH_DEVICE void multiply_again_without_fence(const Params& params) {
  multiply(params, [](const Tiles&, float (&)[2][4]) {}, [](const Tiles& tiles, float (&d)[2][4]) {
    d[0][0] *= 2.0f;
    ptx::wgmma<false, false>(Float16{}, d, tiles.a, tiles.b, true);  // caught: missing_second_fence
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  });
}
CUFLASH_DEFINE_KERNEL(missing_second_fence, Params, kWarpgroup, 1, multiply_again_without_fence)

CUFLASH_DEVICE void change_register_operand(const Params& params) {
  Tiles tiles;
  float d[2][4];
  u32 a[4] = {};
  ptx::wgmma_fence();
  ptx::wgmma<false>(Float16{}, d, a, tiles.b, false);  // caught: register_operand_changed
  ptx::wgmma_commit();
  a[2] = params.count;
  ptx::wgmma_wait<0>();
  store_sum(params, d);
}
CUFLASH_DEFINE_KERNEL(register_operand_changed, Params, kWarpgroup, 1, change_register_operand)

CUFLASH_DEVICE void issue_different_products(const Params& params) {
  Tiles tiles;
  float d[2][4];
  ptx::wgmma_fence();
  const u64 b = ptx::thread_index() < 64 ? tiles.b : tiles.a;
  ptx::wgmma<false, false>(Float16{}, d, tiles.a, b, false);  // caught: products_differ
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  store_sum(params, d);
}
CUFLASH_DEFINE_KERNEL(products_differ, Params, kWarpgroup, 1, issue_different_products)

CUFLASH_DEVICE void multiply_with(const Params& params, u64 b) {
  Tiles tiles;
  float d[2][4];
  ptx::wgmma_fence();
  ptx::wgmma<false, false>(Float16{}, d, tiles.a, b, false);  // caught: bad_descriptor
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  store_sum(params, d);
}
CUFLASH_DEVICE void multiply_unswizzled(const Params& params) { multiply_with(params, Tiles().b & ~(3ull << 62)); }
CUFLASH_DEFINE_KERNEL(descriptor_unswizzled, Params, kWarpgroup, 1, multiply_unswizzled)
CUFLASH_DEVICE void multiply_past_line(const Params& params) { multiply_with(params, Tiles().b + (112 >> 4)); }
CUFLASH_DEFINE_KERNEL(descriptor_past_line, Params, kWarpgroup, 1, multiply_past_line)
CUFLASH_DEVICE void multiply_misaligned(const Params& params) { multiply_with(params, Tiles().b + (128 >> 4)); }
CUFLASH_DEFINE_KERNEL(descriptor_misaligned, Params, kWarpgroup, 1, multiply_misaligned)
CUFLASH_DEVICE void multiply_past_shared(const Params& params) { multiply_with(params, Tiles().b + (0x10000 >> 4)); }
CUFLASH_DEFINE_KERNEL(descriptor_past_shared, Params, kWarpgroup, 1, multiply_past_shared)

// ---- Warps and their registers --------------------------------------------------------------------------------------

CUFLASH_DEVICE void keep_negative(const Params&) {
  ptx::keep_before(-1.0f, Shared().space);  // caught: negative_kept
}
CUFLASH_DEFINE_KERNEL(negative_kept, Params, kWarpgroup, 1, keep_negative)

CUFLASH_DEVICE void read_stored_matrix(const Params& params) {
  const u32 thread = ptx::thread_index();
  const u32 fragment[4] = {};
  ptx::store_matrix_x4(Shared().box + thread % 64 * 16, fragment);  // caught: matrices_overlap
  keep(params, 0);
}
CUFLASH_DEFINE_KERNEL(matrices_overlap, Params, kWarpgroup, 1, read_stored_matrix)

CUFLASH_DEVICE void take_too_many_registers(const Params&) {
  if (ptx::thread_index() < kWarpgroup)
    ptx::decrease_registers<40>();
  else
    ptx::increase_registers<240>();  // caught: too_many_registers
}
CUFLASH_DEFINE_KERNEL(too_many_registers, Params, 3 * kWarpgroup, 1, take_too_many_registers)

CUFLASH_DEVICE void increase_to_fewer(const Params&) {
  ptx::increase_registers<24>();  // caught: increase_to_less
}
CUFLASH_DEFINE_KERNEL(increase_to_less, Params, 3 * kWarpgroup, 1, increase_to_fewer)

CUFLASH_DEVICE void decrease_some(const Params&) {
  if (ptx::thread_index() >= kWarp) ptx::decrease_registers<24>();  // caught: registers_of_some_warps
}
CUFLASH_DEFINE_KERNEL(registers_of_some_warps, Params, kWarpgroup, 1, decrease_some)

// ---- Clusters of two blocks -----------------------------------------------------------------------------------------

CUFLASH_DEVICE void make_barriers_of_block(const Shared& shared) {
  if (ptx::thread_index() == 0) {
    ptx::barrier_init(shared.barrier, 1);
    ptx::barrier_init(shared.other_barrier, 2);
    ptx::fence_barrier_init();
  }
  ptx::sync_named(1, kWarpgroup);
}
// Two boxes, one by each block.
CUFLASH_DEVICE void load_boxes(const Params& params, const Shared& shared) {
  if (ptx::thread_index() == 0) {
    ptx::barrier_arrive_expect(shared.barrier, 2 * kBoxBytes);
    ptx::load_tensor_by_cluster<2, 8>(shared.box, params.map, shared.barrier, 0, 0, 0, 0);
  }
}

CUFLASH_DEVICE void arrive_unsynchronised(const Params&) {
  Shared shared;
  make_barriers_of_block(shared);
  if (ptx::thread_index() == 0) ptx::barrier_arrive_in_cluster<2>(shared.other_barrier);  // caught: cluster_not_ready
  ptx::sync_cluster<2>();
}
CUFLASH_DEFINE_CLUSTER_KERNEL(cluster_not_ready, Params, kWarpgroup, 2, arrive_unsynchronised)

CUFLASH_DEVICE void leave_early(const Params&) {
  Shared shared;
  make_barriers_of_block(shared);
  ptx::sync_cluster<2>();
  if (ptx::thread_index() == 0) ptx::barrier_arrive_in_cluster<2>(shared.other_barrier);  // caught: cluster_left
}
CUFLASH_DEFINE_CLUSTER_KERNEL(cluster_left, Params, kWarpgroup, 2, leave_early)

CUFLASH_DEVICE void arrive_at_home_alone(const Params&) {
  Shared shared;
  make_barriers_of_block(shared);
  ptx::sync_cluster<2>();
  if (ptx::thread_index() == 0) ptx::barrier_arrive(shared.other_barrier);
  ptx::barrier_wait(shared.other_barrier, 0);  // caught: cluster_arrival_missing
  ptx::sync_cluster<2>();
}
CUFLASH_DEFINE_CLUSTER_KERNEL(cluster_arrival_missing, Params, kWarpgroup, 2, arrive_at_home_alone)

// The other block may still read.
CUFLASH_DEVICE void replace_boxes(const Params& params) {
  Shared shared;
  make_barriers_of_block(shared);
  ptx::sync_cluster<2>();
  load_boxes(params, shared);
  ptx::barrier_wait(shared.barrier, 0);
  keep(params, read_box(shared));
  ptx::fence_async_proxy();
  ptx::sync_named(1, kWarpgroup);
  load_boxes(params, shared);
  ptx::barrier_wait(shared.barrier, 1);
  ptx::sync_cluster<2>();
}
CUFLASH_DEFINE_CLUSTER_KERNEL(cluster_box_in_use, Params, kWarpgroup, 2, replace_boxes)

// Every thread sends 16 bytes to the other block, and counts on one of the barriers there, or here.
CUFLASH_DEVICE void send_part(const Shared& shared, u32 barrier_of) {
  const u32 other = ptx::distance_in_cluster(ptx::cluster_rank<2>() ^ 1);
  const float part[4] = {};
  if (ptx::thread_index() == 0) ptx::barrier_arrive_expect(shared.barrier, 16 * kWarpgroup);
  const u32 place = shared.a + 16 * ptx::thread_index();
  ptx::store_remote_f32x4(place + other, part, shared.barrier + (barrier_of ? other : 0));  // caught: remote_misplaced
}
CUFLASH_DEVICE void count_at_home(const Params&) {
  Shared shared;
  make_barriers_of_block(shared);
  ptx::sync_cluster<2>();
  send_part(shared, 0);
  ptx::barrier_wait(shared.barrier, 0);
  ptx::sync_cluster<2>();
}
CUFLASH_DEFINE_CLUSTER_KERNEL(remote_misplaced, Params, kWarpgroup, 2, count_at_home)

// The other block may still read what the first round brought.
CUFLASH_DEVICE void send_again(const Params& params) {
  Shared shared;
  make_barriers_of_block(shared);
  ptx::sync_cluster<2>();
  for (u32 i = 0; i < 2; ++i) {
    send_part(shared, 1);
    ptx::barrier_wait(shared.barrier, i);
    keep(params, ptx::load_shared_b16(shared.a + 16 * ptx::thread_index()));
    ptx::fence_async_proxy();
  }
  ptx::sync_cluster<2>();
}
CUFLASH_DEFINE_CLUSTER_KERNEL(remote_in_use, Params, kWarpgroup, 2, send_again)

CUFLASH_DEVICE void read_part_at_once(const Params& params) {
  Shared shared;
  make_barriers_of_block(shared);
  ptx::sync_cluster<2>();
  send_part(shared, 1);
  keep(params, ptx::load_shared_b16(shared.a + 16 * ptx::thread_index()));
  ptx::barrier_wait(shared.barrier, 0);
  ptx::sync_cluster<2>();
}
CUFLASH_DEFINE_CLUSTER_KERNEL(remote_not_waited_for, Params, kWarpgroup, 2, read_part_at_once)

// ---- A script of what orders accesses -------------------------------------------------------------------------------

struct Step {
  u32 action;  // see the test
  u32 actor;   // thread, or warp
  u32 offset;  // in shared memory
  u32 barrier;
};

CUFLASH_DEVICE void run_script(const Params& params) {
  constexpr u32 kBarriers = 6, kCopyBytes = 16;
  const u32 thread = ptx::thread_index(), warp = thread / kWarp;
  const u32 shared = ptx::dynamic_shared(), barriers = Shared().space;
  if (thread == 0)
    for (u32 i = 0; i < kBarriers; ++i) ptx::barrier_init(barriers + 8 * i, 1);
  ptx::fence_barrier_init();
  ptx::sync_block();
  const Step* steps = (const Step*)params.source;
  for (u32 i = 0; i < params.count; ++i) {
    const Step step = steps[i];
    const u32 address = shared + step.offset, barrier = barriers + 8 * step.barrier;
    if (step.action == 0) ptx::sync_block();
    if (step.action == 1 && step.actor == warp) ptx::any_lane(false);
    if (step.action == 2 && step.actor == warp) ptx::arrive_named(1 + i, 2 * kWarp);
    if (step.action == 2 && step.actor != warp) ptx::sync_named(1 + i, 2 * kWarp);
    if (step.action < 3 || step.actor != thread) continue;
    if (step.action == 3) ptx::load_shared_b16(address);
    if (step.action == 4) ptx::store_shared_b16(address, 0);
    if (step.action == 5) ptx::barrier_arrive(barrier);
    if (step.action == 6) ptx::barrier_wait(barrier, 0);
    if (step.action == 7) ptx::fence_async_proxy();
    if (step.action == 8) {
      ptx::barrier_arrive_expect(barrier, kCopyBytes);
      ptx::load_bulk(address, params.source, kCopyBytes, barrier);
    }
  }
}
CUFLASH_DEFINE_KERNEL(script, Params, 2 * kWarp, 1, run_script)
