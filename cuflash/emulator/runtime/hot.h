// The hot loops are plain C++; the best instruction set of the machine is chosen when the library is loaded.
#pragma once

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
#define EMULATOR_HOT __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EMULATOR_HOT
#endif
