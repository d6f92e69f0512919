// Functions of vectors against those of the C library in a wider type, and permutations of lanes against loops.
#pragma once

#include "simd/vectors.h"

#include "check.h"

namespace {
namespace vector_tests {

// Where products are rounded before they are added, results are further off. With the checks of a sanitizer between
// them, compilers do not fuse all.
constexpr bool IS_FUSED = HAS_FMA && !IS_SANITIZED;
constexpr double UNITS_OF_EXP2 = IS_FUSED ? 1 : 1.3, UNITS_OF_SCALED = IS_FUSED ? 1.15 : 1.4;
constexpr double UNITS_OF_TANH = 2.6, UNITS_OF_LOG = 1;

// A function of vectors, of a single number. Other lanes have other numbers, so that none depends on its neighbours.
template <class T, class F> T of_one(F function, T x) {
    Vector<T> lanes = iota<T>();
    const int lane = int(random_below(LANES<T>));
    lanes[lane] = x;
    return Vector<T>(function(lanes))[lane];
}

// Calls run(x, function(x)) for numbers of all signs and exponents, NaN, infinities and subnormal numbers among them.
template <class T, class F, class Run> void for_every_exponent(F function, Run run) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    constexpr int MANTISSA = Vectors<T>::MANTISSA, EXPONENTS = sizeof(T) == 4 ? 256 : 2048;
    constexpr long COUNT = (IS_DENSE ? 16 : 1) * (sizeof(T) == 4 ? 1024 : 64);
    constexpr Bits FRACTION = (Bits(1) << MANTISSA) - 1;
    T x[LANES<T>], y[LANES<T>];
    for (Bits high = 0; high < 2 * EXPONENTS; ++high)
        for (long i = 0; i < COUNT; i += LANES<T>) {
            for (long lane = 0; lane < LANES<T>; ++lane) {
                const Bits edges[] = {0, 1, FRACTION};  // and random fractions
                const Bits fraction = i + lane < 3 ? edges[i + lane] : Bits(random_bits()) & FRACTION;
                const Bits bits = high << MANTISSA | fraction;
                std::memcpy(&x[lane], &bits, sizeof bits);
            }
            store(y, Vector<T>(function(load(x))));
            for (long lane = 0; lane < LANES<T>; ++lane) run(x[lane], y[lane]);
        }
}

// The exact result in the next wider type: float in double, double in long double.
template <class T> using Wide = std::conditional_t<sizeof(T) == 4, double, long double>;

template <class T> void test_exp2() {
    constexpr T LOWEST = Vectors<T>::LOWEST, HIGHEST = Vectors<T>::HIGHEST;
    for_every_exponent<T>([](Vector<T> x) { return exp2<T>(x); },
                          [](T x, T y) {
                              if (std::isnan(x)) CHECK(std::isnan(y), "exp2(NaN) = %g", double(y));
                              if (x < LOWEST) CHECK(y == 0, "exp2(%g) = %g", double(x), double(y));
                              if (x >= HIGHEST) CHECK(std::isinf(y) && y > 0, "exp2(%g) = %g", double(x), double(y));
                              if (x >= LOWEST && x < HIGHEST - 1)
                                  CHECK(units(y, std::exp2(Wide<T>(x))) <= UNITS_OF_EXP2, "exp2(%.17g) = %.17g",
                                        double(x), double(y));
                          });
    for (long n = 0; n < (IS_DENSE ? 4'000'000 : 200'000); ++n) {  // evenly over exponents, too
        const T x = T(random_uniform(LOWEST, HIGHEST - 1));
        const T y = of_one<T>([](Vector<T> x) { return exp2<T>(x); }, x);
        CHECK(units(y, std::exp2(Wide<T>(x))) <= UNITS_OF_EXP2, "exp2(%.17g) = %.17g", double(x), double(y));
    }
}

// Powers of scaled numbers, as the softmax has them: the factor is positive, and no power is large.
template <class T> void test_exp2_of_scaled() {
    constexpr T LOWEST = Vectors<T>::LOWEST, MOST = 20;
    for (int exponent = -120; exponent <= 100; exponent += 5) {
        const T factor = T(std::ldexp(1.0 + 0.4426950408889634, exponent));
        const Exp2OfScaled<T> power(factor);
        auto apply = [&](Vector<T> x) { return power(x); };
        auto with_factor = [&](Vector<T> x) { return exp2<T>(x, splat(factor)); };
        for (long n = 0; n < (IS_DENSE ? 100'000 : 1000); ++n) {
            const T x = T(random_uniform(LOWEST * 1.1, MOST) / factor);
            const Wide<T> exponent_of_two = Wide<T>(x) * factor;
            const T results[] = {of_one<T>(apply, x), of_one<T>(with_factor, x)};
            for (T y : results) {
                // Products of float are exact in double. Those of double are rounded where there is no wider type.
                const double most = UNITS_OF_SCALED + (sizeof(T) == 8 && sizeof(Wide<T>) == 8 ? 700 : 0);
                const bool is_near_limit = std::fabs(double(exponent_of_two / LOWEST) - 1) < 1e-6;
                if (exponent_of_two < LOWEST && !is_near_limit) CHECK(y == 0, "2^(%g * %g)", double(x), double(factor));
                // Without FMA the product is rounded: by up to half a unit in the last place of 128 or 1024.
                const double of_product = HAS_FMA ? 0 : std::fabs(double(exponent_of_two)) * 0.7;
                if (exponent_of_two >= LOWEST && !is_near_limit)
                    CHECK(units(y, std::exp2(exponent_of_two)) <= most + of_product, "2^(%.17g * %.17g) = %.17g",
                          double(x), double(factor), double(y));
            }
        }
        const T infinity = std::numeric_limits<T>::infinity(), largest = std::numeric_limits<T>::max();
        CHECK(of_one<T>(apply, -infinity) == 0, "factor %g", double(factor));
        CHECK(std::isnan(of_one<T>(apply, std::numeric_limits<T>::quiet_NaN())), "factor %g", double(factor));
        if (factor > 1) CHECK(of_one<T>(apply, -largest) == 0, "factor %g", double(factor));
        CHECK(of_one<T>(apply, T(0)) == 1 && of_one<T>(apply, T(-0.0)) == 1, "factor %g", double(factor));
    }
}

template <class T> void check_tanh(T x, T y, double most) {
    if (std::isnan(x)) CHECK(std::isnan(y), "tanh(NaN) = %g", double(y));
    // A subnormal number has no unit of its own, and may be flushed where the processor does that.
    if (std::fabs(x) >= std::numeric_limits<T>::min())
        CHECK(units(y, std::tanh(Wide<T>(x))) <= most, "tanh(%.17g) = %.17g", double(x), double(y));
    if (!std::isnan(x)) CHECK(std::signbit(x) == std::signbit(y), "the sign of tanh(%g)", double(x));
}

template <class T> void test_tanh() {
    auto one = [](Vector<T> x) {
        Vector<T> values[] = {x};
        tanh_of_each<T>(values);
        return values[0];
    };
    for_every_exponent<T>(one, [](T x, T y) { check_tanh(x, y, UNITS_OF_TANH); });
    // Several vectors at once get what each would get alone.
    for (long n = 0; n < 1000; ++n) {
        Vector<T> four[4], alone[4];
        for (int u = 0; u < 4; ++u)
            for (int lane = 0; lane < LANES<T>; ++lane) alone[u][lane] = four[u][lane] = T(random_normal() * 3);
        tanh_of_each<T>(four);
        for (int u = 0; u < 4; ++u) {
            alone[u] = one(alone[u]);
            CHECK(!std::memcmp(&alone[u], &four[u], sizeof alone[u]), "vector %d of 4", u);
        }
    }
}

template <class T> void test_log() {
    for_every_exponent<T>([](Vector<T> x) { return log<T>(x); },
                          [](T x, T y) {
                              if (std::isnan(x)) CHECK(std::isnan(y), "log(NaN) = %g", double(y));
                              if (x >= std::numeric_limits<T>::min() && x <= std::numeric_limits<T>::max())
                                  CHECK(units(y, std::log(Wide<T>(x))) <= UNITS_OF_LOG, "log(%.17g) = %.17g", double(x),
                                        double(y));
                              if (!std::isnan(x))  // of one number: subnormal and negative ones, too
                                  CHECK(units(log_of(x), std::log(Wide<T>(x))) <= UNITS_OF_LOG, "log_of(%.17g) = %.17g",
                                        double(x), double(log_of(x)));
                          });
    for (long n = 0; n < (IS_DENSE ? 4'000'000 : 200'000); ++n) {  // around 1, where the logarithm is near 0
        const T x = T(random_uniform(0.5, 2));
        const T y = of_one<T>([](Vector<T> x) { return log<T>(x); }, x);
        CHECK(units(y, std::log(Wide<T>(x))) <= UNITS_OF_LOG, "log(%.17g) = %.17g", double(x), double(y));
    }
    CHECK(of_one<T>([](Vector<T> x) { return log<T>(x); }, T(1)) == 0, "log(1)");
}

void test_exp_of() {
    for (long n = 0; n < 100'000; ++n) {
        const double x = random_uniform(-660, 705);
        // x / log(2) is rounded, and so is 1 / log(2): by 2^-53 of x and by an eighth of that.
        CHECK(units(exp_of(x), std::exp((long double)x)) <= UNITS_OF_EXP2 + 1.13 * std::fabs(x), "exp(%.17g) = %.17g",
              x, exp_of(x));
    }
    const double infinity = std::numeric_limits<double>::infinity();
    CHECK(exp_of(-infinity) == 0 && exp_of(0) == 1 && std::isinf(exp_of(infinity)), "limits of exp");
    CHECK(std::isnan(exp_of(std::nan(""))), "exp(NaN)");
}

// Where a quotient is corrected once (simd/avx512.h), an estimate of 1 / y that is off by e leaves e^2 of it: 2^-28 of
// float's and 2^-56 of double's, whose estimate was corrected before. A unit is 2^-24 or 2^-53 of the quotient, or
// more.
template <class T> void test_quotient() {
    const double most = !HAS_SCALING     ? 0.5
                        : sizeof(T) == 4 ? 0.5 + std::ldexp(1, 24 - 28)
                                         : 0.5 + std::ldexp(1, 53 - 56);
    for (long n = 0; n < 100'000; ++n) {
        const T x = T(random_normal()), y = T(std::ldexp(1 + std::fabs(random_normal()), int(random_below(40)) - 20));
        const T got = of_one<T>([&](Vector<T> lanes) { return quotient<T>(lanes, splat(y)); }, x);
        CHECK(units(got, (long double)x / y) <= most + 1e-3, "%.17g / %.17g = %.17g", double(x), double(y),
              double(got));
    }
}

// Single instructions, which NaN and signs go through as through the loops of which they take the place.
template <class T> void test_comparisons() {
    const T nan = std::numeric_limits<T>::quiet_NaN(), infinity = std::numeric_limits<T>::infinity();
    const T numbers[] = {
        T(0), T(-0.0), T(1), T(-1), T(3.5), infinity, -infinity, nan, std::numeric_limits<T>::denorm_min()};
    auto is_same = [](T x, T y) { return (std::isnan(x) && std::isnan(y)) || x == y; };
    for (T x : numbers)
        for (T y : numbers) {
            const T most = of_one<T>([&](Vector<T> lanes) { return larger<T>(lanes, splat(y)); }, x);
            CHECK(is_same(most, x > y ? x : y), "larger(%g, %g) = %g", double(x), double(y), double(most));
            if (std::isnan(y)) continue;
            const T least = of_one<T>([&](Vector<T> lanes) { return at_most<T>(lanes, y); }, x);
            CHECK(is_same(least, x > y ? y : x), "at_most(%g, %g) = %g", double(x), double(y), double(least));
            for (int lane = 0; lane < LANES<T>; ++lane) {
                Vector<T> lanes = splat(-infinity);
                lanes[lane] = x;
                CHECK(any_above<T>(lanes, y) == (x > y), "any_above(%g, %g), lane %d", double(x), double(y), lane);
            }
        }
    for (T x : numbers) {
        const T all = splat(x)[random_below(LANES<T>)];
        CHECK(is_same(all, x) && std::signbit(all) == std::signbit(x), "splat(%g) = %g", double(x), double(all));
        const T size = of_one<T>([](Vector<T> lanes) { return size_of_each<T>(lanes); }, x);
        CHECK(is_same(size, std::fabs(x)) && !std::signbit(size), "size of %g is %g", double(x), double(size));
    }
    for (long n = 0; n < 10'000; ++n) {
        const T sum = T(random_normal()), x = T(random_normal()), y = T(random_normal());
        const T got = of_one<T>([&](Vector<T> lanes) { return add_product(splat(sum), lanes, splat(y)); }, x);
        const T product = x * y, expected = HAS_FMA ? std::fma(x, y, sum) : T(sum + product);
        CHECK(got == expected, "%.17g + %.17g * %.17g", double(sum), double(x), double(y));
    }
}

template <class T> void test_lanes() {
    constexpr int N = LANES<T>;
    T x[N], y[N];
    for (long n = 0; n < 1000; ++n) {
        T sum = 0, most = -std::numeric_limits<T>::infinity();
        for (int i = 0; i < N; ++i) {
            x[i] = T(random_below(2001) - 1000);  // whose sums are exact
            y[i] = T(random_below(2001) - 1000);
            sum += x[i];
            most = x[i] > most ? x[i] : most;
        }
        CHECK(sum_of_lanes<T>(load(x)) == sum, "sum of lanes");
        CHECK(largest_lane<T>(load(x)) == most, "largest lane");
        Integers<T> from;
        for (int i = 0; i < N; ++i) from[i] = random_below(2 * N);
        const Vector<T> picked = pick<T>(load(x), load(y), from);
        for (int i = 0; i < N; ++i) CHECK(picked[i] == (from[i] < N ? x[from[i]] : y[from[i] - N]), "lane %d", i);
        Vector<T> rows[N];
        T sums[N] = {};
        for (int r = 0; r < N; ++r)
            for (int i = 0; i < N; ++i) sums[r] += rows[r][i] = T(random_below(2001) - 1000);
        const Vector<T> got = sums_of_lanes<T>(rows);
        for (int r = 0; r < N; ++r) CHECK(got[r] == sums[r], "sum of row %d", r);
    }
    for (int i = 0; i < N; ++i) CHECK(iota<T>()[i] == i, "iota, lane %d", i);
    T apart[3 * N];
    for (long at = 0; at < N; ++at) {  // any address of an element
        store(apart + at, iota<T>());
        for (int i = 0; i < N; ++i) CHECK(load(apart + at)[i] == i && apart[at + i] == i, "at %ld", at);
    }
}

template <class T> void test_transpose_square() {
    constexpr long N = LANES<T>, STRIDE = N + 3, OUT_STRIDE = N + 1;
    for (long count = 0; count <= N; ++count) {
        Memory<T> in(count ? (count - 1) * STRIDE + N : 0), out(N * OUT_STRIDE);
        for (long i = 0; i < in.count; ++i) in[i] = T(i + 1);
        for (long i = 0; i < out.count; ++i) out[i] = -1;
        transpose_square(in.data, STRIDE, out.data, OUT_STRIDE, count);
        for (long column = 0; column < N; ++column)
            for (long row = 0; row < OUT_STRIDE; ++row) {
                const T expected = row >= N ? T(-1) : row < count ? in[row * STRIDE + column] : T(0);
                CHECK(out[column * OUT_STRIDE + row] == expected, "%ld rows, element %ld, %ld", count, row, column);
            }
    }
}

// What is rounded to bfloat16 afterwards may be further off.
void test_functions_for_bfloat16() {
    for_every_exponent<float>([](Vector<float> x) { return exp2_of_half_less(x); },
                              [](float x, float y) {
                                  if (std::isnan(x)) CHECK(std::isnan(y), "exp2(NaN) = %g", y);
                                  if (x < Vectors<float>::LOWEST) CHECK(y == 0, "exp2(%g) = %g", x, y);
                                  if (x > 129) CHECK(std::isinf(y), "exp2(%g) = %g", x, y);
                                  if (x >= Vectors<float>::LOWEST && x < 127)
                                      CHECK(units(y, std::exp2(double(x) - 0.5)) <= 2.5, "2^(%.9g - 1/2) = %.9g", x, y);
                              });
    auto one = [](Vector<float> x) {
        Vector<float> values[] = {x};
        rough_tanh_of_each(values);
        return values[0];
    };
    for_every_exponent<float>(one, [](float x, float y) { check_tanh(x, y, 5); });
}

template <class T> void test_all() {
    test_exp2<T>();
    test_exp2_of_scaled<T>();
    test_tanh<T>();
    test_log<T>();
    test_quotient<T>();
    test_comparisons<T>();
    test_lanes<T>();
    test_transpose_square<T>();
}

void run() {
    test_all<float>();
    test_all<double>();
    test_exp_of();
    if (HAS_BF16X2) test_functions_for_bfloat16();
}

}  // namespace vector_tests
}  // namespace
