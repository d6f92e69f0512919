// The library for functions of a caller, which cuflash/score_mod/codegen.py writes: entries of score_mod args, and
// functions of numbers as in NumPy.
#pragma once
#include "common/config.cuh"
#include "common/softmax/exponential.cuh"

// An array that a function reads, of up to four axes; strides in elements. An index outside of an axis counts as the
// nearest one within.
struct ScoreArg {
  const void* data;
  i64 stride[4];
  i64 size[4];
  i64 first;  // of a table (cuflash/score_mod/tables.py), the position of its first entry
};

// The offset of an element from the first one of an array. 32 bits are enough if no array reaches far, and none back.
template <bool narrow>
struct Offsets {
  using Type = i64;
};
template <>
struct Offsets<true> {
  using Type = u32;
};
using Offset = Offsets<CUFLASH_NARROW_SCORE_ARGS>::Type;

template <class E, class Stored, class At>
CUFLASH_DEVICE auto score_element(E, const Stored* data, At at) {
  if constexpr (sizeof(Stored) == 2)
    return to_real<E>(data[at]);
  else if constexpr (sizeof(Stored) == 1)
    return data[at] != 0;
  else
    return data[at];
}
template <class E>
struct StoredAs {
  using Type = u16;
};
template <>
struct StoredAs<float> {
  using Type = float;
};
template <>
struct StoredAs<double> {
  using Type = double;
};
template <>
struct StoredAs<i32> {
  using Type = i32;
};
template <>
struct StoredAs<i64> {
  using Type = i64;
};
template <>
struct StoredAs<u8> {
  using Type = u8;
};

// The entry of an axis for an index: the nearest one if the index is outside.
CUFLASH_DEVICE i64 score_entry(i64 size, i64 index) { return index < 0 ? 0 : index < size ? index : size - 1; }
CUFLASH_DEVICE u32 score_entry(i64 size, u32 index) {
  const u32 last = size > 0xffffffffll ? 0xffffffffu : (u32)size - 1;
  return index < last ? index : last;
}
CUFLASH_DEVICE u32 score_entry(i64 size, int index) { return score_entry(size, (u32)(index < 0 ? 0 : index)); }

template <int axis>
CUFLASH_DEVICE Offset score_offset(const ScoreArg&) {
  return 0;
}
template <int axis, class Index, class... Rest>
CUFLASH_DEVICE Offset score_offset(const ScoreArg& array, Index index, Rest... rest) {
  const Offset within = score_entry(array.size[axis], index);
  return within * (Offset)array.stride[axis] + score_offset<axis + 1>(array, rest...);
}
template <class E, class... Indices>
CUFLASH_DEVICE auto score_load(const ScoreArg& array, Indices... indices) {
  return score_element(E{}, (const typename StoredAs<E>::Type*)array.data, score_offset<0>(array, indices...));
}

// The flat index of an element of an array, in C order.
template <int axis>
CUFLASH_DEVICE i64 flat_index(const ScoreArg&, i64 outer) {
  return outer;
}
template <int axis, class Index, class... Rest>
CUFLASH_DEVICE i64 flat_index(const ScoreArg& array, i64 outer, Index index, Rest... rest) {
  const i64 within = score_entry(array.size[axis], index);
  return flat_index<axis + 1>(array, outer * array.size[axis] + within, rest...);
}

// A table is over batch entries, heads and positions. Its stride is 0 and its size 1 on an axis whose entries share a
// row. Returns the address of position 0 of a row.
template <class E>
CUFLASH_DEVICE const typename StoredAs<E>::Type* row_of_table(const ScoreArg& table, int batch, int head) {
  const i64 row = batch * table.stride[0] + head * table.stride[1];
  return (const typename StoredAs<E>::Type*)table.data + (row - table.first);
}
// The index of an entry among all entries of a table.
CUFLASH_DEVICE i64 index_in_table(const ScoreArg& table, int batch, int head, int position) {
  return (batch * table.size[1] + head) * table.size[2] + (position - table.first);
}

CUFLASH_DEVICE void score_put(float, void* data, i64 at, Real value) { ((float*)data)[at] = value; }
CUFLASH_DEVICE void score_put(double, void* data, i64 at, Real value) { ((double*)data)[at] = value; }
template <class E>
CUFLASH_DEVICE void score_put(E, void* data, i64 at, Real value) {
  ((u16*)data)[at] = (u16)ptx::pack(E{}, value, value);
}

CUFLASH_DEVICE float score_exp(float x) { return expf(x); }
CUFLASH_DEVICE double score_exp(double x) { return exp(x); }
CUFLASH_DEVICE float score_log(float x) { return logf(x); }
CUFLASH_DEVICE double score_log(double x) { return log(x); }
CUFLASH_DEVICE float score_sqrt(float x) { return sqrtf(x); }
CUFLASH_DEVICE double score_sqrt(double x) { return sqrt(x); }
CUFLASH_DEVICE float score_tanh(float x) { return tanhf(x); }
CUFLASH_DEVICE double score_tanh(double x) { return tanh(x); }
CUFLASH_DEVICE float score_sin(float x) { return sinf(x); }
CUFLASH_DEVICE double score_sin(double x) { return sin(x); }
CUFLASH_DEVICE float score_cos(float x) { return cosf(x); }
CUFLASH_DEVICE double score_cos(double x) { return cos(x); }
CUFLASH_DEVICE float score_pow(float x, float y) { return powf(x, y); }
CUFLASH_DEVICE double score_pow(double x, double y) { return pow(x, y); }
CUFLASH_DEVICE float score_floor(float x) { return ptx::floor_to_float(x); }
CUFLASH_DEVICE double score_floor(double x) { return floor(x); }
CUFLASH_DEVICE float score_abs(float x) { return fabsf(x); }
CUFLASH_DEVICE double score_abs(double x) { return fabs(x); }
// sech(x)^2 = 1 - tanh(x)^2, the derivative of tanh, from an exponential: what is left of the difference where tanh is
// near 1 are rounding errors.
template <class T>
CUFLASH_DEVICE T score_sech2(T x) {
  const T e = score_exp(-2 * score_abs(x));
  return 4 * e / ((1 + e) * (1 + e));
}
CUFLASH_DEVICE int score_abs(int x) { return x < 0 ? -x : x; }
CUFLASH_DEVICE i64 score_abs(i64 x) { return x < 0 ? -x : x; }

// Functions for numbers whose last bits decide nothing, such as a comparison. For 16-bit elements they are as accurate
// as fast_tanh.
CUFLASH_DEVICE Real score_fast_exp(Real x) { return kWide ? score_exp(x) : (Real)ptx::exp2_approx((float)x * kLog2e); }
CUFLASH_DEVICE Real score_fast_log(Real x) { return kWide ? score_log(x) : (Real)(ptx::log2_approx((float)x) * kLn2); }
CUFLASH_DEVICE Real score_fast_sqrt(Real x) { return kWide ? score_sqrt(x) : (Real)ptx::sqrt_approx((float)x); }
CUFLASH_DEVICE Real score_fast_tanh(Real x) { return kWide ? score_tanh(x) : fast_tanh(x); }
// From the exponential e of the tanh that the score needs, too: sech(x)^2 = 4 r (1 - r) with r = 1 / (1 + e). Where r
// is near 1, little is left of the difference, and it is e r.
CUFLASH_DEVICE float fast_sech2(float x) {
  const float e = ptx::exp2_approx(x * (2.0f * kLog2e)), r = ptx::reciprocal_approx(1.0f + e);
  return 4.0f * r * (x < 0 ? e * r : 1.0f - r);
}
CUFLASH_DEVICE Real score_fast_sech2(Real x) { return kWide ? score_sech2(x) : (Real)fast_sech2((float)x); }
// sin(x + quarters pi / 2), by polynomials at the nearest multiple of pi / 2; within 2^-22 for abs(x) up to 10^4.
CUFLASH_DEVICE float fast_wave(float x, u32 quarters) {
  constexpr float kRoundsToInteger = 12582912.0f;  // 1.5 * 2^23
  const float shifted = x * 0.63661977f + kRoundsToInteger, steps = shifted - kRoundsToInteger;
  // pi / 2 as three terms; the products with the first two are exact.
  const float r = x - steps * 1.5703125f - steps * 4.837512969970703e-4f - steps * 7.549789954891882e-8f, r2 = r * r;
  const float sine = r + r * r2 * (-0.16666655f + r2 * (0.0083321609f + r2 * -0.00019515296f));
  const float cosine = 1.0f - 0.5f * r2 + r2 * r2 * (0.041666646f + r2 * (-0.0013887316f + r2 * 2.4433157e-05f));
  const u32 quarter = ptx::bits_of(shifted) + quarters;
  const float wave = quarter & 1 ? cosine : sine;
  return quarter & 2 ? -wave : wave;
}
CUFLASH_DEVICE Real score_fast_sin(Real x) { return kWide ? score_sin(x) : (Real)fast_wave((float)x, 0); }
CUFLASH_DEVICE Real score_fast_cos(Real x) { return kWide ? score_cos(x) : (Real)fast_wave((float)x, 1); }
CUFLASH_DEVICE Real score_fast_div(Real x, Real y) {
  return kWide ? x / y : x * (Real)ptx::reciprocal_approx((float)y);
}

// x / y, correctly rounded, from the correctly rounded reciprocal of y, in three instructions that need no branch:
// Brisebarre, Muller and Raina, "Accelerating correctly rounded floating-point division when the divisor is known in
// advance" (2004). The remainder of the first quotient is exact unless abs(x) is below 2^-101; then the result may be
// one unit off. What has no finite remainder is as in IEEE arithmetic, but for divisors below 2^-128, which count as 0.
CUFLASH_DEVICE float score_div(float x, float y, float reciprocal) {
  const float quotient = x * reciprocal, remainder = fmaf(-quotient, y, x);
  return fabsf(remainder) < ptx::infinity() ? fmaf(remainder, reciprocal, quotient) : quotient;
}
CUFLASH_DEVICE double score_div(double x, double y, double) { return x / y; }
CUFLASH_DEVICE Real score_fast_div(Real x, Real y, Real reciprocal) {
  return kWide ? score_div(x, y, reciprocal) : x * reciprocal;
}

// The largest integer that is not above x, within 32 bits; 0 for a NaN.
CUFLASH_DEVICE int score_floor_to_int(float x) { return ptx::floor_to_int(x); }
CUFLASH_DEVICE int score_floor_to_int(double x) {
  if (x >= 2147483648.0) return 2147483647;
  if (x <= -2147483648.0) return -2147483647 - 1;
  return x == x ? (int)floor(x) : 0;
}

// If one is a NaN, so is the result.
template <class A, class B>
CUFLASH_DEVICE auto score_min(A a, B b) {
  return a < b || a != a ? a : b;
}
template <class A, class B>
CUFLASH_DEVICE auto score_max(A a, B b) {
  return a > b || a != a ? a : b;
}

// Rounds to minus infinity. Integers divided by zero give zero. Of real numbers, the third may be the reciprocal of the
// divisor.
CUFLASH_DEVICE Real score_floordiv(Real a, Real b, Real reciprocal) { return score_floor(score_div(a, b, reciprocal)); }
CUFLASH_DEVICE Real score_mod(Real a, Real b, Real reciprocal) { return a - b * score_floordiv(a, b, reciprocal); }
template <class A, class B>
CUFLASH_DEVICE auto score_floordiv(A a, B b) {
  if constexpr (Integer<(A)0.5 != 0>::value) {
    return score_floor(a / b);
  } else {
    const auto quotient = b == 0 ? a * 0 : a / (b == 0 ? 1 : b);
    return quotient - (b != 0 && quotient * b != a && (a < 0) != (b < 0));
  }
}
template <class A, class B>
CUFLASH_DEVICE auto score_mod(A a, B b) {
  if constexpr (Integer<(A)0.5 != 0>::value) {
    return a - b * score_floor(a / b);
  } else {
    const auto rest = b == 0 ? a * 0 : a % (b == 0 ? 1 : b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
  }
}

// A derivative times a factor. A derivative of 0, such as that of a branch not taken, stays 0 whatever the factor is.
CUFLASH_DEVICE Real score_product(Real derivative, Real factor) { return derivative == 0 ? 0 : derivative * factor; }

CUFLASH_DEVICE Real score_infinity() { return (Real)ptx::infinity(); }
CUFLASH_DEVICE Real score_nan() { return score_infinity() - score_infinity(); }
