// Products of tiles: fragments from shared memory or registers, accumulators in registers.
//
// An accumulator tile is Real[m_tiles][n_tiles][4]: 16 x 8 tiles, see sm80/fragments.cuh.
#pragma once
#include "sm80/fragments.cuh"

// Columns of a product are dealt to `warps` warps in turns of 16, so that a warp's n-tile `n` of 8 columns starts here.
template <int warps>
CUFLASH_DEVICE constexpr int column_of(int warp, int n) {
  return 16 * (warp + n / 2 * warps) + n % 2 * 8;
}

// d += a b over `k_steps` steps of kStep, all of them unrolled. load_a(m, k, fragment) fetches rows 16 m of A;
// load_b(n, k, fragment) fetches 16 columns of B, two n-tiles at a time. Fragments of B are fetched kFragmentsAhead
// products before their use.
template <int k_steps, int m_tiles, int n_tiles, class LoadA, class LoadB>
CUFLASH_DEVICE void multiply_unrolled(Real (&d)[m_tiles][n_tiles][4], LoadA load_a, LoadB load_b) {
  static_assert(n_tiles % 2 == 0, "columns come 16 at a time");
  constexpr int kPairs = n_tiles / 2, kTotal = k_steps * kPairs;
  constexpr int kStepsAhead = kFragmentsAhead > 0 ? 1 : 0;  // of A
  Fragment a[kStepsAhead + 1][m_tiles], b[kFragmentsAhead + 1];
  Factor factor_a[m_tiles], factor_b;
  const auto load_step = [&](int k) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) load_a(m, k, a[k % (kStepsAhead + 1)][m]);
  };
  const auto load_pair = [&](int i) { load_b(i % kPairs, i / kPairs, b[i % (kFragmentsAhead + 1)]); };

  if (kStepsAhead > 0) load_step(0);
#pragma unroll
  for (int i = 0; i < kFragmentsAhead && i < kTotal; ++i) load_pair(i);
  const auto product = [&](int i) __attribute__((always_inline)) {
    const int k = i / kPairs, n = i % kPairs;
    if (n == 0 && k + kStepsAhead < k_steps) load_step(k + kStepsAhead);
    if (i + kFragmentsAhead < kTotal) load_pair(i + kFragmentsAhead);
    if (n == 0) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) factor_of(a[k % (kStepsAhead + 1)][m], factor_a[m]);
    }
    factor_of(b[i % (kFragmentsAhead + 1)], factor_b);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
      multiply_add(d[m][2 * n], factor_a[m], factor_b, 0);
      multiply_add(d[m][2 * n + 1], factor_a[m], factor_b, 1);
    }
  };
  if constexpr (kWide) {
    // As a loop it would be too long to be unrolled.
    repeat<kTotal>([&](auto i) __attribute__((always_inline)) { product(decltype(i)::value); });
  } else {
#pragma unroll
    for (int i = 0; i < kTotal; ++i) product(i);
  }
}

// The same where both operands are in shared memory, so that any step can be read at any time. Long rows become a loop:
// code for all of their steps would take long to compile, above all for float32, whose operands have two terms. Kernels
// with tangents have more than twice the products; unrolled, these spill accumulators of wide elements, for the sake of
// the addresses of their many loads.
//
// Tensor cores cut their sums off, on compute capability 7.5 once for every 8 columns: there long rows are summed in
// partial sums, which are then added with rounding.
constexpr bool kManyProducts = kWide && CUFLASH_TANGENTS;
constexpr bool kLoopsEarly = kElementBytes == 4 || kManyProducts;
constexpr bool kPartialSums = CUFLASH_ARCH < 80 && !kWide && !kByLanes;
constexpr int kUnrolledSteps = (kManyProducts ? 32 : kLoopsEarly || kPartialSums ? 128 : 256) / kStep;
constexpr int kStepsOfLoop = (kLoopsEarly ? 32 : kPartialSums ? 128 : 64) / kStep;
template <int k_steps, int m_tiles, int n_tiles, class LoadA, class LoadB>
CUFLASH_DEVICE void multiply(Real (&d)[m_tiles][n_tiles][4], LoadA load_a, LoadB load_b) {
  if constexpr (k_steps == 0) {  // over the columns of values that there are not
  } else if constexpr (k_steps <= kUnrolledSteps) {
    multiply_unrolled<k_steps>(d, load_a, load_b);
  } else {
    constexpr int kRest = k_steps % kStepsOfLoop;
    const auto multiply_from = [&](int first, auto steps) __attribute__((always_inline)) {
      const auto add_to = [&](auto& sum) __attribute__((always_inline)) {
        multiply_unrolled<decltype(steps)::value>(
            sum, [&](int m, int k, Fragment& fragment) { load_a(m, first + k, fragment); },
            [&](int n, int k, Fragment& fragment) { load_b(n, first + k, fragment); });
      };
      if constexpr (kPartialSums) {
        Real partial[m_tiles][n_tiles][4];
        set_zero(partial);
        add_to(partial);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m)
#pragma unroll
          for (int n = 0; n < n_tiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) d[m][n][i] += partial[m][n][i];
      } else {
        add_to(d);
      }
    };
#pragma unroll 1
    for (int first = kRest; first < k_steps; first += kStepsOfLoop) multiply_from(first, Integer<kStepsOfLoop>{});
    if constexpr (kRest > 0) multiply_from(0, Integer<kRest>{});
  }
}

// The same for one of many products that are added up, one for each tile. One running sum over all of them, term by
// term, would lose a digit of float64, or of float32 by single multiply-adds. There each product is summed by itself,
// 16 columns at a time, and then added.
constexpr bool kSumsProductsSeparately = kElementBytes == 8 || (kElementBytes == 4 && kByLanes);
template <int k_steps, int m_tiles, int n_tiles, class LoadA, class LoadB>
CUFLASH_DEVICE void add_product(Real (&d)[m_tiles][n_tiles][4], LoadA load_a, LoadB load_b) {
  if constexpr (!kSumsProductsSeparately) {
    multiply<k_steps>(d, load_a, load_b);
  } else {
    Fragment a[k_steps][m_tiles];
#pragma unroll
    for (int k = 0; k < k_steps; ++k)
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) load_a(m, k, a[k][m]);
    repeat<n_tiles / 2>([&](auto pair) __attribute__((always_inline)) {
      constexpr int n = decltype(pair)::value;
      Real sum[m_tiles][2][4];
      set_zero(sum);
      multiply<k_steps>(
          sum, [&](int m, int k, Fragment& fragment) { fragment = a[k][m]; },
          [&](int, int k, Fragment& fragment) { load_b(n, k, fragment); });
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int i = 0; i < 8; ++i) d[m][2 * n + i / 4][i % 4] += sum[m][i / 4][i % 4];
    });
  }
}

// The order of the rows and columns of an accumulator of wide elements, by the operands of its product. (Accumulators
// of 16-bit elements are always in plain order, except for products of fp8 values, whose columns are paired.)
enum class Order {
  kPlain,              // RowMajorA, ColumnMajorB
  kPairedColumns,      // RowMajorA, RowMajorB
  kPairedRowsColumns,  // ColumnMajorA, RowMajorB
};

// `store_fragments` of 16-bit elements. With `paired`, of four neighbouring columns the even n-tile has the first and
// the third.
template <bool paired, int row, int warps, int m_tiles, int n_tiles, class RowFactor>
CUFLASH_DEVICE void store_half_fragments(u32 tile, int r, int warp, const Real (&value)[m_tiles][n_tiles][4],
                                         const RowFactor& factor) {
  const u32 lane_row = fragment_row(), lane_column = fragment_column() * (paired ? 4 : 2);
  const u32 start = tile + (r + lane_row) * row;
  const u32 address = paired ? start + ((warp * 32 + lane_column) ^ row_swizzle<row>(lane_row))
                             : start + ((warp * 32) ^ row_swizzle<row>(lane_row)) + lane_column;
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float f = factor(m, half);
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        const u32 of_rows = (16 * m + 8 * half) * row;
        if constexpr (paired) {
          const int i = 2 * half + n % 2;
          ptx::store_shared_b32(along_row(address, column_of<warps>(0, n / 2 * 2) * 2) + of_rows + n % 2 * 4,
                                ptx::pack(Element{}, value[m][n / 2 * 2][i] * f, value[m][n / 2 * 2 + 1][i] * f));
        } else {
          ptx::store_shared_b32(along_row(address, column_of<warps>(0, n) * 2) + of_rows,
                                ptx::pack(Element{}, value[m][n][2 * half] * f, value[m][n][2 * half + 1] * f));
        }
      }
    }
}

// `store_fragments` of wide elements, whose rows and columns have an order.
template <Order order, int row, int warps, int m_tiles, int n_tiles, class RowFactor>
CUFLASH_DEVICE void store_wide_fragments(u32 tile, int r, int warp, const Real (&value)[m_tiles][n_tiles][4],
                                         const RowFactor& factor) {
  constexpr bool kPaired = order != Order::kPlain;
  const u32 lane_row = fragment_row();
  repeat<2>([&](auto half_of_fragment) {
    constexpr int half = decltype(half_of_fragment)::value;
    const u32 its_row = order == Order::kPairedRowsColumns ? 2 * lane_row + half : lane_row + 8 * half;
    const u32 column = fragment_column() * (kPaired ? 2 : 1);  // the first of four neighbours, or of two
    const u32 start = tile + (r + its_row) * row + ((column * kElementBytes) ^ row_swizzle<row>(its_row));
    const u32 address = along_row(start, warp * 16 * kElementBytes);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m) {
      const Real f = factor(m, half);
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        const auto& first = value[m][kPaired ? n / 2 * 2 : n];
        const auto& second = value[m][kPaired ? n / 2 * 2 + 1 : n];
        const int i = 2 * half + (kPaired ? n % 2 : 0);  // of the first; the second's is the same or the next
        const Real pair[2] = {first[i] * f, second[kPaired ? i : i + 1] * f};
        const int offset = kPaired ? column_of<warps>(0, n / 2 * 2) + n % 2 * 2 : column_of<warps>(0, n);
        ptx::store_shared_x2(along_row(address, offset * kElementBytes) + 16 * m * row, pair);
      }
    }
  });
}

// Rounds an accumulator tile, times `factor` of its row, into a shared tile with rows of `row` bytes, from row `r` on;
// columns as dealt to `warp` of `warps`.
template <Order order, int row, int warps, int m_tiles, int n_tiles, class RowFactor>
CUFLASH_DEVICE void store_fragments(u32 tile, int r, int warp, const Real (&value)[m_tiles][n_tiles][4],
                                    RowFactor factor) {
  if constexpr (kWide)
    store_wide_fragments<order, row, warps>(tile, r, warp, value, factor);
  else
    store_half_fragments<kHasFloat8 && order == Order::kPairedColumns, row, warps>(tile, r, warp, value, factor);
}

// Calls visit(column, left, right) for the pairs of neighbouring columns of O that a lane has in one row of an
// accumulator: the upper or the lower `half` of its two rows.
template <int warps, int n_tiles, class Visit>
CUFLASH_DEVICE void visit_row_pairs(const Real (&value)[n_tiles][4], int warp, int half, Visit visit) {
#pragma unroll
  for (int n = 0; n < n_tiles; ++n) {
    if constexpr (kWide || kHasFloat8) {  // Order::kPairedColumns
      const int i = 2 * half + n % 2;
      visit(column_of<warps>(warp, n / 2 * 2) + 2 * fragment_column() + n % 2 * 2, value[n / 2 * 2][i],
            value[n / 2 * 2 + 1][i]);
    } else {
      visit(column_of<warps>(warp, n) + fragment_column(), value[n][2 * half], value[n][2 * half + 1]);
    }
  }
}

// Stores sums, times `factor` of their row, without rounding them to the element type: from fragments in the order of
// 16-bit elements, to rows [first_row, row_stop) of a head in global memory, to be added to other partial sums.
template <int columns, int warps_d, int m_tiles, int n_tiles, class RowFactor>
CUFLASH_DEVICE void store_sums(const Real (&sum)[m_tiles][n_tiles][4], int warp_row, int warp_d, RowFactor factor,
                               Real* result, i64 row_stride, int first_row, int row_stop) {
  static_assert(columns > 0 && kElementBytes == 2, "only sums of 16-bit elements are wider than these");
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + warp_row + 16 * m + 8 * half + fragment_row();
      const Real f = factor(m, half);
      if (row >= row_stop) continue;
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = column_of<warps_d>(warp_d, n) + fragment_column() + i;
          if (column < columns) result[row * row_stride + column] = sum[m][n][2 * half + i] * f;
        }
    }
}
