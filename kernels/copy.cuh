// Tiles between global and shared memory, by all threads of a block.
#pragma once
#include "config.cuh"
#include "params.cuh"

// First element of head (batch, head) of an operand.
CUFLASH_DEVICE const u16* head_of(const Tensor& tensor, int batch, int head) {
  return (const u16*)tensor.data + batch * tensor.batch_stride + head * tensor.head_stride;
}

// Loads rows [first_row, first_row + rows) of a head into shared rows of row_elements(padded columns), without waiting.
// Rows at and past `row_stop` are never read and become zeros, as do the columns past the head dimension.
//
// Up to 8 neighbouring threads share a row and walk along it by constant steps, so that a thread needs one address for
// each of its rows, not for each copy: a copy holds on to its address register until it is under way, and would stall
// whoever writes the next address into it.
template <int rows, int columns>
CUFLASH_DEVICE void load_tile(u32 tile, const u16* head, i64 row_stride, int first_row, int row_stop) {
  constexpr int kPadded = round_up(columns, CUFLASH_DIM_MULTIPLE);
  constexpr int kVector = kLoadBytes / 2;
  constexpr int kVectors = kPadded / kVector;  // of a row
  constexpr int kThreadsOfRow = kVectors % 8 == 0 ? 8 : kVectors % 4 == 0 ? 4 : 2;
  constexpr int kRowsAtOnce = kNumThreads / kThreadsOfRow;
  constexpr int kRow = row_elements(kPadded);
  static_assert(kVectors % kThreadsOfRow == 0, "threads of a row get the same number of vectors");
  const int thread = ptx::thread_index();
  const int row = thread / kThreadsOfRow, column = thread % kThreadsOfRow * kVector;
  const u16* source = head + (first_row + row) * row_stride + column;
  const u32 destination = tile + row * kRow * 2 + ((column * 2) ^ row_swizzle<kRow>(row));
  static_assert(kRowsAtOnce % 8 == 0, "all rows of a thread have one swizzle");

#pragma unroll
  for (int i = 0; i < rows; i += kRowsAtOnce) {
    if (rows % kRowsAtOnce != 0 && row + i >= rows) break;
    const bool exists = row + i < row_stop - first_row;
const auto load = [&](auto step) {
      constexpr int c = decltype(step)::value * kThreadsOfRow * kVector;
      int elements = exists ? kVector : 0;
      if (c + kThreadsOfRow * kVector > columns && exists && column + c + kVector > columns)
        elements = column + c < columns ? columns - column - c : 0;
      const u32 target = along_row(destination, c * 2) + i * kRow * 2;
      if constexpr (kLoadBytes >= 4)
        ptx::copy_async<kLoadBytes, 2 * c>(target, source, elements * 2);
      else
        ptx::store_shared_b16(target, elements ? source[c] : (u16)0);
    };
    repeat<kVectors / kThreadsOfRow>(load);
    source += kRowsAtOnce * row_stride;
  }
}

// Stores a shared tile (rows of row_elements(padded columns)) to rows [first_row, row_stop) of a head.
template <int rows, int columns>
CUFLASH_DEVICE void store_tile(u32 tile, u16* head, i64 row_stride, int first_row, int row_stop) {
  constexpr int kRow = row_elements(round_up(columns, CUFLASH_DIM_MULTIPLE));
  constexpr int kVector = columns % (kStoreBytes / 2) == 0 ? kStoreBytes / 2 : 1;
  constexpr int kVectors = columns / kVector;
  constexpr int kTotal = rows * kVectors;
  const int thread = ptx::thread_index();
#pragma unroll 4
  for (int vector = thread; vector < kTotal; vector += kNumThreads) {
    const int row = vector / kVectors;
    const int column = vector % kVectors * kVector;
    if (first_row + row >= row_stop) break;
    u16* destination = head + (first_row + row) * row_stride + column;
    const u32 source = tile + row * kRow * 2 + ((column * 2) ^ row_swizzle<kRow>(row));
    if constexpr (kVector == 8) {
      *(Bytes16*)destination = ptx::load_shared_b128(source);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) destination[i] = ptx::load_shared_b16(source + 2 * i);
    }
  }
}
