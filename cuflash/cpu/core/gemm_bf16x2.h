// Products of bf16x2: sixteen rows of A, of sixteen bf16x2 each, by sixteen rows of B, in tile registers where there
// are any. Four registers hold a block of C. What does not fill a whole tile is multiplied in vectors.
#pragma once

#include "gemm.h"
#include "simd/amx.h"
#include "simd/bf16x2.h"

namespace {

// C = A B or C += A B, of bf16x2, in steps that other work may come between: tile registers compute meanwhile.
// num_columns is a multiple of the lanes of a vector.
struct Bf16x2Product {
    int64_t num_rows = 0, num_columns = 0, length = 0;
    const float *a = nullptr;
    int64_t a_stride = 0;
    const float *b = nullptr;
    int64_t b_stride = 0;
    float *c = nullptr;
    int64_t c_stride = 0;
    bool adds = false;
    struct Term {
        const float *a, *b;
    };
    Term more[3] = {};  // products of the same sizes that are added
    int num_more = 0;
    int64_t i = 0, j = 0;  // the block of C that is next

    void add(const float *more_a, const float *more_b) { more[num_more++] = Term{more_a, more_b}; }

    // Computes the next four tiles of C, or what is left of them: two by two, or four of a single column or row.
    // All rows come before the next columns, so that the rows of B that they need stay in the first cache.
    // It is a function of its own because the loops that call it need all registers.
    __attribute__((noinline)) void step() {
        if constexpr (HAS_TILES) step_of_tiles();
    }

    // Does all steps that are left, and multiplies what does not fill a whole tile.
    void finish() {
        const int64_t rows = tile_rows(), columns = tile_columns(), whole = length / TILE * TILE;
        if constexpr (HAS_TILES)
            while (i < rows) step();
        if (rows && whole < length)
            for (int n = -1; n < num_more; ++n)
                product<float, Order::ROWS, Bf16x2Ops>(rows, columns, length - whole, term(n).a + whole, a_stride,
                                                       term(n).b + whole * b_stride, b_stride, c, c_stride, true);
        if (rows && columns < num_columns)
            for (int n = -1; n < num_more; ++n)
                product<float, Order::ROWS, Bf16x2Ops>(rows, num_columns - columns, length, term(n).a, a_stride,
                                                       term(n).b + columns, b_stride, c + columns, c_stride,
                                                       adds || n >= 0);
        for (int n = -1; n < num_more && rows < num_rows; ++n)
            product<float, Order::ROWS, Bf16x2Ops>(num_rows - rows, num_columns, length, term(n).a + rows * a_stride,
                                                   a_stride, term(n).b, b_stride, c + rows * c_stride, c_stride,
                                                   adds || n >= 0);
    }

  private:
    Term term(int n) const { return n < 0 ? Term{a, b} : more[n]; }

    // With tile registers a vector has as many columns as a tile; with a model of them it may have fewer.
    int64_t tile_columns() const { return LANES<float> == TILE ? num_columns : num_columns / TILE * TILE; }
    int64_t tile_rows() const { return HAS_TILES && length >= TILE && tile_columns() > 0 ? num_rows / TILE * TILE : 0; }

    void step_of_tiles() {
        const int64_t rows = tile_rows(), columns = tile_columns();
        if (i >= rows) return;
        const int64_t height = columns == TILE ? 4 : rows > TILE ? 2 : 1, width = 4 / height;
        if (rows - i < height * TILE || columns - j < width * TILE) {
            for (int64_t y = i; y < smaller(rows, i + height * TILE); y += TILE)
                for (int64_t x = j; x < smaller(columns, j + width * TILE); x += TILE) multiply<1, 1>(y, x);
        } else if (height == 4) {
            multiply<4, 1>(i, j);
        } else if (height == 2) {
            multiply<2, 2>(i, j);
        } else {
            multiply<1, 4>(i, j);
        }
        i += height * TILE;
        if (i >= rows) {
            j += width * TILE;
            i = j < columns ? 0 : rows;
        }
    }

    // Computes R by S tiles of C, which stay in the first registers.
    template <int R, int S> void multiply(int64_t row, int64_t column) const {
        auto for_tiles = [&](auto run) {
            for_each_of<R>([&](auto r) {
                for_each_of<S>([&](auto s) {
                    run(std::integral_constant<int, r * S + s>(), c + (row + r * TILE) * c_stride + column + s * TILE);
                });
            });
        };
        for_tiles([&](auto tile, const float *from) {
            if (adds) {
                load_tile<tile>(from, c_stride);
            } else {
                clear_tile<tile>();
            }
        });
        for (int n = -1; n < num_more; ++n) {
            const float *rows = term(n).a + row * a_stride, *from = term(n).b + column;
            for (int64_t k = 0; k + TILE <= length; k += TILE, from += TILE * b_stride)
                for_each_of<R>([&](auto r) {
                    load_tile<4 + r % 2>(rows + r * TILE * a_stride + k, a_stride);
                    for_each_of<S>([&](auto s) {
                        if (r == 0) load_tile<6 + s % 2>(from + s * TILE, b_stride);
                        multiply_tiles<r * S + s, 4 + r % 2, 6 + s % 2>();
                    });
                });
        }
        for_tiles([&](auto tile, float *to) { store_tile<tile>(to, c_stride); });
    }
};

inline void bf16x2_product(int64_t num_rows, int64_t num_columns, int64_t length, const float *a, int64_t a_stride,
                           const float *b, int64_t b_stride, float *c, int64_t c_stride, bool adds) {
    Bf16x2Product{num_rows, num_columns, length, a, a_stride, b, b_stride, c, c_stride, adds}.finish();
}

}  // namespace
