// Rows of bf16x2: two neighbours along the axis that a product sums over lie in the 32 bits of one element. Products
// and sums are those of float32.
#pragma once

#include "vectors.h"

namespace {

typedef uint32_t Bf16x2Word __attribute__((may_alias));

inline int64_t bf16x2_count(int64_t count) { return ceil_div(count, 2); }

// The stride of rows of bf16x2: whole vectors.
template <class T> inline int64_t bf16x2_stride(int64_t dim) { return round_up(bf16x2_count(dim), LANES<T>); }

constexpr int64_t PIECE = 512;  // numbers of a row that are copied at a time

// Copies a row of bfloat16, and writes zeros after it, up to `padded` numbers.
NOINLINE void load_bits(const char *in, int64_t step, int64_t dim, Bits *out, int64_t padded) {
    if (step == 1) {
        memcpy((void *)out, in, dim * 2);
    } else {
        for (int64_t d = 0; d < dim; ++d) memcpy((void *)(out + d), in + d * step * 2, 2);
    }
    memset((void *)(out + dim), 0, (padded - dim) * 2);
}

// Copies a slice of a row of bfloat16: the numbers from d on that there are, and zeros up to `padded` numbers.
inline void load_piece(const char *row, int64_t step, int64_t dim, int64_t d, Bits *out, int64_t padded) {
    const int64_t count = smaller(padded, larger(0, dim - d));
    load_bits(row + d * step * 2, step, count, out, padded);
}

// Makes bf16x2 of two rows that are whole vectors: the two numbers of a column are one. It stores whole vectors,
// because loads of tile registers wait long for what was stored in smaller pieces.
inline void interleave_whole(const Bits *x, const Bits *y, float *out, int64_t padded) {
    for (int64_t d = 0; d < padded; d += LANES<float>)
        store(out + d, (Vector<float>)(widen<float>(load_halves(x + d)) | widen<float>(load_halves(y + d)) << 16));
}

// The same of any rows, of which the second may be missing.
NOINLINE void interleave(const char *first, const char *second, int64_t step, int64_t dim, float *out, int64_t padded) {
    if (second && step == 1 && dim == padded)
        return interleave_whole((const Bits *)first, (const Bits *)second, out, padded);
    Bits rows[2][PIECE];
    for (int64_t d = 0, count; d < padded; d += count) {
        count = smaller(PIECE, padded - d);
        load_piece(first, step, dim, d, rows[0], count);
        load_piece(second ? second : first, step, second ? dim : 0, d, rows[1], count);
        interleave_whole(rows[0], rows[1], out + d, count);
    }
}

template <class T> inline void negate_bf16x2(T *x, int64_t count) {
    Bf16x2Word *words = (Bf16x2Word *)x;
    for (int64_t x = 0; x < count; ++x) words[x] ^= 0x80008000;
}

// Products of bf16x2, for `product`.
struct Bf16x2Ops {
    static Vector<float> spread(const float *p) {
        int32_t bits;
        memcpy(&bits, p, 4);
        return (Vector<float>)(Integers<float>{} + bits);
    }
    static Vector<float> add(Vector<float> sum, Vector<float> x, Vector<float> y) {
        return add_bf16x2_product<float>(sum, x, y);
    }
};

inline void store_halves(float *out, Halves halves) { memcpy((void *)out, &halves, sizeof halves); }

// Rounds a row of whole vectors to bf16x2 of neighbours. `out` may begin where the row does.
inline void round_to_bf16x2(const float *row, int64_t count, float *out) {
    for (int64_t j = 0; j < count; j += LANES<float>)
        store_halves(out + j / 2, round_to_bfloat16<float>(load(row + j)));
}

// Rounds two rows to bf16x2: the two numbers of a column are one. `out` may be the first row.
inline void round_to_bf16x2(const float *first, const float *second, int64_t count, float *out) {
    for (int64_t j = 0; j < count; j += LANES<float>)
        store(out + j, interleave_halves<float>(round_to_bfloat16<float>(load(first + j), load(second + j))));
}

}  // namespace
