// What is added to the scores of a tile, as exponents, by class of operand: slopes times a distance that is known but
// for a constant. Nothing here depends on which pairs are visible.
#pragma once
#include "common/config.cuh"
#include "common/fragments.cuh"
#include "common/score.cuh"

// Whether this serves all that is added; else each score looks for its own (common/score.cuh).
constexpr bool kAddsByTile = kHasAlibi && kBiasBytes == 0;

// The addends of what a lane holds of a tile, whose n-tiles run along the keys, or with `transposed` along the queries.
template <bool transposed>
struct Addends {
  float slope;
  float distance[2];  // from the query to the key of the first element, and of the one 8 rows below it

  // `row` and `key` are those of the first element.
  CUFLASH_DEVICE Addends(const Score& score, int row, int key) : slope(score.exponent_slope), distance{} {
    if constexpr (kHasAlibi) {
      distance[0] = (float)(row + score.diagonal - key);
      distance[1] = distance[0] + (transposed ? -8.0f : 8.0f);
    }
  }

  // f(n, i, addend) for all elements: `addend` of a number gives its sum with what is added to the score.
  template <int n_tiles, class Function>
  CUFLASH_DEVICE void visit(Function f) const {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        f(n, i, [&](float sum) {
          if constexpr (kHasAlibi) {
            const float steps = 8 * n + i % 2, from = distance[i / 2] + (transposed ? steps : -steps);
            sum -= slope * fabsf(from);
          }
          return sum;
        });
      }
  }
};
