// Sums of float32 that are exact, whatever the order of additions. They have a 64-bit word for every 24 bits between
// the smallest number and the largest. A number has 24 bits, so that it lies in two neighbouring words, to which
// integers below 2^24 are added: 2^39 numbers can be added without overflow.
#pragma once
#include "common/config.cuh"

constexpr int kSumWords = 12, kWordBits = 24, kLowestExponent = -149;

// A finite number as an integer times a power of two: `position` is that of its lowest bit above the lowest bit of all
// numbers, and `units` is the number in units of that bit.
struct ExactTerm {
  u32 position;
  u64 units;
  bool is_negative;

  CUFLASH_DEVICE explicit ExactTerm(float x) {
    const u32 bits = ptx::bits_of(x), exponent = bits >> 23 & 255;
    position = exponent > 0 ? exponent - 1 : 0;
    units = (bits & 0x7fffff) | (exponent > 0 ? 0x800000 : 0);
    is_negative = bits >> 31;
  }
  CUFLASH_DEVICE void add_to(u64* words) const {
    const u64 shifted = units << position % kWordBits,
              partial[2] = {shifted & ((1u << kWordBits) - 1), shifted >> kWordBits};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (partial[i] != 0) ptx::reduce_add(words + position / kWordBits + i, is_negative ? 0 - partial[i] : partial[i]);
  }
};

// 2^n, for |n| < 1023.
CUFLASH_DEVICE double power_of_two(int n) { return ptx::double_of((u64)(1023 + n) << 52); }

// The sum that words hold, added up from the highest word down.
CUFLASH_DEVICE double exact_sum(const i64* words) {
  double sum = 0;
#pragma unroll
  for (int i = kSumWords - 1; i >= 0; --i) sum += (double)words[i] * power_of_two(kWordBits * i + kLowestExponent);
  return sum;
}
