// Copies that run by themselves: loads that count on a barrier, and a thread's groups of stores and reductions.
#pragma once
#include "scheduler.h"

namespace emulator {

void reset_tma();

// Loads arrive when no thread can run, and under a random order at any time.
void land_loads();

void check_no_loads_left();
void finish_bulk_stores(Thread& thread);

}  // namespace emulator
