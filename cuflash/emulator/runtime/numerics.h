// Half precision and fp8, and a NaN of the emulator's own.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "interface.h"

namespace emulator {

inline u32 bits_of(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float float_of(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Free of branches, so that loops over it become vector code.
inline float float16_to_float32(u16 bits) {
  constexpr float kExponentShift = 0x1p112f;  // the difference of the exponent biases
  const float magnitude = float_of((u32)(bits & 0x7fff) << 13) * kExponentShift;
  const u32 infinity_or_nan = (bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  return float_of(bits_of(magnitude) | infinity_or_nan | (u32)(bits & 0x8000) << 16);
}
inline float bfloat16_to_float32(u16 bits) { return float_of((u32)bits << 16); }

// What the registers of an accumulator hold while a product is in flight: a signalling NaN. Arithmetic with it sets one
// bit, and does not hide where it came from.
constexpr u32 kInFlight = 0xFFA5A5A5;
inline bool is_in_flight(float value) {
  constexpr u32 kQuiet = 1u << 22, kSign = 1u << 31;
  return ((bits_of(value) ^ kInFlight) & ~(kQuiet | kSign)) == 0;
}

constexpr u16 kNan16 = 0x7fff;  // what cvt makes of any NaN, in both formats

inline u16 float32_to_float16(float value) {
  constexpr float kRoundsToInfinity = 65520.0f;
  constexpr float kSmallestNormal = 0x1p-14f;
  constexpr float kSmallestSubnormal = 0x1p-24f;
  if (std::isnan(value)) return kNan16;
  const u16 sign = (u16)(bits_of(value) >> 16 & 0x8000);
  const float magnitude = std::fabs(value);
  if (magnitude >= kRoundsToInfinity) return sign | 0x7c00;
  if (magnitude < kSmallestNormal) return sign | (u16)std::nearbyint(magnitude / kSmallestSubnormal);
  const u32 rebiased = bits_of(magnitude) - (112u << 23);
  return sign | (u16)((rebiased + 0x0fff + (rebiased >> 13 & 1)) >> 13);
}

inline u16 float32_to_bfloat16(float value) {
  if (std::isnan(value)) return kNan16;
  const u32 bits = bits_of(value);
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// (8 + f) 2^(e - 10), or f 2^-9 where e is 0; all bits but the sign set are NaN.
inline float e4m3_to_float32(u8 byte) {
  const int e = byte >> 3 & 15, f = byte & 7;
  const float magnitude = (byte & 127) == 127 ? NAN : e == 0 ? f * 0x1p-9f : std::ldexp((float)(8 + f), e - 10);
  return byte & 128 ? -magnitude : magnitude;
}
// The first byte of a float16.
inline float e5m2_to_float32(u8 byte) { return float16_to_float32((u16)(byte << 8)); }

inline float element_to_float32(Element type, u16 bits) {
  switch (type) {
    case Element::kFloat16:
      return float16_to_float32(bits);
    case Element::kBFloat16:
      return bfloat16_to_float32(bits);
    case Element::kFloat8E4M3:
      return e4m3_to_float32((u8)bits);
    case Element::kFloat8E5M2:
      return e5m2_to_float32((u8)bits);
  }
  return NAN;
}

// To nearest, ties to even; what is beyond the largest number becomes that.
inline u8 float32_to_e4m3(float value) {
  constexpr u8 kLargest = 0x7e, kNan8 = 0x7f;
  if (std::isnan(value)) return kNan8;
  const u8 sign = std::signbit(value) ? 128 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude >= e4m3_to_float32(kLargest)) return sign | kLargest;
  // Of numbers near it, as an exponent: eight of them are from one power of two to the next.
  const int step = magnitude == 0 ? -9 : std::max(std::ilogb(magnitude) - 3, -9);
  return sign | (u8)((step + 9) * 8 + (int)std::nearbyint(std::ldexp(magnitude, -step)));
}

// TF32 is the first 19 bits of float32.
inline float cut_to_tf32(float value) { return float_of(bits_of(value) & 0xffffe000u); }
inline float rounded_to_tf32(float value) {
  return std::isfinite(value) ? cut_to_tf32(float_of(bits_of(value) + 0x1000u)) : value;
}

// A float64 that is not rounded to float32 but cut off after its 24 bits. NaN has no sign, as on devices.
inline float cut_to_float32(double value) {
  unsigned long long bits;
  memcpy(&bits, &value, 8);
  bits &= ~0x1fffffffull;
  double cut;
  memcpy(&cut, &bits, 8);
  return cut != cut ? std::fabs((float)cut) : (float)cut;
}
// The same after 14 bits: what products in fp8 keep of their sums (DeepSeek-V3, arXiv 2412.19437,
// 3.3.2).
inline float cut_to_14_bits(double value) { return float_of(bits_of(cut_to_float32(value)) & 0xfffffc00u); }

}  // namespace emulator
