// Decode on compute capability 9.0, in half precision: reads K and V once, as fast as
// memory allows.
//
//   S = Q K^T        P = exp(S - m)        l = rowsum(P)        O = P V / l        lse = m + log l
//
// All queries of the query heads that share a key/value head fit into the 64 rows of one product: row head_in_group *
// seqlen_q + query. The kernel is persistent: as many blocks as the device holds take equal splits of all keys
// (common/schedule/key_splits.cuh). A block that has a head to itself stores its results. Blocks that share a head
// leave O and the sums of their keys in scratch memory; the last of them to finish combines these, unless
// helpers/split_combine.cu does.
//
// One thread, the producer, loads tiles by TMA as far ahead as the rings allow: that many bytes have to be on their way
// to keep memory busy. The other warps are the consumer warpgroup, which takes one tile after another. The rings run on
// from one head to the next. Where two blocks share an SM, the products of one run during the softmax of the
// other.
//
//   barrier      one phase is over when           who waits
//   q_full       Q of a head has arrived          consumer, before its first S
//   q_empty      every warp has its last S        producer, before Q of the next head
//   k_full[i]    K has arrived in stage i         consumer, before S
//   k_empty[i]   every warp has its S             producer, before the next K in stage i
//   v_full[i]    V has arrived in stage i         consumer, before O
//   v_empty[i]   every warp has its O             producer, before the next V in stage i
//   named: one for the consumer
#include "common/io/fragments.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/softmax.cuh"
#include "sm90/decode_work.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr int kNTiles = kBlockN / 8;
using Shared = DecodeShared<chunked_bytes(kBlockM, kDim)>;

// The products of a warp with the tile of keys `at`.
struct DecodeProducts {
  const Shared& shared;
  const HeadWork& work;
  const Position<kNumStages>& at;

  // [GEMM 1] S = Q K^T.
  CUFLASH_DEVICE void multiply_scores(float (&s)[1][kNTiles][4]) const {
    shared.k_ring.full(at).wait(at.parity);
    issue_rows<kDim, kBlockM, kBlockN>(s[0], shared.q, shared.k + at.stage * kBytesK);
    wait_for<0>(s[0]);
    release_by_warp(shared.k_ring.empty(at));
  }
  // [GEMM 3] O += P V.
  CUFLASH_DEVICE void add_values(int n_block, const Fragment (&p)[kBlockN / 16], float (&o)[1][kDimV / 8][4]) const {
    const u32 v = shared.v + at.stage * kBytesV;
    shared.v_ring.full(at).wait(at.parity);
    // Rows of V past the last key are cleared: their weights are 0, but what lies there may be NaN, and 0 times NaN
    // is NaN. Tensor maps may reach over more keys than there are (cuflash/gpu/launch.py says why).
    const int valid = work.key_stop - n_block * kBlockN;
    if (valid < kBlockN) {
      zero_rows<kBlockN, kDimV>(v, valid, ptx::thread_index());
      ptx::fence_async_proxy();
      sync_consumer();
    }
    issue_weighted<kBlockN>(o[0], p, v);
    wait_for<0>(o[0]);
    release_by_warp(shared.v_ring.empty(at));
  }
};

// The tiles of keys that the block has of a head.
CUFLASH_DEVICE void take_head(const Params& common, const Shared& shared, const HeadScheduler& scheduler,
                              const int (&lane_row)[2], Position<kNumStages>& at, Position<1>& q_at) {
  const HeadWork work(common, scheduler);
  const LaneRows rows(common, work, lane_row);
  OnlineSoftmax<1> softmax;
  float s[1][kNTiles][4], o[1][kDimV / 8][4];
  Fragment p[kBlockN / 16];
  set_zero(o);
  const DecodeProducts products{shared, work, at};
  if (work.has_keys()) shared.q_ring.full(q_at).wait(q_at.parity);
#pragma unroll 1
  for (int n_block = work.keys.stop - 1; n_block >= work.keys.start; --n_block, at.advance()) {
    products.multiply_scores(s);
    const int lane_key = n_block * kBlockN + fragment_column();
    const bool masked = n_block < work.keys.full_start || n_block >= work.keys.full_stop;
    rows.score[0].cap(s);
    to_scores<true>(rows, rows, s, [](int, int i) { return i / 2; }, lane_key, masked);
    softmax.update(s, o, rows.score[0].exponent_scale());
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k) to_operand(s[0], k, p[k]);
    products.add_values(n_block, p, o);
  }
  if (work.has_keys()) {
    release_by_warp(shared.q_ring.empty(q_at));
    q_at.advance();
  }
  softmax.finish();
  const auto visit_pairs = [&](int half, auto visit) {
#pragma unroll
    for (int n = 0; n < kDimV / 8; ++n) visit(8 * n + fragment_column(), o[0][n][2 * half], o[0][n][2 * half + 1]);
  };
  store_rows(
      common, scheduler, work, rows, lane_row, softmax, o, [&](int half) { return softmax.inverse_sum(0, half); },
      visit_pairs);
}

// The consumer warpgroup takes one head after another.
CUFLASH_DEVICE void consume(const DecodeParams& params, Shared& shared) {
  const Params& common = params.common;
  const u32 thread = ptx::thread_index();
  const int warp_row = warp_index() * 16;
  // This lane holds slices of these two rows of the product.
  const int lane_row[2] = {warp_row + fragment_row(), warp_row + fragment_row() + 8};

  if (kCombines && thread == 0) prepare_arrivals(common);

  // Rows that stand for no query are never loaded but take part in the product, so they are cleared first.
  zero_rows<kBlockM, kDim>(shared.q, common.num_heads / common.num_heads_kv * common.seqlen_q, thread);
  ptx::fence_async_proxy();
  sync_consumer();

  Position<kNumStages> at;
  Position<1> q_at;
#pragma unroll 1
  for (HeadScheduler scheduler(common); scheduler.more(); scheduler.advance()) {
    take_head(common, shared, scheduler, lane_row, at, q_at);
  }
  if constexpr (kCombines) {
    sync_consumer();
    combine_heads<kConsumerWarps>(common);
  }
}

CUFLASH_DEVICE void decode(const DecodeParams& params) {
  Shared shared;
  shared.make_barriers(kConsumerWarps, kConsumerWarps, kConsumerWarps);
  if (ptx::uniform(warp_index()) < kConsumerWarps)
    consume(params, shared);
  else if (ptx::elect_lane())
    produce(params, shared);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, DecodeParams, kNumThreads, kMinBlocks, decode)
