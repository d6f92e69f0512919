"""Batch axes by the real kernels: the calls that one on CuPy arrays is made of."""

from typing import Any

import pytest

import cuflash.testing as ct
from cuflash.emulator import find_compiler
from tests.emulate import attention

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler: g++ is not on the path")

SIZES: dict[str, Any] = {"num_heads": 2, "num_heads_kv": 1, "seqlen_q": 70, "seqlen_k": 140, "head_dim": 32}
ROWS: dict[str, Any] = {"axes": (2, 3), "bias": (2, 1, 2, 70, 140), "mask": (2, 3, 1, 1, 140)}
CASES = {
    "rows share a bias": ct.Case(**SIZES, **ROWS, dtype="bfloat16", layout="bshd"),
    "and k and v": ct.Case(
        **SIZES, **ROWS, dtype="float16", bias_dtype="input", batch_axes=(("k", (2, 1)), ("v", (1, 1)))
    ),
    "structures share q": ct.Case(
        **SIZES, axes=(2, 1, 2), dtype="bfloat16", batch_axes=(("q", (2,)),), mask=(2, 1, 1, 1, 1, 140)
    ),
}


@pytest.mark.parametrize(
    ("arch", "name"),
    [("9.0", "rows share a bias"), ("9.0", "and k and v"), ("8.0", "and k and v"), ("8.0", "structures share q")],
)
def test_results_are_right(arch, name):
    case = CASES[name]
    arrays, need = case.arrays(), ct.gradients_of(case.problem)
    ct.assert_forward(case, **attention.by_calls(case, arrays, "forward", arch=arch))
    ct.assert_backward(case, **attention.by_calls(case, arrays, "backward", arch=arch, need=need))
