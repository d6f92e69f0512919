// Backward pass on the tensor cores and the TMA unit of compute capability 9.0, transposed, in 16-bit types.
//
//   P' = exp(K Q' - lse)    dP' = V dO'    dS' = P' * (dP' - delta)
//   dV = P' dO              dK = dS' Q     dQ += dS K                       (X' is X transposed; rows of X' are keys)
//
// A block owns kBlockN keys of one key/value head and walks over the tiles of queries, and over the query heads that
// share its keys; or over its share of them, where tiles of keys do not fill the device. Its warpgroups have roles. Two
// are consumers, with dK and dV in registers, where P' and dS' are operands as they come: each makes everything for 64
// keys of its own, or, where registers hold one of dV and dK only, both share 64 keys, the first makes P' and dV, the
// second dS' and dK, and P' is handed over in shared memory. dS' goes there too, and from it the next warpgroup makes dQ
// of the tile and adds it to memory, at its own pace. Consumers issue dV and dK of a tile of queries behind P' of the
// next one, or dP' where they make no P', so that they run during what follows from it. They take turns at what the other
// would slow down (kPingPong).
// The warpgroup of dQ first clears what later blocks add to (common/clear_dq.cuh). A warp of it asks TMA for
// tiles. Where blocks take turns at dQ, three warps of a last warpgroup ask for tiles, wait for the turns, and end them:
// each of the three takes as long as a memory access. They ask for tiles no sooner than dQ is through with a step: sooner,
// they are in its way.
//
//   barrier       one phase is over when              who waits
//   kv_full       K and V have arrived                consumers, dQ
//   q_full[i]     Q and statistics are in stage i     consumers, before P'
//   q_empty[i]    every consumer is done with them    who asks for the next
//   do_full[i], do_empty[i]                           the same for dO; with turns dQ is done with its step, too
//   ds_full[i]    who makes dS' has written it to i   dQ
//   ds_empty[i]   dQ, and dK if it does, has read it  who makes dS', before writing there again
//   p_full        P' has been left there              who makes dS', where roles are split
//   p_empty       it has been read                    who makes P', before leaving the next there
//   turn[i]       it is this block's turn at a tile   dQ, before adding to it
//   added[i]      dQ of the tile is added             who ends the turn
//   ended[i]      the turn has been ended             who waits for turns, before the next but one
//   named: one per consumer for itself, and for its turn; one for all consumers; one for consumers and dQ at the end
#include "common/clear_dq.cuh"
#include "common/config.cuh"
#include "common/dropout.cuh"
#include "common/fragments.cuh"
#include "common/mask.cuh"
#include "common/operands.cuh"
#include "common/params.cuh"
#include "common/score.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/ping_pong.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tiles.cuh"

// Whether dP' is issued at the start of a step, or only when the products of the step before have freed their registers.
constexpr bool kDpEarly = CUFLASH_DP_EARLY;
constexpr bool kSplitsRoles = CUFLASH_SPLITS_ROLES;
static_assert(kPairsStats, "a lane reads lse of two queries, and later their delta");
// Whether consumers keep K in registers, so that only Q is read for P'.
constexpr bool kHoldsK = CUFLASH_HOLDS_K;
// Whether dK reads dS' from shared memory, where registers hold no more operands.
constexpr bool kDkFromShared = CUFLASH_DK_FROM_SHARED;
constexpr int kConsumers = 2;
static_assert(!kDkFromShared || !kSplitsRoles, "every consumer frees dS'");
constexpr int kDsWriters = kSplitsRoles ? 1 : kConsumers;
// Whether one consumer goes through a step from P' to dS' while the other waits, or does what is left of its own: side by
// side, each product takes twice as long, and both have nothing but exponentials to do at the same time. With split roles
// the first lets the second in once its products are issued. On an H200 this kernel alone is 9 to 12 % faster so at
// head_dim 128 from seqlen 4096 on, 4 % at 64, 2 to 3 % at 256; but with softcap, where scores take more than an
// exponential, 40 % slower.
constexpr bool kPingPong = kScaleInExponent && !kHasDropout;
constexpr int kQueryTiles = kBlockM / 8;
constexpr int kConsumerThreads = 128 * kConsumers;
static_assert(kNumWarps == 4 * (kConsumers + 1 + kDqInOrder), "the consumers, dQ, and who serves turns");
static_assert(kBlockN == 64 * kDsWriters, "a consumer, or both, own 64 keys");
static_assert(kBlockM == 64, "dQ is one product of 64 rows");

// Shared memory: K, V, the rings of Q, of dO, of dS' and of P', statistics, barriers.
constexpr u32 kBytesK = chunked_bytes(kBlockN, kDim);
constexpr u32 kBytesV = chunked_bytes(kBlockN, kDimV);
constexpr u32 kBytesQ = chunked_bytes(kBlockM, kDim);
constexpr u32 kBytesDo = chunked_bytes(kBlockM, kDimV);
constexpr u32 kBytesDs = chunked_bytes(kBlockN, kBlockM);
constexpr u32 kBytesStats = kBlockM * 8;
constexpr int kDsStages = 2, kPStages = kSplitsRoles, kTurnStages = kDqInOrder ? 2 : 0;
constexpr u32 kBytesP = 128 * kQueryTiles * 16;
constexpr u32 kBytesBarriers = 8 * (2 + 4 * kNumStages + 2 * kDsStages + 2 * kPStages + 3 * kTurnStages);
static_assert(kBytesK + kBytesV + kNumStages * (kBytesQ + kBytesDo + kBytesStats) + kDsStages * kBytesDs +
                      kPStages * kBytesP + kBytesBarriers ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers of a thread after the roles are dealt: what the block started with in all. Products that are in flight want
// more than their accumulators and operands take, or the compiler makes one wait for the other.
constexpr int kServerRegisters = kDqInOrder ? 24 : 0;
constexpr int kConsumerRegisters = kScaleInExponent ? 208 : kDqInOrder ? 216 : 224;
constexpr int kDqRegisters = (kDqInOrder ? 512 : 504) - kServerRegisters - kConsumers * kConsumerRegisters;
// Columns of dQ that one product makes.
constexpr int kDqColumns = kSplitsRoles && 64 / 2 + 28 <= kDqRegisters ? 64 : 32;
// Fragments of dS', of 16 keys, that dQ holds for all of its columns. The assembler keeps 28 registers for other things,
// used or not. What does not fit beside them and a product's columns is read from shared memory, by every product: with all
// of dS' that makes the pass 8 % slower on an H200 (head_dim 128).
constexpr int kDsFragments = kBlockN / 16, kDqRoom = (kDqRegisters - 28 - kDqColumns / 2) / 4;
constexpr int kDqHeld = kDqRoom < kDsFragments ? kDqRoom : kDsFragments;
constexpr bool kDqHoldsDs = kDqHeld == kDsFragments;
static_assert(kChunk % kDqColumns == 0, "columns of one chunk of K");

// Whether dQ asks for a tile while its last columns are made, and not behind them. On an H200 2 to 7 % faster at head_dim
// 256, up to 1 % at 64; at 128, where products read the most from shared memory, up to 1 % slower.
constexpr bool kAsksEarly = !kDkFromShared;
// Cycles that dQ waits once dS' is there, so that what consumers issue next goes first. On an H200, with turns 60 are 1 to
// 4 % faster than none at head_dim 64, 100 are 1 to 8 % faster at 256, and at 128 it makes no difference. Without turns
// any delay costs, at head_dim 64 as little as 20 cycles 2 to 5 %; but of packed sequences 20 to 40 are
// 1 to 3 % faster there.
constexpr u32 kDqDelay = kDkFromShared ? 0 : kDqInOrder ? (kSplitsRoles ? 100 : 60) : kIsPacked && !kSplitsRoles ? 30 : 0;

// Named barriers: of each consumer, of all of them, of consumers and dQ at the end, of each consumer for its turn.
constexpr u32 kConsumer = 1, kAll = kConsumer + kConsumers, kEnd = kAll + 1, kPingPongBarrier = kEnd + 1;

struct BackwardParams {
  Params common;
  TensorMap q, k, v, dout, dkv[kNeedsDk + kNeedsDv];  // dk, dv: those that are wanted
};
static_assert(sizeof(BackwardParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

struct Shared {
  u32 k, v, q, dout, ds, p, stats;
  Barrier kv_full;
  Ring<kNumStages> q_ring, do_ring;
  Ring<kDsStages> ds_ring;
  Ring<kPStages> p_ring;
  u32 turn, added, ended;  // barriers, one behind the other

  CUFLASH_DEVICE Shared() {
    k = ptx::dynamic_shared();
    v = k + kBytesK;
    q = v + kBytesV;
    dout = q + kNumStages * kBytesQ;
    ds = dout + kNumStages * kBytesDo;
    p = ds + kDsStages * kBytesDs;
    stats = p + kPStages * kBytesP;
    kv_full = {stats + kNumStages * kBytesStats};
    q_ring = {kv_full.address + 16};
    do_ring = {q_ring.address + Ring<kNumStages>::kBytes};
    ds_ring = {do_ring.address + Ring<kNumStages>::kBytes};
    p_ring = {ds_ring.address + Ring<kDsStages>::kBytes};
    turn = p_ring.address + Ring<kPStages>::kBytes;
    added = turn + 8 * kTurnStages;
    ended = added + 8 * kTurnStages;
  }
};

// Warp. Asks for the tiles of a block: K and V at once, those of queries as their stages get free. All lanes know where it
// is, and one of them asks: so the compiler knows coordinates to be the same in all, as TMA wants them.
struct Producer {
  const BackwardParams& params;
  const Shared& shared;
  const KeyTile& tile;
  Walk next;
  Position<kNumStages> at;
  int steps_left;

  CUFLASH_DEVICE Producer(const BackwardParams& params_, const Shared& shared_, const KeyTile& tile_)
      : params(params_), shared(shared_), tile(tile_), next(tile_.first()), steps_left(tile_.num_steps) {}

  CUFLASH_DEVICE void load_keys() const {
    if (!ptx::elect_lane()) return;
    shared.kv_full.arrive_expect(kBytesK + kBytesV);
    const int first_key = key_start_of(tile.work.batch) + tile.first_key, batch = entry_of(tile.work.batch);
    load_chunks<kBlockN, kDim>(shared.k, params.k, shared.kv_full, first_key, tile.head_kv, batch);
    load_chunks<kBlockN, kDimV>(shared.v, params.v, shared.kv_full, first_key, tile.head_kv, batch);
  }
  CUFLASH_DEVICE void load_queries() {
    if (steps_left-- <= 0) return;
    if (ptx::elect_lane()) load_next();
    next.advance(tile.queries);
    at.advance();
  }

 private:
  CUFLASH_DEVICE void load_next() const {
    const Entry batch = tile.work.batch;
    const int row = next.m_block * kBlockM, first_row = query_start_of(batch) + row;
    const Barrier q_full = shared.q_ring.full(at), do_full = shared.do_ring.full(at);
    const auto load_dout = [&]() {
      do_full.arrive_expect(kBytesDo);
      load_chunks<kBlockM, kDimV>(shared.dout + at.stage * kBytesDo, params.dout, do_full, first_row, next.head,
                                  entry_of(batch));
    };
    shared.do_ring.empty(at).wait(at.parity ^ 1);
    if constexpr (kSplitsRoles) load_dout();  // who makes dV is done before who makes dK
    shared.q_ring.empty(at).wait(at.parity ^ 1);
    q_full.arrive_expect(kBytesQ + kBytesStats);
    load_chunks<kBlockM, kDim>(shared.q + at.stage * kBytesQ, params.q, q_full, first_row, next.head, entry_of(batch));
    ptx::load_bulk(shared.stats + at.stage * kBytesStats, stats_of(params.common, batch, next.head) + row * 2,
                   kBytesStats, q_full.address);
    if constexpr (!kSplitsRoles) load_dout();
  }
};

// The last warpgroup where blocks take turns: a warp, and a thread of each of two others.
CUFLASH_DEVICE void serve(const BackwardParams& params, const Shared& shared, const Work& found, u32 thread) {
  const Params& common = params.common;
  const KeyTile tile(common, found);
  if (tile.num_steps == 0) return;
  if (ptx::uniform(thread / 32) == 0) {
    Producer producer(params, shared, tile);
    producer.load_keys();
#pragma unroll 1
    while (producer.steps_left > 0) producer.load_queries();
    return;
  }
  if (thread != 32 && thread != 64) return;
  Position<kTurnStages> at;
  Walk walk = tile.first();
#pragma unroll 1
  for (int step = 0; step < tile.num_steps; ++step, walk.advance(tile.queries), at.advance()) {
    u32* turns = dq_order_of(common, tile.num_m_blocks, tile.index_of(common, walk));
    const Barrier turn{shared.turn + 8 * at.stage}, added{shared.added + 8 * at.stage}, ended{shared.ended + 8 * at.stage};
    if (thread == 32) {
      ended.wait(at.parity ^ 1);
      ptx::wait_for_turn(turns, tile.turn(common, walk.m_block));
      turn.arrive();
    } else {
      added.wait(at.parity);
      ptx::end_turn(turns);
      ended.arrive();
    }
  }
}

// The warpgroup of dQ: of each tile of queries and these keys, added to the sum in memory.
CUFLASH_DEVICE void accumulate_dq(const BackwardParams& params, const Shared& shared, const Work& found, u32 thread) {
  const Params& common = params.common;
  const KeyTile tile(common, found);
  const bool produces = !kDqInOrder && ptx::uniform(thread / 32) == 0;
  Producer producer(params, shared, tile);
  if (produces && tile.num_steps > 0) {
    producer.load_keys();
    for (int i = 0; i < kNumStages; ++i) producer.load_queries();
  }
  if (kClearsAhead && Share(common).part == 0) clear_ahead(common, tile.num_m_blocks, tile.work, thread);
  if (tile.num_steps == 0) return;
  if constexpr (kClearsAhead) wait_for_clears(common, tile.num_m_blocks, tile.work);
  shared.kv_full.wait(0);
  Position<kDsStages> at;
  Position<kTurnStages> turn_at;
  Position<kNumStages> q_at;
  Walk walk = tile.first();
#pragma unroll 1
  for (int step = 0; step < tile.num_steps; ++step, walk.advance(tile.queries), at.advance()) {
    float* accumulator = (float*)common.dq_accumulator + tile.index_of(common, walk) * (kBlockM * kDim) + thread * 4;
    shared.ds_ring.full(at).wait(at.parity);
    ptx::pause<kDqDelay>();
    if constexpr (!kDqByReduction) {  // not wanted
      arrive_as_warp(shared.ds_ring.empty(at));
      if (produces) producer.load_queries();
      continue;
    }
    const u32 s_ds = shared.ds + at.stage * kBytesDs;
    const u64 a = descriptor_of_transposed<kBlockN>(s_ds);
    Fragment ds[kDqHeld];
    load_fragments_chunked_transposed(s_ds, thread / 32 * 16, ds);
    if constexpr (kDqHoldsDs) arrive_as_warp(shared.ds_ring.empty(at));
    float dq[kDqColumns / 8][4];
    constexpr int slices = kDim / kDqColumns;
    repeat<slices>([&](auto slice) {
      constexpr int index = decltype(slice)::value, first = index * kDqColumns;
      const u64 b = descriptor_of_transposed<kBlockN>(shared.k + first / kChunk * kBlockN * kLineBytes) +
                    first % kChunk * 2 / 16;
      ptx::fence_operand(dq);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDqHeld; ++k)
        ptx::wgmma<true>(Element{}, dq, ds[k].word, along_k_transposed(b, k), k > 0);
#pragma unroll
      for (int k = kDqHeld; k < kDsFragments; ++k)
        ptx::wgmma<true, true>(Element{}, dq, along_k_transposed(a, k), along_k_transposed(b, k), true);
      ptx::wgmma_commit();
      if constexpr (kDqInOrder && index == 0) Barrier{shared.turn + 8 * turn_at.stage}.wait(turn_at.parity);
      if (kAsksEarly && index + 1 == slices && produces) producer.load_queries();
      ptx::wgmma_wait<0>();
      ptx::fence_operand(dq);
      if constexpr (!kDqHoldsDs && index + 1 == slices) arrive_as_warp(shared.ds_ring.empty(at));
#pragma unroll
      for (int n = 0; n < kDqColumns / 8; ++n)
        ptx::reduce_add_x4(accumulator + (index * kDqColumns / 8 + n) * 128 * 4, dq[n]);
    });
    if constexpr (kDqInOrder) {
      arrive_as_warp({shared.added + 8 * turn_at.stage});
      turn_at.advance();
      arrive_as_warp(shared.do_ring.empty(q_at));
      q_at.advance();
    }
    if (!kAsksEarly && produces) producer.load_queries();
  }
}

// `a` in registers, or in shared memory with k along its lines.
template <int n_tiles>
CUFLASH_DEVICE void multiply_any(float (&d)[n_tiles][4], const Fragment& a, u64 b, bool adds) {
  ptx::wgmma<true>(Element{}, d, a.word, b, adds);
}
template <int n_tiles>
CUFLASH_DEVICE void multiply_any(float (&d)[n_tiles][4], u64 a, u64 b, bool adds) {
  ptx::wgmma<false, true>(Element{}, d, a, b, adds);
}

// A consumer, number `consumer`, of 64 keys: it makes P' and dV, or dS' and dK, or all of them.
template <bool makes_dv, bool makes_dk>
CUFLASH_DEVICE void consume(const BackwardParams& params, const Shared& shared, const Work& found, u32 consumer) {
  const Params& common = params.common;
  const KeyTile tile(common, found);
  const Entry batch = tile.work.batch;
  const u32 thread = ptx::thread_index() % 128, lane = lane_index();
  const bool elected = thread == 0;
  const u32 first = kSplitsRoles ? 0 : consumer * 64;  // of its keys
  const int warp_key = thread / 32 * 16, lane_key = tile.first_key + first + warp_key + fragment_row();
  const u32 rows_k = shared.k + first * kLineBytes, rows_v = shared.v + first * kLineBytes;
  float dk[makes_dk ? kDim / 8 : 1][4], dv[makes_dv ? kDimV / 8 : 1][4];
#pragma unroll
  for (auto& tile : dk) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
#pragma unroll
  for (auto& tile : dv) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;

  if (tile.num_steps > 0) {
    shared.kv_full.wait(0);
    if constexpr (kHidesLastKeys) {
      // Keys past the last one have weight 0, but 0 times what lies there may be NaN.
      const int valid = tile.key_stop - tile.first_key;
      if (valid < kBlockN) {
        if (consumer == 0) {
          zero_rows<kBlockN, kDim>(shared.k, valid, thread);
          zero_rows<kBlockN, kDimV>(shared.v, valid, thread);
          ptx::fence_async_proxy();
        }
        ptx::sync_named(kAll, kConsumerThreads);
      }
    }
  }

  // P' or dP': `a` is the rows of K or V of this warpgroup, of which K may be held in registers, `b` a tile of Q or dO.
  Fragment k_operand[kHoldsK ? kDim / 16 : 1];
  if constexpr (kHoldsK)
    if (tile.num_steps > 0) load_fragments_chunked<kBlockN>(rows_k, warp_key, k_operand);
  const auto multiply_keys = [&](auto& d, auto held, u32 a, u32 b, auto steps) {
    const u64 a_rows = descriptor_of(a), b_rows = descriptor_of(b);
    ptx::fence_operand(d);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < decltype(steps)::value; ++k) {
      if constexpr (decltype(held)::value)
        ptx::wgmma<false>(Element{}, d, k_operand[k].word, along_k<kBlockM>(b_rows, k), k > 0);
      else
        ptx::wgmma<false, false>(Element{}, d, along_k<kBlockN>(a_rows, k), along_k<kBlockM>(b_rows, k), k > 0);
    }
    ptx::wgmma_commit();
  };

  Position<kNumStages> at;
  Position<kDsStages> ds_at;
  Position<kPStages> p_at;
  Fragment p_operand[kBlockM / 16], ds_operand[kBlockM / 16];  // of the step before
  const auto to_operands = [](const auto& value, auto& operand) {
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k) to_operand(value, k, operand[k]);
  };
  // The weights that dV is made of: none that dropout has marked.
  const auto to_weights = [&](const auto& p, auto& operand) {
    if constexpr (kHasDropout) {
      float kept[kQueryTiles][4];
#pragma unroll
      for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) kept[n][i] = is_dropped(p[n][i]) ? 0.0f : p[n][i];
      to_operands(kept, operand);
    } else {
      to_operands(p, operand);
    }
  };
  const float kept_scale = kept_scale_of(common);
  const auto set_to_zero = [](auto& operand) {
#pragma unroll
    for (auto& fragment : operand)
      for (u32& word : fragment.word) word = 0;
  };
  // `d` += a b, where `a(k)` is 16 columns in registers or a descriptor. By 128 columns at a time: a product of more wants
  // more registers than a thread of a large block starts with.
  const auto multiply_queries = [&](auto& d, const auto& a, u64 b, bool adds) {
    constexpr int kPieces = sizeof(d) / sizeof(d[0]);
    repeat<(kPieces + 15) / 16>([&](auto part) {
      constexpr int first = 16 * decltype(part)::value, count = kPieces - first < 16 ? kPieces - first : 16;
      auto& columns = (float(&)[count][4])d[first];
      const u64 b_columns = b + first * 8 / kChunk * (kBlockM * kLineBytes / 16);
#pragma unroll
      for (int k = 0; k < kBlockM / 16; ++k)
        multiply_any(columns, a(k), along_k_transposed(b_columns, k), adds || k > 0);
    });
    ptx::wgmma_commit();
  };
  // dV and dK of the tile of queries in stage `stage`; added to the sums, or instead of them. With `nothing` before it,
  // any operands do.
  const auto multiply_operands = [&](int stage, bool adds, bool nothing) {
    const u64 dout = descriptor_of_transposed<kBlockM>(shared.dout + stage * kBytesDo);
    const u64 q = descriptor_of_transposed<kBlockM>(shared.q + stage * kBytesQ);
    // Of the keys of this consumer; what it wrote last is in the other stage.
    const u64 ds = descriptor_of(nothing ? shared.q : shared.ds + (ds_at.stage ^ 1) * kBytesDs + first * kLineBytes);
    if constexpr (kDkFromShared) ptx::sync_named(kConsumer + consumer, 128);
    ptx::fence_operand(dv);
    ptx::fence_operand(dk);
    ptx::wgmma_fence();
    if constexpr (makes_dv) multiply_queries(dv, [&](int k) -> auto& { return p_operand[k]; }, dout, adds);
    if constexpr (makes_dk && kDkFromShared)
      multiply_queries(dk, [&](int k) { return along_k<kBlockN>(ds, k); }, q, adds);
    else if constexpr (makes_dk)
      multiply_queries(dk, [&](int k) -> auto& { return ds_operand[k]; }, q, adds);
  };
  const auto finish_products = [&](int stage, bool frees) {
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dv);
    ptx::fence_operand(dk);
    // All have read the statistics, of which no product tells. Who makes dS has told dQ by then, without which nobody asks
    // for tiles.
    if constexpr (!makes_dk) ptx::sync_named(kConsumer + consumer, 128);
    if (elected && frees) {
      if constexpr (kDkFromShared) shared.ds_ring.empty({ds_at.stage ^ 1}).arrive();
      shared.do_ring.empty({stage}).arrive();
      shared.q_ring.empty({stage}).arrive();
    }
  };

  const PingPong<kPingPong, kConsumers, kPingPongBarrier> ping_pong(consumer);
  Walk walk = tile.first();
  int stage_before = 0;
  const auto step = [&](int index) {
    const u32 s_q = shared.q + at.stage * kBytesQ, s_do = shared.dout + at.stage * kBytesDo;
    const u32 s_stats = shared.stats + at.stage * kBytesStats + fragment_column() * 8;
    float p[kQueryTiles][4], ds[kQueryTiles][4];

    constexpr bool dp_early = makes_dk && kDpEarly;
    shared.q_ring.full(at).wait(at.parity);
    if constexpr (!dp_early) shared.do_ring.full(at).wait(at.parity);
    if constexpr (kIsPacked) {
      // Likewise queries past the last one.
      const int valid = seqlen_q_of(common, batch) - walk.m_block * kBlockM;
      if (valid < kBlockM) {
        if (consumer == 0) {
          shared.do_ring.full(at).wait(at.parity);
          zero_last_of_64<kBlockM, kDim>(s_q, valid, thread);
          zero_last_of_64<kBlockM, kDimV>(s_do, valid, thread);
          ptx::fence_async_proxy();
        }
        ptx::sync_named(kAll, kConsumerThreads);
      }
    }
    ping_pong.wait();
    if constexpr (makes_dv) multiply_keys(p, Constant<kHoldsK>{}, rows_k, s_q, Integer<kDim / 16>{});
    const auto multiply_dp = [&]() { multiply_keys(ds, Constant<false>{}, rows_v, s_do, Integer<kDimV / 16>{}); };
    if constexpr (dp_early) {
      shared.do_ring.full(at).wait(at.parity);
      multiply_dp();
    }
    // The first step has nothing before it and makes products of it all the same, to which those of the second do not
    // add: a first step apart from the loop takes twice the instructions, and more registers.
    constexpr int kBehind = makes_dv + makes_dk;
    multiply_operands(stage_before, index > 1, index == 0);
    if constexpr (!makes_dk) ping_pong.pass();
    const auto finish_step_before = [&]() { finish_products(stage_before, index > 0); };

    [[maybe_unused]] float derivative[kScaleInExponent ? 1 : kQueryTiles][4];
    if constexpr (makes_dv) {
      const int head = walk.head, m_block = walk.m_block, first_row = m_block * kBlockM;
      const Score score(common, batch, head, tile.key_stop, tile.own_diagonal);
      const Mask mask(common, batch, head, tile.key_stop, tile.own_diagonal);
      const float scale_log2 = score.exponent_scale();
      const bool masked = walk.needs_mask(tile.queries);
      const auto row_of = [&](int n, int i) { return first_row + 8 * n + fragment_column() + i % 2; };
      const auto key_of = [&](int i) { return lane_key + i / 2 * 8; };

      ptx::wgmma_wait<kBehind + dp_early>();
      ptx::fence_operand(p);
      // A product can be masked at once, in a branch of its own, only where it is the score but for a positive factor.
      if (kScaleInExponent && masked) {
#pragma unroll
        for (int n = 0; n < kQueryTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (!mask.visible(row_of(n, i), key_of(i))) p[n][i] = -ptx::infinity();
      }
#pragma unroll
      for (int n = 0; n < kQueryTiles; ++n) {
        float lse[2];  // of this lane's two queries
        ptx::load_shared_x2(s_stats + n * 64, lse);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float x = p[n][i];
          if constexpr (!kScaleInExponent) {
            x = score.of(x, row_of(n, i), key_of(i), derivative[n][i]);
            if (masked && !mask.visible(row_of(n, i), key_of(i))) x = -ptx::infinity();
          }
          p[n][i] = ptx::exp2_approx(x * scale_log2 - lse[i % 2]);
        }
      }
      if constexpr (kHasDropout) Dropout(common, batch, head).mark(p, row_of(0, 0), lane_key);
    }
    [[maybe_unused]] const u32 s_p = shared.p + p_at.stage * kBytesP + thread * 16;
    if constexpr (!makes_dk) {
      finish_step_before();
      shared.p_ring.empty(p_at).wait(p_at.parity ^ 1);
#pragma unroll
      for (int n = 0; n < kQueryTiles; ++n) {
        float handed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) handed[i] = kHasSoftcap ? p[n][i] * derivative[n][i] : p[n][i];
        ptx::store_shared_f32x4(s_p + n * 128 * 16, handed);
      }
      arrive_as_warp(shared.p_ring.full(p_at));
      p_at.advance();
      to_weights(p, p_operand);
    } else {
      if constexpr (dp_early) {
        ptx::wgmma_wait<kBehind>();
      } else {
        finish_step_before();
        multiply_dp();
        if constexpr (makes_dv) to_weights(p, p_operand);
        ptx::wgmma_wait<0>();
      }
      ptx::fence_operand(ds);
      if constexpr (!makes_dv) shared.p_ring.full(p_at).wait(p_at.parity);
#pragma unroll
      for (int n = 0; n < kQueryTiles; ++n) {
        // Before the last one, so that the assembler moves most exponentials behind it: a turn that ends behind them costs
        // more than turns are worth.
        if (n == kQueryTiles - 1) ping_pong.pass();
        float delta[2];
        ptx::load_shared_x2(s_stats + n * 64 + 8, delta);
        if constexpr (!makes_dv) ptx::load_shared_f32x4(s_p + n * 128 * 16, p[n]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          ds[n][i] = gradient_of(p[n][i], ds[n][i], kept_scale, delta[i % 2]);
          if constexpr (kHasSoftcap && makes_dv) ds[n][i] *= derivative[n][i];
        }
      }
      if constexpr (!makes_dv) {
        arrive_as_warp(shared.p_ring.empty(p_at));
        p_at.advance();
      }
      // As operands, P' and dS' overwrite those of the products of the step before.
      if constexpr (dp_early) {
        finish_step_before();
        if constexpr (makes_dv) to_weights(p, p_operand);
      }
      to_operands(ds, ds_operand);
      // dS' to shared memory, rows of keys.
      shared.ds_ring.empty(ds_at).wait(ds_at.parity ^ 1);
      const u32 line = shared.ds + ds_at.stage * kBytesDs + (first + warp_key + lane % 16) * kLineBytes;
#pragma unroll
      for (int k = 0; k < kBlockM / 16; ++k)
        ptx::store_matrix_x4(line + ((k * 32 + lane / 16 * 16) ^ (lane % 8 * 16)), ds_operand[k].word);
      if constexpr (kDkFromShared || !kDqHoldsDs) ptx::fence_async_proxy();
      arrive_as_warp(shared.ds_ring.full(ds_at));
      ds_at.advance();
    }
    stage_before = at.stage;
    at.advance();
    walk.advance(tile.queries);
  };
  if (tile.num_steps > 0) {
    set_to_zero(p_operand);
    set_to_zero(ds_operand);
#pragma unroll 1
    for (int i = 0; i < tile.num_steps; ++i) step(i);
    multiply_operands(stage_before, tile.num_steps > 1, false);
    finish_products(stage_before, true);
  }
  ping_pong.finish();

  if constexpr (!kSplitsGroup) ptx::sync_named(kEnd, kConsumerThreads + 128);
  if (tile.is_shared) {
    Real* partials = tile.partials(common, kSplitsRoles ? thread : ptx::thread_index());
    const auto leave = [&](const auto& d) {
#pragma unroll
      for (const auto& n_tile : d) {
        *(Real4*)partials = {n_tile[0], n_tile[1], n_tile[2], n_tile[3]};
        partials += kDsWriters * 128 * 4;
      }
    };
    if constexpr (makes_dk && kNeedsDk)
      leave(dk);
    else
      partials += kBlockN * kDim;
    if constexpr (makes_dv && kNeedsDv) leave(dv);
    return;
  }

  // dK and dV leave through the room of these rows of K and V, which nobody needs any more.
  if constexpr (makes_dv) store_fragments_chunked<kBlockN>(rows_v, warp_key, dv, kept_scale, kept_scale);
  if constexpr (makes_dk) store_fragments_chunked<kBlockN>(rows_k, warp_key, dk, common.scale, common.scale);
  ptx::fence_async_proxy();
  ptx::sync_named(kConsumer + consumer, 128);
  const int first_key = tile.first_key + first;
  const int rows = kIsPacked ? seqlen_k_of(common, batch) - first_key : 64;
  if (rows < 64) {
    const auto store = [&](const Tensor& result, auto columns, u32 tile_rows) {
      Storage* first_row = (Storage*)keys_of(common, result, batch, tile.head_kv) + first_key * result.row_stride;
      store_first_rows<kBlockN, decltype(columns)::value>(first_row, result.row_stride, tile_rows, at_least_zero(rows),
                                                          thread);
    };
    if constexpr (makes_dv && kNeedsDv) store(common.dv, Integer<kHeadDimV>{}, rows_v);
    if constexpr (makes_dk && kNeedsDk) store(common.dk, Integer<kHeadDim>{}, rows_k);
    return;
  }
  if (elected && first_key < common.seqlen_k) {
    const int row = key_start_of(batch) + first_key, entry = entry_of(batch);
    if constexpr (makes_dv && kNeedsDv)
      store_chunks<kBlockN, kDimV>(params.dkv[kNeedsDk], rows_v, row, tile.head_kv, entry);
    if constexpr (makes_dk && kNeedsDk)
      store_chunks<kBlockN, kDim>(params.dkv[0], rows_k, row, tile.head_kv, entry);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }
}

CUFLASH_DEVICE void backward(const BackwardParams& params) {
  const Shared shared;
  Work found = {};
  if constexpr (kIsPacked) {
    found = KeyTile::find(params.common);
    if (!has_keys(params.common, found)) {
      if (kClearsAhead && ptx::thread_index() < kClearThreads && Share(params.common).part == 0)
        clear_ahead(params.common, num_tiles_of(params.common, params.common.seqlen_q, kBlockM), found,
                    ptx::thread_index());
      return;
    }
  }
  if (ptx::thread_index() == 0) {
    shared.kv_full.init(1);
    shared.q_ring.init(kConsumers);
    shared.do_ring.init(kConsumers + (kDqInOrder ? 4 : 0));
    for (int i = 0; i < kDsStages; ++i) {
      shared.ds_ring.full({i}).init(4 * kDsWriters);
      shared.ds_ring.empty({i}).init(4 + (kDkFromShared ? kConsumers : 0));
    }
    for (int i = 0; i < kPStages; ++i) {
      shared.p_ring.full({i}).init(4);
      shared.p_ring.empty({i}).init(4);
    }
    for (int i = 0; i < kTurnStages; ++i) {
      Barrier{shared.turn + 8 * i}.init(1);
      Barrier{shared.added + 8 * i}.init(4);
      Barrier{shared.ended + 8 * i}.init(1);
    }
    ptx::fence_barrier_init();
  }
  ptx::sync_block();
  const u32 warpgroup = ptx::uniform(ptx::thread_index() / 128);
  if (kDqInOrder && warpgroup == kConsumers + 1) {
    ptx::decrease_registers<kServerRegisters>();
    serve(params, shared, found, ptx::thread_index() % 128);
  } else if (warpgroup == kConsumers) {
    ptx::decrease_registers<kDqRegisters>();
    accumulate_dq(params, shared, found, ptx::thread_index() % 128);
    if constexpr (!kSplitsGroup) ptx::arrive_named(kEnd, kConsumerThreads + 128);
  } else if constexpr (!kSplitsRoles) {
    ptx::increase_registers<kConsumerRegisters>();
    consume<true, true>(params, shared, found, warpgroup);
  } else if (warpgroup == 0) {
    ptx::increase_registers<kConsumerRegisters>();
    consume<true, false>(params, shared, found, warpgroup);
  } else {
    ptx::increase_registers<kConsumerRegisters>();
    consume<false, true>(params, shared, found, warpgroup);
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, BackwardParams, kNumThreads, 1, backward)
