// The functions of kernels/ptx/base.cuh on the CPU. Included by it in place of the inline PTX; the work is done by the
// emulation runtime, which is compiled once (runtime/).
#pragma once
#include "runtime/interface.h"

#define CUFLASH_DEVICE inline

#define CUFLASH_DEFINE_KERNEL(name, Params, threads, min_blocks, body) \
  CUFLASH_DEFINE_EMULATED(name, Params, threads, min_blocks, 1, body)
#define CUFLASH_DEFINE_CLUSTER_KERNEL(name, Params, threads, blocks, body) \
  CUFLASH_DEFINE_EMULATED(name, Params, threads, 1, blocks, body)
#define CUFLASH_DEFINE_EMULATED(name, Params, threads, min_blocks, cluster, body)                                   \
  static void name##_thread(const void* params) { body(*static_cast<const Params*>(params)); }                      \
  extern "C" __attribute__((visibility("default"))) int name(                                                       \
      const void* params, u64 params_bytes, const ::emulator::LaunchOptions* options, ::emulator::Report* report) { \
    return ::emulator::launch({name##_thread, sizeof(Params), threads, min_blocks, cluster}, params, params_bytes,  \
                              *options, *report);                                                                   \
  }

// Functions that NVRTC knows without a header.
extern "C" float fmaxf(float, float) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
extern "C" float fabsf(float) noexcept;
extern "C" float fminf(float, float) noexcept;
extern "C" float expf(float) noexcept;
extern "C" float logf(float) noexcept;
extern "C" float sqrtf(float) noexcept;
extern "C" float tanhf(float) noexcept;
extern "C" float sinf(float) noexcept;
extern "C" float cosf(float) noexcept;
extern "C" float powf(float, float) noexcept;
extern "C" float copysignf(float, float) noexcept;
extern "C" double exp(double) noexcept;
extern "C" double log(double) noexcept;
extern "C" double sqrt(double) noexcept;
extern "C" double tanh(double) noexcept;
extern "C" double sin(double) noexcept;
extern "C" double cos(double) noexcept;
extern "C" double pow(double, double) noexcept;
extern "C" double floor(double) noexcept;
extern "C" double fmax(double, double) noexcept;
extern "C" double fmin(double, double) noexcept;
extern "C" double fabs(double) noexcept;

namespace ptx {

using ::emulator::Element;
using ::emulator::Site;

constexpr Element element_of(Float16) { return Element::kFloat16; }
constexpr Element element_of(BFloat16) { return Element::kBFloat16; }
constexpr Element element_of(Float8E4M3) { return Element::kFloat8E4M3; }
constexpr Element element_of(Float8E5M2) { return Element::kFloat8E5M2; }

template <class T>
static inline T read_shared_as(u32 address, Site site) {
  T value;
  __builtin_memcpy(&value, ::emulator::read_shared(address, sizeof(T), site), sizeof(T));
  return value;
}
template <class T>
static inline void write_shared_as(u32 address, T value, Site site) {
  __builtin_memcpy(::emulator::write_shared(address, sizeof(T), site), &value, sizeof(T));
}

// ---- Indices ------------------------------------------------------------------------------------------------------
CUFLASH_DEVICE u32 thread_index() { return ::emulator::thread_index(); }
CUFLASH_DEVICE u32 block_index() { return ::emulator::block_index(); }
CUFLASH_DEVICE u32 num_blocks() { return ::emulator::num_blocks(); }

// ---- Shared memory ------------------------------------------------------------------------------------------------
CUFLASH_DEVICE u32 dynamic_shared() { return ::emulator::dynamic_shared(); }

CUFLASH_DEVICE void load_shared_f32x4(u32 address, float (&value)[4], Site site = Site::here()) {
  const Bytes16 bytes = read_shared_as<Bytes16>(address, site);
  for (int i = 0; i < 4; ++i) __builtin_memcpy(&value[i], &bytes.word[i], 4);
}
CUFLASH_DEVICE void store_shared_f32x4(u32 address, const float (&value)[4], Site site = Site::here()) {
  Bytes16 bytes;
  for (int i = 0; i < 4; ++i) __builtin_memcpy(&bytes.word[i], &value[i], 4);
  write_shared_as(address, bytes, site);
}
template <class T>
CUFLASH_DEVICE void load_shared(u32 address, T& value, Site site = Site::here()) {
  value = read_shared_as<T>(address, site);
}
template <class T>
struct PairOf {
  T value[2];
};
template <class T>
CUFLASH_DEVICE void load_shared_x2(u32 address, T (&value)[2], Site site = Site::here()) {
  const auto pair = read_shared_as<PairOf<T>>(address, site);
  value[0] = pair.value[0], value[1] = pair.value[1];
}
template <class T>
CUFLASH_DEVICE void store_shared_x2(u32 address, const T (&value)[2], Site site = Site::here()) {
  write_shared_as(address, PairOf<T>{value[0], value[1]}, site);
}
CUFLASH_DEVICE u16 load_shared_b16(u32 address, Site site = Site::here()) { return read_shared_as<u16>(address, site); }
CUFLASH_DEVICE u32 load_shared_b32(u32 address, Site site = Site::here()) { return read_shared_as<u32>(address, site); }
CUFLASH_DEVICE Bytes16 load_shared_b128(u32 address, Site site = Site::here()) {
  return read_shared_as<Bytes16>(address, site);
}
CUFLASH_DEVICE void store_shared_b128(u32 address, const Bytes16& value, Site site = Site::here()) {
  write_shared_as(address, value, site);
}
CUFLASH_DEVICE void store_shared_b16(u32 address, u16 value, Site site = Site::here()) {
  write_shared_as(address, value, site);
}
CUFLASH_DEVICE void store_shared_b32(u32 address, u32 value, Site site = Site::here()) {
  write_shared_as(address, value, site);
}

// ---- Barriers and shuffles ----------------------------------------------------------------------------------------
CUFLASH_DEVICE void sync_block(Site site = Site::here()) { ::emulator::sync_block(site); }
CUFLASH_DEVICE void sync_warp(Site site = Site::here()) { ::emulator::sync_warp(site); }
CUFLASH_DEVICE void sync_named(u32 identifier, u32 threads, Site site = Site::here()) {
  ::emulator::sync_named(identifier, threads, site);
}
CUFLASH_DEVICE void arrive_named(u32 identifier, u32 threads, Site site = Site::here()) {
  ::emulator::arrive_named(identifier, threads, site);
}
CUFLASH_DEVICE bool sync_named_any(u32 identifier, u32 threads, bool predicate, Site site = Site::here()) {
  return ::emulator::sync_named_any(identifier, threads, predicate, site);
}
CUFLASH_DEVICE float shuffle_xor(float value, u32 lane_mask, Site site = Site::here()) {
  return ::emulator::shuffle_xor(value, lane_mask, site);
}
CUFLASH_DEVICE double shuffle_xor(double value, u32 lane_mask, Site site = Site::here()) {
  return ::emulator::shuffle_xor(value, lane_mask, site);
}
CUFLASH_DEVICE float shuffle(float value, u32 lane, Site site = Site::here()) {
  return ::emulator::shuffle(value, lane, site);
}
CUFLASH_DEVICE double shuffle(double value, u32 lane, Site site = Site::here()) {
  return ::emulator::shuffle(value, lane, site);
}
CUFLASH_DEVICE u32 shuffle(u32 value, u32 lane, Site site = Site::here()) {
  return ::emulator::shuffle(value, lane, site);
}
CUFLASH_DEVICE bool any_lane(bool predicate, Site site = Site::here()) { return ::emulator::any_lane(predicate, site); }
CUFLASH_DEVICE u32 ballot(bool predicate, Site site = Site::here()) { return ::emulator::ballot(predicate, site); }
CUFLASH_DEVICE u32 match_any(u32 value, Site site = Site::here()) {
  u32 lanes = 0;
  for (u32 lane = 0; lane < 32; ++lane) lanes |= (u32)(::emulator::shuffle(value, lane, site) == value) << lane;
  return lanes;
}

// ---- Asynchronous copies ------------------------------------------------------------------------------------------
template <int bytes, int offset>
CUFLASH_DEVICE void copy_async(u32 destination, const void* source, u32 source_bytes, Site site = Site::here()) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  ::emulator::copy_async(destination, (const u8*)source + offset, bytes, source_bytes, site);
}
CUFLASH_DEVICE void copy_async_commit(Site site = Site::here()) { ::emulator::copy_async_commit(site); }
template <int pending>
CUFLASH_DEVICE void copy_async_wait(Site site = Site::here()) {
  static_assert(pending >= 0, "a count of groups");
  ::emulator::copy_async_wait(pending, site);
}

// ---- Matrix fragments ---------------------------------------------------------------------------------------------
CUFLASH_DEVICE void load_matrix_x4(u32 (&fragment)[4], u32 address, Site site = Site::here()) {
  ::emulator::load_matrix(fragment, address, site);
}
CUFLASH_DEVICE void load_matrix_x4_transposed(u32 (&fragment)[4], u32 address, Site site = Site::here()) {
  ::emulator::load_matrix_transposed(fragment, address, site);
}
CUFLASH_DEVICE void mma_m16n8k16(Float16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site = Site::here()) {
  ::emulator::multiply_matrix(Element::kFloat16, d, a, b0, b1, site);
}
CUFLASH_DEVICE void mma_m16n8k16(BFloat16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site = Site::here()) {
  ::emulator::multiply_matrix(Element::kBFloat16, d, a, b0, b1, site);
}

CUFLASH_DEVICE void mma_m16n8k8(float (&d)[4], const float (&a)[4], float b0, float b1, Site site = Site::here()) {
  ::emulator::multiply_matrix_tf32(d, a, b0, b1, site);
}
CUFLASH_DEVICE void mma_m16n8k16(double (&d)[4], const double (&a)[2][4], const double (&b)[2][2],
                                 Site site = Site::here()) {
  for (int i = 0; i < 2; ++i) ::emulator::multiply_matrix_float64(d, a[i], b[i][0], b[i][1], site);
}

// ---- Arithmetic ---------------------------------------------------------------------------------------------------
CUFLASH_DEVICE float multiply(float x, float y) { return x * y; }
CUFLASH_DEVICE double multiply(double x, double y) { return x * y; }
CUFLASH_DEVICE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
CUFLASH_DEVICE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
CUFLASH_DEVICE float limit_magnitude(float x, float most) { return fmaxf(fminf(x, most), -most); }
CUFLASH_DEVICE float exp2_approx(float x) { return ::emulator::exp2_approx(x); }
CUFLASH_DEVICE void at_least_u16x2(u32 a, u32 b, u32& low, u32& high) {
  low = (u16)a >= (u16)b, high = a >> 16 >= b >> 16;
}
CUFLASH_DEVICE float fma_saturated(float a, float b, float c) {
  const float y = __builtin_fmaf(a, b, c);
  return y > 0.0f ? fminf(y, 1.0f) : 0.0f;
}
CUFLASH_DEVICE float reciprocal_approx(float x) { return ::emulator::reciprocal_approx(x); }
CUFLASH_DEVICE float sqrt_approx(float x) { return ::emulator::sqrt_approx(x); }
CUFLASH_DEVICE float log2_approx(float x) { return ::emulator::log2_approx(x); }
CUFLASH_DEVICE float log2_of_normal(float x) { return ::emulator::log2_approx(fabsf(x) < 0x1p-126f ? 0.0f : x); }
CUFLASH_DEVICE int floor_to_int(float x) { return ::emulator::floor_to_int(x); }
CUFLASH_DEVICE float floor_to_float(float x) { return ::emulator::floor_to_float(x); }
template <class T>
CUFLASH_DEVICE u32 pack(T type, float low, float high) {
  return ::emulator::from_float32(element_of(type), low) | (u32)::emulator::from_float32(element_of(type), high) << 16;
}
template <class T>
CUFLASH_DEVICE float to_float32(T type, u16 bits) {
  return ::emulator::to_float32(element_of(type), bits);
}
CUFLASH_DEVICE u32 to_float16x2(Float8E4M3 type, u16 two) {
  return pack(Float16{}, to_float32(type, two & 255), to_float32(type, two >> 8));
}
CUFLASH_DEVICE u32 to_float16x2(Float8E5M2, u16 two) { return (two & 255) << 8 | (u32)(two >> 8) << 24; }
template <class Float8>
CUFLASH_DEVICE void to_float16x4(Float8 type, u32 bytes, u32& low, u32& high) {
  low = to_float16x2(type, (u16)bytes), high = to_float16x2(type, (u16)(bytes >> 16));
}
CUFLASH_DEVICE u16 to_float8x2(Float8E4M3 type, float low, float high) {
  return ::emulator::from_float32(element_of(type), low) | ::emulator::from_float32(element_of(type), high) << 8;
}
CUFLASH_DEVICE u16 to_float8x2(Float8E4M3 type, u32 halves) {
  return to_float8x2(type, to_float32(Float16{}, (u16)halves), to_float32(Float16{}, (u16)(halves >> 16)));
}
CUFLASH_DEVICE int clamped_sum(int x, int y, int largest) {
  const int sum = (int)((u32)x + (u32)y), most = sum < largest ? sum : largest;
  return most > 0 ? most : 0;
}
CUFLASH_DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) {
  const u64 bytes = (u64)high << 32 | low;
  u32 chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return chosen;
}
CUFLASH_DEVICE u32 multiply_f16x2(u32 x, u32 y) {
  const auto product = [&](int shift) { return to_float32(Float16{}, x >> shift) * to_float32(Float16{}, y >> shift); };
  return pack(Float16{}, product(0), product(16));
}
CUFLASH_DEVICE float round_to_tf32(float x) { return ::emulator::round_to_tf32(x); }
CUFLASH_DEVICE u32 leading_zeros(u32 bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
CUFLASH_DEVICE u32 population_count(u32 bits) { return __builtin_popcount(bits); }
template <class To, class From>
static inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
CUFLASH_DEVICE u32 bits_of(float x) { return same_bits<u32>(x); }
CUFLASH_DEVICE u64 bits_of(double x) { return same_bits<u64>(x); }
CUFLASH_DEVICE float float_of(u32 bits) { return same_bits<float>(bits); }
CUFLASH_DEVICE double double_of(u64 bits) { return same_bits<double>(bits); }
CUFLASH_DEVICE float infinity() { return __builtin_inff(); }

// ---- Reductions in global memory ----------------------------------------------------------------------------------
CUFLASH_DEVICE void reduce_add(float* address, float value, Site site = Site::here()) {
  ::emulator::reduce_add(address, &value, 1, site);
}
CUFLASH_DEVICE void reduce_add(double* address, double value, Site site = Site::here()) {
  ::emulator::reduce_add(address, &value, 1, site);
}
CUFLASH_DEVICE void reduce_add(u64* address, u64 value, Site site = Site::here()) {
  ::emulator::reduce_add(address, value, site);
}
CUFLASH_DEVICE void reduce_max(u64* address, u64 value, Site site = Site::here()) {
  ::emulator::reduce_max(address, value, site);
}
CUFLASH_DEVICE void reduce_add_x4(float* address, const float (&value)[4], Site site = Site::here()) {
  ::emulator::reduce_add(address, value, 4, site);
}

template <u32 cycles>
CUFLASH_DEVICE void pause() {}

// ---- Counts and turns of blocks -----------------------------------------------------------------------------------
CUFLASH_DEVICE void wait_for_count(const u32* counter, u32 count, Site site = Site::here()) {
  ::emulator::wait_for_count(counter, count, site);
}
CUFLASH_DEVICE void add_to_count(u32* counter, Site site = Site::here()) { ::emulator::add_to_count(counter, site); }
CUFLASH_DEVICE void wait_for_turn(const u32* turns, u32 turn, Site site = Site::here()) {
  ::emulator::wait_for_turn(turns, turn, site);
}
CUFLASH_DEVICE void end_turn(u32* turns, Site site = Site::here()) { ::emulator::end_turn(turns, site); }

// ---- Results that blocks leave for one another ----------------------------------------------------------------------
template <class T>
CUFLASH_DEVICE void store_for_blocks_x2(T* address, const T (&value)[2], Site site = Site::here()) {
  ::emulator::store_for_blocks(address, value, sizeof value, site);
}
template <class T>
CUFLASH_DEVICE void load_of_blocks_x2(const T* address, T (&value)[2], Site site = Site::here()) {
  ::emulator::load_of_blocks(address, value, sizeof value, site);
}
CUFLASH_DEVICE void load_of_blocks_x4(const float* address, float (&value)[4], Site site = Site::here()) {
  ::emulator::load_of_blocks(address, value, sizeof value, site);
}
CUFLASH_DEVICE void load_of_blocks_x4(const double* address, double (&value)[4], Site site = Site::here()) {
  for (int i = 0; i < 4; i += 2) ::emulator::load_of_blocks(address + i, value + i, 2 * sizeof(double), site);
}
CUFLASH_DEVICE u64 load_arrivals(const u64* counter, Site site = Site::here()) {
  return ::emulator::load_arrivals(counter, site);
}
CUFLASH_DEVICE void replace_arrivals(u64* counter, u64 expected, u64 value, Site site = Site::here()) {
  ::emulator::replace_arrivals(counter, expected, value, site);
}
CUFLASH_DEVICE u64 count_arrival(u64* counter, Site site = Site::here()) {
  return ::emulator::count_arrival(counter, site);
}

}  // namespace ptx

#include "ptx_sm90_emulated.h"
