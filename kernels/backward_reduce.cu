// dk and dv = sums of the parts that blocks left who share a tile of keys, in the order of the parts.
#include "backward_warps.cuh"
#include "copy.cuh"
#include "mma.cuh"
#include "params.cuh"
#include "schedule.cuh"

constexpr int kRow = row_bytes(kDim);
constexpr int kRowV = row_bytes(kDimV);
constexpr u32 kBytesDk = tile_bytes(kBlockN, kDim);
static_assert(kBytesDk + tile_bytes(kBlockN, kDimV) == CUFLASH_SHARED_BYTES, "shared memory differs from the plan");

CUFLASH_DEVICE void backward_reduce(const Params& params) {
  const int num_n_blocks = num_tiles_of(params, params.seqlen_k, kBlockN);
  const Work work = find_keys(params, ptx::block_index() + (kSplitsTail ? params.whole_tiles : 0), params.num_heads_kv);
  if (!has_keys(params, work)) return;
  const int n_block = work.block, head_kv = work.head;
  const Entry batch = work.batch;

  const int parts = kSplitsTail ? params.tail_splits : params.group_splits;
  const i64 first_part = kSplitsTail ? (i64)ptx::block_index() * parts
                                     : first_part_of(params, num_n_blocks, batch, head_kv, n_block);

  Real dk[kKeyTiles][kColumnTiles][4], dv[kKeyTiles][kColumnTilesV][4];
  set_zero(dk);
  set_zero(dv);
#pragma unroll 1
  for (int part = 0; part < parts; ++part) {
    const Real* partials = partials_at(params, first_part + part, ptx::thread_index());
    const auto add = [&](auto& d) {
#pragma unroll
      for (auto& row : d)
#pragma unroll
        for (auto& piece : row) {
          const Real4 part = *(const Real4*)partials;
#pragma unroll
          for (int i = 0; i < 4; ++i) piece[i] += part.value[i];
          partials += kNumThreads * 4;
        }
    };
    // Parts that are not wanted were not left.
    if constexpr (kNeedsDk)
      add(dk);
    else
      partials += kBlockN * kDim;
    if constexpr (kNeedsDv) add(dv);
  }

  const u32 s_dk = ptx::dynamic_shared(), s_dv = s_dk + kBytesDk;
  const int warp_key = warp_index() / kWarpsD * 16 * kKeyTiles, warp_d = warp_index() % kWarpsD;
  const Real scale = scale_of(params), kept_scale = kept_scale_of(params);
  constexpr Order kOrder = kPlainFragments ? Order::kPlain : Order::kPairedColumns;
  if constexpr (kNeedsDk)
    store_fragments<kOrder, kRow, kWarpsD>(s_dk, warp_key, warp_d, dk, [&](int, int) { return scale; });
  if constexpr (kNeedsDv)
    store_fragments<kOrder, kRowV, kWarpsD>(s_dv, warp_key, warp_d, dv, [&](int, int) { return kept_scale; });
  ptx::sync_block();
  const int first_key = n_block * kBlockN, seqlen_k = seqlen_k_of(params, batch);
  if constexpr (kNeedsDk)
    store_tile<kBlockN, kHeadDim>(s_dk, (Storage*)keys_of(params, params.dk, batch, head_kv), params.dk.row_stride,
                                  first_key, seqlen_k);
  if constexpr (kNeedsDv)
    store_tile<kBlockN, kHeadDimV>(s_dv, (Storage*)keys_of(params, params.dv, batch, head_kv), params.dv.row_stride,
                                   first_key, seqlen_k);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_reduce)
