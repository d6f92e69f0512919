// A dynamic tile scheduler: blocks claim one tile of queries after another, the longest ones of some heads first. So
// all blocks end at about the same time, however much their tiles differ in length.
#pragma once
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/schedule/arrivals.cuh"
#include "common/schedule/schedule.cuh"
#include "common/schedule/tile_order.cuh"
#include "sm90/tile_ring.cuh"

// Thread. The scheduler. The first tile of a block is the one of its index. For others it counts arrivals, of which the
// last one of each block finds no tile. Then it hands over a tile with head -1 as the end mark.
CUFLASH_DEVICE void claim_tiles(const Params& params, const TileRing& ring) {
  const int num_m_blocks = ceil_div(params.seqlen_q, kBlockM);
  const u32 num_tiles = num_m_blocks * params.num_heads * params.batch;
  const Arrivals claims(params, 0, num_tiles);
  claims.prepare();
  Position<kTileStages> at;
  const auto put = [&](const TileSlot& slot) {
    ptx::store_shared_b128(ring.tile(at), {(u32)slot.block, (u32)slot.head, (u32)slot.batch, 0});
    ring.full(at).arrive();
    at.advance();
  };
  u32 index = ptx::block_index();
#pragma unroll 1
  while (index < num_tiles) {
    put(schedule(params, TileOrder::of_queries(params).launch_index(index), num_m_blocks, params.num_heads,
                 params.head_section, kHasRightBound));
    ring.empty(at).wait(at.parity ^ 1);  // until all roles have given the tile back
    index = ptx::num_blocks() + claims.arrive();
  }
  put({0, -1, 0});
}

// The scheduler of the other roles: the tiles that the scheduler hands over. Consumers, which read them as warps, give
// a tile back at once; the producer, a thread, does when it has started all loads for it. So a block claims its next
// tile late: one that it claimed when it started a long tile would have to wait, while others have nothing left to do.
//
// With `gives_back` the producer gives it back by itself, kStepsAhead steps before the last loads: a claim takes about
// as long. On an H200 it makes causal passes of head dimensions 128 and 256 up to 1 % shorter, those with block masks
// 2 to 5 %; at 64, where it costs up to 1 %, a claim is not waited for.
constexpr bool kGivesBackEarly = kDynamicTiles && kDim > 64;
constexpr int kStepsAhead = 4;

template <bool is_warp, bool gives_back>
struct DynamicTileScheduler {
  TileRing ring;
  Position<kTileStages> at;
  Work current;

  CUFLASH_DEVICE explicit DynamicTileScheduler(const TileRing& ring_) : ring(ring_) { read(); }

  CUFLASH_DEVICE bool more() const { return current.head >= 0; }
  CUFLASH_DEVICE Work work(const Params&) const { return current; }
  CUFLASH_DEVICE void give_back() const { ring.empty(at).arrive(); }
  CUFLASH_DEVICE void advance() {
    if constexpr (!is_warp && !gives_back) give_back();
    at.advance();
    read();
  }

 private:
  CUFLASH_DEVICE void read() {
    ring.full(at).wait(at.parity);
    const Bytes16 tile = ptx::load_shared_b128(ring.tile(at));
    if constexpr (is_warp) arrive_as_warp(ring.empty(at));
    const auto value = [](u32 word) { return (int)(is_warp ? ptx::uniform(word) : word); };
    current = {value(tile.word[0]), value(tile.word[1]), value(tile.word[2])};
  }
};
