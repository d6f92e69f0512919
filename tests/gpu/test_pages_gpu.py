"""Keys and values in pages on the device: graphs, plans, and what is refused."""

from typing import Any

import pytest

import cuflash
import cuflash.testing as ct
from tests.gpu.planned import plans_of

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"batch": 3, "num_heads": 8, "num_heads_kv": 2, "seqlen_k": 2048, "kv_lengths": (1, 1371, 2048)}


@pytest.mark.parametrize("seqlen_q", [1, 300])
def test_graphs(cupy, seqlen_q):
    """The table and the lengths may change between replays, as a cache grows."""
    sizes = SIZES | {"seqlen_q": seqlen_q, "head_dim": 64, "dtype": "float16", "causal": True, "page_size": 64}
    case, other = ct.Case(**sizes), ct.Case(**sizes | {"kv_lengths": (1, 1000, 2010)}, seed=1)
    arrays, changed = case.arrays(cupy.asarray), other.arrays()
    rows = min(len(arrays["k"]), len(changed["k"]))
    attn = cuflash.FlashAttention(causal=True)
    inputs, optional = ct.qkv(arrays), ct.optional(arrays)
    pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        attn.compile(*inputs, **optional)
        stream.begin_capture()
        out, lse = attn.forward(*inputs, **optional)
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
        ct.assert_forward(case, out, lse)
        assert changed["block_table"].max() < rows
        for name in ("q", "kv_lengths", "block_table"):
            arrays[name].set(changed[name])
        for name in "kv":
            arrays[name][:rows].set(changed[name][:rows])
        graph.launch()
        stream.synchronize()
        ct.assert_forward(other, out, lse)


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
