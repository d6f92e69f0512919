"""Tiles of queries that blocks claim on the device: the bits of tiles that blocks know beforehand, call after call."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.plan.sm90 import scored
from cuflash.spec.passes import FORWARD
from tests.gpu.planned import is_sm90, plan_of
from tests.sampling import examples

pytestmark = pytest.mark.gpu

OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 20.0, "sinks": True},
    "slopes": {"alibi_slopes": (8,)},
    "lengths": {"kv_lengths": True},
    "dropout": {"dropout": 0.1},
}


@pytest.fixture
def cupy():
    cupy = pytest.importorskip("cupy")
    if not is_sm90():
        pytest.skip("blocks claim tiles on compute capability 9.0")
    return cupy


def claims(plan):
    return ("CUFLASH_DYNAMIC_TILES", 1) in plan.kernels[-1].defines


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bits_do_not_depend_on_who_claims_what(cupy, monkeypatch, head_dim, options):
    from cuflash.gpu import launch_cache

    options = dict(options)
    static = {name: options.pop(name) for name in ("softcap", "dropout") if name in options}
    attn = cuflash.FlashAttention(causal=True, **static)
    rng = cupy.random.default_rng(3)

    @settings(max_examples=examples(60))
    @given(seqlen_q=st.integers(2048, 3000), seqlen_k=st.integers(2048, 4096), batch=st.integers(8, 10))
    def check(seqlen_q, seqlen_k, batch):
        def normal(heads, seqlen):
            return rng.standard_normal((batch, heads, seqlen, head_dim), dtype=np.float32).astype(np.float16)

        arrays = {"q": normal(8, seqlen_q), "k": normal(4, seqlen_k), "v": normal(4, seqlen_k)}
        if "alibi_slopes" in options:
            arrays["alibi_slopes"] = cupy.linspace(0.01, 0.5, 8, dtype=np.float32)
        if "sinks" in options:
            arrays["sinks"] = cupy.linspace(-1, 1, 8, dtype=np.float32)
        if "kv_lengths" in options:
            arrays["kv_lengths"] = cupy.asarray(np.linspace(0, seqlen_k, batch).astype(np.int32))
        random = {"seed": 3, "offset": 0} if "dropout" in static else {}
        names = ("q", "k", "v")
        others = {name: x for name, x in arrays.items() if name not in names}
        plan = plan_of(FORWARD, attn, *(arrays[name] for name in names), **others)
        claimed = [attn.forward(**arrays, **random) for _ in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(scored, "CLAIMED_KEYS", 1 << 40)
            patch.setattr(scored, "CLAIMED_KEYS_64", 1 << 40)
            launch_cache.forget_launches()
            known = attn.forward(**arrays, **random)
            known_plan = plan_of(FORWARD, attn, *(arrays[name] for name in names), **others)
        launch_cache.forget_launches()
        assert not claims(known_plan)
        assert claims(plan)
        for out, lse in claimed:
            for x, y in ((out, claimed[0].out), (lse, claimed[0].lse)):
                cupy.testing.assert_array_equal(x, y)
        if plan.tiles == known_plan.tiles:
            cupy.testing.assert_array_equal(claimed[0].out, known.out)
            cupy.testing.assert_array_equal(claimed[0].lse, known.lse)

    check()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_graphs_claim_all_tiles_at_every_replay(cupy, head_dim):
    case = ct.Case(
        seqlen_q=2100,
        seqlen_k=2100,
        batch=2,
        num_heads=32,
        num_heads_kv=2,
        head_dim=head_dim,
        dtype="bfloat16",
        causal=True,
    )
    arrays = case.arrays(cupy.asarray)
    attn = cuflash.FlashAttention(causal=True)
    q, k, v = ct.qkv(arrays)
    assert claims(plan_of(FORWARD, attn, q, k, v))
    expected = attn.forward(q, k, v)
    out, lse = cupy.empty_like(expected.out), cupy.empty_like(expected.lse)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        attn.forward(q, k, v, out=out, lse=lse)
        stream.synchronize()
        stream.begin_capture()
        attn.forward(q, k, v, out=out, lse=lse)
        graph = stream.end_capture()
        for _ in range(5):
            out.fill(np.nan)
            lse.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            cupy.testing.assert_array_equal(out, expected.out)
            cupy.testing.assert_array_equal(lse, expected.lse)
