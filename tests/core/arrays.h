// Arrays of a call, and their elements by the definition of their dtype.
#pragma once

#include "rows.h"

#include "check.h"

namespace {

// A number of a format by its definition: a sign, `exponent_bits` bits of exponent and `fraction_bits` of fraction. The
// highest exponent has infinities and NaN, unless `is_finite`, where only fractions of ones are NaN.
double number_of(uint32_t bits, int exponent_bits, int fraction_bits, bool is_finite = false) {
    const int bias = (1 << (exponent_bits - 1)) - 1, highest = (1 << exponent_bits) - 1;
    const int fraction = int(bits & ((1u << fraction_bits) - 1)), exponent = int(bits >> fraction_bits) & highest;
    const double sign = bits >> (exponent_bits + fraction_bits) & 1 ? -1 : 1;
    const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
    if (is_finite && exponent == highest && fraction == (1 << fraction_bits) - 1) return nan;
    if (!is_finite && exponent == highest) return fraction ? nan : sign * infinity;
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
    return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

// An element of an array, exactly.
double element(const char *at, Dtype dtype) {
    uint16_t half;
    float single;
    double whole;
    switch (dtype) {
        case FLOAT16:
            return std::memcpy(&half, at, 2), number_of(half, 5, 10);
        case BFLOAT16:
            return std::memcpy(&half, at, 2), number_of(half, 8, 7);
        case FLOAT32:
            return std::memcpy(&single, at, 4), single;
        case FLOAT64:
            return std::memcpy(&whole, at, 8), whole;
        case FLOAT8_E4M3FN:
            return number_of(uint8_t(*at), 4, 3, true);
        default:
            return number_of(uint8_t(*at), 5, 2);
    }
}

// An array of a call: elements of any dtype, whose axes of length 1 are broadcast, with space between its rows.
struct AnyArray {
    Dtype dtype;
    long sizes[4], strides[4];  // of an element in elements; 0 where it is broadcast
    Memory<char> memory;

    static long extent(const long (&shape)[4], long step, long space) {
        const long row = (shape[3] - 1) * step + 1;
        return shape[0] * shape[1] * shape[2] * (row + space) - space;
    }
    AnyArray(Dtype dtype, const long (&shape)[4], long step = 1, long space = 0)
        : dtype(dtype), memory(extent(shape, step, space) * size_of(dtype)) {
        long stride = (shape[3] - 1) * step + 1 + space;
        strides[3] = shape[3] == 1 ? 0 : step;
        for (int axis = 3; axis >= 0; --axis) sizes[axis] = shape[axis];
        for (int axis = 2; axis >= 0; --axis) {
            strides[axis] = shape[axis] == 1 ? 0 : stride;
            stride *= shape[axis];
        }
        for (long i = 0; i < memory.count / size_of(dtype); ++i) put(memory.data + i * size_of(dtype));
    }
    // Any finite number.
    void put(char *at) const {
        const double x = random_uniform(-2, 2);
        const float single = float(x);
        const uint16_t half = dtype == BFLOAT16 ? to_bfloat16(single) : to_float16(single);
        if (dtype == FLOAT64) std::memcpy(at, &x, 8);
        if (dtype == FLOAT32) std::memcpy(at, &single, 4);
        if (size_of(dtype) == 2) std::memcpy(at, &half, 2);
        if (size_of(dtype) == 1) *at = char(random_below(0x77));
    }
    void give(Call &call, Array array) {
        call.arrays[array] = memory.data;
        call.begins[array] = 0, call.ends[array] = memory.count;
        call.given[call.num_given++] = array;
        call.sizes[array] = size_of(dtype);
        for (int axis = 0; axis < 4; ++axis) call.strides[array][axis] = strides[axis];
    }
    char *at(long b, long h, long i, long j) const {
        return memory.data + (b * strides[0] + h * strides[1] + i * strides[2] + j * strides[3]) * size_of(dtype);
    }
    double number(long b, long h, long i, long j) const { return element(at(b, h, i, j), dtype); }
};

}  // namespace
