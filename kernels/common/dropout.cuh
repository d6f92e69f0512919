// Which weights dropout drops (FlashAttention, Algorithm 2). The random numbers, and what of them belongs to which
// weight, are those of cuflash/dropout.py: a call of the generator serves rows i and i + 8 and columns j, j + 1, j + 8,
// j + 9.
#pragma once
#include "common/fragments.cuh"
#include "common/params.cuh"

// Philox-4x32-7 (Salmon et al. 2011): the words of a counter, in its place.
CUFLASH_DEVICE void philox(u32 (&word)[4], u32 key_low, u32 key_high) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const u64 product_0 = (u64)word[0] * 0xd2511f53u, product_2 = (u64)word[2] * 0xcd9e8d57u;
    word[0] = (u32)(product_2 >> 32) ^ word[1] ^ key_low;
    word[1] = (u32)product_2;
    word[2] = (u32)(product_0 >> 32) ^ word[3] ^ key_high;
    word[3] = (u32)product_0;
    key_low += 0x9e3779b9u;
    key_high += 0xbb67ae85u;
  }
}

// The bits of 8 weights: of those that a lane holds in two neighbouring n-tiles of an accumulator, whose
// columns are keys, or, transposed, queries.
template <bool transposed>
struct KeptWeights {
  u32 word[4];
  u32 threshold;

  // Whether element i of n-tile n, counted from an even one, is kept.
  CUFLASH_DEVICE bool keeps(int n, int i) const {
    const int down = i / 2, next_n_tile = n % 2;
    const u32 bits = word[2 * (i % 2) + (transposed ? down : next_n_tile)];
    return ((transposed ? next_n_tile : down) == 0 ? bits << 16 : bits) >= threshold;
  }
  // Calls f(n, i, whether it is kept) for the elements of both n-tiles, two of them at a time, whose bits share a word.
  template <class Function>
  CUFLASH_DEVICE void for_each(Function f) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = j % 2, other = j / 2;  // a row, or an n-tile, as neighbours have bits of one word
      u32 low, high;
      ptx::at_least_u16x2(word[2 * column + other], threshold | threshold >> 16, low, high);
      if constexpr (transposed) {
        f(0, column + 2 * other, low != 0);
        f(1, column + 2 * other, high != 0);
      } else {
        f(other, column, low != 0);
        f(other, column + 2, high != 0);
      }
    }
  }
};

// The weights of one head. Places are those of a lane's first element of an n-tile: rows g, columns 2t.
struct Dropout {
  u32 seed_low, seed_high, head, offset, threshold, first_rows, first_columns;

  CUFLASH_DEVICE Dropout(const Params& params, int batch, int head_)
      : seed_low(params.seed_low),
        seed_high(params.seed_high),
        head(params.dropout_head + batch * params.dropout_heads + head_),
        offset(params.offset),
        threshold(params.dropout_threshold << 16),
        first_rows(params.dropout_rows),
        first_columns(params.dropout_columns) {}

  // The weights of two neighbouring n-tiles; `later` is how many n-tiles they come after the place, an even number.
  CUFLASH_DEVICE KeptWeights<false> of(int query, int key, int later = 0) const {
    return call(rows_of(query), columns_of(key) + 2 * later);
  }

  // Warp. In an accumulator whose rows are keys: two calls serve two lanes with neighbouring keys, a half of each call
  // each of them. So each makes one, and they swap halves.
  CUFLASH_DEVICE KeptWeights<true> transposed(int query, int key, int later = 0) const {
    const bool odd = key % 2 != 0;
    KeptWeights<true> kept = {{}, threshold};
    const KeptWeights<false> made = call(rows_of(query) + odd + 4 * later, columns_of(key));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 own = odd ? made.word[2 + i] : made.word[i], given = odd ? made.word[i] : made.word[2 + i];
      const u32 got = ptx::bits_of(ptx::shuffle_xor(ptx::float_of(given), 4));
      kept.word[i] = odd ? got : own;
      kept.word[2 + i] = odd ? own : got;
    }
    return kept;
  }

  template <bool is_transposed>
  CUFLASH_DEVICE KeptWeights<is_transposed> of_either(int query, int key, int later) const {
    if constexpr (is_transposed)
      return transposed(query, key, later);
    else
      return of(query, key, later);
  }

  // Puts zeros in the place of weights that are dropped.
  template <class T, int n_tiles>
  CUFLASH_DEVICE void drop(T (&weight)[n_tiles][4], int query, int key) const {
#pragma unroll
    for (int first = 0; first < n_tiles; first += 2) {
      of(query, key, first).for_each([&](int n, int i, bool kept) {
        T& x = weight[first + n][i];
        x = kept ? x : 0;
      });
    }
  }

  // Warp. Marks them by their sign, in an accumulator whose rows are keys.
  template <int n_tiles>
  CUFLASH_DEVICE void mark(float (&weight)[n_tiles][4], int query, int key) const {
#pragma unroll
    for (int first = 0; first < n_tiles; first += 2) {
      transposed(query, key, first).for_each([&](int n, int i, bool kept) {
        float& x = weight[first + n][i];
        x = kept ? x : -x;
      });
    }
  }

 private:
  CUFLASH_DEVICE static u32 rows_of(int query) { return (u32)query / 16 * 8 + (u32)query % 8; }
  CUFLASH_DEVICE static u32 columns_of(int key) { return (u32)key / 16 * 4 + (u32)key % 8 / 2; }
  CUFLASH_DEVICE KeptWeights<false> call(u32 rows, u32 columns) const {
    KeptWeights<false> kept = {{first_columns + columns, first_rows + rows, head, offset}, threshold};
    philox(kept.word, seed_low, seed_high);
    return kept;
  }
};

CUFLASH_DEVICE bool is_dropped(float marked) { return (i32)ptx::bits_of(marked) < 0; }
// What dropout leaves of a marked weight: 0 of one that is dropped, NaN included.
CUFLASH_DEVICE float kept_of(float marked) {
  const i32 bits = ptx::bits_of(marked);
  return ptx::float_of((u32)(bits > 0 ? bits : 0));
}

// The gradient of a score, dS = P (dP - delta): of a weight that dropout keeps or drops,
CUFLASH_DEVICE Real gradient_of(Real weight, Real dp, bool keeps, Real kept_scale, Real delta) {
  return weight * ((keeps ? dp : 0) * kept_scale - delta);
}
// and of a marked one. What is left of it becomes an operand later; at larger head dimensions it takes a register too
// many to keep it until then.
CUFLASH_DEVICE float gradient_of(float weight, float dp, float kept_scale, float delta) {
  if constexpr (!kHasDropout) return weight * (dp - delta);
  if constexpr (max_of(kDim, kDimV) > 64) return fabsf(weight) * ((is_dropped(weight) ? 0.0f : dp) * kept_scale - delta);
  return kept_of(weight) * kept_scale * dp - fabsf(weight) * delta;
}
