// Which work a block index stands for, and which tiles of the other axis that work needs.
#pragma once
#include "common/config.cuh"
#include "common/score/mask.cuh"
#include "common/io/params.cuh"
#include "common/schedule/sequences.cuh"

struct Work {
  int block;  // index of the tile of queries (or of keys)
  int head;   // query head (or key/value head)
  Entry batch;
};
// The same before the packed sequence is looked up: `block` is a slot among those of all sequences.
struct TileSlot {
  int block;
  int head;
  int batch;
};

// The number of heads of all batch entries. Packed sequences lie in one batch entry.
CUFLASH_DEVICE u32 heads_in_all(const Params& params, int num_heads) {
  return kIsPacked ? num_heads : num_heads * params.batch;
}

// Work starts in the order of its index. Tiles of one head are neighbours, so that they share its operands in L2;
// `section` heads are interleaved. With `last_first` the tiles run from the last to the first: under a causal mask the
// last tiles of queries take the longest, so that short tiles fill the gaps at the end.
CUFLASH_DEVICE TileSlot schedule(const Params& params, u32 index, int num_blocks, int num_heads, u32 section,
                                 bool last_first) {
  const u32 heads = heads_in_all(params, num_heads);
  const u32 first = index / (num_blocks * section) * section;
  const u32 within = index - first * num_blocks;
  const u32 width = heads - first < section ? heads - first : section;
  const u32 head = first + within % width;
  const int block = within / width;
  return {last_first ? num_blocks - 1 - block : block, (int)(head % num_heads), (int)(head / num_heads)};
}

// How many tiles of `rows` rows a head of `seqlen` rows has; packed: how many slots of tiles.
//
// Packed: tile t of sequence b has slot start(b) / rows + b + t. No two tiles share a slot, because the slots of a
// sequence are at least as many as its tiles. At most one slot per sequence is empty. The starts alone determine which
// tile a slot belongs to.
CUFLASH_DEVICE int num_tiles_of(const Params& params, int seqlen, int rows) {
  return kIsPacked ? seqlen / rows + params.batch + 1 : ceil_div(seqlen, rows);
}
CUFLASH_DEVICE int first_slot_of_queries(Entry batch, int rows) { return query_start_of(batch) / rows + batch; }
CUFLASH_DEVICE int first_slot_of_keys(Entry batch, int rows) { return key_start_of(batch) / rows + batch; }

// Warp. The last lane for which `holds` is true; it must be true for the first lane.
CUFLASH_DEVICE u32 last_lane(bool holds) { return 31 - ptx::leading_zeros(ptx::ballot(holds)); }

// Warp. Finds the sequence of a slot, and which of its tiles the slot stands for; that tile may not exist. The lanes
// look at 32 sequences at once. If there are more, they first look at every 32nd, or at every 1024th.
template <class FirstSlot>
CUFLASH_DEVICE Work at_slot(const Params& params, const TileSlot& slot, FirstSlot first_slot) {
  const int lane = ptx::thread_index() % 32;
  int shift = 0, first = 0;
  while (params.batch >> shift >= 32) shift += 5;
#pragma unroll 1
  for (;; shift -= 5) {
    const int last = (params.batch - first) >> shift;
    const Sequence own = sequence_at(params, first + (min_of(lane, last) << shift));
    const Sequence found = sequence_of_lane(own, last_lane(first_slot(own) <= slot.block));
    if (shift == 0) return {slot.block - first_slot(found), slot.head, found};
    first = found.index;
  }
}
CUFLASH_DEVICE Work at_slot_of_queries(const Params& params, const TileSlot& slot) {
  return at_slot(params, slot, [](const Sequence& batch) { return first_slot_of_queries(batch, kBlockM); });
}
CUFLASH_DEVICE Work at_slot_of_keys(const Params& params, const TileSlot& slot) {
  return at_slot(params, slot, [](const Sequence& batch) { return first_slot_of_keys(batch, kBlockN); });
}

// Warp. The work at an index: a tile of queries, or of keys.
CUFLASH_DEVICE Work schedule_queries(const Params& params, u32 index, int num_heads, bool last_first) {
  const int num_blocks = num_tiles_of(params, params.seqlen_q, kBlockM);
  const TileSlot slot = schedule(params, index, num_blocks, num_heads, params.head_section, last_first);
  if constexpr (kIsPacked) return at_slot_of_queries(params, slot);
  return {slot.block, slot.head, slot.batch};
}
CUFLASH_DEVICE Work schedule_keys(const Params& params, u32 index, int num_heads, u32 section, bool last_first) {
  const int num_blocks = num_tiles_of(params, params.seqlen_k, kBlockN);
  const TileSlot slot = schedule(params, index, num_blocks, num_heads, section, last_first);
  if constexpr (kIsPacked) return at_slot_of_keys(params, slot);
  return {slot.block, slot.head, slot.batch};
}
// Whether there is a tile at this slot.
CUFLASH_DEVICE bool has_queries(const Params& params, const Work& work) {
  return !kIsPacked || work.block * kBlockM < seqlen_q_of(params, work.batch);
}
CUFLASH_DEVICE bool has_keys(const Params& params, const Work& work) {
  return !kIsPacked || work.block * kBlockN < seqlen_k_of(params, work.batch);
}

// Whether every tile needs the mask, because no tile is known to be visible as a whole.
constexpr bool kTestsAllTiles = (kLooksUpMask || kHasMaskFunction || kMaskByBits) && !kHasBlockIndex;

// A range of tiles [start, stop). Those in [full_start, full_stop) have every pair visible; the others need the mask.
// With kHasEdges, those before full_start are cut by the left bound alone.
struct TileRange {
  int start, full_start, full_stop, stop;
};

// Calls step(n_block, masked) for the positions of a range, from the last to the first: for tiles that need the mask
// with Constant<true>, for the others with Constant<false>. With `one_body` one body of code serves all tiles, and
// `masked` is a bool.
template <bool one_body, class Step>
CUFLASH_DEVICE void for_each_tile(const TileRange& tiles, const Step& step) {
  int n_block = tiles.stop - 1;
  if constexpr (one_body) {
#pragma unroll 1
    for (; n_block >= tiles.start; --n_block) step(n_block, n_block >= tiles.full_stop || n_block < tiles.full_start);
  } else {
#pragma unroll 1
    for (; n_block >= tiles.full_stop; --n_block) step(n_block, Constant<true>{});
#pragma unroll 1
    for (; n_block >= tiles.full_start; --n_block) step(n_block, Constant<false>{});
    if constexpr (kHasLeftBound) {
#pragma unroll 1
      for (; n_block >= tiles.start; --n_block) step(n_block, Constant<true>{});
    }
  }
}

// Tiles of keys that queries [first_row, last_row] of a batch entry attend to.
CUFLASH_DEVICE TileRange key_tiles(const Params& params, Entry batch, int first_row, int last_row, int key_stop) {
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
  if constexpr (kTestsAllTiles) full_stop = full_start;
  start = min_of(start, stop);
  if constexpr (kHasEdges) {
    full_stop = min_of(max_of(full_stop, start), stop);
    full_start = min_of(max_of(full_start, start), full_stop);
    return {start, full_start, full_stop, stop};
  }
  full_start = min_of(full_start < start ? start : full_start, stop);
  full_stop = full_stop < full_start ? full_start : full_stop;
  return {start, full_start, full_stop, stop};
}

// Tiles of queries that attend to keys [first_key, last_key] of a batch entry.
CUFLASH_DEVICE TileRange query_tiles(const Params& params, Entry batch, int first_key, int last_key, int key_stop) {
  int start = 0, full_start = 0, stop = ceil_div(seqlen_q_of(params, batch), kBlockM), full_stop = stop;
  if constexpr (kHasRightBound) {
    const int right_offset = right_offset_of(params, batch);
    start = at_least_zero(first_key - right_offset) / kBlockM;
    full_start = ceil_div(at_least_zero(last_key - right_offset), kBlockM);
  }
  if constexpr (kHasLeftBound) {
    const int left_offset = left_offset_of(params, batch);
    stop = min_of(stop, ceil_div(at_least_zero(last_key - left_offset + 1), kBlockM));
    full_stop = min_of(full_stop, at_least_zero(first_key - left_offset + 1) / kBlockM);
  }
  if (kTestsAllTiles || last_key >= key_stop) full_stop = full_start;
  if (first_key >= key_stop) stop = 0;
  start = min_of(start, stop);
  full_start = min_of(full_start < start ? start : full_start, stop);
  full_stop = full_stop < full_start ? full_start : min_of(full_stop, stop);
  return {start, full_start, full_stop, stop};
}

// With a block mask, or a mask or a function that hides pairs, helpers/block_index.cu writes a row of a block-sparse
// index for each tile of one axis: the number of tiles of the other axis that it is multiplied by, the number of those
// with every pair visible, and the indices of the fully visible ones, then of the others, each in rising order. A
// kernel then iterates over positions in the row instead of tiles.
constexpr int kIndexHeader = 2;

// An entry of a row: the index of a tile in the low bits, and flags that the loop needs above it, so that a step loads
// one number.
struct IndexEntry {
  static constexpr u32 kIndexBits = 28;  // enough: a tile has at least 16 of at most 2^30 rows
  static constexpr u32 kIsLast = 1u << 31;
  static constexpr u32 kNeedsMask = 1u << 30;      // some pair is hidden
  static constexpr u32 kEvaluatesMask = 1u << 29;  // masks hide some pair, not only a diagonal or the last key
  u32 entry;

  CUFLASH_DEVICE int tile() const { return entry & ((1u << kIndexBits) - 1); }
  CUFLASH_DEVICE bool is_last() const { return (entry & kIsLast) != 0; }
  CUFLASH_DEVICE bool needs_mask() const { return (entry & kNeedsMask) != 0; }
  CUFLASH_DEVICE bool evaluates_mask() const { return (entry & kEvaluatesMask) != 0; }
};

// The row of tile `block` of `num_blocks`. It has space for `length` entries.
CUFLASH_DEVICE i32* index_row_of(const Params& params, void* index, int batch, int head, int block, int num_blocks,
                                 int length) {
  return (i32*)index + (indices_in(params).of(batch, head) * num_blocks + block) * (kIndexHeader + length);
}

// Whether the loop leads away from the queries: from the tile of keys at the diagonal to the first tile, and then from
// the tile after the diagonal to the last one. Kernels go from the last place to the first. Slopes (ALiBi) make the
// scores of near keys the largest, so the first maxima of the rows stay the largest ones and nothing is rescaled.
constexpr bool kGoesOutward = kHasAlibi && !kHasRightBound && !kHasLeftBound && !kHasBlockIndex;

// The tiles of keys that a tile of queries attends to: a range of positions, and the tile at each.
struct KeyTiles : TileRange {
  const i32* row;
  int nearest;  // kGoesOutward: of the tiles with every pair visible, the one nearest to the diagonal

  CUFLASH_DEVICE KeyTiles(const Params& params, const Work& work, int key_stop) : row(nullptr), nearest(0) {
    const int first_row = work.block * kBlockM;
    if constexpr (kHasBlockIndex) {
      row = index_row_of(params, params.key_index, work.batch, work.head, work.block,
                         ceil_div(params.seqlen_q, kBlockM), ceil_div(params.seqlen_k, kBlockN));
      start = full_start = 0, full_stop = row[1], stop = row[0];
    } else {
      const int last_row = min_of(first_row + kBlockM, seqlen_q_of(params, work.batch)) - 1;
      TileRange::operator=(key_tiles(params, work.batch, first_row, last_row, key_stop));
      if constexpr (kGoesOutward) {
        const int diagonal = params.diagonal + own_diagonal_of(params, work.batch);
        nearest = at_least_zero(first_row + kBlockM / 2 + diagonal) / kBlockN;
        nearest = max_of(min_of(nearest, full_stop - 1), full_start);
      }
    }
  }
  CUFLASH_DEVICE int at(int position) const {
    if constexpr (kHasBlockIndex) return entry_at(position).tile();
    if constexpr (kGoesOutward) {
      const int steps = full_stop - 1 - position, before = nearest - full_start;
      if (position >= full_start && steps >= 0) return steps <= before ? nearest - steps : full_start + steps;
    }
    return position;
  }
  // Whether a function that hides pairs must be called for a tile that is not visible as a whole.
  CUFLASH_DEVICE bool evaluates_mask_at(int position) const {
    return !kHasBlockIndex || entry_at(position).evaluates_mask();
  }

 private:
  CUFLASH_DEVICE IndexEntry entry_at(int position) const { return {(u32)row[kIndexHeader + position]}; }
};

// The work of the blocks of a persistent kernel: of every `resident_blocks` units, each block takes one. A unit is a
// tile of queries, or a pair of tiles.
//
// kPairs: later tiles attend to more keys, so a unit is the n-th tile of a head from the end and the n-th from the
// start. Together they attend to as many keys as any other such pair. If there are twice as many blocks as pairs, each
// block takes one tile: the first half of the blocks take the tiles from the end. Kernels with pages do not do this,
// because they have no register to spare.
//
// kHasWindow: the tiles that attend to the whole window are the first units, head by head. The shorter tiles follow,
// from the longest to the shortest, of many heads at once. Every other round goes through the blocks backwards, so that
// the totals of the blocks differ little.
//
// Clusters: the `cluster` blocks of a cluster take a unit together, and `resident_blocks` counts clusters.
template <int cluster>
struct TileSchedulerOf {
  static constexpr bool kMaySplitPair = kPairs && kPageSize == 0;

  int num_m_blocks, units_of_head;
  u32 unit, num_units, step;
  u32 two_rounds;  // kHasWindow: the units of a round and of the backward round after it
  bool second;

  CUFLASH_DEVICE explicit TileSchedulerOf(const Params& params)
      : num_m_blocks(ceil_div(params.seqlen_q, kBlockM)),
        units_of_head(kPairs ? (num_m_blocks + 1) / 2 : num_m_blocks),
        unit(ptx::block_index() / cluster),
        num_units(units_of_head * params.num_heads * params.batch),
        step(params.resident_blocks),
        two_rounds(2 * step),
        second(kMaySplitPair && unit >= step) {
    if constexpr (kHasWindow) step = two_rounds - 1 - 2 * unit;
    if (!second) return;
    unit -= step;
    if (!has_second()) unit = num_units;
  }

  CUFLASH_DEVICE bool more() const { return unit < num_units; }
  CUFLASH_DEVICE Work work(const Params& params) const {
    if constexpr (kHasWindow) return longest_first(params);
    if constexpr (!kPairs) {
      const TileSlot slot = schedule(params, unit, num_m_blocks, params.num_heads, params.head_section, kHasRightBound);
      return work_of(params, slot.block, slot.head + slot.batch * params.num_heads);
    }
    const u32 head = unit / units_of_head;
    const int from_start = unit % units_of_head;
    return work_of(params, second ? from_start : num_m_blocks - 1 - from_start, head);
  }
  CUFLASH_DEVICE void advance() {
    second = kPairs && !second && !(kMaySplitPair && ptx::num_blocks() / cluster > step) && has_second();
    if (!second) unit += step;
    if constexpr (kHasWindow) step = two_rounds - step;
  }

 private:
  CUFLASH_DEVICE bool has_second() const { return 2 * (int)(unit % units_of_head) + 1 < num_m_blocks; }

  // kHasWindow. The first key cuts the windows of the first `before` tiles of a head; the last key cuts those from
  // `stop` on.
  CUFLASH_DEVICE Work longest_first(const Params& params) const {
    const int before = min_of(ceil_div(at_least_zero(-params.left_offset), kBlockM), num_m_blocks);
    const int uncut = at_least_zero(params.seqlen_k - params.right_offset) / kBlockM;
    const int stop = max_of(min_of(uncut, num_m_blocks), before), after = num_m_blocks - stop;
    const u32 num_whole = (stop - before) * params.num_heads * params.batch;
    const bool whole = unit < num_whole;
    const TileSlot slot = schedule(params, whole ? unit : unit - num_whole, whole ? stop - before : before + after,
                                   params.num_heads, whole && !kBatchFirst ? 1 : params.head_section, false);
    int block = stop - 1 - slot.block;
    if (!whole) {
      // Tiles come from both ends in turn as long as both ends have some.
      const int turns = min_of(before, after);
      const bool at_start = slot.block < 2 * turns ? slot.block % 2 == 0 : before > after;
      const int distance = slot.block < 2 * turns ? slot.block / 2 : slot.block - turns;
      block = at_start ? before - 1 - distance : stop + distance;
    }
    return work_of(params, block, slot.head + slot.batch * params.num_heads);
  }

  // `head` is an index among the heads of all batch entries, in launch order.
  CUFLASH_DEVICE static Work work_of(const Params& params, int block, u32 head) {
    if constexpr (kBatchFirst) return {block, (int)(head / params.batch), (int)(head % params.batch)};
    return {block, (int)(head % params.num_heads), (int)(head / params.num_heads)};
  }
};

using TileScheduler = TileSchedulerOf<1>;

// A tile of queries, and the tiles of keys that it attends to.
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

  // The tiles of keys that the 64 queries of consumer warpgroup `consumer` attend to, within `keys`.
  CUFLASH_DEVICE TileRange keys_of(const Params& params, int consumer) const {
    const int first = first_row + 64 * consumer;
    const int seqlen_q = seqlen_q_of(params, work.batch);
    if (first >= seqlen_q) return {keys.start, keys.start, keys.start, keys.start};
    const int last = min_of(first + 64, seqlen_q) - 1;
    if constexpr (!kHasBlockIndex) return key_tiles(params, work.batch, first, last, key_stop);
    TileRange own = keys;
    if constexpr (kHasRightBound && kBlockN < kBlockM) {
      // The last places of the list hold the last of the tiles that a diagonal cuts.
      const int key_end = last + right_offset_of(params, work.batch) + 1;
      while (own.stop > own.full_stop && keys.at(own.stop - 1) * kBlockN >= key_end) --own.stop;
    }
    return own;
  }
};
