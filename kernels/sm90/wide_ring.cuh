// Shared by the kernels for wide heads of compute capability 9.0: roles, shared memory, and the ring of boxes. Sums of
// 64 rows and 512 columns take half of the registers of an SM. So a block has 64 rows, and several
// warpgroups divide the work that one consumer does in other kernels:
//
//   warpgroup 0, 1  add to the sums, half of the columns each
//   warpgroup 2     makes scores, and from them the factor: the left operand of the products that are summed
//   warpgroup 3     one thread of it, the producer, loads by TMA
//
//   sum   rows     scores                           factor    sums
//   kOut  queries  S = Q K'                         P         O += P V
//   kDv   keys     S' = K Q'                        P'        dV += P' dO
//   kDk   keys     S' = K Q', then dP' = V dO'      dS'       dK += dS' Q
//   kDq   queries  S = Q K', then dP = dO V'        dS        dQ += dS K         (X' is X transposed)
//
// A block keeps its own rows in shared memory. The rows that they are multiplied by stream by in tiles of kTile rows. A
// tile comes in boxes of 64 columns through one ring, in the order of their use: the boxes for the scores of a tile
// alternate with those for the sums of the tile before. The factor goes through shared memory in the order of threads:
// the elements that a thread of warpgroup 2 makes are those that the same thread of warpgroups 0 and 1 needs.
//
// Two blocks of a cluster either have different rows for the same tiles (kRowBlocks): each block loads half of a
// box for both of them, so that L2 is read once. Or they have the same rows and half of the columns each, of the
// products that make scores and of the sums (kColumnBlocks): each then has a partial sum of every score. They send each
// other these partial sums, and both add them.
//
//   barrier       one phase is over when                           who waits
//   own_full      the rows of the block have arrived               warpgroup 2, before S
//   own_empty     they have their last scores                      producer, before the next rows
//   stats_full[i] statistics of a tile of queries are in stage i   warpgroup 2, before it makes weights
//   stats_empty[i] it has read them                                producer, before the next ones in stage i
//   full[w][i]    a box for warpgroup w is in stage i              that warpgroup
//   empty[i]      these warpgroups of all blocks are done with it  producer, before the next box in stage i
//                 (where V is in K, a box is for warpgroup 2 and one of the others)
//   ready[w]      the factor is there for warpgroup w              that warpgroup
//   taken         both of them have it in registers                warpgroup 2, before it writes the next one
//   partial_full     the other block's partial scores is there        warpgroup 2, before it adds it
//   partial_empty    the other block has added this one's             warpgroup 2, before it sends the next one
//   named: one for each warpgroup but the last
//
// Warpgroup 1 gets the factor only when the scores of the next tile are complete: the products of its half then run
// while the next factor is made, when the tensor cores would be idle otherwise.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/params.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

enum class WideSum { kOut, kDv, kDk, kDq };
constexpr WideSum kSum = WideSum::CUFLASH_WIDE_SUM;
constexpr bool kIsForward = kSum == WideSum::kOut;
constexpr bool kRowsAreKeys = kSum == WideSum::kDv || kSum == WideSum::kDk;
constexpr bool kMakesDs = kSum == WideSum::kDk || kSum == WideSum::kDq;

constexpr int kRows = 64;
constexpr int kRowBlocks = (kRowsAreKeys ? kBlockN : kBlockM) / kRows, kColumnBlocks = CUFLASH_COLUMN_BLOCKS;
constexpr int kClusterBlocks = kRowBlocks * kColumnBlocks;
constexpr int kTile = kRowsAreKeys ? kBlockM : kBlockN;
static_assert(kNumWarps == 16, "two warpgroups of sums, one of scores, and the producer's");
static_assert((kRowsAreKeys ? kBlockN : kBlockM) == kRows * kRowBlocks, "a block has 64 rows");
static_assert(kRowBlocks == 1 || kColumnBlocks == 1, "blocks of a cluster divide rows or columns");
constexpr int kNTiles = kTile / 8, kSteps = kTile / 16;

// Which rows of the cluster, and which columns, this block has.
CUFLASH_DEVICE u32 row_rank() { return kRowBlocks > 1 ? ptx::cluster_rank<kClusterBlocks>() : 0; }
CUFLASH_DEVICE u32 column_rank() { return kColumnBlocks > 1 ? ptx::cluster_rank<kClusterBlocks>() : 0; }

// Chunks of 64 columns of a block: those of the products that make scores, and those of the sums of one pass over the
// tiles. A warpgroup sums at most 4 chunks; for gradients, whose factors are small, the first one may have 5. Where
// blocks divide columns, the last chunks may lie past the last column: TMA fills them with zeros.
CUFLASH_DEVICE constexpr int chunks_of_block(int columns) { return ceil_div(chunks_of(columns), kColumnBlocks); }
CUFLASH_DEVICE constexpr int columns_of_block(int columns) {
  return kColumnBlocks > 1 ? chunks_of_block(columns) * kChunk : columns;
}
constexpr int kOwnDim = columns_of_block(kDim), kOwnDimV = columns_of_block(kDimV);
constexpr int kChunksOfS = chunks_of(kOwnDim), kChunksOfDp = kMakesDs ? chunks_of(kOwnDimV) : 0;
constexpr int kScoreChunks = kChunksOfS + kChunksOfDp;
constexpr int kSumColumns = kMakesDs ? kDim : kDimV;
constexpr int kPasses = ceil_div(chunks_of_block(kSumColumns), kIsForward ? 8 : 9);
constexpr int kSumChunks = ceil_div(chunks_of_block(kSumColumns), kPasses);
static_assert(kIsForward || kPasses == 1, "blocks divide more columns of gradients than one has registers for");
constexpr int kFirstChunks = ceil_div(kSumChunks, 2), kSecondChunks = kSumChunks - kFirstChunks;
CUFLASH_DEVICE int first_chunk_of_sums(int pass) { return (pass + column_rank()) * kSumChunks; }

// Whether V is the first columns of K: then boxes come once, for scores, and stay for the sums.
constexpr bool kVInK = CUFLASH_V_IN_K;
constexpr int kChunksOfSums = kVInK ? 0 : kSumChunks;  // boxes of a step that only sums read
static_assert(!kVInK || (kIsForward && kPasses == 1 && kSumChunks <= kChunksOfS && kNumStages >= 2 * kChunksOfS),
              "a ring of two tiles of keys, whose columns are those of one pass");

// Registers of a thread of each warpgroup; together they are what the block started with. A factor takes kTile / 4 of
// them. Gradients under a causal mask were measured with a few more for the sums, which make other gradients up to 3 %
// slower.
struct Registers {
  int first_half, second_half, scores, producer;
};
constexpr bool kSumsTakeMore = !kIsForward && kHasRightBound && kColumnBlocks == 1;
constexpr Registers kRegisters = kFirstChunks > 4 ? Registers{208, 176, 96, 32}
                                 : kTile > 64     ? Registers{192, 192, 96, 32}
                                 : kSumsTakeMore  ? Registers{184, 184, 112, 32}
                                                  : Registers{176, 176, 128, 32};
static_assert(kRegisters.first_half + kRegisters.second_half + kRegisters.scores + kRegisters.producer == 4 * 128,
              "registers are neither more nor fewer");

struct WideForwardParams {
  Params common;
  TensorMap q, k, v;
};
struct WideBackwardParams : WideForwardParams {
  TensorMap dout;
};
using WideParams = Either<kIsForward, WideForwardParams, WideBackwardParams>::Type;
static_assert(sizeof(WideParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

// ---- The ring of boxes ----------------------------------------------------------------------------------------------

// Each warpgroup that reads boxes has full barriers of its own, whose phases count its own boxes alone. With one
// barrier per stage, a warpgroup could wait for its box before the box of another warpgroup has come to that stage, and
// would mistake the earlier phase for its own, because both have the same parity.
enum Reader { kFirstHalf, kSecondHalf, kScores, kReaders };
struct BoxRing {
  static constexpr u32 kBytes = 8 * (kReaders + 1) * kNumStages;
  u32 address;

  CUFLASH_DEVICE Barrier full(int stage, Reader reader) const { return {address + 8 * (reader * kNumStages + stage)}; }
  CUFLASH_DEVICE Barrier empty(int stage) const { return {address + 8 * (kReaders * kNumStages + stage)}; }
  CUFLASH_DEVICE void init() const {
    for (int i = 0; i < kNumStages; ++i) {
      for (int reader = 0; reader < kReaders; ++reader) full(i, (Reader)reader).init(1);
      empty(i).init((1 + kVInK) * kRowBlocks);
    }
  }
};

// The order of boxes. A pass begins with the boxes for the scores of the first tile. Then every step loads boxes for
// the scores of the next tile, if there is one, in turn with boxes of its own tile for warpgroup 0; those for warpgroup
// 1 come last. These functions give the position of a box in its step, which has `of_scores` boxes for scores.
CUFLASH_DEVICE constexpr int position_of_score(int i) { return i + min_of(i, kFirstChunks); }
template <Reader half>
CUFLASH_DEVICE constexpr int position_of_sum(int i, int of_scores) {
  return half == kFirstHalf ? min_of(i + 1, of_scores) + i : of_scores + kFirstChunks + i;
}

// ---- Shared memory --------------------------------------------------------------------------------------------------

// The rows of the block, the ring, the factor, what rescales O, the other block's partial scores, statistics, barriers.
constexpr int kStatsStages = kRowsAreKeys ? 2 : 0;
constexpr u32 kBytesOwn = chunked_bytes(kRows, kOwnDim), kBytesOwnV = kMakesDs ? chunked_bytes(kRows, kOwnDimV) : 0;
constexpr u32 kBytesBox = chunked_bytes(kTile, kChunk);
constexpr u32 kBytesFactor = kSteps * 128 * 16, kBytesRescaling = kIsForward ? 128 * 8 : 0;
constexpr u32 kBytesStats = kRowsAreKeys ? kTile * 8 : 0;
constexpr u32 kBytesPartial = kColumnBlocks > 1 ? kNTiles * 128 * 16 : 0;
constexpr int kPartialStages = kColumnBlocks > 1 ? 1 : 0;
constexpr u32 kBytesBarriers =
    Ring<1>::kBytes + Ring<kStatsStages>::kBytes + Ring<kPartialStages>::kBytes + BoxRing::kBytes + 24;
static_assert(kBytesOwn + kBytesOwnV + kNumStages * kBytesBox + kBytesFactor + kBytesRescaling + kBytesPartial +
                      kStatsStages * kBytesStats + kBytesBarriers ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

struct Shared {
  u32 own, own_v, boxes, factor, rescaling, partial, stats;
  Ring<1> own_ring;
  Ring<kStatsStages> stats_ring;
  Ring<kPartialStages> partial_ring;
  BoxRing ring;
  Barrier ready[2], taken;

  CUFLASH_DEVICE Shared() {
    own = ptx::dynamic_shared();
    own_v = own + kBytesOwn;
    boxes = own_v + kBytesOwnV;
    factor = boxes + kNumStages * kBytesBox;
    rescaling = factor + kBytesFactor;
    partial = rescaling + kBytesRescaling;
    stats = partial + kBytesPartial;
    own_ring = {stats + kStatsStages * kBytesStats};
    stats_ring = {own_ring.address + Ring<1>::kBytes};
    partial_ring = {stats_ring.address + Ring<kStatsStages>::kBytes};
    ring = {partial_ring.address + Ring<kPartialStages>::kBytes};
    const u32 others = ring.address + BoxRing::kBytes;
    ready[0] = {others}, ready[1] = {others + 8}, taken = {others + 16};
  }

  // Called by all threads of the cluster.
  CUFLASH_DEVICE void make_barriers() const {
    if (ptx::thread_index() == 0) {
      own_ring.init(4);
      stats_ring.init(4);
      partial_ring.init(4);
      ring.init();
      ready[0].init(4);
      ready[1].init(4);
      taken.init(kSecondChunks > 0 ? 8 : 4);
      ptx::fence_barrier_init();
    }
    ptx::sync_cluster<kClusterBlocks>();
  }
};

// Box `count` of all that pass through the ring.
struct Box : Position<kNumStages> {
  CUFLASH_DEVICE explicit Box(u32 count) : Position<kNumStages>{(int)(count % kNumStages), count / kNumStages & 1} {}

  CUFLASH_DEVICE u32 address(const Shared& shared) const { return shared.boxes + stage * kBytesBox; }
};

// Warpgroup. Waits for its boxes, one after another, and gives them back.
template <Reader reader>
struct Boxes {
  const Shared& shared;
  u32 parities = 0;  // of the next box in each stage
  static_assert(kNumStages <= 32, "a bit for each stage");

  CUFLASH_DEVICE void wait(const Box& box) {
    if constexpr (kVInK) {  // a box stays until all have read it, so that none is ahead by a phase
      shared.ring.full(box.stage, kScores).wait(box.parity);
    } else {
      shared.ring.full(box.stage, reader).wait(parities >> box.stage & 1);
      parities ^= 1u << box.stage;
    }
  }
  // Gives the box back.
  CUFLASH_DEVICE void release(const Box& box) const {
    if (ptx::thread_index() % 128 == 0)
      ptx::barrier_arrive_in_cluster<kRowBlocks>(shared.ring.empty(box.stage).address);
  }
};

// Warpgroup. Stores a factor to shared memory, as operands of the sums.
CUFLASH_DEVICE void store_factor(const Shared& shared, u32 thread, const float (&value)[kNTiles][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    Fragment factor;
    to_operand(value, k, factor);
    ptx::store_shared_b128(shared.factor + (k * 128 + thread) * 16,
                           {factor.word[0], factor.word[1], factor.word[2], factor.word[3]});
  }
}

// ---- The producer ---------------------------------------------------------------------------------------------------

// Where the rows of a tile are.
struct Source {
  const TensorMap& map;
  int row, head;
};

// The steps of work whose rows need a range of tiles of keys: from the last to the first, unless `ascends()`.
struct KeySteps {
  int n_block, left;

  CUFLASH_DEVICE bool more() const { return left > 0; }
  CUFLASH_DEVICE bool is_last() const { return left == 1; }
};
template <class Work>
struct OverKeys {
  CUFLASH_DEVICE static bool ascends() { return false; }
  CUFLASH_DEVICE KeySteps first() const { return {own().ascends() ? own().keys.start : own().keys.stop - 1, count()}; }
  CUFLASH_DEVICE bool is_first(const KeySteps& step) const { return step.left == count(); }
  CUFLASH_DEVICE void advance(KeySteps& step) const {
    step.n_block += own().ascends() ? 1 : -1;
    --step.left;
  }
  CUFLASH_DEVICE Source for_scores(const WideParams& params, const KeySteps& step, bool of_dp) const {
    return {of_dp ? params.v : params.k, own().tile_at(step.n_block) * kTile, own().head_kv};
  }
  CUFLASH_DEVICE Source for_sums(const WideParams& params, const KeySteps& step) const {
    return {kMakesDs ? params.k : params.v, own().tile_at(step.n_block) * kTile, own().head_kv};
  }
  // How many keys exist from the first key of the tile on: fewer than kTile if the tile is not whole.
  CUFLASH_DEVICE int valid(const KeySteps& step) const { return own().key_stop - own().tile_at(step.n_block) * kTile; }

 private:
  CUFLASH_DEVICE int count() const { return own().keys.stop - own().keys.start; }
  CUFLASH_DEVICE const Work& own() const { return static_cast<const Work&>(*this); }
};

// One thread. `work` says which tiles its rows need: one in each step from `first()` on.
struct Producer {
  const WideParams& params;
  const Shared& shared;
  u32 count = 0;
  Position<1> own;
  Position<kStatsStages> stats;

  template <class Work>
  CUFLASH_DEVICE void take(const WideParams&, const Work& work, int pass) {
    auto next = work.first();
    if (!next.more()) return;
    shared.own_ring.empty(own).wait(own.parity ^ 1);
    work.load_own(params, shared, shared.own_ring.full(own));
    own.advance();
    load_stats(work, next);
#pragma unroll 1
    for (int i = 0; i < kScoreChunks; ++i) load_for_scores(work, next, i);
#pragma unroll 1
    for (auto step = next; step.more(); step = next) {
      work.advance(next);
      const int of_scores = next.more() ? kScoreChunks : 0;
      if (of_scores > 0) load_stats(work, next);
#pragma unroll 1
      for (int i = 0; i < max_of(kScoreChunks, kFirstChunks); ++i) {
        if (i < of_scores) load_for_scores(work, next, i);
        if (!kVInK && i < kFirstChunks) load_for_sums(kFirstHalf, work, step, pass, i);
      }
#pragma unroll 1
      for (int i = kFirstChunks; i < kChunksOfSums; ++i) load_for_sums(kSecondHalf, work, step, pass, i);
    }
  }

 private:
  template <class Work>
  CUFLASH_DEVICE void load(Reader reader, const Work& work, const Source& source, int chunk) {
    const Box box(count++);
    const Barrier full = shared.ring.full(box.stage, reader);
    shared.ring.empty(box.stage).wait(box.parity ^ 1);
    full.arrive_expect(kBytesBox);
    ptx::load_tensor_by_cluster<kRowBlocks, kTile / kRowBlocks>(box.address(shared), source.map, full.address,
                                                                chunk * kChunk, source.row, source.head, work.entry());
  }
  template <class Work, class Step>
  CUFLASH_DEVICE void load_for_scores(const Work& work, const Step& step, int i) {
    const bool of_dp = kMakesDs && i >= kChunksOfS;
    const int first = column_rank() * (of_dp ? kChunksOfDp : kChunksOfS);
    load(kScores, work, work.for_scores(params, step, of_dp), first + (of_dp ? i - kChunksOfS : i));
  }
  template <class Work, class Step>
  CUFLASH_DEVICE void load_for_sums(Reader half, const Work& work, const Step& step, int pass, int i) {
    load(half, work, work.for_sums(params, step), first_chunk_of_sums(pass) + i);
  }
  template <class Work, class Step>
  CUFLASH_DEVICE void load_stats(const Work& work, const Step& step) {
    if constexpr (kRowsAreKeys) {
      const Barrier full = shared.stats_ring.full(stats);
      shared.stats_ring.empty(stats).wait(stats.parity ^ 1);
      full.arrive_expect(kBytesStats);
      ptx::load_bulk(shared.stats + stats.stage * kBytesStats, work.stats_at(params.common, step), kBytesStats,
                     full.address);
      stats.advance();
    }
  }
};

// ---- Scores ---------------------------------------------------------------------------------------------------------

// After every 16 columns, tensor cores cut off the bits of a sum that are past its last one. With 576 columns that made
// lse less exact than the oracle rule allows, so the second half of the columns has a sum of its own where there are
// registers for it.
constexpr int kChunksOfSum = kIsForward && kTile <= 64 && kChunksOfS > 5 ? ceil_div(kChunksOfS, 2) : kChunksOfS;
constexpr bool kHasRest = kChunksOfSum < kChunksOfS;

// Warpgroup 2: [GEMM 1] S, and then, where dS is made, [GEMM 2] dP.
struct ScoreProducts {
  const Shared& shared;
  Boxes<kScores> boxes{shared};
  u32 count = 0;  // of boxes before this step
  float s[1][kNTiles][4], dp[kNTiles][4], rest[kNTiles][4];

  // Calls `meanwhile(Integer<i>)` when S is complete and the product of chunk i of dP is under way.
  template <class Meanwhile>
  CUFLASH_DEVICE void multiply(bool is_first, Meanwhile meanwhile) {
    const auto box_of = [&](int i) { return Box(count + (kVInK || is_first ? i : position_of_score(i))); };
    const auto release = [&](int i) {
      boxes.release(box_of(i));
      if (kVInK && i >= kSumChunks) boxes.release(box_of(i));  // for the sums, which do not read it
    };
    ptx::fence_operand(s[0]);
    if constexpr (kMakesDs) ptx::fence_operand(dp);
    if constexpr (kHasRest) ptx::fence_operand(rest);
    repeat<kScoreChunks>([&](auto number) {
      constexpr int i = decltype(number)::value;
      constexpr bool of_dp = i >= kChunksOfS;
      constexpr int chunk = of_dp ? i - kChunksOfS : i, kColumns = of_dp ? kOwnDimV : kOwnDim;
      const Box box = box_of(i);
      const u64 own = descriptor_of(of_dp ? shared.own_v : shared.own), other = descriptor_of(box.address(shared));
      constexpr bool of_rest = !of_dp && i >= kChunksOfSum;
      auto& product = of_dp ? dp : of_rest ? rest : s[0];
      constexpr int first = of_rest ? 4 * kChunksOfSum : 0;
      boxes.wait(box);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 4 * chunk; k < min_of(4 * chunk + 4, kColumns / 16); ++k)
        ptx::wgmma<false, false>(Element{}, product, along_k<kRows>(own, k), along_k<kTile>(other, k % 4), k > first);
      ptx::wgmma_commit();
      if constexpr (i > 0) {
        ptx::wgmma_wait<1>();
        release(i - 1);
      }
      if constexpr (i == kChunksOfS) ptx::fence_operand(s[0]);
      if constexpr (of_dp) meanwhile(Integer<chunk>{});
    });
    wait_for<0>(kMakesDs ? dp : s[0]);
    if constexpr (kHasRest) {
      ptx::fence_operand(rest);
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[0][n][i] += rest[n][i];
    }
    release(kScoreChunks - 1);
    count += kScoreChunks + (is_first ? 0 : kChunksOfSums);
  }
  CUFLASH_DEVICE void multiply(bool is_first) {
    multiply(is_first, [](auto) {});
  }
};
