// The backward pass with tangents: the tangents of gradients, with the tiles, jobs and orders of the backward pass.
// Where that has weights p and gradients ds of scores, this pass has the tangents of both, too.
#pragma once

#include <initializer_list>

#include "backward.h"
#include "tangents.h"

namespace {

template <class T> struct BackwardJvpBuffers : BackwardBuffers<T> {
    static constexpr int64_t MOST_ROWS = 60, MOST_KEYS = 128;  // of a block and of a tile
    const Call &tangents;
    T *tq, *tdout, *tk, *tk_t, *tv_t, *ts, *tds, *dbias, *tlse, *tdelta;
    bool moves_weights = false;  // whether the weights of the block have tangents
    TangentBuffers<T> scores;

    BackwardJvpBuffers(const Work &work, char *memory)
        : BackwardBuffers<T>(work, memory), tangents(*work.tangents),
          scores(work.call, *work.tangents, Scaling<T>(work.call), this->scratch) {
        const int64_t rows = work.rows_per_block, keys = work.keys_per_tile, dim = this->sizes.dim,
                      dim_v = this->sizes.dim_v;
        tq = this->scratch.template take<T>(rows * dim);
        tdout = this->scratch.template take<T>(rows * dim_v);
        tk = this->scratch.template take<T>(keys * larger(dim, dim_v));
        tk_t = this->scratch.template take<T>(dim * this->keys_stride);
        tv_t = this->scratch.template take<T>(dim_v * this->keys_stride);
        ts = this->scratch.template take<T>(rows * SCORES_STRIDE<T>);
        tds = this->scratch.template take<T>(rows * SCORES_STRIDE<T>);
        dbias = this->scratch.template take<T>(is_wanted(tangents, DBIAS) ? rows * SCORES_STRIDE<T> : 0);
        tlse = this->scratch.template take<T>(rows);
        tdelta = this->scratch.template take<T>(rows);
    }

    const T *score_gradients() const { return dbias; }
};

template <class T>
inline void load_queries(const Work &work, const Entry &entry, const Block &block, BackwardJvpBuffers<T> &buffers) {
    const Call &call = work.call, &tangents = buffers.tangents;
    const int64_t num_rows = rows_of(block), dim_v = buffers.sizes.dim_v;
    load_queries(work, entry, block, static_cast<BackwardBuffers<T> &>(buffers));
    const bool has_tdout = has_tangent(tangents, DOUT);
    if (has_tangent(tangents, Q)) load_signed_rows(tangents, Q, entry, block, call.head_dim, buffers.tq);
    if (has_tdout) load_rows(tangents, DOUT, entry, block, call.head_dim_v, buffers.tdout, dim_v, num_rows);
    buffers.moves_weights = moves_scores(tangents);
    for (int64_t r = 0; r < num_rows; ++r) {
        const Row row = row_of(block, r);
        const T lse = buffers.lse[r];
        buffers.tlse[r] = number<T>(tangents, LSE, entry.batch, row.head, entry.first_q + row.i);
        // lse moves with the sink, and with scores of keys that other calls have.
        buffers.moves_weights |= buffers.tlse[r] != 0;
        buffers.tdelta[r] = tangent_of_delta(call, tangents, entry, row, lse, buffers.dout + r * dim_v,
                                             has_tdout ? buffers.tdout + r * dim_v : nullptr, dim_v, buffers.dq);
    }
}

template <class T>
inline void load_key_tile(const Call &call, const Entry &entry, int64_t head_kv, int64_t first, int64_t count,
                          BackwardJvpBuffers<T> &buffers) {
    const Call &tangents = buffers.tangents;
    load_key_tile(call, entry, head_kv, first, count, static_cast<BackwardBuffers<T> &>(buffers));
    if (has_tangent(tangents, V))
        load_and_transpose({tangents, V, entry, head_kv, first, count}, buffers.tk, buffers.tv_t, buffers.keys_stride);
    if (has_tangent(tangents, K))
        load_and_transpose({tangents, K, entry, head_kv, first, count}, buffers.tk, buffers.tk_t, buffers.keys_stride);
}

// The same with their tangents.
template <class T> struct JvpRowStats {
    T lse, delta, tlse, tdelta;
    RowSum<T> sum;
};

// Scores of a row, and all that goes with them, for keys of a tile.
template <class T> struct JvpScores {
    T *p, *ts, *ds, *tds;
    T *dbias = nullptr;  // if that is wanted
    const T *products = nullptr, *tproducts = nullptr;
    const T *tanhs = nullptr, *cap_slopes = nullptr;  // if there is a cap
    const unsigned char *kept = nullptr;
    Vector<T> start = {};  // of the distances of keys
};

// What a row adds to the tangents of the gradients of numbers.
template <class T> struct JvpSums {
    Vector<T> slopes = {}, scale = {}, softcap = {};
};

// Replaces the scores p of a row by weights, their tangents ts by those of the weights, both with dropout; the
// gradients ds of weights by those of products, times the scale, and their tangents tds by the tangents of these.
template <class T>
NOINLINE void softmax_row(const Call &call, const Scaling<T> &scaling, const BackwardJvpBuffers<T> &buffers,
                          const JvpRowStats<T> &row, int64_t columns, const JvpScores<T> &of, JvpSums<T> *sums) {
    if (row.lse == T(-__builtin_inf())) {
        for (T *x : {of.p, of.ts, of.ds, of.tds}) clear(x, columns);
        if (of.dbias) clear(of.dbias, columns);
        return;
    }
    const Vector<T> unit = splat(buffers.scores.unit), scale = splat(T(size_of_scale(call))),
                    of_scale = splat(tangent_of_scale<T>(buffers.tangents));
    const Vector<T> zero = {};
    auto recompute_p = [&](auto weight_of, auto drops) {
        auto kept_of = [&](Vector<T> x, int64_t j) {
            return drops ? drop<T>(x * splat(T(call.kept_scale)), of.kept + j) : x;
        };
        for (int64_t j = 0; j < columns; j += LANES<T>) {
            const Vector<T> weight = weight_of(load(of.p + j));
            // What has no weight may be infinite or NaN.
            const auto counts = weight != zero;
            auto if_counts = [&](const T *x) { return counts ? load(x + j) : zero; };
            const Vector<T> u = counts ? add_product(splat(-row.tlse), load(of.ts + j), unit) : zero;
            Vector<T> gradient = weight * (kept_of(load(of.ds + j), j) - splat(row.delta));
            Vector<T> tangent = add_product(weight * (kept_of(load(of.tds + j), j) - splat(row.tdelta)), u, gradient);
            if (of.dbias) store(of.dbias + j, tangent);
            if (sums) sums->slopes -= tangent * size_of_each<T>(of.start + splat(T(j)));
            if (of.tanhs) {
                const Vector<T> slope = slope_of_cap<T>(if_counts(of.tanhs)), cap_slope = if_counts(of.cap_slopes);
                if (sums) {
                    // The tangent of the derivative by the cap is -x times that of the slope.
                    const Vector<T> product = if_counts(of.products);
                    sums->softcap += tangent * derivative_by_softcap<T>(call, product, if_counts(of.tanhs)) -
                                     gradient * cap_slope * argument_of_cap<T>(call, product);
                }
                tangent = add_product(tangent * slope, gradient, cap_slope);
                gradient = gradient * slope;
            }
            if (sums) sums->scale += tangent * if_counts(of.products) + gradient * if_counts(of.tproducts);
            store(of.p + j, kept_of(weight, j));
            store(of.ts + j, kept_of(weight * u, j));
            store(of.ds + j, gradient * scale);
            store(of.tds + j, add_product(tangent * scale, gradient, of_scale));
        }
    };
    with_weights(scaling, row.lse, row.sum,
                 [&](auto weight_of, auto) { recompute_p(weight_of, call.dropout_steps != 0); });
}

// Computes weights p and gradients ds, and the tangents of both, of a block and a tile that are loaded.
template <class T>
inline Visible differentiate(const Call &call, const Scaling<T> &scaling, const Entry &entry, const Block &block,
                             int64_t first, int64_t count, bool for_bias, BackwardJvpBuffers<T> &buffers) {
    constexpr int64_t STRIDE = SCORES_STRIDE<T>;
    const Call &tangents = buffers.tangents;
    const Sizes<T> &sizes = buffers.sizes;
    if (call.dropout_steps) load_kept(call, entry, block, first, count, buffers.kept);
    const int64_t next_bias = SUBGROUP * call.strides[BIAS][2];
    const bool has_sums = !for_bias && buffers.scores.has_sums;
    auto clear_keys = [&](Keys computed, int64_t r, int64_t begin, int64_t end) {
        if (!for_bias && buffers.bias == BiasGradient::PAIRS)
            clear_bias(tangents, entry, row_of(block, r), first + begin, smaller(end, count) - begin);
        if (is_wanted(tangents, DBIAS)) clear_scores(computed, r, begin, end, buffers.dbias);
        for (T *x : {buffers.p, buffers.ts, buffers.ds, buffers.tds}) clear_scores(computed, r, begin, end, x);
    };
    auto differentiate_rows = [&](int64_t r0, int64_t n, Keys keys, int64_t columns, Keys) {
        const int64_t at = r0 * STRIDE + keys.first;
        T *p = buffers.p + at, *ts = buffers.ts + at, *ds = buffers.ds + at, *tds = buffers.tds + at;
        const T *q = buffers.q + r0 * sizes.dim, *dout = buffers.dout + r0 * sizes.dim_v;
        const T *k_t = buffers.k_t + keys.first, *v_t = buffers.v_t + keys.first;
        auto multiply = [&](const T *rows, const T *keys_t, T *c, bool adds) {
            product_of_rows(n, columns, call.head_dim_v, rows, sizes.dim_v, keys_t, buffers.keys_stride, c, STRIDE,
                            adds);
        };
        multiply_rows(call, buffers.q, call.head_dim, k_t, buffers.keys_stride, r0, n, columns, p);
        const ProductOperands<T> operands = {q,         buffers.tq + r0 * sizes.dim, k_t, buffers.tk_t + keys.first,
                                             sizes.dim, buffers.keys_stride};
        multiply_tangents(call, tangents, n, columns, operands, ts);
        multiply(dout, v_t, ds, false);
        const bool has_tv = has_tangent(tangents, V), has_tdout = has_tangent(tangents, DOUT);
        if (has_tv) multiply(dout, buffers.tv_t + keys.first, tds, false);
        if (has_tdout) multiply(buffers.tdout + r0 * sizes.dim_v, v_t, tds, has_tv);
        for (int64_t r = 0; r < n && !has_tv && !has_tdout; ++r) clear(tds + r * STRIDE, columns);
        const ScoreTile tile = {call,    entry,    block, r0, n, first + keys.first, keys.stop - keys.first,
                                columns, next_bias};
        finish_both(tangents, scaling, tile, p, buffers.added, ts, buffers.scores);
        for (int64_t r = 0; r < n; ++r) {
            const int64_t own = r0 + r, in_group = r * STRIDE;
            const Row row = row_of(block, own);
            const JvpRowStats<T> stats = {buffers.lse[own], buffers.delta[own], buffers.tlse[own], buffers.tdelta[own],
                                          buffers.row_sums[own]};
            JvpScores<T> of = {p + in_group, ts + in_group, ds + in_group, tds + in_group};
            if (is_wanted(tangents, DBIAS)) of.dbias = buffers.dbias + at + in_group;
            of.products = buffers.scores.products + in_group;
            of.tproducts = buffers.scores.tproducts + in_group;
            if (has_cap(call)) {
                of.tanhs = buffers.scores.tanhs + in_group;
                of.cap_slopes = buffers.scores.cap_slopes + in_group;
            }
            of.kept = buffers.kept + own * MAX_KEYS + keys.first;
            of.start = splat(T(first + keys.first - row.i - entry.diagonal)) + iota<T>();
            JvpSums<T> sums;
            softmax_row(call, scaling, buffers, stats, columns, of, has_sums ? &sums : nullptr);
            if (for_bias) continue;
            if (of.dbias) put_bias_gradients(tangents, entry, block, row, first, count, keys, of.dbias, buffers);
            if (!has_sums) continue;
            buffers.sums[row.head] += double(sum_of_lanes<T>(sums.slopes));
            buffers.sums[call.num_heads] += double(sum_of_lanes<T>(sums.scale)) * tangents.scale;
            buffers.sums[call.num_heads + 1] += double(sum_of_lanes<T>(sums.softcap));
        }
    };
    return for_visible_rows<T>(call, entry, block, first, count, clear_keys, differentiate_rows);
}

template <class T>
inline void add_to_dk_and_dv(const Call &call, const Visible &visible, int64_t count, BackwardJvpBuffers<T> &buffers) {
    const Call &tangents = buffers.tangents;
    const Sizes<T> &sizes = buffers.sizes;
    auto add = [&](const T *scores, const T *rows, int64_t dim, T *to) {
        add_to_keys(call, visible, count, scores, rows, dim, to, buffers.keys_stride);
    };
    if (is_wanted(tangents, DV)) {
        if (buffers.moves_weights) add(buffers.ts, buffers.dout, sizes.dim_v, buffers.dv);
        if (has_tangent(tangents, DOUT)) add(buffers.p, buffers.tdout, sizes.dim_v, buffers.dv);
    }
    if (is_wanted(tangents, DK)) {
        add(buffers.tds, buffers.q, sizes.dim, buffers.dk);
        if (has_tangent(tangents, Q)) add(buffers.ds, buffers.tq, sizes.dim, buffers.dk);
    }
}

template <class T> inline void multiply_into_dq(const ScoreTile &tile, bool adds, BackwardJvpBuffers<T> &buffers) {
    multiply_by_keys(tile, buffers, buffers.tds, buffers.k, adds);
    if (has_tangent(buffers.tangents, K)) multiply_by_keys(tile, buffers, buffers.ds, buffers.tk, true);
}

}  // namespace
