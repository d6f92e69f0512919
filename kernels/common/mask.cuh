// Which pairs (query, key) are visible. See common/schedule.cuh for tiles that need no look at all.
#pragma once
#include "common/config.cuh"
#include "common/functions.cuh"
#include "common/params.cuh"
#include "common/sequences.cuh"

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
enum class Pairs { kNone, kSome, kAll };

// What two masks leave, of which each leaves so much.
CUFLASH_DEVICE Pairs both(Pairs a, Pairs b) {
  if (a == Pairs::kNone || b == Pairs::kNone) return Pairs::kNone;
  return a == Pairs::kAll ? b : Pairs::kSome;
}

// The most blocks, of so many rows or keys, that a tile lies over.
CUFLASH_DEVICE constexpr int most_over(int tile, int block) {
  return tile % block == 0 ? tile / block : block % tile == 0 ? 1 : (tile - 2) / block + 2;
}

// What is visible of a tile that lies over blocks of so many rows and keys; `of_block(i, j)` says it of a block.
template <int rows, int keys, class OfBlock>
CUFLASH_DEVICE Pairs pairs_over(const Params& params, int m_block, int n_block, OfBlock of_block) {
  const int first_row = m_block * kBlockM, last_row = min_of(first_row + kBlockM, params.seqlen_q) - 1;
  const int first_key = n_block * kBlockN, last_key = min_of(first_key + kBlockN, params.seqlen_k) - 1;
  bool any = false, all = true;
  const auto look_at = [&](int i, int j) {
    const Pairs pairs = of_block(i, j);
    any = any || pairs != Pairs::kNone;
    all = all && pairs == Pairs::kAll;
  };
  constexpr int kRows = most_over(kBlockM, rows), kKeys = most_over(kBlockN, keys);
  if constexpr (kRows * kKeys <= 4) {
    // Without branches, so that looks at all of them are on their way together; the last block is looked at again.
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kKeys; ++j)
        look_at(min_of(first_row / rows + i, last_row / rows), min_of(first_key / keys + j, last_key / keys));
  } else {
    for (int i = first_row / rows; i <= last_row / rows; ++i)
      for (int j = first_key / keys; j <= last_key / keys; ++j) look_at(i, j);
  }
  return all ? Pairs::kAll : any ? Pairs::kSome : Pairs::kNone;
}

// What the block mask leaves of a tile.
CUFLASH_DEVICE Pairs pairs_of(const Params& params, const BlockMask& blocks, int m_block, int n_block) {
  return pairs_over<kMaskBlockM, kMaskBlockN>(
      params, m_block, n_block, [&](int i, int j) { return blocks.has(i, j) ? Pairs::kAll : Pairs::kNone; });
}

// How many batch entries and heads have matrices of their own: of lists, of bits, or of notes of tiles.
struct Matrices {
  int batches, heads;

  // Which one a head has.
  CUFLASH_DEVICE i64 of(int batch, int head) const {
    return (batches == 1 ? 0 : (i64)batch * heads) + (heads == 1 ? 0 : head);
  }
};
CUFLASH_DEVICE Matrices lists_in(const Params& params) { return {params.list_batches, params.list_heads}; }
CUFLASH_DEVICE Matrices masks_in(const Params& params) { return {params.mask_batches, params.mask_heads}; }
CUFLASH_DEVICE Matrices biases_in(const Params& params) {
  return {params.bias.batch_stride == 0 ? 1 : params.batch, params.bias.head_stride == 0 ? 1 : params.num_heads};
}

// What around/mask_tiles.cu found of a tile of a matrix.
CUFLASH_DEVICE Pairs pairs_noted(const Params& params, const void* notes, i64 matrix, int m_block, int n_block) {
  const i64 row = matrix * ceil_div(params.seqlen_q, kBlockM) + m_block;
  return (Pairs)((const u8*)notes)[row * ceil_div(params.seqlen_k, kBlockN) + n_block];
}
CUFLASH_DEVICE Pairs left_by_masks(const Params& params, int batch, int head, int m_block, int n_block) {
  return pairs_noted(params, params.mask_blocks, masks_in(params).of(batch, head), m_block, n_block);
}

// What a bias leaves: how many tiles there are within bounds, in the lower half of a number, and how many of these are
// hidden, in the upper half; and notes of all tiles.
struct BiasBlocks {
  u64* count;
  u8* notes;

  CUFLASH_DEVICE explicit BiasBlocks(const Params& params)
      : count((u64*)params.bias_blocks), notes((u8*)params.bias_blocks + sizeof(Bytes16)) {}
};
CUFLASH_DEVICE Pairs left_by_bias(const Params& params, int batch, int head, int m_block, int n_block) {
  return pairs_noted(params, BiasBlocks(params).notes, biases_in(params).of(batch, head), m_block, n_block);
}

// Whether a kernel is to run, of two that differ in that one has lists of what a bias leaves. To walk over lists takes 4
// to 13 % of a pass on an H100 that hides nothing by them (16-bit types, 4096 queries and keys): the kernel that has
// them runs where more than one in so many tiles is hidden.
constexpr u32 kTilesToHidden = 8;
CUFLASH_DEVICE bool is_chosen(const Params& params) {
  if constexpr (!kIsChosen) return true;
  const u64 count = *BiasBlocks(params).count;
  return ((u32)(count >> 32) > (u32)count / kTilesToHidden) == kHasLists;
}

// Whether nothing hides pairs but a window and the end of the keys. Then in tiles in front of those that the right bound
// cuts the left bound is all that hides any.
constexpr bool kHasEdges = kHasWindow && !kLooksUpMask && !kMaskByBits && !kHasBlockMask && !kHasMaskFunction;

// The left bound of a window, asked pair by pair.
struct LeftBound {
  int left_offset;

  CUFLASH_DEVICE bool visible(int row, int key) const { return key >= row + left_offset; }
};
// In the place of Constant<true> for a tile that it alone cuts.
struct LeftEdge : Constant<true> {};
template <class Masked>
struct IsLeftEdge : Constant<false> {};
template <>
struct IsLeftEdge<LeftEdge> : Constant<true> {};
// What tells of a tile in front of those that have every pair visible.
using InFront = Either<kHasEdges, LeftEdge, Constant<true>>::Type;

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
  // Whether a function shows the pair. Asked apart from all else, of whole tiles, the compiler reads what the function
  // needs of a row, or of a key, once for all pairs of it; that takes registers.
  CUFLASH_DEVICE bool shows(int row, int key) const {
#if CUFLASH_HAS_MASK_FUNCTION
    return functions.shows(row, key);
#endif
    return true;
  }
  // Whether all else does.
  CUFLASH_DEVICE bool within(int row, int key) const {
    bool seen = key < key_stop;
    if constexpr (kHasRightBound) seen = seen && key <= row + right_offset;
    if constexpr (kHasLeftBound) seen = seen && key >= row + left_offset;
    if constexpr (kLooksUpMask) seen = seen && row < seqlen_q && bytes[row * row_stride + key * key_stride] != 0;
    if constexpr (kHasBlockMask) seen = seen && row < seqlen_q && blocks.has(row / kMaskBlockM, key / kMaskBlockN);
    return seen;
  }
};

// All of it but a function of the caller.
struct MaskWithoutFunction : Mask {
  using Mask::Mask;

  CUFLASH_DEVICE bool visible(int row, int key) const { return within(row, key); }
};
