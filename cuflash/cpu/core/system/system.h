// What the core needs of the operating system: threads, locks, clocks, aligned memory. `posix.h` and `windows.h` have
// the same names.
#pragma once

#if defined(_WIN32)
#include "windows.h"
#else
#include "posix.h"
#endif
