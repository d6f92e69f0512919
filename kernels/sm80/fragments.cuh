// Fragments of operands: how a lane gets its slice of a product's factors from shared memory, for each element type.
//
// With g = lane / 4 and t = lane % 4, a lane holds of a 16 x 8 tile of an accumulator the rows g and g + 8, columns
// 2t and 2t + 1: four Reals, in the layout of ptx::mma_m16n8k16, whatever the element type.
//
// 16-bit elements: a fragment is 16 x 16, read by one ldmatrix; the layouts of accumulators and of A coincide.
//
// Wide elements (float32, float64) have no transposing load, and their mma takes the columns t and t + 4 of A where an
// accumulator has 2t and 2t + 1. But the order of k is free as long as A and B agree: lane (g, t) always takes k = 2t
// and 2t + 1 of every 8, so an accumulator is an operand as it stands, and operands stored by rows are read as pairs of
// neighbours. Operands stored by columns are read as pairs of neighbours too, which belong to two rows of A or to two
// columns of B: rows 2g and 2g + 1 of A come out where g and g + 8 should be, and of the two n-tiles of 8 columns that
// a fragment of B makes, one has the even columns of 16, the other the odd ones. store_fragments (sm80/mma.cuh) undoes
// both.
#pragma once
#include "common/io/fragments.cuh"
#include "sm80/lane_products.cuh"

// ---- From shared memory -------------------------------------------------------------------------------------------
//
// Four loaders, for A and B stored by rows ([m][k], [k][n]) or by columns ([k][m], [n][k]). Each is constructed from a
// shared tile with rows of `row` bytes and the position in it that stands for (0, 0). It fetches fragments of kStep of
// k: 16 rows m of A, or 16 columns n of B. Columns of B are dealt to `warps` warps in turns of 16.

// Where a lane points ldmatrix within the 16 x 16 fragment at row `r`, column 16 `column_tile`. Two orders of the four
// 8 x 8 matrices serve every operand: down first for A stored [m][k] and B stored [k][n], across first for B stored
// [n][k] and A stored [k][m].
template <int row>
CUFLASH_DEVICE u32 lane_down_first(u32 tile, int r, int column_tile) {
  const u32 lane = lane_index();
  return tile + (r + lane % 16) * row + ((column_tile * 32 + lane / 16 * 16) ^ row_swizzle<row>(lane));
}
template <int row>
CUFLASH_DEVICE u32 lane_across_first(u32 tile, int r, int column_tile) {
  const u32 lane = lane_index();
  return tile + (r + lane % 8 + lane / 16 * 8) * row +
         ((column_tile * 32 + lane / 8 % 2 * 16) ^ row_swizzle<row>(lane));
}

// Where a lane finds its pair of wide elements: in row g, columns 2t and 2t + 1; or in row 2t, columns 2g and 2g + 1.
// The pair below the latter is at next_row. `r` is a multiple of 8.
template <int row>
CUFLASH_DEVICE u32 lane_along_row(u32 tile, int r) {
  const u32 g = lane_index() / 4, t = lane_index() % 4;
  return tile + (r + g) * row + ((2 * t * kElementBytes) ^ row_swizzle<row>(g));
}
template <int row>
CUFLASH_DEVICE u32 lane_down_columns(u32 tile, int column_tile) {
  const u32 g = lane_index() / 4, t = lane_index() % 4;
  const u32 lane = tile + 2 * t * row + ((2 * g * kElementBytes) ^ row_swizzle<row>(2 * t));
  return along_row(lane, column_tile * 16 * kElementBytes);
}
template <int row>
CUFLASH_DEVICE u32 next_row(u32 address) {
  return (address ^ row_swizzle<row>(0) ^ row_swizzle<row>(1)) + row;
}

template <class T>
CUFLASH_DEVICE void load_pair(u32 address, T& first, T& second) {
  T pair[2];
  ptx::load_shared_x2(address, pair);
  first = pair[0], second = pair[1];
}

template <int row>
struct RowMajorA {
  u32 lane;

  CUFLASH_DEVICE explicit RowMajorA(u32 tile, int r = 0)
      : lane(kWide ? lane_along_row<row>(tile, r) : lane_down_first<row>(tile, r, 0)) {}

  template <class F>
  CUFLASH_DEVICE void operator()(int m, int k, F& a) const {
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < kStep / 8; ++i) {
        const u32 address = along_row(lane, (k * kStep + 8 * i) * kElementBytes) + m * 16 * row;
        load_pair(address, a.word[i][0], a.word[i][2]);
        load_pair(address + 8 * row, a.word[i][1], a.word[i][3]);
      }
    } else {
      ptx::load_matrix_x4(a.word, along_row(lane, k * 32) + m * 16 * row);
    }
  }
};

template <int row>
struct ColumnMajorA {
  u32 lane;

  CUFLASH_DEVICE explicit ColumnMajorA(u32 tile, int column_tile)
      : lane(kWide ? lane_down_columns<row>(tile, column_tile) : lane_across_first<row>(tile, 0, column_tile)) {}

  template <class F>
  CUFLASH_DEVICE void operator()(int m, int k, F& a) const {
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < kStep / 8; ++i) {
        const u32 address = along_row(lane, m * 16 * kElementBytes) + (k * kStep + 8 * i) * row;
        load_pair(address, a.word[i][0], a.word[i][1]);
        load_pair(next_row<row>(address), a.word[i][2], a.word[i][3]);
      }
    } else {
      ptx::load_matrix_x4_transposed(a.word, along_row(lane, m * 32) + k * 16 * row);
    }
  }
};

template <int row, int warps>
struct RowMajorB {
  u32 lane;

  CUFLASH_DEVICE explicit RowMajorB(u32 tile, int warp = 0)
      : lane(kWide ? lane_down_columns<row>(tile, warp) : lane_down_first<row>(tile, 0, warp)) {}

  template <class F>
  CUFLASH_DEVICE void operator()(int n, int k, F& b) const {
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < kStep / 8; ++i) {
        const u32 address = along_row(lane, n * warps * 16 * kElementBytes) + (k * kStep + 8 * i) * row;
        load_pair(address, b.word[i][0], b.word[i][2]);
        load_pair(next_row<row>(address), b.word[i][1], b.word[i][3]);
      }
    } else {
      ptx::load_matrix_x4_transposed(b.word, along_row(lane, n * warps * 32) + k * 16 * row);
    }
  }
};

template <int row, int warps>
struct ColumnMajorB {
  u32 lane;

  CUFLASH_DEVICE explicit ColumnMajorB(u32 tile, int warp = 0)
      : lane(kWide ? lane_along_row<row>(tile, 16 * warp) : lane_across_first<row>(tile, 16 * warp, 0)) {}

  template <class F>
  CUFLASH_DEVICE void operator()(int n, int k, F& b) const {
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < kStep / 8; ++i) {
        const u32 address = along_row(lane, (k * kStep + 8 * i) * kElementBytes) + n * warps * 16 * row;
        load_pair(address, b.word[i][0], b.word[i][1]);
        load_pair(address + 8 * row, b.word[i][2], b.word[i][3]);
      }
    } else {
      ptx::load_matrix_x4(b.word, along_row(lane, k * 32) + n * warps * 16 * row);
    }
  }
};

// The same operand `bytes` further on, a multiple of 1024.
template <class Loader>
CUFLASH_DEVICE Loader shifted(Loader loader, u32 bytes) {
  loader.lane += bytes;
  return loader;
}

// ---- Products -----------------------------------------------------------------------------------------------------
//
// `factor_of` converts a fragment to what the tensor cores take, once for all products that it is in. `multiply_add`
// adds the product of two factors to one n-tile of an accumulator: that of the first or of the second 8 columns of B.

template <class E>
CUFLASH_DEVICE void factor_of(const FragmentOf<E>& fragment, FragmentOf<E>& same) {
  same = fragment;
}
template <class E>
CUFLASH_DEVICE void multiply_add(float (&d)[4], const FragmentOf<E>& a, const FragmentOf<E>& b, int half) {
  if constexpr (kByLanes)
    add_lane_products(E{}, d, a.word, b.word[2 * half], b.word[2 * half + 1]);
  else
    ptx::mma_m16n8k16(E{}, d, a.word, b.word[2 * half], b.word[2 * half + 1]);
}
CUFLASH_DEVICE void multiply_add(double (&d)[4], const FragmentOf<Float64>& a, const FragmentOf<Float64>& b, int half) {
  if constexpr (kByLanes) {
    add_wide_lane_products(d, a.word, b.word, half);
  } else {
    const double columns[2][2] = {{b.word[0][2 * half], b.word[0][2 * half + 1]},
                                  {b.word[1][2 * half], b.word[1][2 * half + 1]}};
    ptx::mma_m16n8k16(d, a.word, columns);
  }
}
CUFLASH_DEVICE void factor_of(const FragmentOf<Float32>& fragment, FragmentOf<Float32>& rounded) {
#pragma unroll
  for (int i = 0; i < kStep / 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      rounded.word[i][j] = kByLanes ? fragment.word[i][j] : ptx::round_to_tf32(fragment.word[i][j]);
}
// The product of `columns` columns of operands rounded to TF32, from `first` on.
template <int columns>
CUFLASH_DEVICE void add_columns(float (&d)[4], const FragmentOf<Float32>& a, const FragmentOf<Float32>& b, int half,
                                int first) {
#pragma unroll
  for (int i = first / 8; i < (first + columns) / 8; ++i)
    ptx::mma_m16n8k8(d, a.word[i], b.word[i][2 * half], b.word[i][2 * half + 1]);
}
// One product of such operands. Where lanes multiply, the operands are not rounded.
CUFLASH_DEVICE void multiply_add(float (&d)[4], const FragmentOf<Float32>& a, const FragmentOf<Float32>& b, int half) {
  if constexpr (kByLanes)
    add_wide_lane_products(d, a.word, b.word, half);
  else
    add_columns<kStep>(d, a, b, half, 0);
}

// float32 to its full precision: each element is the sum of two TF32 numbers, but for 2^-24 of it. The product of two
// small terms is about as small, so it is left out.
struct Tf32Split {
  FragmentOf<Float32> big, small;
};

// The big term is rounded to nearest, so that the small term has 12 bits and either sign. Of an infinity, the small
// term is the infinity and the big term is the largest number: with a finite factor, its product is then neither the
// difference of two infinities nor that of an infinity and a small term which is zero. The small term of a NaN is NaN,
// whatever becomes of the big one.
CUFLASH_DEVICE void tf32_split(float x, float& big, float& small) {
  constexpr float kLargest = 3.4011621342146535e38f;  // of TF32
  const float rounded = ptx::float_of((ptx::bits_of(x) + 0x1000u) & 0xffffe000u);
  big = ptx::limit_magnitude(rounded, kLargest);
  small = x - big;
}
CUFLASH_DEVICE void factor_of(const FragmentOf<Float32>& fragment, Tf32Split& terms) {
#pragma unroll
  for (int i = 0; i < kStep / 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) tf32_split(fragment.word[i][j], terms.big.word[i][j], terms.small.word[i][j]);
}
// The tensor cores cut sums off, so only the few products of `columns` columns are summed there, small ones first. These
// sums are added with rounding.
template <int columns>
CUFLASH_DEVICE void add_split_columns(float (&d)[4], const Tf32Split& a, const Tf32Split& b, int half) {
#pragma unroll
  for (int first = 0; first < kStep; first += columns) {
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    add_columns<columns>(sum, a.small, b.big, half, first);
    add_columns<columns>(sum, a.big, b.small, half, first);
    add_columns<columns>(sum, a.big, b.big, half, first);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += sum[i];
  }
}
CUFLASH_DEVICE void multiply_add(float (&d)[4], const Tf32Split& a, const Tf32Split& b, int half) {
  add_split_columns<kStep>(d, a, b, half);
}

// The same for products of scores, whose rounding moves weights: fewer columns are cut off together. For other sums this
// would spill accumulators.
template <class T, class F>
CUFLASH_DEVICE void multiply_add_score(T (&d)[4], const F& a, const F& b, int half) {
  multiply_add(d, a, b, half);
}
CUFLASH_DEVICE void multiply_add_score(float (&d)[4], const Tf32Split& a, const Tf32Split& b, int half) {
  add_split_columns<8>(d, a, b, half);
}

// The type that `factor_of` makes.
template <class E, bool splits>
struct FactorOf {
  using Type = FragmentOf<E>;
};
template <>
struct FactorOf<Float32, true> {
  using Type = Tf32Split;
};
using Factor = FactorOf<Element, !kRoundsToTf32 && !kByLanes>::Type;
