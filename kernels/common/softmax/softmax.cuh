// The online softmax over the rows of an accumulator tile (Milakov and Gimelshein 2018; FlashAttention, Algorithm 1).
#pragma once
#include "common/softmax/exponential.cuh"
#include "common/softmax/row_reductions.cuh"

// How far the maximum of a tile's row may exceed the row max that exponents are relative to. For wide elements,
// exponentials are most accurate near 0, so the row max of float32 follows the maximum at once, and that of float64
// before the rounding of exponents grows. With tangents it follows early, because so does their shift
// (common/softmax/tangents.cuh): in half precision, results are as accurate with 2 as with 0, and less with 3.
constexpr float kMaxGrowth = kWide              ? (kElementBytes == 8 && !CUFLASH_TANGENTS ? 1.0f : 0.0f)
                             : CUFLASH_TANGENTS ? 2.0f
                                                : 8.0f;

// Whether the softmax step of one function (`update`) rounds scores before it subtracts the row max. An exponent in one
// multiply-add keeps what the rounding of the row max leaves of it: the weight of the largest score is then not 1, and
// products of TF32 terms, which hold 23 of the 24 bits of a value, are rounded once more. So a row that attends to one
// key would be off by two units in the last place of its value.
constexpr bool kRoundsScores = kElementBytes == 4 && kFactorInExponent && !kRoundsToTf32 && kHasValues;

// Where an exponent is one multiply-add, that of the largest score is what the rounding of the row max leaves. Up to
// this row max that is at most 1; beyond, it would overflow in the end, so that rows are rounded as above
// (`exponentiate`).
constexpr Real kLargestFused = kElementBytes == 8 ? 0x1p53 : 0x1p24f;

// Statistics of the 2 m_tiles rows that a lane holds. `natural` says whether row maxima are natural (kNaturalRowMax).
template <int m_tiles, bool natural = kNaturalRowMax, bool max_by_weights = false>
struct OnlineSoftmax : RowReductions<m_tiles, natural, max_by_weights> {
  using Reductions = RowReductions<m_tiles, natural, max_by_weights>;
  static constexpr bool kFused = kFactorInExponent && !natural;  // exponents are one multiply-add

  Real row_max[m_tiles][2];  // exponents are relative to it; -inf until a key is visible
  Real row_sum[m_tiles][2];  // sum over this lane's columns only, until `finish`

  CUFLASH_DEVICE OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) row_max[m][half] = -ptx::infinity(), row_sum[m][half] = 0;
  }

  // Takes in a tile of scores and replaces each by the exponential of exponent_scale score - row_max.
  //
  // The row maxima are raised to those of the tile only when, in some row of the warp, the maximum exceeds the row max
  // by more than kMaxGrowth. What was summed so far is then rescaled. Until then exponentials may exceed 1, up to
  // 2^kMaxGrowth, which no floating-point format minds, and both sums stay relative to the same row max, so the result
  // is exact. Below row maxima beyond kLargestFused the branch is taken by all tiles that have weights.
  template <int n_tiles, int out_tiles>
  CUFLASH_DEVICE void update(Real (&score)[m_tiles][n_tiles][4], Real (&out)[m_tiles][out_tiles][4],
                             Real exponent_scale) {
    const Real scale = rounded(score, exponent_scale);
    const bool raised = raise_row_maxima(score, scale, [&](int m, int half, Real factor) {
#pragma unroll
      for (int n = 0; n < out_tiles; ++n) out[m][n][2 * half] *= factor, out[m][n][2 * half + 1] *= factor;
    });
    exponentiate(score, scale, row_sum, !kRoundsScores && has_unfused(raised));
  }

  // Multiplies scores by their scale, if they are to be rounded. Returns the scale that is left.
  template <int n_tiles>
  CUFLASH_DEVICE static Real rounded(Real (&score)[m_tiles][n_tiles][4], Real exponent_scale) {
    if constexpr (kRoundsScores) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) score[m][n][i] = ptx::multiply(score[m][n][i], exponent_scale);
      return 1;
    } else {
      return exponent_scale;
    }
  }
  // Warp. Whether some row max is beyond kLargestFused. They are looked at only if they were `raised`: a tile below
  // such a row max that they were not raised for has no weights.
  CUFLASH_DEVICE bool has_unfused(bool raised = true) const {
    if (!kFused || !raised) return false;
    bool unfused = false;
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) unfused = unfused || is_unfused(row_max[m][0]) || is_unfused(row_max[m][1]);
    return ptx::any_lane(unfused);
  }

  // Updates the row maxima only, because the output is still being summed. If it returns true, the output must later be
  // rescaled by `factor` (`rescale`).
  template <int n_tiles>
  CUFLASH_DEVICE bool update(const Real (&score)[m_tiles][n_tiles][4], Real (&factor)[m_tiles][2],
                             Real exponent_scale) {
    return raise_row_maxima(score, exponent_scale, [&](int m, int half, Real f) { factor[m][half] = f; });
  }

  template <int out_tiles>
  CUFLASH_DEVICE static void rescale(Real (&out)[m_tiles][out_tiles][4], const Real (&factor)[m_tiles][2]) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int n = 0; n < out_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][n][i] *= factor[m][i / 2];
  }

  // Replaces scores by their exponentials and adds those of this lane to `sum`. `unfused` says whether some row max of
  // the warp is beyond kLargestFused.
  template <int n_tiles>
  CUFLASH_DEVICE void exponentiate(Real (&score)[m_tiles][n_tiles][4], Real exponent_scale, Real (&sum)[m_tiles][2],
                                   bool unfused) {
    unfused = unfused && kFused;
    if (unfused) make_relative(score, exponent_scale);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Real less = unfused ? 0 : finite_row_max(m, half);
        Real tile_sum = 0;  // wide elements: shorter chains of additions have smaller errors
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            const Real exponent = exponent_of<natural>(score[m][n][i], exponent_scale, less);
            score[m][n][i] = warp_exponential(exponent);
            Reductions::add_weight(m, half, score[m][n][i], exponent, true);
            (kWide ? tile_sum : sum[m][half]) += score[m][n][i];
            if (i % 2 == 1) Reductions::add_largest(m, half, score[m][n][i - 1], score[m][n][i]);
          }
        if constexpr (kWide) sum[m][half] += tile_sum;
      }
  }

  // Adds up the sums of the lanes of each row.
  CUFLASH_DEVICE void finish() {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[m][half] += ptx::shuffle_xor(row_sum[m][half], 1);
        row_sum[m][half] += ptx::shuffle_xor(row_sum[m][half], 2);
      }
    Reductions::finish(row_max);
  }

  // Adds one more key to each row, after `finish`: its value is zero, and its score, in the unit of row maxima, is
  // sink(m, half).
  template <int out_tiles, typename Sink>
  CUFLASH_DEVICE void add_sinks(Real (&out)[m_tiles][out_tiles][4], Sink sink) {
    Real factor[m_tiles][2];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Real own = sink(m, half);
        factor[m][half] = raise_row_max(m, half, own);
        const Real weight = relative<natural>(own, row_max[m][half]);
        row_sum[m][half] += weight;
        if constexpr (kReducesExponents)
          Reductions::add_weight(m, half, weight, exponent_of_difference<natural>(own, row_max[m][half]), true);
      }
    rescale(out, factor);
  }

  // Factor of the output row: 1 / sum; 0 for a row that saw no key.
  CUFLASH_DEVICE Real inverse_sum(int m, int half) const { return row_sum[m][half] == 0 ? 0 : 1 / row_sum[m][half]; }

 protected:
  CUFLASH_DEVICE static bool is_unfused(Real row_max) {
    return magnitude_of(row_max) > kLargestFused && row_max > -ptx::infinity();
  }
  // While no key is visible, exponents are relative to 0, and exponentials are 0.
  CUFLASH_DEVICE Real finite_row_max(int m, int half) const {
    return row_max[m][half] == -ptx::infinity() ? 0 : row_max[m][half];
  }
  // Rounds exponents, and turns the differences from the row max into scores again, relative to 0.
  template <int n_tiles>
  CUFLASH_DEVICE void make_relative(Real (&score)[m_tiles][n_tiles][4], Real exponent_scale) const {
    const Real inverse = inverse_of(exponent_scale);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Real exponent = ptx::multiply(score[m][n][i], exponent_scale);
          score[m][n][i] = (exponent - finite_row_max(m, i / 2)) * inverse;
        }
  }

  // Raises the row maxima to the maxima of a tile of scores where that is needed, and returns whether it was. If so,
  // `rescale_row(m, half, factor)` is called for every row with the factor of its earlier sums.
  template <int n_tiles, typename RescaleRow>
  CUFLASH_DEVICE bool raise_row_maxima(const Real (&score)[m_tiles][n_tiles][4], Real exponent_scale,
                                       RescaleRow rescale_row) {
    Real tile_max[m_tiles][2];
    bool grows = false;
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Real max = max_of(score[m][0][2 * half], score[m][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < n_tiles; ++n) max = max_of(max, max_of(score[m][n][2 * half], score[m][n][2 * half + 1]));
        max = max_of(max, ptx::shuffle_xor(max, 1));
        max = max_of(max, ptx::shuffle_xor(max, 2));
        tile_max[m][half] = natural ? max : ptx::multiply(max, exponent_scale);
        Reductions::add_tile_max(m, half, tile_max[m][half]);
        Real largest = row_max[m][half] + (natural ? kMaxGrowth * kLn2 : kMaxGrowth);
        if constexpr (kFused) largest = ptx::fused(magnitude_of(row_max[m][half]), -256 / kLargestFused, largest);
        grows = grows || tile_max[m][half] > largest;
      }
    if (!ptx::any_lane(grows)) return false;
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Real factor = raise_row_max(m, half, tile_max[m][half]);
        rescale_row(m, half, factor);
      }
    return true;
  }

  // Raises the row max of a row, if `other` is larger. Returns the factor of what was summed before.
  CUFLASH_DEVICE Real raise_row_max(int m, int half, Real other) {
    const Real old = row_max[m][half];
    row_max[m][half] = max_of(old, other);
    const Real factor = relative<natural>(old, row_max[m][half]);
    if constexpr (kReducesExponents)
      Reductions::rescale_moment(m, half, factor, exponent_of_difference<natural>(old, row_max[m][half]),
                                 row_sum[m][half]);
    row_sum[m][half] *= factor;
    return factor;
  }
};
