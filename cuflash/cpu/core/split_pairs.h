// Numbers of float16 as sums of two of bfloat16, exactly, so that tile registers multiply them: the forward pass. What is
// not finite has no such sum; calls with any of that are computed in float32.
#pragma once

#include "tile_products.h"

namespace {

#if HAS_TILES

constexpr long SPLIT_ROWS = 32;  // queries that are worth it

inline bool may_split(const Call &call) {
    return call.dtype == FLOAT16 && call.kv_dtype == FLOAT16 && call.seqlen_q >= SPLIT_ROWS;
}

// A row of floats, whose length is a multiple of 16, as pairs of neighbours: of the upper parts and of the lower ones.
inline void split_to_pairs(const float *row, long count, float *high, float *low) {
    for (long j = 0; j < count; j += 16) {
        const __m512 x = (__m512)load(row + j);
        const __m256bh upper = _mm512_cvtneps_pbh(x);
        const __m512i widened = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)upper), 16);
        const __m256bh lower = _mm512_cvtneps_pbh(_mm512_sub_ps(x, (__m512)widened));
        memcpy((void *)(high + j / 2), &upper, sizeof upper);
        memcpy((void *)(low + j / 2), &lower, sizeof lower);
    }
}

// A row of float16, with zeros up to `width` pairs.
inline void load_split(const char *in, long step, long dim, long width, float *high, float *low) {
    float row[MOST_DIM + 32];
    load_row(in, FLOAT16, step, dim, row);
    clear(row + dim, 2 * width - dim);
    split_to_pairs(row, 2 * width, high, low);
}

// Rows of q of a block: the upper parts of a row, and behind them the lower ones.
inline void load_split_rows(const Call &call, const Entry &entry, const Block &block, float *out) {
    const long width = pair_stride<float>(call.head_dim);
    for (long r = 0; r < rows_of(block); ++r) {
        float *to = out + 2 * r * width;
        load_split(row_address(call, Q, entry, row_of(block, r)), call.strides[Q][3], call.head_dim, width, to,
                   to + width);
    }
    if (call.scale < 0) negate_pairs(out, 2 * rows_of(block) * width);
}

// Rows of k, transposed: all upper parts, and below them the lower ones.
inline void load_split_keys(const Call &call, const Entry &entry, long head_kv, long first, long count, float *rows,
                            float *transposed) {
    const long width = pair_stride<float>(call.head_dim);
    for (long j = 0; j < count; ++j) {
        float *to = rows + 2 * j * width;
        load_split(key_address(call, K, entry, head_kv, first + j), call.strides[K][3], call.head_dim, width, to,
                   to + width);
    }
    transpose(rows, 2 * width, count, 2 * width, transposed, SCORES_STRIDE<float>);
}

// Rows of v, pairs of neighbouring keys: the upper parts of all, and the lower ones from `low` on.
inline void load_split_values(const Call &call, const Entry &entry, long head_kv, long first, long count, float *high,
                              float *low) {
    const long padded = round_up(call.head_dim_v, LANES<float>), width = pair_stride<float>(call.head_dim_v);
    float parts[4][MOST_DIM / 2 + 16];
    for (long j = 0; j < count; j += 2) {
        for (long n = 0; n < 2; ++n) {
            if (j + n < count) {
                load_split(key_address(call, V, entry, head_kv, first + j + n), call.strides[V][3], call.head_dim_v,
                           width, parts[n], parts[2 + n]);
            } else {
                clear(parts[n], width);
                clear(parts[2 + n], width);
            }
        }
        interleave((const char *)parts[0], (const char *)parts[1], 1, padded, high + j / 2 * padded, padded);
        interleave((const char *)parts[2], (const char *)parts[3], 1, padded, low + j / 2 * padded, padded);
    }
}

inline bool is_finite_row(const char *in, long step, long count) {
    const uint16_t *bits = (const uint16_t *)in;
    int found = 0;
    if (step == 1) {
        for (long d = 0; d < count; ++d) found |= (bits[d] & 0x7C00) == 0x7C00;
    } else {
        for (long d = 0; d < count; ++d) found |= (bits[d * step] & 0x7C00) == 0x7C00;
    }
    return !found;
}

// Looks at q, k and v of a head of an entry.
template <class T> void check_job(Work &work, char *, long job) {
    const Call &call = work.call;
    const Entry &entry = work.entries[job / call.num_heads];
    const long head = job % call.num_heads;
    bool is_finite = true;
    for (long i = 0; i < entry.seqlen_q && is_finite; ++i)
        is_finite = is_finite_row(row_address(call, Q, entry, Row{head, i}), call.strides[Q][3], call.head_dim);
    for (long j = 0; j < entry.seqlen_k && head < call.num_heads_kv && is_finite; ++j)
        is_finite = is_finite_row(key_address(call, K, entry, head, j), call.strides[K][3], call.head_dim) &&
                    is_finite_row(key_address(call, V, entry, head, j), call.strides[V][3], call.head_dim_v);
    if (!is_finite) work.is_finite.store(false, std::memory_order_relaxed);
}

#endif

// How many numbers of bfloat16 make one, where products are of pairs; 0 where they are not.
template <class T> inline int parts_of_numbers(const Work &work) {
    if (uses_pairs<T>(work.call)) return 1;
#if HAS_TILES
    if (may_split(work.call)) return work.is_finite.load(std::memory_order_relaxed) ? 2 : 0;
#endif
    return 0;
}

}  // namespace
