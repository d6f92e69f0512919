// What the kernels of the backward pass agree on.
#pragma once
#include "config.cuh"
#include "params.cuh"

// dq gathers contributions of every tile of keys: by reductions into an accumulator, in any order (fast), or in
// a kernel of its own that recomputes them, in a fixed order (deterministic).
constexpr bool kDqByReduction = CUFLASH_DQ_BY_REDUCTION;

// Warps of the product dq = ds k along its rows; the others share the columns.
constexpr int kDqWarpsM = CUFLASH_DQ_WARPS_M;
constexpr int kDqWarpsD = kNumWarps / kDqWarpsM;
constexpr int kDqMTiles = kBlockM / (16 * kDqWarpsM);
constexpr int kDqNTiles = kDim / (8 * kDqWarpsD);
static_assert(kDqMTiles * 16 * kDqWarpsM == kBlockM && kDqNTiles * 8 * kDqWarpsD == kDim, "dq divides among the warps");
static_assert(kDqNTiles % 2 == 0, "columns come 16 at a time");
static_assert((kDqMTiles & (kDqMTiles - 1)) == 0, "rows of a warp start at a multiple of their number");

// dk and dv of one key/value head are sums over the query heads of its group. Where tiles of keys alone are too few to
// fill the device, params.group_splits blocks share the heads and leave partial sums to a kernel that adds them.
constexpr bool kSplitsGroup = CUFLASH_SPLITS_GROUP;

// The warps of the kernel that owns keys: along keys, and along the columns of dk and dv.
constexpr int kWarpsD = CUFLASH_WARPS_D;
constexpr int kWarpsN = kNumWarps / kWarpsD;
constexpr int kKeyTiles = kBlockN / (16 * kWarpsN);    // pieces of 16 keys of a warp
constexpr int kColumnTiles = kDim / (8 * kWarpsD);     // pieces of 8 columns of dk of a warp
constexpr int kColumnTilesV = kDimV / (8 * kWarpsD);   // and of dv
// Along the queries of P' and dS', which they share through shared memory.
constexpr int kWarpsQ = CUFLASH_WARPS_Q;
constexpr int kPartialElements = kBlockN * (kDim + kDimV);

// The accumulator of a tile keeps the fragments as the threads hold them, neighbours in a warp next to each other: four
// elements a thread where the device reduces four at once (float32 from sm_90 on), else one.
constexpr bool kReducesFour = CUFLASH_ARCH >= 90 && kElementBytes < 8;
CUFLASH_DEVICE int accumulator_offset(int piece, int element) {
  const int thread = ptx::thread_index();
  return kReducesFour ? (piece * kNumThreads + thread) * 4 + element : (piece * 4 + element) * kNumThreads + thread;
}

struct alignas(16) Real4 {
  Real value[4];
};

// The part of `split` in the sums of a tile of keys: dk, then dv, four elements of a thread next to each other.
CUFLASH_DEVICE Real* partials_of(const Params& params, int num_n_blocks, int batch, int head_kv, int n_block, int split) {
  const i64 tile = ((i64)batch * params.num_heads_kv + head_kv) * num_n_blocks + n_block;
  return (Real*)params.dkv_partials + (tile * params.group_splits + split) * kPartialElements + ptx::thread_index() * 4;
}

// Pairs (lse as an exponent, delta) of the rows of a head; rows past seqlen_q, up to a whole tile, have no weights.
CUFLASH_DEVICE Real* stats_of(const Params& params, int batch, int head) {
  return (Real*)params.row_stats + ((i64)batch * params.num_heads + head) * params.stats_rows * 2;
}
