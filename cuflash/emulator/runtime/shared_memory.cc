// Two accesses of which one writes must be ordered: order.h says by what. A race is found whatever the schedule,
// because the record of an access says when it happened in the terms of what orders accesses.
#include "shared_memory.h"

#include <cstdio>
#include <cstring>

namespace emulator {
namespace {

constexpr u32 kCellBytes = 16;
constexpr u32 kPartBytes = 2;
constexpr u32 kParts = kCellBytes / kPartBytes;
constexpr u32 kNone = ~0u;

// A write, and the reads after it that are not known to each other.
struct Record {
  Access write;
  Access read;
  u32 more_reads;  // index in shared.more_reads, or kNone
};

struct MoreReads {
  Access read;
  u32 next;
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
  std::vector<MoreReads> more_reads;
};
SharedMemory shared;

enum class Use { kRead, kWrite };

[[noreturn]] void fail_in_flight(const Access& write, const Access& now, Use use, const Thread& thread, u32 offset) {
  const char* verb = use == Use::kRead ? "reads" : "writes";
  if (write.by_agent())
    fail(thread, now.site, "%s shared memory at offset %u while the copy issued at %s:%u is in flight: a %s is missing",
         verb, offset, file_name(write.site), write.site.line, wait_for(write));
  fail(thread, now.site,
       "%s shared memory at offset %u while the cp.async of thread %u at %s:%u is in flight: a copy_async_wait is "
       "missing",
       verb, offset, write.actor * kWarpLanes + __builtin_ctz(write.lanes), file_name(write.site), write.site.line);
}

[[noreturn]] void fail_by_race(const Access& earlier, Use earlier_use, const Access& now, Use use, const Thread& thread,
                               u32 offset) {
  const char* verb = use == Use::kRead ? "reads" : "writes";
  if (earlier.by_agent())
    fail(
        thread, now.site,
        "data race: %s shared memory at offset %u, which what was issued at %s:%u %s: a %s, or a barrier behind it, is "
        "missing",
        verb, offset, file_name(earlier.site), earlier.site.line, earlier_use == Use::kRead ? "reads" : "wrote",
        wait_for(earlier));
  const bool several = (earlier.lanes & (earlier.lanes - 1)) != 0;
  fail(thread, now.site,
       "data race: %s shared memory at offset %u, which thread %u%s %s at %s:%u, with no barrier between", verb, offset,
       earlier.actor * kWarpLanes + __builtin_ctz(earlier.lanes), several ? " and others" : "",
       earlier_use == Use::kRead ? "read" : "wrote", file_name(earlier.site), earlier.site.line);
}

[[noreturn]] void fail_unwritten(const Access& now, const Thread& thread, u32 offset) {
  fail(thread, now.site, "uninitialised: reads shared memory at offset %u, never written", offset);
}

[[noreturn]] void fail_unfenced(const Access& write, const Access& now, Use use, const Thread& thread, u32 offset) {
  fail(thread, now.site,
       "missing fence_async_proxy: %s shared memory at offset %u, which thread %u wrote at %s:%u and did not make "
       "visible outside of the threads before the barrier",
       use == Use::kRead ? "reads" : "overwrites", offset, write.actor * kWarpLanes + __builtin_ctz(write.lanes),
       file_name(write.site), write.site.line);
}

// Reads by ld.shared and ldmatrix may still be under way when their thread arrives at a barrier: only a fence keeps
// what overwrites the place in the other proxy behind them.
void check_read_fenced(const Access& read, const Access& now, const Thread& thread, u32 offset) {
  if (is_fenced(read, thread)) return;
  fail(thread, now.site,
       "missing fence_async_proxy: overwrites shared memory at offset %u, which thread %u read at %s:%u and did not "
       "fence before the barrier",
       offset, read.actor * kWarpLanes + __builtin_ctz(read.lanes), file_name(read.site), read.site.line);
}

bool is_same_read(const Access& earlier, const Access& now) {
  return earlier.actor == now.actor && earlier.by_agent() == now.by_agent() &&
         (earlier.epoch == now.epoch || now.by_agent());
}

// Adds `now` to the reads. Reads that are known to it need not be kept. Agents are not asked what they know.
void add_read(Record& record, const Access& now, const Thread& thread) {
  Access* read = &record.read;
  u32* next = &record.more_reads;
  for (;;) {
    if (is_same_read(*read, now)) {
      const u32 lanes = read->lanes | now.lanes;
      *read = now;
      read->lanes = lanes;
      return;
    }
    if (read->epoch == 0 || (!now.by_agent() && is_ordered(*read, now, thread))) {
      *read = now;
      return;
    }
    if (*next == kNone) break;
    MoreReads& more = shared.more_reads[*next];
    read = &more.read;
    next = &more.next;
  }
  *next = (u32)shared.more_reads.size();
  shared.more_reads.push_back({now, kNone});
}

void check_written(const Record& record, const Access& now, const Thread& thread, u32 offset) {
  const Access& write = record.write;
  if (write.in_flight) fail_in_flight(write, now, Use::kRead, thread, offset);
  if (!is_ordered(write, now, thread)) fail_by_race(write, Use::kWrite, now, Use::kRead, thread, offset);
  if (write.epoch == 0 && block.options.trap_unwritten) fail_unwritten(now, thread, offset);
}

void note_read(Record& record, const Access& now, const Thread& thread, u32 offset) {
  check_written(record, now, thread, offset);
  add_read(record, now, thread);
}

void note_write(Record& record, const Access& now, const Thread& thread, u32 offset) {
  if (record.write.in_flight) fail_in_flight(record.write, now, Use::kWrite, thread, offset);
  if (!is_ordered(record.write, now, thread)) fail_by_race(record.write, Use::kWrite, now, Use::kWrite, thread, offset);
  if (!is_ordered(record.read, now, thread)) fail_by_race(record.read, Use::kRead, now, Use::kWrite, thread, offset);
  for (u32 i = record.more_reads; i != kNone; i = shared.more_reads[i].next) {
    const Access& read = shared.more_reads[i].read;
    if (!is_ordered(read, now, thread)) fail_by_race(read, Use::kRead, now, Use::kWrite, thread, offset);
  }
  record = {now, {}, kNone};
}

Record copy_of(const Record& record) {
  Record copy = {record.write, record.read, kNone};
  for (u32 i = record.more_reads; i != kNone; i = shared.more_reads[i].next) {
    shared.more_reads.push_back({shared.more_reads[i].read, copy.more_reads});
    copy.more_reads = (u32)shared.more_reads.size() - 1;
  }
  return copy;
}

// Calls visit(record, offset) for every record of the bytes, which lie in one cell.
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
    for (u32 i = 0; i < kParts; ++i) parts[i] = copy_of(cell.whole);
  }
  const u32 first = offset % kCellBytes / kPartBytes;
  for (u32 i = first; i < first + bytes / kPartBytes; ++i) visit(parts[i], offset + (i - first) * kPartBytes);
}

void land(const Copy& copy, Thread& thread) {
  const u32 offset = copy.destination - kSharedBase;
  if (copy.source_bytes && memcmp(copy.source, copy.bytes_read, copy.source_bytes))
    fail(thread, copy.site, "the source of a cp.async changed while it was in flight");
  memcpy(&shared.bytes[offset], copy.bytes_read, copy.bytes);
  const Access landed = access_by(thread, copy.site);
  for_each_record(offset, copy.bytes, [&](Record& record, u32) { record.write = landed; });
}

void note_reads(u32 offset, u32 bytes, const Access& now, const Thread& thread) {
  for_each_record(offset, bytes, [&](Record& record, u32 at) { note_read(record, now, thread, at); });
}

// Makes all parts of a cell the same, when it is written as a whole.
void join_parts(u32 offset) {
  Cell& cell = shared.cells[offset / kCellBytes];
  if (!cell.is_split) return;
  cell.is_split = false;
  cell.whole = shared.parts[offset / kCellBytes * kParts];
}

void note_writes(u32 offset, u32 bytes, const Access& now, const Thread& thread) {
  for_each_record(offset, bytes, [&](Record& record, u32 at) { note_write(record, now, thread, at); });
  if (bytes == kCellBytes) join_parts(offset);
}

}  // namespace

namespace {

// Swizzles see the same address bits in all blocks.
u32 bytes_of_block() { return (block.options.shared_bytes + 1023) / 1024 * 1024; }

}  // namespace

void reset_shared_memory() {
  const u32 bytes = block.kernel->cluster == 1 ? block.options.shared_bytes : block.kernel->cluster * bytes_of_block();
  const u32 cells = (bytes + kCellBytes - 1) / kCellBytes;
  shared.bytes.assign(bytes, kPoison);
  shared.cells.assign(cells, Cell{{{}, {}, kNone}, false});
  shared.parts.resize(cells * kParts);
  shared.more_reads.clear();
}

u32 checked_offset(u32 address, u32 bytes, u32 alignment, const Thread& thread, Site site) {
  if (address % alignment)
    fail(thread, site, "misaligned shared address: 0x%x is not a multiple of %u bytes", address, alignment);
  const u32 rank = address >> kRankShift, within = address % (1u << kRankShift), offset = within - kSharedBase;
  if (within < kSharedBase || (u64)offset + bytes > block.options.shared_bytes || rank >= block.kernel->cluster)
    fail(thread, site, "out of bounds: %u bytes at offset %lld of %u bytes of shared memory", bytes,
         (long long)address - kSharedBase, block.options.shared_bytes);
  if (block.exited_of[rank] == block.options.threads)
    fail(thread, site, "block %u of the cluster has exited: its shared memory is gone", rank);
  return rank * bytes_of_block() + offset;
}

u8* shared_bytes(u32 offset) { return &shared.bytes[offset]; }

u32 address_in(u32 rank, u32 address) { return rank << kRankShift | address % (1u << kRankShift); }
u32 dynamic_shared() { return address_in(rank_of(*block.current), kSharedBase); }

const u8* read_shared(u32 address, u32 bytes, Site site) {
  Thread& self = *block.current;
  self.site = site;
  const u32 offset = checked_offset(address, bytes, bytes, self, site);
  note_reads(offset, bytes, access_by(self, site), self);
  return &shared.bytes[offset];
}

u8* write_shared(u32 address, u32 bytes, Site site) {
  Thread& self = *block.current;
  self.site = site;
  const u32 offset = checked_offset(address, bytes, bytes, self, site);
  note_writes(offset, bytes, access_by(self, site), self);
  return &shared.bytes[offset];
}

const u8* read_matrix_row(u32 address, const Thread& thread, Site site) {
  const u32 offset = checked_offset(address, kCellBytes, kCellBytes, thread, site);
  note_reads(offset, kCellBytes, access_by_warp(thread, site), thread);
  return &shared.bytes[offset];
}

u8* write_matrix_row(u32 address, const Thread& thread, Site site) {
  const u32 offset = checked_offset(address, kCellBytes, kCellBytes, thread, site);
  note_writes(offset, kCellBytes, access_by_warp(thread, site), thread);
  return &shared.bytes[offset];
}

// ---- Agents ---------------------------------------------------------------------------------------------------------

void begin_agent_write(u32 offset, u32 bytes, const Access& write, const Thread& thread) {
  for (u32 at = offset; at < offset + bytes; at += kCellBytes) {
    for_each_record(at, kCellBytes, [&](Record& record, u32 place) {
      const Record before = record;
      note_write(record, write, thread, place);
      if (!is_fenced(before.write, thread)) fail_unfenced(before.write, write, Use::kWrite, thread, place);
      check_read_fenced(before.read, write, thread, place);
      for (u32 i = before.more_reads; i != kNone; i = shared.more_reads[i].next)
        check_read_fenced(shared.more_reads[i].read, write, thread, place);
      record.write.in_flight = true;
    });
    join_parts(at);
  }
}

void end_agent_write(u32 offset, u32 bytes) {
  for (u32 at = offset; at < offset + bytes; at += kCellBytes)
    for_each_record(at, kCellBytes, [](Record& record, u32) { record.write.in_flight = false; });
}

void note_agent_read(u32 offset, u32 bytes, const Access& read, const Thread& thread) {
  for (u32 at = offset; at < offset + bytes; at += kCellBytes)
    for_each_record(at, kCellBytes, [&](Record& record, u32 place) {
      note_read(record, read, thread, place);
      if (!is_fenced(record.write, thread)) fail_unfenced(record.write, read, Use::kRead, thread, place);
    });
}

void note_agent_read_of_all(u32 offset, const Access& read, u32 first_thread, u32 count, Clock& visible) {
  for_each_record(offset, kCellBytes, [&](Record& record, u32 place) {
    const Access& write = record.write;
    if (write.in_flight || write.epoch == 0) check_written(record, read, *block.threads[first_thread], place);
    if (!is_within(write, visible)) {
      for (u32 i = first_thread; i < first_thread + count; ++i) {
        const Thread& thread = *block.threads[i];
        check_written(record, read, thread, place);
        if (!is_fenced(write, thread)) fail_unfenced(write, read, Use::kRead, thread, place);
      }
      add_to(visible, write);
    }
    add_read(record, read, *block.threads[first_thread]);
  });
}

// ---- Asynchronous copies --------------------------------------------------------------------------------------------

void copy_async(u32 destination, const void* source, u32 bytes, u32 source_bytes, Site site) {
  Thread& self = *block.current;
  self.site = site;
  const u32 offset = checked_offset(destination, bytes, bytes, self, site);
  if ((unsigned long)source % bytes)
    fail(self, site, "misaligned source of cp.async: %p is not a multiple of %u bytes", source, bytes);
  if (source_bytes > bytes) fail(self, site, "cp.async of %u bytes reads %u", bytes, source_bytes);

  Access now = access_by(self, site);
  now.in_flight = true;
  note_writes(offset, bytes, now, self);
  Copy copy = {site, static_cast<const u8*>(source), source_bytes, destination, bytes, self.groups_committed, {}};
  memcpy(copy.bytes_read, source, source_bytes);
  block.statistics.bytes_loaded += source_bytes;
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
