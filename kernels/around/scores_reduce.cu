// The gradients of bias, slopes, scale and softcap from the parts that blocks of sm80/backward_scores.cu left, in an
// order that is fixed. For dbias a block serves one tile; for the others it makes one number. Parts are added in
// float64, whatever the elements are: there are few of them.
#include "common/backward.cuh"
#include "common/reduce.cuh"
#include "common/score_gradients.cuh"

static_assert(kBlockSumBytes == CUFLASH_SHARED_BYTES, "shared memory differs from the plan");

CUFLASH_DEVICE void add_dbias(const Params& params) {
  const ScoreTiles tile(params, ptx::block_index());
  const Real* parts = score_partials_of(params, ptx::block_index(), 0);
  for (int i = ptx::thread_index(); i < kResultElements; i += kNumThreads) {
    double sum = 0;
#pragma unroll 4
    for (int split = 0; split < params.score_splits; ++split) sum += parts[(i64)split * kResultElements + i];
    store_dbias(params, tile, i, (Real)sum);
  }
}

// Block 0 makes dscale and the next one dsoftcap, if they are wanted; each of the others makes a slope.
CUFLASH_DEVICE void add_sums(const Params& params) {
  const i64 num_parts = (i64)num_tiles_of(params, params.seqlen_q, kBlockM) * params.sums_splits;
  const i64 of_head = kIsPacked ? num_parts : num_parts * params.batch;
  const int index = ptx::block_index(), thread = ptx::thread_index();
  const int slope = index - kNeedsDscale - kNeedsDsoftcap;
  const Real* parts;
  i64 count;
  void* result;
  if (slope >= 0) {
    const int head = slope % params.num_heads, batch = slope / params.num_heads;
    parts = sums_partials_of(params, 0, head, entry_at(params, batch), 0);
    i64 of_entry = num_parts;
    if constexpr (kIsPacked) of_entry = sums_partials_of(params, 0, head, entry_at(params, batch + 1), 0) - parts;
    count = kSumsBatch ? of_head : of_entry;
    result = (Real*)params.dalibi_slopes.data + batch * params.dalibi_slopes.batch_stride +
             head * params.dalibi_slopes.head_stride;
  } else {
    const bool of_scale = kNeedsDscale && index == 0;
    parts = sums_partials_of(params, of_scale ? 1 : 2, 0, {0}, 0);
    count = of_head * params.num_heads;
    result = of_scale ? params.dscale : params.dsoftcap;
  }
  double sum = 0;
#pragma unroll 4
  for (i64 i = thread; i < count; i += kNumThreads) sum += parts[i];
  sum = block_sum(sum);
  if (thread == 0) *(Real*)result = sum;
}

CUFLASH_DEVICE void backward_scores_reduce(const Params& params) {
  if constexpr (kNeedsDbias)
    add_dbias(params);
  else
    add_sums(params);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_scores_reduce)
