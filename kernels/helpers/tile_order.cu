// Orders the tiles of a kernel that iterates over a block-sparse index by how many steps they take, which the index
// says. One block, since there are at most some ten thousand tiles.
//
//   bucket     tiles                                                      why
//   0, 1, 2    those that take more than a share of all steps, half or    one of them that started late would keep all
//              a quarter of it, the share being an even part of a block   other blocks waiting
//   3          others, but the last ones, in launch order                 neighbours share operands in L2
//   4 to 31    the last ones, the longest first                           blocks end at about the same time
//
// Tiles of a bucket keep their order, so that the result is the same in every call.
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/schedule/tile_order.cuh"

constexpr bool kIndexesKeys = CUFLASH_INDEXES_KEYS;
constexpr u32 kBlocksAtOnce = CUFLASH_BLOCKS_AT_ONCE;  // blocks of the main kernel that run at a time
constexpr u32 kNumLast = CUFLASH_TILES_SORTED_LAST;
constexpr u32 kBuckets = 32, kFarBuckets = 3, kFirstOfLast = 4, kLevels = kBuckets - kFirstOfLast;
static_assert(kNumWarps == kBuckets && kBuckets == 32, "a warp counts the tiles of a bucket, a lane those of a warp");
constexpr u32 kLevelsOfMean = 7;  // up to the mean number of steps; tiles of four times as many have the last level
constexpr u32 kMostTiles = CUFLASH_MOST_TILES, kTilesOfLane = 4;

// Shared memory. Of each tile, by launch index: its steps, and then its bucket and its rank among the warp's tiles of
// this bucket. Of each bucket and warp: the number of tiles, and then of those that warps before have. Last, sums by
// warp, and then by bucket. Lanes read a row or a column of the counts without bank conflicts.
struct Shared {
  const u32 tiles = ptx::dynamic_shared(), counts = tiles + 4 * kMostTiles,
            sums = counts + 4 * kBuckets * (kNumWarps + 1);

  CUFLASH_DEVICE u32 tile(u32 launch_index) const { return tiles + 4 * launch_index; }
  CUFLASH_DEVICE u32 count(u32 bucket, u32 warp) const { return counts + 4 * (bucket * (kNumWarps + 1) + warp); }
  CUFLASH_DEVICE u32 sum(u32 index) const { return sums + 4 * index; }
};

static_assert(4 * (kMostTiles + kBuckets * (kNumWarps + 1) + kNumWarps) == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Warp. The sum over this lane and those before it.
CUFLASH_DEVICE u32 sum_up_to_lane(u32 value) {
#pragma unroll
  for (u32 distance = 1; distance < 32; distance *= 2) {
    const u32 other = ptx::shuffle(value, (lane_index() - distance) % 32);
    if (lane_index() >= distance) value += other;
  }
  return value;
}
CUFLASH_DEVICE u32 sum_of_lanes(u32 value) { return ptx::shuffle(sum_up_to_lane(value), 31); }

// Where the tiles of a head start in launch order: the inverse of `schedule`.
struct TilesOfHead {
  u32 num_tiles, first, width;  // the first launch index, and how many heads are interleaved

  CUFLASH_DEVICE static TilesOfHead at(const TileOrder& order, u32 head) {
    const u32 most = order.params.head_section, section = head / most * most, num_tiles = order.num_rows;
    const u32 width = min_of(heads_in_all(order.params, order.num_heads) - section, most);
    return {num_tiles, section * num_tiles + head - section, width};
  }
  CUFLASH_DEVICE u32 launch_index(u32 tile) const {
    constexpr bool kLastFirst = kIndexesKeys && kHasRightBound;
    return first + (kLastFirst ? num_tiles - 1 - tile : tile) * width;
  }
};

// Warp. Stores the steps of neighbouring tiles of one head. Those of queries have as many as the index lists tiles of
// keys for them, those of keys as it lists tiles of queries, of all heads of a group. Returns the sum of this lane's.
CUFLASH_DEVICE u32 store_steps(const TileOrder& order, const Shared& shared, u32 head_of_all, int first_tile) {
  const Params& params = order.params;
  const int batch = head_of_all / order.num_heads, head = head_of_all - batch * order.num_heads;
  const int group = kIndexesKeys ? 1 : params.num_heads / params.num_heads_kv;
  const int own_tile = first_tile + (int)lane_index();
  u32 steps[kTilesOfLane] = {}, sum = 0;
  for (int query_head = head * group; query_head < (head + 1) * group; ++query_head) {
    const i32* rows = index_row_of(params, order.index, batch, query_head, 0, order.num_rows, order.length);
#pragma unroll
    for (int i = 0; i < kTilesOfLane; ++i)
      if (own_tile + 32 * i < order.num_rows)
        steps[i] += rows[(i64)(own_tile + 32 * i) * (kIndexHeader + order.length)];
  }
  const TilesOfHead tiles = TilesOfHead::at(order, head_of_all);
#pragma unroll
  for (int i = 0; i < kTilesOfLane; ++i) {
    if (own_tile + 32 * i < order.num_rows)
      ptx::store_shared_b32(shared.tile(tiles.launch_index(own_tile + 32 * i)), steps[i]);
    sum += steps[i];
  }
  return sum;
}

// Block. Stores the steps of all tiles, and returns their sum.
CUFLASH_DEVICE u32 store_all_steps(const TileOrder& order, const Shared& shared) {
  constexpr u32 kTilesOfUnit = 32 * kTilesOfLane;
  const u32 units = ceil_div(order.num_rows, (int)kTilesOfUnit), heads = heads_in_all(order.params, order.num_heads);
  u32 sum = 0;
  for (u32 index = warp_index(); index < units * heads; index += kNumWarps) {
    const u32 head = index / units, unit = index - head * units;
    sum += store_steps(order, shared, head, unit * kTilesOfUnit);
  }
  sum = sum_of_lanes(sum);
  if (lane_index() == 0) ptx::store_shared_b32(shared.sum(warp_index()), sum);
  ptx::sync_block();
  return sum_of_lanes(ptx::load_shared_b32(shared.sum(lane_index())));
}

// The bucket of the tile at a launch index, which has so many of `total` steps.
CUFLASH_DEVICE u32 bucket_of(u32 index, u32 num_tiles, u32 steps, u64 total) {
  const u64 of_blocks = (u64)steps * kBlocksAtOnce;
  if (4 * of_blocks > total) return of_blocks > total ? 0 : 2 * of_blocks > total ? 1 : 2;
  if (index + kNumLast < num_tiles) return kFirstOfLast - 1;
  const u64 level = (u64)steps * num_tiles * kLevelsOfMean / (total == 0 ? 1 : total);
  return kBuckets - 1 - (level < kLevels ? (u32)level : kLevels - 1);
}

// Warp. Calls step(index) for the warp's launch indices, which are neighbours, 32 at a time.
template <class Step>
CUFLASH_DEVICE void for_tiles_of_warp(u32 num_tiles, Step step) {
  const u32 length = ceil_div((int)num_tiles, 32 * kNumWarps) * 32, start = warp_index() * length;
  for (u32 first = start; first < start + length && first < num_tiles; first += 32) step(first + lane_index());
}

// Block. Replaces the steps of tiles by bucket and rank. Each warp counts its tiles of each bucket.
CUFLASH_DEVICE void rank_tiles(const Shared& shared, u32 num_tiles, u32 total) {
  ptx::store_shared_b32(shared.count(lane_index(), warp_index()), 0);
  for_tiles_of_warp(num_tiles, [&](u32 index) {
    const bool has_tile = index < num_tiles;
    const u32 steps = has_tile ? ptx::load_shared_b32(shared.tile(index)) : 0;
    const u32 bucket = has_tile ? bucket_of(index, num_tiles, steps, total) : kBuckets;
    const u32 lanes = ptx::match_any(bucket), before = ptx::population_count(lanes & ((1u << lane_index()) - 1));
    ptx::sync_warp();
    const u32 rank = has_tile ? ptx::load_shared_b32(shared.count(bucket, warp_index())) + before : 0;
    ptx::sync_warp();
    if (!has_tile) return;
    ptx::store_shared_b32(shared.tile(index), bucket * kMostTiles + rank);
    if (before == 0) ptx::store_shared_b32(shared.count(bucket, warp_index()), rank + ptx::population_count(lanes));
  });
  ptx::sync_block();
}

// Block. Replaces the counts of warps by how many tiles of the same bucket warps before have. Returns how many tiles
// are in the bucket `lane_index()`.
CUFLASH_DEVICE u32 add_counts(const Shared& shared) {
  const u32 bucket = warp_index(), count = shared.count(bucket, lane_index());
  const u32 own = ptx::load_shared_b32(count), up_to_own = sum_up_to_lane(own);
  ptx::store_shared_b32(count, up_to_own - own);
  if (lane_index() == 31) ptx::store_shared_b32(shared.sum(bucket), up_to_own);
  ptx::sync_block();
  return ptx::load_shared_b32(shared.sum(lane_index()));
}

// Warp. The first head, in launch order, with tiles that start elsewhere than in this order, or the number of heads.
CUFLASH_DEVICE u32 first_moved_head(const TileOrder& order, u32 in_bucket) {
  const u32 buckets = ptx::ballot(in_bucket > 0), section = order.params.head_section;
  if (buckets % (1u << kFarBuckets) != 0) return 0;
  if (ptx::population_count(buckets >> kFirstOfLast) < 2) return heads_in_all(order.params, order.num_heads);
  const u32 num_tiles = order.num_tiles(), first_of_last = num_tiles > kNumLast ? num_tiles - kNumLast : 0;
  return first_of_last / (section * order.num_rows) * section;
}

CUFLASH_DEVICE void order_tiles(const Params& params) {
  const TileOrder order = kIndexesKeys ? TileOrder::of_queries(params) : TileOrder::of_keys(params);
  const Shared shared;
  const u32 num_tiles = order.num_tiles();
  rank_tiles(shared, num_tiles, store_all_steps(order, shared));
  const u32 in_bucket = add_counts(shared), in_lower_buckets = sum_up_to_lane(in_bucket) - in_bucket;
  u32* const places = order.places();
  for_tiles_of_warp(num_tiles, [&](u32 index) {
    const u32 tile = index < num_tiles ? ptx::load_shared_b32(shared.tile(index)) : 0;
    const u32 bucket = tile / kMostTiles, first = ptx::shuffle(in_lower_buckets, bucket);
    if (index >= num_tiles) return;
    const u32 in_warps_before = ptx::load_shared_b32(shared.count(bucket, warp_index()));
    places[first + in_warps_before + tile % kMostTiles] = index;
  });
  const u32 head = first_moved_head(order, in_bucket);
  if (ptx::thread_index() == 0) order.first_moved_head() = head;
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, order_tiles)
