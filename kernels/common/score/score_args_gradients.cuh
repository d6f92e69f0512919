// Gradients of arrays that a score reads: sums of integers, which do not depend on the order of additions.
//
// If sm90/backward.cu makes the terms, the sums are exact (common/softmax/exact_sums.cuh). Otherwise they are
// fixed-point sums, to which every pair adds a term for each read. One launch finds the largest term of each array, and
// the largest number of reads of a pair. The next one adds terms as multiples of a power of two, the unit, which is
// chosen so that no sum overflows: 2^62 units are more than the largest possible number of terms of the largest size.
// So each term is off by at most half a unit, which is 2^-61 of the largest term times the number of terms (of which
// each factor is rounded up to a power of two). For float64, a second word holds the rest of a term that the first one
// leaves out.
#pragma once
#include "common/config.cuh"
#include "common/softmax/exact_sums.cuh"
#include "common/io/fragments.cuh"
#include "common/score/functions.cuh"
#include "common/io/params.cuh"
#include "common/softmax/reduce.cuh"

constexpr int kFindsLargest = 1, kAddsTerms = 2, kAddsExactly = 3;  // values of CUFLASH_NEEDS_SCORE_ARGS
constexpr bool kSumsScoreArgs = CUFLASH_NEEDS_SCORE_ARGS == kAddsExactly;
constexpr int kTermWords = sizeof(Real) == 8 ? 2 : 1;
constexpr int kTermBits = 61;

// What the flat index of a read in its array depends on, besides the head: nothing, the key, the query, the difference
// of both, or more than that. `class_of_read` returns it; cuflash/score_mod/program.py writes that function.
enum ReadClass { kReadOfHead, kReadOfKey, kReadOfQuery, kReadOfDiagonal, kReadOfPair };

#if CUFLASH_NEEDS_SCORE_ARGS
// The number of elements of an array, and where its sums begin among those of all arrays that have sums. These are
// arrays whose gradients are wanted, and tables through which such arrays are read (cuflash/score_mod/hoisting.py).
CUFLASH_DEVICE i64 elements_of(const ScoreArg& array) {
  return array.size[0] * array.size[1] * array.size[2] * array.size[3];
}
CUFLASH_DEVICE i64 first_sum_of(const Params& params, int array) {
  i64 first = 0;
  for (int i = 0; i < array; ++i)
    if (has_sums(i)) first += elements_of(params.score_args[i]);
  return first;
}
CUFLASH_DEVICE i64* score_arg_sums_of(const Params& params, int word) {
  return (i64*)params.score_arg_sums + word * first_sum_of(params, kNumScoreArgs);
}
CUFLASH_DEVICE u64* score_arg_largest_of(const Params& params) { return (u64*)params.score_arg_largest; }
CUFLASH_DEVICE u64* most_reads_of(const Params& params) { return score_arg_largest_of(params) + kNumScoreArgs; }

CUFLASH_DEVICE int ceil_log2(int n) { return n > 1 ? 32 - (int)ptx::leading_zeros((u32)(n - 1)) : 0; }
// Base-2 logarithm, rounded up, of the number of terms that a sum can have.
CUFLASH_DEVICE int term_count_log2(const Params& params) {
  return ceil_log2(kIsPacked ? 1 : params.batch) + ceil_log2(params.num_heads) + ceil_log2(params.seqlen_q) +
         ceil_log2(params.seqlen_k) + ceil_log2((int)*most_reads_of(params));
}

// Converts terms of an array to words, and sums of words back.
struct TermScale {
  double first, second;  // units of the first word per 1, and of the second word per unit of the first

  CUFLASH_DEVICE TermScale(const Params& params, int array) {
    const int count = term_count_log2(params);
    const int exponent = (int)(score_arg_largest_of(params)[array] >> 52) - 1022;  // the largest term is below 2^this
    const int first_bits = kTermBits - count - exponent;
    first = power_of_two(first_bits > 1000 ? 1000 : first_bits < -1000 ? -1000 : first_bits);
    second = power_of_two(kTermBits > count ? kTermBits - count : 0);
  }
  CUFLASH_DEVICE static i64 rounded(double x) { return (i64)(x + (x < 0 ? -0.5 : 0.5)); }
  CUFLASH_DEVICE void words(Real term, i64 (&word)[kTermWords]) const {
    const double units = (double)term * first;
    word[0] = rounded(units);
    if constexpr (kTermWords == 2) word[1] = rounded((units - (double)word[0]) * second);
  }
  CUFLASH_DEVICE double value(const i64 (&word)[kTermWords]) const {
    double units = (double)word[0];
    if constexpr (kTermWords == 2) units += (double)word[1] / second;
    return units / first;
  }
};

// What a lane keeps during the loop of its block, all of whose pairs are of one head. It is the largest term of each
// read of an array in the score; or, in the next launch, the sums of reads that do not depend on the pair. The terms of
// other reads are added one by one.
struct ScoreArgSums {
  const Params& params;
  double largest[max_of(kNumReads, 1)];
  int most_reads = 0;  // the largest number of reads of a pair
  i64 own[max_of(kNumReads, 1)][kTermWords];
  i64 own_index[max_of(kNumReads, 1)];

  CUFLASH_DEVICE explicit ScoreArgSums(const Params& params_) : params(params_) {
#pragma unroll
    for (int read = 0; read < kNumReads; ++read) {
      largest[read] = 0;
      own_index[read] = -1;
#pragma unroll
      for (i64& word : own[read]) word = 0;
    }
  }

  // Takes in a pair that has a weight; `ds` is the gradient of its score, whose tangent is `tds`, and `ts` that of its
  // scaled product.
#if CUFLASH_TANGENTS
  CUFLASH_DEVICE void add(const Functions& functions, Real s, Real ts, int row, int key, Real ds, Real tds) {
    int reads = 0;
    functions.derivative_tangents(s, ts, row, key, [&](auto read, i64 index, Real derivative, Real tangent) {
      constexpr int kRead = decltype(read)::value, kArray = array_of_read(kRead);
      const Real term = score_product(derivative, tds) + score_product(tangent, ds);
#else
  CUFLASH_DEVICE void add(const Functions& functions, Real s, int row, int key, Real ds) {
    Real by_s;
    int reads = 0;
    functions.derivatives(s, row, key, by_s, [&](auto read, i64 index, Real derivative) {
      constexpr int kRead = decltype(read)::value, kArray = array_of_read(kRead);
      const Real term = ds * (derivative * functions.factor_of_read(kRead));
#endif
      ++reads;
      if constexpr (CUFLASH_NEEDS_SCORE_ARGS == kFindsLargest) {
        // A NaN counts as an infinity: both make results NaN.
        const double magnitude = term == term ? (double)(term < 0 ? -term : term) : (double)ptx::infinity();
        if (magnitude > largest[kRead]) largest[kRead] = magnitude;
      } else {
        i64 word[kTermWords];
        TermScale(params, kArray).words(term, word);
        if constexpr (class_of_read(kRead) == kReadOfHead) {
          own_index[kRead] = index;
#pragma unroll
          for (int i = 0; i < kTermWords; ++i) own[kRead][i] += word[i];
        } else {
          add_words(kArray, index, word);
        }
      }
    });
    most_reads = max_of(most_reads, reads);
  }

  CUFLASH_DEVICE void finish() {
    if constexpr (CUFLASH_NEEDS_SCORE_ARGS == kFindsLargest) ptx::reduce_max(most_reads_of(params), (u64)most_reads);
    repeat<kNumReads>([&](auto read) {
      constexpr int kRead = decltype(read)::value, kArray = array_of_read(kRead);
      if constexpr (CUFLASH_NEEDS_SCORE_ARGS == kFindsLargest) {
        if (largest[kRead] > 0) ptx::reduce_max(score_arg_largest_of(params) + kArray, ptx::bits_of(largest[kRead]));
      } else if constexpr (class_of_read(kRead) == kReadOfHead) {
        if (own_index[kRead] >= 0) add_words(kArray, own_index[kRead], own[kRead]);
      }
    });
  }

 private:
  CUFLASH_DEVICE void add_words(int array, i64 index, const i64 (&word)[kTermWords]) const {
    const i64 at = first_sum_of(params, array) + index;
#pragma unroll
    for (int i = 0; i < kTermWords; ++i)
      if (word[i] != 0) ptx::reduce_add((u64*)score_arg_sums_of(params, i) + at, (u64)word[i]);
  }
};

// ---- Exact sums -----------------------------------------------------------------------------------------------------

// Adds a term to the sum of an element.
CUFLASH_DEVICE void add_exactly(const Params& params, int array, i64 index, float term) {
  const u64 infinite = ptx::bits_of((double)ptx::infinity());
  if (term == 0) return;
  if (!(fabsf(term) < ptx::infinity())) return ptx::reduce_max(score_arg_largest_of(params) + array, infinite);
  ExactTerm(term).add_to((u64*)score_arg_sums_of(params, 0) + (first_sum_of(params, array) + index) * kSumWords);
}

// Warp. The same for one term of each lane. If all have the same index, the terms are added up first.
CUFLASH_DEVICE void add_of_warp(const Params& params, int array, i64 index, float term) {
  const u32 low = (u32)index, high = (u32)(index >> 32), first_low = ptx::shuffle(low, 0),
            first_high = ptx::shuffle(high, 0);
  if (ptx::any_lane(low != first_low || high != first_high)) return add_exactly(params, array, index, term);
  const float sum = (float)warp_sum(term);
  if (lane_index() == 0) add_exactly(params, array, index, sum);
}

// The flat index of a read for a pair. It is also that of all pairs with the same index, so the pair itself need not
// exist.
template <int read>
CUFLASH_DEVICE i64 index_of_read(const Functions& functions, int row, int key) {
  i64 found = 0;
  Real by_s;
  functions.derivatives(0, row, key, by_s, [&](auto other, i64 index, Real) {
    if constexpr (decltype(other)::value == read) found = index;
  });
  return found;
}
#endif
