"""Streamed keys and values against the oracle: on the CPU, and by way of a stand-in for a device."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.streaming import calls
from tests.fakes import FakeDevice

FEATURES = (*(name for name in ct.FEATURES if name != "scale"), "sinks", "dlse", "dropout", "block_mask")
SMALL: dict[str, Any] = {
    "features": FEATURES,
    "max_seqlen": 100,
    "max_head_dim": 24,
    "max_scores": 2**13,
    "score_spreads": (1.0, 8.0),
}
CASE = ct.Case(seqlen_q=13, seqlen_k=50, num_heads=4, num_heads_kv=2, head_dim=8, causal=True)
DEVICES = st.sampled_from([None, *({"late": late, "pinned": pinned} for late in (0, 1) for pinned in (0, 1))])


def results_of(case, chunk, arrays=None, **options):
    """All results of both passes."""
    arrays = case.arrays() if arrays is None else arrays
    q, k, v = ct.qkv(arrays)
    keys = cuflash.streamed(k, v, chunk=chunk)
    attn: Any = cuflash.FlashAttention(**case.keywords, **options)
    need = ct.gradients_of(case.problem)
    out, lse = attn.forward(q, *keys, **ct.optional(arrays), **case.random)
    terms = ct.optional_backward(arrays) | case.random
    gradients = attn.backward(arrays["dout"], q, *keys, out, lse, need=need, **terms)
    return {"out": out, "lse": lse, **dict(zip(need, gradients, strict=True))}


def judge(case, results):
    ct.assert_forward(case, results["out"], results["lse"])
    ct.assert_backward(case, **{name: x for name, x in results.items() if name not in ("out", "lse")})


def same(x, y):
    return all(x[name].tobytes() == y[name].tobytes() for name in x)


@pytest.fixture
def devices(monkeypatch):
    """Lets calls on NumPy arrays go by way of a stand-in for a device, or of none."""

    def use(how):
        device = None if how is None else FakeDevice(**how)
        monkeypatch.setattr(calls, "device_of", lambda kind: device)
        return device

    return use


def chunks_for(data, case):
    step = 16 if case.dropout else 1
    if case.block_mask is not None:
        step = max(step, case.block_size[1])
    return data.draw(st.sampled_from([step * n for n in (1, 2, 3, 5, 10, 100)]), "chunk")


@settings(max_examples=60)
@given(data=st.data(), case=ct.cases(**SMALL), how=DEVICES)
def test_any_chunks_of_any_case_keep_the_oracle_rule(data, case, how):
    with pytest.MonkeyPatch.context() as patch:
        device = None if how is None else FakeDevice(**how)
        patch.setattr(calls, "device_of", lambda kind: device)
        judge(case, results_of(case, chunks_for(data, case)))
