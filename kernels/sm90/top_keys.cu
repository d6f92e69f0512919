// The strongest keys of each query, in half precision, with wgmma and TMA (compute capability 9.0): of the scores of a
// row the largest, with their keys, and weights exp(S - lse).
//
// A block owns kBlockM queries of one head, 64 for each consumer warpgroup. The last warp, the producer, loads the
// tiles of keys twice: first consumers look for a threshold of each row, then for the scores that reach it
// (common/softmax/candidates.cuh). A stage is given back as soon as S is in registers, so that the next tile arrives
// while candidates are found; products of the other warpgroups of an SM run at the same time.
//
//   barrier      one phase is over when            who waits
//   q_full       Q has arrived                     consumers, before the first S
//   full[i]      K is in stage i                   consumers, before S
//   empty[i]     every warp has its S              producer, before the next K in stage i
#include "common/softmax/candidates.cuh"
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "sm90/key_tile.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr int kConsumers = kBlockM / 64;
constexpr int kNTiles = kBlockN / 8;
static_assert(kNumWarps == 4 * kConsumers + 1, "the consumers and a producer");

// Shared memory: Q, the ring of K, what each warp needs for its candidates, barriers.
constexpr u32 kBytesQ = chunked_bytes(kBlockM, kDim);
constexpr u32 kBytesK = chunked_bytes(kBlockN, kDim);
static_assert(kBytesQ + kNumStages * kBytesK + 4 * kConsumers * kBytesCandidates + Ring<kNumStages>::kBytes + 16 ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

struct TopParams {
  Params common;
  TensorMap maps[2];  // of q and k
};
static_assert(sizeof(TopParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

struct Shared {
  u32 q, k, candidates;
  Ring<kNumStages> ring;
  Barrier q_full;

  CUFLASH_DEVICE Shared() {
    q = ptx::dynamic_shared();
    k = q + kBytesQ;
    candidates = k + kNumStages * kBytesK;
    ring = {candidates + 4 * kConsumers * kBytesCandidates};
    q_full = {ring.address + Ring<kNumStages>::kBytes};
  }
};

// The producer: one thread.
CUFLASH_DEVICE void produce(const TopParams& params, const Shared& shared, const QueryTile& tile) {
  if (tile.keys.start >= tile.keys.stop) return;
  const int batch = entry_of(tile.work.batch);
  shared.q_full.arrive_expect(kBytesQ);
  load_chunks<kBlockM, kDim>(shared.q, params.maps[0], shared.q_full, query_start_of(tile.work.batch) + tile.first_row,
                             tile.work.head, batch);
  Position<kNumStages> at;
#pragma unroll 1
  for (int pass = needs_threshold(tile.keys.stop - tile.keys.start) ? 0 : 1; pass < 2; ++pass)
#pragma unroll 1
    for (int n_block = tile.keys.start; n_block < tile.keys.stop; ++n_block, at.advance()) {
      const KeyTile keys(params.common, batch, tile.head_kv, tile.keys.at(n_block), tile.key_stop,
                         key_start_of(tile.work.batch));
      shared.ring.empty(at).wait(at.parity ^ 1);
      keys.load<kDim>(shared.k + at.stage * kBytesK, params.maps[1], shared.ring.full(at));
    }
}

// A consumer warpgroup, number `index`, of 64 queries.
CUFLASH_DEVICE void consume(const Params& params, const Shared& shared, const QueryTile& tile, u32 index) {
  const Entry batch = tile.work.batch;
  const int head = tile.work.head;
  const int warp_row = tile.first_row + index * 64 + ptx::thread_index() % 128 / 32 * 16;
  const int lane_row = warp_row + fragment_row();
  const u32 rows_q = shared.q + index * 64 * kLineBytes;
  const Score score(params, batch, head, tile.key_stop);
  const Mask mask(params, batch, head, tile.key_stop);
  Position<kNumStages> at;
  // Calls visit(s, lane_key) for the scores of each tile.
  const auto visit_tiles = [&](auto visit) {
#pragma unroll 1
    for (int n_block = tile.keys.start; n_block < tile.keys.stop; ++n_block, at.advance()) {
      float s[1][kNTiles][4];
      shared.ring.full(at).wait(at.parity);
      issue_rows<kDim, kBlockM, kBlockN>(s[0], rows_q, shared.k + at.stage * kBytesK);
      wait_for<0>(s[0]);
      arrive_as_warp(shared.ring.empty(at));
      const int lane_key = tile.keys.at(n_block) * kBlockN + fragment_column();
      const bool masked = n_block < tile.keys.full_start || n_block >= tile.keys.full_stop;
      to_scores(score, mask, s, [&](int, int i) { return lane_row + i / 2 * 8; }, lane_key, masked);
      visit(s[0], lane_key);
    }
  };

  const u32 s_candidates = shared.candidates + warp_index() * kBytesCandidates;
  const int count = (int)params.dv.row_stride;  // results are contiguous
  Candidates candidates(s_candidates, count, tile.keys.stop - tile.keys.start);
  if (tile.keys.start < tile.keys.stop) shared.q_full.wait(0);
  if (needs_threshold(tile.keys.stop - tile.keys.start)) {
    candidates.clear_maxima();
    visit_tiles([&](const float (&s)[kNTiles][4], int) { candidates.find_maxima(s); });
    candidates.find_thresholds();
  }
  visit_tiles([&](const float (&s)[kNTiles][4], int lane_key) { candidates.append(s, lane_key); });
  write_candidates(params, candidates, batch, head, warp_row, score.exponent_scale());
}

CUFLASH_DEVICE void top_keys(const TopParams& params) {
  if (!is_chosen(params.common)) return;
  const Work work = schedule_queries(params.common, ptx::block_index(), params.common.num_heads, kHasRightBound);
  if (!has_queries(params.common, work)) return;
  const Shared shared;
  if (ptx::thread_index() == 0) {
    shared.ring.init(4 * kConsumers);
    shared.q_full.init(1);
    ptx::fence_barrier_init();
  }
  ptx::sync_block();
  const QueryTile tile(params.common, work);
  const u32 warp = ptx::uniform(ptx::thread_index() / 32);
  if (warp < 4 * kConsumers)
    consume(params.common, shared, tile, warp / 4);
  else if (ptx::elect_lane())
    produce(params, shared, tile);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, TopParams, kNumThreads, kMinBlocks, top_keys)
