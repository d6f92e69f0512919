// The order in which tiles start where a block-sparse index tells how many steps each of them takes. The longest ones
// start first, so that blocks do not wait for one of them at the end; helpers/tile_order.cu finds the order.
#pragma once
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"

constexpr bool kHasTileOrder = CUFLASH_HAS_TILE_ORDER;
static_assert(!kHasTileOrder || !kIsPacked, "packed sequences have no block-sparse index");

// The tiles of the axis whose rows an index has, and their order. It lies behind the rows: for each place, the launch
// index of the tile that starts there (`schedule`); then the first head, in launch order, with a tile that has moved.
struct TileOrder {
  const Params& params;
  void* index;
  const int num_rows, length, num_heads;

  CUFLASH_DEVICE static TileOrder of_queries(const Params& params) {
    return {params, params.key_index, ceil_div(params.seqlen_q, kBlockM), ceil_div(params.seqlen_k, kBlockN),
            params.num_heads};
  }
  CUFLASH_DEVICE static TileOrder of_keys(const Params& params) {
    return {params, params.query_index, ceil_div(params.seqlen_k, kBlockN), ceil_div(params.seqlen_q, kBlockM),
            params.num_heads_kv};
  }

  CUFLASH_DEVICE u32 num_tiles() const { return num_rows * num_heads * params.batch; }
  CUFLASH_DEVICE u32* places() const {
    const i64 rows = (i64)params.index_batches * params.index_heads * num_rows;
    return (u32*)index + rows * (kIndexHeader + length);
  }
  CUFLASH_DEVICE u32 launch_index(u32 place) const { return kHasTileOrder ? places()[place] : place; }
  CUFLASH_DEVICE u32& first_moved_head() const { return places()[num_tiles()]; }
};
