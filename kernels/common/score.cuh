// From the product q.k to the score that the softmax sees, as an exponent: scale, softcap, slopes, bias.
#pragma once
#include "common/config.cuh"
#include "common/exponential.cuh"
#include "common/params.cuh"
#include "common/sequences.cuh"

// The score of one head. When the scale can be folded into the exponent (kScaleInExponent), `of` leaves the product as
// it is and `exponent_scale` does the work; otherwise `of` does it all and exponent_scale is 1.
struct Score {
  Real scale;
  Real softcap;
  Real exponent_slope;
  int diagonal;
  int seqlen_q;
  int key_stop;
  const void* bias;  // of this head
  i64 bias_row_stride;
  i64 bias_key_stride;

  CUFLASH_DEVICE Score(const Params& params, Entry batch, int head, int key_stop_)
      : Score(params, batch, head, key_stop_, own_diagonal_of(params, batch)) {}

  CUFLASH_DEVICE Score(const Params& params, Entry batch, int head, int key_stop_, int own_diagonal)
      : scale(scale_of(params)),
        softcap(softcap_of(params)),
        exponent_slope(0),
        diagonal(params.diagonal + own_diagonal),
        seqlen_q(params.seqlen_q),
        key_stop(key_stop_),
        bias(nullptr),
        bias_row_stride(params.bias.row_stride),
        bias_key_stride(params.bias.key_stride) {
    if (kHasAlibi && !is_left_over(params, batch)) {
      const Tensor& slopes = params.alibi_slopes;
      const Real* slope = (const Real*)slopes.data + batch * slopes.batch_stride + head * slopes.head_stride;
      exponent_slope = *slope * kExponentOfE;
    }
    if constexpr (kBiasBytes != 0) {
      const i64 offset = batch * params.bias.batch_stride + head * params.bias.head_stride;
      bias = (const u8*)params.bias.data + offset * kBiasBytes;
    }
  }

  CUFLASH_DEVICE Real exponent_scale() const { return kScaleInExponent ? scale * kExponentOfE : 1; }

  // The score of (row, key), and the derivative of the capped score in the scaled product (1 without softcap).
  CUFLASH_DEVICE Real of(Real product, int row, int key, Real& derivative) const {
    derivative = 1;
    if constexpr (kScaleInExponent) return product;
    Real score = product * scale;
    if constexpr (kHasSoftcap) {
      const Real t = tanh(score / softcap);
      derivative = 1 - t * t;
      score = softcap * t;
    }
    score *= kExponentOfE;
    if constexpr (kHasAlibi) {
      score -= exponent_slope * distance(row, key);
    }
    if constexpr (kBiasBytes != 0) {
      if (row < seqlen_q && key < key_stop) score += bias_at(row, key) * kExponentOfE;
    }
    return score;
  }

  // What a slope is multiplied by.
  CUFLASH_DEVICE Real distance(int row, int key) const {
    const int distance = row + diagonal - key;
    return (Real)(distance < 0 ? -distance : distance);
  }

  // The derivative of softcap tanh(x), x = scale product / softcap, by softcap: tanh(x) - x (1 - tanh(x)^2). Near 0,
  // where the two terms cancel, (sinh(2x) - 2x) / 2 (1 - tanh(x)^2), by the series of the first factor.
  CUFLASH_DEVICE Real derivative_by_softcap(Real product) const {
    const Real x = product * scale / softcap, x2 = x * x;
    const Real t = tanh(x), slope = 1 - t * t;
    if (x2 >= (Real)0.25) return t - x * slope;
    Real series = 1;
#pragma unroll
    for (int n = 18; n >= 4; n -= 2) series = 1 + 4 * x2 / (n * (n + 1)) * series;
    return x * x2 * (2 / (Real)3) * series * slope;
  }

 private:
  // For 16-bit elements through one exponential, to 1e-7 absolutely; NaN and the infinities as they should be.
  CUFLASH_DEVICE static Real tanh(Real x) {
    if constexpr (kWide) return accurate_tanh(x);
    const float magnitude = x < 0.0f ? -x : x;
    const float e = ptx::exp2_approx(magnitude * (-2.0f * kLog2e));
    const float t = (1.0f - e) / (1.0f + e);
    return x < 0.0f ? -t : t;
  }

  CUFLASH_DEVICE Real bias_at(int row, int key) const {
    const i64 index = row * bias_row_stride + key * bias_key_stride;
    if constexpr (kBiasBytes == sizeof(Real)) return ((const Real*)bias)[index];
    return to_real<Element>(((const Storage*)bias)[index]);
  }
};
