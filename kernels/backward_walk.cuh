// The keys of a block of the backward pass on compute capability 9.0, and the tiles of queries that it walks over.
#pragma once
#include "backward.cuh"
#include "config.cuh"
#include "list_walk.cuh"
#include "params.cuh"
#include "schedule.cuh"

// Tiles of keys start, and where they take turns add, from the first to the last: the longest first under a causal mask.
// With a left bound from the last to the first, so that they meet no tile of queries before those that add to it first.
constexpr bool kLastFirst = kDqInTurn && kHasLeftBound;
// Under a causal mask those that take turns meet the tiles of queries from the last to the first: all see the last.
constexpr bool kFromLastQuery = kDqInTurn && kHasRightBound && !kHasLeftBound;

// The walk over (query head of the group, tile of queries), heads outermost.
struct RangeWalk {
  int head, m_block;
  CUFLASH_DEVICE bool needs_mask(const TileRange& tiles) const {
    return m_block < tiles.full_start || m_block >= tiles.full_stop;
  }
  CUFLASH_DEVICE void advance(const TileRange& tiles) {
    m_block += kFromLastQuery ? -1 : 1;
    if (m_block == (kFromLastQuery ? tiles.start - 1 : tiles.stop)) m_block = first_of(tiles), ++head;
  }
  CUFLASH_DEVICE static RangeWalk first(const TileRange& tiles, int head) { return {head, first_of(tiles)}; }
  CUFLASH_DEVICE static int first_of(const TileRange& tiles) { return kFromLastQuery ? tiles.stop - 1 : tiles.start; }
};

using Walk = Either<kHasBlockMask, ListWalk, RangeWalk>::Type;
using QueryTiles = Either<kHasBlockMask, QueryLists, TileRange>::Type;

// The keys of a block, and what every role walks over.
struct KeyTile {
  Work work;
  int num_n_blocks, num_m_blocks, split, head_kv, first_key, key_stop, first_head, num_steps;
  int own_diagonal;  // of the batch entry
  QueryTiles queries;

  // Warp. The work of packed sequences is found beforehand, once for all roles.
  CUFLASH_DEVICE static Work find(const Params& params) {
    const int splits = kSplitsGroup ? params.group_splits : 1;
    return schedule_keys(params, ptx::block_index(), params.num_heads_kv * splits, kLastFirst);
  }

  CUFLASH_DEVICE explicit KeyTile(const Params& params, const Work& found = {}) {
    const int splits = kSplitsGroup ? params.group_splits : 1, group = params.num_heads / params.num_heads_kv;
    num_n_blocks = num_tiles_of(params, params.seqlen_k, kBlockN);
    num_m_blocks = num_tiles_of(params, params.seqlen_q, kBlockM);
    work = kIsPacked ? found : schedule_keys(params, ptx::block_index(), params.num_heads_kv * splits, kLastFirst);
    head_kv = work.head / splits;
    split = work.head % splits;
    first_key = work.block * kBlockN;
    key_stop = key_stop_of(params, work.batch);
    own_diagonal = own_diagonal_of(params, work.batch);
    first_head = head_kv * group + group * split / splits;
    const int stop_head = head_kv * group + group * (split + 1) / splits;
    num_steps = find_queries(params, work, first_head, stop_head, key_stop, queries);
    if constexpr (kDqInTurn && kIsPacked) {
      if (*overlap_of(params, num_m_blocks)) num_steps = 0;
    }
  }
  CUFLASH_DEVICE Walk first() const { return Walk::first(queries, first_head); }
  // Of a tile of queries among those of all heads and batches.
  CUFLASH_DEVICE i64 index_of(const Params& params, const Walk& walk) const {
    return m_tile_of(params, num_m_blocks, work.batch, walk.head, walk.m_block);
  }
  // How many of the tiles of keys that a tile of queries sees come before this one.
  CUFLASH_DEVICE u32 turn(const Params& params, int m_block) const {
    const int first_row = m_block * kBlockM;
    const TileRange keys = key_tiles(params, work.batch, first_row, first_row + kBlockM - 1, key_stop);
    return kLastFirst ? keys.stop - 1 - work.block : work.block - keys.start;
  }
};
