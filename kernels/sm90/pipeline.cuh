// The pipeline between a producer and its consumers: barriers in shared memory, and rings of them.
#pragma once
#include "ptx/tma.cuh"

struct Barrier {
  u32 address;

  CUFLASH_DEVICE void init(u32 count) const { ptx::barrier_init(address, count); }
  CUFLASH_DEVICE void arrive() const { ptx::barrier_arrive(address); }
  CUFLASH_DEVICE void arrive_expect(u32 bytes) const { ptx::barrier_arrive_expect(address, bytes); }
  CUFLASH_DEVICE void wait(u32 parity) const { ptx::barrier_wait(address, parity); }
};

// Warp. Arrives once for all of its lanes, when all of them have come here.
CUFLASH_DEVICE void arrive_as_warp(const Barrier& barrier) {
  ptx::sync_warp();
  if (ptx::thread_index() % 32 == 0) barrier.arrive();
}

// The same at the end of a stage that lanes have read themselves, by ld.shared or ldmatrix. TMA writes there next, in
// another proxy: without the fence it may overtake reads that are still under way.
CUFLASH_DEVICE void arrive_after_reads(const Barrier& barrier) {
  ptx::fence_async_proxy();
  arrive_as_warp(barrier);
}
// At the end of a stage of two rings.
CUFLASH_DEVICE void arrive_after_reads(const Barrier& barrier, const Barrier& other) {
  arrive_after_reads(barrier);
  if (ptx::thread_index() % 32 == 0) other.arrive();
}

// The position of a tile in a ring of `stages`: tile i of the loop is in stage i % stages, with parity i / stages % 2.
template <int stages>
struct Position {
  int stage = 0;
  u32 parity = 0;

  CUFLASH_DEVICE void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// A ring of tiles. At position p, consumers wait for full(p) with p's parity, and the producer waits for empty(p) with
// the other parity.
template <int stages>
struct Ring {
  static constexpr u32 kBytes = 16 * stages;
  u32 address;

  CUFLASH_DEVICE Barrier full(const Position<stages>& at) const { return {address + 8 * at.stage}; }
  CUFLASH_DEVICE Barrier empty(const Position<stages>& at) const { return {address + 8 * (stages + at.stage)}; }
  CUFLASH_DEVICE void init(u32 consumers, u32 producers = 1) const {
    for (int i = 0; i < stages; ++i) {
      full({i}).init(producers);
      empty({i}).init(consumers);
    }
  }
};

// The rings of tiles of queries, of keys and of values.
template <int stages, int q_stages = 1>
struct QkvBarriers {
  static constexpr u32 kBytes = Ring<q_stages>::kBytes + 2 * Ring<stages>::kBytes;
  Ring<q_stages> q_ring;
  Ring<stages> k_ring, v_ring;

  CUFLASH_DEVICE void place_barriers(u32 address) {
    q_ring = {address};
    k_ring = {address + Ring<q_stages>::kBytes};
    v_ring = {address + Ring<q_stages>::kBytes + Ring<stages>::kBytes};
  }
  // Called by all threads of the block. The first three numbers say how many arrivals give back a tile of Q, of K and
  // of V. `k_producers` arrivals announce a tile of K, and `producers` arrivals announce a tile of Q or of V.
  CUFLASH_DEVICE void make_barriers(u32 q_consumers, u32 k_consumers, u32 v_consumers, u32 k_producers = 1,
                                    u32 producers = 1) const {
    if (ptx::thread_index() == 0) {
      q_ring.init(q_consumers, producers);
      k_ring.init(k_consumers, k_producers);
      v_ring.init(v_consumers, producers);
      ptx::fence_barrier_init();
    }
    ptx::sync_block();
  }
};

// Shared memory that holds, in this order: Q, the ring of K, the ring of V, barriers.
template <int stages>
struct QkvShared : QkvBarriers<stages> {
  u32 q, k, v;

  CUFLASH_DEVICE QkvShared(u32 bytes_q, u32 bytes_of_keys, u32 bytes_of_values) {
    q = ptx::dynamic_shared();
    k = q + bytes_q;
    v = k + bytes_of_keys;
    this->place_barriers(v + bytes_of_values);
  }
};
