// Block index -> work, and which tiles of the other axis that work needs.
#pragma once
#include "config.cuh"
#include "params.cuh"

struct Work {
  int block;  // index of the tile of queries (or of keys)
  int head;   // query head (or key/value head)
  int batch;
};

// Blocks start in the order of their index. Tiles of one head are neighbours, so that they share its operands in L2;
// `head_section` heads are interleaved. With `last_first` the tiles run from the last to the first: under a causal mask
// those are the longest, and short ones fill the gaps at the end.
CUFLASH_DEVICE Work schedule(const Params& params, int num_blocks, int num_heads, bool last_first) {
  const u32 index = ptx::block_index();
  const u32 section = params.head_section;
  const u32 heads = num_heads * params.batch;
  const u32 first = index / (num_blocks * section) * section;
  const u32 within = index - first * num_blocks;
  const u32 width = heads - first < section ? heads - first : section;
  const u32 head = first + within % width;
  const int block = within / width;
  return {last_first ? num_blocks - 1 - block : block, (int)(head % num_heads), (int)(head / num_heads)};
}

CUFLASH_DEVICE int min_of(int a, int b) { return a < b ? a : b; }
CUFLASH_DEVICE int at_least_zero(int a) { return a > 0 ? a : 0; }
CUFLASH_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Keys [0, key_stop) of a batch exist: seqlen_k, or less where kv_lengths says so.
CUFLASH_DEVICE int key_stop_of(const Params& params, int batch) {
  if constexpr (kKvLengthsBytes == 0) return params.seqlen_k;
  i64 length;
  if constexpr (kKvLengthsBytes == 8)
    length = ((const i64*)params.kv_lengths)[batch * params.kv_lengths_stride];
  else
    length = ((const i32*)params.kv_lengths)[batch * params.kv_lengths_stride];
  return length < 0 ? 0 : length < params.seqlen_k ? (int)length : params.seqlen_k;
}

// A range of tiles [start, stop). Those in [full_start, full_stop) have every pair visible; the others need the mask.
struct TileRange {
  int start, full_start, full_stop, stop;
};

// Tiles of keys that queries [first_row, last_row] see.
CUFLASH_DEVICE TileRange key_tiles(const Params& params, int first_row, int last_row, int key_stop) {
  int start = 0, full_start = 0, full_stop = key_stop / kBlockN, stop = ceil_div(key_stop, kBlockN);
  if constexpr (kHasRightBound) {
    stop = min_of(stop, ceil_div(at_least_zero(last_row + params.right_offset + 1), kBlockN));
    full_stop = min_of(full_stop, at_least_zero(first_row + params.right_offset + 1) / kBlockN);
  }
  if constexpr (kHasLeftBound) {
    start = at_least_zero(first_row + params.left_offset) / kBlockN;
    full_start = ceil_div(at_least_zero(last_row + params.left_offset), kBlockN);
  }
  if constexpr (kHasMask) full_stop = full_start;
  start = min_of(start, stop);
  full_start = min_of(full_start < start ? start : full_start, stop);
  full_stop = full_stop < full_start ? full_start : full_stop;
  return {start, full_start, full_stop, stop};
}

// Tiles of queries that see keys [first_key, last_key].
CUFLASH_DEVICE TileRange query_tiles(const Params& params, int first_key, int last_key, int key_stop) {
  int start = 0, full_start = 0, stop = ceil_div(params.seqlen_q, kBlockM), full_stop = stop;
  if constexpr (kHasRightBound) {
    start = at_least_zero(first_key - params.right_offset) / kBlockM;
    full_start = ceil_div(at_least_zero(last_key - params.right_offset), kBlockM);
  }
  if constexpr (kHasLeftBound) {
    stop = min_of(stop, ceil_div(at_least_zero(last_key - params.left_offset + 1), kBlockM));
    full_stop = min_of(full_stop, at_least_zero(first_key - params.left_offset + 1) / kBlockM);
  }
  if (kHasMask || last_key >= key_stop) full_stop = full_start;
  if (first_key >= key_stop) stop = 0;
  start = min_of(start, stop);
  full_start = min_of(full_start < start ? start : full_start, stop);
  full_stop = full_stop < full_start ? full_start : min_of(full_stop, stop);
  return {start, full_start, full_stop, stop};
}
