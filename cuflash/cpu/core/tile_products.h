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

// Two by two tiles of C; the length is in whole tiles.
inline void product_of_four_tiles(const float *a, long a_stride, const float *b, long b_stride, long length, float *c,
                                  long c_stride, bool adds) {
    const float *a1 = a + TILE * a_stride;
    float *c1 = c + TILE * c_stride;
    if (adds) {
        _tile_loadd(0, c, c_stride * 4);
        _tile_loadd(1, c + TILE, c_stride * 4);
        _tile_loadd(2, c1, c_stride * 4);
        _tile_loadd(3, c1 + TILE, c_stride * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long k = 0; k < length; k += TILE, b += TILE * b_stride) {
        _tile_loadd(4, a + k, a_stride * 4);
        _tile_loadd(6, b, b_stride * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + TILE, b_stride * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a1 + k, a_stride * 4);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_stride * 4);
    _tile_stored(1, c + TILE, c_stride * 4);
    _tile_stored(2, c1, c_stride * 4);
    _tile_stored(3, c1 + TILE, c_stride * 4);
}

inline void product_of_tile(const float *a, long a_stride, const float *b, long b_stride, long length, float *c,
                            long c_stride, bool adds) {
    if (adds) {
        _tile_loadd(0, c, c_stride * 4);
    } else {
        _tile_zero(0);
    }
    for (long k = 0; k < length; k += TILE, b += TILE * b_stride) {
        _tile_loadd(4, a + k, a_stride * 4);
        _tile_loadd(6, b, b_stride * 4);
        _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, c, c_stride * 4);
}

#endif

// C = A B or C += A B, of pairs; num_columns is in whole vectors.
inline void product_of_pairs(long num_rows, long num_columns, long length, const float *a, long a_stride,
                             const float *b, long b_stride, float *c, long c_stride, bool adds) {
#if HAS_TILES
    const long rows = num_rows / TILE * TILE, whole = length / TILE * TILE;
    if (rows && whole) {
        asm volatile("" ::: "memory");  // registers are loaded behind the compiler's back
        for (long i = 0; i < rows; i += 2 * TILE)
            for (long j = 0; j < num_columns; j += 2 * TILE) {
                const float *own_a = a + i * a_stride, *own_b = b + j;
                float *own_c = c + i * c_stride + j;
                if (rows - i > TILE && num_columns - j > TILE) {
                    product_of_four_tiles(own_a, a_stride, own_b, b_stride, whole, own_c, c_stride, adds);
                    continue;
                }
                for (long y = 0; y < smaller(rows - i, 2 * TILE); y += TILE)
                    for (long x = 0; x < smaller(num_columns - j, 2 * TILE); x += TILE)
                        product_of_tile(own_a + y * a_stride, a_stride, own_b + x, b_stride, whole,
                                        own_c + y * c_stride + x, c_stride, adds);
            }
        asm volatile("" ::: "memory");
        if (whole < length)
            product<float, Order::ROWS, Pairs>(rows, num_columns, length - whole, a + whole, a_stride,
                                               b + whole * b_stride, b_stride, c, c_stride, true);
        num_rows -= rows;
        a += rows * a_stride;
        c += rows * c_stride;
    }
#endif
    product<float, Order::ROWS, Pairs>(num_rows, num_columns, length, a, a_stride, b, b_stride, c, c_stride, adds);
}

#endif

}  // namespace
