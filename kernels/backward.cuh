// What the kernels of the backward pass agree on.
#pragma once
#include "config.cuh"
#include "params.cuh"

// dq gathers contributions of every tile of keys: by reductions into an accumulator, in any order (fast), or in
// a kernel of its own that recomputes them, in a fixed order (deterministic).
constexpr bool kDqByReduction = CUFLASH_DQ_BY_REDUCTION;
// Or blocks take turns at the accumulator: for each tile of queries, behind the accumulator, a counter of those who had it.
// Then the order is fixed as well (deterministic).
constexpr bool kDqInTurn = CUFLASH_DQ_IN_TURN;

// dk and dv of one key/value head are sums over the query heads of its group. Where tiles of keys alone are too few to
// fill the device, params.group_splits blocks share the heads and leave partial sums to a kernel that adds them.
constexpr bool kSplitsGroup = CUFLASH_SPLITS_GROUP;

// Which of the two are wanted; what was left out of a kernel's sums is zero in its registers and goes nowhere.
constexpr bool kNeedsDk = CUFLASH_NEEDS_DK;
constexpr bool kNeedsDv = CUFLASH_NEEDS_DV;

constexpr int kPartialElements = kBlockN * (kDim + kDimV);

struct alignas(16) Real4 {
  Real value[4];
};

// The part of `split` in the sums of a tile of keys: dk, then dv, four elements of a thread next to each other.
CUFLASH_DEVICE Real* partials_of(const Params& params, int num_n_blocks, int batch, int head_kv, int n_block, int split,
                                 u32 thread) {
  const i64 tile = ((i64)batch * params.num_heads_kv + head_kv) * num_n_blocks + n_block;
  return (Real*)params.dkv_partials + (tile * params.group_splits + split) * kPartialElements + thread * 4;
}

CUFLASH_DEVICE u32* turns_of(const Params& params, int num_m_blocks, i64 m_tile) {
  const i64 num_tiles = (i64)params.batch * params.num_heads * num_m_blocks;
  return (u32*)((Real*)params.dq_accumulator + num_tiles * (kBlockM * kDim)) + m_tile;
}

// Pairs (lse as an exponent, delta - dlse) of the rows of a head; rows past seqlen_q, up to a whole tile, have no weights. Or, of
// every two rows, both lse before both delta: who needs only one of them reads two at once.
constexpr bool kPairsStats = CUFLASH_PAIRS_STATS;

CUFLASH_DEVICE Real* stats_of(const Params& params, int batch, int head) {
  return (Real*)params.row_stats + ((i64)batch * params.num_heads + head) * params.stats_rows * 2;
}
