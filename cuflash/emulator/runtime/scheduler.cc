#include "scheduler.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "arrivals.h"
#include "barriers.h"
#include "tma.h"
#include "order.h"
#include "shared_memory.h"
#include "turns.h"
#include "warpgroup.h"

namespace emulator {

Block block;

const char* file_name(Site site) {
  if (!site.file) return "start of the kernel";
  const char* slash = strrchr(site.file, '/');
  return slash ? slash + 1 : site.file;
}

u16 ReadyQueue::pop_first() {
  u16 thread = at(0);
  first_ = (first_ + 1) % kMaxThreads;
  --count_;
  return thread;
}

u16 ReadyQueue::pop_any(u32 random) {
  u16& chosen = at(random % count_);
  u16 thread = chosen;
  chosen = pop_last();
  return thread;
}

u32 next_random() {
  block.random_state = block.random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (u32)(block.random_state >> 33);
}

namespace {

void switch_to(Thread* next) {
  Fiber& from = block.current ? block.current->fiber : block.driver;
  Fiber& to = next ? next->fiber : block.driver;
  if (&from == &to) return;
  ++block.statistics.fiber_switches;
  block.current = next;
  Fiber::switch_between(from, to);
}

// One line for each run of neighbouring threads that wait in the same place.
void describe_waiting_threads(char* text, size_t size) {
  constexpr int kMaxLines = 16;
  size_t used = 0;
  int lines = 0;
  for (size_t first = 0; first < block.threads.size() && lines < kMaxLines;) {
    const Thread& thread = *block.threads[first];
    size_t next = first + 1;
    while (next < block.threads.size() && block.threads[next]->state == thread.state &&
           block.threads[next]->operation == thread.operation && block.threads[next]->site == thread.site &&
           block.threads[next]->waits_for == thread.waits_for)
      ++next;
    const bool exited = thread.state == Thread::State::kExited;
    char detail[160] = "";
    if (!exited && thread.describe_wait) thread.describe_wait(thread.waits_for, detail, sizeof detail);
    const int written = exited
                            ? snprintf(text + used, size - used, "\n  threads %zu to %zu have exited", first, next - 1)
                            : snprintf(text + used, size - used, "\n  threads %zu to %zu wait in %s%s at %s:%u", first,
                                       next - 1, thread.operation, detail, file_name(thread.site), thread.site.line);
    if (written < 0 || used + written >= size) return;
    used += written;
    first = next;
    ++lines;
  }
}

[[noreturn]] void fail_by_deadlock() {
  char waiting[2048] = "";
  describe_waiting_threads(waiting, sizeof waiting);
  for (auto& thread : block.threads)
    if (thread->state == Thread::State::kWaiting) fail(*thread, thread->site, "deadlock: no thread can run%s", waiting);
  abort();
}

Thread& next_ready_thread() {
  land_loads();
  if (block.ready.empty()) fail_by_deadlock();
  switch ((Order)block.options.order) {
    case Order::kFirstInFirstOut:
      return *block.threads[block.ready.pop_first()];
    case Order::kRandom:
      return *block.threads[block.ready.pop_any(next_random())];
    default:
      return *block.threads[block.ready.pop_last()];
  }
}

[[noreturn]] void exit_thread(Thread& thread) {
  check_no_copies_left(thread);
  finish_bulk_stores(thread);
  check_no_products_left(thread);
  Warp& warp = warp_of(thread);
  if (warp.arrived)
    fail(thread, warp.site, "divergent warp: the thread exits while others of its warp wait in %s", warp.operation);
  ++warp.exited;
  thread.state = Thread::State::kExited;
  thread.operation = "";
  thread.site = {};
  thread.waits_for = 0;
  ++block.exited;
  if (++block.exited_of[rank_of(thread)] == block.options.threads) check_no_arrivals_left(thread);
  if (block.exited == block.threads.size()) check_no_loads_left();
  switch_to(block.exited == block.threads.size() ? nullptr : &next_ready_thread());
  abort();
}

void run_thread() {
  block.kernel->thread_body(block.params);
  exit_thread(*block.current);
}

}  // namespace

bool run_block(u32 index) {
  block.index = index;
  block.exited = 0;
  for (u32& exited : block.exited_of) exited = 0;
  block.ready.clear();
  block.warps.assign(block.threads.size() / kWarpLanes, Warp{});
  for (Warp& warp : block.warps) warp.epoch = warp.collective_epoch = warp.block_epoch = 1;
  block.barrier_arrived = 0;
  reset_order();
  reset_barriers();
  reset_tma();
  reset_warpgroups();
  reset_turns();
  reset_arrivals();
  const u32 count = (u32)block.threads.size();
  for (auto& thread : block.threads) {
    thread->state = Thread::State::kReady;
    thread->site = {};
    thread->operation = "";
    thread->copies.clear();
    thread->copies_landed = 0;
    thread->groups_committed = 0;
    thread->fiber.prepare(run_thread);
  }
  // A last-in first-out queue starts with what is pushed last.
  const bool push_backwards = (Order)block.options.order == Order::kLastInFirstOut;
  for (u32 i = 0; i < count; ++i) block.ready.push((u16)(push_backwards ? count - 1 - i : i));
  switch_to(&next_ready_thread());
  return !block.failed;
}

void wait_for_wake(const char* operation, Site site, void (*describe_wait)(u64, char*, size_t), u64 waits_for) {
  Thread& self = *block.current;
  self.describe_wait = describe_wait;
  self.waits_for = waits_for;
  self.state = Thread::State::kWaiting;
  self.operation = operation;
  self.site = site;
  switch_to(&next_ready_thread());
}

void wake(Thread& thread) {
  thread.state = Thread::State::kReady;
  block.ready.push((u16)thread.index);
}

void fail(const Thread& thread, Site site, const char* format, ...) {
  Report& report = *block.report;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(report.message, sizeof report.message, format, arguments);
  va_end(arguments);
  snprintf(report.file, sizeof report.file, "%s", site.file ? site.file : "");
  report.line = site.line;
  report.block = block.index + rank_of(thread);
  report.thread = index_in_block(thread);
  report.has_thread = 1;
  block.failed = true;
  switch_to(nullptr);
  abort();
}

// ---- The operations of a whole block --------------------------------------------------------------------------------

u32 thread_index() { return index_in_block(*block.current); }
u32 block_index() { return block.index + rank_of(*block.current); }
u32 num_blocks() { return block.options.grid; }

namespace {

void sync_all(const char* operation, Site site) {
  Thread& self = *block.current;
  if (block.barrier_arrived == 0)
    block.barrier_site = site;
  else if (block.barrier_site != site)
    fail(self, site, "divergent barrier: the thread calls %s here while others wait in it at %s:%u", operation,
         file_name(block.barrier_site), block.barrier_site.line);
  self.site = site;
  if (++block.barrier_arrived < block.threads.size()) {
    wait_for_wake(operation, site);
    return;
  }
  block.barrier_arrived = 0;
  order_block();
  ++block.statistics.block_barriers;
  for (auto& thread : block.threads)
    if (thread.get() != &self) wake(*thread);
}

}  // namespace

void sync_block(Site site) {
  if (block.kernel->cluster > 1) fail(*block.current, site, "sync_block in a cluster: not emulated");
  sync_all("sync_block", site);
}
void sync_cluster(Site site) { sync_all("sync_cluster", site); }

}  // namespace emulator
