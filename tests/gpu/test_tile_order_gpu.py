"""Tiles that start in the order of their steps on the device: the results of tiles in launch order, call after call."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.plan import block_index
from cuflash.spec.passes import FORWARD
from tests.gpu.planned import is_sm90, plan_of
from tests.sampling import examples

pytestmark = pytest.mark.gpu

BLOCK = 128


@pytest.fixture
def cupy():
    cupy = pytest.importorskip("cupy")
    if not is_sm90():
        pytest.skip("tiles are ordered on compute capability 9.0")
    return cupy


def is_ordered(plan):
    return any(kernel.source == "helpers/tile_order.cu" for kernel in plan.kernels)


def mask_of(kind, rows, keys, rng):
    """Which blocks are visible: some at random, or a band, and all in some rows and columns of blocks."""
    blocks = rng.random((rows, keys)) < {"few": 0.05, "some": 0.4}.get(kind, 0)
    if kind == "band":
        blocks |= abs(np.arange(rows)[:, None] - np.arange(keys)) <= 2
    blocks[rng.integers(rows, size=rng.integers(3))] = True
    blocks[:, rng.integers(keys, size=rng.integers(3))] = True
    return blocks


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_results_do_not_depend_on_the_order(cupy, monkeypatch, head_dim, causal):
    from cuflash.gpu import launch_cache

    attn = cuflash.FlashAttention(causal=causal, block_size=(BLOCK, BLOCK))
    rng = np.random.default_rng(3)

    @settings(max_examples=examples(40))
    @given(
        seqlen_q=st.integers(2048, 4200),
        seqlen_k=st.integers(2048, 4200),
        heads=st.sampled_from([(16, 16), (32, 8), (40, 20)]),
        kind=st.sampled_from(["few", "some", "band"]),
    )
    def check(seqlen_q, seqlen_k, heads, kind):
        def normal(num_heads, seqlen):
            return cupy.asarray(rng.standard_normal((2, num_heads, seqlen, head_dim), np.float32).astype(np.float16))

        q, dout = (normal(heads[0], seqlen_q) for _ in range(2))
        k, v = (normal(heads[1], seqlen_k) for _ in range(2))
        blocks = cupy.asarray(mask_of(kind, -(-seqlen_q // BLOCK), -(-seqlen_k // BLOCK), rng))

        def both_passes():
            out, lse = attn.forward(q, k, v, block_mask=blocks)
            return (out, lse, *attn.backward(dout, q, k, v, out, lse, block_mask=blocks))

        assert is_ordered(plan_of(FORWARD, attn, q, k, v, block_mask=blocks))
        ordered = [both_passes() for _ in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(block_index, "MOST_ORDERED", 0)
            launch_cache.forget_launches()
            in_launch_order = both_passes()
            assert not is_ordered(plan_of(FORWARD, attn, q, k, v, block_mask=blocks))
        launch_cache.forget_launches()
        for found in ordered:
            for x, first in zip(found, ordered[0], strict=True):
                if x is not found[2]:  # dq is added up in any order
                    cupy.testing.assert_array_equal(x, first)
            for x, known in zip(found[:2], in_launch_order[:2], strict=True):
                cupy.testing.assert_array_equal(x, known)
            for x, known in zip(found[2:], in_launch_order[2:], strict=True):
                # Sums of the same terms in another order, in float32, which are rounded to 16 bits.
                cupy.testing.assert_allclose(x, known, rtol=2**-9, atol=1e-4 * float(abs(known).max()))

    check()
