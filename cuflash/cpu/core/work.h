// The work of one call: phases, one after the other, of jobs that threads share. Which jobs there are follows from the
// problem alone, and not from the number of threads, so that the bits of results do not depend on it.
#pragma once

#include <atomic>
#include <cstdlib>
#include <new>

#include "call.h"
#include "system/system.h"

struct Work;

struct Phase {
    void (*run)(Work &work, char *scratch, int64_t job);
    int64_t num_jobs;
    std::atomic<int64_t> next;  // the job that is taken next
    std::atomic<int64_t> done;  // how many jobs are done
};

// A batch entry or a packed sequence.
struct Entry {
    int64_t batch;             // index in q, k, v and the arrays that have their axes
    int64_t index;             // index in bias, mask, slopes and block arrays, and for dropout
    int64_t first_q, first_k;  // rows and keys before its own
    int64_t seqlen_q, seqlen_k;
    int64_t diagonal;
};

// Queries of one head, or all queries of some heads that share keys.
struct Block {
    int64_t entry, head_kv, first_head, num_heads, first_row, num_rows;
    int64_t first_key, stop_key;  // those that it looks at
    int64_t split, num_splits;    // where several jobs split its keys
};

// The blocks of a head of k that no thread has taken yet: from `next` on, before `stop`.
struct HeadBlocks {
    std::atomic<int64_t> next;
    int64_t stop;
};
constexpr int64_t NO_HEAD = -1;

// A tile of keys, and its position in the order in which gradients are summed.
struct KeyTile {
    int64_t entry, head_kv, first_key, num_keys;
    int64_t before;       // the job of the tile before it, or -1
    int64_t bias_before;  // the job that adds to the same slice of dbias before it, or -1
};

// Tiles of keys and values in the layout that products read, where several blocks of a head read them: each thread
// holds those that it has packed of the head whose blocks it takes.
struct PackedKv {
    bool are_held = false;
    int64_t tiles_per_head = 0, elements_per_tile = 0;
    HeadBlocks *heads = nullptr;        // the blocks of each head of k, if they are held
    std::atomic<int64_t> next_head{0};  // the first one that no thread has begun
};

// Partial dq of a step of a job, kept until its turn to be added. The elements of its rows follow.
struct KeptDq {
    KeptDq *next;
    int64_t step, first_row, stop_row, bytes;

    void *numbers() { return this + 1; }
    static void release(KeptDq *kept) {
        while (kept) {
            KeptDq *next = kept->next;
            free(kept);
            kept = next;
        }
    }
};

struct Work {
    static constexpr int MAX_PHASES = 10;
    Call call;
    Call *tangents = nullptr;  // of a pass with tangents
    int num_phases = 0;
    Phase phases[MAX_PHASES];
    std::atomic<bool> stopped;
    int64_t scratch_bytes = 0;          // of each thread
    bool adds_dq = false;               // whether jobs of keys add to dq
    std::atomic<bool> is_finite{true};  // whether all checked numbers are finite

    int64_t num_entries = 0, num_blocks = 0, num_tiles = 0;
    Entry *entries = nullptr;
    Block *blocks = nullptr;
    int64_t num_split_blocks = 0;
    int64_t *split_blocks = nullptr;  // of each block whose keys are split, the index of the job with the first keys
    KeyTile *tiles = nullptr;
    std::atomic<int64_t> *progress = nullptr;  // of tiles: how many of their steps have been added
    std::atomic<KeptDq *> *kept_dq = nullptr;  // of tiles whose jobs have ended: what is still to be added to dq
    std::atomic<int64_t> num_kept{0};          // tiles with kept dq
    std::atomic<int64_t> kept_requests{0};     // requests to add kept dq, since a thread began to
    std::atomic<int64_t> kept_bytes{0};        // of kept dq, of jobs under way too
    char *shared = nullptr;                    // partial results
    double *sums = nullptr;                    // partial sums of gradients that are numbers
    char *bias_sums = nullptr;                 // partial sums for a bias of keys, by entry and head
    char *row_sums = nullptr;                  // sums of rows, if lse of any of them is large
    char *delta = nullptr;                     // of each row, for the backward pass
    int64_t *first_max = nullptr;              // the first key with the largest score of each row, -1 of none
    PackedKv packed;
    int64_t rows_per_partial = 0;  // rows of a block whose keys are split, at most
    int64_t rows_per_block = 0, keys_per_tile = 0;
    void *allocated[16] = {};
    int num_allocated = 0;

    ~Work() {
        for (int64_t t = 0; kept_dq && t < num_tiles; ++t) KeptDq::release(kept_dq[t]);
        for (int i = 0; i < num_allocated; ++i) free_aligned(allocated[i]);
    }

    // Allocates memory for the time of the call; returns false if there is none left.
    template <class T> bool allocate(T *&p, int64_t count) {
        void *memory = allocate_aligned(64, count > 0 ? count * sizeof(T) : 64);
        if (!memory) return false;
        allocated[num_allocated++] = memory;
        p = (T *)memory;
        return true;
    }

    // The call that has the results of a backward pass.
    const Call &results() const { return tangents ? *tangents : call; }

    // Every phase has jobs, so that a call is done when its last phase is.
    void add_phase(void (*run)(Work &, char *, int64_t), int64_t num_jobs) {
        if (num_jobs > 0) new (&phases[num_phases++]) Phase{run, num_jobs, {0}, {0}};
    }
};
