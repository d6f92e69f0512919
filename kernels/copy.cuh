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
template <int rows, int columns>
CUFLASH_DEVICE void load_tile(u32 tile, const u16* head, i64 row_stride, int first_row, int row_stop) {
  constexpr int kPadded = round_up(columns, CUFLASH_DIM_MULTIPLE);
  constexpr int kVector = kLoadBytes / 2;
  constexpr int kVectors = kPadded / kVector;  // of a row
  const int thread = ptx::thread_index();

  const auto load = [&](u32 destination, const u16* source, int column, bool exists) {
    int elements = exists ? kVector : 0;
    if (columns != kPadded && exists && column + kVector > columns) elements = column < columns ? columns - column : 0;
    if constexpr (kLoadBytes >= 4)
      ptx::copy_async<kLoadBytes>(destination, source, elements * 2);
    else
      ptx::store_shared_b16(destination, elements ? *source : (u16)0);
  };
  if constexpr (kNumThreads % kVectors == 0 && rows % (kNumThreads / kVectors) == 0) {
    // A thread keeps its column; the pointer runs down the rows, so that no address lives longer than its copy.
    constexpr int kRowsAtOnce = kNumThreads / kVectors;
    const int row = thread / kVectors, column = thread % kVectors * kVector;
    const u16* source = head + (first_row + row) * row_stride + column;
    const u32 destination = tile + (row * row_elements(kPadded) + column) * 2;
#pragma unroll
    for (int i = 0; i < rows / kRowsAtOnce; ++i) {
      const u32 offset = i * kRowsAtOnce * row_elements(kPadded) * 2;
      load(destination + offset, source, column, row + i * kRowsAtOnce < row_stop - first_row);
      source += kRowsAtOnce * row_stride;
    }
  } else {
    for (int vector = thread; vector < rows * kVectors; vector += kNumThreads) {
      const int row = vector / kVectors, column = vector % kVectors * kVector;
      load(tile + (row * row_elements(kPadded) + column) * 2, head + (first_row + row) * row_stride + column, column,
           first_row + row < row_stop);
    }
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
    const u32 source = tile + (row * kRow + column) * 2;
    if constexpr (kVector == 8) {
      *(Bytes16*)destination = ptx::load_shared_b128(source);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) destination[i] = ptx::load_shared_b16(source + 2 * i);
    }
  }
}

// Rounds an accumulator tile, times `factor` of its row, into a shared tile with rows of `row` elements.
template <int row, int m_tiles, int n_tiles, class Factor>
CUFLASH_DEVICE void store_fragments(u32 tile, const float (&value)[m_tiles][n_tiles][4], Factor factor) {
  const u32 lane = ptx::thread_index() % 32;
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float f = factor(m, half);
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        const u32 offset = ((16 * m + 8 * half + lane / 4) * row + 8 * n + 2 * (lane % 4)) * 2;
        ptx::store_shared_b32(tile + offset, ptx::pack(Element{}, value[m][n][2 * half] * f, value[m][n][2 * half + 1] * f));
      }
    }
}
