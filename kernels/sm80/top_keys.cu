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

// The tiles of keys of a block, and what makes their scores.
struct KeyScan {
  const Params& params;
  const QueryTile& tile;
  const KeyHead g_k;
  const u32 s_q, s_k;
  const int warp_row, lane_row;
  const Score score;
  const Mask mask;

  CUFLASH_DEVICE KeyScan(const Params& params_, const QueryTile& tile_)
      : params(params_),
        tile(tile_),
        g_k(keys_of(params, params.k, tile.work.batch, tile.head_kv)),
        s_q(ptx::dynamic_shared()),
        s_k(s_q + kBytesQ),
        warp_row(warp_index() * 16),
        lane_row(tile.first_row + warp_row + fragment_row()),
        score(params, tile.work.batch, tile.work.head, tile.key_stop),
        mask(params, tile.work.batch, tile.work.head, tile.key_stop) {}

  CUFLASH_DEVICE void load_k(int n_block, int stage) const {
    load_tile<kBlockN, kHeadDim>(s_k + stage * kBytesK, g_k, params.k.row_stride, tile.keys.at(n_block) * kBlockN,
                                 tile.key_stop);
  }
  // Calls visit(s, lane_key) for the scores of each tile.
  template <class Visit>
  CUFLASH_DEVICE void visit_tiles(Visit visit) const {
    const KeyTiles& tiles = tile.keys;
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
  }
};

CUFLASH_DEVICE void top_keys(const Params& params) {
  if (!is_chosen(params)) return;
  const Work work = schedule_queries(params, ptx::block_index(), params.num_heads, kHasRightBound);
  if (!has_queries(params, work)) return;
  const QueryTile tile(params, work);
  const KeyScan scan(params, tile);
  load_tile<kBlockM, kHeadDim>(scan.s_q, queries_of(params.q, work.batch, work.head), params.q.row_stride,
                               tile.first_row, seqlen_q_of(params, work.batch));

  const u32 s_candidates = scan.s_k + kNumStages * kBytesK + warp_index() * kBytesCandidates;
  const int count = (int)params.dv.row_stride;  // results are contiguous
  const int num_tiles = tile.keys.stop - tile.keys.start;
  Candidates candidates(s_candidates, count, num_tiles);
  if (needs_threshold(num_tiles)) {
    candidates.clear_maxima();
    scan.visit_tiles([&](const Real(&s)[kNTiles][4], int) { candidates.find_maxima(s); });
    candidates.find_thresholds();
  }
  scan.visit_tiles([&](const Real(&s)[kNTiles][4], int lane_key) { candidates.append(s, lane_key); });
  ptx::copy_async_wait<0>();
  write_candidates(params, candidates, work.batch, work.head, tile.first_row + scan.warp_row,
                   scan.score.exponent_scale());
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, top_keys)
