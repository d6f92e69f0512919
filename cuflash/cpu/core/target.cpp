// Both passes for one target, which the compiler's flags say. TARGET is its name.
#include "targets.h"
#include "backward.h"
#include "forward.h"
#if !defined(ONLY_BFLOAT16)
#include "backward_jvp.h"
#include "jvp.h"
#include "small_heads.h"
#include "weight_reductions.h"
#endif

#define JOINED(a, b) a##b
#define NAMED(a, b) JOINED(a, b)

template <class T> static bool prepare_pass(Work &work) {
#if !defined(ONLY_BFLOAT16)
    if (work.tangents)
        return work.call.is_backward ? prepare_backward<T, BackwardJvpBuffers<T>>(work) : prepare_jvp<T>(work);
    if (reduces_weights(work.call)) return prepare_weight_reduction<T>(work);
    if (!work.call.finds_row_sums && is_small(work.call)) return prepare_small<T>(work);
#endif
    if (work.call.finds_row_sums) return prepare_row_sums<T>(work);
    return work.call.is_backward ? prepare_backward<T, BackwardBuffers<T>>(work) : prepare_forward<T>(work);
}

static bool prepare(Work &work) {
#if !defined(ONLY_BFLOAT16)
    if (work.call.dtype == FLOAT64) return prepare_pass<double>(work);
#endif
    return prepare_pass<float>(work);
}

template <class T> static Vector<T> value_of(Function function, Vector<T> x) {
    Vector<T> values[] = {x};
    if constexpr (MAY_USE_BF16X2<T>) {
        if (function == EXP2_OF_HALF_LESS) return exp2_of_half_less(x);
        if (function == ROUGH_TANH) return rough_tanh_of_each(values), values[0];
    }
    if constexpr (HAS_TABLE_EXP2<T>)
        if (function == EXP2_BY_TABLE) return Exp2ByTable(1)(x);
    if (function == TANH) return tanh_of_each<T>(values), values[0];
    return function == LOG ? log<T>(x) : exp2<T>(x);
}

template <class T> static void evaluate_all(Function function, const T *in, T *out, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES<T>) {
        const int64_t n = smaller(LANES<T>, count - i);
        T values[LANES<T>] = {};
        memcpy(values, in + i, n * sizeof(T));
        store(values, value_of<T>(function, load(values)));
        memcpy(out + i, values, n * sizeof(T));
    }
}

static void evaluate(bool is_double, Function function, const void *in, void *out, int64_t count) {
    if (is_double) {
        evaluate_all(function, (const double *)in, (double *)out, count);
    } else {
        evaluate_all(function, (const float *)in, (float *)out, count);
    }
}

static void begin() {
    if constexpr (HAS_TILES) begin_tiles();
}
static void end() {
    if constexpr (HAS_TILES) end_tiles();
}

extern const Kernels NAMED(kernels_, TARGET) = {prepare, evaluate, begin, end};
