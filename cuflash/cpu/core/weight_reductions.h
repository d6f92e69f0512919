// Reductions of the weights, which are computed again from lse: over the queries of each key, and to the strongest keys
// of each query.
//
// A job of a reduction over queries owns a tile of keys, as in the backward pass, and goes through the queries in
// order; a job of the strongest keys owns a block of queries. So no sum and no order depends on the number of threads.
#pragma once

#include "backward.h"

namespace {

template <class T> struct ReductionBuffers : BackwardBuffers<T> {
    T *columns, *of_block;  // of each head that shares the keys, and each key
    T *best;                // the largest scores of each row, in order
    int32_t *keys;          // which ones have these
    long best_stride;

    ReductionBuffers(const Work &work, char *memory) : BackwardBuffers<T>(work, memory) {
        const Call &call = work.call;
        const long of_columns = call.num_top_keys ? 0 : group_of(call) * SCORES_STRIDE<T>;
        best_stride = round_up(call.num_top_keys, LANES<T>);
        columns = this->scratch.template take<T>(of_columns);
        of_block = this->scratch.template take<T>(of_columns);
        best = this->scratch.template take<T>(work.rows_per_block * best_stride);
        keys = this->scratch.template take<int32_t>(work.rows_per_block * best_stride);
    }
};

// ---- over queries ---------------------------------------------------------------------------------------------------

// Sums, over the rows of a block and then over the blocks, the weights of each key of a tile, times dlse of the row if
// that is given; or finds the largest weight.
template <class T> void columns_job(Work &work, char *memory, long job) {
    const Call &call = work.call;
    const KeyTile &tile = work.tiles[job];
    const Entry &entry = work.entries[tile.entry];
    const Scaling<T> scaling(call);
    ReductionBuffers<T> buffers(work, memory);
    const Steps steps(work, entry);
    const bool is_sum = call.arrays[COLUMN_SUMS];
    const long first = tile.first_key, count = tile.num_keys, size = steps.group * SCORES_STRIDE<T>;
    load_key_tile(call, entry, tile.head_kv, first, count, buffers);
    clear(buffers.columns, size);
    for (long step = 0; step < steps.count; ++step) {
        if (work.stopped.load(std::memory_order_relaxed)) return;
        const Block block = steps.block(entry, tile, step);
        const Keys keys = keys_visible_to(call, entry, block.first_row, block.first_row + block.num_rows - 1);
        if (keys.stop <= first || keys.first >= first + count || !any_visible(call, entry, block, first, count))
            continue;
        load_queries(work, entry, block, buffers);
        T *columns = is_sum ? buffers.of_block : buffers.columns;
        if (is_sum) clear(columns, size);
        auto is_needed = [&](long r) { return buffers.lse[r] != T(-__builtin_inf()); };
        auto add = [&](long r, const T *s, long num_keys, long at) {
            if (!is_needed(r)) return;
            const Row row = row_of(block, r);
            const bool has_factor = call.arrays[DLSE];
            const Vector<T> factor =
                splat(has_factor ? number<T>(call, DLSE, entry.batch, row.head, entry.first_q + row.i) : T(1));
            T *to = columns + (row.head - tile.head_kv * steps.group) * SCORES_STRIDE<T> + (at - first);
            with_weights(scaling, buffers.lse[r], buffers.row_sums[r], [&](auto weight_of) {
                for (long j = 0; j < num_keys; j += LANES<T>) {
                    const Vector<T> weight = weight_of(load(s + j)), own = load(to + j);
                    // The difference is 0, and keeps NaN.
                    store(to + j, is_sum ? add_product(own, factor, weight)
                                         : larger<T>(own, weight) + (own - own) + (weight - weight));
                }
            });
        };
        for_scores_of_tile(call, scaling, entry, block, first, count, buffers, is_needed, add);
        for (long x = 0; x < size && is_sum; x += LANES<T>)
            store(buffers.columns + x, load(buffers.columns + x) + load(columns + x));
    }
    const Array result = is_sum ? COLUMN_SUMS : COLUMN_MAX;
    for (long g = 0; g < steps.group; ++g)
        for (long j = 0; j < count; ++j)
            number<T>(call, result, entry.batch, tile.head_kv * steps.group + g, entry.first_k + first + j) =
                buffers.columns[g * SCORES_STRIDE<T> + j];
}

// ---- strongest keys -------------------------------------------------------------------------------------------------

// Takes the scores of a row, which are whole vectors and begin with that of the key `first`, into its largest ones:
// they are in order, and of equal ones the first key comes first.
template <class T> inline void take_largest(const T *s, long columns, long first, long count, T *best, int32_t *keys) {
    for (long j = 0; j < columns; j += LANES<T>) {
        if (!any_above<T>(load(s + j), best[count - 1])) continue;
        for (long x = j; x < j + LANES<T>; ++x) {
            const T score = s[x];
            if (!(score > best[count - 1])) continue;
            long at = count - 1;
            for (; at > 0 && score > best[at - 1]; --at) best[at] = best[at - 1], keys[at] = keys[at - 1];
            best[at] = score;
            keys[at] = int32_t(first + x);
        }
    }
}

template <class T> void top_keys_job(Work &work, char *memory, long job) {
    const Call &call = work.call;
    const Block &block = work.blocks[job];
    const Entry &entry = work.entries[block.entry];
    const Scaling<T> scaling(call);
    ReductionBuffers<T> buffers(work, memory);
    const long num_rows = rows_of(block), count = call.num_top_keys, stride = buffers.best_stride;
    const T none = T(-__builtin_inf());
    load_queries(work, entry, block, buffers);
    for (long x = 0; x < num_rows * stride; ++x) buffers.best[x] = none, buffers.keys[x] = -1;
    const bool finds_sums = !call.arrays[ROW_SUMS];
    RowSumsSoFar<T> sums;
    auto take = [&](long r, const T *s, long columns, long at) {
        take_largest(s, columns, at, count, buffers.best + r * stride, buffers.keys + r * stride);
        if (finds_sums && is_large(buffers.lse[r])) sums.add(scaling, r, s, columns);
    };
    for_scores(work, scaling, block, buffers, [](long) { return true; }, take);
    for (long r = 0; r < num_rows; ++r) {
        const Row row = row_of(block, r);
        const T lse = buffers.lse[r], *best = buffers.best + r * stride;
        const RowSum<T> sum = finds_sums && is_large(lse)
                                  ? explained_sum(call, scaling, row.head, lse, sums.row_max[r], sums.sums[r])
                                  : buffers.row_sums[r];
        T *weights = buffers.ds;
        with_weights(scaling, lse, sum, [&](auto weight_of) {
            for (long x = 0; x < stride; x += LANES<T>) store(weights + x, weight_of(load(best + x)));
        });
        for (long x = 0; x < count; ++x) {
            const int32_t key = buffers.keys[r * stride + x];
            const long i = entry.first_q + row.i;
            *(int32_t *)address(call, KEY_INDICES, 4, entry.batch, row.head, i, x) =
                key < 0 ? -1 : int32_t(entry.first_k + key);
            *(T *)address(call, KEY_WEIGHTS, sizeof(T), entry.batch, row.head, i, x) =
                key < 0 || lse == none ? T(0) : weights[x];  // the weight of no key may be NaN
        }
    }
}

template <class T> bool prepare_weight_reduction(Work &work) {
    if (!make_entries(work)) return false;
    choose_backward_tiles<T, ReductionBuffers<T>>(work);
    work.scratch_bytes = ReductionBuffers<T>(work, nullptr).scratch.used;
    const bool has_sums = work.call.arrays[ROW_SUMS];
    if (work.call.num_top_keys) {
        if (has_sums && !allocate_row_sums<T>(work)) return false;
        if (!make_blocks(work, false, 0)) return false;
        work.add_phase(top_keys_job<T>, work.num_blocks);
        return true;
    }
    if (!allocate_row_sums<T>(work) || !make_tiles(work)) return false;
    if (work.row_sums && !has_sums) {
        if (!make_blocks(work, false, 0)) return false;
        work.add_phase(row_sums_job<T>, work.num_blocks);
    }
    work.add_phase(columns_job<T>, work.num_tiles);
    return true;
}

}  // namespace
