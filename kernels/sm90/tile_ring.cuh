// The ring through which the scheduler, one warp of a block, hands tiles of queries to its other warps.
#pragma once
#include "common/config.cuh"
#include "sm90/pipeline.cuh"

// Whether a warp of each block is a scheduler: it finds the tiles of packed sequences, or claims one tile after
// another.
constexpr bool kHasTileRing = kIsPacked || kDynamicTiles;
// With one stage a tile is claimed when all roles have given back the one before.
constexpr int kTileStages = kDynamicTiles ? 1 : 2;
constexpr u32 kBytesOfTile = 32;

// Barriers, and a tile in each stage. There is room for two.
struct TileRing : Ring<kTileStages> {
  static constexpr u32 kBytes = Ring<2>::kBytes + 2 * kBytesOfTile;

  CUFLASH_DEVICE u32 tile(const Position<kTileStages>& at) const {
    return address + Ring::kBytes + at.stage * kBytesOfTile;
  }
};
