// Warps that share the rows of a block, each with some of the keys of a tile, add up their softmax statistics.
#pragma once
#include "common/io/fragments.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/softmax/softmax.cuh"
#include "common/softmax/store_lse.cuh"

// The statistics of a row over some of the keys.
struct alignas(2 * sizeof(Real)) RowPart {
  Real row_max, row_sum;
};
template <int warps>
constexpr u32 kBytesRowParts = warps * kBlockM * sizeof(RowPart);

// Block. Adds up the sums of `warps` warps; the first of them, `warp_n` 0, gets those of all keys. `s_parts` is shared
// memory of kBytesRowParts<warps> that nobody reads any more.
template <int warps, int m_tiles>
CUFLASH_DEVICE void merge_warps(OnlineSoftmax<m_tiles>& softmax, u32 s_parts, int warp_row, int warp_n) {
  const auto at = [&](int warp, int m, int half) {
    const int row = warp_row + 16 * m + 8 * half + fragment_row();
    return s_parts + (warp * kBlockM + row) * (u32)sizeof(RowPart);
  };
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Real part[2] = {softmax.row_max[m][half], softmax.row_sum[m][half]};
      if (fragment_column() == 0) ptx::store_shared_x2(at(warp_n, m, half), part);
    }
  ptx::sync_block();
  if (warp_n > 0) return;
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll 1
      for (int warp = 1; warp < warps; ++warp) {
        Real part[2];
        ptx::load_shared_x2(at(warp, m, half), part);
        Real &row_max = softmax.row_max[m][half], &row_sum = softmax.row_sum[m][half];
        const Real larger = max_of(row_max, part[0]);
        row_sum = row_sum * relative(row_max, larger) + part[1] * relative(part[0], larger);
        row_max = larger;
      }
}

// Block. The epilogue of kernels without values: adds up the sums of lanes, of warps, and the sink, and stores lse.
template <int warps, int m_tiles>
CUFLASH_DEVICE void finish_lse(const Params& params, const Work& work, OnlineSoftmax<m_tiles>& softmax, u32 s_parts,
                               int warp_row, int warp_n, int seqlen_q) {
  softmax.finish();
  if constexpr (warps > 1) merge_warps<warps>(softmax, s_parts, warp_row, warp_n);
  if (kHasSinks && !is_left_over(params, work.batch)) {
    Real no_output[m_tiles][1][4] = {};
    softmax.add_sinks(no_output, [&](int, int) { return to_row_max(sink_of(params, work.head)); });
  }
  Real* g_lse = row_values_of(params.lse, work.batch, work.head);
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = work.block * kBlockM + warp_row + fragment_row() + 16 * m + 8 * half;
      if (warp_n == 0 && fragment_column() == 0 && row < seqlen_q)
        store_lse(g_lse + row * params.lse.row_stride, softmax, m, half);
    }
}
