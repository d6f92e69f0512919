// Decode: rows of k and v are read once, where they lie and in their own dtype,
// and are converted in registers. Memory never rests: rows of v are fetched while scores are computed from k, and rows
// of k of the next tile are fetched while values are added. Processors look ahead along a tile by themselves, but not
// from one tile to the next.
#pragma once

#include "score_tiles.h"
#include "simd/bf16x2.h"

namespace {

// Blocks of up to DECODE_ROWS rows are decode, with up to MANY_KEYS keys those of up to DECODE_ROWS_OF_FEW_KEYS. Their
// scores are dot products with rows of k as they lie in memory.
constexpr int64_t DECODE_ROWS = 8, DECODE_ROWS_OF_FEW_KEYS = 2, MANY_KEYS = 512;
constexpr int KEYS_AT_ONCE = 4;  // keys whose products with a row of q are summed at a time

// All rows of the entry that share keys decide it where the bits of a row must not depend on how rows are cut into
// blocks.
inline bool is_decode(const Call &call, const Entry &entry, const Block &block) {
    const int64_t rows = call.batch_invariant ? entry.seqlen_q * group_of(call) : rows_of(block);
    return rows <= (entry.seqlen_k > MANY_KEYS ? DECODE_ROWS : DECODE_ROWS_OF_FEW_KEYS);
}

// sum + x y, where x was loaded as S.
template <class T, class S> inline Vector<T> add_product_as(Vector<T> sum, Vector<T> x, Vector<T> y) {
    if constexpr (std::is_same_v<S, Bf16x2>) return Bf16x2Ops::add(sum, x, y);
    return add_product(sum, x, y);
}

// Rows of k or v of a tile: where each begins, and what its numbers are.
struct KeyRows {
    int64_t dtype;
    int64_t bytes;   // of a row
    int64_t stride;  // in bytes, from row to row; 0 where that differs
    const char *at[MAX_KEYS];
};

// Rows that are needed soon, and prefetched: they lie `offset` bytes after those of a tile.
struct Coming {
    const KeyRows &rows;
    int64_t offset;

    // Into the second level of the cache: a tile is too large for the first.
    ALWAYS_INLINE void fetch(int64_t j) const {
        for (int64_t x = 0; x < rows.bytes; x += 64) __builtin_prefetch(rows.at[j] + offset + x, 0, 2);
    }
};

// Whether rows of k or v are read where they lie: they are whole vectors of neighbours, and not fp8.
template <class T> inline bool are_read_in_place(const Call &call, Array array, int64_t dim) {
    return call.strides[array][3] == 1 && dim % LANES<T> == 0 && !has_float8(call);
}

// Finds the rows of the array itself if they are read in place; others are copied.
template <class T> inline void find_key_rows(const KeySlice &keys, T *copies, int64_t copies_stride, KeyRows &rows) {
    const Call &call = keys.call;
    const int64_t size = size_of(call.kv_dtype), count = keys.count;
    rows.dtype = call.kv_dtype;
    rows.bytes = keys.dim() * size;
    if (!are_read_in_place<T>(call, keys.array, keys.dim())) {
        load_keys(keys, copies, copies_stride, count);
        rows.dtype = sizeof(T) == 4 ? FLOAT32 : FLOAT64;
        rows.stride = copies_stride * int64_t(sizeof(T));
        for (int64_t j = 0; j < count; ++j) rows.at[j] = (const char *)(copies + j * copies_stride);
        return;
    }
    const int64_t stride = call.strides[keys.array][2] * size;
    rows.stride = call.page_size ? 0 : stride;
    for (int64_t j = 0; j < count;) {
        const int64_t in_page = call.page_size ? call.page_size - (keys.first + j) % call.page_size : count;
        const int64_t stop = smaller(count, j + in_page);
        const char *row = keys.row(j);
        for (; j < stop; ++j, row += stride) rows.at[j] = row;
    }
}

constexpr int MOST_PRODUCT_ROWS = 4;  // of q, at a time
template <class T> constexpr int KEYS_OF_SUMS = LANES<T> > KEYS_AT_ONCE ? LANES<T> : KEYS_AT_ONCE;

// Sums, lane by lane, of products of R rows of q and KEYS_AT_ONCE rows of k; those of the next row of q lie
// KEYS_OF_SUMS vectors further. It is a function of its own so that the sums stay in registers.
template <class T, class S, int R>
__attribute__((noinline)) void lanes_of_products(const T *q, int64_t dim, const char *const *k, Vector<T> *lanes) {
    const S *k0 = (const S *)k[0], *k1 = (const S *)k[1], *k2 = (const S *)k[2], *k3 = (const S *)k[3];
    Vector<T> sums0[R] = {}, sums1[R] = {}, sums2[R] = {}, sums3[R] = {};
    for (int64_t d = 0; d < dim; d += LANES<T>) {
        const Vector<T> x0 = load_as<T>(k0 + d), x1 = load_as<T>(k1 + d);
        const Vector<T> x2 = load_as<T>(k2 + d), x3 = load_as<T>(k3 + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const Vector<T> y = load(q + r * dim + d);
            sums0[r] = add_product_as<T, S>(sums0[r], x0, y);
            sums1[r] = add_product_as<T, S>(sums1[r], x1, y);
            sums2[r] = add_product_as<T, S>(sums2[r], x2, y);
            sums3[r] = add_product_as<T, S>(sums3[r], x3, y);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        Vector<T> *to = lanes + r * KEYS_OF_SUMS<T>;
        to[0] = sums0[r], to[1] = sums1[r], to[2] = sums2[r], to[3] = sums3[r];
    }
}

// s[r][j] = dot(q[r], k[j]) for up to MOST_PRODUCT_ROWS rows, by their `lanes_of_products`. The rest of the last vector
// gets products of the last key. One copy serves all dtypes of keys and numbers of rows: compilers take long for it.
template <class T>
NOINLINE void dot_products(void (*lanes_of)(const T *, int64_t, const char *const *, Vector<T> *), int64_t num_rows,
                           const T *q, int64_t dim, const KeyRows &k, int64_t num_keys, const Coming *coming, T *s) {
    constexpr int N = LANES<T>;
    Vector<T> lanes[MOST_PRODUCT_ROWS * KEYS_OF_SUMS<T>];
    for (int64_t j = 0; j < num_keys; j += KEYS_OF_SUMS<T>) {
#pragma GCC unroll 4
        for (int n = 0; n < KEYS_OF_SUMS<T>; n += KEYS_AT_ONCE) {
            const char *rows[KEYS_AT_ONCE];
#pragma GCC unroll 4
            for (int x = 0; x < KEYS_AT_ONCE; ++x) {
                const int64_t key = smaller(j + n + x, num_keys - 1);
                rows[x] = k.at[key];
                if (coming) coming->fetch(key);
            }
            lanes_of(q, dim, rows, lanes + n);
        }
        for (int64_t r = 0; r < num_rows; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < KEYS_OF_SUMS<T>; n += N)
                store(s + r * SCORES_STRIDE<T> + j + n, sums_of_lanes<T>(lanes + r * KEYS_OF_SUMS<T> + n));
    }
}

template <class T, int R, int N> inline void add_sums(const Vector<T> (&sums)[R][N], T *o, int64_t o_stride) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            T *p = o + r * o_stride + n * LANES<T>;
            store(p, load(p) + sums[r][n]);
        }
}

// o[r] += sum of s[r][j] v[j] for R rows and N vectors. The sum is complete before it is added to o.
template <class T, class S, int R, int N>
__attribute__((noinline)) void add_products(const T *s, const KeyRows &v, int64_t num_keys, int64_t d,
                                            const Coming *coming, T *o, int64_t o_stride) {
    Vector<T> sums[R][N] = {};
    for (int64_t j = 0; j < num_keys; ++j) {
        const S *row = (const S *)v.at[j] + d;
        if (coming) coming->fetch(j);
        Vector<T> x[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) x[n] = load_as<T>(row + n * LANES<T>);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vector<T> y = splat(s[r * SCORES_STRIDE<T> + j]);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sums[r][n] += y * x[n];
        }
    }
    add_sums<T>(sums, o + d, o_stride);
}

template <class T, class S, int R>
NOINLINE void weighted_rows(const T *s, const KeyRows &v, int64_t num_keys, int64_t dim, const Coming *coming, T *o) {
    constexpr int MOST = (NUM_REGISTERS == 32 ? 2 : 1) * (R > 4 ? 1 : R > 2 ? 2 : 4);
    int64_t d = 0;
    auto run = [&](auto vectors) {
        constexpr int N = decltype(vectors)::value;
        for (; dim - d >= N * LANES<T>; d += N * LANES<T>)
            add_products<T, S, R, N>(s, v, num_keys, d, d == 0 ? coming : nullptr, o, dim);
    };
    run(std::integral_constant<int, MOST>());
    if constexpr (MOST > 4) run(std::integral_constant<int, 4>());
    if constexpr (MOST > 2) run(std::integral_constant<int, 2>());
    run(std::integral_constant<int, 1>());
}

// Calls run(r, count) for groups of up to MOST rows: `r` is the first row of a group, and `count` is a type.
template <int MOST, class F> inline void for_groups_of_rows(int64_t num_rows, F run) {
    int64_t r = 0;
    for (; num_rows - r >= MOST; r += MOST) run(r, std::integral_constant<int, MOST>());
    if constexpr (MOST > 4)
        for (; num_rows - r >= 4; r += 4) run(r, std::integral_constant<int, 4>());
    if (num_rows - r == 3) run(r, std::integral_constant<int, 3>());
    if (num_rows - r == 2) run(r, std::integral_constant<int, 2>());
    if (num_rows - r == 1) run(r, std::integral_constant<int, 1>());
}

// s = Q K^T; rows of q are `dim` long, a multiple of the lanes of a vector. The rows of `coming` are fetched meanwhile.
template <class T>
inline void decode_scores(int64_t num_rows, const T *q, int64_t dim, const KeyRows &k, int64_t num_keys, Coming coming,
                          T *s) {
    with_element_type<T>(k.dtype, [&](auto *number) {
        using S = std::remove_const_t<std::remove_pointer_t<decltype(number)>>;
        for_groups_of_rows<MOST_PRODUCT_ROWS>(num_rows, [&](int64_t r, auto rows) {
            dot_products<T>(lanes_of_products<T, S, rows>, rows, q + r * dim, dim, k, num_keys,
                            r == 0 ? &coming : nullptr, s + r * SCORES_STRIDE<T>);
        });
    });
}

// o += s V, likewise.
template <class T>
inline void add_decode_values(int64_t num_rows, const T *s, const KeyRows &v, int64_t num_keys, int64_t dim,
                              Coming coming, T *o) {
    with_element_type<T>(v.dtype, [&](auto *number) {
        using S = std::remove_const_t<std::remove_pointer_t<decltype(number)>>;
        for_groups_of_rows<NUM_REGISTERS == 32 ? 8 : 4>(num_rows, [&](int64_t r, auto rows) {
            weighted_rows<T, S, decltype(rows)::value>(s + r * SCORES_STRIDE<T>, v, num_keys, dim,
                                                       r == 0 ? &coming : nullptr, o + r * dim);
        });
    });
}

}  // namespace
