"""Keys and values in pages on the device: graphs, plans, and what is refused."""

from typing import Any

import pytest

import cuflash
import cuflash.testing as ct
from tests.gpu.planned import plans_of

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"batch": 3, "num_heads": 8, "num_heads_kv": 2, "seqlen_k": 2048, "kv_lengths": (1, 1371, 2048)}


def test_plans(cupy):
    case = ct.Case(**SIZES, seqlen_q=1, head_dim=64, dtype="float16", page_size=64)
    arrays = case.arrays(cupy.asarray)
    plans = plans_of(cuflash.FlashAttention(), *ct.qkv(arrays), **ct.optional(arrays))
    assert plans.backward is None
    assert "pages64" in plans.describe(
        verbose=True, width=0
    ) and "no backward pass with a block_table" in plans.describe(verbose=True, width=0)


def test_backward_is_refused(cupy):
    case = ct.Case(**SIZES, seqlen_q=1, head_dim=64, dtype="float16", page_size=64)
    arrays = case.arrays(cupy.asarray)
    out, lse = cuflash.FlashAttention().forward(*ct.qkv(arrays), **ct.optional(arrays))
    with pytest.raises(NotImplementedError, match=r"^block_table: .*gather the pages"):
        inputs = ct.qkv(arrays)
        cuflash.FlashAttention().backward(out, *inputs, out, lse, **ct.optional(arrays))
