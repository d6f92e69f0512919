"""Partial results in float32, from operands of 16 bits: they round to what the same kernels store rounded."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash.testing as ct
from cuflash.spec import passes
from tests import sampling
from tests.emulate import attention

SIZES: dict[str, Any] = {"seqlen_q": 75, "seqlen_k": 140, "num_heads": 2, "window": (None, 0)}
CASES = {
    "9.0": ct.Case(**SIZES, num_heads_kv=1, head_dim=72, dtype="bfloat16", layout="bshd"),
    "9.0 wide heads": ct.Case(**SIZES, num_heads_kv=1, head_dim=320, dtype="bfloat16"),
    "8.0": ct.Case(**SIZES, head_dim=37, dtype="float16", strides="padded"),
}


@pytest.mark.parametrize("wide", [("dq",), ("dk",), ("dv",), ("dq", "dk", "dv")], ids="-".join)
@pytest.mark.parametrize("name", CASES)
def test_a_partial_result_is_not_rounded(name, wide):
    case, arch = CASES[name], name[:3]
    problem, arrays = attention.inputs_of(case, diagonal=30)
    out, lse = attention.forward_by_oracle(problem, arrays)
    narrow = attention.backward(problem, arrays, out, lse, arch=arch)
    found = attention.backward(replace(problem, wide=wide), arrays, out, lse, arch=arch)
    dtype = narrow[0].dtype
    expected = ct.yardsticks(problem, arrays)
    for name, x, y in zip(("dq", "dk", "dv"), found, narrow, strict=True):
        assert x.dtype == (np.float32 if name in wide else dtype)
        assert (x != x.astype(dtype)).any() == (name in wide)
        np.testing.assert_array_equal(x.astype(dtype), y)
        assert not ct.measure(name, x, expected[name]).failure


@pytest.mark.parametrize(
    ("name", "options", "need"),
    [
        (name, *own)
        for number, name in enumerate(CASES)
        for n, own in enumerate([({"deterministic": True}, ("dq", "dk", "dv")), ({}, ("dq",))])
        if sampling.exhaustive or (number + n) % 2
    ],
)
def test_a_partial_dq_by_a_kernel_of_its_own_is_not_rounded(name, options, need):
    case, arch = CASES[name], name[:3]
    problem, arrays = attention.inputs_of(case, diagonal=30, **options)
    out, lse = attention.forward_by_oracle(problem, arrays)
    narrow, *_ = attention.backward(problem, arrays, out, lse, arch=arch, need=need)
    found, *_ = attention.backward(replace(problem, wide=("dq",)), arrays, out, lse, arch=arch, need=need)
    assert found.dtype == np.float32
    assert (found != found.astype(narrow.dtype)).any()
    np.testing.assert_array_equal(found.astype(narrow.dtype), narrow)
    assert not ct.measure("dq", found, ct.yardsticks(problem, arrays)["dq"]).failure


FORWARD = {
    **CASES,
    "9.0 decode": ct.Case(seqlen_q=2, seqlen_k=700, num_heads=4, num_heads_kv=2, head_dim=72, dtype="bfloat16"),
    "9.0 decode, combined": ct.Case(
        seqlen_q=1, seqlen_k=1500, num_heads=9, num_heads_kv=1, head_dim=64, dtype="float16"
    ),
    "9.0 decode, wide heads": ct.Case(
        seqlen_q=2, seqlen_k=700, num_heads=4, num_heads_kv=2, head_dim=320, head_dim_v=328, dtype="float16"
    ),
    "9.0 three tiles": ct.Case(seqlen_q=300, seqlen_k=200, head_dim=128, dtype="float16", sinks=True),
}


@pytest.mark.parametrize("name", FORWARD)
def test_a_partial_out_is_not_rounded(name):
    case, arch = FORWARD[name], name[:3]
    problem, arrays = attention.inputs_of(case, diagonal=30)
    narrow = attention.forward(problem, arrays, arch=arch)
    found = attention.forward(replace(problem, wide=("out",)), arrays, arch=arch)
    assert found[0].dtype == np.float32
    assert (found[0] != found[0].astype(narrow[0].dtype)).any()
    np.testing.assert_array_equal(found[0].astype(narrow[0].dtype), narrow[0])
    np.testing.assert_array_equal(found[1], narrow[1])
    assert not ct.measure("out", found[0], ct.yardsticks(problem, arrays)["out"]).failure


def test_kernels_of_fp8_round():
    case = ct.Case(seqlen_q=70, seqlen_k=90, head_dim=64, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    problem, arrays = attention.inputs_of(case, wide=("out",))
    with pytest.raises(NotImplementedError, match=r"^out: got dtype float32 with fp8 k and v, expected"):
        attention.plan_for(problem, passes.FORWARD, arrays, "9.0")


def test_rows_of_which_only_wide_ones_have_whole_16_bytes():
    """TMA reads v, and would write no row of 20 half precision."""
    case = ct.Case(seqlen_q=70, seqlen_k=90, head_dim=64, head_dim_v=20, dtype="bfloat16")
    arrays = case.arrays()
    longer = np.full((1, 1, 90, 24), np.nan, arrays["v"].dtype)
    longer[..., :20] = arrays["v"]
    arrays["v"] = longer[..., :20]
    problem = replace(attention.problem_of(case, arrays), wide=("out",))
    kernels = attention.plan_for(problem, passes.FORWARD, arrays, "9.0").kernels
    assert [kernel.source for kernel in kernels] == ["sm90/forward.cu"]
    out, _ = attention.forward(problem, arrays, arch="9.0")
    assert not ct.measure("out", out, ct.yardsticks(problem, arrays)["out"]).failure
