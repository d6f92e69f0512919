#include "order.h"

#include <algorithm>

#include "hot.h"

namespace emulator {
namespace {

std::vector<const char*> agents;  // what waits for them

EMULATOR_HOT void take_maximum(u32* __restrict into, const u32* __restrict from, size_t count) {
  for (size_t i = 0; i < count; ++i) into[i] = into[i] < from[i] ? from[i] : into[i];
}

size_t used_entries() { return block.threads.size() + agents.size(); }

void merge(Clock& into, const Clock& from) { take_maximum(into.data(), from.data(), used_entries()); }

// The last epoch of thread `other` that `thread` knows.
u32 known_epoch(const Thread& thread, u32 other) {
  const Warp& warp = block.warps[other / kWarpLanes];
  const bool same_warp = warp_index(thread) == other / kWarpLanes;
  return std::max(thread.known[other], (same_warp ? warp.collective_epoch : warp.block_epoch) - 1);
}

}  // namespace

void reset_order() {
  agents.clear();
  for (auto& thread : block.threads) {
    thread->known.assign(block.threads.size() + kMaxAgents, 0);
    thread->fences.clear();
  }
}

u16 new_agent(const char* wait, const Thread& thread, Site site) {
  if (agents.size() == kMaxAgents)
    fail(thread, site, "more barriers than the %u that the emulator follows", kMaxAgents);
  agents.push_back(wait);
  return (u16)(agents.size() - 1);
}

const char* wait_for(const Access& by_agent) { return agents[by_agent.actor]; }

bool is_fenced(const Access& write, const Thread& thread) {
  if (write.epoch == 0 || write.by_agent()) return true;
  for (u32 lanes = write.lanes; lanes; lanes &= lanes - 1) {
    const u32 writer = write.actor * kWarpLanes + __builtin_ctz(lanes);
    const std::vector<u32>& fences = block.threads[writer]->fences;
    const auto first = std::lower_bound(fences.begin(), fences.end(), write.epoch);
    if (first == fences.end()) return false;
    // A fence stands between its epoch and the next one.
    if (writer != thread.index && *first >= known_epoch(thread, writer)) return false;
  }
  return true;
}

void fence(Thread& thread) {
  u32& epoch = warp_of(thread).epoch;
  thread.fences.push_back(epoch);
  ++epoch;
}

void release(const Thread& thread, Clock& clock) {
  merge(clock, thread.known);
  Warp& warp = warp_of(thread);
  u32* lanes = &clock[thread.index / kWarpLanes * kWarpLanes];
  for (u32 i = 0; i < kWarpLanes; ++i) lanes[i] = std::max(lanes[i], warp.collective_epoch - 1);
  clock[thread.index] = warp.epoch;
  ++warp.epoch;
}

void acquire(Thread& thread, const Clock& clock) {
  merge(thread.known, clock);
  warp_of(thread).lanes_differ = true;
}

void learn_step(Thread& thread, u16 agent, u32 step) {
  step_in(thread.known, agent) = step;
  warp_of(thread).lanes_differ = true;
}

u32& step_in(Clock& clock, u16 agent) { return clock[block.threads.size() + agent]; }

bool is_within(const Access& access, const Clock& clock) {
  if (access.by_agent()) return clock[block.threads.size() + access.actor] >= access.epoch;
  for (u32 lanes = access.lanes; lanes; lanes &= lanes - 1)
    if (clock[access.actor * kWarpLanes + __builtin_ctz(lanes)] < access.epoch) return false;
  return true;
}

void add_to(Clock& clock, const Access& access) {
  if (access.by_agent()) step_in(clock, access.actor) = std::max(step_in(clock, access.actor), access.epoch);
  for (u32 lanes = access.lanes; lanes; lanes &= lanes - 1) {
    u32& known = clock[access.actor * kWarpLanes + __builtin_ctz(lanes)];
    known = std::max(known, access.epoch);
  }
}

void order_lanes(Warp& warp) {
  if (warp.lanes_differ) {
    const size_t first = (size_t)(&warp - block.warps.data()) * kWarpLanes;
    Clock& all = block.threads[first]->known;
    for (u32 i = 1; i < kWarpLanes; ++i) merge(all, block.threads[first + i]->known);
    for (u32 i = 1; i < kWarpLanes; ++i) block.threads[first + i]->known = all;
    warp.lanes_differ = false;
  }
  warp.collective_epoch = ++warp.epoch;
}

void order_block() {
  for (Warp& warp : block.warps) warp.block_epoch = warp.collective_epoch = ++warp.epoch;
  if (agents.empty()) return;
  const size_t threads = block.threads.size();
  Clock& all = block.threads[0]->known;
  for (auto& thread : block.threads) take_maximum(&all[threads], &thread->known[threads], agents.size());
  for (auto& thread : block.threads)
    if (thread != block.threads[0]) std::copy_n(&all[threads], agents.size(), &thread->known[threads]);
}

}  // namespace emulator
