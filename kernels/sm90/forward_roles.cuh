// The roles in the persistent forward kernels of compute capability 9.0: consumer warpgroups, each of which owns 64
// queries of a tile, and a producer warpgroup, the last one.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/softmax/softmax.cuh"
#include "common/softmax/store_lse.cuh"
#include "ptx/tma.cuh"

constexpr int kConsumers = kBlockM / 64;
static_assert(kNumWarps == 4 * (kConsumers + 1), "the consumers and a producer");
static_assert(kBlockM == 64 * kConsumers, "a consumer owns 64 queries");

// Named barriers: one per consumer for the ping-pong, one per consumer for itself, one for all consumers.
constexpr u32 kPingPongBarrier = 1, kConsumer = kPingPongBarrier + kConsumers, kAll = kConsumer + kConsumers;

CUFLASH_DEVICE void sync_consumer(u32 consumer) { ptx::sync_named(kConsumer + consumer, 128); }

// Stores lse of rows `row` and `row` + 8, the two of a lane.
template <class Softmax>
CUFLASH_DEVICE void store_lse(const Params& params, Entry batch, int head, int row, const Softmax& softmax) {
  float* g_lse = row_values_of(params.lse, batch, head);
  const int seqlen_q = seqlen_q_of(params, batch);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int half_row = row + 8 * half;
    if (fragment_column() == 0 && half_row < seqlen_q) {
      store_lse(g_lse + half_row * params.lse.row_stride, softmax, 0, half);
      store_row_reductions(params, batch, head, half_row, softmax, 0, half);
    }
  }
}
