// The threads that compute calls. Starting a thread takes longer than a small call, so a thread is kept for a second
// after its last call. In the first moments of that second it polls for the next call without sleeping.
#pragma once

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include "simd/processor.h"
#include "targets.h"

namespace {

constexpr long AWAKE_NS = 200'000;  // with 50'000, calls of 0.1 to 2 ms take up to 10 % longer; more gains nothing
constexpr long KEPT_MS = 1000;
constexpr long KEPT_BYTES = 4 << 20;  // of memory for jobs, between calls
constexpr long FAN_OUT = 4;           // threads that one thread wakes: each takes a system call

struct Running;

// A thread of the pool. When the thread ends, this struct is kept for the next thread, because a call that is over may
// still look at it.
struct Worker {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t woken = PTHREAD_COND_INITIALIZER;
    std::atomic<Running *> given{nullptr};  // the call that it is to take part in
    long index = 0;                         // among the workers of that call
    bool is_started = false;
    Worker *next = nullptr;  // in a list of the pool
    void *scratch = nullptr;
    long scratch_bytes = 0;
};

struct Pool {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    Worker *idle = nullptr;   // the one that was the last at work comes first
    Worker *ended = nullptr;  // without a thread
};
Pool pool;

// A call under way.
struct Running {
    Work work;
    const Kernels *kernels = nullptr;
    fenv_t rounding;  // of the thread that called
#if defined(__linux__)
    cpu_set_t cores;  // that it may use
#endif
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
    std::atomic<bool> out_of_memory{false};
    std::atomic<long> left{0};  // workers that have joined and are done
    long num_idle = 0;          // how many of its workers, the first ones, have to be woken
    long num_workers = 0;
    Worker *workers[];
};

inline long nanoseconds_now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000L + now.tv_nsec;
}

inline timespec after_milliseconds(long milliseconds) {
    timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += milliseconds % 1000 * 1'000'000L;
    until.tv_sec += milliseconds / 1000 + until.tv_nsec / 1'000'000'000L;
    until.tv_nsec %= 1'000'000'000L;
    return until;
}

void *allocate_scratch(long bytes) {
    void *memory = nullptr;
    return posix_memalign(&memory, 64, bytes + 64) ? nullptr : memory;
}

// ---- a call ---------------------------------------------------------------------------------------------------------

inline bool is_past(const Work &work, int phase) {
    return work.done[phase].load(std::memory_order_acquire) >= work.phases[phase].num_jobs ||
           work.stopped.load(std::memory_order_relaxed);
}

inline bool is_done(const Running &running) {
    const int num_phases = running.work.num_phases;
    return !num_phases || is_past(running.work, num_phases - 1);
}

void announce(Running &running) {
    pthread_mutex_lock(&running.mutex);
    pthread_cond_broadcast(&running.changed);
    pthread_mutex_unlock(&running.mutex);
}

void stop(Running &running) {
    running.work.stopped = true;
    announce(running);
}

// Returns when the condition is met. Every change of it is announced.
template <class Condition> void wait_until(Running &running, Condition is_met) {
    const long sleep_at = nanoseconds_now() + AWAKE_NS;
    while (!is_met() && nanoseconds_now() < sleep_at) rest();
    // The lock is taken even if there is nothing to wait for, because the announcing thread may still hold it.
    pthread_mutex_lock(&running.mutex);
    while (!is_met()) pthread_cond_wait(&running.changed, &running.mutex);
    pthread_mutex_unlock(&running.mutex);
}

// Computes jobs of a call until there are no more. All jobs of a phase are done before the next one begins.
void compute(Running &running, char *scratch) {
    Work &work = running.work;
    running.kernels->begin();
    for (int phase = 0; phase < work.num_phases; ++phase) {
        if (phase) wait_until(running, [&] { return is_past(work, phase - 1); });
        const long num_jobs = work.phases[phase].num_jobs;
        for (;;) {
            const long job = work.next[phase].fetch_add(1, std::memory_order_relaxed);
            if (job >= num_jobs || work.stopped.load(std::memory_order_relaxed)) break;
            work.phases[phase].run(work, scratch, job);
            if (work.done[phase].fetch_add(1, std::memory_order_acq_rel) + 1 == num_jobs) announce(running);
        }
    }
    running.kernels->end();
}

// ---- the pool -------------------------------------------------------------------------------------------------------

void push(Worker *&list, Worker &worker) {
    worker.next = list;
    list = &worker;
}

Worker *pop(Worker *&list) {
    Worker *worker = list;
    if (worker) list = worker->next;
    return worker;
}

void make_idle(Worker &worker) {
    pthread_mutex_lock(&pool.mutex);
    push(pool.idle, worker);
    pthread_mutex_unlock(&pool.mutex);
}

// Removes a worker from the idle ones for good; returns false if a call has taken it meanwhile.
bool retire(Worker &worker) {
    pthread_mutex_lock(&pool.mutex);
    Worker **at = &pool.idle;
    while (*at && *at != &worker) at = &(*at)->next;
    const bool is_idle = *at;
    if (is_idle) *at = worker.next;
    pthread_mutex_unlock(&pool.mutex);
    return is_idle;
}

void wake(Worker &worker) {
    pthread_mutex_lock(&worker.mutex);
    pthread_cond_signal(&worker.woken);
    pthread_mutex_unlock(&worker.mutex);
}

void wake_from(const Running &running, long first) {
    for (long i = first; i < first + FAN_OUT && i < running.num_idle; ++i) wake(*running.workers[i]);
}

// Accepts the call that a worker was given, so that `finish` can no longer take it back; null if there is none.
Running *accept(Worker &worker) {
    Running *running = worker.given.load(std::memory_order_acquire);
    return running && worker.given.compare_exchange_strong(running, nullptr) ? running : nullptr;
}

// The next call of a worker; null after a long time without one.
Running *wait_for_call(Worker &worker) {
    const long sleep_at = nanoseconds_now() + AWAKE_NS;
    for (;;) {
        if (Running *running = accept(worker)) return running;
        if (nanoseconds_now() >= sleep_at) break;
        rest();
    }
    for (;;) {
        const timespec until = after_milliseconds(KEPT_MS);
        int error = 0;
        Running *running;
        pthread_mutex_lock(&worker.mutex);
        while (!(running = accept(worker)) && error == 0)
            error = pthread_cond_timedwait(&worker.woken, &worker.mutex, &until);
        pthread_mutex_unlock(&worker.mutex);
        if (running || retire(worker)) return running;
    }
}

bool has_scratch(Worker &worker, long bytes) {
    if (worker.scratch_bytes >= bytes && worker.scratch) return true;
    free(worker.scratch);
    worker.scratch = allocate_scratch(bytes);
    worker.scratch_bytes = worker.scratch ? bytes : 0;
    return worker.scratch;
}

// Computes jobs of a call on a thread of the pool, on the cores and with the rounding of the thread that called.
void join(Worker &worker, Running &running) {
    wake_from(running, FAN_OUT * (worker.index + 1));
#if defined(__linux__)
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) == 0 && !CPU_EQUAL(&cores, &running.cores))
        sched_setaffinity(0, sizeof cores, &running.cores);
#endif
    fesetenv(&running.rounding);
    if (has_scratch(worker, running.work.scratch_bytes)) {
        compute(running, (char *)worker.scratch);
    } else {
        running.out_of_memory = true;
        stop(running);
    }
    if (worker.scratch_bytes > KEPT_BYTES) {
        free(worker.scratch);
        worker.scratch = nullptr;
    }
}

void *run_worker(void *argument) {
    Worker &worker = *(Worker *)argument;
    // Signals, except for faults, are left to the threads of the program.
    sigset_t signals;
    sigfillset(&signals);
    constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    for (int fault : FAULTS) sigdelset(&signals, fault);
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    while (Running *running = wait_for_call(worker)) {
        join(worker, *running);
        make_idle(worker);  // before the call ends, so that the next call finds it
        pthread_mutex_lock(&running->mutex);
        ++running->left;
        pthread_cond_broadcast(&running->changed);
        pthread_mutex_unlock(&running->mutex);
    }
    free(worker.scratch);
    worker.scratch = nullptr;
    pthread_mutex_lock(&pool.mutex);
    push(pool.ended, worker);
    pthread_mutex_unlock(&pool.mutex);
    return nullptr;
}

// A child of fork has the thread that forked, and none of the pool.
void forget_threads_in_children() {
    auto lock = [] { pthread_mutex_lock(&pool.mutex); };
    auto unlock = [] { pthread_mutex_unlock(&pool.mutex); };
    auto forget = [] { new (&pool) Pool; };
    pthread_atfork(lock, unlock, forget);
}

bool start_thread(Worker &worker) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    const int error = pthread_create(&thread, &attributes, run_worker, &worker);
    pthread_attr_destroy(&attributes);
    return error == 0;
}

// Gives a call to `wanted` workers, or to as many as there can be.
void give(Running &running, long wanted) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, forget_threads_in_children);
    fegetenv(&running.rounding);
#if defined(__linux__)
    sched_getaffinity(0, sizeof running.cores, &running.cores);
#endif
    long count = 0;
    pthread_mutex_lock(&pool.mutex);
    while (count < wanted && pool.idle) running.workers[count++] = pop(pool.idle);
    running.num_idle = count;
    while (count < wanted) {
        Worker *worker = pop(pool.ended);
        if (!worker) {
            void *memory = malloc(sizeof(Worker));
            if (!memory) break;
            worker = new (memory) Worker;
        }
        running.workers[count++] = worker;
    }
    pthread_mutex_unlock(&pool.mutex);
    running.num_workers = count;
    // Backwards, because a worker wakes others of higher indices, which have to have been given the call by then.
    for (long i = count - 1; i >= 0; --i) {
        running.workers[i]->index = i;
        running.workers[i]->given.store(&running, std::memory_order_release);
    }
    wake_from(running, 0);
    for (long i = running.num_idle; i < count; ++i) {
        running.workers[i]->is_started = true;
        if (!start_thread(*running.workers[i])) running.workers[i]->is_started = false;
    }
}

// Ends a call: takes it back from workers that have not begun, and waits for the others.
void finish(Running &running) {
    long num_begun = running.num_workers;
    if (!num_begun) return;
    for (long i = 0; i < running.num_workers; ++i) {
        Worker &worker = *running.workers[i];
        Running *expected = &running;
        if (!worker.given.compare_exchange_strong(expected, nullptr)) continue;
        --num_begun;
        pthread_mutex_lock(&pool.mutex);
        push(worker.is_started ? pool.idle : pool.ended, worker);
        pthread_mutex_unlock(&pool.mutex);
    }
    wait_until(running, [&] { return running.left == num_begun; });
}

}  // namespace
