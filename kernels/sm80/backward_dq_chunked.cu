// dq of long heads without values (sm80/backward_chunked.cuh): a block owns kBlockM queries of one head and iterates
// over the tiles of keys.
#define CUFLASH_OWNS_KEYS 0
#include "sm80/backward_chunked.cuh"

// Replaces products by dS = P * dlse, times the derivatives of the scores by the scaled products.
CUFLASH_DEVICE void make_ds(const Weights& weights, const ChunkedGradient& block, const RowStats (&stats)[kMTiles][2],
                            int lane_row, int lane_key, bool masked, Real (&s)[kMTiles][kNTiles][4]) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const RowStats& own = stats[m][i / 2];
        Real derivative;
        const Real p = weights.of(s[m][n][i], lane_row + 16 * m + i / 2 * 8,
                                  lane_key + column_of<kWarpsD>(block.warp_d, n) + i % 2, masked, own, derivative);
        s[m][n][i] = gradient_of(p, 0, true, 1, own.delta) * derivative;
      }
}

CUFLASH_DEVICE void store_dq(const Params& params, ChunkedGradient& block, const Slice& slice, const Work& work) {
  const int first_row = work.block * kBlockM, seqlen_q = seqlen_q_of(params, work.batch);
  const Real scale = scale_of(params);
  if constexpr (CUFLASH_DQ_WIDE)
    block.store<true>(slice, row_values_of(params.dq, work.batch, work.head), params.dq.row_stride, first_row, seqlen_q,
                      scale);
  else
    block.store<false>(slice, (Storage*)queries_of(params.dq, work.batch, work.head), params.dq.row_stride, first_row,
                       seqlen_q, scale);
}

CUFLASH_DEVICE void backward_dq_chunked(const Params& params) {
  if (!is_chosen(params)) return;
  const Slice slice(ptx::block_index());
  const Work work = schedule_queries(params, slice.unit, params.num_heads, kHasRightBound);
  if (!has_queries(params, work)) return;
  const int head = work.head;
  const Entry batch = work.batch;
  const QueryTile tile(params, work);
  const KeyTiles& tiles = tile.keys;
  const int first_row = tile.first_row, seqlen_q = seqlen_q_of(params, batch);
  const Storage* g_q = queries_of(params.q, batch, head);
  const Storage* g_k = keys_of(params, params.k, batch, tile.head_kv);

  ChunkedGradient block;
  const auto load = [&](int step, int stage) {
    const u32 s_own = block.s_ring + stage * kBytesStage;
    const int i = step % slice.num_steps(), n_block = tiles.at(tiles.stop - 1 - step / slice.num_steps());
    if (i < kChunks) load_chunk<kBlockM>(s_own, g_q, params.q.row_stride, first_row, seqlen_q, i);
    load_chunk<kBlockN>(s_own + kBytesOwn, g_k, params.k.row_stride, n_block * kBlockN, tile.key_stop,
                        i < kChunks ? i : slice.first_chunk + i - kChunks);
  };
  ChunkRing ring(load, (tiles.stop - tiles.start) * slice.num_steps());

  const Weights weights(params, batch, head, tile.key_stop);
  const int lane_row = first_row + block.warp_row + fragment_row();
  RowStats stats[kMTiles][2];
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) stats[m][half] = RowStats(params, batch, head, lane_row + 16 * m + 8 * half);

#pragma unroll 1
  for (int n_block = tiles.stop - 1; n_block >= tiles.start; --n_block) {
    Real s[kMTiles][kNTiles][4];
    block.multiply_rows(ring, s);
    make_ds(weights, block, stats, lane_row, tiles.at(n_block) * kBlockN + fragment_column(),
            n_block >= tiles.full_stop || n_block < tiles.full_start, s);
    block.add_products(ring, slice, s);
  }
  ring.finish();
  store_dq(params, block, slice, work);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_dq_chunked)
