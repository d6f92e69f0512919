// The scores of the tiles of keys that a warp of sm90/forward.cu takes: what products are turned into scores by, and
// which pairs are hidden.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/params.cuh"
#include "common/score/mask_bits.cuh"
#include "common/score/scores.cuh"
#include "sm90/bias_terms.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile_scheduler.cuh"

constexpr int kNTiles = kBlockN / 8;

struct TileScores {
  using Scores = float[1][kNTiles][4];

  const Params& common;
  const QueryTile& tile;
  const Position<kNumStages>& key;  // the stage of the tile of keys
  const u32 s_bias, s_numbers;      // their first stages
  const int warp_line, lane_row;    // this warp's first row in the tile of queries; this lane's first row
  const int own_diagonal;           // of the batch entry
  const Score score;
  const RowsOfLane rows{score, lane_row};
  const u32* mask_words = nullptr;                    // of this lane, for the first tile of keys
  u32 shown[kMaskByBits ? kBlockN / kBitsBlock : 1];  // the mask bits of this step's tile

  CUFLASH_DEVICE TileScores(const Params& common_, const QueryTile& tile_, const Position<kNumStages>& key_,
                            u32 s_bias_, u32 s_numbers_, int warp_line_)
      : common(common_),
        tile(tile_),
        key(key_),
        s_bias(s_bias_),
        s_numbers(s_numbers_),
        warp_line(warp_line_),
        lane_row(tile.first_row + warp_line + fragment_row()),
        own_diagonal(own_diagonal_of(common, tile.work.batch)),
        score(common, tile.work.batch, tile.work.head, tile.key_stop, own_diagonal) {
    if constexpr (kMaskByBits) {
      const int m_block = tile.work.block * (kBlockM / kBitsBlock) + warp_line / 64;
      mask_words = mask_words_of(common, MaskBits(common), tile.work.batch, tile.work.head, m_block, 0);
    }
  }

  // The key of this lane's first column in a tile of keys.
  CUFLASH_DEVICE int lane_key(int n_block) const { return tile.keys.at(n_block) * kBlockN + fragment_column(); }

  // Loads the mask bits of a tile of keys. The load is issued before the product whose pairs the bits hide.
  template <class Masked>
  CUFLASH_DEVICE void load_mask(int n_block, Masked masked) {
    if constexpr (kMaskByBits) {
      if (masked) {
        const i64 first_block = tile.keys.at(n_block) * (kBlockN / kBitsBlock);
#pragma unroll
        for (int i = 0; i < kBlockN / kBitsBlock; ++i) shown[i] = mask_words[(first_block + i) * kBitsWords];
      }
    }
  }

  // The bias terms of the scores of the tile of keys in stage `key`.
  CUFLASH_DEVICE BiasTerms<false> bias_terms(int n_block) const {
    const u32 pairs = s_bias + key.stage * kBytesBias + warp_line * kLineBytes;
    return {score, lane_row, lane_key(n_block), pairs, numbers()};
  }
  // The address of the per-key values in stage `key`, from this lane's first key on.
  CUFLASH_DEVICE u32 numbers() const { return s_numbers + key.stage * kBytesPerKeyValues + fragment_column() * 4; }
  // The mask is made anew for every tile. If it were kept, it would take registers, and spill with a block mask.
  template <class AnyMask = Mask, class Masked>
  CUFLASH_DEVICE auto mask(Masked) const {
    if constexpr (IsLeftEdge<Masked>::value)
      return LeftBound{common.left_offset + own_diagonal};
    else
      return AnyMask(common, tile.work.batch, tile.work.head, tile.key_stop, own_diagonal);
  }
  // A function that says whether a mask hides an element of a tile of keys.
  template <class AnyMask>
  CUFLASH_DEVICE auto hidden_in(int n_block, const AnyMask& mask) const {
    if constexpr (kMaskByBits)
      return [this](int n, int i) { return !(shown[n / 8] >> bit_of(n % 8, i) & 1); };
    else
      return [mask, row = lane_row, key = lane_key(n_block)](int n, int i) {
        return !mask.visible(row + i / 2 * 8, key + 8 * n + i % 2);
      };
  }
  // Hides the pairs that the caller's mask function hides. Where the block-sparse index says that it hides none, it is
  // not evaluated.
  CUFLASH_DEVICE void hide_by_function(Scores& s, int n_block) const {
#if CUFLASH_HAS_MASK_FUNCTION
    if (!tile.keys.evaluates_mask_at(n_block)) return;
    const Functions functions(common, tile.work.batch, tile.work.head);
    const int first_key = lane_key(n_block);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!functions.shows(lane_row + i / 2 * 8, first_key + 8 * n + i % 2)) s[0][n][i] = -ptx::infinity();
#endif
  }
  // Applies the caller's score function to the products of an n-tile. `first_key` is this lane's first key in it.
  CUFLASH_DEVICE void apply_function(Scores& s, int n, int first_key) const {
#if CUFLASH_HAS_SCORE_FUNCTION
    const Functions& functions = score.functions;
    OfKey of_key[2];
    if constexpr (kNumPerKey == 0) of_key[0] = functions.of_key(first_key), of_key[1] = functions.of_key(first_key + 1);
#pragma unroll
    for (int k = 0; k < kNumPerKey; ++k) {
      float two[2];
      ptx::load_shared_x2(numbers() + k * kBlockN * 4 + n * 32, two);
      of_key[0].x[k] = two[0], of_key[1].x[k] = two[1];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Unused derivative;
      s[0][n][i] = functions.score(s[0][n][i] * score.scale, lane_row + i / 2 * 8, first_key + i % 2,
                                   rows.at(score, lane_row, i / 2), of_key[i % 2], derivative);
    }
#endif
  }
  // Turns the results of Score::cap into scores.
  template <class Masked>
  CUFLASH_DEVICE void complete(Scores& s, int n_block, Masked masked) const {
    const auto without_function = mask<MaskWithoutFunction>(masked);
    const auto is_hidden = hidden_in(n_block, without_function);
    const auto hide = [&](int n, int i) {
      if (masked && is_hidden(n, i)) s[0][n][i] = -ptx::infinity();
    };
    if constexpr (kAddsByTile) {
      bias_terms(n_block).visit<kNTiles>([&](int n, int i, auto score_of) {
        s[0][n][i] = score_of(s[0][n][i]);
        hide(n, i);
      });
    } else if constexpr (kHasScoreFunction) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        apply_function(s, n, lane_key(n_block) + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i) hide(n, i);
      }
    } else if constexpr (kMaskByBits) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) hide(n, i);
    } else {
      const auto row_of = [&](int, int i) { return lane_row + i / 2 * 8; };
      to_scores<true>(score, without_function, s, row_of, lane_key(n_block), masked);
    }
    if constexpr (Masked::value) hide_by_function(s, n_block);
  }
};
