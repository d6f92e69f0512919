// Tangents of gradients in float32 on compute capability 9.0 (Hopper), transposed, with wgmma and TMA. The formulas are
// those of sm90/backward_jvp.cu, the products those of sm90/backward_fp32.cu: every array and every tangent comes split
// into bf16 terms (helpers/split_fp32.cu), and a product is the sum of the products of their terms.
//
//   [1] S' = K Q'    tX' = K tQ' + tK Q'      [2] P' and u' = scale tX' - tlse     [3] tdV += (P' u') dO
//   [4] dP' = V dO'  tdP' = tV dO'            [5] dX' and tdX'                     [6] tdK += dX' tQ + tdX' Q
//   [7] tdQ += dX tK + tdX K                                                       (X' is X transposed)
//
// A block owns 64 keys of one key/value head and iterates over the tiles of 64 queries, and over the query heads that
// share its keys. Nothing is computed twice: the first warpgroup makes [1] to [3] and hands P' and u' to the second
// one, which makes [4] to [6] and hands dX' and tdX' to the third one, which makes [7] and adds it to memory. Two
// threads of the last warpgroup are producers.
//
// Operands in shared memory cost as many clocks as a product of 64 columns takes. So V and tV, which one product each
// reads, are in registers, and K is multiplied by Q and tQ at once. V and tV arrive where dX' and tdX' will be.
//
//   barrier         one phase is over when                     who waits
//   k_full, v_full  K and tK, or V and tV, have arrived        the warpgroups that multiply with them
//   q_full[i]       Q and tQ are in stage i                    [1], [6]
//   q_empty[i]      [6] is done, and so is [1]                 the producer of Q
//   do_full[i]      dO and statistics are in stage i           [3], [4], before they read either
//   do_empty[i]     [3] and [5] are done                       the producer of dO
//   p_full[i]       P' and u' are in buffer i                  [5]
//   dx_full[i]      dX' and tdX' have replaced them            [7]
//   dx_empty[i]     [6] and [7] are done, at the start: V and  [2], before P' and u' are written there
//                   tV have been read
//   named: one for the second warpgroup
//
// The products of the four warps of a warpgroup end at different times: each warp says that its own is done.
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "sm90/backward_jvp_terms.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

static_assert(kDim <= kChunk && kDimV <= kChunk, "a tile is one chunk");
static_assert(kNumWarps == 16, "P', dX', tdQ and the producers");
constexpr int kQStages = CUFLASH_NUM_STAGES, kDoStages = CUFLASH_DO_STAGES, kBuffers = CUFLASH_NUM_BUFFERS;

// Shared memory: K and tK, the ring of Q and tQ, the ring of dO, buffers, statistics and their tangents, barriers.
// Terms of a tile come one after the other; those of Q and tQ take turns, so that one product reads both.
constexpr u32 kTerms = kBf16Terms * kTerm;
constexpr u32 kBytesP = 128 * kNTiles * 16;  // and as many of u'
static_assert(kBytesP <= kTerms, "P' lies where dX' will be");
constexpr u32 kBytesBarriers = 8 * (2 + 2 * kQStages + 2 * kDoStages + 3 * kBuffers);
static_assert((2 + 2 * kQStages + kDoStages + 2 * kBuffers) * kTerms + kDoStages * 2 * kBytesStats + kBytesBarriers ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers of a thread once each role has its own number of them: as many in all as the block started with.
constexpr int kPRegisters = 168, kDxRegisters = 232, kTdqRegisters = 80, kProducerRegisters = 32;

constexpr u32 kDxWarpgroup = 1;  // named barrier

// The barriers of the buffers in which P' and u', and then dX' and tdX', are handed over.
struct BufferBarriers {
  u32 address;

  CUFLASH_DEVICE Barrier p_full(const Position<kBuffers>& at) const { return {address + 24 * at.stage}; }
  CUFLASH_DEVICE Barrier dx_full(const Position<kBuffers>& at) const { return {address + 24 * at.stage + 8}; }
  CUFLASH_DEVICE Barrier dx_empty(const Position<kBuffers>& at) const { return {address + 24 * at.stage + 16}; }
  CUFLASH_DEVICE void init() const {
    for (int i = 0; i < kBuffers; ++i) {
      p_full({i}).init(4);
      dx_full({i}).init(1);
      dx_empty({i}).init(8);
    }
  }
  // Every warp of the second and of the third warpgroup: it reads the buffers no more.
  CUFLASH_DEVICE void begin() const {
    for (int i = 0; i < kBuffers; ++i) arrive_as_warp(dx_empty({i}));
  }
};

struct Shared {
  u32 k, tk, q_stages, do_stages, buffers, stats;
  Barrier k_full, v_full;
  Ring<kQStages> q_ring;
  Ring<kDoStages> do_ring;
  BufferBarriers handed;

  CUFLASH_DEVICE Shared() {
    k = ptx::dynamic_shared();
    tk = k + kTerms;
    q_stages = tk + kTerms;
    do_stages = q_stages + kQStages * 2 * kTerms;
    buffers = do_stages + kDoStages * kTerms;
    stats = buffers + kBuffers * 2 * kTerms;
    k_full = {stats + kDoStages * 2 * kBytesStats};
    v_full = {k_full.address + 8};
    q_ring = {v_full.address + 8};
    do_ring = {q_ring.address + Ring<kQStages>::kBytes};
    handed = {do_ring.address + Ring<kDoStages>::kBytes};
  }
  CUFLASH_DEVICE u32 q_at(const Position<kQStages>& at) const { return q_stages + at.stage * 2 * kTerms; }
  CUFLASH_DEVICE u32 do_at(const Position<kDoStages>& at) const { return do_stages + at.stage * kTerms; }
  CUFLASH_DEVICE u32 stats_at(const Position<kDoStages>& at) const { return stats + at.stage * 2 * kBytesStats; }
  // dX', before that P', at the start V; tdX', u' and tV follow.
  CUFLASH_DEVICE u32 dx_at(const Position<kBuffers>& at) const { return buffers + at.stage * 2 * kTerms; }
  CUFLASH_DEVICE u32 tdx_at(const Position<kBuffers>& at) const { return dx_at(at) + kTerms; }
};

// ---- Producers ------------------------------------------------------------------------------------------------------

// A producer is one thread. One loads K and tK, and stages of Q and tQ; the other V and tV, and stages of dO with the
// statistics of their rows.
struct Producer {
  const BackwardJvpParams& params;
  const Shared& shared;
  const BackwardWork tile;

  CUFLASH_DEVICE Producer(const BackwardJvpParams& params_, const Shared& shared_)
      : params(params_), shared(shared_), tile(params_.common) {}

  // Loads the terms of an array from term `first` on, `term_bytes` apart.
  CUFLASH_DEVICE void load(u32 to, int map, const Barrier& full, int row, int head, int first = 0,
                           u32 term_bytes = kTerm) const {
#pragma unroll 1
    for (int term = 0; term < kBf16Terms; ++term)
      ptx::load_tensor(to + term * term_bytes, params.maps[map], full.address, 0, row, head,
                       (first + term) * params.common.batch + tile.work.batch);
  }
  template <bool moves>
  CUFLASH_DEVICE void load_keys(u32 to, int map, const Barrier& full) const {
    full.arrive_expect((1 + moves) * kTerms);
    load(to, map, full, tile.first_key, tile.head_kv);
    if constexpr (moves) load(to + kTerms, map, full, tile.first_key, tile.head_kv, kBf16Terms);
  }
  CUFLASH_DEVICE void produce_q() const {
    if (tile.num_steps == 0) return;
    load_keys<kMovesK>(shared.k, kMapK, shared.k_full);
    QueryTileIterator m_tile = tile.first();
    Position<kQStages> at;
#pragma unroll 1
    for (int step = 0; step < tile.num_steps; ++step, m_tile.advance(tile.queries), at.advance()) {
      const int first_row = m_tile.m_block * kRows;
      const Barrier full = shared.q_ring.full(at);
      shared.q_ring.empty(at).wait(at.parity ^ 1);
      full.arrive_expect((1 + kMovesQ) * kTerms);
      load(shared.q_at(at), kMapQ, full, first_row, m_tile.head, 0, 2 * kTerm);
      if constexpr (kMovesQ) load(shared.q_at(at) + kTerm, kMapQ, full, first_row, m_tile.head, kBf16Terms, 2 * kTerm);
    }
  }
  CUFLASH_DEVICE void produce_dout() const {
    if (tile.num_steps == 0) return;
    load_keys<kMovesV>(shared.dx_at({}), kMapV, shared.v_full);
    QueryTileIterator m_tile = tile.first();
    Position<kDoStages> at;
#pragma unroll 1
    for (int step = 0; step < tile.num_steps; ++step, m_tile.advance(tile.queries), at.advance()) {
      const int first_row = m_tile.m_block * kRows;
      const Barrier full = shared.do_ring.full(at);
      shared.do_ring.empty(at).wait(at.parity ^ 1);
      full.arrive_expect(kTerms + 2 * kBytesStats);
      load_stats(params.common, shared.stats_at(at), full, tile, m_tile);
      load(shared.do_at(at), kMapDout, full, first_row, m_tile.head);
    }
  }
};

// ---- The first warpgroup: P', u' and tdV --------------------------------------------------------------------------

struct MakerOfP {
  const Params& common;
  const Shared& shared;
  const u32 thread;
  const BackwardWork tile;
  const int lane_key;
  const float kept_scale;

  float tdv[kDimV / 8][4];
  QueryTileIterator m_tile;
  Position<kQStages> q_at;
  Position<kDoStages> do_at;
  Position<kBuffers> buffer;

  CUFLASH_DEVICE MakerOfP(const Params& common_, const Shared& shared_, u32 thread_)
      : common(common_),
        shared(shared_),
        thread(thread_),
        tile(common_),
        lane_key(tile.first_key + thread / 32 * 16 + fragment_row()),
        kept_scale(kept_scale_of(common)),
        m_tile(tile.first()) {
    set_zero((float (&)[1][kDimV / 8][4]) tdv);
  }

  // [1] S', and tX' as its two products.
  CUFLASH_DEVICE void issue_scores(float (&s_and_ktq)[(1 + kMovesQ) * kNTiles][4], Accumulator& tkq) const {
    const u64 keys = descriptor_of(shared.k), tangents = descriptor_of(shared.tk);
    const u64 queries = descriptor_of(shared.q_at(q_at));
    if constexpr (kMovesK) ptx::fence_operand(tkq);
    issue(s_and_ktq, [&]() __attribute__((always_inline)) {
      for_term_products([&](auto i, auto j, int index) __attribute__((always_inline)) {
        // The terms of K come in the order in which the forward pass has those of its second factor.
        const auto multiply = [&](auto& d, u64 a) __attribute__((always_inline)) {
#pragma unroll
          for (int k = 0; k < kDim / 16; ++k)
            ptx::wgmma<false, false>(BFloat16{}, d, along_k<kRows>(term_of(a, j.value), k),
                                     along_k<kRows>(term_of(queries, i.value, 2 * kTerm), k), index > 0 || k > 0);
        };
        multiply(s_and_ktq, keys);
        if constexpr (kMovesK) multiply(tkq, tangents);
      });
    });
  }

  // Waits for them, and adds up tX'.
  CUFLASH_DEVICE void finish_scores(float (&s_and_ktq)[(1 + kMovesQ) * kNTiles][4], Accumulator& tx) const {
    wait_for<0>(s_and_ktq);
    if constexpr (kMovesK) ptx::fence_operand(tx);
    if constexpr (!kMovesQ) return;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float ktq = s_and_ktq[kMovesQ * kNTiles + n][i];
        tx[n][i] = kMovesK ? ktq + tx[n][i] : ktq;
      }
  }

  // [2] Makes P' and u', hands them over, and leaves P' u' in place of tX'.
  CUFLASH_DEVICE void make_p(Accumulator& s, Accumulator& tx, const PairWeights& pairs, bool masked, bool large) const {
    const u32 s_p = shared.dx_at(buffer) + thread * 16;
    WeightsOfTile{common, tile, m_tile, lane_key, kept_scale}.make(
        s, tx, shared.stats_at(do_at) + fragment_column() * 8, pairs, masked, large,
        [&](int n, const float (&pu)[4]) __attribute__((always_inline)) {
          ptx::store_shared_f32x4(s_p + n * 2048, s[n]);
          ptx::store_shared_f32x4(s_p + kTerms + n * 2048, tx[n]);
#pragma unroll
          for (int i = 0; i < 4; ++i) tx[n][i] = pu[i];
        });
    arrive_as_warp(shared.handed.p_full(buffer));
  }

  CUFLASH_DEVICE void step() {
    float s_and_ktq[(1 + kMovesQ) * kNTiles][4];
    Accumulator tx;
    shared.q_ring.full(q_at).wait(q_at.parity);
    issue_scores(s_and_ktq, tx);
    const PairWeights pairs(common, tile.work.batch, m_tile.head, tile.key_stop, tile.own_diagonal);
    const bool masked = m_tile.needs_mask(tile.queries);
    shared.do_ring.full(do_at).wait(do_at.parity);
    const bool large = is_of_large(ptx::float_of(ptx::load_shared_b32(shared.stats_at(do_at))));
    finish_scores(s_and_ktq, tx);
    shared.handed.dx_empty(buffer).wait(buffer.parity);
    make_p((Accumulator&)s_and_ktq, tx, pairs, masked, large);
    if constexpr (kSumsTdv) add_tdv(tdv, tx, shared.do_at(do_at));  // [3]
    arrive_after_reads(shared.do_ring.empty(do_at));
    q_at.advance(), do_at.advance(), buffer.advance();
    m_tile.advance(tile.queries);
  }
  CUFLASH_DEVICE void run() {
    if (tile.num_steps > 0) shared.k_full.wait(0);
#pragma unroll 1
    for (int i = 0; i < tile.num_steps; ++i) step();
    if constexpr (kNeedsDv) store_rows<kHeadDimV>(common, common.dv, tile, thread, tdv, 1.0f);
  }
};

// ---- The second warpgroup: dX', tdX' and tdK ----------------------------------------------------------------------

struct MakerOfDx {
  const Params& common;
  const Shared& shared;
  const u32 thread;
  const BackwardWork tile;
  const float kept_scale;

  Terms<kDimV / 16> v, tv;
  float tdk[kDim / 8][4];
  Position<kQStages> q_at;
  Position<kDoStages> do_at;
  Position<kBuffers> buffer;

  CUFLASH_DEVICE MakerOfDx(const Params& common_, const Shared& shared_, u32 thread_)
      : common(common_), shared(shared_), thread(thread_), tile(common_), kept_scale(kept_scale_of(common)) {
    set_zero((float (&)[1][kDim / 8][4]) tdk);
  }

  CUFLASH_DEVICE void sync() const { ptx::sync_named(kDxWarpgroup, 128); }

  // Loads V and tV to registers, and gives their memory to P' and u'.
  CUFLASH_DEVICE void load_values() {
    const auto load = [&](Terms<kDimV / 16>& operand, u32 tile) __attribute__((always_inline)) {
#pragma unroll
      for (int term = 0; term < kBf16Terms; ++term)
#pragma unroll
        for (int k = 0; k < kDimV / 16; ++k) {
          FragmentOf<BFloat16> fragment;
          load_fragment_chunked<kRows>(tile + term * kTerm, thread / 32 * 16, k, fragment);
#pragma unroll
          for (int i = 0; i < 4; ++i) operand[term][k][i] = fragment.word[i];
        }
    };
    shared.v_full.wait(0);
    load(v, shared.dx_at({}));
    if constexpr (kMovesV) load(tv, shared.tdx_at({}));
    shared.handed.begin();
  }

  // [4] dP' and tdP'.
  CUFLASH_DEVICE void make_dp(Accumulator& dp, Accumulator& tdp) const {
    const u64 dout = descriptor_of(shared.do_at(do_at));
    if constexpr (kMovesV) ptx::fence_operand(tdp);
    issue(dp, [&]() __attribute__((always_inline)) {
      for_term_products([&](auto i, auto j, int index) __attribute__((always_inline)) {
        const auto multiply = [&](Accumulator& d, const Terms<kDimV / 16>& a) __attribute__((always_inline)) {
#pragma unroll
          for (int k = 0; k < kDimV / 16; ++k)
            ptx::wgmma<false>(BFloat16{}, d, a[j.value][k], along_k<kRows>(term_of(dout, i.value), k),
                              index > 0 || k > 0);
        };
        multiply(dp, v);
        if constexpr (kMovesV) multiply(tdp, tv);
      });
    });
    wait_for<0>(dp);
    if constexpr (kMovesV) ptx::fence_operand(tdp);
  }

  // [5] dX' = P' (dP' - delta) in place of dP' and tdX' = u' dX' + P' (tdP' - tdelta) in place of tdP'. Where a
  // function makes scores, u' is what dP' - delta is multiplied by.
  CUFLASH_DEVICE void make_dx(Accumulator& dx, Accumulator& tdx) const {
    const u32 s_stats = shared.stats_at(do_at) + fragment_column() * 8 + 8, s_p = shared.dx_at(buffer) + thread * 16;
    [[maybe_unused]] const ScaledGradients scaled(common.scale, tscale_of(common));
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      float delta[2], tdelta[2], p[4], u[4];
      ptx::load_shared_x2(s_stats + n * 64, delta);
      ptx::load_shared_x2(s_stats + kBytesStats + n * 64, tdelta);
      ptx::load_shared_f32x4(s_p + n * 2048, p);
      ptx::load_shared_f32x4(s_p + kTerms + n * 2048, u);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float dp = dx[n][i], tdp = kMovesV ? tdx[n][i] : 0.0f, weight = p[i];
        if constexpr (kHasDropout) {
          const bool drops = is_dropped(weight);
          dp = (drops ? 0.0f : dp) * kept_scale, tdp = (drops ? 0.0f : tdp) * kept_scale, weight = fabsf(weight);
        }
        dp -= delta[i % 2];
        dx[n][i] = weight * dp;
        tdx[n][i] = u[i] * (kHasDerivative ? dp : dx[n][i]) + weight * (tdp - tdelta[i % 2]);
        scaled.apply(dx[n][i], tdx[n][i]);
      }
    }
  }

  // [6] tdK += dX' tQ + tdX' Q, as tdV.
  CUFLASH_DEVICE void add_tdk() {
    const u64 dx = descriptor_of(shared.dx_at(buffer)), tdx = descriptor_of(shared.tdx_at(buffer));
    const u64 q = descriptor_of_transposed<kRows>(shared.q_at(q_at));
    const u64 tq = descriptor_of_transposed<kRows>(shared.q_at(q_at) + kTerm);
    float sum[kDim / 8][4];
    issue(sum, [&]() __attribute__((always_inline)) {
      for_term_products([&](auto i, auto j, int index) __attribute__((always_inline)) {
        const auto multiply = [&](u64 a, u64 b, bool adds) __attribute__((always_inline)) {
#pragma unroll
          for (int k = 0; k < kSteps; ++k)
            ptx::wgmma<false, true>(BFloat16{}, sum, along_k<kRows>(term_of(a, i.value), k),
                                    along_k_transposed(term_of(b, j.value, 2 * kTerm), k), adds || k > 0);
        };
        if constexpr (kMovesQ) multiply(dx, tq, index > 0);
        multiply(tdx, q, kMovesQ || index > 0);
      });
    });
    wait_for<0>(sum);
    add(tdk, sum);
  }

  CUFLASH_DEVICE void step() {
    Accumulator dx, tdx;  // dP' and tdP' before
    shared.do_ring.full(do_at).wait(do_at.parity);
    make_dp(dx, tdx);
    shared.handed.p_full(buffer).wait(buffer.parity);
    make_dx(dx, tdx);
    ptx::fence_async_proxy();
    sync();  // all threads have read P' and u', which are overwritten, and the statistics
    if (thread == 0) shared.do_ring.empty(do_at).arrive();
    if constexpr (kReadsDx) store_terms(dx, shared.dx_at(buffer), thread);
    store_terms(tdx, shared.tdx_at(buffer), thread);
    ptx::fence_async_proxy();
    sync();
    if (thread == 0) shared.handed.dx_full(buffer).arrive();
    shared.q_ring.full(q_at).wait(q_at.parity);
    if constexpr (kNeedsDk) add_tdk();
    arrive_as_warp(shared.q_ring.empty(q_at));
    arrive_as_warp(shared.handed.dx_empty(buffer));
    q_at.advance(), do_at.advance(), buffer.advance();
  }
  CUFLASH_DEVICE void run() {
    if (tile.num_steps > 0) load_values();
#pragma unroll 1
    for (int i = 0; i < tile.num_steps; ++i) step();
    const float factor = ScaledGradients(common.scale, tscale_of(common)).factor;
    if constexpr (kNeedsDk) store_rows<kHeadDim>(common, common.dk, tile, thread, tdk, factor);
  }
};

// ---- The third warpgroup: tdQ -------------------------------------------------------------------------------------

// [7] makes tdQ of each tile of queries and these keys, and adds it to the sum in memory.
CUFLASH_DEVICE void accumulate_tdq(const Params& common, const Shared& shared, u32 thread) {
  const BackwardWork tile(common);
  if (tile.num_steps == 0) return;
  shared.handed.begin();
  shared.k_full.wait(0);
  const u64 k = descriptor_of_transposed<kRows>(shared.k), tk = descriptor_of_transposed<kRows>(shared.tk);
  QueryTileIterator m_tile = tile.first();
  Position<kBuffers> buffer;
#pragma unroll 1
  for (int step = 0; step < tile.num_steps; ++step, m_tile.advance(tile.queries), buffer.advance()) {
    shared.handed.dx_full(buffer).wait(buffer.parity);
    if constexpr (kDqByReduction) {
      const u64 dx = descriptor_of_transposed<kRows>(shared.dx_at(buffer));
      const u64 tdx = descriptor_of_transposed<kRows>(shared.tdx_at(buffer));
      float tdq[kDim / 8][4];
      issue(tdq, [&]() __attribute__((always_inline)) {
        for_term_products([&](auto i, auto j, int index) __attribute__((always_inline)) {
          const auto multiply = [&](u64 a, u64 b, bool adds) __attribute__((always_inline)) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
              ptx::wgmma<true, true>(BFloat16{}, tdq, along_k_transposed(term_of(a, i.value), step),
                                     along_k_transposed(term_of(b, j.value), step), adds || step > 0);
          };
          if constexpr (kMovesK) multiply(dx, tk, index > 0);
          multiply(tdx, k, kMovesK || index > 0);
        });
      });
      wait_for<0>(tdq);
      arrive_as_warp(shared.handed.dx_empty(buffer));
      float* sum = (float*)common.dq_accumulator + tile.index_of(common, m_tile) * (kRows * kDim) + thread * 4;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) ptx::reduce_add_x4(sum + n * 128 * 4, tdq[n]);
    } else {
      arrive_as_warp(shared.handed.dx_empty(buffer));
    }
  }
}

CUFLASH_DEVICE void backward_jvp(const BackwardJvpParams& params) {
  if (!is_chosen(params.common)) return;
  const Shared shared;
  if (ptx::thread_index() == 0) {
    shared.k_full.init(1);
    shared.v_full.init(1);
    shared.q_ring.init(4);
    shared.do_ring.init(4 + 1);
    shared.handed.init();
    ptx::fence_barrier_init();
  }
  ptx::sync_block();
  const u32 warpgroup = ptx::uniform(ptx::thread_index() / 128), thread = ptx::thread_index() % 128;
  if (warpgroup == 0) {
    ptx::increase_registers<kPRegisters>();
    MakerOfP(params.common, shared, thread).run();
  } else if (warpgroup == 1) {
    ptx::increase_registers<kDxRegisters>();
    MakerOfDx(params.common, shared, thread).run();
  } else if (warpgroup == 2) {
    ptx::decrease_registers<kTdqRegisters>();
    accumulate_tdq(params.common, shared, thread);
  } else {
    ptx::decrease_registers<kProducerRegisters>();
    if (thread == 0) Producer(params, shared).produce_q();
    if (thread == 32) Producer(params, shared).produce_dout();
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, BackwardJvpParams, kNumThreads, 1, backward_jvp)
