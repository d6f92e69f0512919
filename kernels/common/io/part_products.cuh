// float32 products on tensor cores that take bfloat16. Every number is the sum of parts of 8 bits each, rounded to
// nearest one after the other. Three parts (high, middle and low) hold the whole number. Of the nine products of the
// parts of two numbers, six matter: the others together are below 2^-24 of the product. Two parts hold 16 bits of it,
// where TF32 has 11. Then three of the four products matter, and all that is left out is below 2^-14 of the product,
// where TF32 may lose 2^-10.
#pragma once
#include "common/config.cuh"

constexpr int kBf16Parts = CUFLASH_BF16_PARTS;  // 1 where elements have 16 bits already
constexpr int kHigh = 0, kMiddle = 1, kLow = 2, kLast = kBf16Parts - 1;

// Which parts of a and b a product multiplies. The tensor cores truncate sums, so large products come last. All
// products with the same part of b are neighbours, so that this part can be released as soon as possible.
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
