// What the jvp kernels of float32 share: how terms of Q and tQ arrive, and the softmax step.
#pragma once
#include "common/config.cuh"
#include "common/io/bf16_split.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/dropout.cuh"
#include "sm90/jvp_scores.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tiles.cuh"

// The batch index of a term: in the map of an array, term i of batch entry b has batch index i * batch + b. The terms
// of its tangent follow.
CUFLASH_DEVICE int batch_of_term(const Params& params, int term, int batch) { return term * params.batch + batch; }

// A producer. Loads the terms of Q and tQ of a tile of queries, `term_bytes` each, once those before are read.
template <u32 term_bytes>
CUFLASH_DEVICE void load_query_terms(const JvpParams& params, u32 to, const Ring<1>& ring, const Position<1>& query,
                                     const QueryTile& tile) {
  const Barrier full = ring.full(query);
  ring.empty(query).wait(query.parity ^ 1);
  full.arrive_expect((1 + kMovesQ) * kBf16Terms * term_bytes);
#pragma unroll 1
  for (int i = 0; i < (1 + kMovesQ) * kBf16Terms; ++i)
    load_chunks<kBlockM, kDim>(to + i * term_bytes, params.maps[kMapQ], full, tile.first_row, tile.work.head,
                               batch_of_term(params.common, i, tile.work.batch));
}

// The rows of a warpgroup in a tile of queries, the first of this lane `lane_row`.
struct TangentRows {
  const Params& common;
  const QueryTile& tile;
  const int lane_row;
  const Score score;
  const ScoreTangents tangents;
  const Dropout dropout;
  const float exponent_scale;
  TangentSoftmax<1> softmax;

  CUFLASH_DEVICE TangentRows(const Params& common_, const QueryTile& tile_, int first_row)
      : common(common_),
        tile(tile_),
        lane_row(first_row + ptx::thread_index() % 128 / 32 * 16 + fragment_row()),
        score(common, tile.work.batch, tile.work.head, tile.key_stop),
        tangents(common, tile.work.batch, tile.work.head),
        dropout(common, tile.work.batch, tile.work.head),
        exponent_scale(score.exponent_scale()),
        softmax(make_tangent_softmax(common, tile.work.batch, tile.work.head)) {}

  // Turns products of a tile of keys, some of which `keys` may hide, into P and P (tS - c); rescales the sums of
  // earlier tiles, `o` and `a`.
  template <int n_tiles, int out_tiles>
  CUFLASH_DEVICE void softmax_step(float (&s)[1][n_tiles][4], float (&ts)[1][n_tiles][4], float (&o)[1][out_tiles][4],
                                   float (&a)[1][out_tiles][4], int n_block, const TileRange& keys) {
    // Where scores take many instructions, the mask is always evaluated, so that they are compiled once.
    if (kNeedsProduct || kBiasBytes != 0 || n_block >= keys.full_stop || n_block < keys.full_start)
      softmax_step(s, ts, o, a, n_block, Constant<true>{});
    else
      softmax_step(s, ts, o, a, n_block, Constant<false>{});
  }

 private:
  template <int n_tiles, int out_tiles, bool masked>
  CUFLASH_DEVICE void softmax_step(float (&s)[1][n_tiles][4], float (&ts)[1][n_tiles][4], float (&o)[1][out_tiles][4],
                                   float (&a)[1][out_tiles][4], int n_block, Constant<masked> is_masked) {
    const int lane_key = tile.keys.at(n_block) * kBlockN + fragment_column();
    const Mask mask(common, tile.work.batch, tile.work.head, tile.key_stop);
    make_scores(score, tangents, mask, s, ts, lane_row, lane_key, is_masked);
    const auto raised = softmax.to_weights(s, exponent_scale);
    make_tangents(score, tangents, ts, lane_row, lane_key);
    const Constant<masked || kMayHide> selects;
    const float scale = kTangentIsScaled ? score.scale : 1.0f;
    softmax.rescale_sums(raised, s, ts, o, a, scale, selects);
    softmax.weigh_tangents(s, ts, scale, selects);
    if constexpr (kHasDropout) {
      const float kept_scale = kept_scale_of(common);
      dropout.drop(s[0], lane_row, lane_key, kept_scale);
      if constexpr (kMovesScores) dropout.drop(ts[0], lane_row, lane_key, kept_scale);
    }
  }
};
