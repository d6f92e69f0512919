// Forward pass of fp8 q, k and v on compute capability 9.0, with wgmma and TMA.
//
//   S = Q K^T        P = exp(S - m)        l = rowsum(P)        O = P V / l        lse = m + log l
//
// The kernel is persistent, with consumers that own 64 queries each, as sm90/forward.cu is. What differs:
//   - fp8 products read both operands along k, so the keys of V must be neighbours in memory. The first warp of
//     the last warpgroup is the producer; its other three, the transposers, transpose each tile of V in shared memory.
//   - Weights are rounded to float8_e4m3, which has 3 bits after the first and ends at 448. Row maxima keep
//     them near 2^kHeadroom, where what is far below the largest still has all bits.
//   - Tensor cores keep 14 bits of sums of fp8 products. So each tile of keys has a product of its own, and the
//     kernel adds these to O in float32.
//   - l is the sum of the rounded weights: V has a column of ones after its last one. So O / l is a mean of values,
//     whatever the rounding does.
// q_scale, k_scale and scale become one factor of the exponents, v_scale one of what a tile adds to O, or of O.
//
//   barrier      one phase is over when              who waits
//   q_full[i]    Q has arrived in stage i            consumers, before S
//   q_empty[i]   every warp has its last S           producer, before the next Q in stage i
//   k_full[i]    K has arrived in stage i            consumers, before S
//   k_empty[i]   every consumer has its S            producer, before the next K in stage i
//   v_full[i]    V has arrived in stage i            transposers
//   v_empty[i]   they have read it                   producer, before the next V in stage i
//   t_full[i]    V transposed is in stage i          consumers, before O
//   t_empty[i]   every consumer has its O            transposers, before the next one in stage i
//   named: one per consumer for its turn at exponentials; one per consumer for itself
#include "common/config.cuh"
#include "common/io/float8.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/softmax.cuh"
#include "sm90/forward_roles.cuh"
#include "sm90/key_tile.cuh"
#include "sm90/ping_pong.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

using Weight = Float8E4M3;
constexpr int kQStages = CUFLASH_Q_STAGES;          // tiles of queries
constexpr int kValueStages = CUFLASH_VALUE_STAGES;  // tiles of V before they are transposed
constexpr bool kOverlaps = CUFLASH_OVERLAPS;        // S of a tile overlaps O of the tile before
constexpr int kBytesChunk = kLineBytes;             // columns of a line
constexpr int kTransposers = 3;                     // warps
constexpr int kNTiles = kBlockN / 8;
constexpr int kOnes = 8;  // rows of ones after V transposed: as few as a product takes
// The columns of O that one product makes, of several in turn where the sums of all would take too many registers.
constexpr int kSliceColumns = kDimV <= 128 ? kDimV : 64;
constexpr int kSlices = kDimV / kSliceColumns, kSliceTiles = kSliceColumns / 8;
// Where O has several slices, l is a product of its own, so that all accumulators that share registers have one size.
// When the last slice had 8 columns more than the others, ptxas failed to place them in a third of all variants,
// different ones with every version, and waited for each product by itself.
constexpr bool kSumsSeparately = kSlices > 1;
constexpr int kSumTiles = kSliceTiles + !kSumsSeparately;
static_assert(kDimV % kSliceColumns == 0 && kDim % 32 == 0 && kDimV % 32 == 0 && kBlockN % 32 == 0, "whole products");
static_assert(kBlockN <= kLineBytes, "a line has the keys of a tile");
// Where they take turns, one consumer makes exponentials at a time, while the products of others run. Left alone,
// consumers may drift into step: they share the units, are done at once, and then leave them idle.
using ExponentialTurns = PingPong<CUFLASH_PING_PONG, kConsumers, kPingPongBarrier>;

constexpr u32 kBytesQ = ceil_div(kDim, kBytesChunk) * kBlockM * kLineBytes;
constexpr u32 kBytesK = ceil_div(kDim, kBytesChunk) * kBlockN * kLineBytes;
constexpr u32 kBytesV = ceil_div(kDimV, kBytesChunk) * kBlockN * kLineBytes;
constexpr u32 kBytesT = (kDimV + kOnes) * kLineBytes;
constexpr u32 kBytesBarriers = Ring<kQStages>::kBytes + 2 * Ring<kNumStages>::kBytes + Ring<kValueStages>::kBytes;
static_assert(kQStages * kBytesQ + kNumStages * (kBytesK + kBytesT) + kValueStages * kBytesV + kBytesBarriers ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers of a thread. All together they are at most what the block starts with.
constexpr int kProducerRegisters = kConsumers == 2 ? 56 : 32;
constexpr int kConsumerRegisters = kConsumers == 2 ? 224 : kConsumers == 3 ? 160 : 112;

// The largest weight of a row is 2^kHeadroom when its row max is set. It may grow until one rounds to kLargestCode:
// then the row max is set again.
constexpr float kHeadroom = 6.0f;
constexpr u32 kLargestCode = 0x7e;

// Exponentials run on the unit for special functions, which all weights together keep busy for as long as the products
// take. So half of the weights use integer arithmetic instead (`PowersByLine`). With more columns the products take
// longer, and all weights are exponentials.
constexpr bool kMixes = kDim <= 128 && kDimV <= 128;

// Approximates 2^x by writing the bits of a float16 as an integer: 1024 (x + 15) is exact where x is whole, and linear
// in x between two powers (Schraudolph, "A fast, compact approximation of the exponential function", 1999). The
// relative error is -4.0 % to +2.1 %; kLower shifts the line down so that the mean error is 0. After the rounding to
// three bits the error is less than 1/12, where that of an exponential is less than 1/16.
struct PowersByLine {
  // The bits of the float16 1, what the line is lowered by, and 2^23: a float32 of 2^23 or more has an integer in its
  // lowest bits.
  static constexpr float kOne = 15360.0f, kLower = 59.0f, kWhole = 8388608.0f;
  static constexpr int kBitsOfWhole = 0x4b000000, kLargestBits = 0x7fff;  // of 2^23, and a NaN of float16
  float slope, start;

  // x is `score * factor - row_max`.
  CUFLASH_DEVICE PowersByLine(float factor, float row_max)
      : slope(1024.0f * factor), start(kWhole + kOne - kLower - 1024.0f * row_max) {}

  // Two weights. An x far below 0 gives 0. An x far above gives NaN; so does NaN, and so does an x between -2^14 and
  // -2^13, where the sum of integers overflows. `round_weights` reports a NaN as a large weight, and the caller then
  // makes the weights of the tile again from exponentials. So none of these is wrong in the end.
  CUFLASH_DEVICE u32 pair(float low, float high) const { return ptx::permute_bytes(bits(low), bits(high), 0x5410); }

 private:
  CUFLASH_DEVICE u32 bits(float score) const {
    return ptx::clamped_sum((int)ptx::bits_of(score * slope + start), -kBitsOfWhole, kLargestBits);
  }
};

struct ForwardParams {
  Params common;
  TensorMap q, k, v;
};
static_assert(sizeof(ForwardParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

struct Shared {
  u32 q, k, v, t;
  Ring<kQStages> q_ring;
  Ring<kNumStages> k_ring, t_ring;
  Ring<kValueStages> v_ring;

  CUFLASH_DEVICE Shared() {
    q = ptx::dynamic_shared();
    k = q + kQStages * kBytesQ;
    v = k + kNumStages * kBytesK;
    t = v + kValueStages * kBytesV;
    q_ring = {t + kNumStages * kBytesT};
    k_ring = {q_ring.address + Ring<kQStages>::kBytes};
    t_ring = {k_ring.address + Ring<kNumStages>::kBytes};
    v_ring = {t_ring.address + Ring<kNumStages>::kBytes};
  }

  // Called by all threads of the block.
  CUFLASH_DEVICE void initialise() const {
    if (ptx::thread_index() == 0) {
      q_ring.init(4 * kConsumers);
      k_ring.init(kConsumers);
      v_ring.init(kTransposers);
      t_ring.init(kConsumers, kTransposers);
      ptx::fence_barrier_init();
    }
    for (int stage = 0; stage < kNumStages; ++stage) {
      const u32 ones = t + stage * kBytesT + kDimV * kLineBytes;
      for (u32 word = ptx::thread_index(); word < kOnes * kLineBytes / 4; word += kNumThreads)
        ptx::store_shared_b32(ones + word * 4, 0x01010101u * one_code(KeyElement{}));
    }
    ptx::fence_async_proxy();
    ptx::sync_block();
  }

 private:
  CUFLASH_DEVICE static constexpr u32 one_code(Float8E4M3) { return 0x38; }
  CUFLASH_DEVICE static constexpr u32 one_code(Float8E5M2) { return 0x3c; }
};

// The producer: one thread. It iterates over the tiles as the consumers do, as far ahead of them as the rings allow.
CUFLASH_DEVICE void produce(const ForwardParams& params, const Shared& shared) {
  Position<kQStages> query;
  Position<kNumStages> key;
  Position<kValueStages> value;
  for (TileScheduler scheduler(params.common); scheduler.more(); scheduler.advance(), query.advance()) {
    const QueryTile tile(params.common, scheduler.work(params.common));
    const Barrier q_full = shared.q_ring.full(query);
    shared.q_ring.empty(query).wait(query.parity ^ 1);
    q_full.arrive_expect(kBytesQ);
#pragma unroll
    for (int c = 0; c < ceil_div(kDim, kBytesChunk); ++c)
      ptx::load_tensor(shared.q + query.stage * kBytesQ + c * kBlockM * kLineBytes, params.q, q_full.address,
                       c * kBytesChunk, tile.first_row, tile.work.head, tile.work.batch);
    for (int n_block = tile.keys.stop - 1; n_block >= tile.keys.start; --n_block, key.advance(), value.advance()) {
      const KeyTile keys(params.common, tile.work.batch, tile.head_kv, tile.keys.at(n_block), tile.key_stop);
      shared.k_ring.empty(key).wait(key.parity ^ 1);
      keys.load<kDim, kBytesChunk>(shared.k + key.stage * kBytesK, params.k, shared.k_ring.full(key));
      shared.v_ring.empty(value).wait(value.parity ^ 1);
      keys.load<kDimV, kBytesChunk>(shared.v + value.stage * kBytesV, params.v, shared.v_ring.full(value));
    }
  }
}

// Transposes 16 columns of V. TileClass of neighbouring columns move as elements of 16 bits; then columns separate.
//
// Keys come out in the order in which a lane has weights of four of them: 0, 1, 8, 9, 2, 3, 10, 11, … of every 16. And
// of 16 columns the even ones come first, so that eight neighbouring lines are written at once; `store_out` knows.
template <class Ends>
CUFLASH_DEVICE void transpose(u32 target, u32 source, u32 columns, int valid, Ends) {
  constexpr int kGroups = kBlockN / 32;
  const u32 lane = lane_index(), swizzle = lane % 8 * 16, matrix = lane / 8;
  const u32 from = source + (columns / 8 * kBlockN + lane) * kLineBytes + (columns % 8 * 16 ^ swizzle);
  const u32 to = target + (columns * 16 + matrix % 2 * 8 + lane % 8) * kLineBytes + (matrix / 2 * 16 ^ swizzle);
  u32 pairs[kGroups][4];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) ptx::load_matrix_x4_transposed(pairs[g], from + g * 32 * kLineBytes);
  if constexpr (Ends::value) {  // what lies after the last key may be NaN
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) {
      const int left = valid - (8 * i + fragment_column());
      pairs[i / 4][i % 4] = left <= 0 ? 0 : left == 1 ? pairs[i / 4][i % 4] & 0xffff : pairs[i / 4][i % 4];
    }
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const u32 parted[4] = {
        ptx::permute_bytes(pairs[g][0], pairs[g][1], 0x6420), ptx::permute_bytes(pairs[g][0], pairs[g][1], 0x7531),
        ptx::permute_bytes(pairs[g][2], pairs[g][3], 0x6420), ptx::permute_bytes(pairs[g][2], pairs[g][3], 0x7531)};
    ptx::store_matrix_x4(to ^ g * 32, parted);
  }
}

// A transposer, one warp of kTransposers.
CUFLASH_DEVICE void transpose_values(const Params& params, const Shared& shared, u32 index) {
  Position<kNumStages> key;
  Position<kValueStages> value;
  for (TileScheduler scheduler(params); scheduler.more(); scheduler.advance()) {
    const QueryTile tile(params, scheduler.work(params));
    for (int n_block = tile.keys.stop - 1; n_block >= tile.keys.start; --n_block, key.advance(), value.advance()) {
      const int valid = tile.key_stop - tile.keys.at(n_block) * kBlockN;
      shared.v_ring.full(value).wait(value.parity);
      shared.t_ring.empty(key).wait(key.parity ^ 1);
      const auto transpose_all = [&](auto ends) {
#pragma unroll 1
        for (u32 columns = index; columns < kDimV / 16; columns += kTransposers)
          transpose(shared.t + key.stage * kBytesT, shared.v + value.stage * kBytesV, columns, valid, ends);
      };
      if (valid < kBlockN)
        transpose_all(Constant<true>{});
      else
        transpose_all(Constant<false>{});
      ptx::fence_async_proxy();
      arrive_as_warp(shared.v_ring.empty(value));
      arrive_as_warp(shared.t_ring.full(key));
    }
  }
}

// A consumer warpgroup, `index` of kConsumers, at one tile of queries, of which it owns 64. Products are numbered:
//
//   [GEMM 1] S = Q K^T        [2] P = exp(S - m)        [GEMM 3] O += P V, l += P 1
struct Consumer {
  using Scores = float[1][kNTiles][4];

  const Params& common;
  const Shared& shared;
  const u32 index;
  const ExponentialTurns& turns;
  const bool elected;
  Position<kNumStages>& key;
  const QueryTile& tile;
  const u32 s_q;
  const int lane_row;
  const HeadScales<kKScale> k_scales;
  const HeadScales<kVScale> v_scales;
  float row_factor[2];  // of a product, for its exponent: all of it but scales of blocks of keys

  OnlineSoftmax<1, false> softmax;  // row maxima are exponents, whatever factors products have
  float o[1][kDimV / 8 + 1][4];     // and after it l
  u32 p[kBlockN / 32][4];
  bool all_started = false;  // rows of the warp have row maxima, none of which is beyond kLargestFused

  CUFLASH_DEVICE Consumer(const Params& common_, const Shared& shared_, u32 index_, const ExponentialTurns& turns_,
                          const Position<kQStages>& query, Position<kNumStages>& key_, const QueryTile& tile_)
      : common(common_),
        shared(shared_),
        index(index_),
        turns(turns_),
        elected(ptx::thread_index() % 128 == 0),
        key(key_),
        tile(tile_),
        s_q(shared.q + query.stage * kBytesQ + index * 64 * kLineBytes),
        lane_row(tile.first_row + index * 64 + warp_index() % 4 * 16 + fragment_row()),
        k_scales(common, common.k_scale, common.k_scale_shift, tile.work.batch, tile.head_kv),
        v_scales(common, common.v_scale, common.v_scale_shift, tile.work.batch, tile.head_kv) {
    set_zero(o);
    const QueryScales q_scales(common, tile.work.batch, tile.work.head);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      row_factor[half] = scale_of(common) * kLog2e * k_scales.of_head() * q_scales.of(lane_row + 8 * half);
  }

  CUFLASH_DEVICE void release(const Barrier& empty) const {
    if (elected) empty.arrive();
  }

  // [GEMM 1] S = Q K^T.
  CUFLASH_DEVICE void issue_s(Scores& s) const {
    shared.k_ring.full(key).wait(key.parity);
    const u64 queries = descriptor_of(s_q), keys = descriptor_of(shared.k + key.stage * kBytesK);
    issue(s[0], [&]() __attribute__((always_inline)) {
#pragma unroll
      for (int k = 0; k < kDim / 32; ++k)
        ptx::wgmma_k32(KeyElement{}, KeyElement{}, s[0], along_k<kBlockM>(queries, k), along_k<kBlockN>(keys, k),
                       k > 0);
    });
  }
  CUFLASH_DEVICE void wait_for_s(Scores& s) const {
    wait_for<0>(s[0]);
    release(shared.k_ring.empty(key));
  }

  // Multiplies scores by their factors, which are 1 then.
  CUFLASH_DEVICE static void multiply(Scores& s, float (&factor)[2]) {
    for_each_score([&](int n, int i) { s[0][n][i] = ptx::multiply(s[0][n][i], factor[i / 2]); });
    factor[0] = factor[1] = 1;
  }
  // Hides pairs. Exponents are what it leaves times `factor`: a hidden one is -inf.
  CUFLASH_DEVICE void hide(Scores& s, float (&factor)[2], int n_block) const {
    if (!(fminf(factor[0], factor[1]) > 0)) multiply(s, factor);
    const Mask mask(common, tile.work.batch, tile.work.head, tile.key_stop);
    const int lane_key = tile.keys.at(n_block) * kBlockN + fragment_column();
    for_each_score([&](int n, int i) {
      if (!mask.visible(lane_row + i / 2 * 8, lane_key + 8 * n + i % 2)) s[0][n][i] = -ptx::infinity();
    });
  }
  template <class Visit>
  CUFLASH_DEVICE static void for_each_score(Visit visit) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) visit(n, i);
  }

  // Lets row maxima follow the maxima of a tile, and what was summed before follow them.
  CUFLASH_DEVICE void raise_row_maxima(const Scores& s, const float (&factor)[2]) {
    float of_sums[1][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A factor below 0 makes the smallest product the largest exponent. The sign alone is multiplied in here: if the
      // factor were, the compiler would make these exponents for all tiles, few of which come here.
      const float sign = factor[half] < 0 ? -1.0f : 1.0f;
      float largest = -ptx::infinity();
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
        largest = fmaxf(largest, fmaxf(sign * s[0][n][2 * half], sign * s[0][n][2 * half + 1]));
      largest = fmaxf(largest, ptx::shuffle_xor(largest, 1));
      largest = fmaxf(largest, ptx::shuffle_xor(largest, 2));
      float& row_max = softmax.row_max[0][half];
      const float raised = fmaxf(largest * fabsf(factor[half]) - kHeadroom, row_max);
      of_sums[0][half] = raised == row_max ? 1.0f : exponential(row_max - raised);
      row_max = raised;
    }
    softmax.rescale(o, of_sums);
    all_started = !ptx::any_lane(!(fmaxf(fabsf(softmax.row_max[0][0]), fabsf(softmax.row_max[0][1])) <= kLargestFused));
  }

  // Makes weights of scores. With Mixed, every second tile of 8 columns uses PowersByLine, the even ones for the first
  // of a lane's rows and the odd ones for the second. Returns whether a weight of this lane is the largest number, or
  // NaN.
  template <class Mixed>
  CUFLASH_DEVICE bool round_weights(const Scores& s, const float (&factor)[2], Mixed) {
    u32 carries = 0;
    const float row_max[2] = {finite_row_max(0), finite_row_max(1)};
    const PowersByLine line[2] = {{factor[0], row_max[0]}, {factor[1], row_max[1]}};
#pragma unroll
    for (int k = 0; k < kBlockN / 32; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i % 2, n = 4 * k + i / 2 * 2;
        const auto pair = [&](int m) {
          const float low = s[0][m][2 * half], high = s[0][m][2 * half + 1];
          if (Mixed::value && (m + half) % 2 == 0) return (u32)ptx::to_float8x2(Weight{}, line[half].pair(low, high));
          return (u32)ptx::to_float8x2(Weight{}, exponential(ptx::fused(low, factor[half], -row_max[half])),
                                       exponential(ptx::fused(high, factor[half], -row_max[half])));
        };
        p[k][i] = pair(n) | pair(n + 1) << 16;
        carries |= p[k][i] + 0x01010101u * (0x80 - kLargestCode);
      }
    return (carries & 0x80808080u) != 0;
  }
  // While no key was visible, exponents are taken relative to 0, and are -inf.
  CUFLASH_DEVICE float finite_row_max(int half) const {
    return softmax.row_max[0][half] == -ptx::infinity() ? 0.0f : softmax.row_max[0][half];
  }

  // [2] P = exp(S - m).
  template <class Masked>
  CUFLASH_DEVICE void softmax_step(Scores& s, int n_block, Masked) {
    float factor[2] = {row_factor[0], row_factor[1]};
    if constexpr (kKScale == 2) {
      const float of_keys = k_scales.of(tile.keys.at(n_block) * kBlockN);
      factor[0] *= of_keys, factor[1] *= of_keys;
    }
    if constexpr (Masked::value) hide(s, factor, n_block);
    turns.wait();
    bool raise = !all_started;
    if (!raise) raise = ptx::any_lane(round_weights(s, factor, Constant<kMixes>{}));
    if (raise) {
      raise_row_maxima(s, factor);
      if (softmax.has_unfused()) multiply(s, factor);
      round_weights(s, factor, Constant<false>{});
    }
    turns.pass();
  }

  // [GEMM 3] O += P V, l += P 1 of the tile of keys `n_block` at `at`. `issue_next` issues a product that need not be
  // over when this one is.
  template <int pending, class IssueNext>
  CUFLASH_DEVICE void add_values(int n_block, const Position<kNumStages>& at, IssueNext issue_next) {
    float sums[kSlices == 1 ? 1 : 2][kSumTiles][4], ones[1][4];
    float of_values = 1.0f;
    if constexpr (kVScale == 2) of_values = v_scales.of(tile.keys.at(n_block) * kBlockN);
    shared.t_ring.full(at).wait(at.parity);
    repeat<kSlices>([&](auto slice) {
      constexpr int kSlice = decltype(slice)::value;
      issue_values(sums[kSlice % 2], at, kSlice * kSliceTiles);
      if constexpr (kSlice > 0) add_sums<1>(sums[(kSlice - 1) % 2], (kSlice - 1) * kSliceTiles, of_values);
      if constexpr (kSlice + 1 == kSlices) {
        if constexpr (kSumsSeparately) issue_values(ones, at, kDimV / 8);
        issue_next();
        add_sums<pending + kSumsSeparately>(sums[kSlice % 2], kSlice * kSliceTiles, of_values);
        if constexpr (kSumsSeparately) add_sums<pending>(ones, kDimV / 8, of_values);
      }
    });
    release(shared.t_ring.empty(at));
  }

  // What one tile of keys adds to the columns of O, and of l after them, that begin at 8 `first_tile`.
  template <int n_tiles>
  CUFLASH_DEVICE void issue_values(float (&sums)[n_tiles][4], const Position<kNumStages>& at, int first_tile) const {
    const u64 values = descriptor_of(shared.t + at.stage * kBytesT + first_tile * 8 * kLineBytes);
    issue(sums, [&]() __attribute__((always_inline)) {
#pragma unroll
      for (int k = 0; k < kBlockN / 32; ++k)
        ptx::wgmma_k32(Weight{}, KeyElement{}, sums, p[k], along_k<kDimV + kOnes>(values, k), k > 0);
    });
  }
  // Adds it, once at most `pending` later products are in flight.
  template <int pending, int n_tiles>
  CUFLASH_DEVICE void add_sums(float (&sums)[n_tiles][4], int first_tile, float of_values) {
    wait_for<pending>(sums);
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        o[0][first_tile + n][i] += kVScale == 2 && first_tile + n < kDimV / 8 ? sums[n][i] * of_values : sums[n][i];
  }

  // The first tile of keys has no product O before it.
  CUFLASH_DEVICE void first_step(int n_block, const TileRange& keys) {
    Scores s;
    issue_s(s);
    wait_for_s(s);
    if (n_block >= keys.full_stop || n_block < keys.full_start)
      softmax_step(s, n_block, Constant<true>{});
    else
      softmax_step(s, n_block, Constant<false>{});
  }
  // The product O of the tile before, and the weights of this one.
  template <class Masked>
  CUFLASH_DEVICE void step(int n_block, Masked masked) {
    Scores s;
    if constexpr (kOverlaps) {
      const Position<kNumStages> before = key;
      key.advance();
      add_values<1>(n_block + 1, before, [&]() { issue_s(s); });
      wait_for_s(s);
      softmax_step(s, n_block, masked);
    } else {
      issue_s(s);
      wait_for_s(s);
      softmax_step(s, n_block, masked);
      finish(n_block);
    }
  }
  // The product O of the tile whose weights are there.
  CUFLASH_DEVICE void finish(int n_block) {
    add_values<0>(n_block, key, []() {});
    key.advance();
  }

  // Passes over a tile of keys that other consumers of the block need, but not the queries of this one.
  CUFLASH_DEVICE void skip() {
    turns.wait();
    turns.pass();
    shared.k_ring.full(key).wait(key.parity);
    shared.t_ring.full(key).wait(key.parity);
    sync_consumer(index);  // so that no thread still waits for this phase when the next one is over
    release(shared.k_ring.empty(key));
    release(shared.t_ring.empty(key));
    key.advance();
  }

  // Iterates over all tiles of keys that these queries attend to, from the last place to the first.
  CUFLASH_DEVICE void mainloop(const TileRange& keys) {
    int n_block = keys.stop - 1;
    if constexpr (kOverlaps) first_step(n_block--, keys);
#pragma unroll 1
    for (; n_block >= keys.full_stop; --n_block) step(n_block, Constant<true>{});
#pragma unroll 1
    for (; n_block >= keys.full_start; --n_block) step(n_block, Constant<false>{});
    if constexpr (kHasLeftBound) {
#pragma unroll 1
      for (; n_block >= keys.start; --n_block) step(n_block, Constant<true>{});
    }
    if constexpr (kOverlaps) finish(n_block + 1);
  }

  // The epilogue: O / l, rounded. A lane has four neighbouring columns of every 16.
  CUFLASH_DEVICE void store_out() const {
    const Entry batch = tile.work.batch;
    const int seqlen_q = seqlen_q_of(common, batch);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_row + 8 * half;
      if (row >= seqlen_q) continue;
      const float factor = softmax.inverse_sum(0, half) * v_scales.of_head();
      Storage* g_row = (Storage*)queries_of(common.out, batch, tile.work.head) + row * common.out.row_stride;
#pragma unroll
      for (int n = 0; n < kDimV / 8; n += 2) {
        const int column = 8 * n + 2 * fragment_column();
        const auto value = [&](int i) { return o[0][n + i % 2][2 * half + i / 2] * factor; };
        const u64 four = ptx::pack(Element{}, value(0), value(1)) | (u64)ptx::pack(Element{}, value(2), value(3)) << 32;
        if (column >= kHeadDimV) continue;
        if constexpr (kStoreBytes >= 8) {
          *(u64*)(g_row + column) = four;
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) g_row[column + i] = (Storage)(four >> 16 * i);
        }
      }
    }
  }
};

// A consumer warpgroup takes one tile of queries after another.
CUFLASH_DEVICE void consume(const ForwardParams& params, const Shared& shared, u32 index) {
  const Params& common = params.common;
  const ExponentialTurns turns(index);
  Position<kQStages> query;
  Position<kNumStages> key;
  for (TileScheduler scheduler(common); scheduler.more(); scheduler.advance(), query.advance()) {
    const QueryTile tile(common, scheduler.work(common));
    Consumer consumer(common, shared, index, turns, query, key, tile);
    shared.q_ring.full(query).wait(query.parity);
    const TileRange keys = tile.keys_of(common, index);
    for (int n_block = tile.keys.stop - 1; n_block >= max_of(keys.stop, tile.keys.start); --n_block) consumer.skip();
    if (keys.start < keys.stop) consumer.mainloop(keys);
    arrive_as_warp(shared.q_ring.empty(query));
    for (int n_block = min_of(keys.start, keys.stop) - 1; n_block >= tile.keys.start; --n_block) consumer.skip();

    OnlineSoftmax<1, false>& softmax = consumer.softmax;
#pragma unroll
    for (int half = 0; half < 2; ++half) softmax.row_sum[0][half] = consumer.o[0][kDimV / 8][2 * half];
    if (kHasSinks) softmax.add_sinks(consumer.o, [&](int, int) { return sink_of(common, tile.work.head) * kLog2e; });
    consumer.store_out();
    store_lse(common, tile.work.batch, tile.work.head, consumer.lane_row, softmax);
  }
  turns.finish();
}

CUFLASH_DEVICE void forward(const ForwardParams& params) {
  if (!is_chosen(params.common)) return;
  const Shared shared;
  shared.initialise();
  const u32 warp = ptx::uniform(ptx::thread_index() / 32);
  if (warp >= 4 * kConsumers) {
    ptx::decrease_registers<kProducerRegisters>();
    if (warp > 4 * kConsumers)
      transpose_values(params.common, shared, warp - 4 * kConsumers - 1);
    else if (ptx::elect_lane())
      produce(params, shared);
  } else {
    ptx::increase_registers<kConsumerRegisters>();
    consume(params, shared, warp / 4);
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, ForwardParams, kNumThreads, 1, forward)
