// Fibers: stacks that are switched by hand, one per thread of the block.
#pragma once
#include "interface.h"

#if !defined(__x86_64__) || defined(EMULATOR_UCONTEXT)
#define EMULATOR_USES_UCONTEXT 1
#include <ucontext.h>
#endif

namespace emulator {

class Fiber {
 public:
  // Stands for the fiber of the caller, and owns no stack.
  Fiber() = default;
  // A fiber with a stack of its own. `color` spreads the stacks over the sets of the cache.
  explicit Fiber(u32 color);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next switch to this fiber calls `entry`, which never returns. Whatever the stack held is gone: it reads as NaN.
  void prepare(void (*entry)());

  static void switch_between(Fiber& from, Fiber& to);

 private:
  void erase_used_stack();

  u8* mapping_ = nullptr;
  u8* top_ = nullptr;
  u8* lowest_used_ = nullptr;
#ifdef EMULATOR_USES_UCONTEXT
  ucontext_t context_;
#else
  void* stack_pointer_ = nullptr;
#endif
};

}  // namespace emulator
