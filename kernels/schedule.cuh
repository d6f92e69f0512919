// Block index -> work, and which tiles of the other axis that work needs.
#pragma once
#include "config.cuh"
#include "params.cuh"

struct Work {
  int block;  // index of the tile of queries (or of keys)
  int head;   // query head (or key/value head)
  int batch;
};

// Work starts in the order of its index. Tiles of one head are neighbours, so that they share its operands in L2;
// `head_section` heads are interleaved. With `last_first` the tiles run from the last to the first: under a causal mask
// those are the longest, and short ones fill the gaps at the end.
CUFLASH_DEVICE Work schedule(const Params& params, u32 index, int num_blocks, int num_heads, bool last_first) {
  const u32 section = params.head_section;
  const u32 heads = num_heads * params.batch;
  const u32 first = index / (num_blocks * section) * section;
  const u32 within = index - first * num_blocks;
  const u32 width = heads - first < section ? heads - first : section;
  const u32 head = first + within % width;
  const int block = within / width;
  return {last_first ? num_blocks - 1 - block : block, (int)(head % num_heads), (int)(head / num_heads)};
}

CUFLASH_DEVICE constexpr int min_of(int a, int b) { return a < b ? a : b; }
CUFLASH_DEVICE int at_least_zero(int a) { return a > 0 ? a : 0; }
CUFLASH_DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

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

// What the diagonal of a batch entry adds to params.diagonal, right_offset and left_offset, which are of seqlen_k keys.
CUFLASH_DEVICE int own_diagonal_of(const Params& params, int batch) {
  if constexpr (!kFollowsLengths) return 0;
  return key_stop_of(params, batch) - params.seqlen_k;
}
// Query i stands at key position i + diagonal, sees keys up to i + right_offset, and from i + left_offset on.
CUFLASH_DEVICE int diagonal_of(const Params& params, int batch) {
  return params.diagonal + own_diagonal_of(params, batch);
}
CUFLASH_DEVICE int right_offset_of(const Params& params, int batch) {
  return params.right_offset + own_diagonal_of(params, batch);
}
CUFLASH_DEVICE int left_offset_of(const Params& params, int batch) {
  return params.left_offset + own_diagonal_of(params, batch);
}

// A range of tiles [start, stop). Those in [full_start, full_stop) have every pair visible; the others need the mask.
struct TileRange {
  int start, full_start, full_stop, stop;
};

// Tiles of keys that queries [first_row, last_row] of a batch entry see.
CUFLASH_DEVICE TileRange key_tiles(const Params& params, int batch, int first_row, int last_row, int key_stop) {
  int start = 0, full_start = 0, full_stop = key_stop / kBlockN, stop = ceil_div(key_stop, kBlockN);
  if constexpr (kHasRightBound) {
    const int right_offset = right_offset_of(params, batch);
    stop = min_of(stop, ceil_div(at_least_zero(last_row + right_offset + 1), kBlockN));
    full_stop = min_of(full_stop, at_least_zero(first_row + right_offset + 1) / kBlockN);
  }
  if constexpr (kHasLeftBound) {
    const int left_offset = left_offset_of(params, batch);
    start = at_least_zero(first_row + left_offset) / kBlockN;
    full_start = ceil_div(at_least_zero(last_row + left_offset), kBlockN);
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

// With a block mask, block_lists.cu lists beforehand for each tile of one axis those of the other axis that it meets: their
// number, the number of those that have every pair visible, and their indices, of these first, each in rising order. What
// walks over tiles without a block mask then walks over places in the list.
constexpr int kListHeader = 2;

// The list of tile `block` of `num_blocks` with room for `length` others.
CUFLASH_DEVICE i32* list_of(const Params& params, void* lists, int batch, int head, int block, int num_blocks, int length) {
  const i64 matrix = (params.list_batches == 1 ? 0 : (i64)batch * params.list_heads) + (params.list_heads == 1 ? 0 : head);
  return (i32*)lists + (matrix * num_blocks + block) * (kListHeader + length);
}

// The tiles of keys that a tile of queries sees: a range of places, and the tile at each.
struct KeyTiles : TileRange {
  const i32* list;

  CUFLASH_DEVICE KeyTiles(const Params& params, const Work& work, int key_stop) : list(nullptr) {
    const int first_row = work.block * kBlockM;
    if constexpr (kHasBlockMask) {
      list = list_of(params, params.key_lists, work.batch, work.head, work.block, ceil_div(params.seqlen_q, kBlockM),
                     ceil_div(params.seqlen_k, kBlockN));
      start = full_start = 0, full_stop = list[1], stop = list[0];
    } else {
      const int last_row = min_of(first_row + kBlockM, params.seqlen_q) - 1;
      (TileRange&)*this = key_tiles(params, work.batch, first_row, last_row, key_stop);
    }
  }
  CUFLASH_DEVICE int at(int place) const {
    if constexpr (kHasBlockMask) return list[kListHeader + place];
    return place;
  }
};

// The work of blocks that stay: each takes one unit of every `resident_blocks`. A unit is a tile of queries; with kPairs,
// where tiles see the more keys the later they come, it is the n-th tile of a head from the end and the n-th from the
// start, which together see as many keys as any other two.
struct TileWalk {
  int num_m_blocks, units_of_head;
  u32 unit, num_units, step;
  bool second;

  CUFLASH_DEVICE explicit TileWalk(const Params& params)
      : num_m_blocks(ceil_div(params.seqlen_q, kBlockM)),
        units_of_head(kPairs ? (num_m_blocks + 1) / 2 : num_m_blocks),
        unit(ptx::block_index()),
        num_units(units_of_head * params.num_heads * params.batch),
        step(params.resident_blocks),
        second(false) {}

  CUFLASH_DEVICE bool more() const { return unit < num_units; }
  CUFLASH_DEVICE Work work(const Params& params) const {
    if constexpr (!kPairs) return schedule(params, unit, num_m_blocks, params.num_heads, kHasRightBound);
    const u32 head = unit / units_of_head;
    const int from_start = unit % units_of_head;
    return {second ? from_start : num_m_blocks - 1 - from_start, (int)(head % params.num_heads),
            (int)(head / params.num_heads)};
  }
  CUFLASH_DEVICE void advance() {
    const int from_start = unit % units_of_head;
    second = kPairs && !second && 2 * from_start + 1 < num_m_blocks;
    if (!second) unit += step;
  }
};

// A tile of queries: where it stands, and the tiles of keys that it sees.
struct QueryTile {
  Work work;
  int first_row, head_kv, key_stop;
  KeyTiles keys;

  CUFLASH_DEVICE QueryTile(const Params& params, const Work& work_)
      : work(work_),
        first_row(work.block * kBlockM),
        head_kv(work.head / (params.num_heads / params.num_heads_kv)),
        key_stop(key_stop_of(params, work.batch)),
        keys(params, work, key_stop) {}

  // Those that the 64 queries of a warpgroup, the `consumer`-th, see, within `keys`.
  CUFLASH_DEVICE TileRange keys_of(const Params& params, int consumer) const {
    const int first = first_row + 64 * consumer;
    if (first >= params.seqlen_q) return {keys.start, keys.start, keys.start, keys.start};
    if constexpr (kHasBlockMask) return keys;
    return key_tiles(params, work.batch, first, min_of(first + 64, params.seqlen_q) - 1, key_stop);
  }
};
