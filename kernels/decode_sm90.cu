// Forward pass for few queries on compute capability 9.0, in 16-bit types: reads K and V once, as fast as memory allows.
//
//   S = Q K^T        P = exp(S - m)        l = rowsum(P)        O = P V / l        lse = m + log l
//
// All queries of the query heads that share a key/value head fit into the 64 rows of one product: row
// head_in_group * seqlen_q + query. A block owns one key/value head of one batch entry and one split: an equal share of
// the tiles of keys that these queries see. It leaves O and lse of its keys in scratch memory, where combine.cu finds
// them; without kSplitsKeys a block sees all keys, and its O and lse are the results.
//
// One thread, the producer, asks the copy engine for tiles as far ahead as the rings allow: so many bytes have to be on
// their way to keep memory busy. The other warps are the consumer, a warpgroup that takes one tile after another. Where
// two blocks share a multiprocessor, the products of one run behind the softmax of the other.
//
//   barrier      one phase is over when           who waits
//   q_full       Q has arrived                    consumer, before its first S
//   k_full[i]    K has arrived in stage i         consumer, before S
//   k_empty[i]   every warp has its S             producer, before the next K in stage i
//   v_full[i]    V has arrived in stage i         consumer, before O
//   v_empty[i]   every warp has its O             producer, before the next V in stage i
//   named: one for the consumer
#include "config.cuh"
#include "mask.cuh"
#include "mma.cuh"
#include "params.cuh"
#include "pipeline.cuh"
#include "ptx_wgmma.cuh"
#include "schedule.cuh"
#include "score.cuh"
#include "softmax.cuh"
#include "splits.cuh"
#include "tiles_sm90.cuh"

constexpr bool kSplitsKeys = CUFLASH_SPLITS_KEYS;  // blocks share the keys of a head
constexpr int kConsumerWarps = 4;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
constexpr int kNTiles = kBlockN / 8;
static_assert(kNumWarps == kConsumerWarps + 1, "the consumer and the producer");
static_assert(kBlockM == 64, "rows of one product");

// Shared memory: Q, through whose room the output leaves; the rings of K and V; barriers.
constexpr u32 kBytesQ = chunked_bytes(kBlockM, max_of(kDim, kDimV));
constexpr u32 kBytesK = chunked_bytes(kBlockN, kDim);
constexpr u32 kBytesV = chunked_bytes(kBlockN, kDimV);
constexpr u32 kBytesBarriers = 8 * (1 + 4 * kNumStages);
static_assert(kBytesQ + kNumStages * (kBytesK + kBytesV) + kBytesBarriers == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

struct DecodeParams {
  Params common;
  TensorMap q, k, v, out;  // boxes of q and out hold all rows of a group
};
static_assert(sizeof(DecodeParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

struct Shared {
  u32 q, k, v;
  Barrier q_full;
  Ring<kNumStages> k_ring, v_ring;

  CUFLASH_DEVICE Shared() {
    q = ptx::dynamic_shared();
    k = q + kBytesQ;
    v = k + kNumStages * kBytesK;
    const u32 barriers = v + kNumStages * kBytesV;
    q_full = {barriers};
    k_ring = {barriers + 8};
    v_ring = {barriers + 8 + Ring<kNumStages>::kBytes};
  }
};

// What a block owns. Neighbours take neighbouring heads of the same keys: those lie next to each other in memory if any
// two things do that are read at the same time.
struct SplitWork {
  int head_kv, split, batch;
  int group;  // query heads of the key/value head
  int rows;   // of the product that stand for a query
  int key_stop;
  TileRange keys;  // of this split; `full_start` and `full_stop` are those of all keys

  CUFLASH_DEVICE explicit SplitWork(const Params& params) {
    const u32 index = ptx::block_index();
    head_kv = index % params.num_heads_kv;
    split = index / params.num_heads_kv % params.key_splits;
    batch = index / params.num_heads_kv / params.key_splits;
    group = params.num_heads / params.num_heads_kv;
    rows = group * params.seqlen_q;
    key_stop = key_stop_of(params, batch);
    keys = key_tiles(params, 0, params.seqlen_q - 1, key_stop);
    const int first = keys.start;
    const i64 num_tiles = keys.stop - first;
    keys.start = first + (int)(num_tiles * split / params.key_splits);
    keys.stop = first + (int)(num_tiles * (split + 1) / params.key_splits);
  }
};

CUFLASH_DEVICE void produce(const DecodeParams& params, Shared& shared, const SplitWork& work) {
  if (work.keys.start == work.keys.stop) return;
  shared.q_full.arrive_expect(chunked_bytes(work.rows, kDim));
  load_chunks<kBlockM, kDim>(shared.q, params.q, shared.q_full, 0, work.head_kv * work.group, work.batch);
  Position<kNumStages> at;
  for (int n_block = work.keys.stop - 1; n_block >= work.keys.start; --n_block, at.advance()) {
    const Barrier k_full = shared.k_ring.full(at), v_full = shared.v_ring.full(at);
    shared.k_ring.empty(at).wait(at.parity ^ 1);
    k_full.arrive_expect(kBytesK);
    load_chunks<kBlockN, kDim>(shared.k + at.stage * kBytesK, params.k, k_full, n_block * kBlockN, work.head_kv,
                               work.batch);
    shared.v_ring.empty(at).wait(at.parity ^ 1);
    v_full.arrive_expect(kBytesV);
    load_chunks<kBlockN, kDimV>(shared.v + at.stage * kBytesV, params.v, v_full, n_block * kBlockN, work.head_kv,
                                work.batch);
  }
}

CUFLASH_DEVICE void consume(const DecodeParams& params, Shared& shared, const SplitWork& work) {
  const Params& common = params.common;
  const u32 thread = ptx::thread_index();
  const int warp_row = warp_index() * 16;
  const auto sync_consumer = [&]() { ptx::sync_named(1, kConsumerThreads); };
  const auto release_by_warp = [&](const Barrier& empty) {
    if (lane_index() == 0) empty.arrive();
  };

  const Score score(common, work.batch, work.head_kv * work.group, work.key_stop);
  const Mask mask(common, work.batch, work.head_kv * work.group, work.key_stop);
  const float scale_log2 = score.exponent_scale();
  // The two rows of the product that this lane has a part of, and the queries that they stand for.
  const int row[2] = {warp_row + fragment_row(), warp_row + fragment_row() + 8};
  const int query[2] = {row[0] % common.seqlen_q, row[1] % common.seqlen_q};

  OnlineSoftmax<1> softmax;
  float s[1][kNTiles][4], o[1][kDimV / 8][4];
  Fragment p[kBlockN / 16];
  set_zero(o);

  Position<kNumStages> at;
  const auto multiply_s = [&]() {
    shared.k_ring.full(at).wait(at.parity);
    const u64 a = descriptor_of(shared.q), b = descriptor_of(shared.k + at.stage * kBytesK);
    ptx::renew_registers(s[0]);
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      ptx::multiply_async<false, false>(Element{}, s[0], along_k<kBlockM>(a, k), along_k<kBlockN>(b, k), k > 0);
    ptx::commit_products();
    ptx::wait_products<0>();
    ptx::renew_registers(s[0]);
    release_by_warp(shared.k_ring.empty(at));
  };
  const auto to_scores = [&](int n_block) {
    const bool masked = n_block < work.keys.full_start || n_block >= work.keys.full_stop;
    if (kScaleInExponent && !masked) return;
    const int lane_key = n_block * kBlockN + fragment_column();
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = lane_key + 8 * n + i % 2;
        float derivative;
        s[0][n][i] = score.of(s[0][n][i], query[i / 2], key, derivative);
        if (masked && !mask.visible(query[i / 2], key)) s[0][n][i] = -ptx::infinity();
      }
  };
  const auto multiply_o = [&](int n_block) {
    const u32 v = shared.v + at.stage * kBytesV;
    shared.v_ring.full(at).wait(at.parity);
    if constexpr (kKvLengthsBytes != 0) {
      // Keys past kv_lengths have weight 0, but 0 times what lies there may be NaN.
      const int valid = work.key_stop - n_block * kBlockN;
      if (valid < kBlockN) {
        zero_rows<kBlockN, kDimV>(v, valid, thread);
        ptx::fence_async_proxy();
        sync_consumer();
      }
    }
    const u64 b = descriptor_of_transposed<kBlockN>(v);
    ptx::renew_registers(o[0]);
    ptx::fence_products();
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k)
      ptx::multiply_async<true>(Element{}, o[0], p[k].word, along_k_transposed(b, k), true);
    ptx::commit_products();
    ptx::wait_products<0>();
    ptx::renew_registers(o[0]);
    release_by_warp(shared.v_ring.empty(at));
  };

  if (work.keys.start < work.keys.stop) {
    // Rows that stand for no query are never loaded, but multiplied like the others.
    zero_rows<kBlockM, kDim>(shared.q, work.rows, thread);
    ptx::fence_async_proxy();
    sync_consumer();
    shared.q_full.wait(0);
  }
#pragma unroll 1
  for (int n_block = work.keys.stop - 1; n_block >= work.keys.start; --n_block, at.advance()) {
    multiply_s();
    to_scores(n_block);
    softmax.update(s, o, scale_log2);
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k) to_operand(s[0], k, p[k]);
    multiply_o(n_block);
  }
  softmax.finish();
  if constexpr (kHasSinks && !kSplitsKeys) {
    softmax.add_sinks(o, [&](int, int half) {
      const int head = work.head_kv * work.group + row[half] / common.seqlen_q;
      return row[half] < work.rows ? sink_of(common, head) * kExponentOfE : 0.0f;
    });
  }

  const Partials partials(common, work.batch, work.head_kv);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row[half] >= work.rows) continue;
    const float lse = softmax.log_sum_exp(0, half);
    if constexpr (kSplitsKeys) {
      const float factor = softmax.inverse_sum(0, half);
      float* g_out = partials.out(work.split, row[half]) + fragment_column();
#pragma unroll
      for (int n = 0; n < kDimV / 8; ++n)
        *(Float2*)(g_out + 8 * n) = {o[0][n][2 * half] * factor, o[0][n][2 * half + 1] * factor};
      if (fragment_column() == 0) *partials.lse(work.split, row[half]) = lse;
    } else if (fragment_column() == 0) {
      *lse_of(common, work.batch, work.head_kv * work.group + row[half] / common.seqlen_q, query[half]) = lse;
    }
  }
  if constexpr (!kSplitsKeys) {
    sync_consumer();  // Q is read no more
    store_fragments_chunked<kBlockM>(shared.q, warp_row, o[0], softmax.inverse_sum(0, 0), softmax.inverse_sum(0, 1));
    ptx::fence_async_proxy();
    sync_consumer();
    if (thread == 0) {
      store_chunks<kBlockM, kDimV>(params.out, shared.q, 0, work.head_kv * work.group, work.batch);
      ptx::bulk_commit();
      ptx::bulk_wait<0>();
    }
  }
}

CUFLASH_DEVICE void decode(const DecodeParams& params) {
  Shared shared;
  if (ptx::thread_index() == 0) {
    shared.q_full.init(1);
    shared.k_ring.init(kConsumerWarps);
    shared.v_ring.init(kConsumerWarps);
    ptx::fence_barrier_init();
  }
  ptx::sync_block();
  const SplitWork work(params.common);
  if (ptx::uniform(warp_index()) < kConsumerWarps)
    consume(params, shared, work);
  else if (ptx::elect_lane())
    produce(params, shared, work);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, DecodeParams, kNumThreads, kMinBlocks, decode)
