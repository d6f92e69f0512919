// The soft cap: it turns products of q and k into scores. Gradients need its derivatives.
#pragma once

#include "call.h"
#include "simd/vectors.h"

namespace {

inline double size_of_scale(const Call &call) { return call.scale < 0 ? -call.scale : call.scale; }

// Replaces the products of a row, which is whole vectors, by scores softcap * tanh(x). `tanhs`, if given, gets tanh(x).
template <class T> inline void apply_cap(const Call &call, int64_t padded, T *s, T *tanhs) {
    const Vector<T> inner = splat(T(size_of_scale(call) / call.softcap));
    const Vector<T> outer = splat(T(call.softcap));
    auto cap = [&](auto tanh_of) {
        auto apply = [&](int64_t j, auto count) {
            constexpr int COUNT = count;
            Vector<T> x[COUNT];
#pragma GCC unroll 4
            for (int u = 0; u < COUNT; ++u) x[u] = load(s + j + u * LANES<T>) * inner;
            tanh_of(x);
#pragma GCC unroll 4
            for (int u = 0; u < COUNT; ++u) {
                if (tanhs) store(tanhs + j + u * LANES<T>, x[u]);
                store(s + j + u * LANES<T>, x[u] * outer);
            }
        };
        int64_t j = 0;
        for (; j + 4 * LANES<T> <= padded; j += 4 * LANES<T>) apply(j, std::integral_constant<int, 4>());
        for (; j < padded; j += LANES<T>) apply(j, std::integral_constant<int, 1>());
    };
    if constexpr (MAY_USE_BF16X2<T>)
        if (call.dtype == BFLOAT16) return cap([](auto &x) { rough_tanh_of_each(x); });
    cap([](auto &x) { tanh_of_each<T>(x); });
}

// The derivative of softcap * tanh(x) by softcap * x, given tanh(x).
template <class T> inline Vector<T> slope_of_cap(Vector<T> tanh) { return splat(T(1)) - tanh * tanh; }

// x = scale * product / softcap, for derivatives: within bounds beyond which those of tanh are 0, because it may be
// infinite, and infinity times 0 is NaN.
template <class T> inline Vector<T> argument_of_cap(const Call &call, Vector<T> product) {
    const Vector<T> x = product * splat(T(size_of_scale(call) / call.softcap)), most = splat(T(64));
    return x > most ? most : x < -most ? -most : x;
}

// The derivative of softcap * tanh(x), x = scale * product / softcap, by softcap: tanh(x) - x (1 - tanh(x)^2). The
// terms cancel near 0, so there it is computed as (sinh(2 x) - 2 x) / 2 * (1 - tanh(x)^2), by the series of the first
// factor.
template <class T> inline Vector<T> derivative_by_softcap(const Call &call, Vector<T> product, Vector<T> tanh) {
    const Vector<T> x = argument_of_cap<T>(call, product);
    const Vector<T> one = splat(T(1)), slope = slope_of_cap<T>(tanh), size = x < Vector<T>{} ? -x : x;
    const Vector<T> square = size < splat(T(0.5)) ? x * x : Vector<T>{};
    Vector<T> series = one;
#pragma GCC unroll 8
    for (int n = 18; n > 3; n -= 2) series = one + splat(T(4.0 / (n * (n + 1)))) * square * series;
    return size < splat(T(0.5)) ? splat(T(2.0 / 3)) * x * square * series * slope : tanh - x * slope;
}

}  // namespace
