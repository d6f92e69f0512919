// Split-KV: how the blocks of the decode kernels split the keys, and how the results of those that share a head are
// combined: the weight of each one's O is its rescaled sum of exponentials over the total.
//
//   l = sum_i l_i exp(m_i - m)        O = sum_i l_i exp(m_i - m) / l O_i        lse = m + log l
//
// A sink is added to the sum of exponentials here, once, and adds nothing to O. The last block of a head to finish
// combines the results; if the results, or the keys, are many, helpers/split_combine.cu does.
#pragma once
#include "common/softmax/exponential.cuh"
#include "common/io/fragments.cuh"
#include "common/io/params.cuh"
#include "common/schedule/arrivals.cuh"
#include "common/softmax/store_lse.cuh"

// The keys of all key/value heads of the batch, one head after the other, are cut into as many equal splits as there
// are blocks. So a block has keys of one head or of neighbouring heads, and a head belongs to one block or to
// neighbouring blocks. A position among these keys is counted in steps: a head is `blocks` steps long, and a split
// `heads` steps.
struct KeySplits {
  u32 blocks, heads;  // their product is less than 2^31

  CUFLASH_DEVICE explicit KeySplits(const Params& params)
      : blocks(params.resident_blocks), heads(params.batch * params.num_heads_kv) {}

  CUFLASH_DEVICE u32 start_of_head(u32 head) const { return head * blocks; }
  CUFLASH_DEVICE u32 start_of_block(u32 block) const { return block * heads; }
  CUFLASH_DEVICE u32 head_at(u32 position) const { return position / blocks; }
  CUFLASH_DEVICE u32 block_at(u32 position) const { return position / heads; }
};

CUFLASH_DEVICE Real* lse_of(const Params& params, int batch, int head, int query) {
  return (Real*)params.lse.data + batch * params.lse.batch_stride + head * params.lse.head_stride +
         query * params.lse.row_stride;
}

// An element of out. It has the dtype of q, or that of the sums if out is to be merged with the results of other keys.
template <bool is_wide>
struct OutElement {
  using Type = Storage;
};
template <>
struct OutElement<true> {
  using Type = Real;
};
using Out = OutElement<CUFLASH_OUT_WIDE>::Type;

CUFLASH_DEVICE Out* out_of(const Params& params, int batch, int head, int query) {
  return (Out*)params.out.data + batch * params.out.batch_stride + head * params.out.head_stride +
         query * params.out.row_stride;
}

// Rounds and stores two neighbouring columns of a row of the output. `column` is even.
template <class E = Element>
CUFLASH_DEVICE void store_pair(Out* g_row, int column, Real left, Real right) {
  struct alignas(2 * sizeof(Out)) Pair {
    Out value[2];
  } pair;
  if constexpr (sizeof(Out) == 2) {
    const u32 rounded = ptx::pack(E{}, left, right);
    pair.value[0] = (u16)rounded, pair.value[1] = (u16)(rounded >> 16);
  } else {
    pair.value[0] = left, pair.value[1] = right;
  }
  if constexpr (kHeadDimV % 2 == 0 && kStoreBytes >= (int)sizeof(Pair)) {
    if (column < kHeadDimV) *(Pair*)(g_row + column) = pair;
  } else {
    if (column < kHeadDimV) g_row[column] = pair.value[0];
    if (column + 1 < kHeadDimV) g_row[column + 1] = pair.value[1];
  }
}

// A warp combines a chunk of some columns of a row. A lane has four of them. Where a chunk has fewer than 128 columns,
// several groups of lanes have all of them, each for other blocks. The order of additions is fixed, and is the same for
// all widths of chunks: each of kWays sums has every kWays-th block, and then the sums are added in pairs.
constexpr int kWays = 4;
constexpr int chunks_of_row(int columns) { return kHasValues ? (kDimV + columns - 1) / columns : 1; }

// The sum of the exponentials of a row over some keys, and the row max that it is relative to. Storing both
// has a smaller rounding error than storing the logarithm of the sum.
struct PartialSum {
  Real row_max, sum;
};

// The partial results of one head: each of its blocks has one, from its own keys alone. A row stands for a query of one
// of the query heads that share the key/value head: row head_in_group * seqlen_q + query.
struct Partials {
  u32 head;  // among the key/value heads of the batch
  u32 first_block;
  int count;  // blocks of the head
  int rows;   // of the result of one block
  Real* g_out;
  Real* g_sums;

  CUFLASH_DEVICE Partials(const Params& params, const KeySplits& splits, u32 head)
      : head(head),
        first_block(splits.block_at(splits.start_of_head(head))),
        count(splits.block_at(splits.start_of_head(head + 1) - 1) - first_block + 1),
        rows(params.num_heads / params.num_heads_kv * params.seqlen_q) {
    const i64 first_row = (i64)slot(first_block, head) * rows;
    g_out = (Real*)params.partial_out + first_row * kDimV;
    g_sums = (Real*)params.partial_sums + first_row * 2;
  }
  // Sums alone, without output, of `count` blocks that each have the same `rows`.
  CUFLASH_DEVICE Partials(int count_, int rows_, Real* g_sums_)
      : head(0), first_block(0), count(count_), rows(rows_), g_out(nullptr), g_sums(g_sums_) {}

  // Where a partial result is stored. The heads of a block have consecutive slots, and so do the blocks of a head. No
  // two results share a slot: from one result to the next, `block` or `head` grows, or both do.
  CUFLASH_DEVICE static u32 slot(u32 block, u32 head) { return block + head; }

  // Row `row` of O, of kDimV columns, and its PartialSum, in the result of the head's `i`-th block.
  CUFLASH_DEVICE Real* out(int i, int row) const { return g_out + ((i64)i * rows + row) * kDimV; }
  CUFLASH_DEVICE Real* sums(int i, int row) const { return g_sums + ((i64)i * rows + row) * 2; }
  template <class Softmax>
  CUFLASH_DEVICE void store_sum(int i, int row, const Softmax& softmax, int half) const {
    ptx::store_for_blocks_x2(sums(i, row), {softmax.row_max[0][half], softmax.row_sum[0][half]});
  }
  CUFLASH_DEVICE PartialSum load_sum(int i, int row) const {
    Real loaded[2];
    ptx::load_of_blocks_x2(sums(i, row), loaded);
    return {loaded[0], loaded[1]};
  }

  CUFLASH_DEVICE Arrivals arrivals(const Params& params) const {
    return {params, head, (u32)count};  // of blocks that have finished
  }

  // Of block `i`, or of no keys if there is no such block.
  CUFLASH_DEVICE PartialSum sum_of_any(int i, int row) const {
    return i < count ? load_sum(i, row) : PartialSum{-ptx::infinity(), 0};
  }

  // Warp. The sum over the blocks and the sink, which is a row max here; `own` is that of this lane's first block.
  // Every lane gets the same result.
  CUFLASH_DEVICE PartialSum combined_sum(PartialSum own, int row, Real sink) const {
    const auto add = [&own](const PartialSum& next) {
      const Real of_both = max_of(own.row_max, next.row_max);
      own.sum = own.sum * relative(own.row_max, of_both) + next.sum * relative(next.row_max, of_both);
      own.row_max = of_both;
    };
    if (kHasSinks && lane_index() == 0 && sink != -ptx::infinity()) add({sink, 1});
    for (int i = lane_index() + 32; i < count; i += 32) add(load_sum(i, row));
    PartialSum all = own;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) all.row_max = max_of(all.row_max, ptx::shuffle_xor(all.row_max, mask));
    all.sum *= relative(own.row_max, all.row_max);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) all.sum += ptx::shuffle_xor(all.sum, mask);
    return all;
  }

  // Warp. The first of the kWays sums of a lane gets all of them: those of a lane, or of the lanes that share columns.
  template <int column_lanes, int sums>
  CUFLASH_DEVICE static void add_in_pairs(Real (&sum)[sums][4]) {
    static_assert(sums == 1 || sums == 4, "sums are added in pairs, by shuffles or in a lane");
#pragma unroll
    for (int mask = column_lanes; mask < 32; mask *= 2)
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[0][k] += ptx::shuffle_xor(sum[0][k], mask);
    if constexpr (sums == 4) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[0][k] = (sum[0][k] + sum[1][k]) + (sum[2][k] + sum[3][k]);
    }
  }

  // Warp. Stores a chunk of so many columns of a row of out, and with the first chunk the lse of the row.
  template <int columns>
  CUFLASH_DEVICE void combine(const Params& params, int row, int chunk) const {
    constexpr int kColumnLanes = columns / 4, kGroups = 32 / kColumnLanes, kSums = kWays / kGroups;
    // Blocks whose results a lane loads before it sums them: as registers allow, and of no more than 32 together.
    constexpr int kRoom = 64 / sizeof(Real), kAhead = kRoom < 32 / kGroups ? kRoom : 32 / kGroups;
    const int heads_of_group = params.num_heads / params.num_heads_kv;
    const int batch = head / params.num_heads_kv, query = row % params.seqlen_q;
    const int query_head = head % params.num_heads_kv * heads_of_group + row / params.seqlen_q;
    const int lane = lane_index(), group = lane / kColumnLanes;
    const int column = chunk * columns + lane % kColumnLanes * 4;
    Real loaded[kAhead][4];
    const auto load = [&](int first) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int i = first + j * kGroups + group;
        if (i < count && column < kDimV) ptx::load_of_blocks_x4(out(i, row) + column, loaded[j]);
      }
    };
    // The loads of the sums and of the results are in flight together, because latency decides how long this takes.
    PartialSum of_lane = sum_of_any(lane, row);
    load(0);
    const PartialSum total = combined_sum(of_lane, row, kHasSinks ? to_row_max(sink_of(params, query_head)) : 0);
    if (chunk == 0 && lane == 0) store_lse(lse_of(params, batch, query_head, query), total.row_max, total.sum);

    Real sum[kSums][4] = {};
    const Real inverse = 1 / total.sum;
#pragma unroll 1
    for (int first = 0; total.sum != 0 && first < count; first += kAhead * kGroups) {
      if (first > 0) load(first);
      if (first > 0 && first % 32 == 0) of_lane = sum_of_any(first + lane, row);
      const Real weight = of_lane.sum * relative(of_lane.row_max, total.row_max) * inverse;
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int i = first + j * kGroups + group;
        const Real weight_of_block = ptx::shuffle(weight, i % 32);
        if (i >= count || column >= kDimV) continue;
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[j % kSums][k] += weight_of_block * loaded[j][k];
      }
    }
    add_in_pairs<kColumnLanes>(sum);
    if (group > 0) return;
    Out* g_out = out_of(params, batch, query_head, query);
#pragma unroll
    for (int k = 0; k < 4; k += 2) store_pair(g_out, column + k, sum[0][k], sum[0][k + 1]);
  }
};
