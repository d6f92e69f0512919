// Decode with an fp8 KV cache on compute capability 9.0.
//
// The producer, the rings and the splits of keys are those of sm90/decode.cu, but the products differ. wgmma takes
// 16-bit operands from shared memory alone, so each byte would pass through shared memory three times: as it arrives,
// once more to be converted, and as the two bytes that it becomes. Here a warp loads bytes as fragments of mma and
// converts them in registers, so that memory is the only limit.
//
// Each warp of the consumer takes kUnit keys of a tile at a time for 16 rows. If all queries fit into 16 rows, the
// four warps divide the keys of a tile. If they fit into 32 rows, two warps have each half of the rows and divide the
// keys. With more rows, each warp takes all keys for its own rows. Every warp has its own online softmax and O, so that
// no warp waits for another one until the end of a head, where the sums of warps with the same rows are merged.
//
//   barrier      one phase is over when           who waits
//   q_full       Q of a head has arrived          consumer, before it takes Q to registers
//   q_empty      every warp is done with the head producer, before Q of the next head
//   k_full[i], v_full[i]    tiles are in stage i  consumer, before S and before O
//   k_empty[i], v_empty[i]  every warp has its    producer, before the next ones in stage i
//                           S, or its O
//   named: one for the consumer
#include "common/config.cuh"
#include "common/io/float8.cuh"
#include "common/io/fragments.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/softmax.cuh"
#include "common/softmax/warp_sums.cuh"
#include "sm90/decode_work.cuh"
#include "sm90/tiles.cuh"

// The operand type of the products. Every fp8 number is a float16 number too; one instruction converts two.
using Operand = Float16;
constexpr bool kNarrowsQueries = !kFloat8Queries && !kIsFloat16<Element>;

constexpr int kUnit = kDim + kDimV > 384 ? 16 : 32;  // keys at a time: Q and O of wide heads leave few registers
constexpr int kUnitTiles = kUnit / 8, kSteps = kDim / 16;
constexpr int kColumnBlock = 32;  // columns of V of which a lane loads four at once
constexpr int kColumnBlocks = ceil_div(kDimV, kColumnBlock), kOutTiles = 4 * kColumnBlocks;
static_assert(kBlockN % kUnit == 0, "tiles are cut into units");

// Q is in registers while keys pass, so at the end of a head its shared memory is free: there two warps leave their O
// for two others. The statistics of these two warps lie after the barriers: those of 16 rows, and a power of two.
using Sums = WarpSums<Operand, kOutTiles>;
constexpr u32 kBytesQ = max_of(chunked_bytes(kBlockM, kDim), 2 * Sums::kBytesOut);
using Shared = DecodeShared<kBytesQ, 2 * Sums::kBytesStatistics>;

// The address of columns `column` to `column` + 3 in row `row` of a tile of queries, whose lines have `columns`
// columns.
template <int columns>
CUFLASH_DEVICE u32 address_of(u32 tile, int row, u32 column) {
  const u32 within = column % columns * (kLineBytes / columns);
  return tile + (column / columns * kBlockM + row) * kLineBytes + (within / 16 * 16 ^ row % 8 * 16) + within % 16;
}

// How the warps of the consumer divide the rows of a head and the keys of a tile.
struct Division {
  int splits;     // warps that have the same rows, each with a split of the keys
  int split;      // which of them this warp is
  int first_row;  // of the 16 rows of this warp

  CUFLASH_DEVICE explicit Division(int rows)
      : splits(rows <= 16   ? 4
               : rows <= 32 ? 2
                            : 1),
        split(warp_index() % splits),
        first_row(warp_index() / splits * 16) {}
};

// 16 rows of Q as operands, in the order in which lanes load keys: a lane has four neighbouring columns of every 16.
struct Queries {
  u32 word[kSteps][4];

  // Rows that stand for no query become zero, whatever lies there.
  CUFLASH_DEVICE void load(u32 tile, int first_row, int rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + fragment_row() + 8 * half;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const u32 column = step * 16 + 2 * fragment_column();
        u32 low = 0, high = 0;
        if (row < rows) {
          if constexpr (kFloat8Queries) {
            const u32 bytes = ptx::load_shared_b32(address_of<kKeyChunk>(tile, row, column));
            ptx::to_float16x4(KeyElement{}, bytes, low, high);
          } else {
            const u32 address = address_of<kChunk>(tile, row, column);
            low = ptx::load_shared_b32(address), high = ptx::load_shared_b32(address + 4);
          }
        }
        word[step][half] = low, word[step][2 + half] = high;
      }
    }
  }

  // Converts bfloat16 to float16. Each row is multiplied by the power of two that brings its largest number to the top
  // of the range, so that a number that underflows is 2^39 times smaller than the largest. `inverse` undoes the powers.
  CUFLASH_DEVICE void narrow(float (&inverse)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 largest = 0;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        const u32 pair = word[i / 2][i % 2 * 2 + half];
        largest = max_of(largest, max_of(pair & 0x7fff0000, pair << 16 & 0x7fff0000));
      }
      largest = max_of(largest, ptx::shuffle(largest, lane_index() ^ 1));
      largest = max_of(largest, ptx::shuffle(largest, lane_index() ^ 2));
      const int exponent = (int)(largest >> 23) - 127;
      const int shift = exponent > 127 ? 0 : min_of(14 - exponent, 126);
      const float factor = power_of_two(shift);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        u32& pair = word[i / 2][i % 2 * 2 + half];
        pair = ptx::pack(Operand{}, ptx::float_of(pair << 16) * factor, ptx::float_of(pair & 0xffff0000) * factor);
      }
      inverse[half] = power_of_two(-shift);
    }
  }
};

// [GEMM 1] S = Q K^T, for the kUnit keys from row `first` of a tile on. `first` is a multiple of 8.
CUFLASH_DEVICE void multiply_s(float (&s)[kUnitTiles][4], const Queries& q, u32 tile, int first) {
  const u32 g = fragment_row(), lane = (tile + (first + g) * kLineBytes + 2 * fragment_column()) ^ g * 16;
#pragma unroll
  for (auto& n_tile : s) n_tile[0] = n_tile[1] = n_tile[2] = n_tile[3] = 0.0f;
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int n = 0; n < kUnitTiles; ++n) {
      u32 low, high;
      ptx::to_float16x4(KeyElement{},
                        ptx::load_shared_b32((lane ^ step % 8 * 16) + (step / 8 * kBlockN + 8 * n) * kLineBytes), low,
                        high);
      ptx::mma_m16n8k16(Operand{}, s[n], q.word[step], low, high);
    }
}

// [GEMM 3] O += P V, for the same keys. A lane loads four columns of four keys, and each of the columns belongs to
// another n-tile of O: column c of n-tile 4 b + j is column 32 b + 4 c + j of V. Unless the keys are `whole`, rows from
// `valid` on count as zeros: their weights are 0, but what lies there may be NaN, and 0 times NaN is NaN. Tensor maps
// may reach over more keys than there are (cuflash/gpu/launch.py says why).
template <bool whole>
CUFLASH_DEVICE void multiply_o(float (&o)[kOutTiles][4], const float (&s)[kUnitTiles][4], u32 tile, int first,
                               int valid) {
  const u32 g = fragment_row(), row = first + fragment_column();
  // Addresses in an even row and in the next one.
  const u32 even = (tile + row * kLineBytes + g % 4 * 4) ^ (g / 4 * 16 ^ fragment_column() * 16), odd = even ^ 16;
#pragma unroll
  for (int k = 0; k < kUnit / 16; ++k) {
    FragmentOf<Operand> p;
    to_operand(s, k, p);
#pragma unroll
    for (int b = 0; b < kColumnBlocks; ++b) {
      u32 of_key[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int below = 16 * k + i % 2 + i / 2 * 8;
        const u32 at_block = (i % 2 == 0 ? even : odd) ^ b % 4 * 32;
        of_key[i] = ptx::load_shared_b32(at_block + (b / 4 * kBlockN + below) * kLineBytes);
        if (!whole && (int)row + below >= valid) of_key[i] = 0;
      }
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const u32 selector = j == 0 ? 0x5140 : 0x7362;  // columns j and j + 1 of two keys, ordered by column
        u32 first_keys[2], last_keys[2];
        ptx::to_float16x4(KeyElement{}, ptx::permute_bytes(of_key[0], of_key[1], selector), first_keys[0],
                          first_keys[1]);
        ptx::to_float16x4(KeyElement{}, ptx::permute_bytes(of_key[2], of_key[3], selector), last_keys[0], last_keys[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) ptx::mma_m16n8k16(Operand{}, o[4 * b + j + i], p.word, first_keys[i], last_keys[i]);
      }
    }
  }
}

// Adds the sums of all splits to those of the first one: half of the splits hand theirs over, then half of the rest.
CUFLASH_DEVICE void merge(Sums& sums, const Division& division, const Shared& shared) {
  for (int half = division.splits / 2; half > 0; half /= 2) {
    const u32 pair = division.split % half + division.first_row / 16 * half;
    const u32 address = shared.q + pair * Sums::kBytesOut, statistics = shared.more + pair * Sums::kBytesStatistics;
    if (division.split >= half && division.split < 2 * half) {
      sums.hand_over(address, statistics);
      ptx::fence_async_proxy();  // the next Q will arrive there
    }
    sync_consumer();
    if (division.split < half) sums.take_in(address, statistics);
    sync_consumer();
  }
}

// The consumer takes one head after another.
struct Consumer {
  const DecodeParams& params;
  const Params& common;
  const Shared& shared;
  const Division division;
  const int lane_row[2];  // this lane holds slices of these two rows
  Position<kNumStages> at;
  Position<1> q_at;
  Queries q;

  CUFLASH_DEVICE Consumer(const DecodeParams& params_, const Shared& shared_)
      : params(params_),
        common(params_.common),
        shared(shared_),
        division(common.num_heads / common.num_heads_kv * common.seqlen_q),
        lane_row{division.first_row + fragment_row(), division.first_row + fragment_row() + 8} {}

  CUFLASH_DEVICE void take_head(const HeadScheduler& scheduler) {
    const HeadWork work(common, scheduler);
    const LaneRows rows(common, work, lane_row);
    const HeadScales<kVScale> v_scales(common, common.v_scale, common.v_scale_shift, work.batch, work.head_kv);
    float q_scale[1][2], narrowed[2] = {1.0f, 1.0f};
    rows.load_scales(common, work, lane_row, q_scale[0]);
    Sums sums;
    set_zero(sums.out);
    if (work.has_keys()) {
      shared.q_ring.full(q_at).wait(q_at.parity);
      q.load(shared.q, division.first_row, work.rows);
      if constexpr (kNarrowsQueries) q.narrow(narrowed);
      ptx::fence_async_proxy();  // as in arrive_after_reads
      sync_consumer();           // what is handed over goes where they lie
    }
    q_scale[0][0] *= narrowed[0], q_scale[0][1] *= narrowed[1];
#pragma unroll 1
    for (int n_block = work.keys.stop - 1; n_block >= work.keys.start; --n_block, at.advance()) {
      shared.k_ring.full(at).wait(at.parity);
      if (division.first_row < work.rows) {
#pragma unroll 1
        for (int unit = division.split; unit < kBlockN / kUnit; unit += division.splits)
          softmax_step(work, rows, v_scales, q_scale, n_block, unit * kUnit, sums);
      }
      shared.v_ring.full(at).wait(at.parity);
      arrive_after_reads(shared.k_ring.empty(at), shared.v_ring.empty(at));
    }
    sums.softmax.finish();
    if (work.has_keys()) {
      merge(sums, division, shared);
      arrive_after_reads(shared.q_ring.empty(q_at));
      q_at.advance();
    }
    if (division.split == 0) store(scheduler, work, rows, v_scales.of_head(), sums);
  }

 private:
  // Adds kUnit keys of a tile to the sums, from row `first` of the tile on.
  CUFLASH_DEVICE void softmax_step(const HeadWork& work, const LaneRows& rows, const HeadScales<kVScale>& v_scales,
                                   const float (&q_scale)[1][2], int n_block, int first, Sums& sums) {
    const int valid = work.key_stop - n_block * kBlockN, first_key = n_block * kBlockN + first;
    if (first >= valid) return;
    const HeadScales<kKScale> k_scales(common, common.k_scale, common.k_scale_shift, work.batch, work.head_kv);
    float scales_of_keys[1], scales_of_values[1], scale[kUnitTiles][2], s[1][kUnitTiles][4];
    k_scales.load_by_lanes(scales_of_keys, first_key, work.key_stop);
    v_scales.load_by_lanes(scales_of_values, first_key, work.key_stop);
    multiply_s(s[0], q, shared.k + at.stage * kBytesK, first);
    k_scales.gather(scale, scales_of_keys);
    multiply_columns<kKScale>(s, scale, k_scales.of_head());
    if constexpr (kQScale || kNarrowsQueries) multiply_rows(s, q_scale);
    const bool masked = n_block < work.keys.full_start || n_block >= work.keys.full_stop;
    rows.score[0].cap(s);
    to_scores<true>(rows, rows, s, [](int, int i) { return i / 2; }, first_key + fragment_column(), masked);
    sums.softmax.update(s, sums.out, rows.score[0].exponent_scale());
    if constexpr (kVScale == 2) {
      v_scales.gather(scale, scales_of_values);
      sums.value_scales.update(scale, sums.out);
      multiply_columns<kVScale>(s, scale, v_scales.of_head());
    }
    shared.v_ring.full(at).wait(at.parity);
    const u32 v = shared.v + at.stage * kBytesV;
    if (first + kUnit <= valid)
      multiply_o<true>(sums.out[0], s[0], v, first, valid);
    else
      multiply_o<false>(sums.out[0], s[0], v, first, valid);
  }

  CUFLASH_DEVICE void store(const HeadScheduler& scheduler, const HeadWork& work, const LaneRows& rows, float v_scale,
                            Sums& sums) const {
    const auto visit_pairs = [&](int half, auto visit) {
#pragma unroll
      for (int b = 0; b < kColumnBlocks; ++b)
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const int column = b * kColumnBlock + 4 * fragment_column() + i, n = 4 * b + i % 4;
          if (column < kDimV) visit(column, sums.out[0][n][2 * half + i / 4], sums.out[0][n + 1][2 * half + i / 4]);
        }
    };
    store_rows(
        common, scheduler, work, rows, lane_row, sums.softmax, sums.out,
        [&](int half) { return sums.value_scales.row_factor(sums.softmax.inverse_sum(0, half), v_scale); },
        visit_pairs);
  }
};

CUFLASH_DEVICE void consume(const DecodeParams& params, const Shared& shared) {
  if (kCombines && ptx::thread_index() == 0) prepare_arrivals(params.common);
  Consumer consumer(params, shared);
#pragma unroll 1
  for (HeadScheduler scheduler(params.common); scheduler.more(); scheduler.advance()) consumer.take_head(scheduler);
  if constexpr (kCombines) {
    sync_consumer();
    combine_heads<kConsumerWarps>(params.common);
  }
}

CUFLASH_DEVICE void decode(const DecodeParams& params) {
  Shared shared;
  shared.make_barriers(kConsumerWarps, kConsumerWarps, kConsumerWarps);
  if (ptx::uniform(warp_index()) < kConsumerWarps)
    consume(params, shared);
  else if (ptx::elect_lane())
    produce(params, shared);
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, DecodeParams, kNumThreads, kMinBlocks, decode)
