// Sums over tiles of keys, to which jobs add in the order of the tiles, so that their bits do not depend on threads:
// dq, and dbias where it is a sum over heads or entries.
//
// A job whose turn to add to dq has not come keeps its partial dq for later, and goes on. Else a thread that loses its
// core to another program, for some milliseconds, would hold up all others.
#pragma once

#include "backward_scores.h"
#include "simd/processor.h"

namespace {

constexpr int64_t TURN_NS = 20'000;          // how long a job polls for its turn before it keeps its partial dq
constexpr int64_t YIELD_NS = 50'000;         // and, where it cannot keep it, before it yields its core
constexpr int64_t DQ_BYTES = 32 << 20;       // at most, for the dq accumulator, where dq has half precision
constexpr int64_t KEPT_DQ_BYTES = 16 << 20;  // at most, of all jobs of a call

// The order in which jobs add to a sum: each after the job before it. `progress` of a job says how many steps it and
// all jobs before it have done; or that it is done itself, and jobs before it say the rest.
struct AddingOrder {
    static constexpr int64_t DONE = -1;
    Work &work;
    const int64_t KeyTile::*before;  // null if there is no such sum

    // How many steps all jobs before this one have done, and `most` if that is less or there are none.
    NOINLINE int64_t steps_before(int64_t job, int64_t most) const {
        while (before && (job = work.tiles[job].*before) >= 0) {
            const int64_t steps = work.progress[job].load(std::memory_order_acquire);
            if (steps != DONE) return smaller(steps, most);
        }
        return most;
    }
    bool is_turn(int64_t job, int64_t steps) const { return steps_before(job, steps) >= steps; }
    // Polls until they have done `steps`, so long; returns whether they have.
    NOINLINE bool poll(int64_t job, int64_t steps, int64_t nanoseconds) const {
        if (is_turn(job, steps)) return true;
        const int64_t until = nanoseconds_now() + nanoseconds;
        while (!is_turn(job, steps)) {
            if (nanoseconds_now() >= until) return false;
            rest();
        }
        return true;
    }
    // Waits until they have done `steps`. Returns false if the call has been stopped.
    NOINLINE bool wait(int64_t job, int64_t steps) const {
        if (poll(job, steps, YIELD_NS)) return true;
        while (!is_turn(job, steps)) {
            if (work.stopped.load(std::memory_order_relaxed)) return false;
            yield_core();
        }
        return true;
    }
};

// How far a job of keys has come with the sums that it adds to, dq and an ordered dbias, for the jobs after it.
struct Progress {
    Work &work;
    const int64_t job;
    const AddingOrder dq, bias;

    Progress(Work &work, int64_t job, bool adds_bias)
        : work(work), job(job), dq{work, work.adds_dq ? &KeyTile::before : nullptr},
          bias{work, adds_bias ? &KeyTile::bias_before : nullptr} {}

    int64_t steps_before(int64_t most) const { return dq.steps_before(job, bias.steps_before(job, most)); }
    void set(int64_t steps) const {
        if (work.progress) work.progress[job].store(steps, std::memory_order_release);
    }
    // The steps of this job before `step` add nothing: they count as done as far as jobs before it have come.
    void skip_to(int64_t step) const { set(steps_before(step)); }
    // All `steps` are done.
    void finish(int64_t steps) const { set(steps_before(steps) == steps ? steps : AddingOrder::DONE); }
};

// Allocates how far jobs of keys have come; returns false if there is no memory.
inline bool allocate_progress(Work &work) {
    if (!work.allocate(work.progress, work.num_tiles) || !work.allocate(work.kept_dq, work.num_tiles)) return false;
    for (int64_t t = 0; t < work.num_tiles; ++t) {
        work.progress[t] = 0;
        work.kept_dq[t] = nullptr;
    }
    return true;
}

inline bool has_dq_accum(const Call &call) { return call.dtype == FLOAT16 || call.dtype == BFLOAT16; }

// Which jobs compute dq.
enum class DqGradient {
    NONE,
    IN_PLACE,  // jobs of keys add to dq, one after the other
    ACCUM,     // they add to the dq accumulator, and dq is rounded afterwards
    SEPARATE   // dq has jobs of its own, which compute the weights once more: its accumulator would be too large
};

template <class T> inline int64_t bytes_of_dq_accum(const Call &call) {
    return num_rows_of(call) * call.head_dim * int64_t(sizeof(T));
}

template <class T> inline DqGradient dq_gradient(const Work &work) {
    const Call &call = work.call;
    if (!is_wanted(work.results(), DQ)) return DqGradient::NONE;
    if (!has_dq_accum(call)) return DqGradient::IN_PLACE;
    return bytes_of_dq_accum<T>(call) <= DQ_BYTES || call.batch_invariant ? DqGradient::ACCUM : DqGradient::SEPARATE;
}

// Address of the sum of dq of a row, where dq itself has 16 bits.
template <class T> inline T *dq_sum(const Work &work, const Entry &entry, Row row) {
    const Call &call = work.call;
    return (T *)work.shared +
           ((entry.batch * call.num_heads + row.head) * call.seqlen_q + entry.first_q + row.i) * call.head_dim;
}

// Adds partial dq of these rows of a block; `dq` begins with the first of them.
template <class T>
NOINLINE void add_dq(const Work &work, const Entry &entry, const Block &block, RowRange range, const T *dq,
                     int64_t dim) {
    const Call &call = work.results();
    const T scale = T(call.scale);
    for (int64_t r = range.first; r < range.stop; ++r) {
        const Row row = row_of(block, r);
        const bool has_accum = has_dq_accum(call);
        T *to = has_accum ? dq_sum<T>(work, entry, row) : (T *)row_address(call, DQ, entry, row);
        const int64_t step = has_accum ? 1 : call.strides[DQ][3];
        const T *from = dq + (r - range.first) * dim;
        if (step == 1) {
            for (int64_t d = 0; d < call.head_dim; ++d) to[d] += scale * from[d];
        } else {
            for (int64_t d = 0; d < call.head_dim; ++d) to[d * step] += scale * from[d];
        }
    }
}

// Adds partial dq of a job, step by step, each when its turn has come.
template <class T> struct DqAdder {
    Work &work;
    const Entry &entry;
    const KeyTile &tile;
    const Steps steps;
    const Progress &progress;
    const int64_t job, dim;
    const bool may_keep;
    KeptDq *first = nullptr, *last = nullptr;  // of steps whose turn has not come, in order

    DqAdder(const Progress &progress, int64_t dim, bool may_keep)
        : work(progress.work), entry(work.entries[work.tiles[progress.job].entry]), tile(work.tiles[progress.job]),
          steps(work, entry), progress(progress), job(progress.job), dim(dim), may_keep(may_keep) {}
    DqAdder(const DqAdder &) = delete;
    ~DqAdder() { KeptDq::release(first); }  // of a call that has been stopped

    // Adds what is kept, as far as its turn has come; returns whether nothing is left.
    bool add_kept() {
        while (first && progress.dq.is_turn(job, first->step + 1)) {
            KeptDq *kept = first;
            const RowRange rows = {kept->first_row, kept->stop_row};
            add_dq(work, entry, steps.block(entry, tile, kept->step), rows, (const T *)kept->numbers(), dim);
            progress.set(kept->step + 1);
            first = kept->next;
            work.kept_bytes -= kept->bytes;
            free(kept);
        }
        return !first;
    }

    // Keeps partial dq of a step; returns false if there is no memory for it.
    NOINLINE bool keep(int64_t step, RowRange rows, const T *dq) {
        const int64_t bytes = (rows.stop - rows.first) * dim * int64_t(sizeof(T));
        if (work.kept_bytes.fetch_add(bytes) + bytes > KEPT_DQ_BYTES) return work.kept_bytes -= bytes, false;
        void *memory = malloc(sizeof(KeptDq) + bytes);
        if (!memory) return work.kept_bytes -= bytes, false;
        KeptDq *kept = new (memory) KeptDq{nullptr, step, rows.first, rows.stop, bytes};
        memcpy(kept->numbers(), dq, bytes);
        first ? last->next = kept : first = kept;
        last = kept;
        return true;
    }

    // Adds the partial dq of a step, at once or later. Returns false if the call has been stopped.
    bool add(int64_t step, const Block &block, RowRange rows, const T *dq) {
        const T *own = dq + rows.first * dim;
        if (may_keep) {
            const int64_t patience = first ? 0 : TURN_NS;
            const bool is_turn = add_kept() && progress.dq.poll(job, step + 1, patience);
            if (!is_turn && keep(step, rows, own)) return true;
        }
        for (; first; add_kept())
            if (!progress.dq.wait(job, first->step + 1)) return false;
        if (!progress.dq.wait(job, step + 1)) return false;
        add_dq(work, entry, block, rows, own, dim);
        return true;
    }

    // All steps of a job are done, but for what is kept: other jobs add that when they end.
    void finish() {
        if (add_kept()) {
            progress.finish(steps.count);
        } else {
            ++work.num_kept;
            work.kept_dq[job].store(first, std::memory_order_release);
            first = nullptr;
        }
        // Counters are read by additions, whose order says that either this thread finds what another one has kept, or
        // that one finds this job done. The thread that asks first adds for those that ask meanwhile.
        if (!work.num_kept.fetch_add(0) || work.kept_requests.fetch_add(1)) return;
        int64_t requests = 1;
        do add_all_kept();
        while (!work.kept_requests.compare_exchange_strong(requests, 0));
    }

    // Adds what jobs that have ended have kept, in the order of the jobs: the next one may wait for it.
    NOINLINE void add_all_kept() const {
        for (int64_t other = 0; other < work.num_tiles; ++other) {
            KeptDq *kept = work.kept_dq[other].load(std::memory_order_acquire);
            if (!kept) continue;
            const Progress of_job(work, other, false);
            DqAdder of_other(of_job, dim, true);
            of_other.first = kept;
            if (of_other.add_kept()) {
                of_job.finish(of_other.steps.count);
                --work.num_kept;
            }
            work.kept_dq[other].store(of_other.first, std::memory_order_relaxed);
            of_other.first = nullptr;
        }
    }
};

}  // namespace
