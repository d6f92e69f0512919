// lse of long heads without values, in half precision, with wgmma and TMA (compute capability 9.0): the GEMM of the
// scores, whose epilogue is the softmax.
//
//   S = Q K^T        l = rowsum(exp(S - m))        lse = m + log l
//
// sm90/chunked_ring.cuh has the roles and barriers. A cluster has a tile of queries and goes through its tiles of keys.
// Where query tiles are few, splits of the keys have clusters of their own (kSplitsKeys). The last of them to finish
// combines their row maxima and row sums. Neighbours in launch order have the same split of different query tiles, so
// that they read the same keys at about the same time.
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/key_splits.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/softmax.cuh"
#include "common/softmax/store_lse.cuh"
#include "sm90/chunked_ring.cuh"

constexpr bool kSplitsKeys = CUFLASH_SPLITS_KEYS;
constexpr bool kBiasOfKeys = CUFLASH_BIAS_OF_KEYS;  // the bias differs from key to key only
static_assert(!kIsPacked && kPageSize == 0, "tiles are boxes of an array with a head for each batch entry");

struct ChunkedParams {
  Params common;
  TensorMap q, k;
};
static_assert(sizeof(ChunkedParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

// The queries of a block, and its split of the tiles of keys that they attend to.
struct ChunkedTile : QueryTile {
  u32 index;                                // among the query tiles of all heads
  int split, num_splits, own, start, stop;  // the first query of the block is the tile's row `own`

  CUFLASH_DEVICE explicit ChunkedTile(const Params& params)
      : ChunkedTile(params, ptx::block_index() / kRowBlocks,
                    ceil_div(params.seqlen_q, kBlockM) * heads_in_all(params, params.num_heads)) {}

  CUFLASH_DEVICE Partials partials(const Params& params) const {
    return {num_splits, kBlockM, (Real*)params.partial_sums + (i64)index * num_splits * kBlockM * 2};
  }
  CUFLASH_DEVICE Arrivals arrivals(const Params& params) const { return {params, index, (u32)num_splits}; }
  CUFLASH_DEVICE bool is_masked(int n_block) const { return n_block < keys.full_start || n_block >= keys.full_stop; }

 private:
  CUFLASH_DEVICE ChunkedTile(const Params& params, u32 unit, u32 num_tiles)
      : QueryTile(params, schedule_queries(params, unit % num_tiles, params.num_heads, kHasRightBound)),
        index(unit % num_tiles),
        split(unit / num_tiles),
        num_splits(ptx::num_blocks() / (num_tiles * kRowBlocks)),
        own(ptx::cluster_rank<kRowBlocks>() * kRows) {
    const auto cut = [&](int i) { return keys.start + (int)((i64)(keys.stop - keys.start) * i / num_splits); };
    start = cut(split), stop = cut(split + 1);
  }
};

// The producer: one thread.
CUFLASH_DEVICE void produce(const ChunkedParams& params, const Shared& shared, const ChunkedTile& tile) {
  const int batch = entry_of(tile.work.batch);
  Position<kNumStages> at;
#pragma unroll 1
  for (int n_block = tile.stop - 1; n_block >= tile.start; --n_block)
    load_rows(shared, at, {params.q, tile.first_row + tile.own, tile.work.head, batch},
              {params.k, tile.keys.at(n_block) * kBlockN, tile.head_kv, batch});
}

// The consumers of the first block of a cluster, when all of its blocks have stored their statistics. Combines those of
// the splits of a query tile, if this is the last one to finish.
CUFLASH_DEVICE void combine_splits(const Params& params, const ChunkedTile& tile) {
  const bool arrives = ptx::thread_index() == 0;
  if (!ptx::sync_named_any(1, 128 * kConsumers, arrives && tile.arrivals(params).is_last_arrival())) return;
  const Partials partials = tile.partials(params);
  const Real sink = kHasSinks ? to_row_max(sink_of(params, tile.work.head)) : 0;
  const auto lse = row_values_of(params.lse, tile.work.batch, tile.work.head);
#pragma unroll 1
  for (int row = warp_index(); row < min_of(kBlockM, params.seqlen_q - tile.first_row); row += 4 * kConsumers) {
    const PartialSum total = partials.combined_sum(partials.sum_of_any(lane_index(), row), row, sink);
    if (lane_index() == 0) store_lse(lse + (tile.first_row + row) * params.lse.row_stride, total.row_max, total.sum);
  }
}

// Turns products into scores, as `to_scores` does, where a bias differs from key to key only: it is loaded once for
// both rows of a lane.
CUFLASH_DEVICE void add_key_bias(const Score& score, const Mask& mask, float (&s)[kNTiles][4], int lane_row,
                                 int lane_key, bool masked) {
#pragma unroll
  for (int n = 0; n < kNTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int key = lane_key + 8 * n + j;
      const float bias = key < score.key_stop ? score.bias_of_key(key) : 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane_row + 8 * half;
        float& x = s[n][2 * half + j];
        x = Score::with_terms<true>(score.capped(x), score.factor, score.slope,
                                    kHasAlibi ? score.distance(row, key) : 0, bias);
        if (masked && !mask.visible(row, key)) x = -ptx::infinity();
      }
    }
}

// A consumer warpgroup, number `index`, of 64 queries.
CUFLASH_DEVICE void consume(const Params& params, const Shared& shared, const ChunkedTile& tile, u32 index) {
  if (kSplitsKeys && ptx::thread_index() == 0) tile.arrivals(params).prepare();
  const int row = tile.own + index * 64 + ptx::thread_index() % 128 / 32 * 16 + fragment_row();
  const int lane_row = tile.first_row + row;
  const Score score(params, tile.work.batch, tile.work.head, tile.key_stop);
  const Mask mask(params, tile.work.batch, tile.work.head, tile.key_stop);
  const float exponent_scale = score.exponent_scale();
  OnlineSoftmax<1> softmax;
  float no_output[1][1][4] = {};
  Position<kNumStages> at;
#pragma unroll 1
  for (int n_block = tile.stop - 1; n_block >= tile.start; --n_block) {
    float s[1][kNTiles][4];
    multiply_rows(shared, at, index, s[0]);
    const int lane_key = tile.keys.at(n_block) * kBlockN + fragment_column();
    if constexpr (kBiasOfKeys)
      add_key_bias(score, mask, s[0], lane_row, lane_key, tile.is_masked(n_block));
    else
      to_scores(score, mask, s, [&](int, int i) { return lane_row + i / 2 * 8; }, lane_key, tile.is_masked(n_block));
    softmax.update(s, no_output, exponent_scale);
  }
  softmax.finish();
  if constexpr (!kSplitsKeys && kHasSinks)
    softmax.add_sinks(no_output, [&](int, int) { return to_row_max(sink_of(params, tile.work.head)); });
  Real* lse = row_values_of(params.lse, tile.work.batch, tile.work.head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (fragment_column() != 0 || lane_row + 8 * half >= params.seqlen_q) continue;
    if constexpr (kSplitsKeys)
      tile.partials(params).store_sum(tile.split, row + 8 * half, softmax, half);
    else
      store_lse(lse + (lane_row + 8 * half) * params.lse.row_stride, softmax, 0, half);
  }
}

CUFLASH_DEVICE void forward_chunked(const ChunkedParams& params) {
  if (!is_chosen(params.common)) return;
  const Shared shared;
  shared.make_barriers();
  const ChunkedTile tile(params.common);
  const bool counts = kSplitsKeys && ptx::cluster_rank<kRowBlocks>() == 0;
  if (counts && ptx::thread_index() == 0) tile.arrivals(params.common).prepare();
  const u32 warp = ptx::uniform(warp_index());
  if (warp < 4 * kConsumers) {
    ptx::increase_registers<kConsumerRegisters>();
    consume(params.common, shared, tile, warp / 4);
  } else {
    ptx::decrease_registers<kProducerRegisters>();
    if (warp == 4 * kConsumers && ptx::elect_lane()) produce(params, shared, tile);
  }
  // No block leaves while others may still arrive at its barriers, and all have stored their statistics.
  if constexpr (kSplitsKeys || kRowBlocks > 1) ptx::sync_cluster<kRowBlocks>();
  if (counts && warp < 4 * kConsumers) combine_splits(params.common, tile);
}

CUFLASH_DEFINE_CLUSTER_KERNEL(CUFLASH_KERNEL_NAME, ChunkedParams, kNumThreads, kRowBlocks, forward_chunked)
