"""Batch axes on the device against the oracle, in both passes, and what is said and tuned of them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import cuflash
import cuflash.testing as ct
from tests.gpu.planned import plans_of
from tests.sampling import examples

pytestmark = pytest.mark.gpu

FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES, "dropout")
ROWS: dict[str, Any] = {"axes": (2, 3), "bias": (2, 1, 4, 300, 300), "mask": (2, 3, 1, 1, 300)}
STRUCTURES = ct.Case(**ROWS, num_heads=4, seqlen_q=300, seqlen_k=300, head_dim=64, dtype="bfloat16")


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def assert_right(cupy, case, **options):
    """Both passes of a case, with all gradients, twice: the second time launches are remembered."""
    arrays = case.arrays(cupy.asarray)
    attn: Any = cuflash.FlashAttention(**case.keywords, **options)
    inputs, need = ct.qkv(arrays), ct.gradients_of(case.problem)
    for _ in range(2):
        out, lse = attn.forward(*inputs, **ct.optional(arrays), **case.random)
        keywords = ct.optional_backward(arrays) | case.random
        found = attn.backward(arrays["dout"], *inputs, out, lse, need=need, **keywords)
        ct.assert_forward(case, out, lse)
        ct.assert_backward(case, **dict(zip(need, found, strict=True)))


@settings(max_examples=examples(200))
@given(ct.with_axes(ct.cases(ndims=(4,), features=FEATURES, max_head_dim=128, max_scores=2**16)))
def test_oracle(cupy, case):
    assert_right(cupy, case)


@pytest.mark.parametrize("batch_axes", [(), (("k", (2, 1)), ("v", (1, 1))), (("q", (3,)),)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_share(cupy, batch_axes, deterministic):
    assert_right(cupy, ct.Case(**vars(STRUCTURES) | {"batch_axes": batch_axes}), deterministic=deterministic)


def test_plans_compile_and_tune(cupy):
    arrays = STRUCTURES.arrays(cupy.asarray)
    attn, optional = cuflash.FlashAttention(), ct.optional(arrays)
    plans = plans_of(attn, *ct.qkv(arrays), **optional)
    assert "batch axes (2, 3): 2 calls with a batch of 3, because bias cannot step" in plans.describe(
        verbose=True, width=0
    )
    attn.compile(*ct.qkv(arrays), **optional)
    attn.tune(*ct.qkv(arrays), **optional, passes=("forward",), remember=False)


def test_results_are_written_to_views(cupy):
    arrays = STRUCTURES.arrays(cupy.asarray)
    into = cupy.full((3, 2, 4, 300, 64), np.nan, arrays["q"].dtype).swapaxes(0, 1)
    out, _ = cuflash.FlashAttention().forward(*ct.qkv(arrays), **ct.optional(arrays), out=into)
    assert out is into
    ct.assert_forward(STRUCTURES, out)
