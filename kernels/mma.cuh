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

// Where a lane points ldmatrix within a 16 x 16 piece whose storage has rows of `row` elements. Two orders of the four
// 8 x 8 matrices serve every operand: down first for A stored [m][k] and B stored [k][n], across first for B stored
// [n][k] and A stored [k][m].
template <int row>
CUFLASH_DEVICE u32 lane_down_first(u32 tile) {
  const u32 lane = lane_index();
  return tile + ((lane % 16) * row + lane / 16 * 8) * 2;
}
template <int row>
CUFLASH_DEVICE u32 lane_across_first(u32 tile) {
  const u32 lane = lane_index();
  return tile + ((lane % 8 + lane / 16 * 8) * row + lane / 8 % 2 * 8) * 2;
}

// Byte offset of element (r, c) from the first of a tile with rows of `row` elements.
template <int row>
CUFLASH_DEVICE constexpr u32 at(int r, int c) {
  return (r * row + c) * 2;
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
