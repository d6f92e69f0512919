// Arithmetic and conversions of one thread, under the same rules as ptx/base.cuh, which includes this.
#pragma once

namespace ptx {

// Thread. ex2.approx.ftz (9.7.3.21): 2^x to 2 ulp; results under 2^-126 are 0, 2^-inf is 0.
CUFLASH_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Thread. rcp.approx.ftz (9.7.3.16): 1 / x to 1 ulp; of the infinities 0.
CUFLASH_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Thread. fma.rn.sat.ftz (9.7.3.6): a * b + c within [0, 1]; 0 for NaN.
CUFLASH_DEVICE float fma_saturated(float a, float b, float c) {
  float y;
  asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
}
// Thread. sqrt.approx.ftz (9.7.3.17): the square root to 1 ulp.
CUFLASH_DEVICE float sqrt_approx(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Thread. lg2.approx (9.7.3.20): log2(x) to an absolute error of 2^-22 near 1, else 2 ulp.
CUFLASH_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Thread. lg2.approx.ftz (9.7.3.20): the same of a number that is not denormal, by one instruction.
CUFLASH_DEVICE float log2_of_normal(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Thread. cvt.rmi (9.7.9.22): the largest integer that is not above `x`, within 32 bits; 0 for a NaN.
CUFLASH_DEVICE int floor_to_int(float x) { return __float2int_rd(x); }
// Thread. mul.rm (9.7.3.4): the largest integer that is not above `x`; infinities and NaN stay. A product with 2^-149,
// the least positive float32, is a multiple of it, so that rounding makes an integer of `x`. Conversions to integers
// share the unit of the exponentials, products do not.
CUFLASH_DEVICE float floor_to_float(float x) {
  float y;
  asm("mul.rm.f32 %0, %1, 0f00000001;" : "=f"(y) : "f"(x));
  return y * 0x1p127f * 0x1p22f;
}
// Thread. mul.rn (9.7.3.4): the rounded product, never fused into a sum.
CUFLASH_DEVICE float multiply(float x, float y) {
  float z;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
CUFLASH_DEVICE double multiply(double x, double y) {
  double z;
  asm("mul.rn.f64 %0, %1, %2;" : "=d"(z) : "d"(x), "d"(y));
  return z;
}
// Thread. fma.rn (9.7.3.6): a * b + c, rounded once.
CUFLASH_DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
CUFLASH_DEVICE double fused(double a, double b, double c) { return __fma_rn(a, b, c); }
// Thread. min.xorsign.abs (9.7.3.11): `x`, or where its magnitude is more, or it is a NaN, `most` with a sign: that of
// `x`, which of a NaN may be either. Before sm_86, two instructions.
CUFLASH_DEVICE float limit_magnitude(float x, float most) {
#if CUFLASH_ARCH >= 86
  float y;
  asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(most));
  return y;
#else
  return fmaxf(fminf(x, most), -most);
#endif
}
// Thread. max.u16x2 (9.7.1.15) and setp.eq (9.7.6.2), one instruction on sm_90: whether halves of a are at least b's.
CUFLASH_DEVICE void at_least_u16x2(u32 a, u32 b, u32& low, u32& high) {
#if CUFLASH_ARCH >= 90
  asm("{\n.reg .pred p, q;\n.reg .b32 most;\n.reg .u16 l, h, ll, hh;\nmax.u16x2 most, %2, %3;\n"
      "mov.b32 {l, h}, most;\nmov.b32 {ll, hh}, %2;\nsetp.eq.u16 p, l, ll;\nsetp.eq.u16 q, h, hh;\n"
      "selp.b32 %0, 1, 0, p;\nselp.b32 %1, 1, 0, q;\n}" : "=r"(low), "=r"(high) : "r"(a), "r"(b));
#else
  low = a << 16 >= b << 16, high = a >= (b & 0xffff0000u);
#endif
}
// Thread. cvt.rn (9.7.9.22): two float32 rounded to nearest even; `low` lands in the low half. Before sm_80, one by
// one, bfloat16 by integers: half a unit, but for ties to even, is added to what is cut off. A NaN becomes the
// canonical one.
CUFLASH_DEVICE u32 pack(Float16, float low, float high) {
  u32 bits;
#if CUFLASH_ARCH >= 80
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
  asm("{\n.reg .b16 low, high;\ncvt.rn.f16.f32 low, %1;\ncvt.rn.f16.f32 high, %2;\nmov.b32 %0, {low, high};\n}"
      : "=r"(bits)
      : "f"(low), "f"(high));
#endif
  return bits;
}
CUFLASH_DEVICE u32 pack(BFloat16, float low, float high) {
  u32 bits;
#if CUFLASH_ARCH >= 80
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
  const auto rounded = [](float x) {
    const u32 whole = __float_as_uint(x);
    return x != x ? 0x7fffu : (whole + 0x7fffu + (whole >> 16 & 1)) >> 16;
  };
  bits = rounded(low) | rounded(high) << 16;
#endif
  return bits;
}
// Thread. cvt (9.7.9.22): one 16-bit element as float32, exactly.
CUFLASH_DEVICE float to_float32(Float16, u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
CUFLASH_DEVICE float to_float32(BFloat16, u16 bits) { return __uint_as_float((u32)bits << 16); }
#if __CUDA_ARCH__ >= 890
// Thread. cvt.rn.f16x2 (9.7.9.22): two fp8 numbers as float16, exactly. From compute capability 8.9 on.
CUFLASH_DEVICE u32 to_float16x2(Float8E4M3, u16 pair) {
  u32 bits;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(bits) : "h"(pair));
  return bits;
}
CUFLASH_DEVICE u32 to_float16x2(Float8E5M2, u16 pair) {
  u32 bits;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(bits) : "h"(pair));
  return bits;
}
// Thread. The same of four numbers, of which the assembler takes halves as they are.
CUFLASH_DEVICE void to_float16x4(Float8E4M3, u32 bytes, u32& low, u32& high) {
  asm("{\n.reg .b16 first, second;\nmov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\ncvt.rn.f16x2.e4m3x2 %1, second;\n}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}
CUFLASH_DEVICE void to_float16x4(Float8E5M2, u32 bytes, u32& low, u32& high) {
  asm("{\n.reg .b16 first, second;\nmov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e5m2x2 %0, first;\ncvt.rn.f16x2.e5m2x2 %1, second;\n}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
}
// Thread. cvt.rn.satfinite (9.7.9.22): two float32 as fp8 numbers, `low` in the lower one; the largest number
// stands for what is beyond it.
CUFLASH_DEVICE u16 to_float8x2(Float8E4M3, float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
// Thread. The same of two float16.
CUFLASH_DEVICE u16 to_float8x2(Float8E4M3, u32 halves) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(pair) : "r"(halves));
  return pair;
}
#endif
#if __CUDA_ARCH__ >= 900
// Thread. add, min.relu (9.7.1.1, 9.7.1.14): x + y, which wraps, but at most `largest` and at least 0; one instruction.
CUFLASH_DEVICE int clamped_sum(int x, int y, int largest) {
  int sum;
  asm("{\n.reg .s32 whole;\nadd.s32 whole, %1, %2;\nmin.relu.s32 %0, whole, %3;\n}"
      : "=r"(sum)
      : "r"(x), "r"(y), "r"(largest));
  return sum;
}
#endif
// Thread. prmt (9.7.9.7): the bytes of `low` and `high`, numbers 0 to 3 and 4 to 7, that the digits of `selector` name,
// the last digit that of the lowest byte.
CUFLASH_DEVICE u32 permute_bytes(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }
// Thread. mul.rn.f16x2 (9.7.4.3): two products of float16; subnormal numbers count.
CUFLASH_DEVICE u32 multiply_f16x2(u32 x, u32 y) {
  u32 z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
// Thread. cvt.rna.tf32 (9.7.9.22): to nearest, ties away from zero.
CUFLASH_DEVICE float round_to_tf32(float x) {
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}
// Thread. clz (9.7.1.19): how many bits are 0 above the highest one that is 1; 32 of 0.
CUFLASH_DEVICE u32 leading_zeros(u32 bits) { return __clz(bits); }
// Thread. popc (9.7.1.18): how many bits are 1.
CUFLASH_DEVICE u32 population_count(u32 bits) { return __popc(bits); }
// Thread. mov.b32 and mov.b64 (9.7.9.2): bits as they are.
CUFLASH_DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
CUFLASH_DEVICE u64 bits_of(double x) { return (u64)__double_as_longlong(x); }
CUFLASH_DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
CUFLASH_DEVICE double double_of(u64 bits) { return __longlong_as_double((i64)bits); }
CUFLASH_DEVICE float infinity() { return __int_as_float(0x7f800000); }

}  // namespace ptx
