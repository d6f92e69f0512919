// Products are formed when the last of the 128 threads has issued them, and then have read their operands in shared
// memory: whoever writes there before the wait is found by the record of that read. The sums reach the registers at the
// wait; until then these hold signalling NaNs, which are compared then, as are the operands in registers.
//
// A wait covers what the own warp reads of operand a, its 16 rows, and all of b: warps end at different times, as was
// seen on an H200, where a buffer of a that one warp had given back for all was overwritten too early. There a product
// begins when the last warp has issued it. The waits of its warps ended at the same clock with one warpgroup on the SM,
// up to 12 clocks apart with two, and up to 58 with three.
#include "warpgroup.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>

#include "hot.h"
#include "interface_sm90.h"
#include "numerics.h"
#include "shared_memory.h"

namespace emulator {
namespace {

constexpr u32 kThreads = 128;  // of a warpgroup
constexpr u32 kGroupRows = 64;
constexpr u32 kMaxColumns = 256;
constexpr u32 kOperandBytes = 32;  // of one row along k
constexpr u32 kLineBytes = 128;

// The registers of one accumulator, in all threads, that products in flight add to.
struct Accumulator {
  u32 n_tiles;
  u32 products;                // products that some thread has issued and that have not reached the registers
  Site site;                   // where the newest of them was issued
  float* registers[kThreads];  // null until the thread has issued its first
  float sums[kGroupRows * kMaxColumns];
};

struct Issued {
  Product product;
  Site site;
  Accumulator* accumulator;
  u32 threads;  // how many threads have issued it
  const u32* a_registers[kThreads];
  u32 a[kThreads][4];
};

// Registers that a product of this thread used, and which wgmma_fence was the last before it was over.
struct UsedRegisters {
  const void* registers;
  u32 content[4];  // of an operand
  u32 fence;
};

struct ThreadState {
  u32 issued;               // how many products it has issued
  std::vector<u32> groups;  // how many products had been issued at each wgmma_commit
  u32 fences;
  std::vector<UsedRegisters> used;
};

struct Warpgroup {
  bool has_agent;
  u16 agent;                       // that reads operands b
  u16 warp_agents[kThreads / 32];  // that read operands a, each the rows of its warp
  std::deque<Issued> in_flight;
  u32 landed;  // how many products have reached the registers
  std::deque<Accumulator> accumulators;
  ThreadState threads[kThreads];
  Clock visible;  // see note_agent_read_of_all

  // A rendezvous of all threads.
  u32 arrived;
  const char* operation;
  Site site;
  u32 argument;

  u32 registers;  // of a thread
};

// What the compiler gives a thread at the start of the kernel: as many as the launch bounds leave.
u32 registers_at_launch() {
  constexpr u32 kOfMultiprocessor = 65536, kMost = 255;
  const u32 threads = block.kernel->max_threads * block.kernel->min_blocks;
  return std::min(kOfMultiprocessor / threads, kMost) / 8 * 8;
}

std::vector<Warpgroup> warpgroups;
u32 free_registers[kMaxCluster];      // registers of each block, given back and not taken yet
std::vector<u32> waiting_warpgroups;  // warpgroups that wait for registers

u32 first_thread(const Warpgroup& group) { return (u32)(&group - warpgroups.data()) * kThreads; }
u32& free_registers_for(const Warpgroup& group) { return free_registers[rank_of(*block.threads[first_thread(group)])]; }
Warpgroup& warpgroup_of(const Thread& thread, Site site) {
  if (thread.index / kThreads >= warpgroups.size())
    fail(thread, site, "the thread is not part of a whole warpgroup: the block has %zu threads", block.threads.size());
  return warpgroups[thread.index / kThreads];
}

// Returns true in the last thread of the group to call. The others wait until that one wakes them.
bool gather(Warpgroup& group, const char* operation, u32 argument, Site site) {
  Thread& self = *block.current;
  self.site = site;
  if (group.arrived == 0) {
    group.operation = operation;
    group.site = site;
    group.argument = argument;
  } else if (group.operation != operation || group.site != site || group.argument != argument) {
    fail(self, site, "divergent warpgroup: the thread calls %s here while others of its warpgroup wait in %s at %s:%u",
         operation, group.operation, file_name(group.site), group.site.line);
  }
  if (++group.arrived < kThreads) {
    wait_for_wake(operation, site);
    return false;
  }
  group.arrived = 0;
  return true;
}

void wake_others(const Warpgroup& group) {
  for (u32 i = first_thread(group); i < first_thread(group) + kThreads; ++i)
    if (i != block.current->index) wake(*block.threads[i]);
}

// ---- Operands in shared memory --------------------------------------------------------------------------------------

struct Descriptor {
  u32 start, leading, stride;
};

Descriptor decode(u64 descriptor, Site site) {
  const Thread& self = *block.current;
  if (descriptor >> 62 != 1)
    fail(self, site, "a matrix descriptor without the 128-byte swizzle (mode %llu): not emulated", descriptor >> 62);
  if (descriptor >> 49 & 7) fail(self, site, "a matrix descriptor with a base offset: not emulated");
  const Descriptor decoded = {(u32)(descriptor & 0x3fff) << 4, (u32)(descriptor >> 16 & 0x3fff) << 4,
                              (u32)(descriptor >> 32 & 0x3fff) << 4};
  if (decoded.start / kLineBytes % 8 || decoded.stride % 1024)
    fail(self, site,
         "the lines of a tile start at 0x%x and are %u bytes apart by eights: both must be multiples of 1024",
         decoded.start / kLineBytes * kLineBytes, decoded.stride);
  return decoded;
}

// Reads the 16 bytes at this address of the tile, as one of the agents of the group.
void read_chunk(Warpgroup& group, u16 agent, u32 address, u32 step, Site site, void* chunk) {
  const u32 swizzled = address_in(rank_of(*block.current), address ^ (address >> 7 & 7) << 4);
  const u32 offset = checked_offset(swizzled, kChunkBytes, kChunkBytes, *block.current, site);
  note_agent_read_of_all(offset, access_by_agent(agent, step, site), first_thread(group), kThreads, group.visible);
  memcpy(chunk, shared_bytes(offset), kChunkBytes);
}

u32 element_bytes(Element type) { return type == Element::kFloat16 || type == Element::kBFloat16 ? 2 : 1; }

// Elements of `type`, 16 bytes of them, as float32. Returns how many there are.
u32 convert_chunk(Element type, const u8* chunk, float* values) {
  const u32 count = kChunkBytes / element_bytes(type);
  u16 bits[8];
  memcpy(bits, chunk, sizeof bits);
  for (u32 i = 0; i < count; ++i) values[i] = element_to_float32(type, count == 8 ? bits[i] : chunk[i]);
  return count;
}

// Calls visit(row, k, value) for the elements of an operand of `rows` rows: those of a, or the columns of b.
// `agent_of(row)` reads a row.
template <class AgentOf, class Visit>
void read_operand(Warpgroup& group, Element type, u64 bits, bool transposed, u32 rows, u32 step, Site site,
                  AgentOf agent_of, Visit visit) {
  const Descriptor tile = decode(bits, site);
  const u32 column = tile.start % kLineBytes;
  u8 chunk[kChunkBytes];
  float values[kChunkBytes];
  if (!transposed) {
    if (column + kOperandBytes > kLineBytes)
      fail(*block.current, site, "the operand starts at byte %u of its lines, and takes %u bytes: it leaves them",
           column, kOperandBytes);
    for (u32 row = 0; row < rows; ++row)
      for (u32 half = 0; half < kOperandBytes / kChunkBytes; ++half) {
        read_chunk(group, agent_of(row), tile.start + row / 8 * tile.stride + row % 8 * kLineBytes + half * kChunkBytes,
                   step, site, chunk);
        const u32 count = convert_chunk(type, chunk, values);
        for (u32 i = 0; i < count; ++i) visit(row, half * count + i, values[i]);
      }
    return;
  }
  constexpr u32 kLineElements = kLineBytes / 2, kChunkElements = kChunkBytes / 2, kDepth = 16;
  if (column && column + rows * 2 > kLineBytes)
    fail(*block.current, site, "the operand starts at byte %u of its lines, and takes %u bytes: it leaves them", column,
         rows * 2);
  for (u32 k = 0; k < kDepth; ++k)
    for (u32 row = 0; row < rows; row += kChunkElements) {
      read_chunk(group, agent_of(row),
                 tile.start + row / kLineElements * tile.leading + row % kLineElements * 2 + k / 8 * tile.stride +
                     k % 8 * kLineBytes,
                 step, site, chunk);
      convert_chunk(type, chunk, values);
      for (u32 i = 0; i < kChunkElements; ++i) visit(row + i, k, values[i]);
    }
}

// ---- Products -------------------------------------------------------------------------------------------------------

// Where the elements of a thread lie: those of the accumulator, and those of an operand of two elements.
u32 row_of(u32 thread, u32 i) { return thread / 32 * 16 + thread % 32 / 4 + 8 * i; }

void read_a_registers(const Issued& issued, u32 depth, float* a) {
  const Element type = issued.product.type;
  const u32 count = 4 / element_bytes(type), bits_each = 32 / count;  // of a register
  for (u32 thread = 0; thread < kThreads; ++thread)
    for (u32 i = 0; i < 4; ++i) {
      const u32 row = row_of(thread, i % 2), k = (thread % 4 + i / 2 * 4) * count;
      for (u32 j = 0; j < count; ++j)
        a[row * depth + k + j] = element_to_float32(type, (u16)(issued.a[thread][i] >> bits_each * j));
    }
}

// sums (+)= a b, cut off rather than rounded.
EMULATOR_HOT void multiply(const float* __restrict a, const float* __restrict b, u32 depth, u32 columns,
                           bool accumulate, bool is_fp8, float* __restrict sums) {
  for (u32 row = 0; row < kGroupRows; ++row) {
    double product[kMaxColumns] = {};
    for (u32 k = 0; k < depth; ++k)
      for (u32 column = 0; column < columns; ++column)
        product[column] += (double)a[row * depth + k] * b[k * columns + column];
    float* sum = sums + row * columns;
    for (u32 column = 0; column < columns; ++column) {
      const double whole = (accumulate ? sum[column] : 0.0f) + product[column];
      sum[column] = is_fp8 ? cut_to_14_bits(whole) : cut_to_float32(whole);
    }
  }
}

// `step` is the number of products that have landed once this one has.
void form(Warpgroup& group, const Issued& issued, u32 step) {
  const Product& product = issued.product;
  const u32 bytes = element_bytes(product.type), depth = kOperandBytes / bytes, columns = 8 * product.n_tiles;
  static float a[kGroupRows * kOperandBytes], b[kOperandBytes * kMaxColumns];
  if (product.a_registers)
    read_a_registers(issued, depth, a);
  else
    read_operand(
        group, product.type, product.a, product.a_transposed, kGroupRows, step, issued.site,
        [&](u32 row) { return group.warp_agents[row / 16]; },
        [&](u32 row, u32 k, float value) { a[row * depth + k] = value; });
  read_operand(
      group, product.b_type, product.b, product.b_transposed, columns, step, issued.site,
      [&](u32) { return group.agent; }, [&](u32 column, u32 k, float value) { b[k * columns + column] = value; });
  multiply(a, b, depth, columns, product.accumulate, bytes == 1, issued.accumulator->sums);
  ++block.statistics.warpgroup_products;
}

// Calls visit(register, sum) for the elements of one thread.
template <class Visit>
void for_each_register(Accumulator& accumulator, u32 thread, Visit visit) {
  const u32 columns = 8 * accumulator.n_tiles;
  for (u32 n = 0; n < accumulator.n_tiles; ++n)
    for (u32 i = 0; i < 4; ++i)
      visit(accumulator.registers[thread][4 * n + i],
            accumulator.sums[row_of(thread, i / 2) * columns + 8 * n + thread % 4 * 2 + i % 2]);
}

void show_sums(Accumulator& accumulator) {
  for (u32 thread = 0; thread < kThreads; ++thread)
    for_each_register(accumulator, thread, [](float& value, float sum) { value = sum; });
}

UsedRegisters* find_used(ThreadState& state, const void* registers) {
  for (UsedRegisters& used : state.used)
    if (used.registers == registers) return &used;
  return nullptr;
}

void note_used(ThreadState& state, const void* registers, const u32* content) {
  UsedRegisters* used = find_used(state, registers);
  if (!used) {
    state.used.push_back({registers, {}, 0});
    used = &state.used.back();
  }
  used->fence = state.fences;
  if (content) memcpy(used->content, content, sizeof used->content);
}

void check_fenced(const Thread& self, ThreadState& state, const Product& product, bool is_in_flight, Site site) {
  if (state.fences == 0) fail(self, site, "missing wgmma_fence before the first product");
  const UsedRegisters* d = find_used(state, product.d);
  if (d && !is_in_flight && d->fence == state.fences)
    fail(self, site, "missing wgmma_fence: the accumulator may have been touched since its last wgmma_wait");
  if (!product.a_registers) return;
  const UsedRegisters* a = find_used(state, product.a_registers);
  if (a && a->fence == state.fences && memcmp(a->content, product.a_registers, sizeof a->content))
    fail(self, site, "missing wgmma_fence: the operand in registers was written since its last product");
}

bool is_same_product(const Product& x, const Product& y) {
  return x.type == y.type && x.b_type == y.b_type && x.n_tiles == y.n_tiles && !x.a_registers == !y.a_registers &&
         x.a == y.a && x.b == y.b && x.a_transposed == y.a_transposed && x.b_transposed == y.b_transposed &&
         x.accumulate == y.accumulate;
}

// Returns the accumulator of these registers, which is in flight from now on.
Accumulator& accumulator_for(Warpgroup& group, const Product& product, u32 thread, Site site) {
  for (Accumulator& accumulator : group.accumulators) {
    const float* registers = accumulator.registers[thread];
    if (!accumulator.products || !registers) continue;
    if (registers == product.d && accumulator.n_tiles == product.n_tiles) return accumulator;
    if (registers < product.d + 4 * product.n_tiles && product.d < registers + 4 * accumulator.n_tiles)
      fail(*block.current, site, "the accumulator overlaps that of the product in flight at %s:%u",
           file_name(accumulator.site), accumulator.site.line);
  }
  for (Accumulator& accumulator : group.accumulators)
    if (!accumulator.products) return accumulator;
  group.accumulators.emplace_back();
  return group.accumulators.back();
}

void put_in_flight(Accumulator& accumulator, u32 thread, float* registers) {
  accumulator.registers[thread] = registers;
  for_each_register(accumulator, thread, [](float& value, float& sum) {
    sum = value;
    memcpy(&value, &kInFlight, sizeof value);
  });
}

// Called when a product is over: its registers may be touched again, unless other products still add to them.
void land(Warpgroup& group, const Issued& issued) {
  Accumulator& accumulator = *issued.accumulator;
  const bool last = --accumulator.products == 0;
  for (u32 i = 0; i < kThreads; ++i) {
    const Thread& thread = *block.threads[first_thread(group) + i];
    if (issued.product.a_registers && memcmp(issued.a_registers[i], issued.a[i], sizeof issued.a[i]))
      fail(thread, issued.site, "the operand in registers of this product changed while it was in flight");
    if (issued.product.a_registers) note_used(group.threads[i], issued.a_registers[i], issued.a[i]);
    if (!last) continue;
    for_each_register(accumulator, i, [&](float& value, float sum) {
      const u32 expected = block.options.eager_copies ? bits_of(sum) : kInFlight;
      if (memcmp(&value, &expected, sizeof value))
        fail(thread, issued.site, "the accumulator of this product was written while it was in flight");
    });
    note_used(group.threads[i], accumulator.registers[i], nullptr);
  }
  if (!last) return;
  show_sums(accumulator);
  for (float*& registers : accumulator.registers) registers = nullptr;
}

}  // namespace

void reset_warpgroups() {
  warpgroups.clear();
  warpgroups.resize(block.threads.size() / kThreads);
  for (Warpgroup& group : warpgroups) group.registers = registers_at_launch();
  for (u32& free : free_registers) free = 0;
  waiting_warpgroups.clear();
}

void check_no_products_left(const Thread& thread) {
  if (thread.index / kThreads >= warpgroups.size()) return;
  const Warpgroup& group = warpgroups[thread.index / kThreads];
  const u32 issued = group.threads[thread.index % kThreads].issued;
  if (issued > group.landed)
    fail(thread, group.in_flight[issued - group.landed - 1].site,
         "the thread exits with this product in flight: a wgmma_wait is missing");
}

void wgmma_fence(Site site) {
  Thread& self = *block.current;
  self.site = site;
  ++warpgroup_of(self, site).threads[self.index % kThreads].fences;
}

void wgmma(const Product& product, Site site) {
  Thread& self = *block.current;
  self.site = site;
  Warpgroup& group = warpgroup_of(self, site);
  const u32 thread = self.index % kThreads;
  ThreadState& state = group.threads[thread];
  if (!group.has_agent) {
    group.agent = new_agent("wgmma_wait", self, site);
    for (u16& agent : group.warp_agents) agent = new_agent("wgmma_wait of its warp", self, site);
    group.has_agent = true;
    group.visible.assign(self.known.size(), 0);
  }

  const u32 position = state.issued++ - group.landed;
  if (position == group.in_flight.size()) {
    group.in_flight.emplace_back();
    Issued& fresh = group.in_flight.back();
    fresh.product = product;
    fresh.site = site;
    fresh.accumulator = &accumulator_for(group, product, thread, site);
    fresh.accumulator->n_tiles = product.n_tiles;
    ++fresh.accumulator->products;
  }
  Issued& issued = group.in_flight[position];
  if (issued.site != site || !is_same_product(issued.product, product))
    fail(self, site, "divergent warpgroup: the thread issues another product here than others did at %s:%u",
         file_name(issued.site), issued.site.line);

  Accumulator& accumulator = *issued.accumulator;
  accumulator.site = site;
  const bool is_in_flight = accumulator.registers[thread] != nullptr;
  check_fenced(self, state, product, is_in_flight, site);
  if (is_in_flight && accumulator.registers[thread] != product.d)
    fail(self, site, "the accumulator of this product differs from that of other threads, which is in flight");
  if (!is_in_flight) put_in_flight(accumulator, thread, product.d);
  if (product.a_registers) {
    issued.a_registers[thread] = product.a_registers;
    memcpy(issued.a[thread], product.a_registers, sizeof issued.a[thread]);
  }
  if (++issued.threads < kThreads) return;
  form(group, issued, group.landed + position + 1);
  if (block.options.eager_copies) show_sums(accumulator);
}

void wgmma_commit(Site site) {
  Thread& self = *block.current;
  self.site = site;
  ThreadState& state = warpgroup_of(self, site).threads[self.index % kThreads];
  state.groups.push_back(state.issued);
}

void wgmma_wait(u32 pending, Site site) {
  Warpgroup& group = warpgroup_of(*block.current, site);
  if (!gather(group, "wgmma_wait", pending, site)) return;
  const std::vector<u32>& groups = group.threads[0].groups;
  for (const ThreadState& state : group.threads)
    if (state.groups != groups)
      fail(*block.current, site, "divergent warpgroup: its threads committed different groups of products");
  const u32 until = groups.size() > pending ? groups[groups.size() - 1 - pending] : group.landed;
  for (; group.landed < until; ++group.landed) {
    land(group, group.in_flight.front());
    group.in_flight.pop_front();
  }
  if (group.has_agent)
    for (u32 i = 0; i < kThreads; ++i) {
      Clock& known = block.threads[first_thread(group) + i]->known;
      step_in(known, group.agent) = group.landed;
      step_in(known, group.warp_agents[i / 32]) = group.landed;
    }
  wake_others(group);
}

// ---- Registers moved between warpgroups -----------------------------------------------------------------------------

namespace {

void describe_registers(u64 waits_for, char* text, size_t size) {
  snprintf(text, size, " (of %llu registers a thread; %u of the block are free)", waits_for,
           free_registers[rank_of(*block.current)]);
}

bool take_registers(Warpgroup& group, u32 registers) {
  const u32 more = (registers - group.registers) * kThreads;
  u32& free = free_registers_for(group);
  if (more > free) return false;
  free -= more;
  group.registers = registers;
  return true;
}

void check_register_count(u32 registers, bool possible, u32 now, Site site) {
  if (registers % 8 || registers < 24 || registers > 256 || !possible)
    fail(*block.current, site,
         "a thread of %u registers cannot have %u: a multiple of 8 from 24 to 256, fewer after a decrease and more "
         "after "
         "an increase",
         now, registers);
}

}  // namespace

void decrease_registers(u32 registers, Site site) {
  Warpgroup& group = warpgroup_of(*block.current, site);
  if (!gather(group, "decrease_registers", registers, site)) return;
  check_register_count(registers, registers <= group.registers, group.registers, site);
  free_registers_for(group) += (group.registers - registers) * kThreads;
  group.registers = registers;
  for (size_t i = 0; i < waiting_warpgroups.size();) {
    Warpgroup& waiting = warpgroups[waiting_warpgroups[i]];
    if (!take_registers(waiting, waiting.argument)) {
      ++i;
      continue;
    }
    waiting_warpgroups.erase(waiting_warpgroups.begin() + (long)i);
    for (u32 j = first_thread(waiting); j < first_thread(waiting) + kThreads; ++j) wake(*block.threads[j]);
  }
  wake_others(group);
}

void increase_registers(u32 registers, Site site) {
  Warpgroup& group = warpgroup_of(*block.current, site);
  if (!gather(group, "increase_registers", registers, site)) return;
  check_register_count(registers, registers >= group.registers, group.registers, site);
  if (take_registers(group, registers)) {
    wake_others(group);
    return;
  }
  waiting_warpgroups.push_back(first_thread(group) / kThreads);
  wait_for_wake("increase_registers", site, describe_registers, registers);
}

}  // namespace emulator
