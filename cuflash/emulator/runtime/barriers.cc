#include "barriers.h"

#include <cstdio>
#include <cstring>

#include "interface_sm90.h"
#include "shared_memory.h"

namespace emulator {
namespace {

constexpr u32 kBarrierBytes = 8;
constexpr u32 kMaxCount = (1u << 20) - 1;  // the most arrivals of a phase, and the most bytes announced

// ---- Barriers in shared memory --------------------------------------------------------------------------------------

struct Barrier {
  u32 offset;
  u32 count;             // arrivals that end a phase
  u32 arrivals_left;     // arrivals that this phase still waits for
  long long bytes_left;  // bytes announced that have not arrived; negative if more arrived than were announced
  u32 phase;             // how many phases are over
  u32 copies;            // copies in flight that complete on it
  u16 agent;
  Access init;
  bool visible_to_copies;  // the thread that made it fenced
  Clock arrived;           // what the threads knew that have arrived in this phase
  Clock over;              // what all threads knew that had arrived when the last phase ended
  std::vector<u16> waiting;
};

std::vector<Barrier> barriers;
// The last arrival of each thread at a barrier of another block, by the rank of that block.
std::vector<Access> remote_arrivals[kMaxCluster];

// What shared memory holds in place of the barrier: a kernel that writes over it is found out.
u64 word_of(const Barrier& barrier) {
  return (u64)barrier.arrivals_left | (u64)barrier.count << 20 | (u64)(barrier.bytes_left & 0x3fffff) << 40 |
         (u64)(barrier.phase & 1) << 62 | 1ull << 63;
}

void store_word(const Barrier& barrier) {
  const u64 word = word_of(barrier);
  memcpy(shared_bytes(barrier.offset), &word, kBarrierBytes);
}

Barrier* find_at(u32 offset) {
  for (Barrier& barrier : barriers)
    if (barrier.offset == offset) return &barrier;
  return nullptr;
}

Barrier& barrier_at(u32 address, const Thread& thread, Site site) {
  const u32 offset = checked_offset(address, kBarrierBytes, kBarrierBytes, thread, site);
  Barrier* barrier = find_at(offset);
  if (!barrier) fail(thread, site, "there is no barrier at offset %u: a barrier_init is missing before this", offset);
  if (!is_ordered(barrier->init, access_by(thread, site), thread))
    fail(thread, site,
         "data race: uses the barrier at offset %u, which thread %u made at %s:%u, with no barrier between", offset,
         barrier->init.actor * kWarpLanes + __builtin_ctz(barrier->init.lanes), file_name(barrier->init.site),
         barrier->init.site.line);
  const u64 word = word_of(*barrier);
  if (memcmp(shared_bytes(offset), &word, kBarrierBytes))
    fail(thread, site, "the barrier at offset %u was written over", offset);
  return *barrier;
}

bool is_over(const Barrier& barrier, u32 parity) { return (barrier.phase & 1) != parity; }

void describe_wait(u64 waits_for, char* text, size_t size) {
  const Barrier& barrier = barriers[waits_for >> 1];
  snprintf(text, size, " (barrier at offset %u, parity %u; missing in this phase: %u arrivals of %u, %lld bytes)",
           barrier.offset, (u32)waits_for & 1, barrier.arrivals_left, barrier.count, barrier.bytes_left);
}

void end_phase_if_complete(Barrier& barrier, const Thread& thread, Site site) {
  if (barrier.arrivals_left == 0 && barrier.bytes_left < 0)
    fail(thread, site,
         "the phase of the barrier at offset %u can never end: copies bring %lld bytes more than announced",
         barrier.offset, -barrier.bytes_left);
  if (barrier.arrivals_left == 0 && barrier.bytes_left == 0) {
    if (barrier.copies)
      fail(thread, site,
           "the phase of the barrier at offset %u ends while copies to it are in flight: they bring more bytes than "
           "announced",
           barrier.offset);
    ++barrier.phase;
    barrier.arrivals_left = barrier.count;
    step_in(barrier.arrived, barrier.agent) = barrier.phase;
    barrier.over = barrier.arrived;
    std::vector<u16> waiting;
    waiting.swap(barrier.waiting);
    for (u16 index : waiting) {
      Thread& waiter = *block.threads[index];
      if (is_over(barrier, (u32)waiter.waits_for & 1)) {
        acquire(waiter, barrier.over);
        wake(waiter);
      } else {
        barrier.waiting.push_back(index);
      }
    }
  }
  store_word(barrier);
}

// ---- Named barriers -------------------------------------------------------------------------------------------------

constexpr u32 kNamedBarriers = 16;

struct NamedBarrier {
  u32 threads;  // that take part in this round
  u32 arrived;
  Clock clock;   // what those that arrived knew
  bool reduces;  // a predicate, that held in some of the threads that have arrived, or not
  bool any;
  struct Waiting {
    u16 thread;
    bool* any;  // where it looks for the result
  };
  std::vector<Waiting> waiting;
  struct Lanes {
    u32 lanes;
    const char* operation;
    Site site;
  };
  std::vector<Lanes> of_warp;
};

NamedBarrier named_barriers[kMaxCluster * kNamedBarriers];

NamedBarrier& named_barrier(u32 identifier) {
  return named_barriers[rank_of(*block.current) * kNamedBarriers + identifier % kNamedBarriers];
}

void describe_named_wait(u64 waits_for, char* text, size_t size) {
  const NamedBarrier& barrier = named_barriers[waits_for];
  snprintf(text, size, " (barrier %llu; %u of %u threads have arrived)", waits_for % kNamedBarriers, barrier.arrived,
           barrier.threads);
}

// Returns whether the thread was the last to arrive.
bool arrive_at(NamedBarrier& barrier, u32 identifier, u32 threads, const char* operation, Site site,
               const bool* predicate = nullptr) {
  Thread& self = *block.current;
  self.site = site;
  if (identifier == 0 || identifier >= kNamedBarriers)
    fail(self, site, "there is no named barrier %u: they are numbered from 1 to 15", identifier);
  if (threads == 0 || threads % kWarpLanes || threads > block.options.threads)
    fail(self, site, "%u threads cannot take part in a named barrier: a multiple of 32, and no more than the block has",
         threads);
  if (barrier.arrived == 0) {
    barrier.threads = threads;
    barrier.reduces = predicate != nullptr;
    barrier.any = false;
    barrier.clock.assign(self.known.size(), 0);
    barrier.of_warp.assign(block.warps.size(), {});
  } else if (barrier.threads != threads) {
    fail(self, site, "named barrier %u: %u threads take part, others said %u", identifier, threads, barrier.threads);
  } else if (barrier.reduces != (predicate != nullptr)) {
    fail(self, site, "named barrier %u: the thread calls %s here, which others that take part do not", identifier,
         operation);
  }
  if (predicate) barrier.any |= *predicate;
  NamedBarrier::Lanes& warp = barrier.of_warp[self.index / kWarpLanes];
  const u32 lane = 1u << self.index % kWarpLanes;
  if (warp.lanes & lane)
    fail(self, site, "the thread arrives twice at named barrier %u before it opens: first at %s:%u", identifier,
         file_name(warp.site), warp.site.line);
  if (warp.lanes && (warp.operation != operation || warp.site != site))
    fail(self, site, "divergent warp: the thread calls %s here, and others of its warp %s at %s:%u", operation,
         warp.operation, file_name(warp.site), warp.site.line);
  warp.lanes |= lane;
  warp.operation = operation;
  warp.site = site;
  release(self, barrier.clock);
  if (++barrier.arrived < threads) return false;

  for (const NamedBarrier::Lanes& other : barrier.of_warp)
    if (other.lanes != 0 && other.lanes != ~0u)
      fail(self, site, "divergent warp: only some lanes took part in named barrier %u, at %s:%u", identifier,
           file_name(other.site), other.site.line);
  barrier.arrived = 0;
  for (const NamedBarrier::Waiting& waiting : barrier.waiting) {
    Thread& thread = *block.threads[waiting.thread];
    if (waiting.any) *waiting.any = barrier.any;
    acquire(thread, barrier.clock);
    wake(thread);
  }
  barrier.waiting.clear();
  return true;
}

}  // namespace

void reset_barriers() {
  barriers.clear();
  for (auto& arrivals : remote_arrivals) arrivals.assign(block.threads.size(), Access{});
  for (NamedBarrier& barrier : named_barriers) barrier = {};
}

void barrier_init(u32 address, u32 count, Site site) {
  Thread& self = *block.current;
  write_shared(address, kBarrierBytes, site);
  const u32 offset = checked_offset(address, kBarrierBytes, kBarrierBytes, self, site);
  if (find_at(offset)) fail(self, site, "there is a barrier at offset %u already", offset);
  if (count == 0 || count > kMaxCount) fail(self, site, "%u arrivals cannot end a phase: 1 to %u", count, kMaxCount);
  Barrier barrier = {};
  barrier.offset = offset;
  barrier.count = barrier.arrivals_left = count;
  barrier.agent = new_agent("barrier_wait", self, site);
  barrier.init = access_by(self, site);
  barrier.arrived.assign(self.known.size(), 0);
  barrier.over = barrier.arrived;
  barriers.push_back(barrier);
  store_word(barriers.back());
}

void check_no_arrivals_left(const Thread& thread) {
  const u32 rank = rank_of(thread), first = rank * block.options.threads;
  for (const Access& arrival : remote_arrivals[rank]) {
    bool known = false;
    for (u32 i = first; i < first + block.options.threads; ++i)
      known = known || is_ordered(arrival, arrival, *block.threads[i]);
    if (!known)
      fail(thread, arrival.site,
           "block %u of the cluster may exit before the arrival here at its barrier: a sync_cluster is missing", rank);
  }
}

void note_barrier_fence(const Thread& thread) {
  for (Barrier& barrier : barriers)
    if (!barrier.visible_to_copies && barrier.init.actor == thread.index / kWarpLanes &&
        barrier.init.lanes == 1u << thread.index % kWarpLanes)
      barrier.visible_to_copies = true;
}

void fence_barrier_init(Site site) {
  block.current->site = site;
  note_barrier_fence(*block.current);
}

void barrier_arrive(u32 address, u32 bytes, Site site) {
  Thread& self = *block.current;
  self.site = site;
  Barrier& barrier = barrier_at(address, self, site);
  if (barrier.arrivals_left == 0)
    fail(self, site, "one more than the %u arrivals that end a phase of the barrier at offset %u", barrier.count,
         barrier.offset);
  if (bytes > kMaxCount) fail(self, site, "%u bytes cannot be announced at once: at most %u", bytes, kMaxCount);
  const u32 rank = address >> kRankShift;
  if (rank != rank_of(self)) remote_arrivals[rank][self.index] = access_by(self, site);
  release(self, barrier.arrived);
  --barrier.arrivals_left;
  barrier.bytes_left += bytes;
  end_phase_if_complete(barrier, self, site);
}

void barrier_wait(u32 address, u32 parity, Site site) {
  Thread& self = *block.current;
  self.site = site;
  Barrier& barrier = barrier_at(address, self, site);
  if (parity > 1) fail(self, site, "the parity of a phase is 0 or 1, got %u", parity);
  if (is_over(barrier, parity)) {
    acquire(self, barrier.over);
    return;
  }
  barrier.waiting.push_back((u16)self.index);
  wait_for_wake("barrier_wait", site, describe_wait, (u64)(&barrier - barriers.data()) << 1 | parity);
}

CopyTarget begin_copy_on_barrier(u32 address, Thread& thread, Site site) {
  Barrier& barrier = barrier_at(address, thread, site);
  if (!barrier.visible_to_copies)
    fail(thread, site, "missing fence_barrier_init: the barrier at offset %u is not visible to TMA", barrier.offset);
  ++barrier.copies;
  return {(u32)(&barrier - barriers.data()), barrier.agent, barrier.phase + 1};
}

void end_copy_on_barrier(const CopyTarget& target, u32 bytes, const Thread& thread, Site site) {
  Barrier& barrier = barriers[target.barrier];
  --barrier.copies;
  barrier.bytes_left -= bytes;
  end_phase_if_complete(barrier, thread, site);
}

void sync_named(u32 identifier, u32 threads, Site site) {
  NamedBarrier& barrier = named_barrier(identifier);
  if (arrive_at(barrier, identifier, threads, "sync_named", site)) {
    acquire(*block.current, barrier.clock);
    return;
  }
  barrier.waiting.push_back({(u16)block.current->index, nullptr});
  wait_for_wake("sync_named", site, describe_named_wait, (u64)(&barrier - named_barriers));
}

bool sync_named_any(u32 identifier, u32 threads, bool predicate, Site site) {
  NamedBarrier& barrier = named_barrier(identifier);
  if (arrive_at(barrier, identifier, threads, "sync_named_any", site, &predicate)) {
    acquire(*block.current, barrier.clock);
    return barrier.any;
  }
  bool any = false;
  barrier.waiting.push_back({(u16)block.current->index, &any});
  wait_for_wake("sync_named_any", site, describe_named_wait, (u64)(&barrier - named_barriers));
  return any;
}

void arrive_named(u32 identifier, u32 threads, Site site) {
  arrive_at(named_barrier(identifier), identifier, threads, "arrive_named", site);
}

}  // namespace emulator
