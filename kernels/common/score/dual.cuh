// The library for scores that a caller writes in CUDA (cuflash/score_mod/cuda_source.py, docs/score.md): dual numbers,
// functions of them, and arrays whose entries are read as dual numbers. A score is a template over the type of its
// numbers: with Real it returns a value, with Dual a value and one derivative.
#pragma once
#include "common/config.cuh"
#include "common/score/score_functions.cuh"

namespace score_text {

// A product of the chain rule. A factor of 0 makes it 0, whatever the other one is: a tangent of what does not depend
// on a quantity stays 0, and so does an infinite tangent of what has no weight in a value.
CUFLASH_DEVICE Real chain_product(Real x, Real y) { return x == 0 || y == 0 ? 0 : x * y; }

// A number and its derivative (tangent) by one quantity, whose own tangent is 1. Numbers that do not depend on that
// quantity have the tangent 0.
struct Dual {
  Real value, tangent;

  CUFLASH_DEVICE Dual() {}
  CUFLASH_DEVICE Dual(Real value_, Real tangent_ = 0) : value(value_), tangent(tangent_) {}

  friend CUFLASH_DEVICE Dual operator+(Dual x) { return x; }
  friend CUFLASH_DEVICE Dual operator-(Dual x) { return {-x.value, -x.tangent}; }
  friend CUFLASH_DEVICE Dual operator+(Dual x, Dual y) { return {x.value + y.value, x.tangent + y.tangent}; }
  friend CUFLASH_DEVICE Dual operator-(Dual x, Dual y) { return {x.value - y.value, x.tangent - y.tangent}; }
  friend CUFLASH_DEVICE Dual operator*(Dual x, Dual y) {
    return {x.value * y.value, chain_product(x.tangent, y.value) + chain_product(y.tangent, x.value)};
  }
  friend CUFLASH_DEVICE Dual operator/(Dual x, Dual y) {
    const Real quotient = x.value / y.value, inverse = score_fast_div((Real)1, y.value);
    return {quotient, chain_product(x.tangent, inverse) - chain_product(y.tangent, quotient * inverse)};
  }
  CUFLASH_DEVICE Dual& operator+=(Dual y) { return *this = *this + y; }
  CUFLASH_DEVICE Dual& operator-=(Dual y) { return *this = *this - y; }
  CUFLASH_DEVICE Dual& operator*=(Dual y) { return *this = *this * y; }
  CUFLASH_DEVICE Dual& operator/=(Dual y) { return *this = *this / y; }

  friend CUFLASH_DEVICE bool operator<(Dual x, Dual y) { return x.value < y.value; }
  friend CUFLASH_DEVICE bool operator<=(Dual x, Dual y) { return x.value <= y.value; }
  friend CUFLASH_DEVICE bool operator>(Dual x, Dual y) { return x.value > y.value; }
  friend CUFLASH_DEVICE bool operator>=(Dual x, Dual y) { return x.value >= y.value; }
  friend CUFLASH_DEVICE bool operator==(Dual x, Dual y) { return x.value == y.value; }
  friend CUFLASH_DEVICE bool operator!=(Dual x, Dual y) { return x.value != y.value; }
};

CUFLASH_DEVICE Real infinity() { return score_infinity(); }

CUFLASH_DEVICE Real value_of(Real x) { return x; }
CUFLASH_DEVICE Real value_of(Dual x) { return x.value; }

// A function of x, from its value and its derivative at x.
CUFLASH_DEVICE Real chain(Real, Real value, Real) { return value; }
CUFLASH_DEVICE Dual chain(Dual x, Real value, Real slope) { return {value, chain_product(x.tangent, slope)}; }
// The same from its second derivative, too, which only passes with tangents need.
CUFLASH_DEVICE Real chain(Real, Real value, Real, Real) { return value; }
CUFLASH_DEVICE Dual chain(Dual x, Real value, Real slope, Real) { return chain(x, value, slope); }

// For 16-bit elements these are approximations, as they are in traced functions.
CUFLASH_DEVICE Real exp(Real x) { return score_fast_exp(x); }
CUFLASH_DEVICE Real log(Real x) { return score_fast_log(x); }
CUFLASH_DEVICE Real sqrt(Real x) { return score_fast_sqrt(x); }
CUFLASH_DEVICE Real tanh(Real x) { return score_fast_tanh(x); }
CUFLASH_DEVICE Real sin(Real x) { return score_fast_sin(x); }
CUFLASH_DEVICE Real cos(Real x) { return score_fast_cos(x); }
CUFLASH_DEVICE Real pow(Real x, Real y) { return score_pow(x, y); }
CUFLASH_DEVICE Dual exp(Dual x) {
  const Real y = exp(x.value);
  return chain(x, y, y);
}
CUFLASH_DEVICE Dual log(Dual x) { return chain(x, log(x.value), score_fast_div((Real)1, x.value)); }
CUFLASH_DEVICE Dual sqrt(Dual x) {
  const Real y = sqrt(x.value);
  return chain(x, y, score_fast_div((Real)0.5, y));
}
CUFLASH_DEVICE Dual tanh(Dual x) { return chain(x, tanh(x.value), score_fast_sech2(x.value)); }
CUFLASH_DEVICE Dual sin(Dual x) { return chain(x, sin(x.value), cos(x.value)); }
CUFLASH_DEVICE Dual cos(Dual x) { return chain(x, cos(x.value), -sin(x.value)); }
CUFLASH_DEVICE Dual pow(Dual x, Dual y) {
  const Real power = pow(x.value, y.value);
  const Real by_base = y.value == 0 ? 0 : y.value * pow(x.value, y.value - 1);
  const Real by_exponent = x.value == 0 && y.value >= 0 ? 0 : chain_product(power, log(x.value));
  return {power, chain_product(x.tangent, by_base) + chain_product(y.tangent, by_exponent)};
}

// At 0 the derivative is 0.
CUFLASH_DEVICE Dual abs(Dual x) { return chain(x, score_abs(x.value), x < 0 ? -1 : x > 0 ? 1 : 0); }
template <class A>
CUFLASH_DEVICE A abs(A x) {
  return score_abs(x);
}
// The result is an integer, so it can be an index.
CUFLASH_DEVICE int floor(Real x) { return score_floor_to_int(x); }
CUFLASH_DEVICE int floor(Dual x) { return score_floor_to_int(x.value); }

// If both are equal, the result is the first, with its derivative. If one is a NaN, the result is that NaN.
template <class A, class B>
CUFLASH_DEVICE auto min(A x, B y) {
  return x <= y || x != x ? x : y;
}
template <class A, class B>
CUFLASH_DEVICE auto max(A x, B y) {
  return x >= y || x != x ? x : y;
}
template <class A, class Low, class High>
CUFLASH_DEVICE auto clamp(A x, Low low, High high) {
  return min(max(x, low), high);
}
template <class A, class B>
CUFLASH_DEVICE auto where(bool condition, A x, B y) {
  return condition ? x : y;
}

// The reads, in one run of a score, of arrays whose gradients are wanted: how many there were, and where the read was
// whose entry has the tangent 1.
struct Reads {
  int seeded = -1;
  int count = 0;
  int array = 0;
  i64 index = 0;
#if CUFLASH_TANGENTS
  bool moves = false;  // whether entries read as Dual have the tangents of their arrays
#endif
};

template <class T>
constexpr bool kIsDual = false;
template <>
constexpr bool kIsDual<Dual> = true;
template <class A>
constexpr bool kIsInteger = false;
template <>
constexpr bool kIsInteger<bool> = true;
template <>
constexpr bool kIsInteger<u8> = true;
template <>
constexpr bool kIsInteger<i32> = true;
template <>
constexpr bool kIsInteger<u32> = true;
template <>
constexpr bool kIsInteger<i64> = true;

// An array as a score reads it: real numbers are read as T, others as they are.
template <class T, class E, int array, int num_axes, bool is_wanted>
struct GivenArray {
  const ScoreArg& score_args;
  Reads& reads;

  // The entry at one index for each axis; an index outside of an axis counts as the nearest one within.
  template <class... Index>
  CUFLASH_DEVICE auto operator()(Index... index) const {
    static_assert(sizeof...(Index) == num_axes, "an array is read at one index for each of its axes");
    static_assert((kIsInteger<Index> && ...), "an index is an int or a long long");
    const auto entry = score_load<E>(score_args, index...);
    if constexpr (kIsInteger<E>) {
      return entry;
    } else if constexpr (is_wanted && kIsDual<T>) {
      const bool is_seeded = reads.count++ == reads.seeded;
      if (is_seeded) reads.array = array, reads.index = flat_index<0>(score_args, 0, index...);
      return Dual(entry, is_seeded);
    } else {
      return T(entry);
    }
  }
  // The length of an axis.
  CUFLASH_DEVICE i64 size(int axis) const { return score_args.size[axis]; }
};

// The score of s, and its derivative by s if that is used. `run` runs a score: it takes the scaled product, a Real or a
// Dual, and Reads.
template <class Run>
CUFLASH_DEVICE Real score_of(Real s, Unused&, Run run) {
  Reads reads;
  return run(s, reads);
}
template <class Run>
CUFLASH_DEVICE Real score_of(Real s, Real& by_s, Run run) {
  Reads reads;
  const Dual score = run(Dual(s, 1), reads);
  by_s = score.tangent;
  return score.value;
}

// The derivatives by s, and by the entry of each read of an array whose gradient is wanted: `visit` gets the array, the
// flat index in it and the derivative. A run with the tangent 1 at s counts the reads; then each read has a run with
// the tangent 1 at its entry.
template <class Run, class Visit>
CUFLASH_DEVICE void derivatives_of(Real s, Real& by_s, Run run, Visit visit) {
  Reads reads;
  by_s = run(Dual(s, 1), reads).tangent;
  const int count = reads.count;
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    reads.seeded = n, reads.count = 0;
    const Real derivative = run(Dual(s), reads).tangent;
    visit(reads.array, reads.index, derivative);
  }
}

}  // namespace score_text
