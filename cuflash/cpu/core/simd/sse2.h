// SSE2, which all x86-64 processors have.
#pragma once

#include "operations.h"

namespace {

// Each of the first four bytes four times.
template <class N> inline __m128i repeat_bytes(const unsigned char *bytes) {
    N few;
    memcpy(&few, bytes, sizeof few);
    const __m128i first = _mm_cvtsi32_si128(few), twice = _mm_unpacklo_epi8(first, first);
    return _mm_unpacklo_epi16(twice, twice);
}
template <> inline Integers<float> mask_of_bytes<float>(const unsigned char *bytes) {
    return (Integers<float>)repeat_bytes<int32_t>(bytes);
}
template <> inline Integers<double> mask_of_bytes<double>(const unsigned char *bytes) {
    const __m128i words = repeat_bytes<int16_t>(bytes);
    return (Integers<double>)_mm_unpacklo_epi32(words, words);
}

template <> inline Words multiply_words(Words x, uint64_t y) {
    return (Words)_mm_mul_epu32((__m128i)x, _mm_set1_epi64x(y));
}

}  // namespace
