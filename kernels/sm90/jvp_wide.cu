// Attention and its tangent in half precision on compute capability 9.0 (Hopper), for head dimensions whose two
// accumulators take the registers of two warpgroups. The formulas are those of sm90/jvp.cu.
//
// The kernel is persistent. A block has 64 queries, two consumer warpgroups and a producer. For each tile of keys, a
// consumer makes scores, tangents and P of half of the keys, and adds to half of the columns of O and A:
//
//   [1] S = Q K^T and tX = tQ K^T + Q tK^T     of its keys
//   [2] P = exp(S - m) and l, once both know the row maxima of all keys
//   [3] P (tS - c) and r                       both matrices go to shared memory, for both consumers
//   [4] O += P V and A += P (tS - c) V + P tV  of its columns, all keys
//
// Tiles of keys go through one ring of stages. A stage has 64 columns of K and tK, or 32 rows of V and tV. [1] of a
// tile of keys is issued before [4] of the tile before it, so that [2] and [3] run during [4].
//
//   barrier      one phase is over when               who waits
//   q_full       Q and tQ have arrived                consumers, before S
//   q_empty      every warp has its last scores       producer, before the next Q
//   full[i]      keys, or values, are in stage i      consumers, before their products
//   empty[i]     both consumers have theirs           producer, before it loads the next ones there
//   named: one for each two warps that have the same rows; one per consumer for itself; one for both consumers, before
//   P is written and before it is read
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/dropout.cuh"
#include "common/softmax/store_lse.cuh"
#include "sm90/jvp_scores.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"
#include "sm90/tile_scheduler.cuh"

constexpr int kConsumers = 2;
static_assert(kNumWarps == 4 * (kConsumers + 1), "the consumers and a producer");
static_assert(kBlockM == 64, "all consumers have the same queries");
static_assert(kBlockN == kConsumers * kChunk, "a consumer makes P of the keys of one chunk");
static_assert(kPageSize == 0 && !kStoresByRows, "not served");

constexpr int kKeys = kBlockN / kConsumers, kNTiles = kKeys / 8;  // of a consumer
// Columns of a consumer: whole chunks. Where their number is odd, the last ones are zeros.
constexpr int kOutChunks = ceil_div(chunks_of(kDimV), kConsumers), kOutColumns = kOutChunks * kChunk;
constexpr int kAllChunks = kConsumers * kOutChunks;
constexpr int kScoreSteps = chunks_of(kDim);                        // stages of K and tK
constexpr int kValueRows = 32, kValueSteps = kBlockN / kValueRows;  // stages of V and tV
static_assert(kValueSteps == 4, "[2] and [3] are cut to so many pieces");

// Shared memory: Q and tQ, the ring, P and P (tS - c), what two warps with the same rows tell each other, and barriers.
constexpr u32 kBytesQ = chunked_bytes(kBlockM, kDim);
constexpr u32 kBytesBox = max_of(chunked_bytes(kBlockN, kChunk), kAllChunks * kValueRows * kLineBytes);
constexpr u32 kBytesP = chunked_bytes(kBlockM, kBlockN);
constexpr u32 kBytesMaxima = kConsumers * kBlockM * 4, kBytesSums = kConsumers * kBlockM * 8;
constexpr u32 kBytesBarriers = Ring<1>::kBytes + Ring<kNumStages>::kBytes + 16 + TileRing::kBytes;
static_assert(2 * kBytesQ + kNumStages * 2 * kBytesBox + 2 * kBytesP + kBytesMaxima + kBytesSums + kBytesBarriers ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers per thread, as in sm90/forward.cu.
constexpr int kProducerRegisters = kIsPacked ? 40 : 24, kConsumerRegisters = kIsPacked ? 232 : 240;
constexpr u32 kPair = 1, kConsumer = kPair + 4, kAll = kConsumer + kConsumers;  // named barriers

struct Shared {
  u32 q, ring_tiles, p, tp, maxima, sums, scratch;
  Ring<1> q_ring;
  Ring<kNumStages> ring;
  TileRing tiles;  // of packed sequences

  CUFLASH_DEVICE Shared() {
    q = ptx::dynamic_shared();
    ring_tiles = q + 2 * kBytesQ;
    p = ring_tiles + kNumStages * 2 * kBytesBox;
    tp = p + kBytesP;
    maxima = tp + kBytesP;
    sums = maxima + kBytesMaxima;
    q_ring = {sums + kBytesSums};
    ring = {q_ring.address + Ring<1>::kBytes};
    scratch = ring.address + Ring<kNumStages>::kBytes;
    tiles = {{scratch + 16}};
  }
  // Called by all threads of the block.
  CUFLASH_DEVICE void make_barriers() const {
    if (ptx::thread_index() == 0) {
      q_ring.init(4 * kConsumers);
      ring.init(kConsumers);
      if constexpr (kIsPacked) tiles.init(4 * kConsumers + 1);
      ptx::fence_barrier_init();
    }
    ptx::sync_block();
  }
  // The tangents of a stage lie after its values.
  CUFLASH_DEVICE u32 at(const Position<kNumStages>& at) const { return ring_tiles + at.stage * 2 * kBytesBox; }
};

// The producer: one thread. It iterates over the tiles as the consumers do, as far ahead of them as the ring allows.
struct Producer {
  const JvpParams& params;
  const Shared& shared;
  Position<1> query;
  Position<kNumStages> at;

  CUFLASH_DEVICE void load_q(const QueryTile& tile) {
    const Barrier full = shared.q_ring.full(query);
    const int row = query_start_of(tile.work.batch) + tile.first_row;
    const int head = tile.work.head, batch = entry_of(tile.work.batch);
    shared.q_ring.empty(query).wait(query.parity ^ 1);
    full.arrive_expect((1 + kMovesQ) * kBytesQ);
    load_chunks<kBlockM, kDim>(shared.q, params.maps[kMapQ], full, row, head, batch);
    if constexpr (kMovesQ) load_chunks<kBlockM, kDim>(shared.q + kBytesQ, params.maps[kMapTq], full, row, head, batch);
    query.advance();
  }
  // Loads `chunks` chunks of `rows` rows of an array, and of its tangent if it `moves`, to the next stage.
  template <int rows, int chunks, bool moves>
  CUFLASH_DEVICE void load(const QueryTile& tile, const TensorMap& map, const TensorMap& tangent, int row,
                           int first_chunk) {
    const Barrier full = shared.ring.full(at);
    const u32 to = shared.at(at);
    shared.ring.empty(at).wait(at.parity ^ 1);
    full.arrive_expect((1 + moves) * chunks * rows * kLineBytes);
    const auto load_array = [&](u32 destination, const TensorMap& of) {
#pragma unroll 1
      for (int c = 0; c < chunks; ++c)
        ptx::load_tensor(destination + c * rows * kLineBytes, of, full.address, (first_chunk + c) * kChunk, row,
                         tile.head_kv, entry_of(tile.work.batch));
    };
    load_array(to, map);
    if constexpr (moves) load_array(to + kBytesBox, tangent);
    at.advance();
  }
  CUFLASH_DEVICE static int first_key(const QueryTile& tile, int n_block) {
    return key_start_of(tile.work.batch) + tile.keys.at(n_block) * kBlockN;
  }
  CUFLASH_DEVICE void load_keys(const QueryTile& tile, int n_block, bool with_q) {
    const int key = first_key(tile, n_block);
#pragma unroll 1
    for (int i = 0; i < kScoreSteps; ++i) {
      load<kBlockN, 1, kMovesK>(tile, params.maps[kMapK], params.maps[kMapTk], key, i);
      if (with_q && i == 0) load_q(tile);
    }
  }
  CUFLASH_DEVICE void load_values(const QueryTile& tile, int n_block) {
    const int key = first_key(tile, n_block);
#pragma unroll 1
    for (int i = 0; i < kValueSteps; ++i)
      load<kValueRows, kAllChunks, kMovesV>(tile, params.maps[kMapV], params.maps[kMapTv], key + i * kValueRows, 0);
  }
  CUFLASH_DEVICE void produce() {
#pragma unroll 1
    for (auto scheduler = make_scheduler<false>(params.common, shared.tiles); scheduler.more(); scheduler.advance()) {
      const QueryTile tile(params.common, scheduler.work(params.common));
      if (tile.keys.start == tile.keys.stop) {
        load_q(tile);
        continue;
      }
      load_keys(tile, tile.keys.stop - 1, true);
#pragma unroll 1
      for (int n_block = tile.keys.stop - 2; n_block >= tile.keys.start; --n_block) {
        load_keys(tile, n_block, false);
        load_values(tile, n_block + 1);
      }
      load_values(tile, tile.keys.start);
    }
  }
};

// The warp of the other consumer that has the same rows, and what the two tell each other through shared memory. Each
// place is written again only after a barrier of both consumers.
struct OtherWarp {
  u32 maxima, sums, to_other;  // of this lane's first row in this consumer's part; between it and the other's, in rows
  u32 barrier;

  CUFLASH_DEVICE OtherWarp(const Shared& shared, u32 index, u32 warp) {
    const u32 row = index * kBlockM + warp * 16 + fragment_row();
    maxima = shared.maxima + row * 4;
    sums = shared.sums + row * 8;
    to_other = index == 0 ? kBlockM : -kBlockM;
    barrier = kPair + warp;
  }
  CUFLASH_DEVICE void sync() const { ptx::sync_named(barrier, 64); }

  // Raises the maxima of the two rows of a lane to those of the other's keys.
  CUFLASH_DEVICE void raise(float (&max)[2]) const {
    if (fragment_column() == 0) {
      ptx::store_shared_b32(maxima, ptx::bits_of(max[0]));
      ptx::store_shared_b32(maxima + 8 * 4, ptx::bits_of(max[1]));
    }
    sync();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      max[half] = max_of(max[half], ptx::float_of(ptx::load_shared_b32(maxima + (to_other + 8 * half) * 4)));
  }
  // Adds the other's to two sums of a row.
  CUFLASH_DEVICE void add(int half, float& x, float& y) const {
    if (fragment_column() == 0) ptx::store_shared_x2(sums + half * 64, {x, y});
    sync();
    float other[2];
    ptx::load_shared_x2(sums + to_other * 8 + half * 64, other);
    x += other[0];
    y += other[1];
  }
};

// One consumer warpgroup at work on one tile of queries.
struct Consumer {
  const Params& common;
  const Shared& shared;
  const u32 index, thread;
  const bool elected;
  Position<kNumStages>& at;  // the next stage
  const QueryTile& tile;
  const int warp_row, lane_row;
  const int own_diagonal;  // of the batch entry
  const Score score;
  const ScoreTangents tangents;
  const float exponent_scale;

  const OtherWarp other;
  TangentSoftmax<1, OtherWarp> softmax;
  float s[1][kNTiles][4], ts[1][kNTiles][4], o[1][kOutColumns / 8][4], a[1][kOutColumns / 8][4];
  int valid = kBlockN;  // keys of the tile whose values come next; what lies after them is cleared

  CUFLASH_DEVICE Consumer(const Params& common_, const Shared& shared_, u32 index_, Position<kNumStages>& at_,
                          const QueryTile& tile_)
      : common(common_),
        shared(shared_),
        index(index_),
        thread(ptx::thread_index() % 128),
        elected(thread == 0),
        at(at_),
        tile(tile_),
        warp_row(thread / 32 * 16),
        lane_row(tile.first_row + warp_row + fragment_row()),
        own_diagonal(own_diagonal_of(common, tile.work.batch)),
        score(common, tile.work.batch, tile.work.head, tile.key_stop, own_diagonal),
        tangents(common, tile.work.batch, tile.work.head),
        exponent_scale(score.exponent_scale()),
        other(shared, index, thread / 32),
        softmax(make_tangent_softmax(common, tile.work.batch, tile.work.head, other)) {
    set_zero(o);
    set_zero(a);
  }

  // The key of this lane's first column in a tile of keys.
  CUFLASH_DEVICE int lane_key(int n_block) const {
    return tile.keys.at(n_block) * kBlockN + index * kKeys + fragment_column();
  }
  CUFLASH_DEVICE void sync() const { ptx::sync_named(kConsumer + index, 128); }
  CUFLASH_DEVICE void sync_all() const { ptx::sync_named(kAll, 128 * kConsumers); }
  CUFLASH_DEVICE void release(const Position<kNumStages>& stage) const {
    if (elected) shared.ring.empty(stage).arrive();
  }

  // Clears the rows of Q and tQ from `row_stop` on, where this sequence ends. Those rows belong to other sequences and
  // must not decide when sums are rescaled.
  CUFLASH_DEVICE void clear_queries(int row_stop) const {
    if constexpr (kIsPacked) {
      if (row_stop < kBlockM) {
        if (index == 0) {
          zero_last_of_64<kBlockM, kDim>(shared.q, row_stop, thread);
          if constexpr (kMovesQ) zero_last_of_64<kBlockM, kDim>(shared.q + kBytesQ, row_stop, thread);
          ptx::fence_async_proxy();
        }
        sync_all();
      }
    }
  }

  // [1] as one group of products for each stage. The last one is still in flight at the end.
  CUFLASH_DEVICE void issue_scores() {
    u32 queries = shared.q;
    Position<kNumStages> last = at;
    ptx::fence_operand(s[0]);
    ptx::fence_operand(ts[0]);
#pragma unroll 1
    for (int step = 0; step < kScoreSteps; ++step, queries += kBlockM * kLineBytes) {
      const u32 keys = shared.at(at) + index * kKeys * kLineBytes;
      const u64 q = descriptor_of(queries), tq = descriptor_of(queries + kBytesQ);
      const u64 k = descriptor_of(keys), tk = descriptor_of(keys + kBytesBox);
      shared.ring.full(at).wait(at.parity);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto multiply = [&](float (&sum)[kNTiles][4], u64 left, u64 right, bool adds)
                                  __attribute__((always_inline)) {
                                    ptx::wgmma<false, false>(Element{}, sum, along_k<kBlockM>(left, i),
                                                             along_k<kBlockN>(right, i), adds || i > 0);
                                  };
        multiply(s[0], q, k, step > 0);
        if constexpr (kMovesQ) multiply(ts[0], tq, k, step > 0);
        if constexpr (kMovesK) multiply(ts[0], q, tk, kMovesQ || step > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (step > 0) release(last);
      last = at;
      at.advance();
    }
  }
  // Waits for the scores, after which `pending` groups of values were issued. `last` is their last stage.
  template <int pending>
  CUFLASH_DEVICE void wait_for_scores(const Position<kNumStages>& last) {
    wait_for<pending>(s[0]);
    if constexpr (kMovesX)
      ptx::fence_operand(ts[0]);
    else if constexpr (kMovesScores)
      set_zero(ts);
    release(last);
  }

  // [4] of the rows of one stage.
  template <int step>
  CUFLASH_DEVICE void issue_values() {
    const u32 tiles = shared.at(at) + index * kOutChunks * kValueRows * kLineBytes;
    const u64 v = descriptor_of_transposed<kValueRows>(tiles);
    const u64 tv = descriptor_of_transposed<kValueRows>(tiles + kBytesBox);
    const u32 weights = shared.p;
    const u64 p = descriptor_of(weights), tp = descriptor_of(weights + kBytesP);
    shared.ring.full(at).wait(at.parity);
    clear_values(tiles, valid - step * kValueRows);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kValueRows / 16; ++i) {
      const auto multiply = [&](float (&sum)[kOutColumns / 8][4], u64 left, u64 right) __attribute__((always_inline)) {
        ptx::wgmma<false, true>(Element{}, sum, along_k<kBlockM>(left, step * kValueRows / 16 + i),
                                along_k_transposed(right, i), true);
      };
      multiply(o[0], p, v);
      if constexpr (kMovesV) multiply(a[0], p, tv);
      if constexpr (kMovesScores) multiply(a[0], tp, v);
    }
    ptx::wgmma_commit();
    at.advance();
  }
  // Clears values of keys past the last one: their weights are 0, but what lies there may be NaN, and 0 * NaN is NaN.
  CUFLASH_DEVICE void clear_values(u32 tiles, int first) const {
    if constexpr (kHidesLastKeys) {
      if (first < kValueRows) {
        zero_rows<kValueRows, kOutColumns>(tiles, at_least_zero(first), thread);
        if constexpr (kMovesV) zero_rows<kValueRows, kOutColumns>(tiles + kBytesBox, at_least_zero(first), thread);
        ptx::fence_async_proxy();
        sync();
      }
    }
  }
  // Waits until at most `pending` groups of values are in flight, and gives back the stage that the one before them has
  // read.
  template <int pending>
  CUFLASH_DEVICE void finish_values(Position<kNumStages>& stage) const {
    ptx::wgmma_wait<pending>();
    release(stage);
    stage.advance();
  }

  CUFLASH_DEVICE Mask mask() const {
    return Mask(common, tile.work.batch, tile.work.head, tile.key_stop, own_diagonal);
  }

  CUFLASH_DEVICE static float square(float x) { return x * x; }

  // [2] and [3]: turns scores into weights. `meanwhile` is called between them, and `at_end` before O and A are
  // rescaled.
  template <class Masked, class Meanwhile, class Later, class AtEnd>
  CUFLASH_DEVICE void softmax_step(int n_block, Masked masked, Meanwhile meanwhile, Later later, AtEnd at_end) {
    const int key = lane_key(n_block);
    make_scores(score, tangents, mask(), s, ts, lane_row, key, masked);
    const auto raised = softmax.to_weights(s, row_maxima().score, exponent_scale);
    meanwhile();
    make_tangents(score, tangents, ts, lane_row, key);
    later();
    const Constant<Masked::value || kMayHide> selects;
    const float scale = kTangentIsScaled ? score.scale : 1.0f;
    // The sums of a column where O is 1 and A is 0 get the factors of all columns, whose products are in flight.
    float of_o[1][1][4] = {{{1.0f, 1.0f, 1.0f, 1.0f}}}, of_a[1][1][4] = {{{0.0f, 0.0f, 0.0f, 0.0f}}};
    softmax.rescale_sums(raised, s, ts, of_o, of_a, scale, selects);
    softmax.weigh_tangents(s, ts, scale, selects);
    if constexpr (kHasDropout) {
      const float kept_scale = kept_scale_of(common);  // before they are rounded: in float16 they may be subnormal
      const Dropout dropout(common, tile.work.batch, tile.work.head);  // no registers are left to keep it
      dropout.drop(s[0], lane_row, key, kept_scale);
      if constexpr (kMovesScores) dropout.drop(ts[0], lane_row, key, kept_scale);
    }
    // The products of values have to overlap all of this, but the assembler would sink it past the wait.
    if constexpr (kMovesScores)
      ptx::keep_before(square(softmax.mean_sum[0][0]) + square(softmax.mean_sum[0][1]), shared.scratch);
    at_end();
    if (raised.any) rescale(of_o[0][0], of_a[0][0]);
  }
  CUFLASH_DEVICE void rescale(const float (&of_o)[4], const float (&of_a)[4]) {
#pragma unroll
    for (int n = 0; n < kOutColumns / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[0][n][i] = a[0][n][i] * of_o[i] + of_a[i] * o[0][n][i];
        o[0][n][i] *= of_o[i];
      }
  }
  // The row maxima of the tile, as scores.
  struct Maxima {
    float score[1][1][4];
  };
  CUFLASH_DEVICE Maxima row_maxima() const {
    float max[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = max_of(s[0][0][2 * half], s[0][0][2 * half + 1]);
#pragma unroll
      for (int n = 1; n < kNTiles; ++n) max[half] = max_of(max[half], max_of(s[0][n][2 * half], s[0][n][2 * half + 1]));
      max[half] = max_of(max[half], ptx::shuffle_xor(max[half], 1));
      max[half] = max_of(max[half], ptx::shuffle_xor(max[half], 2));
    }
    other.raise(max);
    return {{{{max[0], max[0], max[1], max[1]}}}};
  }
  // Writes P and P (tS - c) of its keys, once both consumers have read those of the tile before.
  CUFLASH_DEVICE void store_weights() {
    const u32 chunk = index * kBlockM * kLineBytes;
    sync_all();
    store_fragments_chunked<kBlockM>(shared.p + chunk, warp_row, s[0], 1.0f, 1.0f);
    if constexpr (kMovesScores) store_fragments_chunked<kBlockM>(shared.tp + chunk, warp_row, ts[0], 1.0f, 1.0f);
    ptx::fence_async_proxy();
    sync_all();
  }

  // The first tile of keys has no values before it. P is written where TMA may still read results from.
  CUFLASH_DEVICE void first_step(int n_block) {
    issue_scores();
    wait_for_scores<0>(before(at));
    if constexpr (kHidesLastKeys) valid = tile.key_stop - tile.keys.at(n_block) * kBlockN;
    if (elected) ptx::bulk_wait_read<0>();
    softmax_step(n_block, Constant<true>{}, []() {}, []() {}, []() {});
    store_weights();
  }
  template <class Masked>
  CUFLASH_DEVICE void step(int n_block, Masked masked) {
    issue_scores();
    const Position<kNumStages> last = before(at);
    Position<kNumStages> values = at;
    ptx::fence_operand(o[0]);
    ptx::fence_operand(a[0]);
    issue_values<0>();
    wait_for_scores<1>(last);
    issue_values<1>();
    softmax_step(
        n_block, masked,
        [&]() __attribute__((always_inline)) {
          finish_values<1>(values);
          issue_values<2>();
        },
        [&]() __attribute__((always_inline)) {
          finish_values<1>(values);
          issue_values<3>();
        },
        [&]() __attribute__((always_inline)) {
          finish_values<1>(values);
          finish_values<0>(values);
          ptx::fence_operand(o[0]);
          ptx::fence_operand(a[0]);
        });
    if constexpr (kHidesLastKeys) valid = kBlockN;
    store_weights();
  }
  CUFLASH_DEVICE void last_values() {
    Position<kNumStages> values = at;
    ptx::fence_operand(o[0]);
    ptx::fence_operand(a[0]);
    issue_values<0>();
    issue_values<1>();
    finish_values<1>(values);
    issue_values<2>();
    finish_values<1>(values);
    issue_values<3>();
    finish_values<1>(values);
    finish_values<0>(values);
    ptx::fence_operand(o[0]);
    ptx::fence_operand(a[0]);
  }
  CUFLASH_DEVICE static Position<kNumStages> before(const Position<kNumStages>& at) {
    return {at.stage == 0 ? kNumStages - 1 : at.stage - 1};  // whose stage alone matters
  }

  // Iterates over all tiles of keys, from the last place to the first. Gives Q back at `empty`.
  CUFLASH_DEVICE void mainloop(const Barrier& empty) {
    const TileRange& keys = tile.keys;
    int n_block = keys.stop - 1;
    first_step(n_block--);
    // Where scores take many instructions, the mask is always evaluated, so that they are compiled once less.
#pragma unroll 1
    for (; n_block >= (kNeedsProduct ? keys.start : keys.full_stop); --n_block) step(n_block, Constant<true>{});
    if constexpr (!kNeedsProduct) {
#pragma unroll 1
      for (; n_block >= keys.full_start; --n_block) step(n_block, Constant<false>{});
      if constexpr (kHasLeftBound) {
#pragma unroll 1
        for (; n_block >= keys.start; --n_block) step(n_block, Constant<true>{});
      }
    }
    arrive_as_warp(empty);
    last_values();
  }

  // out = O / l and tout = (A - (r / l) O) / l.
  CUFLASH_DEVICE void finish() {
    softmax.finish();
    if constexpr (kHasSinks) softmax.add_sink(o, a);
    take_out_mean(softmax, o, a);
    sync_all();  // both have read P, where results go next, and the other's sums
  }
  // Rounds a result and writes it, chunk by chunk, to where this consumer's P and P (tS - c) were in turn, once TMA has
  // read what was there before. From there TMA, or store_first_rows, stores it.
  template <int map>
  CUFLASH_DEVICE void store(float (&sum)[1][kOutColumns / 8][4], const Tensor& result, const TensorMap* maps,
                            int row_stop) {
    const Entry batch = tile.work.batch;
    const float upper = softmax.inverse_sum(0, 0), lower = softmax.inverse_sum(0, 1);
    repeat<kOutChunks>([&](auto chunk) {
      constexpr int i = decltype(chunk)::value, kCount = i + (map == kMapTout) * kOutChunks;
      const u32 s_out = (kCount % 2 ? shared.tp : shared.p) + index * kBlockM * kLineBytes;
      if (elected) ptx::bulk_wait_read<1>();
      sync();
      store_fragments_chunked<kBlockM>(s_out, warp_row, (float (&)[kChunk / 8][4]) sum[0][i * kChunk / 8], upper,
                                       lower);
      ptx::fence_async_proxy();
      sync();
      if (kIsPacked && row_stop < kBlockM) {
        Storage* g_out = (Storage*)queries_of(result, batch, tile.work.head) + tile.first_row * result.row_stride;
        repeat<kConsumers>([&](auto consumer) {
          constexpr int kFirst = (decltype(consumer)::value * kOutChunks + i) * kChunk;
          if constexpr (kFirst < kHeadDimV)
            if (index == decltype(consumer)::value)
              store_first_rows<kBlockM, min_of(kChunk, kHeadDimV - kFirst)>(g_out + kFirst, result.row_stride, s_out,
                                                                            row_stop, thread);
        });
      } else if (elected) {
        store_chunks<kBlockM, kChunk>(maps[map], s_out, query_start_of(batch) + tile.first_row, tile.work.head,
                                      entry_of(batch), (index * kOutChunks + i) * kChunk);
        ptx::bulk_commit();
      }
    });
  }
  CUFLASH_DEVICE void store_row_values() const {
    if (index > 0) return;
    const Entry batch = tile.work.batch;
    const int head = tile.work.head;
    const int seqlen_q = seqlen_q_of(common, batch);
    float* g_lse = row_values_of(common.lse, batch, head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 8 * half;
      if (fragment_column() == 0 && row < seqlen_q) store_lse(g_lse + row * common.lse.row_stride, softmax, 0, half);
    }
    store_tlse(common, batch, head, lane_row, softmax);
  }
};

// A consumer warpgroup takes one tile of queries after another.
CUFLASH_DEVICE void consume(const JvpParams& params, const Shared& shared, u32 index) {
  Position<1> query;
  Position<kNumStages> at;
#pragma unroll 1
  for (auto scheduler = make_scheduler<true>(params.common, shared.tiles); scheduler.more();
       scheduler.advance(), query.advance()) {
    const QueryTile tile(params.common, scheduler.work(params.common));
    Consumer consumer(params.common, shared, index, at, tile);
    const int row_stop = seqlen_q_of(params.common, tile.work.batch) - tile.first_row;
    shared.q_ring.full(query).wait(query.parity);
    consumer.clear_queries(row_stop);
    if (tile.keys.start < tile.keys.stop)
      consumer.mainloop(shared.q_ring.empty(query));
    else
      arrive_as_warp(shared.q_ring.empty(query));
    consumer.finish();
    consumer.store<kMapOut>(consumer.o, params.common.out, params.maps, row_stop);
    consumer.store<kMapTout>(consumer.a, params.common.tout, params.maps, row_stop);
    consumer.store_row_values();
  }
  if (ptx::thread_index() % 128 == 0) ptx::bulk_wait<0>();
}

CUFLASH_DEVICE void jvp(const JvpParams& params) {
  if (!is_chosen(params.common)) return;
  const Shared shared;
  shared.make_barriers();
  const u32 warp = ptx::uniform(ptx::thread_index() / 32);
  if (warp >= 4 * kConsumers) {
    ptx::decrease_registers<kProducerRegisters>();
    if (warp == 4 * kConsumers && ptx::elect_lane()) Producer{params, shared}.produce();
    if constexpr (kIsPacked) {
      if (warp == 4 * kConsumers + 1) schedule_tiles(params.common, shared.tiles);
    }
  } else {
    ptx::increase_registers<kConsumerRegisters>();
    consume(params, shared, warp / 4);
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, JvpParams, kNumThreads, 1, jvp)
