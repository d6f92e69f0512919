// The interface to Python.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "targets.h"
#include "small_head_calls.h"
#include "threads.h"

// setup.py names the targets that are left out; without it, in a test of this file, all but the baseline are.
#define IS_LEFT_OUT(name) extern const Kernels kernels_##name = {};
#if !defined(LEFT_OUT)
#define LEFT_OUT IS_LEFT_OUT(avx2) IS_LEFT_OUT(avx512) IS_LEFT_OUT(avx512_bfloat16) IS_LEFT_OUT(amx)
#endif
LEFT_OUT

namespace {

struct Target {
    const char *name;
    const Kernels *kernels;
};

// Queried once, without the guards of variables in functions, which are in the libraries of C++ that the core does
// without.
inline const Processor &processor() {
    static Processor found{};
    static Once once;
    once.run([] { found = find_processor(); });
    return found;
}

// The best target that was built and that this processor can run; the `limit` best of all targets are left out.
Target target_of_processor(int limit) {
    const Processor &found = processor();
    if (kernels_amx.prepare && found.has_tiles && limit < 1 && may_use_tiles()) return Target{"AMX", &kernels_amx};
    if (kernels_avx512_bfloat16.prepare && found.has_bfloat16 && limit < 2)
        return Target{"AVX-512 with bfloat16", &kernels_avx512_bfloat16};
    if (kernels_avx512.prepare && found.has_avx512 && limit < 3) return Target{"AVX-512", &kernels_avx512};
    if (kernels_avx2.prepare && found.has_avx2 && limit < 4) return Target{"AVX2", &kernels_avx2};
    return Target{found.baseline, &kernels_baseline};
}

// The kernels for a call. Those with products of bfloat16 serve calls of bfloat16 and, if they have tile registers, the
// forward pass of float16; but no tangents, no reductions of the weights and no small heads, which are computed in
// float32.
const Kernels &kernels_for(const Call &call, int limit) {
    const Kernels *kernels = target_of_processor(limit).kernels;
    const bool is_only_bfloat16 = kernels == &kernels_amx || kernels == &kernels_avx512_bfloat16;
    // Whether float16 can be split follows from all numbers of a call.
    const bool is_split =
        kernels == &kernels_amx && call.dtype == FLOAT16 && !call.is_backward && !call.batch_invariant;
    const bool is_float32 = call.has_tangents || reduces_weights(call) || (is_small(call) && !call.finds_row_sums);
    const bool is_served =
        (call.dtype == BFLOAT16 || is_split) && !is_float32 && !(call.is_backward && has_float8(call));
    if (is_only_bfloat16 && !is_served) kernels = target_of_processor(2).kernels;
    return *kernels;
}

enum Status { DONE, OUT_OF_MEMORY, OTHER_LAYOUT, NO_THREAD, UNALIGNED, OVERLAPPING };

// The fields of an array object of NumPy after the head that all Python objects have. All versions have these.
struct ArrayObject {
    char *data;
    int num_axes;
    const intptr_t *shape, *strides;
    const void *base, *dtype;
};

// Type, dtype, shape and strides of an array, as Python fills them in. Objects without a dtype, as None, are no arrays.
struct ArraySignature {
    const void *type, *dtype;  // the objects
    int64_t num_axes, shape[4], strides[4];
};

// Types, dtypes, shapes and strides of the arrays of some calls.
struct Table {
    int64_t num_calls, num_arrays, head_bytes;  // arrays of each call; the head of an object
    ArraySignature signatures[];
};

// What changes from call to call, with Python objects or addresses in place of arrays: `load_call` adds it to the fixed
// fields of a `Call`. It is one struct, because Python takes longer to hand over an argument than to pack it.
struct Changing {
    int64_t head_bytes;    // of an array object; if it is negative, addresses of data are given
    int64_t limit;         // how many of the best targets are left out
    int64_t num_threads;   // that the call may be computed on
    int64_t are_disjoint;  // results are known to share no memory with each other or with operands
    uint64_t seed, offset;
    char *const *arrays;  // as many as are given
};

inline bool is_result(const Call &call, int64_t array) {
    if (array == ROW_SUMS) return call.finds_row_sums;
    return call.is_backward ? (array >= DQ && array <= DV) || array >= DBIAS
                            : array == OUT || array == LSE || array == MAX || array == ENTROPY;
}

// Whether an array has no elements.
inline bool is_empty(const Call &call, int64_t array) { return call.begins[array] == call.ends[array]; }

// Whether the memory of each result overlaps with that of no other array.
bool are_disjoint(const Call &call) {
    for (int i = 0; i < call.num_given; ++i) {
        const int64_t one = call.given[i];
        if (!is_result(call, one)) continue;
        for (int j = 0; j < call.num_given; ++j) {
            const int64_t other = call.given[j];
            if (one != other && call.arrays[one] + call.begins[one] < call.arrays[other] + call.ends[other] &&
                call.arrays[other] + call.begins[other] < call.arrays[one] + call.ends[one])
                return false;
        }
    }
    return true;
}

// The head of an object ends with its type.
inline bool matches(const char *object, int64_t head_bytes, const ArraySignature &signature) {
    if (((const void *const *)(object + head_bytes))[-1] != signature.type) return false;
    if (!signature.dtype) return true;
    const ArrayObject &array = *(const ArrayObject *)(object + head_bytes);
    if (array.dtype != signature.dtype || array.num_axes != signature.num_axes) return false;
    for (int i = 0; i < array.num_axes; ++i)
        if (array.shape[i] != signature.shape[i] || array.strides[i] != signature.strides[i]) return false;
    return true;
}

bool all_match(char *const *arrays, const Table &table, int64_t call) {
    for (int64_t i = 0; i < table.num_arrays; ++i)
        if (!matches(arrays[i], table.head_bytes, table.signatures[call * table.num_arrays + i])) return false;
    return true;
}

// Fills in a call, whose arrays these are.
inline int load_one(Call &call, const void *fixed, const Changing *changing, char *const *arrays) {
    memcpy((void *)&call, fixed, offsetof(Call, seed));
    if (call.bytes != int64_t(sizeof(Call))) return OTHER_LAYOUT;
    call.seed = changing->seed;
    call.offset = changing->offset;
    memset((void *)call.arrays, 0, sizeof call.arrays);
    for (int i = 0; i < call.num_given; ++i) {
        char *array = arrays[i];
        const int64_t at = call.given[i];
        if (is_empty(call, at)) {  // it may have any address and strides
            if (!is_result(call, at)) call.arrays[at] = array;
            continue;
        }
        const bool is_object = changing->head_bytes >= 0;
        call.arrays[at] = is_object ? ((const ArrayObject *)(array + changing->head_bytes))->data : array;
        if ((uintptr_t)call.arrays[at] & (call.sizes[at] - 1)) return UNALIGNED;
    }
    return DONE;
}

int load_call(Work &work, const void *fixed, const Changing *changing) {
    int status = load_one(work.call, fixed, changing, changing->arrays);
    if (status == DONE && work.call.has_tangents) {
        if (!work.allocate(work.tangents, 1)) return OUT_OF_MEMORY;
        const char *of_tangents = (const char *)fixed + sizeof(Call);
        status = load_one(*work.tangents, of_tangents, changing, changing->arrays + work.call.num_given);
        // Gradients of scores are scaled where their tangents are made: what is left is the sign that q comes with.
        work.tangents->scale = work.call.scale < 0 ? -1 : 1;
    }
    if (status != DONE) return status;
    if (!changing->are_disjoint && !are_disjoint(work.call)) return OVERLAPPING;
    work.stopped = false;
    return DONE;
}

void destroy(Running *running) {
    running->work.~Work();
    free(running);
}

// Ends a call, done or not.
int end(Running *running) {
    finish(*running);
    const int status = running->out_of_memory ? OUT_OF_MEMORY : DONE;
    destroy(running);
    return status;
}

// Memory of a calling thread for its jobs. Some of it is kept between calls: fresh memory has to be mapped page by
// page, which takes longer than a small call. It goes when the thread ends, and not while the thread computes, as
// memory of Python's would when the interpreter exits.
struct CallerScratch {
    static constexpr int64_t CALLER_BYTES = 4 << 20;
    static inline ThreadMemory kept;
    void *memory;  // null if there is none
    bool is_kept;

    explicit CallerScratch(int64_t bytes) {
        static Once once;
        once.run([] { kept.make(); });
        memory = bytes <= CALLER_BYTES ? kept.get() : nullptr;
        is_kept = memory;
        if (is_kept) return;
        memory = allocate_scratch(bytes < CALLER_BYTES ? CALLER_BYTES : bytes);
        is_kept = memory && bytes <= CALLER_BYTES && kept.set(memory);
    }
    ~CallerScratch() {
        if (!is_kept) free_aligned(memory);
    }
};

// A long call under way, in memory of Python's: it knows of the call as soon as there is one, wherever an exception
// comes from.
struct LongCall {
    Running *running;
    int status;
};

// Prepares a call in which up to `num_threads` workers take part. If that fails, it returns null, and the reason in
// `status`.
Running *prepare_call(const void *fixed, const Changing *changing, int64_t num_threads, int *status) {
    Running *running = (Running *)calloc(1, sizeof(Running) + num_threads * sizeof(Worker *));
    *status = OUT_OF_MEMORY;
    if (!running) return nullptr;
    new (running) Running;
    *status = load_call(running->work, fixed, changing);
    if (*status == DONE) {
        running->kernels = &kernels_for(running->work.call, int(changing->limit));
        if (!running->kernels->prepare(running->work)) *status = OUT_OF_MEMORY;
    }
    if (*status == DONE) return running;
    destroy(running);
    return nullptr;
}

// At most as many threads as a phase has jobs: no more can be at work at a time.
int64_t most_threads(const Running &running, int64_t num_threads) {
    int64_t most = 1;
    for (int i = 0; i < running.work.num_phases; ++i)
        most = running.work.phases[i].num_jobs > most ? running.work.phases[i].num_jobs : most;
    return num_threads < most ? num_threads : most;
}

}  // namespace

// The sources that the library was built from.
EXPORTED const char *cuflash_sources() { return SOURCES; }

EXPORTED int64_t cuflash_call_bytes() { return sizeof(Call); }

// About how long a call takes on one core in addition to its multiplications. Only the fixed fields of the call
// are given.
EXPORTED double cuflash_overhead_ns(const void *fixed) {
    Call call;
    memcpy((void *)&call, fixed, offsetof(Call, seed));
    return double(call.batch) * call.num_heads * overhead_of_head_ns(call);
}

// The target whose kernels run here; the `limit` best targets are left out.
EXPORTED const char *cuflash_processor(int limit) { return target_of_processor(limit).name; }

// A function of all numbers of an array, as the kernels compute it.
EXPORTED void cuflash_evaluate(int limit, int is_double, int function, const void *in, void *out, int64_t count) {
    target_of_processor(limit).kernels->evaluate(is_double, Function(function), in, out, count);
}

// The first call of a table whose arrays have the signatures of these objects, or -1.
EXPORTED int cuflash_find(const Table *table, char *const *arrays) {
    for (int64_t call = 0; call < table->num_calls; ++call)
        if (all_match(arrays, *table, call)) return int(call);
    return -1;
}

// Computes a call on this thread and on others of the pool.
EXPORTED int cuflash_run(const void *fixed, const Changing *changing) {
    int status;
    const int64_t num_others = changing->num_threads - 1;
    Running *running = prepare_call(fixed, changing, num_others, &status);
    if (!running) return status;
    const CallerScratch scratch(running->work.scratch_bytes);
    if (scratch.memory) {
        Participant &caller = running->caller;
        if (num_others) {
            caller.core = enter_core();
            give(*running, most_threads(*running, num_others + 1) - 1);
        }
        compute(*running, caller, (char *)scratch.memory);
        if (num_others) wait_until(*running, caller, [&] { return is_done(*running); });
        leave_core(caller.core);
        caller.core = -1;
    } else {
        running->out_of_memory = true;
    }
    return end(running);
}

// Starts a call on threads of the pool. If that fails, none is running, and the status says why.
EXPORTED void cuflash_start(const void *fixed, const Changing *changing, LongCall *call) {
    call->running = prepare_call(fixed, changing, changing->num_threads, &call->status);
    if (!call->running) return;
    Running &running = *call->running;
    give(running, most_threads(running, changing->num_threads));
    for (int64_t i = 0; i < running.num_workers; ++i)
        if (running.workers[i]->is_started) return;
    end(call->running);
    *call = LongCall{nullptr, NO_THREAD};
}

// Waits for a call, at most `milliseconds`, and returns whether it is done or none is running.
EXPORTED int cuflash_wait(const LongCall *call, int milliseconds) {
    if (!call->running) return true;
    Running &running = *call->running;
    const Deadline until = after_milliseconds(milliseconds);
    bool is_early = true;
    running.mutex.lock();
    while (!is_done(running) && is_early) is_early = running.changed.wait(running.mutex, until);
    running.mutex.unlock();
    return is_done(running);
}

// Ends a call, done or not, if one is running; the status says how.
EXPORTED void cuflash_finish(LongCall *call) {
    if (!call->running) return;
    stop(*call->running);
    *call = LongCall{nullptr, end(call->running)};
}
