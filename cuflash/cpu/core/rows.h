// Rows of operands in the dtype of the computation: loaded from arrays of any dtype and strides, and stored there.
#pragma once

#include "call.h"
#include "simd/convert.h"

namespace {

// Calls `run` with a null pointer to numbers of a dtype that `load_as` loads.
template <class T, class F> inline void with_element_type(int64_t dtype, F run) {
    if constexpr (sizeof(T) == 4) {
        if (dtype == BFLOAT16) return run((const Bfloat16 *)nullptr);
        if constexpr (SERVES_FLOAT16)
            if (dtype == FLOAT16) return run((const Float16 *)nullptr);
    }
    run((const T *)nullptr);
}

// The dtype of T.
template <class T> constexpr int64_t OWN_DTYPE = sizeof(T) == 4 ? FLOAT32 : FLOAT64;

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

// Loads `count` numbers from `in` on, of stride `stride` in elements: of T, fp8, or half precision if T is float.
template <class T> NOINLINE void load_row(const char *in, int64_t dtype, int64_t stride, int64_t count, T *out) {
    if (dtype == OWN_DTYPE<T> && stride == 1) {
        memcpy(out, in, count * sizeof(T));
    } else if (dtype == OWN_DTYPE<T>) {
        for (int64_t i = 0; i < count; ++i) out[i] = ((const T *)in)[i * stride];
    } else if (dtype == FLOAT8_E4M3FN) {
        load_each((const uint8_t *)in, stride, count, out, from_e4m3fn);
    } else if (dtype == FLOAT8_E5M2) {
        load_each((const uint8_t *)in, stride, count, out, from_e5m2);
    } else if constexpr (sizeof(T) == 4) {
        if (dtype == BFLOAT16) {
            load_each((const uint16_t *)in, stride, count, out, from_bfloat16);
        } else if (stride == 1) {
            load_float16((const uint16_t *)in, count, out);
        } else {
            load_each((const uint16_t *)in, stride, count, out, from_float16);
        }
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

// Stores them, as numbers of T, or of half precision if T is float.
template <class T> NOINLINE void store_row(const T *in, int64_t dtype, int64_t stride, int64_t count, char *out) {
    if (dtype == OWN_DTYPE<T> && stride == 1) {
        memcpy(out, in, count * sizeof(T));
    } else if (dtype == OWN_DTYPE<T>) {
        for (int64_t i = 0; i < count; ++i) ((T *)out)[i * stride] = in[i];
    } else if constexpr (sizeof(T) == 4) {
        if (dtype == BFLOAT16) {
            store_each(in, stride, count, (uint16_t *)out, to_bfloat16);
        } else if (HAS_FLOAT16_STORES && stride == 1) {
            store_float16(in, count, (uint16_t *)out);
        } else {
            store_each(in, stride, count, (uint16_t *)out, to_float16);
        }
    }
}

// Stores zeros, of any dtype.
inline void clear_row(char *out, int64_t dtype, int64_t stride, int64_t count) {
    const int64_t size = size_of(dtype);
    if (stride == 1) return void(memset(out, 0, count * size));
    for (int64_t i = 0; i < count; ++i) memset(out + i * stride * size, 0, size);
}

template <class T> inline void clear(T *p, int64_t count) { memset((void *)p, 0, count * sizeof(T)); }

}  // namespace
