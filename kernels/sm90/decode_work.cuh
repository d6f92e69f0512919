// What the kernels for few queries have in common: the producer that loads the keys of a block, and the epilogue.
#pragma once
#include "common/config.cuh"
#include "common/float8.cuh"
#include "common/fragments.cuh"
#include "common/key_splits.cuh"
#include "common/params.cuh"
#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "sm90/head_work.cuh"
#include "sm90/key_tile.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tiles.cuh"

constexpr bool kCombines = CUFLASH_COMBINES;  // the last block of a head combines the results
constexpr int kConsumerWarps = 4;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
static_assert(kNumWarps == kConsumerWarps + 1, "the consumer and the producer");
static_assert(kBlockM == 64, "the most rows of a head");

// A line has 64 columns of Q, and of K and V, or 128 of one byte.
constexpr int kKeyChunk = kLineBytes / sizeof(KeyStorage);
constexpr u32 kBytesK = ceil_div(kDim, kKeyChunk) * kBlockN * kLineBytes;
constexpr u32 kBytesV = ceil_div(kDimV, kKeyChunk) * kBlockN * kLineBytes;

struct DecodeParams {
  Params common;
  TensorMap q, k, v;  // a box of q holds all rows of a group
};
static_assert(sizeof(DecodeParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

// Shared memory: Q, in so many bytes, the rings of K and V, barriers, and more bytes.
template <u32 bytes_q, u32 more_bytes = 0>
struct DecodeShared : QkvShared<kNumStages> {
  static constexpr u32 kRings = kNumStages * (kBytesK + kBytesV), kBarriers = QkvBarriers<kNumStages>::kBytes;
  static_assert(bytes_q + kRings + kBarriers + more_bytes == CUFLASH_SHARED_BYTES,
                "shared memory differs from the plan");
  u32 more;

  CUFLASH_DEVICE DecodeShared() : QkvShared(bytes_q, kNumStages * kBytesK, kNumStages * kBytesV) {
    more = q + bytes_q + kRings + kBarriers;
  }
};

// Loads the tiles of the heads of a block, by one thread.
CUFLASH_DEVICE void produce(const DecodeParams& params, const QkvShared<kNumStages>& shared) {
  Position<kNumStages> at;
  Position<1> q_at;
  for (HeadWalk walk(params.common); walk.more(); walk.advance()) {
    const HeadWork work(params.common, walk);
    for (int n_block = work.keys.stop - 1; n_block >= work.keys.start; --n_block, at.advance()) {
      const Barrier k_full = shared.k_ring.full(at), v_full = shared.v_ring.full(at);
      const KeyTile tile(params.common, work.batch, work.head_kv, n_block, work.key_stop);
      shared.k_ring.empty(at).wait(at.parity ^ 1);
      tile.load<kDim, kKeyChunk>(shared.k + at.stage * kBytesK, params.k, k_full);
      if (n_block == work.keys.stop - 1) {
        const Barrier q_full = shared.q_ring.full(q_at);
        shared.q_ring.empty(q_at).wait(q_at.parity ^ 1);
        constexpr int kQueryChunk = kFloat8Queries ? kKeyChunk : kChunk, kQueryChunks = ceil_div(kDim, kQueryChunk);
        q_full.arrive_expect(kQueryChunks * work.rows * kLineBytes);
#pragma unroll
        for (int c = 0; c < kQueryChunks; ++c)
          ptx::load_tensor(shared.q + c * kBlockM * kLineBytes, params.q, q_full.address, c * kQueryChunk, 0,
                           work.first_head(), work.batch);
        q_at.advance();
      }
      shared.v_ring.empty(at).wait(at.parity ^ 1);
      tile.load<kDimV, kKeyChunk>(shared.v + at.stage * kBytesV, params.v, v_full);
    }
  }
}

// Prepares the counters of arrivals of the heads that this block shares with others.
CUFLASH_DEVICE void prepare_arrivals(const Params& params) {
#pragma unroll 1
  for (HeadWalk walk(params); walk.more(); walk.advance()) {
    const Partials partials(params, walk.shares, walk.head);
    if (partials.count > 1) partials.arrivals(params).prepare();
  }
}

// Combines the results of the heads with which this block is the last to be done. It has stored all of its own results
// before.
CUFLASH_DEVICE void combine_heads(const Params& params) {
#pragma unroll 1
  for (HeadWalk walk(params); walk.more(); walk.advance()) {
    const Partials partials(params, walk.shares, walk.head);
    if (partials.count == 1) continue;
    const bool arrives = ptx::thread_index() == 0;
    if (!ptx::sync_named_any(1, kConsumerThreads, arrives && partials.arrivals(params).arrive())) continue;
#pragma unroll 1
    for (int i = warp_index(); i < partials.rows * kChunks; i += kConsumerWarps)
      partials.combine(params, i / kChunks, i % kChunks);
  }
}

CUFLASH_DEVICE void sync_consumer() { ptx::sync_named(1, kConsumerThreads); }
CUFLASH_DEVICE void release_by_warp(const Barrier& empty) {
  if (lane_index() == 0) empty.arrive();
}

// The epilogue: O / l and lse, to the results or, where blocks share the head, to where they are combined. A lane holds
// two rows, `half` of them each time: `factor(half)` is what O is multiplied by, and `visit_pairs(half, visit)` calls
// visit(column, left, right) for its pairs of columns.
template <class Softmax, int out_tiles, class Factor, class VisitPairs>
CUFLASH_DEVICE void store_rows(const Params& common, const HeadWalk& walk, const HeadWork& work, const LaneRows& rows,
                               const int (&lane_row)[2], Softmax& softmax, float (&o)[1][out_tiles][4], Factor factor,
                               VisitPairs visit_pairs) {
  const Partials partials(common, walk.shares, walk.head);
  const bool is_alone = !kSplitsKeys || partials.count == 1;
  if (kHasSinks && is_alone) {
    softmax.add_sinks(o, [&](int, int half) {
      const int head = work.first_head() + lane_row[half] / common.seqlen_q;
      return lane_row[half] < work.rows ? sink_of(common, head) * kExponentOfE : 0.0f;
    });
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_row[half];
    if (row >= work.rows) continue;
    const float lse = softmax.log_sum_exp(0, half), of_out = factor(half);
    const auto store = [&](auto store_lse, auto store_columns) {
      if (fragment_column() == 0) store_lse(lse);
      visit_pairs(half,
                  [&](int column, float left, float right) { store_columns(column, left * of_out, right * of_out); });
    };
    if (is_alone) {
      const int head = work.first_head() + row / common.seqlen_q;
      Out* g_out = out_of(common, work.batch, head, rows.query[half]);
      store([&](float lse) { *lse_of(common, work.batch, head, rows.query[half]) = lse; },
            [&](int column, float left, float right) { store_pair(g_out, column, left, right); });
    } else {
      const int i = ptx::block_index() - partials.first_block;
      float* g_out = partials.out(i, row);
      store([&](float lse) { ptx::store_for_blocks(partials.lse(i, row), lse); },
            [&](int column, float left, float right) { ptx::store_for_blocks_x2(g_out + column, {left, right}); });
    }
  }
}
