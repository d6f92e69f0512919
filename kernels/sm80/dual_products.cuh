// Products of factors with tangents: d += a b and td += ta b + a tb. Fragments of float32 are fetched, and split into
// two terms, once for all products that they are factors of. Other elements need no such terms: there a fragment is
// fetched for each product, because four of them at a time take the registers of accumulators.
#pragma once
#include "sm80/mma.cuh"

constexpr bool kSharesFactors = kElementBytes == 4 && !kByLanes;

// All of `k_steps` steps are unrolled. Without `has_ta` or `has_tb`, a tangent is zero and its loader is not called.
template <int k_steps, bool has_ta, bool has_tb, bool of_scores, int m_tiles, int n_tiles, class A, class Ta, class B,
          class Tb>
CUFLASH_DEVICE void multiply_dual_unrolled(Real (&d)[m_tiles][n_tiles][4], Real (&td)[m_tiles][n_tiles][4], A load_a,
                                           Ta load_ta, B load_b, Tb load_tb) {
  constexpr int kPairs = n_tiles / 2;
  Factor a[m_tiles], ta[m_tiles], b, tb;
  const auto fetch = [](const auto& load, int i, int k, Factor& factor) __attribute__((always_inline)) {
    Fragment fragment;
    load(i, k, fragment);
    factor_of(fragment, factor);
  };
  const auto add = [](Real(&sum)[4], const Factor& left, const Factor& right, int half) __attribute__((always_inline)) {
    if constexpr (of_scores)
      multiply_add_score(sum, left, right, half);
    else
      multiply_add(sum, left, right, half);
  };
  repeat<k_steps * kPairs>([&](auto step) __attribute__((always_inline)) {
    constexpr int k = decltype(step)::value / kPairs, n = decltype(step)::value % kPairs;
#pragma unroll
    for (int m = 0; m < m_tiles && n == 0; ++m) {
      fetch(load_a, m, k, a[m]);
      if constexpr (has_ta) fetch(load_ta, m, k, ta[m]);
    }
    fetch(load_b, n, k, b);
    if constexpr (has_tb) fetch(load_tb, n, k, tb);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        add(d[m][2 * n + half], a[m], b, half);
        if constexpr (has_ta) add(td[m][2 * n + half], ta[m], b, half);
        if constexpr (has_tb) add(td[m][2 * n + half], a[m], tb, half);
      }
  });
}

// Where any step can be read at any time, long rows become a loop, as in `multiply`. `of_scores` says that weights are
// made of d.
template <int k_steps, bool has_ta, bool has_tb, bool of_scores = false, int m_tiles, int n_tiles, class A, class Ta,
          class B, class Tb>
CUFLASH_DEVICE void multiply_dual(Real (&d)[m_tiles][n_tiles][4], Real (&td)[m_tiles][n_tiles][4], A load_a, Ta load_ta,
                                  B load_b, Tb load_tb) {
  if constexpr (!kSharesFactors) {
    multiply<k_steps>(d, load_a, load_b);
    if constexpr (has_ta) multiply<k_steps>(td, load_ta, load_b);
    if constexpr (has_tb) multiply<k_steps>(td, load_a, load_tb);
  } else if constexpr (k_steps <= kUnrolledSteps) {
    multiply_dual_unrolled<k_steps, has_ta, has_tb, of_scores>(d, td, load_a, load_ta, load_b, load_tb);
  } else {
    constexpr int kRest = k_steps % kStepsOfLoop;
    const auto multiply_from = [&](int first, auto steps) __attribute__((always_inline)) {
      const auto from = [&](const auto& load) __attribute__((always_inline)) {
        return [&load, first](int i, int k, Fragment& fragment) { load(i, first + k, fragment); };
      };
      multiply_dual_unrolled<decltype(steps)::value, has_ta, has_tb, of_scores>(d, td, from(load_a), from(load_ta),
                                                                                from(load_b), from(load_tb));
    };
#pragma unroll 1
    for (int first = kRest; first < k_steps; first += kStepsOfLoop) multiply_from(first, Integer<kStepsOfLoop>{});
    if constexpr (kRest > 0) multiply_from(0, Integer<kRest>{});
  }
}

// The same for one of many products that are added up, as `add_product`. Fragments of A are in registers.
template <int k_steps, bool has_ta, bool has_tb, int m_tiles, int n_tiles, class A, class Ta, class B, class Tb>
CUFLASH_DEVICE void add_dual_product(Real (&d)[m_tiles][n_tiles][4], Real (&td)[m_tiles][n_tiles][4], A load_a,
                                     Ta load_ta, B load_b, Tb load_tb) {
  if constexpr (!kSharesFactors) {
    add_product<k_steps>(d, load_a, load_b);
    if constexpr (has_ta) add_product<k_steps>(td, load_ta, load_b);
    if constexpr (has_tb) add_product<k_steps>(td, load_a, load_tb);
  } else {
    multiply_dual_unrolled<k_steps, has_ta, has_tb, false>(d, td, load_a, load_ta, load_b, load_tb);
  }
}
