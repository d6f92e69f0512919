// The tile schedulers of the persistent kernels of compute capability 9.0: which tiles of queries a block takes, and
// how its roles learn of them.
#pragma once
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "sm90/dynamic_scheduler.cuh"
#include "sm90/tile_ring.cuh"
#include "sm90/varlen_scheduler.cuh"

// Warp. The scheduler of a block, where it has one.
CUFLASH_DEVICE void schedule_tiles(const Params& params, const TileRing& ring) {
  if constexpr (kIsPacked)
    find_tiles(params, ring);
  else if (kDynamicTiles && ptx::elect_lane())
    claim_tiles(params, ring);
}

// Iterates over the tiles of queries of a block, by one thread or by a whole warp. With `gives_back`, the thread calls
// `give_back` for each tile, once.
template <bool is_warp, bool gives_back = false>
CUFLASH_DEVICE auto make_scheduler(const Params& params, const TileRing& ring) {
  if constexpr (kIsPacked)
    return VarlenTileScheduler<is_warp>(ring);
  else if constexpr (kDynamicTiles)
    return DynamicTileScheduler<is_warp, gives_back>(ring);
  else
    return TileScheduler(params);
}
// Where blocks claim tiles early, the producer calls this before the loads of each step, and once if there are none.
template <class Scheduler>
CUFLASH_DEVICE void give_back_early(const Scheduler& scheduler, bool is_first, int steps_after) {
  if constexpr (kGivesBackEarly)
    if (steps_after == kStepsAhead || (is_first && steps_after < kStepsAhead)) scheduler.give_back();
}
