// Two accesses of different threads are ordered by a sync_block between them or, inside a warp, by a collective. A race
// is found whatever the schedule, because the record of an access says after which barriers it happened.
#include "shared_memory.h"

#include <cstdio>
#include <cstring>

namespace emulator {
namespace {

constexpr u32 kCellBytes = 16;
constexpr u32 kPartBytes = 2;
constexpr u32 kParts = kCellBytes / kPartBytes;

struct Access {
  Site site;
  u32 block_epoch;  // 0: never
  u32 warp_epoch;
  u16 thread;
  bool several_lanes;
  bool several_warps;
  bool in_flight;
};

struct Record {
  Access write;
  Access read;
};

// Most accesses cover 16 aligned bytes and need one record; the first smaller one splits the cell.
struct Cell {
  Record whole;
  bool is_split;
};

struct SharedMemory {
  std::vector<u8> bytes;
  std::vector<Cell> cells;
  std::vector<Record> parts;
};
SharedMemory shared;

bool is_ordered(const Access& earlier, const Access& now) {
  if (earlier.block_epoch < now.block_epoch) return true;
  if (earlier.several_warps || earlier.thread / kWarpLanes != now.thread / kWarpLanes) return false;
  return earlier.warp_epoch < now.warp_epoch ||
         (earlier.thread == now.thread && !earlier.several_lanes && !now.several_lanes);
}

Access access_by(const Thread& thread, Site site) {
  return {site, block.epoch, warp_of(thread).epoch, (u16)thread.index, false, false, false};
}

enum class Use { kRead, kWrite };

[[noreturn]] void fail_in_flight(const Access& copy, const Access& now, Use use, u32 offset) {
  fail(*block.threads[now.thread], now.site,
       "%s shared memory at offset %u while the cp.async of thread %u at %s:%u is in flight: a copy_async_wait is "
       "missing",
       use == Use::kRead ? "reads" : "writes", offset, copy.thread, file_name(copy.site), copy.site.line);
}

[[noreturn]] void fail_by_race(const Access& earlier, Use earlier_use, const Access& now, Use use, u32 offset) {
  fail(*block.threads[now.thread], now.site,
       "data race: %s shared memory at offset %u, which thread %u%s %s at %s:%u, with no barrier between",
       use == Use::kRead ? "reads" : "writes", offset, earlier.thread, earlier.several_warps ? " and others" : "",
       earlier_use == Use::kRead ? "read" : "wrote", file_name(earlier.site), earlier.site.line);
}

void note_read(Record& record, Access now, u32 offset) {
  const Access& write = record.write;
  if (write.in_flight) fail_in_flight(write, now, Use::kRead, offset);
  if (!is_ordered(write, now)) fail_by_race(write, Use::kWrite, now, Use::kRead, offset);
  if (write.block_epoch == 0 && block.options.trap_unwritten)
    fail(*block.threads[now.thread], now.site, "uninitialised: reads shared memory at offset %u, never written", offset);

  Access& read = record.read;
  if (read.block_epoch == now.block_epoch) {
    if (read.several_warps) return;
    if (read.thread / kWarpLanes != now.thread / kWarpLanes) {
      read.several_warps = true;
      return;
    }
    if (read.warp_epoch == now.warp_epoch && (read.thread != now.thread || read.several_lanes))
      now.several_lanes = true;
  }
  read = now;
}

void note_write(Record& record, const Access& now, u32 offset) {
  if (record.write.in_flight) fail_in_flight(record.write, now, Use::kWrite, offset);
  if (!is_ordered(record.write, now)) fail_by_race(record.write, Use::kWrite, now, Use::kWrite, offset);
  if (!is_ordered(record.read, now)) fail_by_race(record.read, Use::kRead, now, Use::kWrite, offset);
  record.write = now;
}

// Calls visit(record, offset) for every record of the bytes.
template <class Visit>
void for_each_record(u32 offset, u32 bytes, Visit visit) {
  Cell& cell = shared.cells[offset / kCellBytes];
  if (bytes == kCellBytes && !cell.is_split) {
    visit(cell.whole, offset);
    return;
  }
  Record* parts = &shared.parts[offset / kCellBytes * kParts];
  if (!cell.is_split) {
    cell.is_split = true;
    for (u32 i = 0; i < kParts; ++i) parts[i] = cell.whole;
  }
  const u32 first = offset % kCellBytes / kPartBytes;
  for (u32 i = first; i < first + bytes / kPartBytes; ++i) visit(parts[i], offset + (i - first) * kPartBytes);
}

// The offset of the bytes in the block's shared memory.
u32 checked_offset(u32 address, u32 bytes, const Thread& thread, Site site) {
  if (address % bytes)
    fail(thread, site, "misaligned shared address: 0x%x is not a multiple of %u bytes", address, bytes);
  const u32 offset = address - kSharedBase;
  if (address < kSharedBase || (u64)offset + bytes > shared.bytes.size())
    fail(thread, site, "out of bounds: %u bytes at offset %lld of %zu bytes of shared memory", bytes,
         (long long)address - kSharedBase, shared.bytes.size());
  return offset;
}

void land(const Copy& copy, Thread& thread) {
  const u32 offset = copy.destination - kSharedBase;
  if (copy.source_bytes && memcmp(copy.source, copy.bytes_read, copy.source_bytes))
    fail(thread, copy.site, "the source of a cp.async changed while it was in flight");
  memcpy(&shared.bytes[offset], copy.bytes_read, copy.bytes);
  const Access landed = access_by(thread, copy.site);
  for_each_record(offset, copy.bytes, [&](Record& record, u32) { record.write = landed; });
}

}  // namespace

void reset_shared_memory() {
  const u32 bytes = block.options.shared_bytes;
  const u32 cells = (bytes + kCellBytes - 1) / kCellBytes;
  shared.bytes.assign(bytes, 0xFF);
  shared.cells.assign(cells, Cell{});
  shared.parts.resize(cells * kParts);
}

u32 dynamic_shared() { return kSharedBase; }

const u8* read_shared(u32 address, u32 bytes, Site site) {
  Thread& self = *block.current;
  self.site = site;
  const u32 offset = checked_offset(address, bytes, self, site);
  const Access now = access_by(self, site);
  for_each_record(offset, bytes, [&](Record& record, u32 at) { note_read(record, now, at); });
  return &shared.bytes[offset];
}

u8* write_shared(u32 address, u32 bytes, Site site) {
  Thread& self = *block.current;
  self.site = site;
  const u32 offset = checked_offset(address, bytes, self, site);
  const Access now = access_by(self, site);
  for_each_record(offset, bytes, [&](Record& record, u32 at) { note_write(record, now, at); });
  return &shared.bytes[offset];
}

const u8* read_matrix_row(u32 address, const Thread& thread, Site site) {
  const u32 offset = checked_offset(address, kCellBytes, thread, site);
  Access now = access_by(thread, site);
  now.several_lanes = true;
  for_each_record(offset, kCellBytes, [&](Record& record, u32 at) { note_read(record, now, at); });
  return &shared.bytes[offset];
}

// ---- Asynchronous copies --------------------------------------------------------------------------------------------

void copy_async(u32 destination, const void* source, u32 bytes, u32 source_bytes, Site site) {
  Thread& self = *block.current;
  self.site = site;
  const u32 offset = checked_offset(destination, bytes, self, site);
  if ((unsigned long)source % bytes)
    fail(self, site, "misaligned source of cp.async: %p is not a multiple of %u bytes", source, bytes);
  if (source_bytes > bytes) fail(self, site, "cp.async of %u bytes reads %u", bytes, source_bytes);

  Access now = access_by(self, site);
  now.in_flight = true;
  for_each_record(offset, bytes, [&](Record& record, u32 at) { note_write(record, now, at); });
  Copy copy = {site, static_cast<const u8*>(source), source_bytes, destination, bytes, self.groups_committed, {}};
  memcpy(copy.bytes_read, source, source_bytes);
  if (block.options.eager_copies) memcpy(&shared.bytes[offset], copy.bytes_read, bytes);
  self.copies.push_back(copy);
}

void copy_async_commit(Site site) {
  Thread& self = *block.current;
  self.site = site;
  ++self.groups_committed;
}

void copy_async_wait(u32 pending, Site site) {
  Thread& self = *block.current;
  self.site = site;
  while (self.copies_landed < self.copies.size()) {
    const Copy& copy = self.copies[self.copies_landed];
    if (copy.group + pending >= self.groups_committed) return;
    land(copy, self);
    ++self.copies_landed;
  }
  self.copies.clear();
  self.copies_landed = 0;
}

void check_no_copies_left(const Thread& thread) {
  if (thread.copies_landed == thread.copies.size()) return;
  const Copy& copy = thread.copies[thread.copies_landed];
  fail(thread, copy.site, "the thread exits with this cp.async in flight: a copy_async_%s is missing",
       copy.group == thread.groups_committed ? "commit" : "wait");
}

}  // namespace emulator
