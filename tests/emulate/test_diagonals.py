"""Slices of longer problems: the kernels take any diagonal, not only those that follow from the lengths."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.spec.dropout import kept_weights
from cuflash.spec.options import Origin
from cuflash.spec.passes import FORWARD
from tests.emulate import attention
from tests.judging import assert_within

pytestmark = pytest.mark.one_in(3)

# Queries before most keys, so that many attend to nothing; in the middle; and after most keys, so that no query
# attends to many.
SLICES = ((-70, (40, 10)), (15, (None, 0)), (160, (90, None)))
KERNELS = (("8.0", "float32", 16), ("9.0", "bfloat16", 64), ("9.0", "float32", 64))


@pytest.mark.parametrize(("arch", "dtype", "dim"), KERNELS)
@pytest.mark.parametrize(("diagonal", "window"), SLICES)
def test_any_diagonal_keeps_the_oracle_rule(arch, dtype, dim, diagonal, window):
    case = ct.Case(seqlen_q=75, seqlen_k=140, head_dim=dim, dtype=dtype, window=window, alibi_slopes=(1,))
    problem, arrays = attention.inputs_of(case, diagonal=diagonal)
    assert problem.diagonal == diagonal
    out, lse = attention.forward(problem, arrays, arch=arch)
    need = ("dq", "dk", "dv", "dalibi_slopes")
    gradients = attention.backward(problem, arrays, out, lse, arch=arch, need=need)
    judge(problem, arrays, {"out": out, "lse": lse, **dict(zip(need, gradients, strict=True))})


@pytest.mark.parametrize(("dtype", "kernel"), [("bfloat16", "sm90/decode.cu"), ("float32", "sm80/decode.cu")])
def test_decode_in_the_middle_of_many_keys(dtype, kernel):
    """By the decode kernels."""
    sizes: dict[str, Any] = {"seqlen_q": 3, "seqlen_k": 1200, "num_heads": 4, "num_heads_kv": 1, "head_dim": 64}
    case = ct.Case(**sizes, dtype=dtype, window=(800, 0))
    problem, arrays = attention.inputs_of(case, diagonal=1000)
    assert kernel in {kernel.source for kernel in attention.plan_for(problem, FORWARD, arrays, "9.0").kernels}
    judge(problem, arrays, dict(zip(("out", "lse"), attention.forward(problem, arrays, arch="9.0"), strict=True)))


@pytest.mark.parametrize(("arch", "dtype", "dim"), [("8.0", "float32", 16), ("9.0", "bfloat16", 64)])
def test_dropout_counts_from_the_origin_of_a_slice(arch, dtype, dim):
    """What it drops of the slice is what it drops there of the whole."""
    random: dict[str, Any] = {"seed": 5, "offset": 7}
    case = ct.Case(batch=2, num_heads=2, seqlen_q=75, seqlen_k=140, head_dim=dim, dtype=dtype, dropout=0.3)
    problem, arrays = attention.inputs_of(case, diagonal=0, origin=Origin(48, 96, 3, 7))
    whole = cuflash.dropout_mask(5, 7, 2, 7, 48 + 75, 96 + 140, 0.3)
    heads = np.array([[3, 4], [10, 11]])
    kept = kept_weights(problem.dropout, 5, 7, heads, range(48, 48 + 75), range(96, 96 + 140))
    np.testing.assert_array_equal(whole[:, 3:5, 48:, 96:], kept)
    out, lse = attention.forward(problem, arrays, arch=arch, **random)
    gradients = attention.backward(problem, arrays, out, lse, arch=arch, **random)
    results = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    judge(problem, arrays, results, **random)
    for changed in ({"query": 0}, {"key": 0}, {"head": 2}, {"num_heads": 6}):
        with pytest.raises(AssertionError):
            judge(replace(problem, origin=problem.origin._replace(**changed)), arrays, results, **random)


def judge(problem, arrays, results, **random):
    expected = ct.yardsticks(problem, arrays, **random)
    assert_within(results, expected)
