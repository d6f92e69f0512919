// Candidates for the strongest keys of each query: those of its scores that are above a threshold, with their keys.
//
// The scores of a row come twice. The first time, its four lanes keep the maxima of kMaxima groups of keys each. If
// `count` of these maxima reach a number, at least `count` scores do: bisection finds such a number, and the threshold
// is just below it. The second time, each lane appends its scores above the threshold to a list of its own. Of keys in
// random order about -g log(1 - count / g) are, where g = 4 kMaxima is the number of groups. Where the strongest keys
// lie in few groups there are more. Then, whenever a list has no space, the warp sorts the candidates of the row and
// keeps the first `count`, and the last of these is the new threshold. Candidates are ordered by score and key, so that
// the order of tiles does not change the result.
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

constexpr int kCapacity = CUFLASH_CAPACITY;  // candidates of a row
constexpr int kMaxima = kCapacity / 2;       // of a row, for each of its lanes
constexpr int kBisections = 12;              // at most

// Shared memory of a warp: the maxima, later in their place, lane by lane, the lists: first all scores, then all keys.
// A slot has 32 lanes for the first half of the rows, then 32 for the other. cuflash/plan/tiles.py has the same.
constexpr int kSlots = kCapacity / 4;
constexpr int kMostInList = kSlots - 1;  // what finds no space is written to the last slot
constexpr u32 kBytesSlot = 2 * 32 * sizeof(Real);
constexpr u32 kBytesScores = kSlots * kBytesSlot;
constexpr u32 kBytesCandidates = 2 * kBytesScores;
static_assert(kBytesCandidates == kMaxima * kBytesSlot, "candidates take the place of the maxima");

// Whether a threshold is looked for: not where the lists have space for the keys of all tiles.
CUFLASH_DEVICE constexpr bool needs_threshold(int tiles) { return tiles * kBlockN > 4 * kMostInList; }

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

// The lists of the lanes of a warp.
struct CandidateLists {
  u32 s_warp;

  // The slot of a list, by its address.
  CUFLASH_DEVICE u32 slot(int half, int i, u32 lane) const {
    return s_warp + i * kBytesSlot + (half * 32 + lane) * sizeof(Real);
  }
  CUFLASH_DEVICE static void store(u32 slot, Real score, u32 key) {
    store_real(slot, score);
    ptx::store_shared_b32(slot + kBytesScores, key);
  }
  CUFLASH_DEVICE static Candidate load(u32 slot) {
    Candidate found;
    ptx::load_shared(slot, found.score);
    found.key = ptx::load_shared_b32(slot + kBytesScores);
    return found;
  }
};

// The candidates of a row, which lie in the lists of its four lanes.
struct CandidatesOfRow {
  CandidateLists lists;
  int row;      // of the warp
  int size[4];  // of the lists

  CUFLASH_DEVICE CandidatesOfRow(const CandidateLists& lists_, int row_, const int (&lane_size)[2])
      : lists(lists_), row(row_) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      size[i] = (int)ptx::shuffle((u32)(row < 8 ? lane_size[0] : lane_size[1]), row % 8 * 4 + i);
  }
  CUFLASH_DEVICE int total() const { return size[0] + size[1] + size[2] + size[3]; }
  CUFLASH_DEVICE Candidate at(int i) const {
    int list = 0;
#pragma unroll
    for (int j = 0; j < 3; ++j)
      if (list == j && i >= size[j]) i -= size[j], ++list;
    if (list == 3 && i >= size[3]) return {-ptx::infinity(), 0xffffffff};
    return lists.load(lists.slot(row / 8, i, row % 8 * 4 + list));
  }
};

// The candidates of some rows in order, of each at most `capacity`; a lane has those at lane + 32 i.
template <int capacity, int rows>
struct SortedCandidates {
  static constexpr int kOfLane = capacity / 32;
  Candidate own[rows][kOfLane];

  // `row_of(row)` gives the candidates of a row.
  template <class RowOf>
  CUFLASH_DEVICE SortedCandidates(RowOf row_of) {
#pragma unroll
    for (int row = 0; row < rows; ++row) {
      const CandidatesOfRow candidates = row_of(row);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) own[row][i] = candidates.at(lane_index() + 32 * i);
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
        for (Candidate(&of_row)[kOfLane] : own)
#pragma unroll
          for (int i = 0; i < kOfLane; ++i) {
            const Candidate other = {ptx::shuffle_xor(of_row[i].score, distance),
                                     ptx::shuffle(of_row[i].key, lane_index() ^ distance)};
            keep(of_row[i], other, keeps_first(i, length, distance));
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
    for (Candidate(&of_row)[kOfLane] : own)
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        constexpr int kApart = distance / 32;
        if (i & kApart) continue;
        Candidate &first = of_row[i], &second = of_row[i + kApart];
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
  const CandidateLists lists;
  const int count;       // wanted of each row
  const int num_groups;  // of a tile, for each lane
  Real threshold[2];
  u32 next[2];      // slots of the lists of this lane
  int next_maxima;  // the place of the next group

  // `tiles` are those of a visit, of kBlockN keys each.
  CUFLASH_DEVICE Candidates(u32 s_warp, int count_, int tiles)
      : lists{s_warp}, count(count_), num_groups(min_of(kMaxima / max_of(tiles, 1), kBlockN / 16)), next_maxima(0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) threshold[half] = -ptx::infinity(), next[half] = own_slot(half, 0);
  }

  // ---- the first time

  CUFLASH_DEVICE void clear_maxima() const {
#pragma unroll 1
    for (int i = 0; i < 2 * kMaxima; ++i) store_real(maximum_at(i / 2, i % 2), (Real)-ptx::infinity());
  }
  // Finds the maxima of the groups of a tile. Where there are few tiles, groups are small, so that they fill the
  // places; where there are many, groups share a place.
  template <int n_tiles>
  CUFLASH_DEVICE void find_maxima(const Real (&s)[n_tiles][4]) {
    if constexpr (n_tiles >= 8)
      if (num_groups >= n_tiles / 2) return find_maxima_of<2>(s);
    if constexpr (n_tiles >= 4)
      if (num_groups >= n_tiles / 4) return find_maxima_of<4>(s);
    find_maxima_of<8>(s);
  }
  CUFLASH_DEVICE void find_thresholds() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Real found = reached_by_count(half);
      threshold[half] = found - (max_of(found, -found) * kOfThreshold + kLeastOfThreshold);
    }
  }

  // ---- the second time

  // Appends the scores of a tile that pass. `lane_key` is the key of this lane's first column.
  template <int n_tiles>
  CUFLASH_DEVICE void append(const Real (&s)[n_tiles][4], int lane_key) {
    const u32 before[2] = {next[0], next[1]};
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) append_n_tile(s[n], lane_key + 8 * n);
    if (!ptx::any_lane(next[0] == own_slot(0, kMostInList) || next[1] == own_slot(1, kMostInList))) return;
    // Once more, with space for every n-tile. What has been written from `before` on is written again. The tile moves
    // through its first n-tile, so that the loop need not be unrolled.
    next[0] = before[0], next[1] = before[1];
    Real left[n_tiles][4];
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) left[n][i] = s[n][i];
#pragma unroll 1
    for (int n = 0; n < n_tiles; ++n) {
      make_space();
      append_n_tile(left[0], lane_key + 8 * n);
#pragma unroll
      for (int next = 1; next < n_tiles; ++next)
#pragma unroll
        for (int i = 0; i < 4; ++i) left[next - 1][i] = left[next][i];
    }
  }

  // Calls write(row, i, candidate) in whole warps, for the first `count` of each row and possibly more; of places that
  // have no candidate the score is -inf.
  template <class Write>
  CUFLASH_DEVICE void visit_sorted(Write write) const {
    ptx::sync_warp();
#pragma unroll 1
    for (int first = 0; first < 16; first += kRowsAtOnce) {
      int most = count;
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) most = max_of(most, of_row(first + i).total());
      if (most <= 32)
        visit_rows<32, 4>(first, write);
      else if (kCapacity == 64 || most <= 64)
        visit_rows<64, 2>(first, write);
      else
        visit_rows<kCapacity, 1>(first, write);
    }
  }

 private:
  // Scores pass that are above the threshold, so it is lowered by more than an ulp, and by a normal number.
  static constexpr Real kOfThreshold = sizeof(Real) == 8 ? 0x1p-51 : 0x1p-22f;
  static constexpr Real kLeastOfThreshold = 1e-37f;
  static constexpr int kRowsAtOnce = 4;

  CUFLASH_DEVICE u32 own_slot(int half, int i) const { return lists.slot(half, i, lane_index()); }
  CUFLASH_DEVICE int size(int half) const { return (int)((next[half] - own_slot(half, 0)) / kBytesSlot); }
  CUFLASH_DEVICE CandidatesOfRow of_row(int row) const {
    const int sizes[2] = {size(0), size(1)};
    return {lists, row, sizes};
  }
  CUFLASH_DEVICE u32 maximum_at(int at, int half) const { return own_slot(half, at); }

  // The same for groups of `tiles` n-tiles.
  template <int tiles, int n_tiles>
  CUFLASH_DEVICE void find_maxima_of(const Real (&s)[n_tiles][4]) {
#pragma unroll
    for (int first = 0; first < n_tiles; first += tiles) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 address = maximum_at(next_maxima, half);
        Real largest;
        ptx::load_shared(address, largest);
#pragma unroll
        for (int n = first; n < min_of(first + tiles, n_tiles); ++n)
          largest = max_of(largest, max_of(s[n][2 * half], s[n][2 * half + 1]));
        store_real(address, largest);
      }
      if (++next_maxima == kMaxima) next_maxima = 0;
    }
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
    const int most = count + max_of(count / 8, 4);
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

  // Thread. Appends the scores of an n-tile that pass.
  CUFLASH_DEVICE void append_n_tile(const Real (&s)[4], int key) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!passes(i / 2, s[i])) continue;
      lists.store(next[i / 2], s[i], (u32)(key + i % 2));
      next[i / 2] = min_of(next[i / 2] + kBytesSlot, own_slot(i / 2, kMostInList));
    }
  }

  // Sorts the candidates of rows with a list that may have no space for an n-tile, and keeps `count` of each.
  CUFLASH_DEVICE void make_space() {
    ptx::sync_warp();
    const u32 full[2] = {ptx::ballot(size(0) > kMostInList - 2), ptx::ballot(size(1) > kMostInList - 2)};
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      const u32 of_half = row < 8 ? full[0] : full[1], first_lane = row % 8 * 4;
      if ((of_half >> first_lane & 15) == 0) continue;
      const SortedCandidates<kCapacity, 1> sorted([&](int) { return of_row(row); });
      ptx::sync_warp();
      Real last = -ptx::infinity();
#pragma unroll
      for (int i = 0; i < kCapacity / 32; ++i) {
        const int at = lane_index() + 32 * i;
        const Candidate& x = sorted.own[0][i];
        if (at < count) lists.store(lists.slot(row / 8, at / 4, first_lane + at % 4), x.score, x.key);
        const Real of_last = ptx::shuffle(sorted.own[0][i].score, (u32)(count - 1) % 32);
        if ((count - 1) / 32 == i) last = of_last;
      }
      if (lane_index() / 4 * 4 != first_lane) continue;
      const int kept = (count - (int)lane_index() % 4 + 3) / 4;
      if (row < 8)
        threshold[0] = last, next[0] = own_slot(0, kept);
      else
        threshold[1] = last, next[1] = own_slot(1, kept);
    }
    ptx::sync_warp();
  }

  // The same for kRowsAtOnce rows, of which `rows` are sorted together.
  template <int capacity, int rows, class Write>
  CUFLASH_DEVICE void visit_rows(int first, Write write) const {
#pragma unroll 1
    for (int row = first; row < first + kRowsAtOnce; row += rows) {
      const SortedCandidates<capacity, rows> sorted([&](int i) { return of_row(row + i); });
#pragma unroll
      for (int i = 0; i < rows; ++i)
#pragma unroll
        for (int j = 0; j < capacity / 32; ++j) write(row + i, (int)lane_index() + 32 * j, sorted.own[i][j]);
    }
  }
};

// Warp. Writes weights and indices of the rows of a warp, from `first_row` on. Results are contiguous.
CUFLASH_DEVICE void write_candidates(const Params& params, const Candidates& candidates, Entry batch, int head,
                                     int first_row, Real exponent_scale) {
  const int first_of_keys = key_start_of(batch);  // of packed sequences
  const int seqlen_q = seqlen_q_of(params, batch);
  Real* weights = row_values_of(params.dv, batch, head) + first_row * params.dv.row_stride;
  i32* indices = (i32*)params.dk.data + (weights - (Real*)params.dv.data);
  candidates.visit_sorted([&](int row, int at, const Candidate& x) {
    if (first_row + row >= seqlen_q) return;
    const RowStats stats(params, batch, head, first_row + row);
    const Real weight = stats.weight_of(x.score, exponent_scale);
    if (at >= candidates.count) return;
    const i64 place = row * params.dv.row_stride + at;
    const bool is_key = x.score > -ptx::infinity();
    weights[place] = is_key ? weight : 0;
    indices[place] = is_key ? (i32)x.key + first_of_keys : -1;
  });
}
