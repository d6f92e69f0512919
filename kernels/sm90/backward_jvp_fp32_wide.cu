// Tangents of gradients in float32 on compute capability 9.0 (Hopper) for head dimensions whose operands do not fit
// into shared memory together: the formulas and products of sm90/backward_jvp_fp32.cu, with operands that arrive box by
// box.
//
//   [1] S' = K Q'    tX' = K tQ' + tK Q'   [2] dP' = V dO'   [3] P' and u' = scale tX' - tlse
//   [4] dX'          [5] tdV += (P' u') dO  [6] tdP' = tV dO' [7] tdX'
//   [8] tdK += dX' tQ + tdX' Q             [9] tdQ += dX tK + tdX K               (X' is X transposed)
//
// A block owns 64 keys of one key/value head and iterates over the tiles of 64 queries, and over the query heads that
// share its keys. Nothing is computed twice: the first warpgroup makes [1] to [7] and hands over dX', and then tdX' in
// the same memory. The second one makes [8], the third one [9], which it adds to memory. Three threads of the last
// warpgroup are producers.
//
// K and tK stay in shared memory, because [1] and [9] both read them; dO stays for a tile of queries. Q, tQ, V and tV
// arrive in boxes of one term of 64 columns, each where it is multiplied, by way of two rings: L2 has them.
//
// The tensor cores truncate sums instead of rounding them. So boxes come from the lowest term to the highest, and those
// of the highest terms of all columns are multiplied together, their largest products last.
//
//   barrier           one phase is over when                       who waits
//   k_full            K and tK have arrived                        [1], [9]
//   do_full           dO and statistics have arrived               [2], [3]
//   do_empty          [7] is done, and so are [2], [5] and [6]     the producer of dO
//   boxes.full[i]     a box of Q, tQ, V or tV is in i              [1], [2], [6]
//   boxes.empty[i]    the products with it are done                its producer
//   tdk_boxes         the same for boxes of Q and tQ               [8]; its producer
//   dx_full           dX' or tdX' is there                         [8], [9]
//   dx_empty          [8] and [9] have read it                     [4], [7], before they write there again
//
// The products of the four warps of a warpgroup end at different times: each warp says that its own is done.
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "sm90/backward_jvp_terms.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

static_assert(kNumWarps == 16, "dX', tdK, tdQ and the producers");
constexpr int kBoxes = CUFLASH_NUM_STAGES, kTdkBoxes = CUFLASH_TDK_BOXES;
constexpr int kChunks = chunks_of(kDim), kChunksV = chunks_of(kDimV);
static_assert(kBoxes >= 2 * max_of(kChunks, kChunksV), "boxes of the highest terms, and those before them");
static_assert(kTdkBoxes >= 2, "the next box is taken while products read the one before");

constexpr bool kSumsTdqOfDx = kDqByReduction && kMovesK;  // tdQ += dX tK

// Shared memory: K and tK, dO, dX' or tdX', boxes of the first ring and of the second one, statistics and their
// tangents, barriers. The columns of a term come one chunk after the other, the terms one after the other.
constexpr u32 kTermK = chunked_bytes(kRows, kDim), kBytesK = kBf16Terms * kTermK;
constexpr u32 kBytesDo = kBf16Terms * kTermDo;
constexpr u32 kBytesDx = kBf16Terms * kTerm;
constexpr u32 kBytesBarriers = 8 + 2 * Ring<1>::kBytes + Ring<kBoxes>::kBytes + Ring<kTdkBoxes>::kBytes;
static_assert(2 * kBytesK + kBytesDo + kBytesDx + (kBoxes + kTdkBoxes) * kTerm + 2 * kBytesStats + kBytesBarriers ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers of a thread once each role has its own number of them: as many in all as the block started with.
constexpr int kDxRegisters = 240, kTdkRegisters = 136, kTdqRegisters = 104, kProducerRegisters = 32;

struct Shared {
  u32 k, tk, dout, dx, stats;
  BoxRing<kBoxes> boxes;
  BoxRing<kTdkBoxes> tdk_boxes;
  Barrier k_full;
  Ring<1> do_ring, dx_ring;

  CUFLASH_DEVICE Shared() {
    k = ptx::dynamic_shared();
    tk = k + kBytesK;
    dout = tk + kBytesK;
    dx = dout + kBytesDo;
    boxes.first = dx + kBytesDx;
    tdk_boxes.first = boxes.first + kBoxes * kTerm;
    stats = tdk_boxes.first + kTdkBoxes * kTerm;
    k_full = {stats + 2 * kBytesStats};
    do_ring = {k_full.address + 8};
    dx_ring = {do_ring.address + Ring<1>::kBytes};
    boxes.barriers = {dx_ring.address + Ring<1>::kBytes};
    tdk_boxes.barriers = {boxes.barriers.address + Ring<kBoxes>::kBytes};
  }
};

// ---- Producers ------------------------------------------------------------------------------------------------------

// A producer is one thread. One loads K and tK, and boxes of the first ring; one boxes of the second ring; one dO with
// the statistics of its rows.
struct Producer {
  const BackwardJvpParams& params;
  const Shared& shared;
  const BackwardWork tile;

  CUFLASH_DEVICE Producer(const BackwardJvpParams& params_, const Shared& shared_)
      : params(params_), shared(shared_), tile(params_.common) {}

  CUFLASH_DEVICE int batch_of(int term) const { return term * params.common.batch + tile.work.batch; }

  CUFLASH_DEVICE void produce_boxes() const {
    if (tile.num_steps == 0) return;
    shared.k_full.arrive_expect((1 + kMovesK) * kBytesK);
#pragma unroll 1
    for (int term = 0; term < (1 + kMovesK) * kBf16Terms; ++term)
      load_chunks<kRows, kDim>(shared.k + term * kTermK, params.maps[kMapK], shared.k_full, tile.first_key,
                               tile.head_kv, batch_of(term));
    QueryTileIterator m_tile = tile.first();
    Position<kBoxes> at;
#pragma unroll 1
    for (int step = 0; step < tile.num_steps; ++step, m_tile.advance(tile.queries)) {
      const int first_row = m_tile.m_block * kRows;
#pragma unroll 1
      for (int term = kLast; term >= 0; --term) {
#pragma unroll 1
        for (int c = 0; kMovesQ && c < kChunks; ++c)
          shared.boxes.load(at, params.maps[kMapQ], c, first_row, m_tile.head, batch_of(kBf16Terms + term));
#pragma unroll 1
        for (int c = 0; c < kChunks; ++c)
          shared.boxes.load(at, params.maps[kMapQ], c, first_row, m_tile.head, batch_of(term));
      }
#pragma unroll 1
      for (int first = 0; first <= kMovesV * kBf16Terms; first += kBf16Terms)
#pragma unroll 1
        for (int term = kLast; term >= 0; --term)
#pragma unroll 1
          for (int c = 0; c < kChunksV; ++c)
            shared.boxes.load(at, params.maps[kMapV], c, tile.first_key, tile.head_kv, batch_of(first + term));
    }
  }

  CUFLASH_DEVICE void produce_tdk_boxes() const {
    QueryTileIterator m_tile = tile.first();
    Position<kTdkBoxes> at;
#pragma unroll 1
    for (int step = 0; step < tile.num_steps; ++step, m_tile.advance(tile.queries)) {
#pragma unroll 1
      for (int first = kMovesQ * kBf16Terms; first >= 0; first -= kBf16Terms)
#pragma unroll 1
        for (int c = 0; c < kChunks; ++c)
#pragma unroll 1
          for (int term = kLast; term >= 0; --term)
            shared.tdk_boxes.load(at, params.maps[kMapQ], c, m_tile.m_block * kRows, m_tile.head,
                                  batch_of(first + term));
    }
  }

  CUFLASH_DEVICE void produce_dout() const {
    QueryTileIterator m_tile = tile.first();
    Position<1> at;
#pragma unroll 1
    for (int step = 0; step < tile.num_steps; ++step, m_tile.advance(tile.queries), at.advance()) {
      const int first_row = m_tile.m_block * kRows;
      const Barrier full = shared.do_ring.full(at);
      shared.do_ring.empty(at).wait(at.parity ^ 1);
      full.arrive_expect(kBytesDo + 2 * kBytesStats);
      load_stats(params.common, shared.stats, full, tile, m_tile);
#pragma unroll 1
      for (int term = 0; term < kBf16Terms; ++term)
        load_chunks<kRows, kDimV>(shared.dout + term * kTermDo, params.maps[kMapDout], full, first_row, m_tile.head,
                                  batch_of(term));
    }
  }
};

// ---- The first warpgroup: dX', tdX' and tdV -------------------------------------------------------------------------

struct MakerOfDx {
  const Params& common;
  const Shared& shared;
  const u32 thread;
  const BackwardWork tile;
  const int lane_key;
  const float kept_scale;
  const u32 s_stats;  // of this lane's first query

  float tdv[kDimV / 8][4];
  QueryTileIterator m_tile;
  BoxReader<kBoxes> reader;
  Position<1> do_at, dx_at;

  CUFLASH_DEVICE MakerOfDx(const Params& common_, const Shared& shared_, u32 thread_)
      : common(common_),
        shared(shared_),
        thread(thread_),
        tile(common_),
        lane_key(tile.first_key + thread / 32 * 16 + fragment_row()),
        kept_scale(kept_scale_of(common)),
        s_stats(shared.stats + fragment_column() * 8),
        m_tile(tile.first()),
        reader(shared.boxes) {
    set_zero((float (&)[1][kDimV / 8][4]) tdv);
  }

  // [1] S' and tX'.
  CUFLASH_DEVICE void make_scores(Accumulator& s, Accumulator& tx) {
    const u64 keys = descriptor_of(shared.k), tangents = descriptor_of(shared.tk);
    ptx::fence_operand(s);
    if constexpr (kMovesProducts) ptx::fence_operand(tx);
    const auto by_tangents = [&](int other, int k, u64 box, bool first) __attribute__((always_inline)) {
      ptx::wgmma<false, false>(BFloat16{}, tx, along_k<kRows>(term_of(keys, other, kTermK), k), box, !first);
    };
    const auto by_queries = [&](int other, int k, u64 box, bool first) __attribute__((always_inline)) {
      ptx::wgmma<false, false>(BFloat16{}, s, along_k<kRows>(term_of(keys, other, kTermK), k), box, !first);
      if constexpr (kMovesK)
        ptx::wgmma<false, false>(BFloat16{}, tx, along_k<kRows>(term_of(tangents, other, kTermK), k), box,
                                 kMovesQ || !first);
    };
    repeat<kBf16Terms>([&](auto n) __attribute__((always_inline)) {
      constexpr int kOwn = kLast - decltype(n)::value;
      if constexpr (kMovesQ)
        multiply_boxes<kOwn, kDim>(reader, by_tangents, by_queries);
      else
        multiply_boxes<kOwn, kDim>(reader, by_queries);
    });
    reader.finish();
    ptx::fence_operand(s);
    if constexpr (kMovesProducts) ptx::fence_operand(tx);
  }

  // [2] dP' or [6] tdP', of the values that come next.
  CUFLASH_DEVICE void make_dp(Accumulator& dp) {
    const u64 dout = descriptor_of(shared.dout);
    ptx::fence_operand(dp);
    repeat<kBf16Terms>([&](auto n) __attribute__((always_inline)) {
      multiply_boxes<kLast - decltype(n)::value, kDimV>(
          reader, [&](int other, int k, u64 box, bool first) __attribute__((always_inline)) {
            ptx::wgmma<false, false>(BFloat16{}, dp, box, along_k<kRows>(term_of(dout, other, kTermDo), k), !first);
          });
    });
    reader.finish();
    ptx::fence_operand(dp);
  }

  // [4] dX' = P' (dP' - delta), whose terms it stores, in place of dP'; in place of u' what it adds to tdX', u' dX'.
  // Where a function makes scores, u' is what dP' - delta is multiplied by. Leaves P' u', as tdV needs it, in place of
  // dX'; with a function it is made already.
  CUFLASH_DEVICE void make_dx(const Accumulator& p, Accumulator& u, const Accumulator& pu, Accumulator& dx) const {
    [[maybe_unused]] const ScaledGradients scaled(common.scale, tscale_of(common));
    repeat<kSteps>([&](auto step) __attribute__((always_inline)) {
      constexpr int k = decltype(step)::value;
      float made[2][4];
#pragma unroll
      for (int n = 2 * k; n < 2 * k + 2; ++n) {
        float delta[2];
        ptx::load_shared_x2(s_stats + 8 + n * 64, delta);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float dp = after_dropout(dx[n][i], p[n][i]) - delta[i % 2];
          made[n % 2][i] = kHasDerivative ? pu[n][i] : after_dropout(weight_of_pair(p[n][i]) * u[n][i], p[n][i]);
          dx[n][i] = weight_of_pair(p[n][i]) * dp;
          u[n][i] *= kHasDerivative ? dp : dx[n][i];
          scaled.apply(dx[n][i], u[n][i]);
        }
      }
      if constexpr (kReadsDx) store_terms<k, k + 1>(dx, shared.dx, thread);
#pragma unroll
      for (int n = 2 * k; n < 2 * k + 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) dx[n][i] = made[n % 2][i];
    });
  }

  // [7] tdX' = u' dX' + P' (tdP' - tdelta) in place of tdP'.
  CUFLASH_DEVICE void make_tdx(const Accumulator& p, const Accumulator& u_dx, Accumulator& tdx) const {
    const ScaledGradients scaled(common.scale, tscale_of(common));
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      float tdelta[2];
      ptx::load_shared_x2(s_stats + 8 + kBytesStats + n * 64, tdelta);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float tdp = (kMovesV ? after_dropout(tdx[n][i], p[n][i]) : 0.0f) - tdelta[i % 2];
        tdx[n][i] = ptx::fused(weight_of_pair(p[n][i]) * scaled.unit, tdp, u_dx[n][i]);
      }
    }
  }
  CUFLASH_DEVICE float after_dropout(float dp, float p) const {
    return kHasDropout ? (is_dropped(p) ? 0.0f : dp) * kept_scale : dp;
  }
  CUFLASH_DEVICE static float weight_of_pair(float p) { return kHasDropout ? fabsf(p) : p; }

  // Hands over dX' or tdX', which has been stored once its memory was free.
  CUFLASH_DEVICE void wait_for_space() const { shared.dx_ring.empty(dx_at).wait(dx_at.parity ^ 1); }
  CUFLASH_DEVICE void hand_over() {
    ptx::fence_async_proxy();
    arrive_as_warp(shared.dx_ring.full(dx_at));
    dx_at.advance();
  }

  CUFLASH_DEVICE void step() {
    Accumulator s, tx, dx, tdx, pu;
    make_scores(s, tx);
    shared.do_ring.full(do_at).wait(do_at.parity);
    make_dp(dx);
    const PairWeights pairs(common, tile.work.batch, m_tile.head, tile.key_stop, tile.own_diagonal);
    const bool masked = m_tile.needs_mask(tile.queries);
    const bool large = is_of_large(ptx::float_of(ptx::load_shared_b32(shared.stats)));
    WeightsOfTile{common, tile, m_tile, lane_key, kept_scale}.make(
        s, tx, s_stats, pairs, masked, large, [&](int n, const float (&of_n)[4]) __attribute__((always_inline)) {
#pragma unroll
          for (int i = 0; i < 4; ++i) pu[n][i] = of_n[i];
        });
    if constexpr (kReadsDx) wait_for_space();
    make_dx(s, tx, pu, dx);
    if constexpr (kReadsDx) hand_over();
    if constexpr (kMovesV) make_dp(tdx);
    make_tdx(s, tx, tdx);
    wait_for_space();
    store_terms(tdx, shared.dx, thread);
    hand_over();
    if constexpr (kSumsTdv) add_tdv(tdv, dx, shared.dout);  // [5]
    arrive_after_reads(shared.do_ring.empty(do_at));
    do_at.advance();
    m_tile.advance(tile.queries);
  }
  CUFLASH_DEVICE void run() {
    if (tile.num_steps > 0) shared.k_full.wait(0);
#pragma unroll 1
    for (int i = 0; i < tile.num_steps; ++i) step();
    if constexpr (kNeedsDv) store_rows<kHeadDimV>(common, common.dv, tile, thread, tdv, 1.0f);
  }
};

// ---- The second warpgroup: tdK --------------------------------------------------------------------------------------

struct MakerOfTdk {
  const Params& common;
  const Shared& shared;
  const BackwardWork tile;

  float tdk[kDim / 8][4];
  BoxReader<kTdkBoxes> reader;
  Position<1> dx_at;

  CUFLASH_DEVICE MakerOfTdk(const Params& common_, const Shared& shared_)
      : common(common_), shared(shared_), tile(common_), reader(shared.tdk_boxes) {
    set_zero((float (&)[1][kDim / 8][4]) tdk);
  }

  // [8] tdK += dX' tQ, or tdX' Q, whose boxes come next, chunk by chunk. Tiles are added with rounding, as in tdV.
  CUFLASH_DEVICE void add_tdk() {
    const u64 dx = descriptor_of(shared.dx);
    repeat<kChunks>([&](auto chunk) __attribute__((always_inline)) {
      auto& total = chunk_of<decltype(chunk)::value>(tdk);
      float sum[sizeof(total) / sizeof(total[0])][4];
      ptx::fence_operand(sum);
#pragma unroll
      for (int term = kLast; term >= 0; --term) {
        const u64 box = descriptor_of_transposed<kRows>(reader.take());
        ptx::wgmma_fence();
#pragma unroll
        for (int other = kLast - term; other >= 0; --other)
#pragma unroll
          for (int k = 0; k < kSteps; ++k)
            ptx::wgmma<false, true>(BFloat16{}, sum, along_k<kRows>(term_of(dx, other), k), along_k_transposed(box, k),
                                    term < kLast || k > 0);
        reader.commit();
      }
      reader.finish();
      ptx::fence_operand(sum);
      add(total, sum);
    });
  }
  template <bool adds>
  CUFLASH_DEVICE void serve() {
    shared.dx_ring.full(dx_at).wait(dx_at.parity);
    if constexpr (adds) add_tdk();
    arrive_as_warp(shared.dx_ring.empty(dx_at));
    dx_at.advance();
  }
  CUFLASH_DEVICE void run(u32 thread) {
#pragma unroll 1
    for (int i = 0; i < tile.num_steps; ++i) {
      if constexpr (kReadsDx) serve<kNeedsDk && kMovesQ>();
      serve<kNeedsDk>();
    }
    const float factor = ScaledGradients(common.scale, tscale_of(common)).factor;
    if constexpr (kNeedsDk) store_rows<kHeadDim>(common, common.dk, tile, thread, tdk, factor);
  }
};

// ---- The third warpgroup: tdQ ---------------------------------------------------------------------------------------

// [9] makes dX tK, and then tdX K, of each tile of queries and these keys, and adds them to the sum in memory. Both
// are sums of their own: the tensor cores would truncate the products of one after those of the other.
CUFLASH_DEVICE void accumulate_tdq(const Params& common, const Shared& shared, u32 thread) {
  const BackwardWork tile(common);
  if (tile.num_steps == 0) return;
  shared.k_full.wait(0);
  const u64 dx = descriptor_of_transposed<kRows>(shared.dx);
  QueryTileIterator m_tile = tile.first();
  Position<1> at;
  const auto serve = [&](auto adds, u32 keys, float* sum) __attribute__((always_inline)) {
    shared.dx_ring.full(at).wait(at.parity);
    if constexpr (decltype(adds)::value) {
      const u64 columns = descriptor_of_transposed<kRows>(keys);
      float tdq[kDim / 8][4];
      issue(tdq, [&]() __attribute__((always_inline)) {
        for_term_products([&](auto i, auto j, int index) __attribute__((always_inline)) {
#pragma unroll
          for (int k = 0; k < kSteps; ++k)
            ptx::wgmma<true, true>(BFloat16{}, tdq, along_k_transposed(term_of(dx, i.value), k),
                                   along_k_transposed(term_of(columns, j.value, kTermK), k), index > 0 || k > 0);
        });
      });
      wait_for<0>(tdq);
      arrive_as_warp(shared.dx_ring.empty(at));
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) ptx::reduce_add_x4(sum + n * 128 * 4, tdq[n]);
    } else {
      arrive_as_warp(shared.dx_ring.empty(at));
    }
    at.advance();
  };
#pragma unroll 1
  for (int step = 0; step < tile.num_steps; ++step, m_tile.advance(tile.queries)) {
    float* sum = (float*)common.dq_accumulator + tile.index_of(common, m_tile) * (kRows * kDim) + thread * 4;
    if constexpr (kReadsDx) serve(Constant<kSumsTdqOfDx>{}, shared.tk, sum);
    serve(Constant<kDqByReduction>{}, shared.k, sum);
  }
}

CUFLASH_DEVICE void backward_jvp(const BackwardJvpParams& params) {
  if (!is_chosen(params.common)) return;
  const Shared shared;
  if (ptx::thread_index() == 0) {
    shared.k_full.init(1);
    shared.do_ring.init(4);
    shared.dx_ring.init(8, 4);
    shared.boxes.barriers.init(4);
    shared.tdk_boxes.barriers.init(4);
    ptx::fence_barrier_init();
  }
  ptx::sync_block();
  const u32 warpgroup = ptx::uniform(ptx::thread_index() / 128), thread = ptx::thread_index() % 128;
  if (warpgroup == 0) {
    ptx::increase_registers<kDxRegisters>();
    MakerOfDx(params.common, shared, thread).run();
  } else if (warpgroup == 1) {
    ptx::increase_registers<kTdkRegisters>();
    MakerOfTdk(params.common, shared).run(thread);
  } else if (warpgroup == 2) {
    ptx::decrease_registers<kTdqRegisters>();
    accumulate_tdq(params.common, shared, thread);
  } else {
    ptx::decrease_registers<kProducerRegisters>();
    if (thread == 0) Producer(params, shared).produce_boxes();
    if (thread == 32) Producer(params, shared).produce_dout();
    if constexpr (kNeedsDk) {
      if (thread == 64) Producer(params, shared).produce_tdk_boxes();
    }
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, BackwardJvpParams, kNumThreads, 1, backward_jvp)
