// Where blocks that own keys (sm90/backward.cu) store their sums of gradients of scores, which helpers/scores_reduce.cu
// adds. Each warp, of 16 keys, stores one number. A tile of keys has a partial sum for every query head that attends to
// it and for each of its tail_splits blocks.
#pragma once
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"

constexpr int kSumWarps = kBlockN / 16;

// The index of a partial sum. Those of a query head are neighbours, and within them those of a batch entry.
CUFLASH_DEVICE i64 key_partial_of(const Params& params, int head, Entry batch, int n_block, int split) {
  const int num_n_blocks = num_tiles_of(params, params.seqlen_k, kBlockN);
  i64 tile = ((i64)head * params.batch + batch) * num_n_blocks + n_block;
  if constexpr (kIsPacked) tile = (i64)head * num_n_blocks + first_slot_of_keys(batch, kBlockN) + n_block;
  return tile * params.tail_splits + split;
}
// The number of partial sums of all query heads.
CUFLASH_DEVICE i64 num_key_partials(const Params& params) {
  const i64 tiles = (i64)(kIsPacked ? 1 : params.batch) * num_tiles_of(params, params.seqlen_k, kBlockN);
  return tiles * params.num_heads * params.tail_splits;
}

// The sums of the gradient of a slope, by warp, and those of the gradient of a bias that depends on the key only, by
// key.
CUFLASH_DEVICE Real* slope_sums_of(const Params& params, i64 key_partial) {
  return (Real*)params.sums_partials + key_partial * kSumWarps;
}
CUFLASH_DEVICE Real* bias_sums_of(const Params& params, i64 key_partial) {
  return (Real*)params.score_partials + key_partial * kBlockN;
}

// The sums of the gradients of the scale, and then of the cap, come after those of slopes: sums over all work of a
// block, by warp.
CUFLASH_DEVICE i64 num_key_blocks(const Params& params) {
  const i64 tiles = (i64)heads_in_all(params, params.num_heads_kv) * num_tiles_of(params, params.seqlen_k, kBlockN);
  return params.whole_tiles + (tiles - params.whole_tiles) * params.group_splits * params.tail_splits;
}
CUFLASH_DEVICE Real* block_sums_of(const Params& params, bool of_softcap, i64 block) {
  Real* sums = slope_sums_of(params, kNeedsDalibiSlopes ? num_key_partials(params) : 0);
  return sums + ((of_softcap && kNeedsDscale ? num_key_blocks(params) : 0) + block) * kSumWarps;
}
