// The online softmax over the rows of an accumulator tile (Milakov and Gimelshein 2018; FlashAttention, Algorithm 1).
#pragma once
#include "mma.cuh"

constexpr float kMaxGrowth = 8.0f;

// Statistics of the 2 m_tiles rows that a lane holds.
template <int m_tiles>
struct OnlineSoftmax {
  float offset[m_tiles][2];   // what exponents are taken relative to, in units of log2; -inf while no key was visible
  float row_sum[m_tiles][2];  // of this lane's columns only, until `finish`

  CUFLASH_DEVICE OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) offset[m][half] = -ptx::infinity(), row_sum[m][half] = 0.0f;
  }

  // Takes in a tile of scores and leaves exp2(scale_log2 score - offset) in its place.
  //
  // The offset follows the row's maximum only when it falls behind by more than kMaxGrowth in some row of the warp; what
  // was summed so far is then rescaled. Until then exponentials reach 2^kMaxGrowth instead of 1, which no floating-point
  // format minds, and both sums stay relative to one offset, so the result is exact.
  template <int n_tiles, int out_tiles>
  CUFLASH_DEVICE void update(float (&score)[m_tiles][n_tiles][4], float (&out)[m_tiles][out_tiles][4], float scale_log2) {
    raise_offsets(score, scale_log2, [&](int m, int half, float factor) {
#pragma unroll
      for (int n = 0; n < out_tiles; ++n) out[m][n][2 * half] *= factor, out[m][n][2 * half + 1] *= factor;
    });
    exponentiate(score, scale_log2, row_sum);
  }

  // The offsets of `update`, for an output that is still being summed: when true, `rescale` it by `factor` later.
  template <int n_tiles>
  CUFLASH_DEVICE bool update(const float (&score)[m_tiles][n_tiles][4], float (&factor)[m_tiles][2], float scale_log2) {
    return raise_offsets(score, scale_log2, [&](int m, int half, float f) { factor[m][half] = f; });
  }

  template <int out_tiles>
  CUFLASH_DEVICE static void rescale(float (&out)[m_tiles][out_tiles][4], const float (&factor)[m_tiles][2]) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int n = 0; n < out_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[m][n][i] *= factor[m][i / 2];
  }

  // Leaves the exponentials in place of the scores and adds this lane's to `sum`.
  template <int n_tiles>
  CUFLASH_DEVICE void exponentiate(float (&score)[m_tiles][n_tiles][4], float scale_log2, float (&sum)[m_tiles][2]) const {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // While nothing is visible, exponents are taken relative to 0, and are 0.
        const float finite_offset = offset[m][half] == -ptx::infinity() ? 0.0f : offset[m][half];
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            score[m][n][i] = ptx::exp2_approx(score[m][n][i] * scale_log2 - finite_offset);
            sum[m][half] += score[m][n][i];
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
  CUFLASH_DEVICE float log_sum_exp(int m, int half) const {
    if (row_sum[m][half] == 0.0f) return -ptx::infinity();
    return (offset[m][half] + ptx::log2_approx(row_sum[m][half])) * kLn2;
  }

 private:
  // Lets the offsets follow the maxima of a tile of scores, and says if they had to: then for every row what was summed
  // before takes a factor, which `rescale_row(m, half, factor)` learns.
  template <int n_tiles, typename RescaleRow>
  CUFLASH_DEVICE bool raise_offsets(const float (&score)[m_tiles][n_tiles][4], float scale_log2, RescaleRow rescale_row) {
    float tile_max[m_tiles][2];
    bool grows = false;
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float max = fmaxf(score[m][0][2 * half], score[m][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < n_tiles; ++n) max = fmaxf(max, fmaxf(score[m][n][2 * half], score[m][n][2 * half + 1]));
        max = fmaxf(max, ptx::shuffle_xor(max, 1));
        max = fmaxf(max, ptx::shuffle_xor(max, 2));
        tile_max[m][half] = ptx::multiply(max, scale_log2);
        grows = grows || tile_max[m][half] > offset[m][half] + kMaxGrowth;
      }
    if (!ptx::any_lane(grows)) return false;
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old = offset[m][half];
        offset[m][half] = fmaxf(old, tile_max[m][half]);
        const float factor = old == -ptx::infinity() ? 0.0f : ptx::exp2_approx(old - offset[m][half]);
        row_sum[m][half] *= factor;
        rescale_row(m, half, factor);
      }
    return true;
  }
};
