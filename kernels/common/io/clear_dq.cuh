// How the accumulators of dq are cleared before blocks add to them.
#pragma once
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"

// A kernel that only clears them takes as long as memory needs, while the stores cost next to nothing compared with the
// products of another kernel. So the blocks of the kernel that owns keys clear accumulators as they start. The blocks
// of a head, or of a part of a group, share the accumulators of the head that comes params.clear_ahead places later in
// launch order. Each of their threads then counts, and blocks wait for the count of all threads before they add. The
// kernel before clears the accumulators of the first places.
constexpr bool kClearsAhead = CUFLASH_CLEARS_AHEAD;
static_assert(!kClearsAhead || kDqByReduction, "there are accumulators");

// A part, and its place in launch order among the parts of all batch entries (find_keys). Packed sequences are in one
// batch entry.
struct Part {
  int index, batch;
};
CUFLASH_DEVICE u32 place_of(const Params& params, const Part& part) {
  const int num_parts = num_parts_of(params), num_back = num_heads_back(num_parts), num_ahead = num_parts - num_back;
  if (kBackShare == 0 || part.index < num_ahead) return part.batch * num_ahead + part.index;
  return heads_in_all(params, num_ahead) + part.batch * num_back + part.index - num_ahead;
}
CUFLASH_DEVICE Part part_at(const Params& params, u32 place) {
  const int num_parts = num_parts_of(params), num_back = num_heads_back(num_parts), num_ahead = num_parts - num_back;
  const u32 num_before = heads_in_all(params, num_ahead);
  if (kBackShare == 0 || place < num_before) return {(int)(place % num_ahead), (int)(place / num_ahead)};
  place -= num_before;
  return {num_ahead + (int)(place % num_back), (int)(place / num_back)};
}
CUFLASH_DEVICE u32 num_places(const Params& params) { return heads_in_all(params, num_parts_of(params)); }

// The tiles of queries of a part are consecutive: their number, and the index of the first one.
CUFLASH_DEVICE int m_tiles_of_part(const Params& params, int num_m_blocks) {
  return params.num_heads / num_parts_of(params) * num_m_blocks;
}
CUFLASH_DEVICE i64 first_m_tile_of(const Params& params, int num_m_blocks, const Part& part) {
  return ((i64)part.batch * num_parts_of(params) + part.index) * m_tiles_of_part(params, num_m_blocks);
}

// Block or warpgroup. Clears the accumulator of a tile of queries.
CUFLASH_DEVICE void clear_accumulator(const Params& params, i64 m_tile, u32 thread, u32 num_threads) {
  Bytes16* accumulator = (Bytes16*)((Real*)params.dq_accumulator + m_tile * (kBlockM * kDim));
#pragma unroll 4
  for (u32 i = thread; i < kBlockM * kDim * sizeof(Real) / 16; i += num_threads) accumulator[i] = {0, 0, 0, 0};
}

// Counts the threads that have cleared their share of the accumulators of a place. These counters are stored after
// those of the order of dq, and after the word that says whether sequences overlap.
CUFLASH_DEVICE u32* clears_of(const Params& params, int num_m_blocks, u32 place) {
  const i64 num_turns = kDqInOrder ? (i64)heads_in_all(params, params.num_heads) * num_m_blocks + kIsPacked : 0;
  return dq_order_of(params, num_m_blocks, num_turns + place);
}
constexpr u32 kClearThreads = 128;  // threads of a block that clear
CUFLASH_DEVICE u32 clears_of_place(const Params& params) {
  return kClearThreads * num_tiles_of(params, params.seqlen_k, kBlockN);
}

// Block, one for each tile of queries, in the kernel before: clears the accumulators of the first places.
CUFLASH_DEVICE void clear_before(const Params& params, int num_m_blocks, i64 m_tile, u32 thread) {
  if constexpr (!kClearsAhead) {
    clear_accumulator(params, m_tile, thread, kNumThreads);
    return;
  }
  const u32 index = ptx::block_index(), tiles_of_part = m_tiles_of_part(params, num_m_blocks);
  const u32 place = index / tiles_of_part, num_before = params.clear_ahead;
  if (place < num_before) {
    const i64 first = first_m_tile_of(params, num_m_blocks, part_at(params, place));
    clear_accumulator(params, first + index % tiles_of_part, thread, kNumThreads);
  }
  if (thread == 0 && index < num_places(params))
    *clears_of(params, num_m_blocks, index) = index < num_before ? clears_of_place(params) : 0;
}

// Warpgroup, one for each tile of keys: clears its share of what the tiles of its place clear.
CUFLASH_DEVICE void clear_ahead(const Params& params, int num_m_blocks, const Work& keys, u32 thread) {
  const u32 place = place_of(params, {keys.head, entry_of(keys.batch)}) + params.clear_ahead;
  if (place >= num_places(params)) return;
  const int num_n_blocks = num_tiles_of(params, params.seqlen_k, kBlockN),
            count = m_tiles_of_part(params, num_m_blocks);
  const i64 first = first_m_tile_of(params, num_m_blocks, part_at(params, place));
  const int n_block = keys.block + (kIsPacked ? first_place_of_keys(keys.batch, kBlockN) : 0);
  const auto share = [&](int n_block) { return (int)((i64)count * n_block / num_n_blocks); };
#pragma unroll 1
  for (int i = share(n_block); i < share(n_block + 1); ++i) clear_accumulator(params, first + i, thread, kClearThreads);
  ptx::add_to_count(clears_of(params, num_m_blocks, place));
}

// Thread. Waits until the accumulators of the place of these keys are cleared.
CUFLASH_DEVICE void wait_for_clears(const Params& params, int num_m_blocks, const Work& keys) {
  const u32 place = place_of(params, {keys.head, entry_of(keys.batch)});
  ptx::wait_for_count(clears_of(params, num_m_blocks, place), clears_of_place(params));
}
