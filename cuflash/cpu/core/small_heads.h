// Small heads are computed whole: all scores of a head at once, without tiles, blocks or a running maximum.
//
// Scores are kept as s[key][query], so that a vector holds one key and many queries: maxima, sums, logarithms and
// weights of many rows are computed side by side, and no lanes are summed up. Operands are read, and results written,
// where they lie. A job takes many heads, because heads have few scores and dispatch would take longer than arithmetic.
#pragma once

#include "bias_gradients.h"
#include "schedule.h"
#include "small_head_calls.h"

namespace {

// About how long a job takes, and how long at least, where there is so little work that jobs are made shorter to give
// many threads some.
constexpr double SMALL_JOB_NS = 30e3, LEAST_JOB_NS = 8e3;
constexpr int64_t QUERIES_AT_ONCE = 64;  // where a window cuts their keys

// How many heads are computed side by side: vectors of queries are filled with those of several heads.
template <class T> inline int64_t heads_at_once(const Call &call) {
    return call.arrays[KV_LENGTHS] ? 1 : larger(1, LANES<T> / larger(call.seqlen_q, 1));
}

// Rows of one head in memory.
template <class T> struct Rows {
    T *data;
    int64_t stride;
    Rows from(int64_t i) const { return {data + i * stride, stride}; }
};

// Queries of a head of q, with all of its keys.
template <class T> struct Member {
    const Entry *entry;
    int64_t head, head_kv;
    Range queries;
    Rows<const T> q, k, v, dout;
};

// An operand or a result of a small head. Its rows are used where they lie if they are neighbours and whole vectors of
// the dtype of the computation, and are copied otherwise, to as many slots as there are heads at once.
template <class T> struct SmallArray {
    Array array;
    int64_t length, dim, padded;
    bool lies_well;
    T *copies = nullptr;

    SmallArray(const Call &call, Scratch &scratch, Array array, int64_t length, int64_t dim)
        : array(array), length(length), dim(dim), padded(round_up(dim, LANES<T>)) {
        lies_well = has_whole_rows<T>(call, array, dim) && (length == 1 || call.strides[array][2] == dim);
        const int64_t count = call.arrays[array] && !lies_well ? heads_at_once<T>(call) : 0;
        copies = scratch.template take<T>(count * length * padded);
    }

    // Where the rows of a head are, or where they are copied to.
    Rows<T> rows(const Call &call, const Entry &entry, int64_t head, int64_t slot) const {
        if (lies_well) return {(T *)row(call, entry, head, 0), dim};
        return {copies + slot * length * padded, padded};
    }

    Rows<const T> read(const Call &call, const Entry &entry, int64_t head, int64_t slot, Range range) const {
        const Rows<T> to = rows(call, entry, head, slot);
        if (!lies_well) load_copies(call, entry, head, range, to.data);
        return {to.data, to.stride};
    }

    // Copies computed rows into the array, unless they were computed there.
    void write(const Call &call, const Entry &entry, int64_t head, Range range) const {
        if (!lies_well) store_copies(call, entry, head, range, rows(call, entry, head, 0).data);
    }

    // The same for `count` rows, followed by zeros.
    void write_padded(const Call &call, const Entry &entry, int64_t head, int64_t count) const {
        const Rows<T> from = rows(call, entry, head, 0);
        if (count < length) clear(from.data + count * from.stride, (length - count) * from.stride);
        write(call, entry, head, {0, length});
    }

  private:
    NOINLINE void load_copies(const Call &call, const Entry &entry, int64_t head, Range range, T *to) const {
        for (int64_t i = range.first; i < range.stop; ++i) {
            load_row(row(call, entry, head, i), call.dtype, call.strides[array][3], dim, to + i * padded);
            clear(to + i * padded + dim, padded - dim);
        }
    }
    NOINLINE void store_copies(const Call &call, const Entry &entry, int64_t head, Range range, const T *from) const {
        for (int64_t i = range.first; i < range.stop; ++i)
            store_row(from + i * padded, call.dtype, call.strides[array][3], dim, row(call, entry, head, i));
    }
    char *row(const Call &call, const Entry &entry, int64_t head, int64_t i) const {
        return address(call, array, size_of(call.dtype), entry.batch, head, i);
    }
};

// Memory for heads that are computed at once. Neighbours in scores are queries, of all these heads.
template <class T> struct SmallBuffers {
    Scratch scratch;
    SmallArray<T> q, k, v, out, dout, dq, dk, dv;
    int64_t stride;  // from key to key in scores
    T *columns_of_q, *columns_of_dout, *s, *ds, *lse, *max, *entropy, *delta, *dentropy, *dmax, *sinks, *queries;

    SmallBuffers(const Call &call, char *memory)
        : scratch{memory}, q(call, scratch, Q, call.seqlen_q, call.head_dim),
          k(call, scratch, K, call.seqlen_k, call.head_dim), v(call, scratch, V, call.seqlen_k, call.head_dim_v),
          out(call, scratch, OUT, call.seqlen_q, call.head_dim_v),
          dout(call, scratch, DOUT, call.seqlen_q, call.head_dim_v),
          dq(call, scratch, DQ, call.seqlen_q, call.head_dim), dk(call, scratch, DK, call.seqlen_k, call.head_dim),
          dv(call, scratch, DV, call.seqlen_k, call.head_dim_v) {
        // Results of a head may extend up to a vector beyond it; the next head overwrites that. The stride is no
        // power of two where there are many queries, so that keys do not share sets of the cache.
        // Dot products may extend beyond the last key, whichever key they begin with.
        const int64_t length = call.seqlen_k + LANES<T>, heads = heads_at_once<T>(call);
        stride = round_up(heads * larger(call.seqlen_q, 1), LANES<T>);
        if (heads > 1 || stride > LANES<T>) stride += LANES<T>;
        columns_of_q = scratch.template take<T>(q.padded * stride);
        columns_of_dout = scratch.template take<T>(call.is_backward ? v.padded * stride : 0);
        s = scratch.template take<T>(length * stride);
        ds = scratch.template take<T>(call.is_backward ? length * stride : 0);
        lse = scratch.template take<T>(stride);
        max = scratch.template take<T>(has_row_reductions(call) ? stride : 0);
        entropy = scratch.template take<T>(has_row_reductions(call) ? stride : 0);
        delta = scratch.template take<T>(stride);
        dentropy = scratch.template take<T>(call.arrays[DENTROPY] ? stride : 0);
        dmax = scratch.template take<T>(call.arrays[DMAX] ? stride : 0);
        sinks = scratch.template take<T>(stride);
        queries = scratch.template take<T>(stride);
        if (memory)
            for (int64_t x = 0; x < stride; ++x) queries[x] = call.seqlen_q ? T(x % call.seqlen_q) : T(0);
    }
};

// ---- products of rows with rows -------------------------------------------------------------------------------------

// s[j][i] = dot(b[j], a[i]), by dot products; writes up to whole vectors of queries and of keys.
template <class T>
NOINLINE void dot_products_by_columns(Rows<const T> a, int64_t num_rows, Rows<const T> b, int64_t num_keys, int64_t dim,
                                      T *s, int64_t stride) {
    constexpr int R = LANES<T> < 4 ? LANES<T> : 4, KEYS = LANES<T> / R;
    if (num_rows * num_keys < 4) {
        for (int64_t i = 0; i < num_rows; ++i)
            for (int64_t j = 0; j < num_keys; ++j) {
                Vector<T> sum = {};
                for (int64_t d = 0; d < dim; d += LANES<T>) sum += load(a.from(i).data + d) * load(b.from(j).data + d);
                s[j * stride + i] = sum_of_lanes<T>(sum);
            }
        return;
    }
    for (int64_t i = 0; i < num_rows; i += R) {
        const T *rows[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) rows[r] = a.from(smaller(i + r, num_rows - 1)).data;
        for (int64_t j = 0; j < num_keys; j += KEYS) {
            const T *keys[KEYS];
#pragma GCC unroll 4
            for (int n = 0; n < KEYS; ++n) keys[n] = b.from(smaller(j + n, num_keys - 1)).data;
            Vector<T> sums[LANES<T>] = {};
            for (int64_t d = 0; d < dim; d += LANES<T>) {
#pragma GCC unroll 4
                for (int n = 0; n < KEYS; ++n) {
                    const Vector<T> y = load(keys[n] + d);
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) sums[n * R + r] += load(rows[r] + d) * y;
                }
            }
            T lanes[LANES<T>];
            store(lanes, sums_of_lanes<T>(sums));
#pragma GCC unroll 4
            for (int n = 0; n < KEYS; ++n) memcpy(s + (j + n) * stride + i, lanes + n * R, R * sizeof(T));
        }
    }
}

// Products of the rows of a head, a, with all keys, b. Whole vectors of rows are multiplied by columns, which are
// copied first. The rows that are left are multiplied in the same way, unless dot products take less time.
template <class T> struct RowProducts {
    Rows<const T> a, b;
    int64_t dim, by_columns, stride;
    T *columns;

    void start(Rows<const T> rows, Range range, Rows<const T> keys, int64_t num_keys, int64_t length, T *to,
               int64_t to_stride) {
        a = rows, b = keys, dim = length, columns = to, stride = to_stride;
        const int64_t left = range.stop % LANES<T>, vectors = dim / LANES<T>;
        // Compares about how long both ways take.
        const bool are_dots = left * num_keys * (vectors + 4) < vectors * (6 + num_keys) * LANES<T>;
        by_columns = are_dots ? range.stop - left : range.stop;
        transpose(a.from(range.first).data, a.stride, by_columns - range.first, dim, columns + range.first, stride);
    }

    // s[j][i] = dot(b[j], a[i]) for keys from `first` to `stop` and rows from `begin` to `end`. The rows before `begin`
    // are whole vectors.
    void compute(int64_t begin, int64_t end, int64_t first, int64_t stop, T *s) const {
        const Rows<const T> keys = b.from(first);
        const int64_t middle = smaller(end, by_columns);
        if (middle > begin)
            product_of_rows(stop - first, round_up(middle - begin, LANES<T>), dim, keys.data, keys.stride,
                            columns + begin, stride, s + first * stride + begin, stride);
        const int64_t left = larger(begin, middle);
        if (end > left)
            dot_products_by_columns<T>(a.from(left), end - left, keys, stop - first, dim, s + first * stride + left,
                                       stride);
    }
};

// C = A B or C += A B, like `product`. Sums of one term are computed separately, since they need no blocks of C in
// registers.
template <class T, Order ORDER>
NOINLINE void small_product(int64_t num_rows, int64_t num_columns, int64_t length, const T *a, int64_t a_stride,
                            const T *b, int64_t b_stride, T *c, int64_t c_stride, bool adds) {
    if (length != 1) {
        product<T, ORDER>(num_rows, num_columns, length, a, a_stride, b, b_stride, c, c_stride, adds);
        return;
    }
    for (int64_t r = 0; r < num_rows; ++r, c += c_stride, a += ORDER == Order::ROWS ? a_stride : 1)
        for (int64_t j = 0; j < num_columns; j += LANES<T>)
            store(c + j, adds ? load(c + j) + splat(*a) * load(b + j) : splat(*a) * load(b + j));
}

// ---- what is visible ------------------------------------------------------------------------------------------------

inline bool has_window(const Call &call) { return call.window_left < NO_BOUND || call.window_right < NO_BOUND; }

// Which keys a vector of neighbouring columns of scores attends to.
template <class T> struct Sight {
    Keys of_all;
    Vector<T> from, to;
    Sight(const Call &call, const Entry &entry, const T *queries, int64_t begin, int64_t end) {
        of_all = keys_visible_to_all(call, entry, begin, end - 1);
        const Vector<T> diagonals = load(queries) + splat(T(entry.diagonal));
        from = diagonals - splat(T(call.window_left));
        to = diagonals + splat(T(call.window_right));
    }
    // A score, or -inf in the slot of a hidden one.
    Vector<T> hide(Vector<T> score, int64_t j) const {
        if (j >= of_all.first && j < of_all.stop) return score;
        const Vector<T> key = splat(T(j)), hidden = splat(T(-__builtin_inf()));
        score = key < from ? hidden : score;
        return key > to ? hidden : score;
    }
};

// Calls body(begin, end, keys) for queries of a head, and the keys that they attend to.
template <class F> inline void for_queries(const Call &call, const Entry &entry, Range queries, F body) {
    const int64_t step = has_window(call) ? QUERIES_AT_ONCE : SMALL_LENGTH;
    for (int64_t i = queries.first; i < queries.stop; i += step) {
        const int64_t end = smaller(i + step, queries.stop);
        body(i, end, keys_visible_to(call, entry, i, end - 1));
    }
}

// Calls body(column, sight) for each vector of queries from `begin` to `end` of `heads` heads. There may be several
// heads only if `begin` to `end` are all of their queries.
template <class T, class F>
inline void for_vectors(const Call &call, const SmallBuffers<T> &buffers, const Entry &entry, int64_t heads,
                        int64_t begin, int64_t end, F body) {
    for (int64_t x = begin; x < end + (heads - 1) * entry.seqlen_q; x += LANES<T>) {
        const int64_t first = heads > 1 ? 0 : x, last = heads > 1 ? end : smaller(x + LANES<T>, end);
        body(x, Sight<T>(call, entry, buffers.queries + x, first, last));
    }
}

// ---- forward --------------------------------------------------------------------------------------------------------

template <class T> struct ReducedRows {
    Vector<T> lse, max, entropy;  // the last two if they are wanted
};

// Turns the scores of a vector of queries into weights, whose sums are 1, or less with a sink.
template <class T, class R>
NOINLINE ReducedRows<T> softmax_step(R reduces, const Scaling<T> &scaling, const Sight<T> &sight, Keys keys, T *s,
                                     int64_t stride, const T *sinks) {
    const T infinity = T(__builtin_inf());
    Vector<T> most = splat(-infinity);
    for (int64_t j = keys.first; j < keys.stop; ++j) {
        const Vector<T> score = sight.hide(load(s + j * stride), j);
        store(s + j * stride, score);
        most = larger<T>(score, most);
    }
    // A row that attends to no key has scores of -inf, and weights of 0.
    const Vector<T> row_max = most == -infinity ? Vector<T>{} : most, factor = splat(scaling.factor);
    Vector<T> sum = {}, moment = {};
    for (int64_t j = keys.first; j < keys.stop; ++j) {
        const Vector<T> x = load(s + j * stride) - row_max, weight = exp2<T>(x, factor);
        store(s + j * stride, weight);
        sum += weight;
        if constexpr (reduces) moment += weight * larger<T>(x, splat(scaling.least));
    }
    const Vector<T> one = splat(T(1));
    const Vector<T> natural = splat(T(scaling.natural)), log_sum = log<T>(sum);
    Vector<T> lse = most * natural + log_sum, shrinks = one / (sum == T(0) ? one : sum), entropy = {};
    lse = sum == T(0) ? splat(-infinity) : lse;
    if constexpr (reduces) entropy = sum == T(0) ? Vector<T>{} : log_sum - moment * natural * shrinks;
    for (int i = 0; i < LANES<T> && sinks; ++i) {
        const double sink = sinks[i], top = sum[i] == 0 ? -__builtin_inf() : most[i] * scaling.natural;
        const double joined = top > sink ? top : sink, shifted = joined == -__builtin_inf() ? 0 : joined;
        const double rest = exp_of(top - shifted), total = sum[i] * rest + exp_of(sink - shifted);
        lse[i] = T(shifted + log_of(total));
        if constexpr (reduces) {
            const double of_sink = exp_of(sink - shifted), own = sum[i] * rest;
            double all = own == 0 ? 0 : moment[i] * scaling.natural * rest + (top - shifted) * own;
            all += of_sink == 0 ? 0 : (sink - shifted) * of_sink;
            entropy[i] = T(total == 0 ? 0 : log_of(total) - all / total);
        }
        shrinks[i] = T(rest / (total == 0 ? 1 : total));
    }
    for (int64_t j = keys.first; j < keys.stop; ++j) store(s + j * stride, load(s + j * stride) * shrinks);
    return {lse, most * natural, entropy};
}

template <class T>
void forward_heads(const Call &call, SmallBuffers<T> &buffers, const Member<T> *members, int64_t count) {
    const Scaling<T> scaling(call);
    const Entry &entry = *members[0].entry;  // as those of the other members
    const Range queries = members[0].queries;
    const int64_t num_rows = entry.seqlen_q, stride = buffers.stride, dim_v = buffers.v.padded;
    RowProducts<T> products[LANES<T>];
    for (int64_t x = 0; x < count; ++x) {
        products[x].start(members[x].q, queries, members[x].k, entry.seqlen_k, buffers.q.padded,
                          buffers.columns_of_q + x * num_rows, stride);
        if (call.arrays[SINKS])
            for (int64_t i = 0; i < num_rows; ++i)
                buffers.sinks[x * num_rows + i] = number<T>(call, SINKS, 0, members[x].head);
    }
    const T *sinks = call.arrays[SINKS] ? buffers.sinks : nullptr;
    for_queries(call, entry, queries, [&](int64_t begin, int64_t end, Keys keys) {
        for (int64_t x = 0; x < count; ++x)
            products[x].compute(begin, end, keys.first, keys.stop, buffers.s + x * num_rows);
        for_vectors<T>(call, buffers, entry, count, begin, end, [&](int64_t x, const Sight<T> &sight) {
            auto reduce = [&](auto reduces) {
                const ReducedRows<T> found =
                    softmax_step<T>(reduces, scaling, sight, keys, buffers.s + x, stride, sinks ? sinks + x : nullptr);
                store(buffers.lse + x, found.lse);
                if constexpr (reduces) store(buffers.max + x, found.max), store(buffers.entropy + x, found.entropy);
            };
            has_row_reductions(call) ? reduce(std::true_type()) : reduce(std::false_type());
        });
        for (int64_t x = 0; x < count; ++x) {
            const Member<T> &member = members[x];
            const Rows<T> out = buffers.out.rows(call, *member.entry, member.head, 0).from(begin);
            const Rows<const T> v = member.v.from(keys.first);
            const T *weights = buffers.s + keys.first * stride + x * num_rows + begin;
            small_product<T, Order::COLUMNS>(end - begin, dim_v, keys.stop - keys.first, weights, stride, v.data,
                                             v.stride, out.data, out.stride, false);
            if (end == queries.stop) buffers.out.write(call, *member.entry, member.head, queries);
        }
    });
    auto write = [&](Array array, const T *from) {
        for (int64_t x = 0; x < count && call.arrays[array]; ++x) {
            T *to = &number<T>(call, array, members[x].entry->batch, members[x].head);
            for (int64_t i = queries.first; i < queries.stop; ++i)
                to[i * call.strides[array][2]] = from[x * num_rows + i];
        }
    };
    write(LSE, buffers.lse);
    write(MAX, buffers.max);
    write(ENTROPY, buffers.entropy);
}

// ---- backward -------------------------------------------------------------------------------------------------------

// lse of a head, delta, and gradients with respect to row reductions.
template <class T>
NOINLINE void load_row_numbers(const Call &call, SmallBuffers<T> &buffers, const Member<T> &member, int64_t slot) {
    const Entry &entry = *member.entry;
    const int64_t num_rows = entry.seqlen_q;
    const Rows<const T> out = buffers.out.read(call, entry, member.head, slot, {0, num_rows});
    T *lse = buffers.lse + slot * num_rows, *delta = buffers.delta + slot * num_rows;
    for (int64_t i = 0; i < num_rows; i += LANES<T>) {
        const int64_t count = smaller(LANES<T>, num_rows - i);
        Vector<T> sums[LANES<T>] = {};
        for (int64_t r = 0; r < count; ++r)
            for (int64_t d = 0; d < buffers.v.padded; d += LANES<T>)
                sums[r] += load(member.dout.from(i + r).data + d) * load(out.from(i + r).data + d);
        if (count < 3) {
            for (int64_t r = 0; r < count; ++r) delta[i + r] = sum_of_lanes<T>(sums[r]);
        } else {
            store(delta + i, sums_of_lanes<T>(sums));
        }
    }
    for (int64_t i = 0; i < num_rows; ++i) {
        auto of_row = [&](Array array) { return number<T>(call, array, entry.batch, member.head, i); };
        lse[i] = of_row(LSE);
        delta[i] += of_row_gradients(call, entry, Row{member.head, i}, lse[i]);
        if (call.arrays[DENTROPY]) buffers.dentropy[slot * num_rows + i] = of_row(DENTROPY);
        if (call.arrays[DMAX]) buffers.dmax[slot * num_rows + i] = of_row(DMAX);
    }
}

// Whether any lane has a large lse.
template <class T> inline bool any_large(Vector<T> lse) {
    const Vector<T> size = size_of_each<T>(lse), most = splat(std::numeric_limits<T>::max());
    return any_above<T>(size > most ? Vector<T>{} : size, std::nextafter(T(LARGE_LSE), T(0)));
}

// Finds the sums of those of a vector of queries whose lse is large.
template <class T>
NOINLINE void find_row_sums(Work &work, const Sight<T> &sight, Keys keys, const Member<T> *members, int64_t count,
                            int64_t first, const T *lse, const T *s, int64_t stride, RowSum<T> *found) {
    const Call &call = work.call;
    const Scaling<T> scaling(call);
    Vector<T> most = splat(-T(__builtin_inf())), sum = {};
    for (int64_t j = keys.first; j < keys.stop; ++j) most = larger<T>(sight.hide(load(s + j * stride), j), most);
    const Vector<T> row_max = most == -T(__builtin_inf()) ? Vector<T>{} : most;
    for (int64_t j = keys.first; j < keys.stop; ++j)
        sum += exp2<T>(sight.hide(load(s + j * stride), j) - row_max, splat(scaling.factor));
    const int64_t num_rows = members[0].entry->seqlen_q;
    for (int64_t x = 0; x < LANES<T>; ++x) {
        found[x] = NO_ROW_SUM<T>;
        if (first + x >= count * num_rows) continue;
        const Member<T> &member = members[(first + x) / num_rows];
        if (is_large(lse[x])) found[x] = explained_sum(call, scaling, member.head, lse[x], most[x], double(sum[x]));
        if (work.row_sums) row_sum<T>(work, *member.entry, Row{member.head, (first + x) % num_rows}) = found[x];
    }
}

// The first key of each row of a vector of queries that has its largest score, or -1.
template <class T> inline Vector<T> first_maxima(const Sight<T> &sight, Keys keys, const T *s, int64_t stride) {
    Vector<T> most = splat(-T(__builtin_inf())), at = splat(T(-1));
    for (int64_t j = keys.first; j < keys.stop; ++j) {
        const Vector<T> score = sight.hide(load(s + j * stride), j);
        at = score > most ? splat(T(j)) : at;
        most = score > most ? score : most;
    }
    return at;
}

// What a vector of queries knows of all of its keys: sums of rows and gradients with respect to entropies are null
// where there are none.
template <class T> struct NumbersOfRows {
    const T *lse, *delta, *dentropy;
    const RowSum<T> *sums;
};

// Replaces scores s by weights, and the gradients ds of weights by those of q k^T.
template <class T>
NOINLINE void differentiate(const Call &call, const Sight<T> &sight, Keys keys, const NumbersOfRows<T> &rows, T *s,
                            T *ds, int64_t stride) {
    const T *lse = rows.lse, *dentropy = rows.dentropy;
    const RowSum<T> *sums = rows.sums;
    const Scaling<T> scaling(call);
    const Vector<T> scale = splat(T(call.scale)), deltas = load(rows.delta);
    auto recompute = [&](auto weight_of, auto has_entropy) {
        Vector<T> natural = scale, from = {}, less = load(lse), of_entropy = {};
        if (has_entropy) {
            of_entropy = load(dentropy);
            for (int x = 0; x < LANES<T> && sums; ++x) {
                const LogOfWeight<T> log_of_weight(scaling, lse[x], sums[x]);
                from[x] = log_of_weight.from[x], less[x] = log_of_weight.less[x];
            }
        }
        const Vector<T> least = splat(T(Vectors<T>::LOWEST * 0.6931471805599453));
        for (int64_t j = keys.first; j < keys.stop; ++j) {
            const Vector<T> score = sight.hide(load(s + j * stride), j), weight = weight_of(score);
            Vector<T> gradient = load(ds + j * stride) - deltas;
            if (has_entropy) gradient -= of_entropy * larger<T>((score - from) * natural - less, least);
            store(s + j * stride, weight);
            store(ds + j * stride, weight * gradient * scale);
        }
    };
    const Vector<T> of_rows = load(lse), log2_e = splat(T(1.4426950408889634));
    auto weight_by_lse = [&](Vector<T> score) { return exp2<T>(score * scale - of_rows, log2_e); };
    if (!sums)
        return dentropy ? recompute(weight_by_lse, std::true_type()) : recompute(weight_by_lse, std::false_type());
    Vector<T> row_max, inverse;
    for (int x = 0; x < LANES<T>; ++x) row_max[x] = sums[x].row_max, inverse[x] = sums[x].inverse;
    const Vector<T> factor = splat(scaling.factor);
    auto weight_by_sum = [&](Vector<T> score) {
        const Vector<T> weight = exp2<T>(score - row_max, factor) * inverse, by_lse = weight_by_lse(score);
        return inverse < Vector<T>{} ? by_lse : weight;
    };
    recompute(weight_by_sum, dentropy != nullptr);
}

// Clears weights s and gradients ds of those of a vector of queries whose lse is -inf: they attend to no key, whatever
// their scores are.
template <class T> inline void clear_rows_without_keys(Keys keys, Vector<T> lse, T *s, T *ds, int64_t stride) {
    if (!any_above<T>(-lse, std::numeric_limits<T>::max())) return;
    const auto sees_none = lse == splat(-T(__builtin_inf()));
    for (int64_t j = keys.first; j < keys.stop; ++j) {
        store(s + j * stride, sees_none ? Vector<T>{} : load(s + j * stride));
        store(ds + j * stride, sees_none ? Vector<T>{} : load(ds + j * stride));
    }
}

// Computes dq of the queries from `begin` to `end` of a head, and adds their partial sums to dk and dv of the keys that
// they attend to. `p` and `ds` begin with the first of these queries and keys.
template <class T>
NOINLINE void add_gradients(const Call &call, SmallBuffers<T> &buffers, const Member<T> &member, int64_t begin,
                            int64_t end, Keys keys, const T *p, const T *ds) {
    const Entry &entry = *member.entry;
    const int64_t count = keys.stop - keys.first, length = end - begin, stride = buffers.stride;
    const int64_t dim = buffers.q.padded, dim_v = buffers.v.padded, group = call.num_heads / call.num_heads_kv;
    bool adds = member.head % group > 0 || begin > 0;
    const Rows<T> dk = buffers.dk.rows(call, entry, member.head_kv, 0);
    const Rows<T> dv = buffers.dv.rows(call, entry, member.head_kv, 0);
    if (!adds && count < entry.seqlen_k) {  // these queries do not attend to all keys
        if (is_wanted(call, DK)) clear(dk.data, entry.seqlen_k * dk.stride);
        if (is_wanted(call, DV)) clear(dv.data, entry.seqlen_k * dv.stride);
        adds = true;
    }
    if (is_wanted(call, DV)) {
        const Rows<const T> dout = member.dout.from(begin);
        small_product<T, Order::ROWS>(count, dim_v, length, p, stride, dout.data, dout.stride, dv.from(keys.first).data,
                                      dv.stride, adds);
    }
    if (is_wanted(call, DK)) {
        const Rows<const T> q = member.q.from(begin);
        small_product<T, Order::ROWS>(count, dim, length, ds, stride, q.data, q.stride, dk.from(keys.first).data,
                                      dk.stride, adds);
    }
    if (is_wanted(call, DQ)) {
        const Rows<T> dq = buffers.dq.rows(call, entry, member.head, 0);
        const Rows<const T> k = member.k.from(keys.first);
        small_product<T, Order::COLUMNS>(length, dim, count, ds, stride, k.data, k.stride, dq.from(begin).data,
                                         dq.stride, false);
    }
    if (end < entry.seqlen_q) return;
    if (is_wanted(call, DQ)) buffers.dq.write_padded(call, entry, member.head, entry.seqlen_q);
    if (member.head % group < group - 1) return;
    if (is_wanted(call, DK)) buffers.dk.write_padded(call, entry, member.head_kv, entry.seqlen_k);
    if (is_wanted(call, DV)) buffers.dv.write_padded(call, entry, member.head_kv, entry.seqlen_k);
}

template <class T> void backward_heads(Work &work, SmallBuffers<T> &buffers, const Member<T> *members, int64_t count) {
    const Call &call = work.call;
    const Entry &entry = *members[0].entry;  // as those of the other members
    const int64_t num_rows = entry.seqlen_q, stride = buffers.stride;
    RowProducts<T> scores[LANES<T>], weights[LANES<T>];
    for (int64_t x = 0; x < count; ++x) {
        const Member<T> &member = members[x];
        load_row_numbers(call, buffers, member, x);
        scores[x].start(member.q, member.queries, member.k, entry.seqlen_k, buffers.q.padded,
                        buffers.columns_of_q + x * num_rows, stride);
        weights[x].start(member.dout, member.queries, member.v, entry.seqlen_k, buffers.v.padded,
                         buffers.columns_of_dout + x * num_rows, stride);
    }
    for_queries(call, entry, members[0].queries, [&](int64_t begin, int64_t end, Keys keys) {
        for (int64_t x = 0; x < count; ++x) {
            scores[x].compute(begin, end, keys.first, keys.stop, buffers.s + x * num_rows);
            weights[x].compute(begin, end, keys.first, keys.stop, buffers.ds + x * num_rows);
        }
        for_vectors<T>(call, buffers, entry, count, begin, end, [&](int64_t x, const Sight<T> &sight) {
            const T *lse = buffers.lse + x;
            const bool has_sums = any_large<T>(load(lse));
            RowSum<T> sums[LANES<T>];
            if (has_sums) find_row_sums(work, sight, keys, members, count, x, lse, buffers.s + x, stride, sums);
            const Vector<T> at = call.arrays[DMAX] ? first_maxima<T>(sight, keys, buffers.s + x, stride) : splat(T(-1));
            const NumbersOfRows<T> rows = {lse, buffers.delta + x,
                                           call.arrays[DENTROPY] ? buffers.dentropy + x : nullptr,
                                           has_sums ? sums : nullptr};
            differentiate<T>(call, sight, keys, rows, buffers.s + x, buffers.ds + x, stride);
            clear_rows_without_keys<T>(keys, load(lse), buffers.s + x, buffers.ds + x, stride);
            for (int lane = 0; lane < LANES<T> && call.arrays[DMAX]; ++lane)
                if (at[lane] >= 0)
                    buffers.ds[int64_t(at[lane]) * stride + x + lane] += buffers.dmax[x + lane] * T(call.scale);
        });
        for (int64_t x = 0; x < count; ++x) {
            const int64_t at = keys.first * stride + x * num_rows + begin;
            add_gradients(call, buffers, members[x], begin, end, keys, buffers.s + at, buffers.ds + at);
        }
    });
}

// ---- jobs -----------------------------------------------------------------------------------------------------------

// The work of a job: some heads of q or, where heads are few, a slice of the queries of one head.
struct SmallJobs {
    int64_t heads, queries, slices = 1;

    // A job of the backward pass has all heads that share keys, because gradients of keys are sums over their queries.
    SmallJobs(const Call &call, int64_t lanes) : queries(call.seqlen_q) {
        const double products = call.is_backward ? 5 : 2, dim = larger(call.head_dim, call.head_dim_v);
        const double of_head = overhead_of_head_ns(call) + 0.02 * products * call.seqlen_q * call.seqlen_k * dim;
        const int64_t all = call.batch * call.num_heads,
                      shared = call.is_backward ? call.num_heads / call.num_heads_kv : 1;
        const double of_all = of_head * all / ENOUGH_JOBS;
        const double of_job = of_all > SMALL_JOB_NS ? SMALL_JOB_NS : of_all < LEAST_JOB_NS ? LEAST_JOB_NS : of_all;
        heads = shared * larger(1, int64_t(of_job / (of_head * shared)));
        if (call.is_backward || all >= ENOUGH_JOBS || of_head <= of_job) return;
        queries =
            smaller(round_up(ceil_div(call.seqlen_q, int64_t(std::ceil(of_head / of_job))), lanes), call.seqlen_q);
        slices = ceil_div(call.seqlen_q, queries);
    }

    int64_t count(const Call &call) const { return ceil_div(call.batch * call.num_heads, heads) * slices; }
};

template <class T> void small_job(Work &work, char *memory, int64_t job) {
    const Call &call = work.call;
    SmallBuffers<T> buffers(call, memory);
    const SmallJobs jobs(call, LANES<T>);
    const int64_t group = call.num_heads / call.num_heads_kv, at_once = heads_at_once<T>(call);
    const int64_t begin = job / jobs.slices * jobs.heads,
                  stop = smaller(begin + jobs.heads, call.batch * call.num_heads);
    const int64_t first_query = job % jobs.slices * jobs.queries;
    const Range queries = {first_query, smaller(first_query + jobs.queries, call.seqlen_q)};
    Member<T> members[LANES<T>];
    int64_t e = begin / call.num_heads, head = begin % call.num_heads, head_kv = head / group;
    for (int64_t first = begin; first < stop; first += at_once) {
        const int64_t count = smaller(at_once, stop - first);
        for (int64_t x = 0; x < count; ++x) {
            Member<T> &member = members[x];
            const Entry &entry = work.entries[e];
            const Keys keys = {0, entry.seqlen_k};
            member.entry = &entry;
            member.head = head;
            member.head_kv = head_kv;
            member.queries = queries;
            member.q = buffers.q.read(call, entry, member.head, x, queries);
            member.k = buffers.k.read(call, entry, member.head_kv, x, keys);
            member.v = buffers.v.read(call, entry, member.head_kv, x, keys);
            if (call.is_backward) member.dout = buffers.dout.read(call, entry, member.head, x, queries);
            if (++head == (head_kv + 1) * group) ++head_kv;
            if (head == call.num_heads) ++e, head = head_kv = 0;
        }
        if (call.is_backward) {
            backward_heads(work, buffers, members, count);
        } else {
            forward_heads(call, buffers, members, count);
        }
    }
}

template <class T> bool prepare_small(Work &work) {
    const Call &call = work.call;
    if (!make_entries(work)) return false;
    work.scratch_bytes = SmallBuffers<T>(call, nullptr).scratch.used;
    work.add_phase(small_job<T>, SmallJobs(call, LANES<T>).count(call));
    if (is_wanted(call, DSINKS)) {
        if (!allocate_row_sums<T>(work)) return false;
        choose_tiles<T>(work, BACKWARD_ROWS, USUAL_KEYS);
        work.scratch_bytes = larger(work.scratch_bytes, BackwardBuffers<T>(work, nullptr).scratch.used);
        work.add_phase(sinks_job<T>, call.num_heads);
    }
    return true;
}

}  // namespace
