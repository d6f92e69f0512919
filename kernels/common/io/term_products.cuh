// float32 products on tensor cores that take bfloat16. Every number is the sum of terms of 8 bits each, rounded to
// nearest one after the other. Three terms (high, middle and low) hold the whole number. Of the nine products of the
// terms of two numbers, six matter: the others together are below 2^-24 of the product. Two terms hold 16 bits of it,
// where TF32 has 11. Then three of the four products matter, and all that is left out is below 2^-14 of the product,
// where TF32 may lose 2^-10.
#pragma once
#include "common/config.cuh"

constexpr int kBf16Terms = CUFLASH_BF16_TERMS;  // 1 where elements have 16 bits already
constexpr int kHigh = 0, kMiddle = 1, kLow = 2, kLast = kBf16Terms - 1;

// Which terms of a and b a product multiplies. The tensor cores truncate sums, so large products come last. All
// products with the same term of b are neighbours, so that this term can be released as soon as possible.
struct TermProduct {
  int a, b;
};
constexpr int kTermProducts = kBf16Terms * (kBf16Terms + 1) / 2;
CUFLASH_DEVICE constexpr TermProduct term_product(int i) {
  constexpr TermProduct kOrder[6] = {{kHigh, kLow}, {kMiddle, kMiddle}, {kHigh, kMiddle},
                                     {kLow, kHigh}, {kMiddle, kHigh},   {kHigh, kHigh}};
  constexpr TermProduct kOrderOfTwo[3] = {{kHigh, kMiddle}, {kMiddle, kHigh}, {kHigh, kHigh}};
  return kBf16Terms == 3 ? kOrder[i] : kBf16Terms == 2 ? kOrderOfTwo[i] : TermProduct{kHigh, kHigh};
}
