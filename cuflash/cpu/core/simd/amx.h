// Tile registers of AMX: sixteen rows of sixteen bf16x2, or of sixteen floats. MODEL_OF_TILES computes the same by
// loops, so that it is tested on processors without these registers.
#pragma once

#include "operations.h"

namespace {

constexpr int64_t TILE = 16;

#if defined(__AMX_BF16__) && !defined(MODEL_OF_TILES)

static_assert(LANES<float> == TILE, "what is whole vectors is whole tiles");

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
    // GCC 12 assumes that only the first eight bytes are read, and omits the stores to the others.
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
}

inline void end_tiles() { _tile_release(); }

// Each is one instruction. Intrinsics do not take the number of a register from a template.
template <int N> inline void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(N)); }
template <int N> inline void load_tile(const float *from, int64_t stride) {
    asm volatile("tileloadd (%0, %1), %%tmm%c2" ::"r"(from), "r"(4 * stride), "i"(N) : "memory");
}
template <int N> inline void store_tile(float *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0, %1)" ::"r"(to), "r"(4 * stride), "i"(N) : "memory");
}
template <int C, int A, int B> inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

thread_local float model_tiles[8][TILE][TILE];

inline void begin_tiles() {}
inline void end_tiles() {}
template <int N> inline void clear_tile() { memset(model_tiles[N], 0, sizeof model_tiles[N]); }
template <int N> inline void load_tile(const float *from, int64_t stride) {
    for (int i = 0; i < TILE; ++i) memcpy(model_tiles[N][i], from + i * stride, 64);
}
template <int N> inline void store_tile(float *to, int64_t stride) {
    for (int i = 0; i < TILE; ++i) memcpy(to + i * stride, model_tiles[N][i], 64);
}
template <int C, int A, int B> inline void multiply_tiles() {
    for (int m = 0; m < TILE; ++m)
        for (int k = 0; k < TILE; ++k)
            for (int n = 0; n < TILE; ++n) {
                const uint32_t x = to_bits(model_tiles[A][m][k]), y = to_bits(model_tiles[B][k][n]);
                model_tiles[C][m][n] += from_bits(x << 16) * from_bits(y << 16);
                model_tiles[C][m][n] += from_bits(x & 0xFFFF0000) * from_bits(y & 0xFFFF0000);
            }
}

#endif

}  // namespace
