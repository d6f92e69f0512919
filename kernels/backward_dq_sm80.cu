// dq in a fixed order of additions, for the deterministic backward pass: a block owns kBlockM queries of one head and
// walks over the tiles of keys, recomputing P and dP (FlashAttention-2, Algorithm 2, with the loops exchanged).
//
//   P = exp(Q K' - lse)    dP = dO V'    dS = P * (dP - delta)    dQ = dS K        (X' is X transposed)
#include "backward_warps.cuh"
#include "config.cuh"
#include "copy.cuh"
#include "mask.cuh"
#include "mma.cuh"
#include "params.cuh"
#include "schedule.cuh"
#include "score.cuh"

constexpr int kMTiles = kBlockM / (16 * kNumWarps);
constexpr int kNTiles = kBlockN / 8;
constexpr int kRow = row_elements(kDim);
constexpr int kRowV = row_elements(kDimV);
static_assert(kMTiles * 16 * kNumWarps == kBlockM, "every warp owns the same number of whole fragments");
static_assert(kNumStages == 2, "one tile of keys arrives while another is used");

// Shared memory: Q, dO, then the ring of K and V tiles.
constexpr u32 kBytesQ = tile_bytes(kBlockM, kDim);
constexpr u32 kBytesDo = tile_bytes(kBlockM, kDimV);
constexpr u32 kBytesK = tile_bytes(kBlockN, kDim);
constexpr u32 kBytesV = tile_bytes(kBlockN, kDimV);
static_assert(kBytesQ + kBytesDo + kNumStages * (kBytesK + kBytesV) == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

CUFLASH_DEVICE void backward_dq(const Params& params) {
  const int num_m_blocks = ceil_div(params.seqlen_q, kBlockM);
  const Work work = schedule(params, ptx::block_index(), num_m_blocks, params.num_heads, kHasRightBound);
  const int m_block = work.block, head = work.head, batch = work.batch;
  const int first_row = m_block * kBlockM;
  const int last_row = min_of(first_row + kBlockM, params.seqlen_q) - 1;
  const int head_kv = head / (params.num_heads / params.num_heads_kv);
  const int key_stop = key_stop_of(params, batch);
  const TileRange tiles = key_tiles(params, first_row, last_row, key_stop);

  const u16* g_k = head_of(params.k, batch, head_kv);
  const u16* g_v = head_of(params.v, batch, head_kv);
  const u32 s_q = ptx::dynamic_shared(), s_do = s_q + kBytesQ, s_k = s_do + kBytesDo, s_v = s_k + kNumStages * kBytesK;
  const int warp_row = warp_index() * 16 * kMTiles;

  const auto load_keys = [&](int n_block, int stage) {
    load_tile<kBlockN, kHeadDim>(s_k + stage * kBytesK, g_k, params.k.row_stride, n_block * kBlockN, key_stop);
    load_tile<kBlockN, kHeadDimV>(s_v + stage * kBytesV, g_v, params.v.row_stride, n_block * kBlockN, key_stop);
  };
  load_tile<kBlockM, kHeadDim>(s_q, head_of(params.q, batch, head), params.q.row_stride, first_row, params.seqlen_q);
  load_tile<kBlockM, kHeadDimV>(s_do, head_of(params.dout, batch, head), params.dout.row_stride, first_row,
                                params.seqlen_q);
  if (tiles.start < tiles.stop) load_keys(tiles.stop - 1, 0);
  ptx::copy_async_commit();

  const Score score(params, batch, head, key_stop);
  const Mask mask(params, batch, head, key_stop);
  const float scale_log2 = score.exponent_scale();
  const int lane_row = first_row + warp_row + fragment_row();

  float lse_log2[kMTiles][2], delta[kMTiles][2];
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* stats = stats_of(params, batch, head) + (lane_row + 16 * m + 8 * half) * 2;
      lse_log2[m][half] = stats[0];
      delta[m][half] = stats[1];
    }

  const u32 lane_q = lane_down_first<kRow>(s_q, warp_row);
  const u32 lane_do = lane_down_first<kRowV>(s_do, warp_row);
  float dq[kMTiles][kDim / 8][4];
  set_zero(dq);

  int stage = 0;
  const auto step = [&](int n_block, auto masked) {
    ptx::copy_async_wait<0>();
    ptx::sync_block();
    if (n_block > tiles.start) load_keys(n_block - 1, 1 - stage);
    ptx::copy_async_commit();

    const u32 lane_k = lane_across_first<kRow>(s_k + stage * kBytesK);
    const u32 lane_v = lane_across_first<kRowV>(s_v + stage * kBytesV);
    const u32 operand_k = lane_down_first<kRow>(s_k + stage * kBytesK);
    float s[kMTiles][kNTiles][4], dp[kMTiles][kNTiles][4];
    set_zero(s);
    multiply<kDim / 16>(
        s, [&](int m, int k, u32(&a)[4]) { ptx::load_matrix_x4(a, at<kRow>(lane_q, m, k)); },
        [&](int n, int k, u32(&b)[4]) { ptx::load_matrix_x4(b, at<kRow>(lane_k, n, k)); });
    set_zero(dp);
    multiply<kDimV / 16>(
        dp, [&](int m, int k, u32(&a)[4]) { ptx::load_matrix_x4(a, at<kRowV>(lane_do, m, k)); },
        [&](int n, int k, u32(&b)[4]) { ptx::load_matrix_x4(b, at<kRowV>(lane_v, n, k)); });

    const int lane_key = n_block * kBlockN + fragment_column();
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = lane_row + 16 * m + i / 2 * 8, key = lane_key + 8 * n + i % 2;
          float derivative;
          float x = score.of(s[m][n][i], row, key, derivative);
          if (masked.value && !mask.visible(row, key)) x = -ptx::infinity();
          const float p = ptx::exp2_approx(x * scale_log2 - lse_log2[m][i / 2]);
          s[m][n][i] = p * (dp[m][n][i] - delta[m][i / 2]) * derivative;
        }

    multiply<kBlockN / 16>(
        dq, [&](int m, int k, u32(&a)[4]) { to_operand(s[m], k, a); },
        [&](int n, int k, u32(&b)[4]) { ptx::load_matrix_x4_transposed(b, at<kRow>(operand_k, k, n)); });
    stage = 1 - stage;
  };

  int n_block = tiles.stop - 1;
#pragma unroll 1
  for (; n_block >= tiles.full_stop; --n_block) step(n_block, Constant<true>{});
#pragma unroll 1
  for (; n_block >= tiles.full_start; --n_block) step(n_block, Constant<false>{});
  if constexpr (kHasLeftBound) {
#pragma unroll 1
    for (; n_block >= tiles.start; --n_block) step(n_block, Constant<true>{});
  }

  ptx::copy_async_wait<0>();
  ptx::sync_block();
  const float scale = params.scale;
  store_fragments<kRow, 1>(s_q, warp_row, 0, dq, [&](int, int) { return scale; });
  ptx::sync_block();
  store_tile<kBlockM, kHeadDim>(s_q, (u16*)head_of(params.dq, batch, head), params.dq.row_stride, first_row,
                                params.seqlen_q);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_dq)
