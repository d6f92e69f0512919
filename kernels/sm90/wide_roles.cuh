// The roles in the kernels for wide heads of compute capability 9.0. The output of 64 rows takes half of the registers of
// a multiprocessor, so a block has 64 rows and divides what others leave to one consumer:
//
//   warpgroup 0, 1  sum O += P V, half of the columns each
//   warpgroup 2     makes S = Q K^T and the weights P = exp(S - m)
//   warpgroup 3     one thread of it, the producer, loads by TMA
//
// K and V come in boxes of kBlockN keys and 64 columns through one ring, in the order in which they are used: the scores
// of a tile of keys beside the output of the tile before. P and the factors that rescale O go through shared memory, in
// the order of threads: the lane that makes a weight has the place in its warpgroup of those that need it.
//
// Two blocks of a cluster have other rows that see the same keys. Each brings half of a box to both of them, so that L2
// is read once (kClusterBlocks).
//
//   barrier      one phase is over when                           who waits
//   q_full       Q has arrived                                    warpgroup 2, before S
//   q_empty      it has its last S                                producer, before the next Q
//   full[w][i]   a box for warpgroup w is in stage i              that warpgroup
//   empty[i]     these warpgroups of all blocks are done with it  producer, before the next box in stage i
//   ready[w]     P and factors are there for warpgroup w          that warpgroup
//   taken        both of them have P and factors in registers     warpgroup 2, before it writes the next ones
//   named: one for each warpgroup but the last
//
// Warpgroup 1 gets P only once S of the next tile is there: products of its half run during the softmax, in which the
// tensor cores would be idle otherwise.
#pragma once
#include "common/config.cuh"
#include "common/fragments.cuh"
#include "common/params.cuh"
#include "common/schedule.cuh"
#include "common/scores.cuh"
#include "common/softmax.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/products.cuh"
#include "sm90/tiles.cuh"

constexpr int kRows = 64;
constexpr int kClusterBlocks = kBlockM / kRows;
static_assert(kNumWarps == 16, "two warpgroups of the output, one of the scores, and the producer's");
static_assert(kBlockM == kRows * kClusterBlocks, "a block has 64 rows");

// Chunks of 64 columns: of Q and K, and of V those that a pass over the keys takes, at most 4 a warpgroup.
constexpr int kKeyChunks = chunks_of(kDim);
constexpr int kPasses = ceil_div(chunks_of(kDimV), 8);
constexpr int kOutChunks = ceil_div(chunks_of(kDimV), kPasses);
constexpr int kFirstChunks = ceil_div(kOutChunks, 2), kSecondChunks = kOutChunks - kFirstChunks;
constexpr int kNTiles = kBlockN / 8, kSteps = kBlockN / 16;

// The ring of boxes. Each of those that need boxes has its own barriers for them, whose phases count its own boxes
// alone. With one barrier a stage it could wait for a box of its own before the box of another warpgroup has come to
// that stage, and would take the phase before that one for its own: they have the same parity.
enum Reader { kFirstHalf, kSecondHalf, kScores, kReaders };
struct BoxRing {
  static constexpr u32 kBytes = 8 * (kReaders + 1) * kNumStages;
  u32 address;

  CUFLASH_DEVICE Barrier full(int stage, Reader reader) const { return {address + 8 * (reader * kNumStages + stage)}; }
  CUFLASH_DEVICE Barrier empty(int stage) const { return {address + 8 * (kReaders * kNumStages + stage)}; }
  CUFLASH_DEVICE void init() const {
    for (int i = 0; i < kNumStages; ++i) {
      for (int reader = 0; reader < kReaders; ++reader) full(i, (Reader)reader).init(1);
      empty(i).init(kClusterBlocks);
    }
  }
};

constexpr u32 kBytesQ = chunked_bytes(kRows, kDim);
constexpr u32 kBytesBox = chunked_bytes(kBlockN, kChunk);
constexpr u32 kBytesP = kSteps * 128 * 16, kBytesFactors = 128 * 8;
constexpr u32 kBytesBarriers = Ring<1>::kBytes + BoxRing::kBytes + 24;
static_assert(kBytesQ + kNumStages * kBytesBox + kBytesP + kBytesFactors + kBytesBarriers == CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

// Registers of a thread. All together they are what the block started with.
constexpr int kOutRegisters = 192, kScoreRegisters = 96, kProducerRegisters = 32;

struct WideParams {
  Params common;
  TensorMap q, k, v;
};
static_assert(sizeof(WideParams) == CUFLASH_ARGUMENT_BYTES, "the argument differs from its description in Python");

struct Shared {
  u32 q, boxes, p, factors;
  Ring<1> q_ring;
  BoxRing ring;
  Barrier ready[2], taken;

  CUFLASH_DEVICE Shared() {
    q = ptx::dynamic_shared();
    boxes = q + kBytesQ;
    p = boxes + kNumStages * kBytesBox;
    factors = p + kBytesP;
    q_ring = {factors + kBytesFactors};
    ring = {q_ring.address + Ring<1>::kBytes};
    const u32 others = ring.address + BoxRing::kBytes;
    ready[0] = {others}, ready[1] = {others + 8}, taken = {others + 16};
  }

  // Called by all threads of the cluster.
  CUFLASH_DEVICE void make_barriers() const {
    if (ptx::thread_index() == 0) {
      q_ring.init(1);
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

// Warpgroup. The boxes that it needs, one after another.
template <Reader reader>
struct Boxes {
  const Shared& shared;
  u32 parities = 0;  // of the next box in each stage
  static_assert(kNumStages <= 32, "a bit for each stage");

  CUFLASH_DEVICE void wait(const Box& box) {
    shared.ring.full(box.stage, reader).wait(parities >> box.stage & 1);
    parities ^= 1u << box.stage;
  }
  // Gives the box back.
  CUFLASH_DEVICE void release(const Box& box) const {
    if (ptx::thread_index() % 128 == 0)
      ptx::barrier_arrive_in_cluster<kClusterBlocks>(shared.ring.empty(box.stage).address);
  }
};

// The order of boxes. A pass begins with those of K of the first tile. Then come steps: of K of the next tile, while
// there is one, and of V of the tile for warpgroup 0, one of each in turn; those of V for warpgroup 1 follow last. These
// are places in a step that has so many boxes of K.
CUFLASH_DEVICE constexpr int place_of_key(int i) { return i + min_of(i, kFirstChunks); }
template <Reader half>
CUFLASH_DEVICE constexpr int place_of_value(int i, int of_keys) {
  return half == kFirstHalf ? min_of(i + 1, of_keys) + i : of_keys + kFirstChunks + i;
}

// The producer: one thread.
struct Producer {
  const WideParams& params;
  const Shared& shared;
  u32 count = 0;
  Position<1> query;

  template <class Work>
  CUFLASH_DEVICE void load(Reader reader, const Work& work, const TensorMap& map, int n_block, int chunk) {
    const Box box(count++);
    const Barrier full = shared.ring.full(box.stage, reader);
    shared.ring.empty(box.stage).wait(box.parity ^ 1);
    full.arrive_expect(kBytesBox);
    ptx::load_tensor_by_cluster<kClusterBlocks, kBlockN / kClusterBlocks>(
        box.address(shared), map, full.address, chunk * kChunk, work.tile_at(n_block) * kBlockN, work.head_kv,
        work.batch);
  }

  template <class Work>
  CUFLASH_DEVICE void take(const WideParams&, const Work& work, int pass) {
    if (work.keys.start == work.keys.stop) return;
    const int first_chunk = pass * kOutChunks, last = work.keys.stop - 1;
    shared.q_ring.empty(query).wait(query.parity ^ 1);
    work.load_q(params, shared.q, shared.q_ring.full(query));
    query.advance();
#pragma unroll 1
    for (int i = 0; i < kKeyChunks; ++i) load(kScores, work, params.k, last, i);
#pragma unroll 1
    for (int n_block = last; n_block >= work.keys.start; --n_block) {
      const int of_keys = n_block > work.keys.start ? kKeyChunks : 0;
#pragma unroll 1
      for (int i = 0; i < max_of(kKeyChunks, kFirstChunks); ++i) {
        if (i < of_keys) load(kScores, work, params.k, n_block - 1, i);
        if (i < kFirstChunks) load(kFirstHalf, work, params.v, n_block, first_chunk + i);
      }
#pragma unroll 1
      for (int i = 0; i < kSecondChunks; ++i)
        load(kSecondHalf, work, params.v, n_block, first_chunk + kFirstChunks + i);
    }
  }
};

// Warpgroup 2 makes scores, and weights of them.
struct Weigher {
  const Shared& shared;
  Boxes<kScores> boxes{shared};
  const u32 thread = ptx::thread_index() % 128;
  u32 count = 0;  // of boxes before this step
  Position<1> query, message;
  OnlineSoftmax<1> softmax;
  float s[1][kNTiles][4];

  // [GEMM 1] S = Q K^T
  CUFLASH_DEVICE void multiply(bool is_first) {
    const u64 q = descriptor_of(shared.q);
    const auto box_of = [&](int i) { return Box(count + (is_first ? i : place_of_key(i))); };
    ptx::fence_operand(s[0]);
    repeat<kKeyChunks>([&](auto chunk) {
      constexpr int i = decltype(chunk)::value;
      const Box box = box_of(i);
      const u64 k = descriptor_of(box.address(shared));
      boxes.wait(box);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 4 * i; step < min_of(4 * i + 4, kDim / 16); ++step)
        ptx::wgmma<false, false>(Element{}, s[0], along_k<kRows>(q, step), along_k<kBlockN>(k, step % 4), step > 0);
      ptx::wgmma_commit();
      if constexpr (i > 0) {
        ptx::wgmma_wait<1>();
        boxes.release(box_of(i - 1));
      }
    });
    wait_for<0>(s[0]);
    boxes.release(box_of(kKeyChunks - 1));
    count += kKeyChunks + (is_first ? 0 : kOutChunks);
  }

  // [2] P = exp(S - m), for those that multiply by V, and what O is multiplied by before.
  template <class Rows>
  CUFLASH_DEVICE void weigh(const Rows& rows, int n_tile, bool masked) {
    float factor[1][2] = {{1.0f, 1.0f}};
    const int lane_key = n_tile * kBlockN + fragment_column();
    rows.to_scores(s, lane_key, masked);
    softmax.update(s, factor, rows.exponent_scale());
    softmax.exponentiate(s, rows.exponent_scale(), softmax.row_sum);
    rows.drop(s[0], lane_key);
    shared.taken.wait(message.parity ^ 1);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Fragment p;
      to_operand(s[0], k, p);
      ptx::store_shared_b128(shared.p + (k * 128 + thread) * 16, {p.word[0], p.word[1], p.word[2], p.word[3]});
    }
    hand_over(factor[0]);
  }
  CUFLASH_DEVICE void hand_over(const float (&factor)[2]) {
    ptx::store_shared_x2(shared.factors + thread * 8, {factor[0], factor[1]});
    arrive_as_warp(shared.ready[kFirstHalf]);
    message.advance();
  }
  CUFLASH_DEVICE void let_second_follow() const { arrive_as_warp(shared.ready[kSecondHalf]); }

  // All keys of a piece of work. At the end O gets its last factor.
  template <class Work>
  CUFLASH_DEVICE void take(const WideParams& params, const Work& work, int pass) {
    const auto rows = work.rows_of_lane(params.common, thread / 32 * 16 + fragment_row());
    softmax = OnlineSoftmax<1>();
    const int last = work.keys.stop - 1;
    const bool has_keys = last >= work.keys.start;
    if (has_keys) {
      shared.q_ring.full(query).wait(query.parity);
      work.clear_rows(shared.q, thread);
    }
#pragma unroll 1
    for (int n_block = last; n_block >= work.keys.start; --n_block) {
      multiply(n_block == last);
      if (n_block != last) let_second_follow();
      if (n_block == work.keys.start && thread == 0) shared.q_ring.empty(query).arrive();
      weigh(rows, work.tile_at(n_block), work.is_masked(n_block));
    }
    if (has_keys) {
      let_second_follow();
      query.advance();
      count += kOutChunks;
    }
    float factor[2];
    rows.finish(softmax, factor, pass);
    shared.taken.wait(message.parity ^ 1);
    hand_over(factor);
    let_second_follow();
  }
};

// Warpgroups 0 and 1, `half` of the columns each: [GEMM 3] O += P V.
template <Reader half>
struct Summer {
  static constexpr int kChunks = half == kFirstHalf ? kFirstChunks : kSecondChunks;
  const Shared& shared;
  Boxes<half> boxes{shared};
  const u32 thread = ptx::thread_index() % 128;
  u32 count = 0;  // of boxes before this step
  Position<1> message;
  float factor[1][2];
  Fragment p[kSteps];
  float o[1][8 * kChunks][4];

  CUFLASH_DEVICE void receive(bool has_weights) {
    shared.ready[half].wait(message.parity);
    if (has_weights) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const Bytes16 words = ptx::load_shared_b128(shared.p + (k * 128 + thread) * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) p[k].word[i] = words.word[i];
      }
    }
    ptx::load_shared_x2(shared.factors + thread * 8, factor[0]);
    arrive_as_warp(shared.taken);
    message.advance();
  }

  // `valid` keys of the tile exist. Others are cleared where anything may lie: their weights are 0, but 0 * NaN is NaN.
  template <bool clears>
  CUFLASH_DEVICE void multiply(int of_keys, int valid) {
    const auto box_of = [&](int i) { return Box(count + place_of_value<half>(i, of_keys)); };
    ptx::fence_operand(o[0]);
    repeat<kChunks>([&](auto chunk) {
      constexpr int i = decltype(chunk)::value;
      const Box box = box_of(i);
      const u64 v = descriptor_of_transposed<kBlockN>(box.address(shared));
      boxes.wait(box);
      if (clears && valid < kBlockN) {
        zero_rows<kBlockN, kChunk>(box.address(shared), valid, thread);
        ptx::fence_async_proxy();
        ptx::sync_named(1 + half, 128);
      }
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
        ptx::wgmma<true>(Element{}, (float (&)[8][4])o[0][8 * i], p[k].word, along_k_transposed(v, k), true);
      ptx::wgmma_commit();
      if constexpr (i > 0) {
        ptx::wgmma_wait<1>();
        boxes.release(box_of(i - 1));
      }
    });
    wait_for<0>(o[0]);
    boxes.release(box_of(kChunks - 1));
    count += of_keys + kOutChunks;
  }

  template <class Work>
  CUFLASH_DEVICE void take(const WideParams& params, const Work& work, int pass) {
    set_zero(o);
    const int last = work.keys.stop - 1;
    if (last >= work.keys.start) count += kKeyChunks;
#pragma unroll 1
    for (int n_block = last; n_block >= work.keys.start; --n_block) {
      receive(true);
      if (ptx::any_lane(factor[0][0] != 1.0f || factor[0][1] != 1.0f)) OnlineSoftmax<1>::rescale(o, factor);
      multiply<Work::kClearsValues>(n_block > work.keys.start ? kKeyChunks : 0,
                                    work.key_stop - work.tile_at(n_block) * kBlockN);
    }
    receive(false);
    OnlineSoftmax<1>::rescale(o, factor);
    work.store(params.common, o[0], thread / 32 * 16 + fragment_row(),
               (pass * kOutChunks + half * kFirstChunks) * kChunk);
  }
};

// Words of four neighbouring n-tiles, of which each lane of a quad has two columns, become those of one n-tile a lane,
// in the order of columns: word i of lane j goes to lane i as its word j.
CUFLASH_DEVICE void gather_in_quad(u32 (&word)[4]) {
  const u32 lane = lane_index();
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 received = ptx::shuffle(lane % 2 ? word[i] : word[i + 1], lane ^ 1);
    (lane % 2 ? word[i] : word[i + 1]) = received;
  }
  const bool upper = lane / 2 % 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 received = ptx::shuffle(upper ? word[i] : word[2 + i], lane ^ 2);
    (upper ? word[i] : word[2 + i]) = received;
  }
}

// Rounds a row of the output, `half` of the two that a lane has, and stores it, 16 bytes a lane at a time, unless the
// row is null: to `row` at columns from `first` on. Called by whole warps.
template <int n_tiles>
CUFLASH_DEVICE void store_rounded(Storage* row, const float (&o)[n_tiles][4], int half, int first) {
#pragma unroll
  for (int n = 0; n < n_tiles; n += 4) {
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) word[i] = ptx::pack(Element{}, o[n + i][2 * half], o[n + i][2 * half + 1]);
    gather_in_quad(word);
    const int column = first + (n + lane_index() % 4) * 8;
    if (row && column < kHeadDimV) *(Bytes16*)(row + column) = {word[0], word[1], word[2], word[3]};
  }
}

// What the kernels run: each role goes through the same work.
template <class Walk>
CUFLASH_DEVICE void take_all(const WideParams& params) {
  const Shared shared;
  shared.make_barriers();
  const u32 warp = ptx::uniform(ptx::thread_index() / 32);
  const auto each = [&](auto& role) {
#pragma unroll 1
    for (Walk walk(params.common); walk.more(); walk.advance()) {
      const auto work = walk.work(params.common);
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) role.take(params, work, pass);
    }
  };
  if (warp >= 12) {
    ptx::decrease_registers<kProducerRegisters>();
    if (warp == 12 && ptx::elect_lane()) {
      Producer producer{params, shared};
      each(producer);
    }
  } else if (warp >= 8) {
    ptx::decrease_registers<kScoreRegisters>();
    Weigher weigher{shared};
    each(weigher);
  } else {
    ptx::increase_registers<kOutRegisters>();
    const auto sum = [&](auto half) {
      Summer<(Reader) decltype(half)::value> summer{shared};
      each(summer);
    };
    if (warp < 4)
      sum(Integer<kFirstHalf>{});
    else if constexpr (kSecondChunks > 0)
      sum(Integer<kSecondHalf>{});
  }
  // No block leaves while another one may still arrive at its barriers.
  if constexpr (kClusterBlocks > 1) ptx::sync_cluster<kClusterBlocks>();
}
