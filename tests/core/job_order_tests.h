// Jobs of the backward pass in any order, on one thread and on several: none of them waits for another one, and the
// sums of dq have the bits that they have in the order of the jobs. So a thread that does not run holds up no other.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "backward.h"

#include "arrays.h"

namespace {
namespace job_order_tests {

template <class T> constexpr Dtype DTYPE = sizeof(T) == 4 ? FLOAT32 : FLOAT64;
constexpr long BLOCK = 64;  // rows and keys of a block of the mask

// A backward pass, whose lse and out are any numbers: the gradients are those of no forward pass, but the same sums.
template <class T> struct Pass {
    const Dtype dtype;
    const long batch, heads_kv, group, rows, keys, dim, heads = heads_kv * group;
    const long left, right;
    const bool has_blocks;
    AnyArray q, k, v, out, dout, lse, dq, dk, dv, block_mask;

    static Pass any(Dtype dtype) {
        const bool is_causal = random_below(2);
        return Pass(dtype, 1 + random_below(2), 1 + random_below(2), 1 + random_below(2), 1 + random_below(700),
                    1 + random_below(900), 8 + random_below(20), random_below(3) ? NO_BOUND : random_below(200),
                    is_causal ? 0 : NO_BOUND, random_below(2));
    }
    Pass(Dtype dtype, long batch, long heads_kv, long group, long rows, long keys, long dim, long left, long right,
         bool has_blocks)
        : dtype(dtype), batch(batch), heads_kv(heads_kv), group(group), rows(rows), keys(keys), dim(dim), left(left),
          right(right), has_blocks(has_blocks), q(dtype, {batch, heads, rows, dim}),
          k(dtype, {batch, heads_kv, keys, dim}), v(dtype, {batch, heads_kv, keys, dim}),
          out(dtype, {batch, heads, rows, dim}), dout(dtype, {batch, heads, rows, dim}),
          lse(DTYPE<T>, {1, batch, heads, rows}), dq(dtype, {batch, heads, rows, dim}),
          dk(dtype, {batch, heads_kv, keys, dim}), dv(dtype, {batch, heads_kv, keys, dim}),
          block_mask(FLOAT8_E4M3FN, {batch, heads, ceil_div(rows, BLOCK), ceil_div(keys, BLOCK)}) {
        for (long i = 0; i < block_mask.memory.count; ++i) block_mask.memory[i] = random_below(4) == 0;
    }

    Call call() {
        Call call = {};
        call.bytes = sizeof(Call);
        call.is_backward = 1;
        call.dtype = call.kv_dtype = dtype, call.bias_dtype = DTYPE<T>;
        call.batch = batch, call.num_heads = heads, call.num_heads_kv = heads_kv;
        call.seqlen_q = rows, call.seqlen_k = keys, call.head_dim = call.head_dim_v = dim;
        call.diagonal = keys - rows, call.window_left = left, call.window_right = right;
        call.scale = 0.3, call.kept_scale = 1, call.block_rows = call.block_keys = BLOCK;
        for (auto [array, x] : {std::pair{Q, &q}, {K, &k}, {V, &v}, {OUT, &out}, {DOUT, &dout}}) x->give(call, array);
        lse.give(call, LSE);
        for (int axis = 0; axis < 4; ++axis) call.strides[LSE][axis] = axis < 3 ? lse.strides[axis + 1] : 0;
        if (has_blocks) block_mask.give(call, BLOCK_MASK);
        for (auto [array, x] : {std::pair{DQ, &dq}, {DK, &dk}, {DV, &dv}}) x->give(call, array);
        return call;
    }
    // The gradients, where jobs of each phase are begun in the order in which `order` puts their numbers, by so many
    // threads, which sleep now and then.
    template <class Order> std::vector<char> gradients(Order order, int num_threads = 1) {
        Work work;
        work.call = call();
        work.stopped = false;
        if (!prepare_backward<T, BackwardBuffers<T>>(work)) std::abort();
        for (int phase = 0; phase < work.num_phases; ++phase) {
            std::vector<long> jobs(work.phases[phase].num_jobs);
            for (size_t i = 0; i < jobs.size(); ++i) jobs[i] = long(i);
            order(jobs);
            std::atomic<size_t> next{0};
            auto compute = [&] {
                Memory<char> scratch(work.scratch_bytes);
                for (size_t i; (i = next++) < jobs.size();) {
                    if (num_threads > 1 && i % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
                    work.phases[phase].run(work, scratch.data, jobs[i]);
                }
            };
            std::vector<std::thread> others;
            for (int n = 1; n < num_threads; ++n) others.emplace_back(compute);
            compute();
            for (std::thread &other : others) other.join();
        }
        CHECK(work.num_kept == 0 && work.kept_bytes == 0, "%ld tiles, %ld bytes", long(work.num_kept),
              long(work.kept_bytes));
        std::vector<char> all;
        for (AnyArray *x : {&dq, &dk, &dv}) {
            all.insert(all.end(), x->memory.data, x->memory.data + x->memory.count);
            for (long i = 0; i < x->memory.count / size_of(dtype); ++i) x->put(x->memory.data + i * size_of(dtype));
        }
        return all;
    }
};

template <class T> void test_any_order(Dtype dtype) {
    Pass<T> pass = Pass<T>::any(dtype);
    const std::vector<char> expected = pass.gradients([](std::vector<long> &) {});
    auto check = [&](const char *name, auto order, int num_threads = 1) {
        CHECK(pass.gradients(order, num_threads) == expected,
              "dtype %d, batch %ld, heads %ld / %ld, %ld rows, %ld keys, %s", int(dtype), pass.batch, pass.heads,
              pass.heads_kv, pass.rows, pass.keys, name);
    };
    check("the last job first", [](std::vector<long> &jobs) { std::reverse(jobs.begin(), jobs.end()); });
    check("in any order", [](std::vector<long> &jobs) { std::shuffle(jobs.begin(), jobs.end(), random_bits); });
    check("on threads", [](std::vector<long> &) {}, 3);
    check("the first job last", [](std::vector<long> &jobs) {
        if (!jobs.empty()) std::rotate(jobs.begin(), jobs.begin() + 1, jobs.end());
    });
}

void run() {
    alarm(600);  // a job that waits for another one waits for ever
    for (int n = 0; n < (IS_DENSE ? 60 : 12); ++n)
        for (Dtype dtype : {FLOAT32, FLOAT16, BFLOAT16})
            if (!BACKWARD_IN_BF16X2<float> || dtype == BFLOAT16) test_any_order<float>(dtype);
    for (int n = 0; n < (IS_DENSE ? 60 : 4); ++n) test_any_order<double>(FLOAT64);
    alarm(0);
}

}  // namespace job_order_tests
}  // namespace
