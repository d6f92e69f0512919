// Both passes for one kind of processor, which the compiler's flags say. KIND is its name.
#include "backward.h"
#include "kinds.h"

#define JOINED(a, b) a##b
#define NAMED(a, b) JOINED(a, b)

static bool prepare(Work &work) {
    const bool is_double = work.call.dtype == FLOAT64;
    if (work.call.is_backward) return is_double ? prepare_backward<double>(work) : prepare_backward<float>(work);
    return is_double ? prepare_forward<double>(work) : prepare_forward<float>(work);
}

template <class T> static void evaluate_all(bool is_tanh, const T *in, T *out, long count) {
    for (long i = 0; i < count; i += LANES<T>) {
        const long n = smaller(LANES<T>, count - i);
        T values[LANES<T>] = {};
        memcpy(values, in + i, n * sizeof(T));
        const Vector<T> x = load(values);
        store(values, is_tanh ? tanh<T>(x) : exp2<T>(x));
        memcpy(out + i, values, n * sizeof(T));
    }
}

static void evaluate(bool is_double, bool is_tanh, const void *in, void *out, long count) {
    if (is_double) {
        evaluate_all(is_tanh, (const double *)in, (double *)out, count);
    } else {
        evaluate_all(is_tanh, (const float *)in, (float *)out, count);
    }
}

extern const Kernels NAMED(kernels_, KIND) = {prepare, evaluate};
