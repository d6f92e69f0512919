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

// Iterates over the tiles of queries of a block, by one thread or by a whole warp.
template <bool is_warp>
CUFLASH_DEVICE auto make_scheduler(const Params& params, const TileRing& ring) {
  if constexpr (kIsPacked)
    return VarlenTileScheduler<is_warp>(ring);
  else if constexpr (kDynamicTiles)
    return DynamicTileScheduler<is_warp>(ring);
  else
    return TileScheduler(params);
}
