// lse of long heads without values, on every device: the forward pass of FlashAttention-2 with only its first product,
// whose operands arrive by chunks of columns.
//
//   S = Q K^T        l = rowsum(exp(S - m))        lse = m + log l
//
// A block owns kBlockM queries of one head and iterates over the tiles of keys from the last to the first, and for each
// over the chunks. A warp owns 16 kMTiles of its rows.
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/softmax.cuh"
#include "sm80/chunks.cuh"
#include "sm80/merge_warps.cuh"

constexpr int kWarpsN = CUFLASH_CHUNK_WARPS;  // that share rows, each with some of the keys of a tile
constexpr int kMTiles = kBlockM * kWarpsN / (16 * kNumWarps);
constexpr int kNTiles = kBlockN / (8 * kWarpsN);
static_assert(kMTiles * 16 * kNumWarps == kBlockM * kWarpsN, "every warp owns the same number of whole fragments");

// Shared memory: the ring, whose stages have a chunk of Q and one of K. In the end, row maxima and sums of each warp.
constexpr u32 kBytesQ = tile_bytes(kBlockM, kChunk), kBytesStage = kBytesQ + tile_bytes(kBlockN, kChunk);
static_assert(kNumStages * kBytesStage == CUFLASH_SHARED_BYTES, "shared memory differs from the plan");

static_assert(kBytesRowParts<kWarpsN> <= CUFLASH_SHARED_BYTES, "they take the place of the ring");

CUFLASH_DEVICE void forward_chunked(const Params& params) {
  if (!is_chosen(params)) return;
  const Work work = schedule_queries(params, ptx::block_index(), params.num_heads, kHasRightBound);
  if (!has_queries(params, work)) return;
  const int head = work.head;
  const Entry batch = work.batch;
  const int seqlen_q = seqlen_q_of(params, batch);
  const QueryTile tile(params, work);
  const KeyTiles& tiles = tile.keys;
  const Storage* g_q = queries_of(params.q, batch, head);
  const auto g_k = keys_of(params, params.k, batch, tile.head_kv);
  const u32 s_ring = ptx::dynamic_shared();

  const auto load = [&](int step, int stage) {
    const u32 s_q = s_ring + stage * kBytesStage;
    const int chunk = step % kChunks, n_block = tiles.at(tiles.stop - 1 - step / kChunks);
    load_chunk<kBlockM>(s_q, g_q, params.q.row_stride, tile.first_row, seqlen_q, chunk);
    load_chunk<kBlockN>(s_q + kBytesQ, g_k, params.k.row_stride, n_block * kBlockN, tile.key_stop, chunk);
  };
  ChunkRing ring(load, (tiles.stop - tiles.start) * kChunks);

  const int warp_row = warp_index() / kWarpsN * 16 * kMTiles, warp_n = warp_index() % kWarpsN;
  const int lane_row = tile.first_row + warp_row + fragment_row();
  const Score score(params, batch, head, tile.key_stop);
  const Mask mask(params, batch, head, tile.key_stop);
  const Real exponent_scale = score.exponent_scale();
  const RowMajorA<kRow> operand_q(s_ring, warp_row);
  const ColumnMajorB<kRow, 1> operand_k(s_ring + kBytesQ + warp_n * kNTiles * 8 * kRow);
  OnlineSoftmax<kMTiles> softmax;
  Real no_output[kMTiles][1][4];
  set_zero(no_output);

#pragma unroll 1
  for (int n_block = tiles.stop - 1; n_block >= tiles.start; --n_block) {
    Real s[kMTiles][kNTiles][4];
    multiply_all_chunks(ring, kBytesStage, s, operand_q, operand_k);
    to_scores(
        score, mask, s, [&](int m, int i) { return lane_row + 16 * m + i / 2 * 8; },
        tiles.at(n_block) * kBlockN + warp_n * kNTiles * 8 + fragment_column(),
        n_block >= tiles.full_stop || n_block < tiles.full_start);
    softmax.update(s, no_output, exponent_scale);
  }
  ring.finish();
  finish_lse<kWarpsN>(params, work, softmax, s_ring, warp_row, warp_n, seqlen_q);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, forward_chunked)
