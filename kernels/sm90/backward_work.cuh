// The keys of a block of the backward pass on compute capability 9.0, and the tiles of queries that it iterates over.
#pragma once
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/schedule/query_iterator.cuh"
#include "common/schedule/schedule.cuh"
#include "ptx/tma.cuh"

// The tile of keys of a block, found by the block's launch index, and the split of the tile's steps that is the
// block's own.
struct WorkSplit {
  u32 tile;
  int split, num_splits;

  CUFLASH_DEVICE explicit WorkSplit(const Params& params, u32 block = ptx::block_index())
      : tile(block), split(0), num_splits(1) {
    if (!kSplitsTail || tile < (u32)params.whole_tiles) return;
    const u32 index = tile - params.whole_tiles;
    num_splits = params.tail_splits;
    split = index % num_splits;
    tile = params.whole_tiles + index / num_splits;
  }
};

// A tile of queries of the block-sparse index that the producer has handed over in 8 bytes of shared memory. A role
// that loaded the entries of the index itself would wait for memory at the end of each step.
struct ListedTile {
  int head, m_block;
  IndexEntry entry;
  bool is_masked;  // of the word itself: most steps need nothing else, and the uniform register takes long to fill

  // Warp. The entry lies in a uniform register, so that no thread keeps it while products are made. With dropout, whose
  // numbers are computed from the tile, the assembler then spills up to 68 bytes, and none otherwise.
  CUFLASH_DEVICE void take(u32 address) {
    const u32 word = ptx::load_shared_b32(address);
    is_masked = IndexEntry{word}.needs_mask();
    entry = {kHasDropout ? word : ptx::to_uniform_register(word)};
    m_block = entry.tile();
    head = (int)ptx::load_shared_b32(address + 4);
  }
  CUFLASH_DEVICE bool needs_mask(const QueryIndex&) const { return is_masked; }
  CUFLASH_DEVICE bool evaluates_mask() const { return entry.evaluates_mask(); }
  // The next tile belongs to another head where this one is the last of its row.
  CUFLASH_DEVICE void advance(const QueryIndex&) { head += entry.is_last(); }
  CUFLASH_DEVICE void skip(const QueryIndex&, int) {}
  CUFLASH_DEVICE static ListedTile first(const QueryIndex&, int head) { return {head, 0, {0}, false}; }
};
using QueryTileOfStage = Either<kHasBlockIndex, ListedTile, RangeIterator>::Type;

// The keys of a block, and the steps that every role iterates over.
struct BackwardWork {
  Work work;
  int num_n_blocks, num_m_blocks, split, head_kv, first_key, key_stop, first_head, stop_head, first_step, num_steps;
  int tail_split;    // the index of this block among those of the tile
  int own_diagonal;  // of the batch entry
  bool goes_back;    // from the last tile of queries to the first
  bool is_shared;    // whether other blocks have the same keys
  bool is_idle;      // another block takes all of its steps (kMinSharedSteps)
  QueryTiles queries;

  // Warp. Finds the tile. With packed sequences the block does so once, for all of its roles. The blocks of a cluster
  // share one tile, so there `block` is the number of the cluster.
  CUFLASH_DEVICE static Work find(const Params& params, u32 block = ptx::block_index()) {
    return find_keys(params, WorkSplit(params, block).tile, num_group_splits_of(params));
  }

  CUFLASH_DEVICE explicit BackwardWork(const Params& params, const Work& found = {}, u32 block = ptx::block_index()) {
    const int splits = splits_per_group(params), group = params.num_heads / params.num_heads_kv;
    num_n_blocks = num_tiles_of(params, params.seqlen_k, kBlockN);
    num_m_blocks = num_tiles_of(params, params.seqlen_q, kBlockM);
    work = kIsPacked ? found : find(params, block);
    head_kv = work.head / splits;
    split = work.head % splits;
    first_key = work.block * kBlockN;
    key_stop = key_stop_of(params, work.batch);
    own_diagonal = own_diagonal_of(params, work.batch);
    first_head = head_kv * group + group * split / splits;
    stop_head = head_kv * group + group * (split + 1) / splits;
    num_steps = find_queries(params, work, first_head, stop_head, key_stop, queries);
    goes_back = kReversedOneIn != 0 &&
                work.head >= num_group_splits_of(params) - num_reversed_heads(num_group_splits_of(params));
    set_direction(queries, goes_back);
    first_step = 0;
    tail_split = 0;
    is_shared = kSplitsGroup;
    is_idle = false;
    if constexpr (kSplitsTail) {
      const WorkSplit own(params, block);
      const int splits = kMinSharedSteps > 0 && num_steps < kMinSharedSteps ? 1 : own.num_splits;
      const auto step_of = [&](int split) { return (int)((i64)num_steps * split / splits); };
      is_shared = splits > 1;
      is_idle = own.split >= splits;
      tail_split = own.split;
      first_step = step_of(tail_split);
      num_steps = step_of(tail_split + 1) - first_step;
    }
    if constexpr (kDqInOrder && kIsPacked) {
      if (*overlap_of(params, num_m_blocks)) num_steps = 0;
    }
  }
  template <class Iterator = QueryTileIterator>
  CUFLASH_DEVICE Iterator first() const {
    Iterator m_tile = Iterator::first(queries, first_head);
    if (kSplitsTail && first_step > 0) m_tile.skip(queries, first_step);
    return m_tile;
  }
  // The index of a tile of queries among those of all heads and batch entries.
  template <class Tile>
  CUFLASH_DEVICE i64 index_of(const Params& params, const Tile& m_tile) const {
    return m_tile_of(params, num_m_blocks, work.batch, m_tile.head, m_tile.m_block);
  }
  // Warp. Whether the heads of this block have large rows (common/softmax/backward.cuh). A branch on the statistics in
  // each step, in place of one on what is known before the loop, makes the pass 1 to 2 % slower where no row is large.
  CUFLASH_DEVICE bool has_large_rows(const Params& params) const {
    const int num_groups = ceil_div(seqlen_q_of(params, work.batch), kGroupRows);
    bool large = false;
#pragma unroll 1
    for (int head = first_head; head < stop_head; ++head) {
      const Real* stats = stats_of(params, work.batch, head);
#pragma unroll 4
      for (int group = lane_index(); group < num_groups; group += 32)
        large |= is_of_large(stats[group * kGroupRows * 2]);
    }
    return ptx::any_lane(large);
  }
  // This block's turn to add to dQ of a tile of queries: how many tiles of keys that these queries attend to come
  // before its own.
  CUFLASH_DEVICE u32 turn(const Params& params, int m_block) const {
    const int first_row = m_block * kBlockM;
    const TileRange keys = key_tiles(params, work.batch, first_row, first_row + kBlockM - 1, key_stop);
    return kLastFirst && !goes_back ? keys.stop - 1 - work.block : work.block - keys.start;
  }
  // Where a block that splits its tile with others leaves its partial sums.
  CUFLASH_DEVICE Real* partials(const Params& params, u32 thread, u32 block = ptx::block_index()) const {
    if constexpr (kSplitsTail) return partials_at(params, block - params.whole_tiles, thread);
    return partials_at(params, first_partial_of(params, num_n_blocks, work.batch, head_kv, work.block) + split, thread);
  }
};
