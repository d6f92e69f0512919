// What the 128 threads of a warpgroup do together: products and register budgets.
#pragma once
#include "scheduler.h"

namespace emulator {

void reset_warpgroups();
void check_no_products_left(const Thread& thread);

}  // namespace emulator
