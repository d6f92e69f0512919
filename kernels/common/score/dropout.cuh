// Which weights dropout drops (FlashAttention, Algorithm 2). The random numbers, and which of their bits belong to
// which weight, are those of cuflash/spec/dropout.py: a call of the generator serves rows i and i + 8 and columns j, j
// + 1, j + 8, j + 9.
#pragma once
#include "common/io/fragments.cuh"
#include "common/io/params.cuh"

// Philox-4x32-7 (Salmon et al. 2011). Replaces a counter by its random words.
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

// The random bits of the 8 weights that a lane holds in two neighbouring n-tiles of an accumulator. Its columns are
// keys or, transposed, queries.
template <bool transposed>
struct KeptWeights {
  u32 word[4];
  u32 threshold;

  // Whether element i of n-tile n is kept. n counts from an even n-tile.
  CUFLASH_DEVICE bool keeps(int n, int i) const {
    const int down = i / 2, next_n_tile = n % 2;
    const u32 bits = word[2 * (i % 2) + (transposed ? down : next_n_tile)];
    return ((transposed ? next_n_tile : down) == 0 ? bits << 16 : bits) >= threshold;
  }
};

// The weights of one head. Positions are those of a lane's first element of an n-tile: rows g, columns 2t.
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

  // The weights of two neighbouring n-tiles; `later` is how many n-tiles they come after the position, an even number.
  CUFLASH_DEVICE KeptWeights<false> of(int query, int key, int later = 0) const {
    return call(rows_of(query), columns_of(key) + 2 * later);
  }

  // Warp. The same in an accumulator whose rows are keys. Two lanes with neighbouring keys share two calls, of each of
  // which each lane needs one half. So each lane makes one call, and they swap halves.
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

  // Replaces dropped weights by zeros, and multiplies the others by a factor. The bits of two rows share a word, and
  // are compared at once. Not so where halves of other registers are numbers, too, as of fp8 keys and values: ptxas of
  // CUDA 13.0 lets the instruction that compares two halves write over a register of which a half is still to be read.
  template <class T, int n_tiles>
  CUFLASH_DEVICE void drop(T (&weight)[n_tiles][4], int query, int key, T factor = 1) const {
#pragma unroll
    for (int first = 0; first < n_tiles; first += 2) {
      const KeptWeights<false> kept = of(query, key, first);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        T(&four)[4] = weight[first + j / 2];
        u32 keeps_upper, keeps_lower;
        if constexpr (kHasFloat8)
          keeps_upper = kept.keeps(j / 2, j % 2), keeps_lower = kept.keeps(j / 2, j % 2 + 2);
        else
          ptx::at_least_u16x2(kept.word[2 * (j % 2) + j / 2], threshold | threshold >> 16, keeps_upper, keeps_lower);
        four[j % 2] = keeps_upper != 0 ? four[j % 2] * factor : 0;
        four[j % 2 + 2] = keeps_lower != 0 ? four[j % 2 + 2] * factor : 0;
      }
    }
  }

  // Warp. Marks dropped weights by their sign, in an accumulator whose rows are keys. If two were compared at once, as
  // above, the backward pass on an H100 would be as fast at head_dim 64 and 10 % slower at 128 (453 TFLOP/s instead of
  // 502).
  template <int n_tiles>
  CUFLASH_DEVICE void mark(float (&weight)[n_tiles][4], int query, int key) const {
#pragma unroll
    for (int first = 0; first < n_tiles; first += 2) {
      const KeptWeights<true> kept = transposed(query, key, first);
#pragma unroll
      for (int n = first; n < first + 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) weight[n][i] = kept.keeps(n, i) ? weight[n][i] : -weight[n][i];
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

// The gradient of a score, dS = P (dP - delta), from a weight and whether dropout keeps it.
CUFLASH_DEVICE Real gradient_of(Real weight, Real dp, bool keeps, Real kept_scale, Real delta) {
  return weight * ((keeps ? dp : 0) * kept_scale - delta);
}
// The same from a marked weight.
CUFLASH_DEVICE float gradient_of(float weight, float dp, float kept_scale, float delta) {
  if constexpr (!kHasDropout) return weight * (dp - delta);
  return fabsf(weight) * ((is_dropped(weight) ? 0.0f : dp) * kept_scale - delta);
}
