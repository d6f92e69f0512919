// The keys of a block of the backward pass on compute capability 9.0, and the tiles of queries that it walks over.
#pragma once
#include "backward.cuh"
#include "config.cuh"
#include "list_walk.cuh"
#include "params.cuh"
#include "schedule.cuh"

// Tiles of keys start, and where they take turns add, from the first to the last: the longest first under a causal mask.
// Where they take turns and see no queries before a diagonal, or none after one, they start from the last to the first.
// Under a causal mask each so meets first a tile of queries that those before it do not see, and is a step behind them at
// every other one: nobody waits. But the longest run alone at the end. So, where that costs more than waiting does, one of
// kBackShare heads of each batch entry come behind all others, and start with the longest; they walk from the last query,
// which all see, back to the diagonal. Which ones is a matter of the head alone: its sums are the same in any batch.
constexpr bool kLastFirst = kDqInTurn && (kHasRightBound || kHasLeftBound);
constexpr int kBackShare = CUFLASH_BACK_SHARE;  // or 0: none
constexpr u32 kBackSection = 16;  // of these heads, which are at the same queries, are interleaved
static_assert(kBackShare == 0 || (kDqInTurn && kHasRightBound && !kHasLeftBound), "all heads start at the diagonal");

struct QueryRange : TileRange {
  bool backwards = false;  // from the last tile to the first

  CUFLASH_DEVICE int first() const { return backwards ? stop - 1 : start; }
  CUFLASH_DEVICE int end() const { return backwards ? start - 1 : stop; }
};

CUFLASH_DEVICE void set_direction(QueryRange& tiles, bool backwards) { tiles.backwards = backwards; }
CUFLASH_DEVICE void set_direction(QueryLists&, bool) {}

// The walk over (query head of the group, tile of queries), heads outermost.
struct RangeWalk {
  int head, m_block;
  CUFLASH_DEVICE bool needs_mask(const QueryRange& tiles) const {
    return m_block < tiles.full_start || m_block >= tiles.full_stop;
  }
  CUFLASH_DEVICE void advance(const QueryRange& tiles) {
    m_block += tiles.backwards ? -1 : 1;
    if (m_block == tiles.end()) m_block = tiles.first(), ++head;
  }
  CUFLASH_DEVICE static RangeWalk first(const QueryRange& tiles, int head) { return {head, tiles.first()}; }
};

using Walk = Either<kHasBlockMask, ListWalk, RangeWalk>::Type;
using QueryTiles = Either<kHasBlockMask, QueryLists, QueryRange>::Type;

// The keys of a block, and what every role walks over.
struct KeyTile {
  Work work;
  int num_n_blocks, num_m_blocks, split, head_kv, first_key, key_stop, first_head, num_steps;
  int own_diagonal;  // of the batch entry
  bool walks_back;  // over the queries
  QueryTiles queries;

  // Warp. The work of packed sequences is found beforehand, once for all roles.
  CUFLASH_DEVICE static Work find(const Params& params) {
    const int num_back = num_parts_back(params), num_ahead = num_parts_of(params) - num_back;
    const u32 num_before = heads_in_all(params, num_ahead) * num_tiles_of(params, params.seqlen_k, kBlockN);
    const bool back = kBackShare != 0 && ptx::block_index() >= num_before;
    Work work = schedule_keys(params, ptx::block_index() - (back ? num_before : 0), back ? num_back : num_ahead,
                              back ? kBackSection : params.head_section, kLastFirst && !back);
    if (back) work.head += num_ahead;
    return work;
  }

  CUFLASH_DEVICE explicit KeyTile(const Params& params, const Work& found = {}) {
    const int splits = splits_of(params), group = params.num_heads / params.num_heads_kv;
    num_n_blocks = num_tiles_of(params, params.seqlen_k, kBlockN);
    num_m_blocks = num_tiles_of(params, params.seqlen_q, kBlockM);
    work = kIsPacked ? found : find(params);
    head_kv = work.head / splits;
    split = work.head % splits;
    first_key = work.block * kBlockN;
    key_stop = key_stop_of(params, work.batch);
    own_diagonal = own_diagonal_of(params, work.batch);
    first_head = head_kv * group + group * split / splits;
    const int stop_head = head_kv * group + group * (split + 1) / splits;
    num_steps = find_queries(params, work, first_head, stop_head, key_stop, queries);
    walks_back = kBackShare != 0 && work.head >= num_parts_of(params) - num_parts_back(params);
    set_direction(queries, walks_back);
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
    return kLastFirst && !walks_back ? keys.stop - 1 - work.block : work.block - keys.start;
  }

 private:
  // Blocks that share a tile of keys, each with a part of its query heads; such parts of all heads.
  CUFLASH_DEVICE static int splits_of(const Params& params) { return kSplitsGroup ? params.group_splits : 1; }
  CUFLASH_DEVICE static int num_parts_of(const Params& params) { return params.num_heads_kv * splits_of(params); }
  CUFLASH_DEVICE static int num_parts_back(const Params& params) {
    return kBackShare == 0 ? 0 : num_parts_of(params) / kBackShare;
  }
};
