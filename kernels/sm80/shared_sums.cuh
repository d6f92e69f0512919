// Sums that warps with the same rows share: each makes those of some columns, and all read those of all columns.
//
// A 16 x 8 tile of an accumulator lies in shared memory as the lanes hold it: 16 bytes of one lane are next to those of
// the next lane, so that there are no bank conflicts.
#pragma once
#include "sm80/mma.cuh"

constexpr u32 kBytesOfSums = 32 * 4 * sizeof(Real);  // of such a tile

CUFLASH_DEVICE void store_sums_of_lane(u32 address, const float (&sum)[4]) { ptx::store_shared_f32x4(address, sum); }
CUFLASH_DEVICE void store_sums_of_lane(u32 address, const double (&sum)[4]) {
  const double first[2] = {sum[0], sum[1]}, second[2] = {sum[2], sum[3]};
  ptx::store_shared_x2(address, first);
  ptx::store_shared_x2(address + 32 * 16, second);
}
CUFLASH_DEVICE void load_sums_of_lane(u32 address, float (&sum)[4]) { ptx::load_shared_f32x4(address, sum); }
CUFLASH_DEVICE void load_sums_of_lane(u32 address, double (&sum)[4]) {
  load_pair(address, sum[0], sum[1]);
  load_pair(address + 32 * 16, sum[2], sum[3]);
}

// Stores the sums of the columns that are dealt to `warp` of `warps`; `tiles` has those of its 16 rows.
template <int warps, int n_tiles>
CUFLASH_DEVICE void share_sums(u32 tiles, int warp, const Real (&sum)[n_tiles][4]) {
#pragma unroll
  for (int n = 0; n < n_tiles; ++n)
    store_sums_of_lane(tiles + column_of<warps>(warp, n) / 8 * kBytesOfSums + lane_index() * 16, sum[n]);
}

template <int n_tiles>
CUFLASH_DEVICE void load_shared_sums(u32 tiles, Real (&sum)[n_tiles][4]) {
#pragma unroll
  for (int n = 0; n < n_tiles; ++n) load_sums_of_lane(tiles + n * kBytesOfSums + lane_index() * 16, sum[n]);
}
