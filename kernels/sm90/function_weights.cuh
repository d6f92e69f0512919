// The weights of the backward pass on compute capability 9.0 where a score_mod makes scores.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/score/mask_bits.cuh"
#include "common/score/scores.cuh"
#include "sm90/backward_layout.cuh"
#include "sm90/backward_weights.cuh"
#include "sm90/per_row_values.cuh"

#if CUFLASH_HAS_SCORE_FUNCTION
// P' = exp(S' - lse) for the elements that a lane holds of a tile, whose rows are keys.
struct FunctionWeights {
  const Functions& functions;
  const Mask& mask;
  const OfKey (&of_keys)[2];
  float scale;
  u32 s_stats, s_row_values;  // from this lane's first query on; of the whole tile
  int lane_query, lane_key;   // of the first element
  u32 shown;                  // the mask bits, if there are any
  const RowSum* row_sums;     // of this lane's first query
  bool large;                 // whether some rows of the tile are large

  // Turns products into P'. With Kept::kWeights it multiplies `p` by the derivatives of the score by the scaled
  // product, which may have any size, and `packed` gets P' itself. `masked` says whether some pair may be hidden, some
  // row may be large or may not exist. Such a row gets no weight, whatever the function returns.
  template <int rows, class Masked>
  CUFLASH_DEVICE void make(float (&p)[kQueryTiles][4], u32 (&packed)[rows][2], Masked masked) const {
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      float lse[2], derivative[4];
      OfRow of_rows[2];
      PerRowValues::load(functions, s_row_values, n, lane_query + 8 * n, of_rows);
      ptx::load_shared_x2(s_stats + n * 64, lse);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane_query + 8 * n + i % 2, key = lane_key + i / 2 * 8;
        p[n][i] = functions.score(p[n][i] * scale, row, key, of_rows[i % 2], of_keys[i / 2], derivative[i]);
        if (masked && !(kMaskByBits ? (bool)(shown >> bit_of(n, i) & 1) : mask.visible(row, key)))
          p[n][i] = -ptx::infinity();
      }
      if (masked && large) make_relative(p[n], n, row_sums, kLog2e);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[n][i] = exponential(p[n][i] * kLog2e - lse[i % 2]);
        if (masked && (lse[i % 2] == ptx::infinity() || (large && !row_sums[8 * n + i % 2].exists()))) p[n][i] = 0.0f;
      }
      if constexpr (kKept == Kept::kWeights) {
        PackedWeights::pack(p[n], packed[n]);
#pragma unroll
        for (int i = 0; i < 4; ++i) p[n][i] = p[n][i] == 0.0f ? 0.0f : p[n][i] * derivative[i];
      }
    }
  }
};
#endif
