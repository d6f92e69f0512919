// NEON of 64-bit ARM processors.
#pragma once

#include "operations.h"

namespace {

template <> inline Vector<float> add_product(Vector<float> sum, Vector<float> x, Vector<float> y) {
    return (Vector<float>)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
}
template <> inline Vector<double> add_product(Vector<double> sum, Vector<double> x, Vector<double> y) {
    return (Vector<double>)vfmaq_f64((float64x2_t)sum, (float64x2_t)x, (float64x2_t)y);
}

template <> inline Vector<float> load_as<float>(const Float16 *p) {
    return (Vector<float>)vcvt_f32_f16(vld1_f16((const float16_t *)p));
}

}  // namespace
