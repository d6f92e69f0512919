"""Block masks, and masks and biases that are looked at, on the device: every kernel with a block-sparse index."""

import importlib
from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.block_masks import global_blocks, local, random
from tests.judging import assert_within

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16", "float32", "float64")


def case_of(seqlen_q=700, seqlen_k=900, **options):
    sizes: dict[str, Any] = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64, "block_mask": (2, 4)}
    return ct.Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes | options)


def run(cupy, case, *, deterministic=False, **changes):
    """out, lse and the gradients of a case."""
    arrays = case.arrays(cupy.asarray) | changes
    attn = cuflash.FlashAttention(**case.keywords, deterministic=deterministic)
    inputs, need = ct.qkv(arrays), ("dq", "dk", "dv", *(("dsinks",) if case.sinks else ()))
    out, lse = attn.forward(*inputs, **ct.optional(arrays) | case.random)
    optional = ct.optional_backward(arrays) | case.random
    return out, lse, *attn.backward(arrays["dout"], *inputs, out, lse, **optional, need=need)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_patterns(cupy, dtype):
    """Longformer and BigBird, longer than what a warp indexes at once."""
    n = 5000 // 64 + 1
    for block_mask in (local(n, n, 2) | global_blocks(n, n, 1), local(n, n, 1) | random(n, n, 3, 0)):
        case = case_of(
            5000, 5000, dtype=dtype, batch=1, num_heads=1, num_heads_kv=1, block_mask=(), block_size=(64, 64)
        )
        arrays = case.arrays() | {"block_mask": block_mask}
        yardsticks = ct.yardsticks(case.problem, arrays)
        results = run(cupy, case, block_mask=cupy.asarray(block_mask))
        assert_within(dict(zip(("out", "lse", "dq", "dk", "dv"), results, strict=True)), yardsticks)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((300, 520), {}),
        ((2, 300, 520), {"causal": True}),
        ((2, 1, 1, 520), {}),
        ((2, 1, 1, 520), {"kv_lengths": (520, 300), "sinks": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_are_looked_at(cupy, dtype, shape, options, monkeypatch):
    """However small they are; each call looks again, the second one at what has been written to the array since."""
    monkeypatch.setattr("cuflash.plan.block_index.LOOK_FLOPS", 0)
    monkeypatch.setattr("cuflash.plan.block_index.LOOK_KEYS", 0)
    importlib.import_module("cuflash.gpu.launch_cache").forget_launches()
    case = case_of(300, 520, num_heads=2, num_heads_kv=1, dtype=dtype, block_mask=None, mask=shape, **options)
    mask = case.arrays(cupy.asarray)["mask"]
    names = ("out", "lse", "dq", "dk", "dv", *(("dsinks",) if case.sinks else ()))
    for deterministic in (False, True):
        yardsticks = ct.yardsticks(case.problem, case.arrays() | {"mask": ct.to_numpy(mask)})
        for name, x in zip(names, run(cupy, case, deterministic=deterministic, mask=mask), strict=True):
            measurement = ct.measure(name, x, yardsticks[name])
            assert not measurement.failure, str(measurement)
        mask[..., :128] = ~mask[..., :128]
    arrays = case.arrays(cupy.asarray)
    plans = cuflash.FlashAttention(**case.keywords).plan(*ct.qkv(arrays), **ct.optional(arrays))
    assert "mask: block-sparse index of tiles of keys" in plans.describe(verbose=True, width=0)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": (300, 520)}, {"mask": (2, 1, 1, 520)}], ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 300, 520), (2, 300, 520)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_are_looked_at(cupy, dtype, shape, options, monkeypatch):
    """However small they are: results are those of the oracle, and dbias has zeros where the bias is -inf.

    Where no tile is hidden the kernels without block-sparse index compute.
    """
    monkeypatch.setattr("cuflash.plan.block_index.LOOK_BIAS_FLOPS", 0)
    importlib.import_module("cuflash.gpu.launch_cache").forget_launches()
    case = case_of(300, 520, num_heads=2, num_heads_kv=1, dtype=dtype, block_mask=None, bias=shape, **options)
    names = ("out", "lse", "dq", "dk", "dv", "dbias")
    for seed, kept in enumerate((0.5, 0.8, 1)):
        arrays = case.arrays()
        holes = np.random.default_rng(seed).random((*shape[:-2], 5, 9)) >= kept
        arrays["bias"][holes.repeat(64, -2)[..., :300, :].repeat(64, -1)[..., :520]] = -np.inf
        arrays["bias"][..., 64:288] = -np.inf if kept < 1 else 0
        yardsticks = ct.yardsticks(case.problem, arrays)
        for name in "kv":
            arrays[name][:, :, 128 : 256 if kept < 1 else 128] = np.nan
        on_device = {name: cupy.asarray(x) for name, x in arrays.items()}
        attn, inputs, optional = cuflash.FlashAttention(**case.keywords), ct.qkv(on_device), ct.optional(on_device)
        out, lse = attn.forward(*inputs, **optional)
        results = attn.backward(on_device["dout"], *inputs, out, lse, **optional, need=names[2:])
        for name, x in zip(names, (out, lse, *results), strict=True):
            measurement = ct.measure(name, x, yardsticks[name])
            assert not measurement.failure, str(measurement)
        assert not ct.to_numpy(results[-1])[np.isneginf(arrays["bias"])].any()
    plans = attn.plan(*inputs, **optional)
    assert "bias: block-sparse index of tiles of queries" in plans.describe(verbose=True, width=0)
