// out and lse from those of the blocks that share a head: each one's O weighs as much as its share of the sum of
// exponentials.
//
//   lse = log sum_i exp(lse_i)        O = sum_i exp(lse_i - lse) O_i
//
// A sink joins the sum of exponentials here, once, and has no part in O. A block owns kRows rows. The threads of a row
// stand side by side along the columns, four to each, and beneath each other for results that are summed at once; so
// the order of the additions is fixed. A warp belongs to one row.
#include "common/config.cuh"
#include "common/fragments.cuh"
#include "common/key_splits.cuh"
#include "common/params.cuh"

constexpr int kRows = CUFLASH_BLOCK_ROWS;
constexpr int kAtOnce = CUFLASH_SPLITS_AT_ONCE;
constexpr int kLanes = kDimV / 4;                  // threads along the columns
constexpr int kRowThreads = kLanes * kAtOnce;
static_assert(kRows == 1 || kRowThreads % 32 == 0, "whole warps for every row");
static_assert(kRows * kRowThreads <= kNumThreads, "threads for every row");
static_assert((kAtOnce > 1) * kRows * kRowThreads * 16 == CUFLASH_SHARED_BYTES, "shared memory differs from the plan");

CUFLASH_DEVICE void combine(const Params& params) {
  const int group = params.num_heads / params.num_heads_kv;
  const int row_of_block = kRows == 1 ? 0 : ptx::thread_index() / kRowThreads;
  const int thread = ptx::thread_index() - row_of_block * kRowThreads;
  const int column = thread % kLanes * 4, first_part = thread / kLanes;
  const i64 index = (i64)ptx::block_index() * kRows + row_of_block;
  const int query = index % params.seqlen_q;
  const int head = index / params.seqlen_q % params.num_heads;
  const int batch = index / params.seqlen_q / params.num_heads;
  const int row = head % group * params.seqlen_q + query;
  const Partials partials(params, Shares(params), batch * params.num_heads_kv + head / group);
  // A block that has a head to itself has stored its results.
  const bool owns_row = row_of_block < kRows && batch < params.batch && partials.count > 1;
  const bool finishes = owns_row && first_part == 0;

  Float4 sum = {};
  if (owns_row) {
    const float lse = partials.combined_lse(row, kHasSinks ? sink_of(params, head) : -ptx::infinity());
    if (thread == 0) *lse_of(params, batch, head, query) = lse;
    if (lse != -ptx::infinity() && first_part < kAtOnce) {
#pragma unroll 8
      for (int i = first_part; i < partials.count; i += kAtOnce) {
        const Float4 part = *(const Float4*)(partials.out(i, row) + column);
        const float weight = partials.weight(i, row, lse);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.value[j] += weight * part.value[j];
      }
    }
  }

  if constexpr (kAtOnce > 1) {
    const u32 s_sum = ptx::dynamic_shared() + (row_of_block * kRowThreads + thread) * 16;
    if (owns_row && first_part < kAtOnce) {
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
  Storage* g_out = out_of(params, batch, head, query);
#pragma unroll
  for (int i = 0; i < 4; i += 2) store_pair(g_out, column + i, sum.value[i], sum.value[i + 1]);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, combine)
