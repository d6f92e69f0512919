// How a block of the backward pass iterates over the tiles of queries, heads outermost: over a range of tiles, or over
// the lists of tiles that masks leave.
#pragma once
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"

static_assert(!kHasLists || !kDqInOrder, "the order of dq counts every tile of keys");

// The tiles of queries that attend to a tile of keys, and the direction of the loop.
struct QueryRange : TileRange {
  bool backwards = false;  // from the last tile to the first

  CUFLASH_DEVICE int first() const { return backwards ? stop - 1 : start; }
  CUFLASH_DEVICE int end() const { return backwards ? start - 1 : stop; }
};

// The lists of a tile of keys: one for each query head, or one for all heads.
struct QueryLists {
  const i32* lists;
  i64 head_stride;
  int stop_head;

  CUFLASH_DEVICE const i32* of(int head) const { return lists + head * head_stride; }
  // The first head from `head` on whose list is not empty; stop_head if there is none.
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
                                QueryLists& queries) {
  const int num_m_blocks = ceil_div(params.seqlen_q, kBlockM), num_n_blocks = ceil_div(params.seqlen_k, kBlockN);
  queries.lists = list_of(params, params.query_lists, work.batch, 0, work.block, num_n_blocks, num_m_blocks);
  queries.head_stride = params.list_heads == 1 ? 0 : (i64)num_n_blocks * (kListHeader + num_m_blocks);
  queries.stop_head = stop_head;
  int steps = 0;
  for (int head = first_head; head < stop_head; ++head) steps += queries.of(head)[0];
  return steps;
}

CUFLASH_DEVICE void set_direction(QueryRange& tiles, bool backwards) { tiles.backwards = backwards; }
CUFLASH_DEVICE void set_direction(QueryLists&, bool) {}

// The iteration over (query head of the group, tile of queries) by ranges, heads outermost.
struct RangeIterator {
  int head, m_block;
  CUFLASH_DEVICE bool needs_mask(const QueryRange& tiles) const {
    return m_block < tiles.full_start || m_block >= tiles.full_stop;
  }
  CUFLASH_DEVICE bool asks_function() const { return true; }
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
};

// The position of an iterator in a list: an index, which takes fewer registers, or, in kernels with a mask function of
// the caller, an address.
struct NumberInList {
  int place;

  CUFLASH_DEVICE void start(const i32*, int first) { place = first; }
  CUFLASH_DEVICE void advance() { ++place; }
  CUFLASH_DEVICE ListEntry entry(const i32* list) const { return {(u32)list[kListHeader + place]}; }
};
struct AddressInList {
  const i32* place;

  CUFLASH_DEVICE void start(const i32* list, int first) { place = list + kListHeader + first; }
  CUFLASH_DEVICE void advance() { ++place; }
  CUFLASH_DEVICE ListEntry entry(const i32*) const { return {(u32)*place}; }
};

// The iteration over (query head of the group, tile of queries) by lists.
struct IndexIterator {
  int head, m_block;
  ListEntry entry;
  Either<kHasMaskFunction, AddressInList, NumberInList>::Type place;

  CUFLASH_DEVICE static IndexIterator first(const QueryLists& queries, int first_head) {
    IndexIterator iterator = {queries.next_head(first_head), 0, {0}, {}};
    iterator.start_list(queries, 0);
    return iterator;
  }
  CUFLASH_DEVICE void advance(const QueryLists& queries) {
    if (entry.is_last()) {
      head = queries.next_head(head + 1);
      start_list(queries, 0);
    } else {
      place.advance();
      look_up(queries);
    }
  }
  // Skips the first `steps` steps, of which there must be more.
  CUFLASH_DEVICE void skip(const QueryLists& queries, int steps) {
    for (int length; steps >= (length = queries.of(head)[0]); head = queries.next_head(head + 1)) steps -= length;
    start_list(queries, steps);
  }
  CUFLASH_DEVICE bool needs_mask(const QueryLists&) const { return entry.needs_mask(); }
  // Whether a function that hides pairs must be called, if the tile needs a mask.
  CUFLASH_DEVICE bool asks_function() const { return entry.asks_function(); }

 private:
  CUFLASH_DEVICE void start_list(const QueryLists& queries, int first) {
    if (head >= queries.stop_head) return;
    place.start(queries.of(head), first);
    look_up(queries);
  }
  CUFLASH_DEVICE void look_up(const QueryLists& queries) {
    entry = place.entry(queries.of(head));
    m_block = entry.tile();
  }
};

using QueryTileIterator = Either<kHasLists, IndexIterator, RangeIterator>::Type;
using QueryTiles = Either<kHasLists, QueryLists, QueryRange>::Type;
