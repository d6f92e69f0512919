// Stores lse of a row of the forward pass. Where the result is partial, and is merged with those of other keys, a
// second number follows each lse: what its rounding leaves of row max + log(row sum). Where lse is large, the weight of
// a partial result depends on it (cuflash/spec/row_sums.py); elsewhere it is 0, so that partial results merge as if it
// were not there.
#pragma once
#include "common/softmax/softmax.cuh"

// What is left of the logarithm of a sum of exponentials that is relative to `row_max`.
template <bool natural = kNaturalRowMax>
CUFLASH_DEVICE Real rest_of_lse(Real lse, Real row_max, Real sum) {
  const Real size = lse < 0 ? -lse : lse, log_of_sum = log_sum_exp<true>(0, sum);
  if (!(size >= kLargeLse && size < ptx::infinity())) return 0;
  if constexpr (natural || kWide) return (row_max - lse) + log_of_sum;
  constexpr float kRestOfLn2 = -1.9046543e-9f;
  return fmaf((float)row_max, kLn2, (float)-lse) + ((float)row_max * kRestOfLn2 + (float)log_of_sum);
}

template <bool natural = kNaturalRowMax>
CUFLASH_DEVICE void store_lse(Real* to, Real row_max, Real sum) {
  const Real lse = log_sum_exp<natural>(row_max, sum);
  to[0] = lse;
  if constexpr (CUFLASH_LSE_WIDE) to[1] = rest_of_lse<natural>(lse, row_max, sum);
}
template <int m_tiles, bool natural, bool max_by_weights>
CUFLASH_DEVICE void store_lse(Real* to, const OnlineSoftmax<m_tiles, natural, max_by_weights>& softmax, int m,
                              int half) {
  store_lse<natural>(to, softmax.row_max[m][half], softmax.row_sum[m][half]);
}
