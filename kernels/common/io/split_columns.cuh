// Splits eight columns of a row of float32 into bfloat16 parts (common/io/part_products.cuh).
#pragma once
#include "common/io/bf16_split.cuh"
#include "common/config.cuh"

static_assert(kElementBytes == 4, "parts are those of float32");

// Splits eight columns by `split_pair`, and returns the sum of what that returns.
template <class SplitPair>
CUFLASH_DEVICE float split_columns(const float (&x)[8], Bytes16 (&parts)[kBf16Parts], SplitPair split_pair) {
  float sum = 0.0f;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    u32 word[kBf16Parts];
    sum += split_pair(x[2 * pair], x[2 * pair + 1], word);
#pragma unroll
    for (int part = 0; part < kBf16Parts; ++part) parts[part].word[pair] = word[part];
  }
  return sum;
}
// The same for any numbers.
CUFLASH_DEVICE void split_columns(const float (&x)[8], Bytes16 (&parts)[kBf16Parts]) {
  split_columns(x, parts, [](float x, float y, u32(&word)[kBf16Parts]) {
    bf16_split(x, y, word);
    return 0.0f;
  });
}
