// Exponentials, logarithms and tanh, each as accurate as the element type needs.
//
// The softmax works on exponents. For 16-bit elements their base is 2: 2^x is one instruction, whose error is below the
// rounding of P. For wide elements their base is e, so that no rounded constant is folded into the scale.
//
// The row max (the running maximum m) is an exponent, too, except for 16-bit elements with natural scores
// (kNaturalRowMax): a finite bias near the end of float32 has no exponent of base 2 that is finite, and two scores
// that are equal have the same weight only if each is rounded once. There the difference from the row max, which is
// exact where it matters, becomes an exponent.
#pragma once
#include "common/config.cuh"

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

constexpr Real kLargeLse = kWide ? 128 : 1024;  // what rounding leaves of such an lse is no longer negligible

constexpr Real kExponentOfE = kWide ? (Real)1 : (Real)kLog2e;  // turns a natural exponent into an exponent

// x = steps log 2 + r, with abs(r) at most log(2) / 2. abs(x) is below 2^10. The polynomials interpolate (e^r - 1 - r)
// / r^2 at Chebyshev points; that leaves 0.02 (float32) and 0.15 (float64) units in the last place of e^r.
template <class T>
struct Reduced;

template <>
struct Reduced<float> {
  float power;  // 2^steps
  float rest;   // e^r - 1

  CUFLASH_DEVICE explicit Reduced(float x) {
    constexpr float kRoundsToInteger = 12582912.0f;  // 1.5 * 2^23: its sum with x has no bits for a fraction
    const float shifted = x * kLog2e + kRoundsToInteger;
    const float steps = shifted - kRoundsToInteger;
    // The product with the first term of log 2 is exact.
    const float r = x - steps * 0.693145751953125f - steps * 1.4286068e-06f;
    float series = 0.0001989103f;
    series = series * r + 0.0013933686f;
    series = series * r + 0.0083333105f;
    series = series * r + 0.041666463f;
    series = series * r + 0.16666667f;
    series = series * r + 0.5f;
    power = ptx::float_of(((u32)(i32)steps + 127u) << 23);
    rest = r + r * r * series;
  }
};

template <>
struct Reduced<double> {
  double power;
  double rest;

  CUFLASH_DEVICE explicit Reduced(double x) {
    constexpr double kRoundsToInteger = 6755399441055744.0;  // 1.5 * 2^52
    const double shifted = x * 1.4426950408889634 + kRoundsToInteger;
    const double steps = shifted - kRoundsToInteger;
    const double r = x - steps * 0.6931471805598903 - steps * 5.497923018708371e-14;
    double series = 2.5100424157005067e-08;
    series = series * r + 2.7620138719733994e-07;
    series = series * r + 2.7557268378684192e-06;
    series = series * r + 2.480152119021773e-05;
    series = series * r + 0.00019841269863105968;
    series = series * r + 0.0013888888917281794;
    series = series * r + 0.008333333333330051;
    series = series * r + 0.04166666666662399;
    series = series * r + 0.16666666666666669;
    series = series * r + 0.5000000000000001;
    // The integer stands in the low bits of `shifted`.
    power = ptx::double_of((ptx::bits_of(shifted) + 1023) << 52);
    rest = r + r * r * series;
  }
};

CUFLASH_DEVICE Real magnitude_of(Real x) { return x < 0 ? -x : x; }
CUFLASH_DEVICE float inverse_of(float x) { return ptx::reciprocal_approx(x); }
CUFLASH_DEVICE double inverse_of(double x) { return 1 / x; }

// The exponential of an exponent. Results below the smallest normal number are 0.
CUFLASH_DEVICE float exponential(float exponent) { return ptx::exp2_approx(kWide ? exponent * kLog2e : exponent); }

// Vanishing exponents have the exponential 0: those below -708, with -infinity, but no NaN, because arithmetic sets the
// highest bit of its fraction. Overflowing ones have the exponential infinity: those above 709. Both are found by
// comparing integers, which costs nothing on the units that the tensor cores need too.
CUFLASH_DEVICE bool is_vanishing(double exponent) {
  const u32 high = ptx::bits_of(exponent) >> 32;
  return high - 0xc0862001u <= 0xfff00000u - 0xc0862001u;
}
CUFLASH_DEVICE bool is_overflowing(double exponent) {
  const u32 high = ptx::bits_of(exponent) >> 32;
  return high - 0x40862801u <= 0x7ff00000u - 0x40862801u;
}
CUFLASH_DEVICE double exponential(double exponent) {
  const Reduced<double> reduced(exponent);
  const double value = reduced.power + reduced.power * reduced.rest;
  return is_vanishing(exponent) ? 0.0 : is_overflowing(exponent) ? (double)ptx::infinity() : value;
}

// The same for the exponents of weights, none of which is above 709. All lanes of a warp must call it together. In
// float64 it takes 10 instructions instead of 18 on the units that the tensor cores need too:
// x = (steps / 32) log 2 + r, abs(r) at most log(2) / 64, where a polynomial of degree 5 differs from e^r by at most
// 2^-53. Lane i holds 2^(i / 32), rounded; that makes the result uncertain by one unit in the last place.
CUFLASH_DEVICE float warp_exponential(float exponent) { return exponential(exponent); }
CUFLASH_DEVICE double warp_exponential(double exponent) {
  constexpr double kRoundsToInteger = 6755399441055744.0;  // 1.5 * 2^52
  // log(2) / 32 as two terms; the product of the first with a number below 2^15 is exact.
  constexpr double kBig = 0.021660849392446835, kSmall = 5.145609244655338e-14;
  constexpr u32 kLaneShift = 15;  // the five bits of 32nd parts then lie just below the exponent of two
  const u32 lane = ptx::thread_index() % 32;
  const Reduced<double> of_lane(lane * kBig);
  const double rest_of_lane = of_lane.rest + (1.0 + of_lane.rest) * (lane * kSmall);
  const double root = of_lane.power + of_lane.power * rest_of_lane;
  // The root, minus what the low five bits of the steps, which are the lane, will add to it.
  const double kept = ptx::double_of(ptx::bits_of(root) - ((u64)(lane << kLaneShift) << 32));

  const double shifted = exponent * 46.16624130844683 + kRoundsToInteger;
  const double steps = shifted - kRoundsToInteger;
  const double r = exponent - steps * kBig - steps * kSmall;
  double series = 0.00833337084225481;
  series = series * r + 0.0416668934824987;
  series = series * r + 0.16666666666496643;
  series = series * r + 0.4999999999917691;
  const double rest = r + r * r * series;
  const u32 integer = (u32)ptx::bits_of(shifted);  // the steps, whose low five bits are a lane
  const u64 bits = ptx::bits_of(ptx::shuffle(kept, integer));
  const double power = ptx::double_of(bits + ((u64)(integer << kLaneShift) << 32));
  return is_vanishing(exponent) ? 0.0 : power + power * rest;
}

// tanh from e = e^(-2 abs(x)). Near 0 it is (1 - e) / (1 + e), with 1 - e from the series, so that it keeps its
// relative accuracy. Further out it is 1 - 2e / (1 + e), where rounding errors of the fraction count less. NaN and the
// infinities give the right results.
template <class T>
CUFLASH_DEVICE T accurate_tanh(T x) {
  const T magnitude = x < 0 ? -x : x;
  const Reduced<T> reduced(magnitude > 40 ? (T)-80 : -2 * magnitude);
  const T e = reduced.power + reduced.power * reduced.rest;
  const T less_one = reduced.power * reduced.rest + (reduced.power - 1);
  const bool near = magnitude < (T)0.5;
  const T fraction = (near ? -less_one : 2 * e) / (near ? 2 + less_one : 1 + e);
  const T t = near ? fraction : 1 - fraction;
  return x < 0 ? -t : t;
}

// tanh for abs(x) up to kTanhSeriesStop, with a relative error of 2e-7: the polynomial of least relative error.
constexpr float kTanhSeriesStop = 0.70710678f;
CUFLASH_DEVICE float tanh_by_series(float x) {
  const float x2 = x * x;
  float series = -0.00503488583f;
  series = series * x2 + 0.0199647415f;
  series = series * x2 - 0.0535029247f;
  series = series * x2 + 0.13328056f;
  series = series * x2 - 0.333331108f;
  series = series * x2 + 1.0f;
  return x * series;
}

// tanh with a relative error of 4e-7, for the scores of 16-bit elements: by the series for small arguments, elsewhere
// by an exponential, whose error would be large compared with a small result. NaN and the infinities give the right
// results.
CUFLASH_DEVICE float fast_tanh(float x) {
  const float by_exponential = 1.0f - 2.0f * ptx::reciprocal_approx(1.0f + ptx::exp2_approx(x * (2.0f * kLog2e)));
  return fabsf(x) <= kTanhSeriesStop ? tanh_by_series(x) : by_exponential;
}
CUFLASH_DEVICE double fast_tanh(double x) { return accurate_tanh(x); }

// times tanh(factor x), with a relative error of 2e-7 if abs(factor x) is at most kStop, by the polynomial of `terms`
// terms of least relative error. `times` and `factor` are part of the coefficients, so that neither costs a
// multiplication.
template <int terms>
struct NearTanh {
  static_assert(terms == 3 || terms == 4, "polynomials that are known");
  static constexpr float kStop = terms == 3 ? 0.215f : 0.375f;
  float factor, coefficient[terms];

  CUFLASH_DEVICE explicit NearTanh(float factor_, float times = 1.0f) : factor(factor_) {
    constexpr float kSeries[2][4] = {{1.0f, -0.333284960f, 0.129929980f},
                                     {1.0f, -0.333323335f, 0.132897262f, -0.0484872922f}};
    const float squared = factor * factor;
    float power = factor * times;
#pragma unroll
    for (int i = 0; i < terms; ++i, power *= squared) coefficient[i] = power * kSeries[terms - 3][i];
  }
  // Whether it is accurate for numbers up to `largest`. It is for none if coefficients leave the range of float32.
  CUFLASH_DEVICE bool serves(float largest) const {
    const float first = fabsf(coefficient[0]), last = fabsf(coefficient[terms - 1]);
    return largest * fabsf(factor) <= kStop & fminf(first, last) > 1e-37f & fmaxf(first, last) < 1e37f;
  }
  // times tanh(factor x) + bias term.
  CUFLASH_DEVICE float of(float x, float bias_term = 0.0f) const {
    const float x2 = x * x;
    float series = coefficient[terms - 1];
#pragma unroll
    for (int i = terms - 2; i >= 0; --i) series = series * x2 + coefficient[i];
    return x * series + bias_term;
  }
};

// Natural logarithm of a positive normal number, to one unit in the last place. Infinity and NaN stay as they are.
CUFLASH_DEVICE double natural_log(double x) {
  // x = 2^steps m, m near 1; log m = 2 atanh(s), s = (m - 1) / (m + 1).
  const u64 bits = ptx::bits_of(x);
  const u64 sqrt_half = 0x3fe6a09e667f3bcd;
  const i32 steps = (i32)((i64)(bits - sqrt_half) >> 52);
  const double m = ptx::double_of(bits - ((u64)(i64)steps << 52));
  const double s = (m - 1.0) / (m + 1.0), s2 = s * s;
  double series = 1.0 / 21;
#pragma unroll
  for (int n = 19; n >= 3; n -= 2) series = series * s2 + 1.0 / n;
  const double log_m = 2.0 * (s + s * s2 * series);
  const double value = steps * 0.6931471805598903 + (steps * 5.497923018708371e-14 + log_m);
  return x < (double)ptx::infinity() ? value : x;
}

// The exponent of a number whose natural logarithm is `natural`, in the unit of row maxima.
CUFLASH_DEVICE Real to_row_max(Real natural) { return kNaturalRowMax ? natural : natural * kExponentOfE; }
// The exponent of the quotient of two sums, from their row maxima.
template <bool natural = kNaturalRowMax>
CUFLASH_DEVICE Real exponent_of_difference(Real a, Real b) {
  return natural ? (a - b) * kExponentOfE : a - b;
}

// The exponent of a score relative to a row max. `exponent_scale` is that of the score (Score::exponent_scale).
template <bool natural = kNaturalRowMax>
CUFLASH_DEVICE Real exponent_of(Real score, Real exponent_scale, Real row_max) {
  if constexpr (natural) {
    return exponent_of_difference<true>(score, row_max);
  } else if constexpr (kWide && !kFactorInExponent) {
    return score - row_max;  // its scale is 1
  } else {
    return ptx::fused(score, exponent_scale, -row_max);
  }
}

// The natural logarithm of a sum of exponentials that is relative to `row_max`; -inf if the sum is 0.
template <bool natural = kNaturalRowMax>
CUFLASH_DEVICE Real log_sum_exp(Real row_max, Real sum) {
  if (sum == 0) return -ptx::infinity();
  if constexpr (kWide) return (Real)(row_max + natural_log(sum));
  // The instruction is off by 2^-22 times its result, which is up to 30 because row maxima are raised late. So it gets
  // sum = 2^steps m with m near 1.
  const u32 bits = ptx::bits_of((float)sum), sqrt_half = 0x3f3504f3;
  const i32 steps = (i32)(bits - sqrt_half) >> 23;
  const float log_m = ptx::log2_approx(ptx::float_of(bits - ((u32)steps << 23))) * kLn2;
  const float value = fmaf((float)row_max, natural ? 1.0f : kLn2, fmaf((float)steps, kLn2, log_m));
  return sum < ptx::infinity() ? value : sum;
}
// The factor that makes a sum of exponentials relative to `row_max` relative to a larger one; 0 if the sum is empty.
template <bool natural = kNaturalRowMax>
CUFLASH_DEVICE Real relative(Real row_max, Real larger) {
  return row_max == -ptx::infinity() ? 0 : exponential(exponent_of_difference<natural>(row_max, larger));
}
