// Linux, macOS and other systems by POSIX.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <cstdint>
#include <cstdlib>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

// ---- memory ---------------------------------------------------------------------------------------------------------

// Returns null if there is none left.
inline void *allocate_aligned(int64_t alignment, int64_t bytes) {
    void *memory = nullptr;
    return posix_memalign(&memory, alignment, bytes) ? nullptr : memory;
}

inline void free_aligned(void *memory) { free(memory); }

// ---- time -----------------------------------------------------------------------------------------------------------

inline int64_t nanoseconds_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1'000'000'000) + now.tv_nsec;
}

// Until when a thread waits.
typedef timespec Deadline;

inline Deadline after_milliseconds(int64_t milliseconds) {
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    const int64_t nanoseconds = until.tv_nsec + milliseconds % 1000 * 1'000'000;
    until.tv_sec += milliseconds / 1000 + nanoseconds / 1'000'000'000;
    until.tv_nsec = nanoseconds % 1'000'000'000;
    return until;
}

// ---- locks ----------------------------------------------------------------------------------------------------------

struct Mutex {
    pthread_mutex_t own = PTHREAD_MUTEX_INITIALIZER;
    void lock() { pthread_mutex_lock(&own); }
    void unlock() { pthread_mutex_unlock(&own); }
};

struct Condition {
    pthread_cond_t own = PTHREAD_COND_INITIALIZER;
    void notify_one() { pthread_cond_signal(&own); }
    void notify_all() { pthread_cond_broadcast(&own); }
    void wait(Mutex &mutex) { pthread_cond_wait(&own, &mutex.own); }
    // Returns false if it is past the deadline.
    bool wait(Mutex &mutex, const Deadline &until) { return pthread_cond_timedwait(&own, &mutex.own, &until) == 0; }
};

struct Once {
    pthread_once_t own = PTHREAD_ONCE_INIT;
    void run(void (*function)()) { pthread_once(&own, function); }
};

// ---- threads --------------------------------------------------------------------------------------------------------

// Starts a thread that nobody joins; returns false if there can be none.
template <void (*RUN)(void *)> bool start_thread(void *argument) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    auto run = [](void *given) -> void * { return RUN(given), nullptr; };
    const int error = pthread_create(&thread, &attributes, run, argument);
    pthread_attr_destroy(&attributes);
    return error == 0;
}

// Lets other threads of this core run.
inline void yield_core() { sched_yield(); }

// Leaves signals, except for faults, to other threads.
inline void block_signals() {
    sigset_t signals;
    sigfillset(&signals);
    constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    for (int fault : FAULTS) sigdelset(&signals, fault);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

// Calls these functions before a fork, and after it in the parent and in the child.
inline void at_fork(void (*before)(), void (*parent)(), void (*child)()) { pthread_atfork(before, parent, child); }

// The core that this thread is on, or -1 where the system does not say.
inline int core_of_thread() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

// A thread, for others to look at while it is sure to live.
struct Thread {
    pthread_t own{};

    static Thread current() { return {pthread_self()}; }
    // How long it has run on a core, or -1 where the system does not say.
    int64_t nanoseconds_run() const {
#if defined(__linux__)
        clockid_t clock;
        timespec run;
        if (pthread_getcpuclockid(own, &clock) == 0 && clock_gettime(clock, &run) == 0)
            return run.tv_sec * INT64_C(1'000'000'000) + run.tv_nsec;
#endif
        return -1;
    }
};

// The cores that a thread may use, where the system lets a program choose them.
struct Cores {
#if defined(__linux__)
    cpu_set_t own;
    // Those of this thread; returns false if they are not known.
    bool load() { return sched_getaffinity(0, sizeof own, &own) == 0; }
    // Has this thread use them.
    void use() const {
        cpu_set_t cores;
        if (sched_getaffinity(0, sizeof cores, &cores) == 0 && !CPU_EQUAL(&cores, &own))
            sched_setaffinity(0, sizeof own, &own);
    }
    bool has(int core) const { return CPU_ISSET(core, &own); }
    // Moves a thread, which may use these cores, to one of them. It may use the others all the same.
    bool move(Thread thread, int core) const {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(core, &one);
        return pthread_setaffinity_np(thread.own, sizeof one, &one) == 0 &&
               pthread_setaffinity_np(thread.own, sizeof own, &own) == 0;
    }
#else
    bool load() { return false; }
    void use() const {}
    bool has(int) const { return false; }
    bool move(Thread, int) const { return false; }
#endif
};

// Memory of each thread, which goes when the thread ends.
struct ThreadMemory {
    pthread_key_t key{};
    bool has_key = false;  // there may be too many of others
    void make() { has_key = pthread_key_create(&key, free_aligned) == 0; }
    void *get() const { return has_key ? pthread_getspecific(key) : nullptr; }
    bool set(void *memory) const { return has_key && pthread_setspecific(key, memory) == 0; }
};

}  // namespace
