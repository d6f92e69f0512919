// Loads the compiled core as Python does, on any system, and compares what its functions compute with the formula: both
// passes, by every instruction set of this processor, on one thread, on several, and on those of a long call.
//
//     library PATH_OF_THE_LIBRARY
#if defined(_WIN32)
#include <windows.h>
#undef IN
#undef OUT
#undef UNALIGNED
#else
#include <dlfcn.h>
#endif

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "call.h"

namespace {

int num_failures = 0, num_checks = 0;

#define CHECK(condition, ...)                     \
    do {                                          \
        ++num_checks;                             \
        if (!(condition) && ++num_failures < 9) { \
            std::printf("not %s: ", #condition);  \
            std::printf(__VA_ARGS__);             \
            std::printf("\n");                    \
        }                                         \
    } while (0)

// ---- the library ----------------------------------------------------------------------------------------------------

// `Changing` and `LongCall` of core.cpp.
struct Changing {
    int64_t head_bytes, limit, num_threads, are_disjoint;
    uint64_t seed, offset;
    char *const *arrays;
};
struct LongCall {
    void *running;
    int status;
};

struct Library {
    const char *(*sources)();
    int64_t (*call_bytes)();
    double (*overhead_ns)(const void *);
    const char *(*processor)(int);
    void (*evaluate)(int, int, int, const void *, void *, int64_t);
    int (*run)(const void *, const Changing *);
    void (*start)(const void *, const Changing *, LongCall *);
    int (*wait)(const LongCall *, int);
    void (*finish)(LongCall *);
};

#if defined(_WIN32)
void *open(const char *path) { return (void *)LoadLibraryA(path); }
void *find(void *library, const char *name) { return (void *)GetProcAddress((HMODULE)library, name); }
#else
void *open(const char *path) { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }
void *find(void *library, const char *name) { return dlsym(library, name); }
#endif

template <class F> bool take(void *library, const char *name, F &function) {
    function = (F)find(library, name);
    if (!function) std::printf("there is no function %s\n", name);
    return function;
}

bool take_all(void *from, Library &core) {
    return take(from, "cuflash_sources", core.sources) && take(from, "cuflash_call_bytes", core.call_bytes) &&
           take(from, "cuflash_overhead_ns", core.overhead_ns) && take(from, "cuflash_processor", core.processor) &&
           take(from, "cuflash_evaluate", core.evaluate) && take(from, "cuflash_run", core.run) &&
           take(from, "cuflash_start", core.start) && take(from, "cuflash_wait", core.wait) &&
           take(from, "cuflash_finish", core.finish);
}

// ---- the formula ----------------------------------------------------------------------------------------------------

struct Shape {
    int64_t batch, heads, heads_kv, rows, keys, head_dim, head_dim_v;
    bool is_causal;
    int64_t q_head(int64_t b, int64_t h) const { return (b * heads + h) * rows; }
    int64_t k_head(int64_t b, int64_t h) const { return (b * heads_kv + h / (heads / heads_kv)) * keys; }
    int64_t num_keys_of(int64_t row) const {
        const int64_t last = is_causal ? row + keys - rows + 1 : keys;
        return std::clamp<int64_t>(last, 0, keys);
    }
};

struct Arrays {
    std::vector<double> q, k, v, dout, out, lse, dq, dk, dv;
    explicit Arrays(const Shape &s)
        : q(s.batch * s.heads * s.rows * s.head_dim), k(s.batch * s.heads_kv * s.keys * s.head_dim),
          v(s.batch * s.heads_kv * s.keys * s.head_dim_v), dout(s.batch * s.heads * s.rows * s.head_dim_v),
          out(dout.size()), lse(s.batch * s.heads * s.rows), dq(q.size()), dk(k.size()), dv(v.size()) {}
};

// Both passes with numbers of type T, one by one, in the order of the formula; inputs and results are of T, too.
template <class T> void compute(const Shape &s, double scale, Arrays &x) {
    for (int64_t b = 0; b < s.batch; ++b)
        for (int64_t h = 0; h < s.heads; ++h)
            for (int64_t i = 0; i < s.rows; ++i) {
                const int64_t row = s.q_head(b, h) + i, first = s.k_head(b, h), count = s.num_keys_of(i);
                std::vector<T> p(count), out(s.head_dim_v), dp(count);
                T most = -INFINITY, sum = 0, delta = 0;
                for (int64_t j = 0; j < count; ++j) {
                    T dot = 0;
                    for (int64_t d = 0; d < s.head_dim; ++d)
                        dot += T(x.q[row * s.head_dim + d]) * T(x.k[(first + j) * s.head_dim + d]);
                    p[j] = dot * T(scale);
                    most = std::max(most, p[j]);
                }
                for (int64_t j = 0; j < count; ++j) sum += p[j] = std::exp(p[j] - most);
                for (int64_t j = 0; j < count; ++j) {
                    p[j] /= sum;
                    for (int64_t d = 0; d < s.head_dim_v; ++d) out[d] += p[j] * T(x.v[(first + j) * s.head_dim_v + d]);
                }
                x.lse[row] = count ? most + std::log(sum) : -INFINITY;
                for (int64_t d = 0; d < s.head_dim_v; ++d) {
                    x.out[row * s.head_dim_v + d] = out[d];
                    delta += out[d] * T(x.dout[row * s.head_dim_v + d]);
                }
                for (int64_t j = 0; j < count; ++j) {
                    for (int64_t d = 0; d < s.head_dim_v; ++d) {
                        const int64_t at = (first + j) * s.head_dim_v + d;
                        dp[j] += T(x.dout[row * s.head_dim_v + d]) * T(x.v[at]);
                        x.dv[at] = T(x.dv[at]) + p[j] * T(x.dout[row * s.head_dim_v + d]);
                    }
                    const T ds = p[j] * (dp[j] - delta) * T(scale);
                    for (int64_t d = 0; d < s.head_dim; ++d) {
                        double &dq = x.dq[row * s.head_dim + d], &dk = x.dk[(first + j) * s.head_dim + d];
                        dq = T(dq) + ds * T(x.k[(first + j) * s.head_dim + d]);
                        dk = T(dk) + ds * T(x.q[row * s.head_dim + d]);
                    }
                }
            }
}

// ---- calls ----------------------------------------------------------------------------------------------------------

// Arrays of one dtype, and of the dtype of the softmax, in memory.
struct Storage {
    std::vector<char> bytes;
    int64_t size;
    Storage(const std::vector<double> &x, int64_t dtype) : size(dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2) {
        bytes.resize(x.size() * size);
        for (size_t i = 0; i < x.size(); ++i) {
            const float single = float(x[i]);
            if (size == 8) memcpy(&bytes[i * 8], &x[i], 8);
            if (size == 4) memcpy(&bytes[i * 4], &single, 4);
            if (size == 2) memcpy(&bytes[i * 2], (const char *)&single + 2, 2);  // bfloat16, of numbers that are
        }
    }
    double operator[](int64_t i) const {
        double x = 0;
        float single = 0;
        if (size == 8) return memcpy(&x, &bytes[i * 8], 8), x;
        if (size == 4) memcpy(&single, &bytes[i * 4], 4);
        if (size == 2) memcpy((char *)&single + 2, &bytes[i * 2], 2);
        return single;
    }
};

struct Given {
    Call call{};
    std::vector<char *> arrays;
    Given(const Shape &s, double scale, int64_t dtype, bool is_backward) {
        call.bytes = sizeof(Call);
        call.is_backward = is_backward;
        call.dtype = call.kv_dtype = dtype;
        call.batch = s.batch, call.num_heads = s.heads, call.num_heads_kv = s.heads_kv;
        call.seqlen_q = s.rows, call.seqlen_k = s.keys, call.head_dim = s.head_dim, call.head_dim_v = s.head_dim_v;
        call.diagonal = s.keys - s.rows;
        call.window_left = NO_BOUND, call.window_right = s.is_causal ? 0 : NO_BOUND;
        call.block_rows = call.block_keys = 1;
        call.scale = scale, call.kept_scale = 1;
        call.dropout_heads = s.heads;
    }
    void add(int64_t array, Storage &x, int64_t heads, int64_t length, int64_t width) {
        call.given[call.num_given++] = array;
        arrays.push_back(x.bytes.data());
        call.sizes[array] = x.size;
        call.ends[array] = int64_t(x.bytes.size());
        const int64_t strides[] = {heads * length * width, length * width, width, width > 1 ? 1 : 0};
        memcpy(call.strides[array], strides, sizeof strides);
    }
};

enum Way { ONE_THREAD, FOUR_THREADS, LONG_CALL, NUM_WAYS };

int run(const Library &core, const Given &given, int limit, Way way) {
    const Changing changing{-1, limit, way == ONE_THREAD ? 1 : 4, 0, 0, 0, given.arrays.data()};
    if (way != LONG_CALL) return core.run(&given.call, &changing);
    LongCall call{};
    core.start(&given.call, &changing, &call);
    while (!core.wait(&call, 50)) continue;
    core.finish(&call);
    return call.status;
}

// Compares a result with the formula in float64: twice the error of the plain formula in float32 is allowed, and two
// units in the last place. In float64 errors are smaller by 2^29, and the formula has as large ones.
void compare(const char *what, const char *name, const Storage &found, const std::vector<double> &exact,
             const std::vector<double> &plain, double unit) {
    double most = 0, error = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
        if (std::isinf(exact[i])) continue;
        most = std::max(most, std::abs(exact[i]));
        error = std::max(error, std::abs(plain[i] - exact[i]));
    }
    const double allowed = unit == 0x1p-52 ? 4 * std::ldexp(error, -29) + 4 * unit * most : 2 * error + 2 * unit * most;
    for (size_t i = 0; i < exact.size(); ++i) {
        const bool is_right = std::isinf(exact[i]) ? found[i] == exact[i] : std::abs(found[i] - exact[i]) <= allowed;
        CHECK(is_right, "%s: %s[%zu] is %g, expected %g", what, name, i, found[i], exact[i]);
    }
}

void test(const Library &core, const Shape &s, int64_t dtype, std::mt19937_64 &random) {
    Arrays exact(s);
    std::normal_distribution<double> normal;
    for (auto *x : {&exact.q, &exact.k, &exact.v, &exact.dout})
        for (double &number : *x) {
            float single = float(normal(random));
            const unsigned short none = 0;
            if (dtype == BFLOAT16) memcpy(&single, &none, 2);
            number = single;
        }
    Arrays plain = exact;
    const double scale = 1 / std::sqrt(double(s.head_dim));
    compute<double>(s, scale, exact);
    compute<float>(s, scale, plain);
    // The backward pass takes out and lse as they are rounded here.
    const double unit = dtype == FLOAT64 ? 0x1p-52 : dtype == FLOAT32 ? 0x1p-23 : 0x1p-7;
    const int64_t softmax = dtype == FLOAT64 ? FLOAT64 : FLOAT32;
    for (int limit = 0; limit < 5; ++limit)
        for (int way = 0; way < NUM_WAYS; ++way) {
            char what[200];
            std::snprintf(what, sizeof what, "%s, way %d, dtype %d, shape %d %d %d %d", core.processor(limit), way,
                          int(dtype), int(s.heads), int(s.rows), int(s.keys), int(s.head_dim));
            Storage q(exact.q, dtype), k(exact.k, dtype), v(exact.v, dtype), dout(exact.dout, dtype);
            Storage out(std::vector<double>(exact.out.size(), NAN), dtype);
            Storage lse(std::vector<double>(exact.lse.size(), NAN), softmax);
            Given forward(s, scale, dtype, false);
            forward.add(Q, q, s.heads, s.rows, s.head_dim);
            forward.add(K, k, s.heads_kv, s.keys, s.head_dim);
            forward.add(V, v, s.heads_kv, s.keys, s.head_dim_v);
            forward.add(OUT, out, s.heads, s.rows, s.head_dim_v);
            forward.add(LSE, lse, s.heads, s.rows, 1);
            CHECK(core.overhead_ns(&forward.call) > 0, "%s", what);
            const int status = run(core, forward, limit, Way(way));
            CHECK(status == 0, "%s: forward %d", what, status);
            compare(what, "out", out, exact.out, plain.out, unit);
            compare(what, "lse", lse, exact.lse, plain.lse, softmax == FLOAT64 ? 0x1p-52 : 0x1p-23);

            Storage dq(std::vector<double>(exact.dq.size(), NAN), dtype), dk(exact.k, dtype), dv(exact.v, dtype);
            Given backward(s, scale, dtype, true);
            backward.add(Q, q, s.heads, s.rows, s.head_dim);
            backward.add(K, k, s.heads_kv, s.keys, s.head_dim);
            backward.add(V, v, s.heads_kv, s.keys, s.head_dim_v);
            backward.add(OUT, out, s.heads, s.rows, s.head_dim_v);
            backward.add(DOUT, dout, s.heads, s.rows, s.head_dim_v);
            backward.add(LSE, lse, s.heads, s.rows, 1);
            backward.add(DQ, dq, s.heads, s.rows, s.head_dim);
            backward.add(DK, dk, s.heads_kv, s.keys, s.head_dim);
            backward.add(DV, dv, s.heads_kv, s.keys, s.head_dim_v);
            const int status_of_backward = run(core, backward, limit, Way(way));
            CHECK(status_of_backward == 0, "%s: backward %d", what, status_of_backward);
            compare(what, "dq", dq, exact.dq, plain.dq, unit);
            compare(what, "dk", dk, exact.dk, plain.dk, unit);
            compare(what, "dv", dv, exact.dv, plain.dv, unit);
        }
}

void test_functions(const Library &core) {
    constexpr int COUNT = 1001;
    std::vector<double> x(COUNT), y(COUNT);
    for (int i = 0; i < COUNT; ++i) x[i] = -20 + 0.04 * i;
    for (int limit = 0; limit < 5; ++limit) {
        core.evaluate(limit, true, 0, x.data(), y.data(), COUNT);
        for (int i = 0; i < COUNT; ++i)
            CHECK(std::abs(y[i] - std::exp2(x[i])) <= 4e-16 * std::exp2(x[i]), "exp2(%g) is %.17g", x[i], y[i]);
        core.evaluate(limit, true, 1, x.data(), y.data(), COUNT);
        for (int i = 0; i < COUNT; ++i)
            CHECK(std::abs(y[i] - std::tanh(x[i])) <= 4e-16, "tanh(%g) is %.17g", x[i], y[i]);
    }
}

}  // namespace

int main(int count, char **words) {
    if (count != 2) return std::printf("usage: library PATH_OF_THE_LIBRARY\n"), 2;
    void *loaded = open(words[1]);
    Library core;
    if (!loaded || !take_all(loaded, core)) return std::printf("%s cannot be loaded\n", words[1]), 2;
    CHECK(core.call_bytes() == int64_t(sizeof(Call)), "%" PRId64 " bytes", core.call_bytes());
    CHECK(std::string(core.sources()).size() == 64, "%s", core.sources());
    std::mt19937_64 random(0);
    test_functions(core);
    for (int64_t dtype : {FLOAT32, FLOAT64, BFLOAT16}) {
        for (const Shape &shape : {Shape{40, 4, 2, 5, 7, 3, 4, false}, Shape{2, 4, 2, 70, 130, 32, 32, true},
                                   Shape{4, 3, 3, 1, 700, 64, 64, true}, Shape{1, 1, 1, 90, 60, 16, 24, true}})
            test(core, shape, dtype, random);
    }
    std::printf("%s to %s: %d checks, %d failures\n", core.processor(0), core.processor(4), num_checks, num_failures);
    return num_failures != 0;
}
