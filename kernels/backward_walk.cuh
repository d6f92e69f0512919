// The keys of a block of the backward pass on compute capability 9.0, and the tiles of queries that it walks over.
#pragma once
#include "backward.cuh"
#include "config.cuh"
#include "params.cuh"
#include "schedule.cuh"

// Tiles of keys start, and where they take turns add, from the first to the last: the longest first under a causal mask.
// With a left bound from the last to the first, so that they meet no tile of queries before those that add to it first.
constexpr bool kLastFirst = kDqInTurn && kHasLeftBound;
// Under a causal mask those that take turns meet the tiles of queries from the last to the first: all see the last.
constexpr bool kFromLastQuery = kDqInTurn && kHasRightBound && !kHasLeftBound;

// The walk over (query head of the group, tile of queries), heads outermost.
struct Walk {
  int head, m_block;
  CUFLASH_DEVICE void advance(const TileRange& tiles) {
    m_block += kFromLastQuery ? -1 : 1;
    if (m_block == (kFromLastQuery ? tiles.start - 1 : tiles.stop)) m_block = first_of(tiles), ++head;
  }
  CUFLASH_DEVICE static int first_of(const TileRange& tiles) { return kFromLastQuery ? tiles.stop - 1 : tiles.start; }
};

// The keys of a block, and what every role walks over.
struct KeyTile {
  Work work;
  int num_n_blocks, num_m_blocks, split, head_kv, first_key, key_stop, first_head, num_steps;
  TileRange queries;

  CUFLASH_DEVICE explicit KeyTile(const Params& params) {
    const int splits = kSplitsGroup ? params.group_splits : 1, group = params.num_heads / params.num_heads_kv;
    num_n_blocks = ceil_div(params.seqlen_k, kBlockN);
    num_m_blocks = ceil_div(params.seqlen_q, kBlockM);
    work = schedule(params, ptx::block_index(), num_n_blocks, params.num_heads_kv * splits, kLastFirst);
    head_kv = work.head / splits;
    split = work.head % splits;
    first_key = work.block * kBlockN;
    key_stop = key_stop_of(params, work.batch);
    queries = query_tiles(params, first_key, first_key + kBlockN - 1, key_stop);
    first_head = head_kv * group + group * split / splits;
    num_steps = (queries.stop - queries.start) * (head_kv * group + group * (split + 1) / splits - first_head);
  }
  CUFLASH_DEVICE Walk first() const { return {first_head, Walk::first_of(queries)}; }
  // Of a tile of queries among those of all heads and batches.
  CUFLASH_DEVICE i64 index_of(const Params& params, const Walk& walk) const {
    return ((i64)work.batch * params.num_heads + walk.head) * num_m_blocks + walk.m_block;
  }
  // How many of the tiles of keys that a tile of queries sees come before this one.
  CUFLASH_DEVICE u32 turn(const Params& params, int m_block) const {
    const TileRange keys = key_tiles(params, m_block * kBlockM, m_block * kBlockM + kBlockM - 1, key_stop);
    return kLastFirst ? keys.stop - 1 - work.block : work.block - keys.start;
  }
};
