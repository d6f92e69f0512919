// The gradient of a per-pair bias on compute capability 9.0 (Hopper), with wgmma and TMA.
//
//   P = exp(S - lse)    dP = dO V'    dbias = sum of P * (dP - delta) over what the bias broadcasts along
//
// The kernel is persistent: a block takes one tile of dbias after another, and iterates over the batch entries and
// heads that attend to this tile of the bias. The bias is loaded once for all of them, and the sums stay in registers:
// dbias is written once, in an order of additions that is fixed. Where fewer tiles are left than there are blocks,
// blocks split their loops, and helpers/scores_reduce.cu adds what they leave.
//
// The last warpgroup, the producer, loads tiles by TMA: of Q and K for a product S, and of dO and V for a product dP,
// which take turns in one ring. Each of the two consumers owns 64 queries. They drift out of step, so that the products
// of one run during the exponentials of the other.
//
// Operands of float32 come split into bfloat16 terms (helpers/split_fp32.cu), and each product is the sum of products
// of terms (common/io/term_products.cuh), as in the main kernel.
//
//   barrier         one phase is over when                       who waits
//   full[i]         the operands of a product are in stage i     consumers, before the product
//   empty[i]        every consumer warp has used them            producer, before it loads the next ones there
//   bias_full[i]    a tile of bias is in stage i                 consumers, before their first exponentials with it
//   bias_empty[i]   every consumer warp has made its last        producer, before it loads the next tile there
//                   exponentials with it
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/score/dropout.cuh"
#include "common/io/params.cuh"
#include "common/io/term_products.cuh"
#include "common/score/score_gradients.cuh"
#include "common/score/scores.cuh"
#include "sm90/bias_terms.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr int kBiasStages = CUFLASH_BIAS_STAGES;  // of the ring of tiles of bias
constexpr int kMaps = (CUFLASH_ARGUMENT_BYTES - CUFLASH_PARAMS_BYTES) / sizeof(TensorMap);
constexpr int kBoxRows = 64, kBoxKeys = CUFLASH_BOX_KEYS;  // queries, and keys, in one box of TMA
constexpr int kConsumers = kBlockM / 64, kNTiles = kBlockN / 8;
static_assert(kNumWarps == 4 * (kConsumers + 1), "the consumers and a producer");
static_assert(kBlockM == 64 * kConsumers && kBlockN % kBoxKeys == 0, "a consumer owns 64 queries; boxes are whole");
static_assert(kBiasOfPairs && !kSumsQueries && !kSumsKeys, "the bias differs from pair to pair");
static_assert(!kLooksUpMask && !kMaskByBits, "masks hide keys, or whole tiles and what the bounds hide");

using Factor = Either<kWide, BFloat16, Element>::Type;  // of the operands of products
static_assert(!kWide || max_of(kDim, kDimV) <= kChunk, "the tensor cores cut sums off: each is of one chunk");

// Shared memory: the ring of operands, the ring of tiles of bias, numbers that are added to scores of keys, barriers.
constexpr u32 kTermA = chunked_bytes(kBlockM, max_of(kDim, kDimV)), kBytesA = kBf16Terms * kTermA;
constexpr u32 kTermB = chunked_bytes(kBlockN, max_of(kDim, kDimV)), kBytesStage = kBytesA + kBf16Terms * kTermB;
static_assert(kNumStages * (kBytesStage + kBytesPerKeyValues) + kBiasStages * kBytesBias + Ring<kNumStages>::kBytes +
                      Ring<kBiasStages>::kBytes ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers of a thread after the producer has given up most of its own. It keeps more where it makes per-key values.
constexpr int kProducerRegisters = kHasPerKeyValues ? 40 : 24, kConsumerRegisters = kHasPerKeyValues ? 232 : 240;

struct BiasParams {
  Params common;
  TensorMap q, k, v, dout, others[kMaps - 4];  // the bias is the last one
};
static_assert(sizeof(BiasParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

struct Shared {
  u32 operands, bias, numbers;
  Ring<kNumStages> ring;
  Ring<kBiasStages> bias_ring;

  CUFLASH_DEVICE Shared() {
    operands = ptx::dynamic_shared();
    bias = operands + kNumStages * kBytesStage;
    numbers = bias + kBiasStages * kBytesBias;
    ring = {numbers + kNumStages * kBytesPerKeyValues};
    bias_ring = {ring.address + Ring<kNumStages>::kBytes};
  }
  // Called by all threads of the block.
  CUFLASH_DEVICE void make_barriers() const {
    if (ptx::thread_index() == 0) {
      ring.init(4 * kConsumers, 1 + kHasPerKeyValues);
      bias_ring.init(4 * kConsumers);
      ptx::fence_barrier_init();
    }
    ptx::sync_block();
  }
};

// The work of a block: whole tiles of dbias as long as every block gets one, then splits of the tiles that are left.
struct BiasTileScheduler {
  u32 index, whole, count;

  CUFLASH_DEVICE explicit BiasTileScheduler(const Params& params) : index(ptx::block_index()) {
    const u32 tiles = ScoreTiles::count(params);
    whole = params.score_splits == 1 ? tiles : num_whole_results(params);
    count = whole + (tiles - whole) * params.score_splits;
  }

  CUFLASH_DEVICE bool more() const { return index < count; }
  CUFLASH_DEVICE void advance(const Params& params) { index += params.resident_blocks; }
  CUFLASH_DEVICE bool is_split() const { return index >= whole; }
  // For a split: the index of its tile among those that are shared, and the number of the split. `tile` is for both.
  CUFLASH_DEVICE u32 shared(const Params& params) const { return (index - whole) / params.score_splits; }
  CUFLASH_DEVICE int split(const Params& params) const { return (index - whole) % params.score_splits; }
  CUFLASH_DEVICE u32 tile(const Params& params) const { return is_split() ? whole + shared(params) : index; }
  // The tiles of pairs that are summed, from the first one on.
  CUFLASH_DEVICE ScoreTiles first(const Params& params) const {
    ScoreTiles tiles(params, tile(params));
    tiles.take_split(params, is_split() ? split(params) : 0, is_split() ? params.score_splits : 1);
    return tiles;
  }
};

// Issues the loads of `rows` rows of a head, in boxes of `box_rows` rows.
template <int rows, int box_rows, int columns>
CUFLASH_DEVICE void load_boxes(u32 tile, const TensorMap& map, const Barrier& full, int first_row, int head,
                               int batch) {
#pragma unroll
  for (int c = 0; c < chunks_of(columns); ++c)
#pragma unroll
    for (int row = 0; row < rows; row += box_rows)
      ptx::load_tensor(tile + (c * rows + row) * kLineBytes, map, full.address, c * kChunk, first_row + row, head,
                       batch);
}

// The producer, which is one thread.
CUFLASH_DEVICE void produce(const BiasParams& params, const Shared& shared) {
  const Params& common = params.common;
  const TensorMap& bias_map = params.others[kMaps - 5];
  Position<kNumStages> at;
  Position<kBiasStages> bias_at;
  for (BiasTileScheduler scheduler(common); scheduler.more(); scheduler.advance(common)) {
    bool has_bias = false;
    for (ScoreTiles now = scheduler.first(common); now.left > 0; now.advance(common)) {
      const int head_kv = now.head / (common.num_heads / common.num_heads_kv);
      const int first_row = now.m_block * kBlockM, first_key = now.n_block * kBlockN, batch = entry_of(now.batch);
      const auto load = [&](const TensorMap& of_queries, const TensorMap& of_keys, auto columns) {
        constexpr int kColumns = decltype(columns)::value;
        const Barrier full = shared.ring.full(at);
        const u32 stage = shared.operands + at.stage * kBytesStage;
        shared.ring.empty(at).wait(at.parity ^ 1);
        full.arrive_expect(kBf16Terms * (chunked_bytes(kBlockM, kColumns) + chunked_bytes(kBlockN, kColumns)));
#pragma unroll
        for (int term = 0; term < kBf16Terms; ++term) {
          const int entry = term * common.batch + batch;
          load_boxes<kBlockM, kBoxRows, kColumns>(stage + term * kTermA, of_queries, full, first_row, now.head, entry);
          load_boxes<kBlockN, kBoxKeys, kColumns>(stage + kBytesA + term * kTermB, of_keys, full, first_key, head_kv,
                                                  entry);
        }
        at.advance();
      };
      load(params.q, params.k, Integer<kDim>{});
      if (!has_bias) {
        const Barrier full = shared.bias_ring.full(bias_at);
        shared.bias_ring.empty(bias_at).wait(bias_at.parity ^ 1);
        full.arrive_expect(kBytesBias);
#pragma unroll
        for (int row = 0; row < kBlockM; row += kBoxRows)
          load_bias(common, shared.bias + bias_at.stage * kBytesBias + row * kLineBytes, bias_map, full,
                    first_row + row, first_key, now.head, batch);
        bias_at.advance();
        has_bias = true;
      }
      load(params.dout, params.v, Integer<kDimV>{});
    }
  }
}

// Another warp of the producer stores a number for each key: 0 or, where the mask hides it, -infinity. They go with the
// stage of V. For the stage of K the warp only arrives.
CUFLASH_DEVICE void produce_per_key_values(const Params& params, const Shared& shared) {
  Position<kNumStages> at;
  for (BiasTileScheduler scheduler(params); scheduler.more(); scheduler.advance(params))
    for (ScoreTiles now = scheduler.first(params); now.left > 0; now.advance(params)) {
      const Score score(params, now.batch, now.head, key_stop_of(params, now.batch));
      const PerKeyValues numbers(params, score, now.batch, now.head);
      shared.ring.empty(at).wait(at.parity ^ 1);
      arrive_as_warp(shared.ring.full(at));
      at.advance();
      const u32 stage = shared.numbers + at.stage * kBytesPerKeyValues;
      shared.ring.empty(at).wait(at.parity ^ 1);
#pragma unroll
      for (int i = lane_index(); i < kBlockN; i += 32)
        ptx::store_shared_b32(stage + i * 4, ptx::bits_of(numbers.of(now.n_block * kBlockN + i)));
      arrive_as_warp(shared.ring.full(at));
      at.advance();
    }
}

struct alignas(8) Pair {
  float value[2];
};

// A consumer warpgroup, `index` of kConsumers, at one split of a tile of dbias, of which it owns 64 queries.
//
//   [GEMM 1] S = Q K'    [GEMM 2] dP = dO V'    [3] P = exp(S - lse)    [4] sum += P * (dP - delta)
struct Consumer {
  const Params& common;
  const Shared& shared;
  const u32 index;
  const int warp_row;  // in the tile
  Position<kNumStages>& at;
  const Position<kBiasStages>& bias_at;

  float sum[kNTiles][4], s[1][kNTiles][4], dp[kNTiles][4];

  CUFLASH_DEVICE Consumer(const Params& common_, const Shared& shared_, u32 index_, Position<kNumStages>& at_,
                          const Position<kBiasStages>& bias_at_)
      : common(common_),
        shared(shared_),
        index(index_),
        warp_row(index * 64 + ptx::thread_index() % 128 / 32 * 16),
        at(at_),
        bias_at(bias_at_) {
    set_zero((float (&)[1][kNTiles][4])sum);
  }

  // [GEMM 1], [GEMM 2] d = a b' of the operands in stage `at`.
  template <int columns>
  CUFLASH_DEVICE void issue_product(float (&d)[kNTiles][4]) {
    shared.ring.full(at).wait(at.parity);
    const u32 stage = shared.operands + at.stage * kBytesStage;
    const u64 a = descriptor_of(stage + index * 64 * kLineBytes), b = descriptor_of(stage + kBytesA);
    issue(d, [&]() __attribute__((always_inline)) {
#pragma unroll
      for (int i = 0; i < kTermProducts; ++i)
#pragma unroll
        for (int k = 0; k < columns / 16; ++k)
          ptx::wgmma<false, false>(Factor{}, d, along_k<kBlockM>(a + term_product(i).a * kTermA / 16, k),
                                   along_k<kBlockN>(b + term_product(i).b * kTermB / 16, k), i + k > 0);
    });
  }

  // [3] Replaces S by P. Hidden pairs get some number.
  CUFLASH_DEVICE void recompute_p(const Score& score, int row, int key, const RowStats (&own)[2]) {
    if constexpr (!kWide) score.cap(s);
    const BiasTerms<false, false> bias_terms(score, row, key,
                                             shared.bias + bias_at.stage * kBytesBias + warp_row * kLineBytes);
    bias_terms.visit<kNTiles>([&](int n, int i, auto score_of) {
      float& x = s[0][n][i];
      x = own[i / 2].weight_of(score_of(kWide ? score.capped(x) : x), kExponentOfE);
    });
  }

  // Adds tile `now` of pairs of one head, and takes the one after it. `first` says whether it is the first of a split.
  CUFLASH_DEVICE void step(ScoreTiles& now, bool first) {
    const ScoreTiles tile = now;
    const Entry batch = tile.batch;
    const int head = tile.head, key_stop = key_stop_of(common, batch);
    const int row = tile.m_block * kBlockM + warp_row + fragment_row();
    const int key = tile.n_block * kBlockN + fragment_column();
    const Barrier used_operands = shared.ring.empty(at);
    issue_product<kDim>(s[0]);
    at.advance();
    issue_product<kDimV>(dp);

    // What waits for global memory does so during the products.
    RowStats own[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)  // rows of the last tile need not have statistics
      if (row + 8 * half < common.seqlen_q) own[half].load(common, batch, head, row + 8 * half);
    const bool masked = tile.needs_mask(common, key_stop);
    now.advance(common);
    const Score score(common, batch, head, key_stop);
    if (first) shared.bias_ring.full(bias_at).wait(bias_at.parity);
    wait_for<1>(s[0]);
    if (ptx::any_lane(is_of_large(own[0].lse) || is_of_large(own[1].lse))) {
#pragma unroll
      for (int half = 0; half < 2; ++half) own[half].complete(common, batch, head, row + 8 * half);
      recompute_p(score, row, key, own);
    } else {  // without what large rows need
      recompute_p(score, row, key, own);
    }
    arrive_as_warp(used_operands);
    if (now.left == 0) arrive_after_reads(shared.bias_ring.empty(bias_at));
    wait_for<0>(dp);
    if (masked) {
      const Mask mask(common, batch, head, key_stop);
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (!mask.visible(row + i / 2 * 8, key + 8 * n + i % 2)) s[0][n][i] = dp[n][i] = 0.0f;
    }
    add(Dropout(common, batch, head), row, key, own);
    arrive_as_warp(shared.ring.empty(at));
    at.advance();
  }

  // [4] sum += P * (dP - delta). Keys that the mask hides may be NaN, so they are left out.
  CUFLASH_DEVICE void add(const Dropout& dropout, int row, int key, const RowStats (&own)[2]) {
    const float kept_scale = kept_scale_of(common);
    const u32 numbers = shared.numbers + at.stage * kBytesPerKeyValues + fragment_column() * 4;
    [[maybe_unused]] KeptWeights<false> kept;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      if (kHasDropout && n % 2 == 0) kept = dropout.of(row, key, n);
      float number[2] = {};
      if constexpr (kMaskOfKeys) ptx::load_shared_x2(numbers + n * 32, number);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float kept_dp = !kHasDropout || kept.keeps(n, i) ? dp[n][i] : 0.0f;
        if (number[i % 2] == 0) sum[n][i] += s[0][n][i] * (kept_dp * kept_scale - own[i / 2].delta);
      }
    }
  }

  // Stores the sums: in dbias, or for the kernel that adds up those of several blocks.
  CUFLASH_DEVICE void store(const BiasTileScheduler& scheduler) {
    const ScoreTiles tile(common, scheduler.tile(common));
    const int lane_row = warp_row + fragment_row(), lane_key = fragment_column();
    if (scheduler.is_split()) {
      float* partial =
          score_partials_of(common, scheduler.shared(common), scheduler.split(common)) + lane_row * kBlockN + lane_key;
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *(Pair*)(partial + 8 * half * kBlockN + 8 * n) = {sum[n][2 * half], sum[n][2 * half + 1]};
      return;
    }
    const ScoreTensor& dbias = common.dbias;
    const int row = tile.m_block * kBlockM + lane_row, key = tile.n_block * kBlockN + lane_key;
    const i64 first = tile.batch * dbias.batch_stride + tile.head * dbias.head_stride + row * dbias.row_stride + key;
    const int stop_row = (tile.m_block + 1) * kBlockM, stop_key = (tile.n_block + 1) * kBlockN;
    const bool is_whole = stop_row <= common.seqlen_q && stop_key <= common.seqlen_k;
    u8* to = (u8*)dbias.data + first * kBiasBytes;
    if (is_whole && dbias.key_stride == 1 && dbias.row_stride % 2 == 0 && (u64)to % (2 * kBiasBytes) == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half, to += 8 * dbias.row_stride * kBiasBytes)
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          const float left = sum[n][2 * half], right = sum[n][2 * half + 1];
          if constexpr (kBiasBytes == 2)
            *((u32*)to + 4 * n) = ptx::pack(Factor{}, left, right);
          else
            *((Pair*)to + 4 * n) = {left, right};
        }
      return;
    }
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        store_dbias(common, tile.batch, tile.head, row + i / 2 * 8, key + 8 * n + i % 2, sum[n][i]);
  }
};

CUFLASH_DEVICE void consume(const Params& common, const Shared& shared, u32 index) {
  Position<kNumStages> at;
  Position<kBiasStages> bias_at;
  for (BiasTileScheduler scheduler(common); scheduler.more(); scheduler.advance(common)) {
    Consumer consumer(common, shared, index, at, bias_at);
    ScoreTiles now = scheduler.first(common);
    const bool any = now.left > 0;
#pragma unroll 1
    for (bool first = true; now.left > 0; first = false) consumer.step(now, first);
    if (any) bias_at.advance();
    consumer.store(scheduler);
  }
}

CUFLASH_DEVICE void backward_bias(const BiasParams& params) {
  const Shared shared;
  shared.make_barriers();
  const u32 warp = ptx::uniform(ptx::thread_index() / 32);
  if (warp >= 4 * kConsumers) {
    ptx::decrease_registers<kProducerRegisters>();
    if (warp == 4 * kConsumers && ptx::elect_lane()) produce(params, shared);
    if constexpr (kHasPerKeyValues) {
      if (warp == 4 * kConsumers + 1) produce_per_key_values(params.common, shared);
    }
  } else {
    ptx::increase_registers<kConsumerRegisters>();
    consume(params.common, shared, warp / 4);
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, BiasParams, kNumThreads, 1, backward_bias)
