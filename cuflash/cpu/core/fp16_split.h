// For the forward pass, numbers of float16 are split exactly into sums of two numbers of bfloat16, so that tile
// registers can multiply them. A number that is not finite has no such sum; calls with any such number are computed in
// float32.
#pragma once

#include "amx.h"

namespace {

#if HAS_TILES

constexpr long SPLIT_ROWS = 32;  // the fewest queries for which it is worth it

inline bool is_float16(const Call &call) { return call.dtype == FLOAT16 && call.kv_dtype == FLOAT16; }

inline bool may_split(const Call &call) { return is_float16(call) && call.seqlen_q >= SPLIT_ROWS; }

// Splits a row of floats, whose length is a multiple of 16, into bf16x2 of neighbours: high terms and low terms.
inline void split_to_bf16x2(const float *row, long count, float *high, float *low) {
    for (long j = 0; j < count; j += 16) {
        const __m512 x = (__m512)load(row + j);
        const __m256bh upper = _mm512_cvtneps_pbh(x);
        const __m512i widened = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)upper), 16);
        const __m256bh lower = _mm512_cvtneps_pbh(_mm512_sub_ps(x, (__m512)widened));
        memcpy((void *)(high + j / 2), &upper, sizeof upper);
        memcpy((void *)(low + j / 2), &lower, sizeof lower);
    }
}

// Splits two vectors of numbers of float16 into bf16x2: the two numbers of a lane are one. The high terms are the
// numbers cut off after 16 bits; the low terms are the rest, which has three bits.
inline void split_lanes(__m512 x, __m512 y, float *high, float *low) {
    const __m512i mask = _mm512_set1_epi32(int(0xFFFF0000));
    auto join = [&](__m512 first, __m512 second) {
        const __m512i half = _mm512_srli_epi32((__m512i)first, 16);
        return (Vector<float>)_mm512_or_si512(half, _mm512_and_si512((__m512i)second, mask));
    };
    auto rest = [&](__m512 x) { return _mm512_sub_ps(x, (__m512)_mm512_and_si512((__m512i)x, mask)); };
    store(high, join(x, y));
    store(low, join(rest(x), rest(y)));
}

inline __m512 load_16_of_float16(const uint16_t *in) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)in));
}

// Splits a row of float16, with zeros up to `width` bf16x2. Of each 32 numbers, the first and the 17th make one, and
// so on.
inline void load_split(const char *in, long step, long dim, long width, float *high, float *low) {
    const bool is_whole = step == 1 && dim == 2 * width;
    Bits copied[32];
    for (long d = 0; d < width; d += 16) {
        if (!is_whole) load_piece(in, step, dim, 2 * d, copied, 32);
        const uint16_t *row = is_whole ? (const uint16_t *)in + 2 * d : copied;
        split_lanes(load_16_of_float16(row), load_16_of_float16(row + 16), high + d, low + d);
    }
}

// Splits two rows of float16, of which the second may be missing, into bf16x2: the two numbers of a column are one.
inline void interleave_split(const char *first, const char *second, long step, long dim, long padded, float *high,
                             float *low) {
    const char *rows[2] = {first, second};
    for (long d = 0; d < padded; d += 16) {
        __m512 numbers[2];
        for (int n = 0; n < 2; ++n) {
            const bool is_whole = step == 1 && dim == padded && rows[n];
            Bits copied[16];
            if (!is_whole) load_piece(rows[n] ? rows[n] : first, step, rows[n] ? dim : 0, d, copied, 16);
            numbers[n] = load_16_of_float16(is_whole ? (const uint16_t *)rows[n] + d : copied);
        }
        split_lanes(numbers[0], numbers[1], high + d, low + d);
    }
}

// Loads rows of q of a block: the high terms of a row, followed by its low terms.
inline void load_split_rows(const Call &call, const Entry &entry, const Block &block, float *out) {
    const long width = bf16x2_stride<float>(call.head_dim);
    for (long r = 0; r < rows_of(block); ++r) {
        float *to = out + 2 * r * width;
        load_split(row_address(call, Q, entry, row_of(block, r)), call.strides[Q][3], call.head_dim, width, to,
                   to + width);
    }
    if (call.scale < 0) negate_bf16x2(out, 2 * rows_of(block) * width);
}

// Loads rows of k, transposed: all high terms, and below them the low ones.
inline void load_split_keys(const Call &call, const Entry &entry, long head_kv, long first, long count, float *rows,
                            float *transposed, long transposed_stride) {
    const long width = bf16x2_stride<float>(call.head_dim);
    for (long j = 0; j < count; ++j) {
        float *to = rows + 2 * j * width;
        load_split(key_address(call, K, entry, head_kv, first + j), call.strides[K][3], call.head_dim, width, to,
                   to + width);
    }
    transpose(rows, 2 * width, count, 2 * width, transposed, transposed_stride);
}

// Loads rows of v as bf16x2 of neighbouring keys: the high terms to `high`, the low terms to `low`.
inline void load_split_values(const Call &call, const Entry &entry, long head_kv, long first, long count, float *high,
                              float *low) {
    const long padded = round_up(call.head_dim_v, LANES<float>);
    for (long j = 0; j < count; j += 2)
        interleave_split(key_address(call, V, entry, head_kv, first + j),
                         j + 1 < count ? key_address(call, V, entry, head_kv, first + j + 1) : nullptr,
                         call.strides[V][3], call.head_dim_v, padded, high + j / 2 * padded, low + j / 2 * padded);
}

inline bool is_finite_row(const char *in, long step, long count) {
    constexpr uint16_t INFINITE = 0x7C00;
    const uint16_t *bits = (const uint16_t *)in;
    const __m512i infinite = _mm512_set1_epi16(INFINITE);
    bool found = false;
    for (long d = 0; d < count && step == 1; d += 32) {
        const __mmask32 there = count - d < 32 ? (1u << (count - d)) - 1 : ~0u;
        const __m512i exponents = _mm512_and_si512(_mm512_maskz_loadu_epi16(there, bits + d), infinite);
        found |= _mm512_cmpeq_epi16_mask(exponents, infinite) != 0;
    }
    for (long d = 0; d < count && step != 1; ++d) found |= (bits[d * step] & INFINITE) == INFINITE;
    return !found;
}

// Checks whether q, k and v of a head of an entry are finite.
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

// How many bfloat16 terms a number of a call is split into, at most, where products are of bf16x2; 0 where they are
// not.
template <class T> inline int max_terms(const Call &call) {
    if (uses_bf16x2<T>(call)) return 1;
#if HAS_TILES
    if (is_float16(call)) return 2;
#endif
    return 0;
}

// How many it is in this call, after its numbers have been checked.
template <class T> inline int num_terms(const Work &work) {
    if (uses_bf16x2<T>(work.call)) return 1;
#if HAS_TILES
    if (may_split(work.call)) return work.is_finite.load(std::memory_order_relaxed) ? 2 : 0;
#endif
    return 0;
}

}  // namespace
