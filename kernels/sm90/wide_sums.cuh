// The sums of the kernels for wide heads of compute capability 9.0, how they are stored, and the roles of warpgroups.
#pragma once
#include "common/io/operands.cuh"
#include "common/softmax/softmax.cuh"
#include "sm90/wide_ring.cuh"

// Warpgroups 0 and 1, `half` of the columns each: [GEMM 3].
template <Reader half>
struct Summer {
  static constexpr int kChunks = half == kFirstHalf ? kFirstChunks : kSecondChunks;
  const Shared& shared;
  Boxes<half> boxes{shared};
  const u32 thread = ptx::thread_index() % 128;
  u32 count = 0;  // of boxes before this step
  Position<1> message;
  float rescaling[1][2];
  Fragment factor[kSteps];
  float sum[1][8 * kChunks][4];

  CUFLASH_DEVICE void receive(bool has_factor) {
    shared.ready[half].wait(message.parity);
    if (has_factor) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const Bytes16 words = ptx::load_shared_b128(shared.factor + (k * 128 + thread) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) factor[k].word[i] = words.word[i];
      }
    }
    if constexpr (kIsForward) ptx::load_shared_x2(shared.rescaling + thread * 8, rescaling[0]);
    arrive_as_warp(shared.taken);
    message.advance();
  }

  // `valid` rows of the tile exist. If `clears`, anything may lie in the others, so they are cleared: their factors are
  // 0, but 0 * NaN is NaN.
  template <bool clears>
  CUFLASH_DEVICE void multiply(int of_scores, int valid) {
    const auto box_of = [&](int i) {
      if constexpr (kVInK) return Box(count + half * kFirstChunks + i);
      return Box(count + position_of_sum<half>(i, of_scores));
    };
    ptx::fence_operand(sum[0]);
    repeat<kChunks>([&](auto chunk) {
      constexpr int i = decltype(chunk)::value;
      const Box box = box_of(i);
      const u64 other = descriptor_of_transposed<kTile>(box.address(shared));
      boxes.wait(box);
      if (clears && valid < kTile) {
        zero_rows<kTile, kChunk>(box.address(shared), valid, thread);
        ptx::fence_async_proxy();
        ptx::sync_named(1 + half, 128);
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        ptx::wgmma<true>(Element{}, (float (&)[8][4])sum[0][8 * i], factor[k].word, along_k_transposed(other, k), true);
      ptx::wgmma_commit();
      if constexpr (i > 0) {
        ptx::wgmma_wait<1>();
        boxes.release(box_of(i - 1));
      }
    });
    wait_for<0>(sum[0]);
    boxes.release(box_of(kChunks - 1));
    count += kVInK ? kScoreChunks : of_scores + kSumChunks;
  }

  CUFLASH_DEVICE void rescale() {
    if constexpr (kIsForward) OnlineSoftmax<1>::rescale(sum, rescaling);
  }

  template <class Work>
  CUFLASH_DEVICE void take(const WideParams& params, const Work& work, int pass) {
    set_zero(sum);
    auto step = work.first();
    if (!kVInK && step.more()) count += kScoreChunks;
#pragma unroll 1
    while (step.more()) {
      const int valid = work.valid(step);
      work.advance(step);
      receive(true);
      if (kIsForward && ptx::any_lane(rescaling[0][0] != 1.0f || rescaling[0][1] != 1.0f)) rescale();
      multiply<Work::kClears>(step.more() ? kScoreChunks : 0, valid);
    }
    if constexpr (kIsForward) receive(false);
    rescale();
    work.store(params.common, sum[0], thread / 32 * 16 + fragment_row(),
               (first_chunk_of_sums(pass) + half * kFirstChunks) * kChunk);
  }
};

// ---- Stores ---------------------------------------------------------------------------------------------------------

// Transposes words within a quad. Before, each lane has two columns of four neighbouring n-tiles; afterwards it has all
// columns of one n-tile, in order: word i of lane j goes to lane i as its word j.
CUFLASH_DEVICE void gather_in_quad(u32 (&word)[4]) {
  const u32 lane = lane_index();
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 received = ptx::shuffle(lane % 2 ? word[i] : word[i + 1], lane ^ 1);
    (lane % 2 ? word[i] : word[i + 1]) = received;
  }
  const bool upper = lane / 2 % 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 received = ptx::shuffle(upper ? word[i] : word[2 + i], lane ^ 2);
    (upper ? word[i] : word[2 + i]) = received;
  }
}

// Stores a row of sums, `half` of the two that a lane has, times `factor` to columns from `first` on of `row`, which
// has `columns` columns. Nothing is stored if `row` is null. Called by whole warps. This one rounds, and stores 16
// bytes a lane at a time.
template <int columns, int n_tiles>
CUFLASH_DEVICE void store_wide_row(Storage* row, const float (&sum)[n_tiles][4], int half, float factor, int first) {
#pragma unroll
  for (int n = 0; n < n_tiles; n += 4) {
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      word[i] = ptx::pack(Element{}, sum[n + i][2 * half] * factor, sum[n + i][2 * half + 1] * factor);
    gather_in_quad(word);
    const int column = first + (n + lane_index() % 4) * 8;
    if (row && column < columns) *(Bytes16*)(row + column) = {word[0], word[1], word[2], word[3]};
  }
}
// The same without rounding: these sums are to be added to other partial sums.
template <int columns, int n_tiles>
CUFLASH_DEVICE void store_wide_row(float* row, const float (&sum)[n_tiles][4], int half, float factor, int first) {
  if (row) store_row<columns>(row, sum, half, factor, first);
}

// ---- Roles ----------------------------------------------------------------------------------------------------------

// The kernels run this: every role goes through the same work. `SoftmaxRole` is the role of warpgroup 2.
template <class Scheduler, class SoftmaxRole>
CUFLASH_DEVICE void take_all(const WideParams& params) {
  const Shared shared;
  shared.make_barriers();
  const u32 warp = ptx::uniform(ptx::thread_index() / 32);
  const auto each = [&](auto& role) {
#pragma unroll 1
    for (Scheduler scheduler(params.common); scheduler.more(); scheduler.advance()) {
      const auto work = scheduler.work(params.common);
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) role.take(params, work, pass);
    }
  };
  if (warp >= 12) {
    ptx::decrease_registers<kRegisters.producer>();
    if (warp == 12 && ptx::elect_lane()) {
      Producer producer{params, shared};
      each(producer);
    }
  } else if (warp >= 8) {
    ptx::decrease_registers<kRegisters.scores>();
    SoftmaxRole softmax_role{shared};
    each(softmax_role);
  } else {
    const auto sum = [&](auto half) {
      constexpr Reader kHalf = (Reader) decltype(half)::value;
      ptx::increase_registers<kHalf == kFirstHalf ? kRegisters.first_half : kRegisters.second_half>();
      Summer<kHalf> summer{shared};
      each(summer);
    };
    if (warp < 4)
      sum(Integer<kFirstHalf>{});
    else if constexpr (kSecondChunks > 0)
      sum(Integer<kSecondHalf>{});
  }
  // No block leaves while another one may still arrive at its barriers.
  if constexpr (kClusterBlocks > 1) ptx::sync_cluster<kClusterBlocks>();
}
