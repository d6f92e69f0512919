// Warpgroups that take turns at the tensor cores.
#pragma once
#include "ptx/tma.cuh"

// `count` of them, in the order of their index; the last one lets the first one in. Named barriers from `first_barrier` on,
// one each.
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
