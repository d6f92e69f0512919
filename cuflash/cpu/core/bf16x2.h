// Operands of products of bfloat16, where there are instructions for them: two neighbours along the axis that a product
// sums over lie in the 32 bits of one element, a bf16x2. Products and sums are those of float32; weights, and gradients
// of scores, are rounded to bfloat16 before they are multiplied, as on a GPU.
#pragma once

#include "score_tiles.h"

namespace {

typedef uint16_t Bits __attribute__((may_alias));
typedef uint32_t Bf16x2Word __attribute__((may_alias));

#if defined(__AVX512BF16__)
constexpr bool HAS_BF16X2 = true;
#else
constexpr bool HAS_BF16X2 = false;
struct Bf16x2Ops;
#endif

template <class T> constexpr bool MAY_USE_BF16X2 = HAS_BF16X2 && sizeof(T) == 4;

template <class T> inline bool uses_bf16x2(const Call &call) { return MAY_USE_BF16X2<T> && call.kv_dtype == BFLOAT16; }

inline long bf16x2_count(long count) { return ceil_div(count, 2); }

// The stride of rows of bf16x2: whole vectors.
template <class T> inline long bf16x2_stride(long dim) { return round_up(bf16x2_count(dim), LANES<T>); }

constexpr long KEYS_BF16X2_STRIDE = MAX_KEYS / 2 + 16;  // of rows of bf16x2 of keys
constexpr long PIECE = 512;                             // numbers of a row that are copied at a time

// Copies a row of bfloat16, and writes zeros after it, up to `padded` numbers.
inline void load_bits(const char *in, long step, long dim, Bits *out, long padded) {
    if (step == 1) {
        memcpy((void *)out, in, dim * 2);
    } else {
        for (long d = 0; d < dim; ++d) memcpy((void *)(out + d), in + d * step * 2, 2);
    }
    memset((void *)(out + dim), 0, (padded - dim) * 2);
}

// Copies a slice of a row of bfloat16: the numbers from d on that there are, and zeros up to `padded` numbers.
inline void load_piece(const char *row, long step, long dim, long d, Bits *out, long padded) {
    const long count = smaller(padded, larger(0, dim - d));
    load_bits(row + d * step * 2, step, count, out, padded);
}

// Makes bf16x2 of two rows that are whole vectors: the two numbers of a column are one. It stores whole vectors,
// because loads of tile registers wait long for what was stored in smaller pieces.
inline void interleave_whole(const Bits *x, const Bits *y, float *out, long padded) {
#if defined(__AVX512F__)
    auto words = [](const Bits *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); };
    for (long d = 0; d < padded; d += LANES<float>)
        store(out + d, (Vector<float>)_mm512_or_si512(words(x + d), _mm512_slli_epi32(words(y + d), 16)));
#else
    Bf16x2Word *words = (Bf16x2Word *)out;
    for (long d = 0; d < padded; ++d) words[d] = uint32_t(x[d]) | uint32_t(y[d]) << 16;
#endif
}

// The same of any rows, of which the second may be missing.
inline void interleave(const char *first, const char *second, long step, long dim, float *out, long padded) {
    if (second && step == 1 && dim == padded)
        return interleave_whole((const Bits *)first, (const Bits *)second, out, padded);
    Bits rows[2][PIECE];
    for (long d = 0, count; d < padded; d += count) {
        count = smaller(PIECE, padded - d);
        load_piece(first, step, dim, d, rows[0], count);
        load_piece(second ? second : first, step, second ? dim : 0, d, rows[1], count);
        interleave_whole(rows[0], rows[1], out + d, count);
    }
}

template <class T> inline void negate_bf16x2(T *x, long count) {
    Bf16x2Word *words = (Bf16x2Word *)x;
    for (long x = 0; x < count; ++x) words[x] ^= 0x80008000;
}

// Loads rows of q or dout of a block as bf16x2 of neighbours.
template <class T>
inline void load_rows_bf16x2(const Call &call, Array array, const Entry &entry, const Block &block, long dim, T *out,
                             bool is_negative) {
    const long stride = bf16x2_stride<T>(dim);
    for (long r = 0; r < rows_of(block); ++r)
        load_bits(row_address(call, array, entry, row_of(block, r)), call.strides[array][3], dim,
                  (Bits *)(out + r * stride), 2 * stride);
    if (is_negative) negate_bf16x2(out, rows_of(block) * stride);
}

// Loads rows of k or v as bf16x2 of neighbours, transposed: each row of the result has one bf16x2 of every key, up to a
// whole vector of keys. Rows that are whole vectors are read where they lie.
template <class T>
inline void load_keys_bf16x2(const Call &call, Array array, const Entry &entry, long head_kv, long first, long count,
                             long dim, T *rows, T *transposed, long transposed_stride) {
    const long stride = bf16x2_stride<T>(dim);
    const int64_t *strides = call.strides[array];
    const char *own = key_address(call, array, entry, head_kv, first);
    if (strides[3] == 1 && strides[2] % 2 == 0 && dim == 2 * stride && !call.page_size && (uintptr_t)own % 4 == 0)
        return transpose((const T *)own, strides[2] / 2, count, stride, transposed, transposed_stride);
    for (long j = 0; j < count; ++j)
        load_bits(key_address(call, array, entry, head_kv, first + j), call.strides[array][3], dim,
                  (Bits *)(rows + j * stride), 2 * stride);
    transpose(rows, stride, count, stride, transposed, transposed_stride);
}

// Loads rows of k or v as bf16x2 of neighbouring keys.
template <class T>
inline void interleave_keys(const Call &call, Array array, const Entry &entry, long head_kv, long first, long count,
                            long dim, T *out) {
    const long padded = round_up(dim, LANES<T>);
    for (long j = 0; j < count; j += 2)
        interleave(key_address(call, array, entry, head_kv, first + j),
                   j + 1 < count ? key_address(call, array, entry, head_kv, first + j + 1) : nullptr,
                   call.strides[array][3], dim, (float *)out + j / 2 * padded, padded);
}

#if defined(__AVX512BF16__)
// Products of bf16x2, for `product`.
struct Bf16x2Ops {
    static Vector<float> spread(const float *p) {
        int32_t bits;
        memcpy(&bits, p, 4);
        return (Vector<float>)_mm512_set1_epi32(bits);
    }
    static Vector<float> add(Vector<float> sum, Vector<float> x, Vector<float> y) {
        return (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
    }
};

// Rounds a row, whose length is a multiple of 16, to bf16x2 of neighbours. `out` may begin where the row does.
inline void round_to_bf16x2(const float *row, long count, float *out) {
    for (long j = 0; j < count; j += 16) {
        const __m256bh rounded = _mm512_cvtneps_pbh((__m512)load(row + j));
        memcpy((void *)(out + j / 2), &rounded, sizeof rounded);
    }
}

// Rounds two rows to bf16x2: the two numbers of a column are one. `out` may be the first row.
inline void round_to_bf16x2(const float *first, const float *second, long count, float *out) {
    Bits order[32];
    for (int i = 0; i < 32; ++i) order[i] = uint16_t(i / 2 + i % 2 * 16);
    const __m512i from = _mm512_loadu_si512(order);
    for (long j = 0; j < count; j += 16) {
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(second + j), (__m512)load(first + j));
        store(out + j, (Vector<float>)_mm512_permutexvar_epi16(from, (__m512i)both));
    }
}
#endif

}  // namespace
