// Reductions of the attention weights over the queries, on mma.sync tensor cores (compute capability 8.0 and later):
//
//   P' = exp(K Q' - lse)    sums = P' w  or  sums = rowmax(P')        (X' is X transposed; rows of X' are keys)
//
// A block owns kBlockN keys of one query head and iterates over the tiles of queries. Rows of P' are keys, so that a
// lane adds the weights of its keys in registers; the four lanes that share a key meet once, after the last tile. That
// fixes the order of additions. Without values delta is -dlse, and w comes as dlse: helpers/backward_preprocess.cu
// leaves -w in the place of delta.
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/query_iterator.cuh"
#include "common/schedule/schedule.cuh"
#include "common/softmax/columns.cuh"
#include "sm80/copy.cuh"
#include "sm80/mma.cuh"

constexpr int kKeyTiles = kBlockN / (16 * kNumWarps);  // m-tiles of 16 keys of a warp
constexpr int kQueryTiles = kBlockM / 8;               // n-tiles of 8 queries
constexpr int kRow = row_bytes(kDim);
static_assert(kKeyTiles * 16 * kNumWarps == kBlockN, "every warp owns the same number of whole fragments");
static_assert(kNumStages == 1 || kNumStages == 2, "at most one tile of queries arrives while another is used");
static_assert(kBlockM <= kGroupRows, "a tile has rows of one group: all have row sums, or none");

// Shared memory: K, and the ring of Q and row statistics.
constexpr u32 kBytesK = tile_bytes(kBlockN, kDim);
constexpr u32 kBytesQ = tile_bytes(kBlockM, kDim);
constexpr u32 kBytesStats = kBlockM * 2 * sizeof(Real);
constexpr u32 kBytesStage = kBytesQ + kBytesStats;
constexpr int kRealsOf16Bytes = 16 / sizeof(Real);
static_assert(kBytesK + kNumStages * kBytesStage == CUFLASH_SHARED_BYTES, "shared memory differs from the plan");

// The tile of keys of a block, and the ring of tiles of queries: that of step i of the loop goes to stage i %
// kNumStages.
struct ColumnTiles {
  const Params& params;
  const Entry batch;
  const int head, head_kv, first_key, key_stop, seqlen_q;
  const u32 s_k, s_ring;

  CUFLASH_DEVICE ColumnTiles(const Params& params_, const Work& work)
      : params(params_),
        batch(work.batch),
        head(work.head),
        head_kv(head / (params.num_heads / params.num_heads_kv)),
        first_key(work.block * kBlockN),
        key_stop(key_stop_of(params, batch)),
        seqlen_q(seqlen_q_of(params, batch)),
        s_k(ptx::dynamic_shared()),
        s_ring(s_k + kBytesK) {}

  CUFLASH_DEVICE void load_k() const {
    load_tile<kBlockN, kHeadDim>(s_k, keys_of(params, params.k, batch, head_kv), params.k.row_stride, first_key,
                                 key_stop);
  }
  CUFLASH_DEVICE void load_queries(const QueryTileIterator& at, int stage) const {
    const u32 s_q = s_ring + stage * kBytesStage, s_stats = s_q + kBytesQ;
    const int first_row = at.m_block * kBlockM;
    load_tile<kBlockM, kHeadDim>(s_q, queries_of(params.q, batch, head), params.q.row_stride, first_row, seqlen_q);
    for (int vector = ptx::thread_index(); vector < (int)kBytesStats / 16; vector += kNumThreads)
      ptx::copy_async<16, 0>(s_stats + vector * 16,
                             stats_of(params, batch, head) + first_row * 2 + vector * kRealsOf16Bytes, 16);
  }

  // Stores the results of this lane's keys, from `lane_key` on.
  CUFLASH_DEVICE void store(const Columns<kKeyTiles>& columns, int lane_key) const {
    Real* sums = per_key_values_of(params.dv, batch, head);
    const int stop = seqlen_k_of(params, batch);
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = lane_key + 16 * m + 8 * half;
        const Real sum = columns.of(m, half);
        if (fragment_column() == 0 && key < stop) sums[key * params.dv.row_stride] = sum;
      }
  }
};

CUFLASH_DEVICE void column_sums(const Params& params) {
  if (!is_chosen(params)) return;
  const Work work = schedule_keys(params, ptx::block_index(), params.num_heads, params.head_section, false);
  if (!has_keys(params, work)) return;
  const ColumnTiles block(params, work);
  QueryTiles tiles;
  const int num_steps = find_queries(params, work, work.head, work.head + 1, block.key_stop, tiles);

  // K arrives with the first tile of queries.
  QueryTileIterator current = QueryTileIterator::first(tiles, work.head);
  QueryTileIterator next = current;
  block.load_k();
#pragma unroll
  for (int i = 0; i < kNumStages; ++i) {
    if (i < num_steps) block.load_queries(next, i), next.advance(tiles);
    ptx::copy_async_commit();
  }

  const int warp_key = warp_index() * 16 * kKeyTiles, lane_key = block.first_key + warp_key + fragment_row();
  Columns<kKeyTiles> columns;
  const Weights weights(params, work.batch, work.head, block.key_stop);
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    const int stage = step % kNumStages;
    const u32 s_q = block.s_ring + stage * kBytesStage;
    ptx::copy_async_wait<kNumStages - 1>();
    ptx::sync_block();
    Real p[kKeyTiles][kQueryTiles][4];
    set_zero(p);
    multiply<kDim / kStep>(p, RowMajorA<kRow>(block.s_k, warp_key), ColumnMajorB<kRow, 1>(s_q));
    add_tile(weights, p, s_q + kBytesQ, row_sums_of(params, work.batch, work.head), current.needs_mask(tiles),
             current.m_block * kBlockM + fragment_column(), lane_key, columns);
    ptx::sync_block();
    if (step + kNumStages < num_steps) block.load_queries(next, stage), next.advance(tiles);
    ptx::copy_async_commit();
    current.advance(tiles);
  }
  ptx::copy_async_wait<0>();
  block.store(columns, lane_key);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, column_sums)
