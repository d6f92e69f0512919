// Copies of q, k, v and, in the backward pass, dout, which TMA can read. Their elements have two bytes:
//
//   (terms, batch, heads, seqlen, head dimension rounded up to 8)
//
// In passes with tangents, the terms of the tangent follow those of q, k and v. A block serves kBlockM rows of one head
// of one array.
#pragma once
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#if CUFLASH_TANGENTS
#include "common/io/term_products.cuh"
#endif

// Which arrays are copied, one bit each: q, k, v, dout, tq, tk and tv.
constexpr u32 kCopied = CUFLASH_COPIED;

// Calls copy(to, x, term_stride) for every eight columns `x` of the rows of this block: `to` is where they go in
// the first term, or in term `first_term`; the other terms follow at multiples of `term_stride`. Rows of k and v that
// kv_lengths hides are not read; their copies are zeros.
template <class Copy>
struct Copying {
  const Params& params;
  Copy copy;
  u32 index;  // of this block, among the blocks of this array and the ones after it

  // Copies the rows of this block if it is one of this array. Returns whether it is.
  template <bool of_keys, int columns, int first_term = 0>
  CUFLASH_DEVICE bool serve(u32 bit, const Tensor& source, void* copied) {
    if (!(kCopied & bit)) return false;
    const int num_heads = of_keys ? params.num_heads_kv : params.num_heads;
    const int seqlen = of_keys ? params.seqlen_k : params.seqlen_q;
    const u32 blocks_of_head = ceil_div(seqlen, kBlockM), heads = heads_in_all(params, num_heads);
    if (index >= blocks_of_head * heads) {
      index -= blocks_of_head * heads;
      return false;
    }
    const int head = index / blocks_of_head, batch = head / num_heads, first_row = index % blocks_of_head * kBlockM;
    int row_stop = seqlen;
    if constexpr (of_keys && !kIsPacked) row_stop = key_stop_of(params, entry_at(params, batch));
    constexpr int kWidth = round_up(columns, 8), kVectors = max_of(kWidth / 8, 1);
    const i64 head_elements = (i64)seqlen * kWidth;
    const Storage* g_head = head_of(source, batch, head % num_heads);
    u16* g_copy = (u16*)copied + head * head_elements;
    if constexpr (first_term > 0) g_copy += first_term * heads * head_elements;
#pragma unroll 4
    for (int i = ptx::thread_index(); i < kBlockM * kVectors; i += kNumThreads) {
      const int row = first_row + i / kVectors, column = i % kVectors * 8;
      if (row >= seqlen) break;
      Storage x[8] = {};
      if (row < row_stop) load_columns<columns>(g_head + row * source.row_stride, column, x);
      copy(g_copy + (i64)row * kWidth + column, x, heads * head_elements);
    }
    return true;
  }
};

template <class Copy>
CUFLASH_DEVICE void copy_rows(const Params& params, Copy copy) {
  Copying<Copy> copying = {params, copy, ptx::block_index()};
  if (copying.template serve<false, kHeadDim>(1, params.q, params.q_copy)) return;
  if (copying.template serve<true, kHeadDim>(2, params.k, params.k_copy)) return;
  if (copying.template serve<true, kHeadDimV>(4, params.v, params.v_copy)) return;
#if CUFLASH_TANGENTS
  if (copying.template serve<false, kHeadDim, kBf16Terms>(16, params.tq, params.q_copy)) return;
  if (copying.template serve<true, kHeadDim, kBf16Terms>(32, params.tk, params.k_copy)) return;
  if (copying.template serve<true, kHeadDimV, kBf16Terms>(64, params.tv, params.v_copy)) return;
#endif
  copying.template serve<false, kHeadDimV>(8, params.dout, params.dout_copy);
}
