// How the blocks of a persistent kernel iterate over the tiles of queries of packed sequences (varlen). One warp of a
// block, the scheduler, looks for the tiles, so that no other warp waits for the starts of sequences.
#pragma once
#include "common/config.cuh"
#include "common/io/params.cuh"
#include "common/schedule/schedule.cuh"
#include "sm90/tile_ring.cuh"

// The units of work of a head, numbered through all sequences. As in TileScheduler, a unit is a tile of queries, or a
// pair of them. Each lane keeps one of 32 sequences.
struct SequenceUnits {
  static constexpr int kRows = kPairs ? 2 * kBlockM : kBlockM;  // of a unit
  const Params& params;
  Sequence own;
  u32 own_first;   // unit of the lane's sequence
  u32 first, end;  // the first unit of the 32 sequences, and the first one after them
  u32 count;       // of units

  // If the starts of sequences make no sense, the sum of units may be any number, so the number of slots limits it.
  CUFLASH_DEVICE explicit SequenceUnits(const Params& params_) : params(params_) {
    look_at(0, 0);
    count = end;
    if (params.batch >= 32) count += units_from(32);
    const u32 slots = num_tiles_of(params, params.seqlen_q, kRows);
    count = count < slots ? count : slots;
  }

  // Warp. Finds the sequence of the unit `slot.block`. The `block` of the result counts units within that sequence.
  CUFLASH_DEVICE Work find(const TileSlot& slot) {
    const u32 unit = slot.block;
    if (unit < first) look_at(0, 0);
    while (unit >= end && first_sequence() + 32 <= params.batch) look_at(first_sequence() + 32, end);
    const u32 lane = last_lane(own_first <= unit);
    return {(int)(unit - ptx::shuffle(own_first, lane)), slot.head, sequence_of_lane(own, lane)};
  }

 private:
  CUFLASH_DEVICE static int lane() { return ptx::thread_index() % 32; }
  CUFLASH_DEVICE int first_sequence() const { return own.index - lane(); }

  // Looks at the 32 sequences from `sequence` on, before which there are `units`. Sequences after the last one are
  // empty.
  CUFLASH_DEVICE void look_at(int sequence, u32 units) {
    own = sequence_at(params, sequence + lane());
    const u32 own_units = ceil_div(own.seqlen_q, kRows);
    u32 sum = own_units;  // of this lane and those before it
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const u32 of_others = ptx::shuffle(sum, lane() - distance);
      if (lane() >= distance) sum += of_others;
    }
    first = units;
    own_first = units + sum - own_units;
    end = units + ptx::shuffle(sum, 31);
  }
  // Counts the units of the sequences from `sequence` on.
  CUFLASH_DEVICE u32 units_from(int sequence) const {
    u32 sum = 0;
#pragma unroll 1
    for (int i = sequence + lane(); i <= params.batch; i += 32)
      sum += ceil_div(at_least_zero(query_start_at(params, i + 1) - query_start_at(params, i)), kRows);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shuffle(sum, lane() ^ mask);
    return sum;
  }
};

// Warp. The scheduler. It hands over the tiles of this block, and then a tile with head -1 as the end mark.
CUFLASH_DEVICE void find_tiles(const Params& params, const TileRing& ring) {
  Position<kTileStages> at;
  // Only one lane waits and writes. If others waited, too, one might still wait for a phase when the next one is over.
  const auto put = [&](const Work& work) {
    if (ptx::thread_index() % 32 == 0) {
      const Entry batch = work.batch;
      const u32 seqlen_q = seqlen_q_of(params, batch), seqlen_k = seqlen_k_of(params, batch);
      ring.empty(at).wait(at.parity ^ 1);
      ptx::store_shared_b128(ring.tile(at), {(u32)work.block, (u32)work.head, (u32)batch, (u32)query_start_of(batch)});
      ptx::store_shared_b128(ring.tile(at) + 16, {(u32)key_start_of(batch), seqlen_q, seqlen_k, 0});
      ring.full(at).arrive();
    }
    at.advance();
  };
  SequenceUnits units(params);
#pragma unroll 1
  for (u32 unit = ptx::block_index(); unit < units.count * params.num_heads; unit += params.resident_blocks) {
    Work work = units.find(schedule(params, unit, units.count, params.num_heads, params.head_section, false));
    if constexpr (kPairs) {
      const int from_start = work.block, from_end = ceil_div(seqlen_q_of(params, work.batch), kBlockM) - 1 - from_start;
      work.block = from_end;
      if (from_start != from_end) put(work);
      work.block = from_start;
    }
    put(work);
  }
  put({0, -1, {}});
}

// The scheduler of the other roles: the tiles that the scheduler hands over, read by a thread or by a warp.
template <bool is_warp>
struct VarlenTileScheduler {
  TileRing ring;
  Position<kTileStages> at;
  Work current;

  CUFLASH_DEVICE explicit VarlenTileScheduler(const TileRing& ring_) : ring(ring_) { advance(); }

  CUFLASH_DEVICE bool more() const { return current.head >= 0; }
  CUFLASH_DEVICE Work work(const Params&) const { return current; }
  CUFLASH_DEVICE void advance() {
    ring.full(at).wait(at.parity);
    const Bytes16 low = ptx::load_shared_b128(ring.tile(at)), high = ptx::load_shared_b128(ring.tile(at) + 16);
    if constexpr (is_warp)
      arrive_as_warp(ring.empty(at));
    else
      ring.empty(at).arrive();
    at.advance();
    const auto value = [](u32 word) { return (int)(is_warp ? ptx::uniform(word) : word); };
    const Sequence batch = {value(low.word[2]), value(low.word[3]), value(high.word[0]), value(high.word[1]),
                            value(high.word[2])};
    current = {value(low.word[0]), value(low.word[1]), batch};
  }
};
