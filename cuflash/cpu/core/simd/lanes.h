// Vectors of the widest registers that this file is compiled for, by the compiler's flags, and what its instruction set
// has. Here, and in the other files of this folder, are all intrinsics, and all that depends on the instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// For functions that are called from many places, or seldom: one copy is enough.
#define NOINLINE __attribute__((noinline))
// For what loops keep in registers. And for functions of prefetches alone: GCC takes these for functions without
// effect, and drops calls that it does not inline.
#define ALWAYS_INLINE __attribute__((always_inline)) inline

namespace {

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define USES_AVX512 1
constexpr int VECTOR_BYTES = 64, NUM_REGISTERS = 32;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define USES_AVX2 1
constexpr int VECTOR_BYTES = 32, NUM_REGISTERS = 16;
#elif defined(__aarch64__)
#define USES_NEON 1
constexpr int VECTOR_BYTES = 16, NUM_REGISTERS = 32;
#else
constexpr int VECTOR_BYTES = 16, NUM_REGISTERS = 16;
#endif

// Instructions for a product and a sum that are rounded once, and for conversions of float16.
#if defined(USES_AVX512) || defined(USES_AVX2) || defined(USES_NEON)
constexpr bool HAS_FMA = true, HAS_FLOAT16 = true;
#else
constexpr bool HAS_FMA = false, HAS_FLOAT16 = false;
#endif
// Instructions for products with one lane of a vector, and for conversions to float16; and whether a fused product can
// only overwrite its sum, so that a sum that is needed again, like a constant, is copied first.
#if defined(USES_NEON)
constexpr bool HAS_LANE_PRODUCTS = true, HAS_FLOAT16_STORES = true, COPIES_SUMS = true;
#else
constexpr bool HAS_LANE_PRODUCTS = false, HAS_FLOAT16_STORES = false, COPIES_SUMS = false;
#endif
// Instructions for rounding to integers and multiplying by a power of two; and how many numbers of 4 bytes the table
// has from which an instruction takes one for each lane.
#if defined(USES_AVX512)
constexpr bool HAS_SCALING = true;
constexpr int TABLE_LENGTH = 32;
#else
constexpr bool HAS_SCALING = false;
constexpr int TABLE_LENGTH = VECTOR_BYTES == 32 ? 8 : 0;
#endif

// Products of two neighbouring numbers of bfloat16 at a time, and tile registers, or models of them.
#if defined(__AVX512BF16__) || (defined(MODEL_OF_TILES) && defined(ONLY_BFLOAT16))
constexpr bool HAS_BF16X2 = true;
#else
constexpr bool HAS_BF16X2 = false;
#endif
#if defined(__AMX_BF16__) || defined(MODEL_OF_TILES)
constexpr bool HAS_TILES = HAS_BF16X2;
#else
constexpr bool HAS_TILES = false;
#endif
// Whether calls of float16 come here: kernels for bfloat16 alone serve them where there are tile registers.
#if defined(ONLY_BFLOAT16)
constexpr bool SERVES_FLOAT16 = HAS_TILES;
#else
constexpr bool SERVES_FLOAT16 = true;
#endif
template <class T> constexpr bool MAY_USE_BF16X2 = HAS_BF16X2 && sizeof(T) == 4;
template <class T> constexpr bool MAY_USE_TILES = HAS_TILES && sizeof(T) == 4;

inline int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
inline int64_t larger(int64_t x, int64_t y) { return x > y ? x : y; }
inline int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }
inline int64_t round_up(int64_t x, int64_t y) { return ceil_div(x, y) * y; }

// Calls `run` with 0, 1, ..., COUNT - 1, as types.
template <int COUNT, class F> inline void for_each_of(F run) {
    if constexpr (COUNT > 0) {
        for_each_of<COUNT - 1>(run);
        run(std::integral_constant<int, COUNT - 1>());
    }
}

template <class T> struct Vectors;

template <> struct Vectors<float> {
    typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
    typedef float Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
    typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES)));
    typedef uint32_t Unsigned __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: its sum with x has the nearest integer in its low bits
    static constexpr int MANTISSA = 23;
    static constexpr float LOWEST = -100, HIGHEST = 128;  // see exp2
    static constexpr int DEGREE = 6;
    static constexpr float EXP2[DEGREE + 1] = {1.0f,         0.6931472f,    0.2402265f,    0.05550327f,
                                               0.009618057f, 0.0013400428f, 0.00015461445f};
    // The same for the order of operations of COPIES_SUMS.
    static constexpr float EXP2_BY_PAIRS[DEGREE + 1] = {1.0f,           0.693147182f,   0.240226507f,   0.0555033721f,
                                                        0.00961804762f, 0.00133997493f, 0.000154529509f};
    static constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    // (exp(2 x) - 1 - 2 x) / (2 x^2), for x of up to log(2) / 4.
    static constexpr int EXPM1_TERMS = 5;
    static constexpr float EXPM1[EXPM1_TERMS] = {1.0f, 0.66666305f, 0.33333242f, 0.13381173f, 0.044564f};
    static constexpr float TANH_IS_ONE = 10;
    static constexpr int LOG_TERMS = 5;
};

template <> struct Vectors<double> {
    typedef double Vector __attribute__((vector_size(VECTOR_BYTES)));
    typedef double Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
    typedef int64_t Integers __attribute__((vector_size(VECTOR_BYTES)));
    typedef uint64_t Unsigned __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr double ROUNDER = 6755399441055744.0;  // 1.5 * 2^52
    static constexpr int MANTISSA = 52;
    static constexpr double LOWEST = -960, HIGHEST = 1024;
    static constexpr int DEGREE = 11;
    static constexpr double EXP2[DEGREE + 1] = {1.0,
                                                0.6931471805599453,
                                                0.24022650695910158,
                                                0.055504108664821604,
                                                0.009618129107587314,
                                                0.0013333558146410788,
                                                0.00015403530463679096,
                                                1.5252733837988064e-05,
                                                1.3215432551928214e-06,
                                                1.0178058390428893e-07,
                                                7.074192209639015e-09,
                                                4.4556433403988256e-10};
    static constexpr auto &EXP2_BY_PAIRS = EXP2;
    static constexpr double LN2_HIGH = 0.693145751953125, LN2_LOW = 1.42860682030941723212e-6;
    static constexpr int EXPM1_TERMS = 10;
    static constexpr double EXPM1[EXPM1_TERMS] = {1.0,
                                                  0.6666666666666667,
                                                  0.3333333333329906,
                                                  0.13333333333328062,
                                                  0.04444444453557466,
                                                  0.012698412712429797,
                                                  0.00317459469540713,
                                                  0.0007054660678887858,
                                                  0.00014141543214608152,
                                                  2.5702883845831676e-05};
    static constexpr double TANH_IS_ONE = 20;
    static constexpr int LOG_TERMS = 11;
};

template <class T> using Vector = typename Vectors<T>::Vector;
template <class T> using Integers = typename Vectors<T>::Integers;
template <class T> constexpr int LANES = VECTOR_BYTES / int(sizeof(T));

template <class T> inline Vector<T> load(const T *p) { return *(const typename Vectors<T>::Unaligned *)p; }
template <class T> inline void store(T *p, Vector<T> x) { *(typename Vectors<T>::Unaligned *)p = x; }
template <class T> inline Vector<T> splat(T x) { return x - Vector<T>{}; }  // minus zero stays that

// Picks lanes by number; the lanes of y are counted after those of x.
template <class T> inline Vector<T> pick(Vector<T> x, Vector<T> y, Integers<T> from) {
#if defined(__clang__)
    Vector<T> picked;
    for (int i = 0; i < LANES<T>; ++i) picked[i] = from[i] < LANES<T> ? x[from[i]] : y[from[i] - LANES<T>];
    return picked;
#else
    return __builtin_shuffle(x, y, from);
#endif
}

}  // namespace
