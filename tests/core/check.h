// Checks for the tests of the compiled core. A failed check is printed and counted; the test goes on.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

namespace {

long num_checks = 0, num_failures = 0;
constexpr long MOST_SHOWN = 20;

// CHECK(condition, format, ...): the format and its arguments say for which values the condition fails.
#define CHECK(condition, ...)                                               \
    do {                                                                    \
        ++num_checks;                                                       \
        if (!(condition) && ++num_failures <= MOST_SHOWN) {                 \
            std::printf("%s:%d: not %s: ", __FILE__, __LINE__, #condition); \
            std::printf(__VA_ARGS__);                                       \
            std::printf("\n");                                              \
        }                                                                   \
    } while (0)

// What `main` returns: a test without a check is a failure, too.
inline int report() {
    std::printf("%ld checks, %ld failures\n", num_checks, num_failures);
    return num_failures || !num_checks;
}

// Dense samples, and float64 in all operations, where there is time for them.
#if defined(DENSE)
constexpr bool IS_DENSE = true;
#else
constexpr bool IS_DENSE = false;
#endif

// Whether a sanitizer watches.
#if defined(SANITIZED)
constexpr bool IS_SANITIZED = true;
#else
constexpr bool IS_SANITIZED = false;
#endif

// A reference, which computes on one thread: ThreadSanitizer need not watch it, and would take most of its time there.
#define REFERENCE __attribute__((no_sanitize("thread")))

std::mt19937_64 random_bits;  // the same numbers in every run

inline long random_below(long count) { return long(random_bits() % uint64_t(count)); }
inline double random_uniform(double low, double high) {
    return low + (high - low) * std::ldexp(double(random_bits() >> 11), -53);
}
inline double random_normal() {
    static std::normal_distribution<double> normal;
    return normal(random_bits);
}

// How far a number is from what it should be, in units in the last place of that.
template <class T> inline double units(T got, long double exact) {
    constexpr T INFINITE = std::numeric_limits<T>::infinity();
    const T rounded = T(exact), size = std::fabs(rounded);
    if (!std::isfinite(got) || !std::isfinite(rounded))
        return got == rounded || (std::isnan(got) && std::isnan(rounded)) ? 0 : double(INFINITE);
    return double(std::fabs((long double)got - exact) / ((long double)std::nextafter(size, INFINITE) - size));
}

// An array of exactly so many elements, from an address that is a multiple of 64 on: a sanitizer finds accesses
// outside.
template <class T> struct Memory {
    T *data;
    long count;
    explicit Memory(long count) : count(count) {
        void *memory = nullptr;
        if (posix_memalign(&memory, 64, count > 0 ? count * sizeof(T) : 1)) std::abort();
        data = (T *)memory;
        std::memset(memory, 0, count * sizeof(T));
    }
    Memory(const Memory &) = delete;
    ~Memory() { std::free(data); }
    T &operator[](long i) { return data[i]; }
};

}  // namespace
