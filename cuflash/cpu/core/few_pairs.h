// Few queries against many keys, where there are tile registers and numbers of 16 bits: queries that share keys are a
// tile of columns, and rows of k are multiplied by it where they lie. So it takes no longer to compute with many
// numbers than to read them.
#pragma once

#include "few_rows.h"
#include "split_pairs.h"

namespace {

#if HAS_TILES
// Keys whose scores are multiplied at a time, and those whose values are: what is made of them stays in the first level
// of the cache.
constexpr long KEYS_OF_SCORES = 4 * TILE, KEYS_OF_VALUES = 2 * TILE;

// q of a block as columns: where numbers are of two parts, upper ones, and below them the lower ones.
inline void load_few_columns(const Call &call, const Entry &entry, const Block &block, float *rows, float *columns) {
    const long width = most_parts<float>(call) * pair_stride<float>(call.head_dim);
    if (call.dtype == BFLOAT16) {
        load_row_pairs(call, Q, entry, block, call.head_dim, rows, call.scale < 0);
    } else {
        load_split_rows(call, entry, block, rows);
    }
    transpose(rows, width, rows_of(block), width, columns, TILE);
}

// s = Q K^T. `rows` is room for rows of k, `s_t` for a tile of keys by queries. Where a number is not finite, neither
// are its scores of two parts.
inline void scores_of_few_pairs(const float *q_t, long dim, const KeyRows &k, long num_keys, int parts, Coming coming,
                                float *rows, float *s_t, float *s) {
    const long width = pair_stride<float>(dim);
    const bool lie_well =
        parts == 1 && dim == 2 * width && k.stride && k.stride % 4 == 0 && (uintptr_t)k.at[0] % 4 == 0;
    const long stride = lie_well ? k.stride / 4 : parts * width;
    for (long first = 0; first < num_keys; first += KEYS_OF_SCORES) {
        const long count = smaller(KEYS_OF_SCORES, num_keys - first);
        const float *a = lie_well ? (const float *)k.at[first] : rows;
        for (long j = 0; j < count; ++j) {
            float *to = rows + j * stride;
            coming.fetch(first + j);
            if (parts == 2) {
                load_split(k.at[first + j], 1, dim, width, to, to + width);
            } else if (!lie_well) {
                load_bits(k.at[first + j], 1, dim, (Bits *)to, 2 * width);
            }
        }
        ProductOfPairs scores{count, TILE, width, a, stride, q_t, TILE, s_t, TILE, false};
        if (parts == 2) {
            scores.add(a + width, q_t);
            scores.add(a, q_t + width * TILE);
            scores.add(a + width, q_t + width * TILE);
        }
        scores.finish();
        transpose(s_t, TILE, count, TILE, s + first, SCORES_STRIDE<float>);
    }
}

// Whether scores of so many rows are numbers.
inline bool are_numbers(long num_rows, const float *s, long num_keys) {
    constexpr int N = LANES<float>;
    Vector<float> sum = {};  // of zeros or NaN; there are zeros behind the keys
    for (long r = 0; r < num_rows; ++r)
        for (long j = 0; j < num_keys; j += N) sum += load(s + r * SCORES_STRIDE<float> + j) * 0;
    return sum_of_lanes<float>(sum) == 0;
}

// o += P V, of one part: pairs of weights by pairs of keys. `interleaved` is room for these.
inline void add_values_of_few_pairs(const float *pairs, const KeyRows &v, long num_keys, long dim, Coming coming,
                                    float *interleaved, float *o) {
    for (long first = 0; first < num_keys; first += KEYS_OF_VALUES) {
        const long count = smaller(KEYS_OF_VALUES, num_keys - first);
        for (long j = 0; j < count; j += 2) {
            const bool has_next = j + 1 < count;
            coming.fetch(first + j);
            if (has_next) coming.fetch(first + j + 1);
            interleave(v.at[first + j], has_next ? v.at[first + j + 1] : nullptr, 1, dim, interleaved + j / 2 * dim,
                       dim);
        }
        product_of_pairs(TILE, dim, pairs_of(count), pairs + first / 2, KEY_PAIRS, interleaved, dim, o, dim, true);
    }
}

#endif

}  // namespace
