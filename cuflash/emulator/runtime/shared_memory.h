// The shared memory of the running block, with a record of who touched what since when.
#pragma once
#include "order.h"

namespace emulator {

// The shared window starts with a kilobyte that belongs to the system, as on the hardware: address 0 is never valid.
constexpr u32 kSharedBase = 1024;
// The windows of the blocks of a cluster are so far apart, as on the hardware.
constexpr u32 kRankShift = 24;
constexpr u32 kChunkBytes = 16;  // what TMA and wgmma read at once
constexpr int kPoison = 0xFF;    // of bytes that nobody has written: NaN in every floating-point type

// Fresh storage for the next block: NaN bits, never written.
void reset_shared_memory();

// The 16 bytes of a matrix row, read or written by a whole warp; `thread` passed the address.
const u8* read_matrix_row(u32 address, const Thread& thread, Site site);
u8* write_matrix_row(u32 address, const Thread& thread, Site site);

// The offset of the bytes in the block's shared memory.
u32 checked_offset(u32 address, u32 bytes, u32 alignment, const Thread& thread, Site site);
// The bytes at such an offset.
u8* shared_bytes(u32 offset);

// ---- Agents: bytes are a multiple of 16 at a multiple of 16, `thread` is on whose behalf it happens -----------------

// An agent starts to write, and later is done. Between the two no thread and no other agent may touch the bytes.
void begin_agent_write(u32 offset, u32 bytes, const Access& write, const Thread& thread);
void end_agent_write(u32 offset, u32 bytes);
// An agent reads, from now until its step is known.
void note_agent_read(u32 offset, u32 bytes, const Access& read, const Thread& thread);
// The same for 16 bytes on behalf of `count` threads. `visible` is what all of them were found to see so far: what is
// visible once stays so.
void note_agent_read_of_all(u32 offset, const Access& read, u32 first_thread, u32 count, Clock& visible);

void check_no_copies_left(const Thread& thread);

}  // namespace emulator
