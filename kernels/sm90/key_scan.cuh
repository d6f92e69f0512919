// What the kernels have in common that only scan scores, in half precision: a block owns kBlockM queries of one head,
// 64 for each consumer warpgroup, all of which read the tiles of keys that the last warp, the producer, loads. A stage
// is given back as soon as S is in registers, so that the next tile arrives, and products of other warpgroups run,
// while a consumer looks at its scores.
//
//   barrier      one phase is over when            who waits
//   q_full       Q has arrived                     consumers, before the first S
//   full[i]      K is in stage i                   consumers, before S
//   empty[i]     every warp has its S              producer, before the next K in stage i
#pragma once
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr int kConsumers = kBlockM / 64;
constexpr int kNTiles = kBlockN / 8;
static_assert(kNumWarps == 4 * kConsumers + 1, "the consumers and a producer");

constexpr u32 kBytesQ = chunked_bytes(kBlockM, kDim);
constexpr u32 kBytesK = chunked_bytes(kBlockN, kDim);

// Shared memory: Q, the ring of K, `bytes` of the kernel's own, barriers.
template <u32 bytes>
struct ScanShared {
  static_assert(kBytesQ + kNumStages * kBytesK + bytes + Ring<kNumStages>::kBytes + 16 == CUFLASH_SHARED_BYTES,
                "shared memory differs from the plan");
  u32 q, k, own;
  Ring<kNumStages> ring;
  Barrier q_full;

  CUFLASH_DEVICE ScanShared() {
    q = ptx::dynamic_shared();
    k = q + kBytesQ;
    own = k + kNumStages * kBytesK;
    ring = {own + bytes};
    q_full = {ring.address + Ring<kNumStages>::kBytes};
  }
};

// The rows of a consumer, number `index`, and what their scores need.
struct ScanRows {
  const int warp_row, lane_row;
  const Score score;
  const Mask mask;

  CUFLASH_DEVICE ScanRows(const Params& params, const QueryTile& tile, u32 index)
      : warp_row(tile.first_row + index * 64 + ptx::thread_index() % 128 / 32 * 16),
        lane_row(warp_row + fragment_row()),
        score(params, tile.work.batch, tile.work.head, tile.key_stop),
        mask(params, tile.work.batch, tile.work.head, tile.key_stop) {}

  // Multiplies 64 queries, the first of which is at `rows_q` in a tile of `rows`, by the keys that have arrived at
  // `at`, whose stage it gives back.
  template <int rows, class Shared>
  CUFLASH_DEVICE void multiply(float (&s)[1][kNTiles][4], u32 rows_q, const Shared& shared,
                               const Position<kNumStages>& at) const {
    issue_rows<kDim, rows, kBlockN>(s[0], rows_q, shared.k + at.stage * kBytesK);
    wait_for<0>(s[0]);
    arrive_as_warp(shared.ring.empty(at));
  }
  CUFLASH_DEVICE void finish(float (&s)[1][kNTiles][4], int lane_key, bool masked) const {
    to_scores(score, mask, s, [&](int, int i) { return lane_row + i / 2 * 8; }, lane_key, masked);
  }
};

// Runs a kernel: consume(shared, tile, index) by each consumer, produce(shared, tile) by one thread.
template <class Shared, class Consume, class Produce>
CUFLASH_DEVICE void scan_keys(const Params& params, Consume consume, Produce produce) {
  const Work work = schedule_queries(params, ptx::block_index(), params.num_heads, kHasRightBound);
  if (!has_queries(params, work)) return;
  const Shared shared;
  if (ptx::thread_index() == 0) {
    shared.ring.init(4 * kConsumers);
    shared.q_full.init(1);
    ptx::fence_barrier_init();
  }
  ptx::sync_block();
  const QueryTile tile(params, work);
  const u32 warp = ptx::uniform(ptx::thread_index() / 32);
  if (warp < 4 * kConsumers)
    consume(shared, tile, warp / 4);
  else if (ptx::elect_lane())
    produce(shared, tile);
}
