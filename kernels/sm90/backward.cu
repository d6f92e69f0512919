// Backward pass in half precision on compute capability 9.0 (Hopper), transposed, with wgmma and TMA.
//
//   P' = exp(K Q' - lse)    dP' = V dO'    dS' = P' * (dP' - delta)
//   dV = P' dO              dK = dS' Q     dQ += dS K                       (X' is X transposed; rows of X' are keys)
//
// A block owns kBlockN keys of one key/value head. It iterates over the query heads that share its keys, and for each
// over the tiles of queries. Where tiles of keys alone do not fill the device, blocks share the steps of a loop. Each
// warpgroup has a role:
//   - Two consumers accumulate dK and dV in registers. P' and dS' are operands there, too (but see Schedule). Each of
//     them makes everything for 64 keys of its own. Or, where registers hold only one of dV and dK, both have the same
//     64 keys: the first makes P' and dV, the second dS' and dK, and P' is handed over in shared memory.
//   - The warpgroup of dQ reads dS' from shared memory, makes dQ of the tile, and adds it to memory, at its own pace.
//     It first clears what later blocks add to (common/io/clear_dq.cuh). One of its warps is the producer.
//   - Where blocks add to dQ in order, three warps of a last warpgroup each do what takes as long as a memory access:
//     load tiles (once dQ is done with a step, to keep out of its way), wait for this block's turn, and end the turn.
// Consumers issue dV and dK of a tile of queries right after S' of the next one (after dP' where they make no S'), so
// that these run during P' or dS' of the next one. They ping-pong through what the other would slow down (kTurns).
//
//   barrier       one phase is over when              who waits
//   kv_full       K and V have arrived                consumers, dQ
//   q_full[i]     Q and statistics are in stage i     consumers, before S'
//   q_empty[i]    all consumers have used stage i     producer, before it loads the next Q there
//   do_full[i], do_empty[i]                           the same for dO; in order, dQ arrives at do_empty, too
//   ds_full[i]    dS' has been written to stage i     dQ
//   ds_empty[i]   dQ, and dK if it does, has read it  the consumers that make dS', before they write there again
//   p_full        P' has been handed over             the consumer that makes dS', where roles are split
//   p_empty       P' has been read                    the consumer that makes P', before it hands over the next
//   turn[i], added[i], ended[i]                       the order of dQ (sm90/dq_order.cuh)
//   named: per consumer, one for itself and one for the ping-pong; one for all consumers; one for consumers and dQ
#include "common/io/clear_dq.cuh"
#include "common/config.cuh"
#include "common/score/dropout.cuh"
#include "common/io/fragments.cuh"
#include "common/score/mask_bits.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/score/scores.cuh"
#include "sm90/bias_terms.cuh"
#include "sm90/backward_dq.cuh"
#include "sm90/backward_layout.cuh"
#include "sm90/backward_sums.cuh"
#include "sm90/backward_weights.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/score_arg_sums.cuh"
#include "sm90/function_weights.cuh"
#include "sm90/ping_pong.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/per_row_values.cuh"
#include "sm90/tiles.cuh"

// A consumer warpgroup, `index` of kConsumers, of 64 keys: it makes P' and dV, or dS' and dK, or all of them.
//
//   [GEMM 1] S' = K Q'            [3] P' = exp(S' - lse)            [GEMM 5] dV += P' dO      [GEMM 7] dQ += dS K
//   [GEMM 2] dP' = V dO'          [4] dS' = P' * (dP' - delta)      [GEMM 6] dK += dS' Q      (backward_dq.cuh)
template <bool makes_dv, bool makes_dk>
struct Consumer {
  static constexpr bool kIssuesDpEarly = makes_dk && kDpEarly;
  // Before S' is there, or as soon as it is.
  static constexpr bool kIssuesDpFirst = kIssuesDpEarly && !kEntropyInDp;
  static constexpr bool kIssuesDpNext = kIssuesDpEarly && kEntropyInDp;
  static constexpr int kGradientGroups = (makes_dv && kHasValues) + makes_dk;  // of wgmma: [GEMM 5] and [GEMM 6]
  // Keeping the lane in a register makes a step 3 to 5 % faster where one is to spare, and 1 to 2 % slower elsewhere.
  static constexpr bool kKeepsLane = kHoldsK && !kIsPacked;

  const BackwardParams& params;
  const Params& common;
  const Shared& shared;
  const BackwardWork work;
  const Entry batch;
  const u32 index, thread, kept_lane;
  const bool elected;
  const u32 first;  // of its 64 keys, in the tile
  const int warp_key, lane_key;
  const u32 rows_k, rows_v;
  const float kept_scale;
  const PingPong<kTurns != Turns::kNone, kConsumers, kPingPongBarrier> ping_pong;

  float dk[makes_dk ? kDim / 8 : 1][4], dv[makes_dv && kHasValues ? kDimV / 8 : 1][4];
  Fragment k_operand[kHoldsK ? kDim / 16 : 1];
  Fragment p_operand[kBlockM / 16], ds_operand[kBlockM / 16];  // both of the step before
  Position<kNumStages> at;
  Position<kDsStages> ds_at;
  Position<kPStages> p_at;
  QueryTileOfStage m_tile;
  Position<kListedSlots> listed;
  int stage_before = 0;
  LaneSums lane_sums;
  ScoreArgLane score_args;
  bool scores_are_small = false;  // in this step: see Score::cap
  bool may_be_large = false;      // whether some step has large rows

  CUFLASH_DEVICE Consumer(const BackwardParams& params_, const Shared& shared_, const Work& found, u32 index_)
      : params(params_),
        common(params.common),
        shared(shared_),
        work(common, found),
        batch(work.work.batch),
        index(index_),
        thread(ptx::thread_index() % 128),
        kept_lane(lane_index()),
        elected(thread == 0),
        first(kSplitsRoles ? 0 : index * 64),
        warp_key(thread / 32 * 16),
        lane_key(work.first_key + first + warp_key + fragment_row()),
        rows_k(shared.k + first * kLineBytes),
        rows_v(shared.v + first * kLineBytes),
        kept_scale(kept_scale_of(common)),
        ping_pong(index),
        m_tile(work.first<QueryTileOfStage>()) {
    set_zero((float (&)[1][sizeof(dk) / sizeof(dk[0])][4]) dk);
    set_zero((float (&)[1][sizeof(dv) / sizeof(dv[0])][4]) dv);
  }

  // ---- Waiting ------------------------------------------------------------------------------------------------------

  // Waits for K and V, and clears rows past the last key: their weights are 0, but 0 times a NaN there would be NaN.
  CUFLASH_DEVICE void wait_for_keys() {
    shared.kv_full.wait(0);
    if constexpr (kHidesLastKeys) {
      const int valid = work.key_stop - work.first_key;
      if (valid < kBlockN) {
        if (index == 0) {
          zero_rows<kBlockN, kDim>(shared.k, valid, thread);
          if constexpr (kHasValues) zero_rows<kBlockN, kDimV>(shared.v, valid, thread);
          ptx::fence_async_proxy();
        }
        ptx::sync_named(kAll, kConsumerThreads);
      }
    }
    if constexpr (kHoldsK) load_fragments_chunked<kBlockN>(rows_k, warp_key, k_operand);
  }

  // Waits for Q, and for dO unless step() waits for it before [GEMM 2]. Clears rows past the last query, too.
  CUFLASH_DEVICE void wait_for_queries(u32 s_q, u32 s_do) {
    shared.q_ring.full(at).wait(at.parity);
    if constexpr (!kIssuesDpEarly && kHasValues) shared.do_ring.full(at).wait(at.parity);
    if constexpr (kIsPacked) {
      const int valid = seqlen_q_of(common, batch) - m_tile.m_block * kBlockM;
      if (valid < kBlockM) {
        if (index == 0) {
          if constexpr (kHasValues) shared.do_ring.full(at).wait(at.parity);
          zero_last_of_64<kBlockM, kDim>(s_q, valid, thread);
          if constexpr (kHasValues) zero_last_of_64<kBlockM, kDimV>(s_do, valid, thread);
          ptx::fence_async_proxy();
        }
        ptx::sync_named(kAll, kConsumerThreads);
      }
    }
  }

  // ---- Products -----------------------------------------------------------------------------------------------------

  // [GEMM 1] S' = K Q'.
  CUFLASH_DEVICE void issue_s(float (&p)[kQueryTiles][4], u32 s_q) {
    if constexpr (kHoldsK)
      issue_rows<kDim, kBlockM>(p, k_operand, s_q);
    else
      issue_rows<kDim, kBlockN, kBlockM>(p, rows_k, s_q);
  }

  // [GEMM 2] dP' = V dO', or dP' += V dO' where it begins with what follows from exponents.
  CUFLASH_DEVICE void issue_dp(float (&ds)[kQueryTiles][4], u32 s_do) {
    if constexpr (!kHasValues && kEntropyInDp) return;
    if constexpr (!kHasValues) return set_zero((float (&)[1][kQueryTiles][4])ds);
    issue_rows<kDimV, kBlockN, kBlockM>(ds, rows_v, s_do, kEntropyInDp);
  }
  CUFLASH_DEVICE void issue_dp_early(float (&ds)[kQueryTiles][4], u32 s_do) {
    if constexpr (kHasValues) shared.do_ring.full(at).wait(at.parity);
    issue_dp(ds, s_do);
  }
  // dP' = -(delta + dH E), where `p` holds the exponents E.
  CUFLASH_DEVICE static void start_dp(const float (&p)[kQueryTiles][4], float (&ds)[kQueryTiles][4], u32 s_stats) {
    const u32 s_dh = s_stats + kStatsOfEntropy - fragment_column() * 4;
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      float delta[2], dh[2];
      ptx::load_shared_x2(s_stats + n * 64 + 8, delta);
      ptx::load_shared_x2(s_dh + n * 32, dh);
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[n][i] = -ptx::fused(dh[i % 2], p[n][i], delta[i % 2]);
    }
  }

  // [GEMM 5] dV += P' dO and [GEMM 6] dK += dS' Q, of the step before. They replace the sums unless `adds`. `nothing`
  // says that there is no step before. Then any operands will do, because the next step replaces these sums.
  CUFLASH_DEVICE void issue_gradients(bool adds, bool nothing) {
    const u64 dout = descriptor_of_transposed<kBlockM>(shared.dout + stage_before * kBytesDo);
    const u64 q = descriptor_of_transposed<kBlockM>(shared.q + stage_before * kBytesQ);
    // dS' of the keys of this consumer. It last wrote them to the other of the two stages.
    const u64 ds = descriptor_of(nothing ? shared.q : shared.ds + (ds_at.stage ^ 1) * kBytesDs + first * kLineBytes);
    if constexpr (kDkFromShared) ptx::sync_named(kConsumer + index, 128);
    ptx::fence_operand(dv);
    ptx::fence_operand(dk);
    ptx::wgmma_fence();
    if constexpr (makes_dv && kHasValues)
      issue_columns<kBlockM>(dv, [&](int k) -> auto& { return p_operand[k]; }, dout, adds);
    if constexpr (makes_dk && kDkFromShared)
      issue_columns<kBlockM>(dk, [&](int k) { return along_k<kBlockN>(ds, k); }, q, adds);
    else if constexpr (makes_dk)
      issue_columns<kBlockM>(dk, [&](int k) -> auto& { return ds_operand[k]; }, q, adds);
  }

  CUFLASH_DEVICE void issue_step_before(int number) { issue_gradients(number > 1, number == 0); }

  // Waits for these two products. With `frees`, gives back the tiles that they have read.
  CUFLASH_DEVICE void finish_gradients(bool frees) {
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dv);
    ptx::fence_operand(dk);
    // A finished product does not mean that all threads have read the statistics, so they synchronise here. A consumer
    // that makes dS' need not: the next tile is loaded only once each of its warps has arrived at ds_full.
    if constexpr (!makes_dk) ptx::sync_named(kConsumer + index, 128);
    if (elected && frees) {
      if constexpr (kDkFromShared) shared.ds_ring.empty({ds_at.stage ^ 1}).arrive();
      shared.do_ring.empty({stage_before}).arrive();
      shared.q_ring.empty({stage_before}).arrive();
    }
  }

  // ---- Between the products -----------------------------------------------------------------------------------------

  CUFLASH_DEVICE static void to_operands(const float (&value)[kQueryTiles][4], Fragment (&operand)[kBlockM / 16]) {
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k) to_operand(value, k, operand[k]);
  }
  // Makes operands of the weights that dV is made of. Those that dropout has marked become 0.
  template <int rows>
  CUFLASH_DEVICE void to_weights(const float (&p)[kQueryTiles][4], const u32 (&packed)[rows][2]) {
    if constexpr (kKept == Kept::kWeights) {
      PackedWeights::to_operands(packed, p_operand);
    } else if constexpr (kHasDropout) {
      float kept[kQueryTiles][4];
#pragma unroll
      for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) kept[n][i] = is_dropped(p[n][i]) ? 0.0f : p[n][i];
      to_operands(kept, p_operand);
    } else {
      to_operands(p, p_operand);
    }
  }

  // Element i of the four that two words hold.
  CUFLASH_DEVICE static float element_of(const u32 (&packed)[2], int i) {
    return ptx::to_float32(Float16{}, (u16)(packed[i / 2] >> i % 2 * 16));
  }

  // Loads the mask bits of a tile, if it needs them. Called before the product whose pairs they hide is issued.
  CUFLASH_DEVICE u32 load_mask() const {
    if (!kMaskByBits || !m_tile.needs_mask(work.queries)) return ~0u;
    const int n_block = work.work.block * (kBlockN / kBitsBlock) + first / kBitsBlock;
    return *mask_words_of(common, MaskBits(common), batch, m_tile.head, m_tile.m_block, n_block);
  }

  // The RowSum of this lane's first query.
  CUFLASH_DEVICE const RowSum* row_sums() const {
    return row_sums_of(common, batch, m_tile.head) + m_tile.m_block * kBlockM + fragment_column();
  }

  // Takes the tile of queries of this step, where there is a block-sparse index. Code that few steps run takes it
  // again, so that the other steps keep it in no register.
  CUFLASH_DEVICE void take_tile() { m_tile.take(shared.listed_at(listed)); }

  // Hides pairs of a tile that needs a mask.
  CUFLASH_DEVICE void hide(const Weights& weights, float (&p)[1][kQueryTiles][4], u32 shown) {
    take_tile();
    const int first_row = m_tile.m_block * kBlockM;
    if constexpr (kMaskByBits)
      hide_by_bits(p[0], shown);
    else
      weights.hide(
          p, true, m_tile.evaluates_mask(), [&](int n, int i) { return first_row + 8 * n + fragment_column() + i % 2; },
          [&](int, int i) { return lane_key + i / 2 * 8; });
  }
  // Makes scores relative to the row max in a tile with large rows.
  CUFLASH_DEVICE void make_large_relative(const Weights& weights, float (&p)[1][kQueryTiles][4], u32 s_stats) {
    if (!has_large_rows(s_stats)) return;
    take_tile();
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) make_relative(p[0][n], n, row_sums(), weights.exponent_scale);
  }

  // [3] P' = exp(S' - lse), or with kEntropyInDp its exponents, once at most `pending` groups of wgmma are in flight.
  // `derivative` gets the derivatives of the scores by the scaled products.
  template <int pending, int rows>
  CUFLASH_DEVICE void make_p(float (&p)[kQueryTiles][4], u32 (&derivative)[rows][2], u32 s_stats, u32 shown) {
    const int head = m_tile.head, first_row = m_tile.m_block * kBlockM;
    const Weights weights(common, batch, head, work.key_stop, work.own_diagonal);
    const bool masked = m_tile.needs_mask(work.queries);
    const auto row_of = [&](int n, int i) { return first_row + 8 * n + fragment_column() + i % 2; };
    const auto key_of = [&](int, int i) { return lane_key + i / 2 * 8; };

    auto& products = (float (&)[1][kQueryTiles][4])p;
    [[maybe_unused]] float of_keys[2];  // loaded before the wait, because they are needed right after it
    if constexpr (kHasPerKeyValues) {
      const PerKeyValues numbers(common, weights.score, batch, head);
      of_keys[0] = numbers.of(lane_key), of_keys[1] = numbers.of(lane_key + 8);
    }
    wait_for<pending>(p);
    if constexpr (kTurns == Turns::kUntilS) ping_pong.pass();
    // Where derivatives are kept, no registers are left for the coefficients of the shorter series of cap_near.
    scores_are_small = kKept == Kept::kWeights ? weights.score.cap_near(products) : weights.score.cap(products);
    keep_derivatives(p, derivative);
    if constexpr (kAddsByTile) {
      const int key = first + warp_key;
      BiasTerms<true> bias_terms(weights.score, row_of(0, 0), lane_key,
                                 shared.bias + at.stage * kBytesBias + key / kBiasChunk * kBlockM * kLineBytes +
                                     key % kBiasChunk * kBiasBytes);
      if constexpr (kHasPerKeyValues) bias_terms.of_keys[0] = of_keys[0], bias_terms.of_keys[1] = of_keys[1];
      bias_terms.visit<kQueryTiles>([&](int n, int i, auto score_of) { p[n][i] = score_of(p[n][i]); });
    } else if constexpr (!kFactorInExponent) {
#pragma unroll
      for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) p[n][i] = weights.score.with_bias(p[n][i], row_of(n, i), key_of(0, i));
    }
    if (masked) hide(weights, products, shown);
    if (may_be_large) make_large_relative(weights, products, s_stats);
    to_p(p, derivative, s_stats, weights.exponent_scale, masked || may_be_large);
    if constexpr (kHasDropout) Dropout(common, batch, head).mark(p, row_of(0, 0), lane_key);
  }

#if CUFLASH_HAS_SCORE_FUNCTION
  // [3] The same, where a score_mod makes the scores.
  template <int pending, int rows>
  CUFLASH_DEVICE void make_p_by_function(const Functions& functions, float (&p)[kQueryTiles][4],
                                         u32 (&derivative)[rows][2], u32 s_stats, u32 shown) {
    const int first_row = m_tile.m_block * kBlockM, lane_query = first_row + fragment_column();
    const Mask mask(common, batch, m_tile.head, work.key_stop, work.own_diagonal);
    OfKey of_keys[2];
    PerRowValues::load_keys(functions, s_row_values(), lane_key, of_keys);
    const bool large = may_be_large && has_large_rows(s_stats);
    wait_for<pending>(p);
    if constexpr (kKeepsProducts) keep_scores(p);
    const FunctionWeights by_function = {functions,  mask,     of_keys, common.scale, s_stats, s_row_values(),
                                         lane_query, lane_key, shown,   row_sums(),   large};
    if (large || m_tile.needs_mask(work.queries) || first_row + kBlockM > seqlen_q_of(common, batch))
      by_function.make(p, derivative, Constant<true>{});
    else
      by_function.make(p, derivative, Constant<false>{});
    if constexpr (kHasDropout) Dropout(common, batch, m_tile.head).mark(p, lane_query, lane_key);
  }
  CUFLASH_DEVICE u32 s_row_values() const { return shared.row_values + warp_index() * kBytesPoints; }
#endif

  // Keeps the derivatives of capped scores, or their tanh, which `p` holds at this point.
  template <int rows>
  CUFLASH_DEVICE void keep_derivatives(const float (&p)[kQueryTiles][4], u32 (&derivative)[rows][2]) const {
    if constexpr (kNeedsDsoftcap) {
      keep_scores(p);
    } else if constexpr (kKept == Kept::kDerivatives) {
#pragma unroll
      for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float first = p[n][2 * half], second = p[n][2 * half + 1];
          derivative[n][half] = ptx::pack(Float16{}, 1.0f - first * first, 1.0f - second * second);
        }
    }
  }

  // Where roles are split: hands P', times the derivatives, to the consumer that makes dS'.
  template <int rows>
  CUFLASH_DEVICE void hand_over_p(const float (&p)[kQueryTiles][4], const u32 (&derivative)[rows][2]) {
    ptx::fence_async_proxy();  // lse and biases have been read, which TMA overwrites
    shared.p_ring.empty(p_at).wait(p_at.parity ^ 1);
    const u32 s_p = shared.p + p_at.stage * kBytesP + thread * 16;
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      float handed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        handed[i] = kKept == Kept::kDerivatives ? p[n][i] * element_of(derivative[n], i) : p[n][i];
      ptx::store_shared_f32x4(s_p + n * 128 * 16, handed);
    }
    arrive_as_warp(shared.p_ring.full(p_at));
    p_at.advance();
  }

  // Replaces exponents by P'.
  CUFLASH_DEVICE static void exponentiate(float (&p)[kQueryTiles][4]) {
#pragma unroll
    for (auto& n_tile : p)
#pragma unroll
      for (float& x : n_tile) x = exponential(x);
  }

  // [4] dS' = P' * (dP' - delta), in place of dP'; with kEntropyInDp delta is in dP'.
  template <int rows>
  CUFLASH_DEVICE void make_ds(float (&p)[kQueryTiles][4], float (&ds)[kQueryTiles][4], const u32 (&derivative)[rows][2],
                              u32 s_stats) {
    const u32 s_p = shared.p + p_at.stage * kBytesP + thread * 16;
    [[maybe_unused]] const float distance = sums().distance(m_tile.m_block * kBlockM + fragment_column());
    if constexpr (!makes_dv) shared.p_ring.full(p_at).wait(p_at.parity);
    [[maybe_unused]] const u32 s_dentropy = s_stats + kStatsOfEntropy - fragment_column() * 4;
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      // The other consumer is let in before the last n-tile. The assembler then moves most exponentials after that
      // point; a ping-pong that passes only after the exponentials costs more than it gains.
      if (kTurns == Turns::kUntilDs && n == kQueryTiles - 1) ping_pong.pass();
      if constexpr (kEntropyInDp) {
#pragma unroll
        for (int i = 0; i < 4; ++i) ds[n][i] *= p[n][i];
        continue;
      }
      float delta[2];
      ptx::load_shared_x2(s_stats + n * 64 + 8, delta);
      [[maybe_unused]] float dentropy[2];
      if constexpr (kTakesDentropy) ptx::load_shared_x2(s_dentropy + n * 32, dentropy);
      if constexpr (!makes_dv) ptx::load_shared_f32x4(s_p + n * 128 * 16, p[n]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float row_delta = delta[i % 2];
        if constexpr (kTakesDentropy)
          row_delta = ptx::fused(dentropy[i % 2], log_of_weight(kHasDropout ? fabsf(p[n][i]) : p[n][i]), row_delta);
        ds[n][i] = gradient_of(p[n][i], ds[n][i], kept_scale, row_delta);
        if constexpr (kSumsEarly) lane_sums.add(n, i, ds[n][i], distance);
        if constexpr (kKept == Kept::kDerivatives && makes_dv && !kNeedsDsoftcap)
          ds[n][i] *= element_of(derivative[n], i);
      }
    }
    if constexpr (!makes_dv) {
      arrive_as_warp(shared.p_ring.empty(p_at));
      p_at.advance();
    }
  }

  // Adds the gradients of row maxima to dS'. In most tiles no query has its largest score at one of a warp's 16 keys.
  CUFLASH_DEVICE void add_dmax(float (&ds)[kQueryTiles][4], u32 s_stats) const {
    const u32 s_dmax = s_stats + kStatsOfMax - fragment_column() * 4, s_keys = s_dmax + kBytesDmax;
    const auto load_keys = [](u32 address, i32(&keys)[2]) {
      float bits[2];
      ptx::load_shared_x2(address, bits);
      keys[0] = (i32)ptx::bits_of(bits[0]), keys[1] = (i32)ptx::bits_of(bits[1]);
    };
    const i32 own = lane_key - fragment_row();
    i32 keys[2];  // of two queries of the tile
    load_keys(s_keys - fragment_column() * 4 + lane() * 8, keys);
    if (!ptx::any_lane((u32)(keys[0] - own) < 16 || (u32)(keys[1] - own) < 16)) return;
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      float dmax[2];
      ptx::load_shared_x2(s_dmax + n * 32, dmax);
      load_keys(s_keys + n * 32, keys);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (keys[i % 2] == lane_key + i / 2 * 8) ds[n][i] += dmax[i % 2];
    }
  }

  // Where a thread keeps its scores until dS' is made: the four of an n-tile are neighbours.
  CUFLASH_DEVICE u32 s_scores() const { return shared.scores + index * kBytesScores + thread * 16; }
  CUFLASH_DEVICE void keep_scores(const float (&value)[kQueryTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) ptx::store_shared_f32x4(s_scores() + n * 128 * 16, value[n]);
  }
  CUFLASH_DEVICE KeySumsSlot sums() const { return {common, work, (int)(first + warp_key) / 16}; }
  // Called at the end of a step of a query head. After its last step, leaves the sums that belong to the head.
  CUFLASH_DEVICE void leave_sums(int head, bool last) {
    if (m_tile.head == head && !last) return;
    if constexpr (kSumsScores) {
      sums().leave(head, lane_sums);
      lane_sums.start_head();
    }
#if CUFLASH_NEEDS_SCORE_ARGS
    score_args.leave(common, {common, batch, head}, lane_key);
#endif
  }

  CUFLASH_DEVICE u32 lane() const { return kKeepsLane ? kept_lane : lane_index(); }
  // Stores dS' to shared memory, where rows are keys, for the warpgroup of dQ. Then TMA may overwrite statistics and
  // biases, so that a fence follows their loads. It comes before the stores, for which it would wait, too, unless
  // products read them.
  CUFLASH_DEVICE void hand_over_ds() {
    constexpr bool kProductsReadDs = kDkFromShared || !kDqHoldsDs;
    if constexpr (!kProductsReadDs) ptx::fence_async_proxy();
    shared.ds_ring.empty(ds_at).wait(ds_at.parity ^ 1);
    const u32 line = shared.ds + ds_at.stage * kBytesDs + (first + warp_key + lane() % 16) * kLineBytes;
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k)
      ptx::store_matrix_x4(line + ((k * 32 + lane() / 16 * 16) ^ (lane() % 8 * 16)), ds_operand[k].word);
    if constexpr (kProductsReadDs) ptx::fence_async_proxy();
    arrive_as_warp(shared.ds_ring.full(ds_at));
    ds_at.advance();
  }

  // ---- A step: one tile of queries ----------------------------------------------------------------------------------
  // The first step, too, issues products of "the step before", and those of the second step replace their results. A
  // first step outside of the loop would take twice the instructions, and more registers.
  CUFLASH_DEVICE void step(int number) {
    const u32 s_q = shared.q + at.stage * kBytesQ, s_do = shared.dout + at.stage * kBytesDo;
    const u32 s_stats = shared.stats + at.stage * kBytesStats + fragment_column() * 8;
    float p[kQueryTiles][4], ds[kQueryTiles][4];
    // Two derivatives share a register, as float16; or two weights do, see PackedWeights.
    [[maybe_unused]] u32 derivative[kKept != Kept::kNothing && !kNeedsDsoftcap ? kQueryTiles : 1][2];
    // Without an index, the tile is known before it arrives: what follows is loaded while it does.
    if constexpr (kHasBlockIndex) wait_for_queries(s_q, s_do);
    take_tile();
    [[maybe_unused]] const u32 shown = makes_dv ? load_mask() : 0;
#if CUFLASH_HAS_SCORE_FUNCTION
    const Functions of_head(common, batch, m_tile.head);
    const PerRowValues row_values(of_head, s_row_values(), m_tile.m_block * kBlockM, work.first_key + first + warp_key);
#endif

    if constexpr (!kHasBlockIndex) wait_for_queries(s_q, s_do);
    ping_pong.wait();
    if constexpr (makes_dv) issue_s(p, s_q);
    if constexpr (kIssuesDpFirst) issue_dp_early(ds, s_do);
    if constexpr (!kIssuesDpNext) issue_step_before(number);
    if constexpr (!makes_dk) ping_pong.pass();
    constexpr int kPending = kIssuesDpNext ? 0 : kGradientGroups + (kIssuesDpFirst && kHasValues);
#if CUFLASH_HAS_SCORE_FUNCTION
    if constexpr (makes_dv || kSumsScoreArgs) row_values.store();
    if constexpr (makes_dv) make_p_by_function<kPending>(of_head, p, derivative, s_stats, shown);
#else
    if constexpr (makes_dv) make_p<kPending>(p, derivative, s_stats, shown);
#endif
    if constexpr (kIssuesDpNext) start_dp(p, ds, s_stats), issue_dp_early(ds, s_do), issue_step_before(number);
    if constexpr (!makes_dk) {
      finish_gradients(number > 0);
      hand_over_p(p, derivative);
      to_weights(p, derivative);
    } else {
      finish_ds(p, ds, derivative, s_do, s_stats, number > 0);
      hand_over_ds();
      // These sums come last, because nothing waits for them: dS' is on its way.
      if constexpr (kSumsLate) add_to_sums(ds);
    }
    [[maybe_unused]] const int head = m_tile.head;
    advance();
    if constexpr (makes_dk && (kSumsScores || kSumsScoreArgs)) leave_sums(head, number + 1 == work.num_steps);
  }

  CUFLASH_DEVICE void advance() {
    stage_before = at.stage;
    at.advance();
    listed.advance();
    m_tile.advance(work.queries);
  }

  // The second half of a step of a consumer that makes dS'. P' and dS' become operands, in place of those of the step
  // before. So its products are finished first; with `frees`, the tiles that they have read are given back.
  template <int rows>
  CUFLASH_DEVICE void finish_ds(float (&p)[kQueryTiles][4], float (&ds)[kQueryTiles][4],
                                const u32 (&derivative)[rows][2], u32 s_do, u32 s_stats, bool frees) {
    if constexpr (kIssuesDpEarly) {
      if constexpr (kEntropyInDp) exponentiate(p);
      ptx::wgmma_wait<kGradientGroups>();
    } else {
      finish_gradients(frees);
      if constexpr (kEntropyInDp) start_dp(p, ds, s_stats);
      issue_dp(ds, s_do);
      if constexpr (kEntropyInDp) exponentiate(p);
      if constexpr (makes_dv) to_weights(p, derivative);
      ptx::wgmma_wait<0>();
    }
    if constexpr (kHasValues) ptx::fence_operand(ds);
    make_ds(p, ds, derivative, s_stats);
    if constexpr (kTakesDmax) add_dmax(ds, s_stats);
    if constexpr (kIssuesDpEarly) {
      finish_gradients(frees);
      if constexpr (makes_dv) to_weights(p, derivative);
    }
    if constexpr (kNeedsDsoftcap) {
      if (scores_are_small)
        lane_sums.add_cap(ds, s_scores(), Constant<true>{});
      else
        lane_sums.add_cap(ds, s_scores(), Constant<false>{});
    }
#if CUFLASH_NEEDS_SCORE_ARGS
    const Functions of_head(common, batch, m_tile.head);
    if constexpr (kStepSums > 0) shared.ds_ring.empty(ds_at).wait(ds_at.parity ^ 1);
    score_args.add(of_head, common.scale, m_tile.m_block * kBlockM + fragment_column(), lane_key, s_scores(),
                   s_row_values(), shared.step_sums + ds_at.stage * kBytesStepSums, sums().warp, ds);
#endif
    to_operands(ds, ds_operand);
  }
  CUFLASH_DEVICE void add_to_sums(const float (&ds)[kQueryTiles][4]) {
    const float distance = sums().distance(m_tile.m_block * kBlockM + fragment_column());
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) lane_sums.add(n, i, ds[n][i], distance);
  }

  CUFLASH_DEVICE void run() {
    // With a split of the queries, or with a block-sparse index, the block may have no query of some head.
    if constexpr (makes_dk && kSumsScores && (kSplitsTail || kHasBlockIndex)) sums().leave_zeros();
    double dscale = 0;
    // Made of rows of the index, the number would take a register of each thread; at head_dim 128 none is left.
    const int num_steps = kHasBlockIndex ? (int)ptx::to_uniform_register((u32)work.num_steps) : work.num_steps;
    if (num_steps > 0) {
      if constexpr (makes_dv && !kKeepsWeightsOfCap) may_be_large = work.has_large_rows(common);
      wait_for_keys();
      set_to_zero(p_operand);
      set_to_zero(ds_operand);
#pragma unroll 1
      for (int i = 0; i < num_steps; ++i) step(i);
      issue_gradients(num_steps > 1, false);
      finish_gradients(true);
      if constexpr (makes_dk && kNeedsDscale) dscale = warp_sum(sum_of_products<kBlockN>(rows_k, warp_key, dk));
    } else if constexpr (makes_dk && kSumsScores) {
      sums().leave_zeros();
    }
    if constexpr (makes_dk) sums().leave(dscale, lane_sums);
    ping_pong.finish();
    if constexpr (!kSplitsGroup) ptx::sync_named(kEnd, kConsumerThreads + 128);
    if (work.is_shared)
      store_partials();
    else
      store_gradients();
  }
  template <int count>
  CUFLASH_DEVICE static void set_to_zero(Fragment (&operand)[count]) {
#pragma unroll
    for (auto& fragment : operand)
      for (u32& word : fragment.word) word = 0;
  }

  // ---- The epilogue -------------------------------------------------------------------------------------------------

  // Stores this block's sums of keys that several blocks share, for the kernel that adds them up.
  CUFLASH_DEVICE void store_partials() {
    Real* partials = work.partials(common, kSplitsRoles ? thread : ptx::thread_index());
    const auto store = [&](const auto& d) {
#pragma unroll
      for (const auto& n_tile : d) {
        *(Real4*)partials = {n_tile[0], n_tile[1], n_tile[2], n_tile[3]};
        partials += kDsWriters * 128 * 4;
      }
    };
    if constexpr (makes_dk && kNeedsDk)
      store(dk);
    else
      partials += kBlockN * kDim;
    if constexpr (makes_dv && kNeedsDv) store(dv);
  }

  // Rounds dK and dV and stores them by way of shared memory: over their rows of K and V, which nothing reads again.
  CUFLASH_DEVICE void store_gradients() {
    if constexpr (makes_dv && kHasValues)
      store_fragments_chunked<kBlockN>(rows_v, warp_key, dv, kept_scale, kept_scale);
    if constexpr (makes_dk) store_fragments_chunked<kBlockN>(rows_k, warp_key, dk, common.scale, common.scale);
    ptx::fence_async_proxy();
    ptx::sync_named(kConsumer + index, 128);
    const int first_key = work.first_key + first;
    const int rows = kIsPacked || kStoresByRows ? seqlen_k_of(common, batch) - first_key : 64;
    if (kStoresByRows || rows < 64) {
      const auto store = [&](const Tensor& result, auto columns, u32 tile_rows) {
        Storage* first_row = (Storage*)keys_of(common, result, batch, work.head_kv) + first_key * result.row_stride;
        store_first_rows<kBlockN, decltype(columns)::value>(first_row, result.row_stride, tile_rows,
                                                            min_of(at_least_zero(rows), 64), thread);
      };
      if constexpr (makes_dv && kNeedsDv) store(common.dv, Integer<kHeadDimV>{}, rows_v);
      if constexpr (makes_dk && kNeedsDk) store(common.dk, Integer<kHeadDim>{}, rows_k);
      return;
    }
    if (elected && first_key < common.seqlen_k) {
      const int row = key_start_of(batch) + first_key, entry = entry_of(batch);
      if constexpr (makes_dv && kNeedsDv)
        store_chunks<kBlockN, kDimV>(params.maps[kMapResults + kNeedsDk], rows_v, row, work.head_kv, entry);
      if constexpr (makes_dk && kNeedsDk)
        store_chunks<kBlockN, kDim>(params.maps[kMapResults], rows_k, row, work.head_kv, entry);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
  }
};

CUFLASH_DEVICE void backward(const BackwardParams& params) {
  if (!is_chosen(params.common)) return;
  if constexpr (kMinSharedSteps > 0) {
    if (WorkSplit(params.common).split > 0 && BackwardWork(params.common).is_idle) return;
  }
  const Shared shared;
  Work found = {};
  if constexpr (kIsPacked) {
    found = BackwardWork::find(params.common);
    if (!has_keys(params.common, found)) {
      if (kMakesSums && warp_index() < kSumWarps) leave_nothing(params.common, BackwardWork(params.common, found));
      if (kClearsAhead && ptx::thread_index() < kClearThreads && WorkSplit(params.common).split == 0)
        clear_ahead(params.common, num_tiles_of(params.common, params.common.seqlen_q, kBlockM), found,
                    ptx::thread_index());
      return;
    }
  }
  if (ptx::thread_index() == 0) make_barriers(shared);
  ptx::sync_block();
  const u32 warpgroup = ptx::uniform(ptx::thread_index() / 128);
  if (kDqInOrder && warpgroup == kConsumers + 1) {
    ptx::decrease_registers<kOrderRegisters>();
    keep_dq_order(params, shared, found, ptx::thread_index() % 128);
  } else if (warpgroup == kConsumers) {
    ptx::decrease_registers<kDqRegisters>();
    accumulate_dq(params, shared, found, ptx::thread_index() % 128);
    if constexpr (!kSplitsGroup) ptx::arrive_named(kEnd, kConsumerThreads + 128);
  } else if constexpr (!kSplitsRoles) {
    ptx::increase_registers<kConsumerRegisters>();
    Consumer<true, true>(params, shared, found, warpgroup).run();
  } else if (warpgroup == 0) {
    ptx::increase_registers<kConsumerRegisters>();
    Consumer<true, false>(params, shared, found, warpgroup).run();
  } else {
    ptx::increase_registers<kConsumerRegisters>();
    Consumer<false, true>(params, shared, found, warpgroup).run();
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, BackwardParams, kNumThreads, 1, backward)
