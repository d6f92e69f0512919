// A mask of pairs as around/mask_bits.cu leaves it for kernels that see it by tile: a bit a pair, in the order in which
// accumulators hold pairs, and what is visible of each block of 64 x 64 pairs.
#pragma once
#include "common/config.cuh"
#include "common/fragments.cuh"
#include "common/mask.cuh"
#include "common/params.cuh"

constexpr int kBitsBlock = 64;                            // queries, and keys, of a block
constexpr int kBitsWords = kBitsBlock * kBitsBlock / 32;  // of it
static_assert(!kMaskByBits || (kBlockM % kBitsBlock == 0 && kBlockN % kBitsBlock == 0), "tiles of whole blocks");

// The blocks of all heads that have a mask of their own; tiles at the ends of the axes are whole.
struct MaskBits {
  int m_blocks, n_blocks;
  Matrices matrices;

  CUFLASH_DEVICE explicit MaskBits(const Params& params)
      : m_blocks(ceil_div(params.seqlen_q, kBlockM) * (kBlockM / kBitsBlock)),
        n_blocks(ceil_div(params.seqlen_k, kBlockN) * (kBlockN / kBitsBlock)),
        matrices(masks_in(params)) {}

  CUFLASH_DEVICE u32 count() const { return matrices.batches * matrices.heads * m_blocks * n_blocks; }
  // Place of a block among all.
  CUFLASH_DEVICE i64 at(int batch, int head, int m_block, int n_block) const {
    return (matrices.of(batch, head) * m_blocks + m_block) * n_blocks + n_block;
  }
};

// What is visible of a tile.
CUFLASH_DEVICE Pairs pairs_of(const Params& params, const MaskBits& bits, int batch, int head, int m_block,
                              int n_block) {
  const u8* blocks = (const u8*)params.mask_blocks + bits.at(batch, head, 0, 0);
  return pairs_over<kBitsBlock, kBitsBlock>(params, m_block, n_block,
                                            [&](int i, int j) { return (Pairs)blocks[i * bits.n_blocks + j]; });
}

// What a lane holds of a row of blocks: the word of each belongs to 16 lines of the accumulator of a warp, 64 wide.
CUFLASH_DEVICE const u32* mask_words_of(const Params& params, const MaskBits& bits, int batch, int head, int m_block,
                                        int n_block) {
  const u32 thread = ptx::thread_index() % 128;
  return (const u32*)params.mask_words + bits.at(batch, head, m_block, n_block) * kBitsWords + thread;
}

// The bit of element `i` of n-tile `n` of a block.
CUFLASH_DEVICE constexpr int bit_of(int n, int i) { return n % 4 * 8 + n / 4 * 2 + i / 2 * 4 + i % 2; }

// The word of a lane, of 64 bits a line: those of the lines that it holds elements of.
CUFLASH_DEVICE u32 word_of(const u32 (&upper)[2], const u32 (&lower)[2]) {
  constexpr u32 kColumns = 0x03030303;
  const int column = fragment_column();
  return (upper[0] >> column & kColumns) | (upper[1] >> column & kColumns) << 2 | (lower[0] >> column & kColumns) << 4 |
         (lower[1] >> column & kColumns) << 6;
}
