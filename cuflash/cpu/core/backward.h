// The backward pass: tiles of keys against blocks of queries, weights computed again (FlashAttention-2, algorithm 2).
//
// A job owns a tile of keys: its dk and dv. What it has for dq is added in the order of the tiles: a job waits, block by
// block, for the one before it, which began earlier. So no sum depends on the number of threads.
#pragma once

#include <sched.h>

#include "forward.h"

namespace {

constexpr long BACKWARD_ROWS = 120;        // of a block at most
constexpr long DQ_BYTES = 32 << 20;        // for sums of dq in float32, where dq has 16 bits

inline bool is_wanted(const Call &call, Array array) { return call.arrays[array] != nullptr; }

// Whether each entry of dbias belongs to one pair of a query and a key, and is no sum: the job of the keys writes it.
inline bool has_whole_bias(const Call &call) {
    const int64_t *strides = call.strides[DBIAS];
    return is_wanted(call, DBIAS) && (strides[0] || call.batch == 1) && (strides[1] || call.num_heads == 1) &&
           (strides[2] || call.seqlen_q == 1) && (strides[3] || call.seqlen_k == 1);
}

template <class T> struct BackwardBuffers {
    Scratch scratch;
    Sizes<T> sizes;
    T *k, *k_t, *v_t, *dk, *dv, *q, *dout, *dq, *p, *ds, *tanhs, *products, *lse, *delta, *total;
    unsigned char *kept;
    double *sums;

    BackwardBuffers(const Work &work, char *memory) : scratch{memory}, sizes(work.call) {
        const Call &call = work.call;
        const long rows = work.rows_per_block, keys = work.keys_per_tile, scores = rows * SCORES_STRIDE<T>;
        const bool has_products = is_wanted(call, DSCALE) || is_wanted(call, DSOFTCAP);
        k = scratch.template take<T>(keys * larger(sizes.dim, sizes.dim_v));
        k_t = scratch.template take<T>(sizes.dim * SCORES_STRIDE<T>);
        v_t = scratch.template take<T>(sizes.dim_v * SCORES_STRIDE<T>);
        dk = scratch.template take<T>(keys * sizes.dim);
        dv = scratch.template take<T>(keys * sizes.dim_v);
        q = scratch.template take<T>(rows * sizes.dim);
        dout = scratch.template take<T>(rows * sizes.dim_v);
        dq = scratch.template take<T>(rows * larger(sizes.dim, sizes.dim_v));
        p = scratch.template take<T>(scores);
        ds = scratch.template take<T>(scores);
        tanhs = scratch.template take<T>(call.softcap ? scores : 0);
        products = scratch.template take<T>(has_products ? scores : 0);
        total = scratch.template take<T>(is_wanted(call, DBIAS) ? scores : 0);
        lse = scratch.template take<T>(rows);
        delta = scratch.template take<T>(rows);
        kept = scratch.template take<unsigned char>(call.dropout_steps ? rows * MAX_KEYS : 0);
        sums = scratch.template take<double>(call.num_heads + 2);
    }
};

// rowsum(dout o out) - dlse of a row; `dout` is what was loaded of it, `values` room for as much of out.
template <class T>
inline T delta_of(const Call &call, const Entry &entry, Row row, T lse, const T *dout, long dim, T *values) {
    load_row(row_address(call, OUT, entry, row), call.dtype, call.strides[OUT][3], call.head_dim_v, values);
    clear(values + call.head_dim_v, dim - call.head_dim_v);
    Vector<T> sum = {};
    for (long d = 0; d < dim; d += LANES<T>) sum += load(dout + d) * load(values + d);
    T delta = sum_of_lanes<T>(sum);
    if (call.arrays[DLSE] && lse != T(-__builtin_inf()))
        delta -= number<T>(call, DLSE, entry.batch, row.head, entry.first_q + row.i);
    return delta;
}

// q, dout, lse and delta of a block.
template <class T> inline void load_queries(const Call &call, const Entry &entry, const Block &block,
                                            BackwardBuffers<T> &buffers) {
    const Sizes<T> &sizes = buffers.sizes;
    const long num_rows = rows_of(block);
    load_rows(call, Q, entry, block, call.head_dim, buffers.q, sizes.dim, num_rows);
    load_rows(call, DOUT, entry, block, call.head_dim_v, buffers.dout, sizes.dim_v, num_rows);
    if (call.scale < 0)
        for (long x = 0; x < num_rows * sizes.dim; ++x) buffers.q[x] = -buffers.q[x];
    for (long r = 0; r < num_rows; ++r) {
        const Row row = row_of(block, r);
        const T lse = number<T>(call, LSE, entry.batch, row.head, entry.first_q + row.i);
        buffers.delta[r] =
            delta_of(call, entry, row, lse, buffers.dout + r * sizes.dim_v, sizes.dim_v, buffers.dq);
        // A row that sees no key: its weights are exp(-inf).
        buffers.lse[r] = lse == T(-__builtin_inf()) ? T(__builtin_inf()) : lse;
    }
}

// k and v of a tile: v transposed, k as it is and transposed.
template <class T>
inline void load_key_tile(const Call &call, const Entry &entry, long head_kv, long first, long count,
                          BackwardBuffers<T> &buffers) {
    const Sizes<T> &sizes = buffers.sizes;
    const long padded = round_up(count, LANES<T>);
    load_keys(call, V, entry, head_kv, first, count, call.head_dim_v, buffers.k, sizes.dim_v, padded);
    transpose(buffers.k, sizes.dim_v, padded, sizes.dim_v, buffers.v_t, SCORES_STRIDE<T>);
    load_keys(call, K, entry, head_kv, first, count, call.head_dim, buffers.k, sizes.dim, padded);
    transpose(buffers.k, sizes.dim, padded, sizes.dim, buffers.k_t, SCORES_STRIDE<T>);
}

// The derivative of softcap * tanh(x), x = score / softcap: tanh(x) - x (1 - tanh(x)^2). Near 0, where the terms cancel,
// (sinh(2 x) - 2 x) / 2 * (1 - tanh(x)^2) by the series of the first factor.
template <class T> inline Vector<T> derivative_by_softcap(Vector<T> x, Vector<T> tanh) {
    const Vector<T> one = splat(T(1)), slope = one - tanh * tanh, size = x < Vector<T>{} ? -x : x;
    const Vector<T> square = size < splat(T(0.5)) ? x * x : Vector<T>{};
    Vector<T> series = one;
    for (int n = 18; n > 3; n -= 2) series = one + splat(T(4.0 / (n * (n + 1)))) * square * series;
    return size < splat(T(0.5)) ? splat(T(2.0 / 3)) * x * square * series * slope : tanh - x * slope;
}

struct RowRange {
    long first, stop;
};

// Weights p, with what dropout makes of them, and the gradient ds of scores, of a block and a tile that are loaded; for
// dbias that of scores with their bias, else that of scale q k^T. Gives the rows that see any of these keys; what lies
// between them is zero. Adds to buffers.sums what there is for slopes by head, for scale and for softcap.
template <class T>
inline RowRange differentiate(const Call &call, const Scaling<T> &scaling, const Entry &entry, const Block &block,
                              long first, long count, bool for_bias, BackwardBuffers<T> &buffers) {
    constexpr int N = LANES<T>;
    constexpr long STRIDE = SCORES_STRIDE<T>;
    const Sizes<T> &sizes = buffers.sizes;
    const long num_rows = rows_of(block), padded = round_up(count, N);
    const T scale = T(size_of_scale(call)), inner = scaling.has_terms ? T(1) : scale;
    const Vector<T> log2_e = splat(T(1.4426950408889634));
    const bool has_products = !for_bias && (is_wanted(call, DSCALE) || is_wanted(call, DSOFTCAP));
    if (call.dropout_steps) load_kept(call, entry, block, first, count, buffers.kept);
    RowRange range = {num_rows, 0};
    for (long r0 = 0; r0 < num_rows; r0 += GROUP) {
        const long n = smaller(GROUP, num_rows - r0);
        const Span span = span_of(block, r0, n);
        const Keys seen = seen_by(call, entry, span.first, span.last);
        const long here = smaller(seen.stop - first, count);
        T *p = buffers.p + r0 * STRIDE, *ds = buffers.ds + r0 * STRIDE;
        if (here <= 0 || seen.first >= first + count) {
            for (long r = 0; r < n; ++r) clear(p + r * STRIDE, padded), clear(ds + r * STRIDE, padded);
            continue;
        }
        const long columns = round_up(here, N);
        range.first = smaller(range.first, r0);
        range.stop = r0 + n;
        prefetch_bias(call, entry, block, r0, n, first, here);
        product_of_rows(n, columns, call.head_dim, buffers.q + r0 * sizes.dim, sizes.dim, buffers.k_t, STRIDE, p, STRIDE);
        product_of_rows(n, columns, call.head_dim_v, buffers.dout + r0 * sizes.dim_v, sizes.dim_v, buffers.v_t, STRIDE,
                        ds, STRIDE);
        const bool is_finished = !needs_finishing(call, scaling, entry, span.first, span.last, first, columns);
        for (long r = 0; r < n; ++r, p += STRIDE, ds += STRIDE) {
            const Row row = row_of(block, r0 + r);
            T *products = has_products ? buffers.products + (r0 + r) * STRIDE : nullptr;
            T *tanhs = call.softcap ? buffers.tanhs + (r0 + r) * STRIDE : nullptr;
            if (products) memcpy(products, p, columns * sizeof(T));
            if (!is_finished) finish_scores<T>(call, scaling, entry, row, first, here, columns, p, tanhs);
            const Vector<T> lse = splat(buffers.lse[r0 + r]), delta = splat(buffers.delta[r0 + r]);
            const unsigned char *kept = buffers.kept + (r0 + r) * MAX_KEYS;
            if (call.dropout_steps) drop(call, kept, here, ds);
            for (long j = 0; j < columns; j += N) {
                const Vector<T> weight = exp2<T>((load(p + j) * splat(inner) - lse) * log2_e);
                store(p + j, weight);
                store(ds + j, weight * (load(ds + j) - delta));
            }
            if (call.dropout_steps) drop(call, kept, here, p);
            if (columns < padded) clear(p + columns, padded - columns), clear(ds + columns, padded - columns);
            if (for_bias) continue;
            if (has_whole_bias(call))
                store_row(ds, call.bias_dtype, call.strides[DBIAS][3], here,
                          address(call, DBIAS, size_of(call.bias_dtype), entry.index, row.head, row.i, first));
            if (is_wanted(call, DALIBI_SLOPES)) {
                const Vector<T> start = splat(T(first - row.i - entry.diagonal)) + iota<T>();
                Vector<T> sum = {};
                for (long j = 0; j < columns; j += N) {
                    const Vector<T> distance = start + splat(T(j));
                    sum -= load(ds + j) * (distance < Vector<T>{} ? -distance : distance);
                }
                buffers.sums[row.head] += double(sum_of_lanes<T>(sum));
            }
            if (is_wanted(call, DSOFTCAP)) {
                Vector<T> sum = {};
                for (long j = 0; j < columns; j += N) {
                    const Vector<T> x = load(products + j) * splat(scale / T(call.softcap));
                    sum += load(ds + j) * derivative_by_softcap<T>(x, load(tanhs + j));
                }
                buffers.sums[call.num_heads + 1] += double(sum_of_lanes<T>(sum));
            }
            if (tanhs)
                for (long j = 0; j < columns; j += N)
                    store(ds + j, load(ds + j) * (splat(T(1)) - load(tanhs + j) * load(tanhs + j)));
            if (is_wanted(call, DSCALE)) {
                Vector<T> sum = {};
                for (long j = 0; j < columns; j += N) sum += load(ds + j) * load(products + j);
                const T total = sum_of_lanes<T>(sum);
                buffers.sums[call.num_heads] += double(call.scale < 0 ? -total : total);
            }
        }
    }
    return range;
}

// ---- dq, dk and dv ---------------------------------------------------------------------------------------------------

// The blocks of the heads that share keys, in the order in which jobs go through them.
struct Steps {
    long rows, heads, in_head, count, group;
    Steps(const Work &work, const Entry &entry) {
        const Call &call = work.call;
        group = call.num_heads_kv ? call.num_heads / call.num_heads_kv : 0;
        rows = rows_in_blocks(call, entry.seqlen_q, work.rows_per_block);
        heads = heads_in_blocks(entry.seqlen_q, rows, group, work.rows_per_block);
        in_head = ceil_div(entry.seqlen_q, rows);
        count = group ? in_head * ceil_div(group, heads) : 0;
    }
    Block block(const Entry &entry, const KeyTile &tile, long step) const {
        Block block = {};
        const long head = step / in_head * heads, row = step % in_head * rows;
        block.entry = tile.entry;
        block.head_kv = tile.head_kv;
        block.first_head = tile.head_kv * group + head;
        block.num_heads = smaller(heads, group - head);
        block.first_row = row;
        block.num_rows = smaller(rows, entry.seqlen_q - row);
        return block;
    }
};

// Waits until the job of the tile before has done so many steps; false if the call has been stopped.
inline bool wait_for(Work &work, long before, long steps) {
    if (before < 0) return true;
    for (long n = 0; work.progress[before].load(std::memory_order_acquire) < steps; ++n) {
        if (work.stopped.load(std::memory_order_relaxed)) return false;
        if (n > 100) sched_yield();
    }
    return true;
}

inline bool sums_dq_apart(const Call &call) { return call.dtype == FLOAT16 || call.dtype == BFLOAT16; }

// Where the sum of dq of a row of 16-bit numbers is.
template <class T> inline T *dq_sum(const Work &work, const Entry &entry, Row row) {
    const Call &call = work.call;
    return (T *)work.shared +
           ((entry.batch * call.num_heads + row.head) * call.seqlen_q + entry.first_q + row.i) * call.head_dim;
}

template <class T>
inline void add_dq(const Work &work, const Entry &entry, const Block &block, RowRange range, const T *dq, long dim) {
    const Call &call = work.call;
    const T scale = T(call.scale);
    for (long r = range.first; r < range.stop; ++r) {
        const Row row = row_of(block, r);
        const bool is_apart = sums_dq_apart(call);
        T *to = is_apart ? dq_sum<T>(work, entry, row) : (T *)row_address(call, DQ, entry, row);
        const long step = is_apart ? 1 : call.strides[DQ][3];
        const T *from = dq + r * dim;
        if (step == 1) {
            for (long d = 0; d < call.head_dim; ++d) to[d] += scale * from[d];
        } else {
            for (long d = 0; d < call.head_dim; ++d) to[d * step] += scale * from[d];
        }
    }
}

template <class T> void key_tile_job(Work &work, char *memory, long job) {
    const Call &call = work.call;
    const KeyTile &tile = work.tiles[job];
    const Entry &entry = work.entries[tile.entry];
    const Scaling<T> scaling(call);
    BackwardBuffers<T> buffers(work, memory);
    const Sizes<T> &sizes = buffers.sizes;
    const Steps steps(work, entry);
    const long first = tile.first_key, count = tile.num_keys;
    const bool wants_dq = work.progress != nullptr, wants_dk = is_wanted(call, DK), wants_dv = is_wanted(call, DV);
    load_key_tile(call, entry, tile.head_kv, first, count, buffers);
    clear(buffers.dk, count * sizes.dim);
    clear(buffers.dv, count * sizes.dim_v);
    clear(buffers.sums, call.num_heads + 2);
    for (long step = 0; step < steps.count; ++step) {
        if (work.stopped.load(std::memory_order_relaxed)) return;
        const Block block = steps.block(entry, tile, step);
        const Keys seen = seen_by(call, entry, block.first_row, block.first_row + block.num_rows - 1);
        if (seen.stop <= first || seen.first >= first + count) continue;
        if (!any_visible(call, entry, block, first, count)) continue;
        load_queries(call, entry, block, buffers);
        const RowRange range = differentiate(call, scaling, entry, block, first, count, false, buffers);
        const long rows = range.stop - range.first;
        if (rows <= 0) continue;
        const T *p = buffers.p + range.first * SCORES_STRIDE<T>, *ds = buffers.ds + range.first * SCORES_STRIDE<T>;
        if (wants_dv)
            product<T, Order::COLUMNS>(count, sizes.dim_v, rows, p, SCORES_STRIDE<T>,
                                       buffers.dout + range.first * sizes.dim_v, sizes.dim_v, buffers.dv, sizes.dim_v,
                                       true);
        if (wants_dk)
            product<T, Order::COLUMNS>(count, sizes.dim, rows, ds, SCORES_STRIDE<T>,
                                       buffers.q + range.first * sizes.dim, sizes.dim, buffers.dk, sizes.dim, true);
        if (wants_dq) {
            product<T, Order::ROWS>(rows, sizes.dim, count, ds, SCORES_STRIDE<T>, buffers.k, sizes.dim,
                                    buffers.dq + range.first * sizes.dim, sizes.dim, false);
            if (!wait_for(work, tile.before, step + 1)) return;
            add_dq(work, entry, block, range, buffers.dq, sizes.dim);
            work.progress[job].store(step + 1, std::memory_order_release);
        }
    }
    if (wants_dq) {
        if (!wait_for(work, tile.before, steps.count)) return;
        work.progress[job].store(steps.count, std::memory_order_release);
    }
    const T scale = T(size_of_scale(call));
    for (long j = 0; j < count; ++j) {
        T *dk = buffers.dk + j * sizes.dim, *dv = buffers.dv + j * sizes.dim_v;
        for (long d = 0; d < sizes.dim; ++d) dk[d] *= scale;
        if (wants_dk)
            store_row(dk, call.dtype, call.strides[DK][3], call.head_dim,
                      key_address(call, DK, entry, tile.head_kv, first + j));
        if (wants_dv)
            store_row(dv, call.dtype, call.strides[DV][3], call.head_dim_v,
                      key_address(call, DV, entry, tile.head_kv, first + j));
    }
    if (work.sums) {
        double *to = work.sums + job * (steps.group + 2);
        memcpy(to, buffers.sums + tile.head_kv * steps.group, steps.group * sizeof(double));
        memcpy(to + steps.group, buffers.sums + call.num_heads, 2 * sizeof(double));
    }
}

// dq of a block by itself, where there is no room for its sums.
template <class T> void dq_job(Work &work, char *memory, long job) {
    const Call &call = work.call;
    const Block &block = work.blocks[job];
    const Entry &entry = work.entries[block.entry];
    const Scaling<T> scaling(call);
    BackwardBuffers<T> buffers(work, memory);
    const Sizes<T> &sizes = buffers.sizes;
    load_queries(call, entry, block, buffers);
    // Of what a job of keys has, only dk has room for as many sums; a block has no more rows than a tile has keys.
    T *total = buffers.dk;
    clear(total, rows_of(block) * sizes.dim);
    const Keys seen = seen_by(call, entry, block.first_row, block.first_row + block.num_rows - 1);
    for (long first = seen.first / 16 * 16; first < seen.stop; first += work.keys_per_tile) {
        if (work.stopped.load(std::memory_order_relaxed)) return;
        const long count = smaller(work.keys_per_tile, entry.seqlen_k - first);
        if (!any_visible(call, entry, block, first, count)) continue;
        load_key_tile(call, entry, block.head_kv, first, count, buffers);
        const RowRange range = differentiate(call, scaling, entry, block, first, count, true, buffers);
        if (call.softcap)
            for (long r = range.first; r < range.stop; ++r)
                for (long j = 0; j < count; ++j) {
                    const T tanh = buffers.tanhs[r * SCORES_STRIDE<T> + j];
                    buffers.ds[r * SCORES_STRIDE<T> + j] *= 1 - tanh * tanh;
                }
        if (range.stop > range.first)
            product<T, Order::ROWS>(range.stop - range.first, sizes.dim, count,
                                    buffers.ds + range.first * SCORES_STRIDE<T>, SCORES_STRIDE<T>, buffers.k, sizes.dim,
                                    total + range.first * sizes.dim, sizes.dim, true);
    }
    for (long r = 0; r < rows_of(block); ++r) {
        for (long d = 0; d < call.head_dim; ++d) total[r * sizes.dim + d] *= T(call.scale);
        store_row(total + r * sizes.dim, call.dtype, call.strides[DQ][3], call.head_dim,
                  row_address(call, DQ, entry, row_of(block, r)));
    }
}

// Zeros in dq, dk, dv and dbias of a head of the arrays, where they are summed up, or not all of it is written.
template <class T> void clear_job(Work &work, char *, long job) {
    const Call &call = work.call;
    const long heads = larger(call.num_heads, call.num_heads_kv), b = job / heads, h = job % heads;
    const T zero[MAX_KEYS] = {};
    auto clear_head = [&](Array array, int64_t dtype, long num_heads, long seqlen, long dim) {
        if (!is_wanted(call, array) || h >= num_heads) return;
        const long size = size_of(dtype), step = call.strides[array][3];
        for (long i = 0; i < seqlen; ++i)
            for (long d = 0; d < dim; d += MAX_KEYS)
                store_row(zero, dtype, step, smaller(MAX_KEYS, dim - d),
                          address(call, array, size, b, h, i) + d * step * size);
    };
    clear_head(DQ, call.dtype, call.num_heads, call.seqlen_q, call.head_dim);
    if (has_whole_bias(call)) clear_head(DBIAS, call.bias_dtype, call.num_heads, call.seqlen_q, call.seqlen_k);
    if (call.arrays[CU_SEQLENS_K] || call.arrays[KV_LENGTHS]) {
        clear_head(DK, call.dtype, call.num_heads_kv, call.seqlen_k, call.head_dim);
        clear_head(DV, call.dtype, call.num_heads_kv, call.seqlen_k, call.head_dim_v);
    }
    if (work.shared && h < call.num_heads)
        clear((T *)work.shared + (b * call.num_heads + h) * call.seqlen_q * call.head_dim,
              call.seqlen_q * call.head_dim);
}

// Rounds dq of a head to 16 bits.
template <class T> void round_job(Work &work, char *, long job) {
    const Call &call = work.call;
    const Entry &entry = work.entries[job / call.num_heads];
    for (long i = 0; i < entry.seqlen_q; ++i) {
        const Row row = {job % call.num_heads, i};
        store_row(dq_sum<T>(work, entry, row), call.dtype, call.strides[DQ][3], call.head_dim,
                  row_address(call, DQ, entry, row));
    }
}

// ---- gradients of what scores are made of, and of sinks --------------------------------------------------------------

// dalibi_slopes, dscale and dsoftcap: what the tiles have for them, in order.
template <class T> void sums_job(Work &work, char *, long) {
    const Call &call = work.call;
    const long group = call.num_heads_kv ? call.num_heads / call.num_heads_kv : 0, width = group + 2;
    // Those of all tiles of a head first: the first tile gets what the others have.
    for (long t = work.num_tiles - 1; t >= 0; --t)
        if (work.tiles[t].before >= 0)
            for (long x = 0; x < width; ++x) work.sums[work.tiles[t].before * width + x] += work.sums[t * width + x];
    const bool has_entries = call.strides[DALIBI_SLOPES][0] != 0;  // slopes of each batch entry, or of all of them
    for (long h = 0; h < call.num_heads && is_wanted(call, DALIBI_SLOPES); ++h) {
        for (long e = 0; e < (has_entries ? call.batch : 1); ++e) number<T>(call, DALIBI_SLOPES, e, h) = 0;
        double total = 0;
        for (long t = 0; t < work.num_tiles && work.tiles[t].before < 0; ++t) {
            if (work.tiles[t].head_kv != h / group) continue;
            total = work.sums[t * width + h % group] + (has_entries ? 0 : total);
            number<T>(call, DALIBI_SLOPES, work.tiles[t].entry, h) = T(total);
        }
    }
    double scale = 0, softcap = 0;
    for (long t = 0; t < work.num_tiles && work.tiles[t].before < 0; ++t) {
        scale += work.sums[t * width + group];
        softcap += work.sums[t * width + group + 1];
    }
    if (is_wanted(call, DSCALE)) number<T>(call, DSCALE, 0, 0) = T(scale);
    if (is_wanted(call, DSOFTCAP)) number<T>(call, DSOFTCAP, 0, 0) = T(softcap);
}

// dsinks of a head: the sum of exp(sink - lse) (dlse - delta).
template <class T> void sinks_job(Work &work, char *memory, long head) {
    const Call &call = work.call;
    BackwardBuffers<T> buffers(work, memory);
    const double sink = number<T>(call, SINKS, 0, head);
    double total = 0;
    for (long e = 0; e < work.num_entries; ++e) {
        const Entry &entry = work.entries[e];
        for (long i = 0; i < entry.seqlen_q; ++i) {
            if (work.stopped.load(std::memory_order_relaxed)) return;
            const Row row = {head, i};
            const T lse = number<T>(call, LSE, entry.batch, head, entry.first_q + i);
            if (lse == T(-__builtin_inf())) continue;
            load_row(row_address(call, DOUT, entry, row), call.dtype, call.strides[DOUT][3], call.head_dim_v,
                     buffers.dout);
            clear(buffers.dout + call.head_dim_v, buffers.sizes.dim_v - call.head_dim_v);
            const T delta = delta_of(call, entry, row, lse, buffers.dout, buffers.sizes.dim_v, buffers.dq);
            total -= std::exp(sink - lse) * double(delta);
        }
    }
    number<T>(call, DSINKS, 0, head) = T(total);
}

// The parts of the bias that belong to one job: an axis that the bias has is cut, others are summed over.
struct BiasJobs {
    long entries, heads, blocks, tiles;  // how many, 1 where they are summed over
    long rows, num_blocks, num_tiles;
    BiasJobs(const Work &work) {
        const Call &call = work.call;
        const int64_t *strides = call.strides[DBIAS];
        rows = rows_in_blocks(call, call.seqlen_q, work.rows_per_block);
        num_blocks = ceil_div(call.seqlen_q, rows);
        num_tiles = ceil_div(call.seqlen_k, work.keys_per_tile);
        entries = strides[0] ? call.batch : 1;
        heads = strides[1] ? call.num_heads : 1;
        blocks = strides[2] ? num_blocks : 1;
        tiles = strides[3] && !strides[2] ? num_tiles : 1;
    }
};

template <class T> void bias_job(Work &work, char *memory, long job) {
    const Call &call = work.call;
    const Scaling<T> scaling(call);
    BackwardBuffers<T> buffers(work, memory);
    const BiasJobs jobs(work);
    const long own_tile = job % jobs.tiles, own_block = job / jobs.tiles % jobs.blocks;
    const long own_head = job / jobs.tiles / jobs.blocks % jobs.heads, own_entry = job / jobs.tiles / jobs.blocks / jobs.heads;
    const int64_t *strides = call.strides[DBIAS];
    const bool has_rows = strides[2] != 0, has_keys = strides[3] != 0;
    const long group = call.num_heads_kv ? call.num_heads / call.num_heads_kv : 1;
    constexpr long STRIDE = SCORES_STRIDE<T>;
    T *total = buffers.total;
    const long first_row = own_block * jobs.rows;
    const long num_rows = has_rows ? smaller(jobs.rows, call.seqlen_q - first_row) : 1;
    auto clear_total = [&] {
        for (long r = 0; r < num_rows; ++r) clear(total + r * STRIDE, STRIDE);
    };
    auto write_total = [&](long first, long count) {
        for (long r = 0; r < num_rows; ++r)
            store_row(total + r * STRIDE, call.bias_dtype, strides[3], count,
                      address(call, DBIAS, size_of(call.bias_dtype), own_entry, own_head, first_row + r, first));
    };
    clear_total();
    const long begin = jobs.tiles > 1 ? own_tile : 0, end = jobs.tiles > 1 ? own_tile + 1 : jobs.num_tiles;
    for (long t = begin; t < end; ++t) {
        const long first = t * work.keys_per_tile;
        for (long e = own_entry; e < (strides[0] ? own_entry + 1 : call.batch); ++e) {
            const Entry &entry = work.entries[e];
            const long count = smaller(work.keys_per_tile, entry.seqlen_k - first);
            if (count <= 0) continue;
            for (long h = own_head; h < (strides[1] ? own_head + 1 : call.num_heads); ++h) {
                bool is_loaded = false;
                for (long i = own_block; i < (has_rows ? own_block + 1 : jobs.num_blocks); ++i) {
                    if (work.stopped.load(std::memory_order_relaxed)) return;
                    Block block = {};
                    block.entry = e;
                    block.head_kv = h / group;
                    block.first_head = h;
                    block.num_heads = 1;
                    block.first_row = i * jobs.rows;
                    block.num_rows = smaller(jobs.rows, call.seqlen_q - i * jobs.rows);
                    const Keys seen = seen_by(call, entry, block.first_row, block.first_row + block.num_rows - 1);
                    if (seen.stop <= first || seen.first >= first + count) continue;
                    if (!any_visible(call, entry, block, first, count)) continue;
                    if (!is_loaded) load_key_tile(call, entry, h / group, first, count, buffers);
                    is_loaded = true;
                    load_queries(call, entry, block, buffers);
                    const RowRange range = differentiate(call, scaling, entry, block, first, count, true, buffers);
                    for (long r = range.first; r < range.stop; ++r) {
                        const T *ds = buffers.ds + r * STRIDE;
                        T *to = total + (has_rows ? r : 0) * STRIDE;
                        if (has_keys) {
                            for (long j = 0; j < count; ++j) to[j] += ds[j];
                        } else {
                            Vector<T> sum = {};
                            for (long j = 0; j < round_up(count, LANES<T>); j += LANES<T>) sum += load(ds + j);
                            to[0] += sum_of_lanes<T>(sum);
                        }
                    }
                }
            }
        }
        if (has_keys) {
            write_total(first, smaller(work.keys_per_tile, call.seqlen_k - first));
            clear_total();
        }
    }
    if (!has_keys) write_total(0, 1);
}

// ---- which jobs there are --------------------------------------------------------------------------------------------

// The tiles of all heads: first the first of each, then the second of each, so that a job seldom waits for another.
inline bool make_tiles(Work &work) {
    const Call &call = work.call;
    const long keys = work.keys_per_tile, num_heads = call.num_heads_kv;
    long count = 0, most = 0;
    for (long e = 0; e < work.num_entries; ++e) {
        const long own = ceil_div(work.entries[e].seqlen_k, keys);
        count += own * num_heads;
        most = larger(most, own);
    }
    long *last = nullptr;
    if (!work.allocate(work.tiles, count) || !work.allocate(last, work.num_entries * num_heads)) return false;
    for (long x = 0; x < work.num_entries * num_heads; ++x) last[x] = -1;
    for (long j = 0; j < most; ++j)
        for (long e = 0; e < work.num_entries; ++e) {
            const long seqlen_k = work.entries[e].seqlen_k;
            if (j * keys >= seqlen_k) continue;
            for (long h = 0; h < num_heads; ++h) {
                work.tiles[work.num_tiles] = KeyTile{e, h, j * keys, smaller(keys, seqlen_k - j * keys),
                                                     last[e * num_heads + h]};
                last[e * num_heads + h] = work.num_tiles++;
            }
        }
    return true;
}

template <class T> bool prepare_backward(Work &work) {
    const Call &call = work.call;
    choose_tiles<T>(work, BACKWARD_ROWS);
    if (!make_entries(work) || !make_tiles(work)) return false;
    work.scratch_bytes = BackwardBuffers<T>(work, nullptr).scratch.used;
    const bool is_packed = call.arrays[CU_SEQLENS_Q], wants_dq = is_wanted(call, DQ);
    const long batch = is_packed ? 1 : call.batch;
    const long dq_bytes = batch * call.num_heads * call.seqlen_q * call.head_dim * long(sizeof(T));
    const bool is_apart = wants_dq && sums_dq_apart(call), has_room = !is_apart || dq_bytes <= DQ_BYTES;
    const bool has_sums = is_wanted(call, DALIBI_SLOPES) || is_wanted(call, DSCALE) || is_wanted(call, DSOFTCAP);
    const long group = call.num_heads_kv ? call.num_heads / call.num_heads_kv : 0;
    if (is_apart && has_room && !work.allocate(work.shared, dq_bytes)) return false;
    if (has_sums && !work.allocate(work.sums, work.num_tiles * (group + 2))) return false;
    if (wants_dq && has_room) {
        if (!work.allocate(work.progress, work.num_tiles)) return false;
        for (long t = 0; t < work.num_tiles; ++t) work.progress[t] = 0;
    }
    work.add_phase(clear_job<T>, batch * larger(call.num_heads, call.num_heads_kv));
    if (wants_dq || is_wanted(call, DK) || is_wanted(call, DV) || has_sums || has_whole_bias(call))
        work.add_phase(key_tile_job<T>, work.num_tiles);
    if (is_apart && has_room) work.add_phase(round_job<T>, work.num_entries * call.num_heads);
    if (is_apart && !has_room) {
        if (!make_blocks(work, false, 0)) return false;
        work.add_phase(dq_job<T>, work.num_blocks);
    }
    if (has_sums) work.add_phase(sums_job<T>, 1);
    if (is_wanted(call, DSINKS)) work.add_phase(sinks_job<T>, call.num_heads);
    if (is_wanted(call, DBIAS) && !has_whole_bias(call)) {
        const BiasJobs jobs(work);
        work.add_phase(bias_job<T>, jobs.entries * jobs.heads * jobs.blocks * jobs.tiles);
    }
    return true;
}

}  // namespace
