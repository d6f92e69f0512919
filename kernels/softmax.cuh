// The online softmax over the rows of an accumulator tile (Milakov and Gimelshein 2018; FlashAttention, Algorithm 1).
#pragma once
#include "mma.cuh"

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

  // Takes in a tile of scores and leaves exp2(scale_log2 (score - max)) in its place; rescales what `out` summed so far.
#if CUFLASH_EXP & 1
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
        grows = grows || (new_max[m][half] - row_max[m][half]) * scale_log2 > 8.0f;
      }
    if (ptx::any_lane(grows)) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float offset = new_max[m][half] == -ptx::infinity() ? 0.0f : new_max[m][half] * scale_log2;
          const float rescale = ptx::exp2_approx(row_max[m][half] * scale_log2 - offset);
          row_max[m][half] = new_max[m][half];
          row_sum[m][half] *= rescale;
#pragma unroll
          for (int n = 0; n < out_tiles; ++n) out[m][n][2 * half] *= rescale, out[m][n][2 * half + 1] *= rescale;
        }
    }
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float offset = row_max[m][half] == -ptx::infinity() ? 0.0f : row_max[m][half] * scale_log2;
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            score[m][n][i] = ptx::exp2_approx(score[m][n][i] * scale_log2 - offset);
            row_sum[m][half] += score[m][n][i];
          }
      }
  }
#else
  template <int n_tiles, int out_tiles>
  CUFLASH_DEVICE void update(float (&score)[m_tiles][n_tiles][4], float (&out)[m_tiles][out_tiles][4], float scale_log2) {
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

        const float new_max = fmaxf(row_max[m][half], tile_max);
        // While nothing is visible the maximum is -inf: exponents are then taken relative to 0, and are 0.
        const float offset = new_max == -ptx::infinity() ? 0.0f : new_max * scale_log2;
        const float rescale = ptx::exp2_approx(row_max[m][half] * scale_log2 - offset);
        row_max[m][half] = new_max;

        float sum = row_sum[m][half] * rescale;
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            score[m][n][i] = ptx::exp2_approx(score[m][n][i] * scale_log2 - offset);
            sum += score[m][n][i];
          }
        row_sum[m][half] = sum;
#pragma unroll
        for (int n = 0; n < out_tiles; ++n) out[m][n][2 * half] *= rescale, out[m][n][2 * half + 1] *= rescale;
      }
  }

#endif
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
};
