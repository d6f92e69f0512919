// The forward pass: blocks of queries against tiles of keys, with online softmax (FlashAttention-2, algorithm 1).
//
// The shift of a row is near its largest score so far, and moves only when that has risen by much: sums are rescaled a
// few times in all.
#pragma once

#include <cmath>

#include "few_pairs.h"

namespace {

constexpr long BLOCK_ROWS = HAS_TILES ? 384 : 192;  // at most
constexpr long STEP_ROWS = 4;                       // between steps of products of pairs
constexpr long ENOUGH_JOBS = 32;  // for all threads: with fewer blocks, several jobs share the keys of one
constexpr long TILES_PER_PART = 4;
constexpr long PARTS_BYTES = 32 << 20;

template <class T> struct ForwardBuffers {
    Scratch scratch;
    Sizes<T> sizes;
    T *q, *o, *shift, *l, *s, *p, *bias, *rows, *k_t, *v;
    unsigned char *kept;
    long v_stride;

    ForwardBuffers(const Work &work, char *memory) : scratch{memory}, sizes(work.call) {
        const long rows_of_q = work.rows_per_block, keys = work.keys_per_tile;
        v_stride = sizes.dim_v;
        // Pairs of numbers in two parts take as much room as numbers do, up to whole vectors of each part.
        const long parts = most_parts<T>(work.call),
                   dim = larger(sizes.dim, parts * pair_stride<T>(work.call.head_dim));
        q = scratch.template take<T>(rows_of_q * dim);
        o = scratch.template take<T>(rows_of_q * sizes.dim_v);
        shift = scratch.template take<T>(rows_of_q);
        l = scratch.template take<T>(rows_of_q * LANES<T>);
        // With pairs scores of two groups of rows, and their weights: one is multiplied while the other is weighed.
        s = scratch.template take<T>((parts ? 2 : 1) * GROUP * SCORES_STRIDE<T>);
        p = scratch.template take<T>(2 * parts * GROUP * KEY_PAIRS);
        bias = scratch.template take<T>(work.call.arrays[BIAS] ? GROUP * MAX_KEYS : 0);
        rows = scratch.template take<T>(keys * dim);
        k_t = scratch.template take<T>(dim * SCORES_STRIDE<T>);
        v = scratch.template take<T>(keys * sizes.dim_v);
        kept = scratch.template take<unsigned char>(work.call.dropout_steps ? rows_of_q * MAX_KEYS : 0);
    }
};

// Moves the shift of a row to its largest score, if that is above it by much, and with it sums so far.
template <class T>
inline void raise_shift(const Scaling<T> &scaling, const T *s, long num_keys, T &shift, T *l, T *o, long dim) {
    constexpr int N = LANES<T>;
    Vector<T> most = load(s);
#pragma GCC unroll 4
    for (long j = N; j < num_keys; j += N) most = larger<T>(most, load(s + j));
    if (any_above<T>(most, shift + scaling.rise)) {
        const T top = largest_lane<T>(most);
        if (shift > T(-__builtin_inf())) {
            const Vector<T> shrinks = exp2<T>(splat((shift - top) * scaling.factor));
            store(l, load(l) * shrinks);
            for (long d = 0; d < dim; d += N) store(o + d, load(o + d) * shrinks);
        }
        shift = top;
    }
}

// Scores of one row become weights; their sum goes to l.
template <class T>
inline void exponentials(const Scaling<T> &scaling, T *s, long num_keys, T &shift, T *l, T *o, long dim) {
    constexpr int N = LANES<T>;
    raise_shift(scaling, s, num_keys, shift, l, o, dim);
    // A row that has seen no key yet has a shift of -inf, and only scores of -inf.
    const Vector<T> minus = splat(shift == T(-__builtin_inf()) ? T(0) : shift), factor = splat(scaling.factor);
    Vector<T> sum = {};
#pragma GCC unroll 4
    for (long j = 0; j < num_keys; j += N) {
        const Vector<T> p = exp2<T>((load(s + j) - minus) * factor);
        store(s + j, p);
        sum += p;
    }
    store(l, load(l) + sum);
}

#if defined(__AVX512BF16__)
// The same, where weights become pairs of neighbours.
inline void exponentials_as_pairs(const Scaling<float> &scaling, const float *s, long num_keys, float &shift, float *l,
                                  float *o, long dim, float *pairs) {
    constexpr int N = LANES<float>;
    raise_shift(scaling, s, num_keys, shift, l, o, dim);
    const Vector<float> minus = splat(shift == -__builtin_inff() ? 0.0f : shift), factor = splat(scaling.factor);
    Vector<float> sums[2] = {};
    long j = 0;
#pragma GCC unroll 4
    for (; j + 2 * N <= num_keys; j += 2 * N) {
        const Vector<float> p0 = exp2<float>((load(s + j) - minus) * factor);
        const Vector<float> p1 = exp2<float>((load(s + j + N) - minus) * factor);
        sums[0] += p0;
        sums[1] += p1;
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)p1, (__m512)p0);
        store(pairs + j / 2, (Vector<float>)both);
    }
    if (j < num_keys) {
        const Vector<float> p = exp2<float>((load(s + j) - minus) * factor);
        sums[0] += p;
        const __m256bh rounded = _mm512_cvtneps_pbh((__m512)p);
        memcpy((void *)(pairs + j / 2), &rounded, sizeof rounded);
    }
    store(l, load(l) + (sums[0] + sums[1]));
}
#endif

// Writes out and lse of a row, after its sink has joined the sum l of weights with this shift.
template <class T>
inline void finish_row(const Call &call, const Entry &entry, Row row, const T *o, double shift, double l) {
    double shrinks = 1;
    if (call.arrays[SINKS]) {
        const double sink = number<T>(call, SINKS, 0, row.head), infinity = __builtin_inf();
        const double top = shift > sink ? shift : sink == -infinity ? 0 : sink;
        shrinks = std::exp(shift - top);
        l = l * shrinks + std::exp(sink - top);
        shift = top;
    }
    number<T>(call, LSE, entry.batch, row.head, entry.first_q + row.i) = T(shift + double(std::log(T(l))));
    const T divisor = l == 0 ? T(1) : T(l), factor = T(shrinks);
    T values[MAX_KEYS];
    char *out = row_address(call, OUT, entry, row);
    const long step = call.strides[OUT][3];
    for (long d = 0; d < call.head_dim_v; d += MAX_KEYS) {
        const long count = smaller(MAX_KEYS, call.head_dim_v - d);
        for (long x = 0; x < count; x += LANES<T>) store(values + x, load(o + d + x) * splat(factor) / splat(divisor));
        store_row(values, call.dtype, step, count, out + d * step * size_of(call.dtype));
    }
}

// Whether rows of k or v can be read where they lie: they are whole vectors of the dtype of the computation.
template <class T> inline bool has_whole_rows(const Call &call, Array array, long dim) {
    return size_of(call.kv_dtype) == long(sizeof(T)) && !call.page_size && call.strides[array][3] == 1 &&
           dim % LANES<T> == 0;
}

// Where a block whose keys are shared leaves what it has: o, shift and l of its rows.
template <class T> inline T *part_of(const Work &work, long job) {
    return (T *)work.shared + job * work.rows_per_block * (Sizes<T>(work.call).dim_v + 2);
}

// Scores s of rows become weights: those of `keys`, counted from the first key of the tile. With pairs they go there, in
// so many parts, and `between` is called after each row.
template <class T, class F>
inline void weigh_rows(const Call &call, const Scaling<T> &scaling, const Entry &entry, const Block &block,
                       ForwardBuffers<T> &buffers, long r0, long num_rows, long first, Keys keys, T *s, T *pairs,
                       long parts, F between) {
    const long here = keys.stop - keys.first, columns = round_up(here, LANES<T>), dim = buffers.sizes.dim_v;
    const Span span = span_of(block, r0, num_rows);
    first += keys.first;
    if (needs_finishing(call, scaling, entry, span.first, span.last, first, columns))
        finish_scores<T>(call, scaling, entry, block, r0, num_rows, first, here, columns, s + keys.first,
                         load_bias(call, entry, block, r0, num_rows, first, here, buffers.bias), nullptr);
    for (long r = 0; r < num_rows; ++r) {
        T *row = s + r * SCORES_STRIDE<T> + keys.first;
        T &shift = buffers.shift[r0 + r], *l = buffers.l + (r0 + r) * LANES<T>, *o = buffers.o + (r0 + r) * dim;
        if constexpr (MAY_USE_PAIRS<T>)
            if (parts == 1 && !call.dropout_steps) {
                exponentials_as_pairs(scaling, row, columns, shift, l, o, dim, pairs + r * KEY_PAIRS);
                between();
                continue;
            }
        exponentials(scaling, row, columns, shift, l, o, dim);
        if (call.dropout_steps) drop(call, buffers.kept + (r0 + r) * MAX_KEYS + keys.first, here, row);
        if constexpr (MAY_USE_PAIRS<T>)
            if (parts == 1) {
                round_to_pairs(row, columns, pairs + r * KEY_PAIRS);
                between();
            }
#if HAS_TILES
        if (parts == 2) {
            split_to_pairs((float *)row, columns, (float *)pairs + 2 * r * KEY_PAIRS,
                           (float *)pairs + (2 * r + 1) * KEY_PAIRS);
            between();
        }
#endif
    }
}

// Fetches a share of the rows of k and v of the next tile into the second level of the cache, while there is work to do.
inline void prefetch_next_keys(const Call &call, const Entry &entry, long head_kv, long first, long stop) {
    const long size = size_of(call.kv_dtype), last = smaller(stop, entry.seqlen_k);
    if (call.strides[K][3] != 1 || call.strides[V][3] != 1) return;
    for (long j = first; j < last; ++j) {
        const char *k = key_address(call, K, entry, head_kv, j), *v = key_address(call, V, entry, head_kv, j);
        for (long x = 0; x < call.head_dim * size; x += 64) __builtin_prefetch(k + x, 0, 2);
        for (long x = 0; x < call.head_dim_v * size; x += 64) __builtin_prefetch(v + x, 0, 2);
    }
}

// k and v of a tile as products want them: k transposed, v as rows.
template <class T>
inline void load_tile(const Call &call, const Entry &entry, long head_kv, long first, long count,
                      ForwardBuffers<T> &buffers, const T *&v, long &v_stride) {
    const Sizes<T> &sizes = buffers.sizes;
    const long padded = round_up(count, LANES<T>);
    const T *k = buffers.rows;
    long k_stride = sizes.dim;
    v = buffers.v;
    v_stride = sizes.dim_v;
    if (has_whole_rows<T>(call, K, call.head_dim) && count == padded) {
        k = (const T *)key_address(call, K, entry, head_kv, first);
        k_stride = call.strides[K][2];
    } else {
        load_keys(call, K, entry, head_kv, first, count, call.head_dim, buffers.rows, sizes.dim, padded);
    }
    // Rows that are far apart fall into the same few sets of the cache: those that are read again and again are copied.
    if (has_whole_rows<T>(call, V, call.head_dim_v) &&
        (call.strides[V][2] == call.head_dim_v || call.strides[V][2] == -call.head_dim_v)) {
        v = (const T *)key_address(call, V, entry, head_kv, first);
        v_stride = call.strides[V][2];
    } else {
        load_keys(call, V, entry, head_kv, first, count, call.head_dim_v, buffers.v, sizes.dim_v, count);
    }
    transpose(k, k_stride, padded, sizes.dim, buffers.k_t, SCORES_STRIDE<T>);
}

#if defined(__AVX512BF16__)
// A tile of keys with pairs: scores of the next rows, and what values add to those before, are multiplied while rows are
// weighed.
inline void forward_tile_of_pairs(const Work &work, const Block &block, const Entry &entry,
                                  const Scaling<float> &scaling, ForwardBuffers<float> &buffers, long first,
                                  long count) {
    struct Group {
        long r0, num_rows;
        Keys keys;
    };
    constexpr long STRIDE = SCORES_STRIDE<float>;
    const Call &call = work.call;
    const long all_rows = rows_of(block), dim = buffers.sizes.dim_v, parts = parts_of_numbers<float>(work);
    const long width = pair_stride<float>(call.head_dim), q_stride = parts * width, p_stride = parts * KEY_PAIRS;
    float *low_v = buffers.v + work.keys_per_tile / 2 * dim;
#if HAS_TILES
    if (parts == 2) {
        load_split_keys(call, entry, block.head_kv, first, count, buffers.rows, buffers.k_t);
        load_split_values(call, entry, block.head_kv, first, count, buffers.v, low_v);
    }
#endif
    if (parts == 1) {
        load_key_pairs(call, K, entry, block.head_kv, first, count, call.head_dim, buffers.rows, buffers.k_t);
        interleave_keys(call, V, entry, block.head_kv, first, count, call.head_dim_v, buffers.v);
    }
    if (call.dropout_steps) load_kept(call, entry, block, first, count, buffers.kept);
    // The first group from a row on that sees any of these keys.
    auto group_from = [&](long r0) {
        for (long n; r0 < all_rows; r0 += n) {
            n = rows_of_group(call, block, r0, GROUP);
            const Keys keys = keys_of_group<float>(call, entry, block, r0, n, first, count);
            if (keys.stop > keys.first) return Group{r0, n, keys};
        }
        return Group{all_rows, 0, Keys{0, 0}};
    };
    auto scores_of = [&](const Group &group, float *s) {
        prefetch_next_keys(call, entry, block.head_kv, first + count + group.r0 * count / all_rows,
                           first + count + (group.r0 + group.num_rows) * count / all_rows);
        const float *q = buffers.q + group.r0 * q_stride, *k_t = buffers.k_t + group.keys.first;
        const long columns = round_up(group.keys.stop - group.keys.first, LANES<float>);
        ProductOfPairs scores{group.num_rows,
                              columns,
                              parts == 1 ? pairs_of(call.head_dim) : width,
                              q,
                              q_stride,
                              k_t,
                              STRIDE,
                              s + group.keys.first,
                              STRIDE,
                              false};
        if (parts == 2) {  // these are exact: all four
            scores.add(q + width, k_t);
            scores.add(q, k_t + width * STRIDE);
            scores.add(q + width, k_t + width * STRIDE);
        }
        return scores;
    };
    ProductOfPairs scores, values;
    Group group = group_from(0);
    scores = scores_of(group, buffers.s);
    scores.finish();
    for (long turn = 0; group.num_rows; turn = 1 - turn) {
        const Group next = group_from(group.r0 + group.num_rows);
        float *pairs = buffers.p + turn * GROUP * p_stride;
        scores = scores_of(next, buffers.s + (1 - turn) * GROUP * STRIDE);
        long row = 0;
        weigh_rows(call, scaling, entry, block, buffers, group.r0, group.num_rows, first, group.keys,
                   buffers.s + turn * GROUP * STRIDE, pairs, parts, [&] {
                       if (++row % STEP_ROWS == 0) (row / STEP_ROWS % 2 ? scores : values).step();
                   });
        scores.finish();
        values.finish();
        const long pair = group.keys.first / 2;
        values = ProductOfPairs{group.num_rows,
                                dim,
                                pairs_of(group.keys.stop - group.keys.first),
                                pairs,
                                p_stride,
                                buffers.v + pair * dim,
                                dim,
                                buffers.o + group.r0 * dim,
                                dim,
                                true};
        if (parts == 2) {  // the product of both lower parts is below what weights are rounded by
            values.add(pairs + KEY_PAIRS, buffers.v + pair * dim);
            values.add(pairs, low_v + pair * dim);
        }
        group = next;
    }
    values.finish();
}
#endif

template <class T>
inline void forward_tile(const Work &work, const Block &block, const Entry &entry, const Scaling<T> &scaling,
                         ForwardBuffers<T> &buffers, long first, long count) {
    const Call &call = work.call;
    const long num_rows = rows_of(block), dim = call.head_dim, dim_v = buffers.sizes.dim_v;
    const T *v;
    long v_stride;
    load_tile(call, entry, block.head_kv, first, count, buffers, v, v_stride);
    if (call.dropout_steps) load_kept(call, entry, block, first, count, buffers.kept);
    for (long r0 = 0, n; r0 < num_rows; r0 += n) {
        n = rows_of_group(call, block, r0, GROUP);
        const Keys keys = keys_of_group<T>(call, entry, block, r0, n, first, count);
        const long here = keys.stop - keys.first;
        if (here <= 0) continue;
        prefetch_next_keys(call, entry, block.head_kv, first + count + r0 * count / num_rows,
                           first + count + (r0 + n) * count / num_rows);
        T *s = buffers.s + keys.first, *o = buffers.o + r0 * dim_v;
        product_of_rows(n, round_up(here, LANES<T>), dim, buffers.q + r0 * buffers.sizes.dim, buffers.sizes.dim,
                        buffers.k_t + keys.first, SCORES_STRIDE<T>, s, SCORES_STRIDE<T>);
        weigh_rows<T>(call, scaling, entry, block, buffers, r0, n, first, keys, buffers.s, nullptr, 0, [] {});
        product<T, Order::ROWS>(n, dim_v, here, s, SCORES_STRIDE<T>, v + keys.first * v_stride, v_stride, o, dim_v,
                                true);
    }
}

// The same of few rows. The keys of a job end with those that one of its rows sees: all of them are computed.
// `columns` has what `load_few_columns` gives, if anything.
template <class T>
inline void forward_tile_of_few(const Work &work, const Block &block, const Entry &entry, const Scaling<T> &scaling,
                                ForwardBuffers<T> &buffers, long first, long count, const T *columns) {
    const Call &call = work.call;
    const Sizes<T> &sizes = buffers.sizes;
    const long num_rows = rows_of(block);
    KeyRows k, v;
    find_key_rows(call, K, entry, block.head_kv, first, count, call.head_dim, buffers.rows, sizes.dim, k);
    find_key_rows(call, V, entry, block.head_kv, first, count, call.head_dim_v, buffers.v, sizes.dim_v, v);
    if (call.dropout_steps) load_kept(call, entry, block, first, count, buffers.kept);
    const long next = call.page_size ? 0 : count * call.strides[K][2] * size_of(call.kv_dtype);
    const Coming coming_v{v, 0}, coming_k{k, next};
    bool has_scores = false, has_pairs = false;  // has_pairs: values are multiplied as pairs
#if HAS_TILES
    if (columns && k.dtype == call.dtype && v.dtype == call.dtype) {
        scores_of_few_pairs(columns, call.head_dim, k, count, most_parts<T>(call), coming_v, buffers.rows, buffers.k_t,
                            buffers.s);
        has_pairs = call.dtype == BFLOAT16;
        has_scores = has_pairs || are_numbers(num_rows, buffers.s, count);
    }
#endif
#if defined(__AVX512BF16__) && !HAS_TILES
    if (multiplies_pairs_of_few<T>(call, block)) {
        scores_of_pairs(num_rows, buffers.q, call.head_dim, k, count, coming_v, buffers.s);
        has_scores = has_pairs = true;
    }
#endif
    if (!has_scores) scores_of_few(num_rows, buffers.q, sizes.dim, k, count, coming_v, buffers.s);
    weigh_rows<T>(call, scaling, entry, block, buffers, 0, num_rows, first, Keys{0, count}, buffers.s, buffers.p,
                  has_pairs, [] {});
#if HAS_TILES
    if (has_pairs) return add_values_of_few_pairs(buffers.p, v, count, sizes.dim_v, coming_k, buffers.v, buffers.o);
#elif defined(__AVX512BF16__)
    if (has_pairs) return add_values_of_pairs(num_rows, buffers.p, v, count, sizes.dim_v, coming_k, buffers.o);
#endif
    add_values_of_few(num_rows, buffers.s, v, count, sizes.dim_v, coming_k, buffers.o);
}

template <class T> void forward_job(Work &work, char *memory, long job) {
    const Call &call = work.call;
    const Block &block = work.blocks[job];
    const Entry &entry = work.entries[block.entry];
    const Scaling<T> scaling(call);
    ForwardBuffers<T> buffers(work, memory);
    const Sizes<T> &sizes = buffers.sizes;
    const long num_rows = rows_of(block);
    const bool has_few = has_few_rows(entry, block);
    const long parts = has_few ? 0 : parts_of_numbers<T>(work);
    if (parts == 1 || (has_few && multiplies_pairs_of_few<T>(call, block))) {
        load_row_pairs(call, Q, entry, block, call.head_dim, buffers.q, call.scale < 0);
#if HAS_TILES
    } else if (parts == 2) {
        load_split_rows(call, entry, block, (float *)buffers.q);
#endif
    } else {
        load_rows(call, Q, entry, block, call.head_dim, buffers.q, sizes.dim, num_rows);
        if (call.scale < 0)
            for (long x = 0; x < num_rows * sizes.dim; ++x) buffers.q[x] = -buffers.q[x];
    }
    const T *columns = nullptr;
#if HAS_TILES
    if (has_few && num_rows > VERY_FEW_ROWS && most_parts<T>(call)) {
        columns = buffers.q + FEW_ROWS * sizes.dim;
        load_few_columns(call, entry, block, (float *)buffers.rows, (float *)columns);
    }
#endif
    clear(buffers.o, num_rows * sizes.dim_v);
    clear(buffers.l, num_rows * LANES<T>);
    for (long r = 0; r < num_rows; ++r) buffers.shift[r] = T(-__builtin_inf());

    const Keys seen = seen_by(call, entry, block.first_row, block.first_row + block.num_rows - 1);
    const long whole = call.arrays[BLOCK_MASK] ? work.keys_per_tile : 16;
    const long begin = larger(seen.first / whole * whole, block.first_key), end = smaller(seen.stop, block.stop_key);
    for (long first = begin; first < end; first += work.keys_per_tile) {
        if (work.stopped.load(std::memory_order_relaxed)) return;
        const long count = smaller(work.keys_per_tile, end - first);
        if (!any_visible(call, entry, block, first, count)) continue;
        if (has_few) {
            forward_tile_of_few(work, block, entry, scaling, buffers, first, count, columns);
        } else if (parts) {
            if constexpr (MAY_USE_PAIRS<T>) forward_tile_of_pairs(work, block, entry, scaling, buffers, first, count);
        } else {
            forward_tile(work, block, entry, scaling, buffers, first, count);
        }
    }

    T *part = block.num_parts > 1 ? part_of<T>(work, job) : nullptr;
    for (long r = 0; r < num_rows; ++r) {
        const T l = sum_of_lanes<T>(load(buffers.l + r * LANES<T>));
        const T *o = buffers.o + r * sizes.dim_v;
        if (part) {
            T *to = part + r * (sizes.dim_v + 2);
            memcpy(to, o, sizes.dim_v * sizeof(T));
            to[sizes.dim_v] = buffers.shift[r];
            to[sizes.dim_v + 1] = l;
        } else {
            finish_row(call, entry, row_of(block, r), o, buffers.shift[r] * scaling.natural, l);
        }
    }
}

// Merges what the jobs that share the keys of a block have, in order.
template <class T> void merge_job(Work &work, char *memory, long job) {
    const long first = job * work.blocks[0].num_parts;
    const Block &block = work.blocks[first];
    const Entry &entry = work.entries[block.entry];
    const double natural = Scaling<T>(work.call).natural, infinity = __builtin_inf();
    ForwardBuffers<T> buffers(work, memory);
    const long dim = buffers.sizes.dim_v;
    for (long r = 0; r < rows_of(block); ++r) {
        auto part = [&](long n) { return part_of<T>(work, first + n) + r * (dim + 2); };
        double top = -infinity, l = 0;
        for (long n = 0; n < block.num_parts; ++n) {
            const double shift = part(n)[dim] * natural;
            top = shift > top ? shift : top;
        }
        clear(buffers.o, dim);
        for (long n = 0; n < block.num_parts; ++n) {
            const double shift = part(n)[dim] * natural;
            const double factor = shift == -infinity ? 0 : std::exp(shift - top);
            l += factor * part(n)[dim + 1];
            for (long d = 0; d < dim; ++d) buffers.o[d] += T(factor) * part(n)[d];
        }
        finish_row(work.call, entry, row_of(block, r), buffers.o, top, l);
    }
}

// ---- which blocks there are ------------------------------------------------------------------------------------------

// How many rows and keys are computed at a time, so that their buffers stay in the cache.
template <class T> inline void choose_tiles(Work &work, long most_rows) {
    const Sizes<T> sizes(work.call);
    const long bytes = larger(sizes.dim, sizes.dim_v) * long(sizeof(T));
    work.keys_per_tile = keys_in_tiles(work.call, bytes <= 1024 ? MAX_KEYS : bytes <= 2048 ? 64 : 32);
    work.rows_per_block = bytes <= 1024 ? most_rows : bytes <= 2048 ? most_rows / 2 : most_rows / 4;
    // Small problems have small buffers.
    const Call &call = work.call;
    const long group = call.num_heads_kv ? call.num_heads / call.num_heads_kv : 0;
    work.keys_per_tile = smaller(work.keys_per_tile, round_up(larger(call.seqlen_k, 1), 16));
    if (!call.arrays[BLOCK_MASK])
        work.rows_per_block = smaller(work.rows_per_block, round_up(larger(call.seqlen_q * group, 1), GROUP));
}

// Heads of a block of an entry, which share their keys.
inline long heads_of_block(const Work &work, const Entry &entry) {
    const Call &call = work.call;
    const long group = call.num_heads_kv ? call.num_heads / call.num_heads_kv : 0, most = work.rows_per_block;
    return heads_in_blocks(entry.seqlen_q, rows_in_blocks(call, entry.seqlen_q, most), group, most);
}

// How many blocks all entries have, and how many one head has at most.
struct BlockCount {
    long all = 0, in_head = 0;
    explicit BlockCount(const Work &work) {
        const Call &call = work.call;
        const long group = call.num_heads_kv ? call.num_heads / call.num_heads_kv : 0;
        for (long e = 0; e < work.num_entries; ++e) {
            const Entry &entry = work.entries[e];
            if (!entry.seqlen_q || !group) continue;
            const long own = ceil_div(entry.seqlen_q, rows_in_blocks(call, entry.seqlen_q, work.rows_per_block));
            in_head = larger(in_head, own);
            all += own * ceil_div(group, heads_of_block(work, entry)) * call.num_heads_kv;
        }
    }
};

// The blocks of all entries; those of the last rows, which may see the most keys, come first.
inline bool make_blocks(Work &work, bool has_parts, long bytes_of_row) {
    const Call &call = work.call;
    const long group = call.num_heads_kv ? call.num_heads / call.num_heads_kv : 0, most = work.rows_per_block;
    const BlockCount blocks(work);
    const long count = blocks.all;
    long num_parts = 1, tiles = ceil_div(call.seqlen_k, work.keys_per_tile);
    if (has_parts && count && count < ENOUGH_JOBS && !call.arrays[CU_SEQLENS_Q]) {
        num_parts = smaller(ceil_div(ENOUGH_JOBS, count), tiles / TILES_PER_PART);
        num_parts = larger(1, smaller(num_parts, PARTS_BYTES / (count * most * bytes_of_row)));
        const long tiles_of_part = ceil_div(tiles, num_parts);
        num_parts = ceil_div(larger(tiles, 1), larger(tiles_of_part, 1));
        tiles = tiles_of_part;
    }
    if (!work.allocate(work.blocks, count * num_parts)) return false;
    for (long i = blocks.in_head - 1; i >= 0; --i)
        for (long e = 0; e < work.num_entries; ++e) {
            const Entry &entry = work.entries[e];
            const long rows = rows_in_blocks(call, entry.seqlen_q, most), heads = heads_of_block(work, entry);
            if (i * rows >= entry.seqlen_q) continue;
            for (long h = 0; h < call.num_heads_kv; ++h)
                for (long g = 0; g < group; g += heads)
                    for (long n = 0; n < num_parts; ++n) {
                        Block &block = work.blocks[work.num_blocks++];
                        block.entry = e;
                        block.head_kv = h;
                        block.first_head = h * group + g;
                        block.num_heads = smaller(heads, group - g);
                        block.first_row = i * rows;
                        block.num_rows = smaller(rows, entry.seqlen_q - i * rows);
                        block.first_key = num_parts > 1 ? n * tiles * work.keys_per_tile : 0;
                        block.stop_key = n + 1 < num_parts ? (n + 1) * tiles * work.keys_per_tile : entry.seqlen_k;
                        block.part = n;
                        block.num_parts = num_parts;
                    }
        }
    return true;
}

template <class T> bool prepare_forward(Work &work) {
    if (!make_entries(work)) return false;
    // Smaller blocks pack keys more often, which takes less time than to merge what shares of the keys give.
    for (long parts = 1; parts <= 3; ++parts) {
        choose_tiles<T>(work, BLOCK_ROWS / parts / GROUP * GROUP);
        if (BlockCount(work).all >= ENOUGH_JOBS) break;
    }
    const long bytes_of_row = (Sizes<T>(work.call).dim_v + 2) * long(sizeof(T));
    if (!make_blocks(work, true, bytes_of_row)) return false;
    work.scratch_bytes = ForwardBuffers<T>(work, nullptr).scratch.used;
#if HAS_TILES
    if (may_split(work.call)) work.add_phase(check_job<T>, work.num_entries * work.call.num_heads);
#endif
    work.add_phase(forward_job<T>, work.num_blocks);
    const long num_parts = work.num_blocks ? work.blocks[0].num_parts : 1;
    if (num_parts > 1) {
        if (!work.allocate(work.shared, work.num_blocks * work.rows_per_block * bytes_of_row)) return false;
        work.add_phase(merge_job<T>, work.num_blocks / num_parts);
    }
    return true;
}

}  // namespace
