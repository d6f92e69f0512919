// Tangents of dk, dv and dq on mma.sync tensor cores (compute capability 7.0 and later):
//
//   S' = K Q'    tX' = tK Q' + K tQ'    dP' = V dO'    tdP' = tV dO' + V tdO'         (X' is X transposed)
//   tdV = (P u)' dO + P' tdO            tdK = scale (tdX' Q + dX' tQ) + tscale dX' Q
//   tdQ += tdX K + dX tK
//
// A block owns kBlockN keys of one key/value head and iterates over the tiles of queries, and over the query heads that
// share its keys. A warp owns 16 of its keys, so that its fragments are operands of tdV and tdK. Or kWarpsD warps own
// them, each with a slice of the columns of the sums. With kShares, these divide the products of scores: by 16 queries
// and, where a tile has too few, two of them by columns of q and v. What they make of them lies in shared memory, from
// where it comes to tdQ, too. Without, each makes all of these products. tdQ is left to a kernel of its own without
// kShares, and where the order of additions has to be fixed. common/score/gradient_tangents.cuh has what is made of the
// products.
#include "common/schedule/query_iterator.cuh"
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/gradient_tangents.cuh"
#include "sm80/backward_warps.cuh"
#include "sm80/copy.cuh"
#include "sm80/dual_products.cuh"

constexpr bool kShares = CUFLASH_SHARES;
constexpr bool kOwnOperands = kWarpsD == 1 || !kShares;  // what is made of the products reaches the sums in registers
constexpr int kWarpsP = kOwnOperands ? 1 : kWarpsQ;      // warps among which the queries of the products are divided
constexpr int kQueryTiles = kBlockM / (8 * kWarpsP);     // n-tiles of 8 queries of a warp
// Two warps with the same queries each sum half of the columns. Then each has the sums of one of the two n-tiles.
constexpr int kWarpsK = kWide && !kOwnOperands && kWarpsQ < kWarpsD ? 2 : 1;
constexpr int kRow = row_bytes(kDim);
constexpr int kRowV = row_bytes(kDimV);
constexpr int kRowS = row_bytes(kBlockM);
static_assert(kKeyTiles == 1, "a warp owns one fragment of keys");
static_assert(kShares || !kDqByReduction, "tdQ is made of what warps share");
static_assert(kWarpsK == 1 || (kQueryTiles == 2 && kDim * kElementBytes % 256 == 0 && kDimV * kElementBytes % 256 == 0),
              "halves of the columns are whole lines");
static_assert(kNumStages == 1 || kNumStages == 2, "at most one tile of queries arrives while another is used");

// Shared memory: K, tK, V, tV, the stages of Q, tQ, dO, tdO, then tdX' and dX', and (P u)' and P' where warps share
// them.
constexpr u32 kBytesK = tile_bytes(kBlockN, kDim);
constexpr u32 kBytesV = tile_bytes(kBlockN, kDimV);
constexpr u32 kBytesQ = tile_bytes(kBlockM, kDim);
constexpr u32 kBytesDo = tile_bytes(kBlockM, kDimV);
constexpr u32 kBytesStage = 2 * (kBytesQ + kBytesDo);
constexpr u32 kBytesS = tile_bytes(kBlockN, kBlockM);
constexpr int kSharedTiles = !kShares ? 0 : kWarpsD == 1 ? 2 : 4;
static_assert(2 * (kBytesK + kBytesV) + kNumStages * kBytesStage + kSharedTiles * kBytesS == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

struct BackwardJvp {
  const Params& params;
  const Entry batch;
  const int head_kv, first_key, seqlen_q, key_stop, num_m_blocks;
  const bool has_tdout;
  const u32 s_k, s_tk, s_v, s_tv, s_stages, s_tdx, s_dx, s_pu, s_p;
  const int warp_key, warp_d, warp_p, warp_k, lane_key;

  Real tdk[1][kColumnTiles][4], tdv[1][kColumnTilesV][4];

  CUFLASH_DEVICE BackwardJvp(const Params& params_, const Work& work)
      : params(params_),
        batch(work.batch),
        head_kv(work.head),
        first_key(work.block * kBlockN),
        seqlen_q(seqlen_q_of(params, work.batch)),
        key_stop(key_stop_of(params, work.batch)),
        num_m_blocks(num_tiles_of(params, params.seqlen_q, kBlockM)),
        has_tdout(params.tdout.data != nullptr),
        s_k(ptx::dynamic_shared()),
        s_tk(s_k + kBytesK),
        s_v(s_tk + kBytesK),
        s_tv(s_v + kBytesV),
        s_stages(s_tv + kBytesV),
        s_tdx(s_stages + kNumStages * kBytesStage),
        s_dx(s_tdx + kBytesS),
        s_pu(s_dx + kBytesS),
        s_p(s_pu + kBytesS),
        warp_key(warp_index() / kWarpsD * 16),
        warp_d(warp_index() % kWarpsD),
        warp_p(kOwnOperands ? 0 : warp_d % kWarpsP),
        warp_k(kOwnOperands ? 0 : warp_d / kWarpsP),
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
  CUFLASH_DEVICE void load_queries(const QueryTileIterator& at, int stage) const {
    const Stage s(s_stages, stage);
    load_rows<kHeadDim>(s.q, params.q, at.head, at.m_block);
    load_rows<kHeadDimV>(s.dout, params.dout, at.head, at.m_block);
    if constexpr (kMovesQ) load_rows<kHeadDim>(s.tq, params.tq, at.head, at.m_block);
    if (has_tdout) load_rows<kHeadDimV>(s.tdout, params.tdout, at.head, at.m_block);
  }

  // Where the operands of a stage are.
  struct Stage {
    const u32 q, tq, dout, tdout;

    CUFLASH_DEVICE Stage(u32 stages, int stage)
        : q(stages + stage * kBytesStage), tq(q + kBytesQ), dout(tq + kBytesQ), tdout(dout + kBytesDo) {}
  };

  CUFLASH_DEVICE void step(const QueryTileIterator& at, int stage, bool masked) {
    const Stage s(s_stages, stage);
    // [1] The products of scores, [2] what is made of them.
    Real p[1][kQueryTiles][4], pu[1][kQueryTiles][4], dx[1][kQueryTiles][4], tdx[1][kQueryTiles][4];
    const bool has_products = warp_k < kWarpsK;
    if (has_products) multiply_scores(s, p, pu, dx, tdx);
    if constexpr (kWarpsK == 1) {
      if (has_products) {
        make_gradients(p, pu, dx, tdx, at, masked, 0);
        share(p, pu, dx, tdx, 0);
      }
    } else {
      // Each warp leaves the other one half of its sums, where that one will share what it makes of them.
      if (has_products) {
        const int other = 1 - warp_k;
        leave(s_p, of_tile(p, other), other), leave(s_pu, of_tile(pu, other), other);
        leave(s_dx, of_tile(dx, other), other), leave(s_tdx, of_tile(tdx, other), other);
      }
      ptx::sync_block();
      if (has_products) {
        SumsOfTile own_p = of_tile(p, warp_k), own_pu = of_tile(pu, warp_k);
        SumsOfTile own_dx = of_tile(dx, warp_k), own_tdx = of_tile(tdx, warp_k);
        add_left(own_p, s_p), add_left(own_pu, s_pu), add_left(own_dx, s_dx), add_left(own_tdx, s_tdx);
        make_gradients(own_p.value, own_pu.value, own_dx.value, own_tdx.value, at, masked, warp_k);
        share(own_p.value, own_pu.value, own_dx.value, own_tdx.value, warp_k);
      }
    }
    if constexpr (!kOwnOperands) ptx::sync_block();

    // [3] The sums.
    const auto add_to = [&](auto& sum, const auto& own, u32 shared, auto rows) __attribute__((always_inline)) {
      if constexpr (kOwnOperands)
        add_product<kBlockM / kStep>(sum, [&](int m, int k, Fragment& a) { to_operand(own[m], k, a); }, rows);
      else
        add_product<kBlockM / kStep>(sum, RowMajorA<kRowS>(shared, warp_key), rows);
    };
    if constexpr (kNeedsDv) {
      add_to(tdv, pu, s_pu, RowMajorB<kRowV, kWarpsD>(s.dout, warp_d));
      if (has_tdout) add_to(tdv, p, s_p, RowMajorB<kRowV, kWarpsD>(s.tdout, warp_d));
    }
    if constexpr (kNeedsDk) {
      add_to(tdk, tdx, s_tdx, RowMajorB<kRow, kWarpsD>(s.q, warp_d));
      if constexpr (kMovesQ) add_to(tdk, dx, s_dx, RowMajorB<kRow, kWarpsD>(s.tq, warp_d));
    }
  }

  // [1] The products of scores, over the columns that are this warp's.
  template <class Sums>
  CUFLASH_DEVICE void multiply_scores(const Stage& s, Sums& p, Sums& pu, Sums& dx, Sums& tdx) const {
    set_zero(p), set_zero(pu), set_zero(dx), set_zero(tdx);
    const auto own = [&](const auto& operand, u32 row_bytes) __attribute__((always_inline)) {
      return shifted(operand, kWarpsK == 1 ? 0 : warp_k * (row_bytes / kWarpsK));
    };
    const auto key_rows = [&](u32 tile) { return own(RowMajorA<kRow>(tile, warp_key), kDim * kElementBytes); };
    const auto query_rows = [&](u32 tile) {
      return own(ColumnMajorB<kRow, kWarpsP>(tile, warp_p), kDim * kElementBytes);
    };
    const auto value_rows = [&](u32 tile) { return own(RowMajorA<kRowV>(tile, warp_key), kDimV * kElementBytes); };
    const auto gradient_rows = [&](u32 tile) {
      return own(ColumnMajorB<kRowV, kWarpsP>(tile, warp_p), kDimV * kElementBytes);
    };
    multiply_dual<kDim / kStep / kWarpsK, kMovesK, kMovesQ, true>(p, pu, key_rows(s_k), key_rows(s_tk), query_rows(s.q),
                                                                  query_rows(s.tq));
    multiply_dual<kDimV / kStep / kWarpsK, kMovesV, false>(dx, tdx, value_rows(s_v), value_rows(s_tv),
                                                           gradient_rows(s.dout), gradient_rows(s.tdout));
    if (has_tdout) multiply<kDimV / kStep / kWarpsK>(tdx, value_rows(s_v), gradient_rows(s.tdout));
  }

  // The sums of an n-tile of this warp's keys and queries.
  struct SumsOfTile {
    Real value[1][1][4];
  };
  CUFLASH_DEVICE static SumsOfTile of_tile(const Real (&sums)[1][kQueryTiles][4], int n) {
    SumsOfTile own;
#pragma unroll
    for (int i = 0; i < 4; ++i) own.value[0][0][i] = n == 0 ? sums[0][0][i] : sums[0][kQueryTiles - 1][i];
    return own;
  }
  // Where the upper or the lower `half` of its rows lies, as RowMajorA and ColumnMajorA read it.
  CUFLASH_DEVICE u32 pair_of_tile(u32 tile, int n, int half) const {
    const int row = fragment_row() + 8 * half;
    const u32 start = tile + (warp_key + row) * kRowS + ((fragment_column() * kElementBytes) ^ row_swizzle<kRowS>(row));
    return along_row(start, (16 * warp_p + 8 * n) * kElementBytes);
  }
  CUFLASH_DEVICE void leave(u32 tile, const SumsOfTile& sums, int n) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Real pair[2] = {sums.value[0][0][2 * half], sums.value[0][0][2 * half + 1]};
      ptx::store_shared_x2(pair_of_tile(tile, n, half), pair);
    }
  }
  CUFLASH_DEVICE void add_left(SumsOfTile& sums, u32 tile) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Real first, second;
      load_pair(pair_of_tile(tile, warp_k, half), first, second);
      sums.value[0][0][2 * half] += first, sums.value[0][0][2 * half + 1] += second;
    }
  }

  // Leaves what other warps need of the products of this one, whose first n-tile is `n`.
  template <class Tile>
  CUFLASH_DEVICE void share(const Tile& p, const Tile& pu, const Tile& dx, const Tile& tdx, int n) const {
    const auto store = [&](u32 tile, const Tile& value) __attribute__((always_inline)) {
      if constexpr (kWarpsK == 1)
        store_fragments<Order::kPlain, kRowS, kWarpsP>(tile, warp_key, warp_p, value, [](int, int) { return (Real)1; });
      else
        leave(tile, {{{{value[0][0][0], value[0][0][1], value[0][0][2], value[0][0][3]}}}}, n);
    };
    if constexpr ((!kOwnOperands && kNeedsDk) || kDqByReduction) {
      store(s_tdx, tdx);
      if constexpr (kMovesQ || kMovesK) store(s_dx, dx);
    }
    if constexpr (!kOwnOperands && kNeedsDv) {
      store(s_pu, pu);
      if (has_tdout) store(s_p, p);
    }
  }

  CUFLASH_DEVICE void add_tdq(const QueryTileIterator& at) const {
    const int dq_warp_m = warp_index() / kDqWarpsD, dq_warp_d = warp_index() % kDqWarpsD;
    Real tdq[kDqMTiles][kDqNTiles][4];
    set_zero(tdq);
    const auto add = [&](u32 gradients, u32 keys) __attribute__((always_inline)) {
      multiply<kBlockN / kStep>(tdq, ColumnMajorA<kRowS>(gradients, dq_warp_m * kDqMTiles),
                                RowMajorB<kRow, kDqWarpsD>(keys, dq_warp_d));
    };
    add(s_tdx, s_k);
    if constexpr (kMovesK) add(s_dx, s_tk);
    add_to_dq(params, m_tile_of(params, num_m_blocks, batch, at.head, at.m_block), tdq);
  }

  // Makes the gradients of n-tiles from `first` on.
  template <int n_tiles>
  CUFLASH_DEVICE void make_gradients(Real (&p)[1][n_tiles][4], Real (&pu)[1][n_tiles][4], Real (&dx)[1][n_tiles][4],
                                     Real (&tdx)[1][n_tiles][4], const QueryTileIterator& at, bool masked,
                                     int first) const {
    const GradientTangents made(params, batch, at.head, key_stop);
    const Dropout dropout(params, batch, at.head);
    const int lane_query = at.m_block * kBlockM + fragment_column();
    [[maybe_unused]] KeptWeights<true> kept;
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
      const int of_pair = lane_query + column_of<kWarpsP>(warp_p, n), query = of_pair + 8 * first;
      const RowWithTangents rows[2] = {{params, batch, at.head, query}, {params, batch, at.head, query + 1}};
      if (kHasDropout && n % 2 == 0) kept = dropout.transposed(of_pair, lane_key);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        made.apply(p[0][n][i], pu[0][n][i], dx[0][n][i], tdx[0][n][i], query + i % 2, lane_key + i / 2 * 8, masked,
                   !kHasDropout || kept.keeps(n + first, i), rows[i % 2]);
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
  // K and V arrive with the first tile of queries.
  QueryTileIterator at = QueryTileIterator::first(tiles, first_head), next = at;
  own.load_k_and_v();
#pragma unroll
  for (int i = 0; i < kNumStages; ++i) {
    if (i < num_steps) own.load_queries(next, i), next.advance(tiles);
    ptx::copy_async_commit();
  }
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    const int stage = step % kNumStages;
    ptx::copy_async_wait<kNumStages - 1>();
    ptx::sync_block();
    own.step(at, stage, at.needs_mask(tiles));
    ptx::sync_block();
    // tdQ takes nothing of the stage: the next tile of queries arrives meanwhile.
    const QueryTileIterator now = at;
    at.advance(tiles);
    if constexpr (kNumStages == 1) next = at;  // one iterator takes fewer registers than two
    if (step + kNumStages < num_steps) {
      own.load_queries(next, stage);
      if constexpr (kNumStages > 1) next.advance(tiles);
    }
    ptx::copy_async_commit();
    if constexpr (kDqByReduction) own.add_tdq(now);
  }
  own.finish();
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_jvp)
