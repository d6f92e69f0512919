"""Caches of keys and values that grow from call to call: they are planned once in a while, and results stay right."""

from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.gpu.tuning import tuned_plan
from cuflash.spec.problem import make_problem

pytestmark = pytest.mark.gpu

BATCH, HEADS, HEADS_KV, DIM, LONGEST = 2, 8, 2, 64, 1100


@pytest.fixture
def plans(cupy, monkeypatch):
    """Plans that are made, and no launches of tests before."""
    from cuflash.gpu import launch_cache

    made = []

    def choose(*args, **layout):
        made.append(tuned_plan(*args, **layout))
        return made[-1]

    monkeypatch.setattr(launch_cache, "tuned_plan", choose)
    launch_cache.forget_launches()
    return made


def case_of(length, dtype="bfloat16", seqlen_q=1, **options):
    return ct.Case(
        seqlen_q=seqlen_q,
        seqlen_k=length,
        head_dim=DIM,
        batch=BATCH,
        num_heads=HEADS,
        num_heads_kv=HEADS_KV,
        dtype=dtype,
        **options,
    )


GROWING: dict[str, dict[str, Any]] = {
    "plain": {},
    "four queries": {"seqlen_q": 4, "causal": True},
    "top left": {"seqlen_q": 4, "causal": "top_left"},
    "a window that begins to hide": {"window": (600, 0)},
    "float32": {"dtype": "float32"},
    "float64, four queries": {"dtype": "float64", "seqlen_q": 4, "causal": True, "sinks": True},
    "float32 as bf16 terms": {"dtype": "float32", "seqlen_q": 300},
    "many queries": {"seqlen_q": 200, "causal": True, "dtype": "float16"},
    "layout": {"layout": "bshd"},
    "sinks and slopes": {"sinks": True, "alibi_slopes": (HEADS,)},
}


@pytest.mark.parametrize("name", GROWING)
def test_slices_of_a_cache(cupy, plans, name):
    """Results are bitwise those of arrays that lie alone in memory, and within the oracle rule at some lengths."""
    options = GROWING[name]
    full = case_of(LONGEST, **options)
    arrays = full.arrays(cupy.asarray)
    optional = ct.optional(arrays)
    attn = cuflash.FlashAttention(**full.keywords)
    axis = 1 if full.layout == "bshd" else 2
    lengths = [1, 2, 3, *range(100, 140), *range(500, 620), 1023, 1024, 1025, LONGEST, 577, 64]
    for length in lengths:
        index = (slice(None),) * axis + (slice(0, length),)
        k, v = arrays["k"][index], arrays["v"][index]
        out, lse = attn.forward(arrays["q"], k, v, **optional)
        if length % 37 == 0 or length < 4:
            host = {n: x.get() for n, x in (arrays | {"k": k, "v": v}).items()}
            inputs = ct.qkv(host)
            problem = make_problem(full.options, *inputs, **ct.optional(host))
            yardsticks = ct.yardsticks(problem, {n: x for n, x in host.items() if n != "dout"})
            for result, x in (("out", out), ("lse", lse)):
                measurement = ct.measure(result, x, yardsticks[result])
                assert not measurement.failure, (length, str(measurement))
    if name != "float32 as bf16 terms":
        assert len(plans) < len(lengths) / 4


def test_pages_of_a_growing_table(cupy, plans):
    case = case_of(LONGEST // 16 * 16, page_size=16, kv_lengths=(500, 700), causal=True)
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(**case.keywords)
    expected = attn.forward(*ct.qkv(arrays), **ct.optional(arrays))
    for pages in range(44, LONGEST // 16):
        optional = ct.optional(arrays) | {"block_table": arrays["block_table"][:, :pages]}
        got = attn.forward(*ct.qkv(arrays), **optional)
        for x, right in zip(got, expected, strict=True):
            ct.to_numpy(x)
            np.testing.assert_allclose(
                ct.to_numpy(x).astype(np.float64), ct.to_numpy(right).astype(np.float64), atol=2**-7
            )
    assert len(plans) < 8


def test_launches_that_are_kept_are_few(cupy, plans, monkeypatch):
    """The ones that were used last stay."""
    from cuflash.gpu import launch_cache

    monkeypatch.setattr(launch_cache, "MAX_LAUNCHES", 8)
    attn = cuflash.FlashAttention()
    usual = cupy.asarray(np.random.default_rng(0).standard_normal((1, 2, 40, 16), np.float32))
    right = attn.forward(usual, usual, usual).out
    for seqlen in range(60, 90):
        q = cupy.ones((1, 2, seqlen, 16), np.float32)
        attn.forward(q, q, q)
        np.testing.assert_array_equal(attn.forward(usual, usual, usual).out.get(), right.get())
        assert len(launch_cache._launches) <= 8
    assert len(plans) == 1 + 30


def test_a_given_result_may_not_share_memory_with_a_longer_cache(cupy):
    """Launches are looked up by less than the length; what is refused is not."""
    attn = cuflash.FlashAttention()
    cache = cupy.ones((1, 1, 300, 64), np.float16)
    q, out = cupy.ones((1, 1, 1, 64), np.float16), cache[:, :, 250:251]
    attn.forward(q, cache[:, :, :200], cache[:, :, :200], out=out)
    with pytest.raises(ValueError, match=r"^out: got memory shared with k"):
        attn.forward(q, cache[:, :, :251], cache[:, :, :251], out=out)


def test_copies_of_a_growing_cache(cupy):
    """k and v whose rows are not contiguous are copied, and copies of other lengths have other strides."""
    full = case_of(300, strides="transposed")
    arrays = full.arrays(cupy.asarray)
    attn = cuflash.FlashAttention()
    for length in (200, 201, 256, 257, 300, 130):
        k, v = (arrays[n][:, :, :length] for n in "kv")
        got = attn.forward(arrays["q"], k, v)
        right = attn.forward(arrays["q"], cupy.ascontiguousarray(k), cupy.ascontiguousarray(v))
        for x, y in zip(got, right, strict=True):
            np.testing.assert_array_equal(ct.to_numpy(x), ct.to_numpy(y))
