// Tangents of scores: in natural units, from the product q.k of a pair and the tangent of this.
#pragma once
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/schedule/sequences.cuh"
#include "common/score/score.cuh"

// It keeps no reference to the score: a struct that has one to another of its members stays in local memory.
struct ScoreTangents {
  Real scale, softcap, slope;  // tangents
  const void* bias;            // the tangent of this head's
  i64 bias_row_stride;
  i64 bias_key_stride;

  CUFLASH_DEVICE ScoreTangents(const Params& params, Entry batch, int head)
      : scale(kMovesScale ? *(const Real*)params.tscale : 0),
        softcap(kMovesSoftcap ? *(const Real*)params.tsoftcap : 0),
        slope(0),
        bias(nullptr),
        bias_row_stride(params.tbias.row_stride),
        bias_key_stride(params.tbias.key_stride) {
    if (kMovesAlibi && !is_left_over(params, batch)) {
      const Tensor& slopes = params.talibi_slopes;
      slope = ((const Real*)slopes.data)[batch * slopes.batch_stride + head * slopes.head_stride];
    }
    if constexpr (kMovesBias) {
      const i64 offset = batch * params.tbias.batch_stride + head * params.tbias.head_stride;
      bias = (const u8*)params.tbias.data + offset * kBiasBytes;
    }
  }

  // The tangent of the score of (row, key), whatever hides the pair.
  CUFLASH_DEVICE Real of(const Score& score, Real product, Real tangent, int row, int key) const {
    Real x = scaled(score, product, tangent);
#if CUFLASH_HAS_SCORE_FUNCTION
    return score.functions.tangent(product * score.scale, x, row, key);
#endif
    if constexpr (kHasSoftcap) {
      const Real t = score.capped(product);
      x *= 1 - t * t;
      if constexpr (kMovesSoftcap) x += score.derivative_by_softcap(product) * softcap;
    }
    if constexpr (kMovesAlibi) x -= slope * score.distance(row, key);
    if constexpr (kMovesBias) {
      if (row < score.seqlen_q && key < score.key_stop) x += bias_at(row, key);
    }
    return x;
  }

  // The tangent of the derivative of the score by the scaled product.
  template <class Number>
  CUFLASH_DEVICE Number of_slope(const Score& score, Number product, Number tangent, int row, int key) const {
    const Real x = scaled(score, product, tangent);
#if CUFLASH_HAS_SCORE_FUNCTION
    return score.functions.slope_tangent(product * score.scale, x, row, key);
#endif
    if constexpr (!kHasSoftcap) return 0;
    const Real t = score.capped(product), of_cap = product * score.scale / score.softcap * softcap;
    return -2 * t * (1 - t * t) * (x - (kMovesSoftcap ? of_cap : 0)) / score.softcap;
  }

  // The tangent of Score::derivative_by_softcap: that of the slope, times the argument of tanh.
  CUFLASH_DEVICE Real of_softcap_derivative(const Score& score, Real product, Real tangent) const {
    return -product * score.scale / score.softcap * of_slope(score, product, tangent, 0, 0);
  }

  // The tangent of the scaled product.
  CUFLASH_DEVICE Real scaled(const Score& score, Real product, Real tangent) const {
    return kMovesScale ? score.scale * tangent + scale * product : score.scale * tangent;
  }

 private:
  CUFLASH_DEVICE Real bias_at(int row, int key) const {
    const i64 index = row * bias_row_stride + key * bias_key_stride;
    if constexpr (kBiasBytes == sizeof(Real)) return ((const Real*)bias)[index];
    return to_real<Element>(((const Storage*)bias)[index]);
  }
};
