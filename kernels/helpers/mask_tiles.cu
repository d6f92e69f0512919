// Classifies what a mask of pairs or of keys, or a mask_mod, leaves of each tile of pairs: for the index that
// helpers/block_index.cu makes, or for a kernel that has none. A warp bounds the values of a function over a tile.
// Where the bounds decide nothing, and for masks, it looks at pairs until it has seen a hidden one and a visible one.
// If tiles of a mask are small, a warp has several of them. Tiles that windows and lengths hide are not looked at.
//
// Or it classifies what a per-pair bias leaves: a tile that is -inf throughout is hidden. Then the kernel gets
// the bias, and not of masks. Few biases hide any tile, so a warp has several tiles, and loads one vector of each of
// them first. It looks further only at tiles whose vector is -inf, one after another, until it has seen another number.
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/score/functions.cuh"
#include "common/score/mask.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"

constexpr bool kLooksAtBias = kBiasBytes != 0;       // and at nothing else
constexpr int kLanesOfTile = CUFLASH_LANES_OF_TILE;  // a power of two: this many lanes of a warp belong to each tile
constexpr int kLanes = kLooksAtBias ? 32 : kLanesOfTile;  // lanes that look at a tile together
constexpr bool kVotesEarly = kLanes == 32;  // lanes of several tiles do not come to a vote at the same time
static_assert(kVotesEarly || !kHasMaskFunction, "a warp bounds a function");
static_assert(!kLooksAtBias || (!kHasMask && !kHasMaskFunction), "classes are of a bias or of masks");
constexpr int kVoteRows = 16;  // rows that are evaluated between two votes
constexpr int kVectorKeys = 16 / (kLooksAtBias ? kBiasBytes : 1);
constexpr int kVectors = kBlockN / kVectorKeys;  // of a row of a tile
constexpr int kAtOnce = 4;                       // rows, or vectors of a lane, that are on their way together

CUFLASH_DEVICE int lane_of_tile() { return lane_index() % kLanes; }

// Warp. Whether something holds in any of the lanes that look at this lane's tile.
CUFLASH_DEVICE bool any_lane_of_tile(bool holds) {
  if constexpr (kLanes == 32) return ptx::any_lane(holds);
  constexpr u32 kEvery = (1u << kLanes % 32) - 1;
  return (ptx::ballot(holds) >> lane_index() / kLanes * kLanes & kEvery) != 0;
}

// The queries and keys of a tile that exist.
struct TileOfPairs {
  int first_row, stop_row, first_key, stop_key;
};

// What a lane has seen of a tile. All lanes of a warp take part in a vote.
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
  CUFLASH_DEVICE TileClass pairs() const {
    const bool shows = any_lane_of_tile(any), hides = any_lane_of_tile(!all);
    return !shows ? TileClass::kEmpty : hides ? TileClass::kPartial : TileClass::kFull;
  }
};

// Evaluates pair by pair, `rows` rows at once; the lanes have neighbouring keys. `seen` is what was known before.
template <int rows, class Shows>
CUFLASH_DEVICE Seen seen_by_evaluating(const TileOfPairs& tile, Shows shows, Seen seen = {}) {
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

// Reads a tile that consists of whole vectors. `first` is its first byte, strides are in bytes. `add(seen, vector)`
// adds what a vector shows to what has been seen.
template <class Add>
CUFLASH_DEVICE Seen seen_by_vectors(const u8* first, i64 row_stride, int rows, Add add, Seen seen = {}) {
  constexpr int kStep = kLanes * kAtOnce;
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
    for (int i = 0; i < kAtOnce; ++i) add(seen, vector[i]);
    if (seen.is_decided()) break;
  }
  return seen;
}

// What the mask leaves of a tile. Along axes that broadcast, it looks at one row or one key.
CUFLASH_DEVICE Seen seen_of_mask(const Params& params, int batch, int head, TileOfPairs tile) {
  const u8* bytes = (const u8*)params.mask.data + batch * params.mask.batch_stride + head * params.mask.head_stride;
  const i64 row_stride = params.mask.row_stride, key_stride = params.mask.key_stride;
  if (row_stride == 0) tile.stop_row = tile.first_row + 1;
  if (key_stride == 0) tile.stop_key = tile.first_key + 1;
  const u8* first = bytes + tile.first_row * row_stride + tile.first_key * key_stride;
  if (key_stride == 1 && ((u64)first | (u64)row_stride) % 16 == 0 && tile.stop_key - tile.first_key == kBlockN)
    return seen_by_vectors(first, row_stride, tile.stop_row - tile.first_row, [](Seen& seen, const Bytes16& vector) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        seen.any = seen.any || vector.word[j] != 0;
        seen.all = seen.all && !has_zero(vector.word[j]);
      }
    });
  return seen_by_evaluating<kAtOnce>(tile,
                                     [&](int row, int key) { return bytes[row * row_stride + key * key_stride] != 0; });
}

// A bias whose rows are `row_stride` elements after each other.
struct BiasOfPairs {
  using Number = Either<kBiasBytes == sizeof(Real), Real, Storage>::Type;
  const Number* numbers;  // of this head
  i64 row_stride, key_stride;

  CUFLASH_DEVICE BiasOfPairs(const Params& params, int batch, int head)
      : numbers((const Number*)params.bias.data + batch * params.bias.batch_stride + head * params.bias.head_stride),
        row_stride(params.bias.row_stride),
        key_stride(params.bias.key_stride) {}

  CUFLASH_DEVICE bool hides(int row, int key) const {
    const Number number = numbers[row * row_stride + key * key_stride];
    if constexpr (kBiasBytes == sizeof(Real)) return number == -ptx::infinity();
    return to_real<Element>(number) == -ptx::infinity();
  }
  // Whether all numbers of a vector are -inf.
  CUFLASH_DEVICE static bool hides(const Bytes16& vector) {
    bool hidden = true;
#pragma unroll
    for (int j = 0; j < 4; ++j) hidden = hidden && vector.word[j] == word_of_hidden(j);
    return hidden;
  }
  // The first byte of a tile that consists of whole vectors; null for any other tile.
  CUFLASH_DEVICE const u8* vectors_of(const TileOfPairs& tile) const {
    const u8* first = (const u8*)(numbers + tile.first_row * row_stride + tile.first_key * key_stride);
    const bool are = key_stride == 1 && ((u64)first | (u64)(row_stride * kBiasBytes)) % 16 == 0 &&
                     tile.stop_key - tile.first_key == kBlockN;
    return are ? first : nullptr;
  }
  // Whether a tile begins with -inf: all of its first vector or, if it has no vectors, its first number.
  CUFLASH_DEVICE bool hides_first(const TileOfPairs& tile) const {
    if (const u8* first = vectors_of(tile)) return hides(*(const Bytes16*)first);
    return hides(tile.first_row, tile.first_key);
  }
  // Warp. Whether a tile is -inf throughout.
  CUFLASH_DEVICE bool hides_all(const TileOfPairs& tile) const {
    const Seen before = {false, false};  // whether all pairs are visible does not matter: a visible one decides
    Seen seen;
    if (const u8* first = vectors_of(tile))
      seen = seen_by_vectors(
          first, row_stride * kBiasBytes, tile.stop_row - tile.first_row,
          [](Seen& seen, const Bytes16& vector) { seen.any = seen.any || !hides(vector); }, before);
    else
      seen = seen_by_evaluating<kAtOnce>(tile, [&](int row, int key) { return !hides(row, key); }, before);
    return !any_lane_of_tile(seen.any);
  }

 private:
  template <class E = Element>
  CUFLASH_DEVICE static u32 word_of_hidden(int j) {
    if constexpr (kBiasBytes == 8)
      return j % 2 ? ptx::bits_of(-(double)ptx::infinity()) >> 32 : 0;
    else if constexpr (kBiasBytes == 2)
      return ptx::pack(E{}, -ptx::infinity(), -ptx::infinity());
    else
      return ptx::bits_of(-ptx::infinity());
  }
};

// The tile with a given index among all tiles that are classified, if it exists.
struct ClassifiedTile {
  bool exists;
  int batch, head, m_block, n_block;

  // A bias with more tiles is not looked at: `MOST_BIAS_PAIRS` of cuflash/plan/block_index.py.
  using Index = Either<kLooksAtBias, u32, i64>::Type;

  CUFLASH_DEVICE ClassifiedTile(const Params& params, Index index) {
    const Matrices matrices = kLooksAtBias ? biases_in(params) : masks_in(params);
    const int num_n_blocks = ceil_div(params.seqlen_k, kBlockN);
    const Index num_tiles = (Index)ceil_div(params.seqlen_q, kBlockM) * num_n_blocks, matrix = index / num_tiles;
    const Index tile = index % num_tiles;
    exists = matrix < (Index)matrices.batches * matrices.heads;
    batch = exists ? matrix / matrices.heads : 0, head = exists ? matrix % matrices.heads : 0;
    m_block = tile / num_n_blocks, n_block = tile % num_n_blocks;
  }

  // Finds the pairs of the tile that exist. Returns whether windows and lengths leave any of them.
  CUFLASH_DEVICE bool find(const Params& params, TileOfPairs& pairs) const {
    const int first_row = m_block * kBlockM, stop_row = min_of(first_row + kBlockM, params.seqlen_q);
    const int key_stop = exists ? key_stop_of(params, batch) : 0;
    const TileRange range = key_tiles(params, batch, first_row, stop_row - 1, key_stop);
    const int first_key = n_block * kBlockN;
    pairs = {first_row, stop_row, first_key, min_of(first_key + kBlockN, key_stop)};
    return exists && n_block >= range.start && n_block < range.stop;
  }
};

// What masks leave of a tile.
CUFLASH_DEVICE TileClass left_of(const Params& params, const ClassifiedTile& classified) {
  TileOfPairs tile;
  const bool looks = classified.find(params, tile);
  if (kVotesEarly && !looks) return TileClass::kEmpty;
  TileClass left = TileClass::kFull;
  if constexpr (kHasMask) {
    const Seen seen = looks ? seen_of_mask(params, classified.batch, classified.head, tile) : Seen{false, false};
    left = seen.pairs();
    // A mask of keys is added to scores where it hides single keys: kernels need not know of them.
    if (kMaskOfKeys && left == TileClass::kPartial) left = TileClass::kFull;
  }
#if CUFLASH_HAS_MASK_FUNCTION
  const Functions functions(params, classified.batch, classified.head);
  if (left != TileClass::kEmpty) {
    const Truth shown =
        functions.shows(Integers{tile.first_row, tile.stop_row - 1}, Integers{tile.first_key, tile.stop_key - 1});
    if (shown.never) return TileClass::kEmpty;
    if (!shown.always)
      left =
          both(left, seen_by_evaluating<1>(tile, [&](int row, int key) { return functions.shows(row, key); }).pairs());
  }
#endif
  return left;
}

// Warp. What the bias leaves of each lane's tile; `first` is the index of the first lane's tile. A bias that is -inf in
// single pairs is added to scores: kernels need not know of them.
CUFLASH_DEVICE TileClass left_by_bias_of(const Params& params, const ClassifiedTile& own, ClassifiedTile::Index first) {
  TileOfPairs tile;
  bool hidden = true;
  if (own.find(params, tile)) hidden = BiasOfPairs(params, own.batch, own.head).hides_first(tile);
#pragma unroll 1
  for (int i = 0; i < 32 / kLanesOfTile; ++i) {
    if (ptx::shuffle((u32)hidden, i * kLanesOfTile) == 0) continue;
    const ClassifiedTile other(params, first + i);
    if (!other.find(params, tile)) continue;
    const bool hides = BiasOfPairs(params, other.batch, other.head).hides_all(tile);
    if ((int)lane_index() / kLanesOfTile == i) hidden = hides;
  }
  return hidden ? TileClass::kEmpty : TileClass::kFull;
}

CUFLASH_DEVICE void mask_tiles(const Params& params) {
  using Index = ClassifiedTile::Index;
  const Index warp = (Index)ptx::block_index() * kNumWarps + warp_index();
  const Index first = warp * (32 / kLanesOfTile), index = first + lane_index() / kLanesOfTile;
  const ClassifiedTile tile(params, index);
  TileClass left;
  if constexpr (kLooksAtBias) {
    left = left_by_bias_of(params, tile, first);
  } else {
    if (kVotesEarly && !tile.exists) return;
    left = left_of(params, tile);
  }
  const BiasBlocks bias(params);
  if (kLooksAtBias && warp == 0 && lane_index() == 0) *bias.count = 0;
  u8* classes = kLooksAtBias ? bias.classes : (u8*)params.mask_blocks;
  if (tile.exists && lane_index() % kLanesOfTile == 0) classes[index] = (u8)left;
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, mask_tiles)
