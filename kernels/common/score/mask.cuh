// Which pairs (query, key) are visible. common/schedule/schedule.cuh says which tiles are visible as a whole and need
// no test.
#pragma once
#include "common/config.cuh"
#include "common/score/functions.cuh"
#include "common/io/params.cuh"
#include "common/schedule/sequences.cuh"

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

  CUFLASH_DEVICE bool has(int m_block, int n_block) const {
    return bytes[m_block * row_stride + n_block * key_stride] != 0;
  }
};

// What is visible of a tile, or of a block.
enum class TileClass { kEmpty, kPartial, kFull };

// What is visible through two masks together, given what is visible through each.
CUFLASH_DEVICE TileClass both(TileClass a, TileClass b) {
  if (a == TileClass::kEmpty || b == TileClass::kEmpty) return TileClass::kEmpty;
  return a == TileClass::kFull ? b : TileClass::kPartial;
}

// The largest number of blocks of `block` rows (or keys) that a tile of `tile` rows (or keys) can overlap.
CUFLASH_DEVICE constexpr int most_over(int tile, int block) {
  return tile % block == 0 ? tile / block : block % tile == 0 ? 1 : (tile - 2) / block + 2;
}

// What is visible of a tile that overlaps blocks of `rows` x `keys` pairs; `of_block(i, j)` gives it for one block.
template <int rows, int keys, class OfBlock>
CUFLASH_DEVICE TileClass class_over(const Params& params, int m_block, int n_block, OfBlock of_block) {
  const int first_row = m_block * kBlockM, last_row = min_of(first_row + kBlockM, params.seqlen_q) - 1;
  const int first_key = n_block * kBlockN, last_key = min_of(first_key + kBlockN, params.seqlen_k) - 1;
  bool any = false, all = true;
  const auto look_at = [&](int i, int j) {
    const TileClass pairs = of_block(i, j);
    any = any || pairs != TileClass::kEmpty;
    all = all && pairs == TileClass::kFull;
  };
  constexpr int kRows = most_over(kBlockM, rows), kKeys = most_over(kBlockN, keys);
  if constexpr (kRows * kKeys <= 4) {
    // There are no branches, so that all loads are in flight together. Past the end, the last block is read again.
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kKeys; ++j)
        look_at(min_of(first_row / rows + i, last_row / rows), min_of(first_key / keys + j, last_key / keys));
  } else {
    for (int i = first_row / rows; i <= last_row / rows; ++i)
      for (int j = first_key / keys; j <= last_key / keys; ++j) look_at(i, j);
  }
  return all ? TileClass::kFull : any ? TileClass::kPartial : TileClass::kEmpty;
}

// What the block mask leaves of a tile.
CUFLASH_DEVICE TileClass pairs_of(const Params& params, const BlockMask& blocks, int m_block, int n_block) {
  return class_over<kMaskBlockM, kMaskBlockN>(
      params, m_block, n_block, [&](int i, int j) { return blocks.has(i, j) ? TileClass::kFull : TileClass::kEmpty; });
}

// How many batch entries and heads have matrices of their own. A matrix holds an index, bits, or tile classes.
struct Matrices {
  int batches, heads;

  // The index of the matrix of a head.
  CUFLASH_DEVICE i64 of(int batch, int head) const {
    return (batches == 1 ? 0 : (i64)batch * heads) + (heads == 1 ? 0 : head);
  }
};
CUFLASH_DEVICE Matrices indices_in(const Params& params) { return {params.index_batches, params.index_heads}; }
CUFLASH_DEVICE Matrices masks_in(const Params& params) { return {params.mask_batches, params.mask_heads}; }
CUFLASH_DEVICE Matrices biases_in(const Params& params) {
  return {params.bias.batch_stride == 0 ? 1 : params.batch, params.bias.head_stride == 0 ? 1 : params.num_heads};
}

// What is visible of a tile of a matrix, as helpers/mask_tiles.cu classified it.
CUFLASH_DEVICE TileClass class_of_tile(const Params& params, const void* classes, i64 matrix, int m_block,
                                       int n_block) {
  const i64 row = matrix * ceil_div(params.seqlen_q, kBlockM) + m_block;
  return (TileClass)((const u8*)classes)[row * ceil_div(params.seqlen_k, kBlockN) + n_block];
}
CUFLASH_DEVICE TileClass left_by_masks(const Params& params, int batch, int head, int m_block, int n_block) {
  return class_of_tile(params, params.mask_blocks, masks_in(params).of(batch, head), m_block, n_block);
}

// What a bias leaves visible: a count and tile classes of all tiles. The lower half of the count is how many tiles lie
// within bounds, the upper half how many of these are hidden.
struct BiasBlocks {
  u64* count;
  u8* classes;

  CUFLASH_DEVICE explicit BiasBlocks(const Params& params)
      : count((u64*)params.bias_blocks), classes((u8*)params.bias_blocks + sizeof(Bytes16)) {}
};
CUFLASH_DEVICE TileClass left_by_bias(const Params& params, int batch, int head, int m_block, int n_block) {
  return class_of_tile(params, BiasBlocks(params).classes, biases_in(params).of(batch, head), m_block, n_block);
}

// Whether this kernel is the one of two that is to run: one iterates over a block-sparse index of what a bias leaves,
// the other does not. Iterating over an index costs 4 to 13 % of a pass in which they hide nothing (H100, half
// precision, 4096 queries and keys), so the kernel with an index runs only if more than one in kTilesToHidden tiles is
// hidden.
constexpr u32 kTilesToHidden = 8;
CUFLASH_DEVICE bool is_chosen(const Params& params) {
  if constexpr (!kIsChosen) return true;
  const u64 count = *BiasBlocks(params).count;
  return ((u32)(count >> 32) > (u32)count / kTilesToHidden) == kHasBlockIndex;
}

// Whether only a window and the end of the keys hide pairs. Then, in tiles in front of those that the right bound cuts,
// only the left bound hides pairs.
constexpr bool kHasEdges = kHasWindow && !kLooksUpMask && !kMaskByBits && !kHasBlockMask && !kHasMaskFunction;

// The left bound of a window, tested pair by pair.
struct LeftBound {
  int left_offset;

  CUFLASH_DEVICE bool visible(int row, int key) const { return key >= row + left_offset; }
};
// Replaces Constant<true> for a tile that only the left bound cuts.
struct LeftEdge : Constant<true> {};
template <class Masked>
struct IsLeftEdge : Constant<false> {};
template <>
struct IsLeftEdge<LeftEdge> : Constant<true> {};
// The argument `masked` for the tiles with the first keys, which come before those that are visible as a whole.
using MaskedAtLeft = Either<kHasEdges, LeftEdge, Constant<true>>::Type;

// Whether the block mask shows or hides whole tiles: then no pair is looked up in it. Kernels with a block-sparse index
// compute none of the hidden ones; nor do those that read classes in its place (score_gradients.cuh).
constexpr bool kShowsWholeTiles = kHasBlockIndex && kMaskBlockM % kBlockM == 0 && kMaskBlockN % kBlockN == 0;
constexpr bool kLooksUpBlocks = kHasBlockMask && !kShowsWholeTiles;

// The mask of one head, tested pair by pair.
struct Mask {
  int key_stop;
  int seqlen_q;
  int right_offset;
  int left_offset;
  const u8* bytes;  // of this head
  i64 row_stride;
  i64 key_stride;
  BlockMask blocks;
#if CUFLASH_HAS_MASK_FUNCTION
  Functions functions;
#endif

  CUFLASH_DEVICE Mask(const Params& params, Entry batch, int head, int key_stop_)
      : Mask(params, batch, head, key_stop_, own_diagonal_of(params, batch)) {}

  CUFLASH_DEVICE Mask(const Params& params, Entry batch, int head, int key_stop_, int own_diagonal)
      : key_stop(key_stop_),
        seqlen_q(params.seqlen_q),
        right_offset(params.right_offset + own_diagonal),
        left_offset(params.left_offset + own_diagonal),
        bytes(nullptr),
        row_stride(params.mask.row_stride),
        key_stride(params.mask.key_stride),
        blocks(params, batch, head) {
#if CUFLASH_HAS_MASK_FUNCTION
    functions = Functions(params, batch, head);
#endif
    if constexpr (kLooksUpMask)
      bytes = (const u8*)params.mask.data + batch * params.mask.batch_stride + head * params.mask.head_stride;
  }

  CUFLASH_DEVICE bool visible(int row, int key) const { return within(row, key) && shows(row, key); }
  // Whether a mask_mod shows the pair. If whole tiles are tested by it separately, the compiler loads what the function
  // needs of a row, or of a key, once for all of its pairs.
  CUFLASH_DEVICE bool shows(int row, int key) const {
#if CUFLASH_HAS_MASK_FUNCTION
    return functions.shows(row, key);
#endif
    return true;
  }
  // Whether all else (bounds and masks) shows the pair.
  CUFLASH_DEVICE bool within(int row, int key) const {
    bool shown = key < key_stop;
    if constexpr (kHasRightBound) shown = shown && key <= row + right_offset;
    if constexpr (kHasLeftBound) shown = shown && key >= row + left_offset;
    if constexpr (kLooksUpMask) shown = shown && row < seqlen_q && bytes[row * row_stride + key * key_stride] != 0;
    if constexpr (kLooksUpBlocks) shown = shown && row < seqlen_q && blocks.has(row / kMaskBlockM, key / kMaskBlockN);
    return shown;
  }
};

// The whole mask except a mask_mod.
struct MaskWithoutFunction : Mask {
  using Mask::Mask;

  CUFLASH_DEVICE bool visible(int row, int key) const { return within(row, key); }
};
