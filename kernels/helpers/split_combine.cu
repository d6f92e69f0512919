// Makes out and lse from those of the blocks that share a head (common/schedule/key_splits.cuh), where none of these
// blocks does it. A warp makes some of the columns of one row.
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/schedule/key_splits.cuh"
#include "common/io/params.cuh"

constexpr int kChunkColumns = 32, kChunks = chunks_of_row(kChunkColumns);

CUFLASH_DEVICE void combine(const Params& params) {
  const u32 rows = params.num_heads / params.num_heads_kv * params.seqlen_q;
  const u64 index = (u64)ptx::block_index() * kNumWarps + warp_index();
  const u32 head = index / (rows * kChunks), of_head = index % (rows * kChunks);
  const KeySplits splits(params);
  if (head >= splits.heads) return;
  const Partials partials(params, splits, head);
  // A block that has a head to itself has stored its results.
  if (partials.count > 1) partials.combine<kChunkColumns>(params, of_head / kChunks, of_head % kChunks);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, combine)
