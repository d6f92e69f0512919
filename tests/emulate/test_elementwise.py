"""The lines of code of CuPy's kernels, compiled for the CPU: that they round, add and merge as NumPy does."""

import ctypes
import functools
import hashlib
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.emulator import find_compiler
from cuflash.gpu.elementwise import (
    _HELPERS,
    LANES,
    as_pairs,
    lse_of,
    lse_of_pairs,
    merged_of,
    merged_of_pairs,
    pairs_of,
    products_text,
    sum_of,
)
from cuflash.shards import merge as merging
from tests.sampling import examples

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler: g++ is not on the path")
# What CUDA and CuPy have for such code.
CUDA = """
#include <cmath>
#include <cstring>
#define __device__ static
using std::isinf; using std::exp; using std::log;
template <class T> struct complex {
  T re, im;
  complex(T a, T b) : re(a), im(b) {}
  complex() {}
  T real() const { return re; }
  T imag() const { return im; }
};
template <class To, class From> To cast(From x) { To y; std::memcpy(&y, &x, sizeof y); return y; }
static unsigned __float_as_uint(float x) { return cast<unsigned>(x); }
static float __uint_as_float(unsigned x) { return cast<float>(x); }
static long long __double_as_longlong(double x) { return cast<long long>(x); }
static double __longlong_as_double(long long x) { return cast<double>(x); }
static _Float16 __float2half_rn(float x) { return (_Float16)x; }
static unsigned short __half_as_ushort(_Float16 x) { return cast<unsigned short>(x); }
static _Float16 __ushort_as_half(unsigned short x) { return cast<_Float16>(x); }
static float __half2float(_Float16 x) { return x; }
using float32 = float; using float64 = double; using float16 = _Float16; using uint16 = unsigned short;
using int32 = int;
using complex64 = complex<float>; using complex128 = complex<double>;
"""
DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@functools.cache
def compiled(text, folder):
    path = Path(folder) / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
    command = [str(find_compiler()), "-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(path), "-"]
    subprocess.run(command, input=text, text=True, check=True)
    return ctypes.CDLL(str(path)).run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("kernels"))


def run(folder, formula, parts, rows, target):
    """As `Formula.run`, of arrays (rows, columns), for one number at a time or four."""
    is_wide = bool(parts) and parts[0].dtype == np.float32 and target.shape[1] % LANES == 0
    text = formula.text(len(parts), target.dtype.name, is_wide=is_wide)
    each = LANES if is_wide else 1
    names = [*text.inputs.split(", "), text.output]
    of_type = "double" if target.dtype in (np.float64, np.complex128) else "float"
    code = [
        CUDA,
        f"using T = {of_type}; using C = complex<{of_type}>;",
        text.preamble,
        'extern "C" void run(void** at, long rows, long columns) {',
    ]
    code.append(f"for (long i = 0; i < rows; ++i) for (long j = 0; j < columns / {each}; ++j) {{")
    for number, name in enumerate(names):
        kind, variable = name.split()
        index = "i" if variable[0] == "r" else f"i * (columns / {each}) + j"
        code.append(f"{kind}& {variable} = (({kind}*)at[{number}])[{index}];")
    code += [text.code, "}}"]
    arrays = [*parts, *rows, target]
    pointers = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))
    compiled("\n".join(code), folder)(pointers, ctypes.c_long(target.shape[0]), ctypes.c_long(target.shape[1]))
    return target


SHAPES = st.tuples(st.integers(1, 5), st.sampled_from([4, 8, 5]))
NUMBERS = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-8, 65519.9, 65520.0, 1e38, 3.4e38)


def drawn(seed, count, shape, dtype):
    """Arrays, some of whose numbers are not usual ones."""
    random = np.random.default_rng(seed)
    found = [random.standard_normal(shape).astype(dtype) for _ in range(count)]
    for x in found:
        x.reshape(-1)[random.integers(0, x.size, 2)] = random.choice(NUMBERS, 2)
    return found


def assert_same(got, expected):
    """Bit for bit but for NaN, which is one."""
    got, expected = (x.astype(np.float64) for x in (got, expected))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(np.nan_to_num(got), np.nan_to_num(expected))


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), SHAPES, st.sampled_from(list(DTYPES)))
def test_parts_are_added_in_order_and_rounded_once(folder, seed, count, shape, dtype):
    parts = drawn(seed, count, shape, np.float64 if dtype == "float64" else np.float32)
    with np.errstate(all="ignore"):
        expected = functools.reduce(np.add, parts).astype(DTYPES[dtype])
    assert_same(run(folder, sum_of(count), parts, (), np.empty(shape, DTYPES[dtype])), expected)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), SHAPES, st.sampled_from(list(DTYPES)), st.booleans())
def test_parts_are_merged_as_numpy_does(folder, seed, count, shape, dtype, hides):
    """Rows that see no key of a part, or of none, have -inf there, and any numbers."""
    of_sums = np.float64 if dtype == "float64" else np.float32
    random = np.random.default_rng(seed)
    outs = [random.standard_normal(shape).astype(of_sums) for _ in range(count)]
    lses = [(9 * random.standard_normal(shape[:1])).astype(of_sums) for _ in range(count)]
    if hides:
        for out, lse in zip(outs, lses, strict=True):
            hidden = random.integers(0, 2, shape[0]).astype(bool)
            out[hidden], lse[hidden] = np.nan, -np.inf
    out, lse = np.empty(shape, of_sums), np.empty(shape[:1], of_sums)
    merging.merge_into(outs, lses, out, lse)
    got_lse = run(folder, lse_of(count), (), lses, np.empty((shape[0], 1), of_sums))[:, 0]
    np.testing.assert_allclose(got_lse, lse, rtol=1e-6)
    got = run(folder, merged_of(count), outs, lses, np.empty(shape, DTYPES[dtype]))
    resolution = ml_dtypes.finfo(DTYPES[dtype]).eps
    np.testing.assert_allclose(got.astype(np.float64), out, rtol=2 * float(resolution), atol=1e-6)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.integers(0, 2**32), st.integers(2, 3), SHAPES, st.sampled_from(list(DTYPES)), st.sampled_from([0, -3e4, -1e9])
)
def test_pairs_say_what_parts_weigh_where_lse_is_large(folder, seed, count, shape, dtype, level):
    """Pairs of lse and what its rounding leaves; also where they are merged to a pair first."""
    of_sums = np.float64 if dtype == "float64" else np.float32
    random = np.random.default_rng(seed)
    outs = [random.standard_normal(shape).astype(of_sums) for _ in range(count)]
    exact = [level + np.log(random.integers(1, 50, shape[0])) for _ in range(count)]
    pairs = [np.stack([x.astype(of_sums), x - x.astype(of_sums)], axis=-1).astype(of_sums) for x in exact]
    top = np.max(exact, axis=0)
    weights = [np.exp(x - top) for x in exact]
    expected = sum(w[:, None] * x for w, x in zip(weights, outs, strict=True)) / sum(weights)[:, None]
    rows = [as_pairs(x) for x in pairs]
    got = run(folder, merged_of_pairs(count), outs, rows, np.empty(shape, DTYPES[dtype]))
    close = max(2 * float(ml_dtypes.finfo(DTYPES[dtype]).eps), 2e-15 * abs(level))
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=close, atol=max(1e-6, close))
    lse = top + np.log(sum(weights))
    got_lse = run(folder, lse_of_pairs(count), (), rows, np.empty((shape[0], 1), of_sums))[:, 0]
    np.testing.assert_allclose(got_lse, lse, rtol=1e-6)
    both = np.empty((shape[0], 1, 2), of_sums)
    run(folder, pairs_of(count), (), rows, as_pairs(both))
    np.testing.assert_allclose(both.astype(np.float64).sum(axis=(1, 2)), lse, atol=1e-5 + 2e-15 * abs(level))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numbers_of_wide_elements_are_multiplied_and_added(folder, dtype):
    code = (
        f"{CUDA}{_HELPERS}{products_text(dtype)}"
        'extern "C" void run(complex128** at, float* into, long n) {'
        "for (long i = 0; i < n; ++i) into[i] = cuflash_products(at[0][i], at[1][i]); }"
    )
    x, y = (
        np.random.default_rng(0).standard_normal((2, 7, 16 // np.dtype(DTYPES[dtype]).itemsize)).astype(DTYPES[dtype])
    )
    into = np.empty(7, np.float32)
    pointers = (ctypes.c_void_p * 2)(x.ctypes.data, y.ctypes.data)
    compiled(code, folder)(pointers, ctypes.c_void_p(into.ctypes.data), ctypes.c_long(7))
    np.testing.assert_allclose(into, (x.astype(np.float64) * y.astype(np.float64)).sum(axis=1), rtol=1e-5)
