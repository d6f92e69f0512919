// float32 for tensor cores that take bfloat16: every number is the sum of parts of 8 bits each, rounded to nearest one
// after the other. Three are all of it: high, middle and low. Of the nine products of the parts of two numbers, six
// matter: the others together are below 2^-24 of the product. Two are 16 bits of it, where TF32 has 11. Then three
// products of four matter, and all that is left out is below 2^-14 of the product, where TF32 may lose 2^-10.
#pragma once
#include "common/config.cuh"

constexpr int kBf16Parts = CUFLASH_BF16_PARTS;  // 1 where elements have 16 bits already
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
  return kBf16Parts == 3 ? kOrder[i] : kBf16Parts == 2 ? kOrderOfTwo[i] : PartProduct{kHigh, kHigh};
}
