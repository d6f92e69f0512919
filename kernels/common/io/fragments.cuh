// Which elements of a matrix a lane holds in registers: the layout of accumulators and of operands made from them.
//
// With g = lane / 4 and t = lane % 4, a lane holds rows g and g + 8, columns 2t and 2t + 1, of a 16 x 8 tile of an
// accumulator: four Reals, in the layout of ptx::mma_m16n8k16, whatever the element type.
#pragma once
#include "common/config.cuh"

CUFLASH_DEVICE u32 lane_index() { return ptx::thread_index() % 32; }
CUFLASH_DEVICE u32 warp_index() { return ptx::thread_index() / 32; }
CUFLASH_DEVICE int fragment_row() { return lane_index() / 4; }
CUFLASH_DEVICE int fragment_column() { return 2 * (lane_index() % 4); }

// A step of a product covers this many k.
constexpr int kStep = 16;

template <class E>
struct FragmentOf {
  u32 word[4];
};
// A lane holds four elements for every 8 k. Of A, these are rows g, g + 8, g, g + 8 at k = 2t, 2t, 2t + 1, 2t + 1. Of
// B, they are column g of the first n-tile at k = 2t, 2t + 1, then the same of the second.
template <>
struct FragmentOf<Float32> {
  float word[kStep / 8][4];
};
template <>
struct FragmentOf<Float64> {
  double word[kStep / 8][4];
};
using Fragment = FragmentOf<Element>;

// ---- From an accumulator ------------------------------------------------------------------------------------------

// Turns columns kStep k to kStep (k + 1) - 1 of a row of n-tiles into an operand A.
template <class E, int n_tiles>
CUFLASH_DEVICE void to_operand(const float (&row)[n_tiles][4], int k, FragmentOf<E>& a) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    a.word[i] = ptx::pack(E{}, row[2 * k + i / 2][i % 2 * 2], row[2 * k + i / 2][i % 2 * 2 + 1]);
}
template <class T, int n_tiles>
CUFLASH_DEVICE void wide_to_operand(const T (&row)[n_tiles][4], int k, T (&word)[kStep / 8][4]) {
#pragma unroll
  for (int i = 0; i < kStep / 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) word[i][j] = row[k * (kStep / 8) + i][j / 2 + j % 2 * 2];
}
template <int n_tiles>
CUFLASH_DEVICE void to_operand(const float (&row)[n_tiles][4], int k, FragmentOf<Float32>& a) {
  wide_to_operand(row, k, a.word);
}
template <int n_tiles>
CUFLASH_DEVICE void to_operand(const double (&row)[n_tiles][4], int k, FragmentOf<Float64>& a) {
  wide_to_operand(row, k, a.word);
}

// ---- Accumulators ---------------------------------------------------------------------------------------------------

template <int m_tiles, int n_tiles>
CUFLASH_DEVICE void set_zero(Real (&tile)[m_tiles][n_tiles][4]) {
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[m][n][i] = 0;
}
