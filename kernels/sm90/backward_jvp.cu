// Tangents of gradients in half precision on compute capability 9.0 (Hopper), transposed, with wgmma and TMA.
//
//   S' = K Q'        tX' = K tQ' + tK Q'      dP' = V dO'      tdP' = tV dO' + V tdO'    (X' is X transposed)
//   P' = exp(S' - lse)                        u' = scale tX' - tlse
//   dX' = P' * (dP' - delta)                  tdX' = u' * dX' + P' * (tdP' - tdelta)
//   tdV = (P' * u') dO + P' tdO               tdK = scale (tdX' Q + dX' tQ)          tdQ += tdX K + dX tK
//
// Where a function f makes scores of products, f' P' takes the place of P' in the third line, and P' (f' u' + t(f'))
// (dP' - delta) that of u' dX'.
//
// A block owns kBlockN keys of one key/value head. It iterates over the query heads that share its keys, and for each
// over the tiles of queries. Each warpgroup has a role, as in sm90/backward.cu:
//   - Two consumers accumulate tdK and tdV in registers. P' u', dX' and tdX' are operands there, too. Each makes
//     everything for 64 keys of its own. Or, where registers hold only one of the two sums, both have the same 64 keys:
//     the first makes P', u' and tdV, the second dX', tdX' and tdK, and P' and u' are handed over in shared memory.
//   - The warpgroup of tdQ reads dX' and tdX' from shared memory, makes tdQ of the tile, and adds it to memory, at its
//     own pace. It first clears what later blocks add to (common/io/clear_dq.cuh). One of its warps is the producer, or
//     a warp of a warpgroup of its own, in which two others keep the order of tdQ if blocks add to it in order.
// A step takes a tile of queries, or half of one. Consumers issue tdV and tdK of a step right after the first products
// of the next one, so that these run while P' or dX' of the next one is made. Or before them, where there is but one
// stage of Q: the next Q is loaded once tdK has read this one, and arrives while the products of the next dO run.
//
//   barrier       one phase is over when              who waits
//   kv_full       K, V, tK and tV have arrived        consumers, tdQ
//   q_full[i]     Q and tQ are in stage i             consumers, before S' and before tdK
//   q_empty[i]    all consumers have used stage i     producer, before it loads the next Q there
//   do_full[i], do_empty[i]                           the same for dO and statistics
//   dx_full[i]    dX' and tdX' are in stage i         tdQ
//   dx_empty[i]   tdQ has read them                   the consumers that make them, before they write there again
//   p_full        P' and u' have been handed over     the consumer that makes dX', where roles are split
//   p_empty       they have been read                 the consumer that makes P', before it hands over the next
//   turn[i], added[i], ended[i]                       the order of tdQ (sm90/dq_order.cuh)
//   named: per consumer, one for itself and one for the ping-pong; one for all consumers; one for consumers and tdQ
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/score/dropout.cuh"
#include "common/score/gradient_tangents.cuh"
#include "common/score/scores.cuh"
#include "sm90/backward_jvp_dq.cuh"
#include "sm90/backward_jvp_layout.cuh"
#include "sm90/backward_jvp_weights.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/packed_weights.cuh"
#include "sm90/ping_pong.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

// A consumer warpgroup, `index` of kConsumers, of 64 keys: it makes u' and tdV, or tdX' and tdK, or all of them.
//
//   [GEMM 1] S' = K Q'    [GEMM 2] tX' = K tQ' + tK Q'    [5] P' and u'     [GEMM 8] tdV += (P' u') dO + P' tdO
//   [GEMM 3] dP' = V dO'  [GEMM 4] tdP' = tV dO' + V tdO' [6] dX' and tdX'  [GEMM 9] tdK += tdX' Q + dX' tQ
template <bool makes_tdv, bool makes_tdk>
struct Consumer {
  // Whether K or V are in registers. With tdO, P' takes those of V.
  static constexpr bool kHoldsK = makes_tdv && !kSumsFirst, kHoldsV = makes_tdk && !kSumsFirst && !kHasTdout;
  // Groups of wgmma of the sums of the step before.
  static constexpr int kSumGroups = (makes_tdv ? (kSumsTdv ? 1 : 0) + (kSumsTdvOfP ? 1 : 0) : 0) +
                                    (makes_tdk ? (kSumsTdk ? 1 : 0) + (kSumsTdkOfDx ? 1 : 0) : 0);

  const BackwardJvpParams& params;
  const Params& common;
  const Shared& shared;
  const BackwardWork work;
  const Entry batch;
  const u32 index, thread;
  const bool elected;
  const u32 first;  // of its 64 keys, in the tile
  const int warp_key, lane_key;
  const float kept_scale;
  const PingPong<kPingPong, kConsumers, kPingPongBarrier> ping_pong;

  float tdk[makes_tdk ? kDim / 8 : 1][4], tdv[makes_tdv ? kDimV / 8 : 1][4];
  Fragment k_operand[kHoldsK ? kDim / 16 : 1], v_operand[kHoldsV ? kDimV / 16 : 1];
  Fragment p_operand[kSumsTdvOfP ? kPartRows / 16 : 1];  // of the step before, as the next ones
  Fragment pu_operand[kPartRows / 16], dx_operand[kPartRows / 16], tdx_operand[kPartRows / 16];  // of the step before
  Position<kNumStages> at;
  u32 parity = 0;  // of the one stage of Q, where there is one
  Position<kDxStages> dx_at;
  Position<kPStages> p_at;
  QueryTileIterator m_tile;
  int part = 0;  // of the tile of queries
  int stage_before = 0;
  int part_before = kParts - 1;

  CUFLASH_DEVICE Consumer(const BackwardJvpParams& params_, const Shared& shared_, const Work& found, u32 index_)
      : params(params_),
        common(params.common),
        shared(shared_),
        work(common, found),
        batch(work.work.batch),
        index(index_),
        thread(ptx::thread_index() % 128),
        elected(thread == 0),
        first(kSplitsRoles ? 0 : index * 64),
        warp_key(thread / 32 * 16),
        lane_key(work.first_key + first + warp_key + fragment_row()),
        kept_scale(kept_scale_of(common)),
        ping_pong(index),
        m_tile(work.first()) {
    set_zero((float (&)[1][sizeof(tdk) / sizeof(tdk[0])][4]) tdk);
    set_zero((float (&)[1][sizeof(tdv) / sizeof(tdv[0])][4]) tdv);
  }

  // The rows of this consumer's keys in a tile of K, V, tK or tV.
  CUFLASH_DEVICE u32 rows_of(u32 tile) const { return tile + first * kLineBytes; }

  // ---- Waiting ------------------------------------------------------------------------------------------------------

  // Waits for the keys, and clears rows past the last one: their weights are 0, but 0 times a NaN there would be NaN.
  CUFLASH_DEVICE void wait_for_keys() {
    shared.kv_full.wait(0);
    if constexpr (kHidesLastKeys) {
      const int valid = work.key_stop - work.first_key;
      if (valid < kBlockN) {
        if (index == 0) {
          zero_rows<kBlockN, kDim>(shared.k, valid, thread);
          zero_rows<kBlockN, kDimV>(shared.v, valid, thread);
          if constexpr (kMovesK) zero_rows<kBlockN, kDim>(shared.tk, valid, thread);
          if constexpr (kMovesV) zero_rows<kBlockN, kDimV>(shared.tv, valid, thread);
          ptx::fence_async_proxy();
        }
        ptx::sync_named(kAll, kConsumerThreads);
      }
    }
    if constexpr (kHoldsK) load_fragments_chunked<kBlockN>(rows_of(shared.k), warp_key, k_operand);
    if constexpr (kHoldsV) load_fragments_chunked<kBlockN>(rows_of(shared.v), warp_key, v_operand);
  }

  // Waits for a stage of queries. Clears rows past the last one, too.
  CUFLASH_DEVICE void wait_for_queries() {
    if constexpr (makes_tdv || !kSumsFirst) shared.q_ring.full(q_at()).wait(q_at().parity);
    shared.do_ring.full(at).wait(at.parity);
    if constexpr (kIsPacked) {
      const int valid = seqlen_q_of(common, batch) - m_tile.m_block * kBlockM;
      if (valid < kBlockM) {
        if (index == 0) {
          zero_last_of_64<kBlockM, kDim>(shared.q + q_at().stage * kBytesQ, valid, thread);
          if constexpr (kMovesQ) zero_last_of_64<kBlockM, kDim>(shared.tq + q_at().stage * kBytesQ, valid, thread);
          zero_last_of_64<kBlockM, kDimV>(shared.dout + at.stage * kBytesDo, valid, thread);
          if constexpr (kHasTdout) zero_last_of_64<kBlockM, kDimV>(shared.tdout + at.stage * kBytesDo, valid, thread);
          ptx::fence_async_proxy();
        }
        ptx::sync_named(kAll, kConsumerThreads);
      }
    }
  }

  // ---- Products -----------------------------------------------------------------------------------------------------

  CUFLASH_DEVICE Position<kQStages> q_at() const {
    if constexpr (kQStages == 1)
      return {0, parity};
    else
      return {at.stage, at.parity};
  }
  // Where the rows of a part begin in a stage, and the rows of this part in Q, tQ and dO.
  CUFLASH_DEVICE static u32 row_of_part(int part) { return kStageRows < kBlockM || kParts == 1 ? 0 : part * kPartRows; }
  CUFLASH_DEVICE u32 s_q() const { return shared.q + q_at().stage * kBytesQ + row_of_part(part) * kLineBytes; }
  CUFLASH_DEVICE u32 s_tq() const { return shared.tq + q_at().stage * kBytesQ + row_of_part(part) * kLineBytes; }
  CUFLASH_DEVICE u32 s_do() const { return shared.dout + at.stage * kBytesDo + row_of_part(part) * kLineBytes; }

  CUFLASH_DEVICE u32 s_tdo() const { return shared.tdout + at.stage * kBytesDo + row_of_part(part) * kLineBytes; }

  // Issues wgmma of d = a b' or d += a b' over `columns` columns: a are the rows of this consumer's keys in `tile`,
  // which it has in registers, too, if it `holds` them.
  template <int columns, bool holds, bool adds, int count>
  CUFLASH_DEVICE void multiply_rows(float (&d)[kPartTiles][4], u32 tile, const Fragment (&held)[count], u32 b) const {
    const u64 a_rows = descriptor_of(rows_of(tile)), b_rows = descriptor_of(b);
#pragma unroll
    for (int k = 0; k < columns / 16; ++k) {
      if constexpr (holds)
        ptx::wgmma<false>(Element{}, d, held[k].word, along_k<kStageRows>(b_rows, k), adds || k > 0);
      else
        ptx::wgmma<false, false>(Element{}, d, along_k<kBlockN>(a_rows, k), along_k<kStageRows>(b_rows, k),
                                 adds || k > 0);
    }
  }

  // [GEMM 1] S' = K Q' and [GEMM 2] tX' = K tQ' + tK Q'.
  CUFLASH_DEVICE void issue_scores(float (&s)[kPartTiles][4], float (&tx)[kPartTiles][4]) {
    ptx::fence_operand(tx);
    issue(s, [&]() __attribute__((always_inline)) {
      multiply_rows<kDim, kHoldsK, false>(s, shared.k, k_operand, s_q());
      if constexpr (kMovesQ) multiply_rows<kDim, kHoldsK, false>(tx, shared.k, k_operand, s_tq());
      if constexpr (kMovesK) multiply_rows<kDim, false, kMovesQ>(tx, shared.tk, k_operand, s_q());
    });
  }

  // [GEMM 3] dP' = V dO' and [GEMM 4] tdP' = tV dO' + V tdO'.
  CUFLASH_DEVICE void issue_dp(float (&dp)[kPartTiles][4], float (&tdp)[kPartTiles][4]) {
    ptx::fence_operand(tdp);
    issue(dp, [&]() __attribute__((always_inline)) {
      multiply_rows<kDimV, kHoldsV, false>(dp, shared.v, v_operand, s_do());
      if constexpr (kMovesV) multiply_rows<kDimV, false, false>(tdp, shared.tv, v_operand, s_do());
      if constexpr (kHasTdout) multiply_rows<kDimV, kHoldsV, kMovesV>(tdp, shared.v, v_operand, s_tdo());
    });
  }

  // Issues d = a b or d += a b as one group: `a` is in registers, and b the rows of the part before in a stage. One
  // wgmma computes at most 128 columns, because more would need more registers than a thread starts with.
  template <int n_tiles, int count>
  CUFLASH_DEVICE static void issue_part(float (&d)[n_tiles][4], const Fragment (&a)[count], u32 b, bool adds) {
    static_assert(count == kPartRows / 16, "an operand of a part");
    const u64 b_rows = descriptor_of_transposed<kStageRows>(b);
    repeat<(n_tiles + 15) / 16>([&](auto slice) {
      constexpr int kFirst = 16 * decltype(slice)::value, kCount = n_tiles - kFirst < 16 ? n_tiles - kFirst : 16;
      auto& columns = (float (&)[kCount][4])d[kFirst];
      const u64 b_columns = b_rows + kFirst * 8 / kChunk * (kStageRows * kLineBytes / 16);
#pragma unroll
      for (int k = 0; k < kPartRows / 16; ++k)
        ptx::wgmma<true>(Element{}, columns, a[k].word, along_k_transposed(b_columns, k), adds || k > 0);
    });
    ptx::wgmma_commit();
  }

  // [GEMM 8] tdV += (P' u') dO + P' tdO and [GEMM 9] tdK += tdX' Q + dX' tQ, of the part before. They replace the sums
  // unless it `adds`.
  CUFLASH_DEVICE void issue_sums(bool adds) {
    const u32 rows = row_of_part(part_before) * kLineBytes;
    const u32 of_q = (kQStages == 1 ? 0 : stage_before * kBytesQ) + rows;
    ptx::fence_operand(tdv);
    ptx::fence_operand(tdk);
    ptx::wgmma_fence();
    if constexpr (makes_tdv && kSumsTdv)
      issue_part(tdv, pu_operand, shared.dout + stage_before * kBytesDo + rows, adds);
    if constexpr (makes_tdv && kSumsTdvOfP)
      issue_part(tdv, p_operand, shared.tdout + stage_before * kBytesDo + rows, adds || kSumsTdv);
    if constexpr (makes_tdk && kSumsTdk) issue_part(tdk, tdx_operand, shared.q + of_q, adds);
    if constexpr (makes_tdk && kSumsTdkOfDx) issue_part(tdk, dx_operand, shared.tq + of_q, true);
  }

  // Waits for these products, and for what was issued before all but `pending` groups. With `frees`, gives back the
  // stages that they have read.
  template <int pending>
  CUFLASH_DEVICE void finish_sums(bool frees) {
    ptx::wgmma_wait<pending>();
    ptx::fence_operand(tdv);
    ptx::fence_operand(tdk);
    // A finished product does not mean that all threads have read the statistics, so they synchronise here. A consumer
    // that makes dX' need not where a warp of tdQ is the producer: that loads the next tile only once each warp has
    // arrived at dx_full.
    if constexpr (!makes_tdk || kHasProducer) ptx::sync_named(kConsumer + index, 128);
    if (elected && frees && (kStageRows < kBlockM || kParts == 1 || part_before == kParts - 1)) {
      shared.do_ring.empty({stage_before}).arrive();
      if constexpr (makes_tdk || !kSumsFirst) shared.q_ring.empty({kQStages == 1 ? 0 : stage_before}).arrive();
    }
  }

  // ---- Between the products -----------------------------------------------------------------------------------------

  template <int count>
  CUFLASH_DEVICE static void to_operands(const float (&value)[kPartTiles][4], Fragment (&operand)[count]) {
#pragma unroll
    for (int k = 0; k < kPartRows / 16; ++k) to_operand(value, k, operand[k]);
  }
  // The statistics of this lane's first query, and their tangents.
  CUFLASH_DEVICE u32 s_stats() const {
    return shared.stats + at.stage * kBytesStats + (row_of_part(part) + fragment_column()) * 8;
  }
  CUFLASH_DEVICE u32 s_tangents() const { return s_stats() + kNumStages * kBytesStats; }
  // The index of its query.
  CUFLASH_DEVICE int lane_query() const {
    return m_tile.m_block * kBlockM + (kParts == 1 ? 0 : part * kPartRows) + fragment_column();
  }
  // Whether the tile has large rows (common/softmax/backward.cuh).
  CUFLASH_DEVICE bool has_large_rows() const {
    return is_of_large(ptx::float_of(ptx::load_shared_b32(shared.stats + at.stage * kBytesStats)));
  }

  // [5] P' = exp(S' - lse) in place of S' and u' = scale tX' - tlse in place of tX', once at most `pending` groups of
  // wgmma are in flight. `packed` gets P' u', and `packed_p` P', where a function makes scores.
  template <int pending, int rows, int rows_p>
  CUFLASH_DEVICE void make_p(float (&p)[kPartTiles][4], float (&u)[kPartTiles][4], u32 (&packed)[rows][2],
                             u32 (&packed_p)[rows_p][2], bool large) {
    const int head = m_tile.head, query = lane_query();
    const bool masked = m_tile.needs_mask(work.queries);
    wait_for<pending>(p);
    ptx::fence_operand(u);
    if constexpr (kPairByPair) {
      const WeightsWithTangents weights(common, batch, head, work.key_stop, work.own_diagonal);
      weights.make(p, u, packed, packed_p, s_stats(), s_tangents(), query, lane_key, masked, large);
      return;
    }
    const Weights weights(common, batch, head, work.key_stop, work.own_diagonal);
    const auto row_of = [&](int n, int i) { return query + 8 * n + i % 2; };
    const auto key_of = [&](int, int i) { return lane_key + i / 2 * 8; };
    if constexpr (!kFactorInExponent) {
#pragma unroll
      for (int n = 0; n < kPartTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) p[n][i] = weights.score.with_bias(p[n][i], row_of(n, i), key_of(0, i));
    }
    if (masked || large) {  // one branch, which few tiles take
      weights.hide((float (&)[1][kPartTiles][4])p, masked, m_tile.evaluates_mask(), row_of, key_of);
      if (large) {
        const RowSum* row_sums = row_sums_of(common, batch, head) + query;
#pragma unroll
        for (int n = 0; n < kPartTiles; ++n) make_relative(p[n], n, row_sums, weights.exponent_scale);
      }
    }
#pragma unroll
    for (int n = 0; n < kPartTiles; ++n) {
      float lse[2], tlse[2];  // of this lane's two queries
      ptx::load_shared_x2(s_stats() + n * 64, lse);
      ptx::load_shared_x2(s_tangents() + n * 64, tlse);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[n][i] = exponential(p[n][i] * weights.exponent_scale - lse[i % 2]);
        u[n][i] = (kMovesProducts ? u[n][i] * weights.score.scale : 0.0f) - tlse[i % 2];
      }
    }
    if constexpr (kHasDropout) Dropout(common, batch, head).mark(p, query, lane_key);
  }

  // Makes operands of P' u' and, for tdO, of P'. Those of pairs that dropout has marked become 0, others have its
  // factor before they are rounded: in float16 they may be subnormal.
  template <int rows, int rows_p>
  CUFLASH_DEVICE void to_weights(const float (&p)[kPartTiles][4], const float (&u)[kPartTiles][4],
                                 const u32 (&packed)[rows][2], const u32 (&packed_p)[rows_p][2]) {
    [[maybe_unused]] float kept[kPartTiles][4];
    if constexpr (kSumsTdvOfP && kHasDerivative) {
      PackedWeights::to_operands(packed_p, p_operand);
    } else if constexpr (kSumsTdvOfP) {
#pragma unroll
      for (int n = 0; n < kPartTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) kept[n][i] = kHasDropout && is_dropped(p[n][i]) ? 0.0f : p[n][i] * kept_scale;
      to_operands(kept, p_operand);
    }
    if constexpr (!kSumsTdv) return;
    if constexpr (kHasDerivative) {
      PackedWeights::to_operands(packed, pu_operand);
    } else {
#pragma unroll
      for (int n = 0; n < kPartTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          kept[n][i] = kHasDropout && is_dropped(p[n][i]) ? 0.0f : p[n][i] * u[n][i] * kept_scale;
      to_operands(kept, pu_operand);
    }
  }

  // Where roles are split: hands P' and u' to the consumer that makes dX'.
  CUFLASH_DEVICE u32 handed_over() const { return shared.p + p_at.stage * 2 * kBytesP + thread * 16; }
  CUFLASH_DEVICE void hand_over_p(const float (&p)[kPartTiles][4], const float (&u)[kPartTiles][4]) {
    ptx::fence_async_proxy();  // the statistics have been read, which TMA overwrites
    shared.p_ring.empty(p_at).wait(p_at.parity ^ 1);
#pragma unroll
    for (int n = 0; n < kPartTiles; ++n) {
      ptx::store_shared_f32x4(handed_over() + n * 128 * 16, p[n]);
      ptx::store_shared_f32x4(handed_over() + kBytesP + n * 128 * 16, u[n]);
    }
    arrive_as_warp(shared.p_ring.full(p_at));
    p_at.advance();
  }

  // [6] dX' = P' * (dP' - delta) in place of dP' and tdX' = u' * dX' + P' * (tdP' - tdelta) in place of tdP'. Where a
  // function makes scores, `u` is what dP' - delta is multiplied by.
  CUFLASH_DEVICE void make_dx(float (&p)[kPartTiles][4], float (&u)[kPartTiles][4], float (&dx)[kPartTiles][4],
                              float (&tdx)[kPartTiles][4]) {
    [[maybe_unused]] const ScaledGradients scaled(common.scale, tscale_of(common));
    if constexpr (!makes_tdv) shared.p_ring.full(p_at).wait(p_at.parity);
#pragma unroll
    for (int n = 0; n < kPartTiles; ++n) {
      float delta[2], tdelta[2];
      ptx::load_shared_x2(s_stats() + n * 64 + 8, delta);
      ptx::load_shared_x2(s_tangents() + n * 64 + 8, tdelta);
      if constexpr (!makes_tdv) {
        ptx::load_shared_f32x4(handed_over() + n * 128 * 16, p[n]);
        ptx::load_shared_f32x4(handed_over() + kBytesP + n * 128 * 16, u[n]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float dp = dx[n][i], tdp = kMovesDp ? tdx[n][i] : 0.0f, weight = p[n][i];
        if constexpr (kHasDropout) {
          const bool drops = is_dropped(weight);
          dp = (drops ? 0.0f : dp) * kept_scale, tdp = (drops ? 0.0f : tdp) * kept_scale, weight = fabsf(weight);
        }
        dp -= delta[i % 2];
        dx[n][i] = weight * dp;
        tdx[n][i] = u[n][i] * (kHasDerivative ? dp : dx[n][i]) + weight * (tdp - tdelta[i % 2]);
        scaled.apply(dx[n][i], tdx[n][i]);
      }
    }
    if constexpr (!makes_tdv) {
      arrive_as_warp(shared.p_ring.empty(p_at));
      p_at.advance();
    }
  }

  // Stores dX' and tdX' to shared memory, where rows are keys, for the warpgroup of tdQ.
  CUFLASH_DEVICE void hand_over_dx() {
    if (kParts == 1 || part == 0) shared.dx_ring.empty(dx_at).wait(dx_at.parity ^ 1);
    const u32 line = dx_at.stage * kBytesDx + (first + warp_key + lane_index() % 16) * kLineBytes;
    const auto store = [&](u32 tile, const Fragment(&operand)[kPartRows / 16]) {
#pragma unroll
      for (int k = 0; k < kPartRows / 16; ++k)
        ptx::store_matrix_x4(tile + line +
                                 (((kParts == 1 ? 0 : part * kPartRows * 2) + k * 32 + lane_index() / 16 * 16) ^
                                  (lane_index() % 8 * 16)),
                             operand[k].word);
    };
    if constexpr (kSumsTdq) store(shared.tdx, tdx_operand);
    if constexpr (kSumsTdqOfDx) store(shared.dx, dx_operand);
    ptx::fence_async_proxy();  // of these, for products; and of the statistics, which TMA overwrites
    if (kParts > 1 && part + 1 < kParts) return;
    arrive_as_warp(shared.dx_ring.full(dx_at));
    dx_at.advance();
  }

  // ---- A step: one tile of queries ----------------------------------------------------------------------------------
  // The first step, too, issues sums of "the part before", and those of the second step replace their results. A first
  // step outside of the loop would take twice the instructions, and more registers.
  CUFLASH_DEVICE void step(int number) {
    float p[kPartTiles][4], u[kPartTiles][4];     // S' and tX' before
    float dx[kPartTiles][4], tdx[kPartTiles][4];  // dP' and tdP' before
    [[maybe_unused]] u32 packed[kHasDerivative ? kPartTiles : 1][2];
    [[maybe_unused]] u32 packed_p[kHasDerivative && kSumsTdvOfP ? kPartTiles : 1][2];
    if constexpr (kSumsFirst) issue_sums(number > 1);
    if constexpr (kNumStages == 1) finish_sums<0>(number > 0);
    if (kStageRows < kBlockM || kParts == 1 || part == 0) wait_for_queries();
    [[maybe_unused]] const bool large = makes_tdv && has_large_rows();  // early: products do not wait for it
    ping_pong.wait();
    if constexpr (makes_tdv) issue_scores(p, u);
    if constexpr (makes_tdk) issue_dp(dx, tdx);
    if constexpr (!kSumsFirst) issue_sums(number > 1);
    ping_pong.pass();
    constexpr int kPending = kSumsFirst ? 0 : kSumGroups;  // groups that are in flight while the next lines run
    if constexpr (kSumsFirst && kNumStages > 1) finish_sums<1>(number > 0);
    if constexpr (makes_tdv) make_p<kPending + makes_tdk>(p, u, packed, packed_p, large);
    if constexpr (!makes_tdk) {
      if constexpr (kSumsFirst) {
        if (elected) shared.q_ring.empty(q_at()).arrive();
      } else {
        finish_sums<0>(number > 0);
      }
      hand_over_p(p, u);
      to_weights(p, u, packed, packed_p);
    } else {
      wait_for<kPending>(dx);
      ptx::fence_operand(tdx);
      make_dx(p, u, dx, tdx);
      if constexpr (!kSumsFirst) finish_sums<0>(number > 0);
      if constexpr (makes_tdv) to_weights(p, u, packed, packed_p);
      to_operands(dx, dx_operand);
      to_operands(tdx, tdx_operand);
      hand_over_dx();
      if constexpr (kSumsFirst) shared.q_ring.full(q_at()).wait(q_at().parity);  // which the sums of this part read
    }
    advance();
  }
  CUFLASH_DEVICE void advance() {
    stage_before = at.stage, part_before = part;
    const bool is_last = kParts == 1 || ++part == kParts;
    if (is_last) part = 0, m_tile.advance(work.queries);
    if (kStageRows < kBlockM || is_last) at.advance(), parity ^= 1;
  }

  CUFLASH_DEVICE void run() {
    if (work.num_steps > 0) {
      wait_for_keys();
      if constexpr (kSumsTdvOfP) set_to_zero(p_operand);
      set_to_zero(pu_operand);
      set_to_zero(dx_operand);
      set_to_zero(tdx_operand);
      if constexpr (kSumsFirst) {  // which the first sums read
        shared.do_ring.full(at).wait(at.parity);
        shared.q_ring.full(q_at()).wait(q_at().parity);
      }
#pragma unroll 1
      for (int i = 0; i < kParts * work.num_steps; ++i) step(i);
      issue_sums(kParts * work.num_steps > 1);
      finish_sums<0>(true);
    }
    ping_pong.finish();
    ptx::sync_named(kEnd, kConsumerThreads + 128);
    store_gradients();
  }
  template <int count>
  CUFLASH_DEVICE static void set_to_zero(Fragment (&operand)[count]) {
#pragma unroll
    for (auto& fragment : operand)
      for (u32& word : fragment.word) word = 0;
  }

  // ---- The epilogue -------------------------------------------------------------------------------------------------

  // Rounds tdK and tdV and stores them by way of shared memory: over their rows of K and V, which nothing reads again.
  CUFLASH_DEVICE void store_gradients() {
    const u32 rows_k = rows_of(shared.k), rows_v = rows_of(shared.v);
    [[maybe_unused]] const float factor = ScaledGradients(common.scale, tscale_of(common)).factor;
    if constexpr (makes_tdv) store_fragments_chunked<kBlockN>(rows_v, warp_key, tdv, 1.0f, 1.0f);
    if constexpr (makes_tdk) store_fragments_chunked<kBlockN>(rows_k, warp_key, tdk, factor, factor);
    ptx::fence_async_proxy();
    ptx::sync_named(kConsumer + index, 128);
    const int first_key = work.first_key + first;
    const int rows = kIsPacked ? seqlen_k_of(common, batch) - first_key : 64;
    if (rows < 64) {
      const auto store = [&](const Tensor& result, auto columns, u32 tile_rows) {
        Storage* first_row = (Storage*)keys_of(common, result, batch, work.head_kv) + first_key * result.row_stride;
        store_first_rows<kBlockN, decltype(columns)::value>(first_row, result.row_stride, tile_rows,
                                                            at_least_zero(rows), thread);
      };
      if constexpr (makes_tdv && kNeedsDv) store(common.dv, Integer<kHeadDimV>{}, rows_v);
      if constexpr (makes_tdk && kNeedsDk) store(common.dk, Integer<kHeadDim>{}, rows_k);
      return;
    }
    if (elected && first_key < common.seqlen_k) {
      const int row = key_start_of(batch) + first_key, entry = entry_of(batch);
      if constexpr (makes_tdv && kNeedsDv)
        store_chunks<kBlockN, kDimV>(params.map[kMapOfTdv], rows_v, row, work.head_kv, entry);
      if constexpr (makes_tdk && kNeedsDk)
        store_chunks<kBlockN, kDim>(params.map[kMapOfTdk], rows_k, row, work.head_kv, entry);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
  }
};

CUFLASH_DEVICE void backward_jvp(const BackwardJvpParams& params) {
  if (!is_chosen(params.common)) return;
  const Shared shared;
  Work found = {};
  if constexpr (kIsPacked) {
    found = BackwardWork::find(params.common);
    if (!has_keys(params.common, found)) {
      if constexpr (kClearsAhead) {
        if (ptx::thread_index() < kClearThreads)
          clear_ahead(params.common, num_tiles_of(params.common, params.common.seqlen_q, kBlockM), found,
                      ptx::thread_index());
      }
      return;
    }
  }
  if (ptx::thread_index() == 0) make_barriers(shared);
  ptx::sync_block();
  const u32 warpgroup = ptx::uniform(ptx::thread_index() / 128);
  if (kHasProducer && warpgroup == kConsumers + 1) {
    ptx::decrease_registers<kHasProducer ? kProducerRegisters : 24>();
    produce(params, shared, found, ptx::thread_index() % 128);
  } else if (warpgroup == kConsumers) {
    ptx::decrease_registers<kTdqRegisters>();
    accumulate_tdq(params, shared, found, ptx::thread_index() % 128);
    ptx::arrive_named(kEnd, kConsumerThreads + 128);
  } else if constexpr (!kSplitsRoles) {
    ptx::increase_registers<kFirstRegisters>();
    Consumer<true, true>(params, shared, found, warpgroup).run();
  } else if (warpgroup == 0) {
    ptx::increase_registers<kFirstRegisters>();
    Consumer<true, false>(params, shared, found, warpgroup).run();
  } else {
    ptx::increase_registers<kSecondRegisters>();
    Consumer<false, true>(params, shared, found, warpgroup).run();
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, BackwardJvpParams, kNumThreads, 1, backward_jvp)
