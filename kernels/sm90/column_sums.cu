// Reductions of the attention weights over the queries, in half precision, with wgmma and TMA (compute capability 9.0):
//
//   P' = exp(K Q' - lse)    sums = P' w  or  sums = rowmax(P')        (X' is X transposed; rows of X' are keys)
//
// A block owns kBlockN keys of one query head, 64 for each consumer warpgroup. The last warp, the producer, loads tiles
// of queries and their statistics. Two blocks are resident on an SM: while one warpgroup makes exponentials, the
// products of others run. A producer of one warp leaves consumers 112 registers, and none is moved between roles.
// Without values delta is -dlse, and w comes as dlse: helpers/backward_preprocess.cu leaves -w in the place of delta.
//
//   barrier      one phase is over when            who waits
//   k_full       K has arrived                     consumers, before the first P'
//   full[i]      Q and statistics are in stage i   consumers, before P'
//   empty[i]     every warp has its weights        producer, before the next Q in stage i
#include "common/softmax/columns.cuh"
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/query_iterator.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr int kConsumers = kBlockN / 64;
constexpr int kQueryTiles = kBlockM / 8;  // n-tiles of 8 queries
static_assert(kNumWarps == 4 * kConsumers + 1, "the consumers and a producer");
static_assert(kBlockM % kGroupRows == 0, "whole groups of rows with row sums");
static_assert(!kIsPacked, "rows of other sequences would have to be cleared");

// Shared memory: K, the rings of Q and of row statistics, barriers.
constexpr u32 kBytesK = chunked_bytes(kBlockN, kDim);
constexpr u32 kBytesQ = chunked_bytes(kBlockM, kDim);
constexpr u32 kBytesStats = kBlockM * 8;
static_assert(kBytesK + kNumStages * (kBytesQ + kBytesStats) + Ring<kNumStages>::kBytes + 16 == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

struct ColumnParams {
  Params common;
  TensorMap maps[2];  // of q and k
};
static_assert(sizeof(ColumnParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

struct Shared {
  u32 k, q, stats;
  Ring<kNumStages> ring;
  Barrier k_full;

  CUFLASH_DEVICE Shared() {
    k = ptx::dynamic_shared();
    q = k + kBytesK;
    stats = q + kNumStages * kBytesQ;
    ring = {stats + kNumStages * kBytesStats};
    k_full = {ring.address + Ring<kNumStages>::kBytes};
  }
};

// The keys of a block, and the tiles of queries that attend to them.
struct ColumnWork {
  Work work;
  int head_kv, first_key, key_stop, num_steps;
  QueryTiles queries;

  CUFLASH_DEVICE explicit ColumnWork(const Params& params)
      : work(schedule_keys(params, ptx::block_index(), params.num_heads, params.head_section, false)),
        head_kv(work.head / (params.num_heads / params.num_heads_kv)),
        first_key(work.block * kBlockN),
        key_stop(key_stop_of(params, work.batch)) {
    num_steps = find_queries(params, work, work.head, work.head + 1, key_stop, queries);
  }
  CUFLASH_DEVICE QueryTileIterator first() const { return QueryTileIterator::first(queries, work.head); }
};

// The producer: one thread.
CUFLASH_DEVICE void produce(const ColumnParams& params, const Shared& shared, const ColumnWork& work) {
  const int batch = entry_of(work.work.batch);
  if (work.num_steps == 0) return;
  shared.k_full.arrive_expect(kBytesK);
  load_chunks<kBlockN, kDim>(shared.k, params.maps[1], shared.k_full, work.first_key, work.head_kv, batch);
  QueryTileIterator tile = work.first();
  Position<kNumStages> at;
#pragma unroll 1
  for (int step = 0; step < work.num_steps; ++step, at.advance(), tile.advance(work.queries)) {
    const Barrier full = shared.ring.full(at);
    shared.ring.empty(at).wait(at.parity ^ 1);
    full.arrive_expect(kBytesQ + kBytesStats);
    load_chunks<kBlockM, kDim>(shared.q + at.stage * kBytesQ, params.maps[0], full, tile.m_block * kBlockM,
                               work.work.head, batch);
    ptx::load_bulk(shared.stats + at.stage * kBytesStats,
                   stats_of(params.common, work.work.batch, work.work.head) + tile.m_block * kBlockM * 2, kBytesStats,
                   full.address);
  }
}

// A consumer warpgroup, number `index`, of 64 keys.
CUFLASH_DEVICE void consume(const Params& params, const Shared& shared, const ColumnWork& work, u32 index) {
  const Entry batch = work.work.batch;
  const int head = work.work.head;
  const int lane_key = work.first_key + index * 64 + ptx::thread_index() % 128 / 32 * 16 + fragment_row();
  const u32 rows_k = shared.k + index * 64 * kLineBytes;
  const Weights weights(params, batch, head, work.key_stop);
  const RowSum* row_sums = row_sums_of(params, batch, head);
  Columns<1> columns;
  QueryTileIterator tile = work.first();
  Position<kNumStages> at;
  if (work.num_steps > 0) shared.k_full.wait(0);
#pragma unroll 1
  for (int step = 0; step < work.num_steps; ++step, at.advance(), tile.advance(work.queries)) {
    float p[kQueryTiles][4];
    shared.ring.full(at).wait(at.parity);
    issue_rows<kDim, kBlockN, kBlockM>(p, rows_k, shared.q + at.stage * kBytesQ);
    wait_for<0>(p);
    const bool masked = tile.needs_mask(work.queries);
    repeat<ceil_div(kBlockM, kGroupRows)>([&](auto group) {
      constexpr int kFirst = decltype(group)::value * kGroupRows;
      constexpr int kTiles = min_of(kBlockM, kGroupRows) / 8;
      add_tile(weights, (float (&)[1][kTiles][4])p[kFirst / 8], shared.stats + at.stage * kBytesStats + kFirst * 8,
               row_sums, masked, tile.m_block * kBlockM + kFirst + fragment_column(), lane_key, columns);
    });
    arrive_after_reads(shared.ring.empty(at));
  }
  float* sums = per_key_values_of(params.dv, batch, head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = lane_key + 8 * half;
    const float sum = columns.of(0, half);
    if (fragment_column() == 0 && key < seqlen_k_of(params, batch)) sums[key * params.dv.row_stride] = sum;
  }
}

CUFLASH_DEVICE void column_sums(const ColumnParams& params) {
  if (!is_chosen(params.common)) return;
  const Shared shared;
  if (ptx::thread_index() == 0) {
    shared.ring.init(4 * kConsumers);
    shared.k_full.init(1);
    ptx::fence_barrier_init();
  }
  ptx::sync_block();
  const ColumnWork work(params.common);
  const u32 warp = ptx::uniform(ptx::thread_index() / 32);
  if (warp < 4 * kConsumers)
    consume(params.common, shared, work, warp / 4);
  else if (ptx::elect_lane())
    produce(params, shared, work);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, ColumnParams, kNumThreads, kMinBlocks, column_sums)
