// Ping-pong: consumer warpgroups issue their products one after the other, so that the softmax of one runs during the
// products of another.
#pragma once
#include "ptx/tma.cuh"

// `count` warpgroups take part, in the order of their index. At the start the last one lets the first one in. Each
// waits at a named barrier of its own; their numbers begin with `first_barrier`.
template <bool on, u32 count, u32 first_barrier>
struct PingPong {
  u32 index;

  CUFLASH_DEVICE explicit PingPong(u32 index_) : index(index_) {
    if (on && index == count - 1) pass();
  }
  CUFLASH_DEVICE void wait() const {
    if constexpr (on) ptx::sync_named(first_barrier + index, 256);
  }
  CUFLASH_DEVICE void pass() const {
    if constexpr (on) ptx::arrive_named(first_barrier + (index + 1) % count, 256);
  }
  CUFLASH_DEVICE void finish() const {
    if (on && index == 0) wait();
  }
};
