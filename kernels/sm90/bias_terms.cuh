// What is added to the scores of a tile, by class of operand, and the mask of keys, which hides them.
//   - Slopes times a distance, which is a number of the lane plus a constant of the code.
//   - A bias that differs from key to key only, or a mask that does: a number for each of this lane's keys, -inf for a
//     key that the mask hides.
//   - A per-pair bias: a tile of it lies in shared memory, as TMA writes it.
//   - What a score_mod or mask_mod reads of a key: these are per-key values, too, but nothing adds them to scores.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/score.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tiles.cuh"

constexpr bool kBiasOfPairs = CUFLASH_BIAS_OF_PAIRS;
constexpr bool kBiasOfKeys = CUFLASH_BIAS_OF_KEYS;
// Whether this header makes scores of products: by what it adds to them, or by a mask of keys. Otherwise each score
// looks up its bias, or a score_mod or mask_mod computes it (common/score/score.cuh).
constexpr bool kAddsByTile =
    (!kFactorInExponent || kMaskOfKeys) && !kHasScoreFunction && (kBiasBytes == 0 || kBiasOfPairs || kBiasOfKeys);
constexpr bool kHasPerKeyValues = kBiasOfKeys || kMaskOfKeys;
// How many numbers of each key lie in shared memory. With a score_mod they are what it reads of a key, or
// none where it reads them from global memory itself.
constexpr int kNumPerKey = kHasPerKeyValues ? 1 : CUFLASH_PER_KEY_VALUES;
constexpr u32 kBytesPerKeyValues = kNumPerKey * kBlockN * 4;
static_assert(!kMaskOfKeys || kAddsByTile, "a mask of keys is applied by tile");
#if CUFLASH_HAS_SCORE_FUNCTION
static_assert(kNumPerKey == 0 || kNumPerKey == kNumOfKey,
              "the plan has another number of values per key than the function");
#endif
static_assert(!kMaskByBits || kAddsByTile || kFactorInExponent || kHasScoreFunction,
              "no bias is looked up with a mask of bits");
static_assert(!kMaskByBits || !kHasMaskFunction, "bits tell of masks alone");

// The per-key values of one head: what is added to all scores of a key, or what a function reads of it.
struct PerKeyValues {
  const Score& score;
  const u8* mask;
  i64 stride;

  CUFLASH_DEVICE PerKeyValues(const Params& params, const Score& score_, int batch, int head)
      : score(score_),
        mask((const u8*)params.mask.data + batch * params.mask.batch_stride + head * params.mask.head_stride),
        stride(params.mask.key_stride) {}

  // Arrays may end with the last key, so nothing is read past it.
  CUFLASH_DEVICE float of(int key) const {
    if (key >= score.key_stop) return 0.0f;
    if (kMaskOfKeys && mask[key * stride] == 0) return -ptx::infinity();
    return kBiasOfKeys ? score.bias_of_key(key) : 0.0f;
  }

  // Writes the numbers of a key to shared memory. There the first numbers of all keys of a tile come before all second
  // ones, and so on.
  CUFLASH_DEVICE void store(u32 at, int key) const {
#if CUFLASH_HAS_SCORE_FUNCTION
    const OfKey of_key = score.functions.of_key(key);
#pragma unroll
    for (int n = 0; n < kNumPerKey; ++n) ptx::store_shared_b32(at + n * kBlockN * 4, ptx::bits_of(of_key.x[n]));
#else
    ptx::store_shared_b32(at, ptx::bits_of(of(key)));
#endif
  }
};

// A warp of the producer. It iterates over tiles of queries as the consumers do, and writes the numbers of a tile of
// keys to a stage of `numbers` once the empty barrier of that stage in `ring` says that it is free.
template <int stages, class Scheduler>
CUFLASH_DEVICE void produce_per_key_values(const Params& params, Scheduler scheduler, const Ring<stages>& ring,
                                           u32 numbers) {
  Position<stages> key;
  for (; scheduler.more(); scheduler.advance()) {
    const QueryTile tile(params, scheduler.work(params));
    const Score score(params, tile.work.batch, tile.work.head, tile.key_stop);
    const PerKeyValues of_keys(params, score, tile.work.batch, tile.work.head);
    for (int n_block = tile.keys.stop - 1; n_block >= tile.keys.start; --n_block, key.advance()) {
      ring.empty(key).wait(key.parity ^ 1);
      const u32 stage = numbers + key.stage * kBytesPerKeyValues;
#pragma unroll
      for (int i = lane_index(); i < kBlockN; i += 32)
        of_keys.store(stage + i * 4, tile.keys.at(n_block) * kBlockN + i);
      arrive_as_warp(ring.full(key));
    }
  }
}

// A tile of a per-pair bias: lines of 128 bytes, each with the pairs of one query and kBiasChunk keys.
constexpr int kBiasChunk = kBiasOfPairs ? kLineBytes / kBiasBytes : 1;
constexpr int kBiasChunks = kBlockN / kBiasChunk;
constexpr u32 kBytesBias = kBiasOfPairs ? kBiasChunks * kBlockM * kLineBytes : 0;
static_assert(!kBiasOfPairs || kBlockN % kBiasChunk == 0, "whole lines");

// Issues the load of a tile of a bias, which may broadcast along heads and batch entries.
CUFLASH_DEVICE void load_bias(const Params& params, u32 tile, const TensorMap& map, const Barrier& full, int first_row,
                              int first_key, int head, int batch) {
#pragma unroll
  for (int c = 0; c < kBiasChunks; ++c)
    ptx::load_tensor(tile + c * kBlockM * kLineBytes, map, full.address, first_key + c * kBiasChunk, first_row,
                     params.bias.head_stride != 0 ? head : 0, params.bias.batch_stride != 0 ? batch : 0);
}

// What is added to a lane's elements of a tile. Its n-tiles run along the keys, or with `transposed` along the queries.
// Without `hides_keys`, the caller hides what a mask of keys hides.
template <bool transposed, bool hides_keys = kMaskOfKeys>
struct BiasTerms {
  float factor, slope;
  float distance[2];  // from the query to the key of the first element, and of the one 8 rows below it
  u32 pairs;          // in shared memory: the tile of bias, from the first row or, transposed, key of the warp on
  u32 numbers;        // in shared memory: the per-key values, from this lane's first key on
  float of_keys[2];   // transposed: the numbers of this lane's two keys

  // `row` and `key` are those of the first element.
  CUFLASH_DEVICE BiasTerms(const Score& score, int row, int key, u32 pairs_, u32 numbers_ = 0)
      : factor(score.factor), slope(score.slope), distance{}, pairs(pairs_), numbers(numbers_), of_keys{} {
    if constexpr (kHasAlibi) {
      distance[0] = (float)(row + score.diagonal - key);
      distance[1] = distance[0] + (transposed ? -8.0f : 8.0f);
    }
  }

  // Calls f(n, i, score_of) for all elements. score_of(x) is the score of this element, as Score::with_bias makes it of
  // the product x, or of its tanh, and -inf for a key that the mask hides.
  template <int n_tiles, class Function>
  CUFLASH_DEVICE void visit(Function f) const {
    constexpr bool kHasBias = kBiasOfPairs || kBiasOfKeys, kLoadsNumbers = kBiasOfKeys || hides_keys;
#pragma unroll
    for (int k = 0; k < n_tiles / 2; ++k) {
      const int first = kTileDistance == 2 ? k / 2 * 4 + k % 2 : 2 * k;
      float b[2][4], of_key[2][2];
      if constexpr (kBiasOfPairs) load_bias_of(k, b);
      if constexpr (kLoadsNumbers && !transposed) {
#pragma unroll
        for (int j = 0; j < 2; ++j) ptx::load_shared_x2(numbers + (first + j * kTileDistance) * 32, of_key[j]);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int n = first + j / 4 * kTileDistance, i = j % 4;
        f(n, i, [&](float x) {
          const float steps = 8 * n + i % 2, from = distance[i / 2] + (transposed ? steps : -steps);
          const float number = !kLoadsNumbers ? 0.0f : transposed ? of_keys[i / 2] : of_key[j / 4][i % 2];
          const float bias = kBiasOfPairs ? b[j / 4][i] : number;
          if constexpr (!kFactorInExponent) x = Score::with_terms<kHasBias>(x, factor, slope, fabsf(from), bias);
          // A hidden pair is hidden whatever its score is, even a NaN.
          return hides_keys && number == -ptx::infinity() ? -ptx::infinity() : x;
        });
      }
    }
  }

  // Transposed: where the pair of element `i` of n-tile `n` lies in a tile of float32.
  CUFLASH_DEVICE static u32 pair_at(u32 pairs, int n, int i) {
    const u32 lane = lane_index(), line = pairs + (lane % 4 * 2 + i % 2) * kLineBytes;
    return along_line(line, (lane / 4 + i / 2 * 8) * 4) + 8 * n * kLineBytes;
  }

 private:
  // The distance of the two n-tiles that `visit` takes at once. With a float32 bias two neighbouring rows have the same
  // n-tile in the same banks, but n-tiles of distance two in different banks.
  static constexpr int kTileDistance = kBiasOfPairs && kBiasBytes == 4 && !transposed ? 2 : 1;

  // Loads the bias of the elements of two n-tiles.
  CUFLASH_DEVICE void load_bias_of(int k, float (&b)[2][4]) const {
    const u32 lane = lane_index();
    if constexpr (kBiasBytes == 2) {
      // Four 8 x 8 matrices: those of two n-tiles, each with 8 rows (keys where transposed) and the 8 rows after these.
      FragmentOf<Float16> words;  // of either type of 16 bits
      if constexpr (transposed)
        ptx::load_matrix_x4_transposed(
            words.word, along_line(pairs + (16 * k + lane / 16 * 8 + lane % 8) * kLineBytes, lane / 8 % 2 * 16));
      else
        load_fragment_chunked<kBlockM>(pairs, 0, k, words);
#pragma unroll
      for (int j = 0; j < 8; ++j) b[j / 4][j % 4] = to_real<Element>((u16)(words.word[j / 2] >> j % 2 * 16));
    } else if constexpr (transposed) {
#pragma unroll
      for (int j = 0; j < 8; ++j) ptx::load_shared(pair_at(pairs, 2 * k + j / 4, j % 4), b[j / 4][j % 4]);
    } else {
      // Odd rows load the second of the two n-tiles first.
      const u32 odd = lane / 4 % 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 line = pairs + k / 2 * kBlockM * kLineBytes + (lane / 4 + j % 2 * 8) * kLineBytes;
        ptx::load_shared_x2(along_line(line, k % 2 * 32 + (j / 2 ^ odd) * 64 + lane % 4 * 8),
                            (float (&)[2])b[j / 2][j % 2 * 2]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float loaded_first = b[0][i];
        b[0][i] = odd ? b[1][i] : loaded_first;
        b[1][i] = odd ? loaded_first : b[1][i];
      }
    }
  }
  // The address `bytes` along a line, with the swizzle of TMA.
  CUFLASH_DEVICE static u32 along_line(u32 line, u32 bytes) {
    const u32 address = line + bytes;
    return address ^ address / kLineBytes % 8 * 16;
  }
};
