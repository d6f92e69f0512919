// How the accumulators of dq are cleared before blocks add to them.
#pragma once
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"

// A kernel that only clears them takes as long as memory needs, while the stores cost next to nothing compared with the
// products of another kernel. So the blocks of the kernel that owns keys clear accumulators as they start. The blocks
// of a head, or of a split of a group, divide among them the accumulators of the one that comes params.clear_ahead
// later in launch order. Each of their threads then counts, and blocks wait for the count of all threads before they
// add. The kernel before clears the accumulators of the first splits.
//
// A tile that the order of tiles moves ahead would wait for blocks that start later. So from the first head on whose
// tiles move, blocks clear nothing, and the kernel before does it for them.
constexpr bool kClearsAhead = CUFLASH_CLEARS_AHEAD;
CUFLASH_DEVICE bool clears_nothing(const Params& params, u32 launch_index) {
  return kHasTileOrder && launch_index >= TileOrder::of_keys(params).first_moved_head();
}
static_assert(!kClearsAhead || kDqByReduction, "there are accumulators");

// A split of a group, and its index in launch order among those of all batch entries (find_keys). Packed sequences are
// in one batch entry.
struct GroupSplit {
  int index, batch;
};
CUFLASH_DEVICE u32 launch_index_of(const Params& params, const GroupSplit& split) {
  const int num_splits = num_group_splits_of(params), num_back = num_reversed_heads(num_splits),
            num_ahead = num_splits - num_back;
  if (kReversedOneIn == 0 || split.index < num_ahead) return split.batch * num_ahead + split.index;
  return heads_in_all(params, num_ahead) + split.batch * num_back + split.index - num_ahead;
}
CUFLASH_DEVICE GroupSplit group_split_at(const Params& params, u32 launch_index) {
  const int num_splits = num_group_splits_of(params), num_back = num_reversed_heads(num_splits),
            num_ahead = num_splits - num_back;
  const u32 num_before = heads_in_all(params, num_ahead);
  if (kReversedOneIn == 0 || launch_index < num_before)
    return {(int)(launch_index % num_ahead), (int)(launch_index / num_ahead)};
  launch_index -= num_before;
  return {num_ahead + (int)(launch_index % num_back), (int)(launch_index / num_back)};
}
CUFLASH_DEVICE u32 num_launch_indices(const Params& params) {
  return heads_in_all(params, num_group_splits_of(params));
}

// The tiles of queries of a split are consecutive: their number, and the index of the first one.
CUFLASH_DEVICE int m_tiles_of_split(const Params& params, int num_m_blocks) {
  return params.num_heads / num_group_splits_of(params) * num_m_blocks;
}
CUFLASH_DEVICE i64 first_m_tile_of(const Params& params, int num_m_blocks, const GroupSplit& split) {
  return ((i64)split.batch * num_group_splits_of(params) + split.index) * m_tiles_of_split(params, num_m_blocks);
}

// Block or warpgroup. Clears the accumulator of a tile of queries.
CUFLASH_DEVICE void clear_accumulator(const Params& params, i64 m_tile, u32 thread, u32 num_threads) {
  Bytes16* accumulator = (Bytes16*)((Real*)params.dq_accumulator + m_tile * (kBlockM * kDim));
#pragma unroll 4
  for (u32 i = thread; i < kBlockM * kDim * sizeof(Real) / 16; i += num_threads) accumulator[i] = {0, 0, 0, 0};
}

// Counts the threads that have cleared their slice of the accumulators of a split. These counters are stored after
// those of the order of dq, and after the word that says whether sequences overlap.
CUFLASH_DEVICE u32* clears_of(const Params& params, int num_m_blocks, u32 launch_index) {
  const i64 num_turns = kDqInOrder ? (i64)heads_in_all(params, params.num_heads) * num_m_blocks + kIsPacked : 0;
  return dq_order_of(params, num_m_blocks, num_turns + launch_index);
}
constexpr u32 kClearThreads = 128;  // threads of a block that clear
CUFLASH_DEVICE u32 clears_per_split(const Params& params) {
  return kClearThreads * num_tiles_of(params, params.seqlen_k, kBlockN);
}

// Block, one for each tile of queries, in the kernel before: clears the accumulators that no block clears ahead.
CUFLASH_DEVICE void clear_before(const Params& params, int num_m_blocks, i64 m_tile, u32 thread) {
  if constexpr (!kClearsAhead) {
    clear_accumulator(params, m_tile, thread, kNumThreads);
    return;
  }
  const u32 index = ptx::block_index(), tiles_of_split = m_tiles_of_split(params, num_m_blocks);
  const u32 launch_index = index / tiles_of_split;
  const u32 clear_ahead = params.clear_ahead;
  const auto is_cleared = [&](u32 split) { return split < clear_ahead || clears_nothing(params, split - clear_ahead); };
  if (is_cleared(launch_index)) {
    const i64 first = first_m_tile_of(params, num_m_blocks, group_split_at(params, launch_index));
    clear_accumulator(params, first + index % tiles_of_split, thread, kNumThreads);
  }
  if (thread == 0 && index < num_launch_indices(params))
    *clears_of(params, num_m_blocks, index) = is_cleared(index) ? clears_per_split(params) : 0;
}

// Warpgroup, one for each tile of keys: clears its slice of what the tiles of its split clear.
CUFLASH_DEVICE void clear_ahead(const Params& params, int num_m_blocks, const Work& keys, u32 thread) {
  const u32 own_index = launch_index_of(params, {keys.head, entry_of(keys.batch)});
  const u32 launch_index = own_index + params.clear_ahead;
  if (launch_index >= num_launch_indices(params) || clears_nothing(params, own_index)) return;
  const int num_n_blocks = num_tiles_of(params, params.seqlen_k, kBlockN),
            count = m_tiles_of_split(params, num_m_blocks);
  const i64 first = first_m_tile_of(params, num_m_blocks, group_split_at(params, launch_index));
  const int n_block = keys.block + (kIsPacked ? first_slot_of_keys(keys.batch, kBlockN) : 0);
  const auto slice = [&](int n_block) { return (int)((i64)count * n_block / num_n_blocks); };
#pragma unroll 1
  for (int i = slice(n_block); i < slice(n_block + 1); ++i) clear_accumulator(params, first + i, thread, kClearThreads);
  ptx::add_to_count(clears_of(params, num_m_blocks, launch_index));
}

// Thread. Waits until the accumulators of the split of these keys are cleared.
CUFLASH_DEVICE void wait_for_clears(const Params& params, int num_m_blocks, const Work& keys) {
  const u32 launch_index = launch_index_of(params, {keys.head, entry_of(keys.batch)});
  ptx::wait_for_count(clears_of(params, num_m_blocks, launch_index), clears_per_split(params));
}
