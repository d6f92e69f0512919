// The online softmax over the rows of an accumulator tile (Milakov and Gimelshein 2018; FlashAttention, Algorithm 1).
#pragma once
#include "mma.cuh"

constexpr float kMaxGrowth = 8.0f;

// Row statistics of the 2 m_tiles rows that a lane holds, in units of the score before `scale_log2`.
template <int m_tiles>
struct OnlineSoftmax {
  float row_max[m_tiles][2];  // what the exponents are taken relative to; -inf while no key was visible
  float row_sum[m_tiles][2];  // of this lane's columns only, until `finish`

  CUFLASH_DEVICE OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) row_max[m][half] = -ptx::infinity(), row_sum[m][half] = 0.0f;
  }

  // Takes in a tile of scores and leaves exp2(scale_log2 (score - row_max)) in its place.
  //
  // row_max follows the true maximum only when it falls behind by more than kMaxGrowth powers of two in some row of the
  // warp; what was summed so far is then rescaled. Until then exponentials reach 2^kMaxGrowth instead of 1, which no
  // floating-point format minds, and both sums stay relative to the same row_max, so the result is exact.
  template <int n_tiles, int out_tiles>
  CUFLASH_DEVICE void update(float (&score)[m_tiles][n_tiles][4], float (&out)[m_tiles][out_tiles][4], float scale_log2) {
    float new_max[m_tiles][2];
    bool grows = false;
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float tile_max = fmaxf(score[m][0][2 * half], score[m][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < n_tiles; ++n)
          tile_max = fmaxf(tile_max, fmaxf(score[m][n][2 * half], score[m][n][2 * half + 1]));
        tile_max = fmaxf(tile_max, ptx::shuffle_xor(tile_max, 1));
        tile_max = fmaxf(tile_max, ptx::shuffle_xor(tile_max, 2));
        new_max[m][half] = fmaxf(row_max[m][half], tile_max);
        grows = grows || (new_max[m][half] - row_max[m][half]) * scale_log2 > kMaxGrowth;
      }
    if (ptx::any_lane(grows)) rescale(new_max, out, scale_log2);

#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float offset = exponent_offset(row_max[m][half], scale_log2);
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            score[m][n][i] = ptx::exp2_approx(score[m][n][i] * scale_log2 - offset);
            row_sum[m][half] += score[m][n][i];
          }
      }
  }

  // Sums the lanes of each row.
  CUFLASH_DEVICE void finish() {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[m][half] += ptx::shuffle_xor(row_sum[m][half], 1);
        row_sum[m][half] += ptx::shuffle_xor(row_sum[m][half], 2);
      }
  }

  // Factor of the output row: 1 / sum; 0 for a row that saw no key.
  CUFLASH_DEVICE float inverse_sum(int m, int half) const {
    return row_sum[m][half] == 0.0f ? 0.0f : 1.0f / row_sum[m][half];
  }

  // Natural logarithm of the sum of exponentials; -inf for a row that saw no key.
  CUFLASH_DEVICE float log_sum_exp(int m, int half, float scale_log2) const {
    if (row_sum[m][half] == 0.0f) return -ptx::infinity();
    return (row_max[m][half] * scale_log2 + ptx::log2_approx(row_sum[m][half])) * kLn2;
  }

 private:
  // While nothing is visible the maximum is -inf: exponents are then taken relative to 0, and are 0.
  CUFLASH_DEVICE static float exponent_offset(float max, float scale_log2) {
    return max == -ptx::infinity() ? 0.0f : max * scale_log2;
  }

  template <int out_tiles>
  CUFLASH_DEVICE void rescale(const float (&new_max)[m_tiles][2], float (&out)[m_tiles][out_tiles][4], float scale_log2) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float offset = exponent_offset(new_max[m][half], scale_log2);
        const float factor = ptx::exp2_approx(row_max[m][half] * scale_log2 - offset);
        row_max[m][half] = new_max[m][half];
        row_sum[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < out_tiles; ++n) out[m][n][2 * half] *= factor, out[m][n][2 * half + 1] *= factor;
      }
  }
};
