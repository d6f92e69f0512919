// The threads of the compiled core, by its exported functions, where jobs only count: each is done once, phases follow
// each other, callers and forked processes compute side by side, and a call without memory says so.
#define SOURCES ""
#include "core.cpp"

#include <sys/wait.h>
#include <unistd.h>

#include <mutex>
#include <set>
#include <thread>

#include "check.h"

namespace {

// What a call does. Jobs find it by the seed of the call.
struct Plan {
    std::vector<long> num_jobs;  // of each phase
    long scratch_bytes = 4096;
    long work = 0;  // how long a job takes, in numbers that are added up
    std::vector<std::vector<std::atomic<int>>> done;
    std::atomic<long> num_done{0}, num_failures{0}, num_inside{0};
    std::atomic<int> rounding{-1};  // of the threads; -2 if they differ
    explicit Plan(std::vector<long> num_jobs) : num_jobs(num_jobs) {
        for (long count : num_jobs) done.emplace_back(count > 0 ? count : 0);
    }
    long all() const {
        long sum = 0;
        for (long count : num_jobs) sum += count > 0 ? count : 0;
        return sum;
    }
};

thread_local int begun = 0;  // calls whose jobs this thread is at

void burn(long count) {
    volatile double sum = 0;
    for (long i = 0; i < count; ++i) sum = sum + 1;
}

void run_job(Work &work, char *scratch, long job) {
    Plan &plan = *(Plan *)work.call.seed;
    ++plan.num_inside;
    // Phases without jobs are left out: which one this is follows from the function that the job is of.
    long phase = 0;
    while (job >= plan.num_jobs[phase]) job -= plan.num_jobs[phase++];
    long before = 0;
    for (long p = 0; p < phase; ++p) before += plan.num_jobs[p];
    if (plan.num_done < before) ++plan.num_failures;
    if (begun != 1 || (uintptr_t)scratch % 64) ++plan.num_failures;
    const int rounding = fegetround(), seen = plan.rounding.exchange(rounding);
    if (seen != -1 && seen != rounding) plan.rounding = -2;
    // The memory is this job's own.
    memset(scratch, int(job), plan.scratch_bytes);
    burn(plan.work);
    for (long i = 0; i < plan.scratch_bytes; i += 512)
        if (scratch[i] != char(job)) ++plan.num_failures;
    ++plan.done[phase][job];
    ++plan.num_done;
    --plan.num_inside;
}

template <int PHASE> void run_phase(Work &work, char *scratch, long job) {
    const Plan &plan = *(const Plan *)work.call.seed;
    for (int p = 0; p < PHASE; ++p) job += plan.num_jobs[p];
    run_job(work, scratch, job);
}

bool prepare(Work &work) {
    constexpr void (*RUN[])(Work &, char *, long) = {run_phase<0>, run_phase<1>, run_phase<2>, run_phase<3>};
    const Plan &plan = *(const Plan *)work.call.seed;
    work.scratch_bytes = plan.scratch_bytes;
    for (size_t phase = 0; phase < plan.num_jobs.size(); ++phase) work.add_phase(RUN[phase], plan.num_jobs[phase]);
    return true;
}

struct Arguments {
    Call fixed = {};
    Changing changing = {};
    Arguments(const Plan &plan, long num_threads) {
        fixed.bytes = sizeof(Call);
        changing.head_bytes = -1;
        changing.num_threads = num_threads;
        changing.are_disjoint = 1;
        changing.seed = uint64_t(uintptr_t(&plan));
    }
};

int run(const Plan &plan, long num_threads) {
    const Arguments arguments(plan, num_threads);
    return cuflash_run(&arguments.fixed, &arguments.changing);
}

// The same as a long call, of which this thread does nothing itself.
int run_long(const Plan &plan, long num_threads) {
    const Arguments arguments(plan, num_threads);
    LongCall call = {};
    cuflash_start(&arguments.fixed, &arguments.changing, &call);
    while (!cuflash_wait(&call, 50)) {
    }
    cuflash_finish(&call);
    return call.status;
}

bool is_done_once(const Plan &plan) {
    bool is_right = plan.num_failures == 0 && plan.num_done == plan.all() && plan.num_inside == 0;
    for (const auto &phase : plan.done)
        for (const auto &count : phase) is_right &= count == 1;
    return is_right;
}

const std::vector<long> SHAPES[] = {{1}, {2}, {64}, {1, 1, 1, 1}, {7, 3, 1, 16}, {100, 1, 100}, {3, 0, 5}};

void test_jobs_are_done_once() {
    for (const auto &shape : SHAPES)
        for (long num_threads : {1L, 2L, 3L, 8L, 40L})
            for (long work : {0L, 2000L})
                for (bool is_long : {false, true}) {
                    Plan plan(shape);
                    plan.work = work;
                    const int status = (is_long ? run_long : run)(plan, num_threads);
                    CHECK(status == DONE && is_done_once(plan),
                          "status %d, %ld jobs on %ld threads, %ld done, %ld wrong", status, plan.all(), num_threads,
                          plan.num_done.load(), plan.num_failures.load());
                }
    for (bool is_long : {false, true}) {  // a call without a job
        Plan plan({});
        CHECK((is_long ? run_long : run)(plan, 3) == DONE, "no jobs, long call %d", is_long);
    }
}

void test_many_callers_at_once() {
    std::vector<std::thread> callers;
    std::atomic<long> num_wrong{0};
    for (int caller = 0; caller < 6; ++caller)
        callers.emplace_back([&, caller] {
            for (int n = 0; n < 60; ++n) {
                Plan plan(SHAPES[(n + caller) % 7]);
                plan.work = n % 3 * 500;
                const int status = (n % 4 == 3 ? run_long : run)(plan, 1 + (n + caller) % 5);
                if (status != DONE || !is_done_once(plan)) ++num_wrong;
            }
        });
    for (std::thread &caller : callers) caller.join();
    CHECK(num_wrong == 0, "%ld calls", num_wrong.load());
}

void test_rounding_is_that_of_the_caller() {
    for (int rounding : {FE_UPWARD, FE_TONEAREST, FE_TOWARDZERO})
        for (long num_threads : {1L, 4L}) {
            fesetround(rounding);
            Plan plan({64});
            plan.work = 1000;
            const int status = run(plan, num_threads);
            fesetround(FE_TONEAREST);
            CHECK(status == DONE && plan.rounding == rounding, "%d, expected %d", plan.rounding.load(), rounding);
        }
}

void test_stopped_calls_do_nothing_more() {
    for (int milliseconds : {0, 1, 3}) {
        Plan plan({2000, 2000});
        plan.work = 20'000;
        const Arguments arguments(plan, 3);
        LongCall call = {};
        cuflash_start(&arguments.fixed, &arguments.changing, &call);
        cuflash_wait(&call, milliseconds);
        cuflash_finish(&call);
        const long done = plan.num_done;
        CHECK(done < plan.all() && plan.num_inside == 0 && plan.num_failures == 0, "%ld of %ld jobs", done, plan.all());
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        CHECK(plan.num_done == done, "%ld jobs after the end", plan.num_done - done);
        cuflash_finish(&call);  // once more is allowed: a signal may come in between
    }
}

void test_no_memory() {
    for (bool is_long : {false, true})
        for (long num_threads : {1L, 3L}) {
            Plan plan({5});
            plan.scratch_bytes = 1L << 56;
            CHECK((is_long ? run_long : run)(plan, num_threads) == OUT_OF_MEMORY && plan.num_done == 0, "%ld threads",
                  num_threads);
            Plan next({5});
            CHECK(run(next, num_threads) == DONE && is_done_once(next), "the call after it");
        }
}

void test_other_layouts_are_refused() {
    Plan plan({1});
    Arguments arguments(plan, 2);
    arguments.fixed.bytes -= 8;
    CHECK(cuflash_run(&arguments.fixed, &arguments.changing) == OTHER_LAYOUT && plan.num_done == 0, "run");
    LongCall call = {};
    cuflash_start(&arguments.fixed, &arguments.changing, &call);
    CHECK(cuflash_wait(&call, 0) && call.status == OTHER_LAYOUT, "start");
    cuflash_finish(&call);
}

void test_forked_processes() {
    for (int n = 0; n < 5; ++n) {
        Plan before({9});
        before.work = 2000;
        run(before, 3);      // has threads, which the child does not have
        ++num_computing[n];  // another thread that computes
        const pid_t child = fork();
        if (child == 0) {
            Plan plan({7, 3});
            Plan of_long({7, 3});
            const bool is_right = num_computing[n] == 0 && run(plan, 4) == DONE && is_done_once(plan) &&
                                  run_long(of_long, 4) == DONE && is_done_once(of_long);
            _exit(is_right ? 0 : 1);
        }
        --num_computing[n];
        int status = 1;
        waitpid(child, &status, 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %d of the child", status);
        Plan after({9});
        CHECK(run(after, 3) == DONE && is_done_once(after), "the parent");
    }
}

void test_a_call_does_without_threads_that_do_not_run() {
    static Worker absent[3];  // which threads of other libraries keep from their cores, say: nobody is there
    for (Worker &worker : absent) {
        worker.is_started = true;
        make_idle(worker);
    }
    for (const auto &shape : SHAPES) {
        Plan plan(shape);
        CHECK(run(plan, 4) == DONE && is_done_once(plan), "%ld of %ld jobs", plan.num_done.load(), plan.all());
    }
    for (Worker &worker : absent) CHECK(!worker.given && retire(worker), "still given a call, or lost");
}

#if defined(__linux__)
int num_on_cores() {
    int sum = 0;
    for (const auto &count : num_computing) sum += count;
    return sum;
}

void test_no_thread_is_counted_after_its_call() {
    for (int n = 0; n < 200; ++n) {
        Plan plan(SHAPES[n % 7]);
        (n % 4 == 3 ? run_long : run)(plan, 1 + n % 5);
    }
    for (int n = 0; n < 1000 && num_on_cores(); ++n) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    CHECK(num_on_cores() == 0, "%d threads", num_on_cores());
}

void test_threads_leave_cores_that_are_taken() {
    constexpr int TIMES = 100;
    Cores own;
    if (!own.load() || CPU_COUNT(&own.own) < 2) return;
    int num_moved = 0;
    for (int n = 0; n < TIMES; ++n) {
        const int taken = enter_core();
        std::thread([&] {
            own.move(Thread::current(), taken);
            const int entered = enter_free_core();
            num_moved += core_of_thread() == entered;
            CHECK(entered != taken && num_computing[entered] == 1 && num_computing[taken] == 1, "core %d, taken is %d",
                  entered, taken);
            Cores now;
            CHECK(now.load() && CPU_EQUAL(&now.own, &own.own), "other cores than before");
            leave_core(entered);
        }).join();
        leave_core(taken);
    }
    CHECK(num_moved > TIMES / 2, "%d times of %d", num_moved, TIMES);  // the system may move a thread once more
    // Where there is no free core, a thread stays.
    for (int core = 0; core < MOST_CORES; ++core) num_computing[core] += own.has(core);
    const int entered = enter_free_core();
    CHECK(num_computing[entered] == 2, "%d threads on core %d", num_computing[entered].load(), entered);
    leave_core(entered);
    for (int core = 0; core < MOST_CORES; ++core) num_computing[core] -= own.has(core);
    CHECK(num_on_cores() == 0, "%d threads", num_on_cores());
}
void test_a_thread_that_waits_lends_its_core() {
    Cores own;
    if (!own.load()) return;
    Running running;
    running.cores = own;
    Participant self, &other = running.caller;
    std::mutex until_the_end;
    until_the_end.lock();
    std::atomic<bool> is_there{false};
    std::thread thread([&] {
        other.thread = Thread::current();
        is_there = true;
        until_the_end.lock();  // does not run
        until_the_end.unlock();
    });
    while (!is_there) std::this_thread::yield();
    auto lends_in_time = [&] {  // it looks twice, and at most that often if the thread is about to sleep
        for (int n = 0; n < 1000; ++n) {
            if (lend_core(running, self)) return true;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return false;
    };
    auto looks_again = [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return lend_core(running, self);
    };
    self.core = 3, other.core = 5;
    CHECK(!lend_core(running, self) && !looks_again(), "a thread without jobs");
    other.at_jobs_of = &running;
    CHECK(!lend_core(running, self), "at the first look");
    CHECK(lends_in_time() && self.core == 5 && other.core == 3, "cores %d and %d", self.core, other.core);
    cpu_set_t cores;
    CHECK(pthread_getaffinity_np(thread.native_handle(), sizeof cores, &cores) == 0 && CPU_EQUAL(&cores, &own.own),
          "other cores than before");
    self.core = -1;
    CHECK(lends_in_time() && self.core == -1 && other.core == 3, "cores %d and %d", self.core, other.core);
    other.seen_ns = INT64_MIN / 2;
    CHECK(!looks_again(), "a thread that has run since");
    CHECK(lends_in_time() && !lend_core(running, other), "itself");
    Running next;
    other.at_jobs_of = &next;
    CHECK(!looks_again() && !looks_again(), "a thread of another call");
    until_the_end.unlock();
    thread.join();
}
#else
void test_a_thread_that_waits_lends_its_core() {}
void test_no_thread_is_counted_after_its_call() {}
void test_threads_leave_cores_that_are_taken() {}
#endif

}  // namespace

extern const Kernels kernels_baseline = {prepare, nullptr, [] { ++begun; }, [] { --begun; }};

int main() {
    alarm(1800);  // for a call that does not end
    Cores before, after;
    const bool has_cores = before.load();
    test_jobs_are_done_once();
    test_many_callers_at_once();
    test_rounding_is_that_of_the_caller();
    test_stopped_calls_do_nothing_more();
    test_no_memory();
    test_other_layouts_are_refused();
    test_forked_processes();
    test_a_call_does_without_threads_that_do_not_run();
    test_no_thread_is_counted_after_its_call();
    test_threads_leave_cores_that_are_taken();
    test_a_thread_that_waits_lends_its_core();
    if (has_cores) CHECK(after.load() && memcmp(&before, &after, sizeof before) == 0, "the caller's cores");
    return report();
}
