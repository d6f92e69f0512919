// Gradients of the inputs of scores other than q and k, on mma.sync tensor cores (compute capability 8.0 and later), in
// a fixed order of additions: the gradient of the bias, or those that are sums over pairs.
//
//   P = exp(S - lse)    dP = dO V'    dS = P * (dP - delta)        (X' is X transposed)
//   dbias = dS          dslope = -sum dS * |i + diagonal - j|
//   dscale = sum dS * f'(X) * (Q K')        dc = sum dS * df/dc        (X = scale Q K')
//
// f is the function, if any, that makes a score of X, and c its parameter: common/score/score.cuh has both. The steps
// of a tile of pairs are numbered:
//
//   [GEMM 1] X = Q K'    [GEMM 2] dP = dO V'    [3] P    [4] dS    [5] what is added to the sums
//
// A block owns a tile of dbias and iterates over all axes along which the bias broadcasts: batch entries, heads, tiles
// of queries, tiles of keys. For the other gradients it owns a tile of queries of one head and iterates over the keys.
// Where that makes few blocks, several blocks split a loop, and helpers/scores_reduce.cu adds the partial sums that
// they leave. Gradients of arrays that a score_mod or mask_mod reads are made in the same loop, by sums that do not
// depend on the order of additions (common/score/score_args_gradients.cuh).
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/score/dropout.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/score_gradients.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/row_reduction_gradients.cuh"
#include "sm80/copy.cuh"
#include "sm80/mma.cuh"
#include "sm80/score_sums.cuh"

// Shared memory: the ring of Q, dO, K and V tiles; after the loop, what a block has summed. Of long heads without
// values the ring has chunks of Q and K.
#if CUFLASH_CHUNK_COLUMNS
#include "sm80/chunks.cuh"
constexpr int kColumnsOfStage = kChunk;
#else
constexpr int kRow = row_bytes(kDim);
constexpr int kColumnsOfStage = kDim;
#endif
constexpr int kRowV = row_bytes(kDimV);
constexpr u32 kBytesQ = tile_bytes(kBlockM, kColumnsOfStage);
constexpr u32 kBytesDo = tile_bytes(kBlockM, kDimV);
constexpr u32 kBytesK = tile_bytes(kBlockN, kColumnsOfStage);
constexpr u32 kBytesStage = kBytesQ + kBytesDo + kBytesK + tile_bytes(kBlockN, kDimV);
static_assert(max_of((int)(kNumStages * kBytesStage), (int)kBytesResult) == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

using ScoreTile = Real[kMTiles][kNTiles][4];  // what a lane holds of a tile of pairs

#if CUFLASH_CHUNK_COLUMNS
// Chunks are loaded while they are multiplied.
CUFLASH_DEVICE void load_tiles(const Params&, const ScoreTiles&, u32) {}

// [GEMM 1] by chunks. dP is 0.
CUFLASH_DEVICE void multiply_chunks(const Params& params, const ScoreTiles& now, u32 s_ring, int warp_row, ScoreTile& s,
                                    ScoreTile& dp) {
  const Storage* g_q = queries_of(params.q, now.batch, now.head);
  const Storage* g_k = keys_of(params, params.k, now.batch, now.head / (params.num_heads / params.num_heads_kv));
  const int key_stop = key_stop_of(params, now.batch), seqlen_q = seqlen_q_of(params, now.batch);
  const auto load = [&](int chunk, int stage) {
    const u32 s_q = s_ring + stage * kBytesStage;
    load_chunk<kBlockM>(s_q, g_q, params.q.row_stride, now.m_block * kBlockM, seqlen_q, chunk);
    load_chunk<kBlockN>(s_q + kBytesQ, g_k, params.k.row_stride, now.n_block * kBlockN, key_stop, chunk);
  };
  ChunkRing ring(load, kChunks);
  set_zero(s);
  set_zero(dp);
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const u32 s_q = s_ring + ring.next() * kBytesStage;
    multiply_chunk(s, RowMajorA<kRow>(s_q, warp_row), ColumnMajorB<kRow, 1>(s_q + kBytesQ));
  }
  ring.finish();
}
#else
// Loads the tiles of Q, dO, K and V for one step of the loop.
CUFLASH_DEVICE void load_tiles(const Params& params, const ScoreTiles& next, u32 s_stage) {
  const u32 s_q = s_stage, s_do = s_q + kBytesQ, s_k = s_do + kBytesDo, s_v = s_k + kBytesK;
  const Entry batch = next.batch;
  const int head = next.head, head_kv = head / (params.num_heads / params.num_heads_kv);
  const int first_row = next.m_block * kBlockM, first_key = next.n_block * kBlockN;
  const int key_stop = key_stop_of(params, batch);
  const int seqlen_q = seqlen_q_of(params, batch);
  load_tile<kBlockM, kHeadDim>(s_q, queries_of(params.q, batch, head), params.q.row_stride, first_row, seqlen_q);
  load_tile<kBlockM, kHeadDimV>(s_do, queries_of(params.dout, batch, head), params.dout.row_stride, first_row,
                                seqlen_q);
  load_tile<kBlockN, kHeadDim>(s_k, keys_of(params, params.k, batch, head_kv), params.k.row_stride, first_key,
                               key_stop);
  load_tile<kBlockN, kHeadDimV>(s_v, keys_of(params, params.v, batch, head_kv), params.v.row_stride, first_key,
                                key_stop);
}

// [GEMM 1] X = Q K', [GEMM 2] dP = dO V', of the tiles in one stage.
CUFLASH_DEVICE void multiply_tiles(u32 s_stage, int warp_row, ScoreTile& s, ScoreTile& dp) {
  const u32 s_q = s_stage, s_do = s_q + kBytesQ, s_k = s_do + kBytesDo, s_v = s_k + kBytesK;
  set_zero(s);
  multiply<kDim / kStep>(s, RowMajorA<kRow>(s_q, warp_row), ColumnMajorB<kRow, 1>(s_k));
  set_zero(dp);
  multiply<kDimV / kStep>(dp, RowMajorA<kRowV>(s_do, warp_row), ColumnMajorB<kRowV, 1>(s_v));
}
#endif

// Loads the statistics of this lane's rows. Rows past the last query need not have any.
CUFLASH_DEVICE void load_stats(const Params& params, const Entry& batch, int head, int lane_row,
                               RowStats (&stats)[kMTiles][2]) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 16 * m + 8 * half;
      if (row < seqlen_q_of(params, batch)) stats[m][half] = RowStats(params, batch, head, row);
    }
}

// [3] to [5] of a tile of pairs.
CUFLASH_DEVICE void add_pairs(const Params& params, const ScoreTiles& now, int lane_row, int lane_key,
                              const RowStats (&stats)[kMTiles][2], const ScoreTile& s, const ScoreTile& dp, Sums& sums,
                              [[maybe_unused]] ScoreArgs& score_args) {
  const Entry batch = now.batch;
  const int head = now.head, key_stop = key_stop_of(params, batch);
  const Score score(params, batch, head, key_stop);
  const Mask mask(params, batch, head, key_stop);
  const Dropout dropout(params, batch, head);
  const RowReductionGradients reductions(params, batch, head);
  const Real exponent_scale = score.exponent_scale(), kept_scale = kept_scale_of(params);
  const bool masked = now.needs_mask(params, key_stop);
  [[maybe_unused]] KeptWeights<false> kept;
  [[maybe_unused]] Real of_tile[kNumSums] = {};
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      if (kHasDropout && n % 2 == 0) kept = dropout.of(lane_row + 16 * m, lane_key, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane_row + 16 * m + i / 2 * 8, key = lane_key + 8 * n + i % 2;
        // [3] P = exp(S - lse).
        const Real product = s[m][n][i];
        Real derivative;
        const Real x = masked_score(score, mask, product, row, key, masked, derivative);
        const RowStats& own = stats[m][i / 2];
        const Real p = weight_of(x, exponent_scale, own, derivative);

        // [4] dS = P * (dP - delta).
        const Real kept_dp = !kHasDropout || kept.keeps(n, i) ? dp[m][n][i] : 0;
        const Real delta = reductions.delta_of(own.delta, p, row, own.exists());
        Real ds = p * (kept_dp * kept_scale - delta);
        if constexpr (kTakesDmax) ds = reductions.with_max(ds, p, row, key, derivative, own.exists());

      // [5] The sums.
#if CUFLASH_NEEDS_SCORE_ARGS
        if (p != 0 || (kTakesDmax && ds != 0)) score_args.add(score.functions, product * score.scale, row, key, ds);
#endif
        if constexpr (kNeedsDbias) sums.dbias[m][n][i] += ds;
        add_to_sums(of_tile, score, ds, derivative, product, row, key);
      }
    }
#pragma unroll
  for (int i = 0; i < kNumSums; ++i) sums.of[i] += of_tile[i];
}

CUFLASH_DEVICE void backward_scores(const Params& params) {
  const u32 s_ring = ptx::dynamic_shared();
  const int warp_row = warp_index() * 16 * kMTiles;
  const auto load = [&](const ScoreTiles& tile, int stage) { load_tiles(params, tile, s_ring + stage * kBytesStage); };
  ScoreRing ring(params, load);
  Sums sums;
  sums.clear();
  ScoreArgs score_args(params);
#pragma unroll 1
  for (; ring.now.left > 0; ring.advance()) {
    const int lane_row = ring.now.m_block * kBlockM + warp_row + fragment_row();
    const int lane_key = ring.now.n_block * kBlockN + fragment_column();
    RowStats stats[kMTiles][2];
    load_stats(params, ring.now.batch, ring.now.head, lane_row, stats);
    ScoreTile s, dp;
#if CUFLASH_CHUNK_COLUMNS
    multiply_chunks(params, ring.now, s_ring, warp_row, s, dp);
#else
    ring.wait();
    multiply_tiles(s_ring + ring.stage * kBytesStage, warp_row, s, dp);
    ring.refill();
#endif
    add_pairs(params, ring.now, lane_row, lane_key, stats, s, dp, sums, score_args);
  }
  finish(params, ring, sums, score_args);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_scores)
