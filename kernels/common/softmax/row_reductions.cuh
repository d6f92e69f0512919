// Row reductions, which the forward pass gives besides lse: the largest score, and the entropy of the weights,
//
//   H = lse - sum P S = log l - r / l        l = sum exp(S - m)        r = sum exp(S - m) (S - m)
//
// where m is the row max of the online softmax: r is rescaled where m rises, as l is. All are in the unit of exponents
// until they are stored.
#pragma once
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/softmax/exponential.cuh"

// Those that this pass gives, in the order of the rows of cuflash/spec/outputs.py.
constexpr bool kReducesMax = CUFLASH_ROW_REDUCTIONS & 1, kReducesEntropy = CUFLASH_ROW_REDUCTIONS & 2;
constexpr bool kReducesRows = CUFLASH_ROW_REDUCTIONS & 0xffff;
constexpr bool kReducesExponents = kReducesEntropy;  // sums of weights times a function of their exponents

// Weights of exponents below this one are 0, as those of hidden pairs are, and so are their terms of r.
constexpr Real kLeastExponent = -1024;

// Row reductions over a lane's columns of some scores. The lazy maximum may compute the weights of a tile twice, so
// those of a tile are added to those of the row only when its weights are final.
template <int m_tiles, bool made = kReducesRows>
struct TileReductions {
  i32 weight_bits[m_tiles][2];  // of the largest weight, over this lane's columns only, as is the moment
  Real moment[m_tiles][2];      // r

  CUFLASH_DEVICE TileReductions() {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) weight_bits[m][half] = 0, moment[m][half] = 0;
  }
  // Takes in a weight with its exponent, which is -inf only if the pair `may_be_hidden`.
  CUFLASH_DEVICE void add_weight(int m, int half, Real weight, Real exponent, bool may_be_hidden) {
    if constexpr (kReducesEntropy)
      moment[m][half] =
          ptx::fused(weight, may_be_hidden ? max_of(exponent, kLeastExponent) : exponent, moment[m][half]);
  }
  // Takes two weights into the largest one. Their bits are in the order of integers, of which one instruction finds the
  // largest of three on compute capability 9.0; that of floats has two operands.
  CUFLASH_DEVICE void add_largest(int m, int half, float first, float second) {
    if constexpr (kReducesMax)
      weight_bits[m][half] = max_of(max_of(weight_bits[m][half], (i32)ptx::bits_of(first)), (i32)ptx::bits_of(second));
  }
};

// No code and no registers where no row reductions are wanted.
template <int m_tiles>
struct TileReductions<m_tiles, false> {
  CUFLASH_DEVICE void add_weight(int, int, Real, Real, bool) {}
  CUFLASH_DEVICE void add_largest(int, int, Real, Real) {}
};

// Row reductions over all tiles. `by_weights`: the largest score follows from the largest weight, which costs less
// where the softmax step does not compute the maximum of each tile.
template <int m_tiles, bool natural, bool by_weights, bool made = kReducesRows>
struct RowReductions : TileReductions<m_tiles> {
  using TileReductions<m_tiles>::moment;
  using TileReductions<m_tiles>::weight_bits;

  Real largest[m_tiles][2];  // the largest score, in the unit of row maxima

  CUFLASH_DEVICE RowReductions() {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) largest[m][half] = -ptx::infinity();
  }
  CUFLASH_DEVICE void add(const TileReductions<m_tiles>& tile) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weight_bits[m][half] = max_of(weight_bits[m][half], tile.weight_bits[m][half]);
        moment[m][half] += tile.moment[m][half];
      }
  }
  CUFLASH_DEVICE void add_tile_max(int m, int half, Real tile_max) {
    if constexpr (kReducesMax && !by_weights) largest[m][half] = max_of(largest[m][half], tile_max);
  }
  CUFLASH_DEVICE void add_largest(int m, int half, Real first, Real second) {
    if constexpr (by_weights) TileReductions<m_tiles>::add_largest(m, half, first, second);
  }
  // The row max rises: `exponent` is that of the old one relative to the new one, `factor` its exponential, and
  // `row_sum` what was summed before.
  CUFLASH_DEVICE void rescale_moment(int m, int half, Real factor, Real exponent, Real row_sum) {
    if constexpr (kReducesEntropy)
      moment[m][half] = factor == 0 ? 0 : factor * ptx::fused(exponent, row_sum, moment[m][half]);
    if constexpr (kReducesMax && by_weights)
      weight_bits[m][half] = (i32)ptx::bits_of(ptx::float_of((u32)weight_bits[m][half]) * factor);
  }
  // Adds up the lanes of each row, before a sink does.
  CUFLASH_DEVICE void finish(const Real (&row_max)[m_tiles][2]) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (kReducesMax && by_weights) {
          const float exponent = log_sum_exp<true>(0, ptx::float_of((u32)weight_bits[m][half]));
          const Real rises = natural ? exponent : exponent * kLog2e;  // NaN if the row max is infinity
          largest[m][half] = row_max[m][half] == ptx::infinity() ? row_max[m][half] : row_max[m][half] + rises;
        }
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) {
          if constexpr (kReducesMax)
            largest[m][half] = max_of(largest[m][half], ptx::shuffle_xor(largest[m][half], mask));
          if constexpr (kReducesEntropy) moment[m][half] += ptx::shuffle_xor(moment[m][half], mask);
        }
      }
  }

  // The results of a row, after `finish`. A NaN score is no largest one, but makes the row sum NaN, as infinity does.
  CUFLASH_DEVICE Real max(int m, int half, Real row_sum) const {
    const Real own = largest[m][half];
    if (row_sum != row_sum && own != ptx::infinity()) return row_sum;
    return natural || kWide ? own : own * kLn2;
  }
  CUFLASH_DEVICE Real entropy(int m, int half, Real row_sum) const {
    if (row_sum == 0) return 0;
    return log_sum_exp<true>(0, row_sum) - moment[m][half] / row_sum * (kWide ? (Real)1 : (Real)kLn2);
  }
};

template <int m_tiles, bool natural, bool by_weights>
struct RowReductions<m_tiles, natural, by_weights, false> : TileReductions<m_tiles, false> {
  CUFLASH_DEVICE void add(const TileReductions<m_tiles>&) {}
  CUFLASH_DEVICE void add_tile_max(int, int, Real) {}
  CUFLASH_DEVICE void rescale_moment(int, int, Real, Real, Real) {}
  CUFLASH_DEVICE void finish(const Real (&)[m_tiles][2]) {}
};

// Stores those of a row that are wanted.
template <class Softmax>
CUFLASH_DEVICE void store_row_reductions(const Params& params, Entry batch, int head, int row, const Softmax& softmax,
                                         int m, int half) {
#if CUFLASH_ROW_REDUCTIONS
  if constexpr (kReducesMax)
    row_values_of(params.max, batch, head)[row * params.max.row_stride] =
        softmax.max(m, half, softmax.row_sum[m][half]);
  if constexpr (kReducesEntropy)
    row_values_of(params.entropy, batch, head)[row * params.entropy.row_stride] =
        softmax.entropy(m, half, softmax.row_sum[m][half]);
#endif
}
