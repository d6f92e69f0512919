// Split-KV decode: where a block stores its results of a head, and how the last block of a head combines all of them.
#pragma once
#include "common/config.cuh"
#include "common/schedule/head_work.cuh"
#include "common/schedule/key_splits.cuh"
#include "common/io/params.cuh"
#include "common/softmax/softmax.cuh"

constexpr bool kCombines = CUFLASH_COMBINES;  // the last block of a head combines the results

// Prepares the counters of arrivals of the heads that this block splits with others.
CUFLASH_DEVICE void prepare_arrivals(const Params& params) {
#pragma unroll 1
  for (HeadScheduler scheduler(params); scheduler.more(); scheduler.advance()) {
    const Partials partials(params, scheduler.splits, scheduler.head);
    if (partials.count > 1) partials.arrivals(params).prepare();
  }
}

// Each chunk makes a warp wait for L2 once, and the warps of one block are few, so chunks are as wide as can be.
constexpr int kCombinedColumns = 128, kChunks = chunks_of_row(kCombinedColumns);

// Combines the results of those heads whose last block this is. `warps` warps of the block do it; they must have met at
// a barrier after they stored all of their own results.
template <int warps>
CUFLASH_DEVICE void combine_heads(const Params& params) {
#pragma unroll 1
  for (HeadScheduler scheduler(params); scheduler.more(); scheduler.advance()) {
    const Partials partials(params, scheduler.splits, scheduler.head);
    if (partials.count == 1) continue;
    const bool arrives = ptx::thread_index() == 0;
    if (!ptx::sync_named_any(1, 32 * warps, arrives && partials.arrivals(params).is_last_arrival())) continue;
#pragma unroll 1
    for (int i = warp_index(); i < partials.rows * kChunks; i += warps)
      partials.combine<kCombinedColumns>(params, i / kChunks, i % kChunks);
  }
}

// The epilogue: stores O / l and lse or, if blocks share the head, partial results to be combined. A lane holds two
// rows, half 0 and half 1: `factor(half)` is the factor of O, and `visit_pairs(half, visit)` calls visit(column, left,
// right) for its pairs of columns. If warps share rows, the first warp (`is_first`) stores what a row has only once.
template <class Softmax, int out_tiles, class Factor, class VisitPairs>
CUFLASH_DEVICE void store_rows(const Params& common, const HeadScheduler& scheduler, const HeadWork& work,
                               const LaneRows& rows, const int (&lane_row)[2], Softmax& softmax,
                               Real (&o)[1][out_tiles][4], Factor factor, VisitPairs visit_pairs,
                               bool is_first = true) {
  const Partials partials(common, scheduler.splits, scheduler.head);
  const bool is_alone = !kSplitsKeys || partials.count == 1;
  if (kHasSinks && is_alone) {
    softmax.add_sinks(o, [&](int, int half) {
      const int head = work.first_head() + lane_row[half] / common.seqlen_q;
      return lane_row[half] < work.rows ? to_row_max(sink_of(common, head)) : 0;
    });
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane_row[half];
    if (row >= work.rows) continue;
    const Real of_out = factor(half);
    const bool stores_sum = is_first && fragment_column() == 0;
    if (is_alone) {
      const int head = work.first_head() + row / common.seqlen_q;
      if (stores_sum) store_lse(lse_of(common, work.batch, head, rows.query[half]), softmax, 0, half);
      Out* g_out = out_of(common, work.batch, head, rows.query[half]);
      visit_pairs(half,
                  [&](int column, Real left, Real right) { store_pair(g_out, column, left * of_out, right * of_out); });
    } else {
      const int i = ptx::block_index() - partials.first_block;
      if (stores_sum) partials.store_sum(i, row, softmax, half);
      Real* g_out = partials.out(i, row);
      visit_pairs(half, [&](int column, Real left, Real right) {
        ptx::store_for_blocks_x2(g_out + column, {left * of_out, right * of_out});
      });
    }
  }
}
