// Windows, from version 7 on.
#pragma once

#define WIN32_LEAN_AND_MEAN
#if !defined(NOMINMAX)
#define NOMINMAX
#endif
#if !defined(_WIN32_WINNT)
#define _WIN32_WINNT 0x0601
#endif
#include <malloc.h>
#include <process.h>
#include <windows.h>
// Words of that header that the core has meanings for.
#undef IN
#undef OUT
#undef UNALIGNED

#include <cstdint>
#include <cstdlib>

#define EXPORTED extern "C" __declspec(dllexport)

namespace {

// ---- memory ---------------------------------------------------------------------------------------------------------

inline void *allocate_aligned(int64_t alignment, int64_t bytes) { return _aligned_malloc(bytes, alignment); }
inline void free_aligned(void *memory) { _aligned_free(memory); }

// ---- time -----------------------------------------------------------------------------------------------------------

inline int64_t nanoseconds_now() {
    LARGE_INTEGER now, per_second;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&per_second);
    const int64_t seconds = now.QuadPart / per_second.QuadPart, rest = now.QuadPart % per_second.QuadPart;
    return seconds * 1'000'000'000 + rest * 1'000'000'000 / per_second.QuadPart;
}

// Until when a thread waits, by `nanoseconds_now`.
typedef int64_t Deadline;

inline Deadline after_milliseconds(int64_t milliseconds) { return nanoseconds_now() + milliseconds * 1'000'000; }

// ---- locks ----------------------------------------------------------------------------------------------------------

struct Mutex {
    SRWLOCK own = SRWLOCK_INIT;
    void lock() { AcquireSRWLockExclusive(&own); }
    void unlock() { ReleaseSRWLockExclusive(&own); }
};

struct Condition {
    CONDITION_VARIABLE own = CONDITION_VARIABLE_INIT;
    void notify_one() { WakeConditionVariable(&own); }
    void notify_all() { WakeAllConditionVariable(&own); }
    void wait(Mutex &mutex) { SleepConditionVariableSRW(&own, &mutex.own, INFINITE, 0); }
    // Returns false if it is past the deadline.
    bool wait(Mutex &mutex, Deadline until) {
        const int64_t left = until - nanoseconds_now();
        return left > 0 && SleepConditionVariableSRW(&own, &mutex.own, DWORD((left + 999'999) / 1'000'000), 0);
    }
};

struct Once {
    INIT_ONCE own = INIT_ONCE_STATIC_INIT;
    void run(void (*function)()) {
        auto call = [](INIT_ONCE *, void *given, void **) -> BOOL { return ((void (*)())given)(), TRUE; };
        InitOnceExecuteOnce(&own, call, (void *)function, nullptr);
    }
};

// ---- threads --------------------------------------------------------------------------------------------------------

// Starts a thread that nobody joins; returns false if there can be none.
template <void (*RUN)(void *)> bool start_thread(void *argument) {
    struct Entry {
        static unsigned __stdcall run(void *given) { return RUN(given), 0; }
    };
    const uintptr_t thread = _beginthreadex(nullptr, 0, Entry::run, argument, 0, nullptr);
    if (thread) CloseHandle((HANDLE)thread);
    return thread;
}

// Lets other threads of this core run.
inline void yield_core() { SwitchToThread(); }

inline void block_signals() {}                              // Ctrl-C starts a thread of its own
inline void at_fork(void (*)(), void (*)(), void (*)()) {}  // there is no fork

// The system moves threads to other cores by itself.
inline int core_of_thread() { return -1; }
struct Thread {
    static Thread current() { return {}; }
    int64_t nanoseconds_run() const { return -1; }
};

// The cores that a thread may use: of one group of up to 64, as threads are.
struct Cores {
    GROUP_AFFINITY own;
    // Those of this thread; returns false if they are not known.
    bool load() { return GetThreadGroupAffinity(GetCurrentThread(), &own); }
    // Has this thread use them.
    void use() const {
        GROUP_AFFINITY cores;
        if (GetThreadGroupAffinity(GetCurrentThread(), &cores) && (cores.Mask != own.Mask || cores.Group != own.Group))
            SetThreadGroupAffinity(GetCurrentThread(), &own, nullptr);
    }
    bool has(int) const { return false; }
    bool move(Thread, int) const { return false; }
};

// Memory of each thread, which goes when the thread ends.
struct ThreadMemory {
    DWORD key = FLS_OUT_OF_INDEXES;
    static void __stdcall release(void *memory) { free_aligned(memory); }
    void make() { key = FlsAlloc(release); }
    void *get() const { return key == FLS_OUT_OF_INDEXES ? nullptr : FlsGetValue(key); }
    bool set(void *memory) const { return key != FLS_OUT_OF_INDEXES && FlsSetValue(key, memory); }
};

}  // namespace
