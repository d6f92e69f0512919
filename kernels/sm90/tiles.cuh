// Tiles in shared memory as TMA writes them and wgmma reads them. A tile is cut into chunks of 64 columns. A chunk has
// a line of 128 bytes for each row, whose 16-byte vectors are permuted by the row number (the swizzle).
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "ptx/tma.cuh"
#include "sm90/pipeline.cuh"

constexpr u32 kLineBytes = 128;
constexpr int kChunk = 64;  // columns of a line

CUFLASH_DEVICE constexpr int chunks_of(int columns) { return (columns + kChunk - 1) / kChunk; }
CUFLASH_DEVICE constexpr u32 chunked_bytes(int rows, int columns) { return chunks_of(columns) * rows * kLineBytes; }

// Loads rows [first_row, first_row + rows) of a head, from column `first_column` on. Whole chunks arrive, with zeros
// outside of the array.
template <int rows, int columns>
CUFLASH_DEVICE void load_chunks(u32 tile, const TensorMap& map, const Barrier& full, int first_row, int head, int batch,
                                int first_column = 0) {
#pragma unroll
  for (int c = 0; c < chunks_of(columns); ++c)
    ptx::load_tensor(tile + c * rows * kLineBytes, map, full.address, first_column + c * kChunk, first_row, head,
                     batch);
}

// Stores 64 rows of a tile of `rows` rows, from the row at `tile` on, as columns `first_column` and following.
template <int rows, int columns>
CUFLASH_DEVICE void store_chunks(const TensorMap& map, u32 tile, int first_row, int head, int batch,
                                 int first_column = 0) {
#pragma unroll
  for (int c = 0; c < chunks_of(columns); ++c)
    ptx::store_tensor(map, tile + c * rows * kLineBytes, first_column + c * kChunk, first_row, head, batch);
}

// The same for the first `count` of 64 rows, by the 128 threads of a warpgroup. It is called where the
// next rows belong to another sequence, and where TMA does not support the strides or the address of the array.
template <int rows, int columns>
CUFLASH_DEVICE void store_first_rows(Storage* first, i64 row_stride, u32 tile, int count, u32 thread) {
  constexpr u32 kBytes = columns * 2 % kStoreBytes == 0 ? kStoreBytes : 2;  // of one store
  constexpr u32 kVectors = columns * 2 / kBytes;
#pragma unroll 1
  for (u32 i = thread; i < count * kVectors; i += 128) {
    const u32 row = i / kVectors, byte = i % kVectors * kBytes;
    const u32 line = tile + (byte / kLineBytes * rows + row) * kLineBytes;
    const u32 source = line + (byte % kLineBytes ^ row % 8 * 16);
    Storage* destination = first + row * row_stride + byte / 2;
    if constexpr (kBytes == 16) {
      *(Bytes16*)destination = ptx::load_shared_b128(source);
    } else if constexpr (kBytes == 2) {
      *destination = ptx::load_shared_b16(source);
    } else {
#pragma unroll
      for (u32 word = 0; word < kBytes / 4; ++word) ((u32*)destination)[word] = ptx::load_shared_b32(source + word * 4);
    }
  }
}

// Loads operand `k` to registers: 16 columns of the 16 rows of a warp, which begin at row `r` of a tile of `rows` rows.
template <int rows, class Operand>
CUFLASH_DEVICE void load_fragment_chunked(u32 tile, int r, int k, Operand& operand) {
  const u32 lane = lane_index();
  const u32 line = tile + (r + lane % 16) * kLineBytes, swizzle = lane % 8 * 16;
  ptx::load_matrix_x4(operand.word, line + k / 4 * rows * kLineBytes + ((k % 4 * 32 + lane / 16 * 16) ^ swizzle));
}
// Loads all `count` operands of these rows.
template <int rows, class Operand, int count>
CUFLASH_DEVICE void load_fragments_chunked(u32 tile, int r, Operand (&operand)[count]) {
#pragma unroll
  for (int k = 0; k < count; ++k) load_fragment_chunked<rows>(tile, r, k, operand[k]);
}

// Loads the 16 columns of a chunk from `c` on, transposed. Operand k has its rows [16 k, 16 k + 16) as columns.
template <int count>
CUFLASH_DEVICE void load_fragments_chunked_transposed(u32 chunk, int c, Fragment (&operand)[count]) {
  const u32 lane = lane_index();
  const u32 line = chunk + (lane / 16 * 8 + lane % 8) * kLineBytes + ((c * 2 + lane / 8 % 2 * 16) ^ (lane % 8 * 16));
#pragma unroll
  for (int k = 0; k < count; ++k) ptx::load_matrix_x4_transposed(operand[k].word, line + k * 16 * kLineBytes);
}

// Writes zeros to the rows from `first` on; by the 128 threads of a warpgroup.
template <int rows, int columns>
CUFLASH_DEVICE void zero_rows(u32 tile, int first, u32 thread) {
  for (int c = 0; c < chunks_of(columns); ++c)
    for (u32 word = first * kLineBytes / 4 + thread; word < rows * kLineBytes / 4; word += 128)
      ptx::store_shared_b32(tile + c * rows * kLineBytes + word * 4, 0);
}

// The same for 64 rows of a tile of `rows`, in a loop that takes few registers.
template <int rows, int columns>
CUFLASH_DEVICE void zero_last_of_64(u32 tile, int first, u32 thread) {
  const float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (int c = 0; c < chunks_of(columns); ++c, tile += rows * kLineBytes)
#pragma unroll 1
    for (u32 vector = first * kLineBytes / 16 + thread; vector < 64 * kLineBytes / 16; vector += 128)
      ptx::store_shared_f32x4(tile + vector * 16, zeros);
}

// Multiplies the first 8 of the 16 rows of a warp by `upper` and the others by `lower`, rounds them, and stores them
// from row `r` of a tile of `rows` rows on.
template <int rows, int n_tiles, class E = Element>
CUFLASH_DEVICE void store_fragments_chunked(u32 tile, int r, float (&value)[n_tiles][4], float upper, float lower) {
  const u32 lane = lane_index();
  const u32 line = tile + (r + lane % 16) * kLineBytes, swizzle = lane % 8 * 16;
#pragma unroll
  for (int n = 0; n < n_tiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) value[n][i] *= i / 2 ? lower : upper;
#pragma unroll
  for (int k = 0; k < n_tiles / 2; ++k) {
    FragmentOf<E> fragment;
    to_operand(value, k, fragment);
    ptx::store_matrix_x4(line + k / 4 * rows * kLineBytes + ((k % 4 * 32 + lane / 16 * 16) ^ swizzle), fragment.word);
  }
}
