// The strongest keys of each query, in half precision, with wgmma and TMA (compute capability 9.0): of the scores of a
// row the largest, with their keys, and weights exp(S - lse).
//
// sm90/key_scan.cuh has the roles and barriers. The producer loads the tiles of keys twice: first consumers look for a
// threshold of each row, then for the scores that reach it (common/softmax/candidates.cuh).
#include "common/softmax/candidates.cuh"
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "sm90/key_scan.cuh"
#include "sm90/key_tile.cuh"

// With what each warp needs for its candidates.
using Shared = ScanShared<4 * kConsumers * kBytesCandidates>;

struct TopParams {
  Params common;
  TensorMap maps[2];  // of q and k
};
static_assert(sizeof(TopParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

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
  const ScanRows scan(params, tile, index);
  const u32 rows_q = shared.q + index * 64 * kLineBytes;
  Position<kNumStages> at;
  // Calls visit(s, lane_key) for the scores of each tile.
  const auto visit_tiles = [&](auto visit) {
#pragma unroll 1
    for (int n_block = tile.keys.start; n_block < tile.keys.stop; ++n_block, at.advance()) {
      float s[1][kNTiles][4];
      shared.ring.full(at).wait(at.parity);
      scan.multiply<kBlockM>(s, rows_q, shared, at);
      const int lane_key = tile.keys.at(n_block) * kBlockN + fragment_column();
      const bool masked = n_block < tile.keys.full_start || n_block >= tile.keys.full_stop;
      scan.finish(s, lane_key, masked);
      visit(s[0], lane_key);
    }
  };

  const u32 s_candidates = shared.own + warp_index() * kBytesCandidates;
  const int count = (int)params.dv.row_stride;  // results are contiguous
  Candidates candidates(s_candidates, count, tile.keys.stop - tile.keys.start);
  if (tile.keys.start < tile.keys.stop) shared.q_full.wait(0);
  if (needs_threshold(tile.keys.stop - tile.keys.start)) {
    candidates.clear_maxima();
    visit_tiles([&](const float (&s)[kNTiles][4], int) { candidates.find_maxima(s); });
    candidates.find_thresholds();
  }
  visit_tiles([&](const float (&s)[kNTiles][4], int lane_key) { candidates.append(s, lane_key); });
  write_candidates(params, candidates, tile.work.batch, tile.work.head, scan.warp_row, scan.score.exponent_scale());
}

CUFLASH_DEVICE void top_keys(const TopParams& params) {
  if (!is_chosen(params.common)) return;
  scan_keys<Shared>(
      params.common,
      [&](const Shared& shared, const QueryTile& tile, u32 index) { consume(params.common, shared, tile, index); },
      [&](const Shared& shared, const QueryTile& tile) { produce(params, shared, tile); });
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, TopParams, kNumThreads, kMinBlocks, top_keys)
