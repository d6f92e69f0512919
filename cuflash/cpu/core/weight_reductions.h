// Reductions of the weights, which are computed again from lse: over the queries of each key, and to the strongest keys
// of each query.
//
// A job of a reduction over queries owns a tile of keys, as in the backward pass, and goes through the queries in
// order; a job of the strongest keys owns a block of queries. So no sum and no order depends on the number of threads.
#pragma once

#include <algorithm>

#include "backward_scores.h"
#include "schedule.h"

namespace {

constexpr int64_t MOST_TOP_KEYS = 64;

// A key and its score. Stronger ones come first, and of equal ones the first key.
template <class T> struct ScoredKey {
    T score;
    int32_t key;
    bool operator<(const ScoredKey &other) const {
        return score > other.score || (score == other.score && key < other.key);
    }
};

template <class T> struct ReductionBuffers : BackwardBuffers<T> {
    T *columns, *of_block;       // of each head that shares the keys, and each key
    ScoredKey<T> *best, *space;  // the strongest keys of each row; of a row, with those of a tile
    int64_t *num_best;

    ReductionBuffers(const Work &work, char *memory) : BackwardBuffers<T>(work, memory) {
        const Call &call = work.call;
        const int64_t of_columns = call.num_top_keys ? 0 : group_of(call) * SCORES_STRIDE<T>;
        columns = this->scratch.template take<T>(of_columns);
        of_block = this->scratch.template take<T>(of_columns);
        const int64_t rows = call.num_top_keys ? work.rows_per_block : 0;
        best = this->scratch.template take<ScoredKey<T>>(rows * call.num_top_keys);
        space = this->scratch.template take<ScoredKey<T>>(rows ? MOST_TOP_KEYS + MAX_KEYS + LANES<T> : 0);
        num_best = this->scratch.template take<int64_t>(rows);
    }
};

// ---- over queries ---------------------------------------------------------------------------------------------------

// Sums, over the rows of a block and then over the blocks, the weights of each key of a tile, times dlse of the row if
// that is given; or finds the largest weight.
template <class T> void columns_job(Work &work, char *memory, int64_t job) {
    const Call &call = work.call;
    const KeyTile &tile = work.tiles[job];
    const Entry &entry = work.entries[tile.entry];
    const Scaling<T> scaling(call);
    ReductionBuffers<T> buffers(work, memory);
    const Steps steps(work, entry);
    const bool is_sum = call.arrays[COLUMN_SUMS];
    const int64_t first = tile.first_key, count = tile.num_keys, size = steps.group * SCORES_STRIDE<T>;
    load_key_tile(call, entry, tile.head_kv, first, count, buffers);
    clear(buffers.columns, size);
    for (int64_t step = 0; step < steps.count; ++step) {
        if (work.stopped.load(std::memory_order_relaxed)) return;
        const Block block = steps.block(entry, tile, step);
        const Keys keys = keys_visible_to(call, entry, block);
        if (keys.stop <= first || keys.first >= first + count || !any_visible(call, entry, block, first, count))
            continue;
        load_queries(work, entry, block, buffers);
        T *columns = is_sum ? buffers.of_block : buffers.columns;
        if (is_sum) clear(columns, size);
        auto is_needed = [&](int64_t r) { return buffers.lse[r] != T(-__builtin_inf()); };
        auto add = [&](int64_t r, const T *s, int64_t num_keys, int64_t at) {
            if (!is_needed(r)) return;
            const Row row = row_of(block, r);
            const bool has_factor = call.arrays[DLSE];
            const Vector<T> factor =
                splat(has_factor ? number<T>(call, DLSE, entry.batch, row.head, entry.first_q + row.i) : T(1));
            T *to = columns + (row.head - tile.head_kv * steps.group) * SCORES_STRIDE<T> + (at - first);
            with_weights(scaling, buffers.lse[r], buffers.row_sums[r], [&](auto weight_of, auto) {
                for (int64_t j = 0; j < num_keys; j += LANES<T>) {
                    const Vector<T> weight = weight_of(load(s + j)), own = load(to + j);
                    // The sum is not below the maximum, because weights are not below 0, and NaN if one of the two is.
                    store(to + j, is_sum ? add_product(own, factor, weight)
                                         : -larger<T>(-larger<T>(own, weight), -(own + weight)));
                }
            });
        };
        for_scores_of_tile(call, scaling, entry, block, first, count, buffers, is_needed, add);
        for (int64_t x = 0; x < size && is_sum; x += LANES<T>)
            store(buffers.columns + x, load(buffers.columns + x) + load(columns + x));
    }
    const Array result = is_sum ? COLUMN_SUMS : COLUMN_MAX;
    for (int64_t g = 0; g < steps.group; ++g)
        for (int64_t j = 0; j < count; ++j)
            number<T>(call, result, entry.batch, tile.head_kv * steps.group + g, entry.first_k + first + j) =
                buffers.columns[g * SCORES_STRIDE<T> + j];
}

// ---- strongest keys -------------------------------------------------------------------------------------------------

// A bound that at least `count` scores of a row reach, which are whole vectors: the least of as many maxima of
// different scores; -inf where there are fewer.
template <class T> inline T reached_by(const T *s, int64_t columns, int64_t count) {
    Vector<T> maxima[MOST_TOP_KEYS / LANES<T>];
    const int64_t num_maxima = ceil_div(count, LANES<T>), num_vectors = columns / LANES<T>;
    if (num_vectors < num_maxima) return T(-__builtin_inf());
    for (int64_t n = 0; n < num_maxima; ++n) {
        maxima[n] = splat(T(-__builtin_inf()));
        for (int64_t j = n; j < num_vectors; j += num_maxima) maxima[n] = larger<T>(load(s + j * LANES<T>), maxima[n]);
    }
    Vector<T> least = splat(T(__builtin_inf()));
    for (int64_t n = 0; n < num_maxima; ++n) least = -larger<T>(-maxima[n], -least);
    return -largest_lane<T>(-least);
}

// Takes the scores of a row, which are whole vectors and begin with that of the key `first`, into its `num` strongest
// keys, of which the last one is the weakest. `space` has space for these and a tile.
template <class T>
NOINLINE void take_strongest(const T *s, int64_t columns, int64_t first, int64_t count, ScoredKey<T> *best,
                             int64_t &num, ScoredKey<T> *space) {
    const T least =
        num == count ? best[count - 1].score : std::nextafter(reached_by(s, columns, count), T(-__builtin_inf()));
    int64_t n = num;
    for (int64_t j = 0; j < columns; j += LANES<T>) {
        if (!any_above<T>(larger<T>(load(s + j), splat(least)), least)) continue;  // NaN is none
        for (int64_t x = j; x < j + LANES<T>; ++x) {  // without a branch, which would be predicted wrongly
            space[n] = {s[x], int32_t(first + x)};
            n += s[x] > least;
        }
    }
    if (n == num) return;
    memcpy((void *)space, best, num * sizeof *best);
    if (n >= count) std::nth_element(space, space + count - 1, space + n);
    num = smaller(n, count);
    memcpy((void *)best, space, num * sizeof *best);
}

template <class T> void top_keys_job(Work &work, char *memory, int64_t job) {
    const Call &call = work.call;
    const Block &block = work.blocks[job];
    const Entry &entry = work.entries[block.entry];
    const Scaling<T> scaling(call);
    ReductionBuffers<T> buffers(work, memory);
    const int64_t num_rows = rows_of(block), count = call.num_top_keys;
    load_queries(work, entry, block, buffers);
    for (int64_t r = 0; r < num_rows; ++r) buffers.num_best[r] = 0;
    const bool finds_sums = !call.arrays[ROW_SUMS];
    RowSumsSoFar<T> sums;
    auto take = [&](int64_t r, const T *s, int64_t columns, int64_t at) {
        take_strongest(s, columns, at, count, buffers.best + r * count, buffers.num_best[r], buffers.space);
        if (finds_sums && is_large(buffers.lse[r])) sums.add(scaling, r, s, columns);
    };
    for_scores(work, scaling, block, buffers, [](int64_t) { return true; }, take);
    for (int64_t r = 0; r < num_rows; ++r) {
        const Row row = row_of(block, r);
        const T lse = buffers.lse[r];
        const RowSum<T> sum = finds_sums && is_large(lse)
                                  ? explained_sum(call, scaling, row.head, lse, sums.row_max[r], sums.sums[r])
                                  : buffers.row_sums[r];
        ScoredKey<T> *best = buffers.best + r * count;
        const int64_t num = buffers.num_best[r], i = entry.first_q + row.i;
        std::sort(best, best + num);
        T weights[MOST_TOP_KEYS] = {};
        for (int64_t x = 0; x < num; ++x) weights[x] = best[x].score;
        with_weights(scaling, lse, sum, [&](auto weight_of, auto) {
            for (int64_t x = 0; x < num; x += LANES<T>) store(weights + x, weight_of(load(weights + x)));
        });
        for (int64_t x = 0; x < count; ++x) {
            const bool has_weight = x < num && lse != T(-__builtin_inf());
            *(int32_t *)address(call, KEY_INDICES, 4, entry.batch, row.head, i, x) =
                x < num ? int32_t(entry.first_k + best[x].key) : -1;
            *(T *)address(call, KEY_WEIGHTS, sizeof(T), entry.batch, row.head, i, x) = has_weight ? weights[x] : T(0);
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
