// What blocks that add to global memory wait for: counts, and turns.
#pragma once
#include "scheduler.h"

namespace emulator {

void reset_turns();
// The thread adds to global memory: it must know of the turn that the block has waited for, and have waited for a
// count.
void check_turn(const Thread& thread, Site site);

}  // namespace emulator
