// What passes with tangents add to the library for scores that a caller writes in CUDA (common/score/dual.cuh):
// hyper-dual numbers, which carry second derivatives (Fike and Alonso, 2011), and arrays whose entries have tangents. A
// direction is that of the tangents of s and of the arrays: a run with Dual gives the tangent of a score, a run with
// Hyper also that of its derivative by one quantity.
#pragma once
#include "common/score/dual.cuh"

namespace score_text {

// A number, its derivative by one quantity, its tangent, and the tangent of the derivative.
struct Hyper {
  Real value, derivative, tangent, mixed;

  CUFLASH_DEVICE Hyper() {}
  CUFLASH_DEVICE Hyper(Real value_, Real derivative_ = 0, Real tangent_ = 0, Real mixed_ = 0)
      : value(value_), derivative(derivative_), tangent(tangent_), mixed(mixed_) {}

  friend CUFLASH_DEVICE Hyper operator+(Hyper x) { return x; }
  friend CUFLASH_DEVICE Hyper operator-(Hyper x) { return {-x.value, -x.derivative, -x.tangent, -x.mixed}; }
  friend CUFLASH_DEVICE Hyper operator+(Hyper x, Hyper y) {
    return {x.value + y.value, x.derivative + y.derivative, x.tangent + y.tangent, x.mixed + y.mixed};
  }
  friend CUFLASH_DEVICE Hyper operator-(Hyper x, Hyper y) { return x + -y; }
  friend CUFLASH_DEVICE Hyper operator*(Hyper x, Hyper y) {
    return {x.value * y.value, chain_product(x.derivative, y.value) + chain_product(y.derivative, x.value),
            chain_product(x.tangent, y.value) + chain_product(y.tangent, x.value),
            chain_product(x.mixed, y.value) + chain_product(y.mixed, x.value) + chain_product(x.derivative, y.tangent) +
                chain_product(x.tangent, y.derivative)};
  }
  friend CUFLASH_DEVICE Hyper operator/(Hyper x, Hyper y) {
    const Real inverse = score_fast_div((Real)1, y.value), slope = -inverse * inverse;
    Hyper quotient = x * chain(y, inverse, slope, -2 * inverse * slope);
    quotient.value = x.value / y.value;
    return quotient;
  }
  CUFLASH_DEVICE Hyper& operator+=(Hyper y) { return *this = *this + y; }
  CUFLASH_DEVICE Hyper& operator-=(Hyper y) { return *this = *this - y; }
  CUFLASH_DEVICE Hyper& operator*=(Hyper y) { return *this = *this * y; }
  CUFLASH_DEVICE Hyper& operator/=(Hyper y) { return *this = *this / y; }

  friend CUFLASH_DEVICE bool operator<(Hyper x, Hyper y) { return x.value < y.value; }
  friend CUFLASH_DEVICE bool operator<=(Hyper x, Hyper y) { return x.value <= y.value; }
  friend CUFLASH_DEVICE bool operator>(Hyper x, Hyper y) { return x.value > y.value; }
  friend CUFLASH_DEVICE bool operator>=(Hyper x, Hyper y) { return x.value >= y.value; }
  friend CUFLASH_DEVICE bool operator==(Hyper x, Hyper y) { return x.value == y.value; }
  friend CUFLASH_DEVICE bool operator!=(Hyper x, Hyper y) { return x.value != y.value; }

  // A function of x, from its value and its first two derivatives at x.
  friend CUFLASH_DEVICE Hyper chain(Hyper x, Real value, Real slope, Real curvature) {
    return {value, chain_product(x.derivative, slope), chain_product(x.tangent, slope),
            chain_product(x.mixed, slope) + chain_product(chain_product(x.derivative, x.tangent), curvature)};
  }
};

template <class T>
constexpr bool kIsHyper = false;
template <>
constexpr bool kIsHyper<Hyper> = true;

template <class T>
constexpr bool kAlways = true;

CUFLASH_DEVICE Real value_of(Hyper x) { return x.value; }

template <class Slope>
CUFLASH_DEVICE Hyper chain(Hyper x, Real, Slope) {
  static_assert(!kAlways<Slope>,
                "chain(x, value, slope): expected the second derivative of the function of x, too, as "
                "a fourth argument: backward_jvp needs it");
  return x;
}

CUFLASH_DEVICE Hyper exp(Hyper x) {
  const Real y = exp(x.value);
  return chain(x, y, y, y);
}
CUFLASH_DEVICE Hyper log(Hyper x) {
  const Real slope = score_fast_div((Real)1, x.value);
  return chain(x, log(x.value), slope, -slope * slope);
}
CUFLASH_DEVICE Hyper sqrt(Hyper x) {
  const Real y = sqrt(x.value), slope = score_fast_div((Real)0.5, y);
  return chain(x, y, slope, -2 * slope * slope * slope);
}
CUFLASH_DEVICE Hyper tanh(Hyper x) {
  const Real y = tanh(x.value), slope = score_fast_sech2(x.value);
  return chain(x, y, slope, -2 * y * slope);
}
CUFLASH_DEVICE Hyper sin(Hyper x) {
  const Real y = sin(x.value);
  return chain(x, y, cos(x.value), -y);
}
CUFLASH_DEVICE Hyper cos(Hyper x) {
  const Real y = cos(x.value);
  return chain(x, y, -sin(x.value), -y);
}
// Where a power has an infinite or no derivative by a number that does not move, that derivative counts for nothing.
CUFLASH_DEVICE Hyper pow(Hyper x, Hyper y) {
  const Real a = x.value, b = y.value, power = pow(a, b), below = pow(a, b - 1);
  const bool is_flat = a == 0 && b >= 0;
  const Real log_a = is_flat ? 0 : log(a);
  const Real by_base = b == 0 ? 0 : b * below, by_exponent = chain_product(power, log_a);
  const Real of_base = b == 0 || b == 1 ? 0 : b * (b - 1) * pow(a, b - 2);
  const Real of_both = chain_product(below, 1 + chain_product(b, log_a));
  const Real of_exponent = chain_product(by_exponent, log_a);
  return {power, chain_product(x.derivative, by_base) + chain_product(y.derivative, by_exponent),
          chain_product(x.tangent, by_base) + chain_product(y.tangent, by_exponent),
          chain_product(x.mixed, by_base) + chain_product(y.mixed, by_exponent) +
              chain_product(chain_product(x.derivative, x.tangent), of_base) +
              chain_product(chain_product(x.derivative, y.tangent) + chain_product(x.tangent, y.derivative), of_both) +
              chain_product(chain_product(y.derivative, y.tangent), of_exponent)};
}
CUFLASH_DEVICE Hyper abs(Hyper x) { return chain(x, score_abs(x.value), x < 0 ? -1 : x > 0 ? 1 : 0, 0); }
CUFLASH_DEVICE int floor(Hyper x) { return score_floor_to_int(x.value); }

// GivenArray where some arrays have tangents: entries of such an array have the entry of `tangents` as their tangent.
template <class T, class E, int array, int num_axes, bool is_wanted, bool is_moved>
struct MovedArray {
  const ScoreArg& score_args;
  const ScoreArg& tangents;
  Reads& reads;

  template <class... Index>
  CUFLASH_DEVICE auto operator()(Index... index) const {
    static_assert(sizeof...(Index) == num_axes, "an array is read at one index for each of its axes");
    static_assert((kIsInteger<Index> && ...), "an index is an int or a long long");
    const auto entry = score_load<E>(score_args, index...);
    if constexpr (kIsInteger<E>) {
      return entry;
    } else if constexpr (kIsHyper<T>) {
      bool is_seeded = false;
      if constexpr (is_wanted) {
        is_seeded = reads.count++ == reads.seeded;
        if (is_seeded) reads.array = array, reads.index = flat_index<0>(score_args, 0, index...);
      }
      return Hyper(entry, is_seeded, tangent(index...));
    } else if constexpr (kIsDual<T>) {
      return Dual(entry, reads.moves ? tangent(index...) : (Real)0);
    } else {
      return T(entry);
    }
  }
  CUFLASH_DEVICE i64 size(int axis) const { return score_args.size[axis]; }

 private:
  template <class... Index>
  CUFLASH_DEVICE Real tangent(Index... index) const {
    if constexpr (!is_moved) return 0;
    return score_load<E>(tangents, index...);
  }
};

// The tangent of the score of s, whose tangent is ts, and that of its derivative by s. `run` runs a score.
template <class Run>
CUFLASH_DEVICE Real tangent_of(Real s, Real ts, Run run) {
  Reads reads;
  reads.moves = true;
  return run(Dual(s, ts), reads).tangent;
}
template <class Run>
CUFLASH_DEVICE Real slope_tangent_of(Real s, Real ts, Run run) {
  Reads reads;
  return run(Hyper(s, 1, ts), reads).mixed;
}

// As `derivatives_of`, with the tangents of derivatives. A first run counts the reads.
template <class Run, class Visit>
CUFLASH_DEVICE void derivative_tangents_of(Real s, Real ts, Run run, Visit visit) {
  Reads reads;
  run(Hyper(s, 0, ts), reads);
  const int count = reads.count;
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    reads.seeded = n, reads.count = 0;
    const Hyper score = run(Hyper(s, 0, ts), reads);
    visit(reads.array, reads.index, score.derivative, score.mixed);
  }
}

}  // namespace score_text
