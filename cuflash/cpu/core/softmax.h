// Rows of the forward pass: the buffers that a job has for them, and how their scores become weights.
//
// The row max of a row is near its largest score so far. It is raised only when that score has risen by much, so sums
// are rescaled only a few times in all.
#pragma once

#include "load_bf16x2.h"

namespace {

constexpr int64_t STEP_ROWS = 4;  // rows between two steps of bf16x2 products

template <class T> struct ForwardBuffers {
    Scratch scratch;
    Sizes<T> sizes;
    int64_t keys_stride;
    T *q, *o, *row_max, *l, *largest, *moment, *s, *p, *bias, *rows, *k_t, *v, *held;
    unsigned char *kept, *is_held;
    int64_t *head;  // whose tiles are held

    NOINLINE ForwardBuffers(const Work &work, char *memory)
        : scratch{memory}, sizes(work.call), keys_stride(keys_stride_of<T>(work)) {
        head = scratch.template take<int64_t>(work.packed.are_held);  // comes first: `compute` clears it
        is_held = scratch.template take<unsigned char>(work.packed.are_held ? work.packed.tiles_per_head : 0);
        held = scratch.template take<T>(
            work.packed.are_held ? work.packed.tiles_per_head * work.packed.elements_per_tile : 0);
        const int64_t rows_of_q = work.rows_per_block, keys = work.keys_per_tile;
        // Numbers in two terms take as much space as bf16x2 as they do whole, rounded up to whole vectors of each term.
        const int64_t terms = max_terms<T>(work.call),
                      dim = larger(sizes.dim, terms * bf16x2_stride<T>(work.call.head_dim));
        q = scratch.template take<T>(rows_of_q * dim);
        o = scratch.template take<T>(rows_of_q * sizes.dim_v);
        row_max = scratch.template take<T>(rows_of_q);
        l = scratch.template take<T>(rows_of_q * LANES<T>);
        const int64_t reduced = has_row_reductions(work.call) ? rows_of_q * LANES<T> : 0;
        largest = scratch.template take<T>(has_row_reductions(work.call) ? rows_of_q : 0);
        moment = scratch.template take<T>(reduced);
        // With bf16x2, there are scores and weights of two groups of rows: one is multiplied during the softmax of the
        // other.
        s = scratch.template take<T>(larger((terms ? 2 : 1) * GROUP, WIDE_GROUP) * SCORES_STRIDE<T>);
        p = scratch.template take<T>(2 * terms * GROUP * KEYS_BF16X2_STRIDE);
        bias = scratch.template take<T>(work.call.arrays[BIAS] ? SUBGROUP * MAX_KEYS : 0);
        rows = scratch.template take<T>(keys * dim);
        k_t = scratch.template take<T>(dim * keys_stride);
        v = scratch.template take<T>(keys * sizes.dim_v);
        kept = scratch.template take<unsigned char>(work.call.dropout_steps ? rows_of_q * MAX_KEYS : 0);
    }
};

// Sets the row max to the largest lane, and rescales the sums so far. It is a function of its own because it is
// seldom called, and the loops that call it need all registers.
template <class T>
__attribute__((noinline)) void set_row_max(T factor, Vector<T> most, T &row_max, T *l, T *o, int64_t dim) {
    const T top = largest_lane<T>(most);
    if (row_max > T(-__builtin_inf())) {
        const Vector<T> shrinks = exp2<T>(splat(row_max - top), splat(factor));
        store(l, load(l) * shrinks);
        for (int64_t d = 0; d < dim; d += LANES<T>) store(o + d, load(o + d) * shrinks);
    }
    row_max = top;
}

// What a row has summed: l lane by lane, and o of `dim` numbers.
template <class T> struct RowSoFar {
    T &row_max, *l, *o;
    int64_t dim;
};

// Which weights of a row dropout keeps, and what it multiplies them by.
template <class T> struct Kept {
    const unsigned char *are_kept;
    T scale;
    Vector<T> of(Vector<T> p, int64_t j) const { return drop<T>(p * splat(scale), are_kept + j); }
};

// What the reductions of a row are made of: its largest score so far, and the sums, lane by lane, of p (s - largest)
// over its weights p. In place of `largest`, the row max would make these sums, and their rounding errors, larger,
// because it lags behind. Where no reductions are wanted, nothing is added up.
template <class T> struct RowReductions {
    static constexpr bool IS_WANTED = true;
    T &largest;
    T *moment;
};
struct NoReductions {
    static constexpr bool IS_WANTED = false;
};

// Sets the largest score, and moments relative to it. This comes before the row max changes.
template <class T> __attribute__((noinline)) void set_largest(Vector<T> most, const T *l, RowReductions<T> reductions) {
    const T top = largest_lane<T>(most), rises = reductions.largest - top;
    if (reductions.largest > T(-__builtin_inf()))
        store(reductions.moment, load(reductions.moment) + splat(rises) * load(l));
    reductions.largest = top;
}

// Rescales moments, before the row max is set to the largest score.
template <class T>
__attribute__((noinline)) void rescale_moment(T factor, Vector<T> most, T row_max, RowReductions<T> reductions) {
    if (row_max == T(-__builtin_inf())) return;
    const Vector<T> shrinks = exp2<T>(splat(row_max - largest_lane<T>(most)), splat(factor));
    store(reductions.moment, shrinks[0] > 0 ? load(reductions.moment) * shrinks : Vector<T>{});
}

// The largest number of each lane of a row of whole vectors. Even and odd vectors have maxima of their own: a single
// chain of maxima, each of which waits for the one before, would take as long as the exponentials of the row.
template <class T> inline Vector<T> largest_of_each_lane(const T *s, int64_t count) {
    constexpr int N = LANES<T>;
    Vector<T> even = load(s), odd = count > N ? load(s + N) : even;
    int64_t j = 2 * N;
#pragma GCC unroll 2
    for (; j + N < count; j += 2 * N) {
        even = larger<T>(even, load(s + j));
        odd = larger<T>(odd, load(s + j + N));
    }
    if (j < count) even = larger<T>(even, load(s + j));
    return larger<T>(even, odd);
}

// Raises the row max to the largest score, if that is above it by much. `most` has the largest score of each lane.
template <class T, class R>
inline void raise_row_max(const Scaling<T> &scaling, Vector<T> most, const RowSoFar<T> &row, R reductions) {
    if constexpr (R::IS_WANTED)
        if (any_above<T>(most, reductions.largest)) set_largest<T>(most, row.l, reductions);
    if (any_above<T>(most, row.row_max + scaling.rise)) {
        if constexpr (R::IS_WANTED) rescale_moment<T>(scaling.factor, most, row.row_max, reductions);
        set_row_max(scaling.factor, most, row.row_max, row.l, row.o, row.dim);
    }
}

// Neighbouring rows of a block, at most SUBGROUP, and their scores of a tile, in whole vectors. `minus` is what is
// subtracted from the scores of each: its row max, or 0 where all of its scores so far are -inf.
template <class T> struct Subgroup {
    const Scaling<T> &scaling;
    int64_t count, columns, dim;
    T *s, *row_max, *l, *o, *largest, *moment;
    const unsigned char *are_kept;
    T kept_scale;
    T minus[SUBGROUP];

    T *scores(int64_t i) const { return s + i * SCORES_STRIDE<T>; }
    RowSoFar<T> row(int64_t i) const { return {row_max[i], l + i * LANES<T>, o + i * dim, dim}; }
    Kept<T> kept(int64_t i) const { return {are_kept + i * MAX_KEYS, kept_scale}; }
    // Those of a row, or of none.
    auto reductions(std::true_type, int64_t i) const { return RowReductions<T>{largest[i], moment + i * LANES<T>}; }
    auto reductions(std::false_type, int64_t) const { return NoReductions(); }
};

// Raises the row max of all rows before their exponentials, which wait for nothing then.
template <class T, class Reduces> NOINLINE void raise_row_maxima(Reduces reduces, Subgroup<T> &rows) {
    for (int64_t i = 0; i < rows.count; ++i) {
        const RowSoFar<T> row = rows.row(i);
        const Vector<T> most = largest_of_each_lane(rows.scores(i), rows.columns);
        raise_row_max(rows.scaling, most, row, rows.reductions(reduces, i));
        rows.minus[i] = row.row_max == T(-__builtin_inf()) ? T(0) : row.row_max;
    }
}

// Scores become weights; their sums, before dropout, go to l.
template <class T, class Drops, class Reduces>
NOINLINE void exponentials(Drops drops, Reduces reduces, const Subgroup<T> &rows) {
    constexpr int N = LANES<T>;
    const int64_t columns = rows.columns, count = rows.count;
    const Exp2OfRow<T> power(rows.scaling.factor);
    T *s = rows.s, *l = rows.l;
    for (int64_t i = 0; i < count; ++i, s += SCORES_STRIDE<T>, l += N) {
        const Vector<T> minus = splat(rows.minus[i]);
        const auto reductions = rows.reductions(reduces, i);
        Vector<T> sum = {}, moment = {}, largest = {};
        if constexpr (Reduces::value) largest = splat(reductions.largest);
#pragma GCC unroll 4
        for (int64_t j = 0; j < columns; j += N) {
            const Vector<T> score = load(s + j), p = power(score - minus);
            store(s + j, drops ? rows.kept(i).of(p, j) : p);
            sum += p;
            if constexpr (Reduces::value) moment += p * larger<T>(score - largest, splat(rows.scaling.least));
        }
        store(l, load(l) + sum);
        if constexpr (Reduces::value) store(reductions.moment, load(reductions.moment) + moment);
    }
}

// The same of one of them, whose weights become bf16x2 of neighbours.
template <class Drops, class Reduces>
NOINLINE void exponentials_as_bf16x2(Drops drops, Reduces reduces, const Subgroup<float> &rows, int64_t i,
                                     float *packed) {
    constexpr int N = LANES<float>;
    const float *s = rows.scores(i);
    float *l = rows.row(i).l;
    const int64_t num_keys = rows.columns;
    const Kept<float> kept = rows.kept(i);
    const auto reductions = rows.reductions(reduces, i);
    const Vector<float> minus = splat(rows.minus[i]), factor = splat(rows.scaling.factor);
    const Vector<float> half = splat(0.5f);
    Vector<float> sums[2] = {}, moments[2] = {}, largest = {};
    if constexpr (Reduces::value) largest = splat(reductions.largest);
    auto weight_of = [&](int64_t j, int n) {
        const Vector<float> score = load(s + j), p = exp2_of_half_less((score - minus) * factor + half);
        sums[n] += p;
        if constexpr (Reduces::value) moments[n] += p * larger<float>(score - largest, splat(rows.scaling.least));
        return p;
    };
    auto kept_of = [&](Vector<float> p, int64_t j) { return drops ? kept.of(p, j) : p; };
    int64_t j = 0;
#pragma GCC unroll 4
    for (; j + 2 * N <= num_keys; j += 2 * N) {
        const Vector<float> p0 = weight_of(j, 0), p1 = weight_of(j + N, 1);
        store(packed + j / 2, round_to_bfloat16<float>(kept_of(p0, j), kept_of(p1, j + N)));
    }
    if (j < num_keys) {
        store_halves(packed + j / 2, round_to_bfloat16<float>(kept_of(weight_of(j, 0), j)));
    }
    store(l, load(l) + (sums[0] + sums[1]));
    if constexpr (Reduces::value) store(reductions.moment, load(reductions.moment) + (moments[0] + moments[1]));
}

// The sum l of the weights of a row with this row max, and how its sink joins it: the sink has the weight `of_sink`,
// and what keys have summed shrinks.
struct RowWithSink {
    double row_max, l, shrinks = 1, of_sink = 0;
    template <class T> T divisor() const { return l == 0 ? T(1) : T(l); }
};

template <class T> NOINLINE RowWithSink add_sink(const Call &call, Row row, double row_max, double l) {
    const double sink = number<T>(call, SINKS, 0, row.head), infinity = __builtin_inf();
    const double top = row_max > sink ? row_max : sink == -infinity ? 0 : sink;
    const double shrinks = exp_of(row_max - top), of_sink = exp_of(sink - top);
    return {top, l * shrinks + of_sink, shrinks, of_sink};
}
template <class T> inline RowWithSink with_sink(const Call &call, Row row, double row_max, double l) {
    return call.arrays[SINKS] ? add_sink<T>(call, row, row_max, l) : RowWithSink{row_max, l};
}

// Writes values_of(d), a vector, to a row of out, for every d.
template <class T, class F> inline void write_out(const Call &call, const Entry &entry, Row row, F values_of) {
    char *out = row_address(call, OUT, entry, row);
    const int64_t step = call.strides[OUT][3], bytes = step * size_of(call.dtype);
    if (call.dtype == OWN_DTYPE<T> && step == 1 && call.head_dim_v % LANES<T> == 0) {
        for (int64_t d = 0; d < call.head_dim_v; d += LANES<T>) store((T *)out + d, values_of(d));
        return;
    }
    T values[MAX_KEYS];
    for (int64_t d = 0; d < call.head_dim_v; d += MAX_KEYS) {
        const int64_t count = smaller(MAX_KEYS, call.head_dim_v - d);
        for (int64_t x = 0; x < count; x += LANES<T>) store(values + x, values_of(d + x));
        store_row(values, call.dtype, step, count, out + d * bytes);
    }
}

// Writes out and lse of a row.
template <class T> inline void write_row(const Call &call, const Entry &entry, Row row, const T *o, T factor, T lse) {
    number<T>(call, LSE, entry.batch, row.head, entry.first_q + row.i) = lse;
    write_out<T>(call, entry, row, [&](int64_t d) { return load(o + d) * splat(factor); });
}

// The same, after its sink has joined the sum l of weights with this row max.
template <class T>
inline void write_row_with_sink(const Call &call, const Entry &entry, Row row, const T *o, const RowWithSink &all,
                                T log_of_l) {
    write_row(call, entry, row, o, T(all.shrinks / double(all.divisor<T>())), T(all.row_max + double(log_of_l)));
}
template <class T>
NOINLINE RowWithSink finish_row(const Call &call, const Entry &entry, Row row, const T *o, double row_max, double l) {
    const RowWithSink all = with_sink<T>(call, row, row_max, l);
    write_row_with_sink(call, entry, row, o, all, log_of(T(all.l)));
    return all;
}

// A row after all of its keys, summed over lanes and over the jobs that split its keys. All but l are exponents of e.
struct WholeRow {
    double row_max, l, largest;
    double rises;   // largest - row_max
    double moment;  // relative to the largest score
};

// Writes the row reductions that are wanted, after `finish_row` has found how the sink joins the row.
template <class T>
NOINLINE void write_row_reductions(const Call &call, const Entry &entry, Row row, const WholeRow &own,
                                   const RowWithSink &all) {
    const int64_t i = entry.first_q + row.i;
    // A NaN score is no largest one, but makes the sum NaN, as infinity does.
    const bool has_nan = own.l != own.l && own.largest != __builtin_inf();
    if (call.arrays[MAX]) number<T>(call, MAX, entry.batch, row.head, i) = T(has_nan ? own.l : own.largest);
    if (!call.arrays[ENTROPY]) return;
    T &entropy = number<T>(call, ENTROPY, entry.batch, row.head, i);
    if (own.l == 0) return void(entropy = 0);  // of no key, or of a sink alone
    // Exponents are relative to the largest score, or to a larger sink: relative to the row max, which lags, small
    // entropies would be differences of large numbers.
    const double sink = all.of_sink == 0 ? own.largest : number<T>(call, SINKS, 0, row.head);
    const double below = sink > own.largest ? own.largest - sink : 0,
                 of_sink_below = sink > own.largest ? 0 : sink - own.largest;
    const double shrinks = exp_of(below - own.rises), of_keys = own.l * shrinks;
    const double of_sink = all.of_sink == 0 ? 0 : exp_of(of_sink_below), l = of_keys + of_sink;
    const double moment = own.moment * shrinks + below * of_keys + (of_sink == 0 ? 0 : of_sink_below * of_sink);
    entropy = T(log_of(l) - moment / l);
}

// Where a job with a split of the keys of a block leaves its partial results: for each row o and, after it, these.
struct Partial {
    enum { ROW_MAX, L, LARGEST, MOMENT, COUNT };
};
template <class T> inline T *partial_of(const Work &work, int64_t job) {
    return (T *)work.shared + job * work.rows_per_partial * (Sizes<T>(work.call).dim_v + Partial::COUNT);
}

struct DoNothing {
    void operator()() const {}
};

// Calls run(drops, reduces), the options that loops over scores are specialised on.
template <class F> inline void with_softmax_options(const Call &call, F run) {
    const bool drops = call.dropout_steps;
    if (has_row_reductions(call)) {
        run(drops, std::true_type());
    } else {
        drops ? run(std::true_type(), std::false_type()) : run(std::false_type(), std::false_type());
    }
}

// `count` rows of a block from `first` on, whose scores `s` begin with key `at` of a tile.
template <class T>
inline Subgroup<T> subgroup_of(const Scaling<T> &scaling, const ForwardBuffers<T> &buffers, int64_t first,
                               int64_t count, T *s, int64_t columns, int64_t at, double kept_scale) {
    const int64_t dim = buffers.sizes.dim_v;
    return {scaling,
            count,
            columns,
            dim,
            s,
            buffers.row_max + first,
            buffers.l + first * LANES<T>,
            buffers.o + first * dim,
            buffers.largest + first,
            buffers.moment + first * LANES<T>,
            buffers.kept + first * MAX_KEYS + at,
            T(kept_scale),
            {}};
}

// Turns scores of a tile, which begins with key `at` of s, into weights. With bf16x2, weights go to `p`, in `terms`
// terms, and `between` is called after each row.
template <class T, class F>
NOINLINE void softmax_rows(const Scaling<T> &scaling, const ScoreTile &tile, int64_t at, ForwardBuffers<T> &buffers,
                           T *s, T *p, int64_t terms, F between) {
    const Call &call = tile.call;
    // A cap takes long, and steps of products come between rows only.
    const int64_t most = has_cap(call) ? SUBGROUP / 2 : SUBGROUP;
    for (int64_t r = 0; r < tile.num_rows; r += most) {
        const int64_t count = smaller(most, tile.num_rows - r);
        T *scores = s + r * SCORES_STRIDE<T> + at;
        finish_scores_if_needed<T>(scaling, tile.rows(r, count), scores, buffers.bias, nullptr);
        Subgroup<T> rows = subgroup_of(scaling, buffers, tile.r0 + r, count, scores, tile.padded, at, call.kept_scale);
        with_softmax_options(call, [&](auto, auto reduces) { raise_row_maxima(reduces, rows); });
        if constexpr (MAY_USE_BF16X2<T>)
            if (terms == 1) {
                for (int64_t i = 0; i < count; ++i) {
                    with_softmax_options(call, [&](auto drops, auto reduces) {
                        exponentials_as_bf16x2(drops, reduces, rows, i, p + (r + i) * KEYS_BF16X2_STRIDE);
                    });
                    between();
                }
                continue;
            }
        with_softmax_options(call, [&](auto drops, auto reduces) { exponentials(drops, reduces, rows); });
        if constexpr (MAY_USE_TILES<T>)
            for (int64_t i = r; i < r + count && terms == 2; ++i) {
                split_to_bf16x2(s + i * SCORES_STRIDE<T> + at, tile.padded, p + 2 * i * KEYS_BF16X2_STRIDE,
                                p + (2 * i + 1) * KEYS_BF16X2_STRIDE);
                between();
            }
    }
}

}  // namespace
