// The forward pass with tangents: it has two more sums for each row,
//
//     a = sum of weight * ((tangent of the score - shift) * v + tv)
//     r = sum of weight * (tangent of the score - shift)
//
// which are rescaled where the row max rises, as o and l are. The shift takes out of the tangents what all keys of a
// row have in common: it moves to their mean so far wherever the row max rises. tlse is shift + r / l, and tout is
// (a - r / l * o) / l.
#pragma once

#include "gemm.h"
#include "pack_kv.h"
#include "schedule.h"
#include "tangents.h"

namespace {

// Rows of a block, at most: each row has as many numbers again for its tangents.
constexpr int64_t JVP_ROWS[] = {96, 60, 36, 24};

// What a row has summed.
template <class T> struct JvpRow {
    T &row_max, &shift;
    T *l, *r, *o, *a;
    int64_t dim;  // of o and a
};

template <class T> struct JvpBuffers : ForwardBuffers<T> {
    T *tq, *a, *r, *shift, *ts, *tk_t, *tv;
    TangentBuffers<T> scores;

    JvpBuffers(const Work &work, const Scaling<T> &scaling, char *memory)
        : ForwardBuffers<T>(work, memory), scores(work.call, *work.tangents, scaling, this->scratch) {
        const int64_t rows = work.rows_per_block, keys = work.keys_per_tile, dim = this->sizes.dim;
        tq = this->scratch.template take<T>(rows * dim);
        a = this->scratch.template take<T>(rows * this->sizes.dim_v);
        r = this->scratch.template take<T>(rows * LANES<T>);
        shift = this->scratch.template take<T>(rows);
        ts = this->scratch.template take<T>(GROUP * SCORES_STRIDE<T>);
        tk_t = this->scratch.template take<T>(dim * this->keys_stride);
        tv = this->scratch.template take<T>(keys * this->sizes.dim_v);
    }

    JvpRow<T> row(int64_t at) const {
        const int64_t dim = this->sizes.dim_v, lanes = at * LANES<T>;
        return {this->row_max[at], shift[at], this->l + lanes, r + lanes, this->o + at * dim, a + at * dim, dim};
    }
};

// Scores of a row become weights, and the tangents ts of the scores, if they move, become those of the weights, where
// the shift is taken out. Dropout applies to both, but not to their sums l and r.
template <class T>
NOINLINE void jvp_exponentials(bool moves, bool drops, const Scaling<T> &scaling, T unit, T *s, T *ts, int64_t num_keys,
                               const JvpRow<T> &row, const Kept<T> &kept) {
    constexpr int N = LANES<T>;
    Vector<T> most = load(s);
    for (int64_t j = N; j < num_keys; j += N) most = larger<T>(most, load(s + j));
    const bool rises = any_above<T>(most, row.row_max);
    if (rises) {
        T row_max = row.row_max;
        set_row_max(scaling.factor, most, row_max, row.l, row.o, row.dim);
        set_row_max(scaling.factor, most, row.row_max, row.r, row.a, row.dim);
    }
    // A row that has attended to no key yet has a row max of -inf, and only scores of -inf.
    const Vector<T> minus = splat(row.row_max == T(-__builtin_inf()) ? T(0) : row.row_max),
                    factor = splat(scaling.factor);
    auto weight_at = [&](int64_t j) { return exp2<T>(load(s + j) - minus, factor); };
    // The tangent of a score without weight may be infinite or NaN.
    auto tangent_of = [&](Vector<T> weight, int64_t j) {
        const Vector<T> u = add_product(splat(-row.shift), load(ts + j), splat(unit));
        return weight == Vector<T>{} ? Vector<T>{} : weight * u;
    };
    if (moves && rises) {
        Vector<T> l = load(row.l), r = load(row.r);
        for (int64_t j = 0; j < num_keys; j += N) {
            const Vector<T> weight = weight_at(j);
            l += weight;
            r += tangent_of(weight, j);
        }
        const T gain = sum_of_lanes<T>(r) / sum_of_lanes<T>(l);
        row.shift += gain;
        store(row.r, add_product(load(row.r), load(row.l), splat(-gain)));
        for (int64_t d = 0; d < row.dim; d += N)
            store(row.a + d, add_product(load(row.a + d), load(row.o + d), splat(-gain)));
    }
    auto kept_of = [&](Vector<T> x, int64_t j) { return drops ? kept.of(x, j) : x; };
    Vector<T> l = {}, r = {};
    for (int64_t j = 0; j < num_keys; j += N) {
        const Vector<T> weight = weight_at(j);
        store(s + j, kept_of(weight, j));
        l += weight;
        if (!moves) continue;
        const Vector<T> tangent = tangent_of(weight, j);
        store(ts + j, kept_of(tangent, j));
        r += tangent;
    }
    store(row.l, load(row.l) + l);
    if (moves) store(row.r, load(row.r) + r);
}

template <class T>
inline void jvp_tile(const Work &work, const Block &block, const Entry &entry, const Scaling<T> &scaling,
                     JvpBuffers<T> &buffers, int64_t first, int64_t count) {
    const Call &call = work.call, &tangents = *work.tangents;
    const int64_t num_rows = rows_of(block), dim = buffers.sizes.dim, dim_v = buffers.sizes.dim_v;
    const bool moves = moves_scores(tangents);
    const Tile<T> tile = load_tile(work, entry, block.head_kv, first, count, 0, buffers);
    if (has_tangent(tangents, K))
        load_transposed_keys({tangents, K, entry, block.head_kv, first, count}, buffers.rows, buffers.tk_t,
                             buffers.keys_stride);
    const T *tv = nullptr;
    int64_t tv_stride = 0;
    if (has_tangent(tangents, V))
        tv = find_values({tangents, V, entry, block.head_kv, first, count}, buffers.tv, tv_stride);
    if (call.dropout_steps) load_kept(call, entry, block, first, count, buffers.kept);
    for (int64_t r0 = 0, n; r0 < num_rows; r0 += n) {
        n = rows_of_group(call, block, r0, GROUP);
        const Keys keys = keys_of_group<T>(call, entry, block, r0, n, first, count);
        const int64_t here = keys.stop - keys.first, columns = round_up(here, LANES<T>);
        if (here <= 0) continue;
        T *s = buffers.s + keys.first, *ts = buffers.ts + keys.first;
        const T *q = buffers.q + r0 * dim;
        product_of_rows(n, columns, call.head_dim, q, dim, tile.k_t + keys.first, buffers.keys_stride, s,
                        SCORES_STRIDE<T>);
        const ProductOperands<T> operands = {
            q, buffers.tq + r0 * dim, tile.k_t + keys.first, buffers.tk_t + keys.first, dim, buffers.keys_stride};
        if (moves) multiply_tangents(call, tangents, n, columns, operands, ts);
        const ScoreTile scores = {call, entry, block, r0, n, first + keys.first, here, columns, here};
        finish_both(tangents, scaling, scores, s, buffers.bias, moves ? ts : nullptr, buffers.scores);
        for (int64_t r = 0; r < n; ++r) {
            const int64_t at = r0 + r;
            const Kept<T> kept = {buffers.kept + at * MAX_KEYS + keys.first, T(call.kept_scale)};
            jvp_exponentials<T>(moves, call.dropout_steps, scaling, buffers.scores.unit, s + r * SCORES_STRIDE<T>,
                                ts + r * SCORES_STRIDE<T>, columns, buffers.row(at), kept);
        }
        auto add = [&](const T *weights, const T *v, int64_t v_stride, T *to) {
            product<T, Order::ROWS>(n, dim_v, here, weights, SCORES_STRIDE<T>, v + keys.first * v_stride, v_stride,
                                    to + r0 * dim_v, dim_v, true);
        };
        add(s, tile.v, tile.v_stride, buffers.o);
        if (moves) add(ts, tile.v, tile.v_stride, buffers.a);
        if (tv) add(s, tv, tv_stride, buffers.a);
    }
}

// Writes the results of a row.
template <class T>
inline void finish_jvp_row(const Work &work, const Entry &entry, Row row, const JvpRow<T> &of, double natural) {
    const Call &call = work.call, &tangents = *work.tangents;
    const RowWithSink all =
        finish_row(call, entry, row, of.o, of.row_max * natural, double(sum_of_lanes<T>(load(of.l))));
    double r = double(sum_of_lanes<T>(load(of.r))) * all.shrinks;
    if (all.of_sink > 0) {
        const double of_sink = has_tangent(tangents, SINKS) ? double(number<T>(tangents, SINKS, 0, row.head)) : 0.0;
        r += all.of_sink * (of_sink - double(of.shift));
    }
    const double mean = all.l == 0 ? 0 : r / all.l;
    number<T>(tangents, LSE, entry.batch, row.head, entry.first_q + row.i) = T(double(of.shift) + mean);
    // As in write_row: with the tangent of values alone, and equal to them, this is out to the last bit.
    const Vector<T> factor = splat(T(all.shrinks / double(all.divisor<T>()))), minus = splat(T(-mean));
    write_out<T>(tangents, entry, row,
                 [&](int64_t d) { return add_product(load(of.a + d) * factor, load(of.o + d) * factor, minus); });
}

template <class T> void jvp_job(Work &work, char *memory, int64_t job) {
    const Call &call = work.call, &tangents = *work.tangents;
    const Block &block = work.blocks[job];
    const Entry &entry = work.entries[block.entry];
    const Scaling<T> scaling(call);
    JvpBuffers<T> buffers(work, scaling, memory);
    const Sizes<T> &sizes = buffers.sizes;
    const int64_t num_rows = rows_of(block);
    load_signed_rows(call, Q, entry, block, call.head_dim, buffers.q);
    if (has_tangent(tangents, Q)) load_signed_rows(tangents, Q, entry, block, call.head_dim, buffers.tq);
    clear(buffers.o, num_rows * sizes.dim_v);
    clear(buffers.a, num_rows * sizes.dim_v);
    clear(buffers.l, num_rows * LANES<T>);
    clear(buffers.r, num_rows * LANES<T>);
    clear(buffers.shift, num_rows);
    for (int64_t r = 0; r < num_rows; ++r) buffers.row_max[r] = T(-__builtin_inf());

    const Keys visible = keys_visible_to(call, entry, block.first_row, block.first_row + block.num_rows - 1);
    for (int64_t first = tile_begin(work, visible.first); first < visible.stop; first += work.keys_per_tile) {
        if (work.stopped.load(std::memory_order_relaxed)) return;
        const int64_t count = smaller(work.keys_per_tile, visible.stop - first);
        if (any_visible(call, entry, block, first, count)) jvp_tile(work, block, entry, scaling, buffers, first, count);
    }
    for (int64_t r = 0; r < num_rows; ++r) {
        finish_jvp_row(work, entry, row_of(block, r), buffers.row(r), scaling.natural);
    }
}

template <class T> bool prepare_jvp(Work &work) {
    const Call &call = work.call;
    if (!make_entries(work)) return false;
    const int64_t keys = call.arrays[BIAS] || call.arrays[MASK] ? MAX_KEYS : USUAL_KEYS;
    for (const int64_t rows : JVP_ROWS) {
        choose_tiles<T>(work, rows, keys);
        if (BlockCount(work).all >= ENOUGH_JOBS) break;
    }
    if (!make_blocks(work, false, 0)) return false;
    work.scratch_bytes = JvpBuffers<T>(work, Scaling<T>(call), nullptr).scratch.used;
    work.add_phase(jvp_job<T>, work.num_blocks);
    return true;
}

}  // namespace
