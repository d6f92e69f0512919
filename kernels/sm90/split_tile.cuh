// A tile of float32 that a warpgroup brings from global memory and splits, so that wgmma finds its bfloat16 terms in
// shared memory as TMA would have brought them.
#pragma once
#include "common/config.cuh"
#include "common/io/bf16_split.cuh"
#include "common/io/operands.cuh"
#include "common/io/term_products.cuh"
#include "sm90/tiles.cuh"

// `rows` rows of a head with `columns` columns, at most 32. A thread loads vectors of eight columns, `kSlice` of them
// at a time. `begin` issues the first loads, so that other work hides their latency.
template <int rows, int columns>
struct SplitTile {
  static constexpr int kVectors = round_up(columns, CUFLASH_DIM_MULTIPLE) / 8;  // of a row
  static constexpr int kCount = ceil_div(rows * kVectors, 128), kSlice = min_of(kCount, 4);

  u32 thread;
  const float* first;  // row of the tile
  i64 row_stride;
  int num_rows;  // rows of the tile that exist; the others are zeros
  float x[kSlice][8];

  CUFLASH_DEVICE explicit SplitTile(u32 thread_) : thread(thread_) {}

  CUFLASH_DEVICE void begin(const float* head, i64 stride, int first_row, int row_stop) {
    first = head + first_row * stride, row_stride = stride, num_rows = row_stop - first_row;
    load(0);
  }
  // Writes term `i` to the tile at `tile` + i `term_stride`.
  CUFLASH_DEVICE void finish(u32 tile, u32 term_stride) {
    float rests = 0.0f;
#pragma unroll 1
    for (int from = 0; from < kCount; from += kSlice) {
      if (from > 0) load(from);
#pragma unroll
      for (int i = 0; i < kSlice; ++i) {
        if (!has(from + i)) continue;
        Bytes16 terms[kBf16Terms];
        rests += split_columns(x[i], terms, bf16_split_small);
        store(from + i, terms, tile, term_stride);
      }
    }
    if (rests - rests == 0.0f) return;
    // Some values are not finite, which is rare. All are split again, in a loop that takes few registers.
#pragma unroll 1
    for (int i = 0; has(i); ++i) {
      load_vector(i, x[0]);
      Bytes16 terms[kBf16Terms];
      split_columns(x[0], terms);
      store(i, terms, tile, term_stride);
    }
  }

 private:
  CUFLASH_DEVICE bool has(int i) const { return i * 128 + (int)thread < rows * kVectors; }
  // The rows that eight neighbouring lanes write have a distance of kVectors, so that no two lanes write to the same
  // banks: the swizzle differs in each of eight rows.
  CUFLASH_DEVICE int row_of(int i) const {
    const int row = (i * 128 + thread) / kVectors, of_eight = row % 8;
    return row - of_eight + of_eight * kVectors % 8 + of_eight * kVectors / 8;
  }
  CUFLASH_DEVICE int column_of(int i) const { return (i * 128 + thread) % kVectors * 8; }
  CUFLASH_DEVICE void load(int from) {
#pragma unroll
    for (int i = 0; i < kSlice; ++i)
      if (has(from + i)) load_vector(from + i, x[i]);
  }
  CUFLASH_DEVICE void load_vector(int i, float (&vector)[8]) const {
#pragma unroll
    for (float& value : vector) value = 0.0f;
    const int row = row_of(i), column = column_of(i);
    if (row < num_rows && column < columns) load_columns<columns>(first + row * row_stride, column, vector);
  }
  CUFLASH_DEVICE void store(int i, const Bytes16 (&terms)[kBf16Terms], u32 tile, u32 term_stride) const {
    const int row = row_of(i), column = column_of(i);
    const u32 address = tile + row * kLineBytes + (column * 2 ^ row % 8 * 16);
#pragma unroll
    for (int term = 0; term < kBf16Terms; ++term) ptx::store_shared_b128(address + term * term_stride, terms[term]);
  }
};
