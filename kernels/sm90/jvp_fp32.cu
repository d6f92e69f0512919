// Attention and its tangent in float32 on compute capability 9.0 (Hopper), with wgmma and TMA. The formulas are those of
// sm90/jvp.cu, the products those of sm90/forward_fp32.cu: every array and every tangent comes split into bf16 terms
// (helpers/split_fp32.cu), and a product is the sum of the products of their terms. Tensor cores cut sums off instead of
// rounding them. So they sum P V and P (tS - c) V + P tV of each tile of keys by themselves, small products first, and
// other instructions add these to O and A with rounding.
//
// The kernel is persistent, with a producer and consumers as in sm90/forward_fp32.cu. For each tile of keys a consumer,
// which owns 64 queries, goes through
//
//   [1] S = Q K^T and tX = tQ K^T + Q tK^T
//   [2] P = exp(S - m) and l, P (tS - c) and r, both split into terms in registers
//   [3] O += P V and A += P (tS - c) V + P tV
//
// During [2] of one consumer the tensor cores multiply for another one.
//
// The barriers are those of sm90/forward_fp32.cu: the terms of tQ come with those of Q, a term of tK with that of K, and a
// term of tV with that of V.
#include "common/config.cuh"
#include "common/io/bf16_split.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/dropout.cuh"
#include "sm90/forward_roles.cuh"
#include "sm90/jvp_scores.cuh"
#include "sm90/ping_pong.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr bool kPingPong = CUFLASH_PING_PONG;
using ConsumerPingPong = PingPong<kPingPong, kConsumers, kPingPongBarrier>;
constexpr int kNTiles = kBlockN / 8;
constexpr int kColumnTiles = kDimV / 8;

// Shared memory: the terms of Q and of tQ, the rings of the terms of K and tK and of V and tV, and barriers.
constexpr u32 kTermQ = chunked_bytes(kBlockM, kDim), kBytesQ = kBf16Terms * kTermQ;
constexpr u32 kTermK = chunked_bytes(kBlockN, kDim);
constexpr u32 kTermV = chunked_bytes(kBlockN, kDimV);
constexpr int kSlots = kBf16Terms * kNumStages;  // of a ring of terms, which come and go one by one
static_assert(2 * (kBytesQ + kSlots * (kTermK + kTermV)) + QkvBarriers<kSlots>::kBytes == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers per thread, as in sm90/forward.cu.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kConsumers == 2 && !kIsPacked && kPageSize == 0, "not served");

struct Shared : QkvShared<kSlots> {
  CUFLASH_DEVICE Shared() : QkvShared(2 * kBytesQ, 2 * kSlots * kTermK, 2 * kSlots * kTermV) {}

  // The term of a tangent lies after that of the array.
  CUFLASH_DEVICE u32 k_at(const Position<kSlots>& at) const { return k + at.stage * 2 * kTermK; }
  CUFLASH_DEVICE u32 v_at(const Position<kSlots>& at) const { return v + at.stage * 2 * kTermV; }
};

// Terms of a tile come from the lowest to the highest. `position_of` says where the n-th of them lies, and `term_at`
// which term it is.
CUFLASH_DEVICE Position<kSlots> position_of(const Position<kNumStages>& tile, int n) {
  return {tile.stage * kBf16Terms + n, tile.parity};
}
CUFLASH_DEVICE constexpr int term_at(int n) { return kLast - n; }

// The producer: one thread. It iterates over the tiles as the consumers do, as far ahead of them as the rings allow. In
// the map of an array, term i of batch entry b has batch index i * batch + b; the terms of its tangent follow.
struct Producer {
  const JvpParams& params;
  const Shared& shared;
  Position<1> query;
  Position<kNumStages> key;

  CUFLASH_DEVICE int term_batch(int term, int batch) const { return term * params.common.batch + batch; }

  CUFLASH_DEVICE void load_q(const QueryTile& tile) {
    const Barrier full = shared.q_ring.full(query);
    shared.q_ring.empty(query).wait(query.parity ^ 1);
    full.arrive_expect((1 + kMovesQ) * kBytesQ);
#pragma unroll 1
    for (int i = 0; i < (1 + kMovesQ) * kBf16Terms; ++i)
      load_chunks<kBlockM, kDim>(shared.q + i * kTermQ, params.maps[kMapQ], full, tile.first_row, tile.work.head,
                                 term_batch(i, tile.work.batch));
  }
  template <int columns, bool moves>
  CUFLASH_DEVICE void load_keys(const QueryTile& tile, const Ring<kSlots>& ring, u32 terms, const TensorMap& map,
                                int first_key) {
    constexpr u32 kTerm = chunked_bytes(kBlockN, columns);
#pragma unroll 1
    for (int n = 0; n < kBf16Terms; ++n) {
      const Position<kSlots> at = position_of(key, n);
      const u32 to = terms + at.stage * 2 * kTerm;
      ring.empty(at).wait(at.parity ^ 1);
      ring.full(at).arrive_expect((1 + moves) * kTerm);
      load_chunks<kBlockN, columns>(to, map, ring.full(at), first_key, tile.head_kv,
                                    term_batch(term_at(n), tile.work.batch));
      if constexpr (moves)
        load_chunks<kBlockN, columns>(to + kTerm, map, ring.full(at), first_key, tile.head_kv,
                                      term_batch(kBf16Terms + term_at(n), tile.work.batch));
    }
  }
  CUFLASH_DEVICE void produce() {
    for (TileScheduler scheduler(params.common); scheduler.more(); scheduler.advance(), query.advance()) {
      const QueryTile tile(params.common, scheduler.work(params.common));
      if (tile.keys.start == tile.keys.stop) load_q(tile);
      for (int n_block = tile.keys.stop - 1; n_block >= tile.keys.start; --n_block, key.advance()) {
        const int first_key = tile.keys.at(n_block) * kBlockN;
        load_keys<kDim, kMovesK>(tile, shared.k_ring, shared.k, params.maps[kMapK], first_key);
        if (n_block == tile.keys.stop - 1) load_q(tile);
        load_keys<kDimV, kMovesV>(tile, shared.v_ring, shared.v, params.maps[kMapV], first_key);
      }
    }
  }
};

// One consumer warpgroup, number `index` of kConsumers, at work on one tile of queries, of which it owns 64.
struct Consumer {
  using Terms = u32[kBlockN / 16][kBf16Terms][4];  // of P or of P (tS - c)
  using Scores = float[kNTiles][4];
  using Sum = float[kColumnTiles][4];

  const Params& common;
  const Shared& shared;
  const u32 index, thread;
  const bool elected;
  const ConsumerPingPong& ping_pong;
  Position<kNumStages>& key;
  const QueryTile& tile;
  const u32 s_q;
  const int lane_row;
  const Score score;
  const ScoreTangents tangents;
  const Dropout dropout;
  const float exponent_scale;

  TangentSoftmax<1> softmax;
  float o[1][kColumnTiles][4], a[1][kColumnTiles][4];

  CUFLASH_DEVICE Consumer(const Params& common_, const Shared& shared_, u32 index_, const ConsumerPingPong& ping_pong_,
                          Position<kNumStages>& key_, const QueryTile& tile_)
      : common(common_),
        shared(shared_),
        index(index_),
        thread(ptx::thread_index() % 128),
        elected(thread == 0),
        ping_pong(ping_pong_),
        key(key_),
        tile(tile_),
        s_q(shared.q + index * 64 * kLineBytes),
        lane_row(tile.first_row + index * 64 + thread / 32 * 16 + fragment_row()),
        score(common, tile.work.batch, tile.work.head, tile.key_stop),
        tangents(common, tile.work.batch, tile.work.head),
        dropout(common, tile.work.batch, tile.work.head),
        exponent_scale(score.exponent_scale()),
        softmax(make_tangent_softmax(common, tile.work.batch, tile.work.head)) {
    set_zero(o);
    set_zero(a);
  }

  CUFLASH_DEVICE int lane_key(int n_block) const { return tile.keys.at(n_block) * kBlockN + fragment_column(); }
  CUFLASH_DEVICE void release(const Barrier& empty) const {
    if (elected) empty.arrive();
  }
  // Waits for the groups of products, one for each term, and gives the terms back.
  CUFLASH_DEVICE void release_terms(const Ring<kSlots>& ring) const {
    repeat<kBf16Terms>([&](auto n) {
      constexpr int kTerm = decltype(n)::value;
      ptx::wgmma_wait<kBf16Terms - 1 - kTerm>();
      release(ring.empty(position_of(key, kTerm)));
    });
  }

  // [1] S = Q K^T, and then tX = tQ K^T + Q tK^T. The products with one term of K, or of K and tK, are a group.
  CUFLASH_DEVICE void issue_scores(Scores& s, Scores& ts) const {
    const auto multiply = [&](Scores& sum, int n, u32 queries, u32 keys, bool adds) __attribute__((always_inline)) {
      const u64 a = descriptor_of(s_q + queries), b = descriptor_of(shared.k_at(position_of(key, n)) + keys);
      multiply_terms(n, [&](int i, int term) __attribute__((always_inline)) {
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k)
          ptx::wgmma<false, false>(BFloat16{}, sum, along_k<kBlockM>(a + term * kTermQ / 16, k), along_k<kBlockN>(b, k),
                                   adds || i + k > 0);
      });
    };
    ptx::fence_operand(s);
    ptx::fence_operand(ts);
#pragma unroll
    for (int n = 0; n < kBf16Terms; ++n) {
      const Position<kSlots> at = position_of(key, n);
      shared.k_ring.full(at).wait(at.parity);
      ptx::wgmma_fence();
      multiply(s, n, 0, 0, false);
      ptx::wgmma_commit();
    }
    if constexpr (kMovesX) {
#pragma unroll
      for (int n = 0; n < kBf16Terms; ++n) {
        if constexpr (kMovesQ) multiply(ts, n, kBytesQ, 0, false);
        if constexpr (kMovesK) multiply(ts, n, 0, kTermK, kMovesQ);
        ptx::wgmma_commit();
      }
    }
  }
  // Calls multiply(i, term) for the products with the n-th term of the second factor: product i takes `term` of the first.
  template <class Multiply>
  CUFLASH_DEVICE static void multiply_terms(int n, Multiply multiply) {
#pragma unroll
    for (int i = 0; i < kTermProducts; ++i)
      if (term_product(i).b == term_at(n)) multiply(i, term_product(i).a);
  }

  // [3] P V of this tile of keys, as one group.
  CUFLASH_DEVICE void issue_o(Sum& sum, const Terms& p) const {
    ptx::fence_operand(sum);
#pragma unroll
    for (int n = 0; n < kBf16Terms; ++n) {
      const Position<kSlots> at = position_of(key, n);
      shared.v_ring.full(at).wait(at.parity);
      ptx::wgmma_fence();
      multiply_values(sum, p, n, 0, false);
    }
    ptx::wgmma_commit();
  }
  // P (tS - c) V + P tV of this tile of keys. The products with one term of V and tV are a group.
  CUFLASH_DEVICE void issue_a(Sum& sum, const Terms& p, const Terms& tp) const {
    ptx::fence_operand(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (int n = 0; n < kBf16Terms; ++n) {
      if constexpr (kMovesV) multiply_values(sum, p, n, kTermV, false);
      if constexpr (kMovesScores) multiply_values(sum, tp, n, 0, kMovesV);
      ptx::wgmma_commit();
    }
  }
  CUFLASH_DEVICE void multiply_values(Sum& sum, const Terms& weights, int n, u32 values, bool adds) const {
    const u64 b = descriptor_of_transposed<kBlockN>(shared.v_at(position_of(key, n)) + values);
    multiply_terms(n, [&](int i, int term) __attribute__((always_inline)) {
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k)
        ptx::wgmma<true>(BFloat16{}, sum, weights[k][term], along_k_transposed(b, k), adds || i + k > 0);
    });
  }

  // Skips a tile of keys that other consumers of the block need and this one does not.
  CUFLASH_DEVICE void skip() const {
    for (int product = 0; product < 2; ++product) ping_pong.wait(), ping_pong.pass();
    for (int n = 0; n < kBf16Terms; ++n) {
      shared.k_ring.full(position_of(key, n)).wait(key.parity);
      shared.v_ring.full(position_of(key, n)).wait(key.parity);
    }
    sync_consumer(index);  // so that no thread still waits for this phase when the next one is over
    for (int n = 0; n < kBf16Terms; ++n) {
      release(shared.k_ring.empty(position_of(key, n)));
      release(shared.v_ring.empty(position_of(key, n)));
    }
    key.advance();
  }

  CUFLASH_DEVICE static void to_terms(const float (&weights)[kNTiles][4], Terms& terms) {
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = weights[2 * k + i / 2];
        u32 word[kBf16Terms];
        bf16_split_small(pair[i % 2 * 2], pair[i % 2 * 2 + 1], word);
#pragma unroll
        for (int term = 0; term < kBf16Terms; ++term) terms[k][term][i] = word[term];
      }
  }
  CUFLASH_DEVICE static void add(float (&o)[1][kColumnTiles][4], const Sum& sum) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[0][n][i] += sum[n][i];
  }

  // One tile of keys. Q is given back at `empty` after the last one, the first in memory.
  CUFLASH_DEVICE void step(int n_block, const TileRange& keys, const Barrier& empty) {
    constexpr int kInFlight = kMovesX && !kNeedsProduct ? kBf16Terms : 0;  // groups of tX while P is made
    float s[1][kNTiles][4], ts[1][kNTiles][4], dropped[1][kNTiles][4];
    Sum sum;
    Terms p, tp;
    const int first_key = lane_key(n_block);
    const Mask mask(common, tile.work.batch, tile.work.head, tile.key_stop);
    ping_pong.wait();
    issue_scores(s[0], ts[0]);
    ping_pong.pass();
    wait_for<kInFlight>(s[0]);
    if constexpr (kMovesX && kNeedsProduct)
      ptx::fence_operand(ts[0]);
    else if constexpr (kMovesScores && !kMovesX)
      set_zero(ts);

    // Where scores take many instructions, the mask is always evaluated, so that they are compiled once.
    if (kNeedsProduct || kBiasBytes != 0 || n_block >= keys.full_stop || n_block < keys.full_start)
      make_scores(score, tangents, mask, s, ts, lane_row, first_key, Constant<true>{});
    else
      make_scores(score, tangents, mask, s, ts, lane_row, first_key, Constant<false>{});
    const auto raised = softmax.to_weights(s, exponent_scale);
    const float kept_scale = kHasDropout ? kept_scale_of(common) : 1.0f;
    if constexpr (kHasDropout) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) dropped[0][n][i] = s[0][n][i];
      dropout.drop(dropped[0], lane_row, first_key, kept_scale);
    }
    to_terms(kHasDropout ? dropped[0] : s[0], p);
    ping_pong.wait();
    issue_o(sum, p);
    // Only O is in flight now.
    ptx::wgmma_wait<1>();
    if constexpr (kInFlight > 0) ptx::fence_operand(ts[0]);
    for (int n = 0; n < kBf16Terms; ++n) release(shared.k_ring.empty(position_of(key, n)));
    if (n_block == keys.start) arrive_as_warp(empty);

    make_tangents(score, tangents, ts, lane_row, first_key);
    const float scale = kTangentIsScaled ? score.scale : 1.0f;
    softmax.rescale_sums(raised, s, ts, o, a, scale, Constant<true>{});
    softmax.weigh_tangents(s, ts, scale, Constant<true>{});
    if constexpr (kHasDropout && kMovesScores) dropout.drop(ts[0], lane_row, first_key, kept_scale);
    if constexpr (kMovesScores) to_terms(ts[0], tp);
    wait_for<0>(sum);
    add(o, sum);

    issue_a(sum, p, tp);
    ping_pong.pass();
    release_terms(shared.v_ring);
    if constexpr (kMovesV || kMovesScores) {
      ptx::fence_operand(sum);
      add(a, sum);
    }
    key.advance();
  }

  // Stores out = O / l, tout = (A - (r / l) O) / l, lse and tlse.
  CUFLASH_DEVICE void store() {
    const Entry batch = tile.work.batch;
    const int head = tile.work.head;
    softmax.finish();
    if constexpr (kHasSinks) softmax.add_sink(o, a);
    take_out_mean(softmax, o, a);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 8 * half;
      if (row >= common.seqlen_q) break;
      const float factor = softmax.inverse_sum(0, half);
      const auto store = [&](const Tensor& result, const float (&sum)[1][kColumnTiles][4]) {
        store_row<kHeadDimV>((Storage*)head_of(result, batch, head) + row * result.row_stride, sum[0], half, factor);
      };
      store(common.out, o);
      store(common.tout, a);
    }
    store_lse(common, batch, head, lane_row, softmax);
    store_tlse(common, batch, head, lane_row, softmax);
  }
};

// A consumer warpgroup takes one tile of queries after another.
CUFLASH_DEVICE void consume(const JvpParams& params, const Shared& shared, u32 index) {
  const ConsumerPingPong ping_pong(index);
  Position<1> query;
  Position<kNumStages> key;
  for (TileScheduler scheduler(params.common); scheduler.more(); scheduler.advance(), query.advance()) {
    const QueryTile tile(params.common, scheduler.work(params.common));
    Consumer consumer(params.common, shared, index, ping_pong, key, tile);
    const TileRange keys = tile.keys_of(params.common, index);
    const Barrier empty = shared.q_ring.empty(query);

    shared.q_ring.full(query).wait(query.parity);
    int n_block = tile.keys.stop - 1;
    for (; n_block >= keys.stop; --n_block) consumer.skip();
    if (keys.start == keys.stop) arrive_as_warp(empty);
#pragma unroll 1
    for (; n_block >= keys.start; --n_block) consumer.step(n_block, keys, empty);
    for (; n_block >= tile.keys.start; --n_block) consumer.skip();
    consumer.store();
  }
  ping_pong.finish();
}

CUFLASH_DEVICE void jvp(const JvpParams& params) {
  if (!is_chosen(params.common)) return;
  Shared shared;
  shared.make_barriers(4 * kConsumers, kConsumers, kConsumers);
  const u32 warp = ptx::uniform(ptx::thread_index() / 32);
  if (warp >= 4 * kConsumers) {
    ptx::decrease_registers<kProducerRegisters>();
    if (warp == 4 * kConsumers && ptx::elect_lane()) Producer{params, shared}.produce();
  } else {
    ptx::increase_registers<kConsumerRegisters>();
    consume(params, shared, warp / 4);
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, JvpParams, kNumThreads, 1, jvp)
