"""Dropout on the device: the weights that `cuflash.dropout_mask` names, and both passes against the oracle."""

from typing import Any

import numpy as np
import pytest

import cuflash
import cuflash.testing as ct
from cuflash.spec.passes import FORWARD
from tests.gpu.planned import is_sm90, plan_of

pytestmark = pytest.mark.gpu

RATE = 0.3
RANDOM = {"seed": 2**40 + 17, "offset": 2**31 + 5}
SIZES: dict[str, Any] = {"batch": 2, "num_heads": 4, "num_heads_kv": 2}
DTYPES = ("float16", "bfloat16", "float32", "float64")
# Aligned arrays, which kernels of compute capability 9.0 take, and others.
either_kernel = pytest.mark.parametrize("strides", ["contiguous", "padded"])


def both_passes(cupy, case, **options):
    arrays = case.arrays(cupy.asarray)
    qkv, optional = ct.qkv(arrays), ct.optional(arrays) | case.random
    attn = cuflash.FlashAttention(**case.keywords, **options)
    out, lse = attn.forward(*qkv, **optional)
    return out, lse, *attn.backward(arrays["dout"], *qkv, out, lse, **optional)


@either_kernel
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weights_that_are_dropped(cupy, dtype, head_dim, strides):
    """All weights are alike. V and then dO are the identity, so that out and dV are the weights."""
    if dtype == "float64" and head_dim > 128:
        pytest.skip("the backward pass of float64 needs much shared memory there")
    attn = cuflash.FlashAttention(scale=0.0, dropout=RATE)
    n, seqlen = head_dim, 333

    def made(length, rows=None):
        rows = np.ones((3, 2, length, n)) if rows is None else np.broadcast_to(rows, (3, 2, n, n))
        wide = np.zeros((*rows.shape[:-1], n + (1 if strides == "padded" else 0)), ct.numpy_dtype(dtype))
        wide[..., :n] = rows
        return cupy.asarray(wide)[..., :n]

    q, k, v = made(seqlen), made(n), made(n, np.eye(n))
    out, _ = attn.forward(q, k, v, **RANDOM)
    mask = cuflash.dropout_mask(**RANDOM, batch=3, num_heads=2, seqlen_q=seqlen, seqlen_k=n, rate=RATE)
    np.testing.assert_array_equal(ct.to_numpy(out) != 0, mask)

    q, k, v, dout = made(n), made(seqlen), made(seqlen), made(n, np.eye(n))
    gradients = attn.backward(dout, q, k, v, *attn.forward(q, k, v, **RANDOM), **RANDOM)
    mask = cuflash.dropout_mask(**RANDOM, batch=3, num_heads=2, seqlen_q=n, seqlen_k=seqlen, rate=RATE)
    np.testing.assert_array_equal(ct.to_numpy(gradients.dv) != 0, mask.swapaxes(2, 3))


def test_decode(cupy):
    """Where a kernel knows no dropout, another one runs, and the plan says so."""
    case = ct.Case(seqlen_q=3, seqlen_k=3000, num_heads=8, num_heads_kv=2, head_dim=128, dtype="bfloat16", dropout=0.1)
    if is_sm90():
        arrays = case.arrays(cupy.asarray)
        plan = plan_of(FORWARD, cuflash.FlashAttention(dropout=0.1), *ct.qkv(arrays))
        assert "not sm90/decode: it knows no dropout" in plan.reason


def test_as_on_the_host(cupy):
    """The same weights are dropped on both."""
    case = ct.Case(**SIZES, seqlen_q=200, seqlen_k=300, head_dim=64, dtype="float32", dropout=0.5, seed=3)
    results, on_host = both_passes(cupy, case), both_passes(np, case)
    for x, y in zip(results, on_host, strict=True):
        np.testing.assert_allclose(ct.to_numpy(x), y, rtol=0, atol=2e-5 * np.abs(y).max())


def test_seeds_and_offsets_are_no_part_of_the_problem(cupy):
    """Other numbers drop other weights, and are not compiled or planned for again."""
    from cuflash.gpu import launch_cache

    q, k, v = cupy.asarray(np.random.default_rng(0).standard_normal((3, 2, 200, 64)).astype(np.float16))
    attn = cuflash.FlashAttention(dropout=0.5)
    first = attn.forward(q, k, v, seed=1, offset=2)
    known = len(launch_cache._launches)
    others = [attn.forward(q, k, v, seed=seed, offset=offset) for seed, offset in ((1, 2), (2, 2), (1, 3), (2**63, 2))]
    assert len(launch_cache._launches) == known
    same = [bool((other.out == first.out).all()) for other in others]
    assert same == [True, False, False, False]
    for other in others:
        assert (other.lse == first.lse).all()
    with pytest.raises(TypeError, match="seed: got None"):
        attn.forward(q, k, v)
