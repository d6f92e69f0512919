// What happened before what, whatever the schedule was.
//
// Every warp counts epochs. A new one begins with whatever orders accesses: a collective, a sync_block, and a lane that
// arrives at a barrier or fences. An access is known to a thread, that is, it happened before what the thread does now,
// if
// - the thread itself did it, or
// - a collective of the two threads' warp, or a sync_block, came between, or
// - it is in the thread's clock, which grows when the thread waits at a barrier: it then learns all that those who
//   arrived knew.
// A clock has one entry for each thread, the last epoch that is known of it, and one for each agent: something that
// accesses shared memory by itself, in numbered steps. Agents are the loads that complete on one barrier (a step is a
// phase of it), the products of one warpgroup, and the bulk stores of one thread (a step is a group of them).
#pragma once
#include "scheduler.h"

namespace emulator {

constexpr u32 kMaxAgents = 256;

// One access to shared memory: by `lanes` of warp `actor`, or by agent `actor` if there are none.
struct Access {
  Site site;
  u32 epoch;  // the epoch of the warp, or the step of the agent; 0 if there was no access
  u32 lanes;
  u16 actor;
  bool in_flight;

  bool by_agent() const { return lanes == 0; }
};

inline u32 lane_bit(const Thread& thread) { return 1u << thread.index % kWarpLanes; }
inline u16 warp_index(const Thread& thread) { return (u16)(thread.index / kWarpLanes); }

inline Access access_by(const Thread& thread, Site site) {
  return {site, warp_of(thread).epoch, lane_bit(thread), warp_index(thread), false};
}
inline Access access_by_warp(const Thread& thread, Site site) {
  return {site, warp_of(thread).epoch, ~0u, warp_index(thread), false};
}
inline Access access_by_agent(u16 agent, u32 step, Site site) { return {site, step, 0, agent, false}; }

void reset_order();
// `wait` is the function by which a thread learns that a step of the agent is over.
u16 new_agent(const char* wait, const Thread& thread, Site site);
const char* wait_for(const Access& by_agent);

// Whether `earlier` happened before `now`, which `thread` performs or has an agent perform.
inline bool is_ordered(const Access& earlier, const Access& now, const Thread& thread) {
  if (earlier.epoch == 0) return true;
  if (earlier.by_agent()) return thread.known[block.threads.size() + earlier.actor] >= earlier.epoch;
  const Warp& warp = block.warps[earlier.actor];
  if (earlier.epoch < warp.block_epoch) return true;
  u32 lanes = earlier.lanes;
  if (warp_index(thread) == earlier.actor) {
    if (earlier.epoch < warp.collective_epoch) return true;
    if ((now.lanes & (now.lanes - 1)) == 0) lanes &= ~lane_bit(thread);
  }
  const u32* known = &thread.known[earlier.actor * kWarpLanes];
  for (; lanes; lanes &= lanes - 1)
    if (known[__builtin_ctz(lanes)] < earlier.epoch) return false;
  return true;
}
// Whether what `write` wrote is visible to agents of `thread`: the writers fenced, and the thread knows of that.
bool is_fenced(const Access& write, const Thread& thread);

// Called when the thread does fence_async_proxy.
void fence(Thread& thread);
// `clock` learns what the thread knows; the thread learns what is in `clock`.
void release(const Thread& thread, Clock& clock);
void acquire(Thread& thread, const Clock& clock);
void learn_step(Thread& thread, u16 agent, u32 step);
u32& step_in(Clock& clock, u16 agent);
// Whether a clock has everything that those did up to this access who performed it; and adding that to a clock.
bool is_within(const Access& access, const Clock& clock);
void add_to(Clock& clock, const Access& access);

// From now on all lanes know what each of them did.
void order_lanes(Warp& warp);
// From now on all threads know what each of them did.
void order_block();

}  // namespace emulator
