// Computes gradients of the sinks from what helpers/backward_preprocess.cu left for every row, in a fixed order of
// additions:
//
//   dsink = -sum exp(sink - lse) (delta - dlse)        over all rows of a query head, of all batch entries
//
// or the tangents of these: with delta in place of delta - dlse, -sum exp(sink - lse) ((tsink - tlse) delta + tdelta).
//
// A block owns a query head. Sums of numbers of both signs run in float64, whatever the elements are: there are many of
// them, and an addition for a row costs nothing.
#include "common/softmax/backward.cuh"
#include "common/softmax/exponential.cuh"
#include "common/io/params.cuh"
#include "common/softmax/reduce.cuh"
#include "common/softmax/row_reduction_gradients.cuh"

static_assert(kBlockSumBytes == CUFLASH_SHARED_BYTES, "shared memory differs from the plan");

CUFLASH_DEVICE void backward_sinks(const Params& params) {
  const int head = ptx::block_index(), thread = ptx::thread_index();
  const Real sink = sink_of(params, head);
#if CUFLASH_TANGENTS
  const Real tsink = kMovesSinks ? ((const Real*)params.tsinks)[head * params.tsinks_stride] : (Real)0;
#endif
  // Packed: all slots, also those without a row.
  const int rows = kIsPacked ? params.stats_rows : params.seqlen_q;
  const i64 num_rows = (i64)(kIsPacked ? 1 : params.batch) * rows;
  double sum = 0;
#pragma unroll 4
  for (i64 i = thread; i < num_rows; i += kNumThreads) {
    const Entry batch = {(int)(i / rows)};
    const int row = i % rows;
    const RowStats own(params, batch, head, row);
    if (!own.exists()) continue;
    const Real weight = exponential(own.exponent_of(sink, kExponentOfE)) * own.inverse;
#if CUFLASH_TANGENTS
    const Real* tangents = row_tangents(params, batch, head, row);
    sum -= weight * ((tsink - tangents[0]) * own.delta + tangents[kDelta]);
#else
    const Real delta = RowReductionGradients(params, batch, head).delta_of(own.delta, weight, row);
    sum -= weight * delta;
#endif
  }
  sum = block_sum(sum);
  if (thread == 0) ((Real*)params.dsinks)[head * params.dsinks_stride] = sum;
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_sinks)
