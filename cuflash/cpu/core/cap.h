// The soft cap, where there is one: scores of products of q and k, and what gradients need of it.
#pragma once

#include "call.h"
#include "vectors.h"

namespace {

inline double size_of_scale(const Call &call) { return call.scale < 0 ? -call.scale : call.scale; }

// Scores in the place of products, of a row of whole vectors. `tanhs`, if it is given, gets what the cap is a factor of.
template <class T> inline void apply_cap(const Call &call, long padded, T *s, T *tanhs) {
    const Vector<T> inner = splat(T(size_of_scale(call) / call.softcap));
    const Vector<T> outer = splat(T(call.softcap));
    for (long j = 0; j < padded; j += LANES<T>) {
        Vector<T> t = tanh<T>(load(s + j) * inner);
        if (tanhs) store(tanhs + j, t);
        store(s + j, t * outer);
    }
}

// The derivative of softcap * tanh(x), x = scale * product / softcap: tanh(x) - x (1 - tanh(x)^2). Near 0, where the
// terms cancel, (sinh(2 x) - 2 x) / 2 * (1 - tanh(x)^2) by the series of the first factor.
template <class T> inline Vector<T> derivative_by_softcap(const Call &call, Vector<T> product, Vector<T> tanh) {
    const Vector<T> x = product * splat(T(size_of_scale(call)) / T(call.softcap));
    const Vector<T> one = splat(T(1)), slope = one - tanh * tanh, size = x < Vector<T>{} ? -x : x;
    const Vector<T> square = size < splat(T(0.5)) ? x * x : Vector<T>{};
    Vector<T> series = one;
    for (int n = 18; n > 3; n -= 2) series = one + splat(T(4.0 / (n * (n + 1)))) * square * series;
    return size < splat(T(0.5)) ? splat(T(2.0 / 3)) * x * square * series * slope : tanh - x * slope;
}

}  // namespace
