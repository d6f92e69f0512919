// A product of tiles in shared memory that a warp computes once more, alone.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "sm80/mma.cuh"
#include "sm90/tiles.cuh"

// Warp. Multiplies 16 rows by the rows of another matrix, both as TMA lays them out, with mma.sync. The loop rarely
// runs, so it is not unrolled, which would take registers.
template <int columns, int rows, int other_rows>
CUFLASH_DEVICE void multiply_again(float (&s)[1][other_rows / 8][4], u32 tile, u32 other_tile) {
  const u32 lane = lane_index(), swizzle = lane % 8 * 16;
  const u32 line = tile + lane % 16 * kLineBytes, other_line = other_tile + (lane % 8 + lane / 16 * 8) * kLineBytes;
  set_zero(s);
#pragma unroll 1
  for (int k = 0; k < columns / 16; ++k)
    multiply<1>(
        s,
        [&](int, int, Fragment& a) {
          ptx::load_matrix_x4(a.word, line + k / 4 * rows * kLineBytes + ((k % 4 * 32 + lane / 16 * 16) ^ swizzle));
        },
        [&](int n, int, Fragment& b) {
          ptx::load_matrix_x4(b.word, other_line + n * 16 * kLineBytes + k / 4 * other_rows * kLineBytes +
                                          ((k % 4 * 32 + lane / 8 % 2 * 16) ^ swizzle));
        });
}
