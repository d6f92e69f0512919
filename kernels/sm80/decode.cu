// Decode on every device, in every type: reads K and V once, as fast as memory allows.
//
//   S = Q K^T        P = exp(S - m)        l = rowsum(P)        O = P V / l        lse = m + log l
//
// All queries of the query heads that share a key/value head are rows of one product (common/schedule/head_work.cuh).
// As many blocks as the device holds take equal splits of all keys (common/schedule/key_splits.cuh). A block that has a
// head to itself stores its results. Blocks that share a head leave O and the sums of their keys in scratch memory; the
// last of them to finish combines these, unless helpers/split_combine.cu does.
//
// A block is made of warp groups, which take its tiles of keys in turn. Each warp group has its own ring in shared
// memory, so that no warp group waits for another one before the head ends: otherwise all warps would stand still as
// often as any of them waits for memory. K and V of a tile are two steps of the ring; while one is used, the copies of
// 2 kNumStages - 1 others are on their way. Each warp of a warp group owns 16 rows; with kWarpsD above 1, kWarpsD warps
// share the 16 rows, each with a slice of the columns of O.
#include "common/config.cuh"
#include "common/io/float8.cuh"
#include "common/io/head_results.cuh"
#include "common/schedule/head_work.cuh"
#include "common/score/mask.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/warp_sums.cuh"
#include "sm80/copy.cuh"
#include "sm80/float8_fragments.cuh"
#include "sm80/mma.cuh"
#include "sm80/queries.cuh"

constexpr int kWarpsD = CUFLASH_WARPS_D;
constexpr int kWarpsPerGroup = kBlockM / 16 * kWarpsD, kThreadsPerGroup = 32 * kWarpsPerGroup;
constexpr int kWarpGroups = kNumWarps / kWarpsPerGroup;
constexpr int kNTiles = kBlockN / 8;
constexpr int kColumnTiles = max_of(kDimV / (8 * kWarpsD), 2);  // n-tiles of 8 columns of O of a warp
static_assert(kWarpGroups * kWarpsPerGroup == kNumWarps, "whole groups");
static_assert(!kIsPacked, "packed sequences are served by sm80/forward.cu");

// Shared memory: Q, and for each warp group the stages of K, then those of V. At the end of a head, the sums of the
// warp group's warps replace the stages.
using Sums = WarpSums<Element, kColumnTiles>;
constexpr u32 kBytesQ = tile_bytes(kBlockM, kDim);
constexpr u32 kBytesK = tile_bytes(kBlockN, kDim, sizeof(KeyStorage));
constexpr u32 kBytesV = tile_bytes(kBlockN, kDimV, sizeof(KeyStorage));
constexpr u32 kBytesSums = Sums::kBytesOut + Sums::kBytesStatistics;
constexpr u32 kBytesPerGroup =
    round_up(max_of(kNumStages * (kBytesK + kBytesV), kWarpGroups > 1 ? kWarpsPerGroup * kBytesSums : 0u), 128);
static_assert(kBytesQ + kWarpGroups * kBytesPerGroup == CUFLASH_SHARED_BYTES, "shared memory differs from the plan");

// The warp group of a thread, and its index in it.
struct WarpGroup {
  int index;        // among the warp groups of the block
  int thread;       // among the threads of the warp group
  int row;          // the first of the 16 rows of the warp
  int lane_row[2];  // the two rows of which this lane holds slices
  int warp_d;       // which slice of the columns of O is the warp's
  u32 ring;         // in shared memory

  CUFLASH_DEVICE WarpGroup()
      : index(warp_index() / kWarpsPerGroup),
        thread(ptx::thread_index() % kThreadsPerGroup),
        row(warp_index() % kWarpsPerGroup / kWarpsD * 16),
        lane_row{row + fragment_row(), row + fragment_row() + 8},
        warp_d(warp_index() % kWarpsD),
        ring(ptx::dynamic_shared() + kBytesQ + index * kBytesPerGroup) {}

  CUFLASH_DEVICE void sync() const {
    if constexpr (kWarpsPerGroup == 1)
      ptx::sync_warp();
    else if constexpr (kWarpGroups == 1)
      ptx::sync_block();
    else
      ptx::sync_named(1 + index, kThreadsPerGroup);
  }
};

// The tiles of keys that a warp group takes. It takes every kWarpGroups-th position of its block, from the last place
// to the first.
//
// Tiles that no row attends to are left out. Where a block mask, or tile classes under a mask or a mask_mod, say
// which these are, the lanes look at 32 positions at once. Visible tiles may gather anywhere among the keys, so
// neighbouring positions then stand for tiles far from each other, and each block of a head has some of every region.
struct KeyTileIterator {
  static constexpr int kNone = -1;
  static constexpr bool kLooks = kHasBlockMask || kHasTileClasses;

  const Params& params;
  const HeadWork& work;
  int stride, steps;  // position i + steps j is tile stride i + j of the head
  int start, stop;    // positions of the block
  int position;       // the next position of the warp group
  int looked_at = 0;  // the position that the first lane has looked at
  u32 seen = 0;       // which lanes have seen a visible tile that has not been given yet

  CUFLASH_DEVICE KeyTileIterator(const Params& params, const HeadWork& work, int group)
      : params(params),
        work(work),
        stride(kLooks && kSplitTiles == 0 ? ceil_div(work.blocks, params.batch * params.num_heads_kv) : 1),
        steps(ceil_div(work.num_tiles, stride)),
        start(work.tiles_before(steps * stride, work.from)),
        stop(work.tiles_before(steps * stride, work.to)),
        position(stop - 1 - group) {}

  // Whether the block has any positions.
  CUFLASH_DEVICE bool has_any() const { return start < stop; }

  CUFLASH_DEVICE int next() {
    if constexpr (!kLooks) {
      const int tile = work.first_tile + position;
      const bool exists = position >= start;
      position -= kWarpGroups;
      return exists ? tile : kNone;
    } else {
#pragma unroll 1
      for (; seen == 0; position -= 32 * kWarpGroups) {
        if (position < start) return kNone;
        const int own = position - (int)lane_index() * kWarpGroups;
        seen = ptx::ballot(own >= start && is_visible(tile_at(own)));
        looked_at = position;
      }
      const u32 lane = 31 - ptx::leading_zeros(seen & (0u - seen));
      seen &= seen - 1;
      return tile_at(looked_at - (int)lane * kWarpGroups);
    }
  }

 private:
  CUFLASH_DEVICE int tile_at(int position) const {
    return work.first_tile + position % steps * stride + position / steps;
  }

  // Whether some row may attend to a key of the tile. The tile need not exist.
  CUFLASH_DEVICE bool is_visible(int tile) const {
    if (tile >= work.first_tile + work.num_tiles) return false;
    bool any = false;
#pragma unroll 4
    for (int i = 0; i < (params.mask_heads == 1 ? 1 : work.group); ++i) {
      const int head = work.first_head() + i;
      TileClass pairs = TileClass::kFull;
      if constexpr (kHasBlockMask) pairs = pairs_of(params, BlockMask(params, work.batch, head), 0, tile);
      if constexpr (kHasTileClasses) pairs = both(pairs, left_by_masks(params, work.batch, head, 0, tile));
      any |= pairs != TileClass::kEmpty;
    }
    return any;
  }
};

// A warp group loads a tile of K or V. A page begins where a tile begins, or within a tile.
template <int columns, class Head>
CUFLASH_DEVICE void load_keys(u32 tile, const Head& head, i64 row_stride, int first_key, int key_stop, int thread) {
  constexpr int kPiece = kPageSize == 0 ? kBlockN : min_of(kBlockN, kPageSize);  // keys one stride from each other
  constexpr int kRow = row_bytes(round_up(columns, CUFLASH_DIM_MULTIPLE), sizeof(KeyStorage));
#pragma unroll
  for (int first = 0; first < kBlockN; first += kPiece) {
    const int key = first_key + first;
    const KeyStorage* rows;
    if constexpr (kPageSize == 0)
      rows = head + key * row_stride;
    else
      rows = key < key_stop ? head.row(key) : head.anywhere();
    load_tile<kPiece, columns, kThreadsPerGroup>(tile + first * kRow, rows, row_stride, 0, key_stop - key, thread);
  }
}

// The ring of a warp group. The tiles of its keys are numbered from the one in use on; K and V of each are a group of
// copies.
struct GroupRing {
  const Params& params;
  const HeadWork& work;
  const WarpGroup& group;
  const u32 s_k, s_v;
  const KeyHead g_k, g_v;
  KeyTileIterator& tiles;
  // Those that are loaded, or are loaded next; kNone where there is none. With the array as a member the struct would
  // stay in memory until loops are unrolled.
  int (&tile)[kNumStages + 1];
  int stage = 0;  // of the tile in use

  CUFLASH_DEVICE GroupRing(const Params& params_, const HeadWork& work_, const WarpGroup& group_,
                           KeyTileIterator& tiles_, int (&tile_)[kNumStages + 1])
      : params(params_),
        work(work_),
        group(group_),
        s_k(group.ring),
        s_v(s_k + kNumStages * kBytesK),
        g_k(keys_of(params, params.k, work.batch, work.head_kv)),
        g_v(keys_of(params, params.v, work.batch, work.head_kv)),
        tiles(tiles_),
        tile(tile_) {
#pragma unroll
    for (int i = 0; i <= kNumStages; ++i) tile[i] = tiles.next();
  }

  CUFLASH_DEVICE bool more() const { return tile[0] != KeyTileIterator::kNone; }
  CUFLASH_DEVICE int first_key() const { return tile[0] * kBlockN; }
  CUFLASH_DEVICE bool needs_mask() const {
    return kHasBlockMask || tile[0] < work.keys.full_start || tile[0] >= work.keys.full_stop;
  }

  CUFLASH_DEVICE void fill() const {
#pragma unroll
    for (int i = 0; i < kNumStages; ++i) {
      load_k(i, i);
      if (i + 1 < kNumStages) load_v(i, i);
    }
  }
  // Waits for K of the tile in use, or for its V, and begins a load into the stage that is free since the last step.
  CUFLASH_DEVICE void wait_for_k() const {
    ptx::copy_async_wait<2 * kNumStages - 2>();
    group.sync();
    load_v(kNumStages - 1, stage == 0 ? kNumStages - 1 : stage - 1);
  }
  CUFLASH_DEVICE void wait_for_v() const {
    ptx::copy_async_wait<2 * kNumStages - 2>();
    group.sync();
    load_k(kNumStages, stage);
  }
  CUFLASH_DEVICE void advance() {
#pragma unroll
    for (int i = 0; i < kNumStages; ++i) tile[i] = tile[i + 1];
    tile[kNumStages] = tiles.next();
    stage = stage == kNumStages - 1 ? 0 : stage + 1;
  }

 private:
  CUFLASH_DEVICE void load_k(int i, int stage) const {
    if (tile[i] != KeyTileIterator::kNone)
      load_keys<kHeadDim>(s_k + stage * kBytesK, g_k, params.k.row_stride, tile[i] * kBlockN, work.key_stop,
                          group.thread);
    ptx::copy_async_commit();
  }
  CUFLASH_DEVICE void load_v(int i, int stage) const {
    if (tile[i] != KeyTileIterator::kNone)
      load_keys<kHeadDimV>(s_v + stage * kBytesV, g_v, params.v.row_stride, tile[i] * kBlockN, work.key_stop,
                           group.thread);
    ptx::copy_async_commit();
  }
};

// The numbered steps of a warp at work on a tile of keys:
//
//   [GEMM 1] S = Q K^T     [2] P = exp(S - m), l += rowsum(P)     [GEMM 3] O += P V
using ScoreTile = Real[1][kNTiles][4];
struct DecodeSteps {
  const HeadWork& work;
  const LaneRows& rows;
  const GroupRing& ring;
  const RowMajorA<row_bytes(kDim)> operand_q;
  const KeysOperand<kDim, 1> operand_k;
  const ValuesOperand<kDimV, kWarpsD> operand_v;
  const HeadScales<kKScale> k_scales;
  const HeadScales<kVScale> v_scales;
  const float k_scale;
  const LaneDropout dropout;

  CUFLASH_DEVICE DecodeSteps(const Params& params, const HeadWork& work_, const LaneRows& rows_, const GroupRing& ring_,
                             u32 s_q, const WarpGroup& group)
      : work(work_),
        rows(rows_),
        ring(ring_),
        operand_q(s_q, group.row),
        operand_k(ring.s_k),
        operand_v(ring.s_v, group.warp_d),
        k_scales(params, params.k_scale, params.k_scale_shift, work.batch, work.head_kv),
        v_scales(params, params.v_scale, params.v_scale_shift, work.batch, work.head_kv),
        k_scale(k_scales.of_head()),
        dropout(params, work, group.lane_row) {}

  // [GEMM 1] S = Q K^T.
  CUFLASH_DEVICE void multiply_scores(ScoreTile& s) const {
    set_zero(s);
    multiply<kDim / kStep>(s, operand_q,
                           [&](int n, int k, Fragment& b) { shifted(operand_k, ring.stage * kBytesK)(n, k, b); });
  }

  // [2] P = exp(S - m), l += rowsum(P).
  CUFLASH_DEVICE void make_p(const float (&q_scale)[1][2], ScoreTile& s, Sums& sums) const {
    const int lane_key = ring.first_key() + fragment_column();
    float scale[kNTiles][2];  // of the keys, then of the values
    k_scales.load(scale, lane_key, work.key_stop);
    multiply_columns<kKScale>(s, scale, k_scale);
    if constexpr (kQScale) multiply_rows(s, q_scale);
    to_scores(rows, rows, s, [](int, int i) { return i / 2; }, lane_key, ring.needs_mask());
    sums.softmax.update(s, sums.out, rows.score[0].exponent_scale());
    if constexpr (kHasDropout) dropout.drop(s[0], rows, lane_key);
    if constexpr (kVScale == 2) {
      v_scales.load(scale, lane_key, work.key_stop);
      sums.value_scales.update(scale, sums.out);
      multiply_columns<kVScale>(s, scale, 1.0f);
    }
  }

  // [GEMM 3] O += P V.
  CUFLASH_DEVICE void add_values(const ScoreTile& p, Sums& sums) const {
    if constexpr (kHasValues) {
      add_product<kBlockN / kStep>(
          sums.out, [&](int, int k, Fragment& a) { to_operand(p[0], k, a); },
          [&](int n, int k, Fragment& b) { shifted(operand_v, ring.stage * kBytesV)(n, k, b); });
    }
  }
};

// Sums over the keys that the warp group has of a head.
CUFLASH_DEVICE void attend(const Params& params, const HeadWork& work, const LaneRows& rows, const WarpGroup& group,
                           KeyTileIterator tiles, Sums& sums) {
  const u32 s_q = ptx::dynamic_shared();
  int tile[kNumStages + 1];
  GroupRing ring(params, work, group, tiles, tile);
  ptx::sync_block();  // with the head before, whose sums lie in the rings
  load_queries<kBlockM, kHeadDim>(s_q, GroupRows<QueryStorage>(params, params.q, work), 0, 0, work.rows);
  ptx::copy_async_commit();
  ring.fill();
  ptx::copy_async_wait<2 * kNumStages - 1>();
  ptx::sync_block();

  const DecodeSteps own(params, work, rows, ring, s_q, group);
  float q_scale[1][2];
  rows.load_scales(params, work, group.lane_row, q_scale[0]);
#pragma unroll 1
  for (; ring.more(); ring.advance()) {
    ScoreTile s;
    ring.wait_for_k();
    own.multiply_scores(s);
    own.make_p(q_scale, s, sums);
    ring.wait_for_v();
    own.add_values(s, sums);
  }
  sums.softmax.finish();
}

// Adds the sums of all warp groups to those of the first one: half of the warp groups hand theirs over, then half of
// the rest.
CUFLASH_DEVICE void merge(const WarpGroup& group, Sums& sums) {
  const auto sums_of = [&](int other) {
    return group.ring + (other - group.index) * (int)kBytesPerGroup + warp_index() % kWarpsPerGroup * kBytesSums;
  };
#pragma unroll
  for (int left = kWarpGroups; left > 1; left = (left + 1) / 2) {
    const int half = (left + 1) / 2;
    if (group.index >= half && group.index < left) {
      group.sync();  // other warps of the warp group may still read their last values
      sums.hand_over(sums_of(group.index), sums_of(group.index) + Sums::kBytesOut);
    }
    ptx::sync_block();
    if (group.index + half < left)
      sums.take_in(sums_of(group.index + half), sums_of(group.index + half) + Sums::kBytesOut);
  }
}

CUFLASH_DEVICE void take_head(const Params& params, const HeadScheduler& scheduler, const WarpGroup& group) {
  const HeadWork work(params, scheduler);
  const LaneRows rows(params, work, group.lane_row);
  const KeyTileIterator tiles(params, work, group.index);
  Sums sums;
  set_zero(sums.out);
  if (tiles.has_any()) {
    attend(params, work, rows, group, tiles, sums);
    merge(group, sums);
  }
  if (group.index > 0) return;
  const HeadScales<kVScale> v_scales(params, params.v_scale, params.v_scale_shift, work.batch, work.head_kv);
  const Real kept_scale = kept_scale_of(params), v_scale = v_scales.of_head();
  const auto factor_of = [&](int half) {
    return sums.value_scales.row_factor(sums.softmax.inverse_sum(0, half) * kept_scale, v_scale);
  };
  const auto visit_pairs = [&](int half, auto visit) {
    if constexpr (kHasValues) visit_row_pairs<kWarpsD>(sums.out[0], group.warp_d, half, visit);
  };
  store_rows(params, scheduler, work, rows, group.lane_row, sums.softmax, sums.out, factor_of, visit_pairs,
             group.warp_d == 0);
}

CUFLASH_DEVICE void decode(const Params& params) {
  if (kCombines && ptx::thread_index() == 0) prepare_arrivals(params);
  const WarpGroup group;
#pragma unroll 1
  for (HeadScheduler scheduler(params); scheduler.more(); scheduler.advance()) take_head(params, scheduler, group);
  if constexpr (kCombines) {
    ptx::sync_block();
    combine_heads<kNumWarps>(params);
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, decode)
