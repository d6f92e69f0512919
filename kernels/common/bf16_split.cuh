// float32 for tensor cores that take bfloat16: every number is the sum of parts of 8 bits each, rounded to nearest one
// after the other. Three are all of it: high, middle and low. Of the nine products of the parts of two numbers, six
// matter: the others together are below 2^-24 of the product. Two are 16 bits of it, where TF32 has 11. Then three
// products of four matter, and all that is left out is below 2^-14 of the product, where TF32 may lose 2^-10.
#pragma once
#include "common/config.cuh"

constexpr int kBf16Parts = CUFLASH_BF16_PARTS;
static_assert(kBf16Parts == 2 || kBf16Parts == 3, "parts of TF32's precision, or of float32's");
constexpr int kHigh = 0, kMiddle = 1, kLow = 2, kLast = kBf16Parts - 1;

// Which parts of a and b a product takes. Sums on the tensor cores are cut off, so they meet large numbers last. All
// products with a part of b are neighbours, so that it can go as soon as possible.
struct PartProduct {
  int a, b;
};
constexpr int kPartProducts = kBf16Parts * (kBf16Parts + 1) / 2;
CUFLASH_DEVICE constexpr PartProduct part_product(int i) {
  constexpr PartProduct kOrder[6] = {{kHigh, kLow}, {kMiddle, kMiddle}, {kHigh, kMiddle},
                                     {kLow, kHigh}, {kMiddle, kHigh},   {kHigh, kHigh}};
  constexpr PartProduct kOrderOfTwo[3] = {{kHigh, kMiddle}, {kMiddle, kHigh}, {kHigh, kHigh}};
  return kBf16Parts == 3 ? kOrder[i] : kOrderOfTwo[i];
}

// The parts of a pair of finite numbers up to the largest of bfloat16, or of NaN. The result is finite only if these
// are.
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

// The parts of a pair of any numbers. An infinity is in the last part, which meets the high part of the other factor
// only, below a high part of one: where it meets a finite number, no product is the difference of two infinities nor
// that of an infinity and a part which is zero.
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
