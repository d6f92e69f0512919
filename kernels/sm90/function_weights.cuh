// The weights of the backward pass on compute capability 9.0 where a function of the caller makes scores.
#pragma once
#include "common/config.cuh"
#include "common/fragments.cuh"
#include "common/mask_bits.cuh"
#include "common/scores.cuh"
#include "sm90/backward_layout.cuh"
#include "sm90/backward_weights.cuh"

// P' = exp(S' - lse) of what a lane holds of a tile, whose rows are keys.
struct FunctionWeights {
  const Weights& weights;
  u32 s_stats;               // of this lane's first query
  int lane_query, lane_key;  // of the first element
  u32 shown;                 // the mask bits, if there are any

  // Makes P' of products. Where the derivatives of the score by the scaled product are not 1, P' is left times these,
  // which may have any size, and `packed` gets P' itself. `masked` says whether some pair may be hidden or
  // some row may not exist: such rows have no weight, whatever the function gives.
  template <int rows, class Masked>
  CUFLASH_DEVICE void make(float (&p)[kQueryTiles][4], u32 (&packed)[rows][2], Masked masked) const {
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      float lse[2], derivative[4];
      ptx::load_shared_x2(s_stats + n * 64, lse);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane_query + 8 * n + i % 2, key = lane_key + i / 2 * 8;
        float exponent = weights.score.of(p[n][i], row, key, derivative[i]) * weights.exponent_scale;
        if (masked && !(kMaskByBits ? (bool)(shown >> bit_of(n, i) & 1) : weights.mask.visible(row, key)))
          exponent = -ptx::infinity();
        p[n][i] = exponential(exponent - lse[i % 2]);
        if (masked && lse[i % 2] == ptx::infinity()) p[n][i] = 0.0f;
      }
      if constexpr (kPacksWeights) {
        PackedWeights::pack(p[n], packed[n]);
#pragma unroll
        for (int i = 0; i < 4; ++i) p[n][i] = p[n][i] == 0.0f ? 0.0f : p[n][i] * derivative[i];
      }
    }
  }
};
