// Operations as every instruction set can do them. Files of instruction sets specialise those that they have
// instructions for.
#pragma once

#include "lanes.h"

namespace {

typedef uint16_t Bits __attribute__((may_alias));  // of a half-precision number
// Half-precision numbers, which are converted in registers; bf16x2 are two neighbours, multiplied as one.
struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
struct Bf16x2 {
    uint32_t bits;
};

// ---- arithmetic -----------------------------------------------------------------------------------------------------

template <class T> inline Vector<T> larger(Vector<T> x, Vector<T> y) { return x > y ? x : y; }

// The smaller of x and a limit; NaN stays NaN.
template <class T> inline Vector<T> at_most(Vector<T> x, T limit) { return x > splat(limit) ? splat(limit) : x; }

// p where x is not below the limit, NaN included, and 0 elsewhere, whatever p is there.
template <class T> inline Vector<T> unless_below(Vector<T> p, Vector<T> x, Vector<T> limit) {
    return x < limit ? Vector<T>{} : p;
}

// sum + x y, rounded once where there is an instruction for it. Compilers fuse most products and sums by themselves,
// but GCC 13 does not in all blocks of a product that has an odd number of terms: the bits of a row would depend on how
// many others it is computed with.
template <class V> inline V add_product(V sum, V x, V y) { return sum + x * y; }

// The same with one lane of y, with HAS_LANE_PRODUCTS.
template <int LANE, class V> V add_product_by_lane(V sum, V x, V y);

// x / y of ordinary numbers, to about half a unit in the last place.
template <class T> inline Vector<T> quotient(Vector<T> x, Vector<T> y) { return x / y; }

// With HAS_SCALING.
template <class T> Vector<T> nearest_integer(Vector<T> x);

// What rounding down takes from x, 0 from infinities; and p 2^n, n being rounded down, where x is not below LOWEST, and
// 0 elsewhere.
template <class T> inline Vector<T> above_integer(Vector<T> x) {
    for (int i = 0; i < LANES<T>; ++i) x[i] = std::isinf(x[i]) ? T(0) : x[i] - std::floor(x[i]);
    return x;
}
template <class T> inline Vector<T> scale_ordinary(Vector<T> p, Vector<T> n, Vector<T> x) {
    for (int i = 0; i < LANES<T>; ++i) p[i] = x[i] < Vectors<T>::LOWEST ? T(0) : p[i] * std::exp2(std::floor(n[i]));
    return p;
}

// Of a table of 32 numbers, or of 8 integers, those whose indices are the low bits of lanes.
template <class T> inline Vector<T> look_up_32(const T *table, Integers<T> indices) {
    Vector<T> x;
    for (int i = 0; i < LANES<T>; ++i) x[i] = table[indices[i] & 31];
    return x;
}
template <class T> inline Integers<T> look_up_8(const int32_t *table, Integers<T> indices) {
    for (int i = 0; i < LANES<T>; ++i) indices[i] = table[indices[i] & 7];
    return indices;
}

// ---- lanes ----------------------------------------------------------------------------------------------------------

// Folds a vector in halves, so that compilers need no loop over lanes.
template <class T, int N, class F> inline T fold_lanes(const T *x, F combine) {
    if constexpr (N == 1) {
        return x[0];
    } else {
        typedef T Half __attribute__((vector_size(sizeof(T) * (N / 2))));
        Half low, high;
        memcpy(&low, x, sizeof low);
        memcpy(&high, x + N / 2, sizeof high);
        Half folded = combine(low, high);
        T lanes[N / 2];
        memcpy(lanes, &folded, sizeof folded);
        return fold_lanes<T, N / 2>(lanes, combine);
    }
}

template <class T> inline T sum_of_lanes(Vector<T> x) {
    T lanes[LANES<T>];
    memcpy(lanes, &x, sizeof x);
    return fold_lanes<T, LANES<T>>(lanes, [](auto a, auto b) { return a + b; });
}

template <class T> inline T largest_lane(Vector<T> x) {
    T lanes[LANES<T>];
    memcpy(lanes, &x, sizeof x);
    return fold_lanes<T, LANES<T>>(lanes, [](auto a, auto b) { return a > b ? a : b; });
}

// Whether a number is above the limit; NaN is not.
template <class T> inline bool any_above(Vector<T> x, T limit) { return largest_lane<T>(x) > limit; }

// The sums of lanes 0 and 1, 2 and 3, ... of x, and after them of y.
template <class T> inline Vector<T> sums_of_neighbours(Vector<T> x, Vector<T> y) {
    Integers<T> even, odd;
#pragma GCC unroll 16
    for (int i = 0; i < LANES<T>; ++i) {
        even[i] = 2 * i;
        odd[i] = 2 * i + 1;
    }
    return pick<T>(x, y, even) + pick<T>(x, y, odd);
}

// Lanes of ones or zeros, as the bytes from `bytes` on are.
template <class T> inline Integers<T> mask_of_bytes(const unsigned char *bytes) {
    Integers<T> mask;
    for (int i = 0; i < LANES<T>; ++i) mask[i] = int8_t(bytes[i]);
    return mask;
}

// out[column][row] = in[row][column], for a square of as many numbers a side as there are lanes, whose rows from
// `count` on are taken as zeros. It takes log2(N) perfect shuffles.
template <class T>
inline void transpose_square(const T *in, int64_t stride, T *out, int64_t out_stride, int64_t count) {
    constexpr int N = LANES<T>;
    Vector<T> x[N], y[N];
    Integers<T> low, high;
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
        low[i] = i / 2 + i % 2 * N;
        high[i] = low[i] + N / 2;
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = i < count ? load(in + i * stride) : Vector<T>{};
#pragma GCC unroll 4
    for (int step = N; step > 1; step /= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < N / 2; ++i) {
            y[2 * i] = pick<T>(x[i], x[i + N / 2], low);
            y[2 * i + 1] = pick<T>(x[i], x[i + N / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) x[i] = y[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) store(out + i * out_stride, x[i]);
}

// ---- integers, for dropout ------------------------------------------------------------------------------------------

typedef uint64_t Words __attribute__((vector_size(VECTOR_BYTES)));  // of 32 bits, in the low halves of lanes
typedef uint16_t Draws __attribute__((vector_size(VECTOR_BYTES)));  // of 16 bits, one for each weight
typedef int8_t KeptBytes __attribute__((vector_size(VECTOR_BYTES / 2)));

// Multiplies the low halves of lanes; the high halves may hold anything.
template <class W> inline W multiply_words(W x, uint64_t y) { return (x & (W{} + UINT64_C(0xFFFFFFFF))) * (W{} + y); }

// Bytes of ones where a draw is above the limit, of zeros elsewhere.
template <class D> inline KeptBytes bytes_above(D draws, uint16_t limit) {
    return __builtin_convertvector(draws > D{} + limit, KeptBytes);
}

// ---- half precision -------------------------------------------------------------------------------------------------

inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline float from_bfloat16(uint16_t x) { return from_bits(uint32_t(x) << 16); }

inline uint16_t to_bfloat16(float x) {
    uint32_t bits = to_bits(x);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? bits >> 16 | 0x40 : rounded);
}

// A multiplication moves the exponent, because it also turns subnormal numbers into normal ones.
inline float from_float16(uint16_t x) {
    uint32_t size = uint32_t(x & 0x7FFF) << 13, sign = uint32_t(x & 0x8000) << 16;
    uint32_t bits = to_bits(from_bits(size) * 0x1p112f);
    bits = size >= 0x0F800000 ? size | 0x7F800000 : bits;
    return from_bits(bits | sign);
}

// Rounds to nearest even: ordinary numbers by integer arithmetic, those that become subnormal by an addition.
inline uint16_t to_float16(float x) {
    uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
    uint32_t ordinary = (size + 0xFFF + (size >> 13 & 1) - 0x38000000) >> 13;
    uint32_t subnormal = to_bits(from_bits(size) + 0.5f) - 0x3F000000;
    uint32_t result = size < 0x38800000 ? subnormal : ordinary;
    result = size >= 0x477FF000 ? 0x7C00 : result;  // from the middle between the largest number and infinity
    result = size > 0x7F800000 ? 0x7E00 : result;
    return uint16_t(result | sign);
}

template <class T> inline Vector<T> load_as(const T *p) { return load(p); }

// As many numbers of 16 bits as there are floats in a vector; each in the low half of a lane; and as floats.
typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES / 2)));
inline Halves load_halves(const Bits *p) {
    typedef uint16_t Anywhere __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
    return *(const Anywhere *)p;
}
template <class T> inline Integers<T> widen(Halves bits) {
    typedef uint32_t Unsigned __attribute__((vector_size(VECTOR_BYTES)));
    return (Integers<T>)__builtin_convertvector(bits, Unsigned);
}
template <class T> inline Vector<T> floats_of(Halves bits) { return (Vector<T>)(widen<T>(bits) << 16); }

template <class T> inline Vector<T> load_as(const Bfloat16 *p) { return floats_of<T>(load_halves((const Bits *)p)); }

template <class T> inline Vector<T> load_as(const Float16 *p) {
    T x[LANES<T>];
    for (int i = 0; i < LANES<T>; ++i) x[i] = from_float16(p[i].bits);
    return load(x);
}

// With HAS_FLOAT16_STORES.
template <class T> void store_as(Float16 *p, Vector<T> x);

template <class T> inline Vector<T> load_as(const Bf16x2 *p) {
    typedef T Anywhere __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
    return *(const Anywhere *)p;
}

// Whether none of these float16 is infinite or NaN.
constexpr uint16_t INFINITE_FLOAT16 = 0x7C00;
template <class B> inline bool are_finite(const B *bits, int64_t count) {
    bool found = false;
    for (int64_t i = 0; i < count; ++i) found |= (bits[i] & INFINITE_FLOAT16) == INFINITE_FLOAT16;
    return !found;
}

// ---- bf16x2, with HAS_BF16X2 ----------------------------------------------------------------------------------------

// sum + both products of x and y.
template <class T> inline Vector<T> add_bf16x2_product(Vector<T> sum, Vector<T> x, Vector<T> y) {
    auto high = [](Vector<T> x) { return (Vector<T>)((Integers<T>)x & int32_t(0xFFFF0000)); };
    auto low = [](Vector<T> x) { return (Vector<T>)((Integers<T>)x << 16); };
    return add_product(add_product(sum, low(x), low(y)), high(x), high(y));
}

// x rounded to bfloat16, and x with y after it.
template <class T> inline Halves round_to_bfloat16(Vector<T> x) {
    Halves bits;
    for (int i = 0; i < LANES<T>; ++i) bits[i] = to_bfloat16(x[i]);
    return bits;
}
template <class T> inline Vector<T> round_to_bfloat16(Vector<T> x, Vector<T> y) {
    const Halves halves[2] = {round_to_bfloat16<T>(x), round_to_bfloat16<T>(y)};
    Vector<T> both;
    memcpy(&both, halves, sizeof both);
    return both;
}

// The first half of the numbers of 16 bits of x, each before one of the second half.
template <class T> inline Vector<T> interleave_halves(Vector<T> x) {
    Bits in[2 * LANES<T>], out[2 * LANES<T>];
    memcpy((void *)in, &x, sizeof x);
    for (int i = 0; i < 2 * LANES<T>; ++i) out[i] = in[i / 2 + i % 2 * LANES<T>];
    return load((const T *)out);
}

}  // namespace
