// Copies tiles between global and shared memory, by all threads of a block or by some of its warps.
#pragma once
#include "common/config.cuh"
#include "common/io/pages.cuh"

// A `Head` is the address of its first row. Where rows have to be looked up one by one, it has a function row(i)
// instead, and Stored is the type of their elements.
template <class Head>
constexpr bool kIsStrided = false;
template <class T>
constexpr bool kIsStrided<const T*> = true;

template <class Head>
struct PointerOf {
  using Type = const typename Head::Stored*;
};
template <class T>
struct PointerOf<const T*> {
  using Type = const T*;
};
template <class Head>
constexpr bool kIsFloat8 = sizeof(*typename PointerOf<Head>::Type{}) == 1;  // fp8 elements

template <class Head>
CUFLASH_DEVICE auto row_of(const Head& head, i64 row_stride, int row) {
  if constexpr (kIsStrided<Head>)
    return head + row * row_stride;
  else
    return head.row(row);
}

// Loads rows [first_row, first_row + rows) of a head into shared rows of row_bytes(padded columns), without waiting.
// Rows at and past `row_stop` are never read and become zeros, as do the columns past the head dimension. `threads`
// threads, which are whole warps, take part; `thread` is this one's number among them.
//
// Up to 8 neighbouring threads share a row and go along it by constant steps, so that a thread needs one address for
// each of its rows, not for each copy: a copy holds on to its address register until it is under way, and would stall
// the instruction that writes the next address into it.
template <int rows, int columns, int threads = kNumThreads, class Head>
CUFLASH_DEVICE void load_tile(u32 tile, const Head& head, i64 row_stride, int first_row, int row_stop,
                              int thread = ptx::thread_index()) {
  constexpr int kBytes = kIsFloat8<Head> ? 1 : kElementBytes;  // of an element
  constexpr int kPadded = round_up(columns, CUFLASH_DIM_MULTIPLE);
  // At least two fp8 elements at a time, because shared memory takes two bytes.
  constexpr int kVector = kBytes == 1 ? max_of(kLoadBytes / kElementBytes, 2) : kLoadBytes / kElementBytes;
  constexpr int kVectors = kPadded / kVector;  // of a row
  constexpr int kThreadsOfRow = kVectors % 8 == 0 ? 8 : kVectors % 4 == 0 ? 4 : 2;
  constexpr int kRowsAtOnce = threads / kThreadsOfRow;
  constexpr int kRow = row_bytes(kPadded, kBytes);
  static_assert(kVectors % kThreadsOfRow == 0, "threads of a row get the same number of vectors");
  const int row = thread / kThreadsOfRow, column = thread % kThreadsOfRow * kVector;
  typename PointerOf<Head>::Type source;
  if constexpr (kIsStrided<Head>)
    source = head + (first_row + row) * row_stride + column;
  else
    source = head.anywhere();  // for rows that do not exist: nothing is read from there
  const u32 destination = tile + row * kRow + ((column * kBytes) ^ row_swizzle<kRow, (kBytes > 2)>(row));
  static_assert(kRowsAtOnce % 4 == 0, "rows of a thread differ in the bits of `i` alone");

#pragma unroll
  for (int i = 0; i < rows; i += kRowsAtOnce) {
    if (rows % kRowsAtOnce != 0 && row + i >= rows) break;
    const bool exists = row + i < row_stop - first_row;
    if constexpr (!kIsStrided<Head>) {
      if (exists) source = head.row(first_row + row + i) + column;
    }
    const auto load = [&](auto step) {
      constexpr int c = decltype(step)::value * kThreadsOfRow * kVector;
      int elements = exists ? kVector : 0;
      if (c + kThreadsOfRow * kVector > columns && exists && column + c + kVector > columns)
        elements = column + c < columns ? columns - column - c : 0;
      const u32 in_row = destination ^ row_swizzle<kRow, (kBytes > 2)>(i % 8);
      const u32 target = along_row(in_row, c * kBytes) + i * kRow;
      if constexpr (kVector * kBytes >= 4)
        ptx::copy_async<kVector * kBytes, kBytes * c>(target, source, elements * kBytes);
      else if constexpr (kBytes == 1)
        ptx::store_shared_b16(target, (elements > 0 ? source[c] : 0) | (elements > 1 ? source[c + 1] : 0) << 8);
      else
        ptx::store_shared_b16(target, elements ? source[c] : (u16)0);
    };
    repeat<kVectors / kThreadsOfRow>(load);
    if constexpr (kIsStrided<Head>) source += kRowsAtOnce * row_stride;
  }
}

// One element of a shared tile.
CUFLASH_DEVICE void load_element(u32 address, u16& value) { value = ptx::load_shared_b16(address); }
CUFLASH_DEVICE void load_element(u32 address, float& value) { ptx::load_shared(address, value); }
CUFLASH_DEVICE void load_element(u32 address, double& value) { ptx::load_shared(address, value); }

// Stores a shared tile (rows of row_bytes(padded columns)) to rows [first_row, row_stop) of a head.
template <int rows, int columns>
CUFLASH_DEVICE void store_tile(u32 tile, Storage* head, i64 row_stride, int first_row, int row_stop) {
  constexpr int kRow = row_bytes(round_up(columns, CUFLASH_DIM_MULTIPLE));
  constexpr int kVector = columns % (kStoreBytes / kElementBytes) == 0 ? kStoreBytes / kElementBytes : 1;
  constexpr int kVectors = max_of(columns / kVector, 1);
  constexpr int kTotal = columns == 0 ? 0 : rows * kVectors;
  const int thread = ptx::thread_index();
#pragma unroll 4
  for (int vector = thread; vector < kTotal; vector += kNumThreads) {
    const int row = vector / kVectors;
    const int column = vector % kVectors * kVector;
    if (first_row + row >= row_stop) break;
    Storage* destination = head + (first_row + row) * row_stride + column;
    const u32 source = tile + row * kRow + ((column * kElementBytes) ^ row_swizzle<kRow>(row));
    if constexpr (kVector * kElementBytes == 16) {
      *(Bytes16*)destination = ptx::load_shared_b128(source);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) load_element(source + kElementBytes * i, destination[i]);
    }
  }
}
