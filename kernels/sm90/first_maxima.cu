// The first key with the largest score of each query, which gets the gradient of the row maximum, in half precision,
// with wgmma and TMA (compute capability 9.0). It runs before sm90/backward.cu, whose tensor maps it shares.
//
// A block owns kBlockM queries of one head, 64 for each consumer warpgroup, all of which read the tiles of keys that the
// last warp, the producer, loads. A stage is given back as soon as S is in registers: while one warpgroup looks for
// maxima, the products of others run. So S is all that takes time, and a score takes one instruction or less: a lane
// finds the largest one of a tile, and looks for its key only where that is larger than what its row had before.
//
//   barrier      one phase is over when            who waits
//   q_full       Q has arrived                     consumers, before the first S
//   full[i]      K is in stage i                   consumers, before S
//   empty[i]     every warp has its S              producer, before the next K in stage i
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/row_reduction_gradients.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr int kConsumers = kBlockM / 64;
constexpr int kNTiles = kBlockN / 8;
constexpr int kBoxKeys = CUFLASH_BOX_KEYS;  // keys in one box of TMA
constexpr int kMaps = (CUFLASH_ARGUMENT_BYTES - CUFLASH_PARAMS_BYTES) / sizeof(TensorMap);
static_assert(kNumWarps == 4 * kConsumers + 1, "the consumers and a producer");
static_assert(!kHasBlockIndex, "tiles of keys come in the order of keys, the first of equal scores first");

// Shared memory: the queries of each consumer, the ring of K, barriers.
constexpr u32 kBytesQ = chunked_bytes(64, kDim);
constexpr u32 kBytesK = chunked_bytes(kBlockN, kDim);
static_assert(kConsumers * kBytesQ + kNumStages * kBytesK + Ring<kNumStages>::kBytes + 16 == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

struct MaximaParams {
  Params common;
  TensorMap q, k, others[kMaps - 2];
};
static_assert(sizeof(MaximaParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

struct Shared {
  u32 q, k;
  Ring<kNumStages> ring;
  Barrier q_full;

  CUFLASH_DEVICE Shared() {
    q = ptx::dynamic_shared();
    k = q + kConsumers * kBytesQ;
    ring = {k + kNumStages * kBytesK};
    q_full = {ring.address + Ring<kNumStages>::kBytes};
  }
};

// The producer: one thread.
CUFLASH_DEVICE void produce(const MaximaParams& params, const Shared& shared, const QueryTile& tile) {
  if (tile.keys.start >= tile.keys.stop) return;
  const Entry batch = tile.work.batch;
  shared.q_full.arrive_expect(kConsumers * kBytesQ);
#pragma unroll
  for (int i = 0; i < kConsumers; ++i)
    load_chunks<64, kDim>(shared.q + i * kBytesQ, params.q, shared.q_full,
                          query_start_of(batch) + tile.first_row + 64 * i, tile.work.head, entry_of(batch));
  Position<kNumStages> at;
#pragma unroll 1
  for (int n_block = tile.keys.start; n_block < tile.keys.stop; ++n_block, at.advance()) {
    const Barrier full = shared.ring.full(at);
    shared.ring.empty(at).wait(at.parity ^ 1);
    full.arrive_expect(kBytesK);
#pragma unroll
    for (int i = 0; i < kBlockN / kBoxKeys; ++i)
#pragma unroll
      for (int c = 0; c < chunks_of(kDim); ++c)
        ptx::load_tensor(shared.k + at.stage * kBytesK + (c * kBlockN + i * kBoxKeys) * kLineBytes, params.k,
                         full.address, c * kChunk, key_start_of(batch) + n_block * kBlockN + i * kBoxKeys, tile.head_kv,
                         entry_of(batch));
  }
}

// The largest score of a row so far, and the first key that has it: -1 where there is none. All lanes of a row have
// both.
struct RowMaximum {
  float score = -ptx::infinity();
  i32 key = -1;

  // Warp. Takes in a tile, of whose elements `half` of each row of fragments belongs to this row.
  CUFLASH_DEVICE void update(const float (&s)[kNTiles][4], int half, int lane_key) {
    const float largest = largest_of(s, half);
    if (!ptx::any_lane(largest > score)) return;
    i32 found = 0;
#pragma unroll
    for (int n = kNTiles - 1; n >= 0; --n)
#pragma unroll
      for (int i = 1; i >= 0; --i)
        if (s[n][2 * half + i] == largest) found = 8 * n + i;
    if (largest > score) score = largest, key = lane_key + found;
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      const float other = ptx::shuffle_xor(score, mask);
      const i32 other_key = (i32)ptx::bits_of(ptx::shuffle_xor(ptx::float_of((u32)key), mask));
      if (other > score || (other == score && other_key < key)) score = other, key = other_key;
    }
  }

 private:
  // Warp. The bits of scores that are not negative are in the order of integers, of which one instruction finds the
  // largest of three. If all scores of a lane are negative, it gets a negative number, and they are compared again
  // unless the row has a larger score anyway.
  CUFLASH_DEVICE float largest_of(const float (&s)[kNTiles][4], int half) const {
    i32 bits = (i32)ptx::bits_of(-ptx::infinity());
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
      bits = max_of(max_of(bits, (i32)ptx::bits_of(s[n][2 * half])), (i32)ptx::bits_of(s[n][2 * half + 1]));
    if (!ptx::any_lane(bits < 0 && score < 0)) return bits < 0 ? -ptx::infinity() : ptx::float_of((u32)bits);
    float largest = -ptx::infinity();
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) largest = max_of(max_of(largest, s[n][2 * half]), s[n][2 * half + 1]);
    return largest;
  }
};

// A consumer warpgroup, number `index`, of 64 queries.
CUFLASH_DEVICE void consume(const Params& params, const Shared& shared, const QueryTile& tile, u32 index) {
  const Entry batch = tile.work.batch;
  const int head = tile.work.head;
  const int lane_row = tile.first_row + index * 64 + ptx::thread_index() % 128 / 32 * 16 + fragment_row();
  const Score score(params, batch, head, tile.key_stop);
  const Mask mask(params, batch, head, tile.key_stop);
  const TileRange own = tile.keys_of(params, index);
  RowMaximum rows[2];
  Position<kNumStages> at;
  if (tile.keys.start < tile.keys.stop) shared.q_full.wait(0);
#pragma unroll 1
  for (int n_block = tile.keys.start; n_block < tile.keys.stop; ++n_block, at.advance()) {
    shared.ring.full(at).wait(at.parity);
    if (n_block < own.start || n_block >= own.stop) {
      arrive_as_warp(shared.ring.empty(at));
      continue;
    }
    float s[1][kNTiles][4];
    issue_rows<kDim, 64, kBlockN>(s[0], shared.q + index * kBytesQ, shared.k + at.stage * kBytesK);
    wait_for<0>(s[0]);
    arrive_as_warp(shared.ring.empty(at));
    const int lane_key = n_block * kBlockN + fragment_column();
    // Bounds alone say which tiles are visible as a whole, because there is no index that knows of blocks.
    const bool masked = kHasBlockMask || n_block < own.full_start || n_block >= own.full_stop;
    to_scores(score, mask, s, [&](int, int i) { return lane_row + i / 2 * 8; }, lane_key, masked);
#pragma unroll
    for (int half = 0; half < 2; ++half) rows[half].update(s[0], half, lane_key);
  }
  const int seqlen_q = seqlen_q_of(params, batch);
  i32* first_max = RowReductionGradients(params, batch, head).first_max;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_row + 8 * half;
    if (fragment_column() == 0 && row < seqlen_q) first_max[row] = rows[half].key;
  }
}

CUFLASH_DEVICE void first_maxima(const MaximaParams& params) {
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

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, MaximaParams, kNumThreads, kMinBlocks, first_maxima)
