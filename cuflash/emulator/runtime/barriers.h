// Barriers in shared memory, as TMA sees them, and named barriers.
#pragma once
#include "order.h"

namespace emulator {

void reset_barriers();

// The barrier at this address, for a copy that `thread` issues to complete on it.
struct CopyTarget {
  u32 barrier;
  u16 agent;
  u32 step;
};
CopyTarget begin_copy_on_barrier(u32 address, Thread& thread, Site site);
// The bytes of that copy have arrived.
void end_copy_on_barrier(const CopyTarget& target, u32 bytes, const Thread& thread, Site site);

// The thread does fence_barrier_init: fence_async_proxy does as well.
void note_barrier_fence(const Thread& thread);

}  // namespace emulator
