// Matrix products of all shapes against sums in a wider type: what is left of blocks, and strides.
#pragma once

#include "gemm.h"

#include "check.h"

namespace {
namespace gemm_tests {

// Operands of a product: A in either order, B and C by rows, with space between rows.
template <class T> struct Operands {
    long rows, columns, length, a_stride, b_stride, c_stride;
    bool is_transposed;
    Memory<T> a, b, before, c;

    static long extent(long count, long width, long stride) {
        return count && width ? (count - 1) * stride + width : 0;
    }
    Operands(long rows, long columns, long length, bool is_transposed, long space)
        : rows(rows), columns(columns), length(length), a_stride((is_transposed ? rows : length) + space),
          b_stride(columns + space), c_stride(columns + space), is_transposed(is_transposed),
          a(is_transposed ? extent(length, rows, a_stride) : extent(rows, length, a_stride)),
          b(extent(length, columns, b_stride)), before(extent(rows, columns, c_stride)), c(before.count) {
        for (Memory<T> *x : {&a, &b, &before})
            for (long i = 0; i < x->count; ++i) (*x)[i] = T(random_normal());
    }
    T a_at(long i, long k) { return a[is_transposed ? k * a_stride + i : i * a_stride + k]; }

    // Each element within the bound of any order of summation, and nothing between rows of C is written.
    void check(bool adds) {
        for (long i = 0; i < rows; ++i)
            for (long j = 0; j < c_stride && i * c_stride + j < c.count; ++j) {
                const long at = i * c_stride + j;
                if (j >= columns) {
                    CHECK(c[at] == before[at], "%ld x %ld x %ld: after row %ld", rows, columns, length, i);
                    continue;
                }
                long double sum = adds ? before[at] : 0, size = std::fabs(sum);
                for (long k = 0; k < length; ++k) {
                    const long double term = (long double)a_at(i, k) * b[k * b_stride + j];
                    sum += term;
                    size += std::fabs(term);
                }
                const double most = double((length + 2) * size * std::numeric_limits<T>::epsilon() / 2);
                CHECK(std::fabs(double(c[at] - sum)) <= most, "%ld x %ld x %ld: element %ld, %ld is %g, expected %g",
                      rows, columns, length, i, j, double(c[at]), double(sum));
            }
    }
    template <class Run> void run(Run multiply, bool adds) {
        std::memcpy(c.data, before.data, c.count * sizeof(T));
        multiply();
        check(adds);
    }
};

template <class T, Order ORDER> void test_product(long rows, long vectors, long length, long space) {
    Operands<T> x(rows, vectors * LANES<T>, length, ORDER == Order::COLUMNS, space);
    for (bool adds : {false, true})
        x.run(
            [&] {
                product<T, ORDER>(rows, x.columns, length, x.a.data, x.a_stride, x.b.data, x.b_stride, x.c.data,
                                  x.c_stride, adds);
            },
            adds);
    // The bits of a row do not depend on how many others it is computed with.
    if (ORDER == Order::COLUMNS || rows == 0) return;
    const long row = random_below(rows);
    Memory<T> alone(x.columns);
    std::memcpy(alone.data, x.before.data + row * x.c_stride, x.columns * sizeof(T));
    product<T, ORDER>(1, x.columns, length, x.a.data + row * x.a_stride, x.a_stride, x.b.data, x.b_stride, alone.data,
                      x.columns, true);
    CHECK(!std::memcmp(alone.data, x.c.data + row * x.c_stride, x.columns * sizeof(T)), "row %ld of %ld alone", row,
          rows);
}

template <class T> void test_product_of_rows(long rows, long vectors, long length, long space) {
    Operands<T> x(rows, vectors * LANES<T>, length, false, space);
    for (bool adds : {false, true})
        x.run(
            [&] {
                product_of_rows<T>(rows, x.columns, length, x.a.data, x.a_stride, x.b.data, x.b_stride, x.c.data,
                                   x.c_stride, adds);
            },
            adds);
}

template <class T> void test_all() {
    for (long rows = 0; rows <= (IS_DENSE ? 40 : 26); ++rows)
        for (long vectors = 1; vectors <= 7; ++vectors)
            for (long length : {1L, 2L, 3L, 8L, 65L}) {
                const long space = random_below(3);
                test_product<T, Order::ROWS>(rows, vectors, length, space);
                test_product<T, Order::COLUMNS>(rows, vectors, length, space);
            }
    for (long rows : {1L, 2L, 5L, 13L, 24L})
        for (long vectors = 1; vectors <= 5; ++vectors)
            for (long length : {0L, 1L, 63L, 64L, 65L, 127L, 128L, 129L, 300L})
                test_product_of_rows<T>(rows, vectors, length, random_below(3));
}

void run() {
    test_all<float>();
    if constexpr (IS_DENSE) test_all<double>();
}

}  // namespace gemm_tests
}  // namespace
