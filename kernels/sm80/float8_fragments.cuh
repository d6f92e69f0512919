// B operands of products, from shared tiles of fp8, which become elements on the way to registers.
//
// A lane loads two neighbouring numbers at a time. In operands stored by columns these are two k of one column. In
// operands stored by rows they belong to two columns; as with wide elements (sm80/fragments.cuh), one of the two
// n-tiles of a fragment then has the even columns of 16, the other the odd ones.
#pragma once
#include "common/io/float8.cuh"
#include "sm80/fragments.cuh"

template <int row, int warps>
struct Float8ColumnMajorB {
  u32 lane;

  CUFLASH_DEVICE explicit Float8ColumnMajorB(u32 tile, int warp = 0) {
    const u32 g = lane_index() / 4, t = lane_index() % 4;
    lane = tile + (16 * warp + g) * row + ((2 * t) ^ row_swizzle<row, false>(g));
  }

  template <class F, class E = Element, class Float8 = KeyElement>
  CUFLASH_DEVICE void operator()(int n, int k, F& b) const {
    const u32 address = along_row(lane, k * 16) + n * warps * 16 * row;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u16 pair = ptx::load_shared_b16(address + half * 8 * row + i * 8);
        if constexpr (kWide)
          to_numbers(Float8{}, pair, b.word[i][2 * half], b.word[i][2 * half + 1]);
        else
          b.word[2 * half + i] = to_elements(E{}, Float8{}, pair);
      }
  }
};

template <int row, int warps>
struct Float8RowMajorB {
  u32 lane;

  CUFLASH_DEVICE explicit Float8RowMajorB(u32 tile, int warp = 0) {
    const u32 g = lane_index() / 4, t = lane_index() % 4;
    lane = along_row(tile + 2 * t * row + ((2 * g) ^ row_swizzle<row, false>(2 * t)), warp * 16);
  }

  template <class F, class E = Element, class Float8 = KeyElement>
  CUFLASH_DEVICE void operator()(int n, int k, F& b) const {
    const u32 address = along_row(lane, n * warps * 16) + k * 16 * row;
    constexpr u32 kSwizzles = row_swizzle<row, false>(0) ^ row_swizzle<row, false>(1);  // of this row and the next
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 upper = address + i * 8 * row;
      const u16 first = ptx::load_shared_b16(upper), second = ptx::load_shared_b16((upper ^ kSwizzles) + row);
      if constexpr (kWide) {
        to_numbers(Float8{}, first, b.word[i][0], b.word[i][2]);
        to_numbers(Float8{}, second, b.word[i][1], b.word[i][3]);
      } else {
        b.word[i] = to_elements(E{}, Float8{}, (u16)((first & 0xff) | second << 8));
        b.word[2 + i] = to_elements(E{}, Float8{}, (u16)(first >> 8 | (second & 0xff00)));
      }
    }
  }
};

// The operands K and V of the forward pass, with `columns` columns of any element type.
template <int columns, int warps>
using KeysOperand = typename Either<kHasFloat8, Float8ColumnMajorB<row_bytes(columns, 1), warps>,
                                    ColumnMajorB<row_bytes(columns), warps>>::Type;
template <int columns, int warps>
using ValuesOperand = typename Either<kHasFloat8, Float8RowMajorB<row_bytes(columns, 1), warps>,
                                      RowMajorB<row_bytes(columns), warps>>::Type;
