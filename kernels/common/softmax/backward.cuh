// What all kernels of the backward pass share.
#pragma once
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/schedule/tile_order.cuh"
#include "common/score/scores.cuh"

// dq is the sum of contributions of all tiles of keys. Either blocks add them to an accumulator by atomic reductions,
// in any order (fast), or a separate kernel recomputes them, in a fixed order (deterministic).
constexpr bool kDqByReduction = CUFLASH_DQ_BY_REDUCTION;
// Or blocks add to the accumulator in order. Each tile of queries has a counter of the blocks that have added, which is
// stored after the accumulators, and a block waits for its turn. Then the order is fixed as well (deterministic).
constexpr bool kDqInOrder = CUFLASH_DQ_IN_ORDER;

// dk and dv of one key/value head are sums over the queries of all heads of its group. If there are too few tiles of
// keys to fill the device, params.group_splits blocks share the heads. Or params.tail_splits blocks share the queries
// of each tile that comes, in launch order, after the first params.whole_tiles, because these last tiles would leave
// the device half empty. Blocks that share write partial sums, which another kernel adds.
constexpr bool kSplitsGroup = CUFLASH_SPLITS_GROUP;
constexpr bool kSplitsTail = CUFLASH_SPLITS_TAIL;
static_assert(!kSplitsGroup || !kSplitsTail, "tiles are shared in one way");
// A block takes a tile alone for which a block-sparse index lists fewer tiles of queries: the plan does not know how
// many are listed, and partial sums of a few take longer than they save.
#ifndef CUFLASH_MIN_SHARED_STEPS
#define CUFLASH_MIN_SHARED_STEPS 0
#endif
constexpr int kMinSharedSteps = CUFLASH_MIN_SHARED_STEPS;

CUFLASH_DEVICE int splits_per_group(const Params& params) { return kSplitsGroup ? params.group_splits : 1; }
// The number of splits of all groups of a batch entry.
CUFLASH_DEVICE int num_group_splits_of(const Params& params) { return params.num_heads_kv * splits_per_group(params); }

// Which of dk and dv are wanted. A gradient that is not wanted stays zero in registers and is not stored.
constexpr bool kNeedsDk = CUFLASH_NEEDS_DK;
constexpr bool kNeedsDv = CUFLASH_NEEDS_DV && kHasValues;
// The other gradients (of the inputs of scores other than q and k) that this kernel computes, or whose partial sums it
// adds.
constexpr bool kNeedsDbias = CUFLASH_NEEDS_DBIAS;
constexpr bool kNeedsDalibiSlopes = CUFLASH_NEEDS_DALIBI_SLOPES;
constexpr bool kNeedsDscale = CUFLASH_NEEDS_DSCALE;
constexpr bool kNeedsDsoftcap = CUFLASH_NEEDS_DSOFTCAP;
static_assert(!kIsPacked || !kNeedsDbias, "packed sequences have no bias");

constexpr int kPartialElements = kBlockN * (kDim + kDimV);

struct alignas(16) Real4 {
  Real value[4];
};

// A partial sum of a tile of keys: dk, then dv. Four elements of a thread are next to each other.
CUFLASH_DEVICE Real* partials_at(const Params& params, i64 index, u32 thread) {
  return (Real*)params.dkv_partials + index * kPartialElements + thread * 4;
}
// The index of the first partial sum of the blocks of a group.
CUFLASH_DEVICE i64 first_partial_of(const Params& params, int num_n_blocks, Entry batch, int head_kv, int n_block) {
  i64 tile = ((i64)batch * params.num_heads_kv + head_kv) * num_n_blocks + n_block;
  if constexpr (kIsPacked) tile = (i64)head_kv * num_n_blocks + first_slot_of_keys(batch, kBlockN) + n_block;
  return tile * params.group_splits;
}

// Tiles of keys start from the first to the last, so that the longest start first under a causal mask. If dq is summed
// in order, this is also the order in which they add to it.
//
// kLastFirst: if dq is summed in order and no queries attend to tiles before a diagonal, or none after one, tiles start
// from the last to the first. Under a causal mask each tile then starts with a tile of queries that the tiles before it
// do not have, and reaches every other tile of queries one step later than they do, so that no block waits. But the
// longest tiles run alone at the end.
//
// kReversedOneIn: where that costs more than waiting does, one of kReversedOneIn heads of each batch entry comes after
// all others and starts with its longest tile. Its tiles go from the last query, which attends to all of them, back to
// the diagonal. Which heads these are depends on the head alone, so that the accumulation of dq is the same in any
// batch. So are those of dk and dv, except for tiles that blocks share.
constexpr bool kLastFirst = kDqInOrder && (kHasRightBound || kHasLeftBound);
constexpr int kReversedOneIn = CUFLASH_REVERSED_ONE_IN;  // 0: no such heads
constexpr u32 kBackSection = CUFLASH_BACK_SECTION;       // how many of these heads, at the same queries, interleave
static_assert(kReversedOneIn == 0 || (kDqInOrder && kHasRightBound && !kHasLeftBound),
              "all heads start at the diagonal");

CUFLASH_DEVICE int num_reversed_heads(int num_heads) { return kReversedOneIn == 0 ? 0 : num_heads / kReversedOneIn; }

// Warp. The tile of keys at `index` in launch order, or at that place of the order of tiles.
CUFLASH_DEVICE Work find_keys(const Params& params, u32 index, int num_heads) {
  const int num_back = num_reversed_heads(num_heads), num_ahead = num_heads - num_back;
  const u32 num_before = heads_in_all(params, num_ahead) * num_tiles_of(params, params.seqlen_k, kBlockN);
  const bool back = kReversedOneIn != 0 && index >= num_before;
  index = TileOrder::of_keys(params).launch_index(index);
  Work work = schedule_keys(params, index - (back ? num_before : 0), back ? num_back : num_ahead,
                            back ? kBackSection : params.head_section, kLastFirst && !back);
  if (back) work.head += num_ahead;
  return work;
}

// The index of a tile of queries among those of all heads and batch entries.
CUFLASH_DEVICE i64 m_tile_of(const Params& params, int num_m_blocks, Entry batch, int head, int m_block) {
  if constexpr (kIsPacked) return (i64)head * num_m_blocks + first_slot_of_queries(batch, kBlockM) + m_block;
  return ((i64)batch * params.num_heads + head) * num_m_blocks + m_block;
}

CUFLASH_DEVICE u32* dq_order_of(const Params& params, int num_m_blocks, i64 m_tile) {
  const i64 num_tiles = (i64)(kIsPacked ? 1 : params.batch) * params.num_heads * num_m_blocks;
  return (u32*)((Real*)params.dq_accumulator + num_tiles * (kBlockM * kDim)) + m_tile;
}

// With packed sequences, a word after the counters says whether some sequences overlap because their starts decrease.
// Then a turn might never come, and no block may wait for one.
CUFLASH_DEVICE u32* overlap_of(const Params& params, int num_m_blocks) {
  return dq_order_of(params, num_m_blocks, (i64)params.num_heads * num_m_blocks);
}
// Warp. Whether the starts of sequences decrease somewhere.
CUFLASH_DEVICE bool sequences_overlap(const Params& params) {
  bool decrease = false;
  for (int batch = ptx::thread_index() % 32; batch <= params.batch; batch += 32) {
    decrease = decrease || query_start_at(params, batch + 1) < query_start_at(params, batch);
    decrease = decrease || key_start_at(params, batch + 1) < key_start_at(params, batch);
  }
  return ptx::any_lane(decrease);
}

// The statistics of the rows of a head are pairs (lse as an exponent, delta - dlse). They give rows past seqlen_q, up
// to a whole tile, no weights. With kPairsStats, every two rows have both lse before both delta: a lane that needs only
// one of the two quantities reads it for two rows at once.
constexpr bool kPairsStats = CUFLASH_PAIRS_STATS;

// Statistics are written, and have their slots, by tiles of kStatsBlock rows.
constexpr int kStatsBlock = CUFLASH_STATS_BLOCK;

// The index of the first row of a head among the rows that have statistics.
CUFLASH_DEVICE i64 first_stats_row(const Params& params, Entry batch, int head) {
  if constexpr (kIsPacked)
    return (i64)head * params.stats_rows + (i64)first_slot_of_queries(batch, kStatsBlock) * kStatsBlock;
  return ((i64)batch * params.num_heads + head) * params.stats_rows;
}
// The statistics of all rows of a head.
CUFLASH_DEVICE Real* stats_of(const Params& params, Entry batch, int head) {
  return (Real*)params.row_stats + first_stats_row(params, batch, head) * 2;
}

// The two numbers of one row: lse as an exponent is at [0], delta - dlse at [kDelta].
CUFLASH_DEVICE Real* row_stats(const Params& params, Entry batch, int head, int row) {
  return stats_of(params, batch, head) + (kPairsStats ? row / 2 * 4 + row % 2 : row * 2);
}
constexpr int kDelta = kPairsStats ? 2 : 1;

#if CUFLASH_TANGENTS
// The tangents of lse and of delta - dlse of all rows of a head, and of one row: they lie as the statistics do.
CUFLASH_DEVICE Real* row_tangents_of(const Params& params, Entry batch, int head) {
  return (Real*)params.row_tangents + first_stats_row(params, batch, head) * 2;
}
CUFLASH_DEVICE Real* row_tangents(const Params& params, Entry batch, int head, int row) {
  return row_tangents_of(params, batch, head) + (kPairsStats ? row / 2 * 4 + row % 2 : row * 2);
}
#endif

// Where lse is large, one number does not hold both the row max and the logarithm of the row sum: rounding loses the
// latter, and weights exp(S - lse) would not sum to 1. For such rows, helpers/backward_preprocess.cu finds both again,
// and weights are exp(S - row max) / row sum. Rows come in groups of 64. Where a row of a group is large, all its rows
// have -0 as a statistic, and a RowSum; that of a row that is not large is (lse, 1). Other rows have no RowSum, and no
// statistic of -0.
constexpr int kGroupRows = 64;

// Whether a statistic says so of its group.
CUFLASH_DEVICE bool is_of_large(float lse) { return ptx::bits_of(lse) == 0x80000000u; }
CUFLASH_DEVICE bool is_of_large(double lse) { return ptx::bits_of(lse) == 0x8000000000000000ull; }

// The RowSums of all rows of a head.
CUFLASH_DEVICE RowSum* row_sums_of(const Params& params, Entry batch, int head) {
  return (RowSum*)params.row_sums + first_stats_row(params, batch, head);
}

// A row of either statistics, and its delta - dlse. One that does not exist gets no weight.
struct RowStats {
  Real lse = ptx::infinity(), row_max = 0, inverse = 1, delta = 0;

  CUFLASH_DEVICE RowStats() {}
  CUFLASH_DEVICE RowStats(const Params& params, Entry batch, int head, int row) {
    load(params, batch, head, row);
    complete(params, batch, head, row);
  }
  // The same in two steps, which other instructions may come between: the latency of a load, and what depends on it.
  CUFLASH_DEVICE void load(const Params& params, Entry batch, int head, int row) {
    const Real* stats = row_stats(params, batch, head, row);
    lse = stats[0], delta = stats[kDelta];
  }
  CUFLASH_DEVICE void complete(const Params& params, Entry batch, int head, int row) {
    if (!is_of_large(lse)) return;
    const RowSum sum = row_sums_of(params, batch, head)[row];
    row_max = sum.row_max, inverse = sum.inverse;
    if constexpr (!kNaturalRowMax) lse = row_max;
  }

  CUFLASH_DEVICE bool exists() const { return lse != ptx::infinity() && row_max != ptx::infinity(); }
  // The weight is the exponential of this times the inverse.
  CUFLASH_DEVICE Real exponent_of(Real score, Real exponent_scale) const {
    return (kNaturalRowMax ? score - row_max : score) * exponent_scale - lse;
  }
  CUFLASH_DEVICE Real weight_of(Real score, Real exponent_scale) const {
    return warp_exponential(exponent_of(score, exponent_scale)) * inverse;
  }
};
