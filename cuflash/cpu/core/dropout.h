// Which weights dropout keeps: the bits of Philox-4x32-10, as `cuflash/dropout.py` describes them.
#pragma once

#include "vectors.h"

namespace {

typedef uint64_t Words __attribute__((vector_size(VECTOR_BYTES)));  // of 32 bits, each in a lane of 64
constexpr int WORDS = VECTOR_BYTES / 8;

inline Words multiply_words(Words x, Words y) {
#if defined(__AVX512F__)
    return (Words)_mm512_mul_epu32((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
    return (Words)_mm256_mul_epu32((__m256i)x, (__m256i)y);
#elif defined(__SSE2__) && !defined(__AVX__)
    return (Words)_mm_mul_epu32((__m128i)x, (__m128i)y);
#else
    return x * y;
#endif
}

// kept[row][column], bytes of 0 or 1, for rows [first_row, first_row + num_rows) and columns [first_column,
// first_column + num_columns) of one head. first_column is a multiple of 16, and `stride` one of 16 that has room for
// all columns of the last block of 16.
inline void kept_weights(uint64_t seed, uint64_t offset, uint64_t head, long steps, long first_row, long num_rows,
                         long first_column, long num_columns, unsigned char *kept, long stride) {
    const Words low = Words{} + UINT64_C(0xFFFFFFFF);
    Words lanes;
    for (int i = 0; i < WORDS; ++i) lanes[i] = i;
    const long num_counters = (num_columns + 15) / 16 * 4;
    for (long first = first_row / 16 * 16; first < first_row + num_rows; first += 16) {
        for (long i = first; i < first + 8; ++i) {
            const long upper = i - first_row, lower = upper + 8;
            const bool has_upper = upper >= 0 && upper < num_rows, has_lower = lower >= 0 && lower < num_rows;
            if (!has_upper && !has_lower) continue;
            for (long x = 0; x < num_counters; x += WORDS) {
                Words c0 = lanes + uint64_t(first_column / 4 + x), c1 = Words{} + uint64_t(first / 2 + i % 8);
                Words c2 = Words{} + (head & 0xFFFFFFFF), c3 = Words{} + offset;
                uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
                for (int round = 0; round < 10; ++round) {
                    Words product0 = multiply_words(c0, Words{} + UINT64_C(0xD2511F53));
                    Words product1 = multiply_words(c2, Words{} + UINT64_C(0xCD9E8D57));
                    c0 = (product1 >> 32) ^ c1 ^ (Words{} + uint64_t(key0));
                    c2 = (product0 >> 32) ^ c3 ^ (Words{} + uint64_t(key1));
                    c1 = product1 & low;
                    c3 = product0 & low;
                    key0 += 0x9E3779B9;
                    key1 += 0xBB67AE85;
                }
                uint64_t words[4][WORDS];
                memcpy(words[0], &c0, sizeof c0);
                memcpy(words[1], &c1, sizeof c1);
                memcpy(words[2], &c2, sizeof c2);
                memcpy(words[3], &c3, sizeof c3);
                for (int w = 0; w < WORDS && x + w < num_counters; ++w) {
                    const long column = (x + w) / 4 * 16 + (x + w) % 4 * 2;
                    for (int place = 0; place < 4; ++place) {
                        const long at = column + place / 2 + place % 2 * 8;
                        if (has_upper) kept[upper * stride + at] = long(words[place][w] & 0xFFFF) >= steps;
                        if (has_lower) kept[lower * stride + at] = long(words[place][w] >> 16) >= steps;
                    }
                }
            }
        }
    }
}

}  // namespace
