// float16 numbers as exact sums of two numbers of bfloat16, so that tile registers can multiply them. A number that is
// not finite has no such sum.
#pragma once

#include "bf16x2.h"

namespace {

// Splits a row of floats, which is whole vectors, into bf16x2 of neighbours: high terms and low terms.
inline void split_to_bf16x2(const float *row, int64_t count, float *high, float *low) {
    for (int64_t j = 0; j < count; j += LANES<float>) {
        const Vector<float> x = load(row + j);
        const Halves upper = round_to_bfloat16<float>(x);
        store_halves(high + j / 2, upper);
        store_halves(low + j / 2, round_to_bfloat16<float>(x - floats_of<float>(upper)));
    }
}

// Splits two vectors of numbers of float16 into bf16x2: the two numbers of a lane are one. The high terms are the
// numbers cut off after 16 bits; the low terms are the rest, which has three bits.
inline void split_lanes(Vector<float> x, Vector<float> y, float *high, float *low) {
    const Integers<float> mask = Integers<float>{} + int32_t(0xFFFF0000);
    auto join = [&](Vector<float> first, Vector<float> second) {
        typedef uint32_t Unsigned __attribute__((vector_size(VECTOR_BYTES)));
        return (Vector<float>)((Integers<float>)((Unsigned)first >> 16) | ((Integers<float>)second & mask));
    };
    auto rest = [&](Vector<float> x) { return x - (Vector<float>)((Integers<float>)x & mask); };
    store(high, join(x, y));
    store(low, join(rest(x), rest(y)));
}

// Splits a row of float16, with zeros up to `width` bf16x2. Of the numbers of two vectors, those of the same lane make
// one.
inline void load_split(const char *in, int64_t step, int64_t dim, int64_t width, float *high, float *low) {
    constexpr int N = LANES<float>;
    const bool is_whole = step == 1 && dim == 2 * width;
    Bits copied[2 * N];
    for (int64_t d = 0; d < width; d += N) {
        if (!is_whole) load_piece(in, step, dim, 2 * d, copied, 2 * N);
        const Float16 *row = is_whole ? (const Float16 *)in + 2 * d : (const Float16 *)copied;
        split_lanes(load_as<float>(row), load_as<float>(row + N), high + d, low + d);
    }
}

// Splits two rows of float16, of which the second may be missing, into bf16x2: the two numbers of a column are one.
inline void interleave_split(const char *first, const char *second, int64_t step, int64_t dim, int64_t padded,
                             float *high, float *low) {
    constexpr int N = LANES<float>;
    const char *rows[2] = {first, second};
    for (int64_t d = 0; d < padded; d += N) {
        Vector<float> numbers[2];
        for (int n = 0; n < 2; ++n) {
            const bool is_whole = step == 1 && dim == padded && rows[n];
            Bits copied[N];
            if (!is_whole) load_piece(rows[n] ? rows[n] : first, step, rows[n] ? dim : 0, d, copied, N);
            numbers[n] = load_as<float>(is_whole ? (const Float16 *)rows[n] + d : (const Float16 *)copied);
        }
        split_lanes(numbers[0], numbers[1], high + d, low + d);
    }
}

// Whether a row of float16 has no number that is infinite or NaN.
inline bool is_finite_row(const char *in, int64_t step, int64_t count) {
    const Bits *bits = (const Bits *)in;
    if (step == 1) return are_finite(bits, count);
    bool is_finite = true;
    for (int64_t d = 0; d < count; ++d) is_finite &= (bits[d * step] & INFINITE_FLOAT16) != INFINITE_FLOAT16;
    return is_finite;
}

}  // namespace
