// Products of pairs by the tile registers of AMX: sixteen rows of A, of sixteen pairs each, by sixteen rows of B. Four
// registers hold a block of C. What is no whole tile is left to vectors.
//
// MODEL_OF_TILES computes the same by loops, so that it is tested on processors without these registers.
#pragma once

#include "pairs.h"

#if defined(MODEL_OF_TILES)

namespace {

thread_local float model_tiles[8][16][16];

inline void model_load(int tile, const void *from, long stride) {
    for (int i = 0; i < 16; ++i) memcpy(model_tiles[tile][i], (const char *)from + i * stride, 64);
}

inline void model_store(int tile, void *to, long stride) {
    for (int i = 0; i < 16; ++i) memcpy((char *)to + i * stride, model_tiles[tile][i], 64);
}

inline void model_multiply(int c, int a, int b) {
    for (int m = 0; m < 16; ++m)
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n) {
                uint32_t x, y;
                memcpy(&x, &model_tiles[a][m][k], 4);
                memcpy(&y, &model_tiles[b][k][n], 4);
                model_tiles[c][m][n] += from_bits(x << 16) * from_bits(y << 16);
                model_tiles[c][m][n] += from_bits(x & 0xFFFF0000) * from_bits(y & 0xFFFF0000);
            }
}

}  // namespace

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) (void)(config)
#define _tile_release() (void)0
#define _tile_zero(tile) memset(model_tiles[tile], 0, sizeof model_tiles[tile])
#define _tile_loadd(tile, from, stride) model_load(tile, from, stride)
#define _tile_stored(tile, to, stride) model_store(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) model_multiply(c, a, b)

#endif

namespace {

#if defined(__AVX512BF16__)

#if HAS_TILES

constexpr long TILE = 16;

// All registers are whole: sixteen rows of 64 bytes.
inline void begin_tiles() {
    alignas(64) struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
        config.row_bytes[i] = 64;
        config.rows[i] = TILE;
    }
    // GCC 12 takes it that only the first eight bytes are read, and leaves out what writes the others.
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
}

inline void end_tiles() { _tile_release(); }

#endif

// C = A B or C += A B, of pairs, in steps that may come between other work: tile registers compute meanwhile.
// num_columns is in whole vectors.
struct ProductOfPairs {
    long num_rows = 0, num_columns = 0, length = 0;
    const float *a = nullptr;
    long a_stride = 0;
    const float *b = nullptr;
    long b_stride = 0;
    float *c = nullptr;
    long c_stride = 0;
    bool adds = false;
    struct Term {
        const float *a, *b;
    };
    Term more[3] = {};  // products of the same sizes that are added
    int num_more = 0;
    long i = 0, j = 0;  // the block of C that is next

    void add(const float *more_a, const float *more_b) { more[num_more++] = Term{more_a, more_b}; }

    // The next two by two tiles of C, or what is left of them, if there are any. A function of its own: the loops
    // around it need all registers.
    __attribute__((noinline)) void step() {
#if HAS_TILES
        const long rows = tile_rows();
        if (i >= rows) return;
        asm volatile("" ::: "memory");  // registers are loaded behind the compiler's back
        if (rows - i > TILE && num_columns - j > TILE) {
            four_tiles();
        } else {
            for (long y = i; y < smaller(rows, i + 2 * TILE); y += TILE)
                for (long x = j; x < smaller(num_columns, j + 2 * TILE); x += TILE) one_tile(y, x);
        }
        asm volatile("" ::: "memory");
        j += 2 * TILE;
        if (j >= num_columns) {
            j = 0;
            i += 2 * TILE;
        }
#endif
    }

    // All steps that are left, and what is no whole tile.
    void finish() {
        long first = 0;
#if HAS_TILES
        const long rows = tile_rows(), whole = length / TILE * TILE;
        while (i < rows) step();
        if (rows && whole < length)
            for (int n = -1; n < num_more; ++n)
                product<float, Order::ROWS, Pairs>(rows, num_columns, length - whole, term(n).a + whole, a_stride,
                                                   term(n).b + whole * b_stride, b_stride, c, c_stride, true);
        first = rows;
#endif
        for (int n = -1; n < num_more && first < num_rows; ++n)
            product<float, Order::ROWS, Pairs>(num_rows - first, num_columns, length, term(n).a + first * a_stride,
                                               a_stride, term(n).b, b_stride, c + first * c_stride, c_stride,
                                               adds || n >= 0);
    }

  private:
    Term term(int n) const { return n < 0 ? Term{a, b} : more[n]; }

#if HAS_TILES
    long tile_rows() const { return length >= TILE ? num_rows / TILE * TILE : 0; }

    void four_tiles() const {
        float *c0 = c + i * c_stride + j, *c1 = c0 + TILE * c_stride;
        if (adds) {
            _tile_loadd(0, c0, c_stride * 4);
            _tile_loadd(1, c0 + TILE, c_stride * 4);
            _tile_loadd(2, c1, c_stride * 4);
            _tile_loadd(3, c1 + TILE, c_stride * 4);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int n = -1; n < num_more; ++n) {
            const float *a0 = term(n).a + i * a_stride, *a1 = a0 + TILE * a_stride, *from = term(n).b + j;
            for (long k = 0; k + TILE <= length; k += TILE, from += TILE * b_stride) {
                _tile_loadd(4, a0 + k, a_stride * 4);
                _tile_loadd(6, from, b_stride * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, from + TILE, b_stride * 4);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, a1 + k, a_stride * 4);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, c0, c_stride * 4);
        _tile_stored(1, c0 + TILE, c_stride * 4);
        _tile_stored(2, c1, c_stride * 4);
        _tile_stored(3, c1 + TILE, c_stride * 4);
    }

    void one_tile(long row, long column) const {
        float *to = c + row * c_stride + column;
        if (adds) {
            _tile_loadd(0, to, c_stride * 4);
        } else {
            _tile_zero(0);
        }
        for (int n = -1; n < num_more; ++n) {
            const float *from = term(n).b + column;
            for (long k = 0; k + TILE <= length; k += TILE, from += TILE * b_stride) {
                _tile_loadd(4, term(n).a + row * a_stride + k, a_stride * 4);
                _tile_loadd(6, from, b_stride * 4);
                _tile_dpbf16ps(0, 4, 6);
            }
        }
        _tile_stored(0, to, c_stride * 4);
    }
#endif
};

inline void product_of_pairs(long num_rows, long num_columns, long length, const float *a, long a_stride,
                             const float *b, long b_stride, float *c, long c_stride, bool adds) {
    ProductOfPairs{num_rows, num_columns, length, a, a_stride, b, b_stride, c, c_stride, adds}.finish();
}

#endif

}  // namespace
