// out and lse from those of the splits: each split's O weighs as much as its share of the sum of exponentials.
//
//   lse = log sum_i exp(lse_i)        O = sum_i exp(lse_i - lse) O_i
//
// A sink joins the sum of exponentials here, once, and has no part in O.
// A block owns kRows rows. The threads of a row stand side by side along the columns, four to each, and beneath each other
// for splits that are summed at once; so the order of the additions is fixed. A warp belongs to one row.
#include "config.cuh"
#include "copy.cuh"
#include "exponential.cuh"
#include "fragments.cuh"
#include "params.cuh"
#include "splits.cuh"

constexpr int kRows = CUFLASH_BLOCK_ROWS;
constexpr int kAtOnce = CUFLASH_SPLITS_AT_ONCE;
constexpr int kLanes = kDimV / 4;                  // threads along the columns
constexpr int kRowThreads = kLanes * kAtOnce;
static_assert(kRows == 1 || kRowThreads % 32 == 0, "whole warps for every row");
static_assert(kRows * kRowThreads <= kNumThreads, "threads for every row");
static_assert((kAtOnce > 1) * kRows * kRowThreads * 16 == CUFLASH_SHARED_BYTES, "shared memory differs from the plan");

// log sum exp over the splits and the sink; -inf where no split saw a key. Every warp computes the same.
CUFLASH_DEVICE float combined_lse(const Partials& partials, int row, int num_splits, float sink) {
  float max = sink, sum = 0.0f;
  for (int split = lane_index(); split < num_splits; split += 32) max = fmaxf(max, *partials.lse(split, row));
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) max = fmaxf(max, ptx::shuffle_xor(max, mask));
  if (max == -ptx::infinity()) max = 0.0f;
  for (int split = lane_index(); split < num_splits; split += 32)
    sum += exponential((*partials.lse(split, row) - max) * kLog2e);
  if (kHasSinks && lane_index() == 0) sum += exponential((sink - max) * kLog2e);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shuffle_xor(sum, mask);
  return sum == 0.0f ? -ptx::infinity() : max + ptx::log2_approx(sum) * kLn2;
}

CUFLASH_DEVICE void combine(const Params& params) {
  const int group = params.num_heads / params.num_heads_kv;
  const int row_of_block = kRows == 1 ? 0 : ptx::thread_index() / kRowThreads;
  const int thread = ptx::thread_index() - row_of_block * kRowThreads;
  const int column = thread % kLanes * 4, first_split = thread / kLanes;
  const i64 index = (i64)ptx::block_index() * kRows + row_of_block;
  const int query = index % params.seqlen_q;
  const int head = index / params.seqlen_q % params.num_heads;
  const int batch = index / params.seqlen_q / params.num_heads;
  const bool owns_row = row_of_block < kRows && batch < params.batch, finishes = owns_row && first_split == 0;
  const int row = head % group * params.seqlen_q + query;
  const Partials partials(params, batch, head / group);

  Float4 sum = {};
  if (owns_row) {
    const float sink = kHasSinks ? sink_of(params, head) : -ptx::infinity();
    const float lse = combined_lse(partials, row, params.key_splits, sink);
    if (thread == 0) *lse_of(params, batch, head, query) = lse;
    if (lse != -ptx::infinity() && first_split < kAtOnce) {
#pragma unroll 8
      for (int split = first_split; split < params.key_splits; split += kAtOnce) {
        const Float4 part = *(const Float4*)(partials.out(split, row) + column);
        const float weight = exponential((*partials.lse(split, row) - lse) * kLog2e);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum.value[i] += weight * part.value[i];
      }
    }
  }

  if constexpr (kAtOnce > 1) {
    const u32 s_sum = ptx::dynamic_shared() + (row_of_block * kRowThreads + thread) * 16;
    if (owns_row && first_split < kAtOnce) {
      ptx::store_shared_x2(s_sum, {sum.value[0], sum.value[1]});
      ptx::store_shared_x2(s_sum + 8, {sum.value[2], sum.value[3]});
    }
    ptx::sync_block();
    if (finishes) {
#pragma unroll 4
      for (int i = 1; i < kAtOnce; ++i) {
        float part[4];
        ptx::load_shared_f32x4(s_sum + i * kLanes * 16, part);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.value[j] += part[j];
      }
    }
  }
  if (!finishes) return;
  Storage* g_out = (Storage*)head_of(params.out, batch, head) + query * params.out.row_stride;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 pair = ptx::pack(Element{}, sum.value[i], sum.value[i + 1]);
    if (column + i < kHeadDimV) g_out[column + i] = (u16)pair;
    if (column + i + 1 < kHeadDimV) g_out[column + i + 1] = (u16)(pair >> 16);
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, combine)
