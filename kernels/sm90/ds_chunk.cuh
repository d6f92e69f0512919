// The backward pass of long heads without values on compute capability 9.0, as three GEMMs. Without values
// dS = P * dlse, and
//
//   S = Q K^T        dS = exp(S - lse) * dlse        dK = dS^T Q        dQ = dS K
//
// Keys come in chunks of params.whole_tiles tiles. For each chunk, sm90/backward_chunked_ds.cu stores the rounded dS of
// all heads and queries, and sm90/backward_chunked.cu multiplies it. Operands arrive by the ring of
// sm90/chunked_ring.cuh, in boxes of 64 rows and 64 columns. All sums have a fixed order, so that gradients are
// deterministic.
//
// A plan launches the two kernels in turn, with one argument for all chunks. So they count the launches that have
// ended: a kernel of dS has the chunk that follows the last launch of the products, and these the last one of dS.
#pragma once
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/arrivals.cuh"
#include "common/schedule/schedule.cuh"
#include "sm90/chunked_ring.cuh"

constexpr bool kNeedsDq = CUFLASH_NEEDS_DQ, kMakesDk = CUFLASH_NEEDS_DK;
static_assert(!kIsPacked && kPageSize == 0 && kRowBlocks == 1, "tiles are boxes of an array");

struct GradientParams {
  Params common;
  TensorMap q, k, ds, results[kNeedsDq + kMakesDk];  // dq, dk
};
static_assert(sizeof(GradientParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

// Keys of a chunk: whole tiles of dS, and of dK. The last chunk may have fewer.
CUFLASH_DEVICE int chunk_keys_of(const Params& params) { return params.whole_tiles * kBlockN; }
CUFLASH_DEVICE int num_chunks_of(const Params& params) { return ceil_div(params.seqlen_k, chunk_keys_of(params)); }
CUFLASH_DEVICE int num_query_tiles_of(const Params& params) { return ceil_div(params.seqlen_q, kBlockM); }

// The counts of launches of each of the two kernels, of which the first block of each launch counts its own. Blocks
// read the count of the other kernel, whose launches have all ended.
CUFLASH_DEVICE Arrivals launches_of_ds(const Params& params) { return {params, 0, (u32)num_chunks_of(params)}; }
CUFLASH_DEVICE Arrivals launches_of_products(const Params& params) { return {params, 1, (u32)num_chunks_of(params)}; }
CUFLASH_DEVICE int count_of(const Arrivals& launches) {
  return (int)(ptx::load_arrivals(launches.g_count) - launches.first);
}

// The producer: loads `boxes` boxes, whose columns, or rows, follow one another.
template <int boxes, bool along_columns>
CUFLASH_DEVICE void load_boxes(u32 tile, const TensorMap& map, const Barrier& full, int column, int row, int head,
                               int batch) {
#pragma unroll
  for (int i = 0; i < boxes; ++i)
    ptx::load_tensor(tile + i * kBytesBox, map, full.address, column + (along_columns ? i * 64 : 0),
                     row + (along_columns ? 0 : i * 64), head, batch);
}

// A consumer warpgroup: rounds its 64 rows of sums times `factor`, and has TMA store them.
CUFLASH_DEVICE void store_results(const TensorMap& map, const Shared& shared, u32 index, float (&sum)[kNTiles][4],
                                  float factor, int column, int row, int head, int batch) {
  const u32 thread = ptx::thread_index() % 128;
  repeat<kNTiles / 8>([&](auto slice) {
    constexpr int kSlice = decltype(slice)::value;
    const u32 box = shared.results + (index * kResultBoxes + kSlice % kResultBoxes) * kBytesBox;
    if (thread == 0) ptx::bulk_wait_read<kResultBoxes - 1>();
    ptx::sync_named(1 + index, 128);
    store_fragments_chunked<64>(box, thread / 32 * 16, (float (&)[8][4])sum[kSlice * 8], factor, factor);
    ptx::fence_async_proxy();
    ptx::sync_named(1 + index, 128);
    if (thread == 0) {
      ptx::store_tensor(map, box, column + kSlice * 64, row + index * 64, head, batch);
      ptx::bulk_commit();
    }
  });
}
