// What a batch entry is made of: its queries and keys, and how they line up.
//
// Packed sequences (varlen) lie one after the other in the only batch entry of the arrays. cu_seqlens_q and
// cu_seqlens_k hold the first row of each sequence and the row after the last sequence. The kernels add one more
// sequence, number params.batch, which holds the remaining rows: its queries attend to no keys, and no query attends to
// its keys. Starts are clamped to the rows of the arrays, so that nothing else is accessed whatever the starts are.
#pragma once
#include "common/config.cuh"
#include "common/io/params.cuh"

// The first row of a packed sequence, where all sequences together have `total` rows; sequence params.batch + 1 starts
// at `total`. There are no branches, so that loads of several starts do not wait for each other.
CUFLASH_DEVICE int start_of(const Params& params, const void* cu_seqlens, i64 stride, int total, int sequence) {
  const int start = ((const i32*)cu_seqlens)[min_of(sequence, params.batch) * stride];
  return min_of(max_of(start, sequence > params.batch ? total : 0), sequence > 0 ? total : 0);
}

CUFLASH_DEVICE int query_start_at(const Params& params, int sequence) {
  return start_of(params, params.cu_seqlens_q, params.cu_seqlens_q_stride, params.seqlen_q, sequence);
}
CUFLASH_DEVICE int key_start_at(const Params& params, int sequence) {
  return start_of(params, params.cu_seqlens_k, params.cu_seqlens_k_stride, params.seqlen_k, sequence);
}

// A packed sequence: where its rows start along the axis of rows, and how many there are.
struct Sequence {
  int index;
  int query_start, key_start, seqlen_q, seqlen_k;

  CUFLASH_DEVICE operator int() const { return index; }
};

// Thread. The four loads do not wait for each other.
CUFLASH_DEVICE Sequence sequence_at(const Params& params, int index) {
  const int query_start = query_start_at(params, index), query_stop = query_start_at(params, index + 1);
  const int key_start = key_start_at(params, index), key_stop = key_start_at(params, index + 1);
  return {index, query_start, key_start, at_least_zero(query_stop - query_start), at_least_zero(key_stop - key_start)};
}
// Warp. The sequence that lane `lane` holds.
CUFLASH_DEVICE Sequence sequence_of_lane(const Sequence& own, u32 lane) {
  const auto of_lane = [&](int value) { return (int)ptx::shuffle((u32)value, lane); };
  return {of_lane(own.index), of_lane(own.query_start), of_lane(own.key_start), of_lane(own.seqlen_q),
          of_lane(own.seqlen_k)};
}

// A batch entry. Unless sequences are packed, its index is enough.
using Entry = Either<kIsPacked, Sequence, int>::Type;

CUFLASH_DEVICE Entry entry_at(const Params& params, int index) {
  if constexpr (kIsPacked) return sequence_at(params, index);
  return {index};
}

// Where the rows of a batch entry, or of a packed sequence, start along the axis of rows, and how many there are.
CUFLASH_DEVICE int query_start_of(int) { return 0; }
CUFLASH_DEVICE int query_start_of(const Sequence& batch) { return batch.query_start; }
CUFLASH_DEVICE int key_start_of(int) { return 0; }
CUFLASH_DEVICE int key_start_of(const Sequence& batch) { return batch.key_start; }
CUFLASH_DEVICE int seqlen_q_of(const Params& params, int) { return params.seqlen_q; }
CUFLASH_DEVICE int seqlen_q_of(const Params&, const Sequence& batch) { return batch.seqlen_q; }
CUFLASH_DEVICE int seqlen_k_of(const Params& params, int) { return params.seqlen_k; }
CUFLASH_DEVICE int seqlen_k_of(const Params&, const Sequence& batch) { return batch.seqlen_k; }
// The batch entry of the arrays in which it lies.
CUFLASH_DEVICE int entry_of(Entry batch) { return kIsPacked ? 0 : batch; }
// Whether it stands for the rows that belong to no sequence.
CUFLASH_DEVICE bool is_left_over(const Params& params, Entry batch) { return kIsPacked && batch == params.batch; }

// Keys [0, key_stop) exist: all keys, or fewer with kv_lengths.
CUFLASH_DEVICE int key_stop_of(const Params& params, Entry batch) {
  if constexpr (kIsPacked) return is_left_over(params, batch) ? 0 : seqlen_k_of(params, batch);
  if constexpr (kKvLengthsBytes == 0) return params.seqlen_k;
  i64 length;
  if constexpr (kKvLengthsBytes == 8)
    length = ((const i64*)params.kv_lengths)[batch * params.kv_lengths_stride];
  else
    length = ((const i32*)params.kv_lengths)[batch * params.kv_lengths_stride];
  return length < 0 ? 0 : length < params.seqlen_k ? (int)length : params.seqlen_k;
}
// Whether tiles of keys may hold other rows after key_stop. Their weights are 0, but 0 times their values may be NaN.
constexpr bool kHidesLastKeys = kKvLengthsBytes != 0 || kIsPacked;

// What a batch entry adds to params.diagonal, right_offset and left_offset. These fields hold for seqlen_k keys, or for
// no particular sequence.
CUFLASH_DEVICE int own_diagonal_of(const Params& params, Entry batch) {
  if constexpr (kAlignsEnds) return seqlen_k_of(params, batch) - seqlen_q_of(params, batch);
  if constexpr (kFollowsLengths) return key_stop_of(params, batch) - params.seqlen_k;
  return 0;
}
// Query i attends to keys up to i + right_offset, and from i + left_offset on.
CUFLASH_DEVICE int right_offset_of(const Params& params, Entry batch) {
  return params.right_offset + own_diagonal_of(params, batch);
}
CUFLASH_DEVICE int left_offset_of(const Params& params, Entry batch) {
  return params.left_offset + own_diagonal_of(params, batch);
}
