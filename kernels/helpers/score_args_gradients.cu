// Gradients of arrays that a score reads: clears the sums that sm80/backward_scores.cu or sm90/backward.cu adds to, or
// converts them to results, as common/score/score_args_gradients.cuh says.
#include "common/softmax/backward.cuh"
#include "common/score/score_args_gradients.cuh"
#include "common/config.cuh"
#include "common/io/params.cuh"

constexpr bool kStores = CUFLASH_STORES_SCORE_ARGS;

CUFLASH_DEVICE void clear(const Params& params, i64 first, i64 step) {
  const i64 words = (kSumsScoreArgs ? kSumWords : kTermWords) * first_sum_of(params, kNumScoreArgs);
  for (i64 i = first; i < words; i += step) score_arg_sums_of(params, 0)[i] = 0;
  for (i64 i = first; i <= kNumScoreArgs; i += step)
    score_arg_largest_of(params)[i] = 0;  // the most reads are the last
}

// The offset of the element of an array at `index` in C order.
CUFLASH_DEVICE i64 offset_of(const ScoreArg& array, i64 index) {
  i64 offset = 0;
#pragma unroll
  for (int axis = 3; axis >= 0; --axis) {
    offset += index % array.size[axis] * array.stride[axis];
    index /= array.size[axis];
  }
  return offset;
}

CUFLASH_DEVICE double sum_of(const Params& params, int array, i64 element) {
  if constexpr (kSumsScoreArgs) {
    return exact_sum(score_arg_sums_of(params, 0) + element * kSumWords);
  } else {
    i64 word[kTermWords];
    for (int k = 0; k < kTermWords; ++k) word[k] = score_arg_sums_of(params, k)[element];
    return TermScale(params, array).value(word);
  }
}

CUFLASH_DEVICE void store(const Params& params, i64 first, i64 step) {
  for (int array = 0; array < kNumScoreArgs; ++array) {
    const ScoreArg& gradient = params.gradients[array];
    if (gradient.data == nullptr) continue;
    const i64 sums = first_sum_of(params, array), count = elements_of(params.score_args[array]);
    const u64 largest = score_arg_largest_of(params)[array];
    // If a term of an array is infinite or NaN, its sums tell nothing, and all of its gradients become NaN.
    const bool is_finite = largest < ptx::bits_of((double)ptx::infinity());
    for (i64 i = first; i < count; i += step)
      store_gradient(array, (void*)gradient.data, offset_of(gradient, i),
                     is_finite ? (Real)sum_of(params, array, sums + i) : score_nan());
  }
}

CUFLASH_DEVICE void store_gradients(const Params& params) {
  const i64 first = (i64)ptx::block_index() * kNumThreads + ptx::thread_index();
  const i64 step = (i64)CUFLASH_SCORE_ARG_BLOCKS * kNumThreads;
  if constexpr (kStores)
    store(params, first, step);
  else
    clear(params, first, step);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, store_gradients)
