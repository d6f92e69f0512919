#include "tma.h"

#include <algorithm>
#include <cstring>

#include "barriers.h"
#include "interface_sm90.h"
#include "shared_memory.h"

namespace emulator {

// What stands in for a CUtensorMap, with 128 bytes as well; tensor_map() of cuflash/emulator/memory.py makes it.
struct TensorMapContent {
  u64 magic;
  u8* base;
  u64 strides[3];  // bytes; the first axis has neighbours
  u32 dims[4];
  u32 box[4];
  u32 element_bytes;
};

// Stores, or additions of float32, of one thread, in groups.
struct BulkStore {
  Site site;
  bool adds;
  TensorMapContent map;
  int coordinates[4];
  u32 offset;  // in shared memory
  u32 bytes;
  u32 group;
  std::vector<u8> content;  // what shared memory held when it was read
};

struct BulkStores {
  u16 agent;
  std::vector<BulkStore> stores;
  u32 groups_committed = 0;
  u32 groups_read = 0;
};

Thread::Thread(u32 index) : fiber(index), index(index) {}
Thread::~Thread() = default;

namespace {

constexpr u64 kTensorMapMagic = 0x50414d524f534e54;  // "TNSORMAP"
constexpr u32 kTensorMapAlignment = 64;
constexpr u32 kTensorAlignment = 128;

struct Load {
  Site site;
  Thread* thread;
  bool is_tensor;
  TensorMapContent map;
  int coordinates[4];
  const u8* source;         // of a bulk load, which has no tensor map
  u8 content[kChunkBytes];  // of a store to another block, which has neither
  u32 offset;
  u32 bytes;
  CopyTarget target;
};

std::vector<Load> loads;

// 16-byte chunks of every 128-byte line change places with the line's number.
u32 swizzle(u32 address) { return address ^ (address >> 7 & 7) << 4; }

TensorMapContent read_tensor_map(const void* map, const Thread& thread, Site site) {
  TensorMapContent content;
  if ((unsigned long)map % kTensorMapAlignment)
    fail(thread, site, "misaligned tensor map: %p is not a multiple of %u", map, kTensorMapAlignment);
  memcpy(&content, map, sizeof content);
  if (content.magic != kTensorMapMagic) fail(thread, site, "this is no tensor map");
  return content;
}

u32 box_bytes(const TensorMapContent& map) {
  return map.box[0] * map.box[1] * map.box[2] * map.box[3] * map.element_bytes;
}

// Bytes of the box that lie in the array.
u64 bytes_inside(const TensorMapContent& map, const int (&coordinates)[4]) {
  u64 elements = 1;
  for (u32 axis = 0; axis < 4; ++axis) {
    const long long left = (long long)map.dims[axis] - coordinates[axis];
    elements *= (u64)std::clamp<long long>(left, 0, map.box[axis]);
  }
  return elements * map.element_bytes;
}

// Calls visit(offset, pointer, valid) for every 16 bytes of the box: where they lie in shared memory, where in the
// array, and how many of them are inside of it.
template <class Visit>
void for_each_chunk(const TensorMapContent& map, const int (&coordinates)[4], u32 offset, Visit visit) {
  const u32 row_bytes = map.box[0] * map.element_bytes;
  const long long first_byte = (long long)coordinates[0] * map.element_bytes;
  const long long array_row_bytes = (long long)map.dims[0] * map.element_bytes;
  u32 position = kSharedBase + offset;
  for (u32 i3 = 0; i3 < map.box[3]; ++i3)
    for (u32 i2 = 0; i2 < map.box[2]; ++i2)
      for (u32 i1 = 0; i1 < map.box[1]; ++i1) {
        const u32 within[4] = {0, i1, i2, i3};
        bool inside = true;
        u8* row = map.base;
        for (u32 axis = 1; axis < 4; ++axis) {
          const long long index = (long long)coordinates[axis] + within[axis];
          inside = inside && index >= 0 && index < map.dims[axis];
          row += index * (long long)map.strides[axis - 1];
        }
        for (u32 byte = 0; byte < row_bytes; byte += kChunkBytes, position += kChunkBytes) {
          const long long left = array_row_bytes - (first_byte + byte);
          const bool any = inside && first_byte + byte >= 0 && left > 0;
          const u32 valid = any ? (u32)std::min<long long>(left, kChunkBytes) : 0;
          visit(swizzle(position) - kSharedBase, row + first_byte + byte, valid);
        }
      }
}

void check_coordinates(const TensorMapContent& map, const int (&coordinates)[4], Site site) {
  const Thread& self = *block.current;
  if ((long long)coordinates[0] * map.element_bytes % kChunkBytes)
    fail(self, site, "column %d of a tensor copy is not at a multiple of 16 bytes: an illegal instruction",
         coordinates[0]);
  for (int coordinate : coordinates)
    if (coordinate < 0)  // illegal in a store, and no test has shown what a load does with it
      fail(self, site, "coordinate %d of a tensor copy is negative: not emulated", coordinate);
}

void check_bulk(const void* global, u32 bytes, Site site) {
  const Thread& self = *block.current;
  if ((unsigned long)global % kChunkBytes || bytes % kChunkBytes || bytes == 0)
    fail(self, site, "bulk copy of %u bytes at %p: both are multiples of 16, and not 0 bytes", bytes, global);
}

void write_arrived(const Load& load) {
  u8* to = shared_bytes(load.offset);
  if (!load.is_tensor) {
    memcpy(to, load.source ? load.source : load.content, load.bytes);
    return;
  }
  for_each_chunk(load.map, load.coordinates, load.offset, [](u32 offset, const u8* source, u32 valid) {
    u8* chunk = shared_bytes(offset);
    memcpy(chunk, source, valid);
    memset(chunk + valid, 0, kChunkBytes - valid);
  });
}

void land(size_t index) {
  const Load load = loads[index];
  loads.erase(loads.begin() + (long)index);
  // A fault in here is the load's.
  const Site interrupted = block.current->site;
  block.current->site = load.site;
  write_arrived(load);
  block.current->site = interrupted;
  end_agent_write(load.offset, load.bytes);
  end_copy_on_barrier(load.target, load.bytes, *load.thread, load.site);
}

void issue(Load load, u32 barrier) {
  load.target = begin_copy_on_barrier(barrier, *load.thread, load.site);
  begin_agent_write(load.offset, load.bytes, access_by_agent(load.target.agent, load.target.step, load.site),
                    *load.thread);
  memset(shared_bytes(load.offset), kPoison, load.bytes);
  loads.push_back(load);
  if (load.is_tensor || load.source) {
    ++block.statistics.bulk_copies;
    block.statistics.bytes_loaded += load.is_tensor ? bytes_inside(load.map, load.coordinates) : load.bytes;
  }
  if (block.options.eager_copies) land(loads.size() - 1);
}

BulkStores& bulk_stores_of(Thread& thread, Site site) {
  if (!thread.bulk_stores) {
    thread.bulk_stores = std::make_unique<BulkStores>();
    thread.bulk_stores->agent = new_agent("bulk_wait_read", thread, site);
  }
  return *thread.bulk_stores;
}

void issue(BulkStore store) {
  Thread& self = *block.current;
  BulkStores& bulk = bulk_stores_of(self, store.site);
  store.group = bulk.groups_committed;
  const auto note_read = [&](u32 offset, u32 bytes) {
    if (bytes) note_agent_read(offset, bytes, access_by_agent(bulk.agent, store.group + 1, store.site), self);
  };
  // What lies outside of the array goes nowhere, whatever it is.
  for_each_chunk(store.map, store.coordinates, store.offset,
                 [&](u32 offset, u8*, u32 valid) { note_read(offset, valid); });
  bulk.stores.push_back(store);
  ++block.statistics.bulk_copies;
  u64& bytes = store.adds ? block.statistics.bytes_added : block.statistics.bytes_stored;
  bytes += bytes_inside(store.map, store.coordinates);
}

BulkStore tensor_store(const void* map, u32 source, const int (&coordinates)[4], Site site) {
  Thread& self = *block.current;
  self.site = site;
  BulkStore store = {};
  store.site = site;
  store.map = read_tensor_map(map, self, site);
  memcpy(store.coordinates, coordinates, sizeof coordinates);
  check_coordinates(store.map, coordinates, site);
  const u32 row_bytes = store.map.dims[0] * store.map.element_bytes;
  if (row_bytes % kChunkBytes)
    fail(self, site, "a tensor store to rows of %u bytes: it would write all of their last 16 bytes", row_bytes);
  store.bytes = box_bytes(store.map);
  store.offset = checked_offset(source, store.bytes, kTensorAlignment, self, site);
  return store;
}

void read_source(BulkStore& store) {
  const u8* from = shared_bytes(store.offset);
  store.content.assign(from, from + store.bytes);
}

// Subnormal terms and sums count, unlike those of red (measured on an H200).
void add_float32(u8* destination, const u8* source, u32 bytes) {
  for (u32 i = 0; i < bytes; i += sizeof(float)) {
    float sum, term;
    memcpy(&sum, destination + i, sizeof sum);
    memcpy(&term, source + i, sizeof term);
    sum += term;
    memcpy(destination + i, &sum, sizeof sum);
  }
}

void write_result(const BulkStore& store) {
  for_each_chunk(store.map, store.coordinates, store.offset, [&](u32 offset, u8* destination, u32 valid) {
    const u8* source = &store.content[offset - store.offset];
    if (store.adds)
      add_float32(destination, source, valid);
    else
      memcpy(destination, source, valid);
  });
}

// Lets all groups but the newest `pending` ones read shared memory.
void finish_reading(Thread& self, u32 pending) {
  if (!self.bulk_stores || self.bulk_stores->groups_committed < pending) return;
  BulkStores& bulk = *self.bulk_stores;
  bulk.groups_read = std::max(bulk.groups_read, bulk.groups_committed - pending);
  for (BulkStore& store : bulk.stores)
    if (store.group < bulk.groups_read && store.content.empty()) read_source(store);
  learn_step(self, bulk.agent, bulk.groups_read);
}

void finish_writing(Thread& self, u32 groups) {
  std::vector<BulkStore>& stores = self.bulk_stores->stores;
  size_t done = 0;
  for (; done < stores.size() && stores[done].group < groups; ++done) {
    self.site = stores[done].site;
    write_result(stores[done]);
  }
  stores.erase(stores.begin(), stores.begin() + (long)done);
}

}  // namespace

void reset_tma() {
  loads.clear();
  for (auto& thread : block.threads) thread->bulk_stores.reset();
}

void land_loads() {
  while (!loads.empty() && block.ready.empty()) {
    const Order order = (Order)block.options.order;
    if (order == Order::kFirstInFirstOut)
      land(0);
    else
      land(order == Order::kRandom ? next_random() % loads.size() : loads.size() - 1);
  }
  constexpr u32 kSwitchesPerLoad = 64;
  if (!loads.empty() && (Order)block.options.order == Order::kRandom && next_random() % kSwitchesPerLoad == 0)
    land(next_random() % loads.size());
}

void check_no_loads_left() {
  if (!loads.empty())
    fail(*loads[0].thread, loads[0].site, "the block ends with this load in flight: nobody waited for it");
}

void finish_bulk_stores(Thread& thread) {
  if (!thread.bulk_stores) return;
  for (const BulkStore& store : thread.bulk_stores->stores)
    if (store.content.empty())
      fail(thread, store.site, "the thread exits with this copy in flight: a bulk_%s is missing",
           store.group == thread.bulk_stores->groups_committed ? "commit" : "wait_read");
  finish_writing(thread, thread.bulk_stores->groups_committed);
}

void fence_async_proxy(Site site) {
  Thread& self = *block.current;
  self.site = site;
  fence(self);
  note_barrier_fence(self);
}

void load_tensor(u32 destination, const void* map, u32 barrier, const int (&coordinates)[4], Site site) {
  Thread& self = *block.current;
  self.site = site;
  Load load = {};
  load.site = site;
  load.thread = &self;
  load.is_tensor = true;
  load.map = read_tensor_map(map, self, site);
  memcpy(load.coordinates, coordinates, sizeof coordinates);
  check_coordinates(load.map, coordinates, site);
  load.bytes = box_bytes(load.map);
  load.offset = checked_offset(destination, load.bytes, kTensorAlignment, self, site);
  issue(load, barrier);
}

void load_bulk(u32 destination, const void* source, u32 bytes, u32 barrier, Site site) {
  Thread& self = *block.current;
  self.site = site;
  check_bulk(source, bytes, site);
  Load load = {};
  load.site = site;
  load.thread = &self;
  load.source = static_cast<const u8*>(source);
  load.bytes = bytes;
  load.offset = checked_offset(destination, bytes, kChunkBytes, self, site);
  issue(load, barrier);
}

void store_remote(u32 destination, const void* source, u32 bytes, u32 barrier, Site site) {
  Thread& self = *block.current;
  self.site = site;
  Load load = {};
  load.site = site;
  load.thread = &self;
  load.bytes = bytes;
  memcpy(load.content, source, bytes);
  load.offset = checked_offset(destination, bytes, kChunkBytes, self, site);
  if (destination >> kRankShift != barrier >> kRankShift)
    fail(self, site, "a store to another block counts on a barrier of that block, not of block %u",
         barrier >> kRankShift);
  issue(load, barrier);
}

void store_tensor(const void* map, u32 source, const int (&coordinates)[4], Site site) {
  issue(tensor_store(map, source, coordinates, site));
}

void add_tensor(const void* map, u32 source, const int (&coordinates)[4], Site site) {
  BulkStore store = tensor_store(map, source, coordinates, site);
  if (store.map.element_bytes != sizeof(float))
    fail(*block.current, site, "adds elements of %u bytes: only float32 is emulated", store.map.element_bytes);
  store.adds = true;
  issue(store);
}

void bulk_commit(Site site) {
  Thread& self = *block.current;
  self.site = site;
  ++bulk_stores_of(self, site).groups_committed;
}

void bulk_wait_read(u32 pending, Site site) {
  block.current->site = site;
  finish_reading(*block.current, pending);
}

void bulk_wait(u32 pending, Site site) {
  Thread& self = *block.current;
  self.site = site;
  finish_reading(self, pending);
  if (self.bulk_stores && self.bulk_stores->groups_committed >= pending)
    finish_writing(self, self.bulk_stores->groups_committed - pending);
  self.site = site;
}

}  // namespace emulator
