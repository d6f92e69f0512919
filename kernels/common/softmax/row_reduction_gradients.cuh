// What the gradients of row reductions (common/softmax/row_reductions.cuh) add to dS, besides what
// helpers/backward_preprocess.cu adds to delta:
//
//   -P (log P + H) dH        dH H is a part of delta        dm        at the first key that has the largest score
#pragma once
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/softmax/backward.cuh"
#include "common/softmax/exponential.cuh"

// Whether helpers/backward_preprocess.cu finds the first keys with the largest scores, which sm90/first_maxima.cu finds
// where it serves.
#ifndef CUFLASH_FINDS_MAXIMA
#define CUFLASH_FINDS_MAXIMA 0
#endif

constexpr Real kLeastWeight = 1e-37f;  // added to weights, whose logarithms it makes finite; it is no denormal number

// The statistic of rows without weights: with dH sm90/backward.cu multiplies exponents, which have to be finite.
CUFLASH_DEVICE Real lse_without_weights() { return kTakesDentropy && kPairsStats ? (Real)1e30f : ptx::infinity(); }

// The logarithm of a weight: of base 2 in half precision, where dH has the factor ln 2, natural otherwise.
CUFLASH_DEVICE float log_of_weight(float weight) {
  const float x = weight + (float)kLeastWeight;
  if constexpr (!kWide) return ptx::log2_of_normal(x);
  // The instruction is off by 2^-22 times its result. So it gets x = 2^steps m with m near 1.
  const u32 bits = ptx::bits_of(x), sqrt_half = 0x3f3504f3;
  const i32 steps = (i32)(bits - sqrt_half) >> 23;
  const float log_m = ptx::log2_of_normal(ptx::float_of(bits - ((u32)steps << 23))) * kLn2;
  return fmaf((float)steps, kLn2, log_m);
}
CUFLASH_DEVICE double log_of_weight(double weight) { return natural_log(weight + (double)kLeastWeight); }

// The gradients of reductions of all rows of a head, which lie as its statistics do.
struct RowReductionGradients {
#if CUFLASH_ROW_REDUCTIONS
  Real* dentropy;  // dH, with the factor of log_of_weight; 0 of rows that have no weights
  Real* dmax;      // dm
  i32* first_max;  // the key that gets it; -1 of rows without keys

  CUFLASH_DEVICE RowReductionGradients(const Params& params, Entry batch, int head) {
    const i64 first = first_stats_row(params, batch, head);
    dentropy = (Real*)params.row_dentropy + first;
    dmax = (Real*)params.row_dmax + first;
    first_max = (i32*)params.row_first_max + first;
  }
#else
  CUFLASH_DEVICE RowReductionGradients(const Params&, Entry, int) {}
#endif
  // What delta of a row is for a weight. A row that does not `exist` need not have statistics.
  CUFLASH_DEVICE Real delta_of(Real delta, Real weight, int row, bool exists = true) const {
#if CUFLASH_ROW_REDUCTIONS
    if (!exists) return delta;
    if constexpr (kTakesDentropy) return ptx::fused(dentropy[row], log_of_weight(weight), delta);
#endif
    return delta;
  }
  // The gradient of the score of a pair, which is `ds` without that of the maximum. If a function makes scores, a pair
  // without weight gets no derivative, unless it is the maximum and that has a gradient.
  CUFLASH_DEVICE Real with_max(Real ds, Real weight, int row, int key, Real& derivative, bool exists = true) const {
#if CUFLASH_ROW_REDUCTIONS
    if (exists && key == first_max[row]) ds += dmax[row];
    if (kHasScoreFunction && weight == 0 && ds == 0) derivative = 0;
#endif
    return ds;
  }
};
