// Small heads, whole: all scores of a head at once, without tiles, blocks or a running maximum.
//
// Scores are kept as s[key][query], so that a vector holds one key and many queries: maxima, sums, logarithms and
// weights of many rows are computed side by side, and no lanes are summed up. Operands are read, and results written,
// where they lie. A job takes many heads: with a few scores each, dispatch would take longer than arithmetic.
#pragma once

#include "backward.h"

namespace {

constexpr long SMALL_LENGTH = 128;     // queries and keys of a small head at most
constexpr long SMALL_DIM = 256;        // and its dimensions
constexpr long MANY_ROWS = 5;          // queries that are worth a vector, where there are more keys than SINGLE_KEYS
constexpr long SINGLE_KEYS = 16;
constexpr double SMALL_JOB_NS = 30e3;  // the work of a job, about
constexpr long COLUMNS_AT_ONCE = 64;   // queries that are computed at a time where a window cuts their keys

inline bool is_small(const Call &call) {
    constexpr Array NOT_SERVED[] = {BIAS, MASK, BLOCK_MASK, BLOCK_TABLE, ALIBI_SLOPES, CU_SEQLENS_Q, DSCALE};
    for (Array array : NOT_SERVED)
        if (call.arrays[array]) return false;
    return !call.softcap && call.scale > 0 && !call.dropout_steps && call.num_heads && call.num_heads_kv &&
           larger(call.seqlen_q, call.seqlen_k) <= SMALL_LENGTH && larger(call.head_dim, call.head_dim_v) <= SMALL_DIM &&
           (call.seqlen_q >= MANY_ROWS || call.seqlen_k <= SINGLE_KEYS);
}

// Rows of one head in memory.
template <class T> struct Rows {
    T *data;
    long stride;
};

// An operand or a result of a small head. Its rows are used where they lie if they are neighbours and whole vectors of
// the dtype of the computation, and are copied otherwise.
template <class T> struct SmallArray {
    Array array;
    long dim, padded;
    bool lies_well;
    T *copy = nullptr;

    SmallArray(const Call &call, Scratch &scratch, Array array, long length, long dim)
        : array(array), dim(dim), padded(round_up(dim, LANES<T>)) {
        lies_well = has_whole_rows<T>(call, array, dim) && (length == 1 || call.strides[array][2] == dim);
        if (call.arrays[array] && !lies_well) copy = scratch.template take<T>(length * padded);
    }

    T *where(const Call &call, const Entry &entry, long head) const {
        return (T *)address(call, array, sizeof(T), entry.batch, head);
    }

    Rows<const T> read(const Call &call, const Entry &entry, long head, long count) const {
        if (lies_well) return {where(call, entry, head), dim};
        for (long i = 0; i < count; ++i) {
            load_row(row(call, entry, head, i), call.dtype, call.strides[array][3], dim, copy + i * padded);
            clear(copy + i * padded + dim, padded - dim);
        }
        return {copy, padded};
    }

    Rows<T> room(const Call &call, const Entry &entry, long head) const {
        return lies_well ? Rows<T>{where(call, entry, head), dim} : Rows<T>{copy, padded};
    }

    // Puts rows that were computed in the room of a head in their places, and zeros behind them up to `length`.
    void write(const Call &call, const Entry &entry, long head, long count, long length) const {
        const Rows<T> rows = room(call, entry, head);
        clear(rows.data + count * rows.stride, (length - count) * rows.stride);
        if (lies_well) return;
        for (long i = 0; i < length; ++i)
            store_row(copy + i * padded, call.dtype, call.strides[array][3], dim, row(call, entry, head, i));
    }

   private:
    char *row(const Call &call, const Entry &entry, long head, long i) const {
        return address(call, array, size_of(call.dtype), entry.batch, head, i);
    }
};

// Arrays over the rows of a head, and the scores of a head, of which neighbours are queries.
template <class T> struct SmallBuffers {
    Scratch scratch;
    SmallArray<T> q, k, v, out, dout, dq, dk, dv;
    long columns, stride;  // of scores: queries, rounded up to whole vectors, and how far apart keys are
    T *columns_of_q, *columns_of_dout, *s, *ds, *lse, *delta;

    SmallBuffers(const Call &call, char *memory)
        : scratch{memory},
          q(call, scratch, Q, call.seqlen_q, call.head_dim),
          k(call, scratch, K, call.seqlen_k, call.head_dim),
          v(call, scratch, V, call.seqlen_k, call.head_dim_v),
          out(call, scratch, OUT, call.seqlen_q, call.head_dim_v),
          dout(call, scratch, DOUT, call.seqlen_q, call.head_dim_v),
          dq(call, scratch, DQ, call.seqlen_q, call.head_dim),
          dk(call, scratch, DK, call.seqlen_k, call.head_dim),
          dv(call, scratch, DV, call.seqlen_k, call.head_dim_v) {
        const long length = round_up(larger(call.seqlen_k, 1), LANES<T>);
        columns = round_up(larger(call.seqlen_q, 1), LANES<T>);
        stride = columns + (columns > LANES<T> ? LANES<T> : 0);  // no power of two, so that keys share no sets of the cache
        columns_of_q = scratch.template take<T>(q.padded * stride);
        columns_of_dout = scratch.template take<T>(call.is_backward ? v.padded * stride : 0);
        s = scratch.template take<T>(length * stride);
        ds = scratch.template take<T>(call.is_backward ? length * stride : 0);
        lse = scratch.template take<T>(columns);
        delta = scratch.template take<T>(columns);
    }
};

// ---- products of rows with rows --------------------------------------------------------------------------------------

// s[j][i] = dot(b[j], a[i]), by dot products; writes up to whole vectors of queries and of keys.
template <class T>
inline void dot_products_by_columns(Rows<const T> a, long num_rows, Rows<const T> b, long num_keys, long dim, T *s,
                                    long stride) {
    constexpr int R = LANES<T> < 4 ? LANES<T> : 4, KEYS = LANES<T> / R;
    for (long i = 0; i < num_rows; i += R) {
        const T *rows[R];
        for (int r = 0; r < R; ++r) rows[r] = a.data + smaller(i + r, num_rows - 1) * a.stride;
        for (long j = 0; j < num_keys; j += KEYS) {
            const T *keys[KEYS];
            for (int n = 0; n < KEYS; ++n) keys[n] = b.data + smaller(j + n, num_keys - 1) * b.stride;
            Vector<T> sums[LANES<T>] = {};
            for (long d = 0; d < dim; d += LANES<T>) {
                Vector<T> x[R];
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) x[r] = load(rows[r] + d);
#pragma GCC unroll 4
                for (int n = 0; n < KEYS; ++n) {
                    const Vector<T> y = load(keys[n] + d);
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) sums[n * R + r] += x[r] * y;
                }
            }
            T lanes[LANES<T>];
            store(lanes, sums_of_lanes<T>(sums));
            for (int n = 0; n < KEYS; ++n) memcpy(s + (j + n) * stride + i, lanes + n * R, R * sizeof(T));
        }
    }
}

// The same by columns of a, which are copied first; it takes about as long as these numbers say.
inline bool prefers_dot_products(long num_rows, long num_keys, long vectors, long lanes) {
    const long columns = ceil_div(num_rows, lanes);
    return num_rows * num_keys * (vectors + 4) < columns * vectors * (6 + num_keys) * lanes;
}

// s[j][i] = dot(b[j], a[i]) for keys from `first` to `stop` and queries from `begin` to `end`.
template <class T> struct RowProducts {
    Rows<const T> a, b;
    long num_rows, dim;
    bool are_dots;
    T *columns;
    long stride;

    RowProducts(Rows<const T> a, long num_rows, Rows<const T> b, long num_keys, long dim, T *columns, long stride)
        : a(a), b(b), num_rows(num_rows), dim(dim), columns(columns), stride(stride) {
        are_dots = prefers_dot_products(num_rows, num_keys, dim / LANES<T>, LANES<T>);
        if (!are_dots) transpose(a.data, a.stride, num_rows, dim, columns, stride);
    }

    void compute(long begin, long end, long first, long stop, T *s) const {
        T *to = s + first * stride + begin;
        const Rows<const T> keys = {b.data + first * b.stride, b.stride};
        if (are_dots) {
            dot_products_by_columns<T>({a.data + begin * a.stride, a.stride}, end - begin, keys, stop - first, dim, to,
                                       stride);
        } else {
            product_of_rows(stop - first, round_up(end - begin, LANES<T>), dim, keys.data, keys.stride, columns + begin,
                            stride, to, stride);
        }
    }
};

// ---- what is visible -------------------------------------------------------------------------------------------------

// Which of the keys from `first` to `stop` some neighbouring queries see, as many as a vector has lanes.
template <class T> struct Sight {
    Keys of_all;
    Vector<T> from, to;
    Sight(const Call &call, const Entry &entry, long i) {
        of_all = seen_by_all(call, entry, i, i + LANES<T> - 1);
        const Vector<T> queries = iota<T>() + splat(T(i + entry.diagonal));
        from = queries - splat(T(call.window_left));
        to = queries + splat(T(call.window_right));
    }
    // A score, or -inf in the place of a hidden one.
    Vector<T> hide(Vector<T> score, long j) const {
        if (j >= of_all.first && j < of_all.stop) return score;
        const Vector<T> key = splat(T(j)), hidden = splat(T(-__builtin_inf()));
        score = key < from ? hidden : score;
        return key > to ? hidden : score;
    }
};

inline bool has_window(const Call &call) { return call.window_left < NO_BOUND || call.window_right < NO_BOUND; }

// Calls body(begin, end, keys) for queries of a head, and the keys that they see.
template <class F> inline void for_columns(const Call &call, const Entry &entry, F body) {
    const long step = has_window(call) ? COLUMNS_AT_ONCE : SMALL_LENGTH;
    for (long i = 0; i < entry.seqlen_q; i += step) {
        const long end = smaller(i + step, entry.seqlen_q);
        body(i, end, seen_by(call, entry, i, end - 1));
    }
}

// ---- forward ---------------------------------------------------------------------------------------------------------

// Scores of as many queries as there are lanes become weights, whose sums are 1. Gives their lse.
template <class T>
inline Vector<T> weigh(const Scaling<T> &scaling, const Sight<T> &sight, Keys keys, T *s, long stride,
                       const T *sink) {
    const T infinity = T(__builtin_inf());
    Vector<T> most = splat(-infinity);
    for (long j = keys.first; j < keys.stop; ++j) {
        const Vector<T> score = sight.hide(load(s + j * stride), j);
        store(s + j * stride, score);
        most = larger<T>(score, most);
    }
    // A row that sees no key has scores of -inf, and weights of 0.
    const Vector<T> shift = most == -infinity ? Vector<T>{} : most, factor = splat(scaling.factor);
    Vector<T> sum = {};
    for (long j = keys.first; j < keys.stop; ++j) {
        const Vector<T> weight = exp2<T>((load(s + j * stride) - shift) * factor);
        store(s + j * stride, weight);
        sum += weight;
    }
    const Vector<T> one = splat(T(1));
    Vector<T> lse = most * splat(T(scaling.natural)) + log<T>(sum), shrinks = one / (sum == T(0) ? one : sum);
    lse = sum == T(0) ? splat(-infinity) : lse;
    if (sink) {
        for (int i = 0; i < LANES<T>; ++i) {
            const double top = most[i] * scaling.natural, joined = larger(top, double(*sink));
            const double shift = joined == -__builtin_inf() ? 0 : joined, factor = std::exp(top - shift);
            const double total = sum[i] * factor + std::exp(*sink - shift);
            lse[i] = T(shift + std::log(total));
            shrinks[i] = T(factor / (total == 0 ? 1 : total));
        }
    }
    for (long j = keys.first; j < keys.stop; ++j) store(s + j * stride, load(s + j * stride) * shrinks);
    return lse;
}

template <class T>
void forward_head(const Call &call, const Scaling<T> &scaling, SmallBuffers<T> &buffers, const Entry &entry, long head,
                  Rows<const T> k, Rows<const T> v) {
    const long num_rows = entry.seqlen_q, stride = buffers.stride, dim_v = buffers.v.padded;
    const Rows<const T> q = buffers.q.read(call, entry, head, num_rows);
    const Rows<T> out = buffers.out.room(call, entry, head);
    const RowProducts<T> products(q, num_rows, k, entry.seqlen_k, buffers.q.padded, buffers.columns_of_q, stride);
    const T *sink = call.arrays[SINKS] ? &number<T>(call, SINKS, 0, head) : nullptr;
    for_columns(call, entry, [&](long begin, long end, Keys keys) {
        products.compute(begin, end, keys.first, keys.stop, buffers.s);
        for (long i = begin; i < end; i += LANES<T>)
            store(buffers.lse + i, weigh<T>(scaling, Sight<T>(call, entry, i), keys, buffers.s + i, stride, sink));
        product<T, Order::COLUMNS>(end - begin, dim_v, keys.stop - keys.first, buffers.s + keys.first * stride + begin,
                                   stride, v.data + keys.first * v.stride, v.stride, out.data + begin * out.stride,
                                   out.stride, false);
    });
    buffers.out.write(call, entry, head, num_rows, num_rows);
    for (long i = 0; i < num_rows; ++i) number<T>(call, LSE, entry.batch, head, i) = buffers.lse[i];
}

// ---- backward --------------------------------------------------------------------------------------------------------

// lse of a head, with inf where a row sees no key, and delta: rowsum(dout o out) - dlse.
template <class T>
inline void load_row_numbers(const Call &call, SmallBuffers<T> &buffers, const Entry &entry, long head,
                             Rows<const T> dout) {
    const Rows<const T> out = buffers.out.read(call, entry, head, entry.seqlen_q);
    for (long i = 0; i < entry.seqlen_q; i += LANES<T>) {
        Vector<T> sums[LANES<T>] = {};
        for (long r = 0; r < smaller(LANES<T>, entry.seqlen_q - i); ++r)
            for (long d = 0; d < buffers.v.padded; d += LANES<T>)
                sums[r] += load(dout.data + (i + r) * dout.stride + d) * load(out.data + (i + r) * out.stride + d);
        store(buffers.delta + i, sums_of_lanes<T>(sums));
    }
    for (long i = 0; i < entry.seqlen_q; ++i) {
        const T lse = number<T>(call, LSE, entry.batch, head, i);
        const bool sees_any = lse != T(-__builtin_inf());
        buffers.lse[i] = sees_any ? lse : -lse;
        if (call.arrays[DLSE] && sees_any) buffers.delta[i] -= number<T>(call, DLSE, entry.batch, head, i);
    }
}

// Scores s become weights, and the gradients ds of weights those of q k^T.
template <class T>
inline void differentiate(const Call &call, const Sight<T> &sight, Keys keys, const T *lse, const T *delta, T *s, T *ds,
                          long stride) {
    const Vector<T> scale = splat(T(call.scale)), log2_e = splat(T(1.4426950408889634));
    const Vector<T> of_rows = load(lse), deltas = load(delta);
    for (long j = keys.first; j < keys.stop; ++j) {
        const Vector<T> score = sight.hide(load(s + j * stride), j);
        const Vector<T> weight = exp2<T>((score * scale - of_rows) * log2_e);
        store(s + j * stride, weight);
        store(ds + j * stride, weight * (load(ds + j * stride) - deltas) * scale);
    }
}

// dq of a head of q; adds to dk and dv of its keys, unless it is the first of the heads that share them.
template <class T>
void backward_head(const Call &call, SmallBuffers<T> &buffers, const Entry &entry, long head, long head_kv,
                   Rows<const T> k, Rows<const T> v, bool adds) {
    const long num_rows = entry.seqlen_q, num_keys = entry.seqlen_k, stride = buffers.stride;
    const long dim = buffers.q.padded, dim_v = buffers.v.padded;
    const Rows<const T> q = buffers.q.read(call, entry, head, num_rows);
    const Rows<const T> dout = buffers.dout.read(call, entry, head, num_rows);
    load_row_numbers(call, buffers, entry, head, dout);
    const Rows<T> dq = buffers.dq.room(call, entry, head);
    const Rows<T> dk = buffers.dk.room(call, entry, head_kv), dv = buffers.dv.room(call, entry, head_kv);
    const bool wants_dq = is_wanted(call, DQ), wants_dk = is_wanted(call, DK), wants_dv = is_wanted(call, DV);
    const RowProducts<T> scores(q, num_rows, k, num_keys, dim, buffers.columns_of_q, stride);
    const RowProducts<T> weights(dout, num_rows, v, num_keys, dim_v, buffers.columns_of_dout, stride);
    if (!adds && has_window(call)) {  // not every query sees every key
        if (wants_dk) clear(dk.data, num_keys * dk.stride);
        if (wants_dv) clear(dv.data, num_keys * dv.stride);
        adds = true;
    }
    for_columns(call, entry, [&](long begin, long end, Keys keys) {
        const long first = keys.first, count = keys.stop - first, length = end - begin;
        scores.compute(begin, end, first, keys.stop, buffers.s);
        weights.compute(begin, end, first, keys.stop, buffers.ds);
        for (long i = begin; i < end; i += LANES<T>)
            differentiate<T>(call, Sight<T>(call, entry, i), keys, buffers.lse + i, buffers.delta + i, buffers.s + i,
                             buffers.ds + i, stride);
        const T *p = buffers.s + first * stride + begin, *ds = buffers.ds + first * stride + begin;
        if (wants_dv)
            product<T, Order::ROWS>(count, dim_v, length, p, stride, dout.data + begin * dout.stride, dout.stride,
                                    dv.data + first * dv.stride, dv.stride, adds);
        if (wants_dk)
            product<T, Order::ROWS>(count, dim, length, ds, stride, q.data + begin * q.stride, q.stride,
                                    dk.data + first * dk.stride, dk.stride, adds);
        if (wants_dq)
            product<T, Order::COLUMNS>(length, dim, count, ds, stride, k.data + first * k.stride, k.stride,
                                       dq.data + begin * dq.stride, dq.stride, false);
    });
    if (wants_dq) buffers.dq.write(call, entry, head, num_rows, num_rows);
}

// ---- jobs ------------------------------------------------------------------------------------------------------------

// Heads that share keys, in all batch entries.
inline long count_groups(const Call &call) { return call.batch * call.num_heads_kv; }

template <class T> inline long groups_per_job(const Call &call) {
    const double rows = double(call.num_heads / call.num_heads_kv * call.seqlen_q), products = call.is_backward ? 5 : 2;
    const double of_group = 50 + rows * (5 + 0.02 * products * call.seqlen_k * larger(call.head_dim, call.head_dim_v));
    return larger(1, long(SMALL_JOB_NS / of_group));
}

template <class T> void small_job(Work &work, char *memory, long job) {
    const Call &call = work.call;
    const Scaling<T> scaling(call);
    SmallBuffers<T> buffers(call, memory);
    const long group = call.num_heads / call.num_heads_kv, count = groups_per_job<T>(call);
    for (long x = job * count; x < smaller((job + 1) * count, count_groups(call)); ++x) {
        const Entry &entry = work.entries[x / call.num_heads_kv];
        const long head_kv = x % call.num_heads_kv;
        const Rows<const T> k = buffers.k.read(call, entry, head_kv, entry.seqlen_k);
        const Rows<const T> v = buffers.v.read(call, entry, head_kv, entry.seqlen_k);
        for (long member = 0; member < group; ++member) {
            const long head = head_kv * group + member;
            if (call.is_backward) {
                backward_head(call, buffers, entry, head, head_kv, k, v, member > 0);
            } else {
                forward_head(call, scaling, buffers, entry, head, k, v);
            }
        }
        if (is_wanted(call, DK)) buffers.dk.write(call, entry, head_kv, entry.seqlen_k, call.seqlen_k);
        if (is_wanted(call, DV)) buffers.dv.write(call, entry, head_kv, entry.seqlen_k, call.seqlen_k);
    }
}

template <class T> bool prepare_small(Work &work) {
    const Call &call = work.call;
    if (!make_entries(work)) return false;
    work.scratch_bytes = SmallBuffers<T>(call, nullptr).scratch.used;
    work.add_phase(small_job<T>, ceil_div(count_groups(call), groups_per_job<T>(call)));
    if (is_wanted(call, DSINKS)) {
        choose_tiles<T>(work, BACKWARD_ROWS);
        work.scratch_bytes = larger(work.scratch_bytes, BackwardBuffers<T>(work, nullptr).scratch.used);
        work.add_phase(sinks_job<T>, call.num_heads);
    }
    return true;
}

}  // namespace
