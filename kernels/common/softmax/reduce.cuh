// Sums over a warp and over a block, in a fixed order. They use float64, whatever the elements are: there are few
// numbers, or an addition costs nothing compared with the computation of each number.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"

// Warp. Every lane gets the sum.
CUFLASH_DEVICE double warp_sum(double value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value += ptx::shuffle_xor(value, mask);
  return value;
}

// Block. Thread 0 gets the sum, the others a partial one. Uses the first kBlockSumBytes of shared memory.
constexpr u32 kBlockSumBytes = kNumWarps * 16;
CUFLASH_DEVICE double block_sum(double value) {
  double sum = warp_sum(value);
  if (lane_index() == 0) ptx::store_shared_x2(ptx::dynamic_shared() + warp_index() * 16, {sum, 0.0});
  ptx::sync_block();
  if (ptx::thread_index() != 0) return sum;
  for (int warp = 1; warp < kNumWarps; ++warp) {
    double partial;
    ptx::load_shared(ptx::dynamic_shared() + warp * 16, partial);
    sum += partial;
  }
  return sum;
}
