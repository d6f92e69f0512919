// The first key with the largest score of each query, which gets the gradient of the row maximum, in half precision,
// with wgmma and TMA (compute capability 9.0). It runs before sm90/backward.cu, whose tensor maps it shares.
//
// sm90/key_scan.cuh has the roles and barriers. S is all that takes time, and a score takes one instruction or less: a
// lane finds the largest one of a tile, and looks for its key only where that is larger than what its row had before.
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/params.cuh"
#include "common/softmax/row_reduction_gradients.cuh"
#include "sm90/key_scan.cuh"

constexpr int kBoxKeys = CUFLASH_BOX_KEYS;  // keys in one box of TMA
constexpr int kMaps = (CUFLASH_ARGUMENT_BYTES - CUFLASH_PARAMS_BYTES) / sizeof(TensorMap);
static_assert(!kHasBlockIndex, "tiles of keys come in the order of keys, the first of equal scores first");

// The queries of each consumer are a tile of their own, as boxes of sm90/backward.cu are.
constexpr u32 kBytesOwnQ = chunked_bytes(64, kDim);
using Shared = ScanShared<0>;

struct MaximaParams {
  Params common;
  TensorMap q, k, others[kMaps - 2];
};
static_assert(sizeof(MaximaParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

// The producer: one thread.
CUFLASH_DEVICE void produce(const MaximaParams& params, const Shared& shared, const QueryTile& tile) {
  if (tile.keys.start >= tile.keys.stop) return;
  const Entry batch = tile.work.batch;
  shared.q_full.arrive_expect(kBytesQ);
#pragma unroll
  for (int i = 0; i < kConsumers; ++i)
    load_chunks<64, kDim>(shared.q + i * kBytesOwnQ, params.q, shared.q_full,
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
  const ScanRows scan(params, tile, index);
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
    scan.multiply<64>(s, shared.q + index * kBytesOwnQ, shared, at);
    const int lane_key = n_block * kBlockN + fragment_column();
    // Bounds alone say which tiles are visible as a whole, because there is no index that knows of blocks.
    const bool masked = kHasBlockMask || n_block < own.full_start || n_block >= own.full_stop;
    scan.finish(s, lane_key, masked);
#pragma unroll
    for (int half = 0; half < 2; ++half) rows[half].update(s[0], half, lane_key);
  }
  const int seqlen_q = seqlen_q_of(params, batch);
  i32* first_max = RowReductionGradients(params, batch, tile.work.head).first_max;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = scan.lane_row + 8 * half;
    if (fragment_column() == 0 && row < seqlen_q) first_max[row] = rows[half].key;
  }
}

CUFLASH_DEVICE void first_maxima(const MaximaParams& params) {
  scan_keys<Shared>(
      params.common,
      [&](const Shared& shared, const QueryTile& tile, u32 index) { consume(params.common, shared, tile, index); },
      [&](const Shared& shared, const QueryTile& tile) { produce(params, shared, tile); });
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, MaximaParams, kNumThreads, kMinBlocks, first_maxima)
