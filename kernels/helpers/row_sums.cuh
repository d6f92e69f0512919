// The row max and the row sum of rows whose lse is large (common/softmax/backward.cuh), found again by the scores that
// the backward pass makes. A warp serves 16 rows. Such rows are rare, so this takes little shared memory and few
// registers rather than little time: fragments of Q and K come from global memory.
#pragma once
#include "common/softmax/backward.cuh"
#if CUFLASH_BF16_TERMS > 1
#include "common/io/bf16_split.cuh"
#endif
#include "common/softmax/exponential.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/row_reduction_gradients.cuh"
#include "common/softmax/softmax.cuh"
#include "sm80/mma.cuh"

constexpr int kColumnBlocks = CUFLASH_COLUMN_BLOCKS;  // that divide the columns of q and k in the main kernel

// How far the logarithm of the sum may be from lse, relative to it, where lse is that of these keys: by what rounding a
// few times makes of it. If it is further away, these are only some of the keys that lse is of.
constexpr Real kRoundedLse = kElementBytes == 8 ? 0x1p-50 : 0x1p-21f;

CUFLASH_DEVICE bool is_large(Real lse) { return magnitude_of(lse) >= kLargeLse && magnitude_of(lse) < ptx::infinity(); }

// Rows of a head of q or k as fragments of operands: zeros from row `stop` and from column kHeadDim on.
struct RowFragments {
  const Storage* head;
  i64 row_stride;
  int stop;

  CUFLASH_DEVICE Storage at(int row, int column) const {
    return row < stop && column < kHeadDim ? head[row * row_stride + column] : Storage{};
  }
  // 16 rows of A, or 16 columns of B, from `first` on, and step `k` of their columns. A and B differ in the order
  // of the four words of a lane (sm80/fragments.cuh).
  template <bool of_a, class F>
  CUFLASH_DEVICE void load(int first, int k, F& fragment) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + fragment_row() + (of_a ? i % 2 : i / 2) * 8;
      const int half = of_a ? i / 2 : i % 2;
      if constexpr (kWide) {
#pragma unroll
        for (int j = 0; j < kStep / 8; ++j) fragment.word[j][i] = at(row, k * kStep + 8 * j + fragment_column() + half);
      } else {
        const int column = k * kStep + 8 * half + fragment_column();
        fragment.word[i] = (u16)at(row, column) | (u32)(u16)at(row, column + 1) << 16;
      }
    }
  }
};

// Warp. S = Q K^T of 16 queries and 16 keys, to the bit as the main kernel makes it: the tensor cores cut sums off, so
// that the order of additions decides the last bits, and the weights of large scores are sensitive to these.
#if CUFLASH_BF16_TERMS > 1
CUFLASH_DEVICE void multiply_rows(const RowFragments& q, const RowFragments& k, int first_row, int first_key,
                                  Real (&s)[1][2][4]) {
  set_zero(s);
  const auto load = [](auto of_a, const RowFragments& rows, int first, int step, int term,
                       FragmentOf<BFloat16>& fragment) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + fragment_row() + (of_a ? i % 2 : i / 2) * 8;
      const int column = step * kStep + 8 * (of_a ? i / 2 : i % 2) + fragment_column();
      u32 terms[kBf16Terms];
      bf16_split(rows.at(row, column), rows.at(row, column + 1), terms);
#pragma unroll
      for (int j = 0; j < kBf16Terms; ++j)
        if (j == term) fragment.word[i] = terms[j];
    }
  };
#pragma unroll 1
  for (int i = 0; i < kTermProducts; ++i)
#pragma unroll 1
    for (int step = 0; step < kDim / kStep; ++step) {
      FragmentOf<BFloat16> a, b;
      load(Constant<true>{}, q, first_row, step, term_product(i).a, a);
      load(Constant<false>{}, k, first_key, step, term_product(i).b, b);
#pragma unroll
      for (int n = 0; n < 2; ++n) ptx::mma_m16n8k16(BFloat16{}, s[0][n], a.word, b.word[2 * n], b.word[2 * n + 1]);
    }
}
#else
CUFLASH_DEVICE void multiply_rows(const RowFragments& q, const RowFragments& k, int first_row, int first_key,
                                  Real (&s)[1][2][4]) {
  set_zero(s);
  // Where blocks divide columns, each has its own sum.
  constexpr int kSteps = kDim / kStep;
  constexpr int kStepsOfBlock = kColumnBlocks > 1 ? ceil_div(ceil_div(kDim, 64), kColumnBlocks) * (64 / kStep) : kSteps;
#pragma unroll 1
  for (int first = 0; first < kSteps; first += kStepsOfBlock) {
    Real of_block[1][2][4];
    set_zero(of_block);
#pragma unroll 1
    for (int step = first; step < min_of(first + kStepsOfBlock, kSteps); ++step)
      multiply<1>(
          of_block, [&](int, int, Fragment& a) { q.load<true>(first_row, step, a); },
          [&](int, int, Fragment& b) { k.load<false>(first_key, step, b); });
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[0][n][i] += of_block[0][n][i];
  }
}
#endif

struct ExactProducts {
  const RowFragments q, k;
  const int first_row;

  CUFLASH_DEVICE ExactProducts(const RowFragments& q_, const RowFragments& k_, int first_row_)
      : q(q_), k(k_), first_row(first_row_) {}
  CUFLASH_DEVICE void multiply(int first_key, Real (&s)[1][2][4]) const {
    multiply_rows(q, k, first_row, first_key, s);
  }
};

// Warp. Calls visit(s, key, exponent_scale) for the scores of 16 rows from `first_row` on and the 16 keys from `key`
// on.
template <class Products = ExactProducts, class Visit>
CUFLASH_DEVICE void visit_scores(const Params& params, Entry batch, int head, int first_row, int row_stop,
                                 Visit visit) {
  const int head_kv = head / (params.num_heads / params.num_heads_kv), key_stop = key_stop_of(params, batch);
  const Products products({queries_of(params.q, batch, head), params.q.row_stride, row_stop},
                          {keys_of(params, params.k, batch, head_kv), params.k.row_stride, key_stop}, first_row);
  const Score score(params, batch, head, key_stop);
  const Mask mask(params, batch, head, key_stop);
  const TileRange tiles = key_tiles(params, batch, first_row, min_of(first_row + 16, row_stop) - 1, key_stop);
  const int lane_row = first_row + fragment_row();
#pragma unroll 1
  for (int key = tiles.start * kBlockN; key < min_of(tiles.stop * kBlockN, key_stop); key += 16) {
    Real s[1][2][4];
    products.multiply(key, s);
    to_scores(score, mask, s, [&](int, int i) { return lane_row + i / 2 * 8; }, key + fragment_column(), true);
    visit(s, key, score.exponent_scale());
  }
}

// Warp. Adds the scores of 16 rows from `first_row` on, and the sink, to the sums.
CUFLASH_DEVICE void sum_rows(const Params& params, Entry batch, int head, int first_row, int row_stop,
                             OnlineSoftmax<1>& softmax) {
  visit_scores(params, batch, head, first_row, row_stop, [&](Real(&s)[1][2][4], int, Real exponent_scale) {
    Real factor[1][2];
    softmax.update(s, factor, exponent_scale);
    softmax.exponentiate(s, exponent_scale, softmax.row_sum, false);  // as the backward pass makes weights
  });
  softmax.finish();
  if (kLseHasSinks && !is_left_over(params, batch)) {
    Real nothing[1][1][4] = {};
    softmax.add_sinks(nothing, [&](int, int) { return to_row_max(sink_of(params, head)); });
  }
}

#if CUFLASH_ROW_REDUCTIONS
// The same products where their last bits do not matter. Where elements have 16 bits, a lane reads 8 adjacent columns
// of a row at once, so that the columns of both operands are permuted, in the same way. Q stays in registers.
template <class E, bool permutes>
struct ProductsOfMaxima : ExactProducts {
  using ExactProducts::ExactProducts;
};
template <class E>
struct ProductsOfMaxima<E, true> {
  static constexpr int kVectors = ceil_div(kDim, 32);  // of a row, for each of its lanes
  const RowFragments k;
  Bytes16 q[kVectors][2];

  CUFLASH_DEVICE ProductsOfMaxima(const RowFragments& q_, const RowFragments& k_, int first_row) : k(k_) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) q[i][half] = vector_of(q_, first_row + fragment_row() + 8 * half, i);
  }
  CUFLASH_DEVICE void multiply(int first_key, Real (&s)[1][2][4]) const {
    Bytes16 keys[kVectors][2];
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
      for (int n = 0; n < 2; ++n) keys[i][n] = vector_of(k, first_key + fragment_row() + 8 * n, i);
    set_zero(s);
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
#pragma unroll
      for (int word = 0; word < 4; word += 2) {
        const u32 a[4] = {q[i][0].word[word], q[i][1].word[word], q[i][0].word[word + 1], q[i][1].word[word + 1]};
#pragma unroll
        for (int n = 0; n < 2; ++n)
          ptx::mma_m16n8k16(E{}, s[0][n], a, keys[i][n].word[word], keys[i][n].word[word + 1]);
      }
  }

 private:
  CUFLASH_DEVICE static Bytes16 vector_of(const RowFragments& rows, int row, int i) {
    const int column = 32 * i + 4 * fragment_column();
    if (row >= rows.stop || column >= kHeadDim) return {};
    return *(const Bytes16*)(rows.head + row * rows.row_stride + column);
  }
};
constexpr bool kPermutesColumns = kElementBytes == 2 && kLoadBytes == 16 && kHeadDim % 8 == 0 && kDim <= 256;

// Warp. Stores the first key that has the largest score of each of 16 rows from `first_row` on, -1 where there is none.
CUFLASH_DEVICE void store_first_maxima(const Params& params, Entry batch, int head, int first_row, int row_stop,
                                       i32* first_max) {
  Real largest[2] = {-ptx::infinity(), -ptx::infinity()};
  int found[2] = {-1, -1};
  using Products = ProductsOfMaxima<Element, kPermutesColumns>;
  visit_scores<Products>(params, batch, head, first_row, row_stop, [&](Real(&s)[1][2][4], int key, Real) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (s[0][n][i] > largest[i / 2])
          largest[i / 2] = s[0][n][i], found[i / 2] = key + fragment_column() + 8 * n + i % 2;
  });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      const Real other = ptx::shuffle_xor(largest[half], mask);
      const int other_key = (int)ptx::bits_of(ptx::shuffle_xor(ptx::float_of((u32)found[half]), mask));
      if (other > largest[half] || (other == largest[half] && other_key < found[half]))
        largest[half] = other, found[half] = other_key;
    }
    if (fragment_column() == 0) first_max[first_row + fragment_row() + 8 * half] = found[half];
  }
}
#endif

// Warp. The first statistic of 16 rows from `first_row` on, and their RowSums. What they are made of is loaded at once,
// and stored later.
struct LseStats {
  const Params& params;
  const Entry batch;
  const int head, first_row, row_stop;
  Real own_lse, of_group[kGroupRows / 32];

  CUFLASH_DEVICE LseStats(const Params& params_, Entry batch_, int head_, int first_row_, int row_stop_)
      : params(params_), batch(batch_), head(head_), first_row(first_row_), row_stop(row_stop_) {
    const int lane = lane_index(), first_of_group = first_row / kGroupRows * kGroupRows;
    own_lse = lse_of(first_row + lane % 16);
#pragma unroll
    for (int i = 0; i < kGroupRows / 32; ++i) of_group[i] = lse_of(first_of_group + i * 32 + lane);
  }
  CUFLASH_DEVICE Real lse_of(int row) const {
    return row < row_stop ? row_values_of(params.lse, batch, head)[row * params.lse.row_stride] : -ptx::infinity();
  }

  // Whether some of the 16 rows are large: then `store_large` follows `store`.
  CUFLASH_DEVICE bool has_large() const { return ptx::any_lane(is_large(own_lse)); }

  CUFLASH_DEVICE void store() const {
    RowSum* row_sums = row_sums_of(params, batch, head);
    bool large_in_group = false;
#pragma unroll
    for (const Real lse : of_group) large_in_group = large_in_group || is_large(lse);
    large_in_group = ptx::any_lane(large_in_group);
    if (lane_index() < 16) {
      const int row = first_row + (int)lane_index();
      // A row that saw no key, or that does not exist, has no weights: exp(score - inf) = 0.
      const bool has_keys = own_lse != -ptx::infinity();
      const Real lse = has_keys ? own_lse * kExponentOfE + 0 : lse_without_weights();  // never -0
      row_stats(params, batch, head, row)[0] = large_in_group ? (Real)-0.0f : lse;
      if (large_in_group) row_sums[row] = {has_keys ? to_row_max(own_lse) : ptx::infinity(), 1};
    }
  }

  CUFLASH_DEVICE void store_large() const {
    RowSum* row_sums = row_sums_of(params, batch, head);
    OnlineSoftmax<1> softmax;
    sum_rows(params, batch, head, first_row, row_stop, softmax);
    ptx::sync_warp();  // what is stored above comes before what is stored below
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + fragment_row() + 8 * half;
      const Real lse = lse_of(row), row_max = softmax.row_max[0][half], sum = softmax.row_sum[0][half];
      if (fragment_column() != 0 || !is_large(lse)) continue;
      // lse is close to the row max, so that their difference is exact.
      const Real natural = kWide || kNaturalRowMax ? row_max : row_max * kLn2;
      const Real difference = (natural - lse) + log_sum_exp<true>(0, sum);
      if (magnitude_of(difference) <= kRoundedLse * magnitude_of(lse)) row_sums[row] = {row_max, 1 / sum};
    }
  }
};
