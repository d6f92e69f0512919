// dk of long heads without values (sm80/backward_chunked.cuh): a block owns kBlockN keys of one key/value head and
// iterates over the query heads that share them, and for each over the tiles of queries. Rows of S and dS are keys.
#define CUFLASH_OWNS_KEYS 1
#include "common/schedule/query_iterator.cuh"
#include "sm80/backward_chunked.cuh"

using ScoreTile = Real[kMTiles][kNTiles][4];

// Replaces products by dS = P * dlse, times the derivatives of the scores by the scaled products.
CUFLASH_DEVICE void make_ds(const Params& params, const ChunkedGradient& block, Entry batch, int key_stop,
                            const QueryTileIterator& at, const QueryTiles& tiles, int first_key, ScoreTile& s) {
  const Weights weights(params, batch, at.head, key_stop);
  const bool masked = at.needs_mask(tiles);
  const int lane_key = first_key + block.warp_row + fragment_row();
  const int lane_query = at.m_block * kBlockM + fragment_column();
#pragma unroll
  for (int n = 0; n < kNTiles; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = lane_query + column_of<kWarpsD>(block.warp_d, n) + j;
      const RowStats own(params, batch, at.head, row);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Real& x = s[m][n][2 * half + j];
          Real derivative;
          const Real p = weights.of(x, row, lane_key + 16 * m + 8 * half, masked, own, derivative);
          x = gradient_of(p, 0, true, 1, own.delta) * derivative;
        }
    }
}

CUFLASH_DEVICE void store_dk(const Params& params, ChunkedGradient& block, const Slice& slice, const Work& work) {
  const int first_key = work.block * kBlockN, seqlen_k = seqlen_k_of(params, work.batch);
  const Real scale = scale_of(params);
  if constexpr (CUFLASH_DK_WIDE)
    block.store<true>(slice, per_key_values_of(params.dk, work.batch, work.head), params.dk.row_stride, first_key,
                      seqlen_k, scale);
  else
    block.store<false>(slice, (Storage*)keys_of(params, params.dk, work.batch, work.head), params.dk.row_stride,
                       first_key, seqlen_k, scale);
}

CUFLASH_DEVICE void backward_chunked(const Params& params) {
  if (!is_chosen(params)) return;
  const Slice slice(ptx::block_index());
  const Work work = schedule_keys(params, slice.unit, params.num_heads_kv, params.head_section, false);
  if (!has_keys(params, work)) return;
  const int head_kv = work.head, group = params.num_heads / params.num_heads_kv;
  const Entry batch = work.batch;
  const int first_key = work.block * kBlockN, seqlen_q = seqlen_q_of(params, batch);
  const int key_stop = key_stop_of(params, batch);
  QueryTiles tiles;
  const int num_tiles = find_queries(params, work, head_kv * group, (head_kv + 1) * group, key_stop, tiles);
  const Storage* g_k = keys_of(params, params.k, batch, head_kv);

  ChunkedGradient block;
  QueryTileIterator current = QueryTileIterator::first(tiles, head_kv * group);
  QueryTileIterator next = current;  // whose chunks are being loaded
  const auto load = [&](int step, int stage) {
    const u32 s_own = block.s_ring + stage * kBytesStage;
    const int i = step % slice.num_steps();
    if (i == 0 && step > 0) next.advance(tiles);
    if (i < kChunks) load_chunk<kBlockN>(s_own, g_k, params.k.row_stride, first_key, key_stop, i);
    load_chunk<kBlockM>(s_own + kBytesOwn, queries_of(params.q, batch, next.head), params.q.row_stride,
                        next.m_block * kBlockM, seqlen_q, i < kChunks ? i : slice.first_chunk + i - kChunks);
  };
  ChunkRing ring(load, num_tiles * slice.num_steps());

#pragma unroll 1
  for (int tile = 0; tile < num_tiles; ++tile) {
    ScoreTile s;
    block.multiply_rows(ring, s);
    make_ds(params, block, batch, key_stop, current, tiles, first_key, s);
    block.add_products(ring, slice, s);
    current.advance(tiles);
  }
  ring.finish();
  store_dk(params, block, slice, work);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_chunked)
