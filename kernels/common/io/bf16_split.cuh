// Splits float32 numbers into bfloat16 terms (common/io/term_products.cuh).
#pragma once
#include "common/config.cuh"
#include "common/io/term_products.cuh"

static_assert(kBf16Terms == 2 || kBf16Terms == 3, "terms of TF32's precision, or of float32's");

// The terms of a pair of numbers that are NaN, or finite and at most the largest of bfloat16. The returned number is
// finite only if both numbers are.
CUFLASH_DEVICE float bf16_split_small(float x, float y, u32 (&term)[kBf16Terms]) {
#pragma unroll
  for (int i = 0; i < kLast; ++i) {
    term[i] = ptx::pack(BFloat16{}, x, y);
    x -= ptx::float_of(term[i] << 16);
    y -= ptx::float_of(term[i] & 0xffff0000u);
  }
  term[kLast] = ptx::pack(BFloat16{}, x, y);
  return x * y;
}

// The terms of a pair of any numbers. The high term of an infinity is 1 or -1, and the infinity is in the last term,
// which is multiplied by the high term of the other factor only. So, if the other factor is finite, no sum is the
// difference of two infinities, and no product is that of an infinity and a term that is zero.
CUFLASH_DEVICE void bf16_split(float x, float y, u32 (&term)[kBf16Terms]) {
  constexpr float kLargest = 3.3895313892515355e38f;  // of bfloat16
  const float pair[2] = {x, y};
  float high[2], rest[2];
  for (int i = 0; i < 2; ++i) {
    const bool infinite = pair[i] == ptx::infinity() || pair[i] == -ptx::infinity();
    const float largest = infinite ? 1.0f : kLargest;
    high[i] = fmaxf(fminf(pair[i], largest), -largest);
  }
  term[kHigh] = ptx::pack(BFloat16{}, high[0], high[1]);
  for (int i = 0; i < 2; ++i) rest[i] = pair[i] - ptx::float_of(i == 0 ? term[kHigh] << 16 : term[kHigh] & 0xffff0000u);
  if constexpr (kBf16Terms == 3) {
    float middle[2];
    for (int i = 0; i < 2; ++i) middle[i] = rest[i] == ptx::infinity() || rest[i] == -ptx::infinity() ? 0.0f : rest[i];
    term[kMiddle] = ptx::pack(BFloat16{}, middle[0], middle[1]);
    for (int i = 0; i < 2; ++i) rest[i] -= ptx::float_of(i == 0 ? term[kMiddle] << 16 : term[kMiddle] & 0xffff0000u);
  } else {
    // Numbers next to the largest of float32 must not be rounded up to infinity.
    constexpr float kLargestRest = kLargest / 256.0f;
    for (int i = 0; i < 2; ++i) {
      if (rest[i] > kLargestRest && rest[i] < ptx::infinity()) rest[i] = kLargestRest;
      if (rest[i] < -kLargestRest && rest[i] > -ptx::infinity()) rest[i] = -kLargestRest;
    }
  }
  term[kLast] = ptx::pack(BFloat16{}, rest[0], rest[1]);
}

// Splits eight columns by `split_pair`, and returns the sum of what that returns.
template <class SplitPair>
CUFLASH_DEVICE float split_columns(const float (&x)[8], Bytes16 (&terms)[kBf16Terms], SplitPair split_pair) {
  float sum = 0.0f;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    u32 word[kBf16Terms];
    sum += split_pair(x[2 * pair], x[2 * pair + 1], word);
#pragma unroll
    for (int term = 0; term < kBf16Terms; ++term) terms[term].word[pair] = word[term];
  }
  return sum;
}
// The same for any numbers.
CUFLASH_DEVICE void split_columns(const float (&x)[8], Bytes16 (&terms)[kBf16Terms]) {
  split_columns(x, terms, [](float x, float y, u32(&word)[kBf16Terms]) {
    bf16_split(x, y, word);
    return 0.0f;
  });
}
