// Lists which tiles of keys each tile of queries attends to, or the other way round, from a block mask, a mask of bits,
// tile classes of what a mask, a function or a bias leaves of tiles, and everything else that is known of whole tiles.
// common/schedule/schedule.cuh describes the lists. A warp makes a list.
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/score/mask.cuh"
#include "common/score/mask_bits.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"

constexpr bool kListsKeys = CUFLASH_LISTS_KEYS;
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

CUFLASH_DEVICE void block_lists(const Params& params) {
  const int num_m_blocks = ceil_div(params.seqlen_q, kBlockM), num_n_blocks = ceil_div(params.seqlen_k, kBlockN);
  const int num_lists = kListsKeys ? num_m_blocks : num_n_blocks, length = kListsKeys ? num_n_blocks : num_m_blocks;
  const u32 index = ptx::block_index() * kNumWarps + warp_index(), matrix = index / num_lists;
  if (matrix >= (u32)params.list_batches * params.list_heads) return;
  const int block = index % num_lists, head = matrix % params.list_heads, batch = matrix / params.list_heads;
  const int key_stop = key_stop_of(params, batch);
  const BlockMask blocks(params, batch, head);
  const MaskBits bits(params);
  const int first = block * (kListsKeys ? kBlockM : kBlockN);
  const int last_row = min_of(first + kBlockM, params.seqlen_q) - 1;
  const TileRange range = kListsKeys ? key_tiles(params, batch, first, last_row, key_stop)
                                     : query_tiles(params, batch, first, first + kBlockN - 1, key_stop);
  struct Found {
    TileClass pairs;
    bool shown_whole;  // masks show all of its pairs, even if bounds hide some
  };
  const auto pairs_with = [&](int other) -> Found {
    const int tile = min_of(other, range.stop - 1);
    const int m_block = kListsKeys ? block : tile, n_block = kListsKeys ? tile : block;
    TileClass left = TileClass::kFull;
    if constexpr (kMaskByBits)
      left = pairs_of(params, bits, batch, head, m_block, n_block);
    else if constexpr (kHasBlockMask)
      left = pairs_of(params, blocks, m_block, n_block);
    if constexpr (kIsClassified) left = both(left, left_by_masks(params, batch, head, m_block, n_block));
    if constexpr (kHasBiasTileClasses) left = both(left, left_by_bias(params, batch, head, m_block, n_block));
    if (other >= range.stop) return {TileClass::kEmpty, false};
    const bool full = other >= range.full_start && other < range.full_stop;
    return {left == TileClass::kFull && !full ? TileClass::kPartial : left, left == TileClass::kFull};
  };

  i32* list =
      list_of(params, kListsKeys ? params.key_lists : params.query_lists, batch, head, block, num_lists, length);
  int listed = 0;
  const auto add_those_with = [&](TileClass wanted) {
    for (int own = range.start + lane_index(); own < range.stop + (int)lane_index(); own += 32 * kAtOnce) {
      Found found[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) found[i] = pairs_with(own + 32 * i);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool wants = found[i].pairs == wanted;
        const Count count(wants);
        const u32 marks = (wanted == TileClass::kPartial ? ListEntry::kNeedsMask : 0) |
                          (found[i].shown_whole ? 0 : ListEntry::kAsksFunction);
        if (wants) list[kListHeader + listed + count.before] = (i32)(own + 32 * i | marks);
        listed += count.all;
      }
    }
  };
  add_those_with(TileClass::kFull);
  if (lane_index() == 0) list[1] = listed;
  add_those_with(TileClass::kPartial);
  ptx::sync_warp();
  if (lane_index() != 0) return;
  list[0] = listed;
  if (listed > 0) list[kListHeader + listed - 1] |= (i32)ListEntry::kIsLast;
  const u32 visible = range.stop - range.start;
  if constexpr (kIsChosen) ptx::reduce_add(BiasBlocks(params).count, (u64)(visible - listed) << 32 | visible);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, block_lists)
