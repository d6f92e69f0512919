// Indexes which tiles of keys each tile of queries attends to, or the other way round, from a block mask, a mask of
// bits, tile classes of what a mask, a function or a bias leaves of tiles, and everything else that is known of whole
// tiles. common/schedule/schedule.cuh describes the index. A warp makes a row.
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/score/mask.cuh"
#include "common/score/mask_bits.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"

constexpr bool kIndexesKeys = CUFLASH_INDEXES_KEYS;
constexpr int kAtOnce = 4;  // tiles of a lane that are looked up together
constexpr bool kIsClassified = (kHasMask && !kMaskByBits) || kHasMaskFunction;  // by helpers/mask_tiles.cu

// How many lanes of a warp say yes: those before this one, and all.
struct Count {
  int before, all;

  CUFLASH_DEVICE explicit Count(bool yes) {
    float before_this = 0, sum = yes;  // of the lanes that differ from this one in the bits below `bit` only
    for (u32 bit = 1; bit < 32; bit *= 2) {
      const float others = ptx::shuffle_xor(sum, bit);
      if (lane_index() & bit) before_this += others;
      sum += others;
    }
    before = (int)before_this;
    all = (int)sum;
  }
};

// What masks and a bias leave of the pairs of a tile.
CUFLASH_DEVICE TileClass class_of_tile(const Params& params, const BlockMask& blocks, const MaskBits& bits, int batch,
                                       int head, int m_block, int n_block) {
  TileClass left = TileClass::kFull;
  if constexpr (kMaskByBits)
    left = pairs_of(params, bits, batch, head, m_block, n_block);
  else if constexpr (kHasBlockMask)
    left = pairs_of(params, blocks, m_block, n_block);
  if constexpr (kIsClassified) left = both(left, left_by_masks(params, batch, head, m_block, n_block));
  if constexpr (kHasBiasTileClasses) left = both(left, left_by_bias(params, batch, head, m_block, n_block));
  return left;
}

struct Found {
  TileClass pairs;
  bool shown_whole;  // masks show all of the pairs, even if bounds hide some
};

// Warp. Appends the tiles of `range` that are of class `wanted` to the `num_indexed` entries of a row.
template <class Find>
CUFLASH_DEVICE void append(TileClass wanted, const TileRange& range, const Find& find, i32* row, int& num_indexed) {
  for (int own = range.start + lane_index(); own < range.stop + (int)lane_index(); own += 32 * kAtOnce) {
    Found found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) found[i] = find(own + 32 * i);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool wants = found[i].pairs == wanted;
      const Count count(wants);
      const u32 marks = (wanted == TileClass::kPartial ? IndexEntry::kNeedsMask : 0) |
                        (found[i].shown_whole ? 0 : IndexEntry::kEvaluatesMask);
      if (wants) row[kIndexHeader + num_indexed + count.before] = (i32)(own + 32 * i | marks);
      num_indexed += count.all;
    }
  }
}

CUFLASH_DEVICE void make_block_index(const Params& params) {
  const int num_m_blocks = ceil_div(params.seqlen_q, kBlockM), num_n_blocks = ceil_div(params.seqlen_k, kBlockN);
  const int num_rows = kIndexesKeys ? num_m_blocks : num_n_blocks, length = kIndexesKeys ? num_n_blocks : num_m_blocks;
  const u32 index = ptx::block_index() * kNumWarps + warp_index(), matrix = index / num_rows;
  if (matrix >= (u32)params.index_batches * params.index_heads) return;
  const int block = index % num_rows, head = matrix % params.index_heads, batch = matrix / params.index_heads;
  const int key_stop = key_stop_of(params, batch);
  const BlockMask blocks(params, batch, head);
  const MaskBits bits(params);
  const int first = block * (kIndexesKeys ? kBlockM : kBlockN);
  const int last_row = min_of(first + kBlockM, params.seqlen_q) - 1;
  const TileRange range = kIndexesKeys ? key_tiles(params, batch, first, last_row, key_stop)
                                       : query_tiles(params, batch, first, first + kBlockN - 1, key_stop);
  const auto find = [&](int other) -> Found {
    const int tile = min_of(other, range.stop - 1);
    const int m_block = kIndexesKeys ? block : tile, n_block = kIndexesKeys ? tile : block;
    const TileClass left = class_of_tile(params, blocks, bits, batch, head, m_block, n_block);
    if (other >= range.stop) return {TileClass::kEmpty, false};
    const bool full = other >= range.full_start && other < range.full_stop;
    return {left == TileClass::kFull && !full ? TileClass::kPartial : left, left == TileClass::kFull};
  };

  i32* row =
      index_row_of(params, kIndexesKeys ? params.key_index : params.query_index, batch, head, block, num_rows, length);
  int num_indexed = 0;
  append(TileClass::kFull, range, find, row, num_indexed);
  if (lane_index() == 0) row[1] = num_indexed;
  append(TileClass::kPartial, range, find, row, num_indexed);
  ptx::sync_warp();
  if (lane_index() != 0) return;
  row[0] = num_indexed;
  if (num_indexed > 0) row[kIndexHeader + num_indexed - 1] |= (i32)IndexEntry::kIsLast;
  const u32 visible = range.stop - range.start;
  if constexpr (kIsChosen) ptx::reduce_add(BiasBlocks(params).count, (u64)(visible - num_indexed) << 32 | visible);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, make_block_index)
