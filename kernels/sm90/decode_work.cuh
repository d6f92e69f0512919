// Shared by the decode kernels for compute capability 9.0: shared memory, and the producer that loads the keys.
#pragma once
#include "common/config.cuh"
#include "common/io/float8.cuh"
#include "common/io/fragments.cuh"
#include "common/io/head_results.cuh"
#include "common/schedule/head_work.cuh"
#include "common/io/params.cuh"
#include "sm90/key_tile.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tiles.cuh"

constexpr int kConsumerWarps = 4;
constexpr int kConsumerThreads = 32 * kConsumerWarps;
static_assert(kNumWarps == kConsumerWarps + 1, "the consumer and the producer");
static_assert(kBlockM == 64, "the most rows of a head");

// A line has 64 columns of Q, K or V in half precision, or 128 columns of fp8.
constexpr int kKeyChunk = kLineBytes / sizeof(KeyStorage);
constexpr u32 kBytesK = ceil_div(kDim, kKeyChunk) * kBlockN * kLineBytes;
constexpr u32 kBytesV = ceil_div(kDimV, kKeyChunk) * kBlockN * kLineBytes;

struct DecodeParams {
  Params common;
  TensorMap q, k, v;  // a box of q holds all rows of a group
};
static_assert(sizeof(DecodeParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

// Shared memory: `bytes_q` of Q, the rings of K and V, the barriers, and `more_bytes` from `more` on.
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

// One thread. Loads the tiles of all heads of a block.
CUFLASH_DEVICE void produce(const DecodeParams& params, const QkvShared<kNumStages>& shared) {
  Position<kNumStages> at;
  Position<1> q_at;
  for (HeadScheduler scheduler(params.common); scheduler.more(); scheduler.advance()) {
    const HeadWork work(params.common, scheduler);
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

CUFLASH_DEVICE void sync_consumer() { ptx::sync_named(1, kConsumerThreads); }
CUFLASH_DEVICE void release_by_warp(const Barrier& empty) {
  if (lane_index() == 0) empty.arrive();
}
