// Gradients of the inputs of scores other than q and k, as sums over the keys that a consumer of sm90/backward.cu owns:
//
//   dslope = -sum dS |i + diagonal - j|      dbias = sum dS, of a bias that differs from key to key only
//   dscale = sum dS * f'(x) (k . q) = sum of K * dK over all elements, before dK is scaled
//   dc = sum dS * df/dc
//
// f is the function, if any, that makes a score of the scaled product x, and c is its parameter: common/score/score.cuh
// has both.
//
// The sums stay in registers until the loop comes to the next query head. Then the consumer leaves them in memory for
// helpers/scores_reduce.cu, which adds them up. dscale needs no sum on the way: the consumer makes it at the end, of dK
// and of K, which still lies in shared memory.
#pragma once
#include "common/io/fragments.cuh"
#include "common/score/key_sums.cuh"
#include "common/softmax/reduce.cuh"
#include "common/score/score.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/tiles.cuh"

constexpr bool kSumsScores = kNeedsDalibiSlopes || kNeedsDbias;
constexpr bool kMakesSums = kSumsScores || kNeedsDscale || kNeedsDsoftcap;
// When a consumer sums. Where such a function f is given, it sums early, before gradients of scores become gradients of
// products. Otherwise the two are the same, and it sums late, once dS' is on its way to the warpgroup of dQ.
constexpr bool kSumsEarly = kSumsScores && kHasDerivative, kSumsLate = kSumsScores && !kHasDerivative;

// The sums of a lane for each of its two keys: over one query head (slope, bias), and over all heads (cap).
struct LaneSums {
  float slope[2] = {0, 0}, bias[2] = {0, 0};
  float cap[2] = {0, 0};

  // Adds the gradient `ds` of the score of element `i` of n-tile `n`. `distance` is that of element 0 of n-tile 0.
  CUFLASH_DEVICE void add(int n, int i, float ds, float distance) {
    if constexpr (kNeedsDalibiSlopes) slope[i / 2] -= ds * fabsf(distance + (float)(8 * n + i % 2 - i / 2 * 8));
    if constexpr (kNeedsDbias) bias[i / 2] += ds;
  }
  // Adds what the gradients `ds` of scores contribute to the gradient of the cap, and turns `ds` into gradients of
  // scaled products. The thread has left the tanh of its scores at `s_scores`. `small` is for
  // Score::derivative_by_softcap_of.
  template <int n_tiles, class Small>
  CUFLASH_DEVICE void add_cap(float (&ds)[n_tiles][4], u32 s_scores, Small small) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
      float tanh[4];
      ptx::load_shared_f32x4(s_scores + n * 128 * 16, tanh);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        cap[i / 2] += ds[n][i] * Score::derivative_by_softcap_of(tanh[i], small);
        ds[n][i] *= 1.0f - tanh[i] * tanh[i];
      }
    }
  }
  CUFLASH_DEVICE void start_head() { slope[0] = slope[1] = bias[0] = bias[1] = 0; }
};

// Where a warp of a consumer leaves its sums over its 16 keys.
struct KeySumsSlot {
  const Params& params;
  const BackwardWork& work;
  int warp;  // of the tile of keys

  // The distance from the query of a lane's first element to its first key.
  CUFLASH_DEVICE float distance(int row) const {
    return (float)(row + params.diagonal + work.own_diagonal - (work.first_key + 16 * warp + fragment_row()));
  }

  // Warp. Leaves the sums that belong to one query head.
  CUFLASH_DEVICE void leave(int head, const LaneSums& lane) const {
    const i64 partial = key_partial_of(params, head, work.work.batch, work.work.block, work.tail_split);
    if constexpr (kNeedsDalibiSlopes) {
      const double sum = warp_sum(lane.slope[0] + lane.slope[1]);
      if (lane_index() == 0) slope_sums_of(params, partial)[warp] = sum;
    }
    if constexpr (kNeedsDbias) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = lane.bias[half] + ptx::shuffle_xor(lane.bias[half], 1);
        sum += ptx::shuffle_xor(sum, 2);
        if (fragment_column() == 0) bias_sums_of(params, partial)[16 * warp + fragment_row() + 8 * half] = sum;
      }
    }
  }
  // Warp. Leaves the sums over all heads: that of the cap, and the warp's partial sum of dscale.
  CUFLASH_DEVICE void leave(double scale, const LaneSums& lane) const {
    if (kNeedsDscale && lane_index() == 0) block_sums_of(params, false, ptx::block_index())[warp] = scale;
    if constexpr (kNeedsDsoftcap) {
      const double sum = warp_sum(lane.cap[0] + lane.cap[1]);
      if (lane_index() == 0) block_sums_of(params, true, ptx::block_index())[warp] = sum;
    }
  }

  // Warp. Leaves zeros in all slots that this block has to fill, because it may have no query of some head.
  CUFLASH_DEVICE void leave_zeros() const {
    if constexpr (kSumsScores) {
      const int first = work.tail_split, stop = work.is_shared ? first + 1 : params.tail_splits;
      for (int head = work.first_head; head < work.stop_head; ++head)
        for (int split = first; split < stop; ++split) {
          const i64 index = key_partial_of(params, head, work.work.batch, work.work.block, split);
          if (kNeedsDalibiSlopes && lane_index() == 0) slope_sums_of(params, index)[warp] = 0;
          if (kNeedsDbias && fragment_column() == 0) {
            bias_sums_of(params, index)[16 * warp + fragment_row()] = 0;
            bias_sums_of(params, index)[16 * warp + fragment_row() + 8] = 0;
          }
        }
    }
  }
};

// Warp. Leaves the sums of a tile that does not exist, which are zeros.
CUFLASH_DEVICE void leave_nothing(const Params& params, const BackwardWork& work) {
  const KeySumsSlot sums = {params, work, (int)warp_index()};
  sums.leave_zeros();
  sums.leave(0.0, {});
}

// Warp. Returns a lane's sum of products: its elements of `value` times the same elements of the 16 rows from row `r`
// on, in a tile of `rows` rows.
template <int rows, int n_tiles>
CUFLASH_DEVICE float sum_of_products(u32 tile, int r, const float (&value)[n_tiles][4]) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < n_tiles / 2; ++k) {
    Fragment element;
    load_fragment_chunked<rows>(tile, r, k, element);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      sum += value[2 * k + i / 4][i % 4] * ptx::to_float32(Element{}, (u16)(element.word[i / 2] >> i % 2 * 16));
  }
  return sum;
}
