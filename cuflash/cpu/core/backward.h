// The backward pass: tiles of keys against blocks of queries, weights computed again (FlashAttention-2, algorithm 2).
//
// A job owns a tile of keys and computes its dk and dv. Jobs add to dq in the order of the tiles, for each block after
// the job of the tile before, which began earlier. So no sum depends on the number of threads.
#pragma once

#include "bias_gradients.h"
#include "dq_sums.h"

namespace {

// ---- dq, dk and dv --------------------------------------------------------------------------------------------------

// Adds ds of a block to dbias, where dbias is a sum over heads or entries.
template <class T>
NOINLINE void add_bias(const Call &call, const Entry &entry, const Block &block, const Visible &visible, int64_t first,
                       int64_t count, const T *ds) {
    const int64_t step = call.strides[DBIAS][3];
    const int64_t stop = smaller(visible.keys.stop, count);
    for (int64_t r = visible.rows.first; r < visible.rows.stop; ++r) {
        T *to = (T *)bias_address(call, DBIAS, entry, row_of(block, r), first);
        const T *from = ds + r * SCORES_STRIDE<T>;
        if (step == 1) {
            for (int64_t j = visible.keys.first; j < stop; ++j) to[j] += from[j];
        } else {
            for (int64_t j = visible.keys.first; j < stop; ++j) to[j * step] += from[j];
        }
    }
}

// C += A^T B for the keys of a tile: A is p or ds of the rows of a block, B their dout or q. Neighbouring sections that
// the same rows attend to are one product. With bf16x2, everything is transposed: C^T += B^T A.
template <class T>
NOINLINE void add_to_keys([[maybe_unused]] const Call &call, const Visible &visible, int64_t count, const T *a,
                          const T *b, int64_t dim, T *c, int64_t keys_stride) {
    constexpr int64_t STRIDE = SCORES_STRIDE<T>;
    auto add = [&](RowRange rows, int64_t first, int64_t stop) {
        if (rows.stop <= rows.first || stop <= first) return;
        if constexpr (BACKWARD_IN_BF16X2<T>) {
            const int64_t from = rows.first / 2, length = bf16x2_count(rows.stop) - from;
            const int64_t columns = round_up(stop - first, LANES<T>);
            const T *scores = a + from * STRIDE + first;
            if constexpr (HAS_TILES) {
                bf16x2_product(dim, columns, length, b + from, QUERIES_BF16X2_STRIDE, scores, STRIDE, c + first,
                               keys_stride, true);
            } else {
                product<T, Order::COLUMNS, Bf16x2Ops>(dim, columns, length, b + from * dim, dim, scores, STRIDE,
                                                      c + first, keys_stride, true);
            }
            return;
        }
        product<T, Order::COLUMNS>(stop - first, dim, rows.stop - rows.first, a + rows.first * STRIDE + first, STRIDE,
                                   b + rows.first * dim, dim, c + first * dim, dim, true);
    };
    const int64_t num_sections = ceil_div(count, SECTION_KEYS);
    for (int64_t x = 0, next; x < num_sections; x = next) {
        const RowRange rows = visible.sections[x];
        for (next = x + 1; next < num_sections && visible.sections[next] == rows;) ++next;
        add(rows, x * SECTION_KEYS, smaller(count, next * SECTION_KEYS));
    }
}

// dq = ds K, or dq += ds K if `adds`, for the rows and the keys k of a tile.
template <class T>
NOINLINE void multiply_by_keys(const ScoreTile &tile, BackwardBuffers<T> &buffers, const T *ds, const T *k, bool adds) {
    const int64_t dim = buffers.sizes.dim;
    T *dq = buffers.dq;
    for (int64_t r0 = tile.r0, n; r0 < tile.r0 + tile.num_rows; r0 += n) {
        n = rows_of_group(tile.call, tile.block, r0, GROUP);
        const Keys keys = keys_of_group<T>(tile.call, tile.entry, tile.block, r0, n, tile.first, tile.count);
        const int64_t here = keys.stop - keys.first;
        if constexpr (BACKWARD_IN_BF16X2<T>) {
            bf16x2_product(n, dim, bf16x2_count(here), buffers.ds_rows + r0 * KEYS_BF16X2_STRIDE + keys.first / 2,
                           KEYS_BF16X2_STRIDE, k + keys.first / 2 * dim, dim, dq + r0 * dim, dim, adds);
            continue;
        }
        // Long sums are made of partial sums, which keeps rounding errors down. Rows that attend to no key get zeros.
        int64_t j = keys.first;
        do {
            product<T, Order::ROWS>(n, dim, smaller(USUAL_KEYS, keys.stop - j), ds + r0 * SCORES_STRIDE<T> + j,
                                    SCORES_STRIDE<T>, k + j * dim, dim, dq + r0 * dim, dim, adds || j > keys.first);
            j += USUAL_KEYS;
        } while (j < keys.stop);
    }
}

// What a tile adds to dq of its rows: it goes to buffers.dq, or is added to it.
template <class T> inline void multiply_into_dq(const ScoreTile &tile, bool adds, BackwardBuffers<T> &buffers) {
    multiply_by_keys(tile, buffers, buffers.ds, buffers.k, adds);
}

// Adds what a block adds to dk and dv of a tile.
template <class T>
inline void add_to_dk_and_dv(const Call &call, const Visible &visible, int64_t count, BackwardBuffers<T> &buffers) {
    const Sizes<T> &sizes = buffers.sizes;
    if (is_wanted(call, DV))
        add_to_keys(call, visible, count, buffers.p, BACKWARD_IN_BF16X2<T> ? buffers.dout_bf16x2 : buffers.dout,
                    sizes.dim_v, buffers.dv, buffers.keys_stride);
    if (is_wanted(call, DK))
        add_to_keys(call, visible, count, BACKWARD_IN_BF16X2<T> ? buffers.ds_columns : buffers.ds,
                    BACKWARD_IN_BF16X2<T> ? buffers.q_bf16x2 : buffers.q, sizes.dim, buffers.dk, buffers.keys_stride);
}

// Writes the sums of a job of keys: dk and dv, and its partial sums for other gradients.
template <class T>
NOINLINE void finish_key_tile(const Work &work, const KeyTile &tile, int64_t job, BackwardBuffers<T> &buffers) {
    const Call &call = work.results();
    const Entry &entry = work.entries[tile.entry];
    const Sizes<T> &sizes = buffers.sizes;
    const T scale = T(size_of_scale(call));
    const int64_t group = group_of(call);
    T *all_dk = buffers.dk, *all_dv = buffers.dv;
    if (BACKWARD_IN_BF16X2<T>) {
        const int64_t padded = round_up(tile.num_keys, LANES<T>);
        all_dk = buffers.k_t, all_dv = buffers.v_t;
        transpose(buffers.dk, buffers.keys_stride, sizes.dim, padded, all_dk, sizes.dim);
        transpose(buffers.dv, buffers.keys_stride, sizes.dim_v, padded, all_dv, sizes.dim_v);
    }
    for (int64_t j = 0; j < tile.num_keys; ++j) {
        T *dk = all_dk + j * sizes.dim, *dv = all_dv + j * sizes.dim_v;
        for (int64_t d = 0; d < sizes.dim; ++d) dk[d] *= scale;
        if (is_wanted(call, DK))
            store_row(dk, call.dtype, call.strides[DK][3], call.head_dim,
                      key_address(call, DK, entry, tile.head_kv, tile.first_key + j));
        if (is_wanted(call, DV))
            store_row(dv, call.dtype, call.strides[DV][3], call.head_dim_v,
                      key_address(call, DV, entry, tile.head_kv, tile.first_key + j));
    }
    if (work.sums) {
        double *to = work.sums + job * (group + 2);
        for (int64_t g = 0; g < group; ++g) to[g] = double(buffers.sums[tile.head_kv * group + g]);
        for (int64_t n = 0; n < 2; ++n) to[group + n] = double(buffers.sums[call.num_heads + n]);
    }
    if (buffers.bias == BiasGradient::KEYS)
        for (int64_t g = 0; g < group; ++g)
            memcpy(bias_sums<T>(work, tile.entry, tile.head_kv * group + g, tile.first_key),
                   buffers.total + g * SCORES_STRIDE<T>, tile.num_keys * sizeof(T));
}

// Sums of a tile to which no block has added yet.
template <class T> inline void clear_sums(const Call &call, int64_t count, BackwardBuffers<T> &buffers) {
    const Sizes<T> &sizes = buffers.sizes;
    clear(buffers.dk, BACKWARD_IN_BF16X2<T> ? sizes.dim * buffers.keys_stride : count * sizes.dim);
    clear(buffers.dv, BACKWARD_IN_BF16X2<T> ? sizes.dim_v * buffers.keys_stride : count * sizes.dim_v);
    clear(buffers.sums, call.num_heads + 2);
    if (buffers.bias == BiasGradient::KEYS) clear(buffers.total, group_of(call) * SCORES_STRIDE<T>);
}

template <class T, class Buffers> void key_tile_job(Work &work, char *memory, int64_t job) {
    const Call &call = work.call;
    const KeyTile &tile = work.tiles[job];
    const Entry &entry = work.entries[tile.entry];
    const Scaling<T> scaling(call);
    Buffers buffers(work, memory);
    const Steps steps(work, entry);
    const int64_t first = tile.first_key, count = tile.num_keys;
    const bool adds_bias = buffers.bias == BiasGradient::ORDERED, begins_bias = adds_bias && tile.bias_before < 0;
    const Progress progress(work, job, adds_bias);
    DqAdder<T> dq(progress, buffers.sizes.dim, !adds_bias);
    load_key_tile(call, entry, tile.head_kv, first, count, buffers);
    clear_sums(call, count, buffers);
    for (int64_t step = 0; step < steps.count; ++step) {
        if (work.stopped.load(std::memory_order_relaxed)) return;
        const Block block = steps.block(entry, tile, step);
        const bool is_hidden = !attends_to(call, entry, block, first, count);
        if (begins_bias || (is_hidden && buffers.bias == BiasGradient::PAIRS))
            clear_bias(work.results(), entry, block, first, count);
        if (is_hidden) continue;
        if (!dq.first) progress.skip_to(step);
        load_queries(work, entry, block, buffers);
        const Visible visible = differentiate(call, scaling, entry, block, first, count, false, buffers);
        if (visible.rows.stop <= visible.rows.first) continue;
        add_to_dk_and_dv(call, visible, count, buffers);
        if (work.adds_dq) {
            multiply_into_dq(visible_tile(call, entry, block, visible.rows, first, count), false, buffers);
            if (!dq.add(step, block, visible.rows, buffers.dq)) return;
        }
        if (adds_bias) {
            if (!progress.bias.wait(job, step + 1)) return;
            add_bias(work.results(), entry, block, visible, first, count, buffers.score_gradients());
        }
        if (!dq.first) progress.set(step + 1);
    }
    if (adds_bias) {
        progress.finish(steps.count);
    } else if (work.adds_dq) {
        dq.finish();
    }
    finish_key_tile(work, tile, job, buffers);
}

// Computes dq of one block by itself, where the dq accumulator would need more than DQ_BYTES.
template <class T, class Buffers> void dq_job(Work &work, char *memory, int64_t job) {
    const Call &call = work.call, &results = work.results();
    const Block &block = work.blocks[job];
    const Entry &entry = work.entries[block.entry];
    const Scaling<T> scaling(call);
    Buffers buffers(work, memory);
    const Sizes<T> &sizes = buffers.sizes;
    load_queries(work, entry, block, buffers);
    T *total = buffers.dq;  // a job of keys has the partial dq of a tile there; here it is the sum over all tiles
    clear(total, rows_of(block) * sizes.dim);
    const Keys keys = keys_visible_to(call, entry, block);
    for (int64_t first = tile_begin(work, keys.first); first < keys.stop; first += work.keys_per_tile) {
        if (work.stopped.load(std::memory_order_relaxed)) return;
        const int64_t count = smaller(work.keys_per_tile, entry.seqlen_k - first);
        if (!any_visible(call, entry, block, first, count)) continue;
        load_key_tile(call, entry, block.head_kv, first, count, buffers);
        const Visible visible = differentiate(call, scaling, entry, block, first, count, true, buffers);
        if (has_cap(call) && !work.tangents)
            for (int64_t r = visible.rows.first; r < visible.rows.stop; ++r)
                for (int64_t j = visible.keys.first; j < visible.keys.stop; ++j) {
                    const T tanh = buffers.tanhs[r * SCORES_STRIDE<T> + j];
                    buffers.ds[r * SCORES_STRIDE<T> + j] *= 1 - tanh * tanh;
                }
        const RowRange rows = {visible.rows.first / 2 * 2, visible.rows.stop};
        if (BACKWARD_IN_BF16X2<T>) pack_scores(block, visible.keys, rows, buffers);
        multiply_into_dq(visible_tile(call, entry, block, visible.rows, first, count), true, buffers);
    }
    for (int64_t r = 0; r < rows_of(block); ++r) {
        for (int64_t d = 0; d < call.head_dim; ++d) total[r * sizes.dim + d] *= T(results.scale);
        store_row(total + r * sizes.dim, call.dtype, results.strides[DQ][3], call.head_dim,
                  row_address(results, DQ, entry, row_of(block, r)));
    }
}

constexpr int64_t PREPROCESSED_ROWS = 256;  // by a job, and as many keys

// How many jobs preprocess a head of an entry.
inline int64_t preprocess_jobs_of_head(const Call &call) {
    return larger(1, ceil_div(larger(call.seqlen_q, call.seqlen_k), PREPROCESSED_ROWS));
}

// Clears some rows of dq and of its sums, because jobs add to them, and computes their delta, which each job of keys
// reads. With lengths, it also clears dk, dv and dbias, and with packed sequences dk and dv, because no job writes keys
// past the lengths or outside of the sequences.
template <class T> void preprocess_job(Work &work, char *memory, int64_t job) {
    const Call &call = work.call, &results = work.results();
    const int64_t chunks = preprocess_jobs_of_head(call), heads = larger(call.num_heads, call.num_heads_kv),
                  first = job % chunks * PREPROCESSED_ROWS, b = job / chunks / heads, h = job / chunks % heads;
    auto stop_of = [&](int64_t seqlen) { return smaller(first + PREPROCESSED_ROWS, seqlen); };
    auto clear_rows = [&](Array array, int64_t dtype, int64_t num_heads, int64_t seqlen, int64_t dim) {
        if (!is_wanted(results, array) || h >= num_heads) return;
        for (int64_t i = first; i < stop_of(seqlen); ++i)
            clear_row(address(results, array, size_of(dtype), b, h, i), dtype, results.strides[array][3], dim);
    };
    // Where dq is summed elsewhere, other jobs write all of its rows, except those outside of packed sequences.
    if (!has_dq_accum(call) || call.arrays[CU_SEQLENS_Q])
        clear_rows(DQ, call.dtype, call.num_heads, call.seqlen_q, call.head_dim);
    const bool is_first = (b == 0 || results.strides[DBIAS][0]) && (h == 0 || results.strides[DBIAS][1]);
    if (call.arrays[KV_LENGTHS] && is_first)
        clear_rows(DBIAS, call.bias_dtype, call.num_heads, call.seqlen_q, call.seqlen_k);
    if (call.arrays[CU_SEQLENS_K] || call.arrays[KV_LENGTHS]) {
        clear_rows(DK, call.dtype, call.num_heads_kv, call.seqlen_k, call.head_dim);
        clear_rows(DV, call.dtype, call.num_heads_kv, call.seqlen_k, call.head_dim_v);
    }
    const int64_t num_rows = stop_of(call.seqlen_q) - first;
    if (h >= call.num_heads || num_rows <= 0) return;
    if (work.shared)
        clear((T *)work.shared + ((b * call.num_heads + h) * call.seqlen_q + first) * call.head_dim,
              num_rows * call.head_dim);
    Entry entry = {};  // of all packed sequences
    entry.batch = b;
    Scratch scratch{memory};
    const int64_t dim = Sizes<T>(call).dim_v;
    T *dout = scratch.take<T>(dim), *values = scratch.take<T>(dim);
    for (int64_t i = first; i < first + num_rows; ++i) {
        const Row row = {h, i};
        load_row(row_address(call, DOUT, entry, row), call.dtype, call.strides[DOUT][3], call.head_dim_v, dout);
        clear(dout + call.head_dim_v, dim - call.head_dim_v);
        delta<T>(work, entry, row) = delta_of(call, entry, row, number<T>(call, LSE, b, h, i), dout, dim, values);
    }
}

// Rounds dq of a head to 16 bits.
template <class T> void round_job(Work &work, char *, int64_t job) {
    const Call &call = work.results();
    const Entry &entry = work.entries[job / call.num_heads];
    for (int64_t i = 0; i < entry.seqlen_q; ++i) {
        const Row row = {job % call.num_heads, i};
        store_row(dq_sum<T>(work, entry, row), call.dtype, call.strides[DQ][3], call.head_dim,
                  row_address(call, DQ, entry, row));
    }
}

// ---- which jobs there are -------------------------------------------------------------------------------------------

// Finds the sums of rows of large lse, and nothing else, with the tiles of the backward pass.
template <class T> bool prepare_row_sums(Work &work) {
    if (!make_entries(work)) return false;
    choose_backward_tiles<T, BackwardBuffers<T>>(work);
    work.scratch_bytes = BackwardBuffers<T>(work, nullptr).scratch.used;
    if (!make_blocks(work, false, 0)) return false;
    work.add_phase(row_sums_job<T>, work.num_blocks);
    return true;
}

// Allocates the sums that several jobs make or read; returns false if there is no memory.
template <class T> bool allocate_sums(Work &work, DqGradient dq, BiasGradient bias, bool has_sums) {
    const Call &call = work.call;
    if (dq == DqGradient::ACCUM && !work.allocate(work.shared, bytes_of_dq_accum<T>(call))) return false;
    if (has_sums && !work.allocate(work.sums, work.num_tiles * (group_of(call) + 2))) return false;
    if (!work.allocate(work.delta, num_rows_of(call) * int64_t(sizeof(T)))) return false;
    if (bias == BiasGradient::KEYS && !work.allocate(work.bias_sums, bytes_of_bias_sums(call, sizeof(T)))) return false;
    const bool are_ordered = work.adds_dq || bias == BiasGradient::ORDERED;
    return (!are_ordered || allocate_progress(work)) && allocate_row_sums<T>(work) && allocate_first_max(work);
}

// Adds the phases of a bias whose gradient is summed after the jobs of keys, or by jobs of its own.
template <class T, class Buffers> void add_bias_phases(Work &work, BiasGradient bias, bool finds_rows) {
    const Call &call = work.call;
    const BiasJobs jobs(work);
    if (bias == BiasGradient::KEYS)
        work.add_phase(bias_sums_job<T>, jobs.entries * jobs.heads * ceil_div(call.seqlen_k, MAX_KEYS));
    if (bias == BiasGradient::SEPARATE) {
        if (HAS_TILES && finds_rows)
            work.add_phase(bias_row_sums_job<T>, call.batch * call.num_heads * jobs.num_blocks);
        work.add_phase(bias_job<T, Buffers>, jobs.entries * jobs.heads * jobs.blocks * jobs.tiles);
    }
}

template <class T, class Buffers> bool prepare_backward(Work &work) {
    const Call &call = work.call, &results = work.results();
    if (!make_entries(work)) return false;
    choose_backward_tiles<T, Buffers>(work);
    if (!make_tiles(work)) return false;
    work.scratch_bytes = Buffers(work, nullptr).scratch.used;
    const DqGradient dq = dq_gradient<T>(work);
    const BiasGradient bias = bias_gradient<T>(work);
    const bool has_sums = is_any_wanted(results, DALIBI_SLOPES, DSCALE, DSOFTCAP);
    work.adds_dq = dq == DqGradient::IN_PLACE || dq == DqGradient::ACCUM;
    if (!allocate_sums<T>(work, dq, bias, has_sums)) return false;
    const bool finds_rows = (work.row_sums && !call.arrays[ROW_SUMS]) || work.first_max;
    if ((dq == DqGradient::SEPARATE || finds_rows) && !make_blocks(work, false, 0)) return false;
    const int64_t num_heads = batch_of_arrays(call) * larger(call.num_heads, call.num_heads_kv);
    work.add_phase(preprocess_job<T>, num_heads * preprocess_jobs_of_head(call));
    if (finds_rows) work.add_phase(row_sums_job<T>, work.num_blocks);
    const bool is_bias_of_keys = bias != BiasGradient::NONE && bias != BiasGradient::SEPARATE;
    if (is_any_wanted(results, DQ, DK, DV) || has_sums || is_bias_of_keys)
        work.add_phase(key_tile_job<T, Buffers>, work.num_tiles);
    if (dq == DqGradient::ACCUM) work.add_phase(round_job<T>, work.num_entries * call.num_heads);
    if (dq == DqGradient::SEPARATE) work.add_phase(dq_job<T, Buffers>, work.num_blocks);
    if (has_sums) work.add_phase(sums_job<T>, 1);
    if (is_wanted(results, DSINKS)) work.add_phase(sinks_job<T>, call.num_heads);
    add_bias_phases<T, Buffers>(work, bias, finds_rows);
    return true;
}

}  // namespace
