// Row sums of the backward pass. lse is row max + log(row sum), rounded: of a row whose scores are all about -1e9, as a
// finite mask makes them, nothing is left of the log of the number of its keys, and weights exp(s - lse) would sum to
// that number. So rows of large lse get row max and row sum again, from the scores that their weights are made of. If
// these explain lse, weights are exp(s - row max) / row sum. If not, other calls have the other keys of the row, and
// lse is all that is known of these.
#pragma once

#include "score_tiles.h"

namespace {

constexpr double LARGE_LSE = 128;  // of smaller ones, what is rounded off changes weights by 2^-18 at most
// In the last place of lse, by which it may differ from what the scores say: those of the forward pass may be sums in
// another order. Where they are, one row in a hundred differs by more than 4, at head dimensions up to 256.
constexpr double UNITS_OF_LSE = 8;
constexpr double TINY_WEIGHT = 1e-30;  // many of these added to a weight of 1 do not change it

template <class T> inline bool is_large(T lse) {
    const T size = lse < 0 ? -lse : lse;
    return size >= T(LARGE_LSE) && size <= std::numeric_limits<T>::max();
}

// What the weights 2^(factor (s - row_max)) * inverse of a row are made with, if its sum was found again.
template <class T> struct RowSum {
    T row_max, inverse;
    bool is_found() const { return inverse >= 0; }
};
template <class T> constexpr RowSum<T> NO_ROW_SUM = {0, -1};

// Whether any row of the call has a large lse.
template <class T> inline bool has_large_rows(const Call &call) {
    const int64_t batch = batch_of_arrays(call), step = call.strides[LSE][2];
    auto any_large = [](const T *lse, int64_t count, int64_t step) {
        int any = 0;
        for (int64_t i = 0; i < count; ++i) any |= is_large(lse[i * step]);
        return any;
    };
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t h = 0; h < call.num_heads; ++h) {
            if (!call.seqlen_q) return false;
            const T *lse = &number<T>(call, LSE, b, h);
            if (step == 1 ? any_large(lse, call.seqlen_q, 1) : any_large(lse, call.seqlen_q, step)) return true;
        }
    return false;
}

// Row max, in units of scores, and row sum of a row in ROW_SUMS if they are wanted; the inverse of the row sum,
// negative if there is none, if they are given. These are those of all keys of a row, of which a call may have some.
inline double *numbers_of_row(const Call &call, int64_t batch, int64_t head, int64_t row) {
    return &number<double>(call, ROW_SUMS, batch, head, row);
}

// Allocates the sums of all rows if one may need it; returns false if there is no memory.
template <class T> NOINLINE bool allocate_row_sums(Work &work) {
    const Call &call = work.call;
    if (!call.arrays[ROW_SUMS] && !has_large_rows<T>(call)) return true;
    const int64_t num_rows = num_rows_of(call);
    if (!work.allocate(work.row_sums, num_rows * int64_t(sizeof(RowSum<T>)))) return false;
    RowSum<T> *sums = (RowSum<T> *)work.row_sums;
    for (int64_t r = 0; r < num_rows; ++r) {
        sums[r] = NO_ROW_SUM<T>;
        if (!call.arrays[ROW_SUMS]) continue;
        const int64_t head = r / call.seqlen_q;
        const double *given = numbers_of_row(call, head / call.num_heads, head % call.num_heads, r % call.seqlen_q);
        sums[r] = {T(given[0]), T(given[1])};
    }
    return true;
}

// Allocates the first maxima of all rows, for the gradients of these; returns false if there is no memory.
inline bool allocate_first_max(Work &work) {
    const Call &call = work.call;
    if (!call.arrays[DMAX]) return true;
    const int64_t num_rows = num_rows_of(call);
    if (!work.allocate(work.first_max, num_rows)) return false;
    for (int64_t r = 0; r < num_rows; ++r) work.first_max[r] = -1;
    return true;
}

inline int64_t index_of_row(const Call &call, const Entry &entry, Row row) {
    return (entry.batch * call.num_heads + row.head) * call.seqlen_q + entry.first_q + row.i;
}
template <class T> inline RowSum<T> &row_sum(const Work &work, const Entry &entry, Row row) {
    return ((RowSum<T> *)work.row_sums)[index_of_row(work.call, entry, row)];
}

// The sum of a row, `sum` of 2^(factor (s - row_max)) over its keys, if these and the sink of its head explain lse.
template <class T>
NOINLINE RowSum<T> explained_sum(const Call &call, const Scaling<T> &scaling, int64_t head, T lse, T row_max,
                                 double sum) {
    const double infinity = __builtin_inf(), of_keys = double(row_max) * scaling.natural;
    double top = of_keys, rest = 1;
    if (call.arrays[SINKS]) {
        const double sink = number<T>(call, SINKS, 0, head);
        top = of_keys > sink ? of_keys : sink;
        rest = exp_of(of_keys - top);
        sum = sum * rest + exp_of(sink - top);
    }
    const double unit = std::ldexp(double(std::numeric_limits<T>::epsilon()), std::ilogb(lse));
    const double found = top - double(lse) + log_of(sum);
    if (!(found <= UNITS_OF_LSE * unit && found >= -UNITS_OF_LSE * unit)) return NO_ROW_SUM<T>;
    return {of_keys == -infinity ? T(0) : row_max, T(rest / sum)};
}

// Writes the sum of a row and, if there is one, of its sink, whatever lse is: other calls may have other keys of it.
template <class T>
inline void write_row_sum(const Call &call, const Scaling<T> &scaling, const Entry &entry, Row row, T row_max,
                          double sum) {
    double *to = numbers_of_row(call, entry.batch, row.head, entry.first_q + row.i);
    to[0] = row_max, to[1] = sum;
    if (!call.arrays[SINKS]) return;
    const double sink = number<T>(call, SINKS, 0, row.head), of_keys = double(row_max) * scaling.natural;
    if (sink > of_keys) {
        to[0] = sink / scaling.natural;
        to[1] = sum * exp_of(of_keys - sink) + 1;
    } else if (sum > 0) {
        to[1] += exp_of(sink - of_keys);
    }
}

// Adds the exponentials of a row's scores, which are whole vectors, to its sum, and moves its row_max to its largest
// score.
template <class T>
inline void add_exponentials(const Scaling<T> &scaling, const T *s, int64_t columns, T &row_max, double &sum) {
    constexpr int N = LANES<T>;
    Vector<T> most = load(s);
    for (int64_t j = N; j < columns; j += N) most = larger<T>(most, load(s + j));
    const T top = largest_lane<T>(most);
    if (top > row_max) {
        sum *= exp_of((double(row_max) - double(top)) * scaling.natural);
        row_max = top;
    }
    if (row_max == T(-__builtin_inf())) return;
    Vector<T> sums = {};
    for (int64_t j = 0; j < columns; j += N) sums += exp2<T>(load(s + j) - splat(row_max), splat(scaling.factor));
    sum += double(sum_of_lanes<T>(sums));
}

// Moves `at` to the first of a row's scores that are above `most`, the largest one so far, if one is. They are whole
// vectors, the first of which is that of the key `first`.
template <class T> NOINLINE void find_first_max(const T *s, int64_t columns, int64_t first, T &most, int64_t &at) {
    Vector<T> largest = splat(most);  // and not NaN, if a score is
    for (int64_t j = 0; j < columns; j += LANES<T>) largest = larger<T>(load(s + j), largest);
    if (!any_above<T>(largest, most)) return;
    for (int64_t j = 0; j < columns; ++j)
        if (s[j] > most) most = s[j], at = first + j;
}

// Logarithms of the weights of a row, of which the gradient of its entropy is made. They are finite where scores have
// no weight.
template <class T> struct LogOfWeight {
    Vector<T> natural, from, less;
    LogOfWeight(const Scaling<T> &scaling, T lse, const RowSum<T> &sum)
        : natural(splat(T(scaling.natural))), from(splat(sum.is_found() ? sum.row_max : T(0))),
          less(splat(sum.is_found() ? -log_of(sum.inverse) : lse)) {}
    Vector<T> operator()(Vector<T> s) const {
        return larger<T>((s - from) * natural - less, splat(T(Vectors<T>::LOWEST * 0.6931471805599453)));
    }
};

// The weight of the sink of a row whose sum was found.
template <class T> inline double weight_of_sink(const Scaling<T> &scaling, const RowSum<T> &sum, double sink) {
    const double inverse = sum.inverse;
    // All weights of keys are tiny only compared with a sink of 1.
    if (inverse < TINY_WEIGHT) return 1;
    // Where the sink is the row max, only its quotient by the unit is rounded.
    const bool is_max = double(sum.row_max) == sink / scaling.natural;
    return (is_max ? 1 : exp_of(sink - double(sum.row_max) * scaling.natural)) * inverse;
}

}  // namespace
