// The forward pass: blocks of queries against tiles of keys, with online softmax (FlashAttention-2, algorithm 1).
#pragma once

#include "decode_bf16.h"
#include "forward_bf16.h"
#include "fused_softmax.h"
#include "schedule.h"

namespace {

// Rows of a block, at most: the first of these that makes enough jobs, else the last. Unless blocks share packed tiles,
// or threads hold them, each block packs its own keys. So the smallest blocks pay only where blocks attend to different
// numbers of keys: the load of threads is balanced then.
constexpr int64_t BLOCK_ROWS_OF_TILES[] = {768, 384, 192, 128, 64, 32}, BLOCK_ROWS[] = {192, 96, 60, 36, 24};
// With AMX the last bits of a product depend on which rows are multiplied together. If bits must not depend on that,
// blocks have this many rows in every call.
constexpr int64_t FIXED_BLOCK_ROWS[] = {128};
template <class T>
inline void forward_tile(const Work &work, const Block &block, const Entry &entry, const Scaling<T> &scaling,
                         ForwardBuffers<T> &buffers, int64_t first, int64_t count) {
    const Call &call = work.call;
    const int64_t num_rows = rows_of(block), dim = call.head_dim, dim_v = buffers.sizes.dim_v;
    const int64_t group = call.window_left < NO_BOUND || call.window_right < NO_BOUND ? GROUP : WIDE_GROUP;
    const Tile<T> tile = load_tile(work, entry, block.head_kv, first, count, 0, buffers);
    if (call.dropout_steps) load_kept(call, entry, block, first, count, buffers.kept);
    const bool may_fuse = may_fuse_softmax(call, scaling);
    for (int64_t r0 = 0, n; r0 < num_rows; r0 += n) {
        n = rows_of_group(call, block, r0, group);
        if (may_fuse && n > FUSED_ROWS) n -= n % FUSED_ROWS;
        const Keys keys = keys_of_group<T>(call, entry, block, r0, n, first, count);
        const int64_t here = keys.stop - keys.first;
        if (here <= 0) continue;
        if constexpr (MAY_FUSE_SOFTMAX<T>)
            if (may_fuse && fills_blocks<T>(call, entry, block, r0, n, {first + keys.first, first + keys.stop})) {
                fused_rows(scaling, tile, keys.first, here, dim, r0, n, buffers);
                continue;
            }
        T *s = buffers.s + keys.first, *o = buffers.o + r0 * dim_v;
        product_of_rows(n, round_up(here, LANES<T>), dim, buffers.q + r0 * buffers.sizes.dim, buffers.sizes.dim,
                        tile.k_t + keys.first, buffers.keys_stride, s, SCORES_STRIDE<T>);
        const ScoreTile scores = {call, entry, block, r0, n, first + keys.first, here, round_up(here, LANES<T>), here};
        softmax_rows<T>(scaling, scores, keys.first, buffers, buffers.s, nullptr, 0, DoNothing());
        product<T, Order::ROWS, ElementOps<T>, TALL_BLOCKS>(
            n, dim_v, here, s, SCORES_STRIDE<T>, tile.v + keys.first * tile.v_stride, tile.v_stride, o, dim_v, true);
    }
}

// The same for decode, where a job computes all keys up to the last one that any of its rows attends to. `columns` is
// what `load_queries` returned. The tile after this one has `next_count` keys.
template <class T>
inline void decode_tile(const Work &work, const Block &block, const Entry &entry, const Scaling<T> &scaling,
                        ForwardBuffers<T> &buffers, int64_t first, int64_t count, int64_t next_count,
                        const T *columns) {
    const Call &call = work.call;
    const Sizes<T> &sizes = buffers.sizes;
    const int64_t num_rows = rows_of(block);
    KeyRows k, v, next_k;
    find_key_rows({call, K, entry, block.head_kv, first, count}, buffers.rows, sizes.dim, k);
    find_key_rows({call, V, entry, block.head_kv, first, count}, buffers.v, sizes.dim_v, v);
    if (call.dropout_steps) load_kept(call, entry, block, first, count, buffers.kept);
    // In pages, rows of k of the next tile are found; elsewhere they lie as these do.
    const bool finds_next = call.page_size && next_count > 0 && are_read_in_place<T>(call, K, call.head_dim);
    if (finds_next) {
        find_key_rows({call, K, entry, block.head_kv, first + count, next_count}, buffers.rows, sizes.dim, next_k);
        for (int64_t j = next_count; j < count; ++j) next_k.at[j] = next_k.at[0];
    }
    const int64_t next = call.page_size ? 0 : count * call.strides[K][2] * size_of(call.kv_dtype);
    const Coming coming_v{v, 0}, coming_k{finds_next ? next_k : k, next};
    bool has_scores = false, is_bf16x2 = false;  // is_bf16x2: values are multiplied as bf16x2
    if constexpr (MAY_USE_TILES<T>) {
        if (columns && k.dtype == call.dtype && v.dtype == call.dtype) {
            decode_scores_bf16(columns, call.head_dim, k, count, max_terms<T>(call), coming_v, buffers.rows,
                               buffers.k_t, buffers.s);
            is_bf16x2 = call.dtype == BFLOAT16;
            has_scores = is_bf16x2 || are_finite(num_rows, buffers.s, count);
        }
    } else if constexpr (MAY_USE_BF16X2<T>) {
        if (decodes_in_bf16x2<T>(call, block)) {
            bf16x2_scores(num_rows, buffers.q, call.head_dim, k, count, coming_v, buffers.s);
            has_scores = is_bf16x2 = true;
        }
    }
    if (!has_scores) decode_scores(num_rows, buffers.q, sizes.dim, k, count, coming_v, buffers.s);
    const ScoreTile scores = {call, entry, block, 0, num_rows, first, count, round_up(count, LANES<T>), count};
    softmax_rows<T>(scaling, scores, 0, buffers, buffers.s, buffers.p, is_bf16x2, DoNothing());
    if constexpr (MAY_USE_TILES<T>) {
        if (is_bf16x2) return add_decode_values_bf16(buffers.p, v, count, sizes.dim_v, coming_k, buffers.v, buffers.o);
    } else if constexpr (MAY_USE_BF16X2<T>) {
        if (is_bf16x2) return add_bf16x2_values(num_rows, buffers.p, v, count, sizes.dim_v, coming_k, buffers.o);
    }
    add_decode_values(num_rows, buffers.s, v, count, sizes.dim_v, coming_k, buffers.o);
}

// Stores the partial results of a job with a split of the keys, for `merge_job`.
template <class T>
NOINLINE void leave_partial(const Work &work, int64_t job, const Block &block, const ForwardBuffers<T> &buffers) {
    const int64_t dim = buffers.sizes.dim_v;
    const bool reduces = has_row_reductions(work.call);
    for (int64_t r = 0; r < rows_of(block); ++r) {
        T *to = partial_of<T>(work, job) + r * (dim + Partial::COUNT), *numbers = to + dim;
        memcpy(to, buffers.o + r * dim, dim * sizeof(T));
        numbers[Partial::ROW_MAX] = buffers.row_max[r];
        numbers[Partial::L] = sum_of_lanes<T>(load(buffers.l + r * LANES<T>));
        numbers[Partial::LARGEST] = reduces ? buffers.largest[r] : T(0);
        numbers[Partial::MOMENT] = reduces ? sum_of_lanes<T>(load(buffers.moment + r * LANES<T>)) : T(0);
    }
}

// Writes the results of `count` rows of a block from r0 on, at most as many as a vector has lanes: `l` are theirs.
template <class T>
inline void finish_vector_of_rows(const Call &call, const Entry &entry, const Block &block, const Scaling<T> &scaling,
                                  const ForwardBuffers<T> &buffers, int64_t r0, int64_t count, Vector<T> l) {
    T logs[LANES<T>], factors[LANES<T>];
    store(factors, l);
    logs_of(factors, logs);
    store(factors, splat(T(1)) / (l == Vector<T>{} ? splat(T(1)) : l));
    for (int64_t i = 0; i < count; ++i)
        write_row(call, entry, row_of(block, r0 + i), buffers.o + (r0 + i) * buffers.sizes.dim_v, factors[i],
                  T(buffers.row_max[r0 + i] * scaling.natural + double(logs[i])));
}

// The same with sinks or row reductions.
template <class T>
NOINLINE void finish_vector_of_rows_with_sinks(const Call &call, const Entry &entry, const Block &block,
                                               const Scaling<T> &scaling, const ForwardBuffers<T> &buffers, int64_t r0,
                                               int64_t count, Vector<T> sums) {
    constexpr int N = LANES<T>;
    const double natural = scaling.natural;
    RowWithSink all[N];
    T own_l[N], l[N], logs[N];
    store(own_l, sums);
    store(l, splat(T(1)));
    for (int64_t i = 0; i < count; ++i) {
        all[i] = with_sink<T>(call, row_of(block, r0 + i), buffers.row_max[r0 + i] * natural, own_l[i]);
        l[i] = T(all[i].l);
    }
    logs_of(l, logs);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t r = r0 + i;
        write_row_with_sink(call, entry, row_of(block, r), buffers.o + r * buffers.sizes.dim_v, all[i], logs[i]);
        if (!has_row_reductions(call)) continue;
        const double row_max = buffers.row_max[r], largest = buffers.largest[r];
        const double moment = sum_of_lanes<T>(load(buffers.moment + r * N));
        write_row_reductions<T>(
            call, entry, row_of(block, r),
            {row_max * natural, own_l[i], largest * natural, (largest - row_max) * natural, moment * natural}, all[i]);
    }
}

// Writes the results of a block's rows, as many at a time as a vector has lanes: their sums, logarithms and quotients
// take as long as those of one row.
template <class T>
NOINLINE void finish_rows(const Call &call, const Entry &entry, const Block &block, const Scaling<T> &scaling,
                          const ForwardBuffers<T> &buffers) {
    constexpr int N = LANES<T>;
    const bool has_more = call.arrays[SINKS] || has_row_reductions(call);
    for (int64_t r0 = 0; r0 < rows_of(block); r0 += N) {
        const int64_t count = smaller(N, rows_of(block) - r0);
        Vector<T> lanes[N];
        for (int64_t i = 0; i < N; ++i) lanes[i] = load(buffers.l + (r0 + smaller(i, count - 1)) * N);
        const Vector<T> l = sums_of_lanes<T>(lanes);
        if (has_more) {
            finish_vector_of_rows_with_sinks(call, entry, block, scaling, buffers, r0, count, l);
        } else {
            finish_vector_of_rows(call, entry, block, scaling, buffers, r0, count, l);
        }
    }
}

// Loads the rows of q of a block, in `terms` terms. Returns them by columns where decode reads them so, or null.
template <class T>
NOINLINE T *load_queries(const Work &work, const Entry &entry, const Block &block, bool decodes, int64_t terms,
                         ForwardBuffers<T> &buffers) {
    const Call &call = work.call;
    if (terms == 1 || (decodes && decodes_in_bf16x2<T>(call, block))) {
        load_rows_bf16x2(call, Q, entry, block, call.head_dim, buffers.q);
    } else if (terms == 2) {
        if constexpr (MAY_USE_TILES<T>) load_split_rows(call, entry, block, buffers.q);
    } else if (decodes) {
        load_signed_rows(call, Q, entry, block, call.head_dim, buffers.q);
    } else {
        buffers.q = find_rows(call, Q, entry, block, call.head_dim, buffers.q);
    }
    T *columns = nullptr;
    if constexpr (MAY_USE_TILES<T>)
        if (decodes && rows_of(block) > DECODE_ROWS_OF_FEW_KEYS && max_terms<T>(call)) {
            columns = buffers.q + DECODE_ROWS * buffers.sizes.dim;
            load_decode_columns(call, entry, block, buffers.rows, columns);
        }
    return columns;
}

// Sums of rows that have attended to no key yet.
template <class T> NOINLINE void clear_sums(int64_t num_rows, bool reduces, ForwardBuffers<T> &buffers) {
    clear(buffers.o, num_rows * buffers.sizes.dim_v);
    clear(buffers.l, num_rows * LANES<T>);
    for (int64_t r = 0; r < num_rows; ++r) buffers.row_max[r] = T(-__builtin_inf());
    if (!reduces) return;
    clear(buffers.moment, num_rows * LANES<T>);
    for (int64_t r = 0; r < num_rows; ++r) buffers.largest[r] = T(-__builtin_inf());
}

template <class T> void forward_job(Work &work, char *memory, int64_t job) {
    const Call &call = work.call;
    ForwardBuffers<T> buffers(work, memory);
    if (MAY_HOLD_TILES && work.packed.are_held) {
        const int64_t head = *buffers.head;
        job = take_block(work, *buffers.head);
        if (*buffers.head != head) memset(buffers.is_held, 0, work.packed.tiles_per_head);
    }
    const Block &block = work.blocks[job];
    const Entry &entry = work.entries[block.entry];
    const Scaling<T> scaling(call);
    const bool decodes = is_decode(call, entry, block);
    const int64_t terms = decodes ? 0 : num_terms<T>(work);
    const T *columns = load_queries(work, entry, block, decodes, terms, buffers);
    clear_sums(rows_of(block), has_row_reductions(call), buffers);
    const Keys visible = keys_visible_to(call, entry, block);
    const int64_t begin = larger(tile_begin(work, visible.first), block.first_key),
                  end = smaller(visible.stop, block.stop_key);
    for (int64_t first = begin; first < end; first += work.keys_per_tile) {
        if (work.stopped.load(std::memory_order_relaxed)) return;
        const int64_t count = smaller(work.keys_per_tile, end - first);
        if (!any_visible(call, entry, block, first, count)) continue;
        if (decodes) {
            const int64_t next_count = smaller(work.keys_per_tile, end - first - count);
            decode_tile(work, block, entry, scaling, buffers, first, count, next_count, columns);
        } else if (terms) {
            if constexpr (MAY_USE_BF16X2<T>) forward_tile_bf16(work, block, entry, scaling, buffers, first, count);
        } else {
            forward_tile(work, block, entry, scaling, buffers, first, count);
        }
    }

    if (block.num_splits > 1) {
        leave_partial(work, job, block, buffers);
    } else {
        finish_rows(call, entry, block, scaling, buffers);
    }
}

// Merges, in order, the results of the jobs that split the keys of a block.
template <class T> void merge_job(Work &work, char *memory, int64_t job) {
    const int64_t first = work.split_blocks[job];
    const Block &block = work.blocks[first];
    const Entry &entry = work.entries[block.entry];
    const double natural = Scaling<T>(work.call).natural, infinity = __builtin_inf();
    ForwardBuffers<T> buffers(work, memory);
    const int64_t dim = buffers.sizes.dim_v;
    for (int64_t r = 0; r < rows_of(block); ++r) {
        auto partial = [&](int64_t n) { return partial_of<T>(work, first + n) + r * (dim + Partial::COUNT); };
        double top = -infinity, largest = -infinity, l = 0, moment = 0;
        for (int64_t n = 0; n < block.num_splits; ++n) {
            const double row_max = partial(n)[dim + Partial::ROW_MAX], own = partial(n)[dim + Partial::LARGEST];
            top = row_max > top ? row_max : top;
            largest = own > largest ? own : largest;
        }
        clear(buffers.o, dim);
        // Differences of scores, which are exact where it matters, become exponents.
        for (int64_t n = 0; n < block.num_splits; ++n) {
            const double row_max = partial(n)[dim + Partial::ROW_MAX], own = partial(n)[dim + Partial::L];
            const double factor = row_max == -infinity ? 0 : exp_of((row_max - top) * natural);
            l += factor * own;
            const double from = partial(n)[dim + Partial::LARGEST] - largest;
            if (factor != 0) moment += factor * (partial(n)[dim + Partial::MOMENT] + from * own) * natural;
            for (int64_t d = 0; d < dim; ++d) buffers.o[d] += T(factor) * partial(n)[d];
        }
        const RowWithSink all = finish_row(work.call, entry, row_of(block, r), buffers.o, top * natural, l);
        const WholeRow own = {top * natural, l, largest * natural, (largest - top) * natural, moment};
        if (has_row_reductions(work.call)) write_row_reductions<T>(work.call, entry, row_of(block, r), own, all);
    }
}

// Keys of a tile, at most. Long tiles read rows of a bias or a mask, which have large strides, in longer pieces; with
// AMX they load and store the sums of out less often, which matters where out is wide; and with AVX-512, whose products
// take half the time, the overhead of each tile counts. Short tiles give decode more splits.
template <class T> int64_t most_keys_per_tile(const Call &call) {
    const bool is_wide = HAS_TILES && uses_bf16x2<T>(call) && larger(call.head_dim, call.head_dim_v) > 64;
    const bool is_fast =
        VECTOR_BYTES == 64 && !HAS_BF16X2 && !call.batch_invariant && call.seqlen_q * group_of(call) > DECODE_ROWS;
    return call.arrays[BIAS] || call.arrays[MASK] || is_wide || is_fast ? MAX_KEYS : USUAL_KEYS;
}

template <class T> void choose_forward_tiles(Work &work) {
    const Call &call = work.call;
    // Smaller blocks pack keys more often, but that takes less time than merging the results of jobs that split keys.
    const bool are_equal = call.window_right >= NO_BOUND;
    auto choose_of = [&](auto &block_rows) {
        for (const int64_t rows : block_rows) {
            if (are_equal && rows <= LEAST_ROWS) break;
            choose_tiles<T>(work, rows, most_keys_per_tile<T>(call));
            if (BlockCount(work).all >= ENOUGH_JOBS) break;
        }
    };
    if (HAS_TILES && call.batch_invariant) {
        choose_of(FIXED_BLOCK_ROWS);
    } else {
        HAS_TILES ? choose_of(BLOCK_ROWS_OF_TILES) : choose_of(BLOCK_ROWS);
    }
}

template <class T> bool prepare_forward(Work &work) {
    const Call &call = work.call;
    if (!make_entries(work)) return false;
    choose_forward_tiles<T>(work);
    if (MAY_HOLD_TILES) hold_tiles<T>(work, BlockCount(work).all);
    const int64_t bytes_of_row = (Sizes<T>(call).dim_v + Partial::COUNT) * int64_t(sizeof(T));
    if (!make_blocks(work, true, bytes_of_row)) return false;
    work.scratch_bytes = ForwardBuffers<T>(work, nullptr).scratch.used;
    if constexpr (MAY_USE_TILES<T>)
        if (may_split(call)) work.add_phase(check_job<T>, work.num_entries * call.num_heads);
    work.add_phase(forward_job<T>, work.num_blocks);
    if (work.num_split_blocks) {
        if (!work.allocate(work.shared, work.num_blocks * work.rows_per_partial * bytes_of_row)) return false;
        work.add_phase(merge_job<T>, work.num_split_blocks);
    }
    return true;
}

}  // namespace
