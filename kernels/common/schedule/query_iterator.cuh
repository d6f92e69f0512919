// How a block of the backward pass iterates over the tiles of queries, heads outermost: over a range of tiles, or over
// the block-sparse index of the tiles that masks leave.
#pragma once
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"

static_assert(!kHasBlockIndex || !kDqInOrder, "the order of dq counts every tile of keys");

// The tiles of queries that attend to a tile of keys, and the direction of the loop.
struct QueryRange : TileRange {
  bool backwards = false;  // from the last tile to the first

  CUFLASH_DEVICE int first() const { return backwards ? stop - 1 : start; }
  CUFLASH_DEVICE int end() const { return backwards ? start - 1 : stop; }
};

// The rows of the block-sparse index for a tile of keys: one for each query head, or one for all heads.
struct QueryIndex {
  const i32* rows;
  i64 head_stride;
  int stop_head;

  CUFLASH_DEVICE const i32* of(int head) const { return rows + head * head_stride; }
  // The first head from `head` on whose row is not empty; stop_head if there is none.
  CUFLASH_DEVICE int next_head(int head) const {
    while (head < stop_head && of(head)[0] == 0) ++head;
    return head;
  }
};

// Finds the tiles of queries of heads [first_head, stop_head) that attend to a tile of keys. Returns their number, over
// all of these heads.
CUFLASH_DEVICE int find_queries(const Params& params, const Work& work, int first_head, int stop_head, int key_stop,
                                TileRange& tiles) {
  const int first_key = work.block * kBlockN;
  tiles = query_tiles(params, work.batch, first_key, first_key + kBlockN - 1, key_stop);
  return (tiles.stop - tiles.start) * (stop_head - first_head);
}
CUFLASH_DEVICE int find_queries(const Params& params, const Work& work, int first_head, int stop_head, int,
                                QueryIndex& queries) {
  const int num_m_blocks = ceil_div(params.seqlen_q, kBlockM), num_n_blocks = ceil_div(params.seqlen_k, kBlockN);
  queries.rows = index_row_of(params, params.query_index, work.batch, 0, work.block, num_n_blocks, num_m_blocks);
  queries.head_stride = params.index_heads == 1 ? 0 : (i64)num_n_blocks * (kIndexHeader + num_m_blocks);
  queries.stop_head = stop_head;
  int steps = 0;
  for (int head = first_head; head < stop_head; ++head) steps += queries.of(head)[0];
  return steps;
}

CUFLASH_DEVICE void set_direction(QueryRange& tiles, bool backwards) { tiles.backwards = backwards; }
CUFLASH_DEVICE void set_direction(QueryIndex&, bool) {}

// The iteration over (query head of the group, tile of queries) by ranges, heads outermost.
struct RangeIterator {
  int head, m_block;
  CUFLASH_DEVICE bool needs_mask(const QueryRange& tiles) const {
    return m_block < tiles.full_start || m_block >= tiles.full_stop;
  }
  CUFLASH_DEVICE bool evaluates_mask() const { return true; }
  CUFLASH_DEVICE void advance(const QueryRange& tiles) {
    m_block += tiles.backwards ? -1 : 1;
    if (m_block == tiles.end()) m_block = tiles.first(), ++head;
  }
  CUFLASH_DEVICE void skip(const QueryRange& tiles, int steps) {
    const int length = tiles.stop - tiles.start;
    head += steps / length;
    m_block += tiles.backwards ? -(steps % length) : steps % length;
  }
  CUFLASH_DEVICE static RangeIterator first(const QueryRange& tiles, int head) { return {head, tiles.first()}; }
  // Nothing is handed over: each role counts by itself.
  CUFLASH_DEVICE void hand_over(u32) const {}
  CUFLASH_DEVICE void take(u32) {}
};

// The position of an iterator in a row of the index: a number, which takes fewer registers, or a pointer in kernels
// with a mask_mod.
struct PositionInRow {
  int position;

  CUFLASH_DEVICE void start(const i32*, int first) { position = first; }
  CUFLASH_DEVICE void advance() { ++position; }
  CUFLASH_DEVICE IndexEntry entry(const i32* row) const { return {(u32)row[kIndexHeader + position]}; }
};
struct PointerIntoRow {
  const i32* position;

  CUFLASH_DEVICE void start(const i32* row, int first) { position = row + kIndexHeader + first; }
  CUFLASH_DEVICE void advance() { ++position; }
  CUFLASH_DEVICE IndexEntry entry(const i32*) const { return {(u32)*position}; }
};

// The iteration over (query head of the group, tile of queries) by the block-sparse index. With `prefetches`, the
// entries of a row are loaded a step ahead, so that nothing waits for memory but the first step of a row.
template <class PositionOf, bool prefetches>
struct IndexIteratorWith {
  int head, m_block;
  IndexEntry entry, after;
  PositionOf position;

  CUFLASH_DEVICE static IndexIteratorWith first(const QueryIndex& queries, int first_head) {
    IndexIteratorWith iterator = {queries.next_head(first_head), 0, {0}, {0}, {}};
    iterator.start_row(queries, 0);
    return iterator;
  }
  CUFLASH_DEVICE void advance(const QueryIndex& queries) {
    if (entry.is_last()) {
      head = queries.next_head(head + 1);
      start_row(queries, 0);
    } else if constexpr (prefetches) {
      take(queries, after);
    } else {
      position.advance();
      take(queries, position.entry(queries.of(head)));
    }
  }
  // Skips the first `steps` steps, of which there must be more.
  CUFLASH_DEVICE void skip(const QueryIndex& queries, int steps) {
    for (int length; steps >= (length = queries.of(head)[0]); head = queries.next_head(head + 1)) steps -= length;
    start_row(queries, steps);
  }
  CUFLASH_DEVICE bool needs_mask(const QueryIndex&) const { return entry.needs_mask(); }
  // Whether a function that hides pairs must be called, if the tile needs a mask.
  CUFLASH_DEVICE bool evaluates_mask() const { return entry.evaluates_mask(); }
  // Thread. To a ListedTile (sm90/backward_work.cuh).
  CUFLASH_DEVICE void hand_over(u32 address) const {
    ptx::store_shared_b32(address, entry.entry);
    ptx::store_shared_b32(address + 4, (u32)head);
  }

 private:
  CUFLASH_DEVICE void start_row(const QueryIndex& queries, int first) {
    if (head >= queries.stop_head) return;
    position.start(queries.of(head), first);
    take(queries, position.entry(queries.of(head)));
  }
  CUFLASH_DEVICE void take(const QueryIndex& queries, IndexEntry taken) {
    entry = taken;
    m_block = entry.tile();
    if (!prefetches || entry.is_last()) return;
    position.advance();
    after = position.entry(queries.of(head));
  }
};

using IndexIterator = IndexIteratorWith<Either<kHasMaskFunction, PointerIntoRow, PositionInRow>::Type, false>;
using QueryTileIterator = Either<kHasBlockIndex, IndexIterator, RangeIterator>::Type;
// For a role with registers to spare.
using PrefetchingIterator = Either<kHasBlockIndex, IndexIteratorWith<PointerIntoRow, true>, RangeIterator>::Type;
using QueryTiles = Either<kHasBlockIndex, QueryIndex, QueryRange>::Type;
