// Forward pass of float32 on compute capability 9.0 (Hopper), with wgmma and TMA.
//
//   S = Q K^T        P = exp(S - m)        l = rowsum(P)        O = P V / l        lse = m + log l
//
// The tensor cores multiply bfloat16. So Q, K and V come split into terms (helpers/split_fp32.cu), three each, or two
// where the precision of TF32 is wanted. P is split in registers. Every product is the sum of six products of terms, or
// of three (common/io/bf16_split.cuh). Tensor cores cut sums off instead of rounding them. So they sum the P V of each
// tile of keys by itself, small products first, and other instructions add it to O with rounding.
//
// Where few tiles of queries read K and V and rows are short, the producer splits operands itself, on their way to
// shared memory (kSplitsOperands). That takes instructions for each tile of queries, but saves writing the terms to
// global memory and reading them.
//
// The kernel is persistent: one block stays on each SM and takes one tile of queries after another. Its
// last warpgroup, the producer, loads tiles by TMA. Each of the others, the consumers, owns 64 queries of the tile. The
// products of one consumer run during the softmax of another, for which consumers may issue them in ping-pong
// (kPingPong).
//
//   barrier      one phase is over when            who waits
//   q_full       Q has arrived                     consumers, before S
//   q_empty      every warp has its last S         producer, before the next Q
//   k_full[i]    a term of K has arrived          consumers, before its products in S
//   k_empty[i]   every warp has these              producer, before the next term of K there
//   v_full[i]    a term of V has arrived          consumers, before its products in O
//   v_empty[i]   every warp has these              producer, before the next term of V there
//   bias_terms_full   bias, or per-key values, are there   consumers, before they make scores
//   bias_terms_empty  every warp has its scores             producer, before the next bias, or numbers
//   named: one per consumer for the ping-pong; one per consumer for itself
#include "common/io/bf16_split.cuh"
#include "common/config.cuh"
#include "common/score/dropout.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/softmax.cuh"
#include "sm90/bias_terms.cuh"
#include "sm90/forward_roles.cuh"
#include "sm90/ping_pong.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/split_tile.cuh"
#include "sm90/tiles.cuh"

constexpr bool kPingPong = CUFLASH_PING_PONG;
constexpr bool kSplitsOperands = CUFLASH_SPLITS_OPERANDS;
constexpr int kProducers = kSplitsOperands ? 4 : 1;  // warps, each of which announces what it has brought
using ConsumerPingPong = PingPong<kPingPong, kConsumers, kPingPongBarrier>;
// Whether consumers keep the terms of Q in registers, so that products S read K alone from shared memory. O takes these
// registers otherwise.
constexpr bool kHoldsQ = !kHasValues && kBf16Terms * kDim / 4 <= (kConsumers == 2 ? 96 : 48);
constexpr int kNTiles = kBlockN / 8;
constexpr int kColumnTiles = max_of(kDimV / 8, 2);

// Shared memory: the terms of Q, the rings of the terms of K and of V, the bias terms of the scores of a tile,
// barriers.
constexpr u32 kTermQ = chunked_bytes(kBlockM, kDim), kBytesQ = kBf16Terms * kTermQ;
constexpr u32 kTermK = chunked_bytes(kBlockN, kDim), kBytesK = kBf16Terms * kTermK;
constexpr u32 kTermV = chunked_bytes(kBlockN, kDimV), kBytesV = kBf16Terms * kTermV;
constexpr int kSlots = kBf16Terms * kNumStages;  // of a ring of terms, which come and go one by one
// Whether the bias terms of scores come to shared memory. They have one stage, because all consumers need them only at
// the beginning of their softmax.
constexpr bool kLoadsBiasTerms = kBiasOfPairs || kHasPerKeyValues;
using BiasTermRing = Ring<1>;
constexpr u32 kBytesBiasTerms = kBytesBias + kBytesPerKeyValues;
constexpr u32 kBytesBarriers = QkvBarriers<kSlots>::kBytes + (kLoadsBiasTerms ? BiasTermRing::kBytes : 0);
static_assert(kBytesQ + kNumStages * (kBytesK + kBytesV) + kBytesBiasTerms + kBytesBarriers == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers per thread after the producer has given up most of its own. Their sum over the block is at most what the
// block started with.
constexpr int kConsumerRegisters = kConsumers == 3 ? 152 : kSplitsOperands ? 200 : 232;
constexpr int kProducerRegisters = (kConsumers == 3 ? 512 : 504) - kConsumers * kConsumerRegisters;
static_assert(!kSplitsOperands || kConsumers == 2, "three consumers leave no registers for the producer");
static_assert(!kSplitsOperands || max_of(kHeadDim, kHeadDimV) <= 32, "split tiles have at most 32 columns");

// The tensor maps of the terms of Q, K and V, and that of the bias. A map of terms has term i of batch entry b at batch
// index i * batch + b.
template <int maps>
struct MappedParams {
  Params common;
  TensorMap map[maps];
};
template <>
struct MappedParams<0> {
  Params common;
};
constexpr int kMaps = (kSplitsOperands ? 0 : 2 + kHasValues) + kBiasOfPairs;
using ForwardParams = MappedParams<kMaps>;
static_assert(kMaps == 0 || sizeof(ForwardParams) == CUFLASH_ARGUMENT_BYTES,
              "the argument differs from its description in Python");

struct Shared : QkvShared<kSlots> {
  u32 bias, numbers;
  BiasTermRing bias_term_ring;

  CUFLASH_DEVICE Shared() : QkvShared(kBytesQ, kNumStages * kBytesK, kNumStages * kBytesV + kBytesBiasTerms) {
    bias = v + kNumStages * kBytesV;
    numbers = bias + kBytesBias;
    bias_term_ring = {numbers + kBytesPerKeyValues + QkvBarriers::kBytes};
  }
};

// Terms of a tile come from the lowest to the highest. `position_of` says where the n-th of them lies, and `term_at`
// which term it is.
CUFLASH_DEVICE Position<kSlots> position_of(const Position<kNumStages>& tile, int n) {
  return {tile.stage * kBf16Terms + n, tile.parity};
}
CUFLASH_DEVICE constexpr int term_at(int n) { return kBf16Terms - 1 - n; }

// The position of a consumer in the ring of bias terms, which has one stage.
struct BiasTermStage {
  const BiasTermRing& ring;
  Position<1> at;

  CUFLASH_DEVICE void wait() const {
    if constexpr (kLoadsBiasTerms) ring.full(at).wait(at.parity);
  }
  CUFLASH_DEVICE void release() {
    if constexpr (kLoadsBiasTerms) arrive_after_reads(ring.empty(at)), at.advance();
  }
};

// The producer: one thread. It iterates over the tiles as the consumers do, as far ahead of them as the rings allow.
template <class P>
CUFLASH_DEVICE void produce(const P& params, Shared& shared) {
  Position<kNumStages> key;
  Position<1> query, bias_term;
  for (TileScheduler scheduler(params.common); scheduler.more(); scheduler.advance(), query.advance()) {
    const QueryTile tile(params.common, scheduler.work(params.common));
    const int head = tile.head_kv, batch = tile.work.batch, all_batch = params.common.batch;
    const auto load_q = [&]() {
      const Barrier q_full = shared.q_ring.full(query);
      shared.q_ring.empty(query).wait(query.parity ^ 1);
      q_full.arrive_expect(kBytesQ);
#pragma unroll 1
      for (int i = 0; i < kBf16Terms; ++i)
        load_chunks<kBlockM, kDim>(shared.q + i * kTermQ, params.map[0], q_full, tile.first_row, tile.work.head,
                                   i * all_batch + batch);
    };
    if (tile.keys.start == tile.keys.stop) load_q();
    for (int n_block = tile.keys.stop - 1; n_block >= tile.keys.start; --n_block, key.advance()) {
      const int first_key = tile.keys.at(n_block) * kBlockN;
      const auto load_keys = [&](const Ring<kSlots>& ring, u32 terms, const TensorMap& map, auto columns) {
        constexpr int kColumns = decltype(columns)::value;
        constexpr u32 kTerm = chunked_bytes(kBlockN, kColumns);
#pragma unroll 1
        for (int n = 0; n < kBf16Terms; ++n) {
          const Position<kSlots> at = position_of(key, n);
          ring.empty(at).wait(at.parity ^ 1);
          ring.full(at).arrive_expect(kTerm);
          load_chunks<kBlockN, kColumns>(terms + at.stage * kTerm, map, ring.full(at), first_key, head,
                                         term_at(n) * all_batch + batch);
        }
      };
      load_keys(shared.k_ring, shared.k, params.map[1], Integer<kDim>{});
      if (n_block == tile.keys.stop - 1) load_q();
      if constexpr (kBiasOfPairs) {
        const Barrier full = shared.bias_term_ring.full(bias_term);
        shared.bias_term_ring.empty(bias_term).wait(bias_term.parity ^ 1);
        full.arrive_expect(kBytesBias);
        load_bias(params.common, shared.bias, params.map[kMaps - 1], full, tile.first_row, first_key, tile.work.head,
                  batch);
        bias_term.advance();
      }
      if constexpr (kHasValues) load_keys(shared.v_ring, shared.v, params.map[2], Integer<kDimV>{});
    }
  }
}

// The producer where it splits operands: all threads of its warpgroup. While a thread waits for a free stage for a
// tile, the loads of the first elements that it splits are in flight.
template <class P>
struct SplittingProducer {
  const P& params;
  const Params& common;
  const Shared& shared;
  const u32 thread;
  SplitTile<kBlockM, kHeadDim> q;
  SplitTile<kBlockN, kHeadDim> k;
  SplitTile<kBlockN, max_of(kHeadDimV, 1)> v;
  Position<kNumStages> key;
  Position<1> query, bias_term;

  CUFLASH_DEVICE SplittingProducer(const P& params_, const Shared& shared_, u32 thread_)
      : params(params_), common(params_.common), shared(shared_), thread(thread_), q(thread_), k(thread_), v(thread_) {}

  // Begins to load a tile of keys, or of values.
  template <class Rows>
  CUFLASH_DEVICE void begin(Rows& rows, const Tensor& tensor, const QueryTile& tile, int n_block) {
    rows.begin(head_of(tensor, tile.work.batch, tile.head_kv), tensor.row_stride, tile.keys.at(n_block) * kBlockN,
               tile.key_stop);
  }
  // Begins to load the first tile of keys of a tile of queries.
  CUFLASH_DEVICE void begin_first(const QueryTile& tile) {
    if (tile.keys.start < tile.keys.stop) begin(k, common.k, tile, tile.keys.stop - 1);
  }
  // Puts a tile in its slot of a ring, once that is free. Its terms lie there from the lowest to the highest.
  template <class Rows>
  CUFLASH_DEVICE void finish(Rows& rows, const Ring<kSlots>& ring, u32 terms, u32 term_bytes) {
    for (int n = 0; n < kBf16Terms; ++n) ring.empty(position_of(key, n)).wait(key.parity ^ 1);
    rows.finish(terms + position_of(key, kBf16Terms - 1).stage * term_bytes, 0 - term_bytes);
    ptx::fence_async_proxy();
    for (int n = 0; n < kBf16Terms; ++n) arrive_as_warp(ring.full(position_of(key, n)));
  }
  CUFLASH_DEVICE void bring_q(const QueryTile& tile) {
    q.begin(head_of(common.q, tile.work.batch, tile.work.head), common.q.row_stride, tile.first_row, common.seqlen_q);
    shared.q_ring.empty(query).wait(query.parity ^ 1);
    q.finish(shared.q, kTermQ);
    ptx::fence_async_proxy();
    arrive_as_warp(shared.q_ring.full(query));
  }
  CUFLASH_DEVICE void load_bias_terms(const QueryTile& tile, const PerKeyValues& of_keys, int first_key) {
    const Barrier full = shared.bias_term_ring.full(bias_term);
    shared.bias_term_ring.empty(bias_term).wait(bias_term.parity ^ 1);
    if constexpr (kBiasOfPairs) {
      if (thread == 0) {
        full.arrive_expect(kBytesBias);
        load_bias(common, shared.bias, params.map[kMaps - 1], full, tile.first_row, first_key, tile.work.head,
                  tile.work.batch);
      }
    }
    if constexpr (kHasPerKeyValues) {
      for (int i = thread; i < kBlockN; i += 128) of_keys.store(shared.numbers + i * 4, first_key + i);
      arrive_as_warp(full);
    }
    bias_term.advance();
  }

  CUFLASH_DEVICE void run() {
    TileScheduler scheduler(common);
    if (scheduler.more()) begin_first(QueryTile(common, scheduler.work(common)));
    for (; scheduler.more(); query.advance()) {
      const QueryTile tile(common, scheduler.work(common));
      const Score score(common, tile.work.batch, tile.work.head, tile.key_stop);
      const PerKeyValues of_keys(common, score, tile.work.batch, tile.work.head);
      if (tile.keys.start == tile.keys.stop) bring_q(tile);
      for (int n_block = tile.keys.stop - 1; n_block >= tile.keys.start; --n_block, key.advance()) {
        finish(k, shared.k_ring, shared.k, kTermK);
        if (n_block == tile.keys.stop - 1) bring_q(tile);
        if constexpr (kHasValues) begin(v, common.v, tile, n_block);
        if constexpr (kLoadsBiasTerms) load_bias_terms(tile, of_keys, tile.keys.at(n_block) * kBlockN);
        if constexpr (kHasValues) finish(v, shared.v_ring, shared.v, kTermV);
        if (n_block > tile.keys.start) begin(k, common.k, tile, n_block - 1);
      }
      scheduler.advance();
      if (scheduler.more()) begin_first(QueryTile(common, scheduler.work(common)));
    }
  }
};

template <class P>
CUFLASH_DEVICE void produce_split(const P& params, const Shared& shared) {
  SplittingProducer<P>(params, shared, ptx::thread_index() % 128).run();
}

// The terms of 64 rows of Q as operands: in shared memory, or in registers (kHoldsQ).
struct QueryTerms {
  u32 rows;  // of the highest term
  FragmentOf<BFloat16> held[kHoldsQ ? kBf16Terms : 1][kDim / 16];

  // Warp. Loads those of its rows, once they are there.
  CUFLASH_DEVICE void load(int warp_row) {
    if constexpr (kHoldsQ) {
#pragma unroll
      for (int term = 0; term < kBf16Terms; ++term)
        load_fragments_chunked<kBlockM>(rows + term * kTermQ, warp_row, held[term]);
    }
  }
  // Issues s += a b over columns [16 k, 16 k + 16), of which `a` is one of these terms.
  CUFLASH_DEVICE void issue(float (&s)[kNTiles][4], int term, int k, u64 b, bool adds) const {
    if constexpr (kHoldsQ)
      ptx::wgmma<false>(BFloat16{}, s, held[term][k].word, along_k<kBlockN>(b, k), adds);
    else
      ptx::wgmma<false, false>(BFloat16{}, s, along_k<kBlockM>(descriptor_of(rows) + term * kTermQ / 16, k),
                               along_k<kBlockN>(b, k), adds);
  }
};

// [GEMM 1] S = Q K^T. The products with one term of K wait for that term. They are one group of wgmma, for which
// release_terms waits. The same holds for the terms of V in issue_o.
CUFLASH_DEVICE void issue_s(float (&s)[kNTiles][4], const QueryTerms& q, const Shared& shared,
                            const Position<kNumStages>& key) {
  ptx::fence_operand(s);
#pragma unroll
  for (int n = 0; n < kBf16Terms; ++n) {
    const Position<kSlots> at = position_of(key, n);
    const u64 b = descriptor_of(shared.k + at.stage * kTermK);
    shared.k_ring.full(at).wait(at.parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTermProducts; ++i)
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k)
        if (term_product(i).b == term_at(n)) q.issue(s, term_product(i).a, k, b, i + k > 0);
    ptx::wgmma_commit();
  }
}

// [GEMM 3] sum = P V.
CUFLASH_DEVICE void issue_o(float (&sum)[kColumnTiles][4], const u32 (&p)[kBlockN / 16][kBf16Terms][4],
                            const Shared& shared, const Position<kNumStages>& key) {
  ptx::fence_operand(sum);
#pragma unroll
  for (int n = 0; n < kBf16Terms; ++n) {
    const Position<kSlots> at = position_of(key, n);
    const u64 b = descriptor_of_transposed<kBlockN>(shared.v + at.stage * kTermV);
    shared.v_ring.full(at).wait(at.parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTermProducts; ++i)
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k)
        if (term_product(i).b == term_at(n))
          ptx::wgmma<true>(BFloat16{}, sum, p[k][term_product(i).a], along_k_transposed(b, k), i + k > 0);
    ptx::wgmma_commit();
  }
}

// [2] Turns products into scores. `row` and `key` are those of this lane's first element; `masked` says whether some
// pair may be hidden.
template <class Masked>
CUFLASH_DEVICE void make_scores(float (&s)[1][kNTiles][4], const Score& score, const Mask& mask, const Shared& shared,
                                int row, int key, Masked masked) {
  if constexpr (kAddsByTile) {
    const u32 pairs = shared.bias + warp_index() * 16 * kLineBytes;
    const BiasTerms<false> bias_terms(score, row, key, pairs, shared.numbers + fragment_column() * 4);
    bias_terms.visit<kNTiles>([&](int n, int i, auto score_of) {
      float& x = s[0][n][i];
      x = score_of(score.capped(x));
      if (masked && !mask.visible(row + i / 2 * 8, key + 8 * n + i % 2)) x = -ptx::infinity();
    });
  } else {
    to_scores(score, mask, s, [=](int, int i) { return row + i / 2 * 8; }, key, masked);
  }
}

// The same by one of two versions of the code, with a mask and without. With a block-sparse index and a bias there are
// no registers for two, and one version tests whether to mask.
CUFLASH_DEVICE void make_either_scores(float (&s)[1][kNTiles][4], const Score& score, const Mask& mask,
                                       const Shared& shared, int row, int key, bool masked) {
  if constexpr (kHasBlockIndex && kBiasBytes != 0)
    make_scores(s, score, mask, shared, row, key, masked);
  else if (masked)
    make_scores(s, score, mask, shared, row, key, Constant<true>{});
  else
    make_scores(s, score, mask, shared, row, key, Constant<false>{});
}

// Splits P into terms.
CUFLASH_DEVICE void to_weights(const float (&s)[kNTiles][4], u32 (&p)[kBlockN / 16][kBf16Terms][4]) {
#pragma unroll
  for (int k = 0; k < kBlockN / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&pair)[4] = s[2 * k + i / 2];
      u32 word[kBf16Terms];
      bf16_split_small(pair[i % 2 * 2], pair[i % 2 * 2 + 1], word);
#pragma unroll
      for (int term = 0; term < kBf16Terms; ++term) p[k][term][i] = word[term];
    }
}

// O becomes factor O + sum, with one factor for each row.
CUFLASH_DEVICE void add_rescaled(float (&o)[1][kColumnTiles][4], const float (&factor)[1][2],
                                 const float (&sum)[kColumnTiles][4]) {
#pragma unroll
  for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[0][n][i] = o[0][n][i] * factor[0][i / 2] + sum[n][i];
}

// The epilogue: stores O / l and lse.
CUFLASH_DEVICE void store_rows(const Params& common, const Work& work, int lane_row, OnlineSoftmax<1>& softmax,
                               float (&o)[1][kColumnTiles][4]) {
  const int head = work.head, batch = work.batch;
  softmax.finish();
  if constexpr (kHasSinks) softmax.add_sinks(o, [&](int, int) { return to_row_max(sink_of(common, head)); });
  const float kept_scale = kept_scale_of(common);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_row + 8 * half;
    if (row >= common.seqlen_q) break;
    if constexpr (kHasValues)
      store_row<kHeadDimV>((Storage*)head_of(common.out, batch, head) + row * common.out.row_stride, o[0], half,
                           softmax.inverse_sum(0, half) * kept_scale);
  }
  store_lse(common, batch, head, lane_row, softmax);
}

// The stages of a consumer, number `consumer` of kConsumers. `key` is where it is in the rings of terms.
struct ConsumerStages {
  const Shared& shared;
  const u32 consumer, thread;
  const ConsumerPingPong& ping_pong;
  Position<kNumStages>& key;
  BiasTermStage& bias_terms;

  // The products of the four warps end at different times, and producers write terms as soon as a slot is free.
  CUFLASH_DEVICE void release(const Barrier& empty) const {
    if (thread % 32 == 0) empty.arrive();
  }
  // Waits for the products with the terms of a tile, and gives these back one by one.
  CUFLASH_DEVICE void release_terms(const Ring<kSlots>& ring) const {
    repeat<kBf16Terms>([&](auto n) {
      constexpr int kTerm = decltype(n)::value;
      ptx::wgmma_wait<kBf16Terms - 1 - kTerm>();
      release(ring.empty(position_of(key, kTerm)));
    });
  }
  // Skips a tile of keys that other consumers of the block need and this one does not.
  CUFLASH_DEVICE void skip() const {
    for (int product = 0; product < 1 + kHasValues; ++product) ping_pong.wait(), ping_pong.pass();
    for (int n = 0; n < kBf16Terms; ++n) {
      shared.k_ring.full(position_of(key, n)).wait(key.parity);
      if constexpr (kHasValues) shared.v_ring.full(position_of(key, n)).wait(key.parity);
    }
    bias_terms.wait();
    bias_terms.release();
    sync_consumer(consumer);  // so that no thread still waits for this phase when the next one is over
    for (int n = 0; n < kBf16Terms; ++n) {
      release(shared.k_ring.empty(position_of(key, n)));
      if constexpr (kHasValues) release(shared.v_ring.empty(position_of(key, n)));
    }
    key.advance();
  }
};

// A consumer at work on the tiles of keys of a tile of queries.
struct ConsumerSteps {
  const Shared& shared;
  const ConsumerStages& stages;
  const QueryTile& tile;
  const Position<1>& query;
  const Score score;
  const Mask mask;
  const Dropout dropout;
  const float exponent_scale;
  const QueryTerms& q;
  const int lane_row;

  CUFLASH_DEVICE ConsumerSteps(const Params& common, const Shared& shared_, const ConsumerStages& stages_,
                               const QueryTile& tile_, const Position<1>& query_, const QueryTerms& q_)
      : shared(shared_),
        stages(stages_),
        tile(tile_),
        query(query_),
        score(common, tile.work.batch, tile.work.head, tile.key_stop),
        mask(common, tile.work.batch, tile.work.head, tile.key_stop),
        dropout(common, tile.work.batch, tile.work.head),
        exponent_scale(score.exponent_scale()),
        q(q_),
        lane_row(tile.first_row + stages.consumer * 64 + stages.thread / 32 * 16 + fragment_row()) {}

  CUFLASH_DEVICE int lane_key_of(int n_block) const { return tile.keys.at(n_block) * kBlockN + fragment_column(); }

  CUFLASH_DEVICE void step(const int& n_block, const TileRange& keys, OnlineSoftmax<1>& softmax,
                           float (&o)[1][kColumnTiles][4]) const {
    float s[1][kNTiles][4], sum[kColumnTiles][4];
    u32 p[kBlockN / 16][kBf16Terms][4];
    stages.ping_pong.wait();
    issue_s(s[0], q, shared, stages.key);
    stages.ping_pong.pass();
    stages.release_terms(shared.k_ring);
    ptx::fence_operand(s[0]);
    if (n_block == keys.start) stages.release(shared.q_ring.empty(query));

    stages.bias_terms.wait();
    const bool masked = n_block >= keys.full_stop || n_block < keys.full_start;
    make_either_scores(s, score, mask, shared, lane_row, lane_key_of(n_block), masked);
    stages.bias_terms.release();
    float factor[1][2] = {{1.0f, 1.0f}};
    const bool raised = softmax.update(s, factor, exponent_scale);
    softmax.exponentiate(s, exponent_scale, softmax.row_sum, softmax.has_unfused(raised));
    if constexpr (kHasDropout) dropout.drop(s[0], lane_row, lane_key_of(n_block));
    to_weights(s[0], p);

    if constexpr (kHasValues) {
      stages.ping_pong.wait();
      issue_o(sum, p, shared, stages.key);
      stages.ping_pong.pass();
      stages.release_terms(shared.v_ring);
      ptx::fence_operand(sum);
      add_rescaled(o, factor, sum);
    }
    stages.key.advance();
  }
};

// A consumer warpgroup, number `consumer` of kConsumers, which owns 64 queries of each tile.
CUFLASH_DEVICE void consume(const ForwardParams& params, Shared& shared, u32 consumer) {
  const Params& common = params.common;
  const u32 thread = ptx::thread_index() % 128;
  QueryTerms q{shared.q + consumer * 64 * kLineBytes};
  const ConsumerPingPong ping_pong(consumer);

  Position<kNumStages> key;
  Position<1> query;
  BiasTermStage bias_terms{shared.bias_term_ring, {}};
  const ConsumerStages stages{shared, consumer, thread, ping_pong, key, bias_terms};
  for (TileScheduler scheduler(common); scheduler.more(); scheduler.advance(), query.advance()) {
    const QueryTile tile(common, scheduler.work(common));
    const ConsumerSteps own(common, shared, stages, tile, query, q);

    OnlineSoftmax<1> softmax;
    float o[1][kColumnTiles][4];
    set_zero(o);
    const TileRange keys = tile.keys_of(common, consumer);
    shared.q_ring.full(query).wait(query.parity);
    q.load(thread / 32 * 16);
    int n_block = tile.keys.stop - 1;
    for (; n_block >= keys.stop; --n_block) stages.skip();
    if (keys.start == keys.stop) {
      sync_consumer(consumer);
      stages.release(shared.q_ring.empty(query));
    }
#pragma unroll 1
    for (; n_block >= keys.start; --n_block) own.step(n_block, keys, softmax, o);
    for (; n_block >= tile.keys.start; --n_block) stages.skip();

    store_rows(common, tile.work, own.lane_row, softmax, o);
  }
  ping_pong.finish();
}

CUFLASH_DEVICE void forward(const ForwardParams& params) {
  if (!is_chosen(params.common)) return;
  Shared shared;
  if constexpr (kLoadsBiasTerms) {
    if (ptx::thread_index() == 0)
      shared.bias_term_ring.init(4 * kConsumers, kBiasOfPairs + (kHasPerKeyValues ? kProducers : 0));
  }
  shared.make_barriers(4 * kConsumers, 4 * kConsumers, 4 * kConsumers, kProducers, kProducers);
  const u32 warp = ptx::uniform(ptx::thread_index() / 32);
  if (warp >= 4 * kConsumers) {
    ptx::decrease_registers<kProducerRegisters>();
    if constexpr (kSplitsOperands) {
      produce_split(params, shared);
    } else {
      if (warp == 4 * kConsumers && ptx::elect_lane()) produce(params, shared);
      if constexpr (kHasPerKeyValues) {
        if (warp == 4 * kConsumers + 1)
          produce_per_key_values(params.common, TileScheduler(params.common), shared.bias_term_ring, shared.numbers);
      }
    }
  } else {
    ptx::increase_registers<kConsumerRegisters>();
    consume(params, shared, warp / 4);
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, ForwardParams, kNumThreads, 1, forward)
