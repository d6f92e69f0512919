// One kernel for each function of ptx/base.cuh and ptx/arithmetic.cuh, so small that its result is written down in
// NumPy in one line. They run on the CPU (test_conformance.py), and take no more than a launcher to run on a GPU under
// the same checks.
#include "ptx/base.cuh"

#ifndef ELEMENT
#define ELEMENT Float16
#endif
using Type = ELEMENT;

// Input and output of every kernel: arrays of whatever it says, and a number.
struct Params {
  const void* source;
  const void* second_source;
  void* destination;
  u32 count;
  u32 padding;
};

constexpr int kWarp = 32;
constexpr int kBlock = 128;

template <class T>
CUFLASH_DEVICE const T* source_of(const Params& params) {
  return (const T*)params.source;
}
template <class T>
CUFLASH_DEVICE T* destination_of(const Params& params) {
  return (T*)params.destination;
}
CUFLASH_DEVICE u32 global_thread_index(u32 threads) { return ptx::block_index() * threads + ptx::thread_index(); }

CUFLASH_DEVICE void store_indices(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  destination_of<u32>(params)[3 * i] = ptx::block_index();
  destination_of<u32>(params)[3 * i + 1] = ptx::thread_index();
  destination_of<u32>(params)[3 * i + 2] = ptx::num_blocks();
}
CUFLASH_DEFINE_KERNEL(indices, Params, kBlock, 1, store_indices)

// The block's bytes, 16 a thread, through shared memory; thread i reads what thread i ^ 37 wrote.
CUFLASH_DEVICE void exchange_through_shared(const Params& params) {
  const u32 thread = ptx::thread_index(), other = thread ^ 37u, shared = ptx::dynamic_shared();
  const u32* source = source_of<u32>(params) + 4 * thread;
  for (u32 i = 0; i < 4; ++i) ptx::store_shared_b32(shared + 16 * thread + 4 * i, source[i]);
  ptx::sync_block();
  Bytes16 bytes = ptx::load_shared_b128(shared + 16 * other);
  bytes.word[3] = ptx::load_shared_b32(shared + 16 * other + 12);
  *(Bytes16*)(destination_of<u32>(params) + 4 * thread) = bytes;
}
CUFLASH_DEFINE_KERNEL(shared_b32_b128, Params, kBlock, 1, exchange_through_shared)

// The same the other way round: 16 bytes at once, read one by one.
CUFLASH_DEVICE void exchange_pieces(const Params& params) {
  const u32 thread = ptx::thread_index(), other = thread ^ 37u, shared = ptx::dynamic_shared();
  ptx::store_shared_b128(shared + 16 * thread, source_of<Bytes16>(params)[thread]);
  ptx::sync_block();
  for (u32 i = 0; i < 8; ++i)
    destination_of<u16>(params)[8 * thread + i] = ptx::load_shared_b16(shared + 16 * other + 2 * i);
}
CUFLASH_DEFINE_KERNEL(shared_b128_b16, Params, kBlock, 1, exchange_pieces)

CUFLASH_DEVICE void exchange_f32(const Params& params) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared();
  float values[4];
  for (u32 i = 0; i < 4; ++i) values[i] = source_of<float>(params)[4 * thread + i];
  ptx::store_shared_f32x4(shared + 16 * thread, values);
  ptx::sync_block();
  ptx::load_shared_f32x4(shared + 16 * (thread ^ 37u), values);
  for (u32 i = 0; i < 4; ++i) destination_of<float>(params)[4 * thread + i] = values[i];
}
CUFLASH_DEFINE_KERNEL(shared_f32x4, Params, kBlock, 1, exchange_f32)

CUFLASH_DEVICE void exchange_b16(const Params& params) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared();
  ptx::store_shared_b16(shared + 2 * thread, source_of<u16>(params)[thread]);
  ptx::sync_block();
  destination_of<u16>(params)[thread] = ptx::load_shared_b16(shared + 2 * (thread ^ 37u));
}
CUFLASH_DEFINE_KERNEL(shared_b16, Params, kBlock, 1, exchange_b16)

// The dynamic shared memory starts at a multiple of 1024.
CUFLASH_DEVICE void store_shared_alignment(const Params& params) {
  if (ptx::thread_index() == 0) *destination_of<u32>(params) = ptx::dynamic_shared() % 1024;
}
CUFLASH_DEFINE_KERNEL(dynamic_shared_alignment, Params, kWarp, 1, store_shared_alignment)

// Many rounds of neighbours reading each other: each needs its barriers.
CUFLASH_DEVICE void rotate_values(const Params& params) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared();
  u16 value = source_of<u16>(params)[thread];
  for (u32 round = 0; round < params.count; ++round) {
    ptx::store_shared_b16(shared + 2 * thread, value);
    ptx::sync_block();
    value = ptx::load_shared_b16(shared + 2 * ((thread + 1) % kBlock));
    ptx::sync_block();
  }
  destination_of<u16>(params)[thread] = value;
}
CUFLASH_DEFINE_KERNEL(sync_block, Params, kBlock, 1, rotate_values)

CUFLASH_DEVICE void store_shuffled(const Params& params) {
  const u32 thread = ptx::thread_index();
  destination_of<float>(params)[thread] = ptx::shuffle_xor(source_of<float>(params)[thread], params.count);
}
CUFLASH_DEFINE_KERNEL(shuffle_xor, Params, kBlock, 1, store_shuffled)

// Each thread reads what another one of its warp wrote, round after round.
CUFLASH_DEVICE void pass_around_in_warps(const Params& params) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared();
  u16 value = source_of<u16>(params)[thread];
  for (u32 i = 0; i < params.count; ++i) {
    ptx::store_shared_b16(shared + 2 * thread, value);
    ptx::sync_warp();
    value = ptx::load_shared_b16(shared + 2 * (thread ^ 5u));
    ptx::sync_warp();
  }
  destination_of<u16>(params)[thread] = value;
}
CUFLASH_DEFINE_KERNEL(sync_warp, Params, kBlock, 1, pass_around_in_warps)

// Four warps pass values on, `count` times around: warp w owns named barrier 1 + w, on which the one before it arrives.
CUFLASH_DEVICE void pass_between_warps(const Params& params) {
  constexpr u32 kWarps = 4;
  const u32 shared = ptx::dynamic_shared(), warp = ptx::thread_index() / kWarp, lane = ptx::thread_index() % kWarp;
  if (warp == kWarps - 1) {
    ptx::store_shared_b16(shared + 2 * lane, source_of<u16>(params)[lane]);
    ptx::arrive_named(1, 2 * kWarp);
  }
  for (u32 round = 0; round < params.count; ++round) {
    ptx::sync_named(1 + warp, 2 * kWarp);
    const u16 value = ptx::load_shared_b16(shared + 2 * ((lane + 1) % kWarp));
    ptx::any_lane(false);  // all lanes have read
    ptx::store_shared_b16(shared + 2 * lane, (u16)(value + warp));
    if (warp < kWarps - 1 || round < params.count - 1) ptx::arrive_named(1 + (warp + 1) % kWarps, 2 * kWarp);
  }
  ptx::sync_block();
  if (warp == 0) destination_of<u16>(params)[lane] = ptx::load_shared_b16(shared + 2 * lane);
}
CUFLASH_DEFINE_KERNEL(named_ring, Params, kBlock, 1, pass_between_warps)

// Lane i of the first warp, and no other thread of two warps, is in round i where the predicate holds, for `count`
// rounds.
CUFLASH_DEVICE void ask_two_warps(const Params& params) {
  const u32 thread = ptx::thread_index();
  if (thread >= 2 * kWarp) return;
  for (u32 round = 0; round < params.count; ++round) {
    const bool one = ptx::sync_named_any(1, 2 * kWarp, thread == round);
    const bool none = ptx::sync_named_any(1, 2 * kWarp, false);
    destination_of<u16>(params)[2 * kWarp * round + thread] = (u16)(one + 2 * none);
  }
}
CUFLASH_DEFINE_KERNEL(named_any, Params, kBlock, 1, ask_two_warps)

CUFLASH_DEVICE void store_votes(const Params& params) {
  const u32 thread = ptx::thread_index();
  destination_of<u32>(params)[thread] = ptx::any_lane(thread == params.count);
}
CUFLASH_DEFINE_KERNEL(any_lane, Params, kBlock, 1, store_votes)

// Of the values that are odd: which lanes have one, and how many lanes come behind the last that does.
CUFLASH_DEVICE void store_ballots(const Params& params) {
  const u32 thread = ptx::thread_index(), bits = ptx::ballot(source_of<u32>(params)[thread] % 2 != 0);
  destination_of<u32>(params)[2 * thread] = bits;
  destination_of<u32>(params)[2 * thread + 1] = ptx::leading_zeros(bits);
}
CUFLASH_DEFINE_KERNEL(ballot, Params, kBlock, 1, store_ballots)

// Which lanes have the same value, and how many.
CUFLASH_DEVICE void store_matches(const Params& params) {
  const u32 thread = ptx::thread_index(), lanes = ptx::match_any(source_of<u32>(params)[thread]);
  destination_of<u32>(params)[2 * thread] = lanes;
  destination_of<u32>(params)[2 * thread + 1] = ptx::population_count(lanes);
}
CUFLASH_DEFINE_KERNEL(match_any, Params, kBlock, 1, store_matches)

// Thread i copies `count` of `bytes` bytes, in two groups, into shared memory of all ones.
template <int bytes>
CUFLASH_DEVICE void copy_block(const Params& params) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared() + 2 * bytes * thread;
  for (u32 i = 0; i < bytes; ++i) ptx::store_shared_b16(shared + 2 * i, 0xffff);
  ptx::sync_block();
  const u8* source = source_of<u8>(params) + 2 * bytes * thread;
  ptx::copy_async<bytes, 0>(shared, source, params.count);
  ptx::copy_async_commit();
  ptx::copy_async<bytes, bytes>(shared + bytes, source, bytes);
  ptx::copy_async_commit();
  ptx::copy_async_wait<1>();
  u16* destination = destination_of<u16>(params) + bytes * thread;
  for (u32 i = 0; i < bytes / 2; ++i) destination[i] = ptx::load_shared_b16(shared + 2 * i);
  ptx::copy_async_wait<0>();
  for (u32 i = bytes / 2; i < bytes; ++i) destination[i] = ptx::load_shared_b16(shared + 2 * i);
}
CUFLASH_DEFINE_KERNEL(copy_async_4, Params, kBlock, 1, copy_block<4>)
CUFLASH_DEFINE_KERNEL(copy_async_8, Params, kBlock, 1, copy_block<8>)
CUFLASH_DEFINE_KERNEL(copy_async_16, Params, kBlock, 1, copy_block<16>)

// Row r of the four matrices, one below the other, comes from row (5 r) % 32 of the source.
template <bool transposed>
CUFLASH_DEVICE void load_fragments(const Params& params) {
  const u32 lane = ptx::thread_index(), shared = ptx::dynamic_shared();
  ptx::copy_async<16, 0>(shared + 16 * lane, source_of<u16>(params) + 8 * lane, 16);
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  ptx::sync_block();
  u32 fragment[4];
  const u32 address = shared + 16 * (5 * lane % kWarp);
  if (transposed)
    ptx::load_matrix_x4_transposed(fragment, address);
  else
    ptx::load_matrix_x4(fragment, address);
  for (u32 i = 0; i < 4; ++i) destination_of<u32>(params)[4 * lane + i] = fragment[i];
}
CUFLASH_DEFINE_KERNEL(load_matrix, Params, kWarp, 1, load_fragments<false>)
CUFLASH_DEFINE_KERNEL(load_matrix_transposed, Params, kWarp, 1, load_fragments<true>)

// A is 16 x 16 by rows, B 16 x 8 by columns, D 16 x 8 by rows; D is added to.
CUFLASH_DEVICE void multiply_tiles(const Params& params) {
  const u32 lane = ptx::thread_index(), group = lane / 4, pair = 2 * (lane % 4);
  const u16* a = (const u16*)params.source;
  const u16* b = (const u16*)params.second_source;
  float* d = (float*)params.destination;
  u32 a_fragment[4], b_fragment[2];
  float sum[4];
  for (u32 i = 0; i < 4; ++i) a_fragment[i] = *(const u32*)(a + (group + i % 2 * 8) * 16 + pair + i / 2 * 8);
  for (u32 i = 0; i < 2; ++i) b_fragment[i] = *(const u32*)(b + group * 16 + pair + 8 * i);
  for (u32 i = 0; i < 4; ++i) sum[i] = d[(group + i / 2 * 8) * 8 + pair + i % 2];
  ptx::mma_m16n8k16(Type{}, sum, a_fragment, b_fragment[0], b_fragment[1]);
  for (u32 i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + pair + i % 2] = sum[i];
}
CUFLASH_DEFINE_KERNEL(mma, Params, kWarp, 1, multiply_tiles)

// Two neighbours a thread, through shared memory; thread i reads what thread i ^ 37 wrote, one by one and as a pair.
template <class T>
CUFLASH_DEVICE void exchange_pairs(const Params& params) {
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared(), bytes = 2 * sizeof(T);
  const T* source = source_of<T>(params) + 2 * thread;
  const T pair[2] = {source[0], source[1]};
  ptx::store_shared_x2(shared + bytes * thread, pair);
  ptx::sync_block();
  T other[2], one;
  ptx::load_shared_x2(shared + bytes * (thread ^ 37u), other);
  ptx::load_shared(shared + bytes * (thread ^ 37u) + sizeof(T), one);
  T* destination = destination_of<T>(params) + 3 * thread;
  destination[0] = other[0], destination[1] = other[1], destination[2] = one;
}
CUFLASH_DEFINE_KERNEL(shared_x2_float, Params, kBlock, 1, exchange_pairs<float>)
CUFLASH_DEFINE_KERNEL(shared_x2_double, Params, kBlock, 1, exchange_pairs<double>)

CUFLASH_DEVICE void store_shuffled_double(const Params& params) {
  const u32 thread = ptx::thread_index();
  destination_of<double>(params)[thread] = ptx::shuffle_xor(source_of<double>(params)[thread], params.count);
}
CUFLASH_DEFINE_KERNEL(shuffle_xor_double, Params, kBlock, 1, store_shuffled_double)

// Lane i receives from lane count i.
template <class T>
CUFLASH_DEVICE void store_received(const Params& params) {
  const u32 thread = ptx::thread_index();
  destination_of<T>(params)[thread] = ptx::shuffle(source_of<T>(params)[thread], thread * params.count);
}
CUFLASH_DEFINE_KERNEL(shuffle_float, Params, kBlock, 1, store_received<float>)
CUFLASH_DEFINE_KERNEL(shuffle_double, Params, kBlock, 1, store_received<double>)
CUFLASH_DEFINE_KERNEL(shuffle_u32, Params, kBlock, 1, store_received<u32>)

// A is 16 x 8 `steps` by rows, B 8 `steps` x 8 by columns, D 16 x 8 by rows; `add` adds their product to what lies in
// D.
template <class T, int steps, class Add>
CUFLASH_DEVICE void multiply_wide_tiles(const Params& params, Add add) {
  const u32 lane = ptx::thread_index(), group = lane / 4, t = lane % 4;
  const T* a = source_of<T>(params) + t;
  const T* b = (const T*)params.second_source + group * 8 * steps + t;
  T* d = destination_of<T>(params) + group * 8 + 2 * t;
  T a_fragment[steps][4], b_fragment[steps][2], sum[4];
  for (u32 step = 0; step < steps; ++step) {
    for (u32 i = 0; i < 4; ++i) a_fragment[step][i] = a[(group + i % 2 * 8) * 8 * steps + 8 * step + i / 2 * 4];
    for (u32 i = 0; i < 2; ++i) b_fragment[step][i] = b[8 * step + 4 * i];
  }
  for (u32 i = 0; i < 4; ++i) sum[i] = d[i / 2 * 64 + i % 2];
  add(sum, a_fragment, b_fragment);
  for (u32 i = 0; i < 4; ++i) d[i / 2 * 64 + i % 2] = sum[i];
}
CUFLASH_DEVICE void multiply_tf32(const Params& params) {
  multiply_wide_tiles<float, 1>(params, [](float (&d)[4], const float (&a)[1][4], const float (&b)[1][2]) {
    ptx::mma_m16n8k8(d, a[0], b[0][0], b[0][1]);
  });
}
CUFLASH_DEFINE_KERNEL(mma_tf32, Params, kWarp, 1, multiply_tf32)
CUFLASH_DEVICE void multiply_float64(const Params& params) {
  multiply_wide_tiles<double, 2>(
      params, [](double (&d)[4], const double (&a)[2][4], const double (&b)[2][2]) { ptx::mma_m16n8k16(d, a, b); });
}
CUFLASH_DEFINE_KERNEL(mma_float64, Params, kWarp, 1, multiply_float64)

CUFLASH_DEVICE void map_to_tf32(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i < params.count) destination_of<float>(params)[i] = ptx::round_to_tf32(source_of<float>(params)[i]);
}
CUFLASH_DEFINE_KERNEL(round_to_tf32, Params, kBlock, 1, map_to_tf32)

// Bits to a number and back.
CUFLASH_DEVICE void map_bits(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i < params.count) destination_of<u32>(params)[i] = ptx::bits_of(ptx::float_of(source_of<u32>(params)[i]));
}
CUFLASH_DEFINE_KERNEL(bits_float, Params, kBlock, 1, map_bits)
CUFLASH_DEVICE void map_double_bits(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i < params.count) destination_of<u64>(params)[i] = ptx::bits_of(ptx::double_of(source_of<u64>(params)[i]));
}
CUFLASH_DEFINE_KERNEL(bits_double, Params, kBlock, 1, map_double_bits)

CUFLASH_DEVICE void map_multiply_double(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  const double* source = source_of<double>(params) + 3 * i;
  if (i < params.count) destination_of<double>(params)[i] = ptx::multiply(source[0], source[1]) + source[2];
}
CUFLASH_DEFINE_KERNEL(multiply_double, Params, kBlock, 1, map_multiply_double)

template <class Real>
CUFLASH_DEVICE void map_fused(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  const Real* source = source_of<Real>(params) + 3 * i;
  if (i < params.count) destination_of<Real>(params)[i] = ptx::fused(source[0], source[1], source[2]);
}
CUFLASH_DEFINE_KERNEL(fused, Params, kBlock, 1, map_fused<float>)
CUFLASH_DEFINE_KERNEL(fused_double, Params, kBlock, 1, map_fused<double>)

CUFLASH_DEVICE void add_to_double_sums(const Params& params) {
  const double value = source_of<double>(params)[global_thread_index(kBlock)];
  for (u32 i = 0; i < params.count; ++i) ptx::reduce_add(destination_of<double>(params) + i, value * (i + 1));
}
CUFLASH_DEFINE_KERNEL(reduce_add_double, Params, kBlock, 1, add_to_double_sums)

CUFLASH_DEVICE void map_exp2(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i < params.count) destination_of<float>(params)[i] = ptx::exp2_approx(source_of<float>(params)[i]);
}
CUFLASH_DEFINE_KERNEL(exp2_approx, Params, kBlock, 1, map_exp2)

CUFLASH_DEVICE void map_reciprocal(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i < params.count) destination_of<float>(params)[i] = ptx::reciprocal_approx(source_of<float>(params)[i]);
}
CUFLASH_DEFINE_KERNEL(reciprocal_approx, Params, kBlock, 1, map_reciprocal)

CUFLASH_DEVICE void map_sqrt(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i < params.count) destination_of<float>(params)[i] = ptx::sqrt_approx(source_of<float>(params)[i]);
}
CUFLASH_DEFINE_KERNEL(sqrt_approx, Params, kBlock, 1, map_sqrt)

CUFLASH_DEVICE void map_log2(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i < params.count) destination_of<float>(params)[i] = ptx::log2_approx(source_of<float>(params)[i]);
}
CUFLASH_DEFINE_KERNEL(log2_approx, Params, kBlock, 1, map_log2)

CUFLASH_DEVICE void map_log2_of_normal(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i < params.count) destination_of<float>(params)[i] = ptx::log2_of_normal(source_of<float>(params)[i]);
}
CUFLASH_DEFINE_KERNEL(log2_of_normal, Params, kBlock, 1, map_log2_of_normal)

CUFLASH_DEVICE void map_floor_to_int(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i < params.count) destination_of<int>(params)[i] = ptx::floor_to_int(source_of<float>(params)[i]);
}
CUFLASH_DEFINE_KERNEL(floor_to_int, Params, kBlock, 1, map_floor_to_int)

CUFLASH_DEVICE void map_floor_to_float(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i < params.count) destination_of<float>(params)[i] = ptx::floor_to_float(source_of<float>(params)[i]);
}
CUFLASH_DEFINE_KERNEL(floor_to_float, Params, kBlock, 1, map_floor_to_float)

CUFLASH_DEVICE void map_multiply(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  const float* source = source_of<float>(params) + 3 * i;
  if (i < params.count) destination_of<float>(params)[i] = ptx::multiply(source[0], source[1]) + source[2];
}
CUFLASH_DEFINE_KERNEL(multiply, Params, kBlock, 1, map_multiply)

CUFLASH_DEVICE void map_limit_magnitude(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  const float* source = source_of<float>(params) + 2 * i;
  if (i < params.count) destination_of<float>(params)[i] = ptx::limit_magnitude(source[0], source[1]);
}
CUFLASH_DEFINE_KERNEL(limit_magnitude, Params, kBlock, 1, map_limit_magnitude)

CUFLASH_DEVICE void map_fma_saturated(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  const float* source = source_of<float>(params) + 3 * i;
  if (i < params.count) destination_of<float>(params)[i] = ptx::fma_saturated(source[0], source[1], source[2]);
}
CUFLASH_DEFINE_KERNEL(fma_saturated, Params, kBlock, 1, map_fma_saturated)

CUFLASH_DEVICE void map_at_least_u16x2(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  const u32* source = source_of<u32>(params) + 2 * i;
  u32* destination = destination_of<u32>(params) + 2 * i;
  if (i < params.count) ptx::at_least_u16x2(source[0], source[1], destination[0], destination[1]);
}
CUFLASH_DEFINE_KERNEL(at_least_u16x2, Params, kBlock, 1, map_at_least_u16x2)

CUFLASH_DEVICE void pack_pairs(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  const float* source = source_of<float>(params);
  if (i < params.count) destination_of<u32>(params)[i] = ptx::pack(Type{}, source[2 * i], source[2 * i + 1]);
}
CUFLASH_DEFINE_KERNEL(pack, Params, kBlock, 1, pack_pairs)

CUFLASH_DEVICE void map_to_float32(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i < params.count) destination_of<float>(params)[i] = ptx::to_float32(Type{}, source_of<u16>(params)[i]);
}
CUFLASH_DEFINE_KERNEL(to_float32, Params, kBlock, 1, map_to_float32)

CUFLASH_DEVICE void multiply_halves(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  const u32* source = source_of<u32>(params) + 2 * i;
  if (i < params.count) destination_of<u32>(params)[i] = ptx::multiply_f16x2(source[0], source[1]);
}
CUFLASH_DEFINE_KERNEL(multiply_f16x2, Params, kBlock, 1, multiply_halves)

#if defined(CUFLASH_EMULATION) || __CUDA_ARCH__ >= 890
template <class Float8>
CUFLASH_DEVICE void map_to_float16x2(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i < params.count) destination_of<u32>(params)[i] = ptx::to_float16x2(Float8{}, source_of<u16>(params)[i]);
}
CUFLASH_DEFINE_KERNEL(to_float16x2_e4m3, Params, kBlock, 1, map_to_float16x2<Float8E4M3>)
CUFLASH_DEFINE_KERNEL(to_float16x2_e5m2, Params, kBlock, 1, map_to_float16x2<Float8E5M2>)

template <class Float8>
CUFLASH_DEVICE void map_to_float16x4(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i >= params.count) return;
  const u32 bytes = source_of<u16>(params)[i] | (u32)source_of<u16>(params)[params.count - 1 - i] << 16;
  u32* pairs = destination_of<u32>(params) + 2 * i;
  ptx::to_float16x4(Float8{}, bytes, pairs[0], pairs[1]);
}
CUFLASH_DEFINE_KERNEL(to_float16x4_e4m3, Params, kBlock, 1, map_to_float16x4<Float8E4M3>)
CUFLASH_DEFINE_KERNEL(to_float16x4_e5m2, Params, kBlock, 1, map_to_float16x4<Float8E5M2>)

CUFLASH_DEVICE void map_to_float8x2(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  const float* pair = source_of<float>(params) + 2 * i;
  if (i < params.count) destination_of<u16>(params)[i] = ptx::to_float8x2(Float8E4M3{}, pair[0], pair[1]);
}
CUFLASH_DEFINE_KERNEL(to_float8x2, Params, kBlock, 1, map_to_float8x2)

CUFLASH_DEVICE void map_halves_to_float8x2(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  if (i < params.count) destination_of<u16>(params)[i] = ptx::to_float8x2(Float8E4M3{}, source_of<u32>(params)[i]);
}
CUFLASH_DEFINE_KERNEL(halves_to_float8x2, Params, kBlock, 1, map_halves_to_float8x2)
#endif

#if defined(CUFLASH_EMULATION) || __CUDA_ARCH__ >= 900
CUFLASH_DEVICE void map_clamped_sum(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  const int* of = source_of<int>(params) + 3 * i;
  if (i < params.count) destination_of<int>(params)[i] = ptx::clamped_sum(of[0], of[1], of[2]);
}
CUFLASH_DEFINE_KERNEL(clamped_sum, Params, kBlock, 1, map_clamped_sum)
#endif

CUFLASH_DEVICE void permute_words(const Params& params) {
  const u32 i = global_thread_index(kBlock);
  const u32* words = source_of<u32>(params) + 3 * i;
  if (i < params.count) destination_of<u32>(params)[i] = ptx::permute_bytes(words[0], words[1], words[2]);
}
CUFLASH_DEFINE_KERNEL(permute_bytes, Params, kBlock, 1, permute_words)

CUFLASH_DEVICE void store_infinity(const Params& params) {
  if (ptx::thread_index() == 0) *destination_of<float>(params) = ptx::infinity();
}
CUFLASH_DEFINE_KERNEL(infinity, Params, kWarp, 1, store_infinity)

// Every thread of every block adds to the same `count` sums.
CUFLASH_DEVICE void add_to_sums(const Params& params) {
  const float value = source_of<float>(params)[global_thread_index(kBlock)];
  for (u32 i = 0; i < params.count; ++i) ptx::reduce_add(destination_of<float>(params) + i, value * (i + 1));
}
CUFLASH_DEFINE_KERNEL(reduce_add, Params, kBlock, 1, add_to_sums)

CUFLASH_DEVICE void add_to_integers(const Params& params) {
  const u64 value = source_of<u64>(params)[global_thread_index(kBlock)];
  ptx::reduce_add(destination_of<u64>(params), value);
  ptx::reduce_max(destination_of<u64>(params) + 1, value);
}
CUFLASH_DEFINE_KERNEL(reduce_integers, Params, kBlock, 1, add_to_integers)

CUFLASH_DEVICE void add_to_four_sums(const Params& params) {
  const float value = source_of<float>(params)[global_thread_index(kBlock)];
  const float values[4] = {value, 2 * value, 3 * value, 4 * value};
  ptx::reduce_add_x4(destination_of<float>(params), values);
}
CUFLASH_DEFINE_KERNEL(reduce_add_x4, Params, kBlock, 1, add_to_four_sums)

CUFLASH_DEVICE void copy_behind_pause(const Params& params) {
  const float value = source_of<float>(params)[global_thread_index(kBlock)];
  ptx::pause<1000>();
  destination_of<float>(params)[global_thread_index(kBlock)] = value;
}
CUFLASH_DEFINE_KERNEL(pause, Params, kBlock, 1, copy_behind_pause)

// Blocks add to the same sums one after another; the counter of their turns lies behind the sums.
CUFLASH_DEVICE void add_in_turn(const Params& params) {
  const u32 thread = ptx::thread_index();
  float* sums = destination_of<float>(params);
  u32* turns = (u32*)(sums + kBlock);
  if (thread == 0) ptx::wait_for_turn(turns, ptx::block_index());
  ptx::sync_block();
  ptx::reduce_add(sums + thread, source_of<float>(params)[global_thread_index(kBlock)]);
  ptx::sync_block();
  if (thread == 0) ptx::end_turn(turns);
}
CUFLASH_DEFINE_KERNEL(turns, Params, kBlock, 1, add_in_turn)

// Every block reads what the threads of the one before it have stored, in reverse; the counter of those lies behind it
// all.
CUFLASH_DEVICE void store_behind_counts(const Params& params) {
  const u32 thread = ptx::thread_index(), block = ptx::block_index();
  float* sums = destination_of<float>(params) + block * kBlock;
  u32* counter = (u32*)(destination_of<float>(params) + (params.count + 1) * kBlock);
  ptx::wait_for_count(counter, block * kBlock);
  ptx::sync_block();
  sums[kBlock + thread] = sums[kBlock - 1 - thread] + source_of<float>(params)[global_thread_index(kBlock)];
  ptx::add_to_count(counter);
}
CUFLASH_DEFINE_KERNEL(counts, Params, kBlock, 1, store_behind_counts)

// `count` blocks leave kBlock results each. The one that counts last, from a number on that memory does not hold, sums
// them in the order of the blocks. In memory lie the sums, the results of each block, and the counter.
template <class T>
CUFLASH_DEVICE void sum_results_of_blocks(const Params& params) {
  constexpr u64 kFirst = 0x123456789abc0000ull;
  constexpr u32 kHalf = kBlock / 2;  // results that are loaded by fours, not by twos
  const u32 thread = ptx::thread_index(), shared = ptx::dynamic_shared();
  const T* values = source_of<T>(params) + ptx::block_index() * kBlock;
  T *sums = destination_of<T>(params), *first_result = sums + kBlock;
  T* results = first_result + ptx::block_index() * kBlock;
  u64* counter = (u64*)(first_result + params.count * kBlock);
  if (thread == 0) {
    const u64 found = ptx::load_arrivals(counter);
    if (found - kFirst >= params.count) ptx::replace_arrivals(counter, found, kFirst);
  }
  if (thread % 2 == 0) ptx::store_for_blocks_x2(results + thread, {values[thread], values[thread + 1]});
  ptx::sync_block();
  if (thread == 0) ptx::store_shared_b16(shared, ptx::count_arrival(counter) - kFirst == params.count - 1);
  ptx::sync_block();
  if (ptx::load_shared_b16(shared) == 0) return;
  const u32 count = thread >= kHalf ? 2 : 4;  // of sums of a thread
  if (thread % count != 0) return;
  T sum[4] = {};
  for (u32 block = 0; block < params.count; ++block) {
    const T* of_block = first_result + block * kBlock + thread;
    T two[2], part[4] = {};
    if (count == 2) {
      ptx::load_of_blocks_x2(of_block, two);
      part[0] = two[0], part[1] = two[1];
    } else {
      ptx::load_of_blocks_x4(of_block, part);
    }
    for (u32 i = 0; i < 4; ++i) sum[i] += part[i];
  }
  for (u32 i = 0; i < count; ++i) sums[thread + i] = sum[i];
}
CUFLASH_DEFINE_KERNEL(arrivals, Params, kBlock, 1, sum_results_of_blocks<float>)
CUFLASH_DEFINE_KERNEL(arrivals_float64, Params, kBlock, 1, sum_results_of_blocks<double>)
