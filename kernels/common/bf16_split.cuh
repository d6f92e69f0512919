// float32 for tensor cores that take bfloat16: every number is the sum of pieces of 8 bits each, rounded to nearest one
// after the other. Three are all of it: high, middle and low. Of the nine products of the pieces of two numbers, six
// matter: the others together are below 2^-24 of the product. Two are 16 bits of it, where TF32 has 11. Then three
// products of four matter, and all that is left out is below 2^-14 of the product, where TF32 may lose 2^-10.
#pragma once
#include "common/config.cuh"

constexpr int kPieces = CUFLASH_PIECES;
static_assert(kPieces == 2 || kPieces == 3, "pieces of TF32's precision, or of float32's");
constexpr int kHigh = 0, kMiddle = 1, kLow = 2, kLast = kPieces - 1;

// Which pieces of a and b a product takes. Sums on the tensor cores are cut off, so they meet large numbers last. All
// products with a piece of b are neighbours, so that it can go as soon as possible.
struct PieceProduct {
  int a, b;
};
constexpr int kPieceProducts = kPieces * (kPieces + 1) / 2;
CUFLASH_DEVICE constexpr PieceProduct piece_product(int i) {
  constexpr PieceProduct kOrder[6] = {{kHigh, kLow},  {kMiddle, kMiddle}, {kHigh, kMiddle},
                                      {kLow, kHigh}, {kMiddle, kHigh},   {kHigh, kHigh}};
  constexpr PieceProduct kOrderOfTwo[3] = {{kHigh, kMiddle}, {kMiddle, kHigh}, {kHigh, kHigh}};
  return kPieces == 3 ? kOrder[i] : kOrderOfTwo[i];
}

// The pieces of a pair of finite numbers up to the largest of bfloat16, or of NaN. The result is finite only if these
// are.
CUFLASH_DEVICE float split_small(float x, float y, u32 (&piece)[kPieces]) {
#pragma unroll
  for (int i = 0; i < kLast; ++i) {
    piece[i] = ptx::pack(BFloat16{}, x, y);
    x -= ptx::float_of(piece[i] << 16);
    y -= ptx::float_of(piece[i] & 0xffff0000u);
  }
  piece[kLast] = ptx::pack(BFloat16{}, x, y);
  return x * y;
}

// The pieces of a pair of any numbers. An infinity is in the last piece, which meets the high piece of the other factor
// only, below a high piece of one: where it meets a finite number, no product is the difference of two infinities nor
// that of an infinity and a piece which is zero.
CUFLASH_DEVICE void split(float x, float y, u32 (&piece)[kPieces]) {
  constexpr float kLargest = 3.3895313892515355e38f;  // of bfloat16
  const float pair[2] = {x, y};
  float high[2], rest[2];
  for (int i = 0; i < 2; ++i) {
    const bool infinite = pair[i] == ptx::infinity() || pair[i] == -ptx::infinity();
    const float largest = infinite ? 1.0f : kLargest;
    high[i] = fmaxf(fminf(pair[i], largest), -largest);
  }
  piece[kHigh] = ptx::pack(BFloat16{}, high[0], high[1]);
  for (int i = 0; i < 2; ++i)
    rest[i] = pair[i] - ptx::float_of(i == 0 ? piece[kHigh] << 16 : piece[kHigh] & 0xffff0000u);
  if constexpr (kPieces == 3) {
    float middle[2];
    for (int i = 0; i < 2; ++i)
      middle[i] = rest[i] == ptx::infinity() || rest[i] == -ptx::infinity() ? 0.0f : rest[i];
    piece[kMiddle] = ptx::pack(BFloat16{}, middle[0], middle[1]);
    for (int i = 0; i < 2; ++i)
      rest[i] -= ptx::float_of(i == 0 ? piece[kMiddle] << 16 : piece[kMiddle] & 0xffff0000u);
  } else {
    // Numbers next to the largest of float32 may not be rounded up to the one behind it.
    constexpr float kLargestRest = kLargest / 256.0f;
    for (int i = 0; i < 2; ++i) {
      if (rest[i] > kLargestRest && rest[i] < ptx::infinity()) rest[i] = kLargestRest;
      if (rest[i] < -kLargestRest && rest[i] > -ptx::infinity()) rest[i] = -kLargestRest;
    }
  }
  piece[kLast] = ptx::pack(BFloat16{}, rest[0], rest[1]);
}
