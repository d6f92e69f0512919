// Conversions of all numbers of 16 and of 8 bits, by their definition; rows of any stride, and transposed tiles.
#pragma once

#include "simd/bf16x2.h"

#include "arrays.h"

namespace {
namespace conversion_tests {

bool is_same(double x, double y) {
    return std::isnan(x) ? std::isnan(y) : x == y && std::signbit(x) == std::signbit(y);
}

// A format of 16 bits, whose numbers are rounded to nearest even.
struct Format {
    const char *name;
    int exponent_bits, fraction_bits;
    float (*from)(uint16_t);
    uint16_t (*to)(float);
    double exact(uint32_t bits) const { return number_of(bits, exponent_bits, fraction_bits); }
    uint32_t infinity() const { return ((1u << exponent_bits) - 1) << fraction_bits; }
};

void test_format(const Format &format) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
        const double exact = format.exact(bits);
        const float x = format.from(uint16_t(bits));
        CHECK(is_same(x, exact), "%s %04x is %g, got %g", format.name, bits, exact, double(x));
        const uint16_t back = format.to(x);
        CHECK(std::isnan(exact) ? std::isnan(format.exact(back)) : back == bits, "%s %04x to %04x", format.name, bits,
              unsigned(back));
    }
    // Numbers between neighbours, up to the one that would follow the largest: the middle goes to the even one.
    for (uint32_t sign : {0u, 0x8000u})
        for (uint32_t bits = 0; bits < format.infinity(); ++bits) {
            const double low = format.exact(bits);
            const bool is_largest = bits + 1 == format.infinity();
            const double step = is_largest ? low - format.exact(bits - 1) : format.exact(bits + 1) - low;
            const float middle = float(low + step / 2);
            // Of bfloat16 in a float, whose subnormal numbers have fewer bits, the middle is exact all the same.
            const float numbers[] = {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, INFINITY)};
            const uint32_t expected[] = {bits, bits + (bits & 1), bits + 1};
            for (int n = 0; n < 3; ++n) {
                const uint16_t got = format.to(sign ? -numbers[n] : numbers[n]);
                CHECK(got == (expected[n] | sign), "%s of %.9g: %04x, expected %04x", format.name, double(numbers[n]),
                      unsigned(got), expected[n] | sign);
            }
        }
    for (float x : {std::numeric_limits<float>::max(), INFINITY}) {
        CHECK(format.to(x) == format.infinity(), "%s of %g", format.name, double(x));
        CHECK(format.to(-x) == (format.infinity() | 0x8000), "%s of %g", format.name, double(-x));
    }
    for (uint32_t bits : {0x7F800001u, 0x7FFFFFFFu, 0x7FC00000u, 0xFF800001u, 0xFFFFFFFFu}) {  // signalling ones, too
        float x;
        std::memcpy(&x, &bits, 4);
        CHECK(std::isnan(format.exact(format.to(x))), "%s of NaN %08x: %04x", format.name, bits,
              unsigned(format.to(x)));
    }
}

void test_float8() {
    for (uint32_t bits = 0; bits < 256; ++bits) {
        CHECK(is_same(from_e4m3fn(uint8_t(bits)), number_of(bits, 4, 3, true)), "e4m3fn %02x", bits);
        CHECK(is_same(from_e5m2(uint8_t(bits)), number_of(bits, 5, 2)), "e5m2 %02x", bits);
    }
}

constexpr Dtype DTYPES[] = {FLOAT16, BFLOAT16, FLOAT32, FLOAT64, FLOAT8_E4M3FN, FLOAT8_E5M2};

// Rows of every dtype that calls in T have, length and stride: what is loaded, and that nothing next to it is written.
template <class T> void test_rows(Dtype dtype) {
    const long size = size_of(dtype);
    for (long count = 0; count <= 70; ++count)
        for (long stride : {1L, 2L, 5L, -1L, -3L}) {
            const long extent = count ? (count - 1) * std::labs(stride) + 1 : 0;
            Memory<char> array(extent * size);
            for (long i = 0; i < extent; ++i) {
                const double x = random_normal();
                const float single = float(x);
                const uint16_t half = dtype == BFLOAT16 ? to_bfloat16(single) : to_float16(single);
                char *at = array.data + i * size;
                if (dtype == FLOAT64) std::memcpy(at, &x, 8);
                if (dtype == FLOAT32) std::memcpy(at, &single, 4);
                if (size == 2) std::memcpy(at, &half, 2);
                if (size == 1) *at = char(random_bits());
            }
            char *first = array.data + (stride < 0 && count ? (extent - 1) * size : 0);
            Memory<T> row(count);
            load_row(first, dtype, stride, count, row.data);
            for (long i = 0; i < count; ++i) {
                const double exact = element(first + i * stride * size, dtype);
                CHECK(is_same(row[i], T(exact)), "dtype %d, stride %ld: %g, got %g", int(dtype), stride, exact,
                      double(row[i]));
            }
            if (size == 1) continue;  // no results are fp8
            Memory<char> stored(extent * size);
            std::memset(stored.data, 0x55, extent * size);
            char *to = stored.data + (first - array.data);
            store_row(row.data, dtype, stride, count, to);
            for (long i = 0; i < extent * size; ++i) {
                const long at = i / size - (first - array.data) / size;
                const bool is_element = at % stride == 0;
                // What was loaded from half precision or the dtype of the computation is stored as it was.
                CHECK(stored[i] == (is_element ? array[i] : 0x55), "dtype %d, stride %ld, byte %ld", int(dtype), stride,
                      i);
            }
        }
}

// Vectors of half precision are converted in registers: every number, in every lane.
template <class T, class S> void test_vectors(double (*exact)(uint32_t)) {
    constexpr long N = LANES<T>;
    Memory<S> numbers(65536 + N);
    for (long i = 0; i < numbers.count; ++i) numbers[i].bits = uint16_t(i);
    for (long i = 0; i < 65536; i += N)
        for (long shift : {0L, N - 1}) {
            const Vector<T> x = load_as<T>(numbers.data + i + shift);
            for (long lane = 0; lane < N; ++lane) {
                const uint32_t bits = numbers[i + shift + lane].bits;
                CHECK(is_same(x[lane], exact(bits)), "%04x: %g, got %g", bits, exact(bits), double(x[lane]));
            }
        }
}

template <class T> void test_transposes() {
    constexpr long N = LANES<T>;
    for (long num_rows = 1; num_rows <= 2 * N + 1; ++num_rows)
        for (long num_columns = N; num_columns <= 3 * N; num_columns += N) {
            const long whole = (num_rows + N - 1) / N * N, stride = num_columns + 1, out_stride = whole + 2;
            Memory<T> in((num_rows - 1) * stride + num_columns), out(num_columns * out_stride);
            for (long i = 0; i < in.count; ++i) in[i] = T(i + 1);
            for (long i = 0; i < out.count; ++i) out[i] = -1;
            transpose(in.data, stride, num_rows, num_columns, out.data, out_stride);
            for (long column = 0; column < num_columns; ++column)
                for (long row = 0; row < out_stride; ++row) {
                    const T expected = row >= whole ? T(-1) : row < num_rows ? in[row * stride + column] : T(0);
                    CHECK(out[column * out_stride + row] == expected, "%ld x %ld, element %ld, %ld", num_rows,
                          num_columns, row, column);
                }
        }
}

// Rows of bf16x2: neighbours, and two rows joined, of any stride, with zeros after them.
void test_bf16x2() {
    for (long dim : {1L, 2L, 15L, 16L, 31L, 64L, 511L, 512L, 513L, 1030L})
        for (long step : {1L, 3L, -2L})
            for (bool has_second : {true, false}) {
                const long padded = round_up(dim, 16), extent = (dim - 1) * std::labs(step) + 1;
                Memory<uint16_t> first(extent), second(has_second ? extent : 0), copied(padded);
                for (long i = 0; i < extent; ++i) {
                    first[i] = uint16_t(random_bits());
                    if (has_second) second[i] = uint16_t(random_bits());
                }
                const long start = step < 0 ? extent - 1 : 0;
                auto from = [&](Memory<uint16_t> &row) { return (const char *)(row.data + start); };
                Memory<float> joined(padded);
                interleave(from(first), has_second ? from(second) : nullptr, step, dim, joined.data, padded);
                for (bool is_negative : {false, true}) {
                    if (is_negative) negate_bf16x2(joined.data, padded);
                    for (long d = 0; d < padded; ++d) {
                        uint32_t word;
                        std::memcpy(&word, &joined[d], 4);
                        const uint32_t low = d < dim ? first[start + d * step] : 0;
                        const uint32_t high = d < dim && has_second ? second[start + d * step] : 0;
                        const uint32_t expected = (high << 16 | low) ^ (is_negative ? 0x80008000 : 0);
                        CHECK(word == expected, "dim %ld, step %ld, word %ld", dim, step, d);
                    }
                }
                load_bits(from(first), step, dim, copied.data, padded);
                for (long d = 0; d < padded; ++d)
                    CHECK(copied[d] == (d < dim ? first[start + d * step] : 0), "dim %ld, step %ld, %ld", dim, step, d);
            }
}

void run() {
    test_format({"float16", 5, 10, from_float16, to_float16});
    test_format({"bfloat16", 8, 7, from_bfloat16, to_bfloat16});
    test_float8();
    for (Dtype dtype : DTYPES) {
        if (dtype == FLOAT16 && !SERVES_FLOAT16) continue;
        if (dtype != FLOAT64) test_rows<float>(dtype);
        if constexpr (IS_DENSE)
            if (dtype == FLOAT64 || size_of(dtype) == 1) test_rows<double>(dtype);
    }
    test_vectors<float, Bfloat16>([](uint32_t bits) { return number_of(bits, 8, 7); });
    test_vectors<float, Float16>([](uint32_t bits) { return number_of(bits, 5, 10); });
    test_transposes<float>();
    if constexpr (IS_DENSE) test_transposes<double>();
    test_bf16x2();
}

}  // namespace conversion_tests
}  // namespace
