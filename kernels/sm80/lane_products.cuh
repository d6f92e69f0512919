// Products of fragments by the lanes' own multiply-adds, for elements that the tensor cores do not take: before compute
// capability 8.0 these are all types but float16 on 7.5. Lanes exchange the factors, a quarter of the columns of A at a
// time.
//
// The turns are loops that are not unrolled: unrolled code would be so long that compiling it takes minutes.
//
// Fragments are those of mma: with g = lane / 4 and t = lane % 4, a lane holds rows g and g + 8 of A, column g of B,
// and columns 2t and 2t + 1 of the sums. So in a turn, a lane gets its elements of A from the lane (g, turn) of its own
// group of four, and the rows of B that go with it from the lanes (2t, turn) and (2t + 1, turn).
#pragma once
#include "common/io/fragments.cuh"

template <class E>
constexpr int kArchOfProducts = 80;  // the first compute capability whose tensor cores take these elements
template <>
constexpr int kArchOfProducts<Float16> = 75;
constexpr bool kByLanes = CUFLASH_ARCH < kArchOfProducts<Element>;

CUFLASH_DEVICE double value_of_lane(double value, u32 lane) { return ptx::shuffle(value, lane); }
CUFLASH_DEVICE float value_of_lane(float value, u32 lane) {
  return ptx::float_of(ptx::shuffle(ptx::bits_of(value), lane));
}

// The lanes that have what this one needs in turn `turn` of 4: its rows of A, and the first of its two columns of B.
// The lane with the second column is 4 further on.
struct LanesOfTurn {
  u32 a, b;

  CUFLASH_DEVICE explicit LanesOfTurn(u32 turn) : a(lane_index() / 4 * 4 + turn), b(lane_index() % 4 * 8 + turn) {}
};

// d += a b, for 16 x 16 and 16 x 8 elements of 16 bits. A word has two neighbouring k.
template <class E>
CUFLASH_DEVICE void add_lane_products(E, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 b[2] = {b0, b1};
#pragma unroll 1
  for (u32 turn = 0; turn < 4; ++turn) {
    const LanesOfTurn lanes(turn);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 rows[2] = {ptx::shuffle(a[2 * i], lanes.a), ptx::shuffle(a[2 * i + 1], lanes.a)};
      const u32 columns[2] = {ptx::shuffle(b[i], lanes.b), ptx::shuffle(b[i], lanes.b + 4)};
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          d[j] += ptx::to_float32(E{}, (u16)(rows[j / 2] >> 16 * k)) *
                  ptx::to_float32(E{}, (u16)(columns[j % 2] >> 16 * k));
    }
  }
}

// The same for float32 or float64, with the n-tile `half` of a fragment of B.
template <class T>
CUFLASH_DEVICE void add_wide_lane_products(T (&d)[4], const T (&a)[kStep / 8][4], const T (&b)[kStep / 8][4],
                                           int half) {
#pragma unroll 1
  for (u32 turn = 0; turn < 4; ++turn) {
    const LanesOfTurn lanes(turn);
#pragma unroll
    for (int i = 0; i < kStep / 8; ++i)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const T rows[2] = {value_of_lane(a[i][2 * k], lanes.a), value_of_lane(a[i][2 * k + 1], lanes.a)};
        const T column = b[i][2 * half + k];
        const T columns[2] = {value_of_lane(column, lanes.b), value_of_lane(column, lanes.b + 4)};
#pragma unroll
        for (int j = 0; j < 4; ++j) d[j] += rows[j / 2] * columns[j % 2];
      }
  }
}
