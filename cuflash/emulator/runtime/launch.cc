// A launch: the blocks, or clusters of them, one after another, with faults and endless loops turned into reports.
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "arrivals.h"
#include "shared_memory.h"

namespace emulator {
namespace {

constexpr u32 kMaxSharedBytes = 227 * 1024;  // opt-in limit of one block on the largest device
constexpr int kWatchdogSignal = SIGVTALRM;
constexpr int kFaultSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};

void* program_counter(void* context) {
#if defined(__x86_64__)
  return (void*)static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
  return (void*)static_cast<ucontext_t*>(context)->uc_mcontext.pc;
#else
  (void)context;
  return nullptr;
#endif
}

// Finds the instruction that faulted, if it is one of the kernel's own. A fault in a function that the kernel called is
// told by its site.
void note_fault_location(void* context) {
  Dl_info of_kernel, of_fault;
  void* instruction = program_counter(context);
  if (!instruction || !dladdr(instruction, &of_fault)) return;
  if (!dladdr((void*)block.kernel->thread_body, &of_kernel) || of_kernel.dli_fbase != of_fault.dli_fbase) return;
  snprintf(block.report->fault_module, sizeof block.report->fault_module, "%s", of_fault.dli_fname);
  block.report->fault_offset = (u64)instruction - (u64)of_fault.dli_fbase;
}

void on_fault(int signal_number, siginfo_t* info, void* context) {
  if (!block.current) {  // the kernel did not cause it
    signal(signal_number, SIG_DFL);
    return;
  }
  note_fault_location(context);
  const Thread& thread = *block.current;
  switch (signal_number) {
    case SIGFPE:
      fail(thread, thread.site, "integer division by zero");
    case SIGILL:
      fail(thread, thread.site, "undefined behaviour, found by the sanitizer");
    default:
      fail(thread, thread.site, "invalid memory access at %p", info->si_addr);
  }
}

void on_watchdog(int, siginfo_t*, void* context) {
  if (!block.current) return;
  note_fault_location(context);
  fail(*block.current, block.current->site, "watchdog: the block ran for more than %g s of CPU time: endless loop?",
       block.options.watchdog_seconds);
}

// Catches faults of this thread for as long as it lives.
class SignalGuard {
 public:
  SignalGuard() {
    static u8 stack[64 * 1024];
    stack_t alternate = {};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, &previous_stack_);
    struct sigaction action = {};
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    action.sa_sigaction = on_fault;
    for (int i = 0; i < kFaults; ++i) sigaction(kFaultSignals[i], &action, &previous_[i]);
    action.sa_sigaction = on_watchdog;
    sigaction(kWatchdogSignal, &action, &previous_watchdog_);

    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = kWatchdogSignal;
    event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
    timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_);
  }
  ~SignalGuard() {
    timer_delete(timer_);
    sigaction(kWatchdogSignal, &previous_watchdog_, nullptr);
    for (int i = 0; i < kFaults; ++i) sigaction(kFaultSignals[i], &previous_[i], nullptr);
    sigaltstack(&previous_stack_, nullptr);
  }

  void restart_watchdog(double seconds) {
    itimerspec time = {};
    time.it_value.tv_sec = (time_t)seconds;
    time.it_value.tv_nsec = (long)((seconds - (double)time.it_value.tv_sec) * 1e9);
    timer_settime(timer_, 0, &time, nullptr);
  }

 private:
  static constexpr int kFaults = sizeof kFaultSignals / sizeof *kFaultSignals;
  stack_t previous_stack_;
  struct sigaction previous_[kFaults];
  struct sigaction previous_watchdog_;
  timer_t timer_;
};

std::vector<u32> block_order(const LaunchOptions& options) {
  const u32 cluster = block.kernel->cluster, count = options.grid / cluster;
  std::vector<u32> order(count);
  for (u32 i = 0; i < count; ++i) order[i] = i * cluster;
  if (options.in_turn || options.counted) return order;
  if ((Order)options.order == Order::kReversed) std::vector<u32>(order.rbegin(), order.rend()).swap(order);
  if ((Order)options.order == Order::kRandom)
    for (u32 i = count; i > 1; --i) std::swap(order[i - 1], order[next_random() % i]);
  return order;
}

int refuse(Report& report, const char* message, u64 got, u64 allowed) {
  snprintf(report.message, sizeof report.message, "%s: %llu, allowed %llu", message, got, allowed);
  return 1;
}

}  // namespace

int launch(const Kernel& kernel, const void* params, u64 params_bytes, const LaunchOptions& options, Report& report) {
  report = {};
  if (params_bytes != kernel.params_bytes)
    return refuse(report, "size of the parameter struct", params_bytes, kernel.params_bytes);
  if (options.threads == 0 || options.threads % kWarpLanes || options.threads > kernel.max_threads)
    return refuse(report, "threads of a block (a multiple of 32)", options.threads, kernel.max_threads);
  if (options.grid % kernel.cluster) return refuse(report, "blocks, in clusters", options.grid, kernel.cluster);
  if (kernel.cluster > kMaxCluster || options.threads * kernel.cluster > kMaxThreads)
    return refuse(report, "threads of a cluster", options.threads * kernel.cluster, kMaxThreads);
  if (options.shared_bytes > kMaxSharedBytes)
    return refuse(report, "bytes of shared memory", options.shared_bytes, kMaxSharedBytes);

  block.kernel = &kernel;
  block.params = params;
  block.options = options;
  block.report = &report;
  block.failed = false;
  block.random_state = options.seed * 2654435761u + 12345;
  block.statistics = {};
  const u32 threads = options.threads * kernel.cluster;
  while (block.threads.size() > threads) block.threads.pop_back();
  while (block.threads.size() < threads) block.threads.push_back(std::make_unique<Thread>((u32)block.threads.size()));

  {
    SignalGuard guard;
    forget_counts();
    for (u32 index : block_order(options)) {
      guard.restart_watchdog(options.watchdog_seconds);
      reset_shared_memory();
      if (!run_block(index)) break;
    }
  }
  report.statistics = block.statistics;
  return block.failed;
}

}  // namespace emulator
