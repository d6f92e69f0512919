// Computes the weights of a block of queries and a tile of keys again, and the gradients of their scores. Every
// gradient of the backward pass is made of these.
#pragma once

#include "gemm.h"
#include "gemm_bf16x2.h"
#include "load_bf16x2.h"
#include "row_sums.h"
#include "schedule.h"

namespace {

constexpr int64_t BACKWARD_ROWS = HAS_TILES ? 128 : 120;  // of a block at most

inline bool is_wanted(const Call &call, Array array) { return call.arrays[array] != nullptr; }
template <class... Arrays> inline bool is_any_wanted(const Call &call, Arrays... arrays) {
    return (is_wanted(call, arrays) || ...);
}

// Which jobs compute dbias. It is summed over the axes that the bias does not have.
enum class BiasGradient {
    NONE,
    PAIRS,    // there is no sum: each job of keys writes its own elements
    ORDERED,  // sums over heads or entries: jobs of the same keys add to it, one after the other
    KEYS,     // sums over rows: each job of keys has sums of its own, which are added up afterwards
    SEPARATE  // dbias has jobs of its own, which compute the weights once more
};

constexpr int64_t BIAS_BYTES = 16 << 20;  // at most, for the sums of jobs of keys

inline int64_t bytes_of_bias_sums(const Call &call, int64_t size) {
    return call.batch * call.num_heads * round_up(call.seqlen_k, MAX_KEYS) * size;
}

template <class T> NOINLINE BiasGradient bias_gradient(const Work &work) {
    const Call &call = work.call;
    if (!is_wanted(work.results(), DBIAS)) return BiasGradient::NONE;
    const int64_t *strides = work.results().strides[DBIAS];
    const bool has_entries = strides[0] || call.batch == 1, has_heads = strides[1] || call.num_heads == 1;
    const bool has_rows = strides[2] || call.seqlen_q == 1, has_keys = strides[3] || call.seqlen_k == 1;
    if (has_entries && has_heads && has_rows && has_keys) return BiasGradient::PAIRS;
    if (!call.batch || !call.num_heads)
        return BiasGradient::SEPARATE;  // nothing is summed, but zeros have to be written
    if (!has_rows && strides[3])
        return bytes_of_bias_sums(call, sizeof(T)) <= BIAS_BYTES ? BiasGradient::KEYS : BiasGradient::SEPARATE;
    // A job goes through the heads that share its keys. It adds to each row once if one block has all of these heads.
    const int64_t rows = rows_in_blocks(call, call.seqlen_q, work.rows_per_block), group = group_of(call);
    const bool is_once = has_heads || heads_in_blocks(call.seqlen_q, rows, group, work.rows_per_block) == group;
    const bool is_same = size_of(call.bias_dtype) == int64_t(sizeof(T));  // sums are rounded once
    return has_rows && strides[3] && is_once && is_same && !has_cap(call) ? BiasGradient::ORDERED
                                                                          : BiasGradient::SEPARATE;
}

// bf16x2 of two rows of q or dout, by which p and ds are multiplied: tile registers take them transposed, in rows of
// this stride, and vectors as they are interleaved.
constexpr int64_t QUERIES_BF16X2_STRIDE = BACKWARD_ROWS / 2 + 20;

template <class T> struct BackwardBuffers {
    static constexpr int64_t MOST_ROWS = BACKWARD_ROWS, MOST_KEYS = MAX_KEYS;  // of a block and of a tile
    Scratch scratch;
    Sizes<T> sizes;
    int64_t keys_stride;
    T *k, *k_t, *v_t, *dk, *dv, *q_space, *dout_space, *dq, *p, *ds, *tanhs, *products, *added, *lse, *delta, *dentropy,
        *dmax, *total;
    const T *q, *dout;                                 // rows of the block, in this space or where they lie
    T *q_bf16x2, *dout_bf16x2, *ds_columns, *ds_rows;  // as bf16x2, where products are of bf16x2
    unsigned char *kept;
    long double *sums;  // over many rows
    RowSum<T> *row_sums;
    int64_t *first_max;
    BiasGradient bias;

    NOINLINE BackwardBuffers(const Work &work, char *memory)
        : scratch{memory}, sizes(work.call), keys_stride(keys_stride_of<T>(work)) {
        const Call &call = work.call;
        const int64_t rows = work.rows_per_block, keys = work.keys_per_tile, scores = rows * SCORES_STRIDE<T>;
        const bool has_products = is_any_wanted(call, DSCALE, DSOFTCAP);
        const bool wants_bias = is_wanted(work.results(), DBIAS);
        k = scratch.template take<T>(keys * larger(sizes.dim, sizes.dim_v));
        k_t = scratch.template take<T>(sizes.dim * keys_stride);
        v_t = scratch.template take<T>(sizes.dim_v * keys_stride);
        // With bf16x2, dk and dv are transposed.
        dk = scratch.template take<T>(BACKWARD_IN_BF16X2<T> ? sizes.dim * keys_stride : keys * sizes.dim);
        dv = scratch.template take<T>(BACKWARD_IN_BF16X2<T> ? sizes.dim_v * keys_stride : keys * sizes.dim_v);
        const int64_t num_bf16x2 = HAS_TILES ? QUERIES_BF16X2_STRIDE : bf16x2_count(rows);
        q_bf16x2 = scratch.template take<T>(BACKWARD_IN_BF16X2<T> ? sizes.dim * num_bf16x2 : 0);
        dout_bf16x2 = scratch.template take<T>(BACKWARD_IN_BF16X2<T> ? sizes.dim_v * num_bf16x2 : 0);
        ds_columns = scratch.template take<T>(BACKWARD_IN_BF16X2<T> ? bf16x2_count(rows) * SCORES_STRIDE<T> : 0);
        ds_rows = scratch.template take<T>(BACKWARD_IN_BF16X2<T> ? rows * KEYS_BF16X2_STRIDE : 0);
        q_space = scratch.template take<T>(rows * sizes.dim);
        dout_space = scratch.template take<T>(rows * sizes.dim_v);
        dq = scratch.template take<T>(rows * larger(sizes.dim, sizes.dim_v));
        p = scratch.template take<T>(scores);
        ds = scratch.template take<T>(scores);
        tanhs = scratch.template take<T>(has_cap(call) ? scores : 0);
        products = scratch.template take<T>(has_products ? scores : 0);
        added = scratch.template take<T>(call.arrays[BIAS] ? SUBGROUP * MAX_KEYS : 0);
        bias = bias_gradient<T>(work);
        total = scratch.template take<T>(wants_bias ? larger(scores, group_of(call) * SCORES_STRIDE<T>) : 0);
        lse = scratch.template take<T>(rows);
        delta = scratch.template take<T>(rows);
        dentropy = scratch.template take<T>(call.arrays[DENTROPY] ? rows : 0);
        dmax = scratch.template take<T>(call.arrays[DMAX] ? rows : 0);
        first_max = scratch.template take<int64_t>(call.arrays[DMAX] ? rows : 0);
        row_sums = scratch.template take<RowSum<T>>(rows);
        kept = scratch.template take<unsigned char>(call.dropout_steps ? rows * MAX_KEYS : 0);
        sums = scratch.template take<long double>(call.num_heads + 2);
    }

    // What `differentiate` leaves of the gradients of scores, of which dbias is made.
    const T *score_gradients() const { return ds; }
};

// rowsum(dout o out) of a row. `dout` is its loaded row of dout, and `values` has space for its row of out.
template <class T>
NOINLINE T dot_with_out(const Call &call, const Entry &entry, Row row, const T *dout, int64_t dim, T *values) {
    load_row(row_address(call, OUT, entry, row), call.dtype, call.strides[OUT][3], call.head_dim_v, values);
    clear(values + call.head_dim_v, dim - call.head_dim_v);
    Vector<T> sum = {};
    for (int64_t d = 0; d < dim; d += LANES<T>) sum += load(dout + d) * load(values + d);
    return sum_of_lanes<T>(sum);
}

// What gradients with respect to lse and entropy of a row add to its delta: -dlse, and dentropy times the entropy.
template <class T> inline T of_row_gradients(const Call &call, const Entry &entry, Row row, T lse) {
    if (lse == T(-__builtin_inf())) return 0;
    auto of_row = [&](Array array) { return number<T>(call, array, entry.batch, row.head, entry.first_q + row.i); };
    return (call.arrays[DENTROPY] ? of_row(DENTROPY) * of_row(ENTROPY) : T(0)) -
           (call.arrays[DLSE] ? of_row(DLSE) : T(0));
}

// The delta of a row: rowsum(dout o out), and what gradients with respect to its lse and entropy add.
template <class T>
NOINLINE T delta_of(const Call &call, const Entry &entry, Row row, T lse, const T *dout, int64_t dim, T *values) {
    return dot_with_out(call, entry, row, dout, dim, values) + of_row_gradients(call, entry, row, lse);
}

// The delta of a row, where all of them have been computed.
template <class T> inline T &delta(const Work &work, const Entry &entry, Row row) {
    return ((T *)work.delta)[index_of_row(work.call, entry, row)];
}

// The tangent of delta of a row, rowsum(dout o tout + tdout o out) - tdlse. `tdout` is null where there is none.
template <class T>
inline T tangent_of_delta(const Call &call, const Call &tangents, const Entry &entry, Row row, T lse, const T *dout,
                          const T *tdout, int64_t dim, T *values) {
    const T found = delta_of(tangents, entry, row, lse, dout, dim, values);
    return tdout ? found + dot_with_out(call, entry, row, tdout, dim, values) : found;
}

// Loads q or dout of a block with bf16x2 of two rows; `staging` has space for as many.
template <class T>
inline void interleave_queries(const Call &call, Array array, const Entry &entry, const Block &block, int64_t dim,
                               T *of_two_rows, T *staging) {
    const int64_t num_rows = rows_of(block), padded = round_up(dim, LANES<T>), count = bf16x2_count(num_rows);
    T *interleaved = HAS_TILES ? staging : of_two_rows;
    auto row = [&](int64_t r) { return r < num_rows ? row_address(call, array, entry, row_of(block, r)) : nullptr; };
    for (int64_t r = 0; r < num_rows; r += 2)
        interleave(row(r), row(r + 1), call.strides[array][3], dim, (float *)interleaved + r / 2 * padded, padded);
    if (has_negative_rows(call, array)) negate_bf16x2(interleaved, count * padded);
    if (HAS_TILES) transpose(interleaved, padded, count, padded, of_two_rows, QUERIES_BF16X2_STRIDE);
}

// Loads q, dout, lse, delta and sums of a block.
template <class T>
inline void load_queries(const Work &work, const Entry &entry, const Block &block, BackwardBuffers<T> &buffers) {
    const Call &call = work.call;
    const int64_t num_rows = rows_of(block);
    const bool has_dout = call.arrays[DOUT];
    if (BACKWARD_IN_BF16X2<T>) {
        buffers.q = find_rows_bf16x2(call, Q, entry, block, call.head_dim, buffers.q_space);
        interleave_queries(call, Q, entry, block, call.head_dim, buffers.q_bf16x2, buffers.dq);
        if (has_dout) {
            buffers.dout = find_rows_bf16x2(call, DOUT, entry, block, call.head_dim_v, buffers.dout_space);
            interleave_queries(call, DOUT, entry, block, call.head_dim_v, buffers.dout_bf16x2, buffers.dq);
        }
    } else {
        buffers.q = find_rows(call, Q, entry, block, call.head_dim, buffers.q_space);
        if (has_dout) buffers.dout = find_rows(call, DOUT, entry, block, call.head_dim_v, buffers.dout_space);
    }
    for (int64_t r = 0; r < num_rows; ++r) {
        const Row row = row_of(block, r);
        const T lse = number<T>(call, LSE, entry.batch, row.head, entry.first_q + row.i);
        if (work.delta) buffers.delta[r] = delta<T>(work, entry, row);
        buffers.lse[r] = lse;
        buffers.row_sums[r] = work.row_sums ? row_sum<T>(work, entry, row) : NO_ROW_SUM<T>;
        auto of_row = [&](Array array) { return number<T>(call, array, entry.batch, row.head, entry.first_q + row.i); };
        if (call.arrays[DENTROPY]) buffers.dentropy[r] = of_row(DENTROPY);
        if (call.arrays[DMAX]) {
            buffers.dmax[r] = of_row(DMAX);
            buffers.first_max[r] = work.first_max[index_of_row(call, entry, row)];
        }
    }
}

// Loads rows of k or v of a tile, and the same transposed.
template <class T> NOINLINE void load_and_transpose(const KeySlice &keys, T *rows, T *transposed, int64_t keys_stride) {
    const int64_t padded = round_up(keys.count, LANES<T>), whole = round_up(keys.dim(), LANES<T>);
    load_keys(keys, rows, whole, padded);
    transpose(rows, whole, padded, whole, transposed, keys_stride);
}

// Loads k and v of a tile: v transposed, k both as it is and transposed.
template <class T>
inline void load_key_tile(const Call &call, const Entry &entry, int64_t head_kv, int64_t first, int64_t count,
                          BackwardBuffers<T> &buffers) {
    const KeySlice keys = {call, K, entry, head_kv, first, count}, values = {call, V, entry, head_kv, first, count};
    if (BACKWARD_IN_BF16X2<T>) {
        load_keys_bf16x2(values, buffers.k, buffers.v_t, buffers.keys_stride);
        load_keys_bf16x2(keys, buffers.k, buffers.k_t, buffers.keys_stride);
        interleave_keys(keys, buffers.k);
        return;
    }
    load_and_transpose(values, buffers.k, buffers.v_t, buffers.keys_stride);
    load_and_transpose(keys, buffers.k, buffers.k_t, buffers.keys_stride);
}

// Prefetches rows of q or dout that are multiplied next, to the first cache: where they lie in the arrays of the call,
// no copy has brought them there, nor has `interleave_queries`.
template <class T>
ALWAYS_INLINE void prefetch_rows(const T *rows, const T *space, int64_t dim, int64_t first, int64_t stop) {
    if (BACKWARD_IN_BF16X2<T> || rows == space) return;
    for (int64_t x = first * dim; x < stop * dim; x += 64 / sizeof(T)) __builtin_prefetch(rows + x, 0, 3);
}

// c = A B, where A is the rows of q or dout from r0 on, and B is k or v, transposed.
template <class T>
inline void multiply_rows([[maybe_unused]] const Call &call, const T *rows, int64_t dim, const T *keys_t,
                          int64_t keys_stride, int64_t r0, int64_t num_rows, int64_t num_keys, T *c) {
    if constexpr (BACKWARD_IN_BF16X2<T>) {
        const int64_t stride = bf16x2_stride<T>(dim);
        return bf16x2_product(num_rows, num_keys, bf16x2_count(dim), rows + r0 * stride, stride, keys_t, keys_stride, c,
                              SCORES_STRIDE<T>, false);
    }
    const int64_t stride = round_up(dim, LANES<T>);
    product_of_rows(num_rows, num_keys, dim, rows + r0 * stride, stride, keys_t, keys_stride, c, SCORES_STRIDE<T>);
}

// Address of the bias of a row, or of its gradient, at the key `first`.
inline char *bias_address(const Call &call, Array array, const Entry &entry, Row row, int64_t first) {
    return address(call, array, size_of(call.bias_dtype), entry.index, row.head, row.i, first);
}

// Clears dbias of a row, for `count` keys from `first` on.
inline void clear_bias(const Call &call, const Entry &entry, Row row, int64_t first, int64_t count) {
    if (count > 0)
        clear_row(bias_address(call, DBIAS, entry, row, first), call.bias_dtype, call.strides[DBIAS][3], count);
}

// The same for all rows of a block.
inline void clear_bias(const Call &call, const Entry &entry, const Block &block, int64_t first, int64_t count) {
    for (int64_t r = 0; r < rows_of(block); ++r) clear_bias(call, entry, row_of(block, r), first, count);
}

struct RowRange {
    int64_t first, stop;
    void include(int64_t begin, int64_t end) {
        first = smaller(first, begin);
        stop = larger(stop, end);
    }
    bool operator==(const RowRange &other) const { return first == other.first && stop == other.stop; }
};

// What rows of a block attend to of a tile: keys, counted from its first, in whole sections and vectors; the rows that
// attend to any of them, and the rows that attend to any key of each section. Other scores are not computed.
constexpr int64_t SECTION_KEYS = 64, MAX_SECTIONS = MAX_KEYS / SECTION_KEYS;
struct Visible {
    Keys keys;
    RowRange rows, sections[MAX_SECTIONS];
};

// The rows of a block that attend to any key of a tile.
inline ScoreTile visible_tile(const Call &call, const Entry &entry, const Block &block, RowRange rows, int64_t first,
                              int64_t count) {
    return {call, entry, block, rows.first, rows.stop - rows.first, first, count, count, 0};
}

// Puts the gradients ds of scores of a row, for keys of a tile, into dbias of `results`, where jobs of keys do so at
// once.
template <class T>
NOINLINE void put_bias_gradients(const Call &results, const Entry &entry, const Block &block, Row row, int64_t first,
                                 int64_t count, Keys keys, const T *ds, BackwardBuffers<T> &buffers) {
    const int64_t columns = round_up(keys.stop - keys.first, LANES<T>);
    if (buffers.bias == BiasGradient::PAIRS)
        store_row(ds, results.bias_dtype, results.strides[DBIAS][3], smaller(columns, count - keys.first),
                  bias_address(results, DBIAS, entry, row, first + keys.first));
    if (buffers.bias == BiasGradient::KEYS) {
        T *to = buffers.total + (row.head - block.head_kv * group_of(results)) * SCORES_STRIDE<T> + keys.first;
        for (int64_t j = 0; j < columns; j += LANES<T>) store(to + j, load(to + j) + load(ds + j));
    }
}

// Calls body(r0, n, keys, columns) for n rows of a block, from r0 on, that attend to keys of a tile, which take up
// whole vectors, `columns` numbers; and clear_keys(computed, r, begin, end) for other keys of a row, where scores of
// keys `computed` are read, which is the last argument of `body`. Returns what the rows attend to.
template <class T, class C, class F>
inline Visible for_visible_rows(const Call &call, const Entry &entry, const Block &block, int64_t first, int64_t count,
                                C clear_keys, F body) {
    const int64_t num_rows = rows_of(block), padded = round_up(count, LANES<T>);
    const RowRange none = {num_rows, 0};
    Visible visible;
    visible.rows = none;
    for (RowRange &section : visible.sections) section = none;
    const Keys of_block = keys_visible_to(call, entry, block);
    visible.keys.first = larger(of_block.first - first, 0) / SECTION_KEYS * SECTION_KEYS;
    visible.keys.stop = smaller(round_up(larger(of_block.stop - first, 0), SECTION_KEYS), padded);
    for (int64_t r0 = 0, n; r0 < num_rows; r0 += n) {
        n = rows_of_group(call, block, r0, GROUP);
        const Keys keys = keys_of_group<T>(call, entry, block, r0, n, first, count);
        const int64_t here = keys.stop - keys.first, columns = round_up(here, LANES<T>);
        for (int64_t r = r0; r < r0 + n; ++r) {
            clear_keys(visible.keys, r, 0, keys.first);
            clear_keys(visible.keys, r, keys.first + columns, padded);
        }
        if (here <= 0) continue;
        visible.rows.include(r0, r0 + n);
        for (int64_t x = keys.first / SECTION_KEYS; x * SECTION_KEYS < keys.stop; ++x)
            visible.sections[x].include(r0, r0 + n);
        body(r0, n, keys, columns, visible.keys);
    }
    return visible;
}

// Clears scores of a row that are computed, among keys from `begin` to `end`.
template <class T> inline void clear_scores(Keys computed, int64_t r, int64_t begin, int64_t end, T *scores) {
    begin = larger(begin, computed.first), end = smaller(end, computed.stop);
    if (begin < end) clear(scores + r * SCORES_STRIDE<T> + begin, end - begin);
}

// Calls `run` with the function that makes weights of scores of a row, and whether it is the usual one: code for the
// other need not be specialised on options.
template <class T, class F>
inline void with_weights(const Scaling<T> &scaling, T lse, const RowSum<T> &row_sum, F run) {
    if (row_sum.is_found()) {
        run(
            [&](Vector<T> s) {
                return exp2<T>(s - splat(row_sum.row_max), splat(scaling.factor)) * splat(row_sum.inverse);
            },
            std::false_type());
    } else {
        run(
            [&](Vector<T> s) {
                return exp2<T>(s * splat(T(scaling.natural)) - splat(lse), splat(T(1.4426950408889634)));
            },
            std::true_type());
    }
}

// Statistics of a row over all of its keys.
template <class T> struct RowStats {
    T lse, delta;
    RowSum<T> sum;
    const T *dentropy;  // the gradient with respect to its entropy, if that is given
};

// Replaces the scores p of a row by weights, and the gradients ds of weights by those of scores. Dropout applies to
// both. With `tanhs`, the tanh(x) of the cap, ds becomes the gradients of products; no row with `dentropy` has them. A
// row of lse -inf attends to no key: it has no weights, whatever its scores are, which a function may have made NaN.
template <class T>
NOINLINE void softmax_row(const Call &call, const Scaling<T> &scaling, const RowStats<T> &row, int64_t columns,
                          const unsigned char *kept, const T *tanhs, T *p, T *ds) {
    const T lse = row.lse, delta = row.delta, *dentropy = row.dentropy;
    if (lse == T(-__builtin_inf())) {
        clear(p, columns);
        return clear(ds, columns);
    }
    const LogOfWeight<T> log_of_weight(scaling, lse, dentropy ? row.sum : NO_ROW_SUM<T>);
    auto recompute_p = [&](auto weight_of, auto drops, auto has_tanhs, auto has_entropy) {
        auto kept_of = [&](Vector<T> x, int64_t j) {
            return drops ? drop<T>(x * splat(T(call.kept_scale)), kept + j) : x;
        };
        for (int64_t j = 0; j < columns; j += LANES<T>) {
            const Vector<T> s = load(p + j), weight = weight_of(s);
            store(p + j, kept_of(weight, j));
            Vector<T> gradient = kept_of(load(ds + j), j) - splat(delta);
            if (has_entropy) gradient -= splat(*dentropy) * log_of_weight(s);
            gradient *= weight;
            store(ds + j, has_tanhs ? gradient * slope_of_cap<T>(load(tanhs + j)) : gradient);
        }
    };
    const bool drops = call.dropout_steps;
    auto softmax_by = [&](auto weight_of, auto is_usual) {
        const std::true_type yes;
        const std::false_type no;
        if (!is_usual || dentropy) {
            recompute_p(weight_of, drops, tanhs != nullptr, dentropy != nullptr);
        } else if (drops) {
            tanhs ? recompute_p(weight_of, yes, yes, no) : recompute_p(weight_of, yes, no, no);
        } else {
            tanhs ? recompute_p(weight_of, no, yes, no) : recompute_p(weight_of, no, no, no);
        }
    };
    with_weights(scaling, lse, row.sum, softmax_by);
}

// The product of a row of q and a key, rounded once. Gradients with respect to maxima make dscale a sum of few
// products, whose errors would not average out. `values` has space for both rows.
template <class T>
NOINLINE double exact_product(const Call &call, const Entry &entry, Row row, int64_t head_kv, int64_t key, int64_t dim,
                              T *values) {
    load_row(row_address(call, Q, entry, row), call.dtype, call.strides[Q][3], call.head_dim, values);
    load_keys({call, K, entry, head_kv, key, 1}, values + dim, dim, 1);
    double sum = 0;
    for (int64_t d = 0; d < call.head_dim; ++d) sum += double(values[d]) * double(values[dim + d]);
    return call.scale < 0 ? -sum : sum;
}

// Adds the gradient with respect to the maximum of a row of a tile to ds of the first key that has it, if that is
// there.
template <class T>
inline void add_gradient_of_max(const ScoreTile &tile, int64_t r, T *ds, T *products, BackwardBuffers<T> &buffers) {
    const int64_t own = tile.r0 + r, key = buffers.first_max[own], j = key - tile.first;
    if (j < 0 || j >= tile.padded) return;
    ds[j] += buffers.dmax[own];
    if (products)
        products[j] = T(
            exact_product(tile.call, tile.entry, tile.row(r), tile.block.head_kv, key, buffers.sizes.dim, buffers.dq));
}

// Adds what a row has of the gradients of slopes, the cap and the scale to buffers.sums. With `tanhs`, ds becomes the
// gradients of products.
template <class T>
inline void add_gradients_of_numbers(const ScoreTile &tile, Row row, const T *tanhs, const T *products, T *ds,
                                     BackwardBuffers<T> &buffers) {
    constexpr int N = LANES<T>;
    const Call &call = tile.call;
    const int64_t columns = tile.padded;
    if (is_wanted(call, DALIBI_SLOPES)) {
        const Vector<T> start = splat(T(tile.first - row.i - tile.entry.diagonal)) + iota<T>();
        Vector<T> sum = {};
        for (int64_t j = 0; j < columns; j += N) {
            const Vector<T> distance = start + splat(T(j));
            sum -= load(ds + j) * (distance < Vector<T>{} ? -distance : distance);
        }
        buffers.sums[row.head] += double(sum_of_lanes<T>(sum));
    }
    if (is_wanted(call, DSOFTCAP)) {
        Vector<T> sum = {};
        for (int64_t j = 0; j < columns; j += N)
            sum += load(ds + j) * derivative_by_softcap<T>(call, load(products + j), load(tanhs + j));
        buffers.sums[call.num_heads + 1] += double(sum_of_lanes<T>(sum));
    }
    if (tanhs)
        for (int64_t j = 0; j < columns; j += N) store(ds + j, load(ds + j) * slope_of_cap<T>(load(tanhs + j)));
    if (is_wanted(call, DSCALE)) {
        Vector<T> sum = {};
        for (int64_t j = 0; j < columns; j += N) sum += load(ds + j) * load(products + j);
        const T total = sum_of_lanes<T>(sum);
        buffers.sums[call.num_heads] += double(call.scale < 0 ? -total : total);
    }
}

// Whether anything but products follows from the gradients of scores.
inline bool needs_score_gradients(const Call &call) {
    return is_any_wanted(call, DBIAS, DALIBI_SLOPES, DSOFTCAP) || call.arrays[DMAX] || call.arrays[DENTROPY];
}

// Packs weights and gradients of scores of rows as bf16x2 of two rows, in place of p and in ds_columns, and packs
// gradients as bf16x2 of two keys, too, in ds_rows. The first row is even.
template <class T>
NOINLINE void pack_scores(const Block &block, Keys keys, RowRange rows, BackwardBuffers<T> &buffers) {
    if constexpr (BACKWARD_IN_BF16X2<T>) {
        constexpr int64_t STRIDE = SCORES_STRIDE<T>;
        static constexpr T ZEROS[MAX_KEYS] = {};
        const int64_t at = keys.first, count = keys.stop - at;
        for (int64_t r = rows.first; r < rows.stop; r += 2) {
            const bool has_second = r + 1 < rows_of(block);
            const T *p = buffers.p + r * STRIDE + at, *ds = buffers.ds + r * STRIDE + at;
            round_to_bf16x2(p, has_second ? p + STRIDE : ZEROS, count, buffers.p + r / 2 * STRIDE + at);
            round_to_bf16x2(ds, has_second ? ds + STRIDE : ZEROS, count, buffers.ds_columns + r / 2 * STRIDE + at);
            for (int64_t x = r; x <= r + has_second; ++x)
                round_to_bf16x2(buffers.ds + x * STRIDE + at, count, buffers.ds_rows + x * KEYS_BF16X2_STRIDE + at / 2);
        }
    }
}

// Makes packed weights and gradients of scores of an even number of rows, from an even one on, at once: where no other
// option than scale acts on scores or needs their gradients, and lse is enough to make weights of all of these rows.
template <class T>
NOINLINE void softmax_packed(const Scaling<T> &scaling, Keys keys, RowRange rows, BackwardBuffers<T> &buffers) {
    if constexpr (BACKWARD_IN_BF16X2<T>) {
        constexpr int64_t STRIDE = SCORES_STRIDE<T>;
        const Vector<T> natural = splat(T(scaling.natural)), log2e = splat(T(1.4426950408889634));
        for (int64_t r = rows.first; r < rows.stop; r += 2) {
            const Vector<T> lse[2] = {splat(buffers.lse[r]), splat(buffers.lse[r + 1])};
            const Vector<T> delta[2] = {splat(buffers.delta[r]), splat(buffers.delta[r + 1])};
            const T *p = buffers.p + r * STRIDE, *ds = buffers.ds + r * STRIDE;
            T *packed_p = buffers.p + r / 2 * STRIDE, *ds_columns = buffers.ds_columns + r / 2 * STRIDE;
            T *ds_rows = buffers.ds_rows + r * KEYS_BF16X2_STRIDE;
            for (int64_t j = keys.first; j < keys.stop; j += LANES<T>) {
                Vector<T> weights[2], gradients[2];
#pragma GCC unroll 2
                for (int x = 0; x < 2; ++x) {
                    weights[x] = exp2<T>(load(p + x * STRIDE + j) * natural - lse[x], log2e);
                    gradients[x] = (load(ds + x * STRIDE + j) - delta[x]) * weights[x];
                    store_halves(ds_rows + x * KEYS_BF16X2_STRIDE + j / 2, round_to_bfloat16<T>(gradients[x]));
                }
                store(packed_p + j, interleave_halves<T>(round_to_bfloat16<T>(weights[0], weights[1])));
                store(ds_columns + j, interleave_halves<T>(round_to_bfloat16<T>(gradients[0], gradients[1])));
            }
        }
    }
}

// Computes weights p, after dropout, and gradients ds, of a block and a tile that are loaded. If `for_bias`, ds is the
// gradient of scores with their bias, else that of scale q k^T. Hidden scores of the rows and keys that it returns have
// zeros in p and ds. Unless it is for bias, both are packed where products are of bf16x2, while the first cache has
// them. Adds the gradients of slopes (by head), of the scale and of the cap to buffers.sums, and the gradient of a bias
// of keys (by head) to buffers.total.
template <class T>
inline Visible differentiate(const Call &call, const Scaling<T> &scaling, const Entry &entry, const Block &block,
                             int64_t first, int64_t count, bool for_bias, BackwardBuffers<T> &buffers) {
    constexpr int64_t STRIDE = SCORES_STRIDE<T>;
    const bool has_products = !for_bias && is_any_wanted(call, DSCALE, DSOFTCAP);
    if (call.dropout_steps) load_kept(call, entry, block, first, count, buffers.kept);
    const bool writes_bias = !for_bias && buffers.bias == BiasGradient::PAIRS;
    const int64_t next_bias = SUBGROUP * call.strides[BIAS][2];
    // Gradients become those of products at once, unless something needs the gradients of scores before.
    const bool slopes_at_once = has_cap(call) && !for_bias && !needs_score_gradients(call);
    // Whether rows have more to do than softmax: gradients other than dq, dk and dv, or a cap.
    const bool has_others = needs_score_gradients(call) || has_cap(call) || is_wanted(call, DSCALE);
    const bool packs = BACKWARD_IN_BF16X2<T> && !for_bias;
    const bool packs_at_once = packs && !call.dropout_steps && !has_others;
    int64_t packed = rows_of(block);  // rows from the first visible one to this one are
    auto clear_keys = [&](Keys computed, int64_t r, int64_t begin, int64_t end) {
        if (writes_bias) clear_bias(call, entry, row_of(block, r), first + begin, smaller(end, count) - begin);
        clear_scores(computed, r, begin, end, buffers.p);
        clear_scores(computed, r, begin, end, buffers.ds);
    };
    auto differentiate_rows = [&](int64_t r0, int64_t n, Keys keys, int64_t columns, Keys computed) {
        const ScoreTile tile = {call,    entry,    block, r0, n, first + keys.first, keys.stop - keys.first,
                                columns, next_bias};
        T *p = buffers.p + r0 * STRIDE + keys.first, *ds = buffers.ds + r0 * STRIDE + keys.first;
        const int64_t next_stop = smaller(r0 + 2 * n, rows_of(block));
        prefetch_rows(buffers.q, buffers.q_space, call.head_dim, r0 + n, next_stop);
        multiply_rows(call, buffers.q, call.head_dim, buffers.k_t + keys.first, buffers.keys_stride, r0, n, columns, p);
        prefetch_rows(buffers.dout, buffers.dout_space, call.head_dim_v, r0 + n, next_stop);
        multiply_rows(call, buffers.dout, call.head_dim_v, buffers.v_t + keys.first, buffers.keys_stride, r0, n,
                      columns, ds);
        bool is_usual = packs_at_once && r0 % 2 == 0 && n % 2 == 0 && keys.first == computed.first &&
                        keys.first + columns == computed.stop;
        for (int64_t r = r0; r < r0 + n && is_usual; ++r)
            is_usual = buffers.lse[r] != T(-__builtin_inf()) && !buffers.row_sums[r].is_found();
        if (is_usual) {
            for (int64_t r = 0; r < n; r += SUBGROUP)
                finish_scores_if_needed<T>(scaling, tile.rows(r, smaller(SUBGROUP, n - r)), p + r * STRIDE,
                                           buffers.added, nullptr);
            if (packed < r0) pack_scores(block, computed, {packed, r0}, buffers);  // zeros of hidden rows
            softmax_packed(scaling, computed, {r0, r0 + n}, buffers);
            packed = r0 + n;
            return;
        }
        for (int64_t r = 0; r < n && has_products; ++r)
            memcpy(buffers.products + (r0 + r) * STRIDE + keys.first, p + r * STRIDE, columns * sizeof(T));
        for (int64_t r = 0; r < n; ++r, p += STRIDE, ds += STRIDE) {
            const Row row = row_of(block, r0 + r);
            T *products = has_products ? buffers.products + (r0 + r) * STRIDE + keys.first : nullptr;
            T *tanhs = has_cap(call) ? buffers.tanhs + (r0 + r) * STRIDE + keys.first : nullptr;
            if (r % SUBGROUP == 0)
                finish_scores_if_needed<T>(scaling, tile.rows(r, smaller(SUBGROUP, n - r)), p, buffers.added, tanhs);
            const RowStats<T> stats = {buffers.lse[r0 + r], buffers.delta[r0 + r], buffers.row_sums[r0 + r],
                                       call.arrays[DENTROPY] ? buffers.dentropy + r0 + r : nullptr};
            softmax_row(call, scaling, stats, columns, buffers.kept + (r0 + r) * MAX_KEYS + keys.first,
                        slopes_at_once ? tanhs : nullptr, p, ds);
            if (call.arrays[DMAX]) add_gradient_of_max(tile, r, ds, products, buffers);
            if (for_bias || !has_others) continue;
            put_bias_gradients(call, entry, block, row, first, count, keys, ds, buffers);
            add_gradients_of_numbers(tile, row, slopes_at_once ? nullptr : tanhs, products, ds, buffers);
        }
        if (!packs) return;
        const RowRange rows = {smaller(packed, r0 / 2 * 2), (r0 + n) / 2 * 2};
        pack_scores(block, computed, rows, buffers);
        packed = rows.stop;
    };
    const Visible visible = for_visible_rows<T>(call, entry, block, first, count, clear_keys, differentiate_rows);
    if (packs && packed < visible.rows.stop) pack_scores(block, visible.keys, {packed, visible.rows.stop}, buffers);
    return visible;
}

// Calls body(r, s, columns, at) with the scores s of each row of a block for keys of a tile from the key `at` on, in
// whole vectors. Rows for which is_needed(r) is false may be left out. The rows and the tile are loaded.
template <class T, class N, class F>
inline void for_scores_of_tile(const Call &call, const Scaling<T> &scaling, const Entry &entry, const Block &block,
                               int64_t first, int64_t count, BackwardBuffers<T> &buffers, N is_needed, F body) {
    const int64_t next_bias = SUBGROUP * call.strides[BIAS][2];
    for (int64_t r0 = 0, n; r0 < rows_of(block); r0 += n) {
        n = rows_of_group(call, block, r0, GROUP);
        const Keys keys = keys_of_group<T>(call, entry, block, r0, n, first, count);
        const int64_t here = keys.stop - keys.first, columns = round_up(here, LANES<T>), at = first + keys.first;
        bool any_needed = false;
        for (int64_t r = r0; r < r0 + n; ++r) any_needed |= is_needed(r);
        if (here <= 0 || !any_needed) continue;
        const ScoreTile tile = {call, entry, block, r0, n, at, here, columns, next_bias};
        T *s = buffers.p + r0 * SCORES_STRIDE<T> + keys.first;
        multiply_rows(call, buffers.q, call.head_dim, buffers.k_t + keys.first, buffers.keys_stride, r0, n, columns, s);
        for (int64_t r = 0; r < n; ++r, s += SCORES_STRIDE<T>) {
            if (r % SUBGROUP == 0)
                finish_scores_if_needed<T>(scaling, tile.rows(r, smaller(SUBGROUP, n - r)), s, buffers.added, nullptr);
            body(r0 + r, s, columns, at);
        }
    }
}

// The same for all keys that rows of a block attend to, whose tiles it loads.
template <class T, class N, class F>
inline void for_scores(const Work &work, const Scaling<T> &scaling, const Block &block, BackwardBuffers<T> &buffers,
                       N is_needed, F body) {
    const Call &call = work.call;
    const Entry &entry = work.entries[block.entry];
    const Keys visible = keys_visible_to(call, entry, block);
    for (int64_t first = tile_begin(work, visible.first); first < visible.stop; first += work.keys_per_tile) {
        if (work.stopped.load(std::memory_order_relaxed)) return;
        const int64_t count = smaller(work.keys_per_tile, entry.seqlen_k - first);
        if (!any_visible(call, entry, block, first, count)) continue;
        load_key_tile(call, entry, block.head_kv, first, count, buffers);
        for_scores_of_tile(call, scaling, entry, block, first, count, buffers, is_needed, body);
    }
}

// Row max and row sum of rows of a block, as scores are added.
template <class T> struct RowSumsSoFar {
    T row_max[BACKWARD_ROWS];
    double sums[BACKWARD_ROWS] = {};
    RowSumsSoFar() {
        for (T &x : row_max) x = T(-__builtin_inf());
    }
    NOINLINE void add(const Scaling<T> &scaling, int64_t r, const T *s, int64_t columns) {
        add_exponentials(scaling, s, columns, row_max[r], sums[r]);
    }
};

// Finds what rows of a block have to know of all of their keys before weights are computed: the sums of those whose lse
// is large and, for gradients with respect to maxima, the first key with the largest score.
template <class T> inline void find_row_sums(Work &work, char *memory, const Block &block) {
    const Call &call = work.call;
    const Entry &entry = work.entries[block.entry];
    const Scaling<T> scaling(call);
    BackwardBuffers<T> buffers(work, memory);
    const int64_t num_rows = rows_of(block);
    RowSumsSoFar<T> sums;
    T largest[BACKWARD_ROWS];
    for (T &x : largest) x = T(-__builtin_inf());
    load_queries(work, entry, block, buffers);
    const bool finds_maxima = call.arrays[DMAX];
    auto is_needed = [&](int64_t r) { return finds_maxima || is_large(buffers.lse[r]); };
    bool any_needed = false;
    for (int64_t r = 0; r < num_rows; ++r) any_needed |= is_needed(r);
    if (!any_needed) return;
    for_scores(work, scaling, block, buffers, is_needed, [&](int64_t r, const T *s, int64_t columns, int64_t at) {
        if (finds_maxima) find_first_max(s, columns, at, largest[r], buffers.first_max[r]);
        if (is_large(buffers.lse[r])) sums.add(scaling, r, s, columns);
    });
    for (int64_t r = 0; r < num_rows; ++r) {
        const Row row = row_of(block, r);
        if (finds_maxima) work.first_max[index_of_row(call, entry, row)] = buffers.first_max[r];
        if (!is_large(buffers.lse[r])) continue;
        if (call.finds_row_sums)
            write_row_sum(call, scaling, entry, row, sums.row_max[r], sums.sums[r]);
        else
            row_sum<T>(work, entry, row) =
                explained_sum(call, scaling, row.head, buffers.lse[r], sums.row_max[r], sums.sums[r]);
    }
}

template <class T> void row_sums_job(Work &work, char *memory, int64_t job) {
    find_row_sums<T>(work, memory, work.blocks[job]);
}

}  // namespace
