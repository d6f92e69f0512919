// Sums of gradients of scores by blocks that own keys (sm90/backward.cu), which around/scores_reduce.cu adds: where
// they leave them. Warps of 16 keys leave a number each. There is a part of a tile of keys for every query head that
// sees it and for each of the blocks that share its queries.
#pragma once
#include "common/backward.cuh"
#include "common/config.cuh"
#include "common/params.cuh"
#include "common/schedule.cuh"

constexpr int kSumWarps = kBlockN / 16;

// Parts of a query head are neighbours, and so are those of a batch entry within them.
CUFLASH_DEVICE i64 key_part_of(const Params& params, int head, Entry batch, int n_block, int part) {
  const int num_n_blocks = num_tiles_of(params, params.seqlen_k, kBlockN);
  i64 tile = ((i64)head * params.batch + batch) * num_n_blocks + n_block;
  if constexpr (kIsPacked) tile = (i64)head * num_n_blocks + first_place_of_keys(batch, kBlockN) + n_block;
  return tile * params.tail_splits + part;
}
// Of all query heads.
CUFLASH_DEVICE i64 num_key_parts(const Params& params) {
  const i64 tiles = (i64)(kIsPacked ? 1 : params.batch) * num_tiles_of(params, params.seqlen_k, kBlockN);
  return tiles * params.num_heads * params.tail_splits;
}

// Of the gradient of a slope, by warp; and of that of a bias that differs from key to key only, by key.
CUFLASH_DEVICE Real* slope_sums_of(const Params& params, i64 key_part) {
  return (Real*)params.sums_partials + key_part * kSumWarps;
}
CUFLASH_DEVICE Real* bias_sums_of(const Params& params, i64 key_part) {
  return (Real*)params.score_partials + key_part * kBlockN;
}

// After those of slopes, of the scale, and then of the cap: sums over all that a block does, by warp.
CUFLASH_DEVICE i64 num_key_blocks(const Params& params) {
  const i64 tiles = (i64)heads_in_all(params, params.num_heads_kv) * num_tiles_of(params, params.seqlen_k, kBlockN);
  return params.whole_tiles + (tiles - params.whole_tiles) * params.group_splits * params.tail_splits;
}
CUFLASH_DEVICE Real* block_sums_of(const Params& params, bool of_softcap, i64 block) {
  Real* sums = slope_sums_of(params, kNeedsDalibiSlopes ? num_key_parts(params) : 0);
  return sums + ((of_softcap && kNeedsDscale ? num_key_blocks(params) : 0) + block) * kSumWarps;
}
