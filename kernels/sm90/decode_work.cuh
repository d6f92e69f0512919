// What the kernels for few queries have in common: the keys of a block, the producer that loads them, and the epilogue.
#pragma once
#include "common/config.cuh"
#include "common/float8.cuh"
#include "common/fragments.cuh"
#include "common/key_splits.cuh"
#include "common/params.cuh"
#include "common/schedule.cuh"
#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "sm90/key_tile.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tiles.cuh"

constexpr bool kSplitsKeys = CUFLASH_SPLITS_KEYS;  // blocks share the keys of a head
constexpr bool kCombines = CUFLASH_COMBINES;       // and the last one of a head combines their results
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

// The heads that a block has keys of, one after another.
struct HeadWalk {
  Shares shares;
  u32 at, stop;  // places among all keys
  u32 head;      // of the batch

  CUFLASH_DEVICE explicit HeadWalk(const Params& params) : shares(params) {
    at = shares.start_of_block(ptx::block_index());
    stop = at + shares.heads;
    head = shares.head_at(at);
  }

  CUFLASH_DEVICE bool more() const { return at < stop; }
  CUFLASH_DEVICE void advance() { at = shares.start_of_head(++head); }
};

// What a block has of one head.
struct HeadWork {
  int head_kv, batch;
  int group;  // query heads of the key/value head
  int rows;   // of the product: those that stand for a query
  int key_stop;
  TileRange keys;  // those of this block; but `full_start` and `full_stop` are those of all blocks together

  CUFLASH_DEVICE HeadWork(const Params& params, const HeadWalk& walk) {
    head_kv = walk.head % params.num_heads_kv;
    batch = walk.head / params.num_heads_kv;
    group = params.num_heads / params.num_heads_kv;
    rows = group * params.seqlen_q;
    key_stop = key_stop_of(params, batch);
    keys = key_tiles(params, batch, 0, params.seqlen_q - 1, key_stop);
    const u32 blocks = walk.shares.blocks, num_tiles = keys.stop - keys.start;
    const u32 from = walk.at - walk.shares.start_of_head(walk.head), to = from + (walk.stop - walk.at);
    // num_tiles * steps / blocks, computed without num_tiles * steps, which may be too large.
    const auto tiles_in = [&](u32 steps) {
      return (int)(num_tiles / blocks * steps + num_tiles % blocks * steps / blocks);
    };
    const int first = keys.start;
    keys.start = first + tiles_in(from);
    if (to < blocks) keys.stop = first + tiles_in(to);
  }

  CUFLASH_DEVICE bool has_keys() const { return keys.start < keys.stop; }
  CUFLASH_DEVICE int first_head() const { return head_kv * group; }
};

// A lane holds parts of two rows of the product, which are row 0 and row 1 here. Each stands for a query of some head,
// or for none: then nothing is looked up for it.
struct LaneRows {
  Score score[2];
  Mask mask[2];
  int query[2];

  CUFLASH_DEVICE LaneRows(const Params& params, const HeadWork& work, const int (&row)[2])
      : score{Score(params, work.batch, head_of(params, work, row[0]), work.key_stop),
              Score(params, work.batch, head_of(params, work, row[1]), work.key_stop)},
        mask{Mask(params, work.batch, head_of(params, work, row[0]), work.key_stop),
             Mask(params, work.batch, head_of(params, work, row[1]), work.key_stop)},
        query{row[0] < work.rows ? row[0] % params.seqlen_q : params.seqlen_q,
              row[1] < work.rows ? row[1] % params.seqlen_q : params.seqlen_q} {}

  CUFLASH_DEVICE static int head_of(const Params& params, const HeadWork& work, int row) {
    return work.first_head() + (row < work.rows ? row / params.seqlen_q : 0);
  }

  // What q is multiplied by.
  CUFLASH_DEVICE void load_scales(const Params& params, const HeadWork& work, const int (&row)[2],
                                  float (&scale)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] = QueryScales(params, work.batch, head_of(params, work, row[i])).of(query[i]);
  }

  // What to_scores asks of a Score and of a Mask.
  CUFLASH_DEVICE float of(float product, int row, int key, float& derivative) const {
    return score[row].of(product, query[row], key, derivative);
  }
  CUFLASH_DEVICE float with_addend(float x, int row, int key) const {
    return score[row].with_addend(x, query[row], key);
  }
  CUFLASH_DEVICE bool visible(int row, int key) const { return mask[row].visible(query[row], key); }
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
