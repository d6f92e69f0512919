// Matrix products of tiles in cache: C = A B or C += A B, where a block of C stays in registers.
#pragma once

#include "simd/vectors.h"

namespace {

enum class Order { ROWS, COLUMNS };  // of A: a[row * stride + k], or a[k * stride + row]

// How an element of A is spread over a vector, and how its products are added up. (`Bf16x2Ops` is the same for bf16x2.)
template <class T> struct ElementOps {
    static Vector<T> spread(const T *p) { return splat(*p); }
    static Vector<T> add(Vector<T> sum, Vector<T> x, Vector<T> y) { return add_product(sum, x, y); }
};

// Adds the products of one column of A, R elements of which are at `rows`, and of N vectors of a row of B.
template <class T, int R, int N, class M>
ALWAYS_INLINE void add_products(Vector<T> (&sums)[R][N], const T *const *rows, int64_t row_stride, const T *b) {
    Vector<T> x[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) x[n] = load(b + n * LANES<T>);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        const Vector<T> y = M::spread(rows[r / 3] + r % 3 * row_stride);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[r][n] = M::add(sums[r][n], y, x[n]);
    }
}

// Stores sums to C, or adds them.
template <class T, int R, int N>
ALWAYS_INLINE void store_sums(const Vector<T> (&sums)[R][N], T *c, int64_t c_stride, bool adds) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            T *p = c + r * c_stride + n * LANES<T>;
            store(p, adds ? load(p) + sums[r][n] : sums[r][n]);
        }
    }
}

// Computes R rows and N vectors of C. The sum of this product is complete before it is added to C, so that errors do
// not grow with the number of tiles.
template <class T, int R, int N, Order ORDER, class M>
ALWAYS_INLINE void product_block(const T *a, int64_t a_stride, const T *b, int64_t b_stride, int64_t length, T *c,
                                 int64_t c_stride, bool adds) {
    Vector<T> sums[R][N] = {};
    constexpr int GROUPS = (R + 2) / 3;  // three rows share an address
    const T *rows[GROUPS];
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g) rows[g] = a + (ORDER == Order::ROWS ? 3 * g * a_stride : 3 * g);
    const int64_t row_stride = ORDER == Order::ROWS ? a_stride : 1;
#pragma GCC unroll 2
    for (int64_t k = 0; k < length; ++k) {
        add_products<T, R, N, M>(sums, rows, row_stride, b);
        b += b_stride;
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; ++g) rows[g] += ORDER == Order::ROWS ? 1 : a_stride;
    }
    store_sums<T, R, N>(sums, c, c_stride, adds);
}

// The same where there are products with one lane of a vector: an element of A needs no register of its own, but shares
// one with its neighbours.
template <class T, int R, int N, Order ORDER>
ALWAYS_INLINE void product_block_by_lanes(const T *a, int64_t a_stride, const T *b, int64_t b_stride, int64_t length,
                                          T *c, int64_t c_stride, bool adds) {
    constexpr int L = LANES<T>, TERMS = ORDER == Order::ROWS ? L : 1, LOADS = ORDER == Order::ROWS ? R : R / L;
    constexpr int STEP = ORDER == Order::ROWS ? 4 : 1;  // with fewer, GCC moves sums from register to register
    Vector<T> sums[R][N] = {};
    constexpr int GROUPS = (LOADS + 2) / 3;
    const T *from[GROUPS];
    const int64_t next = ORDER == Order::ROWS ? a_stride : L;
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g) from[g] = a + 3 * g * next;
    int64_t k = 0;
    for (; k + STEP <= length; k += STEP)
        for_each_of<STEP / TERMS>([&](auto) {
            Vector<T> y[LOADS];
#pragma GCC unroll 12
            for (int i = 0; i < LOADS; ++i) y[i] = load(from[i / 3] + i % 3 * next);
            for_each_of<TERMS>([&](auto term) {
                Vector<T> x[N];
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) x[n] = load(b + n * L);
                for_each_of<R>([&](auto r) {
                    constexpr int i = ORDER == Order::ROWS ? r : r / L, lane = ORDER == Order::ROWS ? term : r % L;
#pragma GCC unroll 4
                    for (int n = 0; n < N; ++n) sums[r][n] = add_product_by_lane<lane>(sums[r][n], x[n], y[i]);
                });
                b += b_stride;
            });
#pragma GCC unroll 4
            for (int g = 0; g < GROUPS; ++g) from[g] += ORDER == Order::ROWS ? L : a_stride;
        });
    for (; k < length; ++k, b += b_stride)  // of rows, whose last elements do not fill a vector
        for_each_of<R>([&](auto r) {
            const Vector<T> y = splat(a[r * next + k]);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sums[r][n] = add_product(sums[r][n], load(b + n * L), y);
        });
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            T *p = c + r * c_stride + n * L;
            store(p, adds ? load(p) + sums[r][n] : sums[r][n]);
        }
    }
}

// How many rows a block has at most, of so many vectors.
template <class T, int N, Order ORDER> constexpr int most_rows() {
    if (HAS_LANE_PRODUCTS) return N > 2 && ORDER == Order::ROWS ? 6 : 8;
    return NUM_REGISTERS == 32 ? (N > 2 ? 6 : 12) : (N > 2 ? 3 : 6);
}

template <class T, int N, Order ORDER, class M>
NOINLINE void product_columns(int64_t num_rows, const T *a, int64_t a_stride, const T *b, int64_t b_stride,
                              int64_t length, T *c, int64_t c_stride, bool adds) {
    constexpr int MOST = most_rows<T, N, ORDER>();
    const int64_t step = ORDER == Order::ROWS ? a_stride : 1;
    auto run = [&](auto rows) {
        constexpr int R = decltype(rows)::value;
        for (; num_rows >= R; num_rows -= R, a += R * step, c += R * c_stride) {
            if constexpr (HAS_LANE_PRODUCTS && std::is_same_v<M, ElementOps<T>> &&
                          (ORDER == Order::ROWS || R % LANES<T> == 0)) {
                product_block_by_lanes<T, R, N, ORDER>(a, a_stride, b, b_stride, length, c, c_stride, adds);
            } else {
                product_block<T, R, N, ORDER, M>(a, a_stride, b, b_stride, length, c, c_stride, adds);
            }
        }
    };
    run(std::integral_constant<int, MOST>());
    if constexpr (MOST > 8) run(std::integral_constant<int, 8>());
    if constexpr (MOST > 4) run(std::integral_constant<int, 4>());
    if constexpr (MOST > 2) run(std::integral_constant<int, 2>());
    run(std::integral_constant<int, 1>());
}

// Takes up to WIDE vectors of columns at a time, and calls `run` with the first column and their number, as a type.
// Four that are left are two times two, which takes less time than three and one.
template <class T, int WIDE, class F> inline void for_columns(int64_t num_columns, F run) {
    constexpr int64_t L = LANES<T>;
    int64_t j = 0;
    auto take = [&](auto vectors) {
        constexpr int N = decltype(vectors)::value;
        for (; num_columns - j >= N * L && !(N == 3 && num_columns - j == 4 * L); j += N * L) run(j, vectors);
    };
    take(std::integral_constant<int, WIDE>());
    if constexpr (WIDE > 2) take(std::integral_constant<int, 2>());
    take(std::integral_constant<int, 1>());
}

// How many vectors of columns are multiplied at a time: with more, fewer elements of A are loaded, with fewer, more
// rows share what is read of B.
constexpr int TALL_BLOCKS = HAS_LANE_PRODUCTS ? 3 : 2;
constexpr int WIDE_BLOCKS = NUM_REGISTERS == 32 && !HAS_LANE_PRODUCTS ? 4 : TALL_BLOCKS;

// A is (num_rows, length), B is (length, num_columns); num_columns is a multiple of the lanes of a vector.
template <class T, Order ORDER, class M = ElementOps<T>, int WIDTH = WIDE_BLOCKS>
inline void product(int64_t num_rows, int64_t num_columns, int64_t length, const T *a, int64_t a_stride, const T *b,
                    int64_t b_stride, T *c, int64_t c_stride, bool adds) {
    for_columns<T, WIDTH>(num_columns, [&](int64_t j, auto vectors) {
        product_columns<T, decltype(vectors)::value, ORDER, M>(num_rows, a, a_stride, b + j, b_stride, length, c + j,
                                                               c_stride, adds);
    });
}

// The same a few vectors at a time, which is the best shape where B is read again and again. Long sums are made of
// partial sums of at most SUM_LENGTH terms, which keeps rounding errors down.
constexpr int64_t SUM_LENGTH = 64;

template <class T, class M = ElementOps<T>>
inline void product_of_rows(int64_t num_rows, int64_t num_columns, int64_t length, const T *a, int64_t a_stride,
                            const T *b, int64_t b_stride, T *c, int64_t c_stride, bool adds = false) {
    if (length == 0) {  // values without columns: dP is 0
        for (int64_t i = 0; i < num_rows && !adds; ++i)
            for (int64_t j = 0; j < num_columns; ++j) c[i * c_stride + j] = T(0);
        return;
    }
    const int64_t count = (length + SUM_LENGTH - 1) / SUM_LENGTH, step = (length + count - 1) / count;
    for_columns<T, TALL_BLOCKS>(num_columns, [&](int64_t j, auto vectors) {
        for (int64_t k = 0; k < length; k += step) {
            const int64_t terms = length - k < step ? length - k : step;
            product_columns<T, decltype(vectors)::value, Order::ROWS, M>(
                num_rows, a + k, a_stride, b + k * b_stride + j, b_stride, terms, c + j, c_stride, adds || k > 0);
        }
    });
}

}  // namespace
