"""Block masks, and masks and biases that are looked at, on the device: every kernel with a block-sparse index."""

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.block_masks import global_blocks, local, random
from tests.judging import assert_within

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16", "float32", "float64")
OPTIONS = [
    {"block_size": (128, 128)},
    {"block_size": (64, 48), "causal": True},
    {"block_size": (16, 16), "window": (300, 50), "block_mask": (4,)},
    {"block_size": (128, 64), "kv_lengths": (0, 700), "layout": "bshd", "block_mask": (2, 1)},
    {"block_size": (256, 128), "mask": (2, 1, 1, 900), "bias": (4, 1, 1), "softcap": 5.0, "block_mask": ()},
    {"block_size": (128, 128), "dropout": 0.3, "causal": True, "blocks_kept": 0.2},
    {"block_size": (128, 128), "strides": "padded", "sinks": True, "alibi_slopes": (4,)},
]


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


@pytest.mark.one_in(1)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_oracle(cupy, dtype, options, deterministic):
    case = case_of(dtype=dtype, **options)
    out, lse, *gradients = run(cupy, case, deterministic=deterministic)
    ct.assert_forward(case, out, lse)
    ct.assert_backward(case, *gradients)


@pytest.mark.parametrize("head_dim", [16, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(cupy, dtype, head_dim):
    case = case_of(500, 600, dtype=dtype, head_dim=head_dim, causal=True, block_size=(128, 128))
    out, lse, *gradients = run(cupy, case)
    ct.assert_forward(case, out, lse)
    ct.assert_backward(case, *gradients)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(cupy, dtype):
    case = case_of(3, 3000, dtype=dtype, block_size=(16, 128), causal=True)
    out, lse, *gradients = run(cupy, case)
    ct.assert_forward(case, out, lse)
    ct.assert_backward(case, *gradients)


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
    monkeypatch.setattr("cuflash.plan.draft.LOOK_FLOPS", 0)
    monkeypatch.setattr("cuflash.plan.draft.LOOK_KEYS", 0)
    importlib.import_module("cuflash.gpu.backend").forget_launches()
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
    monkeypatch.setattr("cuflash.plan.draft.LOOK_BIAS_FLOPS", 0)
    importlib.import_module("cuflash.gpu.backend").forget_launches()
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_blocks_and_none(cupy, dtype):
    case = case_of(dtype=dtype, block_mask=())
    blocks = case.arrays(cupy.asarray)["block_mask"]
    everything = run(cupy, case, block_mask=cupy.ones_like(blocks))
    plain = replace(case, block_mask=None)
    ct.assert_forward(plain, *everything[:2])
    ct.assert_backward(plain, *everything[2:])
    out, lse, *gradients = run(cupy, case, block_mask=cupy.zeros_like(blocks))
    assert cupy.isneginf(lse).all()
    assert not any(ct.to_numpy(x).any() for x in (out, *gradients))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_blocks_are_not_computed(cupy, dtype):
    """NaN in keys and rows that no block shows reaches nothing."""
    case = case_of(dtype=dtype, block_mask=(), blocks_kept=1.0, block_size=(256, 256))
    arrays = case.arrays()
    arrays["block_mask"][1], arrays["block_mask"][:, 1] = False, False
    yardsticks = ct.yardsticks(case.problem, arrays)
    for name in ("q", "k", "v", "dout"):
        arrays[name][:, :, 320:448] = np.nan  # whole tiles of every kernel lie around them
    results = run(cupy, case, **{name: cupy.asarray(x) for name, x in arrays.items()})
    assert_within(dict(zip(("out", "lse", "dq", "dk", "dv"), results, strict=True)), yardsticks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_repeatable(cupy, dtype):
    case = case_of(1500, 1500, dtype=dtype, causal=True)
    first = run(cupy, case, deterministic=True)
    for _ in range(3):
        for x, y in zip(run(cupy, case, deterministic=True), first, strict=True):
            np.testing.assert_array_equal(ct.to_numpy(x), ct.to_numpy(y))


def test_a_captured_graph(cupy):
    """Lists are made again in each replay, from the mask as it is then."""
    case = case_of(dtype="bfloat16", block_mask=())
    arrays = case.arrays(cupy.asarray)
    inputs, blocks = ct.qkv(arrays), arrays["block_mask"]
    attn = cuflash.FlashAttention(block_size=case.block_size)
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = cupy.cuda.MemoryPool()
    cupy.cuda.Device().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:
        attn.compile(*inputs, block_mask=blocks)
        stream.begin_capture()
        out, lse = attn.forward(*inputs, block_mask=blocks)
        gradients = attn.backward(arrays["dout"], *inputs, out, lse, block_mask=blocks)
        graph = stream.end_capture()
        for change in (lambda x: x, np.logical_not):
            mask = change(case.arrays()["block_mask"])
            blocks.set(mask)
            graph.launch(stream)
            stream.synchronize()
            yardsticks = ct.yardsticks(case.problem, case.arrays() | {"block_mask": mask})
            assert_within(dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True)), yardsticks)
