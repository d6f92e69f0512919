// NEON of 64-bit ARM processors. Other extensions, as SVE, are not used.
#pragma once

#include "operations.h"

namespace {

// Where x is NaN, y: the instruction for maxima would give NaN.
template <> inline Vector<float> larger<float>(Vector<float> x, Vector<float> y) {
    const uint32x4_t is_larger = vcgtq_f32((float32x4_t)x, (float32x4_t)y);
    return (Vector<float>)vbslq_f32(is_larger, (float32x4_t)x, (float32x4_t)y);
}
template <> inline Vector<double> larger<double>(Vector<double> x, Vector<double> y) {
    const uint64x2_t is_larger = vcgtq_f64((float64x2_t)x, (float64x2_t)y);
    return (Vector<double>)vbslq_f64(is_larger, (float64x2_t)x, (float64x2_t)y);
}

template <> inline Vector<float> at_most<float>(Vector<float> x, float limit) {
    return (Vector<float>)vminq_f32((float32x4_t)x, vdupq_n_f32(limit));
}
template <> inline Vector<double> at_most<double>(Vector<double> x, double limit) {
    return (Vector<double>)vminq_f64((float64x2_t)x, vdupq_n_f64(limit));
}

template <> inline Vector<float> unless_below<float>(Vector<float> p, Vector<float> x, Vector<float> limit) {
    const uint32x4_t below = vcltq_f32((float32x4_t)x, (float32x4_t)limit);
    return (Vector<float>)vbicq_u32((uint32x4_t)p, below);
}
template <> inline Vector<double> unless_below<double>(Vector<double> p, Vector<double> x, Vector<double> limit) {
    const uint64x2_t below = vcltq_f64((float64x2_t)x, (float64x2_t)limit);
    return (Vector<double>)vbicq_u64((uint64x2_t)p, below);
}

template <> inline Vector<float> add_product(Vector<float> sum, Vector<float> x, Vector<float> y) {
    return (Vector<float>)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
}
template <> inline Vector<double> add_product(Vector<double> sum, Vector<double> x, Vector<double> y) {
    return (Vector<double>)vfmaq_f64((float64x2_t)sum, (float64x2_t)x, (float64x2_t)y);
}
template <int LANE> inline Vector<float> add_product_by_lane(Vector<float> sum, Vector<float> x, Vector<float> y) {
    return (Vector<float>)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y, LANE);
}
template <int LANE> inline Vector<double> add_product_by_lane(Vector<double> sum, Vector<double> x, Vector<double> y) {
    return (Vector<double>)vfmaq_laneq_f64((float64x2_t)sum, (float64x2_t)x, (float64x2_t)y, LANE);
}

template <> inline float sum_of_lanes<float>(Vector<float> x) { return vaddvq_f32((float32x4_t)x); }
template <> inline double sum_of_lanes<double>(Vector<double> x) { return vaddvq_f64((float64x2_t)x); }
template <> inline float largest_lane<float>(Vector<float> x) { return vmaxvq_f32((float32x4_t)x); }
template <> inline double largest_lane<double>(Vector<double> x) { return vmaxvq_f64((float64x2_t)x); }

template <> inline Vector<float> sums_of_neighbours<float>(Vector<float> x, Vector<float> y) {
    return (Vector<float>)vpaddq_f32((float32x4_t)x, (float32x4_t)y);
}
template <> inline Vector<double> sums_of_neighbours<double>(Vector<double> x, Vector<double> y) {
    return (Vector<double>)vpaddq_f64((float64x2_t)x, (float64x2_t)y);
}

// Of all bytes that are in four or two of them, each becomes as wide as a lane.
template <> inline Integers<float> mask_of_bytes<float>(const unsigned char *bytes) {
    uint32_t few;
    memcpy(&few, bytes, sizeof few);
    return (Integers<float>)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(few))));
}
template <> inline Integers<double> mask_of_bytes<double>(const unsigned char *bytes) {
    uint16_t few;
    memcpy(&few, bytes, sizeof few);
    const int16x4_t wide = vget_low_s16(vmovl_s8(vcreate_s8(few)));
    return (Integers<double>)vmovl_s32(vget_low_s32(vmovl_s16(wide)));
}

// Perfect shuffles in pairs of rows, by name: compilers do not see through picks of lanes as well.
template <>
inline void transpose_square<float>(const float *in, int64_t stride, float *out, int64_t out_stride, int64_t count) {
    auto row = [&](int i) { return i < count ? vld1q_f32(in + i * stride) : vdupq_n_f32(0); };
    const float32x4x2_t even = vzipq_f32(row(0), row(2)), odd = vzipq_f32(row(1), row(3));
    const float32x4x2_t low = vzipq_f32(even.val[0], odd.val[0]), high = vzipq_f32(even.val[1], odd.val[1]);
    vst1q_f32(out, low.val[0]);
    vst1q_f32(out + out_stride, low.val[1]);
    vst1q_f32(out + 2 * out_stride, high.val[0]);
    vst1q_f32(out + 3 * out_stride, high.val[1]);
}
template <>
inline void transpose_square<double>(const double *in, int64_t stride, double *out, int64_t out_stride, int64_t count) {
    const float64x2_t x = vld1q_f64(in), y = count > 1 ? vld1q_f64(in + stride) : vdupq_n_f64(0);
    vst1q_f64(out, vzip1q_f64(x, y));
    vst1q_f64(out + out_stride, vzip2q_f64(x, y));
}

template <> inline Words multiply_words(Words x, uint64_t y) {
    return (Words)vmull_n_u32(vmovn_u64((uint64x2_t)x), uint32_t(y));
}
template <> inline KeptBytes bytes_above(Draws draws, uint16_t limit) {
    return (KeptBytes)vmovn_u16(vcgtq_u16((uint16x8_t)draws, vdupq_n_u16(limit)));
}

template <> inline Vector<float> load_as<float>(const Bfloat16 *p) {
    const uint16x4_t bits = vld1_u16((const uint16_t *)p);
    return (Vector<float>)vzip1q_u16(vdupq_n_u16(0), vcombine_u16(bits, vdup_n_u16(0)));
}
template <> inline Vector<float> load_as<float>(const Float16 *p) {
    return (Vector<float>)vcvt_f32_f16(vld1_f16((const float16_t *)p));
}
template <> inline void store_as<float>(Float16 *p, Vector<float> x) {
    vst1_f16((float16_t *)p, vcvt_f16_f32((float32x4_t)x));
}

}  // namespace
