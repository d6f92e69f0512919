// dS of a chunk of keys, for the backward pass of long heads without values (sm90/ds_chunk.cuh). A block has a tile of
// queries, and goes through kTilesOfBlock tiles of keys of the chunk. Neighbours in launch order have the same keys.
#include "common/score/dropout.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/backward.cuh"
#include "sm90/ds_chunk.cuh"

constexpr int kTilesOfBlock = CUFLASH_KEY_TILES;
// Tiles of keys of dK that straddle tiles of dS read all of them, if queries attend to one.
constexpr int kMargin = kBlockN % kRows == 0 ? 0 : ceil_div(kRows, kBlockN);

// The queries of a block, and its tiles of keys, by their index in the whole array.
struct DsTile : QueryTile {
  int first_key, start, stop;  // the first key of the chunk; the range of tiles

  CUFLASH_DEVICE DsTile(const Params& params, int chunk)
      : DsTile(params, chunk, ptx::block_index(), num_query_tiles_of(params),
               ceil_div(min_of(params.whole_tiles, ceil_div(params.seqlen_k, kBlockN)), kTilesOfBlock)) {}

 private:
  CUFLASH_DEVICE DsTile(const Params& params, int chunk, u32 unit, u32 num_rows, u32 num_groups)
      : QueryTile(params, work_of(params, unit % num_rows, unit / num_rows / num_groups)),
        first_key(chunk * chunk_keys_of(params)) {
    const int first = chunk * params.whole_tiles, own = first + (int)(unit / num_rows % num_groups) * kTilesOfBlock;
    const int margin = keys.start < keys.stop ? kMargin : 0;
    const int last = min_of(first + params.whole_tiles, ceil_div(params.seqlen_k, kBlockN));
    start = max_of(own, keys.start - margin);
    stop = min_of(min_of(own + kTilesOfBlock, last), keys.stop + margin);
  }
  CUFLASH_DEVICE static Work work_of(const Params& params, int block, u32 head) {
    return {block, (int)(head % params.num_heads), (int)(head / params.num_heads)};
  }
};

CUFLASH_DEVICE void produce(const GradientParams& params, const Shared& shared, const DsTile& tile) {
  const int batch = entry_of(tile.work.batch);
  Position<kNumStages> at;
#pragma unroll 1
  for (int n_block = tile.start; n_block < tile.stop; ++n_block)
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk, at.advance()) {
      const Barrier full = shared.ring.full(at);
      shared.ring.empty(at).wait(at.parity ^ 1);
      full.arrive_expect(kBytesStage);
      load_boxes<kConsumers, false>(shared.left(at), params.q, full, chunk * kChunk, tile.first_row, tile.work.head,
                                    batch);
      load_boxes<kBlockN / 64, false>(shared.right(at), params.k, full, chunk * kChunk, n_block * kBlockN, tile.head_kv,
                                      batch);
    }
}

CUFLASH_DEVICE void consume(const GradientParams& params, const Shared& shared, const DsTile& tile, u32 index) {
  const Params& common = params.common;
  const int head = tile.work.head;
  const Entry batch = tile.work.batch;
  const int lane_row = tile.first_row + index * 64 + ptx::thread_index() % 128 / 32 * 16 + fragment_row();
  const Weights weights(common, batch, head, tile.key_stop);
  const RowStats stats[2] = {RowStats(common, batch, head, lane_row), RowStats(common, batch, head, lane_row + 8)};
  Position<kNumStages> at;
#pragma unroll 1
  for (int n_block = tile.start; n_block < tile.stop; ++n_block) {
    float s[kNTiles][4];
    multiply_rows(shared, at, index, s);
    const bool masked = n_block < tile.keys.full_start || n_block >= tile.keys.full_stop;
    const int lane_key = n_block * kBlockN + fragment_column();
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const RowStats& own = stats[i / 2];
        Real derivative;
        const Real p = weights.of(s[n][i], lane_row + i / 2 * 8, lane_key + 8 * n + i % 2, masked, own, derivative);
        s[n][i] = gradient_of(p, 0, true, 1, own.delta) * derivative;
      }
    store_results(params.ds, shared, index, s, 1, n_block * kBlockN - tile.first_key, tile.first_row, head,
                  entry_of(batch));
  }
  if (ptx::thread_index() % 128 == 0) ptx::bulk_wait<0>();
}

CUFLASH_DEVICE void backward_chunked_ds(const GradientParams& params) {
  const Shared shared;
  shared.make_barriers();
  const Arrivals ended = launches_of_products(params.common);
  if (ptx::thread_index() == 0) ended.prepare();
  ptx::sync_block();
  const DsTile tile(params.common, count_of(ended));
  const u32 warp = ptx::uniform(warp_index());
  if (warp < 4 * kConsumers) {
    ptx::increase_registers<kConsumerRegisters>();
    consume(params, shared, tile, warp / 4);
  } else {
    ptx::decrease_registers<kProducerRegisters>();
    if (warp == 4 * kConsumers && ptx::elect_lane()) produce(params, shared, tile);
  }
  if (ptx::block_index() == 0 && ptx::thread_index() == 0) {
    const Arrivals own = launches_of_ds(params.common);
    own.prepare();
    own.arrive();
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, GradientParams, kNumThreads, 1, backward_chunked_ds)
