// The block or the cluster that runs: its threads, its warps, who runs next, and how a launch ends early.
#pragma once
#include <memory>
#include <vector>

#include "fiber.h"

namespace emulator {

constexpr u32 kWarpLanes = 32;
constexpr u32 kMaxThreads = 1024;
constexpr u32 kMaxCluster = 2;

enum class Order : u32 { kFirstInFirstOut, kLastInFirstOut, kReversed, kRandom };

inline bool operator==(Site a, Site b) { return a.file == b.file && a.line == b.line; }
inline bool operator!=(Site a, Site b) { return !(a == b); }
const char* file_name(Site site);

// One cp.async that was issued. `bytes_read` is what the source held at that time.
struct Copy {
  Site site;
  const u8* source;
  u32 source_bytes;
  u32 destination;
  u32 bytes;
  u32 group;
  u8 bytes_read[16];
};

// The last epoch known of every thread, and the last step of every agent: see order.h.
using Clock = std::vector<u32>;

// Part of a thread's state that tma.cc alone knows.
struct BulkStores;

struct Thread {
  enum class State { kReady, kWaiting, kExited };

  explicit Thread(u32 index);
  ~Thread();

  Fiber fiber;
  const u32 index;
  State state;
  Site site;              // where the last operation was called
  const char* operation;  // the one that it waits in
  // What it waits for there, in words, if `operation` does not say it all; `waits_for` is an argument of it.
  void (*describe_wait)(u64 waits_for, char* text, size_t size);
  u64 waits_for;
  std::vector<Copy> copies;
  size_t copies_landed;
  u32 groups_committed;

  Clock known;
  std::vector<u32> fences;  // the epochs that a fence_async_proxy ended, growing
  std::unique_ptr<BulkStores> bulk_stores;
};

struct Warp {
  u32 exited;
  u32 arrived;  // how many lanes wait in the collective
  const char* operation;
  Site site;
  u32 epoch;             // see order.h
  u32 collective_epoch;  // the epoch that began with the last collective
  u32 block_epoch;       // the epoch that began with the last sync_block
  bool lanes_differ;     // whether some lanes know more than others
  void* argument[kWarpLanes];
};

// Threads that can run, in the order in which they became ready.
class ReadyQueue {
 public:
  void clear() { first_ = count_ = 0; }
  bool empty() const { return count_ == 0; }
  void push(u16 thread) { at(count_++) = thread; }
  u16 pop_first();
  u16 pop_last() { return at(--count_); }
  u16 pop_any(u32 random);

 private:
  u16& at(u32 position) { return threads_[(first_ + position) % kMaxThreads]; }

  u16 threads_[kMaxThreads];
  u32 first_ = 0;
  u32 count_ = 0;
};

// What runs: a block, or all blocks of a cluster, one after another in `threads`.
struct Block {
  const Kernel* kernel;
  const void* params;
  LaunchOptions options;
  Report* report;

  Fiber driver;               // whoever called launch
  Thread* current = nullptr;  // null while the driver runs
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  ReadyQueue ready;
  u32 index;  // of the first block
  u32 exited;
  u32 exited_of[kMaxCluster];  // threads of each block
  bool failed;
  u64 random_state;

  u32 barrier_arrived;
  Site barrier_site;

  Statistics statistics;
};

extern Block block;

// Which block of the cluster the thread is of, and which of its threads.
inline u32 rank_of(const Thread& thread) { return thread.index / block.options.threads; }
inline u32 index_in_block(const Thread& thread) { return thread.index % block.options.threads; }
inline Warp& warp_of(const Thread& thread) { return block.warps[thread.index / kWarpLanes]; }
u32 next_random();

// Gathers the 32 lanes at one call, then performs it once. warp.argument holds the argument of each lane.
void collect(const char* operation, Site site, void* argument, void (*perform)(Warp& warp));
template <class Argument>
Argument& argument_of(Warp& warp, u32 lane) {
  return *static_cast<Argument*>(warp.argument[lane]);
}

// Runs every thread of block `index`, and of the others of its cluster, to its end. Returns false if one of them
// failed.
bool run_block(u32 index);

// Stops the current thread until another one wakes it. A report of a deadlock calls `describe_wait`.
void wait_for_wake(const char* operation, Site site, void (*describe_wait)(u64, char*, size_t) = nullptr,
                   u64 waits_for = 0);
void wake(Thread& thread);

// Ends the launch with a message about `thread`. Never returns to the kernel.
[[noreturn]] void fail(const Thread& thread, Site site, const char* format, ...) __attribute__((format(printf, 3, 4)));

}  // namespace emulator
