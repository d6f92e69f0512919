// Decode of wide heads on compute capability 9.0.
//
// All queries of the query heads that share a key/value head are rows of one product, up to 64 a block, as in
// sm90/decode.cu; sm90/wide_ring.cuh describes the roles of the warpgroups. The keys of all heads are cut into equal
// splits, one for each cluster of blocks; helpers/split_combine.cu combines the results where clusters share a head.
#include "common/schedule/head_work.cuh"
#include "common/schedule/key_splits.cuh"
#include "sm90/wide_sums.cuh"
#include "sm90/wide_weights.cuh"

// A head, and the rows of it that this block has.
struct WideHead : HeadWork, OverKeys<WideHead> {
  static constexpr bool kClears = true;  // tensor maps may reach over more keys than there are

  const Params& common;
  const HeadScheduler& scheduler;
  int first_own, own_rows;

  CUFLASH_DEVICE WideHead(const Params& common_, const HeadScheduler& scheduler_)
      : HeadWork(common_, scheduler_),
        common(common_),
        scheduler(scheduler_),
        first_own(ptx::cluster_rank<kClusterBlocks>() * kRows),
        own_rows(min_of(at_least_zero(rows - first_own), kRows)) {}

  CUFLASH_DEVICE int entry() const { return batch; }
  CUFLASH_DEVICE int tile_at(int n_block) const { return n_block; }
  CUFLASH_DEVICE bool is_masked(int n_block) const { return n_block < keys.full_start || n_block >= keys.full_stop; }

  // A box of q has whole heads, as many as a block has rows for.
  CUFLASH_DEVICE void load_own(const WideParams& params, const Shared& shared, const Barrier& full) const {
    const int heads = min_of(group, kRows / common.seqlen_q);
    full.arrive_expect(kChunksOfS * heads * common.seqlen_q * kLineBytes);
    load_chunks<kRows, kDim>(shared.own, params.q, full, 0, first_head() + first_own / common.seqlen_q, batch);
  }
  // Warpgroup 2. Rows that stand for no query are cleared: they must not decide when sums are rescaled.
  CUFLASH_DEVICE void clear_rows(u32 tile, u32 thread) const {
    if (own_rows == kRows) return;
    zero_last_of_64<kRows, kDim>(tile, own_rows, thread);
    ptx::fence_async_proxy();
    ptx::sync_named(3, 128);
  }

  // The clusters that share the head, the index of this one among them, and whether it is the only one.
  CUFLASH_DEVICE Partials partials() const { return {common, scheduler.splits, scheduler.head}; }
  CUFLASH_DEVICE static int index_in(const Partials& partials) {
    return (int)(ptx::block_index() / kClusterBlocks - partials.first_block);
  }
  CUFLASH_DEVICE static bool is_alone(const Partials& partials) { return !kSplitsKeys || partials.count == 1; }

  // The rows of a lane of warpgroup 2: `row` and `row` + 8 of the head.
  struct Rows {
    const WideHead& head;
    const int row[2];
    const LaneRows lane;

    CUFLASH_DEVICE float exponent_scale() const { return lane.score[0].exponent_scale(); }
    CUFLASH_DEVICE void to_scores(float (&s)[1][kNTiles][4], int lane_key, bool masked) const {
      lane.score[0].cap(s);
      ::to_scores<true>(lane, lane, s, [](int, int i) { return i / 2; }, lane_key, masked);
    }
    CUFLASH_DEVICE void drop(float (&)[kNTiles][4], int) const {}
    CUFLASH_DEVICE void finish(OnlineSoftmax<1>& softmax, float (&factor)[2], int pass) const {
      const Params& common = head.common;
      const Partials partials = head.partials();
      float ones[1][1][4] = {{{1.0f, 1.0f, 1.0f, 1.0f}}};
      softmax.finish();
      if (kHasSinks && is_alone(partials))
        softmax.add_sinks(ones, [&](int, int half) {
          return row[half] < head.rows ? to_row_max(sink_of(common, LaneRows::head_of(common, head, row[half]))) : 0.0f;
        });
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[half] = ones[0][0][2 * half] * softmax.inverse_sum(0, half);
        if (pass > 0 || fragment_column() != 0 || row[half] >= head.rows) continue;
        if (is_alone(partials))
          store_lse(lse_of(common, head.batch, LaneRows::head_of(common, head, row[half]), lane.query[half]), softmax,
                    0, half);
        else
          partials.store_sum(index_in(partials), row[half], softmax, half);
      }
    }
  };
  CUFLASH_DEVICE Rows rows_of_lane(const Params&, int row) const {
    const int both[2] = {first_own + row, first_own + row + 8};
    return {*this, {both[0], both[1]}, LaneRows(common, *this, both)};
  }

  template <int n_tiles>
  CUFLASH_DEVICE void store(const Params&, const float (&o)[n_tiles][4], int row, int first_column) const {
    const Partials partials = this->partials();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = first_own + row + 8 * half;
      if (is_alone(partials)) {
        Out* g_row = out_of(common, batch, LaneRows::head_of(common, *this, own), own % common.seqlen_q);
        store_wide_row<kHeadDimV>(own < rows ? g_row : nullptr, o, half, 1.0f, first_column);
      } else if (own < rows) {
        float* g_row = partials.out(index_in(partials), own);
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
          const int column = first_column + 8 * n + fragment_column();
          if (column < kDimV) ptx::store_for_blocks_x2(g_row + column, {o[n][2 * half], o[n][2 * half + 1]});
        }
      }
    }
  }
};

struct WideHeadScheduler : HeadScheduler {
  CUFLASH_DEVICE explicit WideHeadScheduler(const Params& common)
      : HeadScheduler(common, ptx::block_index() / kClusterBlocks) {}
  CUFLASH_DEVICE WideHead work(const Params& common) const { return {common, *this}; }
};

CUFLASH_DEVICE void decode(const WideParams& params) { take_all<WideHeadScheduler, SoftmaxRole>(params); }

CUFLASH_DEFINE_CLUSTER_KERNEL(CUFLASH_KERNEL_NAME, WideParams, kNumThreads, kClusterBlocks, decode)
