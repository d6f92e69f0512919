// dq in a fixed order of additions, for the deterministic backward pass: a block owns kBlockM queries of one head and
// iterates over the tiles of keys, recomputing P and dP (FlashAttention-2, Algorithm 2, with the loops exchanged).
// Where a warp cannot hold its rows of dQ, kDqWarpsD warps share the rows, each with a slice of the columns. The steps
// of a tile of keys are numbered, where X' is X transposed:
//
//   [GEMM 1] S = Q K'   [GEMM 2] dP = dO V'   [3] P = exp(S - lse)   [4] dS = P * (dP - delta)   [GEMM 5] dQ += dS K
#include "common/config.cuh"
#include "common/score/dropout.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/row_reduction_gradients.cuh"
#include "sm80/backward_warps.cuh"
#include "sm80/copy.cuh"
#include "sm80/key_loader.cuh"
#include "sm80/mma.cuh"

constexpr int kNTiles = kBlockN / 8;
constexpr int kRow = row_bytes(kDim);
constexpr int kRowV = row_bytes(kDimV);
static_assert(kNumStages == 1 || kNumStages == 2, "at most one tile of keys arrives while another is used");

// Shared memory: Q, dO, then the ring of K and V tiles.
constexpr u32 kBytesQ = tile_bytes(kBlockM, kDim);
constexpr u32 kBytesDo = tile_bytes(kBlockM, kDimV);
constexpr u32 kBytesK = tile_bytes(kBlockN, kDim);
constexpr u32 kBytesV = tile_bytes(kBlockN, kDimV);
static_assert(kBytesQ + kBytesDo + kNumStages * (kBytesK + kBytesV) == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// The ring of tiles of keys and values.
struct KeyRing : KeyLoader<kBytesK, kBytesV> {
  using KeyLoader<kBytesK, kBytesV>::KeyLoader;
  int stage = 0;  // of the tile in use

  // Loads the last tile, with Q and dO in one group of copies.
  CUFLASH_DEVICE void fill() const {
    if (tile.keys.start < tile.keys.stop) load_k(tile.keys.stop - 1, 0), load_v(tile.keys.stop - 1, 0);
    ptx::copy_async_commit();
  }
  // Waits for a tile. With two stages, the next one arrives while it is used.
  CUFLASH_DEVICE void wait(int n_block) const {
    ptx::copy_async_wait<0>();
    ptx::sync_block();
    if constexpr (kNumStages == 2) {
      if (n_block > tile.keys.start) load_k(n_block - 1, 1 - stage), load_v(n_block - 1, 1 - stage);
      ptx::copy_async_commit();
    }
  }
  // After the last use of a tile.
  CUFLASH_DEVICE void advance(int n_block) {
    if constexpr (kNumStages == 2) {
      stage = 1 - stage;
    } else {
      ptx::sync_block();
      if (n_block > tile.keys.start) load_k(n_block - 1, 0), load_v(n_block - 1, 0);
      ptx::copy_async_commit();
    }
  }
};

// [3] and [4]: replaces S by dS = P * (dP - delta), times the derivatives of the scores by the scaled products.
template <class Masked>
CUFLASH_DEVICE void make_ds(Real (&s)[kDqMTiles][kNTiles][4], const Real (&dp)[kDqMTiles][kNTiles][4],
                            const Weights& weights, const Dropout& dropout, int lane_row, int lane_key, Masked masked,
                            const RowStats (&stats)[kDqMTiles][2], const RowReductionGradients& reductions,
                            Real kept_scale) {
  [[maybe_unused]] KeptWeights<false> kept;
#pragma unroll
  for (int m = 0; m < kDqMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      if (kHasDropout && n % 2 == 0) kept = dropout.of(lane_row + 16 * m, lane_key, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane_row + 16 * m + i / 2 * 8, key = lane_key + 8 * n + i % 2;
        const RowStats& own = stats[m][i / 2];
        Real derivative;
        const Real p = weights.of(s[m][n][i], row, key, masked, own, derivative);
        const bool keeps = !kHasDropout || kept.keeps(n, i);
        const Real delta = reductions.delta_of(own.delta, p, row);
        Real of_score = gradient_of(p, dp[m][n][i], keeps, kept_scale, delta);
        if constexpr (kTakesDmax) of_score = reductions.with_max(of_score, p, row, key, derivative);
        s[m][n][i] = of_score * derivative;
      }
    }
}

// Stores rows of dq: rounded, through the shared memory of Q; or as they were summed, to be added to other partial sums
// of them.
CUFLASH_DEVICE void store_dq(const Params& params, Entry batch, int head, u32 s_q, int warp_row, int warp_d,
                             const Real (&dq)[kDqMTiles][kDqNTiles][4], int first_row, int seqlen_q) {
  const auto scale = [factor = scale_of(params)](int, int) { return factor; };
  if constexpr (CUFLASH_DQ_WIDE) {
    store_sums<kHeadDim, kDqWarpsD>(dq, warp_row, warp_d, scale, row_values_of(params.dq, batch, head),
                                    params.dq.row_stride, first_row, seqlen_q);
  } else {
    store_fragments<Order::kPairedColumns, kRow, kDqWarpsD>(s_q, warp_row, warp_d, dq, scale);
    ptx::sync_block();
    store_tile<kBlockM, kHeadDim>(s_q, (Storage*)queries_of(params.dq, batch, head), params.dq.row_stride, first_row,
                                  seqlen_q);
  }
}

CUFLASH_DEVICE void backward_dq(const Params& params) {
  if (!is_chosen(params)) return;
  const Work work = schedule_queries(params, ptx::block_index(), params.num_heads, kHasRightBound);
  if (!has_queries(params, work)) return;
  const int head = work.head;
  const Entry batch = work.batch;
  const int seqlen_q = seqlen_q_of(params, batch);
  const QueryTile tile(params, work);
  const int first_row = tile.first_row;

  const u32 s_q = ptx::dynamic_shared(), s_do = s_q + kBytesQ;
  KeyRing ring(params, tile, s_do + kBytesDo);
  const int warp_row = warp_index() / kDqWarpsD * 16 * kDqMTiles, warp_d = warp_index() % kDqWarpsD;

  load_tile<kBlockM, kHeadDim>(s_q, queries_of(params.q, batch, head), params.q.row_stride, first_row, seqlen_q);
  load_tile<kBlockM, kHeadDimV>(s_do, queries_of(params.dout, batch, head), params.dout.row_stride, first_row,
                                seqlen_q);
  ring.fill();

  const Weights weights(params, batch, head, tile.key_stop);
  const Dropout dropout(params, batch, head);
  const RowReductionGradients reductions(params, batch, head);
  const Real kept_scale = kept_scale_of(params);
  const int lane_row = first_row + warp_row + fragment_row();

  RowStats stats[kDqMTiles][2];
#pragma unroll
  for (int m = 0; m < kDqMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) stats[m][half] = RowStats(params, batch, head, lane_row + 16 * m + 8 * half);

  const RowMajorA<kRow> operand_q(s_q, warp_row);
  const RowMajorA<kRowV> operand_do(s_do, warp_row);
  Real dq[kDqMTiles][kDqNTiles][4];
  set_zero(dq);

  const auto step = [&](int n_block, auto masked) __attribute__((always_inline)) {
    ring.wait(n_block);

    // [GEMM 1] S = Q K', [GEMM 2] dP = dO V'.
    const ColumnMajorB<kRow, 1> columns_k(ring.s_k + ring.stage * kBytesK);
    const ColumnMajorB<kRowV, 1> columns_v(ring.s_v + ring.stage * kBytesV);
    const RowMajorB<kRow, kDqWarpsD> rows_k(ring.s_k + ring.stage * kBytesK, warp_d);
    Real s[kDqMTiles][kNTiles][4], dp[kDqMTiles][kNTiles][4];
    set_zero(s);
    multiply<kDim / kStep>(s, operand_q, columns_k);
    set_zero(dp);
    multiply<kDimV / kStep>(dp, operand_do, columns_v);

    // [3] P = exp(S - lse), [4] dS = P * (dP - delta).
    const int lane_key = tile.keys.at(n_block) * kBlockN + fragment_column();
    make_ds(s, dp, weights, dropout, lane_row, lane_key, masked, stats, reductions, kept_scale);

    // [GEMM 5] dQ += dS K.
    add_product<kBlockN / kStep>(dq, [&](int m, int k, Fragment& a) { to_operand(s[m], k, a); }, rows_k);
    ring.advance(n_block);
  };

  for_each_tile<false>(tile.keys, step);

  ptx::copy_async_wait<0>();
  ptx::sync_block();
  store_dq(params, batch, head, s_q, warp_row, warp_d, dq, first_row, seqlen_q);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_dq)
