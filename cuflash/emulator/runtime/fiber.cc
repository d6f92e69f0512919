#include "fiber.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>

#include "shared_memory.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace emulator {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kStackBytes = 32 * kPage;
constexpr size_t kMappingBytes = kPage + kStackBytes;  // the lowest page stays inaccessible
// Functions that a kernel calls reach below the lowest stack pointer seen at a switch.
constexpr size_t kBelowSwitch = 2048;

}  // namespace

#ifndef EMULATOR_USES_UCONTEXT
extern "C" void emulator_switch_stack(void** saved_stack_pointer, void* stack_pointer);
asm(R"(
.text
.local emulator_switch_stack
.type emulator_switch_stack, @function
emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch_stack, . - emulator_switch_stack
)");
#endif

Fiber::Fiber(u32 color) {
  void* mapping = mmap(nullptr, kMappingBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<u8*>(mapping);
  mprotect(mapping_, kPage, PROT_NONE);
  // Without the offset the same variable of every thread would compete for the same few cache lines.
  top_ = mapping_ + kMappingBytes - color * 320 % kPage / 64 * 64;
  lowest_used_ = mapping_ + kPage;
}

Fiber::~Fiber() {
  if (mapping_) munmap(mapping_, kMappingBytes);
}

void Fiber::erase_used_stack() {
  u8* bottom = mapping_ + kPage;
  u8* from = lowest_used_ - bottom > (long)kBelowSwitch ? lowest_used_ - kBelowSwitch : bottom;
#if defined(__SANITIZE_ADDRESS__)
  from = bottom;
  __asan_unpoison_memory_region(bottom, kStackBytes);
#endif
  memset(from, kPoison, top_ - from);
  lowest_used_ = top_;
}

void Fiber::prepare(void (*entry)()) {
  erase_used_stack();
#ifdef EMULATOR_USES_UCONTEXT
  getcontext(&context_);
  context_.uc_stack.ss_sp = mapping_ + kPage;
  context_.uc_stack.ss_size = top_ - (mapping_ + kPage);
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
#else
  // Six saved registers, the address that the switch returns to, and a return address of zero for that function, which
  // ends a backtrace. The stack pointer is then 8 modulo 16, as after a call.
  constexpr size_t kSavedRegisters = 6;
  constexpr size_t kWords = kSavedRegisters + 2;
  void** frame = reinterpret_cast<void**>(top_) - kWords;
  memset(frame, 0, kWords * sizeof(void*));
  frame[kSavedRegisters] = reinterpret_cast<void*>(entry);
  stack_pointer_ = frame;
#endif
}

void Fiber::switch_between(Fiber& from, Fiber& to) {
  u8* here = static_cast<u8*>(__builtin_frame_address(0));
  if (here < from.lowest_used_) from.lowest_used_ = here;
#ifdef EMULATOR_USES_UCONTEXT
  swapcontext(&from.context_, &to.context_);
#else
  emulator_switch_stack(&from.stack_pointer_, to.stack_pointer_);
#endif
}

}  // namespace emulator
