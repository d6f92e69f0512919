// Counters in scratch memory that blocks share, without a launch that clears them.
#pragma once
#include "common/config.cuh"
#include "common/io/params.cuh"

// Counts arrivals of blocks: those that have finished, of which the last one is to be found, or tiles that have been
// handed out.
//
// Scratch memory may hold anything when a call starts, and clearing it would take another launch. So counts start at a
// number that no other call has (Params::call). Every block looks at the counter before it counts, and the first block
// that finds no count below `total` there writes that number. A captured graph has the same number at every replay; it
// finds the count of all arrivals, which is replaced too. Other memory is mistaken for a count only if it happens to
// hold one of `total` numbers of 64 bits; calls are numbered from a random start.
//
// Counters that are cleared once and kept for later calls would need no such number, but they would need memory for
// each of the streams and captured graphs that may run at the same time. Clusters can pass on results without memory,
// but a head may have more blocks than a cluster. Unlike compare-and-swap, an atomic addition succeeds at once however
// many blocks count at the same time.
struct Arrivals {
  u64* g_count;
  u64 first;  // the count before the first arrival
  u32 total;  // arrivals of a call: less than 2^16, and the last one of each block comes after its `prepare`

  CUFLASH_DEVICE Arrivals(const Params& params, u32 counter, u32 total_)
      : g_count((u64*)params.arrivals + counter), first(params.call << 16), total(total_) {}

  // The same thread of each block calls both: `prepare` before all else, and `arrive` after the results of the block
  // are stored. `arrive` returns the number of the arrival.
  CUFLASH_DEVICE void prepare() const {
    const u64 count = ptx::load_arrivals(g_count);
    if (count - first >= total) ptx::replace_arrivals(g_count, count, first);  // unless another block has done so
  }
  CUFLASH_DEVICE u32 arrive() const { return (u32)(ptx::count_arrival(g_count) - first); }
  CUFLASH_DEVICE bool is_last_arrival() const { return arrive() == total - 1; }
};
