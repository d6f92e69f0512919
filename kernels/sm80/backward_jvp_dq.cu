// The tangent of dq on mma.sync tensor cores (compute capability 7.0 and later), in a fixed order of additions:
//
//   S = Q K'    tX = tQ K' + Q tK'    dP = dO V'    tdP = dO tV' + tdO V'              (X' is X transposed)
//   tdQ = scale (tdX K + dX tK) + tscale dX K
//
// A block owns kBlockM queries of one head and iterates over the tiles of keys; a warp owns 16 of its rows, or kWarpsD
// warps share them, each with a slice of the columns. common/score/gradient_tangents.cuh has what is made of the
// products.
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/gradient_tangents.cuh"
#include "sm80/copy.cuh"
#include "sm80/dual_products.cuh"

constexpr int kWarpsD = CUFLASH_WARPS_D;
constexpr int kWarpsM = kNumWarps / kWarpsD;
constexpr int kNTiles = kBlockN / 8;
constexpr int kColumnTiles = kDim / (8 * kWarpsD);
constexpr int kRow = row_bytes(kDim);
constexpr int kRowV = row_bytes(kDimV);
static_assert(kBlockM == 16 * kWarpsM && kNumStages == 1, "a warp owns one fragment of rows");

// Shared memory: Q, tQ, dO, tdO, then a tile of K, tK, V, tV.
constexpr u32 kBytesQ = tile_bytes(kBlockM, kDim);
constexpr u32 kBytesDo = tile_bytes(kBlockM, kDimV);
constexpr u32 kBytesK = tile_bytes(kBlockN, kDim);
constexpr u32 kBytesV = tile_bytes(kBlockN, kDimV);
static_assert(2 * (kBytesK + kBytesV + kBytesQ + kBytesDo) == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

struct BackwardJvpDq {
  const Params& params;
  const Entry batch;
  const int head, head_kv, first_row, seqlen_q, key_stop;
  const bool has_tdout;
  const u32 s_q, s_tq, s_do, s_tdo, s_k, s_tk, s_v, s_tv;
  const int warp_row, warp_d, lane_row;
  const GradientTangents made;
  const Dropout dropout;
  const RowWithTangents rows[2];

  Real tdq[1][kColumnTiles][4];

  CUFLASH_DEVICE BackwardJvpDq(const Params& params_, const Work& work)
      : params(params_),
        batch(work.batch),
        head(work.head),
        head_kv(head / (params.num_heads / params.num_heads_kv)),
        first_row(work.block * kBlockM),
        seqlen_q(seqlen_q_of(params, work.batch)),
        key_stop(key_stop_of(params, work.batch)),
        has_tdout(params.tdout.data != nullptr),
        s_q(ptx::dynamic_shared()),
        s_tq(s_q + kBytesQ),
        s_do(s_tq + kBytesQ),
        s_tdo(s_do + kBytesDo),
        s_k(s_tdo + kBytesDo),
        s_tk(s_k + kBytesK),
        s_v(s_tk + kBytesK),
        s_tv(s_v + kBytesV),
        warp_row(warp_index() / kWarpsD * 16),
        warp_d(warp_index() % kWarpsD),
        lane_row(first_row + warp_row + fragment_row()),
        made(params, batch, head, key_stop),
        dropout(params, batch, head),
        rows{{params, batch, head, lane_row}, {params, batch, head, lane_row + 8}} {
    set_zero(tdq);
  }

  template <int columns>
  CUFLASH_DEVICE void load_rows(u32 tile, const Tensor& tensor) const {
    load_tile<kBlockM, columns>(tile, queries_of(tensor, batch, head), tensor.row_stride, first_row, seqlen_q);
  }
  CUFLASH_DEVICE void load_queries() const {
    load_rows<kHeadDim>(s_q, params.q);
    load_rows<kHeadDimV>(s_do, params.dout);
    if constexpr (kMovesQ) load_rows<kHeadDim>(s_tq, params.tq);
    if (has_tdout) load_rows<kHeadDimV>(s_tdo, params.tdout);
  }
  template <int columns>
  CUFLASH_DEVICE void load_keys(u32 tile, const Tensor& tensor, int first_key) const {
    load_tile<kBlockN, columns>(tile, keys_of(params, tensor, batch, head_kv), tensor.row_stride, first_key, key_stop);
  }
  CUFLASH_DEVICE void load_k_and_v(int first_key) const {
    load_keys<kHeadDim>(s_k, params.k, first_key);
    load_keys<kHeadDimV>(s_v, params.v, first_key);
    if constexpr (kMovesK) load_keys<kHeadDim>(s_tk, params.tk, first_key);
    if constexpr (kMovesV) load_keys<kHeadDimV>(s_tv, params.tv, first_key);
  }

  CUFLASH_DEVICE void step(int first_key, bool masked) {
    ptx::sync_block();
    load_k_and_v(first_key);
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    ptx::sync_block();

    // [1] The products of scores, [2] what is made of them.
    Real p[1][kNTiles][4], pu[1][kNTiles][4], dx[1][kNTiles][4], tdx[1][kNTiles][4];
    set_zero(p), set_zero(pu), set_zero(dx), set_zero(tdx);
    const RowMajorA<kRow> q(s_q, warp_row), tq(s_tq, warp_row);
    const ColumnMajorB<kRow, 1> k(s_k), tk(s_tk);
    multiply_dual<kDim / kStep, kMovesQ, kMovesK, true>(p, pu, q, tq, k, tk);
    const RowMajorA<kRowV> gradients(s_do, warp_row), tangents(s_tdo, warp_row);
    const ColumnMajorB<kRowV, 1> v(s_v), tv(s_tv);
    multiply_dual<kDimV / kStep, false, kMovesV>(dx, tdx, gradients, tangents, v, tv);
    if (has_tdout) multiply<kDimV / kStep>(tdx, tangents, v);

    const int lane_key = first_key + fragment_column();
    [[maybe_unused]] KeptWeights<false> kept;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      if (kHasDropout && n % 2 == 0) kept = dropout.of(lane_row, lane_key, n);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        made.apply(p[0][n][i], pu[0][n][i], dx[0][n][i], tdx[0][n][i], lane_row + i / 2 * 8, lane_key + 8 * n + i % 2,
                   masked, !kHasDropout || kept.keeps(n, i), rows[i / 2]);
    }

    // [3] The sum.
    const auto add = [&](const auto& gradients, u32 keys) __attribute__((always_inline)) {
      add_product<kBlockN / kStep>(
          tdq, [&](int m, int k, Fragment& a) { to_operand(gradients[m], k, a); },
          RowMajorB<kRow, kWarpsD>(keys, warp_d));
    };
    add(tdx, s_k);
    if constexpr (kMovesK) add(dx, s_tk);
  }

  CUFLASH_DEVICE void finish() const {
    ptx::copy_async_wait<0>();
    ptx::sync_block();
    const auto factor = [&](int, int) { return made.scaled.factor; };
    if constexpr (CUFLASH_DQ_WIDE) {
      store_sums<kHeadDim, kWarpsD>(tdq, warp_row, warp_d, factor, row_values_of(params.dq, batch, head),
                                    params.dq.row_stride, first_row, seqlen_q);
    } else {
      store_fragments<Order::kPairedColumns, kRow, kWarpsD>(s_q, warp_row, warp_d, tdq, factor);
      ptx::sync_block();
      store_tile<kBlockM, kHeadDim>(s_q, (Storage*)queries_of(params.dq, batch, head), params.dq.row_stride, first_row,
                                    seqlen_q);
    }
  }
};

CUFLASH_DEVICE void backward_jvp_dq(const Params& params) {
  if (!is_chosen(params)) return;
  const Work work = schedule_queries(params, ptx::block_index(), params.num_heads, kHasRightBound);
  if (!has_queries(params, work)) return;
  BackwardJvpDq own(params, work);
  const KeyTiles tiles(params, work, own.key_stop);
  own.load_queries();
  ptx::copy_async_commit();
#pragma unroll 1
  for (int n_block = tiles.stop - 1; n_block >= tiles.start; --n_block)
    own.step(tiles.at(n_block) * kBlockN, n_block >= tiles.full_stop || n_block < tiles.full_start);
  own.finish();
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_jvp_dq)
