// The shared memory of the running block, with a record of who touched what since when.
#pragma once
#include "scheduler.h"

namespace emulator {

// The shared window starts with a kilobyte that belongs to the system, as on the hardware: address 0 is never valid.
constexpr u32 kSharedBase = 1024;

// Fresh storage for the next block: NaN bits, never written.
void reset_shared_memory();

// The 16 bytes of a matrix row, read by a whole warp; `thread` passed the address.
const u8* read_matrix_row(u32 address, const Thread& thread, Site site);

void check_no_copies_left(const Thread& thread);

}  // namespace emulator
