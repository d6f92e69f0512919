// Whole calls through the exported functions of the compiled core, by every instruction set that it has here, against
// the formula in float64. Arrays have exactly their elements, so that sanitizers find what is read outside.
#include <cerrno>
#include <optional>

#include "arrays.h"

// As `struct Changing` and the functions of `core.cpp`, which Python knows, too.
struct Changing {
    int64_t head_bytes, limit, num_threads, are_disjoint;
    uint64_t seed, offset;
    char *const *arrays;
};
enum Status { DONE, OUT_OF_MEMORY };
extern "C" const char *cuflash_processor(int limit);
extern "C" int64_t cuflash_call_bytes();
extern "C" int cuflash_run(const void *fixed, const Changing *changing);

// Allocations of the core, of which one may fail.
long allocations_left = -1;  // before the one that fails; negative if none does
extern "C" int posix_memalign(void **memory, size_t alignment, size_t bytes) {
    if (allocations_left == 0) return ENOMEM;
    if (allocations_left > 0) --allocations_left;
    *memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    return *memory ? 0 : ENOMEM;
}

namespace {

inline double epsilon_of(Dtype dtype) {
    return dtype == FLOAT16 ? 0x1p-10 : dtype == BFLOAT16 ? 0x1p-7 : dtype == FLOAT32 ? 0x1p-23 : 0x1p-52;
}

// A problem, with all of its arrays.
struct Problem {
    Dtype dtype;
    long batch, group, heads_kv, rows, keys, dim, dim_v;
    bool has_bias, has_mask, has_slopes, has_cap, has_sinks;
    long left, right;
    long heads = group * heads_kv, step = 1, space = 0;
    Dtype of_rows = dtype == FLOAT64 ? FLOAT64 : FLOAT32;
    double scale = 0.3, softcap = has_cap ? 1.5 : 0;
    AnyArray q, k, v, out, dout, dq, dk, dv, lse, bias, mask, slopes, sinks, dsinks;

    static Problem any(Dtype dtype) {
        auto by_chance = [](int one_in) { return random_below(one_in) == 0; };
        const long lengths[] = {1, 2, 5, 17, 64, 100, 130, 129 + random_below(IS_DENSE ? 300 : 20)},
                   dims[] = {1, 8, 16, 33, 64, 80};
        const bool is_plain = by_chance(3);  // as small heads are
        const long rows = lengths[random_below(8)], keys = lengths[random_below(8)];
        const bool is_causal = by_chance(3);
        return Problem(dtype, 1 + random_below(2), 1 + random_below(3), 1 + random_below(2), rows, keys,
                       dims[random_below(6)], dims[random_below(6)], !is_plain && by_chance(2),
                       !is_plain && by_chance(3), !is_plain && by_chance(3), !is_plain && by_chance(3), by_chance(3),
                       by_chance(4) ? random_below(60) : NO_BOUND, is_causal ? 0 : NO_BOUND, by_chance(4) ? 2 : 1,
                       by_chance(2) ? 0 : 3);
    }
    Problem(Dtype dtype, long batch, long group, long heads_kv, long rows, long keys, long dim, long dim_v,
            bool has_bias, bool has_mask, bool has_slopes, bool has_cap, bool has_sinks, long left, long right,
            long step, long space)
        : dtype(dtype), batch(batch), group(group), heads_kv(heads_kv), rows(rows), keys(keys), dim(dim), dim_v(dim_v),
          has_bias(has_bias), has_mask(has_mask), has_slopes(has_slopes), has_cap(has_cap), has_sinks(has_sinks),
          left(left), right(right), step(step), space(space), q(dtype, {batch, heads, rows, dim}, step, space),
          k(dtype, {batch, heads_kv, keys, dim}, step, space), v(dtype, {batch, heads_kv, keys, dim_v}, step, space),
          out(dtype, {batch, heads, rows, dim_v}, step, space), dout(dtype, {batch, heads, rows, dim_v}, step, space),
          dq(dtype, {batch, heads, rows, dim}, step, space), dk(dtype, {batch, heads_kv, keys, dim}, step, space),
          dv(dtype, {batch, heads_kv, keys, dim_v}, step, space), lse(of_rows, {1, batch, heads, rows}),
          bias(of_rows, {1, heads, random_below(2) ? rows : 1, keys}),
          mask(FLOAT8_E4M3FN, {1, 1, random_below(2) ? rows : 1, keys}), slopes(of_rows, {1, 1, 1, heads}),
          sinks(of_rows, {1, 1, 1, heads}), dsinks(of_rows, {1, 1, 1, heads}) {
        for (long i = 0; i < mask.memory.count; ++i) mask.memory[i] = random_below(4) != 0;
    }

    // The arrays of a pass, in the fixed fields of a call.
    Call call(bool is_backward) {
        Call call = {};
        call.bytes = sizeof(Call);
        call.is_backward = is_backward;
        call.dtype = call.kv_dtype = dtype, call.bias_dtype = of_rows;
        call.batch = batch, call.num_heads = heads, call.num_heads_kv = heads_kv;
        call.seqlen_q = rows, call.seqlen_k = keys, call.head_dim = dim, call.head_dim_v = dim_v;
        call.diagonal = keys - rows, call.window_left = left, call.window_right = right;
        call.scale = scale, call.softcap = softcap, call.kept_scale = 1;
        call.block_rows = call.block_keys = 16;
        for (auto [array, x] : {std::pair{Q, &q}, {K, &k}, {V, &v}, {OUT, &out}}) x->give(call, array);
        // Arrays over rows have three axes, those over heads one or two.
        auto give = [&](AnyArray &x, Array array, int first) {
            x.give(call, array);
            int64_t *strides = call.strides[array];
            for (int axis = 0; axis < 4; ++axis) strides[axis] = axis + first < 4 ? x.strides[axis + first] : 0;
        };
        give(lse, LSE, 1);
        if (has_bias) bias.give(call, BIAS);
        if (has_mask) mask.give(call, MASK);
        if (has_slopes) give(slopes, ALIBI_SLOPES, 2);
        if (has_sinks) give(sinks, SINKS, 2);
        if (is_backward) {
            for (auto [array, x] : {std::pair{DOUT, &dout}, {DQ, &dq}, {DK, &dk}, {DV, &dv}}) x->give(call, array);
            if (has_sinks) give(dsinks, DSINKS, 2);
        }
        return call;
    }
    int run(bool is_backward, int limit, long num_threads) {
        const Call call = this->call(is_backward);
        char *arrays[NUM_ARRAYS];
        for (long i = 0; i < call.num_given; ++i) arrays[i] = call.arrays[call.given[i]];
        const Changing changing = {-1, limit, num_threads, 1, 0, 0, arrays};
        return cuflash_run(&call, &changing);
    }
};

// What a pass should give, and how far from it rounding may bring results: a bound for any order of summation, in which
// `terms` roundings act on the sizes of what is summed.
struct Expected {
    std::vector<double> out, lse, dq, dk, dv, dsinks;
    std::vector<double> most_out, most_lse, most_dq, most_dk, most_dv, most_dsinks;
};

// The numbers of an array, row by row.
std::vector<double> numbers_of(const AnyArray &x) {
    std::vector<double> all;
    for (long b = 0; b < x.sizes[0]; ++b)
        for (long h = 0; h < x.sizes[1]; ++h)
            for (long i = 0; i < x.sizes[2]; ++i)
                for (long j = 0; j < x.sizes[3]; ++j) all.push_back(x.number(b, h, i, j));
    return all;
}

REFERENCE Expected expect(const Problem &p, bool rounds_weights) {
    // The sums here are rounded, too, those of float64 as much as the results.
    const double unit = p.dtype == FLOAT64 ? 0x1p-51 : 0x1p-23, of_dtype = epsilon_of(p.dtype);
    const double of_weights = rounds_weights ? 0x1p-7 : 0;  // weights and gradients of scores in bfloat16
    // Tiny weights are 0, and results of float16 may be subnormal.
    const double flushed = p.dtype == FLOAT64 ? 0x1p-900 : p.dtype == FLOAT16 ? 0x1p-24 : 0x1p-85;
    const std::vector<double> all_q = numbers_of(p.q), all_k = numbers_of(p.k), all_v = numbers_of(p.v),
                              all_dout = numbers_of(p.dout);
    const long all = p.batch * p.heads, all_kv = p.batch * p.heads_kv;
    Expected e;
    for (auto [x, count] : {std::pair{&e.out, all * p.rows * p.dim_v},
                            {&e.lse, all * p.rows},
                            {&e.dq, all * p.rows * p.dim},
                            {&e.dk, all_kv * p.keys * p.dim},
                            {&e.dv, all_kv * p.keys * p.dim_v},
                            {&e.dsinks, p.heads}})
        x->assign(count, 0);
    e.most_out = e.out, e.most_lse = e.lse, e.most_dq = e.dq, e.most_dk = e.dk, e.most_dv = e.dv;
    e.most_dsinks = e.dsinks;
    std::vector<double> s(p.keys), slope(p.keys), weights(p.keys);
    for (long b = 0; b < p.batch; ++b)
        for (long h = 0; h < p.heads; ++h)
            for (long i = 0; i < p.rows; ++i) {
                const long head = b * p.heads + h, head_kv = b * p.heads_kv + h / p.group, row = head * p.rows + i;
                const double *q = &all_q[row * p.dim], *dout = &all_dout[row * p.dim_v];
                const double *k = &all_k[head_kv * p.keys * p.dim], *v = &all_v[head_kv * p.keys * p.dim_v];
                const double infinity = std::numeric_limits<double>::infinity();
                double most = p.has_sinks ? p.sinks.number(0, 0, 0, h) : -infinity, size = 0;
                for (long j = 0; j < p.keys; ++j) {
                    const long distance = j - i - (p.keys - p.rows);
                    double x = 0, of_terms = 0;
                    for (long d = 0; d < p.dim; ++d) {
                        const double term = q[d] * k[j * p.dim + d] * p.scale;
                        x += term, of_terms += std::fabs(term);
                    }
                    const double tanh = p.has_cap ? std::tanh(x / p.softcap) : 0;
                    slope[j] = 1 - tanh * tanh;
                    if (p.has_cap) x = p.softcap * tanh;
                    if (p.has_bias) x += p.bias.number(0, h, i, j), of_terms += 2;
                    if (p.has_slopes) {
                        const double term = p.slopes.number(0, 0, 0, h) * double(std::labs(distance));
                        x -= term, of_terms += std::fabs(term);
                    }
                    bool is_visible = distance >= -p.left && distance <= p.right;
                    if (p.has_mask) is_visible &= *p.mask.at(0, 0, i, j) != 0;
                    s[j] = is_visible ? x : -infinity;
                    if (is_visible) most = x > most ? x : most, size = of_terms > size ? of_terms : size;
                }
                double sum = p.has_sinks && most > -infinity ? std::exp(p.sinks.number(0, 0, 0, h) - most) : 0;
                for (long j = 0; j < p.keys; ++j) sum += weights[j] = most > -infinity ? std::exp(s[j] - most) : 0;
                const double lse = most + std::log(sum);
                e.lse[row] = lse;
                // Relative errors of a weight: of its score, of the sum and of lse.
                const double size_of_lse = std::isinf(lse) ? 0 : std::fabs(lse);
                const double wrong = unit * (double(p.dim + 8) * size + double(p.keys + 16) + 2 * size_of_lse);
                e.most_lse[row] = wrong;
                for (double &weight : weights) weight = sum > 0 ? weight / sum : 0;
                double delta = 0, of_delta = 0;
                for (long d = 0; d < p.dim_v; ++d) {
                    double mean = 0, of_terms = 0;
                    for (long j = 0; j < p.keys; ++j) {
                        const double value = v[j * p.dim_v + d];
                        mean += weights[j] * value, of_terms += weights[j] * std::fabs(value);
                    }
                    e.out[row * p.dim_v + d] = mean;
                    e.most_out[row * p.dim_v + d] =
                        (2 * wrong + of_weights) * of_terms + of_dtype * std::fabs(mean) + flushed * double(p.keys);
                    const double gradient = dout[d];
                    delta += gradient * mean;
                    of_delta += std::fabs(gradient) * (of_terms + std::fabs(mean));
                }
                if (p.has_sinks) {
                    const double weight = most > -infinity ? std::exp(p.sinks.number(0, 0, 0, h) - lse) : 0;
                    e.dsinks[h] -= weight * delta;
                    e.most_dsinks[h] +=
                        (4 * wrong + of_dtype + of_weights + unit * double(p.dim_v + p.rows)) * weight * of_delta +
                        flushed;
                }
                for (long j = 0; j < p.keys; ++j) {
                    double dp = 0, of_dp = 0;
                    for (long d = 0; d < p.dim_v; ++d) {
                        const double gradient = dout[d], term = gradient * v[j * p.dim_v + d];
                        dp += term, of_dp += std::fabs(term);
                        const long at = (head_kv * p.keys + j) * p.dim_v + d;
                        e.dv[at] += weights[j] * gradient;
                        e.most_dv[at] += (2 * wrong + of_weights + unit * double(p.rows * p.group + 8) + of_dtype) *
                                             weights[j] * std::fabs(gradient) +
                                         flushed;
                    }
                    const double of_ds = weights[j] * (of_dp + of_delta) * slope[j];
                    // 1 - tanh(x)^2 is rounded as a number of size 1.
                    const double wrong_ds =
                        (4 * wrong + unit * double(p.dim_v + 8) + of_dtype + 2 * of_weights) * of_ds +
                        (p.has_cap ? 8 * unit : 0) * weights[j] * (of_dp + of_delta) + flushed;
                    const double ds = weights[j] * (dp - delta) * slope[j] * p.scale;
                    for (long d = 0; d < p.dim; ++d) {
                        const double of_q = q[d], of_k = k[j * p.dim + d];
                        const long at = (head_kv * p.keys + j) * p.dim + d;
                        e.dq[row * p.dim + d] += ds * of_k;
                        e.dk[at] += ds * of_q;
                        const double of_sums = unit * double(p.rows * p.group + p.keys) + of_dtype;
                        e.most_dq[row * p.dim + d] +=
                            p.scale * (wrong_ds + of_sums * of_ds) * std::fabs(of_k) + flushed;
                        e.most_dk[at] += p.scale * (wrong_ds + of_sums * of_ds) * std::fabs(of_q) + flushed;
                    }
                }
            }
    return e;
}

void compare(const char *name, const AnyArray &got, const std::vector<double> &expected,
             const std::vector<double> &most, const char *processor, const Problem &p) {
    long n = 0;
    for (long b = 0; b < got.sizes[0]; ++b)
        for (long h = 0; h < got.sizes[1]; ++h)
            for (long i = 0; i < got.sizes[2]; ++i)
                for (long d = 0; d < got.sizes[3]; ++d, ++n) {
                    const double x = got.number(b, h, i, d);
                    CHECK(x == expected[n] || std::fabs(x - expected[n]) <= most[n],
                          "%s: %s[%ld, %ld, %ld, %ld] is %.9g, expected %.9g +- %.2g (dtype %d, %ld / %ld heads, %ld x "
                          "%ld, dims %ld, %ld, bias %d, mask %d, slopes %d, cap %d, sinks %d, window %ld, %ld)",
                          processor, name, b, h, i, d, double(x), double(expected[n]), double(most[n]), int(p.dtype),
                          p.heads, p.heads_kv, p.rows, p.keys, p.dim, p.dim_v, p.has_bias, p.has_mask, p.has_slopes,
                          p.has_cap, p.has_sinks, p.left, p.right);
                }
}

// Both passes by every instruction set, on one thread and on three: the same bits, and nothing written between
// elements.
void test_passes(Dtype dtype) {
    Problem p = Problem::any(dtype);
    std::optional<Expected> found[2];  // without weights in bfloat16, and with them
    const char *before = "";
    for (int limit = 0; limit < 5; ++limit) {
        const char *processor = cuflash_processor(limit);
        if (!std::strcmp(processor, before)) continue;
        before = processor;
        const bool has_pairs = !std::strcmp(processor, "AMX") || !std::strcmp(processor, "AVX-512 with bfloat16");
        // With AMX the weights of float16 are two terms of bfloat16.
        const bool rounds_weights = has_pairs && (dtype == BFLOAT16 || dtype == FLOAT16);
        if (!found[rounds_weights]) found[rounds_weights] = expect(p, rounds_weights);
        const Expected &expected = *found[rounds_weights];
        for (bool is_backward : {false, true}) {
            std::vector<AnyArray *> results = {&p.out, &p.lse};
            if (is_backward) results = {&p.dq, &p.dk, &p.dv, &p.dsinks};
            std::vector<std::vector<char>> first;
            for (long num_threads : {1, 3}) {
                for (AnyArray *x : results) std::memset(x->memory.data, 0x7F, x->memory.count);
                CHECK(p.run(is_backward, limit, num_threads) == DONE, "%s", processor);
                for (size_t n = 0; n < results.size(); ++n) {
                    const Memory<char> &memory = results[n]->memory;
                    if (num_threads == 1) first.emplace_back(memory.data, memory.data + memory.count);
                    CHECK(!std::memcmp(first[n].data(), memory.data, memory.count), "%s: other bits on %ld threads",
                          processor, num_threads);
                }
            }
            if (!is_backward) {
                compare("out", p.out, expected.out, expected.most_out, processor, p);
                compare("lse", p.lse, expected.lse, expected.most_lse, processor, p);
            } else {
                compare("dq", p.dq, expected.dq, expected.most_dq, processor, p);
                compare("dk", p.dk, expected.dk, expected.most_dk, processor, p);
                compare("dv", p.dv, expected.dv, expected.most_dv, processor, p);
                if (p.has_sinks) compare("dsinks", p.dsinks, expected.dsinks, expected.most_dsinks, processor, p);
            }
            for (AnyArray *x : results)
                if (p.step == 2)  // every other element belongs to nobody
                    for (long i = 1; i < p.dim_v && x == &p.out; i += 2) {
                        const char *at = x->at(0, 0, 0, 0) + i * size_of(x->dtype);
                        CHECK(*at == 0x7F, "%s: between elements", processor);
                    }
        }
    }
}

// Each allocation of a call fails once: the call says so, and one that has memory computes what it did before.
void test_no_memory(Dtype dtype, long rows, bool has_bias) {
    Problem p(dtype, 1, 2, 1, rows, 300, 16, 16, has_bias, false, false, false, true, NO_BOUND, 0, 1, 0);
    for (bool is_backward : {false, true})
        for (long num_threads : {1L, 3L}) {
            AnyArray &result = is_backward ? p.dk : p.out;
            CHECK(p.run(is_backward, 0, num_threads) == DONE, "before");
            const std::vector<char> expected(result.memory.data, result.memory.data + result.memory.count);
            long n = 0;
            for (int status = OUT_OF_MEMORY; status == OUT_OF_MEMORY && n < 100; ++n) {
                allocations_left = n;
                status = p.run(is_backward, 0, num_threads);
                allocations_left = -1;
                CHECK(status == DONE || status == OUT_OF_MEMORY, "status %d, %ld allocations", status, n);
            }
            CHECK(n > 1 && n < 100, "%ld allocations", n);
            CHECK(p.run(is_backward, 0, num_threads) == DONE, "after");
            CHECK(!std::memcmp(expected.data(), result.memory.data, result.memory.count), "other bits after a failure");
        }
}

}  // namespace

int main() {
    CHECK(cuflash_call_bytes() == sizeof(Call), "%ld bytes", long(cuflash_call_bytes()));
    for (long n = 0; n < (IS_DENSE ? 100 : 10); ++n)
        for (Dtype dtype : {FLOAT32, BFLOAT16, FLOAT16, FLOAT64}) test_passes(dtype);
    test_no_memory(FLOAT32, 70, false);
    test_no_memory(BFLOAT16, 300, true);
    test_no_memory(FLOAT64, 1, false);
    return report();
}
