// What the roles of sm90/backward.cu share: the schedule, the layout of shared memory, registers and named barriers.
#pragma once
#include "common/softmax/backward.cuh"
#include "common/softmax/row_reduction_gradients.cuh"
#include "common/score/score_args_gradients.cuh"
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "sm90/bias_terms.cuh"
#include "sm90/dq_order.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tiles.cuh"

// How registers and shared memory are spent, by head dimension.
enum class Schedule {
  // Each consumer has 64 keys, and K in registers, so that [GEMM 1] reads only Q from shared memory. [GEMM 2] is issued
  // at the start of a step.
  kHoldK,
  // Each consumer has 64 keys. [GEMM 2] is issued only when the products of the step before have freed their registers,
  // and [GEMM 6] reads dS' from shared memory, since registers hold no more operands.
  kSharedDs,
  // Both consumers have the same 64 keys: the first makes P' and dV, the second dS' and dK, and P' is handed over in
  // shared memory. [GEMM 2] is issued at the start of a step.
  kSplitRoles,
};
constexpr Schedule kSchedule = Schedule::CUFLASH_SCHEDULE;
constexpr bool kHoldsK = kSchedule == Schedule::kHoldK;
constexpr bool kDpEarly = kSchedule != Schedule::kSharedDs || !kHasValues;
constexpr bool kDkFromShared = kSchedule == Schedule::kSharedDs;
constexpr bool kSplitsRoles = kSchedule == Schedule::kSplitRoles;
static_assert(kPairsStats, "a lane reads lse of two queries, and later their delta");
// Where the gradient of the entropy is added. The exponent E of a weight is at hand before the weight, so that the
// accumulators of [GEMM 2] may begin as -(delta + dH E), and dS' = P' * dP'. This takes as many instructions as without
// dH, but the product waits for S', and exponentials come after it is issued. Dropout scales and drops dP' itself, and
// where roles are split a consumer that does not know E makes dS': then E is the logarithm of the weight, which takes
// as long as an exponential.
constexpr bool kEntropyInDp = kTakesDentropy && !kHasDropout && !kSplitsRoles;
// Whether exponents may be infinite in tiles that need no mask: biases may be, and values of hidden keys are.
constexpr bool kClampsExponents = kEntropyInDp && (!kFactorInExponent || kHasPerKeyValues);
constexpr int kConsumers = 2;
constexpr int kDsWriters = kSplitsRoles ? 1 : kConsumers;
// What a lane keeps until dS' is made, two neighbours in a register.
enum class Kept {
  // Scores have no derivatives by the products. Or gradients of the soft cap, or of arrays that a score_mod or mask_mod
  // reads, are summed; then the derivatives are made after dS'.
  kNothing,
  // The weights; P' is multiplied by the derivatives.
  kWeights,
  // The derivatives: where dropout marks weights by their sign; where bias terms follow the soft cap, because they come
  // between the tanh and the weights; and where the gradient of such a bias term is summed.
  kDerivatives,
};
constexpr bool kMayKeepWeights =
    kHasScoreFunction ? !kSumsScoreArgs : kFactorInExponent && !kNeedsDsoftcap && !kHasDropout;
constexpr Kept kKept = !kHasDerivative     ? Kept::kNothing
                       : kMayKeepWeights   ? Kept::kWeights
                       : kHasScoreFunction ? Kept::kNothing
                                           : Kept::kDerivatives;
constexpr bool kKeepsWeightsOfCap = kKept == Kept::kWeights && !kHasScoreFunction;
static_assert(kKept != Kept::kWeights || !kHasDropout,
              "weights are marked by their sign, which derivatives would change");
// How many numbers a score_mod or mask_mod reads of a row, and of a key. Each warp of the consumers has its own copy
// of those that it needs of a tile.
constexpr int kNumPerRow = CUFLASH_PER_ROW_VALUES, kNumPerWarpKey = CUFLASH_PER_WARP_KEY_VALUES;
// How consumers ping-pong. If they run side by side, each product takes twice as long, and then both have only
// exponentials to do at the same time. On an H200 ping-pong makes the kernel 9 to 12 % faster at head_dim 128 from
// seqlen 4096 on, 4 % at 64, 2 to 3 % at 256, and with slopes 2 to 12 %. But the kernel is slower by 7 to 14 % where a
// function acts on the products, by 2 to 5 % with a per-pair bias, and by 4 % with a bias of keys at head_dim 64. On an
// H100, the pass with scores of points is 11 to 28 % faster without ping-pong; with gradients of the points, it is from
// 6 % slower to 9 % faster.
enum class Turns {
  kNone,  // side by side
  // With a soft cap alone, P' takes so long that the other consumer is let in as soon as S' is there. This is 1 to 2 %
  // faster than no ping-pong, while a ping-pong from P' to dS' is 3 to 11 % slower.
  kUntilS,
  // One goes from P' to dS' while the other waits, or does the rest of its own step. With split roles the first lets
  // the second in once its products are issued.
  kUntilDs,
};
constexpr bool kCapsAlone = kKeepsWeightsOfCap && !kSplitsRoles;
constexpr bool kSideBySide = (kNumPerRow + kNumPerWarpKey > 0 && !kSplitsRoles) || (kHasDerivative && !kCapsAlone) ||
                             kHasDropout || kBiasOfPairs || (kHasPerKeyValues && !kDkFromShared) ||
                             (kBiasBytes != 0 && !kAddsByTile);
constexpr Turns kTurns = kSideBySide ? Turns::kNone : kCapsAlone ? Turns::kUntilS : Turns::kUntilDs;
constexpr int kQueryTiles = kBlockM / 8;
constexpr int kConsumerThreads = 128 * kConsumers;
static_assert(kNumWarps == 4 * (kConsumers + 1 + kDqInOrder), "the consumers, dQ, and the order of dQ");
static_assert(kBlockN == 64 * kDsWriters, "a consumer, or both, own 64 keys");
static_assert(kBlockM == 64, "dQ is one product of 64 rows");

// Shared memory: K, V, the rings of Q, of dO, of dS' and of P', kept scores, bias and statistics of queries, sums of
// steps, numbers that functions read, barriers.
constexpr u32 kBytesK = chunked_bytes(kBlockN, kDim);
constexpr u32 kBytesV = chunked_bytes(kBlockN, kDimV);
constexpr u32 kBytesQ = chunked_bytes(kBlockM, kDim);
constexpr u32 kBytesDo = chunked_bytes(kBlockM, kDimV);
constexpr u32 kBytesDs = chunked_bytes(kBlockN, kBlockM);
// Of each row lse, delta and, after those of all rows, dH, dm and the key that gets dm, of those that there are
// (common/softmax/row_reduction_gradients.cuh).
constexpr u32 kBytesDentropy = kTakesDentropy ? kBlockM * 4 : 0, kBytesDmax = kTakesDmax ? kBlockM * 4 : 0;
constexpr u32 kStatsOfEntropy = kBlockM * 8, kStatsOfMax = kStatsOfEntropy + kBytesDentropy;
constexpr u32 kBytesStats = kStatsOfMax + 2 * kBytesDmax;
// Per-row values, and per-row and per-key values, of one warp of the consumers.
constexpr u32 kBytesPerRowValues = kNumPerRow * kBlockM * 4, kBytesPoints = kBytesPerRowValues + kNumPerWarpKey * 64;
constexpr int kDsStages = 2, kPStages = kSplitsRoles;
constexpr u32 kBytesP = 128 * kQueryTiles * 16;
// Whether each thread of a consumer keeps numbers of its own scores in shared memory until dS' is made (kKeepsScores):
// their tanh, where the gradient of the cap is wanted; or the products, where derivatives of a score_mod
// are made of them after dS'.
#if CUFLASH_NEEDS_SCORE_ARGS
constexpr bool kKeepsProducts = kDerivativesReadS;
// How many sums a warp leaves in a step for one read of an array (sm90/score_arg_sums.cuh), and how many for all reads
// before that one.
CUFLASH_DEVICE constexpr int step_sums_of(int read) {
  return class_of_read(read) == kReadOfQuery ? kBlockM : class_of_read(read) == kReadOfDiagonal ? kBlockM + 16 : 0;
}
CUFLASH_DEVICE constexpr int first_step_sum(int read) {
  return read == 0 ? 0 : first_step_sum(read - 1) + step_sums_of(read - 1);
}
constexpr int kStepSums = first_step_sum(kNumReads);
#else
constexpr bool kKeepsProducts = false;
constexpr int kStepSums = 0;
#endif
constexpr bool kKeepsScores = kNeedsDsoftcap || kKeepsProducts;
constexpr u32 kBytesScores = kKeepsScores ? kBytesP : 0;
static_assert(!kKeepsScores || !kSplitsRoles, "the consumer that makes dS' knows the scores");
// Each stage of dS' also has the sums of its step, from all warps of the tile.
constexpr int kSumWarpsOfTile = kBlockN / 16;
constexpr u32 kBytesStepSums = kSumWarpsOfTile * kStepSums * 4;
constexpr u32 kBytesBarriers = 8 * (2 + 4 * kNumStages + 2 * kDsStages + 2 * kPStages) + DqTurns::kBytes;
// With a block-sparse index the producer hands over the entry and the query head of each step, too: a role that loaded
// the entry of its next step from memory would wait for it at the end of every step. dQ is up to kDsStages steps behind
// the consumers, which are up to kNumStages behind the producer.
constexpr u32 kBytesListed = 8;
constexpr int kListedSlots = kNumStages + kDsStages;
static_assert(kBytesK + kBytesV + kNumStages * (kBytesQ + kBytesDo + kBytesBias + kBytesStats) +
                      kDsStages * (kBytesDs + kBytesStepSums) + kPStages * kBytesP +
                      kConsumers * (kBytesScores + 4 * kBytesPoints) + kBytesBarriers + kListedSlots * kBytesListed ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers of a thread once each role has its own number of them. In all, they are as many as the block started with.
// Products in flight need more registers than their accumulators and operands take: with fewer, the compiler makes one
// product wait for the other.
constexpr int kOrderRegisters = kDqInOrder ? 24 : 0;
// With 208 registers and dm or dH the kernel spills up to 144 bytes, with 216 up to 32.
constexpr bool kNeedsFewRegisters =
    !(kTakesDmax || kEntropyInDp) && (kScaleInExponent || (kFactorInExponent && !kDkFromShared));
// Whether consumers spare registers even where dQ is added in no order. The warpgroup of dQ needs more of them where it
// adds sums of steps.
constexpr bool kSparesRegisters = kTakesDmax || kEntropyInDp || kFactorInExponent || kAddsByTile ||
                                  (kHasScoreFunction && kDkFromShared) || kStepSums > 0;
constexpr int kConsumerRegisters = kNeedsFewRegisters ? 208 : kDqInOrder || kSparesRegisters ? 216 : 224;
constexpr int kDqRegisters = (kDqInOrder ? 512 : 504) - kOrderRegisters - kConsumers * kConsumerRegisters;
// Columns of dQ that one product makes.
constexpr int kDqColumns = kDim % 32 != 0                                                  ? 16
                           : kSplitsRoles && kDim % 64 == 0 && 64 / 2 + 28 <= kDqRegisters ? 64
                                                                                           : 32;
// The warpgroup of dQ holds kDqHeld fragments of dS', of 16 keys each, in registers for all of its columns. The
// assembler keeps 28 registers for other things, used or not. Every product reads from shared memory the fragments that
// do not fit in addition to these registers and its own columns. Reading all of dS' from there makes the pass 8 %
// slower on an H200 (head_dim 128).
constexpr int kDsFragments = kBlockN / 16, kDqRoom = (kDqRegisters - 28 - kDqColumns / 2) / 4;
constexpr int kDqHeld = kDqRoom < kDsFragments ? kDqRoom : kDsFragments;
constexpr bool kDqHoldsDs = kDqHeld == kDsFragments;
static_assert(kChunk % kDqColumns == 0, "columns of one chunk of K");

// Whether the warpgroup of dQ loads the next tile while its last columns are made, and not after them. On an H200 this
// is 2 to 7 % faster at head_dim 256, and up to 1 % at 64. At 128, where products read the most from shared memory, it
// is up to 1 % slower.
constexpr bool kLoadsEarly = !kDkFromShared;
// Cycles that the warpgroup of dQ waits once dS' is there, so that the consumers issue their next products first. On an
// H200, with dQ in order, 60 cycles are 1 to 4 % faster than none at head_dim 64, 100 are 1 to 8 % faster at 256, and
// at 128 a delay makes no difference. With dQ in no order every delay costs: at head_dim 64, 20 cycles cost 2 to 5 %.
// Packed sequences (varlen) are the exception: 20 to 40 cycles are 1 to 3 % faster there.
constexpr u32 kDqDelay = kDkFromShared                ? 0
                         : kDqInOrder                 ? (kSplitsRoles ? 100 : 60)
                         : kIsPacked && !kSplitsRoles ? 30
                                                      : 0;

// Named barriers: one per consumer, one for all consumers, one for consumers and dQ at the end, and one per consumer
// for the ping-pong.
constexpr u32 kConsumer = 1, kAll = kConsumer + kConsumers, kEnd = kAll + 1, kPingPongBarrier = kEnd + 1;

// TMA writes those of dk and dv that are wanted, unless results are stored by rows.
constexpr int kResultMaps = kStoresByRows ? 0 : kNeedsDk + kNeedsDv;
// The tensor maps: q and k, v and dout, dk and dv, the bias.
constexpr int kMapQ = 0, kMapK = 1, kMapV = 2, kMapDout = 3, kMapResults = kHasValues ? 4 : 2;
constexpr int kMapBias = kMapResults + kResultMaps;
struct BackwardParams {
  Params common;
  TensorMap maps[kMapBias + kBiasOfPairs];
};
static_assert(sizeof(BackwardParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

struct Shared {
  u32 k, v, q, dout, ds, p, scores, bias, stats, step_sums, row_values;
  Barrier kv_full;
  Ring<kNumStages> q_ring, do_ring;
  Ring<kDsStages> ds_ring;
  Ring<kPStages> p_ring;
  DqTurns turns;
  u32 listed;

  CUFLASH_DEVICE Shared() {
    k = ptx::dynamic_shared();
    v = k + kBytesK;
    q = v + kBytesV;
    dout = q + kNumStages * kBytesQ;
    ds = dout + kNumStages * kBytesDo;
    p = ds + kDsStages * kBytesDs;
    scores = p + kPStages * kBytesP;
    bias = scores + kConsumers * kBytesScores;
    stats = bias + kNumStages * kBytesBias;
    step_sums = stats + kNumStages * kBytesStats;
    row_values = step_sums + kDsStages * kBytesStepSums;
    kv_full = {row_values + kConsumers * 4 * kBytesPoints};
    q_ring = {kv_full.address + 16};
    do_ring = {q_ring.address + Ring<kNumStages>::kBytes};
    ds_ring = {do_ring.address + Ring<kNumStages>::kBytes};
    p_ring = {ds_ring.address + Ring<kDsStages>::kBytes};
    turns.place(p_ring.address + Ring<kPStages>::kBytes);
    listed = p_ring.address + Ring<kPStages>::kBytes + DqTurns::kBytes;
  }
  // Where the tile of a step is handed over.
  CUFLASH_DEVICE u32 listed_at(const Position<kListedSlots>& step) const { return listed + step.stage * kBytesListed; }
};

// Thread. Initialises each barrier with the number of arrivals that end one of its phases.
CUFLASH_DEVICE void make_barriers(const Shared& shared) {
  shared.kv_full.init(1);
  shared.q_ring.init(kConsumers);
  shared.do_ring.init(kConsumers + (kDqInOrder ? 4 : 0));
  for (int i = 0; i < kDsStages; ++i) {
    shared.ds_ring.full({i}).init(4 * kDsWriters);
    shared.ds_ring.empty({i}).init(4 + (kDkFromShared ? kConsumers : 0));
  }
  for (int i = 0; i < kPStages; ++i) {
    shared.p_ring.full({i}).init(4);
    shared.p_ring.empty({i}).init(4);
  }
  shared.turns.init();
  ptx::fence_barrier_init();
}
