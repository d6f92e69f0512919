// The strongest keys of each query, on mma.sync tensor cores (compute capability 8.0 and later): of the scores of a row
// the largest, with their keys, and weights exp(S - lse).
//
// A block owns kBlockM queries of one head and iterates over the tiles of keys; a warp owns 16 of its rows. Each row
// has a buffer of candidates in shared memory: scores that are above the threshold of the row are appended. Where
// buffers have no space for another tile, the four lanes of each row look for a higher threshold by bisection, and keep
// what reaches it: at least `count` candidates. So the threshold rises, and ever fewer scores pass: of n random keys
// about count * log(n) do. Where many scores are equal, no threshold helps; then the warp sorts the buffer and keeps
// the first `count`. Candidates are ordered by score and key, so that no order of tiles changes the result.
#include "common/softmax/backward.cuh"
#include "common/config.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "sm80/copy.cuh"
#include "sm80/mma.cuh"

constexpr int kCapacity = 128;              // of a buffer
constexpr int kMost = kCapacity - kBlockN;  // candidates in it before a tile
constexpr int kBisections = 12;             // at most, for a threshold
constexpr int kNTiles = kBlockN / 8;
constexpr int kRow = row_bytes(kDim);
static_assert(kBlockM == 16 * kNumWarps, "every warp owns one fragment of rows");
static_assert(kNumStages == 1 || kNumStages == 2, "at most one tile of keys arrives while another is used");
static_assert(kMost >= 64, "all that may be wanted leave space for a tile");

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

// Warp. The candidates of a row, at most `capacity`, of which a lane has those at lane + 32 i.
template <int capacity>
struct Sorted {
  static constexpr int kOfLane = capacity / 32;
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
    for (int length = 2; length <= capacity; length *= 2) {
      if constexpr (kOfLane > 2)
        if (length > 64) exchange_in_lane<64>(length);
      if constexpr (kOfLane > 1)
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

// The sum over the four lanes of a row.
CUFLASH_DEVICE int row_sum(int x) {
#pragma unroll
  for (u32 mask = 1; mask <= 2; mask *= 2) x += (int)ptx::shuffle((u32)x, lane_index() ^ mask);
  return x;
}
// The sum over those before this one.
CUFLASH_DEVICE int sum_before(int x) {
  const u32 lane = lane_index(), of_row = lane % 4;
  const int first = (int)ptx::shuffle((u32)x, lane ^ of_row), pair = x + (int)ptx::shuffle((u32)x, lane ^ 1);
  const int of_pair = (int)ptx::shuffle((u32)pair, lane ^ of_row);
  const int third = (int)ptx::shuffle((u32)x, (lane ^ of_row) + 2);
  return of_row == 0 ? 0 : of_row == 1 ? first : of_row == 2 ? of_pair : of_pair + third;
}

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

  // Warp. Raises the threshold of a row, of which this lane has the scores at lane + 4 i, until at most `most` of them
  // reach it, and no fewer than `count`.
  CUFLASH_DEVICE void raise(int half, const Real (&score)[kCapacity / 4], int count, int most) {
    Real low = ptx::infinity(), high = -ptx::infinity();
#pragma unroll
    for (const Real x : score)
      if (x > -ptx::infinity()) low = -max_of(-low, -x), high = max_of(high, x);
#pragma unroll
    for (u32 mask = 1; mask <= 2; mask *= 2) {
      low = -max_of(-low, -ptx::shuffle_xor(low, mask));
      high = max_of(high, ptx::shuffle_xor(high, mask));
    }
    int reaching = size[half];
#pragma unroll 1
    for (int i = 0; i < kBisections && ptx::any_lane(reaching > most); ++i) {
      const Real middle = low + (high - low) / 2;
      int found = 0;
#pragma unroll
      for (const Real x : score) found += x >= middle;
      found = row_sum(found);
      if (reaching <= most) continue;
      if (found >= count)
        low = threshold[half] = middle, reaching = found;
      else
        high = middle;
    }
  }

  // Warp. Keeps the candidates of rows that reach higher thresholds. `s_buffers` are those of the rows of this warp.
  CUFLASH_DEVICE void keep(int half, u32 s_buffers, int warp_row, int count, int most) {
    const Buffer buffer(s_buffers, warp_row + fragment_row() + 8 * half);
    const int first = lane_index() % 4;
    ptx::sync_warp();
    Candidate own[kCapacity / 4];
    Real score[kCapacity / 4];
#pragma unroll
    for (int i = 0; i < kCapacity / 4; ++i) {
      own[i] = {-ptx::infinity(), 0};
      if (first + 4 * i < size[half]) own[i] = buffer.load(first + 4 * i);
      score[i] = own[i].score;
    }
    raise(half, score, count, most);
    ptx::sync_warp();
    const Real least = threshold[half];
    int kept = 0;
#pragma unroll
    for (const Candidate& x : own) kept += x.score >= least && x.score > -ptx::infinity();
    int at = sum_before(kept);
    size[half] = row_sum(kept);
#pragma unroll
    for (const Candidate& x : own)
      if (x.score >= least && x.score > -ptx::infinity()) buffer.store(at++, x.score, x.key);
    ptx::sync_warp();
  }

  // Warp. Sorts the buffers of rows that still have too many, and keeps `count` of each.
  CUFLASH_DEVICE void sort(int half, u32 s_buffers, int warp_row, int count, int most) {
    const u32 full = ptx::ballot(size[half] > most);
#pragma unroll 1
    for (int row = 0; full != 0 && row < 8; ++row) {
      if ((full >> (4 * row) & 1) == 0) continue;
      const Buffer buffer(s_buffers, warp_row + 8 * half + row);
      const Sorted<kCapacity> sorted(buffer, (int)ptx::shuffle((u32)size[half], 4 * row));
      Real last = -ptx::infinity();
#pragma unroll
      for (int i = 0; i < kCapacity / 32; ++i) {
        const int at = lane_index() + 32 * i;
        if (at < count) buffer.store(at, sorted.own[i].score, sorted.own[i].key);
        const Real of_last = ptx::shuffle(sorted.own[i].score, (u32)(count - 1) % 32);
        if ((count - 1) / 32 == i) last = of_last;
      }
      if ((int)lane_index() / 4 == row) threshold[half] = last, size[half] = count;
    }
    ptx::sync_warp();
  }

  // Warp. Leaves at most kMost candidates in each buffer.
  CUFLASH_DEVICE void make_space(u32 s_buffers, int warp_row, int count) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!ptx::any_lane(size[half] > kMost)) continue;
      keep(half, s_buffers, warp_row, count, min_of(2 * count, kMost));
      sort(half, s_buffers, warp_row, count, kMost);
    }
  }

  // Warp. Appends the scores of a tile that pass.
  CUFLASH_DEVICE void append(const Real (&s)[1][kNTiles][4], int lane_key, u32 s_buffers, int warp_row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Buffer buffer(s_buffers, warp_row + fragment_row() + 8 * half);
      int found = 0;
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) found += passes(half, s[0][n][i]);
      if (!ptx::any_lane(found > 0)) continue;
      int at = size[half] + sum_before(found);
      size[half] += row_sum(found);
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i)
          if (passes(half, s[0][n][i])) buffer.store(at++, s[0][n][i], lane_key + 8 * n + i % 2);
    }
  }
};

// Warp. Writes the first `count` candidates of a row.
template <int capacity>
CUFLASH_DEVICE void write_row(const Buffer& buffer, int size, int count, int first_key, const RowStats& stats,
                              Real exponent_scale, Real* weights, i32* indices) {
  const Sorted<capacity> sorted(buffer, size);
#pragma unroll
  for (int j = 0; j < capacity / 32; ++j) {
    const int at = lane_index() + 32 * j;
    const Real weight = stats.weight_of(sorted.own[j].score, exponent_scale);
    if (at >= count) continue;
    weights[at] = at < size ? weight : 0;
    indices[at] = at < size ? (i32)sorted.own[j].key + first_key : -1;
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
    rows.make_space(s_buffers, warp_row, count);
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
    rows.append(s, lane_key, s_buffers, warp_row);
  }
  ptx::copy_async_wait<0>();

  const int first_of_keys = key_start_of(batch);  // of packed sequences
  const Real exponent_scale = score.exponent_scale();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.keep(half, s_buffers, warp_row, count, max_of(count, 32));
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const int row = first_row + warp_row + 8 * half + i, size = (int)ptx::shuffle((u32)rows.size[half], 4 * i);
      if (row >= seqlen_q) break;
      const Buffer buffer(s_buffers, warp_row + 8 * half + i);
      const RowStats stats(params, batch, head, row);
      Real* weights = row_values_of(params.dv, batch, head) + row * params.dv.row_stride;
      i32* indices = (i32*)params.dk.data + (weights - (Real*)params.dv.data);
      const auto write = [&](auto capacity) {
        write_row<decltype(capacity)::value>(buffer, size, count, first_of_keys, stats, exponent_scale, weights,
                                             indices);
      };
      if (max_of(size, count) <= 32)
        write(Integer<32>{});
      else
        write(Integer<kCapacity>{});
    }
  }
}

CUFLASH_DEFINE_KERNEL(CUFLASH_KERNEL_NAME, Params, kNumThreads, kMinBlocks, top_keys)
