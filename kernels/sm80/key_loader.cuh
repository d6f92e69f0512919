// How a block that owns a tile of queries loads tiles of keys and values, each into a stage of a ring.
#pragma once
#include "common/io/operands.cuh"
#include "common/schedule/schedule.cuh"
#include "sm80/copy.cuh"

// Shared memory from `s_ring` on: the stages of K, of `bytes_k` each, then those of V.
template <u32 bytes_k, u32 bytes_v>
struct KeyLoader {
  const Params& params;
  const QueryTile& tile;
  const KeyHead g_k, g_v;
  const u32 s_k, s_v;

  CUFLASH_DEVICE KeyLoader(const Params& params_, const QueryTile& tile_, u32 s_ring)
      : params(params_),
        tile(tile_),
        g_k(keys_of(params, params.k, tile.work.batch, tile.head_kv)),
        g_v(keys_of(params, params.v, tile.work.batch, tile.head_kv)),
        s_k(s_ring),
        s_v(s_k + kNumStages * bytes_k) {}

  CUFLASH_DEVICE void load_k(int n_block, int stage) const {
    load_tile<kBlockN, kHeadDim>(s_k + stage * bytes_k, g_k, params.k.row_stride, tile.keys.at(n_block) * kBlockN,
                                 tile.key_stop);
  }
  CUFLASH_DEVICE void load_v(int n_block, int stage) const {
    load_tile<kBlockN, kHeadDimV>(s_v + stage * bytes_v, g_v, params.v.row_stride, tile.keys.at(n_block) * kBlockN,
                                  tile.key_stop);
  }
};
