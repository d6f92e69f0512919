// The strongest keys of each query, on mma.sync tensor cores (compute capability 8.0 and later): of the scores of a row
// the largest, with their keys, and weights exp(S - lse).
//
// A block owns kBlockM queries of one head, of which each warp has 16, and iterates over the tiles of keys twice: first
// for a threshold of each row, then for the scores that reach it (common/softmax/candidates.cuh).
#include "common/softmax/candidates.cuh"
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "sm80/copy.cuh"
#include "sm80/mma.cuh"

constexpr int kNTiles = kBlockN / 8;
constexpr int kRow = row_bytes(kDim);
static_assert(kBlockM == 16 * kNumWarps, "every warp owns one fragment of rows");
static_assert(kNumStages == 1 || kNumStages == 2, "at most one tile of keys arrives while another is used");

// Shared memory: Q, the ring of K tiles, then what each warp needs for its candidates.
constexpr u32 kBytesQ = tile_bytes(kBlockM, kDim);
constexpr u32 kBytesK = tile_bytes(kBlockN, kDim);
static_assert(kBytesQ + kNumStages * kBytesK + kNumWarps * kBytesCandidates == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

CUFLASH_DEVICE void top_keys(const Params& params) {
  if (!is_chosen(params)) return;
  const Work work = schedule_queries(params, ptx::block_index(), params.num_heads, kHasRightBound);
  if (!has_queries(params, work)) return;
  const Entry batch = work.batch;
  const int head = work.head, head_kv = head / (params.num_heads / params.num_heads_kv);
  const int first_row = work.block * kBlockM, seqlen_q = seqlen_q_of(params, batch);
  const int key_stop = key_stop_of(params, batch);
  const KeyTiles tiles(params, work, key_stop);

  const auto g_k = keys_of(params, params.k, batch, head_kv);
  const u32 s_q = ptx::dynamic_shared(), s_k = s_q + kBytesQ;
  const int warp_row = warp_index() * 16;
  const auto load_k = [&](int n_block, int stage) {
    load_tile<kBlockN, kHeadDim>(s_k + stage * kBytesK, g_k, params.k.row_stride, tiles.at(n_block) * kBlockN,
                                 key_stop);
  };
  load_tile<kBlockM, kHeadDim>(s_q, queries_of(params.q, batch, head), params.q.row_stride, first_row, seqlen_q);

  const Score score(params, batch, head, key_stop);
  const Mask mask(params, batch, head, key_stop);
  const int lane_row = first_row + warp_row + fragment_row();
  // Calls visit(s, lane_key) for the scores of each tile.
  const auto visit_tiles = [&](auto visit) {
#pragma unroll
    for (int i = 0; i < kNumStages; ++i) {
      if (tiles.start + i < tiles.stop) load_k(tiles.start + i, i);
      ptx::copy_async_commit();
    }
#pragma unroll 1
    for (int n_block = tiles.start; n_block < tiles.stop; ++n_block) {
      const int stage = (n_block - tiles.start) % kNumStages;
      ptx::copy_async_wait<kNumStages - 1>();
      ptx::sync_block();
      Real s[1][kNTiles][4];
      set_zero(s);
      multiply<kDim / kStep>(s, RowMajorA<kRow>(s_q, warp_row), ColumnMajorB<kRow, 1>(s_k + stage * kBytesK));
      ptx::sync_block();
      if (n_block + kNumStages < tiles.stop) load_k(n_block + kNumStages, stage);
      ptx::copy_async_commit();
      const int lane_key = tiles.at(n_block) * kBlockN + fragment_column();
      const bool masked = n_block < tiles.full_start || n_block >= tiles.full_stop;
      to_scores(score, mask, s, [&](int, int i) { return lane_row + i / 2 * 8; }, lane_key, masked);
      visit(s[0], lane_key);
    }
  };

  const u32 s_candidates = s_k + kNumStages * kBytesK + warp_index() * kBytesCandidates;
  const int count = (int)params.dv.row_stride;  // results are contiguous
  Candidates candidates(s_candidates, count, tiles.stop - tiles.start);
  if (needs_threshold(tiles.stop - tiles.start)) {
    candidates.clear_maxima();
    visit_tiles([&](const Real(&s)[kNTiles][4], int) { candidates.find_maxima(s); });
    candidates.find_thresholds();
  }
  visit_tiles([&](const Real(&s)[kNTiles][4], int lane_key) { candidates.append(s, lane_key); });
  ptx::copy_async_wait<0>();
  write_candidates(params, candidates, batch, head, first_row + warp_row, score.exponent_scale());
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, top_keys)
