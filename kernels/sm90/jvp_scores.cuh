// What the jvp kernels of compute capability 9.0 share: their argument, scores and tangents of scores, results of rows.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/params.cuh"
#include "common/score/score_tangents.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/tangents.cuh"
#include "ptx/tma.cuh"

constexpr bool kMovesX = kMovesQ || kMovesK;  // products of scores have tangents
// Whether tangents of scores need the product of the pair, too: scores are then made once both are there.
constexpr bool kNeedsProduct = kMovesScores && (kHasScoreFunction || kMovesScale || kHasSoftcap);
// Whether the tangent of a score is that of its product but for the scale.
constexpr bool kTangentIsScaled = !kNeedsProduct && !kMovesBias && !kMovesAlibi;
// Whether a pair may be hidden in a tile without a mask.
constexpr bool kMayHide = kBiasBytes != 0 || CUFLASH_HAS_FUNCTIONS;

// Where the tensor maps are, in the order of the plan. float32 comes as bf16 terms: the map of an array is that of its
// tangent, too, and results are stored without one.
constexpr int kMapQ = 0, kMapK = 1, kMapV = 2, kMapTq = 3, kMapTk = kMapTq + kMovesQ, kMapTv = kMapTk + kMovesK;
constexpr int kMapOut = kMapTv + kMovesV, kMapTout = kMapOut + 1,
              kNumMaps = kElementBytes == 4 ? kMapV + 1
                         : kStoresByRows    ? kMapOut
                                            : kMapTout + 1;

struct JvpParams {
  Params common;
  TensorMap maps[kNumMaps];
};
static_assert(sizeof(JvpParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

// Scores of a tile, and with kNeedsProduct their tangents, too. The first ones of a lane are of query `lane_row` and
// key `lane_key`.
template <int n_tiles, class Masked>
CUFLASH_DEVICE void make_scores(const Score& score, const ScoreTangents& tangents, const Mask& mask,
                                float (&s)[1][n_tiles][4], float (&ts)[1][n_tiles][4], int lane_row, int lane_key,
                                Masked masked) {
  if constexpr (kNeedsProduct) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane_row + i / 2 * 8, of_key = lane_key + 8 * n + i % 2;
        const float x = s[0][n][i];
        Unused derivative;
        s[0][n][i] = score.of(x, row, of_key, derivative);
        if (masked && !mask.visible(row, of_key)) s[0][n][i] = -ptx::infinity();
        ts[0][n][i] = s[0][n][i] == -ptx::infinity() ? 0 : tangents.of(score, x, ts[0][n][i], row, of_key);
      }
  } else {
    to_scores(score, mask, s, [&](int, int i) { return lane_row + i / 2 * 8; }, lane_key, masked);
  }
}
// Tangents of scores, where the products are not needed.
template <int n_tiles>
CUFLASH_DEVICE void make_tangents(const Score& score, const ScoreTangents& tangents, float (&ts)[1][n_tiles][4],
                                  int lane_row, int lane_key) {
  if constexpr (kMovesScores && !kNeedsProduct && !kTangentIsScaled) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ts[0][n][i] = tangents.of(score, 0, ts[0][n][i], lane_row + i / 2 * 8, lane_key + 8 * n + i % 2);
  }
}

// A - (r / l) O in place of A, once sums are finished.
template <class Softmax, int out_tiles>
CUFLASH_DEVICE void take_out_mean(const Softmax& softmax, const float (&o)[1][out_tiles][4],
                                  float (&a)[1][out_tiles][4]) {
  const float mean[2] = {softmax.mean(0, 0), softmax.mean(0, 1)};
#pragma unroll
  for (int n = 0; n < out_tiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) a[0][n][i] -= mean[i / 2] * o[0][n][i];
}
// Stores tlse of rows `lane_row` and `lane_row` + 8, the two of a lane.
template <class Softmax>
CUFLASH_DEVICE void store_tlse(const Params& params, Entry batch, int head, int lane_row, const Softmax& softmax) {
  float* g_tlse = row_values_of(params.tlse, batch, head);
  const int seqlen_q = seqlen_q_of(params, batch);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_row + 8 * half;
    if (fragment_column() == 0 && row < seqlen_q) g_tlse[row * params.tlse.row_stride] = softmax.lse_tangent(0, half);
  }
}
