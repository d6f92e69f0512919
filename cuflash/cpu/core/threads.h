// The threads that compute calls. Starting a thread takes longer than a small call, so a thread is kept for a second
// after its last call. In the first moments of that second it polls for the next call without sleeping.
#pragma once

#include <fenv.h>

#include "simd/processor.h"
#include "system/system.h"
#include "targets.h"

namespace {

constexpr int64_t AWAKE_NS = 200'000;  // with 50'000, calls of 0.1 to 2 ms take up to 10 % longer; more gains nothing
constexpr int64_t LOOK_NS = 60'000;    // how often a thread that waits looks whether those that it waits for run
constexpr int64_t LAST_LOOK_NS = 150'000;  // how long a worker without jobs does so before it leaves the call
constexpr int64_t KEPT_MS = 1000;
constexpr int64_t KEPT_BYTES = 4 << 20;  // of memory for jobs, between calls
constexpr int64_t FAN_OUT = 4;           // threads that one thread wakes: each takes a system call

struct Running;

// A thread that takes part in a call, and, under the lock of that call, what other threads of the call know of it.
struct Participant {
    Thread thread;
    std::atomic<Running *> at_jobs_of{nullptr};
    int core = -1;                     // that it is counted on
    int64_t seen_at = 0, seen_ns = 0;  // when another thread looked at it, and how long it had run
};

// A thread of the pool. When the thread ends, this struct is kept for the next thread, because a call that is over may
// still look at it.
struct Worker : Participant {
    Mutex mutex;
    Condition woken;
    std::atomic<Running *> given{nullptr};  // the call that it is to take part in
    int64_t index = 0;                      // among the workers of that call
    bool is_started = false;
    bool has_lent = false;   // its core, to a thread of its last call
    Worker *next = nullptr;  // in a list of the pool
    void *scratch = nullptr;
    int64_t scratch_bytes = 0;
};

struct Pool {
    Mutex mutex;
    Worker *idle = nullptr;   // the one that was the last at work comes first
    Worker *ended = nullptr;  // without a thread
};
Pool pool;

// A call under way.
struct Running {
    Work work;
    const Kernels *kernels = nullptr;
    fenv_t rounding;  // of the thread that called
    Cores cores;      // that it may use
    Participant caller;
    Mutex mutex;
    Condition changed;
    std::atomic<bool> out_of_memory{false};
    std::atomic<int64_t> left{0};  // workers that have joined and are done
    int64_t num_idle = 0;          // how many of its workers, the first ones, have to be woken
    int64_t num_workers = 0;
    Worker *workers[];
};

void *allocate_scratch(int64_t bytes) { return allocate_aligned(64, bytes + 64); }

// ---- cores ----------------------------------------------------------------------------------------------------------

constexpr int MOST_CORES = 1024;

// How many threads of calls are on each core. Where threads of other libraries spin on all other cores, Linux wakes a
// thread on the core of the one that wakes it, and leaves both there: a call would take as long as on one thread. So a
// worker leaves a core that another thread of a call is on for one that none is on, and shares it with what spins
// there.
std::atomic<int32_t> num_computing[MOST_CORES];

// Counts a thread that calls on its core. Returns the core, or -1 if it is not known.
int enter_core() {
    const int core = core_of_thread();
    if (core < 0 || core >= MOST_CORES) return -1;
    ++num_computing[core];
    return core;
}

void leave_core(int core) {
    if (core >= 0) --num_computing[core];
}

// The same for a worker, which first leaves a core that is taken, if it may use one that is not.
int enter_free_core() {
    const int core = enter_core();
    if (core < 0 || num_computing[core].load() == 1) return core;
    Cores own;
    if (!own.load()) return core;
    for (int i = 1; i < MOST_CORES; ++i) {
        const int other = (core + i) % MOST_CORES;
        int32_t none = 0;
        if (!own.has(other) || !num_computing[other].compare_exchange_strong(none, 1)) continue;
        leave_core(core);
        own.move(Thread::current(), other);
        return other;
    }
    return core;
}

// Where a thread of a call waits for the last jobs of others: if one of these has a job and does not run, because the
// system gave its core to another program for some milliseconds, it gets the core of this thread, which then sleeps.
// The lock of the call is held. Returns whether there was such a thread.
bool lend_core(Running &running, Participant &self) {
    const int here = core_of_thread();
    const int64_t now = nanoseconds_now();
    auto lend = [&](Participant &other) {
        if (&other == &self || other.at_jobs_of.load() != &running || now - other.seen_at < LOOK_NS / 2) return false;
        const int64_t ran_ns = other.thread.nanoseconds_run();
        const bool runs = ran_ns < 0 || !other.seen_at || ran_ns - other.seen_ns > (now - other.seen_at) / 2;
        other.seen_at = now;
        other.seen_ns = ran_ns;
        if (runs || !running.cores.move(other.thread, here)) return false;
        const int core = other.core;
        if (self.core >= 0) other.core = self.core, self.core = core;
        return true;
    };
    if (here < 0) return false;
    for (int64_t i = 0; i < running.num_workers; ++i)
        if (lend(*running.workers[i])) return true;
    return lend(running.caller);
}

// ---- a call ---------------------------------------------------------------------------------------------------------

inline bool is_past(const Work &work, const Phase &phase) {
    return phase.done.load(std::memory_order_acquire) >= phase.num_jobs || work.stopped.load(std::memory_order_relaxed);
}

inline bool is_done(const Running &running) {
    const Work &work = running.work;
    return !work.num_phases || is_past(work, work.phases[work.num_phases - 1]);
}

void announce(Running &running) {
    running.mutex.lock();
    running.changed.notify_all();
    running.mutex.unlock();
}

void stop(Running &running) {
    running.work.stopped = true;
    announce(running);
}

// Polls until the condition is met, at most so long, or until this thread has lent its core; returns whether it has.
template <class Condition> bool poll_until(Running &running, Participant &self, int64_t nanoseconds, Condition is_met) {
    const int64_t begun = nanoseconds_now();
    int64_t look_at = begun + LOOK_NS;
    for (int64_t now = begun; !is_met() && now < begun + nanoseconds; now = nanoseconds_now()) {
        rest();
        if (now < look_at) continue;
        look_at = now + LOOK_NS;
        running.mutex.lock();
        const bool is_lent = lend_core(running, self);
        running.mutex.unlock();
        if (is_lent) return true;
    }
    return false;
}

// Returns when the condition is met, and whether the thread has slept. Every change of it is announced.
template <class Condition> bool wait_until(Running &running, Participant &self, Condition is_met) {
    poll_until(running, self, AWAKE_NS, is_met);
    bool has_slept = false;
    // The lock is taken even if there is nothing to wait for, because the announcing thread may still hold it.
    running.mutex.lock();
    for (; !is_met(); has_slept = true)
        if (!running.changed.wait(running.mutex, after_milliseconds(1))) lend_core(running, self);
    running.mutex.unlock();
    return has_slept;
}

// Sets whether a thread has jobs of a call. Others look at it under the lock.
void set_at_jobs(Running &running, Participant &self, bool is_at_jobs) {
    running.mutex.lock();
    self.at_jobs_of = is_at_jobs ? &running : nullptr;
    running.mutex.unlock();
}

// Computes jobs of a call until there are no more. All jobs of a phase are done before the next one begins.
void compute(Running &running, Participant &self, char *scratch) {
    Work &work = running.work;
    running.kernels->begin();
    if (work.packed.are_held) *(int64_t *)scratch = NO_HEAD;
    for (int i = 0; i < work.num_phases; ++i) {
        Phase &phase = work.phases[i];
        if (i && wait_until(running, self, [&] { return is_past(work, work.phases[i - 1]); })) {
            leave_core(self.core);  // it may have lent it
            self.core = enter_free_core();
        }
        const int64_t num_jobs = phase.num_jobs;
        set_at_jobs(running, self, true);
        for (;;) {
            const int64_t job = phase.next.fetch_add(1, std::memory_order_relaxed);
            if (job >= num_jobs || work.stopped.load(std::memory_order_relaxed)) break;
            phase.run(work, scratch, job);
            if (phase.done.fetch_add(1, std::memory_order_acq_rel) + 1 == num_jobs) announce(running);
        }
        set_at_jobs(running, self, false);
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
    pool.mutex.lock();
    push(pool.idle, worker);
    pool.mutex.unlock();
}

// Removes a worker from the idle ones for good; returns false if a call has taken it meanwhile.
bool retire(Worker &worker) {
    pool.mutex.lock();
    Worker **at = &pool.idle;
    while (*at && *at != &worker) at = &(*at)->next;
    const bool is_idle = *at;
    if (is_idle) *at = worker.next;
    pool.mutex.unlock();
    return is_idle;
}

void wake(Worker &worker) {
    worker.mutex.lock();
    worker.woken.notify_one();
    worker.mutex.unlock();
}

void wake_from(const Running &running, int64_t first) {
    for (int64_t i = first; i < first + FAN_OUT && i < running.num_idle; ++i) wake(*running.workers[i]);
}

// Accepts the call that a worker was given, so that `finish` can no longer take it back; null if there is none. Before
// that it goes to its core, where it may have to wait for its time slice: no call waits for it then.
Running *accept(Worker &worker) {
    Running *running = worker.given.load(std::memory_order_acquire);
    if (!running) return nullptr;
    worker.core = enter_free_core();
    worker.seen_at = 0;
    if (worker.given.compare_exchange_strong(running, nullptr)) return running;
    leave_core(worker.core);
    return nullptr;
}

// The next call of a worker; null after a long time without one.
Running *wait_for_call(Worker &worker) {
    const int64_t sleep_at = nanoseconds_now() + (worker.has_lent ? 0 : AWAKE_NS);
    for (;;) {
        if (Running *running = accept(worker)) return running;
        if (nanoseconds_now() >= sleep_at) break;
        rest();
    }
    for (;;) {
        const Deadline until = after_milliseconds(KEPT_MS);
        bool is_early = true;
        Running *running;
        worker.mutex.lock();
        while (!(running = accept(worker)) && is_early) is_early = worker.woken.wait(worker.mutex, until);
        worker.mutex.unlock();
        if (running || retire(worker)) return running;
    }
}

bool has_scratch(Worker &worker, int64_t bytes) {
    if (worker.scratch_bytes >= bytes && worker.scratch) return true;
    free_aligned(worker.scratch);
    worker.scratch = allocate_scratch(bytes);
    worker.scratch_bytes = worker.scratch ? bytes : 0;
    return worker.scratch;
}

// Computes jobs of a call on a thread of the pool, on the cores and with the rounding of the thread that called.
void join(Worker &worker, Running &running) {
    wake_from(running, FAN_OUT * (worker.index + 1));
    running.cores.use();
    fesetenv(&running.rounding);
    if (has_scratch(worker, running.work.scratch_bytes)) {
        compute(running, worker, (char *)worker.scratch);
        set_at_jobs(running, worker, true);
        worker.has_lent = poll_until(running, worker, LAST_LOOK_NS, [&] { return is_done(running); });
        set_at_jobs(running, worker, false);
    } else {
        running.out_of_memory = true;
        stop(running);
    }
    if (worker.scratch_bytes > KEPT_BYTES) {
        free_aligned(worker.scratch);
        worker.scratch = nullptr;
    }
}

void run_worker(void *argument) {
    Worker &worker = *(Worker *)argument;
    block_signals();
    worker.thread = Thread::current();
    while (Running *running = wait_for_call(worker)) {
        join(worker, *running);
        leave_core(worker.core);
        make_idle(worker);  // before the call ends, so that the next call finds it
        running->mutex.lock();
        ++running->left;
        running->changed.notify_all();
        running->mutex.unlock();
    }
    free_aligned(worker.scratch);
    worker.scratch = nullptr;
    pool.mutex.lock();
    push(pool.ended, worker);
    pool.mutex.unlock();
}

// A child of fork has the thread that forked, and none of the pool.
void forget_threads_in_children() {
    at_fork([] { pool.mutex.lock(); }, [] { pool.mutex.unlock(); },
            [] {
                new (&pool) Pool;
                for (std::atomic<int32_t> &count : num_computing) count = 0;
            });
}

// Gives a call to `wanted` workers, or to as many as there can be.
void give(Running &running, int64_t wanted) {
    static Once once;
    once.run(forget_threads_in_children);
    fegetenv(&running.rounding);
    running.cores.load();
    running.caller.thread = Thread::current();
    int64_t count = 0;
    pool.mutex.lock();
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
    pool.mutex.unlock();
    running.num_workers = count;
    // Backwards, because a worker wakes others of higher indices, which have to have been given the call by then.
    for (int64_t i = count - 1; i >= 0; --i) {
        running.workers[i]->index = i;
        running.workers[i]->given.store(&running, std::memory_order_release);
    }
    wake_from(running, 0);
    for (int64_t i = running.num_idle; i < count; ++i) {
        running.workers[i]->is_started = true;
        if (!start_thread<run_worker>(running.workers[i])) running.workers[i]->is_started = false;
    }
}

// Ends a call: takes it back from workers that have not begun, and waits for the others.
void finish(Running &running) {
    int64_t num_begun = running.num_workers;
    if (!num_begun) return;
    for (int64_t i = 0; i < running.num_workers; ++i) {
        Worker &worker = *running.workers[i];
        Running *expected = &running;
        if (!worker.given.compare_exchange_strong(expected, nullptr)) continue;
        --num_begun;
        pool.mutex.lock();
        push(worker.is_started ? pool.idle : pool.ended, worker);
        pool.mutex.unlock();
    }
    wait_until(running, running.caller, [&] { return running.left == num_begun; });
}

}  // namespace
