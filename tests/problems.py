"""Problems of any size, made of arrays that take no memory, and the devices that they are planned for."""

import functools
from dataclasses import replace

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.array_info import FLOAT8, Operand
from cuflash.plan import DeviceSpec
from cuflash.spec.options import Options
from cuflash.spec.passes import BACKWARD
from cuflash.spec.problem import Problem, make_problem

ARCHS = ("7.0", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
SIZES_OF_SHARED = ("7.5", "7.0", "8.6", "8.0", "9.0")  # one for each
H200 = DeviceSpec.for_arch("9.0")


@functools.cache
def problem_of(
    seqlen_q=1024, seqlen_k=1024, dim=64, dim_v=64, *, dtype="bfloat16", batch=2, heads=4, heads_kv=2, **options
) -> Problem:
    """A problem of plain attention with such options."""
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    shapes = (heads, seqlen_q, dim), (heads_kv, seqlen_k, dim), (heads_kv, seqlen_k, dim_v)
    q, k, v = (contiguous((batch, *shape), dtype) for shape in shapes)
    one = np.ones((), np.float32)
    scales = {"q_scale": one, "k_scale": one, "v_scale": one} if dtype.name in FLOAT8 else {}
    return make_problem(Options(**options), q, k, v, **scales)


def blocks_of(seqlen: int) -> Problem:
    """Such a problem with a block mask."""
    problem = problem_of(seqlen, seqlen)
    blocks = Operand(shape=(2, 4, seqlen // 128, seqlen // 128), strides=(0, 0, seqlen // 128, 1), dtype="bool")
    return replace(problem, block_mask=blocks, block_size=(128, 128))


def biased(dim: int, bias_dtype: str) -> Problem:
    """Such a problem with a per-pair bias."""
    bias = Operand(shape=(2, 4, 1024, 1024), strides=(0, 1024**2, 1024, 1), dtype=bias_dtype)
    return replace(problem_of(dim=dim, dim_v=dim), bias=bias)


def masked(dim: int) -> Problem:
    """Such a problem with a mask of pairs."""
    mask = Operand(shape=(2, 4, 1024, 1024), strides=(0, 0, 1024, 1), dtype="bool")
    return replace(problem_of(dim=dim, dim_v=dim), mask=mask)


def contiguous(shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
    """What looks like a contiguous array, and is one element."""
    strides = [dtype.itemsize] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), shape, strides)


# The largest head dimensions that tiles fit for, by shared memory in KiB and dtype: forward, backward.
LARGEST = {
    64: {"bfloat16": (640, 448), "float16": (640, 448), "float32": (320, 224), "float64": (160, 96)},
    96: {"bfloat16": (1024, 640), "float16": (1024, 640), "float32": (512, 256), "float64": (256, 160)},
    100: {"bfloat16": (1024, 768), "float16": (1024, 768), "float32": (512, 256), "float64": (256, 160)},
    164: {"bfloat16": (1024, 1024), "float16": (1024, 1024), "float32": (832, 512), "float64": (384, 256)},
    228: {"bfloat16": (1024, 1024), "float16": (1024, 1024), "float32": (1024, 512), "float64": (512, 384)},
}


def is_served(problem, arch, pass_):
    """All but large head dimensions where shared memory is small."""
    largest = LARGEST[DeviceSpec.for_arch(arch).shared_bytes_per_sm // 1024][problem.dtype]
    return max(problem.head_dim, problem.head_dim_v) <= largest[pass_ is BACKWARD]
