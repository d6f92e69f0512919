// What happened before what, whatever the schedule was.
//
// Every warp counts epochs. A new one begins with whatever orders accesses: a collective, a sync_block, and a lane that
// arrives at a barrier or fences. An access is known to a thread, that is, it happened before what the thread does now, if
// - the thread itself did it, or
// - a collective of the two threads' warp, or a sync_block, came between, or
// - it is in the thread's clock, which grows when the thread waits at a barrier: it then learns all that those who
//   arrived knew.
// A clock has one entry for each thread, the last epoch that is known of it, and one for each agent: something that
// accesses shared memory by itself, in numbered steps, on behalf of one barrier, warpgroup or thread.
#pragma once
#include "scheduler.h"

namespace emulator {

// Loads that complete on a barrier (a step is a phase of it), products of a warpgroup, and bulk stores of a thread (a
// step is a group of them).
struct Agent {
  enum class Kind { kLoads, kProducts, kStores };
  Kind kind;
  const char* missing;  // what makes its steps known
};
constexpr u32 kMaxAgents = 128;

// One access to shared memory: by `lanes` of warp `actor`, or by agent `actor` if there are none.
struct Access {
  Site site;
  u32 epoch;  // of the warp, or step of the agent; 0: never
  u32 lanes;
  u16 actor;
  bool in_flight;

  bool by_agent() const { return lanes == 0; }
};

Access access_by(const Thread& thread, Site site);
Access access_by_warp(const Thread& thread, Site site);
Access access_by_agent(u16 agent, u32 step, Site site);

void reset_order();
u16 new_agent(Agent agent, const Thread& thread, Site site);
const Agent& agent_of(const Access& access);

// Whether `earlier` happened before `now`, which `thread` performs or has an agent perform.
bool is_ordered(const Access& earlier, const Access& now, const Thread& thread);
// Whether what `write` wrote is visible to agents of `thread`: the writers fenced, and the thread knows of that.
bool is_fenced(const Access& write, const Thread& thread);

// The thread does fence_async_proxy.
void fence(Thread& thread);
// `clock` learns what the thread knows; the thread learns what is in `clock`.
void release(const Thread& thread, Clock& clock);
void acquire(Thread& thread, const Clock& clock);
void learn_step(Thread& thread, u16 agent, u32 step);
u32& step_in(Clock& clock, u16 agent);

// All lanes know what each of them did.
void order_lanes(Warp& warp);
// All threads know what each of them did.
void order_block();

}  // namespace emulator
