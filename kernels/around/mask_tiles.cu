// What a function of the caller leaves of each tile of pairs, for the lists that around/lists.cu makes. A warp asks the
// pairs of a tile, until it has seen a hidden one and a visible one. Tiles that windows and lengths hide are not asked.
#include "common/config.cuh"
#include "common/fragments.cuh"
#include "common/functions.cuh"
#include "common/mask.cuh"
#include "common/params.cuh"
#include "common/schedule.cuh"

constexpr int kRowsAtOnce = 16;

CUFLASH_DEVICE Pairs pairs_of_tile(const Params& params, int batch, int head, int m_block, int n_block) {
  const int first_row = m_block * kBlockM, stop_row = min_of(first_row + kBlockM, params.seqlen_q);
  const int key_stop = key_stop_of(params, batch);
  const TileRange range = key_tiles(params, batch, first_row, stop_row - 1, key_stop);
  if (n_block < range.start || n_block >= range.stop) return Pairs::kNone;
  const int first_key = n_block * kBlockN, stop_key = min_of(first_key + kBlockN, key_stop);
  const Functions functions(params, batch, head);
  bool any = false, all = true;
#pragma unroll 1
  for (int row = first_row; row < stop_row; ++row) {
    for (int key = first_key + (int)lane_index(); key < stop_key; key += 32) {
      const bool shown = functions.shows(row, key);
      any = any || shown;
      all = all && shown;
    }
    if (row % kRowsAtOnce == 0 && ptx::any_lane(any) && ptx::any_lane(!all)) return Pairs::kSome;
  }
  return !ptx::any_lane(any) ? Pairs::kNone : ptx::any_lane(!all) ? Pairs::kSome : Pairs::kAll;
}

CUFLASH_DEVICE void mask_tiles(const Params& params) {
  const int num_n_blocks = ceil_div(params.seqlen_k, kBlockN);
  const i64 num_tiles = (i64)ceil_div(params.seqlen_q, kBlockM) * num_n_blocks;
  const i64 index = (i64)ptx::block_index() * kNumWarps + warp_index(), matrix = index / num_tiles;
  if (matrix >= (i64)params.list_batches * params.list_heads) return;
  const int batch = matrix / params.list_heads, head = matrix % params.list_heads, tile = index % num_tiles;
  const Pairs pairs = pairs_of_tile(params, batch, head, tile / num_n_blocks, tile % num_n_blocks);
  if (lane_index() == 0) ((u8*)params.mask_blocks)[index] = (u8)pairs;
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, mask_tiles)
