// Products of long rows on compute capability 9.0, as a GEMM makes them: the operands of a tile of sums arrive by
// chunks of 64 columns through one ring, and the sums stay in registers.
//
//   barrier    one phase is over when                                       who waits
//   full[i]    a chunk of both operands has arrived in stage i              consumers, before its products
//   empty[i]   all consumer warps of the cluster have multiplied it         producer, before the next chunk in stage i
//
// A block has kRows rows of the left operand, 64 for each consumer warpgroup, and one thread of the last warpgroup, the
// producer. The blocks of a cluster have different rows for the same columns of the tile: each loads a slice of the
// right operand for all of them, so that L2 is read once.
#pragma once
#include "common/config.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr int kRowBlocks = CUFLASH_ROW_BLOCKS;  // of a cluster
constexpr int kRows = kBlockM / kRowBlocks, kConsumers = kRows / 64;
constexpr int kNTiles = kBlockN / 8;
constexpr int kChunks = chunks_of(kDim);
static_assert(kRows == 64 * kConsumers, "64 rows for each consumer");

// Registers of a thread of each role; together they are no more than the block started with. A wgmma needs all
// registers of its sums at the start of the kernel, which three consumers have for 128 columns.
constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240, kProducerRegisters = kConsumers == 3 ? 32 : 24;
constexpr int kTilesAtOnce = kConsumers == 3 ? 16 : 32;
static_assert(kNumWarps == 4 * kConsumers + 4 && (kConsumers == 2 || kConsumers == 3), "the consumers and a producer");

constexpr u32 kBytesLeft = chunked_bytes(kRows, kChunk), kBytesRight = chunked_bytes(kBlockN, kChunk);
constexpr u32 kBytesStage = kBytesLeft + kBytesRight;
// Boxes of 64 x 64 rounded results of each consumer, from which TMA stores them.
constexpr int kResultBoxes = CUFLASH_RESULT_BOXES;
constexpr u32 kBytesBox = 64 * kLineBytes, kBytesResults = kConsumers * kResultBoxes * kBytesBox;
static_assert(kNumStages * kBytesStage + kBytesResults + Ring<kNumStages>::kBytes == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

struct Shared {
  u32 stages, results;
  Ring<kNumStages> ring;

  CUFLASH_DEVICE Shared()
      : stages(ptx::dynamic_shared()), results(stages + kNumStages * kBytesStage), ring{results + kBytesResults} {}

  // Called by all threads of the cluster.
  CUFLASH_DEVICE void make_barriers() const {
    if (ptx::thread_index() == 0) {
      ring.init(4 * kConsumers * kRowBlocks);
      ptx::fence_barrier_init();
    }
    ptx::sync_cluster<kRowBlocks>();
  }
  CUFLASH_DEVICE u32 left(const Position<kNumStages>& at) const { return stages + at.stage * kBytesStage; }
  CUFLASH_DEVICE u32 right(const Position<kNumStages>& at) const { return left(at) + kBytesLeft; }
};

// The rows of an operand that a tile of sums needs, from `row` on.
struct Source {
  const TensorMap& map;
  int row, head, batch;
};

// The producer, one thread: loads the chunks of a tile.
CUFLASH_DEVICE void load_rows(const Shared& shared, Position<kNumStages>& at, const Source& left, const Source& right) {
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk, at.advance()) {
    const Barrier full = shared.ring.full(at);
    shared.ring.empty(at).wait(at.parity ^ 1);
    full.arrive_expect(kBytesStage);
    ptx::load_tensor(shared.left(at), left.map, full.address, chunk * kChunk, left.row, left.head, left.batch);
    ptx::load_tensor_by_cluster<kRowBlocks, kBlockN / kRowBlocks>(shared.right(at), right.map, full.address,
                                                                  chunk * kChunk, right.row, right.head, right.batch);
  }
}

// A consumer warpgroup, number `index`: sums = left right', over `num_chunks` chunks, one at least. The k of a
// transposed operand runs down the 64 rows of a chunk, whose 64 columns are some of the rows, or columns, of the sums.
template <bool left_transposed, bool right_transposed>
CUFLASH_DEVICE void multiply_chunks(const Shared& shared, Position<kNumStages>& at, u32 index, float (&sum)[kNTiles][4],
                                    int num_chunks) {
  const auto release = [&](const Position<kNumStages>& done) {
    if (lane_index() == 0) ptx::barrier_arrive_in_cluster<kRowBlocks>(shared.ring.empty(done).address);
  };
  Position<kNumStages> before;
  ptx::fence_operand(sum);
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks; ++chunk) {
    const u32 s_left = shared.left(at) + index * kBytesBox, s_right = shared.right(at);
    const u64 left = left_transposed ? descriptor_of_transposed<64>(s_left) : descriptor_of(s_left);
    const u64 right = right_transposed ? descriptor_of_transposed<64>(s_right) : descriptor_of(s_right);
    shared.ring.full(at).wait(at.parity);
    ptx::wgmma_fence();
    repeat<ceil_div(kNTiles, kTilesAtOnce)>([&](auto slice) {
      constexpr int kFirst = decltype(slice)::value * kTilesAtOnce, kCount = min_of(kTilesAtOnce, kNTiles - kFirst);
      static_assert(!right_transposed || kFirst % 8 == 0, "boxes of 64 columns");
      constexpr int kOffset = right_transposed ? kFirst / 8 * kBytesBox : kFirst * 8 * kLineBytes;
      auto& columns = (float (&)[kCount][4])sum[kFirst];
#pragma unroll
      for (int k = 0; k < kChunk / 16; ++k)
        ptx::wgmma<left_transposed, right_transposed>(
            Element{}, columns, left_transposed ? along_k_transposed(left, k) : along_k<kRows>(left, k),
            (right_transposed ? along_k_transposed(right, k) : along_k<kBlockN>(right, k)) + kOffset / 16,
            chunk > 0 || k > 0);
    });
    ptx::wgmma_commit();
    if (chunk > 0) {
      ptx::wgmma_wait<1>();
      release(before);
    }
    before = at;
    at.advance();
  }
  wait_for<0>(sum);
  release(before);
}
CUFLASH_DEVICE void multiply_rows(const Shared& shared, Position<kNumStages>& at, u32 index, float (&sum)[kNTiles][4]) {
  multiply_chunks<false, false>(shared, at, index, sum, kChunks);
}
