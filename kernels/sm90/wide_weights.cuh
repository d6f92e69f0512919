// Warpgroup 2 in the forward kernels for wide heads of compute capability 9.0 makes scores, and weights from them.
#pragma once
#include "common/score/scores.cuh"
#include "common/softmax/softmax.cuh"
#include "sm90/wide_ring.cuh"

struct SoftmaxRole : ScoreProducts {
  const u32 thread = ptx::thread_index() % 128;
  Position<1> own, message;
  OnlineSoftmax<1> softmax;

  CUFLASH_DEVICE explicit SoftmaxRole(const Shared& shared_) : ScoreProducts{shared_} {}

  // [2] P = exp(S - m), for the warpgroups that multiply it by V, and the factors by which they rescale O before.
  template <class Rows>
  CUFLASH_DEVICE void softmax_step(const Rows& rows, int n_tile, bool masked) {
    float rescaling[1][2] = {{1.0f, 1.0f}};
    const int lane_key = n_tile * kBlockN + fragment_column();
    rows.to_scores(s, lane_key, masked);
    const bool raised = softmax.update(s, rescaling, rows.exponent_scale());
    softmax.exponentiate(s, rows.exponent_scale(), softmax.row_sum, softmax.has_unfused(raised));
    rows.drop(s[0], lane_key);
    shared.taken.wait(message.parity ^ 1);
    store_factor(shared, thread, s[0]);
    hand_over(rescaling[0]);
  }
  CUFLASH_DEVICE void hand_over(const float (&rescaling)[2]) {
    ptx::store_shared_x2(shared.rescaling + thread * 8, {rescaling[0], rescaling[1]});
    arrive_as_warp(shared.ready[kFirstHalf]);
    message.advance();
  }
  CUFLASH_DEVICE void let_second_follow() const { arrive_as_warp(shared.ready[kSecondHalf]); }

  // The softmax over all keys of a piece of work. At the end it hands over the last factors of O.
  template <class Work>
  CUFLASH_DEVICE void take(const WideParams& params, const Work& work, int pass) {
    const auto rows = work.rows_of_lane(params.common, thread / 32 * 16 + fragment_row());
    softmax = OnlineSoftmax<1>();
    auto step = work.first();
    const bool has_keys = step.more();
    if (has_keys) {
      shared.own_ring.full(own).wait(own.parity);
      work.clear_rows(shared.own, thread);
    }
#pragma unroll 1
    for (; step.more(); work.advance(step)) {
      multiply(work.is_first(step));
      if (!work.is_first(step)) let_second_follow();
      if (step.is_last()) arrive_as_warp(shared.own_ring.empty(own));
      softmax_step(rows, work.tile_at(step.n_block), work.is_masked(step.n_block));
    }
    if (has_keys) {
      let_second_follow();
      own.advance();
      count += kChunksOfSums;
    }
    float at_end[2];
    rows.finish(softmax, at_end, pass);
    shared.taken.wait(message.parity ^ 1);
    hand_over(at_end);
    let_second_follow();
  }
};
