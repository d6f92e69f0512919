// Rows of operands in the dtype of the computation: loaded from arrays of any dtype and strides, and stored there.
#pragma once

#include "call.h"
#include "simd/convert.h"

namespace {

// Calls `run` with a null pointer to numbers of a dtype that `load_as` loads.
template <class T, class F> inline void with_numbers(int64_t dtype, F run) {
    if constexpr (sizeof(T) == 4) {
        if (dtype == BFLOAT16) return run((const Bfloat16 *)nullptr);
        if (dtype == FLOAT16) return run((const Float16 *)nullptr);
    }
    run((const T *)nullptr);
}

inline int64_t size_of(int64_t dtype) {
    return dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : dtype >= FLOAT8_E4M3FN ? 1 : 2;
}

template <class T, class S, class F>
inline void load_each(const S *in, int64_t stride, int64_t count, T *out, F convert) {
    if (stride == 1) {
        for (int64_t i = 0; i < count; ++i) out[i] = T(convert(in[i]));
    } else {
        for (int64_t i = 0; i < count; ++i) out[i] = T(convert(in[i * stride]));
    }
}

// Loads `count` numbers from `in` on, of stride `stride` in elements.
template <class T> inline void load_row(const char *in, int64_t dtype, int64_t stride, int64_t count, T *out) {
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

template <class T, class S, class F>
inline void store_each(const T *in, int64_t stride, int64_t count, S *out, F convert) {
    if (stride == 1) {
        for (int64_t i = 0; i < count; ++i) out[i] = convert(in[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) out[i * stride] = convert(in[i]);
    }
}

template <class T> inline void store_row(const T *in, int64_t dtype, int64_t stride, int64_t count, char *out) {
    if (dtype == (sizeof(T) == 4 ? FLOAT32 : FLOAT64) && stride == 1) {
        memcpy(out, in, count * sizeof(T));
    } else if (dtype == FLOAT32) {
        store_each(in, stride, count, (float *)out, [](T x) { return float(x); });
    } else if (dtype == FLOAT64) {
        store_each(in, stride, count, (double *)out, [](T x) { return double(x); });
    } else if (dtype == BFLOAT16) {
        store_each(in, stride, count, (uint16_t *)out, [](T x) { return to_bfloat16(float(x)); });
    } else if (HAS_FLOAT16_STORES && stride == 1) {
        store_float16(in, count, (uint16_t *)out);
    } else {
        store_each(in, stride, count, (uint16_t *)out, [](T x) { return to_float16(float(x)); });
    }
}

template <class T> inline void clear(T *p, int64_t count) { memset((void *)p, 0, count * sizeof(T)); }

}  // namespace
