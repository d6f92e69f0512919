// Forward pass in half precision with wide heads on compute capability 9.0 (Hopper), with wgmma and TMA.
//
//   S = Q K^T        P = exp(S - m)        l = rowsum(P)        O = P V / l        lse = m + log l
//
// sm90/wide_ring.cuh describes the roles of the warpgroups. The kernel is persistent: a block takes one tile of queries
// after another. The blocks of a cluster take the same tile, 64 rows each. More than 512 columns of the output take
// several passes over the keys.
#include "common/score/dropout.cuh"
#include "common/schedule/key_splits.cuh"
#include "common/io/operands.cuh"
#include "common/schedule/schedule.cuh"
#include "common/softmax/store_lse.cuh"
#include "sm90/wide_sums.cuh"
#include "sm90/wide_weights.cuh"

// The rows of a lane of warpgroup 2: `row` and `row` + 8.
struct Rows {
  const Params& common;
  const Work& work;
  const int row;
  const Score score;
  const Mask mask;
  const Dropout dropout;

  CUFLASH_DEVICE float exponent_scale() const { return score.exponent_scale(); }
  CUFLASH_DEVICE void to_scores(float (&s)[1][kNTiles][4], int lane_key, bool masked) const {
    score.cap(s);
    ::to_scores<true>(score, mask, s, [&](int, int i) { return row + i / 2 * 8; }, lane_key, masked);
  }
  CUFLASH_DEVICE void drop(float (&weights)[kNTiles][4], int lane_key) const {
    if constexpr (kHasDropout) dropout.drop(weights, row, lane_key);
  }
  // The last factors of the rows of O; lse is stored with the first pass.
  CUFLASH_DEVICE void finish(OnlineSoftmax<1>& softmax, float (&factor)[2], int pass) const {
    float ones[1][1][4] = {{{1.0f, 1.0f, 1.0f, 1.0f}}};
    softmax.finish();
    if constexpr (kHasSinks) softmax.add_sinks(ones, [&](int, int) { return to_row_max(sink_of(common, work.head)); });
    float* g_lse = row_values_of(common.lse, work.batch, work.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + 8 * half;
      factor[half] = ones[0][0][2 * half] * softmax.inverse_sum(0, half) * kept_scale_of(common);
      if (pass == 0 && fragment_column() == 0 && own < common.seqlen_q) {
        store_lse(g_lse + own * common.lse.row_stride, softmax, 0, half);
        store_row_reductions(common, work.batch, work.head, own, softmax, 0, half);
      }
    }
  }
};

// A tile of queries, and which rows of it this block has.
struct WideTile : QueryTile, OverKeys<WideTile> {
  static constexpr bool kClears = kHidesLastKeys;

  int first_own, batch;
  TileRange own;  // within `keys`

  CUFLASH_DEVICE WideTile(const Params& common, const Work& work) : QueryTile(common, work) {
    const int rank = ptx::cluster_rank<kClusterBlocks>();
    first_own = first_row + rank * kRows;
    batch = work.batch;
    own = keys_of(common, rank);
  }

  CUFLASH_DEVICE int entry() const { return batch; }
  CUFLASH_DEVICE int tile_at(int n_block) const { return keys.at(n_block); }
  CUFLASH_DEVICE bool is_masked(int n_block) const { return n_block < own.full_start || n_block >= own.full_stop; }

  CUFLASH_DEVICE void load_own(const WideParams& params, const Shared& shared, const Barrier& full) const {
    full.arrive_expect(kBytesOwn);
    load_chunks<kRows, kDim>(shared.own, params.q, full, first_own, work.head, work.batch);
  }
  CUFLASH_DEVICE void clear_rows(u32, u32) const {}  // past the last query TMA fills in zeros
  CUFLASH_DEVICE Rows rows_of_lane(const Params& common, int row) const {
    return {common,
            work,
            first_own + row,
            Score(common, work.batch, work.head, key_stop),
            Mask(common, work.batch, work.head, key_stop),
            Dropout(common, work.batch, work.head)};
  }
  template <int n_tiles>
  CUFLASH_DEVICE void store(const Params& common, const float (&o)[n_tiles][4], int row, int first_column) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own_row = first_own + row + 8 * half;
      Out* g_row = own_row < common.seqlen_q ? out_of(common, work.batch, work.head, own_row) : nullptr;
      if constexpr (kStoresByRows) {
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
          if (g_row) store_pair(g_row, first_column + 8 * n + fragment_column(), o[n][2 * half], o[n][2 * half + 1]);
      } else {
        store_wide_row<kHeadDimV>(g_row, o, half, 1.0f, first_column);
      }
    }
  }
};

struct WideTileScheduler : TileSchedulerOf<kClusterBlocks> {
  using TileSchedulerOf<kClusterBlocks>::TileSchedulerOf;
  CUFLASH_DEVICE WideTile work(const Params& common) const {
    return WideTile(common, TileSchedulerOf<kClusterBlocks>::work(common));
  }
};

CUFLASH_DEVICE void forward(const WideParams& params) { take_all<WideTileScheduler, SoftmaxRole>(params); }

CUFLASH_DEFINE_CLUSTER_KERNEL(CUFLASH_KERNEL_NAME, WideParams, kNumThreads, kClusterBlocks, forward)
