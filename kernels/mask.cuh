// Which pairs (query, key) are visible. See schedule.cuh for tiles that need no look at all.
#pragma once
#include "config.cuh"
#include "params.cuh"
#include "schedule.cuh"

// The block mask of one head.
struct BlockMask {
  const u8* bytes;
  i64 row_stride;
  i64 key_stride;

  CUFLASH_DEVICE BlockMask(const Params& params, int batch, int head)
      : bytes(nullptr), row_stride(params.block_mask.row_stride), key_stride(params.block_mask.key_stride) {
    if constexpr (kHasBlockMask)
      bytes = (const u8*)params.block_mask.data + batch * params.block_mask.batch_stride +
              head * params.block_mask.head_stride;
  }

  CUFLASH_DEVICE bool has(int m_block, int n_block) const { return bytes[m_block * row_stride + n_block * key_stride] != 0; }
};

// The mask of one head, asked pair by pair.
struct Mask {
  int key_stop;
  int seqlen_q;
  int right_offset;
  int left_offset;
  const u8* bytes;  // of this head
  i64 row_stride;
  i64 key_stride;
  BlockMask blocks;

  CUFLASH_DEVICE Mask(const Params& params, int batch, int head, int key_stop_)
      : key_stop(key_stop_),
        seqlen_q(params.seqlen_q),
        right_offset(right_offset_of(params, batch)),
        left_offset(left_offset_of(params, batch)),
        bytes(nullptr),
        row_stride(params.mask.row_stride),
        key_stride(params.mask.key_stride),
        blocks(params, batch, head) {
    if constexpr (kHasMask)
      bytes = (const u8*)params.mask.data + batch * params.mask.batch_stride + head * params.mask.head_stride;
  }

  CUFLASH_DEVICE bool visible(int row, int key) const {
    bool seen = key < key_stop;
    if constexpr (kHasRightBound) seen = seen && key <= row + right_offset;
    if constexpr (kHasLeftBound) seen = seen && key >= row + left_offset;
    if constexpr (kHasMask) seen = seen && row < seqlen_q && bytes[row * row_stride + key * key_stride] != 0;
    if constexpr (kHasBlockMask) seen = seen && row < seqlen_q && blocks.has(row / kMaskBlockM, key / kMaskBlockN);
    return seen;
  }
};
