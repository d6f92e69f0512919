// AVX2 with FMA and F16C.
#pragma once

#include "operations.h"

namespace {

// GCC makes a comparison and a blend of the other form.
template <> inline Vector<float> larger<float>(Vector<float> x, Vector<float> y) {
    return (Vector<float>)_mm256_max_ps((__m256)x, (__m256)y);
}
template <> inline Vector<double> larger<double>(Vector<double> x, Vector<double> y) {
    return (Vector<double>)_mm256_max_pd((__m256d)x, (__m256d)y);
}

template <> inline Vector<float> at_most<float>(Vector<float> x, float limit) {
    return (Vector<float>)_mm256_min_ps(_mm256_set1_ps(limit), (__m256)x);
}
template <> inline Vector<double> at_most<double>(Vector<double> x, double limit) {
    return (Vector<double>)_mm256_min_pd(_mm256_set1_pd(limit), (__m256d)x);
}

template <> inline Vector<float> unless_below<float>(Vector<float> p, Vector<float> x, Vector<float> limit) {
    return (Vector<float>)_mm256_and_ps((__m256)p, _mm256_cmp_ps((__m256)x, (__m256)limit, _CMP_NLT_UQ));
}
template <> inline Vector<double> unless_below<double>(Vector<double> p, Vector<double> x, Vector<double> limit) {
    return (Vector<double>)_mm256_and_pd((__m256d)p, _mm256_cmp_pd((__m256d)x, (__m256d)limit, _CMP_NLT_UQ));
}

template <> inline Vector<float> add_product(Vector<float> sum, Vector<float> x, Vector<float> y) {
    return (Vector<float>)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
}
template <> inline Vector<double> add_product(Vector<double> sum, Vector<double> x, Vector<double> y) {
    return (Vector<double>)_mm256_fmadd_pd((__m256d)x, (__m256d)y, (__m256d)sum);
}

template <> inline bool any_above<float>(Vector<float> x, float limit) {
    return _mm256_movemask_ps((__m256)(x > splat(limit)));
}
template <> inline bool any_above<double>(Vector<double> x, double limit) {
    return _mm256_movemask_pd((__m256d)(x > splat(limit)));
}

template <> inline Integers<float> look_up_8<float>(const int32_t *table, Integers<float> indices) {
    return (Integers<float>)_mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i *)table), (__m256i)indices);
}

template <> inline Integers<float> mask_of_bytes<float>(const unsigned char *bytes) {
    return (Integers<float>)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
}
template <> inline Integers<double> mask_of_bytes<double>(const unsigned char *bytes) {
    int32_t four;
    memcpy(&four, bytes, 4);
    return (Integers<double>)_mm256_cvtepi8_epi64(_mm_cvtsi32_si128(four));
}

template <> inline Words multiply_words(Words x, uint64_t y) {
    return (Words)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(y));
}

// The compiler widens each half of them.
template <> inline Integers<float> widen<float>(Halves bits) {
    return (Integers<float>)_mm256_cvtepu16_epi32((__m128i)bits);
}

template <> inline Vector<float> load_as<float>(const Float16 *p) {
    return (Vector<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

// Halves of rows N / 2 apart share a register from the beginning, so that no shuffle crosses halves: loads from memory
// insert halves without one. The compiler makes twice as many instructions of perfect shuffles.
template <>
inline void transpose_square<float>(const float *in, int64_t stride, float *out, int64_t out_stride, int64_t count) {
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
template <>
inline void transpose_square<double>(const double *in, int64_t stride, double *out, int64_t out_stride, int64_t count) {
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

}  // namespace
