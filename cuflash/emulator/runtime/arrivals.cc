#include "arrivals.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "interface.h"
#include "order.h"

namespace emulator {
namespace {

// What a counter was before blocks of this launch changed it. Blocks run one after another here. On a device another
// block may change the counter after this one has loaded it, and loads may see it late.
std::unordered_map<const u64*, u64> before_launch;
std::vector<const u64*> seen;        // counters whose latest state the block knows: it tried to change them itself
std::vector<Access> stored;          // the last store of each thread
Access first_arrival, last_arrival;  // of the block: loads are of one of them, it is not known of which

void check_aligned(const void* address, u32 bytes, Site site) {
  Thread& self = *block.current;
  self.site = site;
  if ((unsigned long)address % bytes) fail(self, site, "misaligned address in global memory: %p", address);
}

u64& latest(u64* counter) {
  before_launch.emplace(counter, *counter);
  seen.push_back(counter);
  return *counter;
}

}  // namespace

void forget_counts() { before_launch.clear(); }

void reset_arrivals() {
  seen.clear();
  stored.assign(block.threads.size(), Access{});
  first_arrival = last_arrival = {};
}

void store_for_blocks(void* address, const void* values, u32 bytes, Site site) {
  check_aligned(address, bytes, site);
  const Thread& self = *block.current;
  const Access now = access_by(self, site);
  if (!is_ordered(last_arrival, now, self))
    fail(self, site, "stores results too late: nothing orders this and the arrival at %s:%u",
         file_name(last_arrival.site), last_arrival.site.line);
  stored[self.index] = now;
  std::memcpy(address, values, bytes);
}

void load_of_blocks(const void* address, void* values, u32 bytes, Site site) {
  check_aligned(address, bytes, site);
  const Thread& self = *block.current;
  if (!is_ordered(first_arrival, access_by(self, site), self))
    fail(self, site, "loads results of other blocks too early: nothing orders this behind the arrival at %s:%u",
         file_name(first_arrival.site), first_arrival.site.line);
  std::memcpy(values, address, bytes);
}

u64 load_arrivals(const u64* counter, Site site) {
  check_aligned(counter, sizeof *counter, site);
  const u64 before = before_launch.emplace(counter, *counter).first->second;
  const bool is_seen = std::find(seen.begin(), seen.end(), counter) != seen.end();
  return is_seen || block.options.eager_copies ? *counter : before;
}

void replace_arrivals(u64* counter, u64 expected, u64 value, Site site) {
  check_aligned(counter, sizeof *counter, site);
  u64& now = latest(counter);
  if (now == expected) now = value;
}

u64 count_arrival(u64* counter, Site site) {
  check_aligned(counter, sizeof *counter, site);
  const Thread& self = *block.current;
  const Access now = access_by(self, site);
  for (const Access& store : stored)
    if (!is_ordered(store, now, self))
      fail(self, site, "arrives too early: nothing orders this behind what thread %u stores at %s:%u",
           (u32)(&store - stored.data()), file_name(store.site), store.site.line);
  if (first_arrival.epoch == 0) first_arrival = now;
  last_arrival = now;
  return latest(counter)++;
}

}  // namespace emulator
