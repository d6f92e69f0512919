// What the roles of sm90/backward_jvp.cu share: the layout of shared memory, registers and named barriers.
#pragma once
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/softmax/backward.cuh"
#include "sm90/dq_order.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tiles.cuh"

// How registers and shared memory are spent, by head dimension.
enum class Schedule {
  // Each consumer has 64 keys, of which K and V are in registers (with tdO, K), and takes the queries of a tile in two
  // halves. All products of a half are issued at once.
  kOwnKeys,
  // Both consumers have the same 64 keys: the first makes P', u' and tdV, with K in registers; the second makes dX',
  // tdX' and tdK, with V in registers. P' and u' are handed over in shared memory.
  kSplitRoles,
  // The same, with K and V in shared memory alone. Stages hold half a tile of queries, and there is one of Q and of tQ:
  // sums are issued before the next products, which wait for the next stage. The producer is a warpgroup of its own.
  // Where there is one stage of dO, too, these sums are done before the next products are issued.
  kHalfStages,
  // The same with stages of whole tiles.
  kOneStageOfQ,
};
constexpr Schedule kSchedule = Schedule::CUFLASH_SCHEDULE;
constexpr bool kSplitsRoles = kSchedule != Schedule::kOwnKeys;
constexpr bool kSumsFirst = kSchedule == Schedule::kHalfStages || kSchedule == Schedule::kOneStageOfQ;
constexpr bool kPingPong = CUFLASH_PING_PONG;
static_assert(kPairsStats, "a lane reads lse of two queries, and later their delta");
static_assert(!kSplitsGroup && !kSplitsTail, "blocks share no tiles of keys");

constexpr int kConsumers = 2;
constexpr int kKeyWriters = kSplitsRoles ? 1 : kConsumers;  // consumers that make dX' of a tile of queries
// Parts of a tile of queries, which a consumer takes one after the other.
constexpr int kParts = kSchedule == Schedule::kOwnKeys || kSchedule == Schedule::kHalfStages ? 2 : 1;
constexpr int kPartRows = kBlockM / kParts, kPartTiles = kPartRows / 8;
constexpr int kStageRows = kSchedule == Schedule::kHalfStages ? kPartRows : kBlockM;  // queries of a stage
constexpr int kQStages = kSumsFirst ? 1 : kNumStages;                                 // of Q and tQ
constexpr int kConsumerThreads = 128 * kConsumers;
// Whether the producer has a warpgroup, which keeps the order of tdQ, too. Else a warp of tdQ is the producer.
constexpr bool kHasProducer = kSumsFirst || kDqInOrder;
static_assert(kNumWarps == 4 * (kConsumers + 1 + kHasProducer), "the consumers, tdQ, and the producer");
static_assert(kBlockN == 64 * kKeyWriters, "a consumer, or both, own 64 keys");
static_assert(kBlockM == 64, "tdQ is one product of 64 rows");

// Whether weights are made pair by pair (sm90/backward_jvp_weights.cuh).
constexpr bool kPairByPair = kHasDerivative || kMovesScale || kMovesBias || kMovesAlibi;
static_assert(!kSumsFirst || !kIsPacked, "consumers meet before a stage to clear the rows after a sequence");
static_assert(!kHasDropout || !kScoreChangesSlope,
              "dropout marks weights by their sign, which a derivative may change");

// Products that are there: those of tangents that are given, and of results that are wanted.
constexpr bool kMovesProducts = kMovesQ || kMovesK;  // tX' = K tQ' + tK Q'
constexpr bool kHasTdout = CUFLASH_HAS_TDOUT;
constexpr bool kMovesDp = kMovesV || kHasTdout;           // tdP' = tV dO' + V tdO'
constexpr bool kSumsTdv = kNeedsDv;                       // tdV += (P' u) dO; lse may move where no score does
constexpr bool kSumsTdvOfP = kNeedsDv && kHasTdout;       // tdV += P' tdO
constexpr bool kSumsTdk = kNeedsDk;                       // tdK += tdX' Q
constexpr bool kSumsTdkOfDx = kNeedsDk && kMovesQ;        // tdK += dX' tQ
constexpr bool kSumsTdq = kDqByReduction;                 // tdQ += tdX K
constexpr bool kSumsTdqOfDx = kDqByReduction && kMovesK;  // tdQ += dX tK

// Shared memory: K, tK, V, tV, the rings of Q, tQ, dO and tdO, of tdX' and dX', of P' and u, statistics, barriers.
constexpr u32 kBytesK = chunked_bytes(kBlockN, kDim);
constexpr u32 kBytesV = chunked_bytes(kBlockN, kDimV);
constexpr u32 kBytesQ = chunked_bytes(kStageRows, kDim);
constexpr u32 kBytesDo = chunked_bytes(kStageRows, kDimV);
constexpr u32 kBytesTdo = kHasTdout ? kBytesDo : 0;
constexpr u32 kBytesDx = chunked_bytes(kBlockN, kBlockM);
constexpr u32 kBytesStats = kStageRows * 8;     // and as many of their tangents
constexpr u32 kBytesP = 128 * kPartTiles * 16;  // and as many of u'
constexpr int kDxStages = CUFLASH_DX_STAGES, kPStages = kSplitsRoles;
constexpr u32 kBytesBarriers = 8 * (2 + 2 * kQStages + 2 * kNumStages + 2 * kDxStages + 2 * kPStages) + DqTurns::kBytes;
static_assert(2 * (kBytesK + kBytesV) + kQStages * 2 * kBytesQ + kNumStages * (kBytesDo + kBytesTdo + 2 * kBytesStats) +
                      2 * kDxStages * kBytesDx + 2 * kPStages * kBytesP + kBytesBarriers ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers of a thread once each role has its own number of them: as many in all as the block started with.
constexpr int kProducerRegisters = kHasProducer ? 24 : 0;
constexpr int kTdqRegisters = kDqInOrder && !kSumsFirst ? 56 : 72;
constexpr int kFirstRegisters = kSplitsRoles ? 208 : 216;  // of the consumer that makes P'
constexpr int kSecondRegisters = (kHasProducer ? 512 : 504) - kProducerRegisters - kTdqRegisters - kFirstRegisters;
// Columns of tdQ that one product makes.
constexpr int kTdqColumns = kDim % 128 == 0 && 128 / 2 + 28 <= kTdqRegisters ? 128
                            : kDim % 64 == 0 && 64 / 2 + 28 <= kTdqRegisters ? 64
                                                                             : 32;

// Named barriers: one per consumer, one for all consumers, one for consumers and tdQ at the end, and one per consumer
// for the ping-pong.
constexpr u32 kConsumer = 1, kAll = kConsumer + kConsumers, kEnd = kAll + 1, kPingPongBarrier = kEnd + 1;

// Tensor maps, in this order: q, k, v, dout, the tangents that there are, tdout, and the results that are wanted.
constexpr int kMapOfTq = 4, kMapOfTk = kMapOfTq + kMovesQ, kMapOfTv = kMapOfTk + kMovesK,
              kMapOfTdo = kMapOfTv + kMovesV, kMapOfTdk = kMapOfTdo + kHasTdout, kMapOfTdv = kMapOfTdk + kNeedsDk,
              kMaps = kMapOfTdv + kNeedsDv;
struct BackwardJvpParams {
  Params common;
  TensorMap map[kMaps];
};
static_assert(sizeof(BackwardJvpParams) == CUFLASH_ARGUMENT_BYTES,
              "the argument differs from its description in Python");

struct Shared {
  u32 k, tk, v, tv, q, tq, dout, tdout, tdx, dx, p, stats, tangents;
  Barrier kv_full;
  Ring<kQStages> q_ring;
  Ring<kNumStages> do_ring;
  Ring<kDxStages> dx_ring;
  Ring<kPStages> p_ring;
  DqTurns turns;

  CUFLASH_DEVICE Shared() {
    k = ptx::dynamic_shared();
    tk = k + kBytesK;
    v = tk + kBytesK;
    tv = v + kBytesV;
    q = tv + kBytesV;
    tq = q + kQStages * kBytesQ;
    dout = tq + kQStages * kBytesQ;
    tdout = dout + kNumStages * kBytesDo;
    tdx = tdout + kNumStages * kBytesTdo;
    dx = tdx + kDxStages * kBytesDx;
    p = dx + kDxStages * kBytesDx;
    stats = p + 2 * kPStages * kBytesP;
    tangents = stats + kNumStages * kBytesStats;
    kv_full = {tangents + kNumStages * kBytesStats};
    q_ring = {kv_full.address + 16};
    do_ring = {q_ring.address + Ring<kQStages>::kBytes};
    dx_ring = {do_ring.address + Ring<kNumStages>::kBytes};
    p_ring = {dx_ring.address + Ring<kDxStages>::kBytes};
    turns.place(p_ring.address + Ring<kPStages>::kBytes);
  }
};

// Thread. Initialises each barrier with the number of arrivals that end one of its phases.
CUFLASH_DEVICE void make_barriers(const Shared& shared) {
  shared.kv_full.init(1);
  shared.q_ring.init(kConsumers);
  shared.do_ring.init(kConsumers);
  shared.dx_ring.init(4, 4 * kKeyWriters);
  shared.p_ring.init(4, 4);
  shared.turns.init();
  ptx::fence_barrier_init();
}
