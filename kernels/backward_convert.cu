// dq = scale * accumulator, from the fragment order of backward_warps.cuh to rows of the element type.
#include "backward_warps.cuh"
#include "copy.cuh"
#include "mma.cuh"
#include "params.cuh"
#include "schedule.cuh"

constexpr int kRow = row_bytes(kDim);
static_assert(tile_bytes(kBlockM, kDim) == CUFLASH_SHARED_BYTES, "shared memory differs from the plan");

CUFLASH_DEVICE void backward_convert(const Params& params) {
  const Work work = schedule_queries(params, ptx::block_index(), params.num_heads, false);
  if (!has_queries(params, work)) return;
  const int m_block = work.block, head = work.head;
  const Entry batch = work.batch;
  const i64 tile = m_tile_of(params, num_tiles_of(params, params.seqlen_q, kBlockM), batch, head, m_block);
  const Real* accumulator = (const Real*)params.dq_accumulator + tile * (kBlockM * kDim);

  Real dq[kDqMTiles][kDqNTiles][4];
#pragma unroll
  for (int m = 0; m < kDqMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kDqNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) dq[m][n][i] = accumulator[accumulator_offset(m * kDqNTiles + n, i)];

  const u32 s_dq = ptx::dynamic_shared();
  const int warp_m = warp_index() / kDqWarpsD, warp_d = warp_index() % kDqWarpsD;
  const Real scale = scale_of(params);
  constexpr Order kOrder = kPlainFragments ? Order::kPlain : Order::kPairedRowsColumns;
  store_fragments<kOrder, kRow, kDqWarpsD>(s_dq, warp_m * 16 * kDqMTiles, warp_d, dq, [&](int, int) { return scale; });
  ptx::sync_block();
  store_tile<kBlockM, kHeadDim>(s_dq, (Storage*)queries_of(params.dq, batch, head), params.dq.row_stride,
                                m_block * kBlockM, seqlen_q_of(params, batch));
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_convert)
