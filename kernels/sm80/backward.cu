// Backward pass on mma.sync tensor cores (compute capability 8.0 and later): FlashAttention-2, Algorithm 2, transposed.
//
//   P' = exp(K Q' - lse)    dP' = V dO'    dS' = P' * (dP' - delta)
//   dV = P' dO              dK = dS' Q     dQ += dS K                       (X' is X transposed; rows of X' are keys)
//
// A block owns kBlockN keys of one key/value head and iterates over the tiles of queries, and over the query heads that
// share its keys. With rows of P' and dS' being keys, a warp's own fragments are the operands of dV and dK; only dS
// goes through shared memory, for dQ. At large head dimensions a warp cannot hold its rows of dK and dV: kWarpsD warps
// then share the rows, each with a slice of the queries of P' and dS' (some with none if the tile has too few) and a
// slice of the columns of dK and dV, and both P' and dS' go through shared memory. The steps of a tile of queries are
// numbered [GEMM 1] to [GEMM 7], as in sm90/backward.cu.
#include "common/config.cuh"
#include "common/score/dropout.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/query_iterator.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/row_reduction_gradients.cuh"
#include "sm80/backward_warps.cuh"
#include "sm80/copy.cuh"
#include "sm80/mma.cuh"

constexpr bool kOwnOperands = kWarpsD == 1;            // P' and dS' reach dV and dK in registers
constexpr bool kNeedsDs = kNeedsDk || kDqByReduction;  // dV alone is made of P'
constexpr int kQueryTiles = kBlockM / (8 * kWarpsQ);   // n-tiles of 8 queries of P' and dS' of a warp
constexpr int kRow = row_bytes(kDim);
constexpr int kRowV = row_bytes(kDimV);
constexpr int kRowS = row_bytes(kBlockM);
static_assert(kKeyTiles * 16 * kWarpsN == kBlockN, "every warp owns the same number of whole fragments");
static_assert(kNumStages == 1 || kNumStages == 2, "at most one tile of queries arrives while another is used");

// Shared memory: K, V, the ring of Q, dO and row statistics, two buffers of dS' (one when P' needs one too).
constexpr u32 kBytesK = tile_bytes(kBlockN, kDim);
constexpr u32 kBytesV = tile_bytes(kBlockN, kDimV);
constexpr u32 kBytesQ = tile_bytes(kBlockM, kDim);
constexpr u32 kBytesDo = tile_bytes(kBlockM, kDimV);
constexpr int kRealsOf16Bytes = 16 / sizeof(Real);
constexpr u32 kBytesStats = kBlockM * 2 * sizeof(Real);
constexpr u32 kBytesS = tile_bytes(kBlockN, kBlockM);
constexpr u32 kBytesStage = kBytesQ + kBytesDo + kBytesStats;
static_assert(kBytesK + kBytesV + kNumStages * kBytesStage + 2 * kBytesS == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// (lse, delta) of two neighbouring queries.
CUFLASH_DEVICE void load_stats(u32 address, float (&stats)[4]) { ptx::load_shared_f32x4(address, stats); }
CUFLASH_DEVICE void load_stats(u32 address, double (&stats)[4]) {
  load_pair(address, stats[0], stats[1]);
  load_pair(address + 16, stats[2], stats[3]);
}

// The shared memory of a stage of the ring of queries.
struct Stage {
  const u32 q, dout, stats;

  CUFLASH_DEVICE Stage(u32 ring, int stage)
      : q(ring + stage * kBytesStage), dout(q + kBytesQ), stats(dout + kBytesDo) {}
};

// The ring of tiles of queries: that of step i of the loop goes to stage i % kNumStages.
struct QueryRing {
  const Params& params;
  const Entry batch;
  const int seqlen_q;
  const u32 s_ring;
  const QueryTiles& tiles;
  const int num_steps;
  QueryTileIterator next;  // the tile to load

  // Fills the ring, with what the first group of copies has besides. Then `wait_first` waits for that group.
  CUFLASH_DEVICE void fill() {
#pragma unroll
    for (int i = 0; i < kNumStages; ++i) {
      if (i < num_steps) load(i);
      ptx::copy_async_commit();
    }
  }
  CUFLASH_DEVICE void wait_first() const {
    ptx::copy_async_wait<kNumStages - 1>();
    ptx::sync_block();
  }

  // After the last use of the tile of `step`: loads a later one into its stage, and waits for that of the next step.
  CUFLASH_DEVICE void refill(int step, int stage) {
    if constexpr (kNumStages == 2) ptx::copy_async_wait<0>();
    ptx::sync_block();
    if (step + kNumStages < num_steps) load(stage);
    ptx::copy_async_commit();
    if constexpr (kNumStages == 1) {
      ptx::copy_async_wait<0>();
      ptx::sync_block();
    }
  }

 private:
  CUFLASH_DEVICE void load(int stage) {
    const Stage s(s_ring, stage);
    const int first_row = next.m_block * kBlockM;
    load_tile<kBlockM, kHeadDim>(s.q, queries_of(params.q, batch, next.head), params.q.row_stride, first_row, seqlen_q);
    load_tile<kBlockM, kHeadDimV>(s.dout, queries_of(params.dout, batch, next.head), params.dout.row_stride, first_row,
                                  seqlen_q);
    const int thread = ptx::thread_index();
    if (thread < (int)kBytesStats / 16)
      ptx::copy_async<16, 0>(s.stats + thread * 16,
                             stats_of(params, batch, next.head) + first_row * 2 + thread * kRealsOf16Bytes, 16);
    next.advance(tiles);
  }
};

// The keys that a block owns, and the query heads that it takes of the group that shares them: all of them, or one of
// `splits` splits.
struct KeyBlock {
  const Work work;
  const Entry batch;
  const int head_kv, split, first_key, key_stop, group, first_head, stop_head;

  CUFLASH_DEVICE KeyBlock(const Params& params, const Work& work_, int splits)
      : work(work_),
        batch(work.batch),
        head_kv(work.head / splits),
        split(work.head % splits),
        first_key(work.block * kBlockN),
        key_stop(key_stop_of(params, batch)),
        group(params.num_heads / params.num_heads_kv),
        first_head(head_kv * group + group * split / splits),
        stop_head(head_kv * group + group * (split + 1) / splits) {}

  CUFLASH_DEVICE void load(const Params& params, u32 s_k, u32 s_v) const {
    load_tile<kBlockN, kHeadDim>(s_k, keys_of(params, params.k, batch, head_kv), params.k.row_stride, first_key,
                                 key_stop);
    load_tile<kBlockN, kHeadDimV>(s_v, keys_of(params, params.v, batch, head_kv), params.v.row_stride, first_key,
                                  key_stop);
  }
};

// What a warp holds: P' or dS' of its keys and queries, and its slices of dK and dV.
using ScoreTile = Real[kKeyTiles][kQueryTiles][4];
using DkTile = Real[kKeyTiles][kColumnTiles][4];
using DvTile = Real[kKeyTiles][kColumnTilesV][4];

// The numbered steps of a warp at work on a tile of queries, which is in stage `s`:
//
//   [GEMM 1] S' = K Q'     [GEMM 2] dP' = V dO'     [3] P' = exp(S' - lse)     [4] dS' = P' * (dP' - delta)
//   [GEMM 5] dV += P' dO   [GEMM 6] dK += dS' Q     [GEMM 7] dQ = dS K
//
// Accumulators are arguments. With them as members the struct would stay in memory until loops are unrolled, and
// kernels would take more registers.
struct BackwardSteps {
  const Params& params;
  const Entry batch;
  const int num_m_blocks, first_key, key_stop;
  const u32 s_k, s_v;
  const int warp_key, warp_d;

  CUFLASH_DEVICE BackwardSteps(const Params& params_, const KeyBlock& block)
      : params(params_),
        batch(block.batch),
        num_m_blocks(num_tiles_of(params, params.seqlen_q, kBlockM)),
        first_key(block.first_key),
        key_stop(block.key_stop),
        s_k(ptx::dynamic_shared()),
        s_v(s_k + kBytesK),
        warp_key(warp_index() / kWarpsD * 16 * kKeyTiles),
        warp_d(warp_index() % kWarpsD) {}

  // Loads lse and delta of this lane's two queries in n-tile `n`.
  CUFLASH_DEVICE void load_own_stats(const Stage& s, int n, Real (&stats)[4]) const {
    load_stats(s.stats + (column_of<kWarpsQ>(warp_d, n) + fragment_column()) * 2 * sizeof(Real), stats);
  }

  // [GEMM 1] S' = K Q', [GEMM 2] dP' = V dO'.
  CUFLASH_DEVICE void multiply_scores(const Stage& s, ScoreTile& p, ScoreTile& ds) const {
    set_zero(p);
    multiply<kDim / kStep>(p, RowMajorA<kRow>(s_k, warp_key), ColumnMajorB<kRow, kWarpsQ>(s.q, warp_d));
    set_zero(ds);
    if constexpr (kNeedsDs)
      multiply<kDimV / kStep>(ds, RowMajorA<kRowV>(s_v, warp_key), ColumnMajorB<kRowV, kWarpsQ>(s.dout, warp_d));
  }

  // Whether this warp has queries of P' and dS'.
  CUFLASH_DEVICE bool has_queries() const { return kWarpsQ == kWarpsD || warp_d < kWarpsQ; }

  // [3] P' = exp(S' - lse), [4] dS' = P' * (dP' - delta).
  CUFLASH_DEVICE void make_p_and_ds(const QueryTileIterator& at, const QueryTiles& tiles, const Stage& s, bool large,
                                    ScoreTile& p, ScoreTile& ds) const {
    const Weights weights(params, batch, at.head, key_stop);
    const RowReductionGradients reductions(params, batch, at.head);
    const Dropout dropout(params, batch, at.head);
    const Real kept_scale = kept_scale_of(params);
    const bool masked = at.needs_mask(tiles);
    const int lane_key = first_key + warp_key + fragment_row();
    const int lane_query = at.m_block * kBlockM + fragment_column();
    const auto row_of = [&](int n, int i) { return lane_query + column_of<kWarpsQ>(warp_d, n) + i % 2; };
    const auto key_of = [&](int m, int i) { return lane_key + 16 * m + i / 2 * 8; };
    weights.hide_products(p, masked, row_of, key_of);
    const auto row_sum_of = [&](int n, int i) -> const RowSum& {
      return row_sums_of(params, batch, at.head)[row_of(n, i)];
    };
    weights.by_statistics(p, large, row_sum_of, [&](auto by_row_sum) __attribute__((always_inline)) {
      [[maybe_unused]] KeptWeights<true> kept[kKeyTiles];
      const RowSum* row_sums = row_sums_of(params, batch, at.head);
#pragma unroll
      for (int n = 0; n < kQueryTiles; ++n) {
        Real stats[4];
        load_own_stats(s, n, stats);
#pragma unroll
        for (int m = 0; m < kKeyTiles; ++m) {
          if (kHasDropout && n % 2 == 0) kept[m] = dropout.transposed(row_of(n, 0), key_of(m, 0));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = row_of(n, i), key = key_of(m, i);
            const bool keeps = !kHasDropout || kept[m].keeps(n, i);
            Real& x = p[m][n][i];
            Real& of_score = ds[m][n][i];
            Real derivative;
            if (by_row_sum)
              x = weights.of_hidden(x, row, key, masked, row_sums[row], derivative);
            else
              x = weights.of_hidden(x, row, key, masked, PlainRow{stats[i % 2 * 2]}, derivative);
            of_score = gradient_of(x, of_score, keeps, kept_scale, reductions.delta_of(stats[i % 2 * 2 + 1], x, row));
            if constexpr (kTakesDmax) of_score = reductions.with_max(of_score, x, row, key, derivative);
            of_score *= derivative;
            x = keeps ? x : 0;
          }
        }
      }
    });
  }

  // [GEMM 1] to [4]. What the first row statistic says of all rows is loaded ahead of the products.
  CUFLASH_DEVICE void recompute(const QueryTileIterator& at, const QueryTiles& tiles, const Stage& s, ScoreTile& p,
                                ScoreTile& ds) const {
    Real first[4];
    load_own_stats(s, 0, first);
    const bool large = is_of_large(first[0]);
    multiply_scores(s, p, ds);
    make_p_and_ds(at, tiles, s, large, p, ds);
  }

  // [GEMM 5] dV += P' dO, [GEMM 6] dK += dS' Q.
  CUFLASH_DEVICE void add_to_dk_and_dv(const Stage& s, u32 s_ds, u32 s_p, const ScoreTile& p, const ScoreTile& ds,
                                       DkTile& dk, DvTile& dv) const {
    const RowMajorB<kRowV, kWarpsD> operand_do(s.dout, warp_d);
    const RowMajorB<kRow, kWarpsD> operand_q(s.q, warp_d);
    const auto one = [](int, int) { return 1.0f; };
    if constexpr (kOwnOperands) {
      if constexpr (kNeedsDv)
        add_product<kBlockM / kStep>(dv, [&](int m, int k, Fragment& a) { to_operand(p[m], k, a); }, operand_do);
      if constexpr (kDqByReduction) store_fragments<Order::kPlain, kRowS, 1>(s_ds, warp_key, 0, ds, one);
      if constexpr (kNeedsDk)
        add_product<kBlockM / kStep>(dk, [&](int m, int k, Fragment& a) { to_operand(ds[m], k, a); }, operand_q);
    } else {
      if (has_queries()) {
        if constexpr (kNeedsDv) store_fragments<Order::kPlain, kRowS, kWarpsQ>(s_p, warp_key, warp_d, p, one);
        if constexpr (kNeedsDs) store_fragments<Order::kPlain, kRowS, kWarpsQ>(s_ds, warp_key, warp_d, ds, one);
      }
      ptx::sync_block();
      const RowMajorA<kRowS> a_p(s_p, warp_key), a_ds(s_ds, warp_key);
      if constexpr (kNeedsDv) add_product<kBlockM / kStep>(dv, a_p, operand_do);
      if constexpr (kNeedsDk) add_product<kBlockM / kStep>(dk, a_ds, operand_q);
    }
  }

  // [GEMM 7] dQ = dS K, of a pair of tiles.
  CUFLASH_DEVICE void add_dq(const QueryTileIterator& at, u32 s_ds) const {
    if constexpr (kDqByReduction) {
      const int dq_warp_m = warp_index() / kDqWarpsD, dq_warp_d = warp_index() % kDqWarpsD;
      Real dq[kDqMTiles][kDqNTiles][4];
      set_zero(dq);
      multiply<kBlockN / kStep>(dq, ColumnMajorA<kRowS>(s_ds, dq_warp_m * kDqMTiles),
                                RowMajorB<kRow, kDqWarpsD>(s_k, dq_warp_d));
      add_to_dq(params, m_tile_of(params, num_m_blocks, batch, at.head, at.m_block), dq);
    }
  }
};

// The epilogue where blocks share the query heads: leaves partial sums.
CUFLASH_DEVICE void leave_partials(const Params& params, const KeyBlock& block, const DkTile& dk, const DvTile& dv) {
  const int num_n_blocks = num_tiles_of(params, params.seqlen_k, kBlockN);
  const i64 first = first_partial_of(params, num_n_blocks, block.batch, block.head_kv, block.work.block);
  Real* partials = partials_at(params, first + block.split, ptx::thread_index());
  const auto leave = [&](const auto& d) {
#pragma unroll
    for (const auto& row : d)
#pragma unroll
      for (const auto& tile : row) {
        *(Real4*)partials = {tile[0], tile[1], tile[2], tile[3]};
        partials += kNumThreads * 4;
      }
  };
  if constexpr (kNeedsDk)
    leave(dk);
  else
    partials += kBlockN * kDim;
  if constexpr (kNeedsDv) leave(dv);
}

// The epilogue: dK and dV leave through the shared memory of K and V, which no thread reads any more after the
// barrier.
CUFLASH_DEVICE void store_gradients(const Params& params, const KeyBlock& block, int warp_key, int warp_d,
                                    const DkTile& dk, const DvTile& dv) {
  const u32 s_k = ptx::dynamic_shared(), s_v = s_k + kBytesK;
  ptx::sync_block();
  const Real scale = scale_of(params), kept_scale = kept_scale_of(params);
  if constexpr (kNeedsDk)
    store_fragments<Order::kPairedColumns, kRow, kWarpsD>(s_k, warp_key, warp_d, dk, [&](int, int) { return scale; });
  if constexpr (kNeedsDv)
    store_fragments<Order::kPairedColumns, kRowV, kWarpsD>(s_v, warp_key, warp_d, dv,
                                                           [&](int, int) { return kept_scale; });
  ptx::sync_block();
  const int seqlen_k = seqlen_k_of(params, block.batch);
  if constexpr (kNeedsDk)
    store_tile<kBlockN, kHeadDim>(s_k, (Storage*)keys_of(params, params.dk, block.batch, block.head_kv),
                                  params.dk.row_stride, block.first_key, seqlen_k);
  if constexpr (kNeedsDv)
    store_tile<kBlockN, kHeadDimV>(s_v, (Storage*)keys_of(params, params.dv, block.batch, block.head_kv),
                                   params.dv.row_stride, block.first_key, seqlen_k);
}

CUFLASH_DEVICE void backward(const Params& params) {
  if (!is_chosen(params)) return;
  const int splits = kSplitsGroup ? params.group_splits : 1;
  const Work work = schedule_keys(params, ptx::block_index(), params.num_heads_kv * splits, params.head_section, false);
  if (!has_keys(params, work)) return;
  const KeyBlock block(params, work, splits);
  QueryTiles tiles;
  const int num_steps = find_queries(params, work, block.first_head, block.stop_head, block.key_stop, tiles);

  const BackwardSteps own(params, block);
  const u32 s_ring = own.s_v + kBytesV;
  const u32 s_s = s_ring + kNumStages * kBytesStage;  // two buffers of dS'; unless kOwnOperands, the second holds P'
  // K and V arrive with the first tile of queries.
  QueryTileIterator current = QueryTileIterator::first(tiles, block.first_head);
  QueryRing ring{params, block.batch, seqlen_q_of(params, block.batch), s_ring, tiles, num_steps, current};
  block.load(params, own.s_k, own.s_v);
  ring.fill();
  DkTile dk;
  DvTile dv;
  set_zero(dk);
  set_zero(dv);
  ring.wait_first();
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    const int stage = step % kNumStages;
    const Stage s(s_ring, stage);
    const u32 s_ds = s_s + (kOwnOperands ? step % 2 * kBytesS : 0), s_p = s_s + kBytesS;
    ScoreTile p, ds;
    if (own.has_queries()) own.recompute(current, tiles, s, p, ds);
    own.add_to_dk_and_dv(s, s_ds, s_p, p, ds, dk, dv);
    // With kOwnOperands, dS is complete after the barrier that also ends the use of this stage, else it is already.
    if constexpr (!kOwnOperands) own.add_dq(current, s_ds);
    ring.refill(step, stage);
    if constexpr (kOwnOperands) own.add_dq(current, s_ds);
    current.advance(tiles);
  }

  ptx::copy_async_wait<0>();
  if constexpr (kSplitsGroup)
    leave_partials(params, block, dk, dv);
  else
    store_gradients(params, block, own.warp_key, own.warp_d, dk, dv);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward)
