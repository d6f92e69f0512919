// The targets that the kernels are compiled for.
#pragma once

#include "work.h"

// Those from EXP2_OF_HALF_LESS on where there is bf16x2, the last one with AVX-512.
enum Function { EXP2, TANH, LOG, EXP2_OF_HALF_LESS, ROUGH_TANH, EXP2_BY_TABLE };

struct Kernels {
    // Makes the phases of a call; returns false if memory runs out.
    bool (*prepare)(Work &work);
    // A function of all numbers of an array, for tests.
    void (*evaluate)(bool is_double, Function function, const void *in, void *out, int64_t count);
    // What a thread does before its jobs and after them.
    void (*begin)();
    void (*end)();
};

extern const Kernels kernels_baseline;
// Those of other architectures, and those whose instructions the compiler does not know, are left out: their functions
// are null.
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bfloat16, kernels_amx;
