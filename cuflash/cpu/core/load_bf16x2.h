// Operands as bf16x2, where there are instructions for products of bfloat16: weights, and gradients of scores, are
// rounded to bfloat16 before they are multiplied, as on a GPU. For the forward pass with tile registers, numbers of
// float16 are split into two terms; calls with any number that is not finite are computed in float32.
#pragma once

#include "score_tiles.h"
#include "simd/fp16_split.h"

namespace {

// Kernels for bfloat16 alone have backward passes of nothing else: k and v of fp8 have no gradients.
template <class T> constexpr bool BACKWARD_IN_BF16X2 = MAY_USE_BF16X2<T>;
template <class T> inline bool uses_bf16x2(const Call &call) { return MAY_USE_BF16X2<T> && call.kv_dtype == BFLOAT16; }

constexpr int64_t KEYS_BF16X2_STRIDE = MAX_KEYS / 2 + 16;  // of rows of bf16x2 of keys

// Loads rows of q or dout of a block as bf16x2 of neighbours; the sign of q changes where the scale is negative.
template <class T>
NOINLINE void load_rows_bf16x2(const Call &call, Array array, const Entry &entry, const Block &block, int64_t dim,
                               T *out) {
    const int64_t stride = bf16x2_stride<T>(dim);
    for (int64_t r = 0; r < rows_of(block); ++r)
        load_bits(row_address(call, array, entry, row_of(block, r)), call.strides[array][3], dim,
                  (Bits *)(out + r * stride), 2 * stride);
    if (has_negative_rows(call, array)) negate_bf16x2(out, rows_of(block) * stride);
}

// The same, or where these rows lie. Tile registers would load rows that straddle lines of the cache.
template <class T>
inline T *find_rows_bf16x2(const Call &call, Array array, const Entry &entry, const Block &block, int64_t dim,
                           T *space) {
    char *own = row_address(call, array, entry, row_of(block, 0));
    if (!HAS_TILES && are_adjacent_rows(call, array, block, BFLOAT16, dim, 2 * LANES<T>) && (uintptr_t)own % 4 == 0)
        return (T *)own;
    load_rows_bf16x2(call, array, entry, block, dim, space);
    return space;
}

// Loads rows of k or v as bf16x2 of neighbours, transposed: each row of the result has one bf16x2 of every key, up to a
// whole vector of keys. Rows that are whole vectors are read where they lie.
template <class T>
NOINLINE void load_keys_bf16x2(const KeySlice &keys, T *rows, T *transposed, int64_t transposed_stride) {
    const int64_t dim = keys.dim(), stride = bf16x2_stride<T>(dim);
    const int64_t *strides = keys.call.strides[keys.array];
    const char *own = keys.row(0);
    if (strides[3] == 1 && strides[2] % 2 == 0 && dim == 2 * stride && !keys.call.page_size && (uintptr_t)own % 4 == 0)
        return transpose((const T *)own, strides[2] / 2, keys.count, stride, transposed, transposed_stride);
    for (int64_t j = 0; j < keys.count; ++j)
        load_bits(keys.row(j), keys.step(), dim, (Bits *)(rows + j * stride), 2 * stride);
    transpose(rows, stride, keys.count, stride, transposed, transposed_stride);
}

// Loads rows of k or v as bf16x2 of neighbouring keys.
template <class T> NOINLINE void interleave_keys(const KeySlice &keys, T *out) {
    const int64_t padded = round_up(keys.dim(), LANES<T>);
    for (int64_t j = 0; j < keys.count; j += 2)
        interleave(keys.row(j), j + 1 < keys.count ? keys.row(j + 1) : nullptr, keys.step(), keys.dim(),
                   (float *)out + j / 2 * padded, padded);
}

// ---- float16 as two terms -------------------------------------------------------------------------------------------

constexpr int64_t SPLIT_ROWS = 32;  // the fewest queries for which it is worth it

inline bool is_float16(const Call &call) { return call.dtype == FLOAT16 && call.kv_dtype == FLOAT16; }

inline bool may_split(const Call &call) { return HAS_TILES && is_float16(call) && call.seqlen_q >= SPLIT_ROWS; }

// Loads rows of q of a block: the high terms of a row, followed by its low terms.
inline void load_split_rows(const Call &call, const Entry &entry, const Block &block, float *out) {
    const int64_t width = bf16x2_stride<float>(call.head_dim);
    for (int64_t r = 0; r < rows_of(block); ++r) {
        float *to = out + 2 * r * width;
        load_split(row_address(call, Q, entry, row_of(block, r)), call.strides[Q][3], call.head_dim, width, to,
                   to + width);
    }
    if (call.scale < 0) negate_bf16x2(out, 2 * rows_of(block) * width);
}

// Loads rows of k, transposed: all high terms, and below them the low ones.
inline void load_split_keys(const KeySlice &keys, float *rows, float *transposed, int64_t transposed_stride) {
    const int64_t width = bf16x2_stride<float>(keys.dim());
    for (int64_t j = 0; j < keys.count; ++j) {
        float *to = rows + 2 * j * width;
        load_split(keys.row(j), keys.step(), keys.dim(), width, to, to + width);
    }
    transpose(rows, 2 * width, keys.count, 2 * width, transposed, transposed_stride);
}

// Loads rows of v as bf16x2 of neighbouring keys: the high terms to `high`, the low terms to `low`.
inline void load_split_values(const KeySlice &values, float *high, float *low) {
    const int64_t padded = round_up(values.dim(), LANES<float>);
    for (int64_t j = 0; j < values.count; j += 2)
        interleave_split(values.row(j), j + 1 < values.count ? values.row(j + 1) : nullptr, values.step(), values.dim(),
                         padded, high + j / 2 * padded, low + j / 2 * padded);
}

// Checks whether q, k and v of a head of an entry are finite.
template <class T> void check_job(Work &work, char *, int64_t job) {
    const Call &call = work.call;
    const Entry &entry = work.entries[job / call.num_heads];
    const int64_t head = job % call.num_heads;
    bool is_finite = true;
    for (int64_t i = 0; i < entry.seqlen_q && is_finite; ++i)
        is_finite = is_finite_row(row_address(call, Q, entry, Row{head, i}), call.strides[Q][3], call.head_dim);
    for (int64_t j = 0; j < entry.seqlen_k && head < call.num_heads_kv && is_finite; ++j)
        is_finite = is_finite_row(key_address(call, K, entry, head, j), call.strides[K][3], call.head_dim) &&
                    is_finite_row(key_address(call, V, entry, head, j), call.strides[V][3], call.head_dim_v);
    if (!is_finite) work.is_finite.store(false, std::memory_order_relaxed);
}

// How many bfloat16 terms a number of a call is split into, at most, where products are of bf16x2; 0 where they are
// not.
template <class T> inline int max_terms(const Call &call) {
    if (uses_bf16x2<T>(call)) return 1;
    return HAS_TILES && is_float16(call) ? 2 : 0;
}

// How many it is in this call, after its numbers have been checked.
template <class T> inline int num_terms(const Work &work) {
    if (uses_bf16x2<T>(work.call)) return 1;
    return may_split(work.call) && work.is_finite.load(std::memory_order_relaxed) ? 2 : 0;
}

}  // namespace
