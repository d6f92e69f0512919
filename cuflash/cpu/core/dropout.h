// Which weights dropout keeps: the bits of Philox-4x32-7, as `cuflash/dropout.py` describes them.
#pragma once

#include "vectors.h"

namespace {

typedef uint64_t Words __attribute__((vector_size(VECTOR_BYTES)));  // of 32 bits, each in a lane of 64
constexpr int WORDS = VECTOR_BYTES / 8, AT_ONCE = 4;

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
    const Words low = Words{} + UINT64_C(0xFFFFFFFF), threshold = Words{} + uint64_t(steps);
    Words lanes;
    for (int i = 0; i < WORDS; ++i) lanes[i] = i;
    const long num_counters = (num_columns + 15) / 16 * 4;
    for (long first = first_row / 16 * 16; first < first_row + num_rows; first += 16) {
        for (long i = first; i < first + 8; ++i) {
            const long upper = i - first_row, lower = upper + 8;
            const bool has_upper = upper >= 0 && upper < num_rows, has_lower = lower >= 0 && lower < num_rows;
            if (!has_upper && !has_lower) continue;
            for (long x = 0; x < num_counters; x += AT_ONCE * WORDS) {
                // Several chains of multiplications at once, since each waits for its own results.
                Words c0[AT_ONCE], c1[AT_ONCE], c2[AT_ONCE], c3[AT_ONCE];
                for (int u = 0; u < AT_ONCE; ++u) {
                    c0[u] = lanes + uint64_t(first_column / 4 + x + u * WORDS);
                    c1[u] = Words{} + uint64_t(first / 2 + i % 8);
                    c2[u] = Words{} + (head & 0xFFFFFFFF);
                    c3[u] = Words{} + offset;
                }
                uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
                for (int round = 0; round < 7; ++round) {
#pragma GCC unroll 4
                    for (int u = 0; u < AT_ONCE; ++u) {
                        const Words product0 = multiply_words(c0[u], Words{} + UINT64_C(0xD2511F53));
                        const Words product1 = multiply_words(c2[u], Words{} + UINT64_C(0xCD9E8D57));
                        c0[u] = (product1 >> 32) ^ c1[u] ^ (Words{} + uint64_t(key0));
                        c2[u] = (product0 >> 32) ^ c3[u] ^ (Words{} + uint64_t(key1));
                        c1[u] = product1 & low;
                        c3[u] = product0 & low;
                    }
                    key0 += 0x9E3779B9;
                    key1 += 0xBB67AE85;
                }
                // A byte for each weight: those of two neighbours in the low half of a block, and in its high half.
                auto bytes = [&](Words x, Words y) {
                    return ((Words)(x >= threshold) & 1) | ((Words)(y >= threshold) & 0x100);
                };
                for (int u = 0; u < AT_ONCE; ++u) {
                    const long at = x + u * WORDS;
                    uint64_t of_upper[2][WORDS], of_lower[2][WORDS];
                    const Words half = Words{} + UINT64_C(0xFFFF);
                    const Words pairs[4] = {bytes(c0[u] & half, c2[u] & half), bytes(c1[u] & half, c3[u] & half),
                                            bytes(c0[u] >> 16, c2[u] >> 16), bytes(c1[u] >> 16, c3[u] >> 16)};
                    memcpy(of_upper, pairs, sizeof of_upper);
                    memcpy(of_lower, pairs + 2, sizeof of_lower);
                    for (int w = 0; w < WORDS && at + w < num_counters; ++w) {
                        const long column = (at + w) / 4 * 16 + (at + w) % 4 * 2;
                        auto put = [&](unsigned char *row, const uint64_t (&of_row)[2][WORDS]) {
                            const uint16_t low_half = uint16_t(of_row[0][w]), high_half = uint16_t(of_row[1][w]);
                            memcpy(row + column, &low_half, 2);
                            memcpy(row + column + 8, &high_half, 2);
                        };
                        if (has_upper) put(kept + upper * stride, of_upper);
                        if (has_lower) put(kept + lower * stride, of_lower);
                    }
                }
            }
        }
    }
}

}  // namespace
