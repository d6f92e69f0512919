// Which weights dropout keeps: the bits of Philox-4x32-7, as `cuflash/spec/dropout.py` describes them.
#pragma once

#include "simd/vectors.h"

namespace {

typedef uint32_t Words32 __attribute__((vector_size(VECTOR_BYTES)));
constexpr int WORDS = VECTOR_BYTES / 8, AT_ONCE = 4, ROUNDS = 7;

// Draws of the rows i and i + 8 for the columns of a vector of counters. Words c0 and c2 of a counter have the draws of
// two neighbouring columns, c1 and c3 those of the two that are eight columns further on. Draws of four counters come
// in the order of columns; of fewer counters, the neighbours come in the first half and those further on in the second.
struct DrawsOfRows {
    Draws upper, lower;
    DrawsOfRows(Words c0, Words c1, Words c2, Words c3) {
        constexpr int RUN = WORDS < 4 ? WORDS : 4;
        Integers<float> in_order;
#pragma GCC unroll 16
        for (int p = 0; p < 2 * WORDS; ++p)
            in_order[p] = 2 * (p / (2 * RUN) * RUN + p % RUN) + p / RUN % 2 * LANES<float>;
        const Words32 low = Words32{} + 0xFFFFu;
        auto low_halves = [&](Words x, Words y) { return (Vector<float>)(((Words32)x & low) | (Words32)y << 16); };
        auto high_halves = [&](Words x, Words y) { return (Vector<float>)((Words32)x >> 16 | ((Words32)y & ~low)); };
        upper = (Draws)pick<float>(low_halves(c0, c2), low_halves(c1, c3), in_order);
        lower = (Draws)pick<float>(high_halves(c0, c2), high_halves(c1, c3), in_order);
    }
};

// Writes kept[row][column], bytes of ones where a weight is kept and of zeros elsewhere, for rows [first_row, first_row
// + num_rows) and columns [first_column, first_column + num_columns) of one head. first_column is a multiple of 16, and
// `stride` is a multiple of VECTOR_BYTES that has space for all columns.
inline void kept_weights(uint64_t seed, uint64_t offset, uint64_t head, int64_t steps, int64_t first_row,
                         int64_t num_rows, int64_t first_column, int64_t num_columns, unsigned char *kept,
                         int64_t stride) {
    constexpr uint64_t MULTIPLIER0 = 0xD2511F53, MULTIPLIER1 = 0xCD9E8D57;
    uint64_t key0[ROUNDS], key1[ROUNDS];
#pragma GCC unroll 8
    for (int round = 0; round < ROUNDS; ++round) {
        key0[round] = uint32_t(seed) + uint32_t(round) * 0x9E3779B9;
        key1[round] = uint32_t(seed >> 32) + uint32_t(round) * 0xBB67AE85;
    }
    Words lanes;
#pragma GCC unroll 16
    for (int i = 0; i < WORDS; ++i) lanes[i] = i;
    const int64_t num_counters = (num_columns + 15) / 16 * 4;
    const uint64_t of_head = (head & 0xFFFFFFFF) * MULTIPLIER1;
    for (int64_t x = 0; x < num_counters; x += AT_ONCE * WORDS) {
        // After two rounds, a counter depends on its column alone, except for words 2 and 3, which its row enters by an
        // exclusive or. One of the products of the third round depends on the column alone, too. Several chains of
        // multiplications run at once, since each waits for its own results.
        Words by_column1[AT_ONCE], by_column2[AT_ONCE], product0[AT_ONCE], upper0[AT_ONCE];
#pragma GCC unroll 4
        for (int u = 0; u < AT_ONCE; ++u) {
            const Words first = multiply_words(lanes + uint64_t(first_column / 4 + x + u * WORDS), MULTIPLIER0);
            by_column1[u] = multiply_words((first >> 32) ^ (Words{} + (offset ^ key1[0])), MULTIPLIER1);
            by_column2[u] = first ^ (Words{} + key1[1]);
            const Words second = (by_column1[u] >> 32) ^ (Words{} + (of_head ^ key0[1]));
            product0[u] = multiply_words(second, MULTIPLIER0);
            by_column1[u] ^= Words{} + key0[2];
            upper0[u] = (product0[u] >> 32) ^ (Words{} + key1[2]);
        }
        for (int64_t first = first_row / 16 * 16; first < first_row + num_rows; first += 16) {
            for (int64_t i = first; i < first + 8; ++i) {
                const int64_t upper = i - first_row, lower = upper + 8;
                const bool has_upper = upper >= 0 && upper < num_rows, has_lower = lower >= 0 && lower < num_rows;
                if (!has_upper && !has_lower) continue;
                const uint32_t row = uint32_t(of_head >> 32) ^ uint32_t(first / 2 + i % 8) ^ uint32_t(key0[0]);
                const uint64_t of_row = row * MULTIPLIER0;
                Words c0[AT_ONCE], c1[AT_ONCE], c2[AT_ONCE], c3[AT_ONCE];
#pragma GCC unroll 4
                for (int u = 0; u < AT_ONCE; ++u) {
                    c1[u] = multiply_words(by_column2[u] ^ (Words{} + (of_row >> 32)), MULTIPLIER1);
                    c0[u] = (c1[u] >> 32) ^ by_column1[u];
                    c2[u] = upper0[u] ^ (Words{} + of_row);
                    c3[u] = product0[u];
                }
#pragma GCC unroll 8
                for (int round = 3; round < ROUNDS; ++round) {
#pragma GCC unroll 4
                    for (int u = 0; u < AT_ONCE; ++u) {
                        const Words low0 = multiply_words(c0[u], MULTIPLIER0),
                                    low1 = multiply_words(c2[u], MULTIPLIER1);
                        c0[u] = (low1 >> 32) ^ c1[u] ^ (Words{} + key0[round]);
                        c2[u] = (low0 >> 32) ^ c3[u] ^ (Words{} + key1[round]);
                        c1[u] = low1;
                        c3[u] = low0;
                    }
                }
#pragma GCC unroll 4
                for (int u = 0; u < AT_ONCE; ++u) {
                    const int64_t at = x + u * WORDS;
                    if (at >= num_counters) break;
                    const DrawsOfRows draws(c0[u], c1[u], c2[u], c3[u]);
                    unsigned char *to = kept + at / 4 * 16 + at % 4 * 2;
                    auto put = [&](unsigned char *row, Draws draws_of_row) {
                        const KeptBytes bytes = bytes_above(draws_of_row, uint16_t(steps - 1));
                        if constexpr (WORDS >= 4) {
                            memcpy(row, &bytes, sizeof bytes);
                        } else {
                            memcpy(row, &bytes, sizeof bytes / 2);
                            memcpy(row + 8, (const char *)&bytes + sizeof bytes / 2, sizeof bytes / 2);
                        }
                    };
                    if (has_upper) put(to + upper * stride, draws.upper);
                    if (has_lower) put(to + lower * stride, draws.lower);
                }
            }
        }
    }
}

// x where `kept` has bytes of ones, zeros elsewhere.
template <class T> inline Vector<T> drop(Vector<T> x, const unsigned char *kept) {
    return (Vector<T>)((Integers<T>)x & mask_of_bytes<T>(kept));
}

}  // namespace
