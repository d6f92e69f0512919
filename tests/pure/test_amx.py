"""Products by the tile registers of AMX, against NumPy: by a model of these registers, which few have."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling import examples

CORE = Path(__file__).parents[2] / "cuflash" / "cpu" / "core"
SOURCE = """
#include "gemm_bf16x2.h"
#include "simd/fp16_split.h"
extern "C" long lanes() { return LANES<float>; }
extern "C" void run(long rows, long columns, long length, const float *a, long a_stride, const float *b, long b_stride,
                    float *c, long c_stride, long adds, long steps, const float *more_a, const float *more_b) {
    Bf16x2Product product{rows, columns, length, a, a_stride, b, b_stride, c, c_stride, adds != 0};
    if (more_a) product.add(more_a, more_b);
    for (long n = 0; n < steps; ++n) product.step();
    product.finish();
}
extern "C" void split(const char *row, long count, float *high, float *low) {
    load_split(row, 1, count, count / 2, high, low);
}
"""
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx512bf16"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Products of bfloat16 by instructions where the processor has them, and elsewhere by a model of them, too."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    cpuinfo = Path("/proc/cpuinfo")
    words = cpuinfo.read_text().split() if cpuinfo.exists() else []
    flags = AVX512 if "avx512_bf16" in words else AVX2 if {"avx2", "fma", "f16c"} <= set(words) else []
    folder = tmp_path_factory.mktemp("tiles")
    (folder / "run.cpp").write_text(SOURCE)
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", *flags, "-DONLY_BFLOAT16", "-DMODEL_OF_TILES", f"-I{CORE}"]
    command = ["c++", *flags, str(folder / "run.cpp"), "-o", str(folder / "run.so")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return ctypes.CDLL(str(folder / "run.so"))


@pytest.fixture(scope="module")
def product(library):
    """``product(a, b, c, adds, steps, more)`` of the pairs of a and of those of b, so many steps before the rest.

    `more` are another two operands of the same sizes, or none.
    """
    array: list[Any] = [ctypes.c_void_p, ctypes.c_long]
    library.run.argtypes = [*[ctypes.c_long] * 3, *array * 3, ctypes.c_long, ctypes.c_long, *[ctypes.c_void_p] * 2]

    def call(a, b, c, adds, steps, more):
        sizes = (len(a), c.shape[1], b.shape[0])
        operands = [x for y in (a, b, c) for x in (y.ctypes.data, y.strides[0] // 4)]
        library.run(*sizes, *operands, adds, steps, *([x.ctypes.data for x in more] or (None, None)))

    return call


@settings(max_examples=examples(100), deadline=None)
@given(
    rows=st.integers(1, 150),
    vectors=st.integers(1, 9),
    length=st.integers(1, 70),
    adds=st.booleans(),
    steps=st.integers(0, 12),
    terms=st.integers(1, 2),
    gap=st.integers(0, 1),  # between rows of the result
    seed=st.integers(0, 2**32 - 1),
)
def test_products_of_pairs(library, product, rows, vectors, length, adds, steps, terms, gap, seed):
    """Of any number of rows, vectors and pairs, in steps or at once: tiles by fours or one by one, and what is left.

    Beside the registers a vector has as many columns as a tile; where they are a model, it may have half as many.
    """
    random, columns = np.random.default_rng(seed), library.lanes() * vectors
    operands = [
        [random.standard_normal((n, 2 * length)).astype(ml_dtypes.bfloat16) for n in (rows, columns)]
        for _ in range(terms)
    ]
    c = random.standard_normal((rows + 1, columns + 3 * gap), np.float32)
    wide = [[x.astype(np.float64) for x in both] for both in operands]
    own = c[:rows, :columns]
    expected = sum(a @ b.T for a, b in wide) + (own if adds else 0)
    size = sum(np.abs(a) @ np.abs(b).T for a, b in wide) + 4
    others = c.copy()
    (a, b), *more = [(a.view(np.float32), np.ascontiguousarray(b.view(np.float32).T)) for a, b in operands]
    product(a, b, own, adds, steps, [x for both in more for x in both])
    assert (np.abs(own - expected) <= 2 * length * 2.0**-23 * size).all()
    others[:rows, :columns] = own
    np.testing.assert_array_equal(c, others)


def test_float16_is_a_sum_of_two_numbers_of_bfloat16(library):
    """Every finite one, exactly."""
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    x = np.where(np.isfinite(x), x, np.float16(0))
    lanes = library.lanes()
    bf16_terms = np.empty((2, len(x) // (2 * lanes), lanes, 2), ml_dtypes.bfloat16)  # of the same lane of two vectors
    library.split.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    library.split(x.ctypes.data, len(x), bf16_terms[0].ctypes.data, bf16_terms[1].ctypes.data)
    expected = x.reshape(-1, 2, lanes).swapaxes(1, 2)
    np.testing.assert_array_equal(bf16_terms[0].astype(np.float64) + bf16_terms[1].astype(np.float64), expected)
