// dK of a chunk of keys, and what the chunk adds to dQ, for the backward pass of long heads without values
// (sm90/ds_chunk.cuh). A block has a tile of kRows keys, or of as many queries, and kBlockN columns of their gradient.
// The columns of a tile are neighbours in launch order, so that they read the same dS.
//
// dQ of all chunks but the last is summed in float32, in the order of the fragments: a block adds what is there.
#include "common/softmax/backward.cuh"
#include "sm90/ds_chunk.cuh"

constexpr int kColumnTiles = ceil_div(kHeadDim, kBlockN);

// The tile of a block, and the chunks of 64 rows of the right operand that it multiplies.
struct ProductTile {
  int chunk, first_key;        // of the keys; the first key of the chunk
  bool of_keys;                // dK, else dQ
  int row, column;             // the first of the gradient
  int head, num_heads, batch;  // the first head of the right operand, and how many are summed up
  int first, num;              // the first row of the right operand, and how many chunks of each head
  u32 index;                   // among the tiles of dQ

  CUFLASH_DEVICE ProductTile(const Params& params, int chunk_)
      : chunk(chunk_), first_key(chunk * chunk_keys_of(params)) {
    const int keys_of_chunk = min_of(chunk_keys_of(params), params.seqlen_k);
    const u32 key_tiles_of_head = ceil_div(keys_of_chunk, kRows) * kColumnTiles;
    const u32 num_of_keys = kMakesDk ? key_tiles_of_head * params.num_heads_kv * params.batch : 0;
    u32 unit = ptx::block_index();
    of_keys = unit < num_of_keys;
    index = of_keys ? 0 : unit - num_of_keys;
    const u32 own = of_keys ? unit : index;
    const u32 tiles = of_keys ? key_tiles_of_head : num_query_tiles_of(params) * kColumnTiles;
    const u32 heads = of_keys ? params.num_heads_kv : params.num_heads;
    column = own % kColumnTiles * kBlockN;
    row = own % tiles / kColumnTiles * kRows + (of_keys ? first_key : 0);
    head = own / tiles % heads;
    batch = own / tiles / heads;
    num_heads = 1;
    if (of_keys) {
      num_heads = params.num_heads / params.num_heads_kv;
      head *= num_heads;
      const int key_stop = key_stop_of(params, batch), last = min_of(row + kRows, params.seqlen_k) - 1;
      first = num = 0;
      if (row < params.seqlen_k) {
        const TileRange range = query_tiles(params, batch, row, last, key_stop);
        first = range.start * kBlockM;
        num = (range.stop - range.start) * (kBlockM / 64);
      }
    } else {
      const QueryTile tile(params, Work{row / kBlockM, head, batch});
      first = max_of(tile.keys.start * kBlockN, first_key);
      num = at_least_zero(min_of(tile.keys.stop * kBlockN, first_key + chunk_keys_of(params)) - first) / 64;
    }
  }
  CUFLASH_DEVICE int num_chunks() const { return num_heads * num; }
};

CUFLASH_DEVICE void produce(const GradientParams& params, const Shared& shared, const ProductTile& tile) {
  const int batch = entry_of(tile.batch), group = params.common.num_heads / params.common.num_heads_kv;
  Position<kNumStages> at;
#pragma unroll 1
  for (int head = tile.head; head < tile.head + tile.num_heads; ++head)
#pragma unroll 1
    for (int i = 0; i < tile.num; ++i, at.advance()) {
      const Barrier full = shared.ring.full(at);
      const int row = tile.first + i * 64;
      shared.ring.empty(at).wait(at.parity ^ 1);
      full.arrive_expect(kBytesStage);
      if (tile.of_keys) {
        load_boxes<kConsumers, true>(shared.left(at), params.ds, full, tile.row - tile.first_key, row, head, batch);
        load_boxes<kBlockN / 64, true>(shared.right(at), params.q, full, tile.column, row, head, batch);
      } else {
        load_boxes<kConsumers, false>(shared.left(at), params.ds, full, row - tile.first_key, tile.row, head, batch);
        load_boxes<kBlockN / 64, true>(shared.right(at), params.k, full, tile.column, row, head / group, batch);
      }
    }
}

// Adds the sums of earlier chunks. Returns whether the gradient is complete; else it stores the sums for later chunks.
CUFLASH_DEVICE bool add_chunks(const Params& params, const ProductTile& tile, float (&sum)[kNTiles][4]) {
  const u32 threads = 128 * kConsumers;
  Real4* g_sum = (Real4*)params.dq_accumulator + (i64)tile.index * kNTiles * threads + ptx::thread_index();
  if (tile.chunk > 0)
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      const Real4 before = g_sum[n * threads];
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] += before.value[i];
    }
  if (tile.chunk + 1 == num_chunks_of(params)) return true;
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) g_sum[n * threads] = {sum[n][0], sum[n][1], sum[n][2], sum[n][3]};
  return false;
}

CUFLASH_DEVICE void consume(const GradientParams& params, const Shared& shared, const ProductTile& tile, u32 index) {
  float sum[kNTiles][4] = {};
  Position<kNumStages> at;
  if (tile.num_chunks() == 0) {
    if (!tile.of_keys && tile.chunk > 0 && tile.chunk + 1 < num_chunks_of(params.common)) return;
  } else if (tile.of_keys) {
    multiply_chunks<true, true>(shared, at, index, sum, tile.num_chunks());
  } else {
    multiply_chunks<false, true>(shared, at, index, sum, tile.num_chunks());
  }
  if (!tile.of_keys && !add_chunks(params.common, tile, sum)) return;
  const int head = tile.of_keys ? tile.head / tile.num_heads : tile.head;
  store_results(params.results[tile.of_keys && kNeedsDq], shared, index, sum, scale_of(params.common), tile.column,
                tile.row, head, entry_of(tile.batch));
  if (ptx::thread_index() % 128 == 0) ptx::bulk_wait<0>();
}

CUFLASH_DEVICE void backward_chunked(const GradientParams& params) {
  const Shared shared;
  shared.make_barriers();
  const ProductTile tile(params.common, count_of(launches_of_ds(params.common)) - 1);
  const u32 warp = ptx::uniform(warp_index());
  if (warp < 4 * kConsumers) {
    ptx::increase_registers<kConsumerRegisters>();
    consume(params, shared, tile, warp / 4);
  } else {
    ptx::decrease_registers<kProducerRegisters>();
    if (warp == 4 * kConsumers && ptx::elect_lane()) produce(params, shared, tile);
  }
  if (ptx::block_index() == 0 && ptx::thread_index() == 0) launches_of_products(params.common).arrive();
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, GradientParams, kNumThreads, 1, backward_chunked)
