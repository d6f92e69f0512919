// The online softmax with tangents: beside the sum of P = exp(S - m) and O, each row has
//
//   r = sum P (tS - c)        A = sum P (tS - c) V + P tV
//
// which are rescaled where m rises, as those are. The shift c is what all keys of a row have in common, taken out before
// P (tS - c) is rounded: it moves to the mean of tS so far wherever m rises. At the end tlse = c + r / l and
// tout = (A - (r / l) O) / l.
#pragma once
#include "common/softmax/softmax.cuh"

template <int m_tiles>
struct TangentSoftmax : OnlineSoftmax<m_tiles> {
  using Base = OnlineSoftmax<m_tiles>;
  using Base::row_sum;

  Real shift[m_tiles][2];
  Real mean_sum[m_tiles][2];  // r; over this lane's columns only, until `finish`

  CUFLASH_DEVICE TangentSoftmax() {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) shift[m][half] = 0, mean_sum[m][half] = 0;
  }

  // Takes in a tile of scores and their tangents, replaces the former by P, the latter by P (tS - c), and makes the sums
  // of earlier tiles, O and A, relative to the same row max and shift.
  template <int n_tiles, int out_tiles>
  CUFLASH_DEVICE void update(Real (&score)[m_tiles][n_tiles][4], Real (&tangent)[m_tiles][n_tiles][4],
                             Real (&o)[m_tiles][out_tiles][4], Real (&a)[m_tiles][out_tiles][4], Real exponent_scale) {
    Real factor[m_tiles][2], before[m_tiles][2];
    const bool is_raised = Base::update(score, factor, exponent_scale);
    if (is_raised) {
      Base::rescale(o, factor);
      Base::rescale(a, factor);
    }
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (is_raised) mean_sum[m][half] *= factor[m][half];
        before[m][half] = row_sum[m][half];
      }
    Base::exponentiate(score, exponent_scale, row_sum);
    if constexpr (kMovesScores) {
      const auto weigh = [&](int m, int half) {
        Real sum = 0;
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) sum += score[m][n][i] * tangent[m][n][i];
        return sum;
      };
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int n = 0; n < n_tiles; ++n)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i)
              tangent[m][n][i] = score[m][n][i] == 0 ? 0 : tangent[m][n][i] - shift[m][half];
          if (is_raised) move_shift(tangent[m], score[m], o[m], a[m], m, half, weigh(m, half), before[m][half]);
          mean_sum[m][half] += weigh(m, half);
#pragma unroll
          for (int n = 0; n < n_tiles; ++n)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) tangent[m][n][i] *= score[m][n][i];
        }
    }
  }

  // Adds up the sums of the lanes of each row.
  CUFLASH_DEVICE void finish() {
    Base::finish();
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) mean_sum[m][half] = sum_of_row(mean_sum[m][half]);
  }

  // Adds one more key to each row, after `finish`: its value is zero, its score, as a row max, is `sink`, and the tangent
  // of that is `tangent`.
  template <int out_tiles>
  CUFLASH_DEVICE void add_sink(Real (&o)[m_tiles][out_tiles][4], Real (&a)[m_tiles][out_tiles][4], Real sink,
                               Real tangent) {
    Real factor[m_tiles][2];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[m][half] = this->raise_row_max(m, half, sink);
        const Real weight = relative<kNaturalRowMax>(sink, this->row_max[m][half]);
        row_sum[m][half] += weight;
        mean_sum[m][half] = mean_sum[m][half] * factor[m][half] + weight * (tangent - shift[m][half]);
      }
    Base::rescale(o, factor);
    Base::rescale(a, factor);
  }

  // The mean of tS - c of a row, after `finish`; 0 in a row that attends to nothing.
  CUFLASH_DEVICE Real mean(int m, int half) const { return mean_sum[m][half] * this->inverse_sum(m, half); }
  // The tangent of lse.
  CUFLASH_DEVICE Real lse_tangent(int m, int half) const { return shift[m][half] + mean(m, half); }

 private:
  CUFLASH_DEVICE static Real sum_of_row(Real x) {
    x += ptx::shuffle_xor(x, 1);
    return x + ptx::shuffle_xor(x, 2);
  }

  // Moves the shift of a row to the mean of the tangents so far: `weighed` is the sum of P tS over this lane's columns of
  // the tile, less the shift, and `before` what the row sum was before it.
  template <int n_tiles, int out_tiles>
  CUFLASH_DEVICE void move_shift(Real (&tangent)[n_tiles][4], const Real (&score)[n_tiles][4],
                                 const Real (&o)[out_tiles][4], Real (&a)[out_tiles][4], int m, int half, Real weighed,
                                 Real before) {
    const Real total = sum_of_row(row_sum[m][half]), weighed_total = sum_of_row(mean_sum[m][half] + weighed);
    const Real gain = total > 0 ? weighed_total / total : 0;
    shift[m][half] += gain;
    mean_sum[m][half] -= gain * before;
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i)
        if (score[n][i] != 0) tangent[n][i] -= gain;
#pragma unroll
    for (int n = 0; n < out_tiles; ++n)
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) a[n][i] -= gain * o[n][i];
  }
};
