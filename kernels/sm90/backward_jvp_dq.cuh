// The warpgroup of sm90/backward_jvp.cu that makes tdQ, and the producer, which is one of its warps.
#pragma once
#include "common/io/clear_dq.cuh"
#include "common/io/operands.cuh"
#include "sm90/backward_jvp_layout.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

// Warp. Loads the tiles of a block: K, V and their tangents at the start, and tiles of queries as stages become free.
// All lanes keep track of the position, though only one of them issues the loads. So the compiler knows that the
// coordinates are the same in all lanes, as TMA requires.
struct Producer {
  const BackwardJvpParams& params;
  const Shared& shared;
  const BackwardWork& tile;
  QueryTileIterator next;
  Position<kNumStages> at;
  u32 q_parity = 0;  // of the one stage of Q, where there is one
  int part = 0;
  int steps_left;

  CUFLASH_DEVICE Producer(const BackwardJvpParams& params_, const Shared& shared_, const BackwardWork& tile_)
      : params(params_),
        shared(shared_),
        tile(tile_),
        next(tile_.first()),
        steps_left(tile_.num_steps * (kBlockM / kStageRows)) {}

  CUFLASH_DEVICE void load_keys() const {
    if (!ptx::elect_lane()) return;
    shared.kv_full.arrive_expect((1 + kMovesK) * kBytesK + (1 + kMovesV) * kBytesV);
    const int first_key = key_start_of(tile.work.batch) + tile.first_key, batch = entry_of(tile.work.batch);
    const auto load = [&](u32 to, auto columns, int map) {
      load_chunks<kBlockN, decltype(columns)::value>(to, params.map[map], shared.kv_full, first_key, tile.head_kv,
                                                     batch);
    };
    load(shared.k, Integer<kDim>{}, 1);
    if constexpr (kMovesK) load(shared.tk, Integer<kDim>{}, kMapOfTk);
    load(shared.v, Integer<kDimV>{}, 2);
    if constexpr (kMovesV) load(shared.tv, Integer<kDimV>{}, kMapOfTv);
  }
  // As much as the stages hold.
  CUFLASH_DEVICE void load_first() {
    load_keys();
    for (int i = 0; i < kNumStages; ++i) load_queries();
  }
  CUFLASH_DEVICE void load_queries() {
    if (steps_left-- <= 0) return;
    if (ptx::elect_lane()) load_next();
    at.advance();
    q_parity ^= 1;
    if (kStageRows < kBlockM && ++part < kParts) return;
    part = 0;
    next.advance(tile.queries);
  }

 private:
  CUFLASH_DEVICE void load_next() const {
    const Params& common = params.common;
    const Entry batch = tile.work.batch;
    const int row = next.m_block * kBlockM + part * kStageRows, first_row = query_start_of(batch) + row;
    const Position<kQStages> q_at =
        kQStages == 1 ? Position<kQStages>{0, q_parity} : Position<kQStages>{at.stage, at.parity};
    const Barrier q_full = shared.q_ring.full(q_at), do_full = shared.do_ring.full(at);
    const auto load = [&](u32 to, auto columns, int map, const Barrier& full) {
      load_chunks<kStageRows, decltype(columns)::value>(to, params.map[map], full, first_row, next.head,
                                                        entry_of(batch));
    };
    shared.do_ring.empty(at).wait(at.parity ^ 1);
    do_full.arrive_expect(kBytesDo + kBytesTdo + 2 * kBytesStats);
    load(shared.dout + at.stage * kBytesDo, Integer<kDimV>{}, 3, do_full);
    if constexpr (kHasTdout) load(shared.tdout + at.stage * kBytesDo, Integer<kDimV>{}, kMapOfTdo, do_full);
    ptx::load_bulk(shared.stats + at.stage * kBytesStats, stats_of(common, batch, next.head) + row * 2, kBytesStats,
                   do_full.address);
    ptx::load_bulk(shared.tangents + at.stage * kBytesStats, row_tangents_of(common, batch, next.head) + row * 2,
                   kBytesStats, do_full.address);
    shared.q_ring.empty(q_at).wait(q_at.parity ^ 1);
    q_full.arrive_expect((1 + kMovesQ) * kBytesQ);
    load(shared.q + q_at.stage * kBytesQ, Integer<kDim>{}, 0, q_full);
    if constexpr (kMovesQ) load(shared.tq + q_at.stage * kBytesQ, Integer<kDim>{}, kMapOfTq, q_full);
  }
};

// [GEMM 7] tdQ = tdX K + dX tK, for kTdqColumns columns from `first` on.
CUFLASH_DEVICE void issue_tdq(float (&tdq)[kTdqColumns / 8][4], u32 s_tdx, u32 s_dx, const Shared& shared, int first) {
  const auto columns_of = [&](u32 tile) {
    return descriptor_of_transposed<kBlockN>(tile + first / kChunk * kBlockN * kLineBytes) + first % kChunk * 2 / 16;
  };
  const u64 tdx = descriptor_of_transposed<kBlockN>(s_tdx), k = columns_of(shared.k);
  const u64 dx = descriptor_of_transposed<kBlockN>(s_dx), tk = columns_of(shared.tk);
  issue(tdq, [&]() __attribute__((always_inline)) {
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i)
      ptx::wgmma<true, true>(Element{}, tdq, along_k_transposed(tdx, i), along_k_transposed(k, i), i > 0);
    if constexpr (kSumsTdqOfDx) {
#pragma unroll
      for (int i = 0; i < kBlockN / 16; ++i)
        ptx::wgmma<true, true>(Element{}, tdq, along_k_transposed(dx, i), along_k_transposed(tk, i), true);
    }
  });
}

// The warpgroup of tdQ. For each tile of queries it makes what the block's keys add to tdQ, and adds it to the sum in
// memory.
CUFLASH_DEVICE void accumulate_tdq(const BackwardJvpParams& params, const Shared& shared, const Work& found,
                                   u32 thread) {
  const Params& common = params.common;
  const BackwardWork tile(common, found);
  if (!kClearsAhead && tile.num_steps == 0) return;
  const bool produces = !kHasProducer && ptx::uniform(thread / 32) == 0;
  Producer producer(params, shared, tile);
  if (produces && (!kClearsAhead || tile.num_steps > 0)) producer.load_first();
  if constexpr (kClearsAhead) {
    clear_ahead(common, tile.num_m_blocks, tile.work, thread);
    if (tile.num_steps == 0) return;
    wait_for_clears(common, tile.num_m_blocks, tile.work);
  }
  shared.kv_full.wait(0);
  Position<kDxStages> at;
  DqTurns::At turn_at;
  QueryTileIterator m_tile = tile.first();
#pragma unroll 1
  for (int step = 0; step < tile.num_steps; ++step, m_tile.advance(tile.queries), at.advance()) {
    shared.dx_ring.full(at).wait(at.parity);
    if constexpr (kSumsTdq) {
      float* sum = (float*)common.dq_accumulator + tile.index_of(common, m_tile) * (kBlockM * kDim) + thread * 4;
      float tdq[kTdqColumns / 8][4];
      constexpr int kSlices = kDim / kTdqColumns;
      repeat<kSlices>([&](auto slice) {
        constexpr int index = decltype(slice)::value;
        issue_tdq(tdq, shared.tdx + at.stage * kBytesDx, shared.dx + at.stage * kBytesDx, shared, index * kTdqColumns);
        if constexpr (kDqInOrder && index == 0) shared.turns.turn(turn_at).wait(turn_at.parity);
        if (index + 1 == kSlices && produces) producer.load_queries();
        wait_for<0>(tdq);
        if constexpr (index + 1 == kSlices) arrive_as_warp(shared.dx_ring.empty(at));
#pragma unroll
        for (int n = 0; n < kTdqColumns / 8; ++n)
          ptx::reduce_add_x4(sum + (index * kTdqColumns / 8 + n) * 128 * 4, tdq[n]);
      });
      if constexpr (kDqInOrder) {
        arrive_as_warp(shared.turns.added(turn_at));
        turn_at.advance();
      }
    } else {
      arrive_as_warp(shared.dx_ring.empty(at));
      if (produces) producer.load_queries();
    }
  }
}

// The warpgroup of the producer, where there is one: its first warp. Others keep the order of tdQ.
CUFLASH_DEVICE void produce(const BackwardJvpParams& params, const Shared& shared, const Work& found, u32 thread) {
  const BackwardWork tile(params.common, found);
  if constexpr (kDqInOrder) {
    if (ptx::uniform(thread / 32) != 0) shared.turns.keep(params.common, tile, thread);
  }
  if (ptx::uniform(thread / 32) != 0 || tile.num_steps == 0) return;
  Producer producer(params, shared, tile);
  producer.load_keys();
#pragma unroll 1
  while (producer.steps_left > 0) producer.load_queries();
}
