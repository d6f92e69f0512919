// The warpgroups of sm90/backward.cu other than the consumers: the producer, dQ, and the order in which blocks add to
// dQ.
#pragma once
#include "common/io/clear_dq.cuh"
#include "common/io/operands.cuh"
#include "sm90/backward_layout.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/score_arg_sums.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

// How the producer iterates. It is a warp of dQ, which else waits for the index at the end of each step: at head_dim 64
// the pass takes 1 % longer. Where scores have bias terms or derivatives, prefetching would make the kernel spill.
using LoadedTile = Either<kFactorInExponent && !kHasDerivative, PrefetchingIterator, QueryTileIterator>::Type;

// Warp. Loads the tiles of a block: K and V at the start, and tiles of queries as stages become free. All lanes keep
// track of the position, though only one of them issues the loads. So the compiler knows that the coordinates are the
// same in all lanes, as TMA requires.
struct Producer {
  const BackwardParams& params;
  const Shared& shared;
  const BackwardWork& tile;
  LoadedTile next;
  Position<kNumStages> at;
  Position<kListedSlots> listed;
  int steps_left;

  CUFLASH_DEVICE Producer(const BackwardParams& params_, const Shared& shared_, const BackwardWork& tile_)
      : params(params_), shared(shared_), tile(tile_), next(tile_.first<LoadedTile>()), steps_left(tile_.num_steps) {}

  CUFLASH_DEVICE void load_keys() const {
    if (!ptx::elect_lane()) return;
    shared.kv_full.arrive_expect(kBytesK + kBytesV);
    const int first_key = key_start_of(tile.work.batch) + tile.first_key, batch = entry_of(tile.work.batch);
    load_chunks<kBlockN, kDim>(shared.k, params.maps[kMapK], shared.kv_full, first_key, tile.head_kv, batch);
    if constexpr (kHasValues)
      load_chunks<kBlockN, kDimV>(shared.v, params.maps[kMapV], shared.kv_full, first_key, tile.head_kv, batch);
  }
  CUFLASH_DEVICE void load_queries() {
    if (steps_left-- <= 0) return;
    if (ptx::elect_lane()) load_next();
    next.advance(tile.queries);
    at.advance();
    listed.advance();
  }

 private:
  // Loads what row reductions add to the statistics of queries.
  CUFLASH_DEVICE void load_reductions(u32 s_stats, int row, const Barrier& q_full) const {
#if CUFLASH_ROW_REDUCTIONS
    const RowReductionGradients of_head(params.common, tile.work.batch, next.head);
    if constexpr (kTakesDentropy)
      ptx::load_bulk(s_stats + kStatsOfEntropy, of_head.dentropy + row, kBytesDentropy, q_full.address);
    if constexpr (kTakesDmax) {
      ptx::load_bulk(s_stats + kStatsOfMax, of_head.dmax + row, kBytesDmax, q_full.address);
      ptx::load_bulk(s_stats + kStatsOfMax + kBytesDmax, of_head.first_max + row, kBytesDmax, q_full.address);
    }
#endif
  }
  CUFLASH_DEVICE void load_next() const {
    const Entry batch = tile.work.batch;
    const int row = next.m_block * kBlockM, first_row = query_start_of(batch) + row;
    const Barrier q_full = shared.q_ring.full(at), do_full = shared.do_ring.full(at);
    const auto load_dout = [&]() {
      if constexpr (kHasValues) {
        do_full.arrive_expect(kBytesDo);
        load_chunks<kBlockM, kDimV>(shared.dout + at.stage * kBytesDo, params.maps[kMapDout], do_full, first_row,
                                    next.head, entry_of(batch));
      }
    };
    shared.do_ring.empty(at).wait(at.parity ^ 1);
    if constexpr (kSplitsRoles) load_dout();  // the consumer that makes dV gives its stage back before the other does
    shared.q_ring.empty(at).wait(at.parity ^ 1);
    next.hand_over(shared.listed_at(listed));
    q_full.arrive_expect(kBytesQ + kBytesBias + kBytesStats);
    load_chunks<kBlockM, kDim>(shared.q + at.stage * kBytesQ, params.maps[kMapQ], q_full, first_row, next.head,
                               entry_of(batch));
    const u32 s_stats = shared.stats + at.stage * kBytesStats;
    ptx::load_bulk(s_stats, stats_of(params.common, batch, next.head) + row * 2, kBlockM * 8, q_full.address);
    if constexpr (kTakesDentropy || kTakesDmax) load_reductions(s_stats, row, q_full);
    if constexpr (kBiasOfPairs)
      load_bias(params.common, shared.bias + at.stage * kBytesBias, params.maps[kMapBias], q_full, row, tile.first_key,
                next.head, entry_of(batch));
    if constexpr (!kSplitsRoles) load_dout();
  }
};

// The last warpgroup where blocks add to dQ in order. Its first warp is the producer, others keep the order.
CUFLASH_DEVICE void keep_dq_order(const BackwardParams& params, const Shared& shared, const Work& found, u32 thread) {
  const Params& common = params.common;
  const BackwardWork tile(common, found);
  if (tile.num_steps == 0) return;
  if (ptx::uniform(thread / 32) == 0) {
    Producer producer(params, shared, tile);
    producer.load_keys();
#pragma unroll 1
    while (producer.steps_left > 0) producer.load_queries();
    return;
  }
  shared.turns.keep(common, tile, thread);
}

// [GEMM 7] dQ = dS K, for kDqColumns columns of K. The first fragments of dS are in registers, the others in shared
// memory.
CUFLASH_DEVICE void issue_dq(float (&dq)[kDqColumns / 8][4], const Fragment (&ds)[kDqHeld], u64 a, u64 b) {
  issue(dq, [&]() __attribute__((always_inline)) {
#pragma unroll
    for (int k = 0; k < kDqHeld; ++k) ptx::wgmma<true>(Element{}, dq, ds[k].word, along_k_transposed(b, k), k > 0);
#pragma unroll
    for (int k = kDqHeld; k < kDsFragments; ++k)
      ptx::wgmma<true, true>(Element{}, dq, along_k_transposed(a, k), along_k_transposed(b, k), true);
  });
}

// The warpgroup of dQ. For each tile of queries it makes the partial dQ of the block's keys, and adds it to
// the sum in memory.
CUFLASH_DEVICE void accumulate_dq(const BackwardParams& params, const Shared& shared, const Work& found, u32 thread) {
  const Params& common = params.common;
  const BackwardWork tile(common, found);
  const bool produces = !kDqInOrder && ptx::uniform(thread / 32) == 0;
  Producer producer(params, shared, tile);
  if (produces && tile.num_steps > 0) {
    producer.load_keys();
    for (int i = 0; i < kNumStages; ++i) producer.load_queries();
  }
  if (kClearsAhead && WorkSplit(common).split == 0) clear_ahead(common, tile.num_m_blocks, tile.work, thread);
  if (tile.num_steps == 0) return;
  if constexpr (kClearsAhead) wait_for_clears(common, tile.num_m_blocks, tile.work);
  shared.kv_full.wait(0);
  Position<kDsStages> at;
  DqTurns::At turn_at;
  Position<kNumStages> q_at;
  QueryTileOfStage m_tile = tile.first<QueryTileOfStage>();
  Position<kListedSlots> listed;
#pragma unroll 1
  for (int step = 0; step < tile.num_steps; ++step, m_tile.advance(tile.queries), at.advance(), listed.advance()) {
    // Without an index, the tile is known before dS' arrives.
    if constexpr (kHasBlockIndex) shared.ds_ring.full(at).wait(at.parity);
    m_tile.take(shared.listed_at(listed));
    float* accumulator = (float*)common.dq_accumulator + tile.index_of(common, m_tile) * (kBlockM * kDim) + thread * 4;
    if constexpr (!kHasBlockIndex) shared.ds_ring.full(at).wait(at.parity);
    ptx::pause<kDqDelay>();
#if CUFLASH_NEEDS_SCORE_ARGS
    StepSums step_sums;
    step_sums.load(shared.step_sums + at.stage * kBytesStepSums, thread);
    const auto add_step_sums = [&]() __attribute__((always_inline)) {
      if constexpr (kStepSums > 0)
        step_sums.add(common, Functions(common, tile.work.batch, m_tile.head), m_tile.m_block * kBlockM, tile.first_key,
                      thread);
    };
#else
    const auto add_step_sums = []() {};
#endif
    if constexpr (!kDqByReduction) {  // dq is not wanted
      arrive_as_warp(shared.ds_ring.empty(at));
      add_step_sums();
      if (produces) producer.load_queries();
      continue;
    }
    const u32 s_ds = shared.ds + at.stage * kBytesDs;
    const u64 a = descriptor_of_transposed<kBlockN>(s_ds);
    Fragment ds[kDqHeld];
    load_fragments_chunked_transposed(s_ds, thread / 32 * 16, ds);
    if constexpr (kDqHoldsDs) arrive_as_warp(shared.ds_ring.empty(at));
    float dq[kDqColumns / 8][4];
    constexpr int slices = kDim / kDqColumns;
    repeat<slices>([&](auto slice) {
      constexpr int index = decltype(slice)::value, first = index * kDqColumns;
      const u64 b =
          descriptor_of_transposed<kBlockN>(shared.k + first / kChunk * kBlockN * kLineBytes) + first % kChunk * 2 / 16;
      issue_dq(dq, ds, a, b);
      if constexpr (kDqInOrder && index == 0) shared.turns.turn(turn_at).wait(turn_at.parity);
      if (kLoadsEarly && index + 1 == slices && produces) producer.load_queries();
      wait_for<0>(dq);
      if constexpr (!kDqHoldsDs && index + 1 == slices) arrive_as_warp(shared.ds_ring.empty(at));
#pragma unroll
      for (int n = 0; n < kDqColumns / 8; ++n)
        ptx::reduce_add_x4(accumulator + (index * kDqColumns / 8 + n) * 128 * 4, dq[n]);
    });
    if constexpr (kDqInOrder) {
      arrive_as_warp(shared.turns.added(turn_at));
      turn_at.advance();
      arrive_as_warp(shared.do_ring.empty(q_at));
      q_at.advance();
    }
    if (!kLoadsEarly && produces) producer.load_queries();
    add_step_sums();
  }
}
