// Attention and its tangent in half precision on compute capability 9.0 (Hopper), with wgmma and TMA, in one pass over
// the keys:
//
//   S = Q K^T     tS = scale (tQ K^T + Q tK^T) + ...     P = exp(S - m)     l = rowsum(P)     r = rowsum(P (tS - c))
//   O = P V       A = P (tS - c) V + P tV                 out = O / l        tout = (A - (r / l) O) / l
//
// The kernel is persistent, with a producer and consumers as in sm90/forward.cu: the producer loads tiles by TMA, each
// consumer owns 64 queries. Products of tangents that are not given are left out (CUFLASH_TANGENTS).
//
// For each tile of keys a consumer goes through
//
//   [1] S = Q K^T, and then tX = tQ K^T + Q tK^T
//   [2] P = exp(S - m) and l, once S is done, during tX
//   [3] P (tS - c) and r, once tX is done
//   [4] O += P V and A += P (tS - c) V + P tV
//
// [4] is done before [1] of the next tile is issued or, with kOverlapsTiles, issued right before it. During [2] and [3]
// of one consumer the tensor cores multiply for another one.
//
// The barriers are those of sm90/forward.cu: a stage of Q holds tQ, too, a stage of K tK, and a stage of V tV.
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/dropout.cuh"
#include "sm90/forward_roles.cuh"
#include "sm90/jvp_scores.cuh"
#include "sm90/key_tile.cuh"
#include "sm90/ping_pong.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/store_out.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tile_scheduler.cuh"

constexpr bool kPingPong = CUFLASH_PING_PONG;
using ConsumerPingPong = PingPong<kPingPong, kConsumers, kPingPongBarrier>;
constexpr int kQStages = CUFLASH_Q_STAGES;               // tiles of queries
constexpr bool kOverlapsTiles = CUFLASH_OVERLAPS_TILES;  // products of values are in flight with the next scores
constexpr int kOutColumns = min_of(kDimV, CUFLASH_OUT_COLUMNS);  // columns of a result that are stored at a time
constexpr int kNTiles = kBlockN / 8;

// Shared memory: the ring of Q and tQ, a slice of a result, the rings of K and tK and of V and tV, and barriers.
constexpr u32 kBytesQ = chunked_bytes(kBlockM, kDim);
constexpr u32 kBytesOut = chunked_bytes(kBlockM, kOutColumns);
constexpr u32 kBytesK = chunked_bytes(kBlockN, kDim);
constexpr u32 kBytesV = chunked_bytes(kBlockN, kDimV);
constexpr u32 kBytesBarriers = QkvBarriers<kNumStages, kQStages>::kBytes + 16 + TileRing::kBytes;
static_assert(2 * kQStages * kBytesQ + kBytesOut + 2 * kNumStages * (kBytesK + kBytesV) + kBytesBarriers ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers per thread, as in sm90/forward.cu.
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kIsPacked ? 40 : 24;
constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kIsPacked ? 232 : 240;

struct Shared : QkvBarriers<kNumStages, kQStages> {
  u32 q, out, k, v;
  u32 scratch;
  TileRing tiles;

  CUFLASH_DEVICE Shared() {
    q = ptx::dynamic_shared();
    out = q + 2 * kQStages * kBytesQ;
    k = out + kBytesOut;
    v = k + 2 * kNumStages * kBytesK;
    const u32 barriers = v + 2 * kNumStages * kBytesV;
    place_barriers(barriers);
    scratch = barriers + QkvBarriers::kBytes;
    tiles = {{scratch + 16}};
  }

  // The tangents of a stage lie behind its values.
  CUFLASH_DEVICE u32 q_at(const Position<kQStages>& at) const { return q + at.stage * 2 * kBytesQ; }
  CUFLASH_DEVICE u32 k_at(const Position<kNumStages>& at) const { return k + at.stage * 2 * kBytesK; }
  CUFLASH_DEVICE u32 v_at(const Position<kNumStages>& at) const { return v + at.stage * 2 * kBytesV; }
};

// The producer: one thread. It iterates over the tiles as the consumers do, as far ahead of them as the rings allow.
CUFLASH_DEVICE void produce(const JvpParams& params, Shared& shared) {
  Position<kQStages> query;
  Position<kNumStages> key;
  for (auto scheduler = make_scheduler<false>(params.common, shared.tiles); scheduler.more();
       scheduler.advance(), query.advance()) {
    const QueryTile tile(params.common, scheduler.work(params.common));
    const int head = tile.head_kv, batch = entry_of(tile.work.batch);
    const auto load_q = [&]() {
      const Barrier q_full = shared.q_ring.full(query);
      const int row = query_start_of(tile.work.batch) + tile.first_row;
      shared.q_ring.empty(query).wait(query.parity ^ 1);
      q_full.arrive_expect((1 + kMovesQ) * kBytesQ);
      load_chunks<kBlockM, kDim>(shared.q_at(query), params.maps[kMapQ], q_full, row, tile.work.head, batch);
      if constexpr (kMovesQ)
        load_chunks<kBlockM, kDim>(shared.q_at(query) + kBytesQ, params.maps[kMapTq], q_full, row, tile.work.head,
                                   batch);
    };
    if (tile.keys.start == tile.keys.stop) load_q();
    for (int n_block = tile.keys.stop - 1; n_block >= tile.keys.start; --n_block, key.advance()) {
      const KeyTile keys(params.common, batch, head, tile.keys.at(n_block), tile.key_stop,
                         key_start_of(tile.work.batch));
      const Barrier k_full = shared.k_ring.full(key), v_full = shared.v_ring.full(key);
      shared.k_ring.empty(key).wait(key.parity ^ 1);
      keys.load<kDim>(shared.k_at(key), params.maps[kMapK], k_full, kMovesK * kBytesK);
      if (n_block == tile.keys.stop - 1) load_q();
      if constexpr (kMovesK) keys.issue<kDim>(shared.k_at(key) + kBytesK, params.maps[kMapTk], k_full);
      shared.v_ring.empty(key).wait(key.parity ^ 1);
      keys.load<kDimV>(shared.v_at(key), params.maps[kMapV], v_full, kMovesV * kBytesV);
      if constexpr (kMovesV) keys.issue<kDimV>(shared.v_at(key) + kBytesV, params.maps[kMapTv], v_full);
    }
  }
}

// One consumer warpgroup, number `index` of kConsumers, at work on one tile of queries, of which it owns 64.
struct Consumer {
  const Params& common;
  const Shared& shared;
  const u32 index, thread;
  const bool elected;
  const ConsumerPingPong& ping_pong;
  Position<kNumStages>& key;
  const QueryTile& tile;
  const u32 s_q;
  const int warp_row, lane_row;
  const int own_diagonal;  // of the batch entry
  const Score score;
  const ScoreTangents tangents;
  const Dropout dropout;
  const float exponent_scale;

  TangentSoftmax<1> softmax;
  float s[1][kNTiles][4], ts[1][kNTiles][4], o[1][kDimV / 8][4], a[1][kDimV / 8][4];
  Fragment p[kBlockN / 16], tp[kBlockN / 16];

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
        s_q(shared.q_at(query) + index * 64 * kLineBytes),
        warp_row(thread / 32 * 16),
        lane_row(tile.first_row + index * 64 + warp_row + fragment_row()),
        own_diagonal(own_diagonal_of(common, tile.work.batch)),
        score(common, tile.work.batch, tile.work.head, tile.key_stop, own_diagonal),
        tangents(common, tile.work.batch, tile.work.head),
        dropout(common, tile.work.batch, tile.work.head),
        exponent_scale(score.exponent_scale()),
        softmax(make_tangent_softmax(common, tile.work.batch, tile.work.head)) {
    set_zero(o);
    set_zero(a);
  }

  // The key of this lane's first column in a tile of keys.
  CUFLASH_DEVICE int lane_key(int n_block) const { return tile.keys.at(n_block) * kBlockN + fragment_column(); }

  CUFLASH_DEVICE void release(const Barrier& empty) const {
    if (elected) empty.arrive();
  }

  // [1] S = Q K^T as a group of products, and tX = tQ K^T + Q tK^T as the next one.
  CUFLASH_DEVICE void issue_scores() {
    shared.k_ring.full(key).wait(key.parity);
    const u64 q = descriptor_of(s_q), tq = descriptor_of(s_q + kBytesQ);
    const u64 k = descriptor_of(shared.k_at(key)), tk = descriptor_of(shared.k_at(key) + kBytesK);
    const auto multiply = [&](float (&sum)[kNTiles][4], u64 queries, u64 keys, bool adds)
                              __attribute__((always_inline)) {
#pragma unroll
                                for (int i = 0; i < kDim / 16; ++i)
                                  ptx::wgmma<false, false>(Element{}, sum, along_k<kBlockM>(queries, i),
                                                           along_k<kBlockN>(keys, i), adds || i > 0);
                              };
    issue(s[0], [&]() __attribute__((always_inline)) { multiply(s[0], q, k, false); });
    if constexpr (kMovesX)
      issue(ts[0], [&]() __attribute__((always_inline)) {
        if constexpr (kMovesQ) multiply(ts[0], tq, k, false);
        if constexpr (kMovesK) multiply(ts[0], q, tk, kMovesQ);
      });
    else if constexpr (kMovesScores)
      set_zero(ts);
  }

  template <class Sum>
  CUFLASH_DEVICE void multiply_values(Sum& sum, const Fragment (&weights)[kBlockN / 16], u32 values) {
    const u64 columns = descriptor_of_transposed<kBlockN>(values);
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i)
      ptx::wgmma<true>(Element{}, sum, weights[i].word, along_k_transposed(columns, i), true);
  }
  // [4] O += P V and A += P (tS - c) V + P tV, of values in stage `at`.
  CUFLASH_DEVICE void issue_values(const Position<kNumStages>& at) {
    const u32 values = shared.v_at(at);
    shared.v_ring.full(at).wait(at.parity);
    ptx::fence_operand(o[0]);
    ptx::fence_operand(a[0]);
    ptx::wgmma_fence();
    multiply_values(o[0], p, values);
    if constexpr (kMovesV) multiply_values(a[0], p, values + kBytesV);
    if constexpr (kMovesScores) multiply_values(a[0], tp, values);
    ptx::wgmma_commit();
  }
  // Waits for the scores, and for the values that were issued before them. tX may still run, if they do not need it.
  CUFLASH_DEVICE void wait_for_scores() {
    wait_for<kMovesX && !kNeedsProduct>(s[0]);
    ptx::fence_operand(o[0]);
    ptx::fence_operand(a[0]);
  }
  CUFLASH_DEVICE void wait_for_values() {
    wait_for<0>(o[0]);
    ptx::fence_operand(a[0]);
    release(shared.v_ring.empty(key));
    key.advance();
  }

  CUFLASH_DEVICE auto mask() const {
    return Mask(common, tile.work.batch, tile.work.head, tile.key_stop, own_diagonal);
  }

  // Skips a tile of keys that other consumers of the block need and this one does not.
  CUFLASH_DEVICE void skip() {
    ping_pong.wait();
    ping_pong.pass();
    shared.k_ring.full(key).wait(key.parity);
    shared.v_ring.full(key).wait(key.parity);
    sync_consumer(index);  // so that no thread still waits for this phase when the next one is over
    release(shared.k_ring.empty(key));
    release(shared.v_ring.empty(key));
    key.advance();
  }
  // Queries that attend to no keys. Q is given back as a warp, so that no lane still waits for one that others have
  // given back.
  CUFLASH_DEVICE void skip_queries(const Barrier& empty) const {
    arrive_as_warp(empty);
    if constexpr (!kOverlapsTiles) {
      ping_pong.wait();
      ping_pong.pass();
    }
  }

  // [2] and [3]: turns products into operands.
  template <class Masked>
  CUFLASH_DEVICE void softmax_step(int n_block, Masked masked) {
    if constexpr (kMovesX && kNeedsProduct) ptx::fence_operand(ts[0]);
    make_scores(score, tangents, mask(), s, ts, lane_row, lane_key(n_block), masked);
    const auto raised = softmax.to_weights(s, exponent_scale);
    if constexpr (kMovesX && !kNeedsProduct) {
      // The exponentials have to overlap tX, but the assembler would sink them past the wait.
      ptx::keep_before(softmax.row_sum[0][0] + softmax.row_sum[0][1], shared.scratch);
      wait_for<0>(ts[0]);
    }
    release(shared.k_ring.empty(key));
    make_tangents(score, tangents, ts, lane_row, lane_key(n_block));
    const Constant<Masked::value || kMayHide> selects;
    const float scale = kTangentIsScaled ? score.scale : 1.0f;
    softmax.rescale_sums(raised, s, ts, o, a, scale, selects);
    softmax.weigh_tangents(s, ts, scale, selects);
    if constexpr (kHasDropout) {
      const float kept_scale = kept_scale_of(common);  // before they are rounded: in float16 they may be subnormal
      dropout.drop(s[0], lane_row, lane_key(n_block), kept_scale);
      if constexpr (kMovesScores) dropout.drop(ts[0], lane_row, lane_key(n_block), kept_scale);
    }
    to_operands(s, p);
    if constexpr (kMovesScores) to_operands(ts, tp);
  }
  // kOverlapsTiles: the first tile of keys has no values before it.
  CUFLASH_DEVICE void first_step(int n_block, const TileRange& keys) {
    ping_pong.wait();
    issue_scores();
    ping_pong.pass();
    wait_for_scores();
    if (n_block >= keys.full_stop || n_block < keys.full_start)
      softmax_step(n_block, Constant<true>{});
    else
      softmax_step(n_block, Constant<false>{});
  }
  // `first` is the last tile that uses Q, which is then given back at `empty`.
  template <class Masked>
  CUFLASH_DEVICE void step(int n_block, Masked masked, int first, const Barrier& empty) {
    if constexpr (kOverlapsTiles) {
      const Position<kNumStages> before = key;
      key.advance();
      ping_pong.wait();
      issue_values(before);
      issue_scores();
      ping_pong.pass();
      wait_for_scores();
      release(shared.v_ring.empty(before));
      softmax_step(n_block, masked);
    } else {
      issue_scores();
      ping_pong.pass();
      wait_for_scores();
      softmax_step(n_block, masked);
      if (n_block == first) arrive_as_warp(empty);
      ping_pong.wait();
      issue_values(key);
      wait_for_values();
    }
  }
  CUFLASH_DEVICE static void to_operands(const float (&weights)[1][kNTiles][4], Fragment (&operands)[kBlockN / 16]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i) to_operand(weights[0], i, operands[i]);
  }

  // Iterates over all tiles of keys that these queries attend to, from the last place to the first. Gives Q back at
  // `empty`.
  CUFLASH_DEVICE void mainloop(const TileRange& keys, const Barrier& empty) {
    int n_block = keys.stop - 1;
    if constexpr (kOverlapsTiles)
      first_step(n_block--, keys);
    else
      ping_pong.wait();
#pragma unroll 1
    for (; n_block >= keys.full_stop; --n_block) step(n_block, Constant<true>{}, keys.start, empty);
#pragma unroll 1
    for (; n_block >= keys.full_start; --n_block) step(n_block, Constant<false>{}, keys.start, empty);
    if constexpr (kHasLeftBound) {
#pragma unroll 1
      for (; n_block >= keys.start; --n_block) step(n_block, Constant<true>{}, keys.start, empty);
    }
    if constexpr (kOverlapsTiles) {
      arrive_as_warp(empty);
      issue_values(key);
      wait_for_values();
    } else {
      ping_pong.pass();
    }
  }

  // Clears the rows of Q and tQ from `row_stop` on, where this sequence ends. Those rows belong to other sequences and
  // must not decide when sums are rescaled.
  CUFLASH_DEVICE void clear_queries(int row_stop) const {
    if constexpr (kIsPacked) {
      if (row_stop > 0 && row_stop < 64) {
        zero_last_of_64<kBlockM, kDim>(s_q, row_stop, thread);
        if constexpr (kMovesQ) zero_last_of_64<kBlockM, kDim>(s_q + kBytesQ, row_stop, thread);
        ptx::fence_async_proxy();
        sync_consumer(index);
      }
    }
  }
  // Clears values of keys past the last one: their weights are 0, but what lies there may be NaN, and 0 * NaN is NaN.
  CUFLASH_DEVICE void clear_values() const {
    if constexpr (kHidesLastKeys) {
      const int valid = tile.key_stop - tile.keys.at(tile.keys.stop - 1) * kBlockN;
      if (tile.keys.start < tile.keys.stop && valid < kBlockN) {
        if (index == 0) {
          shared.v_ring.full(key).wait(key.parity);
          zero_rows<kBlockN, kDimV>(shared.v_at(key), valid, thread);
          if constexpr (kMovesV) zero_rows<kBlockN, kDimV>(shared.v_at(key) + kBytesV, valid, thread);
          ptx::fence_async_proxy();
        }
        ptx::sync_named(kAll, 128 * kConsumers);
      }
    }
  }

  // out = O / l and tout = (A - (r / l) O) / l.
  CUFLASH_DEVICE void finish() {
    softmax.finish();
    if constexpr (kHasSinks) softmax.add_sink(o, a);
    take_out_mean(softmax, o, a);
  }
  CUFLASH_DEVICE void store_row_values() const {
    store_lse(common, tile.work.batch, tile.work.head, lane_row, softmax);
    store_tlse(common, tile.work.batch, tile.work.head, lane_row, softmax);
  }
};

// A consumer warpgroup takes one tile of queries after another.
CUFLASH_DEVICE void consume(const JvpParams& params, Shared& shared, u32 index) {
  const Params& common = params.common;
  const ConsumerPingPong ping_pong(index);
  Position<kQStages> query;
  Position<kNumStages> key;
  for (auto scheduler = make_scheduler<true>(common, shared.tiles); scheduler.more();
       scheduler.advance(), query.advance()) {
    const QueryTile tile(common, scheduler.work(common));
    Consumer consumer(common, shared, index, ping_pong, query, key, tile);

    shared.q_ring.full(query).wait(query.parity);
    const int row_stop = seqlen_q_of(common, tile.work.batch) - tile.first_row - index * 64;  // of these 64 queries
    consumer.clear_queries(row_stop);
    consumer.clear_values();
    const TileRange keys = tile.keys_of(common, index);
#pragma unroll 4
    for (int n_block = tile.keys.stop - 1; n_block >= keys.stop; --n_block) consumer.skip();
    if (keys.start < keys.stop)
      consumer.mainloop(keys, shared.q_ring.empty(query));
    else
      consumer.skip_queries(shared.q_ring.empty(query));
#pragma unroll 4
    for (int n_block = keys.start - 1; n_block >= tile.keys.start; --n_block) consumer.skip();

    consumer.finish();
    store_rounded<kOutColumns>(common.out, params.maps[kMapOut], tile, index, row_stop, shared.out, consumer.softmax,
                               1.0f, consumer.o[0]);
    store_rounded<kOutColumns>(common.tout, params.maps[kMapTout], tile, index, row_stop, shared.out, consumer.softmax,
                               1.0f, consumer.a[0]);
    consumer.store_row_values();
  }
  ping_pong.finish();
  if (ptx::thread_index() % 128 == 0) ptx::bulk_wait<0>();
}

CUFLASH_DEVICE void jvp(const JvpParams& params) {
  if (!is_chosen(params.common)) return;
  Shared shared;
  if constexpr (kIsPacked) {
    if (ptx::thread_index() == 0) shared.tiles.init(4 * kConsumers + 1);
  }
  shared.make_barriers(4 * kConsumers, kConsumers, kConsumers);
  const u32 warp = ptx::uniform(ptx::thread_index() / 32);
  if (warp >= 4 * kConsumers) {
    ptx::decrease_registers<kProducerRegisters>();
    if (warp == 4 * kConsumers && ptx::elect_lane()) produce(params, shared);
    if constexpr (kIsPacked) {
      if (warp == 4 * kConsumers + 1) schedule_tiles(params.common, shared.tiles);
    }
  } else {
    ptx::increase_registers<kConsumerRegisters>();
    consume(params, shared, warp / 4);
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, JvpParams, kNumThreads, 1, jvp)
