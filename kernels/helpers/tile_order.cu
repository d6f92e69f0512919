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
constexpr u32 kLevelsOfMean =
    7;  // levels up to the mean number of steps; tiles of four times as many have the last one

// How many steps the tile at a launch index takes: the tiles of keys that the index lists for it, or those of queries
// of all heads of a group.
CUFLASH_DEVICE u32 steps_of(const TileOrder& order, u32 launch_index) {
  const Params& params = order.params;
  const TileSlot slot = schedule(params, launch_index, order.num_rows, order.num_heads, params.head_section,
                                 kIndexesKeys && kHasRightBound);
  const int group = kIndexesKeys ? 1 : params.num_heads / params.num_heads_kv;
  u32 steps = 0;
  for (int head = slot.head * group; head < (slot.head + 1) * group; ++head)
    steps += index_row_of(params, order.index, slot.batch, head, slot.block, order.num_rows, order.length)[0];
  return steps;
}

// Warp. The sum over its lanes.
CUFLASH_DEVICE u32 sum_of_lanes(u32 value) {
  u32 sum = 0;
  for (u32 lane = 0; lane < 32; ++lane) sum += ptx::shuffle(value, lane);
  return sum;
}

// The tiles, by launch index, and the bucket of each.
struct Tiles {
  u32 *const steps, num_tiles;
  u64 total;

  // Block. Finds the steps of each tile and of all, by way of `shared_sums`.
  CUFLASH_DEVICE Tiles(const TileOrder& order, u32 shared_sums)
      : steps(order.places() + order.num_tiles() + 1), num_tiles(order.num_tiles()) {
    u32 own = 0;
#pragma unroll 4
    for (u32 i = ptx::thread_index(); i < num_tiles; i += kNumThreads) {
      steps[i] = steps_of(order, i);
      own += steps[i];
    }
    const u32 of_warp = sum_of_lanes(own);
    if (lane_index() == 0) ptx::store_shared_b32(shared_sums + 4 * warp_index(), of_warp);
    ptx::sync_block();
    total = sum_of_lanes(lane_index() < kNumWarps ? ptx::load_shared_b32(shared_sums + 4 * lane_index()) : 0);
  }
  CUFLASH_DEVICE u32 bucket_of(u32 index) const {
    const u64 of_blocks = (u64)steps[index] * kBlocksAtOnce;
    if (4 * of_blocks > total) return of_blocks > total ? 0 : 2 * of_blocks > total ? 1 : 2;
    if (index + kNumLast < num_tiles) return kFirstOfLast - 1;
    const u64 level = (u64)steps[index] * num_tiles * kLevelsOfMean / (total == 0 ? 1 : total);
    return kBuckets - 1 - (level < kLevels ? (u32)level : kLevels - 1);
  }
  // Warp. Visits the warp's tiles, which are neighbours, 32 at a time, and the buckets of these one after another:
  // visit(index, bucket, lanes, is_own), where `lanes` is a mask of those whose tile is in the bucket.
  template <class Visit>
  CUFLASH_DEVICE void visit_tiles_of_warp(Visit visit) const {
    const u32 length = ceil_div((int)num_tiles, 32 * kNumWarps) * 32, start = warp_index() * length;
    for (u32 first = start; first < start + length && first < num_tiles; first += 32) {
      const u32 index = first + lane_index();
      const bool has_tile = index < num_tiles;
      const u32 own = has_tile ? bucket_of(index) : kBuckets;
      for (u32 left = ptx::ballot(has_tile); left != 0;) {
        const u32 bucket = ptx::shuffle(own, 31 - ptx::leading_zeros(left)), lanes = ptx::ballot(own == bucket);
        visit(index, bucket, lanes, own == bucket);
        left &= ~lanes;
      }
    }
  }
};

// Block. The first place of a warp's tiles of bucket `lane_index()`: after those of lower buckets, and of this bucket
// in warps before. `count` is how many such tiles the warp has, `num_far` becomes how many tiles have left their
// neighbours.
CUFLASH_DEVICE u32 first_place(u32 count, u32 shared_counts, u32& num_far) {
  const auto count_at = [&](u32 warp) { return shared_counts + 4 * (warp * kBuckets + lane_index()); };
  ptx::store_shared_b32(count_at(warp_index()), count);
  ptx::sync_block();
  u32 of_bucket = 0, place = 0;
  for (u32 warp = 0; warp < kNumWarps; ++warp) {
    const u32 of_warp = ptx::load_shared_b32(count_at(warp));
    of_bucket += of_warp;
    if (warp < warp_index()) place += of_warp;
  }
  num_far = 0;
  for (u32 bucket = 0; bucket < kBuckets; ++bucket) {
    const u32 of_lower = ptx::shuffle(of_bucket, bucket);
    if (bucket < lane_index()) place += of_lower;
    if (bucket < kFarBuckets) num_far += of_lower;
  }
  return place;
}

CUFLASH_DEVICE void order_tiles(const Params& params) {
  const TileOrder order = kIndexesKeys ? TileOrder::of_queries(params) : TileOrder::of_keys(params);
  const u32 shared_sums = ptx::dynamic_shared(), shared_counts = shared_sums + 4 * kNumWarps, lane = lane_index();
  const Tiles tiles(order, shared_sums);
  u32 count = 0, num_far;
  tiles.visit_tiles_of_warp([&](u32, u32 bucket, u32 lanes, bool) {
    if (lane == bucket) count += ptx::population_count(lanes);
  });
  u32 place = first_place(count, shared_counts, num_far), *const places = order.places();
  tiles.visit_tiles_of_warp([&](u32 index, u32 bucket, u32 lanes, bool is_own) {
    const u32 first = ptx::shuffle(place, bucket);
    if (is_own) places[first + ptx::population_count(lanes & ((1u << lane) - 1))] = index;
    if (lane == bucket) place += ptx::population_count(lanes);
  });
  if (ptx::thread_index() == 0) order.moves_far() = num_far > 0;
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, order_tiles)
