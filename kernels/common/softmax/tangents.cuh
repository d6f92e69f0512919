// The online softmax with tangents: beside the sum of P = exp(S - m) and O, each row has
//
//   r = sum P (tS - c)        A = sum P (tS - c) V + P tV
//
// which are rescaled where m rises, as those are. The shift c is what all keys of a row have in common, taken out
// before P (tS - c) is rounded: it moves to the mean of tS over the keys so far wherever m rises. Where m follows late,
// c moves with the next tile, too: the first tile may have few keys, and m may stay at their maximum, but what these
// few have in common may be far from the mean, and cancels in c + r / l. The sink is left out of that mean: next to the
// first keys alone it weighs more than next to all, and c would stay far from the tS of later keys. At the end tlse = c
// + r / l and tout = (A - (r / l) O) / l.
#pragma once
#include "common/io/params.cuh"
#include "common/schedule/sequences.cuh"
#include "common/softmax/softmax.cuh"

// One warp has all keys of its rows.
struct Alone {
  CUFLASH_DEVICE void add(int, Real&, Real&) const {}
};

// `Others` are other warps that have the same rows and other keys: `add(half, x, y)` adds theirs to two sums.
// `to_weights` then gets the row maxima of all of them, so that all raise theirs together.
template <int m_tiles, class Others = Alone>
struct TangentSoftmax : OnlineSoftmax<m_tiles>, Others {
  using Base = OnlineSoftmax<m_tiles>;
  using Base::row_sum;
  static constexpr bool kMovesTwice = kMovesScores && kMaxGrowth > 0;  // with the tile after a rise, too

  Real shift[m_tiles][2];
  Real mean_sum[m_tiles][2];  // r; over this lane's columns only, until `finish`
  bool has_risen = false;     // whether some row max rose with the last tile

  Real sink, sink_tangent;  // with kHasSinks: the score of the sink, as a row max, and its tangent

  explicit CUFLASH_DEVICE TangentSoftmax(Real sink_ = -ptx::infinity(), Real sink_tangent_ = 0, Others others_ = {})
      : Others(others_), sink(sink_), sink_tangent(sink_tangent_) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) shift[m][half] = 0, mean_sum[m][half] = 0;
  }

  // How the row maxima rose with a tile of scores: whether some did, or the shift moves all the same; the factors of
  // what was summed before; and the row sums before the tile, times these.
  struct Raised {
    bool any;
    Real factor[m_tiles][2], before[m_tiles][2];
  };

  // Takes in a tile of scores and their tangents, replaces the former by P, the latter by P (tS - c), and makes the
  // sums of earlier tiles, O and A, relative to the same row max and shift.
  template <int n_tiles, int out_tiles>
  CUFLASH_DEVICE void update(Real (&score)[m_tiles][n_tiles][4], Real (&tangent)[m_tiles][n_tiles][4],
                             Real (&o)[m_tiles][out_tiles][4], Real (&a)[m_tiles][out_tiles][4], Real exponent_scale) {
    const Raised raised = to_weights(score, Base::rounded(score, exponent_scale));
    rescale_sums(raised, score, tangent, o, a, (Real)1, Constant<true>{});
    weigh_tangents(score, tangent, (Real)1, Constant<true>{});
  }

  // The three steps of `update`, for kernels that have products in flight between them.
  //
  // Replaces a tile of scores by P.
  template <int n_tiles>
  CUFLASH_DEVICE Raised to_weights(Real (&score)[m_tiles][n_tiles][4], Real exponent_scale) {
    return to_weights(score, score, exponent_scale);
  }
  // The same, where `maxima` has scores with the row maxima of the tile.
  template <int n_tiles, int n_maxima>
  CUFLASH_DEVICE Raised to_weights(Real (&score)[m_tiles][n_tiles][4], const Real (&maxima)[m_tiles][n_maxima][4],
                                   Real exponent_scale) {
    Raised raised;
    if constexpr (kMovesTwice) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) raised.factor[m][0] = 1, raised.factor[m][1] = 1;
    }
    const bool rises = Base::update(maxima, raised.factor, exponent_scale);
    raised.any = rises || (kMovesTwice && has_risen);
    has_risen = rises;
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) raised.before[m][half] = row_sum[m][half];
    Base::exponentiate(score, exponent_scale, row_sum, Base::has_unfused(rises));
    return raised;
  }
  // If `raised.any`, makes the sums of earlier tiles relative to the row maxima, and moves the shift. A tangent is
  // `scale` times what `tangent` has; with `selects`, that of a weight of 0 may be NaN.
  template <int n_tiles, int out_tiles, class Selects>
  CUFLASH_DEVICE void rescale_sums(const Raised& raised, const Real (&weight)[m_tiles][n_tiles][4],
                                   const Real (&tangent)[m_tiles][n_tiles][4], Real (&o)[m_tiles][out_tiles][4],
                                   Real (&a)[m_tiles][out_tiles][4], Real scale, Selects selects) {
    if (!raised.any) return;
    Base::rescale(o, raised.factor);
    Base::rescale(a, raised.factor);
    if constexpr (kMovesScores) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          mean_sum[m][half] *= raised.factor[m][half];
          Real weighed = 0;
#pragma unroll
          for (int n = 0; n < n_tiles; ++n)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i)
              weighed += weight[m][n][i] * less_shift(weight[m][n][i], tangent[m][n][i], scale, m, half, selects);
          move_shift(o[m], a[m], m, half, weighed, raised.before[m][half]);
        }
    }
  }
  // Replaces the tangents of a tile by P (tS - c), and adds these to r.
  template <int n_tiles, class Selects>
  CUFLASH_DEVICE void weigh_tangents(const Real (&weight)[m_tiles][n_tiles][4], Real (&tangent)[m_tiles][n_tiles][4],
                                     Real scale, Selects selects) {
    if constexpr (kMovesScores) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Real sum = 0;
#pragma unroll
          for (int n = 0; n < n_tiles; ++n)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
              Real& x = tangent[m][n][i];
              x = weight[m][n][i] * less_shift(weight[m][n][i], x, scale, m, half, selects);
              sum += x;
            }
          mean_sum[m][half] += sum;
        }
    }
  }

  // Adds up the sums of the lanes of each row.
  CUFLASH_DEVICE void finish() {
    Base::finish();
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mean_sum[m][half] = sum_of_row(mean_sum[m][half]);
        Others::add(half, row_sum[m][half], mean_sum[m][half]);
      }
  }

  // Adds the sink to each row, after `finish`, as one more key whose value is zero.
  template <int out_tiles>
  CUFLASH_DEVICE void add_sink(Real (&o)[m_tiles][out_tiles][4], Real (&a)[m_tiles][out_tiles][4]) {
    Real factor[m_tiles][2];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[m][half] = this->raise_row_max(m, half, sink);
        const Real weight = relative<kNaturalRowMax>(sink, this->row_max[m][half]);
        row_sum[m][half] += weight;
        mean_sum[m][half] = mean_sum[m][half] * factor[m][half] + weight * (sink_tangent - shift[m][half]);
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

  // A tangent less the shift.
  template <class Selects>
  CUFLASH_DEVICE Real less_shift(Real weight, Real tangent, Real scale, int m, int half, Selects) const {
    return Selects::value && weight == 0 ? 0 : ptx::fused(tangent, scale, -shift[m][half]);
  }

  // Moves the shift of a row to the mean of the tangents so far: `weighed` is the sum of P (tS - c) over this lane's
  // columns of a tile, which r has not got yet, and `before` what the row sum was before the tile.
  template <int out_tiles>
  CUFLASH_DEVICE void move_shift(const Real (&o)[out_tiles][4], Real (&a)[out_tiles][4], int m, int half, Real weighed,
                                 Real before) {
    Real total = sum_of_row(row_sum[m][half]), weighed_total = sum_of_row(mean_sum[m][half] + weighed);
    Others::add(half, total, weighed_total);
    const Real old = shift[m][half];
    shift[m][half] += total > 0 ? weighed_total / total : 0;
    const Real gain = shift[m][half] - old;
    mean_sum[m][half] -= gain * before;
#pragma unroll
    for (int n = 0; n < out_tiles; ++n)
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) a[n][i] -= gain * o[n][i];
  }
};

// Those of rows of a query head. Rows that belong to no sequence have no sink.
template <class Others = Alone>
CUFLASH_DEVICE TangentSoftmax<1, Others> make_tangent_softmax(const Params& params, Entry batch, int head,
                                                              Others others = {}) {
  if (!kHasSinks || is_left_over(params, batch)) return TangentSoftmax<1, Others>(-ptx::infinity(), 0, others);
  const Real tangent = kMovesSinks ? ((const Real*)params.tsinks)[head * params.tsinks_stride] : (Real)0;
  return TangentSoftmax<1, Others>(to_row_max(sink_of(params, head)), tangent, others);
}
