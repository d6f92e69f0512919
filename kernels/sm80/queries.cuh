// Loads tiles of queries, of elements or of fp8, from global to shared memory.
#pragma once
#include "common/io/float8.cuh"
#include "common/io/operands.cuh"
#include "sm80/copy.cuh"
#include "sm80/fragments.cuh"

using QueryStorage = Either<kFloat8Queries, u8, Storage>::Type;

// Loads queries as `load_tile` does. One-byte queries become elements on the way, and have been stored when it returns.
template <int rows, int columns, class E = Element, class Float8 = KeyElement, class Head>
CUFLASH_DEVICE void load_queries(u32 tile, const Head& head, i64 row_stride, int first_row, int row_stop) {
  if constexpr (!kFloat8Queries) {
    load_tile<rows, columns>(tile, head, row_stride, first_row, row_stop);
  } else {
    constexpr int kPadded = round_up(columns, CUFLASH_DIM_MULTIPLE), kRow = row_bytes(kPadded);
    constexpr int kVector = max_of(kLoadBytes / kElementBytes, 2), kVectors = kPadded / kVector;
    constexpr bool kIsAligned = kLoadBytes >= 4;  // else a vector may begin at any byte
    struct alignas(kIsAligned ? kVector : 2) Vector {
      u16 pair[kVector / 2];
    };
#pragma unroll 4
    for (int i = ptx::thread_index(); i < rows * kVectors; i += kNumThreads) {
      const int row = i / kVectors, column = i % kVectors * kVector;
      const u8* source = row_of(head, row_stride, first_row + row) + column;
      const int count = first_row + row < row_stop ? columns - column : 0;
      Vector numbers = {};
      if (kIsAligned && count >= kVector) {
        numbers = *(const Vector*)source;
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          if (j < count) numbers.pair[j / 2] |= source[j] << j % 2 * 8;
      }
      const u32 target = tile + row * kRow + ((column * kElementBytes) ^ row_swizzle<kRow>(row));
#pragma unroll
      for (int j = 0; j < kVector / 2; ++j)
        ptx::store_shared_b32(target + 4 * j, to_elements(E{}, Float8{}, numbers.pair[j]));
    }
  }
}
