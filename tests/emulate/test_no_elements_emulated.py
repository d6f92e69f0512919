"""Lengths of 0 with functions: the arrays that these read have no elements, and kernels leave them alone."""

from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from tests.emulate import attention
from tests.scored import MASKS, SCORES, Scored, score_args_of

LENGTHS = {"batch": 2, "num_heads_kv": 1, "group": 2, "seqlen_q": 40, "seqlen_k": 70}


def without(score: Any, mask: Any, empty: str, dtype: str) -> Scored:
    """A problem whose arrays would be read if there were pairs."""
    batch, heads_kv, group, rows, keys = (0 if name == empty else n for name, n in LENGTHS.items())
    heads = heads_kv * group
    shapes = {"q": (batch, heads, rows), "k": (batch, heads_kv, keys), "v": (batch, heads_kv, keys)}
    arrays: dict[str, Any] = {name: np.ones((*shape, 8), ct.numpy_dtype(dtype)) for name, shape in shapes.items()}
    arrays |= {"dout": arrays["q"].copy(), **score_args_of((score, mask), (batch, heads, rows, keys), dtype, 0)}
    return Scored(cuflash.FlashAttention(score=score, mask=mask), arrays, {}, "")


def judge(case: Scored, arch: str) -> None:
    """Results and scratch memory are full of NaN before; no byte of an array without elements is accessible."""
    inputs = {name: x for name, x in case.arrays.items() if name != "dout"}
    out, lse = attention.forward(case.problem, inputs, arch=arch)
    assert not out.any()
    assert np.isneginf(lse).all()
    need = ("dq", "dk", "dv", *case.problem.score_arg_gradients)
    gradients = attention.backward(case.problem, case.arrays, out, lse, need=need, arch=arch)
    for name, x in zip(need, gradients, strict=True):
        assert not x.any(), name


FUNCTIONS = [*((name, score, None) for name, score in SCORES.items()), *((n, None, mask) for n, mask in MASKS.items())]


@pytest.mark.one_in(40)
@pytest.mark.parametrize("arch, dtype", [("8.0", "float32"), ("9.0", "bfloat16")])
@pytest.mark.parametrize("score, mask", [f[1:] for f in FUNCTIONS], ids=[f[0] for f in FUNCTIONS])
@pytest.mark.parametrize("empty", LENGTHS)
def test_functions_of_no_pairs(empty, score, mask, arch, dtype):
    judge(without(score, mask, empty, dtype), arch)


@pytest.mark.parametrize("empty", ["seqlen_q", "seqlen_k"])
def test_no_table_is_filled(empty):
    """Of slices of queries and of keys: tables have a margin past the last ones, and entries where there are none."""
    case = without(SCORES["of_rows"], None, empty, "float32")
    assert case.problem.hoisted.tables
    judge(case, "8.0")
