// Kernels with one mistake each, and the line on which the emulator has to report it (test_emulator.py).
#include "ptx/base.cuh"

struct Params {
  const void* source;
  void* destination;
  u32 count;
  u32 padding;
};

constexpr int kWarp = 32;
constexpr int kBlock = 64;

CUFLASH_DEVICE const float* source_of(const Params& params) { return (const float*)params.source; }
CUFLASH_DEVICE float* destination_of(const Params& params) { return (float*)params.destination; }

// ---- Shared memory and barriers -------------------------------------------------------------------------------------

CUFLASH_DEVICE void read_without_barrier(const Params& params) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared();
  ptx::store_shared_b16(shared + 2 * thread, 1);
  destination_of(params)[thread] = ptx::load_shared_b16(shared + 2 * (kBlock - 1 - thread));
}
CUFLASH_DEFINE_KERNEL(missing_barrier_before_read, Params, kBlock, 1, read_without_barrier)

CUFLASH_DEVICE void overwrite_without_barrier(const Params&) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared();
  ptx::store_shared_b16(shared + 2 * thread, 1);
  ptx::sync_block();
  const u16 value = ptx::load_shared_b16(shared + 2 * (kBlock - 1 - thread));
  ptx::store_shared_b16(shared + 2 * thread, value);
}
CUFLASH_DEFINE_KERNEL(missing_barrier_before_overwrite, Params, kBlock, 1, overwrite_without_barrier)

CUFLASH_DEVICE void write_same_place(const Params&) {
  ptx::store_shared_b16(ptx::dynamic_shared() + ptx::thread_index() / kWarp * 2, 1);  // caught: two_writers
}
CUFLASH_DEFINE_KERNEL(two_writers, Params, kBlock, 1, write_same_place)

CUFLASH_DEVICE void diverge_at_barrier(const Params&) {
  if (ptx::thread_index() < 32)
    ptx::sync_block();
  else
    ptx::sync_block();
}
CUFLASH_DEFINE_KERNEL(divergent_barrier, Params, kBlock, 1, diverge_at_barrier)

CUFLASH_DEVICE void skip_barrier(const Params&) {
  if (ptx::thread_index() < 32) ptx::sync_block();  // caught: skipped_barrier
}
CUFLASH_DEFINE_KERNEL(skipped_barrier, Params, kBlock, 1, skip_barrier)

CUFLASH_DEVICE void wait_for_each_other(const Params&) {
  if (ptx::thread_index() % 2 == 0)
    ptx::sync_block();
  else
    ptx::shuffle_xor(1.0f, 1);
}
CUFLASH_DEFINE_KERNEL(deadlock, Params, kBlock, 1, wait_for_each_other)

CUFLASH_DEVICE void read_past_shared(const Params& params) {
  destination_of(params)[0] = ptx::load_shared_b16(ptx::dynamic_shared() + params.count);  // caught: shared_overrun
}
CUFLASH_DEFINE_KERNEL(shared_overrun, Params, kWarp, 1, read_past_shared)

CUFLASH_DEVICE void write_before_shared(const Params&) {
  ptx::store_shared_b32(ptx::dynamic_shared() - 4, 0);  // caught: shared_underrun
}
CUFLASH_DEFINE_KERNEL(shared_underrun, Params, kWarp, 1, write_before_shared)

CUFLASH_DEVICE void write_misaligned(const Params&) {
  ptx::store_shared_b32(ptx::dynamic_shared() + 2, 0);  // caught: shared_misaligned
}
CUFLASH_DEFINE_KERNEL(shared_misaligned, Params, kWarp, 1, write_misaligned)

CUFLASH_DEVICE void read_unwritten(const Params& params) {
  const u32 thread = ptx::thread_index();
  float values[4];
  ptx::load_shared_f32x4(ptx::dynamic_shared() + 16 * thread, values);  // caught: shared_unwritten
  destination_of(params)[thread] = values[0];
}
CUFLASH_DEFINE_KERNEL(shared_unwritten, Params, kWarp, 1, read_unwritten)

CUFLASH_DEVICE void load_matrix_past_shared(const Params&) {
  const u32 lane = ptx::thread_index();
  u32 fragment[4];
  ptx::load_matrix_x4(fragment, ptx::dynamic_shared() + 16 * lane);  // caught: matrix_overrun
}
CUFLASH_DEFINE_KERNEL(matrix_overrun, Params, kWarp, 1, load_matrix_past_shared)

// ---- Warps ----------------------------------------------------------------------------------------------------------

CUFLASH_DEVICE void shuffle_in_branches(const Params& params) {
  const u32 thread = ptx::thread_index();
  float value = 0.0f;
  if (thread % 32 < 16)
    value = ptx::shuffle_xor(value, 1);
  else
    value = ptx::shuffle_xor(value, 2);
  destination_of(params)[thread] = value;
}
CUFLASH_DEFINE_KERNEL(divergent_shuffle, Params, kWarp, 1, shuffle_in_branches)

CUFLASH_DEVICE void shuffle_after_exit(const Params& params) {
  const u32 thread = ptx::thread_index();
  if (thread == 5) return;
  destination_of(params)[thread] = ptx::shuffle_xor(1.0f, 1);  // caught: exited_lane
}
CUFLASH_DEFINE_KERNEL(exited_lane, Params, kWarp, 1, shuffle_after_exit)

// ---- Asynchronous copies --------------------------------------------------------------------------------------------

CUFLASH_DEVICE void read_without_wait(const Params& params) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared() + 4 * thread;
  ptx::copy_async<4, 0>(shared, source_of(params) + thread, 4);
  ptx::copy_async_commit();
  destination_of(params)[thread] = ptx::load_shared_b16(shared);  // caught: missing_wait
  ptx::copy_async_wait<0>();
}
CUFLASH_DEFINE_KERNEL(missing_wait, Params, kWarp, 1, read_without_wait)

CUFLASH_DEVICE void wait_without_commit(const Params& params) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared() + 4 * thread;
  ptx::copy_async<4, 0>(shared, source_of(params) + thread, 4);
  ptx::copy_async_wait<0>();
  destination_of(params)[thread] = ptx::load_shared_b16(shared);  // caught: missing_commit
}
CUFLASH_DEFINE_KERNEL(missing_commit, Params, kWarp, 1, wait_without_commit)

CUFLASH_DEVICE void wait_for_too_few(const Params& params) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared() + 4 * thread;
  ptx::copy_async<4, 0>(shared, source_of(params) + thread, 4);
  ptx::copy_async_commit();
  ptx::copy_async<4, 0>(shared + 4 * kWarp, source_of(params) + thread, 4);
  ptx::copy_async_commit();
  ptx::copy_async_wait<1>();
  destination_of(params)[thread] = ptx::load_shared_b16(shared);
  destination_of(params)[thread] = ptx::load_shared_b16(shared + 4 * kWarp);  // caught: short_wait
  ptx::copy_async_wait<0>();
}
CUFLASH_DEFINE_KERNEL(short_wait, Params, kWarp, 1, wait_for_too_few)

CUFLASH_DEVICE void exit_with_copy_in_flight(const Params& params) {
  const u32 to = ptx::dynamic_shared() + 4 * ptx::thread_index();
  ptx::copy_async<4, 0>(to, source_of(params), 4);  // caught: exit_in_flight
  ptx::copy_async_commit();
}
CUFLASH_DEFINE_KERNEL(exit_in_flight, Params, kWarp, 1, exit_with_copy_in_flight)

CUFLASH_DEVICE void read_copy_of_other_warp(const Params& params) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared();
  ptx::copy_async<4, 0>(shared + 4 * thread, source_of(params) + thread % kWarp, 4);
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  destination_of(params)[thread] = ptx::load_shared_b16(shared + 4 * (thread ^ kWarp));
}
CUFLASH_DEFINE_KERNEL(missing_barrier_after_wait, Params, kBlock, 1, read_copy_of_other_warp)

CUFLASH_DEVICE void copy_over_matrix_in_use(const Params& params) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared();
  ptx::store_shared_b32(shared + 4 * thread, 0);
  ptx::store_shared_b32(shared + 4 * (thread + kBlock), 0);
  ptx::sync_block();
  u32 fragment[4];
  ptx::load_matrix_x4(fragment, shared + 16 * (thread % kWarp));
  ptx::copy_async<4, 0>(shared + 4 * (thread ^ kWarp), source_of(params) + thread % kWarp, 4);
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
}
CUFLASH_DEFINE_KERNEL(missing_barrier_before_copy, Params, kBlock, 1, copy_over_matrix_in_use)

CUFLASH_DEVICE void copy_to_misaligned(const Params& params) {
  ptx::copy_async<16, 0>(ptx::dynamic_shared() + 8, params.source, 16);  // caught: copy_to_misaligned_place
}
CUFLASH_DEFINE_KERNEL(copy_to_misaligned_place, Params, kWarp, 1, copy_to_misaligned)

CUFLASH_DEVICE void copy_from_misaligned(const Params& params) {
  ptx::copy_async<8, 0>(ptx::dynamic_shared(), source_of(params) + 1, 8);  // caught: copy_from_misaligned_place
}
CUFLASH_DEFINE_KERNEL(copy_from_misaligned_place, Params, kWarp, 1, copy_from_misaligned)

CUFLASH_DEVICE void copy_more_than_it_holds(const Params& params) {
  ptx::copy_async<4, 0>(ptx::dynamic_shared(), params.source, 8);  // caught: copy_too_long
}
CUFLASH_DEFINE_KERNEL(copy_too_long, Params, kWarp, 1, copy_more_than_it_holds)

CUFLASH_DEVICE void change_source_in_flight(const Params& params) {
  float* place = destination_of(params) + ptx::thread_index();
  *place = 1.0f;
  ptx::copy_async<4, 0>(ptx::dynamic_shared() + 4 * ptx::thread_index(), place, 4);  // caught: source_changed
  ptx::copy_async_commit();
  *place = 2.0f;
  ptx::copy_async_wait<0>();
}
CUFLASH_DEFINE_KERNEL(source_changed, Params, kWarp, 1, change_source_in_flight)

// ---- Global memory and registers ------------------------------------------------------------------------------------

CUFLASH_DEVICE void read_past_end(const Params& params) {
  const u32 thread = ptx::thread_index();
  destination_of(params)[thread] = source_of(params)[thread + params.count];  // caught: global_read_overrun
}
CUFLASH_DEFINE_KERNEL(global_read_overrun, Params, kWarp, 1, read_past_end)

CUFLASH_DEVICE void write_past_end(const Params& params) {
  destination_of(params)[ptx::thread_index() + params.count] = 1.0f;  // caught: global_write_overrun
}
CUFLASH_DEFINE_KERNEL(global_write_overrun, Params, kWarp, 1, write_past_end)

CUFLASH_DEVICE void copy_past_end(const Params& params) {
  const u32 thread = ptx::thread_index();
  const float* source = source_of(params) + thread + params.count;
  ptx::copy_async<4, 0>(ptx::dynamic_shared() + 4 * thread, source, 4);  // caught: global_copy_overrun
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
}
CUFLASH_DEFINE_KERNEL(global_copy_overrun, Params, kWarp, 1, copy_past_end)

CUFLASH_DEVICE void reduce_misaligned(const Params& params) {
  const float values[4] = {};
  ptx::reduce_add_x4(destination_of(params) + 1, values);  // caught: reduction_misaligned
}
CUFLASH_DEFINE_KERNEL(reduction_misaligned, Params, kWarp, 1, reduce_misaligned)

// A turn that only a block can end which starts later.
CUFLASH_DEVICE void wait_for_later_block(const Params& params) {
  ptx::wait_for_turn((const u32*)params.source, 1);  // caught: turn_of_later_block
}
CUFLASH_DEFINE_KERNEL(turn_of_later_block, Params, kWarp, 1, wait_for_later_block)

// The first thread to come here waits for the turn, the others do not wait for that thread.
CUFLASH_DEVICE void add_before_turn(const Params& params) {
  u32* turns = (u32*)params.source;
  if (turns[1]++ == 0) ptx::wait_for_turn(turns, 0);
  ptx::reduce_add(destination_of(params) + ptx::thread_index(), 1.0f);  // caught: addition_before_turn
}
CUFLASH_DEFINE_KERNEL(addition_before_turn, Params, kWarp, 1, add_before_turn)

CUFLASH_DEVICE void wait_for_later_count(const Params& params) {
  ptx::wait_for_count((const u32*)params.source, 1);  // caught: count_of_later_block
}
CUFLASH_DEFINE_KERNEL(count_of_later_block, Params, kWarp, 1, wait_for_later_count)

// One thread waits for the count, and all of them add.
CUFLASH_DEVICE void add_before_count(const Params& params) {
  if (ptx::thread_index() == 0) ptx::wait_for_count((const u32*)params.source, 0);
  ptx::sync_warp();
  ptx::reduce_add(destination_of(params) + ptx::thread_index(), 1.0f);  // caught: addition_before_count
}
CUFLASH_DEFINE_KERNEL(addition_before_count, Params, kWarp, 1, add_before_count)

// The last thread to come here ends the turn, without having met the others.
CUFLASH_DEVICE void end_turn_early(const Params& params) {
  u32* turns = (u32*)params.source;
  ptx::reduce_add(destination_of(params) + ptx::thread_index(), 1.0f);
  if (++turns[1] == kWarp) ptx::end_turn(turns);  // caught: turn_ended_early
}
CUFLASH_DEFINE_KERNEL(turn_ended_early, Params, kWarp, 1, end_turn_early)

CUFLASH_DEVICE u64* counter_of(const Params& params) { return (u64*)params.source; }

CUFLASH_DEVICE void arrive_early(const Params& params) {
  ptx::store_for_blocks_x2(destination_of(params) + 2 * ptx::thread_index(), {1.0f, 1.0f});
  if (ptx::thread_index() == kWarp - 1) ptx::count_arrival(counter_of(params));
}
CUFLASH_DEFINE_KERNEL(early_arrival, Params, kWarp, 1, arrive_early)

// Threads other than the one that arrives have not met it since.
CUFLASH_DEVICE void load_early(const Params& params) {
  if (ptx::thread_index() == 0) ptx::count_arrival(counter_of(params));
  float two[2];
  ptx::load_of_blocks_x2(destination_of(params) + 2 * ptx::thread_index(), two);  // caught: early_load
}
CUFLASH_DEFINE_KERNEL(early_load, Params, kBlock, 1, load_early)

CUFLASH_DEVICE void misalign_results(const Params& params) {
  ptx::store_for_blocks_x2(destination_of(params) + 1, {1.0f, 2.0f});  // caught: result_misaligned
}
CUFLASH_DEFINE_KERNEL(result_misaligned, Params, kWarp, 1, misalign_results)

CUFLASH_DEVICE void divide_by_zero(const Params& params) {
  ((int*)params.destination)[0] = 7 / (int)(params.count - params.padding);  // caught: integer_division
}
CUFLASH_DEFINE_KERNEL(integer_division, Params, kWarp, 1, divide_by_zero)

CUFLASH_DEVICE void loop_forever(const Params& params) {
  volatile const u32* flag = (volatile const u32*)params.source;
  while (*flag != 12345) {  // caught: endless_loop
  }
}
CUFLASH_DEFINE_KERNEL(endless_loop, Params, kWarp, 1, loop_forever)

CUFLASH_DEVICE void loop_over_barriers_forever(const Params& params) {
  volatile const u32* flag = (volatile const u32*)params.source;
  while (*flag != 12345) ptx::sync_block();
}
CUFLASH_DEFINE_KERNEL(endless_barriers, Params, kWarp, 1, loop_over_barriers_forever)

// Accumulators that nobody set to zero.
CUFLASH_DEVICE void accumulate_uninitialised(const Params& params) {
  float sum[4];
  const u32 a[4] = {};
  ptx::mma_m16n8k16(Float16{}, sum, a, 0, 0);
  for (u32 i = 0; i < 4; ++i) destination_of(params)[4 * ptx::thread_index() + i] = sum[i];
}
CUFLASH_DEFINE_KERNEL(uninitialised_accumulator, Params, kWarp, 1, accumulate_uninitialised)

// `count` of 4 is past the end of the fragment.
CUFLASH_DEVICE void index_past_registers(const Params& params) {
  u32 fragment[4];
  ptx::load_matrix_x4(fragment, ptx::dynamic_shared());
  ((u32*)params.destination)[ptx::thread_index()] = fragment[params.count];  // caught: register_index
}
CUFLASH_DEFINE_KERNEL(register_index, Params, kWarp, 1, index_past_registers)

// ---- Not bugs -------------------------------------------------------------------------------------------------------

// All rows of the matrices are `count` bytes apart.
CUFLASH_DEVICE void load_matrix_with_stride(const Params& params) {
  u32 fragment[4];
  ptx::load_matrix_x4(fragment, ptx::dynamic_shared() + params.count * ptx::thread_index());
}
CUFLASH_DEFINE_KERNEL(matrix_with_stride, Params, kWarp, 1, load_matrix_with_stride)

// Writes down in which order the blocks ran.
CUFLASH_DEVICE void number_blocks(const Params& params) {
  u32* counter = (u32*)params.destination;
  if (ptx::thread_index() == 0) counter[1 + counter[0]++] = ptx::block_index();
}
CUFLASH_DEFINE_KERNEL(block_order, Params, kWarp, 1, number_blocks)

// Every block writes down the count that it attends to.
CUFLASH_DEVICE void note_arrivals(const Params& params) {
  if (ptx::thread_index() != 0) return;
  u32* classes = (u32*)params.destination;
  const u32 before = (u32)ptx::load_arrivals(counter_of(params));
  ptx::count_arrival(counter_of(params));
  classes[2 * ptx::block_index()] = before;
  classes[2 * ptx::block_index() + 1] = (u32)ptx::load_arrivals(counter_of(params));
}
CUFLASH_DEFINE_KERNEL(seen_arrivals, Params, kWarp, 1, note_arrivals)

// ---- A script of accesses -------------------------------------------------------------------------------------------

struct Step {
  u32 action;  // 0 barrier, 1 collective of warp `actor`, 2 load and 3 store of `bytes` by thread `actor`
  u32 actor;
  u32 offset;
  u32 bytes;
};

CUFLASH_DEVICE void run_script(const Params& params) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared();
  const Step* steps = (const Step*)params.source;
  for (u32 i = 0; i < params.count; ++i) {
    const Step step = steps[i];
    if (step.action == 0) ptx::sync_block();
    if (step.action == 1 && step.actor == thread / kWarp) ptx::shuffle_xor(0.0f, 1);
    if (step.action < 2 || step.actor != thread) continue;
    const u32 address = shared + step.offset;
    if (step.action == 2 && step.bytes == 2) ptx::load_shared_b16(address);
    if (step.action == 2 && step.bytes == 16) ptx::load_shared_b128(address);
    if (step.action == 3 && step.bytes == 2) ptx::store_shared_b16(address, 0);
    if (step.action == 3 && step.bytes == 4) ptx::store_shared_b32(address, 0);
    if (step.action == 3 && step.bytes == 16) {
      ptx::copy_async<16, 0>(address, nullptr, 0);
      ptx::copy_async_commit();
      ptx::copy_async_wait<0>();
    }
  }
}
CUFLASH_DEFINE_KERNEL(script, Params, kBlock, 1, run_script)
