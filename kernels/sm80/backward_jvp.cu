// Tangents of dk and dv on mma.sync tensor cores (compute capability 7.0 and later), in a fixed order of additions:
//
//   S' = K Q'    tX' = tK Q' + K tQ'    dP' = V dO'    tdP' = tV dO' + V tdO'         (X' is X transposed)
//   tdV = (P u)' dO + P' tdO            tdK = scale (tdX' Q + dX' tQ) + tscale dX' Q
//
// A block owns kBlockN keys of one key/value head and iterates over the tiles of queries, and over the query heads that
// share its keys. A warp owns 16 of its keys, so that its fragments are operands of both sums; or kWarpsD warps share
// them, each with a slice of the columns. common/score/gradient_tangents.cuh has what is made of the products.
#include "common/schedule/query_iterator.cuh"
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/gradient_tangents.cuh"
#include "sm80/copy.cuh"
#include "sm80/mma.cuh"

constexpr int kWarpsD = CUFLASH_WARPS_D;
constexpr int kWarpsN = kNumWarps / kWarpsD;
constexpr int kQueryTiles = kBlockM / 8;              // n-tiles of 8 queries
constexpr int kColumnTiles = kDim / (8 * kWarpsD);    // n-tiles of 8 columns of dK of a warp
constexpr int kColumnTilesV = kDimV / (8 * kWarpsD);  // and of dV
constexpr int kRow = row_bytes(kDim);
constexpr int kRowV = row_bytes(kDimV);
static_assert(kBlockN == 16 * kWarpsN && kNumStages == 1, "a warp owns one fragment of keys");

// Shared memory: K, tK, V, tV, then a tile of Q, tQ, dO, tdO.
constexpr u32 kBytesK = tile_bytes(kBlockN, kDim);
constexpr u32 kBytesV = tile_bytes(kBlockN, kDimV);
constexpr u32 kBytesQ = tile_bytes(kBlockM, kDim);
constexpr u32 kBytesDo = tile_bytes(kBlockM, kDimV);
static_assert(2 * (kBytesK + kBytesV + kBytesQ + kBytesDo) == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

struct BackwardJvp {
  const Params& params;
  const Entry batch;
  const int head_kv, first_key, seqlen_q, key_stop;
  const bool has_tdout;
  const u32 s_k, s_tk, s_v, s_tv, s_q, s_tq, s_do, s_tdo;
  const int warp_key, warp_d, lane_key;

  Real tdk[1][kColumnTiles][4], tdv[1][kColumnTilesV][4];

  CUFLASH_DEVICE BackwardJvp(const Params& params_, const Work& work)
      : params(params_),
        batch(work.batch),
        head_kv(work.head),
        first_key(work.block * kBlockN),
        seqlen_q(seqlen_q_of(params, work.batch)),
        key_stop(key_stop_of(params, work.batch)),
        has_tdout(params.tdout.data != nullptr),
        s_k(ptx::dynamic_shared()),
        s_tk(s_k + kBytesK),
        s_v(s_tk + kBytesK),
        s_tv(s_v + kBytesV),
        s_q(s_tv + kBytesV),
        s_tq(s_q + kBytesQ),
        s_do(s_tq + kBytesQ),
        s_tdo(s_do + kBytesDo),
        warp_key(warp_index() / kWarpsD * 16),
        warp_d(warp_index() % kWarpsD),
        lane_key(first_key + warp_key + fragment_row()) {
    set_zero(tdk);
    set_zero(tdv);
  }

  template <int columns>
  CUFLASH_DEVICE void load_keys(u32 tile, const Tensor& tensor) const {
    load_tile<kBlockN, columns>(tile, keys_of(params, tensor, batch, head_kv), tensor.row_stride, first_key, key_stop);
  }
  CUFLASH_DEVICE void load_k_and_v() const {
    load_keys<kHeadDim>(s_k, params.k);
    load_keys<kHeadDimV>(s_v, params.v);
    if constexpr (kMovesK) load_keys<kHeadDim>(s_tk, params.tk);
    if constexpr (kMovesV) load_keys<kHeadDimV>(s_tv, params.tv);
  }
  template <int columns>
  CUFLASH_DEVICE void load_rows(u32 tile, const Tensor& tensor, int head, int m_block) const {
    load_tile<kBlockM, columns>(tile, queries_of(tensor, batch, head), tensor.row_stride, m_block * kBlockM, seqlen_q);
  }
  CUFLASH_DEVICE void load_queries(int head, int m_block) const {
    load_rows<kHeadDim>(s_q, params.q, head, m_block);
    load_rows<kHeadDimV>(s_do, params.dout, head, m_block);
    if constexpr (kMovesQ) load_rows<kHeadDim>(s_tq, params.tq, head, m_block);
    if (has_tdout) load_rows<kHeadDimV>(s_tdo, params.tdout, head, m_block);
  }

  CUFLASH_DEVICE void step(int head, int m_block, bool masked) {
    ptx::sync_block();
    load_queries(head, m_block);
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    ptx::sync_block();

    // [1] The products of scores, [2] what is made of them.
    Real p[1][kQueryTiles][4], pu[1][kQueryTiles][4], dx[1][kQueryTiles][4], tdx[1][kQueryTiles][4];
    set_zero(p), set_zero(pu), set_zero(dx), set_zero(tdx);
    const auto of_qk = [&](auto& sum, u32 keys, u32 queries) __attribute__((always_inline)) {
      multiply<kDim / kStep>(sum, RowMajorA<kRow>(keys, warp_key), ColumnMajorB<kRow, 1>(queries));
    };
    const auto of_dp = [&](auto& sum, u32 values, u32 rows) __attribute__((always_inline)) {
      multiply<kDimV / kStep>(sum, RowMajorA<kRowV>(values, warp_key), ColumnMajorB<kRowV, 1>(rows));
    };
    of_qk(p, s_k, s_q);
    if constexpr (kMovesQ) of_qk(pu, s_k, s_tq);
    if constexpr (kMovesK) of_qk(pu, s_tk, s_q);
    of_dp(dx, s_v, s_do);
    if constexpr (kMovesV) of_dp(tdx, s_tv, s_do);
    if (has_tdout) of_dp(tdx, s_v, s_tdo);
    make_gradients(p, pu, dx, tdx, head, m_block, masked);

    // [3] The sums.
    const auto add_v = [&](const auto& weights, u32 rows) __attribute__((always_inline)) {
      add_product<kBlockM / kStep>(
          tdv, [&](int m, int k, Fragment& a) { to_operand(weights[m], k, a); },
          RowMajorB<kRowV, kWarpsD>(rows, warp_d));
    };
    const auto add_k = [&](const auto& gradients, u32 rows) __attribute__((always_inline)) {
      add_product<kBlockM / kStep>(
          tdk, [&](int m, int k, Fragment& a) { to_operand(gradients[m], k, a); },
          RowMajorB<kRow, kWarpsD>(rows, warp_d));
    };
    if constexpr (kNeedsDv) {
      if constexpr (kMovesScores) add_v(pu, s_do);
      if (has_tdout) add_v(p, s_tdo);
    }
    if constexpr (kNeedsDk) {
      add_k(tdx, s_q);
      if constexpr (kMovesQ) add_k(dx, s_tq);
    }
  }

  template <class Tile>
  CUFLASH_DEVICE void make_gradients(Tile& p, Tile& pu, Tile& dx, Tile& tdx, int head, int m_block, bool masked) const {
    const GradientTangents made(params, batch, head, key_stop);
    const Dropout dropout(params, batch, head);
    const int lane_query = m_block * kBlockM + fragment_column();
    [[maybe_unused]] KeptWeights<true> kept;
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      const int query = lane_query + 8 * n;
      const RowWithTangents rows[2] = {{params, batch, head, query}, {params, batch, head, query + 1}};
      if (kHasDropout && n % 2 == 0) kept = dropout.transposed(query, lane_key);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        made.apply(p[0][n][i], pu[0][n][i], dx[0][n][i], tdx[0][n][i], query + i % 2, lane_key + i / 2 * 8, masked,
                   !kHasDropout || kept.keeps(n, i), rows[i % 2]);
    }
  }

  CUFLASH_DEVICE void finish() const {
    const Real tscale = kMovesScale ? *(const Real*)params.tscale : (Real)0;
    const Real factor = ScaledGradients(scale_of(params), tscale).factor;
    ptx::copy_async_wait<0>();
    ptx::sync_block();
    const auto of_k = [&](int, int) { return factor; };
    const auto of_v = [&](int, int) { return (Real)1; };
    if constexpr (kNeedsDk && !CUFLASH_DK_WIDE)
      store_fragments<Order::kPairedColumns, kRow, kWarpsD>(s_k, warp_key, warp_d, tdk, of_k);
    if constexpr (kNeedsDv && !CUFLASH_DV_WIDE)
      store_fragments<Order::kPairedColumns, kRowV, kWarpsD>(s_v, warp_key, warp_d, tdv, of_v);
    ptx::sync_block();
    const int seqlen_k = seqlen_k_of(params, batch);
    if constexpr (kNeedsDk && CUFLASH_DK_WIDE)
      store_sums<kHeadDim, kWarpsD>(tdk, warp_key, warp_d, of_k, per_key_values_of(params.dk, batch, head_kv),
                                    params.dk.row_stride, first_key, seqlen_k);
    else if constexpr (kNeedsDk)
      store_tile<kBlockN, kHeadDim>(s_k, (Storage*)keys_of(params, params.dk, batch, head_kv), params.dk.row_stride,
                                    first_key, seqlen_k);
    if constexpr (kNeedsDv && CUFLASH_DV_WIDE)
      store_sums<kHeadDimV, kWarpsD>(tdv, warp_key, warp_d, of_v, per_key_values_of(params.dv, batch, head_kv),
                                     params.dv.row_stride, first_key, seqlen_k);
    else if constexpr (kNeedsDv)
      store_tile<kBlockN, kHeadDimV>(s_v, (Storage*)keys_of(params, params.dv, batch, head_kv), params.dv.row_stride,
                                     first_key, seqlen_k);
  }
};

CUFLASH_DEVICE void backward_jvp(const Params& params) {
  if (!is_chosen(params)) return;
  const Work work = schedule_keys(params, ptx::block_index(), params.num_heads_kv, params.head_section, false);
  if (!has_keys(params, work)) return;
  BackwardJvp own(params, work);
  const int group = params.num_heads / params.num_heads_kv, first_head = work.head * group;
  QueryTiles tiles;
  const int num_steps = find_queries(params, work, first_head, first_head + group, own.key_stop, tiles);
  own.load_k_and_v();
  ptx::copy_async_commit();
  QueryTileIterator at = QueryTileIterator::first(tiles, first_head);
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step, at.advance(tiles)) own.step(at.head, at.m_block, at.needs_mask(tiles));
  own.finish();
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_jvp)
