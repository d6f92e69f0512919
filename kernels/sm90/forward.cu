// Forward pass in half precision on compute capability 9.0 (Hopper), with wgmma and TMA: FlashAttention-3.
//
//   S = Q K^T        P = exp(S - m)        l = rowsum(P)        O = P V / l        lse = m + log l
//
// The kernel is persistent: one block stays on each SM and takes one tile of queries after another. Its
// last warpgroup, the producer, loads tiles by TMA. Each of the others, the consumers, owns 64 queries of the tile.
// Three things overlap:
//   - the loads of later tiles, also across the end of a tile of queries;
//   - the softmax of a tile of keys and the product O of the tile before it;
//   - the softmax of one consumer and the products of another, for which consumers may issue them in ping-pong
//     (kPingPong).
//
//   barrier      one phase is over when            who waits
//   q_full[i]    Q has arrived in stage i          consumers, before S
//   q_empty[i]   every warp has its last S         producer, before the next Q in stage i
//   k_full[i]    K, and bias, are in stage i       consumers, before S
//   k_empty[i]   every warp has its exponentials   producer, before the next K in stage i
//   v_full[i]    V has arrived in stage i          consumers, before O
//   v_empty[i]   every consumer has its O          producer, before the next V in stage i
//   where a scheduler warp finds or claims the tiles of queries (sm90/tile_scheduler.cuh):
//   full[i]      a tile of queries is in stage i   consumers and producer, before they start it
//   empty[i]     all of them have read it          scheduler, before the next in stage i
//   named: one per consumer for the ping-pong; one per consumer for itself; one for all consumers
//
// A step computes the exponentials of a tile relative to the row maxima that it finds, without looking for
// the maxima of the tile first. If a row max has become too small, a sum of exponentials is too large. Only then does
// the warp do the tile again, maxima first (kLazyMaximum). Sums relative to one row max are exact, whatever it is. The
// same is done where row maxima are so large that such an exponent would be rounded too far (kLargestFolded).
#include "common/config.cuh"
#include "common/score/dropout.cuh"
#include "common/score/mask_bits.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/softmax.cuh"
#include "sm80/mma.cuh"
#include "sm90/bias_terms.cuh"
#include "sm90/forward_roles.cuh"
#include "sm90/key_tile.cuh"
#include "sm90/ping_pong.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/store_out.cuh"
#include "sm90/tile_scores.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tile_scheduler.cuh"

constexpr bool kPingPong = CUFLASH_PING_PONG;
using ConsumerPingPong = PingPong<kPingPong, kConsumers, kPingPongBarrier>;
constexpr int kQStages = CUFLASH_Q_STAGES;                        // tiles of queries
constexpr int kOutColumns = kHasValues ? min_of(kDimV, 128) : 8;  // columns of the output that are stored at a time
// Whether dropout waits until the product O of the previous tile is done. It can then use the registers of that
// product's weights.
constexpr bool kDropsLate = kDimV > 192;
// Whether the maxima of a tile are computed only if a sum became too large. Where registers do not suffice for
// computing a tile again, the maxima always come first.
constexpr bool kLazyMaximum = kDimV <= 128 || (kFactorInExponent && !kHasDropout);
// Whether this holds for tiles with hidden pairs, too. Under a causal mask alone they come first, at the diagonal, when
// rows have no row max yet.
constexpr bool kLazyWhereMasked = kMaskByBits || kHasLeftBound;
// Whether consumers keep Q in registers, so that a product S reads K alone from shared memory. With values, O takes
// these registers.
constexpr bool kHoldsQ = !kHasValues && kDim <= 64;
// The largest row max that is subtracted from scores in one instruction with their scaling. A natural row max is
// multiplied by log2(e) before. This rounding moves exponents by at most 2^-13.5, less than the rounding of weights to
// 16 bits does.
constexpr float kLargestFolded = kNaturalRowMax ? 1024.0f : kLargestFused;

// Shared memory: the ring of Q, a slice of the output, the rings of K, V, bias and per-key values, and barriers.
constexpr u32 kBytesQ = chunked_bytes(kBlockM, kDim);
constexpr u32 kBytesOut = kHasValues ? chunked_bytes(kBlockM, kOutColumns) : 0;
constexpr u32 kBytesK = chunked_bytes(kBlockN, kDim);
constexpr u32 kBytesV = chunked_bytes(kBlockN, kDimV);
constexpr u32 kBytesBarriers = QkvBarriers<kNumStages, kQStages>::kBytes + 16 + TileRing::kBytes;
static_assert(kQStages * kBytesQ + kBytesOut + kNumStages * (kBytesK + kBytesV + kBytesBias + kBytesPerKeyValues) +
                      kBytesBarriers ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers per thread after the producer has given up most of its own. Their sum over the block is at most what the
// block started with. The producer warpgroup needs more of them for a scheduler and for per-key values. It gets them
// where the consumers can spare some.
constexpr bool kProducerWantsMore = (kHasTileRing || kNumPerKey > 0) && (kConsumers == 4 || kDimV <= 192);
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : !kProducerWantsMore ? 24 : kConsumers == 4 ? 32 : 40;
constexpr int kConsumerRegisters = kConsumers == 4 ? 112 : kConsumers == 3 ? 160 : kProducerWantsMore ? 232 : 240;

// The largest sum of exponentials of a tile for which the tile is not done again. Up to this sum, weights fit the
// element type, and sums and products fit float32. The entropy is the difference of a logarithm and a mean exponent.
// Both grow with the distance of the maximum from the row max, so with the entropy the row max follows more closely.
CUFLASH_DEVICE constexpr float max_sum(Float16) { return 16384.0f; }
CUFLASH_DEVICE constexpr float max_sum(BFloat16) { return 4294967296.0f; }
constexpr float kMaxSum = kReducesEntropy ? 1024.0f : max_sum(Element{});

// The tensor maps after those of q and k: v; then out, where TMA writes it; then the bias.
constexpr int kMapV = 2, kMapOut = 3, kMapBias = kHasValues ? 3 + !kStoresByRows : 2;

struct ForwardParams {
  Params common;
  TensorMap maps[kMapBias + kBiasOfPairs];
};
static_assert(sizeof(ForwardParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

struct Shared : QkvBarriers<kNumStages, kQStages> {
  u32 q, out, k, v, bias, numbers;
  u32 scratch;
  TileRing tiles;

  CUFLASH_DEVICE Shared() {
    q = ptx::dynamic_shared();
    out = q + kQStages * kBytesQ;
    k = out + kBytesOut;
    v = k + kNumStages * kBytesK;
    bias = v + kNumStages * kBytesV;
    numbers = bias + kNumStages * kBytesBias;
    const u32 barriers = numbers + kNumStages * kBytesPerKeyValues;
    place_barriers(barriers);
    scratch = barriers + QkvBarriers::kBytes;
    tiles = {{scratch + 16}};
  }
};

// The producer: one thread. It iterates over the tiles as the consumers do, as far ahead of them as the rings allow.
CUFLASH_DEVICE void produce(const ForwardParams& params, Shared& shared) {
  Position<kQStages> query;
  Position<kNumStages> key;
  for (auto scheduler = make_scheduler<false, kGivesBackEarly>(params.common, shared.tiles); scheduler.more();
       scheduler.advance(), query.advance()) {
    const QueryTile tile(params.common, scheduler.work(params.common));
    const int head = tile.head_kv, batch = entry_of(tile.work.batch);
    const auto load_q = [&]() {
      const Barrier q_full = shared.q_ring.full(query);
      shared.q_ring.empty(query).wait(query.parity ^ 1);
      q_full.arrive_expect(kBytesQ);
      load_chunks<kBlockM, kDim>(shared.q + query.stage * kBytesQ, params.maps[0], q_full,
                                 query_start_of(tile.work.batch) + tile.first_row, tile.work.head, batch);
    };
    if (tile.keys.start == tile.keys.stop) give_back_early(scheduler, true, 0), load_q();
    for (int n_block = tile.keys.stop - 1; n_block >= tile.keys.start; --n_block, key.advance()) {
      give_back_early(scheduler, n_block == tile.keys.stop - 1, n_block - tile.keys.start);
      const KeyTile keys(params.common, batch, head, tile.keys.at(n_block), tile.key_stop,
                         key_start_of(tile.work.batch));
      shared.k_ring.empty(key).wait(key.parity ^ 1);
      const Barrier k_full = shared.k_ring.full(key), v_full = shared.v_ring.full(key);
      keys.load<kDim>(shared.k + key.stage * kBytesK, params.maps[1], k_full, kBytesBias);
      if constexpr (kBiasOfPairs)
        load_bias(params.common, shared.bias + key.stage * kBytesBias, params.maps[kMapBias], k_full, tile.first_row,
                  tile.keys.at(n_block) * kBlockN, tile.work.head, batch);
      if (n_block == tile.keys.stop - 1) load_q();
      if constexpr (kHasValues) {
        shared.v_ring.empty(key).wait(key.parity ^ 1);
        keys.load<kDimV>(shared.v + key.stage * kBytesV, params.maps[kMapV], v_full);
      }
    }
  }
}

// Warp. A product once more, alone: multiplies 16 rows by the rows of another matrix, both as TMA lays them out, with
// mma.sync. The loop rarely runs, so it is not unrolled, which would take registers.
template <int columns, int rows, int other_rows>
CUFLASH_DEVICE void multiply_again(float (&s)[1][other_rows / 8][4], u32 tile, u32 other_tile) {
  const u32 lane = lane_index(), swizzle = lane % 8 * 16;
  const u32 line = tile + lane % 16 * kLineBytes, other_line = other_tile + (lane % 8 + lane / 16 * 8) * kLineBytes;
  set_zero(s);
#pragma unroll 1
  for (int k = 0; k < columns / 16; ++k)
    multiply<1>(
        s,
        [&](int, int, Fragment& a) {
          ptx::load_matrix_x4(a.word, line + k / 4 * rows * kLineBytes + ((k % 4 * 32 + lane / 16 * 16) ^ swizzle));
        },
        [&](int n, int, Fragment& b) {
          ptx::load_matrix_x4(b.word, other_line + n * 16 * kLineBytes + k / 4 * other_rows * kLineBytes +
                                          ((k % 4 * 32 + lane / 8 % 2 * 16) ^ swizzle));
        });
}

// One consumer warpgroup, number `index` of kConsumers, at work on one tile of queries, of which it owns 64. The steps
// are numbered:
//
//   [GEMM 1] S = Q K^T        [2] P = exp(S - m), l += rowsum(P)        [GEMM 3] O += P V
//
// [GEMM 3] of a tile of keys is issued right after [GEMM 1] of the next one, so that it runs during [2] of that tile.
struct Consumer {
  const Params& common;
  const Shared& shared;
  const u32 index, thread;
  const bool elected;
  const ConsumerPingPong& ping_pong;
  Position<kNumStages>& key;
  const QueryTile& tile;
  const u32 s_q;
  const int warp_row;
  TileScores scores;
  const Dropout dropout;
  const float scale_log2;

  OnlineSoftmax<1, kNaturalRowMax, true> softmax;
  float factor[1][2];
  float s[1][kNTiles][4], o[1][kHasValues ? kDimV / 8 : 1][4];
  Fragment p[kBlockN / 16], q_operand[kHoldsQ ? kDim / 16 : 1];
  bool all_started = false;  // rows of the warp have row maxima that exponents may fold

  CUFLASH_DEVICE Consumer(const Params& common_, const Shared& shared_, u32 index_, const ConsumerPingPong& ping_pong_,
                          const Position<kQStages>& query, Position<kNumStages>& key_, const QueryTile& tile_)
      : common(common_),
        shared(shared_),
        index(index_),
        thread(ptx::thread_index() % 128),
        elected(thread == 0),
        ping_pong(ping_pong_),
        key(key_),
        tile(tile_),
        s_q(shared.q + query.stage * kBytesQ + index * 64 * kLineBytes),
        warp_row(thread / 32 * 16),
        scores(common, tile, key, shared.bias, shared.numbers, index * 64 + warp_row),
        dropout(common, tile.work.batch, tile.work.head),
        scale_log2(scores.score.exponent_scale()) {
    set_zero(o);
  }

  CUFLASH_DEVICE void release(const Barrier& empty) const {
    if (elected) empty.arrive();
  }
  CUFLASH_DEVICE void release_by_warp(const Barrier& empty) const {
    if (lane_index() == 0) empty.arrive();
  }

  // [GEMM 1] S = Q K^T.
  CUFLASH_DEVICE void issue_s() {
    shared.k_ring.full(key).wait(key.parity);
    const u32 rows_k = shared.k + key.stage * kBytesK;
    if constexpr (kHoldsQ)
      issue_rows<kDim, kBlockN>(s[0], q_operand, rows_k);
    else
      issue_rows<kDim, kBlockM, kBlockN>(s[0], s_q, rows_k);
  }

  // Computes S once more, for this warp alone.
  CUFLASH_DEVICE void multiply_s_again() {
    multiply_again<kDim, kBlockM, kBlockN>(s, s_q + warp_row * kLineBytes, shared.k + key.stage * kBytesK);
    ptx::fence_async_proxy();  // as in arrive_after_reads
  }

  // [GEMM 3] O += P V, with the values in stage `at`.
  CUFLASH_DEVICE void issue_o(const Position<kNumStages>& at) {
    if constexpr (kHasValues) {
      shared.v_ring.full(at).wait(at.parity);
      issue_weighted<kBlockN>(o[0], p, shared.v + at.stage * kBytesV);
    }
  }

  // Waits for that product, and gives back the values.
  CUFLASH_DEVICE void finish_o(const Position<kNumStages>& at) {
    if constexpr (kHasValues) {
      wait_for<0>(o[0]);
      release(shared.v_ring.empty(at));
    }
  }

  // Computes exponentials relative to the row maxima that rows already have, and adds them to `sum`.
  template <class Masked>
  CUFLASH_DEVICE void exponentiate(int n_block, float (&sum)[1][2], TileReductions<1>& reductions, Masked masked) {
    constexpr bool kMayBeHidden = Masked::value || !kFactorInExponent || kHasMask;
    if constexpr (kAddsByTile) {
      const auto is_hidden = scores.hidden_in(n_block, scores.mask(masked));
      const float row_max[2] = {exponent_of_row_max(0), exponent_of_row_max(1)};
      scores.bias_terms(n_block).visit<kNTiles>([&](int n, int i, auto score_of) {
        const float exponent = ptx::fused(score_of(s[0][n][i]), scale_log2, -row_max[i / 2]);
        s[0][n][i] = exponential(exponent);
        if (kLazyWhereMasked && masked && is_hidden(n, i)) s[0][n][i] = 0.0f;
        sum[0][i / 2] += s[0][n][i];
        reductions.add_weight(0, i / 2, s[0][n][i], exponent, kMayBeHidden);
        if (i % 2 == 1) reductions.add_largest(0, i / 2, s[0][n][i - 1], s[0][n][i]);
      });
    } else {
      scores.complete(s, n_block, typename Either<kLazyWhereMasked, Masked, Constant<false>>::Type{});
      const float row_max[2] = {exponent_of_row_max(0), exponent_of_row_max(1)};
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            const float exponent = ptx::fused(s[0][n][i], scale_log2, -row_max[half]);
            s[0][n][i] = exponential(exponent);
            sum[0][half] += s[0][n][i];
            reductions.add_weight(0, half, s[0][n][i], exponent, kMayBeHidden);
            if (i % 2 == 1) reductions.add_largest(0, half, s[0][n][i - 1], s[0][n][i]);
          }
    }
  }
  CUFLASH_DEVICE float exponent_of_row_max(int half) const {
    return kNaturalRowMax ? softmax.row_max[0][half] * kLog2e : softmax.row_max[0][half];
  }
  // The same where all arguments of the soft cap are near 0: a short series gives exponents. Returns whether it did.
  template <class Masked>
  CUFLASH_DEVICE bool exponentiate_near(int n_block, float (&sum)[1][2], Masked) {
    if constexpr (!kHasSoftcap || !(kFactorInExponent || kAddsByTile) || Masked::value || CUFLASH_ROW_REDUCTIONS)
      return false;
    const float largest = Score::largest_of(s);
    return exponentiate_by<3>(n_block, sum, largest) || exponentiate_by<4>(n_block, sum, largest);
  }
  template <int terms>
  CUFLASH_DEVICE bool exponentiate_by(int n_block, float (&sum)[1][2], float largest) {
    if constexpr (kAddsByTile) {
      const NearTanh<terms> near(scores.score.cap_factor);
      if (ptx::any_lane(!near.serves(largest))) return false;
#pragma unroll
      for (auto& four : s[0])
#pragma unroll
        for (float& x : four) x = near.of(x);
      TileReductions<1> none;
      exponentiate(n_block, sum, none, Constant<false>{});
    } else {
      const NearTanh<terms> near(scores.score.cap_factor, scale_log2);
      if (ptx::any_lane(!near.serves(largest))) return false;
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[0][n][i] = exponential(near.of(s[0][n][i], -softmax.row_max[0][i / 2]));
          sum[0][i / 2] += s[0][n][i];
        }
    }
    return true;
  }
  CUFLASH_DEVICE void drop(int n_block) {
    if constexpr (kHasDropout) dropout.drop(s[0], scores.lane_row, scores.lane_key(n_block));
  }

  // [2] Turns the products in `s` into exponentials, and adds these to the sums of rows. Returns whether O must be
  // rescaled by `factor`.
  template <class Masked>
  CUFLASH_DEVICE bool softmax_step(int n_block, Masked masked) {
    float sum[1][2] = {{0.0f, 0.0f}};
    TileReductions<1> reductions;
    bool grows = false, maximum_first = (masked && !kLazyWhereMasked) || !kLazyMaximum || !all_started;
    if (!maximum_first) {
      if (!exponentiate_near(n_block, sum, masked)) {
        scores.score.cap(s);
        exponentiate(n_block, sum, reductions, masked);
      }
      maximum_first = ptx::any_lane(sum[0][0] > kMaxSum || sum[0][1] > kMaxSum);
      if (maximum_first) {
        multiply_s_again();
        sum[0][0] = sum[0][1] = 0.0f;
      } else {
        softmax.add(reductions);
      }
    }
    if (maximum_first) {
      scores.score.cap(s);
      scores.complete(s, n_block, masked);
      grows = softmax.update(s, factor, scale_log2);
      softmax.exponentiate(s, scale_log2, sum, softmax.has_unfused(grows));
      const float largest_row_max = fmaxf(fabsf(softmax.row_max[0][0]), fabsf(softmax.row_max[0][1]));
      all_started = !ptx::any_lane(!(largest_row_max <= kLargestFolded));
    }
    if constexpr (kBiasOfPairs)
      arrive_after_reads(shared.k_ring.empty(key));
    else
      release_by_warp(shared.k_ring.empty(key));
    softmax.row_sum[0][0] += sum[0][0];
    softmax.row_sum[0][1] += sum[0][1];
    if constexpr (!kDropsLate) drop(n_block);
    return grows;
  }
  CUFLASH_DEVICE void to_weights(int n_block) {
    if constexpr (kDropsLate) drop(n_block);
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k) to_operand(s[0], k, p[k]);
  }

  // Skips a tile of keys that other consumers of the block need and this one does not.
  CUFLASH_DEVICE void skip() {
    ping_pong.wait();
    ping_pong.pass();
    shared.k_ring.full(key).wait(key.parity);
    if constexpr (kHasValues) shared.v_ring.full(key).wait(key.parity);
    sync_consumer(index);  // so that no thread still waits for this phase when the next one is over
    release_by_warp(shared.k_ring.empty(key));
    if constexpr (kHasValues) release(shared.v_ring.empty(key));
    key.advance();
  }

  // The first tile of keys has no product O before it.
  CUFLASH_DEVICE void first_step(int n_block, const TileRange& keys) {
    scores.load_mask(n_block, Constant<true>{});
    ping_pong.wait();
    issue_s();
    ping_pong.pass();
    wait_for<0>(s[0]);
    // With a score_mod the mask is always evaluated, so that the function is compiled once less.
    if (kHasScoreFunction || n_block >= keys.full_stop || n_block < keys.full_start)
      softmax_step(n_block, Constant<true>{});
    else
      softmax_step(n_block, Constant<false>{});
    to_weights(n_block);
  }
  template <class Masked>
  CUFLASH_DEVICE void step(int n_block, Masked masked) {
    const Position<kNumStages> before = key;
    key.advance();
    scores.load_mask(n_block, masked);
    ping_pong.wait();
    issue_s();
    issue_o(before);
    ping_pong.pass();
    wait_for<kHasValues>(s[0]);
    const bool grows = softmax_step(n_block, masked);
    // With ping-pong the softmax has to overlap the product O, but the assembler would sink it past the wait.
    if constexpr (kPingPong && kHasValues)
      ptx::keep_before(softmax.row_sum[0][0] + softmax.row_sum[0][1], shared.scratch);
    finish_o(before);
    if (grows) softmax.rescale(o, factor);
    to_weights(n_block);
  }

  // Iterates over all tiles of keys that these queries attend to, from the last place to the first. Gives Q back at
  // `empty`.
  CUFLASH_DEVICE void mainloop(const TileRange& keys, const Barrier& empty) {
    int n_block = keys.stop - 1;
    first_step(n_block, keys);
    --n_block;
#pragma unroll 1
    for (; n_block >= keys.full_stop; --n_block) step(n_block, Constant<true>{});
#pragma unroll 1
    for (; n_block >= keys.full_start; --n_block) step(n_block, Constant<false>{});
    if constexpr (kHasLeftBound) {
#pragma unroll 1
      for (; n_block >= keys.start; --n_block) step(n_block, MaskedAtLeft{});
    }
    release_by_warp(empty);
    issue_o(key);
    finish_o(key);
    key.advance();
  }

  // Clears the rows of Q from `row_stop` on, where this sequence ends. Those rows belong to other sequences and must
  // not decide when sums are rescaled.
  CUFLASH_DEVICE void clear_queries(int row_stop) const {
    if constexpr (kIsPacked) {
      if (row_stop > 0 && row_stop < 64) {
        zero_last_of_64<kBlockM, kDim>(s_q, row_stop, thread);
        ptx::fence_async_proxy();
        sync_consumer(index);
      }
    }
  }
  // Clears values of keys past the last one: their weights are 0, but what lies there may be NaN, and 0 * NaN is NaN.
  CUFLASH_DEVICE void clear_values() const {
    if constexpr (kHidesLastKeys && kHasValues) {
      const int valid = tile.key_stop - tile.keys.at(tile.keys.stop - 1) * kBlockN;
      if (tile.keys.start < tile.keys.stop && valid < kBlockN) {
        if (index == 0) {
          shared.v_ring.full(key).wait(key.parity);
          zero_rows<kBlockN, kDimV>(shared.v + key.stage * kBytesV, valid, thread);
          ptx::fence_async_proxy();
        }
        ptx::sync_named(kAll, 128 * kConsumers);
      }
    }
  }
};

// A consumer warpgroup takes one tile of queries after another.
CUFLASH_DEVICE void consume(const ForwardParams& params, Shared& shared, u32 index) {
  const Params& common = params.common;
  const ConsumerPingPong ping_pong(index);
  Position<kQStages> query;
  Position<kNumStages> key;
  for (auto scheduler = make_scheduler<true>(common, shared.tiles); scheduler.more();
       scheduler.advance(), query.advance()) {
    const QueryTile tile(common, scheduler.work(common));
    const Entry batch = tile.work.batch;
    Consumer consumer(common, shared, index, ping_pong, query, key, tile);

    shared.q_ring.full(query).wait(query.parity);
    const int row_stop = seqlen_q_of(common, batch) - tile.first_row - index * 64;  // of these 64 queries
    consumer.clear_queries(row_stop);
    if constexpr (kHoldsQ) load_fragments_chunked<kBlockM>(consumer.s_q, consumer.warp_row, consumer.q_operand);
    consumer.clear_values();
    const TileRange keys = tile.keys_of(common, index);
#pragma unroll 4
    for (int n_block = tile.keys.stop - 1; n_block >= keys.stop; --n_block) consumer.skip();
    if (keys.start < keys.stop)
      consumer.mainloop(keys, shared.q_ring.empty(query));
    else  // as a warp, so that no lane still waits for a Q that the others have given back
      arrive_as_warp(shared.q_ring.empty(query));
#pragma unroll 4
    for (int n_block = keys.start - 1; n_block >= tile.keys.start; --n_block) consumer.skip();

    auto& softmax = consumer.softmax;
    softmax.finish();
    if (kHasSinks && !is_left_over(common, batch))
      softmax.add_sinks(consumer.o, [&](int, int) { return to_row_max(sink_of(common, tile.work.head)); });
    if constexpr (CUFLASH_OUT_WIDE && kHasValues)
      store_wide(common.out, tile.work, consumer.scores.lane_row, seqlen_q_of(common, batch), softmax,
                 kept_scale_of(common), consumer.o[0]);
    else if constexpr (kHasValues)
      store_rounded<kOutColumns>(common.out, params.maps[kMapOut], tile, index, row_stop, shared.out, softmax,
                                 kept_scale_of(common), consumer.o[0]);
    store_lse(common, batch, tile.work.head, consumer.scores.lane_row, softmax);
  }
  ping_pong.finish();
  if (ptx::thread_index() % 128 == 0) ptx::bulk_wait<0>();
}

CUFLASH_DEVICE void forward(const ForwardParams& params) {
  if (!is_chosen(params.common)) return;
  Shared shared;
  if constexpr (kHasTileRing) {
    if (ptx::thread_index() == 0) shared.tiles.init(4 * kConsumers + 1);
  }
  shared.make_barriers(4 * kConsumers, 4 * kConsumers, kConsumers, 1 + (kNumPerKey > 0));
  const u32 warp = ptx::uniform(ptx::thread_index() / 32);
  if (warp >= 4 * kConsumers) {
    ptx::decrease_registers<kProducerRegisters>();
    if (warp == 4 * kConsumers && ptx::elect_lane()) produce(params, shared);
    if constexpr (kNumPerKey > 0) {
      // This warp arrives at k_full, as the load of K does, because the numbers are in the same stage.
      if (warp == 4 * kConsumers + 1)
        produce_per_key_values(params.common, make_scheduler<false>(params.common, shared.tiles), shared.k_ring,
                               shared.numbers);
    }
    if constexpr (kHasTileRing) {
      if (warp == 4 * kConsumers + 1) schedule_tiles(params.common, shared.tiles);
    }
  } else {
    ptx::increase_registers<kConsumerRegisters>();
    consume(params, shared, warp / 4);
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, ForwardParams, kNumThreads, 1, forward)
