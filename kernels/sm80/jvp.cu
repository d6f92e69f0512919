// Attention and its tangent on mma.sync tensor cores (compute capability 7.0 and later), in one pass over the keys:
//
//   S = Q K^T     tS = scale (tQ K^T + Q tK^T) + ...     P = exp(S - m)     l = rowsum(P)     r = rowsum(P (tS - c))
//   O = P V       A = P (tS - c) V + P tV                 out = O / l        tout = (A - (r / l) O) / l
//
// as in forward.cu: a block owns kBlockM queries of one head and iterates over the tiles of keys from the last to the
// first; a warp owns 16 of its rows, or kWarpsD warps share them, each with a slice of the columns of O and A. Of S and
// tS each of these makes some columns, where there are 16 for it, and gets the others through shared memory. Products
// of tangents that are not given are left out (CUFLASH_TANGENTS).
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/dropout.cuh"
#include "common/score/score_tangents.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/store_lse.cuh"
#include "common/softmax/tangents.cuh"
#include "sm80/copy.cuh"
#include "sm80/dual_products.cuh"
#include "sm80/shared_sums.cuh"

constexpr int kWarpsD = CUFLASH_WARPS_D;
constexpr int kWarpsM = kNumWarps / kWarpsD;
constexpr int kNTiles = kBlockN / 8;
constexpr int kWarpsS = min_of(kWarpsD, kNTiles / 2);  // warps of the same rows among which S is divided
constexpr bool kSharesScores = kWarpsS > 1;
constexpr int kOwnNTiles = kNTiles / kWarpsS;
constexpr int kColumnTiles = max_of(kDimV / (8 * kWarpsD), 2);  // n-tiles of 8 columns of O of a warp
constexpr int kRowQ = row_bytes(kDim);
constexpr int kRowV = row_bytes(kDimV);
static_assert(kBlockM == 16 * kWarpsM && kNumStages == 1, "a warp owns one fragment of rows");
static_assert(kOwnNTiles * kWarpsS == kNTiles && kOwnNTiles % 2 == 0, "columns of S divide among the warps");

// Shared memory: Q and tQ (the results replace Q at the end), then a tile of K, tK, V and tV, then one of S and tS.
constexpr u32 kBytesQ = tile_bytes(kBlockM, max_of(kDim, kDimV));
constexpr u32 kBytesK = tile_bytes(kBlockN, kDim);
constexpr u32 kBytesV = tile_bytes(kBlockN, kDimV);
constexpr u32 kBytesS = kSharesScores ? kBlockM * kBlockN * sizeof(Real) : 0;
static_assert(2 * (kBytesQ + kBytesK + kBytesV + kBytesS) == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// A block's queries of one head, the keys that they attend to, and what a warp sums of them.
struct Jvp {
  const Params& params;
  const Work work;
  const int head, head_kv, first_row, seqlen_q, key_stop;
  const Entry batch;
  const KeyTiles tiles;
  const u32 s_q, s_tq, s_k, s_tk, s_v, s_tv, s_s, s_ts;
  const int warp_row, warp_d, lane_row;
  const Score score;
  const ScoreTangents tangents;
  const Mask mask;
  const Dropout dropout;
  const Real exponent_scale, kept_scale;

  TangentSoftmax<1> softmax;
  Real o[1][kColumnTiles][4], a[1][kColumnTiles][4];

  CUFLASH_DEVICE Jvp(const Params& params_, const Work& work_)
      : params(params_),
        work(work_),
        head(work.head),
        head_kv(head / (params.num_heads / params.num_heads_kv)),
        first_row(work.block * kBlockM),
        seqlen_q(seqlen_q_of(params, work.batch)),
        key_stop(key_stop_of(params, work.batch)),
        batch(work.batch),
        tiles(params, work, key_stop),
        s_q(ptx::dynamic_shared()),
        s_tq(s_q + kBytesQ),
        s_k(s_tq + kBytesQ),
        s_tk(s_k + kBytesK),
        s_v(s_tk + kBytesK),
        s_tv(s_v + kBytesV),
        s_s(s_tv + kBytesV + warp_index() / kWarpsD * kNTiles * kBytesOfSums),
        s_ts(s_s + kBytesS),
        warp_row(warp_index() / kWarpsD * 16),
        warp_d(warp_index() % kWarpsD),
        lane_row(first_row + warp_row + fragment_row()),
        score(params, batch, head, key_stop),
        tangents(params, batch, head),
        mask(params, batch, head, key_stop),
        dropout(params, batch, head),
        exponent_scale(score.exponent_scale()),
        kept_scale(kept_scale_of(params)),
        softmax(make_tangent_softmax(params, batch, head)) {
    set_zero(o);
    set_zero(a);
  }

  CUFLASH_DEVICE void load_q() const {
    const auto load = [&](u32 tile, const Tensor& tensor) {
      load_tile<kBlockM, kHeadDim>(tile, queries_of(tensor, batch, head), tensor.row_stride, first_row, seqlen_q);
    };
    load(s_q, params.q);
    if constexpr (kMovesQ) load(s_tq, params.tq);
  }
  template <int columns>
  CUFLASH_DEVICE void load_keys(u32 tile, const Tensor& tensor, int n_block) const {
    load_tile<kBlockN, columns>(tile, keys_of(params, tensor, batch, head_kv), tensor.row_stride,
                                tiles.at(n_block) * kBlockN, key_stop);
  }
  CUFLASH_DEVICE void load_k(int n_block) const {
    load_keys<kHeadDim>(s_k, params.k, n_block);
    if constexpr (kMovesK) load_keys<kHeadDim>(s_tk, params.tk, n_block);
  }
  CUFLASH_DEVICE void load_v(int n_block) const {
    load_keys<kHeadDimV>(s_v, params.v, n_block);
    if constexpr (kMovesV) load_keys<kHeadDimV>(s_tv, params.tv, n_block);
  }

  // [1] One tile of keys: V arrives during the products of scores, the next K during those of values.
  CUFLASH_DEVICE void step(int n_block, bool masked) {
    ptx::copy_async_wait<0>();
    ptx::sync_block();
    load_v(n_block);
    ptx::copy_async_commit();

    // [2] S = Q K^T and tQ K^T + Q tK^T.
    Real s[1][kNTiles][4], ts[1][kNTiles][4];
    if constexpr (!kSharesScores) {
      multiply_scores(s, ts, 0);
    } else if (warp_d < kWarpsS) {
      Real own_s[1][kOwnNTiles][4], own_ts[1][kOwnNTiles][4];
      multiply_scores(own_s, own_ts, warp_d);
      share_sums<kWarpsS>(s_s, warp_d, own_s[0]);
      share_sums<kWarpsS>(s_ts, warp_d, own_ts[0]);
    }

    ptx::copy_async_wait<0>();
    ptx::sync_block();
    if (n_block > tiles.start) load_k(n_block - 1);
    ptx::copy_async_commit();
    if constexpr (kSharesScores) {
      load_shared_sums(s_s, s[0]);
      load_shared_sums(s_ts, ts[0]);
    }

    make_weights(n_block, masked, s, ts);

    // [4] O += P V and A += P (tS - c) V + P tV.
    const auto operand = [](const auto& weights) __attribute__((always_inline)) {
      return [&weights](int m, int k, Fragment& fragment) { to_operand(weights[m], k, fragment); };
    };
    if constexpr (kHasValues) {
      const RowMajorB<kRowV, kWarpsD> operand_v(s_v, warp_d), operand_tv(s_tv, warp_d);
      add_dual_product<kBlockN / kStep, kMovesScores, kMovesV>(o, a, operand(s), operand(ts), operand_v, operand_tv);
    }
  }

  // [3] Scores, P and P (tS - c).
  CUFLASH_DEVICE void make_weights(int n_block, bool masked, Real (&s)[1][kNTiles][4], Real (&ts)[1][kNTiles][4]) {
    const int lane_key = tiles.at(n_block) * kBlockN + fragment_column();
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane_row + i / 2 * 8, key = lane_key + 8 * n + i % 2;
        const Real x = s[0][n][i];
        Unused derivative;
        s[0][n][i] = score.of(x, row, key, derivative);
        if (masked && !mask.visible(row, key)) s[0][n][i] = -ptx::infinity();
        if constexpr (kMovesScores)
          ts[0][n][i] = s[0][n][i] == -ptx::infinity() ? 0 : tangents.of(score, x, ts[0][n][i], row, key);
      }
    softmax.update(s, ts, o, a, exponent_scale);
    if constexpr (kHasDropout) {
      dropout.drop(s[0], lane_row, lane_key, kept_scale);  // before they are rounded: in float16 they may be subnormal
      if constexpr (kMovesScores) dropout.drop(ts[0], lane_row, lane_key, kept_scale);
    }
  }

  // The products of S and tS of the columns that are dealt to `warp` of kWarpsS.
  template <int n_tiles>
  CUFLASH_DEVICE void multiply_scores(Real (&s)[1][n_tiles][4], Real (&ts)[1][n_tiles][4], int warp) const {
    set_zero(s);
    set_zero(ts);
    const RowMajorA<kRowQ> operand_q(s_q, warp_row), operand_tq(s_tq, warp_row);
    const ColumnMajorB<kRowQ, kWarpsS> operand_k(s_k, warp), operand_tk(s_tk, warp);
    multiply_dual<kDim / kStep, kMovesQ, kMovesK, true>(s, ts, operand_q, operand_tq, operand_k, operand_tk);
  }

  // [5] The results, through the shared memory of Q so that the stores to global memory are wide.
  CUFLASH_DEVICE void finish() {
    softmax.finish();
    if constexpr (kHasSinks) softmax.add_sink(o, a);
    const Real mean[2] = {softmax.mean(0, 0), softmax.mean(0, 1)};
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[0][n][i] -= mean[i / 2] * o[0][n][i];
    ptx::copy_async_wait<0>();
    if constexpr (kHasValues) {
      store(o, params.out);
      store(a, params.tout);
    }

    Real* g_lse = row_values_of(params.lse, batch, head);
    Real* g_tlse = row_values_of(params.tlse, batch, head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 8 * half;
      if (warp_d == 0 && fragment_column() == 0 && row < seqlen_q) {
        store_lse(g_lse + row * params.lse.row_stride, softmax.row_max[0][half], softmax.row_sum[0][half]);
        g_tlse[row * params.tlse.row_stride] = softmax.lse_tangent(0, half);
      }
    }
  }

  CUFLASH_DEVICE void store(const Real (&sum)[1][kColumnTiles][4], const Tensor& result) const {
    const auto factor = [&](int m, int half) { return softmax.inverse_sum(m, half); };
    if constexpr (CUFLASH_OUT_WIDE) {  // partial results, which are merged with others
      store_sums<kHeadDimV, kWarpsD>(sum, warp_row, warp_d, factor, row_values_of(result, batch, head),
                                     result.row_stride, first_row, seqlen_q);
    } else {
      ptx::sync_block();
      store_fragments<Order::kPairedColumns, kRowV, kWarpsD>(s_q, warp_row, warp_d, sum, factor);
      ptx::sync_block();
      store_tile<kBlockM, kHeadDimV>(s_q, (Storage*)queries_of(result, batch, head), result.row_stride, first_row,
                                     seqlen_q);
    }
  }
};

CUFLASH_DEVICE void jvp(const Params& params) {
  if (!is_chosen(params)) return;
  const Work work = schedule_queries(params, ptx::block_index(), params.num_heads, kHasRightBound);
  if (!has_queries(params, work)) return;
  Jvp own(params, work);
  const KeyTiles& tiles = own.tiles;
  own.load_q();
  if (tiles.stop > tiles.start) own.load_k(tiles.stop - 1);
  ptx::copy_async_commit();
#pragma unroll 1
  for (int n_block = tiles.stop - 1; n_block >= tiles.start; --n_block)
    own.step(n_block, n_block >= tiles.full_stop || n_block < tiles.full_start);
  own.finish();
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, jvp)
