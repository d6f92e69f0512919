// What options do to tiles of scores, the steps of the softmax, and how tiles of keys and values are packed.
#pragma once

#include "pack_kv.h"

#include "arrays.h"

namespace {
namespace score_tests {

template <class T> constexpr Dtype DTYPE = sizeof(T) == 4 ? FLOAT32 : FLOAT64;

constexpr long BATCH = 2, HEADS = 4, ROWS = 70, KEYS = 150, BLOCK_ROWS_OF_MASK = 24, BLOCK_KEYS_OF_MASK = 48;

// Which options a call has; each axis of an array is broadcast by chance.
struct Options {
    bool has_bias, has_slopes, has_cap, has_mask, has_block_mask, has_window;
    double scale;
    long diagonal;
};

template <class T> void test_finished_scores(const Options &options) {
    constexpr T EPSILON = std::numeric_limits<T>::epsilon(), INFINITE = std::numeric_limits<T>::infinity();
    Call call = {};
    call.dtype = call.kv_dtype = DTYPE<T>;
    call.scale = options.scale;
    call.softcap = options.has_cap ? 0.7 : 0;
    call.window_left = options.has_window ? 20 : NO_BOUND;
    call.window_right = options.has_window ? random_below(30) : NO_BOUND;
    call.block_rows = BLOCK_ROWS_OF_MASK, call.block_keys = BLOCK_KEYS_OF_MASK;
    auto one_or = [](long count) { return random_bits() % 2 ? count : 1L; };
    const Dtype dtypes[] = {DTYPE<T>, SERVES_FLOAT16 ? FLOAT16 : BFLOAT16, BFLOAT16};
    const Dtype bias_dtype = dtypes[sizeof(T) == 4 ? random_below(3) : 0];
    AnyArray bias(bias_dtype, {one_or(BATCH), one_or(HEADS), one_or(ROWS), one_or(KEYS)}, 1 + random_below(2),
                  random_below(4));
    AnyArray slopes(DTYPE<T>, {BATCH, HEADS, 1, 1});
    AnyArray mask(FLOAT8_E4M3FN, {one_or(BATCH), one_or(HEADS), one_or(ROWS), one_or(KEYS)}, 1 + random_below(2));
    AnyArray block_mask(FLOAT8_E4M3FN,
                        {BATCH, HEADS, ceil_div(ROWS, BLOCK_ROWS_OF_MASK), ceil_div(KEYS, BLOCK_KEYS_OF_MASK)});
    for (AnyArray *x : {&mask, &block_mask})
        for (long i = 0; i < x->memory.count; ++i) x->memory[i] = random_bits() % 3 ? char(1 + random_below(255)) : 0;
    if (options.has_bias) bias.give(call, BIAS), call.bias_dtype = bias_dtype;
    if (options.has_slopes) slopes.give(call, ALIBI_SLOPES);
    if (options.has_mask) mask.give(call, MASK);
    if (options.has_block_mask) block_mask.give(call, BLOCK_MASK);

    const long b = random_below(BATCH);
    const Entry entry = {b, b, 0, 0, ROWS, KEYS, options.diagonal};
    const long num_heads = 1 + random_below(2);  // of a block: rows of the second follow those of the first
    const Block block = {0, 0, random_below(HEADS - 1), num_heads, 10, 30, 0, KEYS, 0, 1};
    const long r0 = random_below(rows_of(block) - SUBGROUP), first = random_bits() % 2 ? 0 : 48;
    const long num_rows = 1 + random_below(SUBGROUP);
    const long count = random_bits() % 2 ? KEYS - first : 64, padded = round_up(count, LANES<T>);
    Memory<T> products(num_rows * SCORES_STRIDE<T>), scores(products.count), tanhs(products.count),
        copies(SUBGROUP * MAX_KEYS);
    for (long x = 0; x < products.count; ++x) scores[x] = products[x] = T(random_normal() * 5);
    const Scaling<T> scaling(call);
    const ScoreTile tile = {call, entry, block, r0, num_rows, first, count, padded, 0};
    finish_scores<T>(scaling, tile, scores.data, copies.data, options.has_cap ? tanhs.data : nullptr);
    const double scale = std::fabs(options.scale);
    for (long r = 0; r < num_rows; ++r)
        for (long j = 0; j < count; ++j) {
            const Row row = row_of(block, r0 + r);
            const long key = first + j, distance = key - row.i - options.diagonal;
            bool is_visible = distance >= -call.window_left && distance <= call.window_right;
            if (options.has_mask) is_visible &= *mask.at(b, row.head, row.i, key) != 0;
            if (options.has_block_mask)
                is_visible &= *block_mask.at(b, row.head, row.i / BLOCK_ROWS_OF_MASK, key / BLOCK_KEYS_OF_MASK) != 0;
            const double product = products[r * SCORES_STRIDE<T> + j], got = scores[r * SCORES_STRIDE<T> + j];
            double expected = product, size = 0;
            if (scaling.acts_on_scores) expected = product * scale, size = std::fabs(expected);
            if (options.has_cap) {
                const double tanh = std::tanh(expected / call.softcap);
                expected = call.softcap * tanh;
                size = 4 * call.softcap;
                CHECK(std::fabs(double(tanhs[r * SCORES_STRIDE<T> + j]) - tanh) <= 4 * EPSILON, "tanh of %g", product);
            }
            if (options.has_bias) {
                const double term = bias.number(b, row.head, row.i, key);
                expected += term, size += std::fabs(term);
            }
            if (options.has_slopes) {
                const double term = slopes.number(b, row.head, 0, 0) * double(std::labs(distance));
                expected -= term, size += std::fabs(term);
            }
            if (!is_visible) {
                CHECK(got == -INFINITE, "row %ld, key %ld is hidden, and %g", row.i, key, got);
            } else {
                CHECK(std::fabs(got - expected) <= 2 * EPSILON * size, "row %ld, key %ld is %.9g, expected %.9g", row.i,
                      key, got, expected);
            }
        }
}

template <class T> void test_options() {
    for (long n = 0; n < (IS_DENSE ? 4000 : 300); ++n) {
        auto by_chance = [] { return random_bits() % 2 == 0; };
        const double scales[] = {0.125, 1, -0.3, 0};
        const Options options = {by_chance(),
                                 by_chance(),
                                 by_chance(),
                                 by_chance(),
                                 by_chance(),
                                 by_chance(),
                                 scales[random_below(4)],
                                 random_below(100) - 20};
        test_finished_scores<T>(options);
    }
}

template <class T> void test_derivative_by_softcap() {
    Call call = {};
    call.scale = 0.5;
    for (double softcap : {0.1, 1.0, 30.0}) {
        call.softcap = softcap;
        for (double size = 1e-3; size < 20; size *= 1.01)
            for (double x : {size, -size}) {
                const T product = T(x * softcap / call.scale);
                const long double exact = (long double)product * call.scale / softcap, tanh = std::tanh(exact);
                // tanh(x) - x (1 - tanh(x)^2), by the series of (sinh(2 x) - 2 x) / 2 where the terms cancel.
                long double series = 0, term = exact;
                for (int i = 3; i < 60; i += 2) series += term *= 4 * exact * exact / (i * (i - 1));
                const long double expected = size < 0.5 ? series * (1 - tanh * tanh) : tanh - exact * (1 - tanh * tanh);
                const T got = derivative_by_softcap<T>(call, splat(product), splat(T(tanh)))[0];
                // 1 - tanh(x)^2 is a difference from 1, and is multiplied by x. Near 0, the size is that of x^3.
                const double epsilon = std::numeric_limits<T>::epsilon();
                const double most = epsilon * (size < 0.5 ? 8 * std::fabs(double(expected)) : 4 + 2 * size);
                CHECK(std::fabs(double(got - expected)) <= most, "at %g: %.9g, expected %.9g", x, double(got),
                      double(expected));
            }
    }
}

// Tiles of scores become weights, as in the forward pass, with a row max that lags: in the end o / l is the mean. With
// row reductions, largest and moment tell the largest score and the entropy.
template <class T>
void test_softmax_steps(double spread, double scale, long hidden_tiles, bool has_dropout, bool reduces) {
    constexpr long DIM = 2 * LANES<T>, TILES = 6;
    Call call = {};
    call.scale = scale;
    const Scaling<T> scaling(call);
    Memory<T> o(DIM), l(LANES<T>), s(MAX_KEYS), moment(LANES<T>);
    Memory<unsigned char> kept(MAX_KEYS);
    T row_max = -std::numeric_limits<T>::infinity(), largest = row_max;
    std::vector<double> all, values;
    for (long tile = 0; tile < TILES; ++tile) {
        const long num_keys = LANES<T> * (1 + random_below(MAX_KEYS / LANES<T>));
        for (long j = 0; j < num_keys; ++j) {
            const bool is_hidden = tile < hidden_tiles || random_below(5) == 0;
            s[j] =
                is_hidden ? -std::numeric_limits<T>::infinity() : T(random_normal() * spread + spread * double(tile));
            kept[j] = random_below(4) ? 0xFF : 0;
            all.push_back(double(s[j]) * scale);
        }
        Subgroup<T> rows = {scaling, 1,        num_keys,    DIM,       s.data,  &row_max, l.data,
                            o.data,  &largest, moment.data, kept.data, T(1.25), {}};
        auto step = [&](auto drops, auto reduces) {
            raise_row_maxima(reduces, rows);
            exponentials(drops, reduces, rows);
        };
        auto step_with = [&](auto drops) { reduces ? step(drops, std::true_type()) : step(drops, std::false_type()); };
        has_dropout ? step_with(std::true_type()) : step_with(std::false_type());
        for (long j = 0; j < num_keys; ++j) {
            const T value = T(random_normal());
            values.push_back(!has_dropout ? double(value) : kept[j] ? double(value) * 1.25 : 0);
            if (has_dropout && !kept[j]) CHECK(s[j] == 0, "a dropped weight is %g", double(s[j]));
            for (long d = 0; d < DIM; ++d) o[d] += s[j] * value;
        }
    }
    double most = -std::numeric_limits<double>::infinity(), sum = 0, mean = 0, size = 0, products = 0;
    for (double x : all) most = x > most ? x : most;
    if (std::isinf(most)) {
        CHECK(row_max == -std::numeric_limits<T>::infinity() && sum_of_lanes<T>(load(l.data)) == 0,
              "a row without keys");
        return;
    }
    for (size_t j = 0; j < all.size(); ++j) {
        const double weight = std::exp(all[j] - most);
        sum += weight, mean += weight * values[j], size += weight * std::fabs(values[j]);
        products += weight > 0 ? weight * (all[j] - most) : 0;
    }
    const double epsilon = std::numeric_limits<T>::epsilon(), got = sum_of_lanes<T>(load(l.data));
    // The exponent of a weight is a difference of scores, which is exact near the largest score; elsewhere the weight
    // is small by as much as the difference is rounded. Sums in order add a unit for each term.
    const double most_wrong = epsilon * double(all.size());
    const double lse = row_max * scaling.natural + std::log(got), expected = most + std::log(sum);
    CHECK(std::fabs(lse - expected) <= most_wrong + 2 * epsilon * std::fabs(expected), "lse %.9g, expected %.9g", lse,
          expected);
    // Tiny weights are 0: those less than 2^LOWEST, or by what the row max lags more.
    const double flushed = std::ldexp(double(all.size()) * 10 * std::exp(8), int(Vectors<T>::LOWEST));
    for (long d = 0; d < DIM; ++d)
        CHECK(std::fabs(o[d] / got - mean / sum) <= 2 * most_wrong * size / sum + flushed,
              "o[%ld] is %.9g, expected %.9g", d, o[d] / got, mean / sum);
    if (!reduces) return;
    const double top = largest * scaling.natural;
    CHECK(top == most, "the largest score is %.9g, expected %.9g", top, most);
    const double from_row_max = (largest - row_max) * scaling.natural;
    const double entropy = std::log(got) - from_row_max - sum_of_lanes<T>(load(moment.data)) * scaling.natural / got;
    const double exact = std::log(sum) - products / sum;
    CHECK(std::fabs(entropy - exact) <= most_wrong * (1 + std::log(double(all.size()))) + flushed,
          "the entropy is %.9g, expected %.9g", entropy, exact);
}

template <class T> void test_softmax() {
    for (long n = 0; n < (IS_DENSE ? 300 : 30); ++n)
        for (double spread : {0.0, 1.0, 30.0, 1e4})
            for (double scale : {0.125, 1.0}) test_softmax_steps<T>(spread, scale, n % 7, n % 2, n % 3 == 0);
}

// Tiles of k and v: any dtype, strides and pages, with scales of keys; zeros follow.
template <class T> void test_packing(Dtype dtype, long dim, long step, long page_size, bool has_scales) {
    constexpr long HEADS_KV = 2;
    Call call = {};
    call.dtype = DTYPE<T>, call.kv_dtype = dtype;
    call.head_dim = call.head_dim_v = dim;
    call.page_size = page_size;
    const long pages = page_size ? ceil_div(KEYS, page_size) : 1, space = step == 1 && random_bits() % 2 ? 0 : 5;
    AnyArray k(dtype, {page_size ? pages : BATCH, HEADS_KV, page_size ? page_size : KEYS, dim}, step, space);
    AnyArray scales(FLOAT32, {k.sizes[0], HEADS_KV, k.sizes[2], 1}), table(FLOAT32, {BATCH, pages, 1, 1});
    for (Array array : {K, V}) k.give(call, array);
    for (Array array : {K_SCALE, V_SCALE})
        if (has_scales) scales.give(call, array);
    // The pages of an entry, in any order.
    std::vector<int32_t> order(pages);
    for (long p = 0; p < pages; ++p) order[p] = int32_t(pages - 1 - p);
    for (long b = 0; b < BATCH; ++b)
        for (long p = 0; p < pages; ++p) std::memcpy(table.at(b, p, 0, 0), &order[p], 4);
    if (page_size) {
        table.give(call, BLOCK_TABLE);
        // Of two axes: entries and pages.
        call.strides[BLOCK_TABLE][0] = pages, call.strides[BLOCK_TABLE][1] = 1;
    }
    const long b = random_below(BATCH), head = random_below(HEADS_KV);
    const Entry entry = {b, b, 0, 0, 1, KEYS, 0};
    const long first = 16 * random_below(4), count = 1 + random_below(KEYS - first), padded = round_up(count, LANES<T>);
    const long width = round_up(dim, LANES<T>), keys_stride = padded + 16;
    auto expected = [&](long j, long d) {
        const long key = first + j, page = page_size ? order[key / page_size] : b,
                   at = page_size ? key % page_size : key;
        const T x = T(k.number(page, head, at, d));
        return has_scales ? T(x * T(scales.number(page, head, at, 0))) : x;
    };
    Memory<T> rows(padded * width), k_t(width * keys_stride), v(padded * width);
    load_transposed_keys({call, K, entry, head, first, count}, rows.data, k_t.data, keys_stride);
    for (long d = 0; d < width; ++d)
        for (long j = 0; j < padded; ++j) {
            const T x = d < dim && j < count ? expected(j, d) : T(0);
            CHECK(k_t[d * keys_stride + j] == x, "key %ld of %ld, column %ld of %ld: %g, expected %g", j, count, d, dim,
                  double(k_t[d * keys_stride + j]), double(x));
        }
    long v_stride = 0;
    const T *values = find_values({call, V, entry, head, first, count}, v.data, v_stride);
    for (long j = 0; j < count; ++j)
        for (long d = 0; d < width; ++d) {
            const T x = d < dim ? expected(j, d) : T(0);
            CHECK(values[j * v_stride + d] == x, "value %ld of %ld, column %ld of %ld", j, count, d, dim);
        }
}

template <class T> void test_all() {
    test_options<T>();
    test_derivative_by_softcap<T>();
    test_softmax<T>();
    const Dtype dtypes[] = {DTYPE<T>, FLOAT16, BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2};
    for (Dtype dtype : dtypes) {
        if (sizeof(T) == 8 && size_of(dtype) == 2) continue;  // no call has these k and v with a q of float64
        if (dtype == FLOAT16 && !SERVES_FLOAT16) continue;
        for (long dim : {1L, 8L, 16L, 33L, 64L})
            for (long step : {1L, 2L})
                for (long page_size : {0L, 16L, 48L})
                    for (bool has_scales : {false, true})
                        if (!has_scales || size_of(dtype) == 1)  // fp8 has scales, others have none
                            test_packing<T>(dtype, dim, step, page_size, has_scales);
    }
}

void run() {
    test_all<float>();
    if constexpr (IS_DENSE) test_all<double>();
}

}  // namespace score_tests
}  // namespace
