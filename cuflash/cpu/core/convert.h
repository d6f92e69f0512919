// Rows of operands in the dtype of the computation: loaded from arrays of any dtype and strides, and stored there.
#pragma once

#include "call.h"
#include "vectors.h"

namespace {

inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline float from_bfloat16(uint16_t x) { return from_bits(uint32_t(x) << 16); }

inline uint16_t to_bfloat16(float x) {
    uint32_t bits = to_bits(x);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return uint16_t((bits & 0x7FFFFFFF) > 0x7F800000 ? bits >> 16 | 0x40 : rounded);
}

// A multiplication moves the exponent, because it also turns subnormal numbers into normal ones.
inline float from_float16(uint16_t x) {
    uint32_t size = uint32_t(x & 0x7FFF) << 13, sign = uint32_t(x & 0x8000) << 16;
    uint32_t bits = to_bits(from_bits(size) * 0x1p112f);
    bits = size >= 0x0F800000 ? size | 0x7F800000 : bits;
    return from_bits(bits | sign);
}

// Rounds to nearest even: ordinary numbers by integer arithmetic, those that become subnormal by an addition.
inline uint16_t to_float16(float x) {
    uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
    uint32_t ordinary = (size + 0xFFF + (size >> 13 & 1) - 0x38000000) >> 13;
    uint32_t subnormal = to_bits(from_bits(size) + 0.5f) - 0x3F000000;
    uint32_t result = size < 0x38800000 ? subnormal : ordinary;
    result = size >= 0x477FF000 ? 0x7C00 : result;  // from the middle between the largest number and infinity
    result = size > 0x7F800000 ? 0x7E00 : result;
    return uint16_t(result | sign);
}

// Loads neighbours; there are instructions for as many as a vector has.
template <class T> inline void load_float16(const uint16_t *in, long count, T *out) {
    long i = 0;
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        for (; i + 16 <= count; i += 16)
            _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(in + i))));
#elif defined(__F16C__)
    if constexpr (sizeof(T) == 4)
        for (; i + 8 <= count; i += 8)
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + i))));
#endif
    for (; i < count; ++i) out[i] = T(from_float16(in[i]));
}

// Numbers of 16 bits, which are converted in registers.
struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

template <class T> inline Vector<T> load_as(const T *p) { return load(p); }

template <class T> inline Vector<T> load_as(const Bfloat16 *p) {
    typedef uint16_t Bits __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
    typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
    return (Vector<T>)(__builtin_convertvector(*(const Bits *)p, Words) << 16);
}

template <class T> inline Vector<T> load_as(const Float16 *p) {
    T x[LANES<T>];
    load_float16((const uint16_t *)p, LANES<T>, x);
    return load(x);
}

// Calls `run` with a null pointer to numbers of a dtype that `load_as` loads.
template <class T, class F> inline void with_numbers(int64_t dtype, F run) {
    if constexpr (sizeof(T) == 4) {
        if (dtype == BFLOAT16) return run((const Bfloat16 *)nullptr);
        if (dtype == FLOAT16) return run((const Float16 *)nullptr);
    }
    run((const T *)nullptr);
}

// fp8 numbers. Those of float8_e5m2 are the upper halves of float16.
inline float from_e4m3fn(uint8_t x) {
    uint32_t size = uint32_t(x & 0x7F) << 20, sign = uint32_t(x & 0x80) << 24;
    uint32_t bits = (x & 0x7F) == 0x7F ? 0x7FC00000 : to_bits(from_bits(size) * 0x1p120f);
    return from_bits(bits | sign);
}
inline float from_e5m2(uint8_t x) { return from_float16(uint16_t(x << 8)); }

inline long size_of(int64_t dtype) {
    return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : dtype >= FLOAT8_E4M3FN ? 1 : 2;
}

template <class T, class S, class F> inline void load_each(const S *in, long stride, long count, T *out, F convert) {
    if (stride == 1) {
        for (long i = 0; i < count; ++i) out[i] = T(convert(in[i]));
    } else {
        for (long i = 0; i < count; ++i) out[i] = T(convert(in[i * stride]));
    }
}

// Loads `count` numbers from `in` on, of stride `stride` in elements.
template <class T> inline void load_row(const char *in, int64_t dtype, long stride, long count, T *out) {
    if (dtype == (sizeof(T) == 4 ? FLOAT32 : FLOAT64) && stride == 1) {
        memcpy(out, in, count * sizeof(T));
    } else if (dtype == FLOAT32) {
        load_each((const float *)in, stride, count, out, [](float x) { return x; });
    } else if (dtype == FLOAT64) {
        load_each((const double *)in, stride, count, out, [](double x) { return x; });
    } else if (dtype == BFLOAT16) {
        load_each((const uint16_t *)in, stride, count, out, from_bfloat16);
    } else if (dtype == FLOAT8_E4M3FN) {
        load_each((const uint8_t *)in, stride, count, out, from_e4m3fn);
    } else if (dtype == FLOAT8_E5M2) {
        load_each((const uint8_t *)in, stride, count, out, from_e5m2);
    } else if (stride == 1) {
        load_float16((const uint16_t *)in, count, out);
    } else {
        load_each((const uint16_t *)in, stride, count, out, from_float16);
    }
}

template <class T, class S, class F> inline void store_each(const T *in, long stride, long count, S *out, F convert) {
    if (stride == 1) {
        for (long i = 0; i < count; ++i) out[i] = convert(in[i]);
    } else {
        for (long i = 0; i < count; ++i) out[i * stride] = convert(in[i]);
    }
}

template <class T> inline void store_row(const T *in, int64_t dtype, long stride, long count, char *out) {
    if (dtype == (sizeof(T) == 4 ? FLOAT32 : FLOAT64) && stride == 1) {
        memcpy(out, in, count * sizeof(T));
    } else if (dtype == FLOAT32) {
        store_each(in, stride, count, (float *)out, [](T x) { return float(x); });
    } else if (dtype == FLOAT64) {
        store_each(in, stride, count, (double *)out, [](T x) { return double(x); });
    } else if (dtype == BFLOAT16) {
        store_each(in, stride, count, (uint16_t *)out, [](T x) { return to_bfloat16(float(x)); });
    } else {
        store_each(in, stride, count, (uint16_t *)out, [](T x) { return to_float16(float(x)); });
    }
}

template <class T> inline void clear(T *p, long count) { memset((void *)p, 0, count * sizeof(T)); }

// out[column][row] = in[row][column], in whole squares: zeros follow the last row. The number of columns is a multiple
// of the lanes of a vector.
template <class T>
inline void transpose(const T *in, long stride, long num_rows, long num_columns, T *out, long out_stride) {
    constexpr long N = LANES<T>;
    for (long i = 0; i < num_rows; i += N)
        for (long j = 0; j < num_columns; j += N) {
            const T *from = in + i * stride + j;
            T *to = out + j * out_stride + i;
            if (num_rows - i >= N) {
                transpose_square(from, stride, to, out_stride, N);
            } else {
                transpose_square(from, stride, to, out_stride, num_rows - i);
            }
        }
}

}  // namespace
