// Both passes for one kind of processor, which the compiler's flags say. KERNELS is the name of the function.
#include "backward.h"

bool KERNELS(Work &work) {
    const bool is_double = work.call.dtype == FLOAT64;
    if (work.call.is_backward) return is_double ? prepare_backward<double>(work) : prepare_backward<float>(work);
    return is_double ? prepare_forward<double>(work) : prepare_forward<float>(work);
}
