// Functions of vectors that attention needs.
#pragma once

#include "operations.h"

#if defined(USES_AVX512)
#include "avx512.h"
#elif defined(USES_AVX2)
#include "avx2.h"
#elif defined(USES_NEON)
#include "neon.h"
#elif defined(__SSE2__)
#include "sse2.h"
#endif

namespace {

template <class T> inline Vector<T> size_of_each(Vector<T> x) {
    return (Vector<T>)((Integers<T>)x & ~(Integers<T>)splat(T(-0.0)));
}

// The sum of each of COUNT vectors, as many as there are lanes: of the first in lane 0, and so on.
template <class T, int COUNT = LANES<T>> ALWAYS_INLINE Vector<T> sums_of_lanes(const Vector<T> *x) {
    if constexpr (COUNT == 1) {
        return x[0];
    } else {
        const Vector<T> low = sums_of_lanes<T, COUNT / 2>(x), high = sums_of_lanes<T, COUNT / 2>(x + COUNT / 2);
        return sums_of_neighbours<T>(low, high);
    }
}

// 0, 1, 2, ...
template <class T> inline Vector<T> iota() {
    Vector<T> x;
#pragma GCC unroll 16
    for (int i = 0; i < LANES<T>; ++i) x[i] = T(i);
    return x;
}

// 2^n for an integer n, where `rounded` is n + Vectors::ROUNDER. The shift leaves n alone, because the low bits of
// ROUNDER are zeros. The sum of bits may wrap, as that of signed integers must not.
template <class T> inline Vector<T> power_of_two(Vector<T> rounded) {
    using Unsigned = typename Vectors<T>::Unsigned;
    return (Vector<T>)(((Unsigned)rounded << Vectors<T>::MANTISSA) + (Unsigned)splat(T(1)));
}

// 2^x of numbers from -1/2 to 1/2.
template <class T> inline Vector<T> polynomial_exp2(Vector<T> rest) {
    constexpr int DEGREE = Vectors<T>::DEGREE;
    if constexpr (COPIES_SUMS) {
        // Each constant that is added costs a copy: only every other one is, and the two that count most, which come
        // last because their roundings do.
        constexpr auto &C = Vectors<T>::EXP2_BY_PAIRS;
        const Vector<T> square = rest * rest;
        auto pair = [&](int i) { return add_product(splat(C[i]), rest, splat(C[i + 1])); };
        constexpr int LAST = (DEGREE - 1) / 2 * 2;
        Vector<T> p = pair(LAST);
        if constexpr (LAST + 2 == DEGREE) p = add_product(p, square, splat(C[DEGREE]));
#pragma GCC unroll 16
        for (int i = LAST - 2; i >= 2; i -= 2) p = add_product(pair(i), square, p);
        return add_product(splat(C[0]), rest, add_product(splat(C[1]), rest, p));
    }
    Vector<T> p = splat(Vectors<T>::EXP2[DEGREE]);
#pragma GCC unroll 16
    for (int i = DEGREE - 1; i >= 0; --i) p = p * rest + splat(Vectors<T>::EXP2[i]);
    return p;
}

// 2^n for an integer n, where `rounded` is n + EXPONENT_ROUNDER: the bias of exponents is added with the rounding.
template <class T> constexpr T EXPONENT_ROUNDER = Vectors<T>::ROUNDER + T(Vectors<T>::HIGHEST - 1);
template <class T> inline Vector<T> power_of_two_biased(Vector<T> rounded) {
    return (Vector<T>)((Integers<T>)rounded << Vectors<T>::MANTISSA);
}

// 2^(x factor) to 1.2 units in the last place, or one where the factor is 1, and 0 below LOWEST: subnormal weights
// would cost a hundred times what others do, in products too. The exponent, x times the factor, is not rounded: a unit
// in its last place is many of the weight's. The power of two is a factor, and is not added to the exponent, so that
// NaN stays NaN.
template <class T> inline Vector<T> exp2(Vector<T> x, Vector<T> factor) {
    const Vector<T> number = x * factor;
    if constexpr (HAS_SCALING) {
        const Vector<T> rounded = nearest_integer<T>(number);
        return scale_ordinary<T>(polynomial_exp2<T>(add_product(-rounded, x, factor)), rounded, number);
    } else {
        const Vector<T> rounder = splat(EXPONENT_ROUNDER<T>);
        const Vector<T> rounded = at_most<T>(number, Vectors<T>::HIGHEST) + rounder;
        const Vector<T> rest = add_product(rounder - rounded, x, factor);
        return unless_below<T>(polynomial_exp2<T>(rest) * power_of_two_biased<T>(rounded), number,
                               splat(Vectors<T>::LOWEST));
    }
}
template <class T> inline Vector<T> exp2(Vector<T> x) { return exp2<T>(x, splat(T(1))); }
// 2^(factor * x) of many x, none of which is so large that the power overflows; factor is positive. It is 0 where
// factor * x is below LOWEST.
template <class T> struct Exp2OfScaled {
    Vector<T> factor, limit;
    explicit Exp2OfScaled(T by)
        : factor(splat(by)), limit(splat(T(larger_of(Vectors<T>::LOWEST / by, -std::numeric_limits<T>::max())))) {}
    static T larger_of(T x, T y) { return x > y ? x : y; }
    Vector<T> operator()(Vector<T> x) const {
        if constexpr (HAS_SCALING || !HAS_FMA) return exp2<T>(x, factor);
        // The product is never rounded: two fused instructions have its integer and the rest.
        const Vector<T> rounder = splat(EXPONENT_ROUNDER<T>), rounded = add_product(rounder, x, factor);
        const Vector<T> rest = add_product(rounder - rounded, x, factor);
        return unless_below<T>(polynomial_exp2<T>(rest) * power_of_two_biased<T>(rounded), x, limit);
    }
};

// The same by a table of 2^(i / 32), with fewer multiplications than by a polynomial, to 1.8 units in the last place.
// It is 0 where the nearest multiple of 1 / 32 is below LOWEST. All numbers are read from memory, so that loops of
// products keep their registers.
struct Exp2ByTableOf32 {
    float factor, rounder = 393216;  // 1.5 * 2^18: its sum with x has the nearest multiple of 1 / 32 in its low bits
    float series[2] = {0.6931573f, 0.24022651f};
    alignas(VECTOR_BYTES) float powers[32] = {
        1.0f,        1.0218972f,  1.04427373f, 1.06714046f, 1.09050775f, 1.1143868f,  1.13878858f, 1.1637249f,
        1.18920708f, 1.21524739f, 1.24185777f, 1.26905096f, 1.29683959f, 1.32523668f, 1.35425556f, 1.38390994f,
        1.41421354f, 1.44518077f, 1.47682619f, 1.50916445f, 1.54221082f, 1.5759809f,  1.61049032f, 1.64575553f,
        1.68179286f, 1.71861935f, 1.75625217f, 1.79470909f, 1.8340081f,  1.87416768f, 1.91520655f, 1.95714414f};

    explicit Exp2ByTableOf32(float by) : factor(by) {}
    Vector<float> operator()(Vector<float> x) const {
        const Vector<float> rounded = add_product(splat(rounder), x, splat(factor)), nearest = rounded - splat(rounder);
        const Vector<float> rest = add_product(-nearest, x, splat(factor));
        const Vector<float> power = look_up_32<float>(powers, (Integers<float>)rounded);
        const Vector<float> less = rest * add_product(splat(series[0]), splat(series[1]), rest);
        return scale_ordinary<float>(add_product(power, power, less), nearest, nearest);
    }
};

// The same by a table of 2^(i / 8), to 1.25 units in the last place, and 0 where factor * x is below LOWEST. An eighth
// of an exponent is 2^20 in the bits of a float. The table has the bits of 2^(i / 8) without i of these, so that all
// eighths of the exponent are added to it, without taking them apart.
struct Exp2ByTableOf8 {
    float factor, limit;
    float rounder = 1572864;  // 1.5 * 2^20: its sum with x has the nearest multiple of 1 / 8 in its low bits
    float series[3] = {0.69314724f, 0.24025764f, 0.055496223f};
    int32_t powers[8] = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                         0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};

    explicit Exp2ByTableOf8(float by) : factor(by), limit(Exp2OfScaled<float>(by).limit[0]) {}
    Vector<float> operator()(Vector<float> x) const {
        const Vector<float> rounded = add_product(splat(rounder), x, splat(factor));
        const Vector<float> rest = add_product(splat(rounder) - rounded, x, splat(factor));
        const Integers<float> eighths = (Integers<float>)rounded;
        const Vector<float> power = (Vector<float>)(look_up_8<float>(powers, eighths) + (eighths << 20));
        const Vector<float> p = add_product(splat(series[1]), rest, splat(series[2]));
        const Vector<float> less = rest * add_product(splat(series[0]), rest, p);
        return unless_below<float>(add_product(power, power, less), x, splat(limit));
    }
};

// How weights of the forward pass are computed.
template <class T> constexpr bool HAS_TABLE_EXP2 = TABLE_LENGTH > 0 && std::is_same_v<T, float>;
using Exp2ByTable = std::conditional_t<TABLE_LENGTH == 32, Exp2ByTableOf32, Exp2ByTableOf8>;
template <class T> using Exp2OfRow = std::conditional_t<HAS_TABLE_EXP2<T>, Exp2ByTable, Exp2OfScaled<T>>;

// 2^(x - 1/2) to 2.5 units in the last place, and 0 below LOWEST, for weights that are rounded to bfloat16. The half
// makes the nearest integer of the exponent the integer below x, which the last instruction finds by itself.
inline Vector<float> exp2_of_half_less(Vector<float> x) {
    constexpr float SERIES[] = {0.70710671f, 0.49013323f, 0.16981424f, 0.03947517f, 0.006356423f, 0.0013276472f};
    const Vector<float> rest = above_integer<float>(x);
    Vector<float> p = splat(SERIES[5]);
#pragma GCC unroll 16
    for (int i = 4; i >= 0; --i) p = p * rest + splat(SERIES[i]);
    return scale_ordinary<float>(p, x, x);
}

// tanh(x) = t / (t + 1), t = (exp(2 x) - 1) / 2, is exact to a few units in the last place near zero, too. Several
// vectors are computed at once, step by step, because one alone would wait for each of its own steps.
template <class T, int COUNT> inline void tanh_of_each(Vector<T> (&x)[COUNT]) {
    const Integers<T> sign = (Integers<T>)splat(T(-0.0));
    const Vector<T> half = splat(T(0.5)), half_of_ln2 = splat(T(0.34657359027997264));
    Vector<T> size[COUNT], rounded[COUNT], r[COUNT], p[COUNT], t[COUNT];
    auto for_each = [](auto step) {
#pragma GCC unroll 4
        for (int u = 0; u < COUNT; ++u) step(u);
    };
    for_each([&](int u) { size[u] = at_most<T>(size_of_each<T>(x[u]), Vectors<T>::TANH_IS_ONE); });
    for_each([&](int u) { rounded[u] = size[u] * splat(T(2 * 1.4426950408889634)) + splat(Vectors<T>::ROUNDER); });
    // An error of the product matters the less the larger it is, for tanh has a small slope there.
    for_each([&](int u) { r[u] = size[u] - (rounded[u] - splat(Vectors<T>::ROUNDER)) * half_of_ln2; });
    for_each([&](int u) { p[u] = splat(Vectors<T>::EXPM1[Vectors<T>::EXPM1_TERMS - 1]); });
#pragma GCC unroll 16
    for (int i = Vectors<T>::EXPM1_TERMS - 2; i >= 0; --i)
        for_each([&](int u) { p[u] = p[u] * r[u] + splat(Vectors<T>::EXPM1[i]); });
    for_each([&](int u) { p[u] = r[u] + r[u] * r[u] * p[u]; });
    for_each([&](int u) {
        const Vector<T> power = power_of_two<T>(rounded[u]);
        t[u] = power * p[u] + (power * half - half);
    });
    for_each([&](int u) { t[u] = quotient<T>(t[u], t[u] + splat(T(1))); });
    for_each([&](int u) { x[u] = (Vector<T>)((Integers<T>)t[u] | ((Integers<T>)x[u] & sign)); });
}

// tanh(x) to 5 units in the last place, for scores whose weights are rounded to bfloat16. Up to 9, from where on it is
// 1, tanh(x) / x is a quotient of polynomials of x^2 to 2.1e-8 of its size.
template <int COUNT> inline void rough_tanh_of_each(Vector<float> (&x)[COUNT]) {
    constexpr float OVER[] = {1.0f, 0.13381026f, 0.0034955881f, 2.0609083e-5f, 1.3354662e-8f};
    constexpr float UNDER[] = {1.0f, 0.46714341f, 0.025876982f, 0.00032856349f, 7.7765585e-7f};
    Vector<float> square[COUNT], over[COUNT], under[COUNT];
    auto for_each = [](auto step) {
#pragma GCC unroll 4
        for (int u = 0; u < COUNT; ++u) step(u);
    };
    for_each([&](int u) {
        x[u] = larger<float>(splat(-9.0f), at_most<float>(x[u], 9));
        square[u] = x[u] * x[u];
        over[u] = splat(OVER[4]);
        under[u] = splat(UNDER[4]);
    });
#pragma GCC unroll 4
    for (int i = 3; i >= 0; --i) {
        for_each([&](int u) { over[u] = over[u] * square[u] + splat(OVER[i]); });
        for_each([&](int u) { under[u] = under[u] * square[u] + splat(UNDER[i]); });
    }
    for_each([&](int u) { x[u] = quotient<float>(x[u] * over[u], under[u]); });
}

// log(x) of positive normal numbers, to about one unit in the last place. With x = 2^n m, m from 1/sqrt(2) to sqrt(2),
// it is n log(2) + 2 artanh(y), y = (m - 1) / (m + 1).
template <class T> inline Vector<T> log(Vector<T> x) {
    constexpr T ROOT = T(0.7071067811865476);
    constexpr int MANTISSA = Vectors<T>::MANTISSA;
    using Unsigned = typename Vectors<T>::Unsigned;
    const Integers<T> exponents = (Integers<T>)((Unsigned)x - (Unsigned)splat(ROOT)) >> MANTISSA;
    const Vector<T> m = (Vector<T>)((Unsigned)x - ((Unsigned)exponents << MANTISSA));
    const Vector<T> n = __builtin_convertvector(exponents, Vector<T>);
    const Vector<T> one = splat(T(1)), less = m - one, y = less / (m + one), square = y * y;
    Vector<T> series = splat(T(2.0 / (2 * Vectors<T>::LOG_TERMS + 1)));
#pragma GCC unroll 16
    for (int i = Vectors<T>::LOG_TERMS - 1; i > 0; --i) series = series * square + splat(T(2.0 / (2 * i + 1)));
    // 2 y = less - less^2 / 2 + ..., of which the first terms are exact: 2 y = less - y less.
    const Vector<T> rest = y * (square * series - less) + n * splat(Vectors<T>::LN2_LOW);
    return n * splat(Vectors<T>::LN2_HIGH) + (less + rest) + (x - x);  // NaN stays NaN
}

// exp(x) and log(x) of one number. Those of the C library may be compiled for the first x86-64 processors, and wait for
// long where wide registers were used before.
NOINLINE double exp_of(double x) { return exp2<double>(splat(x * 1.4426950408889634))[0]; }
template <class T> NOINLINE T log_of(T x) {
    const bool is_normal = x >= std::numeric_limits<T>::min() && x <= std::numeric_limits<T>::max();
    return is_normal ? log<T>(splat(x))[0] : std::log(x);
}

// Logarithms of as many numbers as a vector has lanes.
template <class T> inline void logs_of(const T *x, T *logs) {
    bool are_normal = true;
    for (int i = 0; i < LANES<T>; ++i)
        are_normal &= x[i] >= std::numeric_limits<T>::min() && x[i] <= std::numeric_limits<T>::max();
    if (are_normal) return store(logs, log<T>(load(x)));
    for (int i = 0; i < LANES<T>; ++i) logs[i] = log_of(x[i]);
}

// out[column][row] = in[row][column], in whole squares: zeros follow the last row. The number of columns is a multiple
// of the lanes of a vector.
template <class T>
NOINLINE void transpose(const T *in, int64_t stride, int64_t num_rows, int64_t num_columns, T *out,
                        int64_t out_stride) {
    constexpr int64_t N = LANES<T>;
    for (int64_t i = 0; i < num_rows; i += N)
        for (int64_t j = 0; j < num_columns; j += N) {
            const T *from = in + i * stride + j;
            T *to = out + j * out_stride + i;
            if (num_rows - i >= N) {
                transpose_square(from, stride, to, out_stride, N);
            } else {
                transpose_square(from, stride, to, out_stride, num_rows - i);
            }
        }
}

}  // namespace
