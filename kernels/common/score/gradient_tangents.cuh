// Gradients of scores and their tangents, pair by pair, in the pass backward_jvp:
//
//   P = exp(S - lse)      u = tS - tlse      dS = P (dP - delta)      tdS = u dS + P (tdP - tdelta)
//   dX = f' dS            tdX = t(f') dS + f' tdS                      f: what makes a score of X = scale q.k
#pragma once
#include "common/score/dropout.cuh"
#include "common/score/score_tangents.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/backward.cuh"

// A row of the pass.
struct RowWithTangents {
  RowStats stats;
  Real tlse = 0, tdelta = 0;

  CUFLASH_DEVICE RowWithTangents() {}
  CUFLASH_DEVICE RowWithTangents(const Params& params, Entry batch, int head, int row)
      : stats(params, batch, head, row) {
    const Real* tangents = row_tangents(params, batch, head, row);
    tlse = tangents[0], tdelta = tangents[kDelta];
  }
};

// What makes the gradients of q and k of dX and tdX: scale (tdX K + dX tK) + tscale dX K is `factor` times a sum with
// operands `unit` dX and `unit` tdX + `of_scale` dX, so that one accumulator holds it. The unit is a power of two that
// keeps of_scale below 2: operands are in half precision, and those with a large tscale / scale would be infinite.
struct ScaledGradients {
  Real factor, unit = 1, of_scale = 0;

  CUFLASH_DEVICE ScaledGradients(Real scale, Real tscale) : factor(scale) {
    if constexpr (!kMovesScale) return;
    constexpr Real kNegligible = 7.888609052210118e-31f;  // 2^-100
    if (magnitude(scale) <= magnitude(tscale) * kNegligible) {
      factor = tscale, unit = 0, of_scale = 1;
      return;
    }
    const Real ratio = tscale / scale;
    if (magnitude(ratio) >= 2) unit = 1 / power_of_two_of(magnitude(ratio));
    factor /= unit, of_scale = unit * ratio;
  }

  CUFLASH_DEVICE void apply(Real& dx, Real& tdx) const {
    if constexpr (!kMovesScale) return;
    tdx = unit * tdx + of_scale * dx;
    dx *= unit;
  }

 private:
  CUFLASH_DEVICE static Real magnitude(Real x) { return x < 0 ? -x : x; }
  // The largest power of two that x, positive and normal, is not below.
  CUFLASH_DEVICE static float power_of_two_of(float x) { return ptx::float_of(ptx::bits_of(x) & 0x7f800000); }
  CUFLASH_DEVICE static double power_of_two_of(double x) {
    return ptx::double_of(ptx::bits_of(x) & 0x7ff0000000000000);
  }
};

CUFLASH_DEVICE Real tscale_of(const Params& params) { return kMovesScale ? *(const Real*)params.tscale : 0; }

// What is made of a pair: P and u, and the gradients of its score and of its scaled product with their tangents.
struct PairTangents {
  Real p, u, ds, tds, dx, tdx;
};

struct GradientTangents {
  const Weights weights;
  const ScoreTangents tangents;
  const ScaledGradients scaled;
  const Real kept_scale;

  CUFLASH_DEVICE GradientTangents(const Params& params, Entry batch, int head, int key_stop)
      : weights(params, batch, head, key_stop),
        tangents(params, batch, head),
        scaled(weights.score.scale, tangents.scale),
        kept_scale(kept_scale_of(params)) {}

  // The gradients of a pair from its products: q.k and dP, with their tangents. `keeps` says whether dropout keeps it.
  CUFLASH_DEVICE PairTangents of(Real product, Real tangent, Real dp, Real tdp, int row, int key, bool masked,
                                 bool keeps, const RowWithTangents& own) const {
    PairTangents made;
    Real derivative;
    const Real x = masked_score(weights.score, weights.mask, product, row, key, masked, derivative);
    const Real p = made.p = weight_of(x, weights.exponent_scale, own.stats, derivative);
    made.u = p == 0 ? 0 : (kMovesScores ? tangents.of(weights.score, product, tangent, row, key) : 0) - own.tlse;
    made.ds = p * ((keeps ? dp : 0) * kept_scale - own.stats.delta);
    made.tds = made.u * made.ds + p * ((keeps ? tdp : 0) * kept_scale - own.tdelta);
    made.dx = derivative * made.ds;
    made.tdx = derivative * made.tds;
    if constexpr (kHasSoftcap || kHasScoreFunction) {
      if (made.ds != 0) made.tdx += tangents.of_slope(weights.score, product, tangent, row, key) * made.ds;
    }
    return made;
  }

  // Replaces the product q.k of a pair by P, its tangent by P u, dP and tdP by dX and tdX. P and P u are those after
  // dropout, with the factor of what it keeps: where it drops the largest weights of a row, the others may be subnormal
  // in float16, and a factor after rounding would multiply the rounding errors.
  CUFLASH_DEVICE void apply(Real& s, Real& ts, Real& dp, Real& tdp, int row, int key, bool masked, bool keeps,
                            const RowWithTangents& own) const {
    const PairTangents made = of(s, ts, dp, tdp, row, key, masked, keeps, own);
    dp = made.dx, tdp = made.tdx;
    scaled.apply(dp, tdp);
    s = keeps ? made.p * kept_scale : 0;
    ts = s * made.u;
  }
};
