// Converts dq, and dk and dv of tiles of keys that blocks share, to rows of the element type. The kernel before added
// them up, or left partial sums, in the fragment order of sm80/backward_warps.cuh. A block converts a tile of one of
// them.
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/query_iterator.cuh"
#include "common/schedule/schedule.cuh"
#include "sm80/backward_warps.cuh"
#include "sm80/copy.cuh"
#include "sm80/mma.cuh"
#if CUFLASH_TANGENTS
#include "common/score/gradient_tangents.cuh"
#endif

// The warps that left a tile of keys. One block converts what kNumWarps of them left.
constexpr int kTileWarps = CUFLASH_TILE_WARPS;
constexpr int kSlices = kTileWarps / kNumWarps;
constexpr int kKeys = kBlockN / kSlices;
constexpr bool kConvertsKeys = (kSplitsGroup || kSplitsTail) && (kNeedsDk || kNeedsDv);
constexpr int kResultsOfKeys = kNeedsDk && kNeedsDv ? 2 : 1;
constexpr int kBytesOfKeys = kConvertsKeys ? tile_bytes(kKeys, max_of(kDim, kDimV)) : 0;
constexpr int kBytesOfQueries = kDqByReduction ? tile_bytes(kBlockM, kDim) : 0;
static_assert(max_of(kBytesOfKeys, kBytesOfQueries) == CUFLASH_SHARED_BYTES, "shared memory differs from the plan");

// Whether results are stored as they were summed, to be added to other partial sums, and not rounded to the element
// type.
constexpr bool kDqWide = CUFLASH_DQ_WIDE, kDkWide = CUFLASH_DK_WIDE, kDvWide = CUFLASH_DV_WIDE;

// Block. Stores `factor` times the sum of `count` partial sums, which lie `stride` elements after each other and are
// added in their order, to rows [first_row, row_stop) of a head of `result`. `quad_of(partial, i)` is the i-th four
// elements of a thread in a partial sum.
template <Order order, int rows, int columns, int warps_d, class QuadOf, class Result>
CUFLASH_DEVICE void convert(const Real* partial, int count, i64 stride, QuadOf quad_of, Real factor, Result* result,
                            i64 row_stride, int first_row, int row_stop) {
  constexpr int kColumns = round_up(columns, CUFLASH_DIM_MULTIPLE);
  constexpr int kMTiles = rows * warps_d / (16 * kNumWarps), kNTiles = kColumns / (8 * warps_d);
  Real sum[kMTiles][kNTiles][4];
  set_zero(sum);
#pragma unroll 1
  for (int i = 0; i < count; ++i, partial += stride)
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        const Real4 quad = quad_of(partial, m * kNTiles + n);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[m][n][j] += quad.value[j];
      }
  const u32 tile = ptx::dynamic_shared();
  const int warp_row = warp_index() / warps_d * 16 * kMTiles, warp_d = warp_index() % warps_d;
  if constexpr (sizeof(Result) != kElementBytes) {
    store_sums<columns, warps_d>(
        sum, warp_row, warp_d, [&](int, int) { return factor; }, result, row_stride, first_row, row_stop);
  } else {
    constexpr Order kOrder = kPlainFragments ? Order::kPlain : order;
    store_fragments<kOrder, row_bytes(kColumns), warps_d>(tile, warp_row, warp_d, sum,
                                                          [&](int, int) { return factor; });
    ptx::sync_block();
    store_tile<rows, columns>(tile, result, row_stride, first_row, row_stop);
  }
}

// Converts slice `index` of the tiles of dk and dv.
CUFLASH_DEVICE void convert_keys(const Params& params, u32 index) {
  const bool is_dk = kNeedsDk && index % kResultsOfKeys == 0;
  const u32 slice = index / kResultsOfKeys % kSlices, tile = index / (kResultsOfKeys * kSlices);
  const Work work = find_keys(params, tile + (kSplitsTail ? params.whole_tiles : 0), params.num_heads_kv);
  if (!has_keys(params, work)) return;
  const int num_n_blocks = num_tiles_of(params, params.seqlen_k, kBlockN), n_block = work.block, head_kv = work.head;
  const Entry batch = work.batch;
  if constexpr (kMinSharedSteps > 0) {  // a block that took the tile alone has stored the results
    const int group = params.num_heads / params.num_heads_kv;
    QueryIndex queries;
    if (find_queries(params, work, head_kv * group, (head_kv + 1) * group, 0, queries) < kMinSharedSteps) return;
  }
  const int splits = kSplitsTail ? params.tail_splits : params.group_splits;
  const i64 first_partial =
      kSplitsTail ? (i64)tile * splits : first_partial_of(params, num_n_blocks, batch, head_kv, n_block);

  const Real* partial = partials_at(params, first_partial, slice * kNumThreads + ptx::thread_index());
  const auto quad_of = [](const Real* partial, int i) { return *(const Real4*)(partial + i * 32 * kTileWarps * 4); };
  const auto convert_to = [&](auto* head, i64 row_stride, const Real* partial, auto columns, Real factor) {
    convert<Order::kPairedColumns, kKeys, decltype(columns)::value, kWarpsD>(
        partial, splits, kPartialElements, quad_of, factor, head, row_stride, n_block * kBlockN + (int)slice * kKeys,
        seqlen_k_of(params, batch));
  };
  const auto convert_as = [&](auto is_wide, const Tensor& result, const Real* partial, auto columns, Real factor) {
    if constexpr (decltype(is_wide)::value)
      convert_to(per_key_values_of(result, batch, head_kv), result.row_stride, partial, columns, factor);
    else
      convert_to((Storage*)keys_of(params, result, batch, head_kv), result.row_stride, partial, columns, factor);
  };
  if (is_dk)
    convert_as(Integer<kDkWide>{}, params.dk, partial, Integer<kHeadDim>{}, scale_of(params));
  else if constexpr (kHasValues)
    convert_as(Integer<kDvWide>{}, params.dv, partial + kBlockN * kDim, Integer<max_of(kHeadDimV, 1)>{},
               kept_scale_of(params));
}

CUFLASH_DEVICE void convert_queries(const Params& params, u32 index) {
  const Work work = schedule_queries(params, index, params.num_heads, false);
  if (!has_queries(params, work)) return;
  const int m_block = work.block, head = work.head;
  const Entry batch = work.batch;
  const i64 tile = m_tile_of(params, num_tiles_of(params, params.seqlen_q, kBlockM), batch, head, m_block);
  const auto quad_of = [](const Real* sums, int i) -> Real4 {
    const auto at = [&](int element) { return sums + accumulator_offset(i, element); };
    if constexpr (kReducesFour) return *(const Real4*)at(0);
    return {*at(0), *at(1), *at(2), *at(3)};
  };
#if CUFLASH_TANGENTS
  const Real factor = ScaledGradients(scale_of(params), tscale_of(params)).factor;
#else
  const Real factor = scale_of(params);
#endif
  const auto convert_to = [&](auto* result) {
    convert<Order::kPairedRowsColumns, kBlockM, kHeadDim, kDqWarpsD>(
        (const Real*)params.dq_accumulator + tile * (kBlockM * kDim), 1, 0, quad_of, factor, result,
        params.dq.row_stride, m_block * kBlockM, seqlen_q_of(params, batch));
  };
  if constexpr (kDqWide)
    convert_to(row_values_of(params.dq, batch, head));
  else
    convert_to((Storage*)queries_of(params.dq, batch, head));
}

CUFLASH_DEVICE void backward_convert(const Params& params) {
  u32 num_of_keys = 0;
  if constexpr (kConvertsKeys) {
    const u32 num_tiles = heads_in_all(params, params.num_heads_kv) * num_tiles_of(params, params.seqlen_k, kBlockN);
    num_of_keys = (num_tiles - (kSplitsTail ? params.whole_tiles : 0)) * kSlices * kResultsOfKeys;
    if (ptx::block_index() < num_of_keys) {
      convert_keys(params, ptx::block_index());
      return;
    }
  }
  if constexpr (kDqByReduction) convert_queries(params, ptx::block_index() - num_of_keys);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_convert)
