// Products of a warpgroup: operands in shared memory as descriptors, and how groups of wgmma are issued and waited for.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/tiles.cuh"

// `descriptor_of` is the descriptor of an operand whose k runs along the lines. `along_k` is that of the same operand,
// which lies in a tile of `rows` rows, 16 `k` elements further along.
CUFLASH_DEVICE u64 descriptor_of(u32 tile) { return ptx::descriptor(tile, 0, 8 * kLineBytes); }
template <int rows>
CUFLASH_DEVICE u64 along_k(u64 operand, int k) {
  return operand + (k / 4 * rows * kLineBytes + k % 4 * 32) / 16;
}

// The same for an operand whose k runs down the `rows` rows.
template <int rows>
CUFLASH_DEVICE u64 descriptor_of_transposed(u32 tile) {
  return ptx::descriptor(tile, rows * kLineBytes, 8 * kLineBytes);
}
CUFLASH_DEVICE u64 along_k_transposed(u64 operand, int k) { return operand + k * 16 * kLineBytes / 16; }

// Issues the wgmma of `products`, which add to the accumulator `d` or replace it, as one group.
template <int n_tiles, class Products>
CUFLASH_DEVICE void issue(float (&d)[n_tiles][4], Products products) {
  ptx::fence_operand(d);
  ptx::wgmma_fence();
  products();
  ptx::wgmma_commit();
}

// Waits until at most `pending` groups are in flight. `d` is the accumulator of a group that is then done.
template <int pending, int n_tiles>
CUFLASH_DEVICE void wait_for(float (&d)[n_tiles][4]) {
  ptx::wgmma_wait<pending>();
  ptx::fence_operand(d);
}

// Issues d = a b' over `columns` columns, or d += a b' if it `adds`; a and b lie in tiles of rows_a and rows_b rows.
template <int columns, int rows_a, int rows_b, class E = Element, int n_tiles>
CUFLASH_DEVICE void issue_rows(float (&d)[n_tiles][4], u32 a, u32 b, bool adds = false) {
  const u64 a_rows = descriptor_of(a), b_rows = descriptor_of(b);
  issue(d, [&]() __attribute__((always_inline)) {
#pragma unroll
    for (int k = 0; k < columns / 16; ++k)
      ptx::wgmma<false, false>(E{}, d, along_k<rows_a>(a_rows, k), along_k<rows_b>(b_rows, k), adds || k > 0);
  });
}

// Issues d = a b' over `columns` columns; a is in registers, b a tile of `rows` rows.
template <int columns, int rows, int n_tiles, int count>
CUFLASH_DEVICE void issue_rows(float (&d)[n_tiles][4], const Fragment (&a)[count], u32 b) {
  const u64 b_rows = descriptor_of(b);
  issue(d, [&]() __attribute__((always_inline)) {
#pragma unroll
    for (int k = 0; k < columns / 16; ++k) ptx::wgmma<false>(Element{}, d, a[k].word, along_k<rows>(b_rows, k), k > 0);
  });
}

// Issues d += a b; a is in registers, b a tile of `rows` rows.
template <int rows, int n_tiles, class E>
CUFLASH_DEVICE void issue_weighted(float (&d)[n_tiles][4], const FragmentOf<E> (&a)[rows / 16], u32 b) {
  const u64 b_columns = descriptor_of_transposed<rows>(b);
  issue(d, [&]() __attribute__((always_inline)) {
#pragma unroll
    for (int k = 0; k < rows / 16; ++k) ptx::wgmma<true>(E{}, d, a[k].word, along_k_transposed(b_columns, k), true);
  });
}

// Issues one wgmma, d = a b or d += a b. `a` is in registers, or in shared memory with k along its lines.
template <int n_tiles>
CUFLASH_DEVICE void multiply_any(float (&d)[n_tiles][4], const Fragment& a, u64 b, bool adds) {
  ptx::wgmma<true>(Element{}, d, a.word, b, adds);
}
template <int n_tiles>
CUFLASH_DEVICE void multiply_any(float (&d)[n_tiles][4], u64 a, u64 b, bool adds) {
  ptx::wgmma<false, true>(Element{}, d, a, b, adds);
}

// Issues d = a b as one group, or d += a b if it `adds`. `a(k)` gives 16 columns, in registers or as a descriptor; b
// describes a tile of `rows` rows. One wgmma computes at most 128 columns, because more would need more registers than
// a thread of a large block starts with. The caller has issued the fences, which serve several products.
template <int rows, int n_tiles, class A>
CUFLASH_DEVICE void issue_columns(float (&d)[n_tiles][4], A a, u64 b, bool adds) {
  repeat<(n_tiles + 15) / 16>([&](auto slice) {
    constexpr int kFirst = 16 * decltype(slice)::value, kCount = n_tiles - kFirst < 16 ? n_tiles - kFirst : 16;
    auto& columns = (float (&)[kCount][4])d[kFirst];
    const u64 b_columns = b + kFirst * 8 / kChunk * (rows * kLineBytes / 16);
#pragma unroll
    for (int k = 0; k < rows / 16; ++k) multiply_any(columns, a(k), along_k_transposed(b_columns, k), adds || k > 0);
  });
  ptx::wgmma_commit();
}
