// Forward pass on the tensor cores and the TMA unit of compute capability 9.0: FlashAttention-3, in 16-bit types.
//
//   S = Q K^T        P = exp(S - m)        l = rowsum(P)        O = P V / l        lse = m + log l
//
// One block stays on each multiprocessor and takes one tile of queries after another. Its last warpgroup, the producer,
// asks TMA for tiles; each of the others, the consumers, owns 64 queries of the tile. Three things run at
// once: the copies of later tiles, across the end of a tile of queries too; the product S of one tile of keys and the
// product O of the one before it, behind the softmax in between; and the softmax of one consumer while another's products
// run, for which they may take turns at issuing (kPingPong).
//
//   barrier      one phase is over when            who waits
//   q_full[i]    Q has arrived in stage i          consumers, before S
//   q_empty[i]   every warp has its last S         producer, before the next Q in stage i
//   k_full[i]    K has arrived in stage i          consumers, before S
//   k_empty[i]   every warp has its exponentials   producer, before the next K in stage i
//   v_full[i]    V has arrived in stage i          consumers, before O
//   v_empty[i]   every consumer has its O          producer, before the next V in stage i
//   of packed sequences, whose tiles a scheduler finds (sm90/varlen_walk.cuh):
//   full[i]      a tile of queries is in stage i   consumers and producer, before it
//   empty[i]     all of them have read it          scheduler, before the next in stage i
//   named: one per consumer for its turn at the tensor cores; one per consumer for itself; one for all consumers
//
// A step takes the exponentials of a tile relative to the offset that its rows have had since their first tile, without
// looking for their maxima first: an offset that has become too small shows in a sum that is too large, and only then the
// tile is done again, maxima first (kLazyMaximum). Sums relative to one offset are exact, whatever the offset is.
#include "common/config.cuh"
#include "common/dropout.cuh"
#include "common/mask.cuh"
#include "common/params.cuh"
#include "common/schedule.cuh"
#include "common/score.cuh"
#include "common/softmax.cuh"
#include "ptx/wgmma.cuh"
#include "sm80/mma.cuh"
#include "sm90/forward_roles.cuh"
#include "sm90/key_tile.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tiles.cuh"
#include "sm90/varlen_walk.cuh"

constexpr bool kKeepBefore = CUFLASH_KEEP_BEFORE;      // softmax kept in front of the wait for O
constexpr int kQStages = CUFLASH_Q_STAGES;             // tiles of queries
constexpr int kOutColumns = min_of(kDimV, 128);        // of the output that leave at a time
// Whether dropout waits for the product O of the tile before, so that it has the registers of that product's weights.
constexpr bool kDropsLate = kDimV > 192;
// Whether maxima are only looked for where a sum became too large: not where the registers for a second look are missing.
constexpr bool kLazyMaximum = kDimV <= 128 || (kScaleInExponent && !kHasDropout);
constexpr int kNTiles = kBlockN / 8;

// Shared memory: the ring of Q, a part of the output, the rings of K and V, barriers.
constexpr u32 kBytesQ = chunked_bytes(kBlockM, kDim);
constexpr u32 kBytesOut = chunked_bytes(kBlockM, kOutColumns);
constexpr u32 kBytesK = chunked_bytes(kBlockN, kDim);
constexpr u32 kBytesV = chunked_bytes(kBlockN, kDimV);
constexpr u32 kBytesBarriers = QkvBarriers<kNumStages, kQStages>::kBytes + 16 + TileRing::kBytes;
static_assert(kQStages * kBytesQ + kBytesOut + kNumStages * (kBytesK + kBytesV) + kBytesBarriers == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers of a thread after the producer has given up most of its own: at most what the block started with in all.
// The walk over packed sequences wants more of them, where consumers can spare some.
constexpr bool kWalkWantsMore = kIsPacked && (kConsumers == 4 || kDimV <= 192);
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : !kWalkWantsMore ? 24 : kConsumers == 4 ? 32 : 40;
constexpr int kConsumerRegisters = kConsumers == 4 ? 112 : kConsumers == 3 ? 160 : kWalkWantsMore ? 232 : 240;

// The largest sum of exponentials in a tile that needs no second look: weights fit the element type, sums and products
// float32.
CUFLASH_DEVICE constexpr float max_sum(Float16) { return 16384.0f; }
CUFLASH_DEVICE constexpr float max_sum(BFloat16) { return 4294967296.0f; }
constexpr float kMaxSum = max_sum(Element{});

struct ForwardParams {
  Params common;
  TensorMap q, k, v, out;
};
static_assert(sizeof(ForwardParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

struct Shared : QkvBarriers<kNumStages, kQStages> {
  u32 q, out, k, v;
  u32 scratch;
  TileRing tiles;

  CUFLASH_DEVICE Shared() {
    q = ptx::dynamic_shared();
    out = q + kQStages * kBytesQ;
    k = out + kBytesOut;
    v = k + kNumStages * kBytesK;
    place_barriers(v + kNumStages * kBytesV);
    scratch = v + kNumStages * kBytesV + QkvBarriers::kBytes;
    tiles = {{scratch + 16}};
  }
};

// The walk over tiles of a thread, or of a warp.
template <bool is_warp>
CUFLASH_DEVICE auto walk_of(const Params& params, const Shared& shared) {
  if constexpr (kIsPacked)
    return SequenceWalk<is_warp>(shared.tiles);
  else
    return EntryWalk(params);
}

// The producer: one thread that walks over the tiles as the consumers do, as far ahead as the rings allow.
CUFLASH_DEVICE void produce(const ForwardParams& params, Shared& shared) {
  Position<kQStages> query;
  Position<kNumStages> key;
  for (auto walk = walk_of<false>(params.common, shared); walk.more(); walk.advance(), query.advance()) {
    const QueryTile tile(params.common, walk.work(params.common));
    const int head = tile.head_kv, batch = entry_of(tile.work.batch);
    const auto load_q = [&]() {
      const Barrier q_full = shared.q_ring.full(query);
      shared.q_ring.empty(query).wait(query.parity ^ 1);
      q_full.arrive_expect(kBytesQ);
      load_chunks<kBlockM, kDim>(shared.q + query.stage * kBytesQ, params.q, q_full,
                                 query_start_of(tile.work.batch) + tile.first_row, tile.work.head, batch);
    };
    if (tile.keys.start == tile.keys.stop) load_q();
    for (int n_block = tile.keys.stop - 1; n_block >= tile.keys.start; --n_block, key.advance()) {
      const KeyTile keys(params.common, batch, head, tile.keys.at(n_block), tile.key_stop,
                         key_start_of(tile.work.batch));
      shared.k_ring.empty(key).wait(key.parity ^ 1);
      const Barrier k_full = shared.k_ring.full(key), v_full = shared.v_ring.full(key);
      keys.load<kDim>(shared.k + key.stage * kBytesK, params.k, k_full);
      if (n_block == tile.keys.stop - 1) load_q();
      shared.v_ring.empty(key).wait(key.parity ^ 1);
      keys.load<kDimV>(shared.v + key.stage * kBytesV, params.v, v_full);
    }
  }
}

// A consumer: the warpgroup of 64 queries, `consumer` of kConsumers.
CUFLASH_DEVICE void consume(const ForwardParams& params, Shared& shared, u32 consumer) {
  const Params& common = params.common;
  const u32 thread = ptx::thread_index() % 128;
  const bool elected = thread == 0;
  const u32 s_out = shared.out + consumer * 64 * kLineBytes;
  const int warp_row = thread / 32 * 16;

  const ConsumerPingPong ping_pong(consumer);

  Position<kQStages> query;
  Position<kNumStages> key;
  for (auto walk = walk_of<true>(common, shared); walk.more(); walk.advance(), query.advance()) {
    const QueryTile tile(common, walk.work(common));
    const u32 s_q = shared.q + query.stage * kBytesQ + consumer * 64 * kLineBytes;
    const int head = tile.work.head;
    const Entry batch = tile.work.batch;
    const Score score(common, batch, head, tile.key_stop);
    const Mask mask(common, batch, head, tile.key_stop);
    const Dropout dropout(common, batch, head);
    const float scale_log2 = score.exponent_scale();
    const int lane_row = tile.first_row + consumer * 64 + warp_row + fragment_row();

    OnlineSoftmax<1> softmax;
    float factor[1][2];
    float s[1][kNTiles][4], o[1][kDimV / 8][4];
    Fragment p[kBlockN / 16];
    set_zero(o);

    const auto multiply_s = [&]() {
      shared.k_ring.full(key).wait(key.parity);
      const u64 a = descriptor_of(s_q), b = descriptor_of(shared.k + key.stage * kBytesK);
      ptx::fence_operand(s[0]);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k)
        ptx::wgmma<false, false>(Element{}, s[0], along_k<kBlockM>(a, k), along_k<kBlockN>(b, k), k > 0);
      ptx::wgmma_commit();
    };
    // The same by mma.sync, for one warp alone; not unrolled, since it is rare and needs registers.
    const auto multiply_s_again = [&]() {
      const u32 lane = lane_index(), swizzle = lane % 8 * 16;
      const u32 line_q = s_q + (warp_row + lane % 16) * kLineBytes;
      const u32 line_k = shared.k + key.stage * kBytesK + (lane % 8 + lane / 16 * 8) * kLineBytes;
      set_zero(s);
#pragma unroll 1
      for (int k = 0; k < kDim / 16; ++k)
        multiply<1>(
            s,
            [&](int, int, Fragment& a) {
              ptx::load_matrix_x4(a.word,
                                  line_q + k / 4 * kBlockM * kLineBytes + ((k % 4 * 32 + lane / 16 * 16) ^ swizzle));
            },
            [&](int n, int, Fragment& b) {
              ptx::load_matrix_x4(b.word, line_k + n * 16 * kLineBytes + k / 4 * kBlockN * kLineBytes +
                                         ((k % 4 * 32 + lane / 8 % 2 * 16) ^ swizzle));
            });
    };
    const auto multiply_o = [&](const Position<kNumStages>& at) {
      shared.v_ring.full(at).wait(at.parity);
      const u64 b = descriptor_of_transposed<kBlockN>(shared.v + at.stage * kBytesV);
      ptx::fence_operand(o[0]);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k)
        ptx::wgmma<true>(Element{}, o[0], p[k].word, along_k_transposed(b, k), true);
      ptx::wgmma_commit();
    };
    const auto release = [&](const Barrier& empty) {
      if (elected) empty.arrive();
    };
    const auto release_by_warp = [&](const Barrier& empty) {
      if (lane_index() == 0) empty.arrive();
    };
    const auto to_scores = [&](int n_block, auto masked) {
      if constexpr (!kScaleInExponent || masked.value) {
        const int lane_key = tile.keys.at(n_block) * kBlockN + fragment_column();
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = lane_row + i / 2 * 8, column = lane_key + 8 * n + i % 2;
            float derivative;
            s[0][n][i] = score.of(s[0][n][i], row, column, derivative);
            if (masked.value && !mask.visible(row, column)) s[0][n][i] = -ptx::infinity();
          }
      }
    };
    const auto drop = [&](int n_block) {
      if constexpr (kHasDropout) dropout.drop(s[0], lane_row, tile.keys.at(n_block) * kBlockN + fragment_column());
    };
    // From the product in `s` to exponentials there, sums of rows and weights; true when O must be rescaled by `factor`.
    bool all_started = false;  // every row of the warp has seen a key
    const auto weigh = [&](int n_block, auto masked) {
      float sum[1][2] = {{0.0f, 0.0f}};
      bool grows = false, maximum_first = masked.value || !kLazyMaximum || !all_started;
      to_scores(n_block, masked);
      if (!maximum_first) {
        softmax.exponentiate(s, scale_log2, sum);
        maximum_first = ptx::any_lane(sum[0][0] > kMaxSum || sum[0][1] > kMaxSum);
        if (maximum_first) {
          multiply_s_again();
          to_scores(n_block, masked);
          sum[0][0] = sum[0][1] = 0.0f;
        }
      }
      if (maximum_first) {
        grows = softmax.update(s, factor, scale_log2);
        softmax.exponentiate(s, scale_log2, sum);
        all_started = !ptx::any_lane(fminf(softmax.offset[0][0], softmax.offset[0][1]) == -ptx::infinity());
      }
      release_by_warp(shared.k_ring.empty(key));
      softmax.row_sum[0][0] += sum[0][0];
      softmax.row_sum[0][1] += sum[0][1];
      if constexpr (!kDropsLate) drop(n_block);
      return grows;
    };
    const auto to_weights = [&](int n_block) {
      if constexpr (kDropsLate) drop(n_block);
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k) to_operand(s[0], k, p[k]);
    };

    // Tiles of keys that others of the block need, and these queries do not.
    const auto skip = [&]() {
      ping_pong.wait();
      ping_pong.pass();
      shared.k_ring.full(key).wait(key.parity);
      shared.v_ring.full(key).wait(key.parity);
      sync_consumer(consumer);  // nobody may be left waiting for a phase that is long over
      release_by_warp(shared.k_ring.empty(key));
      release(shared.v_ring.empty(key));
      key.advance();
    };

    shared.q_ring.full(query).wait(query.parity);
    const int row_stop = seqlen_q_of(common, batch) - tile.first_row - consumer * 64;  // of these 64 queries
    if constexpr (kIsPacked) {
      // The rows of other sequences must not decide when sums are rescaled.
      if (row_stop > 0 && row_stop < 64) {
        zero_last_of_64<kBlockM, kDim>(s_q, row_stop, thread);
        ptx::fence_async_proxy();
        sync_consumer(consumer);
      }
    }
    if constexpr (kHidesLastKeys) {
      // Keys past the last one have weight 0, but 0 times what lies there may be NaN.
      const int valid = tile.key_stop - tile.keys.at(tile.keys.stop - 1) * kBlockN;
      if (tile.keys.start < tile.keys.stop && valid < kBlockN) {
        if (consumer == 0) {
          shared.v_ring.full(key).wait(key.parity);
          zero_rows<kBlockN, kDimV>(shared.v + key.stage * kBytesV, valid, thread);
          ptx::fence_async_proxy();
        }
        ptx::sync_named(kAll, 128 * kConsumers);
      }
    }
    const TileRange keys = tile.keys_of(common, consumer);
    for (int n_block = tile.keys.stop - 1; n_block >= keys.stop; --n_block) skip();
    if (keys.start < keys.stop) {
      int n_block = keys.stop - 1;
      ping_pong.wait();
      multiply_s();
      ping_pong.pass();
      ptx::wgmma_wait<0>();
      ptx::fence_operand(s[0]);
      if (n_block >= keys.full_stop || n_block < keys.full_start)
        weigh(n_block, Constant<true>{});
      else
        weigh(n_block, Constant<false>{});
      to_weights(n_block);

      const auto step = [&](auto masked) {
        const Position<kNumStages> before = key;
        key.advance();
        ping_pong.wait();
        multiply_s();
        multiply_o(before);
        ping_pong.pass();
        ptx::wgmma_wait<1>();
        ptx::fence_operand(s[0]);
        const bool grows = weigh(n_block, masked);
        if constexpr (kKeepBefore) ptx::keep_before(softmax.row_sum[0][0] + softmax.row_sum[0][1], shared.scratch);
        ptx::wgmma_wait<0>();
        ptx::fence_operand(o[0]);
        release(shared.v_ring.empty(before));
        if (grows) softmax.rescale(o, factor);
        to_weights(n_block);
      };
      --n_block;
#pragma unroll 1
      for (; n_block >= keys.full_stop; --n_block) step(Constant<true>{});
#pragma unroll 1
      for (; n_block >= keys.full_start; --n_block) step(Constant<false>{});
      if constexpr (kHasLeftBound) {
#pragma unroll 1
        for (; n_block >= keys.start; --n_block) step(Constant<true>{});
      }
      release_by_warp(shared.q_ring.empty(query));
      multiply_o(key);
      ptx::wgmma_wait<0>();
      ptx::fence_operand(o[0]);
      release(shared.v_ring.empty(key));
      key.advance();
    } else {
      // Nobody may be left waiting for a Q that others gave back.
      arrive_as_warp(shared.q_ring.empty(query));
    }
    for (int n_block = keys.start - 1; n_block >= tile.keys.start; --n_block) skip();

    // O / l, rounded, to shared memory and from there by TMA, once it has read what was there before.
    softmax.finish();
    if (kHasSinks && !is_left_over(common, batch))
      softmax.add_sinks(o, [&](int, int) { return sink_of(common, head) * kExponentOfE; });
    const float kept_scale = kept_scale_of(common);
    const float upper = softmax.inverse_sum(0, 0) * kept_scale, lower = softmax.inverse_sum(0, 1) * kept_scale;
    repeat<ceil_div(kDimV, kOutColumns)>([&](auto part) {
      constexpr int kFirst = decltype(part)::value * kOutColumns;
      constexpr int kColumns = min_of(kOutColumns, kDimV - kFirst);
      if (elected) ptx::bulk_wait_read<0>();
      sync_consumer(consumer);
      store_fragments_chunked<kBlockM>(s_out, warp_row, (float(&)[kColumns / 8][4])o[0][kFirst / 8], upper, lower);
      ptx::fence_async_proxy();
      sync_consumer(consumer);
      const int first_row = tile.first_row + consumer * 64;
      if (kIsPacked && row_stop < 64) {
        Storage* g_out = (Storage*)queries_of(common.out, batch, head) + first_row * common.out.row_stride;
        store_first_rows<kBlockM, min_of(kColumns, kHeadDimV - kFirst)>(g_out + kFirst, common.out.row_stride, s_out,
                                                                        at_least_zero(row_stop), thread);
      } else if (elected) {
        const int array_row = query_start_of(batch) + first_row;
        store_chunks<kBlockM, kColumns>(params.out, s_out, array_row, head, entry_of(batch), kFirst);
        ptx::bulk_commit();
      }
    });
    store_lse(common, batch, head, lane_row, softmax);
  }
  ping_pong.finish();
  if (elected) ptx::bulk_wait<0>();
}

CUFLASH_DEVICE void forward(const ForwardParams& params) {
  Shared shared;
  if constexpr (kIsPacked) {
    if (ptx::thread_index() == 0) shared.tiles.init(4 * kConsumers + 1);
  }
  shared.make_barriers(4 * kConsumers, 4 * kConsumers, kConsumers);
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

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, ForwardParams, kNumThreads, 1, forward)
