// AVX-512 with F, DQ, BW and VL, and its products of bfloat16.
#pragma once

#include "operations.h"

namespace {

template <> inline Vector<float> larger<float>(Vector<float> x, Vector<float> y) {
    return (Vector<float>)_mm512_max_ps((__m512)x, (__m512)y);
}
template <> inline Vector<double> larger<double>(Vector<double> x, Vector<double> y) {
    return (Vector<double>)_mm512_max_pd((__m512d)x, (__m512d)y);
}

// GCC makes two instructions of the comparison where it knows the limit.
template <> inline Vector<float> at_most<float>(Vector<float> x, float limit) {
    return (Vector<float>)_mm512_min_ps(_mm512_set1_ps(limit), (__m512)x);
}
template <> inline Vector<double> at_most<double>(Vector<double> x, double limit) {
    return (Vector<double>)_mm512_min_pd(_mm512_set1_pd(limit), (__m512d)x);
}

template <> inline Vector<float> add_product(Vector<float> sum, Vector<float> x, Vector<float> y) {
    return (Vector<float>)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
}
template <> inline Vector<double> add_product(Vector<double> sum, Vector<double> x, Vector<double> y) {
    return (Vector<double>)_mm512_fmadd_pd((__m512d)x, (__m512d)y, (__m512d)sum);
}

// A division takes as long as ten multiplications. Instead, x is multiplied by an estimate of 1 / y, which has 14 bits
// at first, and the quotient is corrected by what it leaves of x. That is subtracted with its sign changed, so that a
// quotient of -0 is -0.
template <> inline Vector<float> quotient<float>(Vector<float> x, Vector<float> y) {
    const __m512 estimate = _mm512_rcp14_ps((__m512)y), q = _mm512_mul_ps((__m512)x, estimate);
    return (Vector<float>)_mm512_fnmadd_ps(_mm512_fmsub_ps((__m512)y, q, (__m512)x), estimate, q);
}
template <> inline Vector<double> quotient<double>(Vector<double> x, Vector<double> y) {
    const __m512d rough = _mm512_rcp14_pd((__m512d)y);
    const __m512d error = _mm512_fnmadd_pd((__m512d)y, rough, _mm512_set1_pd(1));
    const __m512d estimate = _mm512_fmadd_pd(rough, error, rough), q = _mm512_mul_pd((__m512d)x, estimate);
    return (Vector<double>)_mm512_fnmadd_pd(_mm512_fmsub_pd((__m512d)y, q, (__m512d)x), estimate, q);
}

template <> inline Vector<float> nearest_integer<float>(Vector<float> x) {
    return (Vector<float>)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
template <> inline Vector<double> nearest_integer<double>(Vector<double> x) {
    return (Vector<double>)_mm512_roundscale_pd((__m512d)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

template <> inline Vector<float> above_integer<float>(Vector<float> x) {
    return (Vector<float>)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}

template <> inline Vector<float> scale_ordinary<float>(Vector<float> p, Vector<float> n, Vector<float> x) {
    const __m512 lowest = _mm512_set1_ps(Vectors<float>::LOWEST);
    const __mmask16 ordinary = _mm512_cmp_ps_mask((__m512)x, lowest, _CMP_NLT_UQ);
    return (Vector<float>)_mm512_maskz_scalef_ps(ordinary, (__m512)p, (__m512)n);
}
template <> inline Vector<double> scale_ordinary<double>(Vector<double> p, Vector<double> n, Vector<double> x) {
    const __m512d lowest = _mm512_set1_pd(Vectors<double>::LOWEST);
    const __mmask8 ordinary = _mm512_cmp_pd_mask((__m512d)x, lowest, _CMP_NLT_UQ);
    return (Vector<double>)_mm512_maskz_scalef_pd(ordinary, (__m512d)p, (__m512d)n);
}

template <> inline Vector<float> look_up_32<float>(const float *table, Integers<float> indices) {
    return (Vector<float>)_mm512_permutex2var_ps(_mm512_loadu_ps(table), (__m512i)indices, _mm512_loadu_ps(table + 16));
}

// Halves are added as elsewhere. GCC would make them in memory, and keep a vector there in the loop that sums it up.
template <> inline float sum_of_lanes<float>(Vector<float> x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
template <> inline double sum_of_lanes<double>(Vector<double> x) {
    const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256((__m512d)x), _mm512_extractf64x4_pd((__m512d)x, 1));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

template <> inline bool any_above<float>(Vector<float> x, float limit) {
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ);
}
template <> inline bool any_above<double>(Vector<double> x, double limit) {
    return _mm512_cmp_pd_mask((__m512d)x, _mm512_set1_pd(limit), _CMP_GT_OQ);
}

template <> inline Integers<float> mask_of_bytes<float>(const unsigned char *bytes) {
    return (Integers<float>)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes));
}
template <> inline Integers<double> mask_of_bytes<double>(const unsigned char *bytes) {
    return (Integers<double>)_mm512_cvtepi8_epi64(_mm_loadl_epi64((const __m128i *)bytes));
}

template <> inline Words multiply_words(Words x, uint64_t y) {
    return (Words)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(y));
}
template <> inline KeptBytes bytes_above(Draws draws, uint16_t limit) {
    return (KeptBytes)_mm256_movm_epi8(_mm512_cmpgt_epu16_mask((__m512i)draws, _mm512_set1_epi16(short(limit))));
}

// The compiler widens each half of them.
template <> inline Integers<float> widen<float>(Halves bits) {
    return (Integers<float>)_mm512_cvtepu16_epi32((__m256i)bits);
}

template <> inline Vector<float> load_as<float>(const Float16 *p) {
    return (Vector<float>)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

template <> inline bool are_finite(const Bits *bits, int64_t count) {
    const __m512i infinite = _mm512_set1_epi16(INFINITE_FLOAT16);
    bool found = false;
    for (int64_t i = 0; i < count; i += 32) {
        const __mmask32 there = count - i < 32 ? (1u << (count - i)) - 1 : ~0u;
        const __m512i exponents = _mm512_and_si512(_mm512_maskz_loadu_epi16(there, bits + i), infinite);
        found |= _mm512_cmpeq_epi16_mask(exponents, infinite) != 0;
    }
    return !found;
}

template <> inline Vector<float> interleave_halves<float>(Vector<float> x) {
    Bits order[32];
#pragma GCC unroll 32
    for (int i = 0; i < 32; ++i) order[i] = uint16_t(i / 2 + i % 2 * 16);
    return (Vector<float>)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), (__m512i)x);
}

#if defined(__AVX512BF16__)
template <> inline Vector<float> add_bf16x2_product<float>(Vector<float> sum, Vector<float> x, Vector<float> y) {
    return (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}
template <> inline Halves round_to_bfloat16<float>(Vector<float> x) { return (Halves)_mm512_cvtneps_pbh((__m512)x); }
template <> inline Vector<float> round_to_bfloat16<float>(Vector<float> x, Vector<float> y) {
    return (Vector<float>)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x);
}
#endif

}  // namespace
