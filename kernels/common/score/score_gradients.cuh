// What all kernels share that compute the gradients of the inputs of scores other than q and k.
#pragma once
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/score/mask.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/score.cuh"

// The axes that a block sums over: those that dbias does not have, or the keys for the other gradients.
constexpr bool kSumsBatch = CUFLASH_SUMS_BATCH;
constexpr bool kSumsHeads = CUFLASH_SUMS_HEADS;
constexpr bool kSumsQueries = CUFLASH_SUMS_QUERIES;
constexpr bool kSumsKeys = CUFLASH_SUMS_KEYS;

// The size of a tile of dbias.
constexpr int kResultRows = kSumsQueries ? 1 : kBlockM;
constexpr int kResultColumns = kSumsKeys ? 1 : kBlockN;
constexpr int kResultElements = kResultRows * kResultColumns;

CUFLASH_DEVICE int splits_of(const Params& params) { return kNeedsDbias ? params.score_splits : params.sums_splits; }

// A tile of pairs of one head, and the iterate over the tiles that are summed, keys innermost.
struct ScoreTiles {
  int num_m_blocks, num_n_blocks;
  Entry batch;
  int head, m_block, n_block;
  i64 left;  // tiles to come, this one included

  // Iterates over all tiles that belong to tile `result` of the result. The indices of the first one are zero on axes
  // that are summed over.
  CUFLASH_DEVICE ScoreTiles(const Params& params, u32 result)
      : num_m_blocks(num_tiles_of(params, params.seqlen_q, kBlockM)), num_n_blocks(ceil_div(params.seqlen_k, kBlockN)) {
    const auto owned = [&](bool sums, int count) {
      if (sums) return 0;
      const int index = result % count;
      result /= count;
      return index;
    };
    n_block = owned(kSumsKeys, num_n_blocks);
    m_block = owned(kSumsQueries, num_m_blocks);
    head = owned(kSumsHeads, params.num_heads);
    if constexpr (kIsPacked) {
      // The tile in this slot, and the keys of its sequence; no keys if there is no tile in it.
      const Work work = at_slot_of_queries(params, {m_block, head, 0});
      m_block = work.block;
      batch = work.batch;
      num_n_blocks = has_queries(params, work) ? ceil_div(key_stop_of(params, batch), kBlockN) : 0;
      left = num_n_blocks;
      return;
    }
    batch = {owned(kSumsBatch, params.batch)};
    left = (i64)(kSumsBatch ? params.batch : 1) * (kSumsHeads ? params.num_heads : 1) *
           (kSumsQueries ? num_m_blocks : 1) * (kSumsKeys ? num_n_blocks : 1);
  }

  // How many tiles the result has.
  CUFLASH_DEVICE static u32 count(const Params& params) {
    return (kSumsBatch ? 1 : params.batch) * (kSumsHeads ? 1 : params.num_heads) *
           (kSumsQueries ? 1 : num_tiles_of(params, params.seqlen_q, kBlockM)) *
           (kSumsKeys ? 1 : ceil_div(params.seqlen_k, kBlockN));
  }

  // Restricts the loop to the split of one of `splits` blocks, and to tiles of which something is visible.
  CUFLASH_DEVICE void take_split(const Params& params, int split, int splits) {
    const i64 first = left * split / splits;
    left = left * (split + 1) / splits - first;
    i64 rest = first;
    const auto start = [&](bool sums, int& index, int count) {
      if (!sums || rest == 0) return;
      index = rest % count;
      rest /= count;
    };
    start(kSumsKeys, n_block, num_n_blocks);
    start(kSumsQueries, m_block, num_m_blocks);
    start(kSumsHeads, head, params.num_heads);
    start(kSumsBatch, index_in(batch), params.batch);
    skip_hidden(params);
  }

  CUFLASH_DEVICE void advance(const Params& params) {
    step(params);
    skip_hidden(params);
  }

  // What the block mask leaves of this tile.
  CUFLASH_DEVICE TileClass class_left(const Params& params) const {
    return pairs_of(params, BlockMask(params, batch, head), m_block, n_block);
  }

  // Whether a mask may hide pairs of this tile.
  CUFLASH_DEVICE bool needs_mask(const Params& params, int key_stop) const {
    const TileRange tiles = visible_keys(params, key_stop);
    return n_block < tiles.full_start || n_block >= tiles.full_stop || kLooksUpMask || kHasMaskFunction ||
           (kHasBlockMask && class_left(params) != TileClass::kFull);
  }

  CUFLASH_DEVICE TileRange visible_keys(const Params& params, int key_stop) const {
    const int first_row = m_block * kBlockM;
    return key_tiles(params, batch, first_row, min_of(first_row + kBlockM, seqlen_q_of(params, batch)) - 1, key_stop);
  }

 private:
  CUFLASH_DEVICE static int& index_in(int& batch) { return batch; }
  CUFLASH_DEVICE static int& index_in(Sequence& batch) { return batch.index; }
  CUFLASH_DEVICE void step(const Params& params) {
    --left;
    const auto next = [](bool sums, int& index, int count) {
      if (sums && ++index == count) index = 0;
      return sums && index != 0;
    };
    if (next(kSumsKeys, n_block, num_n_blocks) || next(kSumsQueries, m_block, num_m_blocks)) return;
    if (!next(kSumsHeads, head, params.num_heads)) next(kSumsBatch, index_in(batch), params.batch);
  }
  CUFLASH_DEVICE void skip_hidden(const Params& params) {
    if constexpr (kHasRightBound || kHasLeftBound || kKvLengthsBytes != 0 || kHasBlockMask || kHasBiasTileClasses) {
#pragma unroll 1
      for (; left > 0; step(params)) {
        const TileRange tiles = visible_keys(params, key_stop_of(params, batch));
        if (n_block < tiles.start || n_block >= tiles.stop) continue;
        if (kHasBlockMask && class_left(params) == TileClass::kEmpty) continue;
        if (kHasBiasTileClasses && left_by_bias(params, batch, head, m_block, n_block) == TileClass::kEmpty) continue;
        return;
      }
    }
  }
};

// How many tiles of dbias have one block each. Several blocks share each tile after them. In a persistent kernel these
// are the tiles after whole rounds of its blocks, in another kernel all tiles.
CUFLASH_DEVICE u32 num_whole_results(const Params& params) {
  const u32 count = ScoreTiles::count(params), resident = params.resident_blocks;
  return resident == 0 ? 0 : count - count % resident;
}

// Where a block stores its partial sums of the tile of dbias that is `shared` tiles after those.
CUFLASH_DEVICE Real* score_partials_of(const Params& params, u32 shared, int split) {
  return (Real*)params.score_partials + ((i64)shared * params.score_splits + split) * kResultElements;
}

// The gradients that are sums over all pairs of a head, or of all heads.
enum Sum { kSumOfSlope, kSumOfScale, kSumOfSoftcap, kNumSums };

// Adds the terms of a pair to the sums that are wanted. `ds` is the gradient of its score, whose derivative by the
// scaled product is `derivative`.
CUFLASH_DEVICE void add_to_sums(Real (&sums)[kNumSums], const Score& score, Real ds, Real derivative, Real product,
                                int row, int key) {
  if constexpr (kNeedsDalibiSlopes) sums[kSumOfSlope] -= ds * score.distance(row, key);
  if constexpr (kNeedsDscale) sums[kSumOfScale] += ds * derivative * product;
  if constexpr (kNeedsDsoftcap) sums[kSumOfSoftcap] += ds * score.derivative_by_softcap(product);
}

// The partial sums of one of these gradients, over a head. Those of the batch entries of a query head are neighbours;
// within them those of the tiles of queries, and within these those of the blocks that share a tile.
CUFLASH_DEVICE Real* sums_partials_of(const Params& params, int quantity, int head, Entry batch, int m_block) {
  const int num_m_blocks = num_tiles_of(params, params.seqlen_q, kBlockM);
  const i64 of_head = (i64)quantity * params.num_heads + head;
  i64 tile = (of_head * params.batch + batch) * num_m_blocks + m_block;
  if constexpr (kIsPacked) tile = of_head * num_m_blocks + first_slot_of_queries(batch, kBlockM) + m_block;
  return (Real*)params.sums_partials + tile * params.sums_splits;
}

// Stores an element of dbias, at the indices of its first pair, if the array has them.
template <class T>
CUFLASH_DEVICE void store_dbias(const Params& params, int batch, int head, int row, int key, T value) {
  if ((!kSumsQueries && row >= params.seqlen_q) || (!kSumsKeys && key >= params.seqlen_k)) return;
  const ScoreTensor& dbias = params.dbias;
  const i64 offset =
      batch * dbias.batch_stride + head * dbias.head_stride + row * dbias.row_stride + key * dbias.key_stride;
  if constexpr (kWide || kBiasBytes == sizeof(Real))
    ((Real*)dbias.data)[offset] = value;
  else
    ((u16*)dbias.data)[offset] = (u16)ptx::pack(Element{}, value, value);
}
// Stores element `index` of a tile.
template <class T>
CUFLASH_DEVICE void store_dbias(const Params& params, const ScoreTiles& tile, int index, T value) {
  store_dbias(params, tile.batch, tile.head, tile.m_block * kBlockM + index / kResultColumns,
              tile.n_block * kBlockN + index % kResultColumns, value);
}
