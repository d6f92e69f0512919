// Barriers in shared memory, as TMA sees them, and named barriers.
#pragma once
#include "order.h"

namespace emulator {

void reset_barriers();

// The barrier on which a copy completes, which `thread` issues.
struct CopyTarget {
  u32 barrier;
  u16 agent;
  u32 step;
};
CopyTarget begin_copy_on_barrier(u32 address, Thread& thread, Site site);
// Says that the bytes of that copy have arrived.
void end_copy_on_barrier(const CopyTarget& target, u32 bytes, const Thread& thread, Site site);

// A block exits with `thread`, its last one: what others do to its barriers must have happened before.
void check_no_arrivals_left(const Thread& thread);

// The thread does fence_barrier_init, or fence_async_proxy, which has the same effect.
void note_barrier_fence(const Thread& thread);

}  // namespace emulator
