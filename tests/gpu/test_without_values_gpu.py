"""Calls without values on the device: lse and its gradients against the oracle, of heads of any length."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from tests.sampling import examples

pytestmark = pytest.mark.gpu

FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES)
LONG: tuple[dict[str, Any], ...] = (
    {"head_dim": 2048, "dtype": "bfloat16", "causal": True, "sinks": True},
    {"head_dim": 4096, "dtype": "float16"},
    {"head_dim": 1100, "dtype": "float32", "bias": (1, 4, 200, 1)},
    {"head_dim": 1025, "dtype": "float64", "softcap": 5.0},
)


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy")


def check(cupy, case):
    attn: Any = cuflash.FlashAttention(**case.keywords)
    arrays = case.arrays(cupy.asarray)
    optional, need = ct.optional(arrays) | case.random, ct.gradients_of(case.problem)
    out, lse = attn.forward(arrays["q"], arrays["k"], None, **optional)
    found = attn.backward(None, arrays["q"], arrays["k"], None, None, lse, need=need, dlse=arrays["dlse"], **optional)
    assert out is found.dv is None
    ct.assert_forward(case, cupy.empty(case.problem.out_shape, arrays["q"].dtype), lse)
    ct.assert_backward(case, **{name: x for name, x in found._asdict().items() if x is not None})


@pytest.mark.parametrize("options", LONG, ids=str)
def test_long_heads(cupy, options):
    sizes: dict[str, Any] = {"seqlen_q": 200, "seqlen_k": 333, "num_heads": 4, "num_heads_kv": 2}
    check(cupy, ct.Case(**sizes | options, has_values=False, dlse=True))


@settings(max_examples=examples(120), deadline=None)
@given(ct.cases(features=FEATURES, max_seqlen=300, max_head_dim=256, max_scores=2**16), st.booleans())
def test_every_option(cupy, case, rows):
    """Some with a bias that differs from query to query only."""
    bias = (case.num_heads, case.seqlen_q, 1) if rows and not case.bias_mask and case.ndim == 4 else case.bias
    check(cupy, replace(case, has_values=False, dlse=True, bias=bias))
