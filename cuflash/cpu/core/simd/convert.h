// Conversions of half precision and fp8.
#pragma once

#include "vectors.h"

namespace {

// Loads neighbours; there are instructions for as many as a vector has.
template <class T> inline void load_float16(const uint16_t *in, int64_t count, T *out) {
    int64_t i = 0;
    if constexpr (HAS_FLOAT16 && sizeof(T) == 4)
        for (; i + LANES<T> <= count; i += LANES<T>) store(out + i, load_as<T>((const Float16 *)(in + i)));
    for (; i < count; ++i) out[i] = T(from_float16(in[i]));
}

template <class T> inline void store_float16(const T *in, int64_t count, uint16_t *out) {
    int64_t i = 0;
    if constexpr (HAS_FLOAT16_STORES && sizeof(T) == 4)
        for (; i + LANES<T> <= count; i += LANES<T>) store_as<T>((Float16 *)(out + i), load(in + i));
    for (; i < count; ++i) out[i] = to_float16(float(in[i]));
}

// fp8 numbers. Those of float8_e5m2 are the upper halves of float16.
inline float from_e4m3fn(uint8_t x) {
    uint32_t size = uint32_t(x & 0x7F) << 20, sign = uint32_t(x & 0x80) << 24;
    uint32_t bits = (x & 0x7F) == 0x7F ? 0x7FC00000 : to_bits(from_bits(size) * 0x1p120f);
    return from_bits(bits | sign);
}
inline float from_e5m2(uint8_t x) { return from_float16(uint16_t(x << 8)); }

}  // namespace
