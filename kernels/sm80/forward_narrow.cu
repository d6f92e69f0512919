// lse of narrow heads without values, such as points in space, on every device. Tensor cores multiply 16 columns at
// once; here lanes multiply those that there are, by fused multiply-adds, whose sums are as accurate as float32 can be.
//
//   S = Q K^T        l = rowsum(exp(S - m))        lse = m + log l
//
// A block owns kBlockM queries of one head and iterates over the tiles of keys from the last to the first. Its warps
// share all rows; each has some of the keys of a tile. Scores lie in the fragments of mma.sync, so that masks and
// softmax are those of other kernels. Queries stay in registers. K is transposed in shared memory: a load brings a
// column of two neighbouring keys. A bias that differs from key to key only is one more column of K.
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/softmax.cuh"
#include "sm80/copy.cuh"
#include "sm80/merge_warps.cuh"

constexpr bool kBiasOfKeys = CUFLASH_BIAS_OF_KEYS;
constexpr int kMTiles = kBlockM / 16;
constexpr int kWarpKeys = kBlockN / kNumWarps;  // keys of a tile that a warp has
constexpr int kNTiles = kWarpKeys / 8;
constexpr int kColumns = kHeadDim + kBiasOfKeys;
constexpr u32 kBytesColumn = kBlockN * sizeof(Real);
static_assert(sizeof(Storage) == sizeof(Real), "elements are multiplied as they are stored");
static_assert(!kHasValues, "there is no product with the weights");
static_assert(kNTiles * 8 * kNumWarps == kBlockN, "every warp has the same number of whole n-tiles");
static_assert(!kBiasOfKeys || kBiasBytes == sizeof(Real), "it is copied as it is stored");

// Shared memory: the ring of K tiles. In the end, row maxima and sums of each warp.
constexpr u32 kBytesStage = kColumns * kBytesColumn;
static_assert(max_of(2 * kBytesStage, kBytesRowParts<kNumWarps>) == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");
static_assert(kNumStages == 2, "one tile arrives while another is used");

// Loads a tile of keys without waiting, a thread each row. Keys at and past `key_stop` are never read and become zeros.
template <class Head>
CUFLASH_DEVICE void load_keys(u32 s_k, const Head& head, i64 row_stride, const Score& score, int first_key,
                              int key_stop) {
#pragma unroll
  for (int first = 0; first < kBlockN; first += kNumThreads) {
    const int row = first + ptx::thread_index(), key = first_key + row;
    if (kBlockN % kNumThreads != 0 && row >= kBlockN) break;
    const u32 bytes = key < key_stop ? sizeof(Real) : 0, s_row = s_k + row * (u32)sizeof(Real);
    // A copy of no bytes reads nothing, but a block table has no entry past the last key.
    const Storage* source = row_of(head, row_stride, kPageSize == 0 || bytes > 0 ? key : first_key);
    repeat<kHeadDim>([&](auto column) {
      constexpr int c = decltype(column)::value;
      ptx::copy_async<sizeof(Real), c * sizeof(Real)>(s_row + c * kBytesColumn, source, bytes);
    });
    if constexpr (kBiasOfKeys)
      ptx::copy_async<sizeof(Real), 0>(s_row + kHeadDim * kBytesColumn,
                                       (const Real*)score.bias + key * score.bias_key_stride, bytes);
  }
}

// Queries of this lane's rows.
struct Queries {
  Real q[kMTiles][2][kHeadDim];

  CUFLASH_DEVICE Queries(const Storage* head, i64 row_stride, int lane_row, int row_stop) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane_row + 16 * m + 8 * half;
#pragma unroll
        for (int column = 0; column < kHeadDim; ++column)
          q[m][half][column] = row < row_stop ? head[row * row_stride + column] : (Real)0;
      }
  }

  // The products with two neighbouring keys, which lie at `s_keys`, in n-tile n.
  CUFLASH_DEVICE void multiply(Real (&s)[kMTiles][kNTiles][4], int n, u32 s_keys) const {
#pragma unroll
    for (int column = 0; column < kHeadDim; ++column) {
      Real k[2];
      ptx::load_shared_x2(s_keys + column * kBytesColumn, k);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Real factor = q[m][i / 2][column];
          s[m][n][i] = column == 0 ? ptx::multiply(factor, k[i % 2]) : ptx::fused(factor, k[i % 2], s[m][n][i]);
        }
    }
  }
};

// Turns the products of n-tile n into scores, with a bias of two neighbouring keys.
template <class RowOf, class Masked>
CUFLASH_DEVICE void add_bias(const Score& score, const Mask& mask, Real (&s)[kMTiles][kNTiles][4], int n,
                             const Real (&bias)[2], RowOf row_of, int lane_key, Masked masked) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_of(m, i), key = lane_key + 8 * n + i % 2;
      Real& x = s[m][n][i];
      x = Score::with_terms<true>(score.capped(x), score.factor, score.slope, kHasAlibi ? score.distance(row, key) : 0,
                                  bias[i % 2]);
      if (masked && !mask.visible(row, key)) x = -ptx::infinity();
    }
}

// S of this lane's keys of a tile, which lie at `s_keys`.
template <class RowOf, class Masked>
CUFLASH_DEVICE void make_scores(const Score& score, const Mask& mask, const Queries& queries, u32 s_keys, int lane_key,
                                RowOf row_of, Masked masked, Real (&s)[kMTiles][kNTiles][4]) {
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
    const u32 s_pair = s_keys + 8 * n * (u32)sizeof(Real);
    queries.multiply(s, n, s_pair);
    if constexpr (kBiasOfKeys) {
      Real bias[2];
      ptx::load_shared_x2(s_pair + kHeadDim * kBytesColumn, bias);
      add_bias(score, mask, s, n, bias, row_of, lane_key, masked);
    }
  }
  if constexpr (!kBiasOfKeys) to_scores(score, mask, s, row_of, lane_key, masked);
}

CUFLASH_DEVICE void forward_narrow(const Params& params) {
  if (!is_chosen(params)) return;
  const Work work = schedule_queries(params, ptx::block_index(), params.num_heads, kHasRightBound);
  if (!has_queries(params, work)) return;
  const int head = work.head;
  const Entry batch = work.batch;
  const int seqlen_q = seqlen_q_of(params, batch);
  const QueryTile tile(params, work);
  const KeyTiles& tiles = tile.keys;
  const auto g_k = keys_of(params, params.k, batch, tile.head_kv);
  const u32 s_ring = ptx::dynamic_shared();
  const Score score(params, batch, head, tile.key_stop);
  const Mask mask(params, batch, head, tile.key_stop);
  const Real exponent_scale = score.exponent_scale();

  const auto load = [&](int n_block, int stage) {
    load_keys(s_ring + stage * kBytesStage, g_k, params.k.row_stride, score, tiles.at(n_block) * kBlockN,
              tile.key_stop);
  };
  if (tiles.start < tiles.stop) load(tiles.stop - 1, 0);
  ptx::copy_async_commit();

  const int lane_row = tile.first_row + fragment_row(), warp_key = warp_index() * kWarpKeys + fragment_column();
  const auto row_of_element = [&](int m, int i) { return lane_row + 16 * m + i / 2 * 8; };
  const Queries queries(queries_of(params.q, batch, head), params.q.row_stride, lane_row, seqlen_q);
  OnlineSoftmax<kMTiles> softmax;
  Real no_output[kMTiles][1][4];
  set_zero(no_output);
  int stage = 0;
  for_each_tile<false>(tiles, [&](int n_block, auto masked) __attribute__((always_inline)) {
    ptx::copy_async_wait<0>();
    ptx::sync_block();
    if (n_block > tiles.start) load(n_block - 1, stage ^ 1);
    ptx::copy_async_commit();
    const u32 s_keys = s_ring + stage * kBytesStage + warp_key * (u32)sizeof(Real);
    Real s[kMTiles][kNTiles][4];
    make_scores(score, mask, queries, s_keys, tiles.at(n_block) * kBlockN + warp_key, row_of_element, masked, s);
    softmax.update(s, no_output, exponent_scale);
    stage ^= 1;
  });

  ptx::copy_async_wait<0>();
  ptx::sync_block();
  finish_lse<kNumWarps>(params, work, softmax, s_ring, 0, warp_index(), seqlen_q);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, forward_narrow)
