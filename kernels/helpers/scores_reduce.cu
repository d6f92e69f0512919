// Adds up the gradients of the inputs of scores other than q and k, in a fixed order, from the partial sums that blocks
// of sm80/backward_scores.cu, sm90/backward_bias.cu or sm90/backward.cu left (the last of these leaves them by tiles of
// keys). For dbias a block serves as many elements of a tile, or keys, as it has threads, so that all partial sums are
// on their way together; for the other gradients it makes one number. They are added in float64, whatever the elements
// are: there are few of them.
#include "common/softmax/backward.cuh"
#include "common/score/key_sums.cuh"
#include "common/softmax/reduce.cuh"
#include "common/score/score_gradients.cuh"

static_assert(kBlockSumBytes == CUFLASH_SHARED_BYTES, "shared memory differs from the plan");

constexpr bool kByKeys = CUFLASH_SUMS_BY_KEYS;

CUFLASH_DEVICE void add_dbias(const Params& params) {
  constexpr int kBlocks = ceil_div(kResultElements, kNumThreads);  // of a tile
  const u32 shared = ptx::block_index() / kBlocks;
  const int i = ptx::block_index() % kBlocks * kNumThreads + ptx::thread_index();
  if (i >= kResultElements) return;
  const ScoreTiles tile(params, num_whole_results(params) + shared);
  const Real* partials = score_partials_of(params, shared, 0) + i;
  double sum = 0;
#pragma unroll 8
  for (int split = 0; split < params.score_splits; ++split) sum += partials[(i64)split * kResultElements];
  store_dbias(params, tile, i, (Real)sum);
}

// The same for a bias that differs from key to key only, whose gradient was summed by keys.
CUFLASH_DEVICE void add_dbias_of_keys(const Params& params) {
  const int blocks = ceil_div(params.seqlen_k, kNumThreads), owner = ptx::block_index() / blocks;
  const int key = ptx::block_index() % blocks * kNumThreads + ptx::thread_index();
  if (key >= params.seqlen_k) return;
  const int own_heads = kSumsHeads ? 1 : params.num_heads, splits = params.tail_splits;
  const int first_head = owner % own_heads, first_batch = owner / own_heads, batches = kSumsBatch ? params.batch : 1;
  const int count = (kSumsHeads ? params.num_heads : 1) * batches * splits;
  double sum = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) {
    const int entry = i / splits, head = first_head + entry / batches;
    const Entry batch = entry_at(params, first_batch + entry % batches);
    sum += bias_sums_of(params, key_partial_of(params, head, batch, key / kBlockN, i % splits))[key % kBlockN];
  }
  store_dbias(params, first_batch, first_head, 0, key, (Real)sum);
}

// The first partial sum of the slope of a query head in one batch entry.
CUFLASH_DEVICE const Real* slope_partials_of(const Params& params, int head, Entry batch) {
  if constexpr (kByKeys) return slope_sums_of(params, key_partial_of(params, head, batch, 0, 0));
  return sums_partials_of(params, kSumOfSlope, head, batch, 0);
}

// Block 0 makes dscale and the next one dsoftcap, if they are wanted; each of the others makes a slope.
CUFLASH_DEVICE void add_sums(const Params& params) {
  const i64 num_partials = kByKeys
                               ? (i64)num_tiles_of(params, params.seqlen_k, kBlockN) * params.tail_splits * kSumWarps
                               : (i64)num_tiles_of(params, params.seqlen_q, kBlockM) * params.sums_splits;
  const i64 of_head = kIsPacked ? num_partials : num_partials * params.batch;
  const int index = ptx::block_index(), thread = ptx::thread_index();
  const int slope = index - kNeedsDscale - kNeedsDsoftcap;
  const Real* partials;
  i64 count;
  void* result;
  if (slope >= 0) {
    const int head = slope % params.num_heads, batch = slope / params.num_heads;
    partials = slope_partials_of(params, head, entry_at(params, batch));
    i64 of_entry = num_partials;
    if constexpr (kIsPacked) of_entry = slope_partials_of(params, head, entry_at(params, batch + 1)) - partials;
    count = kSumsBatch ? of_head : of_entry;
    result = (Real*)params.dalibi_slopes.data + batch * params.dalibi_slopes.batch_stride +
             head * params.dalibi_slopes.head_stride;
  } else {
    const bool of_scale = kNeedsDscale && index == 0;
    partials = kByKeys ? block_sums_of(params, !of_scale, 0)
                       : sums_partials_of(params, of_scale ? kSumOfScale : kSumOfSoftcap, 0, {0}, 0);
    count = kByKeys ? num_key_blocks(params) * kSumWarps : of_head * params.num_heads;
    result = of_scale ? params.dscale : params.dsoftcap;
  }
  double sum = 0;
#pragma unroll 16
  for (i64 i = thread; i < count; i += kNumThreads) sum += partials[i];
  sum = block_sum(sum);
  if (thread == 0) *(Real*)result = sum;
}

CUFLASH_DEVICE void backward_scores_reduce(const Params& params) {
  if constexpr (!kNeedsDbias)
    add_sums(params);
  else if constexpr (kByKeys)
    add_dbias_of_keys(params);
  else
    add_dbias(params);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_scores_reduce)
