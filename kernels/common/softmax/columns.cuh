// Sums, or maxima, of the attention weights of keys over the queries, for kernels whose rows of P' are keys.
#pragma once
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/score/scores.cuh"

constexpr bool kIsMax = CUFLASH_COLUMN_MAX;  // else a sum
// One of so many exponentials is a polynomial, which the FMA units compute, because the units of ex2 are what a single
// product waits for; 0: none.
constexpr int kSeriesOneIn = CUFLASH_SERIES_ONE_IN;
static_assert(kSeriesOneIn == 0 || !kWide, "exponents of base 2");

// 2^x for x up to 127 by a polynomial of relative error 2.4e-7, that of ex2.approx: x = steps + f, abs(f) at most 1/2.
// Results below 2^-126 are 0.
CUFLASH_DEVICE float exp2_by_series(float x) {
  constexpr float kRoundsToInteger = 12582912.0f;  // 1.5 * 2^23
  const float shifted = x + kRoundsToInteger;
  const float f = x - (shifted - kRoundsToInteger);
  float series = 0.0013390863f;
  series = series * f + 0.009676032f;
  series = series * f + 0.05550357f;
  series = series * f + 0.24022107f;
  series = series * f + 0.69314718f;
  series = series * f + 1.0000001f;
  const float power = ptx::float_of((ptx::bits_of(shifted) << 23) + (127u << 23));
  return x < -126.0f ? 0.0f : series * power;
}

// A row whose weights are made so.
struct SeriesRow {
  float lse;  // as an exponent

  CUFLASH_DEVICE bool exists() const { return lse != ptx::infinity(); }
  CUFLASH_DEVICE float weight_of(float score, float exponent_scale) const {
    return exp2_by_series(ptx::fused(score, exponent_scale, -lse));
  }
};

// (lse, -w) of two neighbouring queries.
CUFLASH_DEVICE void load_stats(u32 address, float (&stats)[4]) { ptx::load_shared_f32x4(address, stats); }
CUFLASH_DEVICE void load_stats(u32 address, double (&stats)[4]) {
  ptx::load_shared_x2(address, (double (&)[2])stats[0]);
  ptx::load_shared_x2(address + 16, (double (&)[2])stats[2]);
}

// What a lane has of its keys: two of each m-tile.
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
    x = kIsMax ? max_of(x, weight) : x - weight * negative;
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
  const auto add_weights = [&](auto by_row_sum) __attribute__((always_inline)) {
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
          else if (kSeriesOneIn != 0 && (4 * n + i) % max_of(kSeriesOneIn, 1) == 0)
            weight = weights.of_hidden(p[m][n][i], of_row, key_of(m, i), masked,
                                       typename Either<kWide, PlainRow, SeriesRow>::Type{stats[i % 2 * 2]}, derivative);
          else
            weight = weights.of_hidden(p[m][n][i], of_row, key_of(m, i), masked, PlainRow{stats[i % 2 * 2]}, derivative);
          columns.add(m, i, weight, stats[i % 2 * 2 + 1]);
        }
    }
  };
  // One body of code serves both where products are scores but for their factor.
  if (large) {
    if constexpr (!kScaleInExponent) {
      add_weights(Constant<true>{});
    } else {
      const RelativeScores relative(weights.exponent_scale);
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) p[m][n][i] = relative.of(p[m][n][i], row_sums[row_of(n, i)]);
    }
  }
  if (kScaleInExponent || !large) add_weights(Constant<false>{});
}
