// The strongest keys of each query, on mma.sync tensor cores (compute capability 8.0 and later): of the scores of a row
// the largest, with their keys, and weights exp(S - lse).
//
// A block owns kBlockM queries of one head and iterates over the tiles of keys; a warp owns 16 of its rows. Each row has
// a buffer of kCapacity candidates in shared memory: scores that are above the threshold of the row are appended. When a
// buffer has no space for the next 8 columns, the warp sorts it by a bitonic network, keeps the first `count`, and the
// last of these is the new threshold. As the threshold rises, ever fewer scores pass: of n random keys about
// count * log(n) do. Candidates are ordered by score and key, so that no order of tiles changes the result.
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "sm80/copy.cuh"
#include "sm80/mma.cuh"

constexpr int kCapacity = CUFLASH_CAPACITY;
constexpr int kOfLane = kCapacity / 32;  // candidates that a lane sorts
constexpr int kNTiles = kBlockN / 8;
constexpr int kRow = row_bytes(kDim);
static_assert(kBlockM == 16 * kNumWarps, "every warp owns one fragment of rows");
static_assert(kNumStages == 1 || kNumStages == 2, "at most one tile of keys arrives while another is used");

// Shared memory: Q, the ring of K tiles, then the buffers: scores of all rows, and keys of all rows. Rows are one
// element longer than they need to be, so that the same places of different rows are in different banks.
constexpr int kRowOfBuffer = kCapacity + 1;
constexpr u32 kBytesQ = tile_bytes(kBlockM, kDim);
constexpr u32 kBytesK = tile_bytes(kBlockN, kDim);
constexpr u32 kBytesScores = kBlockM * kRowOfBuffer * sizeof(Real);
static_assert(kBytesQ + kNumStages * kBytesK + kBytesScores + kBlockM * kRowOfBuffer * sizeof(i32) ==
                  CUFLASH_SHARED_BYTES,
              "shared memory differs from the plan");

struct Candidate {
  Real score;
  u32 key;

  // Of equal scores the lower key comes first.
  CUFLASH_DEVICE bool is_before(const Candidate& other) const {
    return score > other.score || (score == other.score && key < other.key);
  }
};

CUFLASH_DEVICE void store_real(u32 address, float value) { ptx::store_shared_b32(address, ptx::bits_of(value)); }
CUFLASH_DEVICE void store_real(u32 address, double value) {
  const u64 bits = ptx::bits_of(value);
  ptx::store_shared_b32(address, (u32)bits);
  ptx::store_shared_b32(address + 4, (u32)(bits >> 32));
}

// The buffer of one row.
struct Buffer {
  u32 s_scores, s_keys;

  CUFLASH_DEVICE Buffer(u32 s_buffers, int row)
      : s_scores(s_buffers + row * kRowOfBuffer * sizeof(Real)),
        s_keys(s_buffers + kBytesScores + row * kRowOfBuffer * sizeof(i32)) {}

  CUFLASH_DEVICE void store(int at, Real score, u32 key) const {
    store_real(s_scores + at * sizeof(Real), score);
    ptx::store_shared_b32(s_keys + at * sizeof(i32), key);
  }
  CUFLASH_DEVICE Candidate load(int at) const {
    Candidate found;
    ptx::load_shared(s_scores + at * sizeof(Real), found.score);
    found.key = ptx::load_shared_b32(s_keys + at * sizeof(i32));
    return found;
  }
};

// Warp. The candidates of a row, of which a lane has those at lane + 32 i.
struct Sorted {
  Candidate own[kOfLane];

  CUFLASH_DEVICE Sorted(const Buffer& buffer, int size) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int at = lane_index() + 32 * i;
      own[i] = {-ptx::infinity(), 0xffffffff};
      if (at < size) own[i] = buffer.load(at);
    }
    // Batcher's bitonic network. Its loops are not unrolled: it is long, and rarely runs.
#pragma unroll 1
    for (int length = 2; length <= kCapacity; length *= 2) {
      if constexpr (kOfLane > 2)
        if (length > 64) exchange_in_lane<64>(length);
      if (length > 32) exchange_in_lane<32>(length);
#pragma unroll 1
      for (int distance = min_of(length / 2, 16); distance > 0; distance /= 2)
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
          const Candidate other = {ptx::shuffle_xor(own[i].score, distance),
                                   ptx::shuffle(own[i].key, lane_index() ^ distance)};
          keep(own[i], other, keeps_first(i, length, distance));
        }
    }
  }

 private:
  // Whether the candidate of a pair that this lane has at i is to come first.
  CUFLASH_DEVICE static bool keeps_first(int i, int length, int distance) {
    const int at = lane_index() + 32 * i;
    return ((at & distance) == 0) == ((at & length) == 0);
  }
  CUFLASH_DEVICE static void keep(Candidate& mine, const Candidate& other, bool keeps_first) {
    if (keeps_first ? other.is_before(mine) : mine.is_before(other)) mine = other;
  }
  template <int distance>
  CUFLASH_DEVICE void exchange_in_lane(int length) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      constexpr int kApart = distance / 32;
      if (i & kApart) continue;
      Candidate &first = own[i], &second = own[i + kApart];
      if (keeps_first(i, length, distance) ? second.is_before(first) : first.is_before(second)) {
        const Candidate kept = first;
        first = second, second = kept;
      }
    }
  }
};

// The number of bits that are set, of four.
CUFLASH_DEVICE int popcount_of_4(u32 bits) { return 0x4332322132212110ull >> (4 * bits) & 15; }

// The state of the two rows that a lane shares with three others.
struct Rows {
  Real threshold[2];  // of candidates; -inf until there are `count`
  int size[2];        // of the buffers

  CUFLASH_DEVICE Rows() {
#pragma unroll
    for (int half = 0; half < 2; ++half) threshold[half] = -ptx::infinity(), size[half] = 0;
  }

  // Tiles come in any order if they are indexed, so that a later key may be the lower one.
  CUFLASH_DEVICE bool passes(int half, Real score) const {
    return score > threshold[half] || (kHasBlockIndex && score == threshold[half] && score > -ptx::infinity());
  }
};

// Warp. Sorts the buffers of the rows that have no space for 8 more, and keeps `count` of each.
CUFLASH_DEVICE void make_space(Rows& rows, u32 s_buffers, int warp_row, int count) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 full = ptx::ballot(rows.size[half] > kCapacity - 8);
    if (full == 0) continue;
    ptx::sync_warp();
#pragma unroll 1
    for (int row = 0; row < 8; ++row) {
      if ((full >> (4 * row) & 1) == 0) continue;
      const Buffer buffer(s_buffers, warp_row + 8 * half + row);
      const Sorted sorted(buffer, (int)ptx::shuffle((u32)rows.size[half], 4 * row));
      Real last = -ptx::infinity();
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int at = lane_index() + 32 * i;
        if (at < count) buffer.store(at, sorted.own[i].score, sorted.own[i].key);
        const Real of_last = ptx::shuffle(sorted.own[i].score, (u32)(count - 1) % 32);
        if ((count - 1) / 32 == i) last = of_last;
      }
      if ((int)lane_index() / 4 == row) rows.threshold[half] = last, rows.size[half] = count;
    }
    ptx::sync_warp();
  }
}

// Warp. Appends the scores of a tile that pass to the buffers of its rows.
CUFLASH_DEVICE void append_tile(const Real (&s)[1][kNTiles][4], int lane_key, Rows& rows, u32 s_buffers, int warp_row,
                                int count) {
  const u32 lane = lane_index(), first_of_row = lane / 4 * 4;
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
    bool passes[4];
    bool any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) passes[i] = rows.passes(i / 2, s[0][n][i]), any = any || passes[i];
    if (!ptx::any_lane(any)) continue;
    make_space(rows, s_buffers, warp_row, count);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Buffer buffer(s_buffers, warp_row + fragment_row() + 8 * half);
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        const u32 of_row = ptx::ballot(passes[i]) >> first_of_row & 15;
        const u32 before = of_row & ((1u << (lane - first_of_row)) - 1);
        if (passes[i]) buffer.store(rows.size[half] + popcount_of_4(before), s[0][n][i], lane_key + 8 * n + i % 2);
        rows.size[half] += popcount_of_4(of_row);
      }
    }
  }
}

CUFLASH_DEVICE void top_keys(const Params& params) {
  if (!is_chosen(params)) return;
  const Work work = schedule_queries(params, ptx::block_index(), params.num_heads, kHasRightBound);
  if (!has_queries(params, work)) return;
  const Entry batch = work.batch;
  const int head = work.head, head_kv = head / (params.num_heads / params.num_heads_kv);
  const int first_row = work.block * kBlockM, seqlen_q = seqlen_q_of(params, batch);
  const int key_stop = key_stop_of(params, batch);
  const int count = (int)params.dv.row_stride;  // results are contiguous
  const KeyTiles tiles(params, work, key_stop);

  const auto g_k = keys_of(params, params.k, batch, head_kv);
  const u32 s_q = ptx::dynamic_shared(), s_k = s_q + kBytesQ, s_buffers = s_k + kNumStages * kBytesK;
  const int warp_row = warp_index() * 16;
  const auto load_k = [&](int n_block, int stage) {
    load_tile<kBlockN, kHeadDim>(s_k + stage * kBytesK, g_k, params.k.row_stride, tiles.at(n_block) * kBlockN,
                                 key_stop);
  };
  load_tile<kBlockM, kHeadDim>(s_q, queries_of(params.q, batch, head), params.q.row_stride, first_row, seqlen_q);
#pragma unroll
  for (int i = 0; i < kNumStages; ++i) {
    if (tiles.start + i < tiles.stop) load_k(tiles.start + i, i);
    ptx::copy_async_commit();
  }

  const Score score(params, batch, head, key_stop);
  const Mask mask(params, batch, head, key_stop);
  const int lane_row = first_row + warp_row + fragment_row();
  Rows rows;
#pragma unroll 1
  for (int n_block = tiles.start; n_block < tiles.stop; ++n_block) {
    const int stage = (n_block - tiles.start) % kNumStages;
    ptx::copy_async_wait<kNumStages - 1>();
    ptx::sync_block();
    Real s[1][kNTiles][4];
    set_zero(s);
    multiply<kDim / kStep>(s, RowMajorA<kRow>(s_q, warp_row), ColumnMajorB<kRow, 1>(s_k + stage * kBytesK));
    ptx::sync_block();
    if (n_block + kNumStages < tiles.stop) load_k(n_block + kNumStages, stage);
    ptx::copy_async_commit();
    const int lane_key = tiles.at(n_block) * kBlockN + fragment_column();
    const bool masked = n_block < tiles.full_start || n_block >= tiles.full_stop;
    to_scores(score, mask, s, [&](int, int i) { return lane_row + i / 2 * 8; }, lane_key, masked);
    append_tile(s, lane_key, rows, s_buffers, warp_row, count);
  }
  ptx::copy_async_wait<0>();
  ptx::sync_warp();

  const int first_of_keys = key_start_of(batch);  // of packed sequences
  const Real exponent_scale = score.exponent_scale();
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const int row = first_row + warp_row + 8 * half + i;
      const int size = (int)ptx::shuffle((u32)rows.size[half], 4 * i);
      if (row >= seqlen_q) break;
      const Sorted sorted(Buffer(s_buffers, warp_row + 8 * half + i), size);
      const RowStats stats(params, batch, head, row);
      Real* weights = row_values_of(params.dv, batch, head) + row * params.dv.row_stride;
      i32* indices = (i32*)params.dk.data + (weights - (Real*)params.dv.data);
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) {
        const int at = lane_index() + 32 * j;
        const Real weight = stats.weight_of(sorted.own[j].score, exponent_scale);
        if (at >= count) continue;
        weights[at] = at < size ? weight : 0;
        indices[at] = at < size ? (i32)sorted.own[j].key + first_of_keys : -1;
      }
    }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, top_keys)
