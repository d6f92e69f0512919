// The softmax of the forward pass inside its two products, where the scale alone acts on scores: QK^T finds row maxima
// as it stores scores, and PV computes the weights of the next keys while it multiplies those of the keys before. What
// is left of the time of exponentials is that of their own multiply-adds.
#pragma once

#include "decode.h"
#include "pack_kv.h"

namespace {

// Only AVX-512 has registers for it, and only float32 these exponentials. A block of a product has FUSED_ROWS rows and
// FUSED_VECTORS vectors of columns.
template <class T> constexpr bool MAY_FUSE_SOFTMAX = HAS_TABLE_EXP2<T> && VECTOR_BYTES == 64 && !HAS_BF16X2;
constexpr int FUSED_ROWS = 12, FUSED_VECTORS = 2;

// Whether nothing but the scale, the window and lengths act on scores of a call.
template <class T> inline bool may_fuse_softmax(const Call &call, const Scaling<T> &scaling) {
    return MAY_FUSE_SOFTMAX<T> && !scaling.acts_on_scores && !call.dropout_steps && !has_row_reductions(call) &&
           !call.arrays[MASK] && !call.arrays[BLOCK_MASK] && call.head_dim_v > (FUSED_VECTORS - 1) * LANES<T>;
}

// Calls step(i) for i below `count`, as a loop that the compiler leaves alone.
template <class F> ALWAYS_INLINE void repeat(int64_t count, F step) {
#pragma GCC unroll 1
    for (int64_t i = 0; i < count; ++i) step(i);
}

// A block of FUSED_ROWS rows and FUSED_VECTORS vectors of a product, whose sums stay in registers.
template <class T> struct FusedBlock {
    static constexpr int R = FUSED_ROWS, N = FUSED_VECTORS;
    Vector<T> sums[R][N] = {};
    const T *rows[R / 3], *b;
    int64_t row_stride, b_stride;

    ALWAYS_INLINE FusedBlock(const T *a, int64_t a_stride, const T *b, int64_t b_stride)
        : b(b), row_stride(a_stride), b_stride(b_stride) {
#pragma GCC unroll 4
        for (int g = 0; g < R / 3; ++g) rows[g] = a + 3 * g * a_stride;
    }
    // Adds the products of the next column of A.
    ALWAYS_INLINE void add_next() {
        add_products<T, R, N, ElementOps<T>>(sums, rows, row_stride, b);
        b += b_stride;
#pragma GCC unroll 4
        for (int g = 0; g < R / 3; ++g) ++rows[g];
    }
};

// Scores of whole blocks of rows, and the largest score of each lane. Scores of a block are compared during the
// products of the next one.
template <class T>
NOINLINE void scores_with_maxima(int64_t num_rows, int64_t num_columns, int64_t length, const T *q, int64_t q_stride,
                                 const T *k_t, int64_t k_stride, T *s, T *maxima) {
    constexpr int64_t R = FUSED_ROWS, L = LANES<T>, WIDTH = FUSED_VECTORS * L;
    const int64_t count = ceil_div(length, SUM_LENGTH), step = ceil_div(length, count);
    for (int64_t r = 0; r < num_rows; ++r) store(maxima + r * L, splat(T(-__builtin_inf())));
    auto compare = [&](int64_t r, int64_t j) __attribute__((always_inline)) {
        const T *from = s + r * SCORES_STRIDE<T> + j;
        store(maxima + r * L, larger<T>(load(maxima + r * L), larger<T>(load(from), load(from + L))));
    };
    for (int64_t j = 0; j < num_columns; j += WIDTH)
        for (int64_t k = 0; k < length; k += step) {
            const int64_t terms = smaller(step, length - k);
            for (int64_t r = 0; r < num_rows; r += R) {
                FusedBlock<T> block(q + r * q_stride + k, q_stride, k_t + k * k_stride + j, k_stride);
                const int64_t compared = k == 0 && j > 0 ? R : 0;
                repeat(compared, [&](int64_t i) __attribute__((always_inline)) {
                    block.add_next();
                    compare(r + i, j - WIDTH);
                });
                repeat(terms - compared, [&](int64_t) __attribute__((always_inline)) { block.add_next(); });
                store_sums<T, R, FUSED_VECTORS>(block.sums, s + r * SCORES_STRIDE<T> + j, SCORES_STRIDE<T>, k > 0);
            }
        }
    for (int64_t r = 0; r < num_rows; ++r) compare(r, num_columns - WIDTH);
}

// Adds P V of a block of rows, and of FUSED_VECTORS vectors of V, to o. Scores in `s` become weights, whose sums are
// added to l, lane by lane. `minus` is what is subtracted from the scores of each row.
template <class T>
NOINLINE void add_values_by_scores(const Exp2ByTable &power, const T *minus, int64_t num_keys, T *s, const T *v,
                                   int64_t v_stride, T *o, int64_t o_stride, T *l) {
    constexpr int R = FUSED_ROWS, L = LANES<T>;
    alignas(VECTOR_BYTES) T sums_of_weights[R * L];
    for (int r = 0; r < R; ++r) {
        T *from = s + r * SCORES_STRIDE<T>;
        const Vector<T> p = power(load(from) - splat(minus[r]));
        store(from, p);
        store(sums_of_weights + r * L, p);
    }
    FusedBlock<T> block(s, SCORES_STRIDE<T>, v, v_stride);
    for (int64_t k = L; k < num_keys; k += L) {
        T *from = s + k, *sum = sums_of_weights;
        repeat(R, [&](int64_t r) __attribute__((always_inline)) {
            block.add_next();
            const Vector<T> p = power(load(from) - splat(minus[r]));
            store(from, p);
            store(sum, load(sum) + p);
            from += SCORES_STRIDE<T>, sum += L;
        });
        repeat(L - R, [&](int64_t) __attribute__((always_inline)) { block.add_next(); });
    }
    repeat(L, [&](int64_t) __attribute__((always_inline)) { block.add_next(); });
    store_sums<T, R, FUSED_VECTORS>(block.sums, o, o_stride, true);
    for (int r = 0; r < R; ++r) store(l + r * L, load(l + r * L) + load(sums_of_weights + r * L));
}

// Whether all of these rows attend to all of these keys, and both are whole blocks.
template <class T>
inline bool fills_blocks(const Call &call, const Entry &entry, const Block &block, int64_t r0, int64_t num_rows,
                         const Keys &keys) {
    const Span span = span_of(block, r0, num_rows);
    const Keys all = keys_visible_to_all(call, entry, span.first, span.last);
    return num_rows % FUSED_ROWS == 0 && (keys.stop - keys.first) % (FUSED_VECTORS * LANES<T>) == 0 &&
           all.first <= keys.first && all.stop >= keys.stop;
}

// Both products of rows of a block from r0 on with `num_keys` keys of a tile, from `at` on.
template <class T>
NOINLINE void fused_rows(const Scaling<T> &scaling, const Tile<T> &tile, int64_t at, int64_t num_keys, int64_t dim,
                         int64_t r0, int64_t num_rows, ForwardBuffers<T> &buffers) {
    constexpr int64_t L = LANES<T>, FIRST = FUSED_VECTORS * L;
    const Exp2ByTable power(scaling.factor);
    const int64_t dim_v = buffers.sizes.dim_v;
    const T *v = tile.v + at * tile.v_stride;
    T *s = buffers.s + at, *o = buffers.o + r0 * dim_v;
    alignas(VECTOR_BYTES) T maxima[WIDE_GROUP * L], minus[FUSED_ROWS];
    scores_with_maxima(num_rows, num_keys, dim, buffers.q + r0 * buffers.sizes.dim, buffers.sizes.dim, tile.k_t + at,
                       buffers.keys_stride, s, maxima);
    for (int64_t r = 0; r < num_rows; r += FUSED_ROWS) {
        for (int64_t i = 0; i < FUSED_ROWS; ++i) {
            const int64_t own = r0 + r + i;
            const RowSoFar<T> row = {buffers.row_max[own], buffers.l + own * L, buffers.o + own * dim_v, dim_v};
            raise_row_max(scaling, load(maxima + (r + i) * L), row, NoReductions());
            minus[i] = row.row_max == T(-__builtin_inf()) ? T(0) : row.row_max;
        }
        add_values_by_scores<T>(power, minus, num_keys, s + r * SCORES_STRIDE<T>, v, tile.v_stride, o + r * dim_v,
                                dim_v, buffers.l + (r0 + r) * L);
    }
    product<T, Order::ROWS, ElementOps<T>, TALL_BLOCKS>(num_rows, dim_v - FIRST, num_keys, s, SCORES_STRIDE<T>,
                                                        v + FIRST, tile.v_stride, o + FIRST, dim_v, true);
}

}  // namespace
