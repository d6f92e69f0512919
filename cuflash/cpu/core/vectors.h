// Vectors of the widest size that this file is compiled for, and the functions of vectors that attention needs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, NUM_REGISTERS = 32;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, NUM_REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16, NUM_REGISTERS = 32;
#else
constexpr int VECTOR_BYTES = 16, NUM_REGISTERS = 16;
#endif

template <class T> struct Vectors;

template <> struct Vectors<float> {
    typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
    typedef float Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
    typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES)));
    typedef uint32_t Bits __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: its sum with x has the nearest integer in its low bits
    static constexpr int MANTISSA = 23;
    static constexpr float LOWEST = -100, HIGHEST = 128;  // see exp2
    static constexpr int DEGREE = 6;
    static constexpr float EXP2[DEGREE + 1] = {1.0f,         0.6931472f,    0.2402265f,    0.05550327f,
                                               0.009618057f, 0.0013400428f, 0.00015461445f};
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
    typedef uint64_t Bits __attribute__((vector_size(VECTOR_BYTES)));
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
template <class T> inline Vector<T> larger(Vector<T> x, Vector<T> y) {
#if defined(__AVX__) && !defined(__AVX512F__)
    // GCC makes a comparison and a blend of the other form.
    if constexpr (sizeof(T) == 4) return (Vector<T>)_mm256_max_ps((__m256)x, (__m256)y);
    if constexpr (sizeof(T) == 8) return (Vector<T>)_mm256_max_pd((__m256d)x, (__m256d)y);
#endif
    return x > y ? x : y;
}
template <class T> inline Vector<T> size_of_each(Vector<T> x) {
    return (Vector<T>)((Integers<T>)x & ~(Integers<T>)splat(T(-0.0)));
}

// sum + x y, rounded once where there is an instruction for it. Compilers fuse most products and sums by themselves,
// but GCC 13 does not in all blocks of a product that has an odd number of terms: the bits of a row would depend on how
// many others it is computed with.
#if defined(__AVX512F__)
inline Vector<float> add_product(Vector<float> sum, Vector<float> x, Vector<float> y) {
    return (Vector<float>)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
}
inline Vector<double> add_product(Vector<double> sum, Vector<double> x, Vector<double> y) {
    return (Vector<double>)_mm512_fmadd_pd((__m512d)x, (__m512d)y, (__m512d)sum);
}
#elif defined(__FMA__)
inline Vector<float> add_product(Vector<float> sum, Vector<float> x, Vector<float> y) {
    return (Vector<float>)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
}
inline Vector<double> add_product(Vector<double> sum, Vector<double> x, Vector<double> y) {
    return (Vector<double>)_mm256_fmadd_pd((__m256d)x, (__m256d)y, (__m256d)sum);
}
#elif defined(__aarch64__)
inline Vector<float> add_product(Vector<float> sum, Vector<float> x, Vector<float> y) {
    return (Vector<float>)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
}
inline Vector<double> add_product(Vector<double> sum, Vector<double> x, Vector<double> y) {
    return (Vector<double>)vfmaq_f64((float64x2_t)sum, (float64x2_t)x, (float64x2_t)y);
}
#else
template <class V> inline V add_product(V sum, V x, V y) { return sum + x * y; }
#endif

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
template <class T> inline bool any_above(Vector<T> x, T limit) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ);
    if constexpr (sizeof(T) == 8) return _mm512_cmp_pd_mask((__m512d)x, _mm512_set1_pd(limit), _CMP_GT_OQ);
#elif defined(__AVX__)
    const auto above = x > splat(limit);
    if constexpr (sizeof(T) == 4) return _mm256_movemask_ps((__m256)above);
    if constexpr (sizeof(T) == 8) return _mm256_movemask_pd((__m256d)above);
#else
    return largest_lane<T>(x) > limit;
#endif
}

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

// The sum of each of COUNT vectors, as many as there are lanes: of the first in lane 0, and so on.
template <class T, int COUNT = LANES<T>> inline Vector<T> sums_of_lanes(const Vector<T> *x) {
    if constexpr (COUNT == 1) {
        return x[0];
    } else {
        Integers<T> even, odd;
        for (int i = 0; i < LANES<T>; ++i) {
            even[i] = 2 * i;
            odd[i] = 2 * i + 1;
        }
        const Vector<T> low = sums_of_lanes<T, COUNT / 2>(x), high = sums_of_lanes<T, COUNT / 2>(x + COUNT / 2);
        return pick<T>(low, high, even) + pick<T>(low, high, odd);
    }
}

// 0, 1, 2, ...
template <class T> inline Vector<T> iota() {
    Vector<T> x;
    for (int i = 0; i < LANES<T>; ++i) x[i] = T(i);
    return x;
}

// 2^n for an integer n, where `rounded` is n + Vectors::ROUNDER. The shift leaves n alone, because the low bits of
// ROUNDER are zeros. The sum of bits may wrap, as that of signed integers must not.
template <class T> inline Vector<T> power_of_two(Vector<T> rounded) {
    using Bits = typename Vectors<T>::Bits;
    return (Vector<T>)(((Bits)rounded << Vectors<T>::MANTISSA) + (Bits)splat(T(1)));
}

// 2^x of numbers from -1/2 to 1/2.
template <class T> inline Vector<T> polynomial_exp2(Vector<T> rest) {
    Vector<T> p = splat(Vectors<T>::EXP2[Vectors<T>::DEGREE]);
    for (int i = Vectors<T>::DEGREE - 1; i >= 0; --i) p = p * rest + splat(Vectors<T>::EXP2[i]);
    return p;
}

// The smaller of x and a limit; NaN stays NaN.
template <class T> inline Vector<T> at_most(Vector<T> x, T limit) {
#if defined(__AVX512F__)
    // GCC makes two instructions of it where it knows the limit.
    if constexpr (sizeof(T) == 4) return (Vector<T>)_mm512_min_ps(_mm512_set1_ps(limit), (__m512)x);
    if constexpr (sizeof(T) == 8) return (Vector<T>)_mm512_min_pd(_mm512_set1_pd(limit), (__m512d)x);
#elif defined(__AVX__)
    if constexpr (sizeof(T) == 4) return (Vector<T>)_mm256_min_ps(_mm256_set1_ps(limit), (__m256)x);
    if constexpr (sizeof(T) == 8) return (Vector<T>)_mm256_min_pd(_mm256_set1_pd(limit), (__m256d)x);
#else
    return x > splat(limit) ? splat(limit) : x;
#endif
}

// 2^(x factor) to less than one unit in the last place, and 0 below LOWEST: subnormal weights would cost a hundred
// times what others do, in products too. The exponent, x times the factor, is not rounded: a unit in its last place is
// many of the weight's. The power of two is a factor, and is not added to the exponent, so that NaN stays NaN.
#if defined(__AVX512F__)
// There are instructions for rounding and for multiplying by a power of two.
template <class T> inline Vector<T> exp2(Vector<T> x, Vector<T> factor) {
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    if constexpr (sizeof(T) == 4) {
        const __m512 number = (__m512)(x * factor), rounded = _mm512_roundscale_ps(number, NEAREST);
        const __mmask16 ordinary = _mm512_cmp_ps_mask(number, _mm512_set1_ps(Vectors<T>::LOWEST), _CMP_NLT_UQ);
        const Vector<T> p = polynomial_exp2<T>(add_product(-(Vector<T>)rounded, x, factor));
        return (Vector<T>)_mm512_maskz_scalef_ps(ordinary, (__m512)p, rounded);
    } else {
        const __m512d number = (__m512d)(x * factor), rounded = _mm512_roundscale_pd(number, NEAREST);
        const __mmask8 ordinary = _mm512_cmp_pd_mask(number, _mm512_set1_pd(Vectors<T>::LOWEST), _CMP_NLT_UQ);
        const Vector<T> p = polynomial_exp2<T>(add_product(-(Vector<T>)rounded, x, factor));
        return (Vector<T>)_mm512_maskz_scalef_pd(ordinary, (__m512d)p, rounded);
    }
}
#elif defined(__AVX2__)
// 2^n for an integer n, where `rounded` is n + EXPONENT_ROUNDER: the bias of exponents is added with the rounding.
template <class T> constexpr T EXPONENT_ROUNDER = Vectors<T>::ROUNDER + T(Vectors<T>::HIGHEST - 1);
template <class T> inline Vector<T> power_of_two_biased(Vector<T> rounded) {
    return (Vector<T>)((Integers<T>)rounded << Vectors<T>::MANTISSA);
}

// p where x is not below the limit, NaN included, and 0 elsewhere, whatever p is there.
template <class T> inline Vector<T> unless_below(Vector<T> p, Vector<T> x, Vector<T> limit) {
    if constexpr (sizeof(T) == 4)
        return (Vector<T>)_mm256_and_ps((__m256)p, _mm256_cmp_ps((__m256)x, (__m256)limit, _CMP_NLT_UQ));
    if constexpr (sizeof(T) == 8)
        return (Vector<T>)_mm256_and_pd((__m256d)p, _mm256_cmp_pd((__m256d)x, (__m256d)limit, _CMP_NLT_UQ));
}

template <class T> inline Vector<T> exp2(Vector<T> x, Vector<T> factor) {
    const Vector<T> rounder = splat(EXPONENT_ROUNDER<T>), number = x * factor;
    const Vector<T> rounded = at_most<T>(number, Vectors<T>::HIGHEST) + rounder;
    const Vector<T> rest = add_product(rounder - rounded, x, factor);
    return unless_below<T>(polynomial_exp2<T>(rest) * power_of_two_biased<T>(rounded), number,
                           splat(Vectors<T>::LOWEST));
}
#else
template <class T> inline Vector<T> exp2(Vector<T> x, Vector<T> factor) {
    const Vector<T> lowest = splat(Vectors<T>::LOWEST), highest = splat(Vectors<T>::HIGHEST), number = x * factor;
    Vector<T> clamped = number < lowest ? lowest : number;
    clamped = clamped > highest ? highest : clamped;
    const Vector<T> rounded = clamped + splat(Vectors<T>::ROUNDER);
    const Vector<T> rest = add_product(splat(Vectors<T>::ROUNDER) - rounded, x, factor);
    const Vector<T> p = polynomial_exp2<T>(rest) * power_of_two<T>(rounded);
    return number < lowest ? Vector<T>{} : p;
}
#endif

template <class T> inline Vector<T> exp2(Vector<T> x) { return exp2<T>(x, splat(T(1))); }
// 2^(factor * x) of many x, none of which is so large that the power overflows; factor is positive. It is 0 where
// factor * x is below LOWEST.
template <class T> struct Exp2OfScaled {
    Vector<T> factor;
#if defined(__AVX2__) && !defined(__AVX512F__)
    Vector<T> limit;
    explicit Exp2OfScaled(T by)
        : factor(splat(by)), limit(splat(T(larger_of(Vectors<T>::LOWEST / by, -std::numeric_limits<T>::max())))) {}
    static T larger_of(T x, T y) { return x > y ? x : y; }
    // The product is never rounded: two fused instructions have its integer and the rest.
    Vector<T> operator()(Vector<T> x) const {
        const Vector<T> rounder = splat(EXPONENT_ROUNDER<T>), rounded = add_product(rounder, x, factor);
        const Vector<T> rest = add_product(rounder - rounded, x, factor);
        return unless_below<T>(polynomial_exp2<T>(rest) * power_of_two_biased<T>(rounded), x, limit);
    }
#else
    explicit Exp2OfScaled(T by) : factor(splat(by)) {}
    Vector<T> operator()(Vector<T> x) const { return exp2<T>(x, factor); }
#endif
};

#if defined(__AVX512BF16__)
// 2^(x - 1/2) to 2.5 units in the last place, and 0 below LOWEST, for weights that are rounded to bfloat16. The half
// makes the nearest integer of the exponent the integer below x, which the last instruction finds by itself.
inline Vector<float> exp2_of_half_less(Vector<float> x) {
    constexpr float SERIES[] = {0.70710671f, 0.49013323f, 0.16981424f, 0.03947517f, 0.006356423f, 0.0013276472f};
    const __m512 number = (__m512)x, rest = _mm512_reduce_ps(number, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const __mmask16 ordinary = _mm512_cmp_ps_mask(number, _mm512_set1_ps(Vectors<float>::LOWEST), _CMP_NLT_UQ);
    Vector<float> p = splat(SERIES[5]);
    for (int i = 4; i >= 0; --i) p = p * (Vector<float>)rest + splat(SERIES[i]);
    return (Vector<float>)_mm512_maskz_scalef_ps(ordinary, (__m512)p, number);
}
#endif

// x / y of ordinary numbers, to about half a unit in the last place.
template <class T> inline Vector<T> quotient(Vector<T> x, Vector<T> y) {
#if defined(__AVX512F__)
    // A division takes as long as ten multiplications. Instead, x is multiplied by an estimate of 1 / y, which has 14
    // bits at first, and the quotient is corrected by what it leaves of x.
    if constexpr (sizeof(T) == 4) {
        const __m512 estimate = _mm512_rcp14_ps((__m512)y), q = _mm512_mul_ps((__m512)x, estimate);
        return (Vector<T>)_mm512_fmadd_ps(_mm512_fnmadd_ps((__m512)y, q, (__m512)x), estimate, q);
    } else {
        const __m512d rough = _mm512_rcp14_pd((__m512d)y);
        const __m512d error = _mm512_fnmadd_pd((__m512d)y, rough, _mm512_set1_pd(1));
        const __m512d estimate = _mm512_fmadd_pd(rough, error, rough), q = _mm512_mul_pd((__m512d)x, estimate);
        return (Vector<T>)_mm512_fmadd_pd(_mm512_fnmadd_pd((__m512d)y, q, (__m512d)x), estimate, q);
    }
#else
    return x / y;
#endif
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

#if defined(__AVX512BF16__)
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
        const __m512 below = _mm512_min_ps(_mm512_set1_ps(9), (__m512)x[u]);
        x[u] = (Vector<float>)_mm512_max_ps(_mm512_set1_ps(-9), below);
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
#endif

// log(x) of positive normal numbers, to about one unit in the last place. With x = 2^n m, m from 1/sqrt(2) to sqrt(2),
// it is n log(2) + 2 artanh(y), y = (m - 1) / (m + 1).
template <class T> inline Vector<T> log(Vector<T> x) {
    constexpr T ROOT = T(0.7071067811865476);
    constexpr int MANTISSA = Vectors<T>::MANTISSA;
    using Bits = typename Vectors<T>::Bits;
    const Integers<T> exponents = (Integers<T>)((Bits)x - (Bits)splat(ROOT)) >> MANTISSA;
    const Vector<T> m = (Vector<T>)((Bits)x - ((Bits)exponents << MANTISSA));
    const Vector<T> n = __builtin_convertvector(exponents, Vector<T>);
    const Vector<T> one = splat(T(1)), less = m - one, y = less / (m + one), square = y * y;
    Vector<T> series = splat(T(2.0 / (2 * Vectors<T>::LOG_TERMS + 1)));
    for (int i = Vectors<T>::LOG_TERMS - 1; i > 0; --i) series = series * square + splat(T(2.0 / (2 * i + 1)));
    // 2 y = less - less^2 / 2 + ..., of which the first terms are exact: 2 y = less - y less.
    const Vector<T> rest = y * (square * series - less) + n * splat(Vectors<T>::LN2_LOW);
    return n * splat(Vectors<T>::LN2_HIGH) + (less + rest) + (x - x);  // NaN stays NaN
}

// exp(x) and log(x) of one number. Those of the C library may be compiled for the first x86-64 processors, and wait for
// long where wide registers were used before.
inline double exp_of(double x) { return exp2<double>(splat(x * 1.4426950408889634))[0]; }
template <class T> inline T log_of(T x) {
    const bool is_normal = x >= std::numeric_limits<T>::min() && x <= std::numeric_limits<T>::max();
    return is_normal ? log<T>(splat(x))[0] : std::log(x);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Halves of rows N / 2 apart share a register from the beginning, so that no shuffle crosses halves: loads from memory
// insert halves without one. The compiler makes twice as many instructions of the perfect shuffles below.
inline void transpose_square(const float *in, long stride, float *out, long out_stride, long count) {
    auto half = [&](int i, int at) { return i < count ? _mm_loadu_ps(in + i * stride + at) : _mm_setzero_ps(); };
#pragma GCC unroll 2
    for (int at = 0; at < 8; at += 4) {
        __m256 x[4], y[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            x[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(half(i, at)), half(i + 4, at), 1);
        y[0] = _mm256_unpacklo_ps(x[0], x[1]), y[1] = _mm256_unpackhi_ps(x[0], x[1]);
        y[2] = _mm256_unpacklo_ps(x[2], x[3]), y[3] = _mm256_unpackhi_ps(x[2], x[3]);
        float *to = out + at * out_stride;
        _mm256_storeu_ps(to, _mm256_shuffle_ps(y[0], y[2], 0x44));
        _mm256_storeu_ps(to + out_stride, _mm256_shuffle_ps(y[0], y[2], 0xEE));
        _mm256_storeu_ps(to + 2 * out_stride, _mm256_shuffle_ps(y[1], y[3], 0x44));
        _mm256_storeu_ps(to + 3 * out_stride, _mm256_shuffle_ps(y[1], y[3], 0xEE));
    }
}
inline void transpose_square(const double *in, long stride, double *out, long out_stride, long count) {
    auto half = [&](int i, int at) { return i < count ? _mm_loadu_pd(in + i * stride + at) : _mm_setzero_pd(); };
#pragma GCC unroll 2
    for (int at = 0; at < 4; at += 2) {
        __m256d x[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i)
            x[i] = _mm256_insertf128_pd(_mm256_castpd128_pd256(half(i, at)), half(i + 2, at), 1);
        _mm256_storeu_pd(out + at * out_stride, _mm256_unpacklo_pd(x[0], x[1]));
        _mm256_storeu_pd(out + (at + 1) * out_stride, _mm256_unpackhi_pd(x[0], x[1]));
    }
}
#else
// out[column][row] = in[row][column], for a square of as many numbers a side as there are lanes, whose rows from
// `count` on are taken as zeros. It takes log2(N) perfect shuffles.
template <class T> inline void transpose_square(const T *in, long stride, T *out, long out_stride, long count) {
    constexpr int N = LANES<T>;
    Vector<T> x[N], y[N];
    Integers<T> low, high;
    for (int i = 0; i < N; ++i) {
        low[i] = i / 2 + i % 2 * N;
        high[i] = low[i] + N / 2;
    }
    for (int i = 0; i < N; ++i) x[i] = i < count ? load(in + i * stride) : Vector<T>{};
    for (int step = N; step > 1; step /= 2) {
        for (int i = 0; i < N / 2; ++i) {
            y[2 * i] = pick<T>(x[i], x[i + N / 2], low);
            y[2 * i + 1] = pick<T>(x[i], x[i + N / 2], high);
        }
        for (int i = 0; i < N; ++i) x[i] = y[i];
    }
    for (int i = 0; i < N; ++i) store(out + i * out_stride, x[i]);
}
#endif

}  // namespace
