// How the backward kernels on mma.sync, and their helpers, deal their tiles to warps.
#pragma once
#include "common/softmax/backward.cuh"

// Whether the accumulators of the main kernel are in plain order, whatever the element type: products of bfloat16 terms
// permute no rows or columns (sm80/fragments.cuh).
constexpr bool kPlainFragments = CUFLASH_PLAIN_FRAGMENTS;

// Warps of the product dq = ds k along its rows; the others share the columns.
constexpr int kDqWarpsM = CUFLASH_DQ_WARPS_M;
constexpr int kDqWarpsD = kNumWarps / kDqWarpsM;
constexpr int kDqMTiles = kBlockM / (16 * kDqWarpsM);
constexpr int kDqNTiles = kDim / (8 * kDqWarpsD);
static_assert(kDqMTiles * 16 * kDqWarpsM == kBlockM && kDqNTiles * 8 * kDqWarpsD == kDim, "dq divides among the warps");
static_assert(kDqNTiles % 2 == 0, "columns come 16 at a time");
static_assert((kDqMTiles & (kDqMTiles - 1)) == 0, "rows of a warp start at a multiple of their number");

// How the kernel that owns keys divides its warps: along keys, and along the columns of dk and dv.
constexpr int kWarpsD = CUFLASH_WARPS_D;
constexpr int kWarpsN = kNumWarps / kWarpsD;
constexpr int kKeyTiles = kBlockN / (16 * kWarpsN);              // m-tiles of 16 keys of a warp
constexpr int kColumnTiles = kDim / (8 * kWarpsD);               // n-tiles of 8 columns of dk of a warp
constexpr int kColumnTilesV = max_of(kDimV / (8 * kWarpsD), 2);  // and of dv
// Warps along the queries of P' and dS', which they share through shared memory.
constexpr int kWarpsQ = CUFLASH_WARPS_Q;

// The accumulator of a tile keeps the fragments as the threads hold them, neighbours in a warp next to each other: four
// elements a thread where the device reduces four at once (float32 from sm_90 on), else one.
constexpr bool kReducesFour = CUFLASH_ARCH >= 90 && kElementBytes < 8;
CUFLASH_DEVICE int accumulator_offset(int n_tile, int element) {
  const int thread = ptx::thread_index();
  return kReducesFour ? (n_tile * kNumThreads + thread) * 4 + element : (n_tile * 4 + element) * kNumThreads + thread;
}

template <class T>
CUFLASH_DEVICE void add_to_accumulator(T* accumulator, int n_tile, const T (&value)[4]) {
  if constexpr (kReducesFour) {
    ptx::reduce_add_x4(accumulator + accumulator_offset(n_tile, 0), value);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::reduce_add(accumulator + accumulator_offset(n_tile, i), value[i]);
  }
}

// Adds the fragments of dq of a tile of queries to its accumulator; `m_tile` is its index among all of them.
CUFLASH_DEVICE void add_to_dq(const Params& params, i64 m_tile, const Real (&dq)[kDqMTiles][kDqNTiles][4]) {
  Real* accumulator = (Real*)params.dq_accumulator + m_tile * (kBlockM * kDim);
#pragma unroll
  for (int m = 0; m < kDqMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kDqNTiles; ++n) add_to_accumulator(accumulator, m * kDqNTiles + n, dq[m][n]);
}
