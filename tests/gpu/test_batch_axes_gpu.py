"""Batch axes on the device against the oracle, in both passes, and what is said and tuned of them."""

from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from tests.gpu.planned import plans_of

pytestmark = pytest.mark.gpu

ROWS: dict[str, Any] = {"axes": (2, 3), "bias": (2, 1, 4, 300, 300), "mask": (2, 3, 1, 1, 300)}
STRUCTURES = ct.Case(**ROWS, num_heads=4, seqlen_q=300, seqlen_k=300, head_dim=64, dtype="bfloat16")


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
