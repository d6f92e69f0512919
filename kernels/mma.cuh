// Products of tiles: fragments from shared memory or registers, accumulators in registers.
//
// An accumulator tile is float[m_tiles][n_tiles][4]: 16 x 8 pieces in the layout of ptx::mma_m16n8k16. Lane l holds of
// each piece the rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
#pragma once
#include "config.cuh"

CUFLASH_DEVICE u32 lane_index() { return ptx::thread_index() % 32; }
CUFLASH_DEVICE u32 warp_index() { return ptx::thread_index() / 32; }
CUFLASH_DEVICE int fragment_row() { return lane_index() / 4; }
CUFLASH_DEVICE int fragment_column() { return 2 * (lane_index() % 4); }

// Columns of a product are dealt to `warps` warps in turns of 16, so that a warp's n-th piece of 8 columns starts here.
template <int warps>
CUFLASH_DEVICE constexpr int column_of(int warp, int n) {
  return 16 * (warp + n / 2 * warps) + n % 2 * 8;
}

// Where a lane points ldmatrix within the 16 x 16 piece at row `r`, column 16 `piece` of a tile with rows of `row`
// elements. Two orders of the four 8 x 8 matrices serve every operand: down first for A stored [m][k] and B stored
// [k][n], across first for B stored [n][k] and A stored [k][m].
template <int row>
CUFLASH_DEVICE u32 lane_down_first(u32 tile, int r = 0, int piece = 0) {
  const u32 lane = lane_index();
  return tile + (r + lane % 16) * row * 2 + ((piece * 32 + lane / 16 * 16) ^ row_swizzle<row>(lane));
}
template <int row>
CUFLASH_DEVICE u32 lane_across_first(u32 tile, int r = 0, int piece = 0) {
  const u32 lane = lane_index();
  return tile + (r + lane % 8 + lane / 16 * 8) * row * 2 + ((piece * 32 + lane / 8 % 2 * 16) ^ row_swizzle<row>(lane));
}

// The same lane's place in the piece 16 `r` rows down and 16 `piece` columns along.
template <int row>
CUFLASH_DEVICE constexpr u32 at(u32 lane_address, int r, int piece) {
  return along_row(lane_address, piece * 32) + r * 16 * row * 2;
}

template <int m_tiles, int n_tiles>
CUFLASH_DEVICE void set_zero(float (&tile)[m_tiles][n_tiles][4]) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[m][n][i] = 0.0f;
}

// d += a b over `k_steps` steps of 16. load_a(m, k, fragment) fetches rows 16 m of A; load_b(n, k, fragment) fetches 16
// columns of B, two n pieces at a time. Fragments of B are fetched kFragmentsAhead products before their use.
template <int k_steps, int m_tiles, int n_tiles, class LoadA, class LoadB>
CUFLASH_DEVICE void multiply(float (&d)[m_tiles][n_tiles][4], LoadA load_a, LoadB load_b) {
  static_assert(n_tiles % 2 == 0, "columns come 16 at a time");
  constexpr int kPairs = n_tiles / 2, kTotal = k_steps * kPairs;
  constexpr int kStepsAhead = kFragmentsAhead > 0 ? 1 : 0;  // of A
  u32 a[kStepsAhead + 1][m_tiles][4], b[kFragmentsAhead + 1][4];
  const auto load_step = [&](int k) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) load_a(m, k, a[k % (kStepsAhead + 1)][m]);
  };
  const auto load_pair = [&](int i) { load_b(i % kPairs, i / kPairs, b[i % (kFragmentsAhead + 1)]); };

  if (kStepsAhead > 0) load_step(0);
#pragma unroll
  for (int i = 0; i < kFragmentsAhead && i < kTotal; ++i) load_pair(i);
#pragma unroll
  for (int i = 0; i < kTotal; ++i) {
    const int k = i / kPairs, n = i % kPairs;
    if (n == 0 && k + kStepsAhead < k_steps) load_step(k + kStepsAhead);
    if (i + kFragmentsAhead < kTotal) load_pair(i + kFragmentsAhead);
    const u32(&fragment)[4] = b[i % (kFragmentsAhead + 1)];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
      ptx::mma_m16n8k16(Element{}, d[m][2 * n], a[k % (kStepsAhead + 1)][m], fragment[0], fragment[1]);
      ptx::mma_m16n8k16(Element{}, d[m][2 * n + 1], a[k % (kStepsAhead + 1)][m], fragment[2], fragment[3]);
    }
  }
}

// The 16 columns 16 k of an accumulator tile, rounded to the element type, as an A operand: the layouts coincide.
template <int n_tiles>
CUFLASH_DEVICE void to_operand(const float (&row)[n_tiles][4], int k, u32 (&a)[4]) {
  a[0] = ptx::pack(Element{}, row[2 * k][0], row[2 * k][1]);
  a[1] = ptx::pack(Element{}, row[2 * k][2], row[2 * k][3]);
  a[2] = ptx::pack(Element{}, row[2 * k + 1][0], row[2 * k + 1][1]);
  a[3] = ptx::pack(Element{}, row[2 * k + 1][2], row[2 * k + 1][3]);
}

// Rounds an accumulator tile, times `factor` of its row, into a shared tile with rows of `row` elements, from row `r` on;
// columns as dealt to `warp` of `warps`.
template <int row, int warps, int m_tiles, int n_tiles, class Factor>
CUFLASH_DEVICE void store_fragments(u32 tile, int r, int warp, const float (&value)[m_tiles][n_tiles][4], Factor factor) {
  const u32 lane_row = fragment_row();
  const u32 address = tile + (r + lane_row) * row * 2 + ((warp * 32) ^ row_swizzle<row>(lane_row)) + fragment_column() * 2;
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float f = factor(m, half);
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
        ptx::store_shared_b32(along_row(address, column_of<warps>(0, n) * 2) + (16 * m + 8 * half) * row * 2,
                              ptx::pack(Element{}, value[m][n][2 * half] * f, value[m][n][2 * half + 1] * f));
    }
}
