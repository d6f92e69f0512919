// Tangents of the gradients of the inputs of scores other than q and k, on mma.sync tensor cores (compute capability
// 7.0 and later), in a fixed order of additions, as backward_scores.cu makes these gradients:
//
//   S = Q K'    tX = tQ K' + Q tK'    dP = dO V'    tdP = dO tV' + tdO V'              (X' is X transposed)
//   tdbias = tdS        tdslope = -sum tdS * |i + diagonal - j|
//   tdscale = sum tdX * (Q K') + dX * tX        tdc = sum tdS * df/dc + dS * t(df/dc)
//
// Blocks own what those of backward_scores.cu own (sm80/score_sums.cuh), and gradients of score_mod args have sums that
// do not depend on the order of additions. common/score/gradient_tangents.cuh has what is made of the products.
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/dropout.cuh"
#include "common/score/gradient_tangents.cuh"
#include "common/score/score_gradients.cuh"
#include "sm80/copy.cuh"
#include "sm80/mma.cuh"
#include "sm80/score_sums.cuh"

constexpr int kRow = row_bytes(kDim);
constexpr int kRowV = row_bytes(kDimV);

// Shared memory: the ring of tiles of Q, tQ, dO, tdO, K, tK, V and tV; after the loop, what a block has summed.
constexpr u32 kBytesQ = tile_bytes(kBlockM, kDim);
constexpr u32 kBytesDo = tile_bytes(kBlockM, kDimV);
constexpr u32 kBytesK = tile_bytes(kBlockN, kDim);
constexpr u32 kBytesV = tile_bytes(kBlockN, kDimV);
constexpr u32 kBytesStage = 2 * (kBytesQ + kBytesDo + kBytesK + kBytesV);
static_assert(max_of((int)(kNumStages * kBytesStage), (int)kBytesResult) == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Where the tiles of a stage are.
struct Stage {
  u32 q, tq, dout, tdout, k, tk, v, tv;

  CUFLASH_DEVICE explicit Stage(int stage)
      : q(ptx::dynamic_shared() + stage * kBytesStage),
        tq(q + kBytesQ),
        dout(tq + kBytesQ),
        tdout(dout + kBytesDo),
        k(tdout + kBytesDo),
        tk(k + kBytesK),
        v(tk + kBytesK),
        tv(v + kBytesV) {}
};

// Loads the tiles for one step of the loop.
CUFLASH_DEVICE void load_tiles(const Params& params, const ScoreTiles& next, const Stage& tile, bool has_tdout) {
  const Entry batch = next.batch;
  const int head = next.head, head_kv = head / (params.num_heads / params.num_heads_kv);
  const int first_row = next.m_block * kBlockM, first_key = next.n_block * kBlockN;
  const int key_stop = key_stop_of(params, batch), seqlen_q = seqlen_q_of(params, batch);
  const auto load_rows = [&](auto columns, u32 to, const Tensor& tensor) __attribute__((always_inline)) {
    load_tile<kBlockM, decltype(columns)::value>(to, queries_of(tensor, batch, head), tensor.row_stride, first_row,
                                                 seqlen_q);
  };
  const auto load_keys = [&](auto columns, u32 to, const Tensor& tensor) __attribute__((always_inline)) {
    load_tile<kBlockN, decltype(columns)::value>(to, keys_of(params, tensor, batch, head_kv), tensor.row_stride,
                                                 first_key, key_stop);
  };
  const Integer<kHeadDim> of_qk;
  const Integer<kHeadDimV> of_v;
  load_rows(of_qk, tile.q, params.q);
  load_rows(of_v, tile.dout, params.dout);
  load_keys(of_qk, tile.k, params.k);
  load_keys(of_v, tile.v, params.v);
  if constexpr (kMovesQ) load_rows(of_qk, tile.tq, params.tq);
  if (has_tdout) load_rows(of_v, tile.tdout, params.tdout);
  if constexpr (kMovesK) load_keys(of_qk, tile.tk, params.tk);
  if constexpr (kMovesV) load_keys(of_v, tile.tv, params.tv);
}

// What a lane holds of the products of a tile: q.k and dP, and their tangents.
struct Products {
  using Tile = Real[kMTiles][kNTiles][4];
  Tile s, ts, dp, tdp;

  CUFLASH_DEVICE Products(const Stage& tile, int warp_row, bool has_tdout) {
    const auto of_qk = [&](Tile& sum, u32 queries, u32 keys) __attribute__((always_inline)) {
      multiply<kDim / kStep>(sum, RowMajorA<kRow>(queries, warp_row), ColumnMajorB<kRow, 1>(keys));
    };
    const auto of_dp = [&](Tile& sum, u32 gradients, u32 values) __attribute__((always_inline)) {
      multiply<kDimV / kStep>(sum, RowMajorA<kRowV>(gradients, warp_row), ColumnMajorB<kRowV, 1>(values));
    };
    set_zero(s), set_zero(ts), set_zero(dp), set_zero(tdp);
    of_qk(s, tile.q, tile.k);
    if constexpr (kMovesQ) of_qk(ts, tile.tq, tile.k);
    if constexpr (kMovesK) of_qk(ts, tile.q, tile.tk);
    of_dp(dp, tile.dout, tile.v);
    if constexpr (kMovesV) of_dp(tdp, tile.dout, tile.tv);
    if (has_tdout) of_dp(tdp, tile.tdout, tile.v);
  }
};

// Loads what the pass needs of this lane's rows. Rows past the last query need not have any.
CUFLASH_DEVICE void load_rows(const Params& params, const Entry& batch, int head, int lane_row,
                              RowWithTangents (&rows)[kMTiles][2]) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 16 * m + 8 * half;
      if (row < seqlen_q_of(params, batch)) rows[m][half] = RowWithTangents(params, batch, head, row);
    }
}

// Adds the terms of a pair to the sums that are wanted; `tangent` is that of its product q.k.
CUFLASH_DEVICE void add_to_sums(Real (&sums)[kNumSums], const GradientTangents& pairs, const PairTangents& made,
                                Real product, Real tangent, int row, int key) {
  const Score& score = pairs.weights.score;
  if constexpr (kNeedsDalibiSlopes) sums[kSumOfSlope] -= made.tds * score.distance(row, key);
  if constexpr (kNeedsDscale) sums[kSumOfScale] += made.tdx * product + made.dx * tangent;
  if constexpr (kNeedsDsoftcap)
    sums[kSumOfSoftcap] += made.tds * score.derivative_by_softcap(product) +
                           made.ds * pairs.tangents.of_softcap_derivative(score, product, tangent);
}

// Adds the terms of a tile of pairs to the sums.
CUFLASH_DEVICE void add_pairs(const Params& params, const ScoreTiles& now, int lane_row, int lane_key,
                              const RowWithTangents (&rows)[kMTiles][2], const Products& tile, Sums& sums,
                              [[maybe_unused]] ScoreArgs& score_args) {
  const int key_stop = key_stop_of(params, now.batch);
  const GradientTangents pairs(params, now.batch, now.head, key_stop);
  const Dropout dropout(params, now.batch, now.head);
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
        const Real product = tile.s[m][n][i], tangent = tile.ts[m][n][i];
        const PairTangents made = pairs.of(product, tangent, tile.dp[m][n][i], tile.tdp[m][n][i], row, key, masked,
                                           !kHasDropout || kept.keeps(n, i), rows[m][i / 2]);
        if (made.p == 0) continue;  // what is hidden may be infinite
        if constexpr (kNeedsDbias) sums.dbias[m][n][i] += made.tds;
        add_to_sums(of_tile, pairs, made, product, tangent, row, key);
#if CUFLASH_NEEDS_SCORE_ARGS
        score_args.add(pairs.weights.score.functions, product * pairs.weights.score.scale,
                       pairs.tangents.scaled(pairs.weights.score, product, tangent), row, key, made.ds, made.tds);
#endif
      }
    }
#pragma unroll
  for (int i = 0; i < kNumSums; ++i) sums.of[i] += of_tile[i];
}

CUFLASH_DEVICE void backward_jvp_scores(const Params& params) {
  const bool has_tdout = params.tdout.data != nullptr;
  const int warp_row = warp_index() * 16 * kMTiles;
  const auto load = [&](const ScoreTiles& tile, int stage) { load_tiles(params, tile, Stage(stage), has_tdout); };
  ScoreRing ring(params, load);
  Sums sums;
  sums.clear();
  ScoreArgs score_args(params);
#pragma unroll 1
  for (; ring.now.left > 0; ring.advance()) {
    const int lane_row = ring.now.m_block * kBlockM + warp_row + fragment_row();
    const int lane_key = ring.now.n_block * kBlockN + fragment_column();
    RowWithTangents rows[kMTiles][2];
    load_rows(params, ring.now.batch, ring.now.head, lane_row, rows);
    ring.wait();
    const Products tile(Stage(ring.stage), warp_row, has_tdout);
    ring.refill();
    add_pairs(params, ring.now, lane_row, lane_key, rows, tile, sums, score_args);
  }
  finish(params, ring, sums, score_args);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_jvp_scores)
