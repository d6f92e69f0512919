// Attention and its tangent in float32 on compute capability 9.0 (Hopper), with wgmma and TMA. The formulas are those
// of sm90/jvp.cu, the products those of sm90/forward_fp32.cu: every array and every tangent comes split into bf16 terms
// (helpers/split_fp32.cu), and a product is the sum of the products of their terms. Tensor cores truncate sums instead
// of rounding them. So they sum P V and P (tS - c) V + P tV of one tile of keys only, small products first, and FADD,
// which rounds, adds these to O and A.
//
// The kernel is persistent, with a producer and consumers as in sm90/forward_fp32.cu. For each tile of keys a consumer,
// which owns 64 queries, goes through
//
//   [1] S = Q K^T and tX = tQ K^T + Q tK^T
//   [2] P = exp(S - m) and l, P (tS - c) and r, both split into terms in registers
//   [3] O += P V and A += P (tS - c) V + P tV
//
// Exponentials and splitting in [2] use no tensor cores: during [2] of one consumer these multiply for the other one.
//
// The barriers are those of sm90/forward_fp32.cu: the terms of tQ come with those of Q, a term of tK with that of K,
// and a term of tV with that of V.
#include "common/config.cuh"
#include "common/io/bf16_split.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "sm90/forward_roles.cuh"
#include "sm90/jvp_terms.cuh"
#include "sm90/ping_pong.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr bool kPingPong = CUFLASH_PING_PONG;
using ConsumerPingPong = PingPong<kPingPong, kConsumers, kPingPongBarrier>;
constexpr int kNTiles = kBlockN / 8;
constexpr int kColumnTiles = kDimV / 8;
// Whether the products for O and for A are in flight together. Registers are too few for their sums next to the terms
// of many keys.
constexpr bool kSumsTogether = kBlockN <= 48;

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

// The producer: one thread. It iterates over the tiles as the consumers do, as far ahead of them as the rings allow.
struct Producer {
  const JvpParams& params;
  const Shared& shared;
  Position<1> query;
  Position<kNumStages> key;

  CUFLASH_DEVICE void load_q(const QueryTile& tile) {
    load_query_terms<kTermQ>(params, shared.q, shared.q_ring, query, tile);
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
                                    batch_of_term(params.common, term_at(n), tile.work.batch));
      if constexpr (moves)
        load_chunks<kBlockN, columns>(to + kTerm, map, ring.full(at), first_key, tile.head_kv,
                                      batch_of_term(params.common, kBf16Terms + term_at(n), tile.work.batch));
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
struct Consumer : TangentRows {
  using Terms = u32[kBlockN / 16][kBf16Terms][4];  // of P or of P (tS - c)
  using Sum = float[kColumnTiles][4];

  const Shared& shared;
  const u32 index;
  const bool elected;
  const ConsumerPingPong& ping_pong;
  Position<kNumStages>& key;
  const u32 s_q;

  float o[1][kColumnTiles][4], a[1][kColumnTiles][4];

  CUFLASH_DEVICE Consumer(const Params& common_, const Shared& shared_, u32 index_, const ConsumerPingPong& ping_pong_,
                          Position<kNumStages>& key_, const QueryTile& tile_)
      : TangentRows(common_, tile_, tile_.first_row + index_ * 64),
        shared(shared_),
        index(index_),
        elected(ptx::thread_index() % 128 == 0),
        ping_pong(ping_pong_),
        key(key_),
        s_q(shared.q + index * 64 * kLineBytes) {
    set_zero(o);
    set_zero(a);
  }

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

  // [1] The products with one term of K and tK are a group.
  CUFLASH_DEVICE void issue_scores(float (&s)[kNTiles][4], float (&ts)[kNTiles][4]) const {
    const u64 q = descriptor_of(s_q);
    ptx::fence_operand(s);
    ptx::fence_operand(ts);
#pragma unroll
    for (int n = 0; n < kBf16Terms; ++n) {
      const Position<kSlots> at = position_of(key, n);
      const u64 keys = descriptor_of(shared.k_at(at));
      shared.k_ring.full(at).wait(at.parity);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTermProducts; ++i) {
        if (term_product(i).b != term_at(n)) continue;
        const auto multiply = [&](float (&sum)[kNTiles][4], int term, u64 b, bool adds) __attribute__((always_inline)) {
#pragma unroll
          for (int k = 0; k < kDim / 16; ++k)
            ptx::wgmma<false, false>(BFloat16{}, sum, along_k<kBlockM>(q + term * kTermQ / 16, k),
                                     along_k<kBlockN>(b, k), adds || k > 0);
        };
        multiply(s, term_product(i).a, keys, i > 0);
        if constexpr (kMovesQ) multiply(ts, kBf16Terms + term_product(i).a, keys, i > 0);
        if constexpr (kMovesK) multiply(ts, term_product(i).a, keys + kTermK / 16, kMovesQ || i > 0);
      }
      ptx::wgmma_commit();
    }
  }

  // [3] The same with terms of V and tV, for O, for A or for both: the sums of this tile of keys alone.
  template <bool of_o, bool of_a>
  CUFLASH_DEVICE void issue_values(Sum& sum_o, Sum& sum_a, const Terms& p, const Terms& tp) const {
    if constexpr (of_o) ptx::fence_operand(sum_o);
    if constexpr (of_a) ptx::fence_operand(sum_a);
#pragma unroll
    for (int n = 0; n < kBf16Terms; ++n) {
      const Position<kSlots> at = position_of(key, n);
      const u64 values = descriptor_of_transposed<kBlockN>(shared.v_at(at));
      shared.v_ring.full(at).wait(at.parity);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTermProducts; ++i) {
        if (term_product(i).b != term_at(n)) continue;
        const auto multiply = [&](Sum& sum, const Terms& weights, u64 b, bool adds) __attribute__((always_inline)) {
#pragma unroll
          for (int k = 0; k < kBlockN / 16; ++k)
            ptx::wgmma<true>(BFloat16{}, sum, weights[k][term_product(i).a], along_k_transposed(b, k), adds || k > 0);
        };
        if constexpr (of_o) multiply(sum_o, p, values, i > 0);
        if constexpr (of_a && kMovesV) multiply(sum_a, p, values + kTermV / 16, i > 0);
        if constexpr (of_a && kMovesScores) multiply(sum_a, tp, values, kMovesV || i > 0);
      }
      ptx::wgmma_commit();
    }
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
    float s[1][kNTiles][4], ts[1][kNTiles][4];
    Sum sum_o, sum_a;
    Terms p, tp;
    ping_pong.wait();
    issue_scores(s[0], ts[0]);
    ping_pong.pass();
    release_terms(shared.k_ring);
    ptx::fence_operand(s[0]);
    if constexpr (kMovesX)
      ptx::fence_operand(ts[0]);
    else if constexpr (kMovesScores)
      set_zero(ts);
    if (n_block == keys.start) arrive_as_warp(empty);

    softmax_step(s, ts, o, a, n_block, keys);  // [2]
    to_terms(s[0], p);
    if constexpr (kSumsTogether && kMovesScores) to_terms(ts[0], tp);

    ping_pong.wait();
    issue_values<true, kSumsTogether>(sum_o, sum_a, p, tp);
    if constexpr (!kSumsTogether) {
      if constexpr (kMovesScores) to_terms(ts[0], tp);
      wait_for<0>(sum_o);
      add(o, sum_o);
      issue_values<false, true>(sum_o, sum_a, p, tp);
    }
    ping_pong.pass();
    release_terms(shared.v_ring);
    if constexpr (kSumsTogether) {
      ptx::fence_operand(sum_o);
      add(o, sum_o);
    }
    if constexpr (kMovesV || kMovesScores) {
      ptx::fence_operand(sum_a);
      add(a, sum_a);
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
