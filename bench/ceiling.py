"""What this device, or this processor, reaches in this run: a large matrix product, a large copy, on a processor
fused multiply-adds, too."""

from __future__ import annotations

import importlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .environment import cores
from .timing import CudaClock, HostClock, time_interleaved

PRODUCT_SIZE = 8192
COPY_BYTES = 2**30
HOST_PRODUCT_SIZE = 2048
HOST_COPY_BYTES = 2**28  # more than caches hold
FMA = Path(__file__).with_name("fma.cpp")


def _matrix_product(cupy: Any) -> tuple[str, Any]:
    """A call of an 8192^3 product of random 16-bit matrices, and what it is."""
    n = PRODUCT_SIZE
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        torch = None
    if torch is None or not torch.cuda.is_available():
        a, b = (cupy.random.default_rng(i).standard_normal((n, n), dtype="float32").astype("float16") for i in (0, 1))
        c = cupy.empty_like(a)
        return f"CuPy float16 {n}^3", lambda: cupy.matmul(a, b, out=c)
    a, b, c = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return f"torch bfloat16 {n}^3", lambda: torch.mm(a, b, out=c)


def measure(clock: CudaClock) -> dict[str, Any]:
    """Matrix-product rate (TFLOP/s) and copy bandwidth (TB/s, bytes read plus bytes written), medians."""
    cupy = clock.cupy
    source = cupy.arange(COPY_BYTES // 4, dtype=cupy.uint32)
    target = cupy.empty_like(source)
    product, multiply = _matrix_product(cupy)

    def copy() -> None:
        target.data.copy_from_device_async(source.data, COPY_BYTES)

    times = time_interleaved({"product": multiply, "copy": copy}, clock)
    return {
        "product": product,
        "product_tflops": 2 * PRODUCT_SIZE**3 / times["product"].median_us / 1e6,
        "copy_tbytes_per_s": 2 * COPY_BYTES / times["copy"].median_us / 1e6,
    }


def measure_host(clock: HostClock) -> dict[str, Any]:
    """The same of NumPy's product of float32 matrices, and of its copy, on all cores that these take."""
    n = HOST_PRODUCT_SIZE
    a, b = (np.random.default_rng(i).standard_normal((n, n), dtype=np.float32) for i in (0, 1))
    c = np.empty_like(a)
    source = np.ones(HOST_COPY_BYTES // 4, np.float32)
    target = np.empty_like(source)
    calls = {"product": lambda: np.matmul(a, b, out=c), "copy": lambda: np.copyto(target, source)}
    times = time_interleaved(calls, clock)
    return {
        "product": f"NumPy float32 {n}^3",
        "product_tflops": 2 * n**3 / times["product"].median_us / 1e6,
        "copy_tbytes_per_s": 2 * HOST_COPY_BYTES / times["copy"].median_us / 1e6,
        **_fused_multiply_adds(),
    }


def _fused_multiply_adds() -> dict[str, Any]:
    """The most that the cores do of them, in float32 and float64; nothing where there is no C++ compiler.

    A library's product may stay far below: that of NumPy's wheels makes less than half of it on some processors.
    """
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "fma")
        build = [compiler, "-O2", "-std=c++17", "-march=native", "-pthread", str(FMA), "-o", program]
        try:
            subprocess.run(build, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return {}
        done = subprocess.run([program, str(cores())], capture_output=True, text=True, check=True)
    rates = dict(zip(("float32", "float64"), map(float, done.stdout.split()), strict=True))
    return {"fma_tflops": {dtype: rate / 1e12 for dtype, rate in rates.items()}}
