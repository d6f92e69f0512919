// A mask of pairs as helpers/mask_bits.cu writes it for kernels that read it by tile: one bit per pair, in the order in
// which accumulators hold pairs, and for each block of 64 x 64 pairs whether all, some or none are visible.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/score/mask.cuh"
#include "common/io/params.cuh"

constexpr int kBitsBlock = 64;                            // queries, and keys, of a block
constexpr int kBitsWords = kBitsBlock * kBitsBlock / 32;  // words of a block
static_assert(!kMaskByBits || (kBlockM % kBitsBlock == 0 && kBlockN % kBitsBlock == 0), "tiles of whole blocks");

// The blocks of all heads that have a mask of their own. They cover whole tiles at the ends of the axes, too.
struct MaskBits {
  int m_blocks, n_blocks;
  Matrices matrices;

  CUFLASH_DEVICE explicit MaskBits(const Params& params)
      : m_blocks(ceil_div(params.seqlen_q, kBlockM) * (kBlockM / kBitsBlock)),
        n_blocks(ceil_div(params.seqlen_k, kBlockN) * (kBlockN / kBitsBlock)),
        matrices(masks_in(params)) {}

  CUFLASH_DEVICE u32 count() const { return matrices.batches * matrices.heads * m_blocks * n_blocks; }
  // The index of a block among all blocks.
  CUFLASH_DEVICE i64 at(int batch, int head, int m_block, int n_block) const {
    return (matrices.of(batch, head) * m_blocks + m_block) * n_blocks + n_block;
  }
};

// What is visible of a tile.
CUFLASH_DEVICE TileClass pairs_of(const Params& params, const MaskBits& bits, int batch, int head, int m_block,
                                  int n_block) {
  const u8* blocks = (const u8*)params.mask_blocks + bits.at(batch, head, 0, 0);
  return class_over<kBitsBlock, kBitsBlock>(params, m_block, n_block,
                                            [&](int i, int j) { return (TileClass)blocks[i * bits.n_blocks + j]; });
}

// Where the words of a lane lie in a row of blocks. It has one word per block, for its elements of the 16 lines, 64
// wide, of the accumulator of its warp.
CUFLASH_DEVICE const u32* mask_words_of(const Params& params, const MaskBits& bits, int batch, int head, int m_block,
                                        int n_block) {
  const u32 thread = ptx::thread_index() % 128;
  return (const u32*)params.mask_words + bits.at(batch, head, m_block, n_block) * kBitsWords + thread;
}

// The bit of element `i` of n-tile `n` of a block.
CUFLASH_DEVICE constexpr int bit_of(int n, int i) { return n % 4 * 8 + n / 4 * 2 + i / 2 * 4 + i % 2; }

// Makes the word of a lane from the 64 bits of each of the two lines of which it holds elements.
CUFLASH_DEVICE u32 word_of(const u32 (&upper)[2], const u32 (&lower)[2]) {
  constexpr u32 kColumns = 0x03030303;
  const int column = fragment_column();
  return (upper[0] >> column & kColumns) | (upper[1] >> column & kColumns) << 2 | (lower[0] >> column & kColumns) << 4 |
         (lower[1] >> column & kColumns) << 6;
}
