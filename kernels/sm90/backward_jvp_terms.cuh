// What the kernels of the tangents of gradients in float32 share: sums of products of bf16 terms, weights and their
// tangents, and terms of dX' and tdX' in shared memory. Tiles are 64 keys by 64 queries, with keys as rows.
#pragma once
#include "common/config.cuh"
#include "common/io/bf16_split.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/score/dropout.cuh"
#include "common/score/gradient_tangents.cuh"
#include "common/score/scores.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/pair_weights.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr int kRows = 64;  // of every tile
constexpr int kNTiles = kRows / 8, kSteps = kRows / 16;
static_assert(kBlockM == kRows && kBlockN == kRows, "tiles of one product");
static_assert(kPairsStats, "a lane reads lse of two queries, or their delta");
static_assert(kHasValues && !kIsPacked && !kDqInOrder && !kSplitsGroup && !kSplitsTail, "not served");

constexpr bool kMovesProducts = kMovesQ || kMovesK;  // tX' = K tQ' + tK Q'
constexpr bool kSumsTdv = kNeedsDv && kMovesScores;
constexpr bool kReadsDx = kMovesQ || kMovesK;  // by the products with tQ or tK; those with Q and K read tdX'
// Whether weights are made pair by pair (sm90/pair_weights.cuh).
constexpr bool kPairByPair = kHasDerivative || kMovesScale || kMovesBias || kMovesAlibi;

constexpr u32 kTerm = chunked_bytes(kRows, kChunk);  // one bf16 term of 64 rows and 64 columns
constexpr u32 kBytesStats = kRows * 8;               // and as many of their tangents

// ---- Products of terms ---------------------------------------------------------------------------------------------

// Calls multiply(a, b, index) for the pairs of terms a and b whose products count, small ones first.
template <class Multiply>
CUFLASH_DEVICE void for_term_products(Multiply multiply) {
  repeat<kTermProducts>([&](auto index) __attribute__((always_inline)) {
    constexpr TermProduct product = term_product(decltype(index)::value);
    multiply(Integer<product.a>{}, Integer<product.b>{}, decltype(index)::value);
  });
}
CUFLASH_DEVICE u64 term_of(u64 tile, int term, u32 term_bytes = kTerm) { return tile + term * (term_bytes / 16); }

using Accumulator = float[kNTiles][4];
template <int steps>
using Terms = u32[kBf16Terms][steps][4];  // of an operand in registers

// Turns 16 columns of an accumulator, from n-tile 2 k on, into terms by `split_pair`. Returns the sum of its results.
template <class SplitPair>
CUFLASH_DEVICE float split_step(const Accumulator& value, int k, u32 (&word)[kBf16Terms][4], SplitPair split_pair) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float (&pair)[4] = value[2 * k + i / 2];
    u32 terms[kBf16Terms];
    sum += split_pair(pair[i % 2 * 2], pair[i % 2 * 2 + 1], terms);
#pragma unroll
    for (int term = 0; term < kBf16Terms; ++term) word[term][i] = terms[term];
  }
  return sum;
}

// An accumulator as the terms of an operand in registers.
CUFLASH_DEVICE void to_terms(const Accumulator& value, Terms<kSteps>& operand) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    u32 word[kBf16Terms][4];
    split_step(value, k, word, bf16_split_small);
#pragma unroll
    for (int term = 0; term < kBf16Terms; ++term)
#pragma unroll
      for (int i = 0; i < 4; ++i) operand[term][k][i] = word[term][i];
  }
}

template <int n_tiles>
CUFLASH_DEVICE void add(float (&total)[n_tiles][4], const float (&sum)[n_tiles][4]) {
#pragma unroll
  for (int n = 0; n < n_tiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) total[n][i] += sum[n][i];
}

// ---- Weights and their tangents -------------------------------------------------------------------------------------

// Turns S' and tX' of a tile into P' and u' = scale tX' - tlse.
struct WeightsOfTile {
  const Params& common;
  const BackwardWork& tile;
  const QueryTileIterator& m_tile;
  const int& lane_key;
  const float& kept_scale;

  // P' and u' of n-tile `n`, whose statistics and their tangents are those of `lse` and `tlse`, in place of S' and tX':
  // weights that dropout drops are marked by their sign. Returns P' u' as tdV needs it.
  template <class RowOf>
  CUFLASH_DEVICE void weigh(float (&p)[4], float (&u)[4], float (&pu)[4], int n, const float (&tlse)[2],
                            const PairWeights& pairs, bool masked, const KeptWeights<true>& kept, RowOf row_of) const {
    const int query = m_tile.m_block * kRows + fragment_column() + 8 * n;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = query + i % 2, key = lane_key + i / 2 * 8;
      const float tangent = kMovesProducts ? u[i] : 0.0f;
      if constexpr (kPairByPair) {
        float weight;
        u[i] = tangent;
        pu[i] = pairs.make(p[i], u[i], weight, row, key, masked, row_of(i % 2), tlse[i % 2]);
      } else {
        float derivative;
        p[i] = pairs.weights.of_hidden(p[i], row, key, masked, row_of(i % 2), derivative);
        u[i] = p[i] == 0.0f ? 0.0f : tangent * pairs.weights.score.scale - tlse[i % 2];
        pu[i] = p[i] * u[i];
      }
      if constexpr (kHasDropout) {
        const bool keeps = kept.keeps(n, i);
        p[i] = keeps ? p[i] : -p[i];
        pu[i] = keeps ? pu[i] * kept_scale : 0.0f;
      }
    }
  }

  // All of them, by the statistics at `s_stats`. Calls `made(n, pu)` for each n-tile; `row_of(query, lse)` is a row as
  // weights take it.
  template <class RowOf, class Made>
  CUFLASH_DEVICE void make_each(Accumulator& s, Accumulator& tx, u32 s_stats, const PairWeights& pairs, bool masked,
                                RowOf row_of, Made made) const {
    const int lane_query = m_tile.m_block * kRows + fragment_column();
    [[maybe_unused]] const Dropout dropout(common, tile.work.batch, m_tile.head);
    KeptWeights<true> kept = {};
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      float lse[2], tlse[2], pu[4];  // of this lane's two queries
      ptx::load_shared_x2(s_stats + n * 64, lse);
      ptx::load_shared_x2(s_stats + kBytesStats + n * 64, tlse);
      if (kHasDropout && n % 2 == 0) kept = dropout.transposed(lane_query + 8 * n, lane_key);
      weigh(s[n], tx[n], pu, n, tlse, pairs, masked, kept,
            [&](int i) { return row_of(lane_query + 8 * n + i, lse[i]); });
      made(n, pu);
    }
  }

  // The same for a tile of which some rows may be `large` (common/softmax/backward.cuh).
  template <class Made>
  CUFLASH_DEVICE void make(Accumulator& s, Accumulator& tx, u32 s_stats, const PairWeights& pairs, bool masked,
                           bool large, Made made) const {
    const Entry batch = tile.work.batch;
    const int head = m_tile.head;
    if constexpr (kPairByPair) {
      make_each(
          s, tx, s_stats, pairs, masked,
          [&](int query, float lse) {
            if (large) return RowStats(common, batch, head, query);
            RowStats stats;
            stats.lse = lse;
            return stats;
          },
          made);
    } else {
      const auto row_of = [&](int n, int i) { return m_tile.m_block * kRows + 8 * n + fragment_column() + i % 2; };
      pairs.weights.hide_products((float (&)[1][kNTiles][4])s, masked, row_of,
                                  [&](int, int i) { return lane_key + i / 2 * 8; });
      // As in sm90/backward_fp32.cu: one body of code serves both where products are scores but for their factor.
      const RowSum* row_sums = row_sums_of(common, batch, head);
      if (large && kScaleInExponent) {
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) make_relative(s[n], n, row_sums + row_of(0, 0), pairs.weights.exponent_scale);
      } else if (large) {
        make_each(s, tx, s_stats, pairs, masked, [row_sums](int query, float) { return row_sums[query]; }, made);
      }
      if (kScaleInExponent || !large)
        make_each(s, tx, s_stats, pairs, masked, [](int, float lse) { return PlainRow{lse}; }, made);
    }
  }
};

// ---- Results --------------------------------------------------------------------------------------------------------

// Where this lane stores terms of an operand whose rows are keys, in a tile from `to` on.
CUFLASH_DEVICE u32 line_of_terms(u32 to, u32 thread) {
  return to + (thread / 32 * 16 + lane_index() % 16) * kLineBytes;
}
// Stores the terms of 16 columns, from n-tile 2 k on. Returns what `split_step` does.
template <class SplitPair>
CUFLASH_DEVICE float store_step(const Accumulator& value, int k, u32 line, SplitPair split_pair) {
  const u32 lane = lane_index();
  u32 word[kBf16Terms][4];
  const float rests = split_step(value, k, word, split_pair);
#pragma unroll
  for (int term = 0; term < kBf16Terms; ++term)
    ptx::store_matrix_x4(line + term * kTerm + ((k * 32 + lane / 16 * 16) ^ (lane % 8 * 16)), word[term]);
  return rests;
}
// The same for steps [first, stop) of numbers some of which may not be finite, which is rare.
template <int first = 0, int stop = kSteps>
CUFLASH_DEVICE void store_terms(const Accumulator& value, u32 to, u32 thread) {
  const u32 line = line_of_terms(to, thread);
  float rests = 0.0f;
#pragma unroll
  for (int k = first; k < stop; ++k) rests += store_step(value, k, line, bf16_split_small);
  if (ptx::any_lane(rests - rests != 0.0f)) {
#pragma unroll
    for (int k = first; k < stop; ++k)
      store_step(value, k, line, [](float x, float y, u32(&word)[kBf16Terms]) {
        bf16_split(x, y, word);
        return 0.0f;
      });
  }
}

// Stores rows of a result.
template <int head_dim, int n_tiles>
CUFLASH_DEVICE void store_rows(const Params& params, const Tensor& result, const BackwardWork& tile, u32 thread,
                               const float (&value)[n_tiles][4], float factor) {
  Storage* head = (Storage*)head_of(result, tile.work.batch, tile.head_kv);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = tile.first_key + thread / 32 * 16 + fragment_row() + half * 8;
    if (key >= params.seqlen_k) continue;
    store_row<head_dim>(head + key * result.row_stride, value, half, factor);
  }
}
