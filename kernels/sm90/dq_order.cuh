// The order in which blocks add to dQ, or to tdQ, on compute capability 9.0 (kDqInOrder).
//
//   barrier   one phase is over when            who waits
//   turn      it is this block's turn at a tile dQ, before it adds to the tile
//   added     dQ of the tile has been added     the thread that ends the turn
//   ended     the turn has been ended           the thread that waits for turns, before the turn after next
#pragma once
#include "common/softmax/backward.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/pipeline.cuh"

constexpr int kTurnStages = kDqInOrder ? 2 : 0;

struct DqTurns {
  static constexpr u32 kBytes = 3 * 8 * kTurnStages;
  using At = Position<kTurnStages>;
  u32 first_turn, first_added, first_ended;

  CUFLASH_DEVICE void place(u32 address) {
    first_turn = address;
    first_added = first_turn + 8 * kTurnStages;
    first_ended = first_added + 8 * kTurnStages;
  }
  CUFLASH_DEVICE Barrier turn(const At& at) const { return {first_turn + 8 * at.stage}; }
  CUFLASH_DEVICE Barrier added(const At& at) const { return {first_added + 8 * at.stage}; }
  CUFLASH_DEVICE Barrier ended(const At& at) const { return {first_ended + 8 * at.stage}; }
  CUFLASH_DEVICE void init() const {
    for (int i = 0; i < kTurnStages; ++i) {
      turn({i}).init(1);
      added({i}).init(4);
      ended({i}).init(1);
    }
  }

  // Warpgroup. A thread of the second warp waits for this block's turns, and a thread of the third ends them: each
  // takes as long as a memory access.
  CUFLASH_DEVICE void keep(const Params& params, const BackwardWork& tile, u32 thread) const {
    if (thread != 32 && thread != 64) return;
    At at;
    QueryTileIterator m_tile = tile.first();
#pragma unroll 1
    for (int step = 0; step < tile.num_steps; ++step, m_tile.advance(tile.queries), at.advance()) {
      u32* turns = dq_order_of(params, tile.num_m_blocks, tile.index_of(params, m_tile));
      const Barrier own_turn = turn(at), own_added = added(at), own_ended = ended(at);
      if (thread == 32) {
        own_ended.wait(at.parity ^ 1);
        ptx::wait_for_turn(turns, tile.turn(params, m_tile.m_block));
        own_turn.arrive();
      } else {
        own_added.wait(at.parity);
        ptx::end_turn(turns);
        own_ended.arrive();
      }
    }
  }
};
