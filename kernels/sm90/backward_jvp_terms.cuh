// What the kernels of the tangents of gradients in float32 share: their argument, statistics of rows, weights and their
// tangents, tdV and results. Tiles are 64 keys by 64 queries, with keys as rows.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/params.cuh"
#include "common/score/dropout.cuh"
#include "common/score/gradient_tangents.cuh"
#include "common/score/scores.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/pair_weights.cuh"
#include "sm90/term_tiles.cuh"

static_assert(kBlockM == kRows && kBlockN == kRows, "tiles of one product");
static_assert(kPairsStats, "a lane reads lse of two queries, or their delta");
static_assert(kHasValues && !kIsPacked && !kDqInOrder && !kSplitsGroup && !kSplitsTail, "not served");

constexpr bool kMovesProducts = kMovesQ || kMovesK;  // tX' = K tQ' + tK Q'
constexpr bool kSumsTdv = kNeedsDv;                  // lse may move where no score does
constexpr bool kReadsDx = kMovesQ || kMovesK;        // by the products with tQ or tK; those with Q and K read tdX'
// Whether weights are made pair by pair (sm90/pair_weights.cuh).
constexpr bool kPairByPair = kHasDerivative || kMovesScale || kMovesBias || kMovesAlibi;

constexpr u32 kBytesStats = kRows * 8;  // and as many of their tangents
constexpr u32 kTermDo = chunked_bytes(kRows, kDimV);

// The tensor maps, of terms: of q, k and v, followed by those of their tangents, and of dout.
constexpr int kMapQ = 0, kMapK = 1, kMapV = 2, kMapDout = 3;
struct BackwardJvpParams {
  Params common;
  TensorMap maps[4];
};
static_assert(sizeof(BackwardJvpParams) == CUFLASH_ARGUMENT_BYTES,
              "the argument differs from its description in Python");

// A producer. Loads the statistics of a tile of queries, and their tangents, which `full` expects already.
CUFLASH_DEVICE void load_stats(const Params& params, u32 to, const Barrier& full, const BackwardWork& tile,
                               const QueryTileIterator& m_tile) {
  const int first = m_tile.m_block * kRows * 2;
  ptx::load_bulk(to, stats_of(params, tile.work.batch, m_tile.head) + first, kBytesStats, full.address);
  ptx::load_bulk(to + kBytesStats, row_tangents_of(params, tile.work.batch, m_tile.head) + first, kBytesStats,
                 full.address);
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

// ---- tdV ------------------------------------------------------------------------------------------------------------

// tdV += (P' u') dO, of the terms of dO at `s_dout`. The tensor cores sum a tile, and tiles are added with rounding.
CUFLASH_DEVICE void add_tdv(float (&tdv)[kDimV / 8][4], const Accumulator& pu, u32 s_dout) {
  Terms<kSteps> operand;
  to_terms(pu, operand);
  repeat<chunks_of(kDimV)>([&](auto chunk) __attribute__((always_inline)) {
    constexpr int c = decltype(chunk)::value;
    const u64 dout = descriptor_of_transposed<kRows>(s_dout + c * kTerm);
    auto& total = chunk_of<c>(tdv);
    float sum[sizeof(total) / sizeof(total[0])][4];
    issue(sum, [&]() __attribute__((always_inline)) {
      for_term_products([&](auto i, auto j, int index) __attribute__((always_inline)) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
          ptx::wgmma<true>(BFloat16{}, sum, operand[i.value][k], along_k_transposed(term_of(dout, j.value, kTermDo), k),
                           index > 0 || k > 0);
      });
    });
    wait_for<0>(sum);
    add(total, sum);
  });
}

// ---- Results --------------------------------------------------------------------------------------------------------

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
