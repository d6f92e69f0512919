// Bounds of what a score_mod or mask_mod returns for all queries and keys of a tile. The code that
// cuflash/score_mod/tile_bounds.py writes is made of these functions. They are interval arithmetic, as in
// cuflash/score_mod/intervals.py: bounds are never too narrow, not even for real numbers that are rounded to float32.
// Whole warps call them, and all lanes get the same result.
#pragma once
#include "common/score/score_functions.cuh"

// A condition: whether it holds for all pairs, and whether it holds for none.
struct Truth {
  bool always, never;
};
struct Integers {
  i64 low, high;
};
// Both bounds are NaN if nothing is known: the numbers may be NaN, infinite or of any size.
struct Reals {
  double low, high;
};

CUFLASH_DEVICE Reals any_real() {
  const double nan = (double)ptx::infinity() - (double)ptx::infinity();
  return {nan, nan};
}
CUFLASH_DEVICE Integers any_integer() { return {-9223372036854775807ll - 1, 9223372036854775807ll}; }
CUFLASH_DEVICE bool is_known(const Reals& x) { return x.low == x.low && x.high == x.high; }
CUFLASH_DEVICE bool is_known(const Integers&) { return true; }

template <class T>
CUFLASH_DEVICE T smaller(T a, T b) {
  return b < a ? b : a;
}
template <class T>
CUFLASH_DEVICE T larger(T a, T b) {
  return a < b ? b : a;
}
template <class Bounds>
CUFLASH_DEVICE Bounds hull(Bounds a, Bounds b) {
  return {smaller(a.low, b.low), larger(a.high, b.high)};
}

// Integers of larger magnitude may have overflowed; the same bounds as real numbers, about_*, show if they did.
CUFLASH_DEVICE Integers unless_wrapped(i64 low, i64 high, double about_low, double about_high) {
  constexpr double kMost = 4611686018427387904.0;  // 2^62
  return fabs(about_low) <= kMost && fabs(about_high) <= kMost ? Integers{low, high} : any_integer();
}
// Infinite bounds may become NaN next and are treated as NaN. Others are widened by the rounding of float32.
CUFLASH_DEVICE Reals rounded(double low, double high) {
  constexpr double kRounding = 1.9073486328125e-6, kTiny = 1.1754943508222875e-38, kLarge = 1.7014118346046923e38;
  const double a = low - kRounding * fabs(low) - kTiny, b = high + kRounding * fabs(high) + kTiny;
  return fabs(a) <= kLarge && fabs(b) <= kLarge ? Reals{a, b} : any_real();  // false for a NaN
}

// ---- Conditions -----------------------------------------------------------------------------------------------------
CUFLASH_DEVICE Truth bounds_not(Truth a) { return {a.never, a.always}; }
CUFLASH_DEVICE Truth bounds_and(Truth a, Truth b) { return {a.always && b.always, a.never || b.never}; }
CUFLASH_DEVICE Truth bounds_or(Truth a, Truth b) { return {a.always || b.always, a.never && b.never}; }
CUFLASH_DEVICE Truth bounds_xor(Truth a, Truth b) {
  return {(a.always && b.never) || (a.never && b.always), (a.always && b.always) || (a.never && b.never)};
}
template <class Bounds>
CUFLASH_DEVICE Truth bounds_lt(Bounds a, Bounds b) {
  const bool known = is_known(a) && is_known(b);
  return {known && a.high < b.low, known && a.low >= b.high};
}
template <class Bounds>
CUFLASH_DEVICE Truth bounds_le(Bounds a, Bounds b) {
  const bool known = is_known(a) && is_known(b);
  return {known && a.high <= b.low, known && a.low > b.high};
}
template <class Bounds>
CUFLASH_DEVICE Truth bounds_eq(Bounds a, Bounds b) {
  const bool known = is_known(a) && is_known(b);
  return {known && a.low == a.high && b.low == b.high && a.low == b.low, known && (a.high < b.low || b.high < a.low)};
}
template <class Bounds>
CUFLASH_DEVICE Truth bounds_ne(Bounds a, Bounds b) {
  return bounds_not(bounds_eq(a, b));
}
CUFLASH_DEVICE Truth bounds_eq(Truth a, Truth b) { return bounds_not(bounds_xor(a, b)); }
CUFLASH_DEVICE Truth bounds_ne(Truth a, Truth b) { return bounds_xor(a, b); }

// ---- Numbers of another type ----------------------------------------------------------------------------------------
CUFLASH_DEVICE Integers to_integers(Truth a) { return {a.always ? 1 : 0, a.never ? 0 : 1}; }
CUFLASH_DEVICE Integers to_integers(Integers a) { return a; }
CUFLASH_DEVICE Reals to_reals(Integers a) { return rounded((double)a.low, (double)a.high); }
CUFLASH_DEVICE Reals to_reals(Truth a) { return to_reals(to_integers(a)); }
CUFLASH_DEVICE Reals to_reals(Reals a) { return a; }
template <class Bounds>
CUFLASH_DEVICE Truth to_truth(Bounds a) {
  return {a.low > 0 || a.high < 0, a.low == 0 && a.high == 0};
}
CUFLASH_DEVICE Truth to_truth(Truth a) { return a; }
CUFLASH_DEVICE Integers bounds_floor(Reals a) {
  if (!is_known(a)) return {-2147483648ll, 2147483647ll};
  const auto floor_of = [](double x) { return (i64)floor(smaller(larger(x, -2147483648.0), 2147483647.0)); };
  return {floor_of(a.low), floor_of(a.high)};
}
CUFLASH_DEVICE Reals bounds_real_floor(Reals a) { return {floor(a.low), floor(a.high)}; }

// ---- Choices --------------------------------------------------------------------------------------------------------
CUFLASH_DEVICE Truth bounds_where(Truth which, Truth a, Truth b) {
  if (which.always) return a;
  if (which.never) return b;
  return {a.always && b.always, a.never && b.never};
}
CUFLASH_DEVICE Integers bounds_where(Truth which, Integers a, Integers b) {
  return which.always ? a : which.never ? b : hull(a, b);
}
CUFLASH_DEVICE Reals bounds_where(Truth which, Reals a, Reals b) {
  if (!is_known(a) || !is_known(b)) return any_real();
  return which.always ? a : which.never ? b : hull(a, b);
}

// ---- Integers -------------------------------------------------------------------------------------------------------
CUFLASH_DEVICE Integers bounds_add(Integers a, Integers b) {
  return unless_wrapped((i64)((u64)a.low + (u64)b.low), (i64)((u64)a.high + (u64)b.high), (double)a.low + (double)b.low,
                        (double)a.high + (double)b.high);
}
CUFLASH_DEVICE Integers bounds_neg(Integers a) {
  return unless_wrapped((i64)(0 - (u64)a.high), (i64)(0 - (u64)a.low), -(double)a.high, -(double)a.low);
}
CUFLASH_DEVICE Integers bounds_sub(Integers a, Integers b) { return bounds_add(a, bounds_neg(b)); }
CUFLASH_DEVICE Integers bounds_mul(Integers a, Integers b) {
  const auto product = [](i64 x, i64 y) {
    const double about = (double)x * (double)y;
    const i64 of_both = (i64)((u64)x * (u64)y);
    return unless_wrapped(of_both, of_both, about, about);
  };
  return hull(hull(product(a.low, b.low), product(a.low, b.high)),
              hull(product(a.high, b.low), product(a.high, b.high)));
}
CUFLASH_DEVICE Integers bounds_min(Integers a, Integers b) { return {smaller(a.low, b.low), smaller(a.high, b.high)}; }
CUFLASH_DEVICE Integers bounds_max(Integers a, Integers b) { return {larger(a.low, b.low), larger(a.high, b.high)}; }
CUFLASH_DEVICE Integers bounds_abs(Integers a) {
  const Integers other = bounds_neg(a);
  const bool spans = a.low <= 0 && a.high >= 0;
  return {spans ? 0 : larger(a.low, other.low), larger(a.high, other.high)};
}
// Bounds are known for positive divisors only.
CUFLASH_DEVICE Integers bounds_floordiv(Integers a, Integers b) {
  if (b.low <= 0) return any_integer();
  const auto quotient = [](i64 x, i64 y) {
    const i64 of_both = score_floordiv(x, y);
    return Integers{of_both, of_both};
  };
  return hull(hull(quotient(a.low, b.low), quotient(a.low, b.high)),
              hull(quotient(a.high, b.low), quotient(a.high, b.high)));
}
CUFLASH_DEVICE Integers bounds_mod(Integers a, Integers b) {
  if (b.low <= 0) return any_integer();
  return a.low >= 0 && a.high < b.low ? a : Integers{0, b.high};
}

// ---- Real numbers ---------------------------------------------------------------------------------------------------
CUFLASH_DEVICE Reals bounds_add(Reals a, Reals b) { return rounded(a.low + b.low, a.high + b.high); }
CUFLASH_DEVICE Reals bounds_sub(Reals a, Reals b) { return rounded(a.low - b.high, a.high - b.low); }
CUFLASH_DEVICE Reals bounds_neg(Reals a) { return {-a.high, -a.low}; }
CUFLASH_DEVICE Reals bounds_mul(Reals a, Reals b) {
  if (!is_known(a) || !is_known(b)) return any_real();
  const Reals x = {smaller(a.low * b.low, a.low * b.high), larger(a.low * b.low, a.low * b.high)};
  const Reals y = {smaller(a.high * b.low, a.high * b.high), larger(a.high * b.low, a.high * b.high)};
  const Reals both = hull(x, y);
  return rounded(both.low, both.high);
}
CUFLASH_DEVICE Reals bounds_div(Reals a, Reals b) {
  if (!is_known(b) || (b.low <= 0 && b.high >= 0)) return any_real();
  return bounds_mul(a, rounded(1 / b.high, 1 / b.low));
}
CUFLASH_DEVICE Reals bounds_min(Reals a, Reals b) {
  if (!is_known(a) || !is_known(b)) return any_real();
  return {smaller(a.low, b.low), smaller(a.high, b.high)};
}
CUFLASH_DEVICE Reals bounds_max(Reals a, Reals b) {
  if (!is_known(a) || !is_known(b)) return any_real();
  return {larger(a.low, b.low), larger(a.high, b.high)};
}
CUFLASH_DEVICE Reals bounds_abs(Reals a) {
  const bool spans = a.low <= 0 && a.high >= 0;
  return {spans ? 0 : smaller(fabs(a.low), fabs(a.high)), larger(fabs(a.low), fabs(a.high))};
}
CUFLASH_DEVICE Reals bounds_exp(Reals a) { return rounded(exp(a.low), exp(a.high)); }
CUFLASH_DEVICE Reals bounds_log(Reals a) { return rounded(log(a.low), log(a.high)); }
CUFLASH_DEVICE Reals bounds_sqrt(Reals a) { return rounded(sqrt(a.low), sqrt(a.high)); }
CUFLASH_DEVICE Reals bounds_tanh(Reals a) { return rounded(tanh(a.low), tanh(a.high)); }

// ---- Entries of arrays ----------------------------------------------------------------------------------------------
constexpr i64 kMostEntries = 4096;  // the most entries of an array that are read for a tile
constexpr u32 kEntriesAtOnce = 8;   // loads of a lane that are in flight together

CUFLASH_DEVICE i64 shuffle_xor_of(i64 value, u32 lanes) {
  const u32 other = ptx::thread_index() % 32 ^ lanes;
  return (i64)((u64)ptx::shuffle((u32)((u64)value >> 32), other) << 32 | ptx::shuffle((u32)(u64)value, other));
}
CUFLASH_DEVICE double shuffle_xor_of(double value, u32 lanes) { return ptx::shuffle_xor(value, lanes); }

// The bounds of single entries.
CUFLASH_DEVICE Integers bounds_of_entry(bool x) { return {x, x}; }
CUFLASH_DEVICE Integers bounds_of_entry(i32 x) { return {x, x}; }
CUFLASH_DEVICE Integers bounds_of_entry(i64 x) { return {x, x}; }
CUFLASH_DEVICE Reals bounds_of_entry(float x) { return rounded((double)x, (double)x); }
CUFLASH_DEVICE Reals bounds_of_entry(double x) { return rounded(x, x); }
CUFLASH_DEVICE Integers any_like(Integers) { return any_integer(); }
CUFLASH_DEVICE Reals any_like(Reals) { return any_real(); }
// If either is a NaN, so is the hull.
CUFLASH_DEVICE Integers hull_of_entries(Integers a, Integers b) { return hull(a, b); }
CUFLASH_DEVICE Reals hull_of_entries(Reals a, Reals b) { return is_known(a) && is_known(b) ? hull(a, b) : any_real(); }

// The bounds of all entries of an array whose indices lie within bounds. E is the dtype of the array.
template <class E, class... Indices>
CUFLASH_DEVICE auto bounds_of_entries(const ScoreArg& array, Indices... indices) {
  constexpr int kAxes = sizeof...(indices);
  const Integers within[kAxes + 1] = {indices..., {0, 0}};
  const auto* data = (const typename StoredAs<E>::Type*)array.data;
  i64 first[kAxes + 1], count[kAxes + 1], entries = 1;
#pragma unroll
  for (int axis = 0; axis < kAxes; ++axis) {
    first[axis] = score_entry(array.size[axis], within[axis].low);
    count[axis] = score_entry(array.size[axis], within[axis].high) - first[axis] + 1;
    entries = entries > kMostEntries || count[axis] > kMostEntries ? kMostEntries + 1 : entries * count[axis];
  }
  // The entries are few enough for 32-bit indices. Divisions take far longer than everything else here.
  const auto entry = [&](u32 index) {
    i64 at = 0;
#pragma unroll
    for (int axis = kAxes - 1; axis >= 0; --axis) {
      const u32 length = (u32)count[axis], within = axis == 0 ? index : index % length;
      at += (first[axis] + within) * array.stride[axis];
      if (axis > 0) index /= length;
    }
    return bounds_of_entry(score_element(E{}, data, at));
  };
  if (entries > kMostEntries) return any_like(decltype(entry(0)){});
  // A lane reads several entries at once. Past the end it reads the last entry again.
  const u32 lane = ptx::thread_index() % 32, last = (u32)entries - 1;
  auto found = entry(smaller(lane, last));
#pragma unroll 1
  for (u32 first = lane; first <= last + lane; first += 32 * kEntriesAtOnce)
#pragma unroll
    for (u32 i = 0; i < kEntriesAtOnce; ++i) found = hull_of_entries(found, entry(smaller(first + 32 * i, last)));
#pragma unroll
  for (u32 lanes = 16; lanes > 0; lanes /= 2)
    found = hull_of_entries(found, {shuffle_xor_of(found.low, lanes), shuffle_xor_of(found.high, lanes)});
  return found;
}
