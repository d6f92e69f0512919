// Forward pass on mma.sync tensor cores (compute capability 8.0 and later): FlashAttention-2, Algorithm 1.
//
//   S = Q K^T        P = exp(S - m)        l = rowsum(P)        O = P V / l        lse = m + log l
//
// A block owns kBlockM queries of one head and iterates over the tiles of keys from the last to the first; a warp owns
// 16 kMTiles of its rows, so that softmax and both products stay within a warp. Q stays in shared memory, K and V
// stream through it. Where a warp cannot hold its rows of the output, kWarpsD warps share the rows, each with a slice
// of the columns of O; every one of them computes S. The steps of a tile of keys are numbered.
#include "common/config.cuh"
#include "common/score/dropout.cuh"
#include "common/io/float8.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/softmax.cuh"
#include "common/softmax/store_lse.cuh"
#include "sm80/copy.cuh"
#include "sm80/float8_fragments.cuh"
#include "sm80/key_loader.cuh"
#include "sm80/mma.cuh"
#include "sm80/queries.cuh"

constexpr int kWarpsD = CUFLASH_WARPS_D;
constexpr int kWarpsM = kNumWarps / kWarpsD;
constexpr int kMTiles = kBlockM / (16 * kWarpsM);
constexpr int kNTiles = kBlockN / 8;
constexpr int kColumnTiles = max_of(kDimV / (8 * kWarpsD), 2);  // n-tiles of 8 columns of O of a warp
constexpr int kRowQ = row_bytes(kDim);
constexpr int kRowV = row_bytes(kDimV);
static_assert(kMTiles * 16 * kWarpsM == kBlockM, "every warp owns the same number of whole fragments");

// Shared memory: Q (which the output replaces at the end), then the ring of K tiles, then that of V tiles.
constexpr u32 kBytesQ = tile_bytes(kBlockM, max_of(kDim, kDimV));
constexpr u32 kBytesK = tile_bytes(kBlockN, kDim, sizeof(KeyStorage));
constexpr u32 kBytesV = tile_bytes(kBlockN, kDimV, sizeof(KeyStorage));
static_assert(kBytesQ + kNumStages * (kBytesK + kBytesV) == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// The ring of tiles of keys and values.
struct KeyRing : KeyLoader<kBytesK, kBytesV> {
  using KeyLoader<kBytesK, kBytesV>::KeyLoader;
  int stage = 0;  // of the tile in use

  // Fills the ring: tile i of the loop goes to stage i % kNumStages. Group i holds tile i (with Q in the first).
  CUFLASH_DEVICE void fill() const {
    const int num_tiles = tile.keys.stop - tile.keys.start;
    if constexpr (kNumStages == 1) {
      if (num_tiles > 0) load_k(tile.keys.stop - 1, 0);
      ptx::copy_async_commit();
    } else {
#pragma unroll
      for (int i = 0; i < kNumStages - 1; ++i) {
        if (i < num_tiles) load_k(tile.keys.stop - 1 - i, i), load_v(tile.keys.stop - 1 - i, i);
        ptx::copy_async_commit();
      }
    }
  }

  // Waits for K of a tile, and begins the next load. One stage: V arrives during S = Q K^T, the next K during P V. More
  // stages: a whole tile arrives ahead.
  CUFLASH_DEVICE void wait_for_k(int n_block) const {
    if constexpr (kNumStages == 1) {
      ptx::copy_async_wait<0>();
      ptx::sync_block();
      load_v(n_block, 0);
      ptx::copy_async_commit();
    } else {
      ptx::copy_async_wait<kNumStages - 2>();
      ptx::sync_block();
      const int next = n_block - (kNumStages - 1);
      const int next_stage = stage == 0 ? kNumStages - 1 : stage - 1;
      if (next >= tile.keys.start) load_k(next, next_stage), load_v(next, next_stage);
      ptx::copy_async_commit();
    }
  }
  // The same for V, once S is there.
  CUFLASH_DEVICE void wait_for_v(int n_block) const {
    if constexpr (kNumStages == 1) {
      ptx::copy_async_wait<0>();
      ptx::sync_block();
      if (n_block > tile.keys.start) load_k(n_block - 1, 0);
      ptx::copy_async_commit();
    }
  }
  CUFLASH_DEVICE void advance() { stage = stage == kNumStages - 1 ? 0 : stage + 1; }
};

using ScoreTile = Real[kMTiles][kNTiles][4];
using OutTile = Real[kMTiles][kColumnTiles][4];

// The scales of fp8 keys, values and queries of one head, for the rows of a lane from `lane_row` on.
struct Float8Scales {
  const HeadScales<kKScale> keys;
  const HeadScales<kVScale> values;
  const float of_keys, of_values;  // 1 unless all of the head share one
  const int key_stop;
  float of_rows[kMTiles][2];
  ValueScales<Element> relative;

  CUFLASH_DEVICE Float8Scales(const Params& params, const QueryTile& tile, int lane_row)
      : keys(params, params.k_scale, params.k_scale_shift, tile.work.batch, tile.head_kv),
        values(params, params.v_scale, params.v_scale_shift, tile.work.batch, tile.head_kv),
        of_keys(keys.of_head()),
        of_values(values.of_head()),
        key_stop(tile.key_stop) {
    const QueryScales queries(params, tile.work.batch, tile.work.head);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) of_rows[m][half] = queries.of(lane_row + 16 * m + 8 * half);
  }

  CUFLASH_DEVICE void multiply_scores(ScoreTile& s, int lane_key) const {
    float scale[kNTiles][2];
    keys.load(scale, lane_key, key_stop);
    multiply_columns<kKScale>(s, scale, of_keys);
    if constexpr (kQScale) multiply_rows(s, of_rows);
  }
  // Rescales O where the scales of these values leave the range of the weights.
  CUFLASH_DEVICE void multiply_weights(ScoreTile& p, OutTile& o, int lane_key) {
    if constexpr (kVScale == 2) {
      float scale[kNTiles][2];
      values.load(scale, lane_key, key_stop);
      relative.update(scale, o);
      multiply_columns<kVScale>(p, scale, of_values);
    }
  }
};

// The numbered steps of a warp at work on a tile of keys:
//
//   [GEMM 1] S = Q K^T     [2] P = exp(S - m), l += rowsum(P)     [GEMM 3] O += P V
//
// Accumulators are arguments, as in backward.cu. The stage is read from the ring where it is needed: an argument would
// be a copy, which takes a register for the whole step.
struct ForwardSteps {
  const KeyRing& ring;
  const RowMajorA<kRowQ> operand_q;
  const KeysOperand<kDim, 1> operand_k;
  const ValuesOperand<kDimV, kWarpsD> operand_v;
  const Score score;
  const Mask mask;
  const Dropout dropout;
  const Real exponent_scale;
  const int lane_row;

  CUFLASH_DEVICE ForwardSteps(const Params& params, const QueryTile& tile, const KeyRing& ring_, u32 s_q, int warp_row,
                              int warp_d)
      : ring(ring_),
        operand_q(s_q, warp_row),
        operand_k(ring.s_k),
        operand_v(ring.s_v, warp_d),
        score(params, tile.work.batch, tile.work.head, tile.key_stop),
        mask(params, tile.work.batch, tile.work.head, tile.key_stop),
        dropout(params, tile.work.batch, tile.work.head),
        exponent_scale(score.exponent_scale()),
        lane_row(tile.first_row + warp_row + fragment_row()) {}

  // [GEMM 1] S = Q K^T.
  CUFLASH_DEVICE void multiply_scores(ScoreTile& s) const {
    set_zero(s);
    multiply<kDim / kStep>(s, operand_q,
                           [&](int n, int k, Fragment& b) { shifted(operand_k, ring.stage * kBytesK)(n, k, b); });
  }

  // [2] P = exp(S - m), l += rowsum(P).
  template <class Masked>
  CUFLASH_DEVICE void make_p(int lane_key, Masked masked, ScoreTile& s, Float8Scales& scales,
                             OnlineSoftmax<kMTiles>& softmax, OutTile& o) const {
    scales.multiply_scores(s, lane_key);
    to_scores(score, mask, s, [&](int m, int i) { return lane_row + 16 * m + i / 2 * 8; }, lane_key, masked);
    softmax.update(s, o, exponent_scale);
    if constexpr (kHasDropout) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) dropout.drop(s[m], lane_row + 16 * m, lane_key);
    }
    scales.multiply_weights(s, o, lane_key);
  }

  // [GEMM 3] O += P V.
  CUFLASH_DEVICE void add_values(const ScoreTile& p, OutTile& o) const {
    if constexpr (kHasValues) {
      add_product<kBlockN / kStep>(
          o, [&](int m, int k, Fragment& a) { to_operand(p[m], k, a); },
          [&](int n, int k, Fragment& b) { shifted(operand_v, ring.stage * kBytesV)(n, k, b); });
    }
  }
};

// O / l, through the shared memory of Q so that the stores to global memory are wide.
template <class RowFactor>
CUFLASH_DEVICE void store_out(const Params& params, const QueryTile& tile, u32 s_q, int warp_row, int warp_d,
                              const OutTile& o, int seqlen_q, RowFactor factor_of) {
  const Work& work = tile.work;
  if constexpr (CUFLASH_OUT_WIDE && kHasValues) {
    store_sums<kHeadDimV, kWarpsD>(o, warp_row, warp_d, factor_of, row_values_of(params.out, work.batch, work.head),
                                   params.out.row_stride, tile.first_row, seqlen_q);
  } else if constexpr (kHasValues) {
    store_fragments<Order::kPairedColumns, kRowV, kWarpsD>(s_q, warp_row, warp_d, o, factor_of);
    ptx::sync_block();
    store_tile<kBlockM, kHeadDimV>(s_q, (Storage*)queries_of(params.out, work.batch, work.head), params.out.row_stride,
                                   tile.first_row, seqlen_q);
  }
}

// lse, and the reductions of rows.
CUFLASH_DEVICE void store_rows(const Params& params, const Work& work, const OnlineSoftmax<kMTiles>& softmax,
                               int lane_row, int warp_d, int seqlen_q) {
  Real* g_lse = row_values_of(params.lse, work.batch, work.head);
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 16 * m + 8 * half;
      if (warp_d == 0 && fragment_column() == 0 && row < seqlen_q) {
        store_lse(g_lse + row * params.lse.row_stride, softmax, m, half);
        store_row_reductions(params, work.batch, work.head, row, softmax, m, half);
      }
    }
}

CUFLASH_DEVICE void forward(const Params& params) {
  if (!is_chosen(params)) return;
  const Work work = schedule_queries(params, ptx::block_index(), params.num_heads, kHasRightBound);
  if (!has_queries(params, work)) return;
  const int seqlen_q = seqlen_q_of(params, work.batch);
  const QueryTile tile(params, work);

  const u32 s_q = ptx::dynamic_shared();
  KeyRing ring(params, tile, s_q + kBytesQ);
  const int warp_row = warp_index() / kWarpsD * 16 * kMTiles, warp_d = warp_index() % kWarpsD;

  load_queries<kBlockM, kHeadDim>(s_q, queries_of<QueryStorage>(params.q, work.batch, work.head), params.q.row_stride,
                                  tile.first_row, seqlen_q);
  ring.fill();

  const ForwardSteps own(params, tile, ring, s_q, warp_row, warp_d);
  const Real kept_scale = kept_scale_of(params);
  Float8Scales scales(params, tile, own.lane_row);
  OnlineSoftmax<kMTiles> softmax;
  OutTile o;
  set_zero(o);

  for_each_tile<kWide>(tile.keys, [&](int n_block, auto masked) __attribute__((always_inline)) {
    ScoreTile s;
    ring.wait_for_k(n_block);
    own.multiply_scores(s);
    ring.wait_for_v(n_block);
    own.make_p(tile.keys.at(n_block) * kBlockN + fragment_column(), masked, s, scales, softmax, o);
    own.add_values(s, o);
    ring.advance();
  });

  // The epilogue.
  softmax.finish();
  if (kHasSinks && !is_left_over(params, work.batch))
    softmax.add_sinks(o, [&](int, int) { return to_row_max(sink_of(params, work.head)); });
  ptx::copy_async_wait<0>();
  ptx::sync_block();
  const auto factor_of = [&](int m, int half) {
    return scales.relative.row_factor(softmax.inverse_sum(m, half) * kept_scale, scales.of_values);
  };
  store_out(params, tile, s_q, warp_row, warp_d, o, seqlen_q, factor_of);
  store_rows(params, work, softmax, own.lane_row, warp_d, seqlen_q);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, forward)
