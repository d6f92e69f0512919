// Sums, or maxima, of the attention weights of keys over the queries, for kernels whose rows of P' are keys.
#pragma once
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/score/scores.cuh"

constexpr bool kIsMax = CUFLASH_COLUMN_MAX;           // else a sum
constexpr bool kHasFactors = CUFLASH_COLUMN_FACTORS;  // of rows: the w of a sum; else 1

static_assert(kPairsStats, "two lse are neighbours, so that a lane loads no -w where it has none");

// lse of two neighbouring queries and, if rows have factors, their -w.
CUFLASH_DEVICE void load_stats(u32 address, Real (&stats)[4]) {
  ptx::load_shared_x2(address, (Real(&)[2])stats[0]);
  if constexpr (kHasFactors && !kIsMax) ptx::load_shared_x2(address + 2 * sizeof(Real), (Real(&)[2])stats[2]);
}

// Sums or maxima over the queries of a lane's columns of P', of its two keys of each m-tile.
template <int m_tiles>
struct Columns {
  Real value[m_tiles][2];

  CUFLASH_DEVICE Columns() {
#pragma unroll
    for (auto& pair : value) pair[0] = pair[1] = 0;
  }
  // Element i of an m-tile: its weight, and -w of its query.
  CUFLASH_DEVICE void add(int m, int i, Real weight, Real negative) {
    Real& x = value[m][i / 2];
    x = kIsMax ? max_of(x, weight) : kHasFactors ? x - weight * negative : x + weight;
  }
  // Warp. The value of a key, from those of its four lanes.
  CUFLASH_DEVICE Real of(int m, int half) const {
    Real x = value[m][half];
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
      const Real other = ptx::shuffle_xor(x, mask);
      x = kIsMax ? max_of(x, other) : x + other;
    }
    return x;
  }
};

// Adds the weights of a tile of products. `row` and `key` are those of this lane's first element, `s_stats` the
// statistics of the tile.
template <int m_tiles, int n_tiles>
CUFLASH_DEVICE void add_tile(const Weights& weights, Real (&p)[m_tiles][n_tiles][4], u32 s_stats,
                             const RowSum* row_sums, bool masked, int row, int key, Columns<m_tiles>& columns) {
  static_assert(8 * n_tiles <= kGroupRows, "rows of one group: all have row sums, or none");
  const auto row_of = [&](int n, int i) { return row + 8 * n + i % 2; };
  const auto key_of = [&](int m, int i) { return key + 16 * m + i / 2 * 8; };
  const auto load_own = [&](int n, Real(&stats)[4]) {
    load_stats(s_stats + (8 * n + fragment_column()) * 2 * sizeof(Real), stats);
  };
  Real first[4];
  load_own(0, first);
  const bool large = is_of_large(first[0]);
  weights.hide_products(p, masked, row_of, key_of);
  const auto row_sum_of = [&](int n, int i) -> const RowSum& { return row_sums[row_of(n, i)]; };
  weights.by_statistics(p, large, row_sum_of, [&](auto by_row_sum) __attribute__((always_inline)) {
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
      Real stats[4];
      load_own(n, stats);
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int of_row = row_of(n, i);
          Real derivative, weight;
          if (by_row_sum)
            weight = weights.of_hidden(p[m][n][i], of_row, key_of(m, i), masked, row_sums[of_row], derivative);
          else
            weight = weights.of_hidden(p[m][n][i], of_row, key_of(m, i), masked, PlainRow{stats[i % 2]}, derivative);
          columns.add(m, i, weight, stats[2 + i % 2]);
        }
    }
  });
}
