// The weights of sm90/backward_jvp.cu and their tangents where they are made pair by pair: where a function makes
// scores of products, or where what is added to these has a tangent.
#pragma once
#include "common/config.cuh"
#include "common/score/dropout.cuh"
#include "sm90/backward_jvp_layout.cuh"
#include "sm90/packed_weights.cuh"
#include "sm90/pair_weights.cuh"

struct WeightsWithTangents {
  const Params& params;
  const Entry batch;
  const int head;
  const PairWeights pairs;

  CUFLASH_DEVICE WeightsWithTangents(const Params& params_, Entry batch_, int head_, int key_stop, int own_diagonal)
      : params(params_), batch(batch_), head(head_), pairs(params, batch, head, key_stop, own_diagonal) {}

  // Replaces the products q.k of a lane by f' P, and their tangents by P (f' u + t(f')), where u = tS - tlse; without a
  // function f by P and u. With one, `packed` gets P u after dropout, and with tdO `packed_p` P. `query` and `key` are
  // those of the first element, whose statistics, and tangents of these, are at `s_stats` and `s_tangents`.
  template <int rows, int rows_p>
  CUFLASH_DEVICE void make(float (&p)[kPartTiles][4], float (&u)[kPartTiles][4], u32 (&packed)[rows][2],
                           u32 (&packed_p)[rows_p][2], u32 s_stats, u32 s_tangents, int query, int key, bool masked,
                           bool large) const {
    const Dropout dropout(params, batch, head);
    [[maybe_unused]] KeptWeights<true> kept;
#pragma unroll
    for (int n = 0; n < kPartTiles; ++n) {
      float lse[2], tlse[2], pu[4], weight[4];
      ptx::load_shared_x2(s_stats + n * 64, lse);
      ptx::load_shared_x2(s_tangents + n * 64, tlse);
      const int row = query + 8 * n;
      const RowStats own[2] = {stats_of(lse[0], row, large), stats_of(lse[1], row + 1, large)};
      if (kHasDropout && n % 2 == 0) kept = dropout.transposed(row, key);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool keeps = !kHasDropout || kept.keeps(n, i);
        pu[i] = pairs.make(p[n][i], u[n][i], weight[i], row + i % 2, key + i / 2 * 8, masked, own[i % 2], tlse[i % 2]);
        if (!keeps) p[n][i] = -p[n][i];
        if constexpr (kHasDropout) pu[i] = keeps ? pu[i] * kept_scale_of(params) : 0;
        if constexpr (kHasDropout && kSumsTdvOfP) weight[i] = keeps ? weight[i] * kept_scale_of(params) : 0;
      }
      if constexpr (kHasDerivative) PackedWeights::pack(pu, packed[n]);
      if constexpr (kHasDerivative && kSumsTdvOfP) PackedWeights::pack(weight, packed_p[n]);
    }
  }

 private:
  // The statistics of a row without its delta. Where the tile has large rows, they are looked up.
  CUFLASH_DEVICE RowStats stats_of(float lse, int row, bool large) const {
    if (large) return RowStats(params, batch, head, row);
    RowStats stats;
    stats.lse = lse;
    return stats;
  }
};
