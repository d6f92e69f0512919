// The backward pass with tangents: the tangents of gradients, with the tiles, jobs and orders of the backward pass. Where
// that has weights p and gradients ds of scores, this pass has the tangents of both, too.
#pragma once

#include <initializer_list>

#include "backward.h"
#include "tangents.h"

namespace {

constexpr long BACKWARD_JVP_ROWS = 60, BACKWARD_JVP_KEYS = 128;  // of a block and of a tile at most

template <class T> struct BackwardJvpBuffers : BackwardBuffers<T> {
    const Call &tangents;
    T *tq, *tdout, *tk, *tk_t, *tv_t, *ts, *tds, *tlse, *tdelta;
    TangentBuffers<T> scores;

    BackwardJvpBuffers(const Work &work, char *memory)
        : BackwardBuffers<T>(work, memory), tangents(*work.tangents),
          scores(work.call, *work.tangents, Scaling<T>(work.call), this->scratch) {
        const long rows = work.rows_per_block, keys = work.keys_per_tile, dim = this->sizes.dim,
                   dim_v = this->sizes.dim_v;
        tq = this->scratch.template take<T>(rows * dim);
        tdout = this->scratch.template take<T>(rows * dim_v);
        tk = this->scratch.template take<T>(keys * larger(dim, dim_v));
        tk_t = this->scratch.template take<T>(dim * this->keys_stride);
        tv_t = this->scratch.template take<T>(dim_v * this->keys_stride);
        ts = this->scratch.template take<T>(rows * SCORES_STRIDE<T>);
        tds = this->scratch.template take<T>(rows * SCORES_STRIDE<T>);
        tlse = this->scratch.template take<T>(rows);
        tdelta = this->scratch.template take<T>(rows);
    }
};

template <class T>
inline void load_queries(const Work &work, const Entry &entry, const Block &block, BackwardJvpBuffers<T> &buffers) {
    const Call &call = work.call, &tangents = buffers.tangents;
    const long num_rows = rows_of(block), dim_v = buffers.sizes.dim_v;
    load_queries(work, entry, block, static_cast<BackwardBuffers<T> &>(buffers));
    const bool has_tdout = has_tangent(tangents, DOUT);
    if (has_tangent(tangents, Q)) load_signed_rows(tangents, Q, entry, block, call.head_dim, buffers.tq);
    if (has_tdout) load_rows(tangents, DOUT, entry, block, call.head_dim_v, buffers.tdout, dim_v, num_rows);
    for (long r = 0; r < num_rows; ++r) {
        const Row row = row_of(block, r);
        const T lse = buffers.lse[r];
        buffers.tlse[r] = number<T>(tangents, LSE, entry.batch, row.head, entry.first_q + row.i);
        buffers.tdelta[r] = tangent_of_delta(call, tangents, entry, row, lse, buffers.dout + r * dim_v,
                                             has_tdout ? buffers.tdout + r * dim_v : nullptr, dim_v, buffers.dq);
    }
}

template <class T>
inline void load_key_tile(const Call &call, const Entry &entry, long head_kv, long first, long count,
                          BackwardJvpBuffers<T> &buffers) {
    const Call &tangents = buffers.tangents;
    load_key_tile(call, entry, head_kv, first, count, static_cast<BackwardBuffers<T> &>(buffers));
    if (has_tangent(tangents, V))
        load_and_transpose(tangents, V, entry, head_kv, first, count, call.head_dim_v, buffers.tk, buffers.tv_t,
                           buffers.keys_stride);
    if (has_tangent(tangents, K))
        load_and_transpose(tangents, K, entry, head_kv, first, count, call.head_dim, buffers.tk, buffers.tk_t,
                           buffers.keys_stride);
}

// What a row knows of all of its keys.
template <class T> struct RowNumbers {
    T lse, delta, tlse, tdelta;
    RowSum<T> sum;
};

// Replaces the scores p of a row by weights, their tangents ts by those of the weights, both with dropout; the gradients
// ds of weights by those of products, times the scale, and their tangents tds by the tangents of these.
template <class T>
inline void softmax_row(const Call &call, const Scaling<T> &scaling, const BackwardJvpBuffers<T> &buffers,
                        const RowNumbers<T> &row, long columns, const unsigned char *kept, const T *tanhs,
                        const T *cap_slopes, T *p, T *ts, T *ds, T *tds) {
    if (row.lse == T(-__builtin_inf())) {
        for (T *x : {p, ts, ds, tds}) clear(x, columns);
        return;
    }
    const Vector<T> unit = splat(buffers.scores.unit), scale = splat(T(size_of_scale(call))),
                    of_scale = splat(tangent_of_scale<T>(buffers.tangents));
    auto recompute_p = [&](auto weight_of, auto drops) {
        auto kept_of = [&](Vector<T> x, long j) {
            return drops ? drop<T>(x * splat(T(call.kept_scale)), kept + j) : x;
        };
        for (long j = 0; j < columns; j += LANES<T>) {
            const Vector<T> weight = weight_of(load(p + j));
            // Tangents without weight may be infinite or NaN.
            const auto counts = weight != Vector<T>{};
            const Vector<T> u = counts ? add_product(splat(-row.tlse), load(ts + j), unit) : Vector<T>{};
            Vector<T> gradient = weight * (kept_of(load(ds + j), j) - splat(row.delta));
            Vector<T> tangent = add_product(weight * (kept_of(load(tds + j), j) - splat(row.tdelta)), u, gradient);
            if (tanhs) {
                const Vector<T> slope = slope_of_cap<T>(load(tanhs + j));
                tangent = add_product(tangent * slope, gradient, counts ? load(cap_slopes + j) : Vector<T>{});
                gradient = gradient * slope;
            }
            store(p + j, kept_of(weight, j));
            store(ts + j, kept_of(weight * u, j));
            store(ds + j, gradient * scale);
            store(tds + j, add_product(tangent * scale, gradient, of_scale));
        }
    };
    with_weights(scaling, row.lse, row.sum, [&](auto weight_of) {
        call.dropout_steps ? recompute_p(weight_of, std::true_type()) : recompute_p(weight_of, std::false_type());
    });
}

// Computes weights p and gradients ds, and the tangents of both, of a block and a tile that are loaded.
template <class T>
inline Visible differentiate(const Call &call, const Scaling<T> &scaling, const Entry &entry, const Block &block,
                             long first, long count, bool, BackwardJvpBuffers<T> &buffers) {
    constexpr long STRIDE = SCORES_STRIDE<T>;
    const Call &tangents = buffers.tangents;
    const Sizes<T> &sizes = buffers.sizes;
    if (call.dropout_steps) load_kept(call, entry, block, first, count, buffers.kept);
    const long next_bias = FEW_OF_GROUP * call.strides[BIAS][2];
    auto clear_keys = [&](Keys computed, long r, long begin, long end) {
        for (T *x : {buffers.p, buffers.ts, buffers.ds, buffers.tds}) clear_scores(computed, r, begin, end, x);
    };
    auto differentiate_rows = [&](long r0, long n, Keys keys, long columns) {
        const long at = r0 * STRIDE + keys.first;
        T *p = buffers.p + at, *ts = buffers.ts + at, *ds = buffers.ds + at, *tds = buffers.tds + at;
        const T *q = buffers.q + r0 * sizes.dim, *dout = buffers.dout + r0 * sizes.dim_v;
        const T *k_t = buffers.k_t + keys.first, *v_t = buffers.v_t + keys.first;
        auto multiply = [&](const T *rows, const T *keys_t, T *c, bool adds) {
            product_of_rows(n, columns, call.head_dim_v, rows, sizes.dim_v, keys_t, buffers.keys_stride, c, STRIDE,
                            adds);
        };
        multiply_rows(call, buffers.q, call.head_dim, k_t, buffers.keys_stride, r0, n, columns, p);
        multiply_tangents(call, tangents, n, columns, q, buffers.tq + r0 * sizes.dim, k_t, buffers.tk_t + keys.first,
                          sizes.dim, buffers.keys_stride, ts);
        multiply(dout, v_t, ds, false);
        const bool has_tv = has_tangent(tangents, V), has_tdout = has_tangent(tangents, DOUT);
        if (has_tv) multiply(dout, buffers.tv_t + keys.first, tds, false);
        if (has_tdout) multiply(buffers.tdout + r0 * sizes.dim_v, v_t, tds, has_tv);
        for (long r = 0; r < n && !has_tv && !has_tdout; ++r) clear(tds + r * STRIDE, columns);
        finish_both(call, tangents, scaling, entry, block, r0, n, first + keys.first, keys.stop - keys.first, columns,
                    next_bias, p, buffers.added, ts, buffers.scores);
        for (long r = 0; r < n; ++r) {
            const long own = r0 + r, in_group = r * STRIDE;
            const RowNumbers<T> row = {buffers.lse[own], buffers.delta[own], buffers.tlse[own], buffers.tdelta[own],
                                       buffers.row_sums[own]};
            const T *tanhs = buffers.scores.tanhs ? buffers.scores.tanhs + in_group : nullptr;
            const T *cap_slopes = tanhs ? buffers.scores.cap_slopes + in_group : nullptr;
            softmax_row(call, scaling, buffers, row, columns, buffers.kept + own * MAX_KEYS + keys.first, tanhs,
                        cap_slopes, p + in_group, ts + in_group, ds + in_group, tds + in_group);
        }
    };
    return for_visible_rows<T>(call, entry, block, first, count, clear_keys, differentiate_rows);
}

template <class T>
inline void multiply_gradients(const Call &call, const Entry &entry, const Block &block, const Visible &visible,
                               long first, long count, bool wants_dq, BackwardJvpBuffers<T> &buffers) {
    const Call &tangents = buffers.tangents;
    const Sizes<T> &sizes = buffers.sizes;
    auto add = [&](const T *scores, const T *rows, long dim, T *to) {
        add_to_keys(call, visible, count, scores, rows, dim, to, buffers.keys_stride);
    };
    auto add_to_queries = [&](const T *scores, const T *keys, bool adds) {
        multiply_by_keys(call, entry, block, visible.rows, first, count, buffers, scores, keys, buffers.dq, adds);
    };
    if (is_wanted(tangents, DV)) {
        add(buffers.ts, buffers.dout, sizes.dim_v, buffers.dv);
        if (has_tangent(tangents, DOUT)) add(buffers.p, buffers.tdout, sizes.dim_v, buffers.dv);
    }
    if (is_wanted(tangents, DK)) {
        add(buffers.tds, buffers.q, sizes.dim, buffers.dk);
        if (has_tangent(tangents, Q)) add(buffers.ds, buffers.tq, sizes.dim, buffers.dk);
    }
    if (wants_dq) {
        add_to_queries(buffers.tds, buffers.k, false);
        if (has_tangent(tangents, K)) add_to_queries(buffers.ds, buffers.tk, true);
    }
}

template <class T> bool prepare_backward_jvp(Work &work) {
    const Call &call = work.call, &results = *work.tangents;
    if (!make_entries(work)) return false;
    choose_tiles<T>(work, BACKWARD_JVP_ROWS, BACKWARD_JVP_KEYS);
    if (!make_tiles(work)) return false;
    work.scratch_bytes = BackwardJvpBuffers<T>(work, nullptr).scratch.used;
    const long batch = call.arrays[CU_SEQLENS_Q] ? 1 : call.batch;
    const bool has_accum = is_wanted(results, DQ) && has_dq_accum(call);
    const long dq_size = batch * call.num_heads * call.seqlen_q * call.head_dim;
    work.adds_dq = is_wanted(results, DQ);
    if (has_accum && !work.allocate(work.shared, dq_size * long(sizeof(T)))) return false;
    if (!allocate_row_sums<T>(work)) return false;
    if (work.row_sums && !make_blocks(work, false, 0)) return false;
    if (!work.allocate(work.progress, work.num_tiles)) return false;
    for (long t = 0; t < work.num_tiles; ++t) work.progress[t] = 0;
    work.add_phase(clear_job<T>, batch * larger(call.num_heads, call.num_heads_kv));
    if (work.row_sums && !call.arrays[ROW_SUMS]) work.add_phase(row_sums_job<T>, work.num_blocks);
    if (work.adds_dq || is_wanted(results, DK) || is_wanted(results, DV))
        work.add_phase(key_tile_job<T, BackwardJvpBuffers<T>>, work.num_tiles);
    if (has_accum) work.add_phase(round_job<T>, work.num_entries * call.num_heads);
    if (is_wanted(results, DSINKS)) work.add_phase(sinks_job<T>, call.num_heads);
    return true;
}

}  // namespace
