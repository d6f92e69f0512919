"""Packed sequences on the device: scratch memory, a batch of equal lengths, and graphs."""

from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.spec.passes import BACKWARD
from tests.emulate.attention import packed_sizes
from tests.gpu.planned import plan_of
from tests.judging import assert_oracle

pytestmark = pytest.mark.gpu

OF_QUERIES, OF_KEYS = (300, 0, 65, 1, 128, 513), (300, 40, 129, 70, 0, 600)


def case_of(**options):
    """Some rows are left after the last sequence."""
    sizes: dict[str, Any] = {"num_heads": 4, "num_heads_kv": 2, "head_dim": 64, "dtype": "bfloat16"}
    return ct.Case(**sizes | packed_sizes(OF_QUERIES, OF_KEYS, 30) | options)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_accumulators_that_blocks_clear(cupy, head_dim, causal, deterministic):
    case = case_of(num_heads=100, num_heads_kv=100, head_dim=head_dim, causal=causal)
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(**case.keywords, deterministic=deterministic)
    plan = plan_of(BACKWARD, attn, *ct.qkv(arrays), **ct.optional(arrays))
    assert (plan.run_time.clear_ahead > 0) == (plan.device.arch == 90)
    cupy.full(plan.extra_bytes // 4, cupy.nan, "float32")  # and so scratch memory holds NaN
    out, lse = attn.forward(*ct.qkv(arrays), **ct.optional(arrays))
    gradients = attn.backward(arrays["dout"], *ct.qkv(arrays), out, lse, **ct.optional(arrays))
    assert_oracle(case, {"out": out, "lse": lse, **gradients._asdict()})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_equal_lengths_are_a_batch(cupy, head_dim, causal):
    """Bit for bit, where dq is summed in a fixed order; and so is a batch of one."""
    batch, heads, seqlen = 5, 8, 1000
    shape = (batch, seqlen, heads, head_dim)
    q, k, v, dout = (cupy.random.standard_normal((4, *shape)) / 2).astype(np.float16)
    attn = cuflash.FlashAttention(causal=causal, layout="bshd", deterministic=True)
    out, lse = attn.forward(q, k, v)
    gradients = attn.backward(dout, q, k, v, out, lse)
    starts = cupy.arange(batch + 1, dtype=np.int32) * seqlen
    flat_dout, flat_q, flat_k, flat_v = (x.reshape(batch * seqlen, heads, head_dim) for x in (dout, q, k, v))
    optional = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    packed_out, packed_lse = attn.forward(flat_q, flat_k, flat_v, **optional)
    packed_gradients = attn.backward(flat_dout, flat_q, flat_k, flat_v, packed_out, packed_lse, **optional)
    for x, y in zip((out, *gradients), (packed_out, *packed_gradients), strict=True):
        assert cupy.array_equal(x.reshape(y.shape), y)
    assert cupy.array_equal(lse.swapaxes(0, 1).reshape(packed_lse.shape), packed_lse)
    alone = attn.backward(*(x[2:3] for x in (dout, q, k, v, out, lse)))
    for x, y in zip(gradients, alone, strict=True):
        assert cupy.array_equal(x[2:3], y)


def test_no_sequences_and_no_rows(cupy):
    q = cupy.ones((2, 40, 64), np.float16)
    none = cupy.zeros(1, np.int32)
    out, lse = cuflash.FlashAttention().forward(q, q, q, cu_seqlens_q=none, cu_seqlens_k=none)
    assert not out.any()
    assert cupy.isneginf(lse).all()
    empty = q[:, :0]
    out, lse = cuflash.FlashAttention().forward(empty, empty, empty, cu_seqlens_q=none, cu_seqlens_k=none)
    assert out.shape == (2, 0, 64)
