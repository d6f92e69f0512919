// Candidates for the strongest keys of each query: those of its scores that reach a threshold, with their keys.
//
// The scores of a row come twice. The first time, its four lanes keep the maxima of kMaxima groups of keys each. If
// `count` of these maxima reach a number, at least `count` scores do: bisection finds such a number, and that is the
// threshold. The second time, scores that reach the threshold are appended to the buffer of the row. Of n keys in random
// order about -g log(1 - count / g) do, where g = 4 kMaxima is the number of groups. Where the strongest keys lie in
// few groups there are more. Then, whenever the buffer has no space, the warp sorts it and keeps the first `count`, and
// the last of these is the new threshold. Candidates are ordered by score and key, so that the order of tiles does not
// change the result.
//
// All functions are called by whole warps. Tiles of scores lie in registers as common/io/fragments.cuh says; a warp has
// 16 rows of them.
#pragma once
#include "common/config.cuh"
#include "common/io/fragments.cuh"
#include "common/io/operands.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "common/score/scores.cuh"
#include "common/softmax/backward.cuh"

constexpr int kCapacity = CUFLASH_CAPACITY;  // of a buffer
constexpr int kMaxima = 32;                  // of a row, for each of its lanes
constexpr int kGroupTiles = 8;               // n-tiles of a group, at most
constexpr int kBisections = 12;              // at most
constexpr int kMostAppended = 8;             // candidates of a row, from one n-tile

// Shared memory of a warp: the maxima, later in their place the buffers. cuflash/plan/tiles.py has the same.
constexpr u32 kBytesMaxima = kMaxima * 2 * 32 * sizeof(Real);
constexpr u32 kBytesCandidates = max_of(kBytesMaxima, 16 * kCapacity * (u32)(sizeof(Real) + sizeof(i32)));

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

// The buffer of one of the 16 rows of a warp.
struct CandidateBuffer {
  u32 s_scores, s_keys;

  CUFLASH_DEVICE CandidateBuffer(u32 s_warp, int row)
      : s_scores(s_warp + row * kCapacity * sizeof(Real)),
        s_keys(s_warp + 16 * kCapacity * sizeof(Real) + row * kCapacity * sizeof(i32)) {}

  CUFLASH_DEVICE void store(int at, const Candidate& x) const {
    store_real(s_scores + at * sizeof(Real), x.score);
    ptx::store_shared_b32(s_keys + at * sizeof(i32), x.key);
  }
  CUFLASH_DEVICE Candidate load(int at) const {
    Candidate found;
    ptx::load_shared(s_scores + at * sizeof(Real), found.score);
    found.key = ptx::load_shared_b32(s_keys + at * sizeof(i32));
    return found;
  }
};

// The first `size` candidates of a buffer in order, of at most `capacity`; a lane has those at lane + 32 i.
template <int capacity>
struct SortedCandidates {
  static constexpr int kOfLane = capacity / 32;
  Candidate own[kOfLane];

  CUFLASH_DEVICE SortedCandidates(const CandidateBuffer& buffer, int size) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int at = lane_index() + 32 * i;
      own[i] = {-ptx::infinity(), 0xffffffff};
      if (at < size) own[i] = buffer.load(at);
    }
    // Batcher's bitonic network. Its loops are not unrolled: it is long, and seldom runs.
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

// Those of the 16 rows of a warp. A lane knows the two rows that it shares with three others.
struct Candidates {
  const u32 s_warp;  // shared memory of this warp
  const int count;   // wanted of each row
  Real threshold[2];
  int size[2];      // of the buffers
  int next_maxima;  // the place of the next group

  CUFLASH_DEVICE Candidates(u32 s_warp_, int count_) : s_warp(s_warp_), count(count_), next_maxima(0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) threshold[half] = -ptx::infinity(), size[half] = 0;
  }

  // ---- the first time

  CUFLASH_DEVICE void clear_maxima() const {
#pragma unroll 1
    for (int i = 0; i < 2 * kMaxima; ++i) store_real(maximum_at(i / 2, i % 2), (Real)-ptx::infinity());
  }
  // Finds the maxima of the groups of a tile. Where there are more groups than places, groups share a place.
  template <int n_tiles>
  CUFLASH_DEVICE void find_maxima(const Real (&s)[n_tiles][4]) {
    constexpr int kTiles = min_of(n_tiles, kGroupTiles);
#pragma unroll
    for (int first = 0; first < n_tiles; first += kTiles) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 address = maximum_at(next_maxima, half);
        Real largest;
        ptx::load_shared(address, largest);
#pragma unroll
        for (int n = first; n < min_of(first + kTiles, n_tiles); ++n)
          largest = max_of(largest, max_of(s[n][2 * half], s[n][2 * half + 1]));
        store_real(address, largest);
      }
      if (++next_maxima == kMaxima) next_maxima = 0;
    }
  }
  CUFLASH_DEVICE void find_thresholds() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Real found = reached_by_count(half);
      // Scores pass that are above the threshold, so it is lowered by more than an ulp.
      threshold[half] = found - (max_of(found, -found) * kOfThreshold + kLeastOfThreshold);
    }
    ptx::sync_warp();  // before candidates take the place of the maxima
  }

  // ---- the second time

  // Appends the scores of a tile that pass. `lane_key` is the key of this lane's first column.
  template <int n_tiles>
  CUFLASH_DEVICE void append(const Real (&s)[n_tiles][4], int lane_key) {
    const int before[2] = {size[0], size[1]};
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) append_n_tile(s[n], lane_key + 8 * n);
    if (!ptx::any_lane(max_of(size[0], size[1]) > kCapacity)) return;
    // Once more, with space for every n-tile. What has been written from `before` on is written again. The tile moves
    // through its first n-tile, so that the loop need not be unrolled.
    size[0] = before[0], size[1] = before[1];
    Real left[n_tiles][4];
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) left[n][i] = s[n][i];
#pragma unroll 1
    for (int n = 0; n < n_tiles; ++n) {
      ptx::sync_warp();
#pragma unroll 1
      for (int half = 0; half < 2; ++half) make_space(half);
      append_n_tile(left[0], lane_key + 8 * n);
#pragma unroll
      for (int next = 1; next < n_tiles; ++next)
#pragma unroll
        for (int i = 0; i < 4; ++i) left[next - 1][i] = left[next][i];
    }
  }

  // Calls visit(row, buffer, size) for each of the 16 rows of the warp.
  template <class Visit>
  CUFLASH_DEVICE void visit_rows(Visit visit) const {
    ptx::sync_warp();
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      const u32 lane = row % 8 * 4;
      const u32 upper = ptx::shuffle((u32)size[0], lane), lower = ptx::shuffle((u32)size[1], lane);
      visit(row, CandidateBuffer(s_warp, row), (int)(row < 8 ? upper : lower));
    }
  }

 private:
  static constexpr Real kOfThreshold = sizeof(Real) == 8 ? 0x1p-51 : 0x1p-22f;
  static constexpr Real kLeastOfThreshold = 1e-37f;  // no subnormal number

  CUFLASH_DEVICE u32 maximum_at(int at, int half) const {
    return s_warp + ((2 * at + half) * 32 + lane_index()) * sizeof(Real);
  }

  // A number that at least `count` of the maxima of a row reach, and hardly more; -inf if there are not as many.
  CUFLASH_DEVICE Real reached_by_count(int half) const {
    Real maxima[kMaxima], low = ptx::infinity(), high = -ptx::infinity();
    int reaching = 0;
#pragma unroll
    for (int i = 0; i < kMaxima; ++i) {
      ptx::load_shared(maximum_at(i, half), maxima[i]);
      if (maxima[i] == -ptx::infinity()) continue;
      low = -max_of(-low, -maxima[i]), high = max_of(high, maxima[i]), ++reaching;
    }
#pragma unroll
    for (u32 mask = 1; mask <= 2; mask *= 2) {
      low = -max_of(-low, -ptx::shuffle_xor(low, mask));
      high = max_of(high, ptx::shuffle_xor(high, mask));
    }
    reaching = row_sum(reaching);
    Real found = reaching >= count ? low : -ptx::infinity();
    const int most = count + max_of(count / 4, 2);
#pragma unroll 1
    for (int i = 0; i < kBisections && ptx::any_lane(reaching > most); ++i) {
      const Real middle = low + (high - low) / 2;
      int above = 0;
#pragma unroll
      for (const Real x : maxima) above += x >= middle;
      above = row_sum(above);
      if (reaching <= most) continue;
      if (above >= count)
        low = found = middle, reaching = above;
      else
        high = middle;
    }
    return found;
  }

  // Where keys do not come in order, one of an equal score that comes later may be the lower one.
  static constexpr bool kKeysAscend = !kHasBlockIndex && !kGoesOutward;
  CUFLASH_DEVICE bool passes(int half, Real score) const {
    return score > threshold[half] || (!kKeysAscend && score == threshold[half] && score > -ptx::infinity());
  }

  // Appends the scores of an n-tile that pass. Where the buffer has no space, only its size grows.
  CUFLASH_DEVICE void append_n_tile(const Real (&s)[4], int key) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool passes_at[2] = {passes(half, s[2 * half]), passes(half, s[2 * half + 1])};
      if (!ptx::any_lane(passes_at[0] || passes_at[1])) continue;
      const CandidateBuffer buffer(s_warp, fragment_row() + 8 * half);
      const u32 lane = lane_index(), of_row = lane % 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 passing = ptx::ballot(passes_at[i]) >> (lane - of_row) & 15;
        const int at = size[half] + (int)ptx::count_ones(passing & ((1u << of_row) - 1));
        if (passes_at[i] && at < kCapacity) buffer.store(at, {s[2 * half + i], (u32)(key + i)});
        size[half] += (int)ptx::count_ones(passing);
      }
    }
  }

  // Sorts the buffers of rows that have no space for an n-tile, and keeps `count` candidates of each.
  CUFLASH_DEVICE void make_space(int half) {
    const int own_size = half == 0 ? size[0] : size[1];
    const u32 full = ptx::ballot(own_size > kCapacity - kMostAppended);
#pragma unroll 1
    for (int row = 0; full != 0 && row < 8; ++row) {
      if ((full >> (4 * row) & 1) == 0) continue;
      const CandidateBuffer buffer(s_warp, 8 * half + row);
      const SortedCandidates<kCapacity> sorted(buffer, (int)ptx::shuffle((u32)own_size, 4 * row));
      Real last = -ptx::infinity();
#pragma unroll
      for (int i = 0; i < kCapacity / 32; ++i) {
        const int at = lane_index() + 32 * i;
        if (at < count) buffer.store(at, sorted.own[i]);
        const Real of_last = ptx::shuffle(sorted.own[i].score, (u32)(count - 1) % 32);
        if ((count - 1) / 32 == i) last = of_last;
      }
      if ((int)lane_index() / 4 != row) continue;
      if (half == 0)
        threshold[0] = last, size[0] = count;
      else
        threshold[1] = last, size[1] = count;
    }
    ptx::sync_warp();
  }
};

// Writes the first `count` candidates of a row.
template <int capacity>
CUFLASH_DEVICE void write_sorted(const CandidateBuffer& buffer, int size, int count, int first_key,
                                 const RowStats& stats, Real exponent_scale, Real* weights, i32* indices) {
  const SortedCandidates<capacity> sorted(buffer, size);
#pragma unroll
  for (int j = 0; j < capacity / 32; ++j) {
    const int at = lane_index() + 32 * j;
    const Real weight = stats.weight_of(sorted.own[j].score, exponent_scale);
    if (at >= count) continue;
    weights[at] = at < size ? weight : 0;
    indices[at] = at < size ? (i32)sorted.own[j].key + first_key : -1;
  }
}

// Warp. Writes weights and indices of the rows of a warp, from `first_row` on. Results are contiguous.
CUFLASH_DEVICE void write_candidates(const Params& params, const Candidates& candidates, Entry batch, int head,
                                     int first_row, Real exponent_scale) {
  const int first_of_keys = key_start_of(batch);  // of packed sequences
  const int count = candidates.count, seqlen_q = seqlen_q_of(params, batch);
  candidates.visit_rows([&](int of_warp, const CandidateBuffer& buffer, int size) {
    const int row = first_row + of_warp;
    if (row >= seqlen_q) return;
    const RowStats stats(params, batch, head, row);
    Real* weights = row_values_of(params.dv, batch, head) + row * params.dv.row_stride;
    i32* indices = (i32*)params.dk.data + (weights - (Real*)params.dv.data);
    if (max_of(size, count) <= 32)
      write_sorted<32>(buffer, size, count, first_of_keys, stats, exponent_scale, weights, indices);
    else
      write_sorted<kCapacity>(buffer, size, count, first_of_keys, stats, exponent_scale, weights, indices);
  });
}
