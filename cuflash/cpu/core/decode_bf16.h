// Decode on half-precision keys, where there are instructions for bf16x2. With tile registers,
// queries that share keys are a tile of columns, and rows of k are multiplied by it where they lie. Without them,
// bf16x2 are multiplied in vectors. So arithmetic takes no longer, or not much longer, than reading k and v.
#pragma once

#include "decode.h"
#include "gemm_bf16x2.h"
#include "load_bf16x2.h"

namespace {

// How many keys are multiplied at a time for scores, and how many for values: what is made of them stays in the first
// level of the cache.
constexpr int64_t KEYS_OF_SCORES = 4 * TILE, KEYS_OF_VALUES = 2 * TILE;

// Loads q of a block as columns. Where numbers have two terms, the low terms lie below the high ones.
inline void load_decode_columns(const Call &call, const Entry &entry, const Block &block, float *rows, float *columns) {
    const int64_t width = max_terms<float>(call) * bf16x2_stride<float>(call.head_dim);
    if (call.dtype == BFLOAT16) {
        load_rows_bf16x2(call, Q, entry, block, call.head_dim, rows);
    } else {
        load_split_rows(call, entry, block, rows);
    }
    transpose(rows, width, rows_of(block), width, columns, TILE);
}

// s = Q K^T. `rows` has space for rows of k, `s_t` for a tile of keys by queries. If numbers have two terms and one is
// not finite, its scores are not finite either.
inline void decode_scores_bf16(const float *q_t, int64_t dim, const KeyRows &k, int64_t num_keys, int terms,
                               Coming coming, float *rows, float *s_t, float *s) {
    const int64_t width = bf16x2_stride<float>(dim);
    const bool lie_well =
        terms == 1 && dim == 2 * width && k.stride && k.stride % 4 == 0 && (uintptr_t)k.at[0] % 4 == 0;
    const int64_t stride = lie_well ? k.stride / 4 : terms * width;
    for (int64_t first = 0; first < num_keys; first += KEYS_OF_SCORES) {
        const int64_t count = smaller(KEYS_OF_SCORES, num_keys - first);
        const float *a = lie_well ? (const float *)k.at[first] : rows;
        for (int64_t j = 0; j < count; ++j) {
            float *to = rows + j * stride;
            coming.fetch(first + j);
            if (terms == 2) {
                load_split(k.at[first + j], 1, dim, width, to, to + width);
            } else if (!lie_well) {
                load_bits(k.at[first + j], 1, dim, (Bits *)to, 2 * width);
            }
        }
        const float *low_a = terms == 2 ? a + width : a, *low_q_t = terms == 2 ? q_t + width * TILE : q_t;
        Bf16x2Product scores{count, TILE, width, low_a, stride, low_q_t, TILE, s_t, TILE, false};
        if (terms == 2) {  // large products come last, because their sums are rounded most
            scores.add(low_a, q_t);
            scores.add(a, low_q_t);
            scores.add(a, q_t);
        }
        scores.finish();
        transpose(s_t, TILE, count, TILE, s + first, SCORES_STRIDE<float>);
    }
}

// Whether all scores of `num_rows` rows are finite.
inline bool are_finite(int64_t num_rows, const float *s, int64_t num_keys) {
    constexpr int N = LANES<float>;
    Vector<float> sum = {};  // of zeros or NaN; zeros follow the last key
    for (int64_t r = 0; r < num_rows; ++r)
        for (int64_t j = 0; j < num_keys; j += N) sum += load(s + r * SCORES_STRIDE<float> + j) * 0;
    return sum_of_lanes<float>(sum) == 0;
}

// o += P V, where numbers have one term: bf16x2 of weights times bf16x2 of keys. `interleaved` has space for the
// latter.
inline void add_decode_values_bf16(const float *p, const KeyRows &v, int64_t num_keys, int64_t dim, Coming coming,
                                   float *interleaved, float *o) {
    for (int64_t first = 0; first < num_keys; first += KEYS_OF_VALUES) {
        const int64_t count = smaller(KEYS_OF_VALUES, num_keys - first);
        for (int64_t j = 0; j < count; j += 2) {
            const bool has_next = j + 1 < count;
            coming.fetch(first + j);
            if (has_next) coming.fetch(first + j + 1);
            interleave(v.at[first + j], has_next ? v.at[first + j + 1] : nullptr, 1, dim, interleaved + j / 2 * dim,
                       dim);
        }
        bf16x2_product(TILE, dim, bf16x2_count(count), p + first / 2, KEYS_BF16X2_STRIDE, interleaved, dim, o, dim,
                       true);
    }
}

// Whether queries, keys and weights of a block of few rows are multiplied as bf16x2, in vectors. Keys have to lie in
// memory as the product reads them, and enough rows have to share them that memory would wait for arithmetic otherwise.
template <class T> inline bool decodes_in_bf16x2(const Call &call, const Block &block) {
    return !HAS_TILES && rows_of(block) > DECODE_ROWS_OF_FEW_KEYS && uses_bf16x2<T>(call) && call.dtype == BFLOAT16 &&
           call.strides[K][3] == 1 && call.strides[V][3] == 1 && call.head_dim % (2 * LANES<T>) == 0 &&
           call.head_dim_v % LANES<T> == 0;
}

// s = Q K^T, where rows of q are bf16x2.
[[maybe_unused]] NOINLINE void bf16x2_scores(int64_t num_rows, const float *q, int64_t dim, const KeyRows &k,
                                             int64_t num_keys, Coming coming, float *s) {
    const int64_t width = bf16x2_count(dim);
    for_groups_of_rows<MOST_PRODUCT_ROWS>(num_rows, [&](int64_t r, auto rows) {
        dot_products<float>(lanes_of_products<float, Bf16x2, rows>, rows, q + r * width, width, k, num_keys,
                            r == 0 ? &coming : nullptr, s + r * SCORES_STRIDE<float>);
    });
}

// o[r] += sum of the weights p[r][j] v[j] for R rows and N vectors, two keys at a time.
template <int R, int N>
__attribute__((noinline)) void add_bf16x2_products(const float *p, const KeyRows &v, int64_t num_keys, int64_t d,
                                                   const Coming *coming, float *o, int64_t o_stride) {
    auto words = [&](int64_t j, int n) {
        const Bits *p = (const Bits *)v.at[j] + d + n * LANES<float>;
        return widen<float>(load_halves(p));
    };
    Vector<float> sums[R][N] = {};
    for (int64_t j = 0; j < num_keys; j += 2) {
        const bool has_next = j + 1 < num_keys;
        if (coming) {
            coming->fetch(j);
            if (has_next) coming->fetch(j + 1);
        }
        Integers<float> x[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) x[n] = words(j, n);
        if (has_next)
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) x[n] |= words(j + 1, n) << 16;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vector<float> y = Bf16x2Ops::spread(p + r * KEYS_BF16X2_STRIDE + j / 2);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sums[r][n] = Bf16x2Ops::add(sums[r][n], y, (Vector<float>)x[n]);
        }
    }
    add_sums<float>(sums, o + d, o_stride);
}

// o += P V, where weights are bf16x2.
[[maybe_unused]] NOINLINE void add_bf16x2_values(int64_t num_rows, const float *p, const KeyRows &v, int64_t num_keys,
                                                 int64_t dim, Coming coming, float *o) {
    for_groups_of_rows<8>(num_rows, [&](int64_t r, auto rows) {
        constexpr int R = decltype(rows)::value, N = R > 4 ? 2 : 4;
        const float *row = p + r * KEYS_BF16X2_STRIDE;
        int64_t d = 0;
        for (; dim - d >= N * LANES<float>; d += N * LANES<float>)
            add_bf16x2_products<R, N>(row, v, num_keys, d, r == 0 && d == 0 ? &coming : nullptr, o + r * dim, dim);
        for (; d < dim; d += LANES<float>)
            add_bf16x2_products<R, 1>(row, v, num_keys, d, r == 0 && d == 0 ? &coming : nullptr, o + r * dim, dim);
    });
}

}  // namespace
