// Tangents of scores, from those of products of q and k.
#pragma once

#include "gemm.h"
#include "score_tiles.h"

namespace {

inline bool has_tangent(const Call &tangents, Array array) { return tangents.arrays[array] != nullptr; }

// Whether tangents of scores are made of those of products, and of others.
inline bool moves_products(const Call &tangents) {
    return has_tangent(tangents, Q) || has_tangent(tangents, K) || has_tangent(tangents, SCALE);
}
inline bool moves_scores(const Call &tangents) {
    return moves_products(tangents) || has_tangent(tangents, BIAS) || has_tangent(tangents, ALIBI_SLOPES) ||
           has_tangent(tangents, SOFTCAP);
}

// The tangent of the scale, where it is the size of the scale that multiplies products.
template <class T> inline T tangent_of_scale(const Call &tangents) {
    return has_tangent(tangents, SCALE) ? number<T>(tangents, SCALE, 0, 0) * T(tangents.scale) : T(0);
}

// What the tangents of scores of a few rows are made of, and what goes with them.
template <class T> struct TangentBuffers {
    bool has_sums;          // whether tangents of gradients of numbers are wanted
    bool has_products;      // whether a tangent depends on products of q and k themselves
    bool acts_on_tangents;  // whether tangents of products are anything but scaled
    T unit;                 // by which what `finish_tangents` leaves is scaled
    T *tanhs, *products, *tproducts, *cap_slopes, *bias;

    TangentBuffers(const Call &call, const Call &tangents, const Scaling<T> &scaling, Scratch &scratch)
        : has_sums(has_tangent(tangents, DALIBI_SLOPES) || has_tangent(tangents, DSCALE) ||
                   has_tangent(tangents, DSOFTCAP)),
          has_products(has_sums || has_tangent(tangents, SCALE) || has_tangent(tangents, SOFTCAP)),
          acts_on_tangents(scaling.acts_on_scores || has_products), unit(T(acts_on_tangents ? 1 : scaling.natural)) {
        const int64_t scores = GROUP * SCORES_STRIDE<T>;
        tanhs = scratch.template take<T>(has_cap(call) ? scores : 0);
        products = scratch.template take<T>(has_products ? scores : 0);
        tproducts = scratch.template take<T>(has_sums ? scores : 0);
        cap_slopes = scratch.template take<T>(has_cap(call) && call.is_backward ? scores : 0);
        bias = scratch.template take<T>(has_tangent(tangents, BIAS) ? SUBGROUP * MAX_KEYS : 0);
        if (!has_cap(call)) tanhs = nullptr;
        if (!has_cap(call) || !call.is_backward) cap_slopes = nullptr;
    }
    // The same for rows from r on of a group.
    TangentBuffers from_row(int64_t r) const {
        TangentBuffers of_rows = *this;
        for (T **x : {&of_rows.tanhs, &of_rows.products, &of_rows.tproducts, &of_rows.cap_slopes})
            if (*x) *x += r * SCORES_STRIDE<T>;
        return of_rows;
    }
};

// Rows of q, keys, transposed, and the tangents of both.
template <class T> struct ProductOperands {
    const T *q, *tq, *k_t, *tk_t;
    int64_t dim, keys_stride;
};

// Computes the tangents of products of q and k.
template <class T>
inline void multiply_tangents(const Call &call, const Call &tangents, int64_t num_rows, int64_t columns,
                              const ProductOperands<T> &of, T *ts) {
    bool adds = false;
    auto add = [&](const T *rows, const T *keys) {
        product_of_rows(num_rows, columns, call.head_dim, rows, of.dim, keys, of.keys_stride, ts, SCORES_STRIDE<T>,
                        adds);
        adds = true;
    };
    if (has_tangent(tangents, Q)) add(of.tq, of.k_t);
    if (has_tangent(tangents, K)) add(of.q, of.tk_t);
    for (int64_t r = 0; r < num_rows && !adds; ++r) clear(ts + r * SCORES_STRIDE<T>, columns);
}

// Turns tangents of products of q and k into those of scores, whose tanhs, if there is a cap, and products, if tangents
// depend on them, are in `buffers`. Tangents of hidden scores may be anything.
template <class T>
__attribute__((noinline)) void finish_tangents(const Call &tangents, const ScoreTile &tile, T *all_ts,
                                               const TangentBuffers<T> &buffers) {
    const Call &call = tile.call;
    const Vector<T> scale = splat(T(size_of_scale(call))), of_scale = splat(tangent_of_scale<T>(tangents));
    const Vector<T> inverse = splat(T(has_cap(call) ? 1 / call.softcap : 0));
    const Vector<T> of_cap = splat(has_tangent(tangents, SOFTCAP) ? number<T>(tangents, SOFTCAP, 0, 0) : T(0));
    BiasRows bias;
    const bool has_bias = has_tangent(tangents, BIAS), has_slopes = has_tangent(tangents, ALIBI_SLOPES);
    if (has_bias) find_bias(tangents, tile, buffers.bias, bias);
    for_rows(tile, all_ts, [&](int64_t r, Row row, T *ts) {
        auto of_row = [&](T *x) { return x ? x + r * SCORES_STRIDE<T> : nullptr; };
        const T *products = buffers.has_products ? of_row(buffers.products) : nullptr, *tanhs = of_row(buffers.tanhs);
        T *cap_slopes = of_row(buffers.cap_slopes);
        const T slope = has_slopes ? number<T>(tangents, ALIBI_SLOPES, tile.entry.index, row.head) : T(0);
        const Vector<T> start = splat(T(tile.first - row.i - tile.entry.diagonal)) + iota<T>();
        for (int64_t j = 0; j < tile.padded; j += LANES<T>) {
            Vector<T> x = load(ts + j) * scale;
            const Vector<T> product = products ? load(products + j) : Vector<T>{};
            if (products) x = add_product(x, product, of_scale);
            if (tanhs) {
                const Vector<T> tanh = load(tanhs + j), cap_slope = slope_of_cap<T>(tanh);
                if (cap_slopes) {
                    const Vector<T> moved = products ? x - argument_of_cap<T>(call, product) * of_cap : x;
                    // The slope first: of a small cap, the tangent of x may be too large a number where the slope is 0.
                    store(cap_slopes + j, splat(T(-2)) * tanh * cap_slope * moved * inverse);
                }
                x = x * cap_slope;
                if (products) x = add_product(x, derivative_by_softcap<T>(call, product, tanh), of_cap);
            }
            if (has_slopes) x = add_product(x, size_of_each<T>(start + splat(T(j))), splat(-slope));
            store(ts + j, x);
        }
        if (has_bias)
            with_element_type<T>(bias.dtype, [&](auto *numbers) {
                for (int64_t j = 0; j < tile.padded; j += LANES<T>)
                    store(ts + j, load(ts + j) + load_as<T>(decltype(numbers)(bias.at[r]) + j));
            });
    });
}

// Scores of a tile, and their tangents if these move, from products of q and k and the tangents of these. `copies` is
// that of `finish_scores`.
template <class T>
inline void finish_both(const Call &tangents, const Scaling<T> &scaling, const ScoreTile &tile, T *scores, T *copies,
                        T *ts, const TangentBuffers<T> &buffers) {
    auto copy = [&](const T *from, T *to) {
        for (int64_t r = 0; r < tile.num_rows; ++r)
            memcpy(to + r * SCORES_STRIDE<T>, from + r * SCORES_STRIDE<T>, tile.padded * sizeof(T));
    };
    if (ts && buffers.has_products) copy(scores, buffers.products);
    if (ts && buffers.has_sums) copy(ts, buffers.tproducts);
    for (int64_t r = 0; r < tile.num_rows; r += SUBGROUP) {  // for which there is space for a bias
        const ScoreTile few = tile.rows(r, smaller(SUBGROUP, tile.num_rows - r));
        const TangentBuffers<T> of_rows = buffers.from_row(r);
        finish_scores_if_needed(scaling, few, scores + r * SCORES_STRIDE<T>, copies, of_rows.tanhs);
        if (ts && buffers.acts_on_tangents) finish_tangents(tangents, few, ts + r * SCORES_STRIDE<T>, of_rows);
    }
}

}  // namespace
