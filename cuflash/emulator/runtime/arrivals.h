// Results that blocks leave for one another, and counts of the blocks that have done so.
#pragma once
#include "scheduler.h"

namespace emulator {

void forget_counts();   // forgets the counts of earlier launches
void reset_arrivals();  // forgets the arrivals of the block that ran before

}  // namespace emulator
