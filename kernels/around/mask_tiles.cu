// What a mask of pairs or of keys, or a function of the caller, leaves of each tile of pairs, for the lists that
// around/lists.cu makes, or as notes for a kernel that has none. A warp bounds what a function gives over a tile; where
// that decides nothing, and of masks, it looks at pairs until it has seen a hidden one and a visible one. Of small tiles
// that a mask is looked at in it has several. Tiles that windows and lengths hide are not looked at.
#include "common/config.cuh"
#include "common/fragments.cuh"
#include "common/functions.cuh"
#include "common/mask.cuh"
#include "common/params.cuh"
#include "common/schedule.cuh"

constexpr int kLanes = CUFLASH_LANES_OF_TILE;  // a power of two
constexpr bool kVotesEarly = kLanes == 32;     // lanes of several tiles do not come to a vote at the same time
static_assert(kVotesEarly || !kHasMaskFunction, "a warp bounds a function");
constexpr int kVoteRows = 16;           // that are asked between two votes
constexpr int kVectors = kBlockN / 16;  // of a row of a tile
constexpr int kAtOnce = 4;              // rows, or vectors of a lane, that are on their way together

CUFLASH_DEVICE int lane_of_tile() { return lane_index() % kLanes; }

// Warp. Whether something holds in any of the lanes that have a tile.
CUFLASH_DEVICE bool any_lane_of_tile(bool holds) {
  if constexpr (kLanes == 32) return ptx::any_lane(holds);
  constexpr u32 kEvery = (1u << kLanes % 32) - 1;
  return (ptx::ballot(holds) >> lane_index() / kLanes * kLanes & kEvery) != 0;
}

// The queries and keys of a tile that there are.
struct TileOfPairs {
  int first_row, stop_row, first_key, stop_key;
};

// What has been seen of a tile by a lane. All lanes of a warp come to a vote.
struct Seen {
  bool any = false, all = true;

  CUFLASH_DEVICE void add(bool shown) {
    any = any || shown;
    all = all && shown;
  }
  CUFLASH_DEVICE bool is_decided() const {
    if constexpr (kVotesEarly) return any_lane_of_tile(any) && any_lane_of_tile(!all);
    return false;
  }
  CUFLASH_DEVICE Pairs pairs() const {
    const bool shows = any_lane_of_tile(any), hides = any_lane_of_tile(!all);
    return !shows ? Pairs::kNone : hides ? Pairs::kSome : Pairs::kAll;
  }
};

// Asks pair by pair, so many rows at once, with the lanes at neighbouring keys.
template <int rows, class Shows>
CUFLASH_DEVICE Seen seen_by_asking(const TileOfPairs& tile, Shows shows) {
  Seen seen;
#pragma unroll 1
  for (int row = tile.first_row; row < tile.stop_row; row += rows) {
    for (int key = tile.first_key + lane_of_tile(); key < tile.stop_key; key += kLanes)
#pragma unroll
      for (int i = 0; i < rows; ++i) seen.add(shows(min_of(row + i, tile.stop_row - 1), key));
    if (row % kVoteRows == 0 && seen.is_decided()) break;
  }
  return seen;
}

// Whether one of four bytes is 0.
CUFLASH_DEVICE bool has_zero(u32 word) { return ((word - 0x01010101) & ~word & 0x80808080) != 0; }

// Reads vectors of 16 keys, of which the tile has whole ones; `first` is the first byte of the tile.
CUFLASH_DEVICE Seen seen_by_vectors(const u8* first, i64 row_stride, int rows) {
  constexpr int kStep = kLanes * kAtOnce;
  Seen seen;
#pragma unroll 1
  for (int start = lane_of_tile(); start < rows * kVectors + lane_of_tile(); start += kStep) {
    Bytes16 vector[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // Lanes without a vector of their own look at the first one once more.
      const int index = start + kLanes * i < rows * kVectors ? start + kLanes * i : 0;
      vector[i] = *(const Bytes16*)(first + index / kVectors * row_stride + index % kVectors * 16);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        seen.any = seen.any || vector[i].word[j] != 0;
        seen.all = seen.all && !has_zero(vector[i].word[j]);
      }
    if (seen.is_decided()) break;
  }
  return seen;
}

// What the mask leaves. Along axes that broadcast one row, or one key, is looked at.
CUFLASH_DEVICE Seen seen_of_mask(const Params& params, int batch, int head, TileOfPairs tile) {
  const u8* bytes = (const u8*)params.mask.data + batch * params.mask.batch_stride + head * params.mask.head_stride;
  const i64 row_stride = params.mask.row_stride, key_stride = params.mask.key_stride;
  if (row_stride == 0) tile.stop_row = tile.first_row + 1;
  if (key_stride == 0) tile.stop_key = tile.first_key + 1;
  const u8* first = bytes + tile.first_row * row_stride + tile.first_key * key_stride;
  if (key_stride == 1 && ((u64)first | (u64)row_stride) % 16 == 0 && tile.stop_key - tile.first_key == kBlockN)
    return seen_by_vectors(first, row_stride, tile.stop_row - tile.first_row);
  return seen_by_asking<kAtOnce>(tile,
                                 [&](int row, int key) { return bytes[row * row_stride + key * key_stride] != 0; });
}

// `exists` says whether there is such a tile.
CUFLASH_DEVICE Pairs pairs_of_tile(const Params& params, int batch, int head, int m_block, int n_block, bool exists) {
  const int first_row = m_block * kBlockM, stop_row = min_of(first_row + kBlockM, params.seqlen_q);
  const int key_stop = exists ? key_stop_of(params, batch) : 0;
  const TileRange range = key_tiles(params, batch, first_row, stop_row - 1, key_stop);
  const int first_key = n_block * kBlockN;
  const TileOfPairs tile = {first_row, stop_row, first_key, min_of(first_key + kBlockN, key_stop)};
  const bool looks = exists && n_block >= range.start && n_block < range.stop;
  if (kVotesEarly && !looks) return Pairs::kNone;
  Pairs left = Pairs::kAll;
  if constexpr (kHasMask) {
    const Seen seen = looks ? seen_of_mask(params, batch, head, tile) : Seen{false, false};
    left = seen.pairs();
    // What hides single keys is added to scores: kernels need not know of it.
    if (kMaskOfKeys && left == Pairs::kSome) left = Pairs::kAll;
  }
#if CUFLASH_HAS_MASK_FUNCTION
  const Functions functions(params, batch, head);
  if (left != Pairs::kNone) {
    const Truth shown =
        functions.shows(Integers{tile.first_row, tile.stop_row - 1}, Integers{tile.first_key, tile.stop_key - 1});
    if (shown.never) return Pairs::kNone;
    if (!shown.always)
      left = both(left, seen_by_asking<1>(tile, [&](int row, int key) { return functions.shows(row, key); }).pairs());
  }
#endif
  return left;
}

CUFLASH_DEVICE void mask_tiles(const Params& params) {
  const int num_n_blocks = ceil_div(params.seqlen_k, kBlockN);
  const i64 num_tiles = (i64)ceil_div(params.seqlen_q, kBlockM) * num_n_blocks;
  const i64 warp = (i64)ptx::block_index() * kNumWarps + warp_index();
  const i64 index = warp * (32 / kLanes) + lane_index() / kLanes, matrix = index / num_tiles;
  const bool exists = matrix < (i64)params.list_batches * params.list_heads;
  if (kVotesEarly && !exists) return;
  const int batch = exists ? matrix / params.list_heads : 0, head = exists ? matrix % params.list_heads : 0;
  const int tile = index % num_tiles;
  const Pairs pairs = pairs_of_tile(params, batch, head, tile / num_n_blocks, tile % num_n_blocks, exists);
  if (exists && lane_of_tile() == 0) ((u8*)params.mask_blocks)[index] = (u8)pairs;
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, mask_tiles)
