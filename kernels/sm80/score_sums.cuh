// What the kernels of score gradients and of their tangents share: the sums of a block, and where it stores them.
#pragma once
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/softmax/reduce.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/score_args_gradients.cuh"
#include "common/score/score_gradients.cuh"
#include "sm80/mma.cuh"

constexpr int kMTiles = kBlockM / (16 * kNumWarps);
constexpr int kNTiles = kBlockN / 8;
static_assert(kMTiles * 16 * kNumWarps == kBlockM, "every warp owns the same number of whole fragments");
static_assert(kNumStages == 1 || kNumStages == 2, "at most one tile arrives while another is used");

// What a block has summed lies in shared memory in rows of kResultPitch, after the loop, in place of the tiles.
constexpr int kResultPitch = kSumsKeys ? 2 : kBlockN + 8;
constexpr u32 kBytesResult = kBlockM * (kBlockN + 8) * sizeof(Real);

// The sums of a lane.
struct Sums {
  Real dbias[kMTiles][kNTiles][4];
  double of[kNumSums];

  CUFLASH_DEVICE void clear() {
    set_zero(dbias);
#pragma unroll
    for (double& sum : of) sum = 0;
  }
};

// The tiles of pairs that one of `splits` blocks takes, and the ring in which their operands arrive: load(tile, stage)
// issues the copies of a tile.
template <class Load>
struct ScoreRing {
  const Params& params;
  const Load load;
  const int splits, split;
  const u32 index;
  const ScoreTiles result;  // whose gradients the block makes
  ScoreTiles now, next;     // the tile in use, and the tile to load
  int stage = 0;            // of the tile in use

  CUFLASH_DEVICE ScoreRing(const Params& params_, const Load& load_)
      : params(params_),
        load(load_),
        splits(splits_of(params)),
        split(ptx::block_index() % splits),
        index(ptx::block_index() / splits),
        result(params, index),
        now(result),
        next(result) {
    now.take_split(params, split, splits);
    next = now;
#pragma unroll
    for (int i = 0; i < kNumStages; ++i) {
      if (next.left > 0) load_next(i);
      ptx::copy_async_commit();
    }
  }

  CUFLASH_DEVICE void wait() const {
    ptx::copy_async_wait<kNumStages - 1>();
    ptx::sync_block();
  }
  // After the last use of a tile.
  CUFLASH_DEVICE void refill() {
    ptx::sync_block();
    if (next.left > 0) load_next(stage);
    ptx::copy_async_commit();
  }
  CUFLASH_DEVICE void advance() {
    if constexpr (kNumStages == 2) stage = 1 - stage;
    now.advance(params);
  }

 private:
  CUFLASH_DEVICE void load_next(int stage) {
    load(next, stage);
    next.advance(params);
  }
};

#if CUFLASH_NEEDS_SCORE_ARGS
using ScoreArgs = ScoreArgSums;
#else
struct ScoreArgs {  // no gradients of score_mod args
  CUFLASH_DEVICE explicit ScoreArgs(const Params&) {}
  CUFLASH_DEVICE void finish() const {}
};
#endif

// Stores the tile of dbias: in dbias, or for the kernel that adds the tiles of several blocks.
CUFLASH_DEVICE void finish_dbias(const Params& params, const ScoreTiles& result, u32 index, int split, Sums& sums) {
  const u32 s_result = ptx::dynamic_shared();
  const int lane_row = warp_index() * 16 * kMTiles + fragment_row();
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 row = s_result + (lane_row + 16 * m + 8 * half) * kResultPitch * (int)sizeof(Real);
      if constexpr (kSumsKeys) {
        Real sum = 0;
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) sum += sums.dbias[m][n][2 * half] + sums.dbias[m][n][2 * half + 1];
        sum += ptx::shuffle_xor(sum, 1);
        sum += ptx::shuffle_xor(sum, 2);
        if (fragment_column() == 0) ptx::store_shared_x2(row, {sum, (Real)0});
      } else {
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          const Real pair[2] = {sums.dbias[m][n][2 * half], sums.dbias[m][n][2 * half + 1]};
          ptx::store_shared_x2(row + (8 * n + fragment_column()) * (int)sizeof(Real), pair);
        }
      }
    }
  ptx::sync_block();
#pragma unroll 1
  for (int i = ptx::thread_index(); i < kResultElements; i += kNumThreads) {
    const u32 first = s_result + (i / kResultColumns * kResultPitch + i % kResultColumns) * (int)sizeof(Real);
    Real value;
    ptx::load_shared(first, value);
    if constexpr (kSumsQueries) {
#pragma unroll 4
      for (int row = 1; row < kBlockM; ++row) {
        Real next;
        ptx::load_shared(first + row * kResultPitch * (int)sizeof(Real), next);
        value += next;
      }
    }
    if (params.score_splits == 1)
      store_dbias(params, result, i, value);
    else
      score_partials_of(params, index, split)[i] = value;
  }
}

// Stores the sums of the block for the kernel that adds those of all blocks.
CUFLASH_DEVICE void finish_sums(const Params& params, const ScoreTiles& result, int split, const Sums& sums) {
  const u32 s_sums = ptx::dynamic_shared();
  double warp[kNumSums];
#pragma unroll
  for (int i = 0; i < kNumSums; ++i) warp[i] = warp_sum(sums.of[i]);
  if (lane_index() == 0) {
    ptx::store_shared_x2(s_sums + warp_index() * 32, {warp[0], warp[1]});
    ptx::store_shared_x2(s_sums + warp_index() * 32 + 16, {warp[2], 0.0});
  }
  ptx::sync_block();
  const int quantity = ptx::thread_index();
  if (quantity >= kNumSums) return;
  double sum = 0;
  for (int i = 0; i < kNumWarps; ++i) {
    double partial;
    ptx::load_shared(s_sums + i * 32 + quantity * 8, partial);
    sum += partial;
  }
  sums_partials_of(params, quantity, result.head, result.batch, result.m_block)[split] = sum;
}

// Stores what the block has summed.
template <class Ring>
CUFLASH_DEVICE void finish(const Params& params, const Ring& ring, Sums& sums, ScoreArgs& score_args) {
  ptx::copy_async_wait<0>();
  if constexpr (CUFLASH_NEEDS_SCORE_ARGS) return score_args.finish();
  ptx::sync_block();
  if constexpr (kNeedsDbias)
    finish_dbias(params, ring.result, ring.index, ring.split, sums);
  else
    finish_sums(params, ring.result, ring.split, sums);
}
