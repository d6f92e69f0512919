// Turns that blocks take to add to global memory.
#pragma once
#include "scheduler.h"

namespace emulator {

void reset_turns();
// The thread adds to global memory: it must know of the turn that the block has waited for.
void check_turn(const Thread& thread, Site site);

}  // namespace emulator
