// Backward pass in half precision with wide heads on compute capability 9.0 (Hopper), with wgmma and TMA: one gradient.
//
//   P = exp(S - lse)        dS = P * (dP - delta)        dV = P' dO        dK = dS' Q        dQ = dS K
//
// Registers hold only one of these gradients, so each has a launch of its own, which makes the scores again: eight
// products in place of five. But nothing is added to memory, so all gradients are bitwise repeatable. Where registers
// do not hold all columns, the two blocks of a cluster have half of them each, and exchange what their columns add to
// the scores. sm90/wide_ring.cuh says what each warpgroup does.
#include "common/softmax/backward.cuh"
#include "common/score/dropout.cuh"
#include "common/io/operands.cuh"
#include "common/score/scores.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/wide_sums.cuh"

// The pairs of a tile that a lane of warpgroup 2 has, and the statistics of their queries.
struct Lane {
  int query, key;                    // of its first element
  u32 s_stats;                       // where rows are keys: the address of those of that query
  float stats[2][2];                 // where rows are queries: lse of both, delta of both
  const RowSum* row_sums = nullptr;  // of the head
  bool large = false;                // whether rows of the tile are large

  CUFLASH_DEVICE int query_of(int n, int i) const { return query + (kRowsAreKeys ? 8 * n + i % 2 : i / 2 * 8); }
  CUFLASH_DEVICE int key_of(int n, int i) const { return key + (kRowsAreKeys ? i / 2 * 8 : 8 * n + i % 2); }
  // Loads lse (0) or delta (1) of the lane's two queries in an n-tile. query_index says which of the two element i has.
  CUFLASH_DEVICE void load(int n, int which, float (&of_both)[2]) const {
    if constexpr (kRowsAreKeys)
      ptx::load_shared_x2(s_stats + n * 64 + which * 8, of_both);
    else
      of_both[0] = stats[which][0], of_both[1] = stats[which][1];
  }
  CUFLASH_DEVICE static constexpr int query_index(int i) { return kRowsAreKeys ? i % 2 : i / 2; }
  CUFLASH_DEVICE void find_large() { large = is_of_large(ptx::float_of(ptx::load_shared_b32(s_stats))); }
};

// Warpgroup 2, where two blocks divide columns: exchanges their partial sums of a product.
struct PartialExchange {
  const Shared& shared;
  const u32 address = shared.partial + ptx::thread_index() % 128 * 16;
  const u32 other = kColumnBlocks > 1 ? ptx::distance_in_cluster(column_rank() ^ 1) : 0;
  Position<kPartialStages> at;

  CUFLASH_DEVICE void send(const float (&partial)[kNTiles][4]) const {
    if constexpr (kColumnBlocks > 1) {
      shared.partial_ring.empty(at).wait(at.parity ^ 1);
      if (ptx::thread_index() % 128 == 0) shared.partial_ring.full(at).arrive_expect(kBytesPartial);
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
        ptx::store_remote_f32x4(address + n * 2048 + other, partial[n], shared.partial_ring.full(at).address + other);
    }
  }
  CUFLASH_DEVICE void add_other(float (&partial)[kNTiles][4]) {
    if constexpr (kColumnBlocks > 1) {
      shared.partial_ring.full(at).wait(at.parity);
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        float others[4];
        ptx::load_shared_f32x4(address + n * 2048, others);
#pragma unroll
        for (int i = 0; i < 4; ++i) partial[n][i] += others[i];
      }
      ptx::fence_async_proxy();  // as in arrive_after_reads
      ptx::sync_warp();
      if (lane_index() == 0) ptx::barrier_arrive_remote(shared.partial_ring.empty(at).address + other);
      at.advance();
    }
  }
};
// A block sends its partial S while the first chunk of dP is under way, and adds the other block's partial S at this
// chunk, where the exponentials begin.
constexpr int kExchangeChunk = kColumnBlocks > 1 ? kChunksOfDp / 2 : 0;
CUFLASH_DEVICE constexpr int p_tiles_before(int chunk_of_dp) {
  return (chunk_of_dp - kExchangeChunk) * kNTiles / max_of(kChunksOfDp - kExchangeChunk, 1);
}

// Warpgroup 2 makes the factors of the sums.
struct Differentiator : ScoreProducts {
  const u32 thread = ptx::thread_index() % 128;
  Position<1> message;
  Position<kStatsStages> stats_at;
  PartialExchange exchange{shared};

  CUFLASH_DEVICE explicit Differentiator(const Shared& shared_) : ScoreProducts{shared_} {}

  // [2] P = exp(S - lse), times the derivatives of the scores where dS is made of it, in n-tiles `first` to `stop` - 1.
  template <int first, int stop>
  CUFLASH_DEVICE void recompute_p(const Weights& weights, const Lane& lane, bool masked) {
    if (lane.large)
      recompute_p_by<first, stop>(weights, lane, masked,
                                  [&](int n, int i) { return lane.row_sums[lane.query_of(n, i)]; });
    else
      recompute_p_by<first, stop>(weights, lane, masked, [&](int n, int i) {
        float lse[2];
        lane.load(n, 0, lse);
        return PlainRow{lse[Lane::query_index(i)]};
      });
  }
  template <int first, int stop, class RowOf>
  CUFLASH_DEVICE void recompute_p_by(const Weights& weights, const Lane& lane, bool masked, const RowOf& row_of) {
#pragma unroll
    for (int n = first; n < stop; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float derivative;
        const float p =
            weights.of(s[0][n][i], lane.query_of(n, i), lane.key_of(n, i), masked, row_of(n, i), derivative);
        s[0][n][i] = kMakesDs && kHasDerivative ? p * derivative : p;
      }
  }

  // [3] dS = P * (dP - delta), or P without the weights that dropout drops; in place of P.
  CUFLASH_DEVICE void make_factor(const Dropout& dropout, const Lane& lane, float kept_scale) {
    [[maybe_unused]] KeptWeights<kRowsAreKeys> kept;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      if (kHasDropout && n % 2 == 0) kept = dropout.of_either<kRowsAreKeys>(lane.query, lane.key, n);
      float delta[2];
      if constexpr (kMakesDs) lane.load(n, 1, delta);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool keeps = !kHasDropout || kept.keeps(n, i);
        float& x = s[0][n][i];
        x = kMakesDs ? gradient_of(x, dp[n][i], keeps, kept_scale, delta[Lane::query_index(i)]) : keeps ? x : 0.0f;
      }
    }
  }

  // Sets factors of keys past the last one to 0. They were made of whatever lies there, which may be NaN.
  CUFLASH_DEVICE void clear_keys(const Lane& lane, int key_stop) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (lane.key_of(n, i) >= key_stop) s[0][n][i] = 0.0f;
  }

  CUFLASH_DEVICE void hand_over() {
    shared.taken.wait(message.parity ^ 1);
    store_factor(shared, thread, s[0]);
    arrive_as_warp(shared.ready[kFirstHalf]);
    message.advance();
  }
  CUFLASH_DEVICE void let_second_follow() const { arrive_as_warp(shared.ready[kSecondHalf]); }

  template <class Work, class Step>
  CUFLASH_DEVICE void take_tile(const Params& common, const Work& work, const Step& step, Lane& lane) {
    const Weights weights = work.weights(common, step);
    work.move(common, lane, step, shared.stats + stats_at.stage * kBytesStats);
    const bool masked = work.is_masked(step);
    if constexpr (kRowsAreKeys) {
      shared.stats_ring.full(stats_at).wait(stats_at.parity);
      lane.find_large();
    }
    multiply(work.is_first(step), [&](auto chunk) {
      constexpr int i = decltype(chunk)::value;
      if constexpr (i == 0) exchange.send(s[0]);
      if constexpr (i == kExchangeChunk) exchange.add_other(s[0]);
      if constexpr (i >= kExchangeChunk) recompute_p<p_tiles_before(i), p_tiles_before(i + 1)>(weights, lane, masked);
    });
    if (!work.is_first(step)) let_second_follow();
    exchange.send(kMakesDs ? dp : s[0]);
    if constexpr (kMakesDs) {
      exchange.add_other(dp);
    } else {
      exchange.add_other(s[0]);
      recompute_p<0, kNTiles>(weights, lane, masked);
    }
    make_factor(Dropout(common, work.entry(), work.query_head(step)), lane, kept_scale_of(common));
    if constexpr (kRowsAreKeys) {
      arrive_after_reads(shared.stats_ring.empty(stats_at));
      stats_at.advance();
    }
    if (Work::kClears && work.valid(step) < kTile) clear_keys(lane, work.key_stop);
    hand_over();
  }

  template <class Work>
  CUFLASH_DEVICE void take(const WideParams& params, const Work& work, int) {
    auto step = work.first();
    if (!step.more()) return;
    shared.own_ring.full({}).wait(0);
    work.clear_own(shared, thread);
    Lane lane = work.lane(params.common, thread / 32 * 16 + fragment_row());
#pragma unroll 1
    for (; step.more(); work.advance(step)) take_tile(params.common, work, step, lane);
    let_second_follow();
  }
};

static_assert(kRowBlocks == 1, "blocks of a cluster divide columns");
CUFLASH_DEVICE u32 cluster_index() { return ptx::block_index() / kClusterBlocks; }

// Thread. Loads the rows of a block, only the columns that the block has.
template <int columns>
CUFLASH_DEVICE void load_rows(u32 tile, const TensorMap& map, const Barrier& full, int first_row, int head, int batch) {
  load_chunks<kRows, columns>(tile, map, full, first_row, head, batch, column_rank() * columns);
}

// Under a causal mask, tiles of one axis differ in how many tiles of the other axis they are multiplied by. Those with
// the most start first, from as many heads as fill the device with half of their tiles. All tiles of this half go from
// the end that every one of them attends to up to the diagonal, so that they are at the same tile at the same time, and
// L2 is evaluated once for it. The shortest of them ends first and makes way for the longest of the other half, the
// second shortest for the second longest, and so on. The other half goes from the diagonal to that end. So its loops,
// too, are at the same tile at the same time, and end together.
constexpr bool kGoesToDiagonal = kHasRightBound && !kHasLeftBound && !kHasBlockIndex;

// The rows are keys: a block makes dV or dK of its keys, from all queries that attend to them.
struct KeyRows : BackwardWork {
  static constexpr bool kClears = false;  // past the last query TMA brings zeros

  struct Step {
    QueryTileIterator m_tile;
    int left;

    CUFLASH_DEVICE bool more() const { return left > 0; }
    CUFLASH_DEVICE bool is_last() const { return left == 1; }
  };

  CUFLASH_DEVICE explicit KeyRows(const Params& common) : BackwardWork(common, {}, cluster_index()) {
    if (kGoesToDiagonal) set_direction(queries, 2 * work.block < num_n_blocks);
  }

  CUFLASH_DEVICE int entry() const { return work.batch; }
  CUFLASH_DEVICE Step first() const { return {BackwardWork::first(), num_steps}; }
  CUFLASH_DEVICE bool is_first(const Step& step) const { return step.left == num_steps; }
  CUFLASH_DEVICE void advance(Step& step) const {
    step.m_tile.advance(queries);
    --step.left;
  }
  CUFLASH_DEVICE Source for_scores(const WideParams& params, const Step& step, bool of_dp) const {
    return {of_dp ? params.dout : params.q, step.m_tile.m_block * kTile, step.m_tile.head};
  }
  CUFLASH_DEVICE Source for_sums(const WideParams& params, const Step& step) const {
    return {kMakesDs ? params.q : params.dout, step.m_tile.m_block * kTile, step.m_tile.head};
  }
  CUFLASH_DEVICE const Real* stats_at(const Params& common, const Step& step) const {
    return stats_of(common, work.batch, step.m_tile.head) + step.m_tile.m_block * kTile * 2;
  }
  CUFLASH_DEVICE static int valid(const Step&) { return kTile; }
  CUFLASH_DEVICE bool is_masked(const Step& step) const { return step.m_tile.needs_mask(queries); }
  CUFLASH_DEVICE static int query_head(const Step& step) { return step.m_tile.head; }

  CUFLASH_DEVICE void load_own(const WideParams& params, const Shared& shared, const Barrier& full) const {
    full.arrive_expect(kBytesOwn + kBytesOwnV);
    load_rows<kOwnDim>(shared.own, params.k, full, first_key, head_kv, work.batch);
    if constexpr (kMakesDs) load_rows<kOwnDimV>(shared.own_v, params.v, full, first_key, head_kv, work.batch);
  }
  // Warpgroup 2. Clears rows past the last key.
  CUFLASH_DEVICE void clear_own(const Shared& shared, u32 thread) const {
    if (!kHidesLastKeys || key_stop - first_key >= kRows) return;
    const int valid = at_least_zero(key_stop - first_key);
    zero_last_of_64<kRows, kOwnDim>(shared.own, valid, thread);
    if constexpr (kMakesDs) zero_last_of_64<kRows, kOwnDimV>(shared.own_v, valid, thread);
    ptx::fence_async_proxy();
    ptx::sync_named(3, 128);
  }
  CUFLASH_DEVICE Weights weights(const Params& common, const Step& step) const {
    return {common, work.batch, step.m_tile.head, key_stop, own_diagonal};
  }
  CUFLASH_DEVICE Lane lane(const Params&, int row) const { return {0, first_key + row, 0, {}}; }
  CUFLASH_DEVICE void move(const Params& common, Lane& lane, const Step& step, u32 s_stats) const {
    lane.query = step.m_tile.m_block * kTile + fragment_column();
    lane.s_stats = s_stats + fragment_column() * 8;
    lane.row_sums = row_sums_of(common, work.batch, step.m_tile.head);
  }

  template <int n_tiles>
  CUFLASH_DEVICE void store(const Params& common, const float (&sum)[n_tiles][4], int row, int first_column) const {
    if (is_shared) {
      store_partial(common, sum, first_column);
      return;
    }
    const Tensor& result = kSum == WideSum::kDk ? common.dk : common.dv;
    const float factor = kSum == WideSum::kDk ? common.scale : kept_scale_of(common);
    Storage* g_head = (Storage*)head_of(result, work.batch, head_kv);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + row + 8 * half;
      Storage* g_row = key < common.seqlen_k ? g_head + key * result.row_stride : nullptr;
      store_wide_row<kSum == WideSum::kDk ? kHeadDim : kHeadDimV>(g_row, sum, half, factor, first_column);
    }
  }
  // Stores the block's partial sums for helpers/backward_postprocess.cu, which adds up those of all blocks.
  template <int n_tiles>
  CUFLASH_DEVICE void store_partial(const Params& common, const float (&sum)[n_tiles][4], int first_column) const {
    constexpr int kQuads = 2 * kBlockN;  // groups of four numbers in an n-tile, of all keys
    Real* partial = partials(common, ptx::thread_index() % 128, cluster_index());
    if constexpr (kSum == WideSum::kDv) partial += kBlockN * kDim;
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
      if (first_column + 8 * n < kSumColumns)
        *(Real4*)(partial + (first_column / 8 + n) * kQuads * 4) = {sum[n][0], sum[n][1], sum[n][2], sum[n][3]};
  }
};

// The rows are queries: a block makes dQ of its queries, from all keys that they attend to.
struct QueryRows : QueryTile, OverKeys<QueryRows> {
  static constexpr bool kClears = kHidesLastKeys;

  bool goes_to_diagonal;

  CUFLASH_DEVICE explicit QueryRows(const Params& common)
      : QueryTile(common, schedule_queries(common, cluster_index(), common.num_heads, kHasRightBound)),
        goes_to_diagonal(kGoesToDiagonal && 2 * work.block >= ceil_div(common.seqlen_q, kBlockM)) {}

  CUFLASH_DEVICE int entry() const { return work.batch; }
  CUFLASH_DEVICE int tile_at(int n_block) const { return keys.at(n_block); }
  CUFLASH_DEVICE bool ascends() const { return goes_to_diagonal; }
  CUFLASH_DEVICE bool is_masked(const KeySteps& step) const {
    return step.n_block < keys.full_start || step.n_block >= keys.full_stop;
  }
  CUFLASH_DEVICE int query_head(const KeySteps&) const { return work.head; }

  CUFLASH_DEVICE void load_own(const WideParams& params, const Shared& shared, const Barrier& full) const {
    full.arrive_expect(kBytesOwn + kBytesOwnV);
    load_rows<kOwnDim>(shared.own, params.q, full, first_row, work.head, work.batch);
    load_rows<kOwnDimV>(shared.own_v, params.dout, full, first_row, work.head, work.batch);
  }
  CUFLASH_DEVICE static void clear_own(const Shared&, u32) {}  // past the last query TMA brings zeros
  CUFLASH_DEVICE Weights weights(const Params& common, const KeySteps&) const {
    return {common, work.batch, work.head, key_stop};
  }
  CUFLASH_DEVICE Lane lane(const Params& common, int row) const {
    Lane lane = {first_row + row, 0, 0, {}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Real* stats = row_stats(common, work.batch, work.head, lane.query + 8 * half);
      lane.stats[0][half] = stats[0], lane.stats[1][half] = stats[kDelta];
    }
    lane.row_sums = row_sums_of(common, work.batch, work.head);
    lane.large = is_of_large(lane.stats[0][0]);
    return lane;
  }
  CUFLASH_DEVICE void move(const Params&, Lane& lane, const KeySteps& step, u32) const {
    lane.key = tile_at(step.n_block) * kTile + fragment_column();
  }

  template <int n_tiles>
  CUFLASH_DEVICE void store(const Params& common, const float (&sum)[n_tiles][4], int row, int first_column) const {
    const auto store_to = [&](auto* g_head) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = first_row + row + 8 * half;
        store_wide_row<kHeadDim>(query < common.seqlen_q ? g_head + query * common.dq.row_stride : nullptr, sum, half,
                                 common.scale, first_column);
      }
    };
    if constexpr (CUFLASH_DQ_WIDE)
      store_to(row_values_of(common.dq, work.batch, work.head));
    else
      store_to((Storage*)queries_of(common.dq, work.batch, work.head));
  }
};

// A cluster has one piece of work.
struct OneTile {
  bool left = true;

  CUFLASH_DEVICE explicit OneTile(const Params&) {}
  CUFLASH_DEVICE bool more() const { return left; }
  CUFLASH_DEVICE void advance() { left = false; }
  CUFLASH_DEVICE auto work(const Params& common) const {
    return typename Either<kRowsAreKeys, KeyRows, QueryRows>::Type(common);
  }
};

CUFLASH_DEVICE void backward(const WideParams& params) {
  if (is_chosen(params.common)) take_all<OneTile, Differentiator>(params);
}

CUFLASH_DEFINE_CLUSTER_KERNEL(CUFLASH_KERNEL_NAME, WideParams, kNumThreads, kClusterBlocks, backward)
