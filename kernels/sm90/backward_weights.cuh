// The weights of the backward pass on compute capability 9.0: P' = exp(S' - lse) for the elements of a tile that a lane
// holds. Rows of the tile are keys.
#pragma once
#include "common/config.cuh"
#include "common/softmax/exponential.cuh"
#include "common/io/fragments.cuh"
#include "common/score/mask_bits.cuh"
#include "sm90/backward_layout.cuh"
#include "sm90/packed_weights.cuh"

// Hides pairs whose bit of a mask is 0.
CUFLASH_DEVICE void hide_by_bits(float (&score)[kQueryTiles][4], u32 shown) {
#pragma unroll
  for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(shown >> bit_of(n, i) & 1)) score[n][i] = -ptx::infinity();
}

// Whether the tile whose statistics begin at `s_stats`, or somewhere before, has large rows. With kKeepsWeightsOfCap
// none has: where soft caps are so large, scores are natural (cuflash/plan/defines.py).
CUFLASH_DEVICE bool has_large_rows(u32 s_stats) {
  return !kKeepsWeightsOfCap && is_of_large(ptx::float_of(ptx::load_shared_b32(s_stats)));
}

// Turns scores into the exponents of their weights, finite ones if some `may_be_hidden`. `s_stats` is as below.
CUFLASH_DEVICE void to_exponents(float (&p)[kQueryTiles][4], u32 s_stats, float exponent_scale, bool may_be_hidden) {
  constexpr float kLeastExponent = -1024;  // its weight is 0
#pragma unroll
  for (int n = 0; n < kQueryTiles; ++n) {
    float lse[2];
    ptx::load_shared_x2(s_stats + n * 64, lse);
#pragma unroll
    for (int i = 0; i < 4; ++i) p[n][i] = ptx::fused(p[n][i], exponent_scale, -lse[i % 2]);
  }
  if (!may_be_hidden) return;
#pragma unroll
  for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) p[n][i] = max_of(p[n][i], kLeastExponent);
}

// Turns `p` into P'. Before, it holds scores, which exponent_scale makes exponents of. With Kept::kWeights these are
// the tanh of a soft cap; then `p` becomes P' times the derivative of the cap, and `packed` gets P' itself. `s_stats`
// is the address of the statistics of this lane's first query. With kEntropyInDp `p` becomes the exponents, see above.
template <int rows>
CUFLASH_DEVICE void to_p(float (&p)[kQueryTiles][4], u32 (&packed)[rows][2], u32 s_stats, float exponent_scale,
                         bool may_be_hidden) {
  if constexpr (kEntropyInDp) return to_exponents(p, s_stats, exponent_scale, kClampsExponents || may_be_hidden);
#pragma unroll
  for (int n = 0; n < kQueryTiles; ++n) {
    float lse[2];  // of this lane's two queries
    ptx::load_shared_x2(s_stats + n * 64, lse);
    [[maybe_unused]] const float tanh[4] = {p[n][0], p[n][1], p[n][2], p[n][3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) p[n][i] = exponential(p[n][i] * exponent_scale - lse[i % 2]);
    if constexpr (kKept == Kept::kWeights) {
      PackedWeights::pack(p[n], packed[n]);
      // Hidden pairs have -inf in place of a tanh. Saturation makes their derivative 0, so that they stay 0.
#pragma unroll
      for (int i = 0; i < 4; ++i) p[n][i] *= ptx::fma_saturated(-tanh[i], tanh[i], 1.0f);
    }
  }
}
