// Attention and its tangent in float32 on compute capability 9.0 (Hopper) for head dimensions whose operands do not fit
// into shared memory together. The formulas are those of sm90/jvp.cu, the products those of sm90/jvp_fp32.cu; terms
// arrive in boxes, as in sm90/backward_jvp_fp32_wide.cu.
//
//   [1] S = Q K^T and tX = tQ K^T + Q tK^T      [2] P = exp(S - m) and l, P (tS - c) and r
//   [3] O += P V and A += P (tS - c) V + P tV
//
// The kernel is persistent: a block takes one tile of 64 queries after another. One warpgroup makes [1] and [2] and
// hands P and P (tS - c) over in shared memory. Each of one or two others owns 64 columns of O and A and makes [3].
// Where row maxima rise, and at the end, these scale what they have by factors of the rows: O becomes x O, A becomes x
// A + y O.
//
// Tensor cores truncate sums instead of rounding them. So they sum the products of one tile of keys only, small
// products first, and FFMA, which rounds, adds these to O and A.
//
//   barrier          one phase is over when                      who waits
//   q_full           Q and tQ have arrived                       [1]
//   q_empty          the last [1] is done                        the producer of Q
//   boxes            as in backward_jvp_fp32_wide.cu: K, tK      [1]; its producer
//   value_boxes[i]   the same: columns of V and tV               [3] of these columns; its producer
//   p_full           P, P (tS - c) and factors are there         [3]
//   p_empty          [3] has read them                           [2], before they are written again
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/softmax/store_lse.cuh"
#include "sm90/jvp_terms.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/term_tiles.cuh"
#include "sm90/tiles.cuh"

static_assert(kBlockM == kRows && kBlockN == kRows, "tiles of one product");
static_assert(kNumWarps == 16, "weights, columns of O and A, and the producers");
static_assert(!kIsPacked && kPageSize == 0 && kHasValues, "not served");
constexpr int kBoxes = CUFLASH_NUM_STAGES, kValueBoxes = CUFLASH_VALUE_BOXES;
constexpr int kChunks = chunks_of(kDim), kChunksV = chunks_of(kDimV);
static_assert(kChunksV <= 2, "two warpgroups have the columns");
static_assert(kBoxes >= 2 * kChunks, "boxes of the highest terms, and those before them");
static_assert(kValueBoxes >= 2, "the next box is taken while products read the one before");

// Shared memory: Q and tQ, P and P (tS - c), boxes of keys, boxes of values of each chunk of columns, factors of rows,
// barriers.
constexpr u32 kTermQ = chunked_bytes(kRows, kDim), kBytesQ = kBf16Terms * kTermQ;
constexpr u32 kBytesP = kBf16Terms * kTerm;
constexpr u32 kBytesFactors = kRows * 8;
constexpr u32 kBytesBarriers = 2 * Ring<1>::kBytes + Ring<kBoxes>::kBytes + kChunksV * Ring<kValueBoxes>::kBytes;
static_assert(2 * kBytesQ + 2 * kBytesP + (kBoxes + kChunksV * kValueBoxes) * kTerm + kBytesFactors + kBytesBarriers ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers of a thread once each role has its own number of them: as many in all as the block started with.
constexpr int kWeightRegisters = 168, kSumRegisters = 160, kProducerRegisters = 24;

struct Shared {
  u32 q, p, tp, factors;
  BoxRing<kBoxes> boxes;
  BoxRing<kValueBoxes> value_boxes[kChunksV];
  Ring<1> q_ring, p_ring;

  CUFLASH_DEVICE Shared() {
    q = ptx::dynamic_shared();
    p = q + 2 * kBytesQ;
    tp = p + kBytesP;
    boxes.first = tp + kBytesP;
    u32 next = boxes.first + kBoxes * kTerm;
#pragma unroll
    for (int c = 0; c < kChunksV; ++c, next += kValueBoxes * kTerm) value_boxes[c].first = next;
    factors = next;
    q_ring = {factors + kBytesFactors};
    p_ring = {q_ring.address + Ring<1>::kBytes};
    boxes.barriers = {p_ring.address + Ring<1>::kBytes};
    next = boxes.barriers.address + Ring<kBoxes>::kBytes;
#pragma unroll
    for (int c = 0; c < kChunksV; ++c, next += Ring<kValueBoxes>::kBytes) value_boxes[c].barriers = {next};
  }
};

// ---- Producers ------------------------------------------------------------------------------------------------------

// A producer is one thread. One loads Q and tQ, and boxes of keys; the others boxes of columns of values.
struct Producer {
  const JvpParams& params;
  const Shared& shared;

  CUFLASH_DEVICE int batch_of(const QueryTile& tile, int term) const {
    return batch_of_term(params.common, term, tile.work.batch);
  }
  CUFLASH_DEVICE void load_q(const QueryTile& tile, Position<1>& query) const {
    load_query_terms<kTermQ>(params, shared.q, shared.q_ring, query, tile);
    query.advance();
  }
  // Calls load(tile, first_key) for the tiles of keys of all tiles of queries.
  template <class Begin, class Load>
  CUFLASH_DEVICE void for_tiles(Begin begin, Load load) const {
#pragma unroll 1
    for (TileScheduler scheduler(params.common); scheduler.more(); scheduler.advance()) {
      const QueryTile tile(params.common, scheduler.work(params.common));
      begin(tile);
#pragma unroll 1
      for (int n_block = tile.keys.stop - 1; n_block >= tile.keys.start; --n_block)
        load(tile, tile.keys.at(n_block) * kBlockN);
    }
  }
  CUFLASH_DEVICE void produce_keys() const {
    Position<1> query;
    Position<kBoxes> at;
    for_tiles([&](const QueryTile& tile) { load_q(tile, query); },
              [&](const QueryTile& tile, int first_key) {
#pragma unroll 1
                for (int term = kLast; term >= 0; --term) {
#pragma unroll 1
                  for (int c = 0; c < kChunks; ++c)
                    shared.boxes.load(at, params.maps[kMapK], c, first_key, tile.head_kv, batch_of(tile, term));
#pragma unroll 1
                  for (int c = 0; kMovesK && c < kChunks; ++c)
                    shared.boxes.load(at, params.maps[kMapK], c, first_key, tile.head_kv,
                                      batch_of(tile, kBf16Terms + term));
                }
              });
  }
  CUFLASH_DEVICE void produce_values(int c) const {
    Position<kValueBoxes> at;
    for_tiles([](const QueryTile&) {},
              [&](const QueryTile& tile, int first_key) {
#pragma unroll 1
                for (int term = kLast; term >= 0; --term) {
                  if constexpr (kMovesV)
                    shared.value_boxes[c].load(at, params.maps[kMapV], c, first_key, tile.head_kv,
                                               batch_of(tile, kBf16Terms + term));
                  shared.value_boxes[c].load(at, params.maps[kMapV], c, first_key, tile.head_kv, batch_of(tile, term));
                }
              });
  }
};

// ---- The warpgroup of weights ---------------------------------------------------------------------------------------

// At work on one tile of queries.
struct MakerOfP : TangentRows {
  const Shared& shared;
  const u32 thread;
  BoxReader<kBoxes>& reader;
  Position<1>& p_at;

  float of_o[1][1][4], of_a[1][1][4];  // a column in which O is 1 and A is 0 shows the factors of all columns

  CUFLASH_DEVICE MakerOfP(const Params& common_, const Shared& shared_, u32 thread_, BoxReader<kBoxes>& reader_,
                          Position<1>& p_at_, const QueryTile& tile_)
      : TangentRows(common_, tile_, tile_.first_row), shared(shared_), thread(thread_), reader(reader_), p_at(p_at_) {}

  // [1]
  CUFLASH_DEVICE void multiply_keys(Accumulator& s, Accumulator& tx) {
    const u64 q = descriptor_of(shared.q), tq = descriptor_of(shared.q + kBytesQ);
    ptx::fence_operand(s);
    if constexpr (kMovesX) ptx::fence_operand(tx);
    const auto by_keys = [&](int other, int k, u64 box, bool first) __attribute__((always_inline)) {
      ptx::wgmma<false, false>(BFloat16{}, s, along_k<kRows>(term_of(q, other, kTermQ), k), box, !first);
      if constexpr (kMovesQ)
        ptx::wgmma<false, false>(BFloat16{}, tx, along_k<kRows>(term_of(tq, other, kTermQ), k), box, !first);
    };
    const auto by_tangents = [&](int other, int k, u64 box, bool first) __attribute__((always_inline)) {
      ptx::wgmma<false, false>(BFloat16{}, tx, along_k<kRows>(term_of(q, other, kTermQ), k), box, kMovesQ || !first);
    };
    repeat<kBf16Terms>([&](auto n) __attribute__((always_inline)) {
      constexpr int kOwn = kLast - decltype(n)::value;
      if constexpr (kMovesK)
        multiply_boxes<kOwn, kDim>(reader, by_keys, by_tangents);
      else
        multiply_boxes<kOwn, kDim>(reader, by_keys);
    });
    reader.finish();
    ptx::fence_operand(s);
    if constexpr (kMovesX)
      ptx::fence_operand(tx);
    else if constexpr (kMovesScores)
      set_zero((float (&)[1][kNTiles][4])tx);
  }

  CUFLASH_DEVICE void begin_factors() {
#pragma unroll
    for (int i = 0; i < 4; ++i) of_o[0][0][i] = 1.0f, of_a[0][0][i] = 0.0f;
  }
  // Hands over the factors, and what `store` stores, once those before have been read.
  template <class Store>
  CUFLASH_DEVICE void hand_over(Store store) {
    shared.p_ring.empty(p_at).wait(p_at.parity ^ 1);
    if (fragment_column() == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ptx::store_shared_x2(shared.factors + (thread / 32 * 16 + fragment_row() + 8 * half) * 8,
                             {of_o[0][0][2 * half], of_a[0][0][2 * half]});
    }
    store();
    ptx::fence_async_proxy();
    arrive_as_warp(shared.p_ring.full(p_at));
    p_at.advance();
  }

  // One tile of keys. Q is given back at `empty` after the last one, the first in memory.
  CUFLASH_DEVICE void step(int n_block, const Barrier& empty) {
    float s[1][kNTiles][4], ts[1][kNTiles][4];
    multiply_keys(s[0], ts[0]);
    if (n_block == tile.keys.start) arrive_as_warp(empty);
    begin_factors();
    softmax_step(s, ts, of_o, of_a, n_block, tile.keys);  // [2]
    hand_over([&]() __attribute__((always_inline)) {
      store_terms(s[0], shared.p, thread);
      if constexpr (kMovesScores) store_terms(ts[0], shared.tp, thread);
    });
  }

  // out = O / l and tout = (A - (r / l) O) / l, as factors of O and A; lse and tlse.
  CUFLASH_DEVICE void finish() {
    softmax.finish();
    begin_factors();
    if constexpr (kHasSinks) softmax.add_sink(of_o, of_a);
    take_out_mean(softmax, of_o, of_a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float inverse = softmax.inverse_sum(0, i / 2);
      of_o[0][0][i] *= inverse, of_a[0][0][i] *= inverse;
    }
    hand_over([] {});
    store_lse();
    store_tlse(common, tile.work.batch, tile.work.head, lane_row, softmax);
  }
  CUFLASH_DEVICE void store_lse() const {
    float* g_lse = row_values_of(common.lse, tile.work.batch, tile.work.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 8 * half;
      if (fragment_column() == 0 && row < common.seqlen_q)
        ::store_lse(g_lse + row * common.lse.row_stride, softmax, 0, half);
    }
  }
};

CUFLASH_DEVICE void make_weights(const JvpParams& params, const Shared& shared, u32 thread) {
  Position<1> query, p_at;
  BoxReader<kBoxes> reader(shared.boxes);
#pragma unroll 1
  for (TileScheduler scheduler(params.common); scheduler.more(); scheduler.advance(), query.advance()) {
    const QueryTile tile(params.common, scheduler.work(params.common));
    MakerOfP maker(params.common, shared, thread, reader, p_at, tile);
    const Barrier empty = shared.q_ring.empty(query);
    shared.q_ring.full(query).wait(query.parity);
    if (tile.keys.start == tile.keys.stop) arrive_as_warp(empty);
#pragma unroll 1
    for (int n_block = tile.keys.stop - 1; n_block >= tile.keys.start; --n_block) maker.step(n_block, empty);
    maker.finish();
  }
}

// ---- The warpgroups of O and A --------------------------------------------------------------------------------------

// Of the columns of chunk `chunk`.
template <int chunk>
struct Columns {
  static constexpr int kColumns = min_of(kDimV - chunk * kChunk, kChunk);
  static constexpr int kStored = min_of(kHeadDimV - chunk * kChunk, kChunk);
  using Sum = float[kColumns / 8][4];

  const Params& common;
  const Shared& shared;
  const u32 thread;
  Sum o, a;
  BoxReader<kValueBoxes> reader;
  Position<1> p_at;

  CUFLASH_DEVICE Columns(const Params& common_, const Shared& shared_, u32 thread_)
      : common(common_), shared(shared_), thread(thread_), reader(shared.value_boxes[chunk]) {}

  using Factors = float[2][2];  // x and y of this lane's rows

  CUFLASH_DEVICE void load_factors(Factors& factors) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      ptx::load_shared_x2(shared.factors + (thread / 32 * 16 + fragment_row() + 8 * half) * 8, factors[half]);
  }
  // O becomes x O + sum_o, A becomes x A + y O + sum_a.
  CUFLASH_DEVICE void accumulate(const Factors& factors, const Sum& sum_o, const Sum& sum_a) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&factor)[2] = factors[i / 2];
        a[n][i] = ptx::fused(factor[1], o[n][i], ptx::fused(factor[0], a[n][i], sum_a[n][i]));
        o[n][i] = ptx::fused(factor[0], o[n][i], sum_o[n][i]);
      }
  }

  // [3] of one tile of keys.
  CUFLASH_DEVICE void step() {
    const u64 p = descriptor_of(shared.p), tp = descriptor_of(shared.tp);
    Sum sum_o, sum_a;
    Factors factors;
    shared.p_ring.full(p_at).wait(p_at.parity);
    ptx::fence_operand(sum_o);
    ptx::fence_operand(sum_a);
    const auto multiply = [&](auto multiply_step) __attribute__((always_inline)) {
      const u64 box = descriptor_of_transposed<kRows>(reader.take());
      ptx::wgmma_fence();
      multiply_step(box);
      reader.commit();
    };
#pragma unroll
    for (int term = kLast; term >= 0; --term) {
      const auto add_products = [&](Sum& sum, u64 weights, u64 box, bool begins) __attribute__((always_inline)) {
#pragma unroll
        for (int other = kLast - term; other >= 0; --other)
#pragma unroll
          for (int k = 0; k < kSteps; ++k)
            ptx::wgmma<false, true>(BFloat16{}, sum, along_k<kRows>(term_of(weights, other), k),
                                    along_k_transposed(box, k), !begins || other < kLast - term || k > 0);
      };
      if constexpr (kMovesV)
        multiply([&](u64 box) __attribute__((always_inline)) { add_products(sum_a, p, box, term == kLast); });
      multiply([&](u64 box) __attribute__((always_inline)) {
        add_products(sum_o, p, box, term == kLast);
        if constexpr (kMovesScores) add_products(sum_a, tp, box, !kMovesV && term == kLast);
      });
    }
    load_factors(factors);
    reader.finish();
    arrive_as_warp(shared.p_ring.empty(p_at));
    p_at.advance();
    ptx::fence_operand(sum_o);
    ptx::fence_operand(sum_a);
    accumulate(factors, sum_o, sum_a);
  }

  CUFLASH_DEVICE void store(const QueryTile& tile) {
    shared.p_ring.full(p_at).wait(p_at.parity);
    Factors factors;
    load_factors(factors);
    arrive_as_warp(shared.p_ring.empty(p_at));
    p_at.advance();
    const Sum none = {};
    accumulate(factors, none, none);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.first_row + thread / 32 * 16 + fragment_row() + 8 * half;
      if (row >= common.seqlen_q) break;
      const auto store_to = [&](const Tensor& result, const Sum& sum) {
        Storage* head = (Storage*)head_of(result, tile.work.batch, tile.work.head);
        store_row<kStored>(head + row * result.row_stride + chunk * kChunk, sum, half, 1.0f);
      };
      store_to(common.out, o);
      store_to(common.tout, a);
    }
  }

  CUFLASH_DEVICE void run() {
#pragma unroll 1
    for (TileScheduler scheduler(common); scheduler.more(); scheduler.advance()) {
      const QueryTile tile(common, scheduler.work(common));
      set_zero((float (&)[1][kColumns / 8][4]) o);
      set_zero((float (&)[1][kColumns / 8][4]) a);
#pragma unroll 1
      for (int n_block = tile.keys.stop - 1; n_block >= tile.keys.start; --n_block) step();
      store(tile);
    }
  }
};

CUFLASH_DEVICE void jvp(const JvpParams& params) {
  if (!is_chosen(params.common)) return;
  const Shared shared;
  if (ptx::thread_index() == 0) {
    shared.q_ring.init(4);
    shared.p_ring.init(4 * kChunksV, 4);
    shared.boxes.barriers.init(4);
    for (int c = 0; c < kChunksV; ++c) shared.value_boxes[c].barriers.init(4);
    ptx::fence_barrier_init();
  }
  ptx::sync_block();
  const u32 warpgroup = ptx::uniform(ptx::thread_index() / 128), thread = ptx::thread_index() % 128;
  if (warpgroup == 0) {
    ptx::increase_registers<kWeightRegisters>();
    make_weights(params, shared, thread);
  } else if (warpgroup < 3) {
    ptx::increase_registers<kSumRegisters>();
    repeat<kChunksV>([&](auto chunk) {
      constexpr int c = decltype(chunk)::value;
      if (warpgroup == 1 + c) Columns<c>(params.common, shared, thread).run();
    });
  } else {
    ptx::decrease_registers<kProducerRegisters>();
    if (thread == 0) Producer{params, shared}.produce_keys();
    if (thread == 32) Producer{params, shared}.produce_values(0);
    if constexpr (kChunksV == 2) {
      if (thread == 64) Producer{params, shared}.produce_values(1);
    }
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, JvpParams, kNumThreads, 1, jvp)
