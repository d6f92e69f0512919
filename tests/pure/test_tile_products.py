"""Products of bfloat16 by the tile registers of AMX, against NumPy: by a model of these registers, which few have."""

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

CORE = Path(__file__).parents[2] / "cuflash" / "cpu" / "core"
SOURCE = """
#include "tile_products.h"
extern "C" void run(long rows, long columns, long length, const float *a, long a_stride, const float *b, long b_stride,
                    float *c, long c_stride, long adds, long steps) {
    ProductOfPairs product{rows, columns, length, a, a_stride, b, b_stride, c, c_stride, adds != 0};
    for (long n = 0; n < steps; ++n) product.step();
    product.finish();
}
"""
FLAGS = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-mavx512f",
    "-mavx512dq",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512bf16",
    "-mfma",
    "-mf16c",
]


@pytest.fixture(scope="module")
def product(tmp_path_factory):
    """``product(a, b, c, adds, steps)`` of the pairs of a and of those of b, so many steps before the rest."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "avx512_bf16" not in cpuinfo.read_text():
        pytest.skip("the processor has no products of bfloat16")
    folder = tmp_path_factory.mktemp("tiles")
    (folder / "run.cpp").write_text(SOURCE)
    command = ["c++", *FLAGS, "-DMODEL_OF_TILES", f"-I{CORE}", str(folder / "run.cpp"), "-o", str(folder / "run.so")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    run = ctypes.CDLL(str(folder / "run.so")).run
    array: list[Any] = [ctypes.c_void_p, ctypes.c_long]
    run.argtypes = [*[ctypes.c_long] * 3, *array * 3, ctypes.c_long, ctypes.c_long]

    def call(a, b, c, adds, steps):
        sizes = (len(a), c.shape[1], b.shape[0])
        operands = [x for y in (a, b, c) for x in (y.ctypes.data, y.strides[0] // 4)]
        run(*sizes, *operands, adds, steps)

    return call


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 70),
    vectors=st.integers(1, 6),
    length=st.integers(1, 70),
    adds=st.booleans(),
    steps=st.integers(0, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_of_pairs(product, rows, vectors, length, adds, steps, seed):
    """Of any number of rows and pairs, in steps or at once: whole tiles, four at a time or one, and what is left."""
    random, columns = np.random.default_rng(seed), 16 * vectors
    a, b = (random.standard_normal((n, 2 * length)).astype(ml_dtypes.bfloat16) for n in (rows, columns))
    c = random.standard_normal((rows, columns + 3), np.float32)
    expected = a.astype(np.float64) @ b.astype(np.float64).T + (c[:, :columns] if adds else 0)
    size = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T + 4
    beside = c[:, columns:].copy()
    product(a.view(np.float32), np.ascontiguousarray(b.view(np.float32).T), c[:, :columns], adds, steps)
    assert (np.abs(c[:, :columns] - expected) <= 2 * length * 2.0**-23 * size).all()
    np.testing.assert_array_equal(c[:, columns:], beside)
