// Gradients of the other operands of scores and of the softmax: slopes, scale, soft cap, sink and bias.
#pragma once

#include "backward_scores.h"

namespace {

// Computes the gradients of slopes, of the scale and of the soft cap: it adds up the sums of the tiles, in order.
template <class T> void sums_job(Work &work, char *, int64_t) {
    const Call &call = work.results();
    const int64_t group = group_of(call), width = group + 2;
    // First, the sums of all tiles of a head are added to those of its first tile.
    for (int64_t t = work.num_tiles - 1; t >= 0; --t)
        if (work.tiles[t].before >= 0)
            for (int64_t x = 0; x < width; ++x) work.sums[work.tiles[t].before * width + x] += work.sums[t * width + x];
    const bool has_entries = call.strides[DALIBI_SLOPES][0] != 0;  // slopes of each batch entry, or of all of them
    for (int64_t h = 0; h < call.num_heads && is_wanted(call, DALIBI_SLOPES); ++h) {
        for (int64_t e = 0; e < (has_entries ? call.batch : 1); ++e) number<T>(call, DALIBI_SLOPES, e, h) = 0;
        double total = 0;
        for (int64_t t = 0; t < work.num_tiles && work.tiles[t].before < 0; ++t) {
            if (work.tiles[t].head_kv != h / group) continue;
            total = work.sums[t * width + h % group] + (has_entries ? 0 : total);
            number<T>(call, DALIBI_SLOPES, work.tiles[t].entry, h) = T(total);
        }
    }
    double scale = 0, cap = 0;
    for (int64_t t = 0; t < work.num_tiles && work.tiles[t].before < 0; ++t) {
        scale += work.sums[t * width + group];
        cap += work.sums[t * width + group + 1];
    }
    if (is_wanted(call, DSCALE)) number<T>(call, DSCALE, 0, 0) = T(scale);
    if (is_wanted(call, DSOFTCAP)) number<T>(call, DSOFTCAP, 0, 0) = T(cap);
}

// What takes the place of delta in the tangent of the gradient of a sink: (tsink - tlse) delta + tdelta. The row of
// dout is loaded.
template <class T>
inline double tangent_of_sink_term(const Work &work, const Entry &entry, Row row, T lse, T delta,
                                   BackwardBuffers<T> &buffers) {
    const Call &call = work.call, &tangents = *work.tangents;
    const int64_t dim = buffers.sizes.dim_v;
    T *tdout = tangents.arrays[DOUT] ? buffers.dout_space + dim : nullptr;
    if (tdout) {
        load_row(row_address(tangents, DOUT, entry, row), call.dtype, tangents.strides[DOUT][3], call.head_dim_v,
                 tdout);
        clear(tdout + call.head_dim_v, dim - call.head_dim_v);
    }
    const T tdelta = tangent_of_delta(call, tangents, entry, row, lse, buffers.dout_space, tdout, dim, buffers.dq);
    const double tsink = tangents.arrays[SINKS] ? double(number<T>(tangents, SINKS, 0, row.head)) : 0.0;
    const T tlse = number<T>(tangents, LSE, entry.batch, row.head, entry.first_q + row.i);
    return (tsink - double(tlse)) * double(delta) + double(tdelta);
}

// The gradient of the sink of a head: the sum of its weights times (dlse - delta). It is one sum over all rows, and in
// double each row, however small its term is, would round off half a unit in the last place of the sum. With tangents,
// it is the tangent of all that.
template <class T> void sinks_job(Work &work, char *memory, int64_t head) {
    const Call &call = work.call, *tangents = work.tangents;
    BackwardBuffers<T> buffers(work, memory);
    const Scaling<T> scaling(call);
    const double sink = number<T>(call, SINKS, 0, head);
    long double total = 0;
    for (int64_t e = 0; e < work.num_entries; ++e) {
        const Entry &entry = work.entries[e];
        for (int64_t i = 0; i < entry.seqlen_q; ++i) {
            if (work.stopped.load(std::memory_order_relaxed)) return;
            const Row row = {head, i};
            const T lse = number<T>(call, LSE, entry.batch, head, entry.first_q + i);
            if (lse == T(-__builtin_inf())) continue;
            load_row(row_address(call, DOUT, entry, row), call.dtype, call.strides[DOUT][3], call.head_dim_v,
                     buffers.dout_space);
            clear(buffers.dout_space + call.head_dim_v, buffers.sizes.dim_v - call.head_dim_v);
            double delta = delta_of(call, entry, row, lse, buffers.dout_space, buffers.sizes.dim_v, buffers.dq);
            if (tangents) delta = tangent_of_sink_term(work, entry, row, lse, T(delta), buffers);
            const RowSum<T> sum = work.row_sums ? row_sum<T>(work, entry, row) : NO_ROW_SUM<T>;
            const double weight = sum.is_found() ? weight_of_sink(scaling, sum, sink) : exp_of(sink - lse);
            if (call.arrays[DENTROPY] && weight > 0)
                delta += double(number<T>(call, DENTROPY, entry.batch, head, entry.first_q + i)) * log_of(weight);
            total -= weight * delta;
        }
    }
    number<T>(work.results(), DSINKS, 0, head) = T(total);
}

// Where a job of keys leaves its sums for a bias of keys: those of a head of q, from a key on.
template <class T> inline T *bias_sums(const Work &work, int64_t entry, int64_t head, int64_t key) {
    const Call &call = work.call;
    return (T *)work.bias_sums + (entry * call.num_heads + head) * round_up(call.seqlen_k, MAX_KEYS) + key;
}

// What a job sums over on an axis of the scores: its own index where dbias has the axis, else all of it.
inline Range summed_over(bool has_axis, int64_t own, int64_t length) {
    return has_axis ? Range{own, own + 1} : Range{0, length};
}

// Computes dbias of some keys. Their sums over the rows are there already; it adds up entries and heads, in order.
template <class T> void bias_sums_job(Work &work, char *, int64_t job) {
    const Call &call = work.results();
    const int64_t *strides = call.strides[DBIAS];
    const int64_t num_tiles = ceil_div(call.seqlen_k, MAX_KEYS), num_heads = strides[1] ? call.num_heads : 1;
    const int64_t first = job % num_tiles * MAX_KEYS;
    const Range heads = summed_over(strides[1] != 0, job / num_tiles % num_heads, call.num_heads),
                entries = summed_over(strides[0] != 0, job / num_tiles / num_heads, call.batch);
    T total[MAX_KEYS] = {};
    for (int64_t e = entries.first; e < entries.stop; ++e) {
        const int64_t count = smaller(MAX_KEYS, work.entries[e].seqlen_k - first);
        for (int64_t h = heads.first; h < heads.stop; ++h) {
            const T *from = bias_sums<T>(work, e, h, first);
            for (int64_t j = 0; j < count; ++j) total[j] += from[j];
        }
    }
    store_row(total, call.bias_dtype, strides[3], smaller(MAX_KEYS, call.seqlen_k - first),
              address(call, DBIAS, size_of(call.bias_dtype), entries.first, heads.first, 0, first));
}

// How dbias is cut into jobs: they share the axes that the bias has, and each job sums over the others.
struct BiasJobs {
    int64_t entries, heads, blocks, tiles;  // how many, 1 where they are summed over
    int64_t rows, num_blocks, num_tiles;
    NOINLINE BiasJobs(const Work &work) {
        const Call &call = work.call;
        const int64_t *strides = work.results().strides[DBIAS];
        rows = rows_in_blocks(call, call.seqlen_q, work.rows_per_block);
        num_blocks = ceil_div(call.seqlen_q, rows);
        num_tiles = ceil_div(call.seqlen_k, work.keys_per_tile);
        entries = strides[0] ? call.batch : 1;
        heads = strides[1] ? call.num_heads : 1;
        blocks = strides[2] ? num_blocks : 1;
        tiles = strides[3] && !strides[2] ? num_tiles : 1;
    }
    // Block i of a head of an entry.
    NOINLINE Block block(const Call &call, int64_t entry, int64_t head, int64_t i) const {
        Block block = {};
        block.entry = entry;
        block.head_kv = head / group_of(call);
        block.first_head = head;
        block.num_heads = 1;
        block.first_row = i * rows;
        block.num_rows = smaller(rows, call.seqlen_q - i * rows);
        return block;
    }
};

// What a job of dbias sums over.
struct BiasAxes {
    Range entries, heads, blocks, tiles;
    BiasAxes(const Call &call, const BiasJobs &jobs, const int64_t *strides, int64_t job)
        : entries(summed_over(strides[0] != 0, job / jobs.tiles / jobs.blocks / jobs.heads, call.batch)),
          heads(summed_over(strides[1] != 0, job / jobs.tiles / jobs.blocks % jobs.heads, call.num_heads)),
          blocks(summed_over(strides[2] != 0, job / jobs.tiles % jobs.blocks, jobs.num_blocks)),
          tiles(summed_over(jobs.tiles > 1, job % jobs.tiles, jobs.num_tiles)) {}
};

// The sum of a job of dbias: for each row of a block and each key of a tile, as far as the bias has these axes.
template <class T> struct BiasTotal {
    static constexpr int64_t STRIDE = SCORES_STRIDE<T>;
    const bool has_rows, has_keys;
    const int64_t num_rows;
    T *const rows;
    long double of_all = 0;  // of a bias without rows and keys: one sum over many rows, as that of a sink

    void clear_rows() {
        for (int64_t r = 0; r < num_rows; ++r) clear(rows + r * STRIDE, STRIDE);
    }
    // Adds the gradients ds of the scores of a block, and of a tile of `count` keys.
    void add(const Visible &visible, int64_t count, const T *ds) {
        for (int64_t r = visible.rows.first; r < visible.rows.stop; ++r) {
            const T *from = ds + r * STRIDE;
            T *to = rows + (has_rows ? r : 0) * STRIDE;
            if (has_keys) {
                for (int64_t j = visible.keys.first; j < smaller(visible.keys.stop, count); ++j) to[j] += from[j];
            } else {
                Vector<T> sum = {};
                for (int64_t j = visible.keys.first; j < visible.keys.stop; j += LANES<T>) sum += load(from + j);
                if (has_rows)
                    to[0] += sum_of_lanes<T>(sum);
                else
                    of_all += sum_of_lanes<T>(sum);
            }
        }
    }
    // Writes the sums of `count` keys from `first` on, into the rows of `results` from `first_row` on.
    void write(const Call &results, const BiasAxes &axes, int64_t first_row, int64_t first, int64_t count) {
        if (!has_rows && !has_keys) rows[0] = T(of_all);
        for (int64_t r = 0; r < num_rows; ++r)
            store_row(rows + r * STRIDE, results.bias_dtype, results.strides[DBIAS][3], count,
                      address(results, DBIAS, size_of(results.bias_dtype), axes.entries.first, axes.heads.first,
                              first_row + r, first));
    }
};

// Finds the sums of the rows of a block of `bias_job`. Where tile registers multiply, the last bits of a score depend
// on the rows that it is computed with, and the blocks of other jobs may have more of these.
template <class T> void bias_row_sums_job(Work &work, char *memory, int64_t job) {
    const BiasJobs jobs(work);
    const int64_t heads = work.call.num_heads, i = job % jobs.num_blocks, head = job / jobs.num_blocks % heads;
    find_row_sums<T>(work, memory, jobs.block(work.call, job / jobs.num_blocks / heads, head, i));
}

template <class T, class Buffers> void bias_job(Work &work, char *memory, int64_t job) {
    const Call &call = work.call, &results = work.results();
    const int64_t *strides = results.strides[DBIAS];
    const Scaling<T> scaling(call);
    Buffers buffers(work, memory);
    const BiasJobs jobs(work);
    const BiasAxes axes(call, jobs, strides, job);
    const int64_t first_row = axes.blocks.first * jobs.rows;
    const int64_t num_rows = strides[2] ? smaller(jobs.rows, call.seqlen_q - first_row) : 1;
    BiasTotal<T> total{strides[2] != 0, strides[3] != 0, num_rows, buffers.total};
    total.clear_rows();
    for (int64_t t = axes.tiles.first; t < axes.tiles.stop; ++t) {
        const int64_t first = t * work.keys_per_tile;
        for (int64_t e = axes.entries.first; e < axes.entries.stop; ++e) {
            const Entry &entry = work.entries[e];
            const int64_t count = smaller(work.keys_per_tile, entry.seqlen_k - first);
            if (count <= 0) continue;
            for (int64_t h = axes.heads.first; h < axes.heads.stop; ++h) {
                bool is_loaded = false;
                for (int64_t i = axes.blocks.first; i < axes.blocks.stop; ++i) {
                    if (work.stopped.load(std::memory_order_relaxed)) return;
                    const Block block = jobs.block(call, e, h, i);
                    if (!attends_to(call, entry, block, first, count)) continue;
                    if (!is_loaded) load_key_tile(call, entry, block.head_kv, first, count, buffers);
                    is_loaded = true;
                    load_queries(work, entry, block, buffers);
                    const Visible visible = differentiate(call, scaling, entry, block, first, count, true, buffers);
                    total.add(visible, count, buffers.score_gradients());
                }
            }
        }
        if (total.has_keys) {
            total.write(results, axes, first_row, first, smaller(work.keys_per_tile, call.seqlen_k - first));
            total.clear_rows();
        }
    }
    if (!total.has_keys) total.write(results, axes, first_row, 0, 1);
}

}  // namespace
