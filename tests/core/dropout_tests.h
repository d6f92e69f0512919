// Which weights dropout keeps: known vectors of Philox, and every weight by a scalar Philox.
#pragma once

#include "dropout.h"

#include "check.h"

namespace {
namespace dropout_tests {

struct Four {
    uint32_t words[4];
};

// Philox-4x32-7 as its authors define it (Salmon and others, 2011).
Four philox(Four counter, uint32_t key0, uint32_t key1) {
    uint32_t *c = counter.words;
    for (int round = 0; round < 7; ++round, key0 += 0x9E3779B9, key1 += 0xBB67AE85) {
        const uint64_t product0 = uint64_t(0xD2511F53) * c[0], product1 = uint64_t(0xCD9E8D57) * c[2];
        const Four next = {{uint32_t(product1 >> 32) ^ c[1] ^ key0, uint32_t(product1),
                            uint32_t(product0 >> 32) ^ c[3] ^ key1, uint32_t(product0)}};
        counter = next;
    }
    return counter;
}

// The counters and results that the authors publish.
struct KnownVector {
    Four counter;
    uint32_t key[2];
    Four result;
};
constexpr KnownVector KNOWN[] = {
    {{{0, 0, 0, 0}}, {0, 0}, {{0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48}}},
    {{{0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF}},
     {0xFFFFFFFF, 0xFFFFFFFF},
     {{0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662}}},
    {{{0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}},
     {0xA4093822, 0x299F31D0},
     {{0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A}}},
};

// The 16 bits of a weight: the fewest steps of the rate that drop it, less one.
uint32_t draw_of(uint64_t seed, uint64_t offset, uint64_t head, long row, long column) {
    const long first = column / 16 * 16;
    unsigned char kept[2 * VECTOR_BYTES];
    long low = 0, high = 65536;  // kept with `low` steps, dropped with `high`
    while (high - low > 1) {
        const long steps = (low + high) / 2;
        kept_weights(seed, offset, head, steps, row, 1, first, 16, kept, sizeof kept);
        (kept[column - first] ? low : high) = steps;
    }
    return uint32_t(low);
}

void test_known_vectors() {
    for (const KnownVector &known : KNOWN) {
        const Four result = philox(known.counter, known.key[0], known.key[1]);
        for (int n = 0; n < 4; ++n) CHECK(result.words[n] == known.result.words[n], "word %d", n);
        // The same words by the kernels, where the counter is a column, a row, a head and the offset.
        const uint32_t *c = known.counter.words;
        const long column = long(c[0] / 4) * 16 + c[0] % 4 * 2, row = long(c[1] / 8) * 16 + c[1] % 8;
        const uint64_t seed = uint64_t(known.key[1]) << 32 | known.key[0];
        for (int n = 0; n < 4; ++n) {
            const long at = column + n / 2 + n % 2 * 8;
            const uint32_t low = draw_of(seed, c[3], c[2], row, at), high = draw_of(seed, c[3], c[2], row + 8, at);
            const uint32_t expected = known.result.words[n];
            CHECK((high << 16 | low) == expected, "%08x, got %04x%04x", expected, high, low);
        }
    }
}

bool is_kept(uint64_t seed, uint64_t offset, uint64_t head, long steps, long i, long j) {
    const Four counter = {
        {uint32_t(4 * (j / 16) + j % 8 / 2), uint32_t(8 * (i / 16) + i % 8), uint32_t(head), uint32_t(offset)}};
    const uint32_t word = philox(counter, uint32_t(seed), uint32_t(seed >> 32)).words[2 * (j % 2) + j % 16 / 8];
    return long(i % 16 < 8 ? word & 0xFFFF : word >> 16) >= steps;
}

// Slices of a head: any rows, and columns from a multiple of 16 on.
void test_slices() {
    for (long n = 0; n < (IS_DENSE ? 3000 : 150); ++n) {
        const uint64_t seed = random_bits(), offset = random_bits() >> 32, head = random_bits() >> 32;
        const long steps = n % 5 ? random_below(65535) + 1 : n % 2 ? 65535 : 1;
        const long first_row = random_below(40), num_rows = random_below(40) + 1, num_columns = random_below(200) + 1;
        const long first_column = 16 * random_below(1 << 20);
        const long stride = (num_columns + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES;
        Memory<unsigned char> kept(num_rows * stride);
        kept_weights(seed, offset, head, steps, first_row, num_rows, first_column, num_columns, kept.data, stride);
        for (long i = 0; i < num_rows; ++i)
            for (long j = 0; j < num_columns; ++j) {
                const bool expected = is_kept(seed, offset, head, steps, first_row + i, first_column + j);
                CHECK(kept[i * stride + j] == (expected ? 0xFF : 0), "row %ld, column %ld", i, j);
            }
    }
}

template <class T> void test_drop() {
    for (long n = 0; n < 1000; ++n) {
        Memory<unsigned char> kept(LANES<T>);
        Vector<T> x;
        for (int i = 0; i < LANES<T>; ++i) {
            kept[i] = random_bits() % 2 ? 0xFF : 0;
            x[i] = T(random_normal());
        }
        const Vector<T> got = drop<T>(x, kept.data);
        for (int i = 0; i < LANES<T>; ++i) CHECK(got[i] == (kept[i] ? x[i] : T(0)), "lane %d", i);
    }
}

void run() {
    test_known_vectors();
    test_slices();
    test_drop<float>();
    test_drop<double>();
}

}  // namespace dropout_tests
}  // namespace
