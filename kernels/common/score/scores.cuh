// Turns products q.k into scores, and scores into the weights of the backward pass, for all elements that a lane holds.
#pragma once
#include "common/config.cuh"
#include "common/softmax/exponential.cuh"
#include "common/io/fragments.cuh"
#include "common/score/mask.cuh"
#include "common/io/params.cuh"
#include "common/score/score.cuh"

// The score of one pair; -inf if the mask hides it. `masked` says whether the mask may hide it.
CUFLASH_DEVICE Real masked_score(const Score& score, const Mask& mask, Real product, int row, int key, bool masked,
                                 Real& derivative) {
  Real x = score.of(product, row, key, derivative);
  if (masked && !mask.visible(row, key)) x = -ptx::infinity();
  return x;
}

// Replaces products by scores, in n-tiles whose rows are queries: `row_of(m, i)` is the query of an element, `lane_key`
// the key of this lane's first element. `masked` says whether some pair may be hidden: a bool, or a Constant if that is
// known at compile time. With `capped`, products went through Score::cap. If rows belong to several heads, `score` and
// `mask` have other types (LaneRows), which look up the head of a row.
template <bool capped = false, class Scores, class Masks, int m_tiles, int n_tiles, class RowOf, class Masked>
CUFLASH_DEVICE void to_scores(const Scores& score, const Masks& mask, Real (&s)[m_tiles][n_tiles][4], RowOf row_of,
                              int lane_key, Masked masked) {
  constexpr bool kAreScores = capped ? kFactorInExponent : kScaleInExponent;
  const auto to_score = [&](int m, int n, int i) __attribute__((always_inline)) {
    const int row = row_of(m, i), key = lane_key + 8 * n + i % 2;
    Unused derivative;
    Real& x = s[m][n][i];
    x = capped ? score.with_bias(x, row, key) : score.of(x, row, key, derivative);
    if (masked && !mask.visible(row, key)) x = -ptx::infinity();
  };
  if constexpr (CUFLASH_HAS_FUNCTIONS) {
    // Keys are outermost: registers can hold what a function reads of rows, but not also that of all keys.
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) to_score(m, n, i);
  } else if (!kAreScores || masked) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) to_score(m, n, i);
  }
}

// How the weights of a row follow from its scores in the backward pass: by lse, or, where that is large, by the row max
// and the row sum, which helpers/backward_preprocess.cu finds again (common/softmax/backward.cuh). Rows that do not
// exist have an lse, or a row max, of infinity, which makes weights zeros.
struct PlainRow {
  Real lse;  // as an exponent

  CUFLASH_DEVICE bool exists() const { return lse != ptx::infinity(); }
  CUFLASH_DEVICE Real weight_of(Real score, Real exponent_scale) const {
    return warp_exponential(score * exponent_scale - lse);
  }
};
struct alignas(2 * sizeof(Real)) RowSum {
  Real row_max;
  Real inverse;  // of the row sum

  CUFLASH_DEVICE bool exists() const { return row_max != ptx::infinity(); }
  CUFLASH_DEVICE Real weight_of(Real score, Real exponent_scale) const {
    return warp_exponential(exponent_of(score, exponent_scale, row_max)) * inverse;
  }
};

// Replaces a score, by which a RowSum makes a weight, by one from which a PlainRow of 0 makes the same weight.
struct RelativeScores {
  Real exponent_scale, inverse_scale;

  CUFLASH_DEVICE explicit RelativeScores(Real exponent_scale_)
      : exponent_scale(exponent_scale_), inverse_scale(inverse_of(exponent_scale_)) {}

  CUFLASH_DEVICE Real of(Real score, const RowSum& own) const {
    return (exponent_of(score, exponent_scale, own.row_max) + log_of(own.inverse)) * inverse_scale;
  }

 private:
  CUFLASH_DEVICE static float log_of(float x) { return ptx::log2_approx(x) * (kWide ? kLn2 : 1.0f); }
  CUFLASH_DEVICE static double log_of(double x) { return natural_log(x); }
};

// Makes the four scores of n-tile `n` relative (RelativeScores). `own` is the RowSum of this lane's first query in the
// tile.
CUFLASH_DEVICE void make_relative(float (&score)[4], int n, const RowSum* own, float exponent_scale) {
  const RelativeScores relative(exponent_scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) score[i] = relative.of(score[i], own[8 * n + i % 2]);
}

// The weight of a pair from its score. If a function makes scores, rows that do not exist get no weight whatever it
// returns, and a pair without weight gets no derivative; where row maxima have gradients, that is for
// RowReductionGradients::with_max to decide.
template <class Row>
CUFLASH_DEVICE Real weight_of(Real score, Real exponent_scale, const Row& own, Real& derivative) {
  Real weight = own.weight_of(score, exponent_scale);
  if constexpr (kHasScoreFunction) {
    if (!own.exists()) weight = 0;
    if (!kTakesDmax && weight == 0) derivative = 0;
  }
  return weight;
}

// Turns products into weights in the backward pass, for one head: P = exp(score - lse).
struct Weights {
  Score score;
  Mask mask;
  Real exponent_scale;

  CUFLASH_DEVICE Weights(const Params& params, Entry batch, int head, int key_stop)
      : Weights(params, batch, head, key_stop, own_diagonal_of(params, batch)) {}
  CUFLASH_DEVICE Weights(const Params& params, Entry batch, int head, int key_stop, int own_diagonal)
      : score(params, batch, head, key_stop, own_diagonal),
        mask(params, batch, head, key_stop, own_diagonal),
        exponent_scale(score.exponent_scale()) {}

  // The weight of one pair of row `own`, and the derivative of its score by the scaled product.
  template <class Row>
  CUFLASH_DEVICE Real of(Real product, int row, int key, bool masked, const Row& own, Real& derivative) const {
    const Real x = masked_score(score, mask, product, row, key, masked, derivative);
    return weight_of(x, exponent_scale, own, derivative);
  }

  // Hides elements of a whole tile, in branches of their own. The elements are scores, or products that are scores
  // except for a positive factor. `row_of(n, i)` and `key_of(m, i)` are the pair of an element; a function of the
  // caller is called only if `evaluates`.
  template <int m_tiles, int n_tiles, class RowOf, class KeyOf>
  CUFLASH_DEVICE void hide(Real (&s)[m_tiles][n_tiles][4], bool masked, bool evaluates, RowOf row_of,
                           KeyOf key_of) const {
    const auto hide_unless = [&](auto visible) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (!visible(row_of(n, i), key_of(m, i))) s[m][n][i] = -ptx::infinity();
    };
    if (!masked) return;
    const bool evaluated = kHasMaskFunction && evaluates;
    hide_unless([&](int row, int key) { return mask.within(row, key); });
    // A separate test, for which what the function needs is loaded once (Mask::shows).
    if (evaluated) hide_unless([&](int row, int key) { return mask.shows(row, key); });
  }
  // The same for products before `of_hidden`, if they are scores except for a positive factor. Otherwise it does
  // nothing, and `of_hidden` hides pair by pair.
  template <int m_tiles, int n_tiles, class RowOf, class KeyOf>
  CUFLASH_DEVICE void hide_products(Real (&product)[m_tiles][n_tiles][4], bool masked, RowOf row_of,
                                    KeyOf key_of) const {
    if constexpr (kScaleInExponent) hide(product, masked, true, row_of, key_of);
  }
  // The weight of one pair whose product went through `hide_products`.
  template <class Row>
  CUFLASH_DEVICE Real of_hidden(Real product, int row, int key, bool masked, const Row& own, Real& derivative) const {
    if constexpr (!kScaleInExponent) return of(product, row, key, masked, own, derivative);
    derivative = 1;
    return own.weight_of(product, exponent_scale);
  }
  // Calls compute(by_row_sum) for a tile of products that went through `hide_products`; by_row_sum is a Constant and
  // says whether weights follow from the row sums, as those of `large` rows do. Where products are scores but for their
  // factor, scores relative to `row_sum_of(n, i)` replace the products of these rows, so that the code of `compute` is
  // compiled once.
  template <int m_tiles, int n_tiles, class RowSumOf, class Compute>
  CUFLASH_DEVICE void by_statistics(Real (&product)[m_tiles][n_tiles][4], const bool& large, const RowSumOf& row_sum_of,
                                    const Compute& compute) const {
    if (large) {
      if constexpr (!kScaleInExponent) {
        compute(Constant<true>{});
      } else {
        const RelativeScores relative(exponent_scale);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m)
#pragma unroll
          for (int n = 0; n < n_tiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) product[m][n][i] = relative.of(product[m][n][i], row_sum_of(n, i));
      }
    }
    if (kScaleInExponent || !large) compute(Constant<false>{});
  }
  // The weight of one pair, where score_of(x) is the score of this pair, see BiasTerms::visit.
  template <class Row, class ScoreOf>
  CUFLASH_DEVICE Real of_added(Real product, int row, int key, bool masked, const Row& own, Real& derivative,
                               ScoreOf score_of) const {
    Real x = score.capped(product);
    derivative = kHasSoftcap ? 1 - x * x : 1;
    x = score_of(x);
    if (masked && !mask.visible(row, key)) x = -ptx::infinity();
    return own.weight_of(x, exponent_scale);
  }
};
