// Gradients of the sinks, from what around/delta.cu left of every row, in an order that is fixed:
//
//   dsink = -sum exp(sink - lse) (delta - dlse)        over all rows of a query head, of all batch entries
//
// A block owns a query head. Sums of numbers of both signs run in float64, whatever the elements are: there are many of
// them, and an addition for a row costs nothing.
#include "common/backward.cuh"
#include "common/exponential.cuh"
#include "common/params.cuh"

static_assert(kNumWarps * 16 == CUFLASH_SHARED_BYTES, "shared memory differs from the plan");

CUFLASH_DEVICE void backward_sinks(const Params& params) {
  const int head = ptx::block_index(), thread = ptx::thread_index();
  const Real exponent = sink_of(params, head) * kExponentOfE;
  // Packed: all places, also those without a row.
  const int rows = kIsPacked ? params.stats_rows : params.seqlen_q;
  const i64 num_rows = (i64)(kIsPacked ? 1 : params.batch) * rows;
  double sum = 0;
#pragma unroll 4
  for (i64 i = thread; i < num_rows; i += kNumThreads) {
    const Entry batch = {(int)(i / rows)};
    const int row = i % rows;
    const Real* stats = stats_of(params, batch, head) + (kPairsStats ? row / 2 * 4 + row % 2 : row * 2);
    const Real exponent_lse = stats[0], delta = stats[kPairsStats ? 2 : 1];
    if (exponent_lse != ptx::infinity()) sum -= exponential(exponent - exponent_lse) * delta;
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shuffle_xor(sum, mask);
  if (thread % 32 == 0) ptx::store_shared_x2(ptx::dynamic_shared() + thread / 32 * 16, {sum, 0.0});
  ptx::sync_block();
  if (thread != 0) return;
  for (int warp = 1; warp < kNumWarps; ++warp) {
    double part;
    ptx::load_shared(ptx::dynamic_shared() + warp * 16, part);
    sum += part;
  }
  ((Real*)params.dsinks)[head * params.dsinks_stride] = sum;
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_sinks)
