// Weights and their tangents of the kernels of backward_jvp, pair by pair.
#pragma once
#include "common/config.cuh"
#include "common/score/score_tangents.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/backward.cuh"

struct PairWeights {
  const Weights weights;
  const ScoreTangents tangents;

  CUFLASH_DEVICE PairWeights(const Params& params, Entry batch, int head, int key_stop, int own_diagonal)
      : weights(params, batch, head, key_stop, own_diagonal), tangents(params, batch, head) {}

  // Replaces the product q.k of a pair by f' P, and its tangent by P (f' u + t(f')), where u = tS - tlse; without a
  // function f by P and u. Returns P u, and `weight` gets P.
  CUFLASH_DEVICE float make(float& p, float& u, float& weight, int row, int key, bool masked, const RowStats& own,
                            float tlse) const {
    const float product = p, tangent = kMovesQ || kMovesK ? u : 0.0f;
    float derivative;
    const float x = masked_score(weights.score, weights.mask, product, row, key, masked, derivative);
    weight = weight_of(x, weights.exponent_scale, own, derivative);
    if (weight == 0) {  // a pair that does not exist may have no tangent
      p = u = 0;
      return 0;
    }
    u = tangents.of(weights.score, product, tangent, row, key) - tlse;
    const float weight_u = weight * u;
    p = derivative * weight;
    if constexpr (kHasDerivative)
      u = derivative * weight_u + weight * tangents.of_slope(weights.score, product, tangent, row, key);
    return weight_u;
  }
};
