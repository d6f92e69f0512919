// Computes what the backward pass needs of every query row: delta = rowsum(dout * out) (FlashAttention-2, Algorithm 2,
// line 4) and lse in the unit of row maxima. The gradient with respect to lse is subtracted from delta: the derivative
// of lse by the scores is P, so dS = P (dP - delta + dlse). Where lse is large, it finds the row max and the row sum
// again (helpers/row_sums.cuh). Also clears accumulators of dq, and dbias where the main kernel does not store all of
// it. A block serves the kBlockM rows of one tile of queries:
//
//   [1] the first key with the largest score, if row maxima have a gradient    [2] delta - dlse, a row for kLanes lanes
//   [3] lse, 16 rows for a warp                                                [4] the accumulators of dq, and dbias
#include "helpers/row_sums.cuh"
#include "common/softmax/backward.cuh"
#include "common/io/clear_dq.cuh"
#include "common/softmax/exponential.cuh"
#include "common/softmax/row_reduction_gradients.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"

// Lanes that share a row, and elements that one of them reads at once.
constexpr int kOf16Bytes = 16 / kElementBytes;
constexpr int kVector = kLoadBytes == 16 && kHeadDimV % kOf16Bytes == 0 ? kOf16Bytes : 1;
constexpr int kLanes = kHeadDimV > 16 * kVector ? 32 : kHeadDimV > 8 * kVector ? 16 : kHeadDimV > 4 * kVector ? 8 : 4;
constexpr int kColumnsAtOnce = kLanes * kVector, kRowsAtOnce = kNumThreads / kLanes;
static_assert(kBlockM % (32 / kLanes) == 0, "a warp stays together");
// Vectors of a row that a lane reads, and rows whose vectors it has in flight at a time: four vectors of each operand.
constexpr int kVectors = ceil_div(kHeadDimV, kColumnsAtOnce);
constexpr int kRowsInFlight = min_of(max_of(4 / max_of(kVectors, 1), 1), ceil_div(kBlockM, kRowsAtOnce));
struct alignas(kVector * sizeof(Storage)) Vector {
  Storage element[kVector];
};

// The sum of kVector products. Vectors of 16-bit elements are unpacked as words: it takes fewer instructions.
template <class E>
CUFLASH_DEVICE float dot(const u16* a, const u16* b) {
  float sum = 0.0f;
  if constexpr (kVector == 8) {
    const Bytes16 x = *(const Bytes16*)a, y = *(const Bytes16*)b;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u16 low = x.word[i / 2] >> (16 * (i % 2)), high = y.word[i / 2] >> (16 * (i % 2));
      sum += ptx::to_float32(E{}, low) * ptx::to_float32(E{}, high);
    }
  } else {
    sum = ptx::to_float32(E{}, *a) * ptx::to_float32(E{}, *b);
  }
  return sum;
}
template <class E>
CUFLASH_DEVICE Real dot(const Real* a, const Real* b) {
  struct alignas(kVector * sizeof(Real)) Vector {
    Real element[kVector];
  };
  const Vector x = *(const Vector*)a, y = *(const Vector*)b;
  Real sum = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum += x.element[i] * y.element[i];
  return sum;
}

// Adds to `delta` what a lane has of rowsum(dout * out) of its rows: `first_row`, and kRowsAtOnce after it, and so on.
// Where a row does not exist, a vector is zero, and no branch keeps the loads of one row from those of the next.
CUFLASH_DEVICE void add_products(Real (&delta)[kRowsInFlight], const Params& params, const Storage* out,
                                 const Storage* dout, int first_row, int row_stop, int lane) {
#pragma unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int column = v * kColumnsAtOnce + lane * kVector;
    Vector of_out[kRowsInFlight] = {}, of_dout[kRowsInFlight] = {};
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int row = first_row + i * kRowsAtOnce;
      if (row >= row_stop || (kHeadDimV % kColumnsAtOnce != 0 && column >= kHeadDimV)) continue;
      of_out[i] = *(const Vector*)(out + row * params.out.row_stride + column);
      of_dout[i] = *(const Vector*)(dout + row * params.dout.row_stride + column);
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) delta[i] += dot<Element>(of_out[i].element, of_dout[i].element);
  }
}

// The sum of a value of each of the kLanes lanes of a row.
CUFLASH_DEVICE Real sum_of_lanes(Real value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) value += ptx::shuffle_xor(value, mask);
  return value;
}

#if CUFLASH_TANGENTS
// The tangents of lse and of delta - dlse of a row: rowsum(dO * tO + tdO * O) - tdlse. tdO and tdlse may be absent.
struct DeltaTangents {
  const Params& params;
  const Entry batch;
  const int head;
  const Storage *tout, *tdout;
  const Real *lse, *tlse, *tdlse;

  CUFLASH_DEVICE DeltaTangents(const Params& params_, Entry batch_, int head_)
      : params(params_),
        batch(batch_),
        head(head_),
        tout(queries_of(params.tout, batch, head)),
        tdout(params.tdout.data == nullptr ? nullptr : queries_of(params.tdout, batch, head)),
        lse(row_values_of(params.lse, batch, head)),
        tlse(row_values_of(params.tlse, batch, head)),
        tdlse(params.tdlse.data == nullptr ? nullptr : row_values_of(params.tdlse, batch, head)) {}

  // Warp. Stores those of one row, whose lanes call it together; zeros of a row that does not exist.
  CUFLASH_DEVICE void store(int row, int row_stop, int lane, const Storage* out, const Storage* dout) const {
    Real tdelta = 0, row_tlse = 0;
    if (row < row_stop) {
      for (int c = lane * kVector; c < kHeadDimV; c += kColumnsAtOnce) {
        tdelta += dot<Element>(tout + row * params.tout.row_stride + c, dout + row * params.dout.row_stride + c);
        if (tdout != nullptr)
          tdelta += dot<Element>(out + row * params.out.row_stride + c, tdout + row * params.tdout.row_stride + c);
      }
    }
    tdelta = sum_of_lanes(tdelta);
    if (lane != 0) return;
    if (row < row_stop && lse[row * params.lse.row_stride] != -ptx::infinity()) {
      row_tlse = tlse[row * params.tlse.row_stride];
      if (tdlse != nullptr) tdelta -= tdlse[row * params.tdlse.row_stride];
    }
    Real* stored = row_tangents(params, batch, head, row);
    stored[0] = row_tlse, stored[kDelta] = tdelta;
  }
};
#endif

#if CUFLASH_ROW_REDUCTIONS
// The gradients of row reductions of the rows of a head: their part of delta, and what other kernels read.
struct ReductionsOfRows {
  const Params& params;
  const RowReductionGradients stored;
  const Real *lse, *entropy, *dentropy, *dmax;

  CUFLASH_DEVICE ReductionsOfRows(const Params& params_, Entry batch, int head)
      : params(params_),
        stored(params, batch, head),
        lse(row_values_of(params.lse, batch, head)),
        entropy(row_values_of(params.entropy, batch, head)),
        dentropy(row_values_of(params.dentropy, batch, head)),
        dmax(row_values_of(params.dmax, batch, head)) {}

  // [1] Of all rows of a tile, whose first is `first_row`.
  CUFLASH_DEVICE void store_maxima(Entry batch, int head, int first_row, int row_stop) const {
    if constexpr (kTakesDmax && CUFLASH_FINDS_MAXIMA) {
#pragma unroll 1
      for (int i = ptx::thread_index() / 32 * 16; i < kBlockM; i += kNumWarps * 16)
        store_first_maxima(params, batch, head, first_row + i, row_stop, stored.first_max);
    }
  }
  // [2] Of one row, whose lanes call it together: adds to its delta, and stores zeros where the row does not exist.
  CUFLASH_DEVICE void store(int row, int row_stop, int lane, Real& delta) const {
    if (kTakesDentropy && row < row_stop && lse[row * params.lse.row_stride] != -ptx::infinity()) {
      const Real row_dentropy = dentropy[row * params.dentropy.row_stride];
      delta += row_dentropy * entropy[row * params.entropy.row_stride];
      if (lane == 0) stored.dentropy[row] = row_dentropy * (kWide ? (Real)1 : (Real)kLn2);
    } else if (kTakesDentropy && lane == 0) {
      stored.dentropy[row] = 0;
    }
    if (kTakesDmax && lane == 0) stored.dmax[row] = row < row_stop ? dmax[row * params.dmax.row_stride] : 0;
  }
};
#endif

// [3] The first statistic of the rows of this warp: 16 rows from `first` on, of which `stats` are, and so on.
CUFLASH_DEVICE void store_lse_stats(const Params& params, const Work& work, int row_stop, int first,
                                    const LseStats& stats) {
  const int first_row = work.block * kBlockM;
  bool any_large = false;
  const auto store = [&](const LseStats& stats) {
    stats.store();
    any_large = any_large || stats.has_large();
  };
  if (first < kBlockM) store(stats);
#pragma unroll 1
  for (int i = first + kNumWarps * 16; i < kBlockM; i += kNumWarps * 16)
    store(LseStats(params, work.batch, work.head, first_row + i, row_stop));
  // A loop of its own, because the code for large rows is long, and this is its only use.
#pragma unroll 1
  for (int i = first; any_large && i < kBlockM; i += kNumWarps * 16) {
    const LseStats large(params, work.batch, work.head, first_row + i, row_stop);
    if (large.has_large()) large.store_large();
  }
}

// Whether the blocks of the main kernel add to dbias, or leave out tiles of it.
#ifndef CUFLASH_CLEARS_DBIAS
#define CUFLASH_CLEARS_DBIAS 0
#endif

// Clears dbias. Blocks take its rows in turn, whose lengths are multiples of 16 bytes.
CUFLASH_DEVICE void clear_dbias(const Params& params, int num_m_blocks, int thread) {
  const ScoreTensor& dbias = params.dbias;
  const int num_heads = dbias.head_stride != 0 ? params.num_heads : 1, seqlen_q = params.seqlen_q;
  const i64 num_rows = (i64)(dbias.batch_stride != 0 ? params.batch : 1) * num_heads * seqlen_q;
  const i64 num_blocks = (i64)params.batch * params.num_heads * num_m_blocks;
#pragma unroll 1
  for (i64 i = ptx::block_index(); i < num_rows; i += num_blocks) {
    const i64 head = i / seqlen_q, row = i % seqlen_q;
    Real* first = (Real*)dbias.data + head / num_heads * dbias.batch_stride + head % num_heads * dbias.head_stride +
                  row * dbias.row_stride;
#pragma unroll 1
    for (int vector = thread; vector < params.seqlen_k * (int)sizeof(Real) / 16; vector += kNumThreads)
      ((Bytes16*)first)[vector] = {0, 0, 0, 0};
  }
}

// [4] dbias; the accumulators of dq, and the turns of the blocks that add to them.
CUFLASH_DEVICE void clear_accumulators(const Params& params, const Work& work, int num_m_blocks, int thread) {
  if constexpr (CUFLASH_CLEARS_DBIAS) clear_dbias(params, num_m_blocks, thread);
  if constexpr (!kDqByReduction) return;
  const i64 tile = m_tile_of(params, num_m_blocks, work.batch, work.head, work.block);
  clear_before(params, num_m_blocks, tile, thread);
  if (kDqInOrder && thread == 0) *dq_order_of(params, num_m_blocks, tile) = 0;
  if constexpr (kDqInOrder && kIsPacked) {
    if (ptx::block_index() == 0 && thread < 32) {
      const bool overlap = sequences_overlap(params);
      if (thread == 0) *overlap_of(params, num_m_blocks) = overlap;
    }
  }
}

// [2] Delta of the rows of a tile, and what else is made of them.
struct DeltaOfRows {
  const Params& params;
  const Work& work;
  const int row_stop, lane;
  const Storage *out, *dout;
  const Real *lse, *dlse;
#if CUFLASH_TANGENTS
  const DeltaTangents tangents;
#endif
#if CUFLASH_ROW_REDUCTIONS
  const ReductionsOfRows reductions;
#endif

  CUFLASH_DEVICE DeltaOfRows(const Params& params_, const Work& work_, int row_stop_)
      : params(params_),
        work(work_),
        row_stop(row_stop_),
        lane(ptx::thread_index() % kLanes),
        out(queries_of(params.out, work.batch, work.head)),
        dout(queries_of(params.dout, work.batch, work.head)),
        lse(row_values_of(params.lse, work.batch, work.head)),
        dlse(params.dlse.data == nullptr ? nullptr : row_values_of(params.dlse, work.batch, work.head))
#if CUFLASH_TANGENTS
        ,
        tangents(params, work.batch, work.head)
#endif
#if CUFLASH_ROW_REDUCTIONS
        ,
        reductions(params, work.batch, work.head)
#endif
  {
  }

  CUFLASH_DEVICE Real dlse_of(int row) const {
    const bool has_keys = row < row_stop && dlse != nullptr && lse[row * params.lse.row_stride] != -ptx::infinity();
    return has_keys ? dlse[row * params.dlse.row_stride] : 0;
  }
  CUFLASH_DEVICE void store() const {
#pragma unroll 1
    for (int first = ptx::thread_index() / kLanes; first < kBlockM; first += kRowsInFlight * kRowsAtOnce) {
      Real delta[kRowsInFlight] = {};
      add_products(delta, params, out, dout, work.block * kBlockM + first, row_stop, lane);
#pragma unroll
      for (int i = 0; i < kRowsInFlight; ++i) {
        const int row_of_tile = first + i * kRowsAtOnce, row = work.block * kBlockM + row_of_tile;
        if (kBlockM % (kRowsInFlight * kRowsAtOnce) != 0 && row_of_tile >= kBlockM) break;
        Real row_delta = sum_of_lanes(delta[i]);
#if CUFLASH_ROW_REDUCTIONS
        reductions.store(row, row_stop, lane, row_delta);
#endif
        if (lane == 0) row_stats(params, work.batch, work.head, row)[kDelta] = row_delta - dlse_of(row);
#if CUFLASH_TANGENTS
        tangents.store(row, row_stop, lane, out, dout);
#endif
      }
    }
  }
};

CUFLASH_DEVICE void backward_delta(const Params& params) {
  const int num_m_blocks = num_tiles_of(params, params.seqlen_q, kBlockM), thread = ptx::thread_index();
  const Work work = schedule_queries(params, ptx::block_index(), params.num_heads, false);
  const int row_stop = is_left_over(params, work.batch) ? 0 : seqlen_q_of(params, work.batch);
  const int first_row = work.block * kBlockM;
  const DeltaOfRows delta(params, work, row_stop);
#if CUFLASH_ROW_REDUCTIONS
  delta.reductions.store_maxima(work.batch, work.head, first_row, row_stop);
#endif

  const int first = thread / 32 * 16;  // of the rows of this warp, whose lse are loaded ahead of [2]
  const LseStats lse_stats(params, work.batch, work.head, first_row + first, first < kBlockM ? row_stop : 0);
  delta.store();
  store_lse_stats(params, work, row_stop, first, lse_stats);
  clear_accumulators(params, work, num_m_blocks, thread);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, backward_delta)
