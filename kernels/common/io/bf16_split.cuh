// Splits float32 numbers into bfloat16 parts (common/io/part_products.cuh).
#pragma once
#include "common/config.cuh"
#include "common/io/part_products.cuh"

static_assert(kBf16Parts == 2 || kBf16Parts == 3, "parts of TF32's precision, or of float32's");

// The parts of a pair of numbers that are NaN, or finite and at most the largest of bfloat16. The returned number is
// finite only if both numbers are.
CUFLASH_DEVICE float bf16_split_small(float x, float y, u32 (&part)[kBf16Parts]) {
#pragma unroll
  for (int i = 0; i < kLast; ++i) {
    part[i] = ptx::pack(BFloat16{}, x, y);
    x -= ptx::float_of(part[i] << 16);
    y -= ptx::float_of(part[i] & 0xffff0000u);
  }
  part[kLast] = ptx::pack(BFloat16{}, x, y);
  return x * y;
}

// The parts of a pair of any numbers. The high part of an infinity is 1 or -1, and the infinity is in the last part,
// which is multiplied by the high part of the other factor only. So, if the other factor is finite, no sum is the
// difference of two infinities, and no product is that of an infinity and a part that is zero.
CUFLASH_DEVICE void bf16_split(float x, float y, u32 (&part)[kBf16Parts]) {
  constexpr float kLargest = 3.3895313892515355e38f;  // of bfloat16
  const float pair[2] = {x, y};
  float high[2], rest[2];
  for (int i = 0; i < 2; ++i) {
    const bool infinite = pair[i] == ptx::infinity() || pair[i] == -ptx::infinity();
    const float largest = infinite ? 1.0f : kLargest;
    high[i] = fmaxf(fminf(pair[i], largest), -largest);
  }
  part[kHigh] = ptx::pack(BFloat16{}, high[0], high[1]);
  for (int i = 0; i < 2; ++i) rest[i] = pair[i] - ptx::float_of(i == 0 ? part[kHigh] << 16 : part[kHigh] & 0xffff0000u);
  if constexpr (kBf16Parts == 3) {
    float middle[2];
    for (int i = 0; i < 2; ++i) middle[i] = rest[i] == ptx::infinity() || rest[i] == -ptx::infinity() ? 0.0f : rest[i];
    part[kMiddle] = ptx::pack(BFloat16{}, middle[0], middle[1]);
    for (int i = 0; i < 2; ++i) rest[i] -= ptx::float_of(i == 0 ? part[kMiddle] << 16 : part[kMiddle] & 0xffff0000u);
  } else {
    // Numbers next to the largest of float32 must not be rounded up to infinity.
    constexpr float kLargestRest = kLargest / 256.0f;
    for (int i = 0; i < 2; ++i) {
      if (rest[i] > kLargestRest && rest[i] < ptx::infinity()) rest[i] = kLargestRest;
      if (rest[i] < -kLargestRest && rest[i] > -ptx::infinity()) rest[i] = -kLargestRest;
    }
  }
  part[kLast] = ptx::pack(BFloat16{}, rest[0], rest[1]);
}

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
