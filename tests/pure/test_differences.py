"""Gradients against differences."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from tests.scored import SCORES, score_args_of

SMOOTH = ("distance", "fade", "of_rows")
SIZES = (2, 2, 20, 24)


def inputs(seed):
    batch, heads, seqlen_q, seqlen_k = SIZES
    random = np.random.default_rng(seed)
    q = random.standard_normal((batch, heads, seqlen_q, 8))
    k, v = random.standard_normal((2, batch, heads, seqlen_k, 8))
    return q, k, v


@settings(max_examples=8)
@given(st.sampled_from(SMOOTH), st.integers(0, 2**16), st.booleans())
def test_gradients_of_functions_are_those_of_differences(name, seed, causal):
    attn = cuflash.FlashAttention(score=SCORES[name], causal=causal)
    arrays: dict[str, Any] = score_args_of((SCORES[name],), SIZES, "float64", seed)
    found = ct.check_gradients(attn, *inputs(seed), seed=seed, **arrays)
    assert {"dq", "dk", "dv"} < found.keys() and all(own.scale > 0 for own in found.values())


def test_gradients_of_options_are_those_of_differences():
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {"bias": random.standard_normal((20, 24)), "sinks": random.standard_normal(2)}
    attn = cuflash.FlashAttention(softcap=3.0, causal=True, dropout=0.2)
    found = ct.check_gradients(attn, *inputs(1), dropout_seed=5, dropout_offset=2, **arrays)
    assert set(found) == {"dq", "dk", "dv", "dbias", "dsinks"}
    assert set(ct.check_gradients(attn, *inputs(1), need=("dk",), dropout_seed=5, dropout_offset=2, **arrays)) == {"dk"}


def test_gradients_of_scalars_are_those_of_differences():
    attn: Any = cuflash.FlashAttention(
        score=lambda s, i, j, *, gamma, shift: s - gamma * cuflash.abs(i - j) + shift * s
    )
    found = ct.check_gradients(attn, *inputs(4), gamma=0.25, shift=np.float32(0.5))
    assert set(found) == {"dq", "dk", "dv", "dgamma", "dshift"}


def test_it_needs_no_hypothesis():
    code = """if True:
        import sys
        sys.modules["hypothesis"] = None
        import numpy as np, cuflash, cuflash.testing as ct
        q, k, v = np.random.default_rng(0).standard_normal((3, 2, 9, 4))
        ct.check_gradients(cuflash.FlashAttention(causal=True), q, k, v)
        try:
            ct.cases
        except ImportError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("cuflash.testing.cases draws cases with hypothesis: pip install hypothesis"), (
        done.stderr
    )
    with pytest.raises(AttributeError, match="has no attribute 'case_of'"):
        ct.case_of  # noqa: B018 (what is tested)


def test_a_wrong_gradient_is_named(monkeypatch):
    attn, (q, k, v) = cuflash.FlashAttention(), inputs(2)
    backward = cuflash.FlashAttention.backward

    def wrong(self, *args, **keywords):
        gradients = backward(self, *args, **keywords)
        return gradients._replace(dk=gradients.dk * (1 + 1e-4))

    monkeypatch.setattr(cuflash.FlashAttention, "backward", wrong)
    with pytest.raises(AssertionError, match=r"^dk: got .* by the gradient, expected .* by differences"):
        ct.check_gradients(attn, q, k, v)


def test_what_it_cannot_check_is_refused():
    attn, (q, k, v) = cuflash.FlashAttention(), inputs(3)
    with pytest.raises(ValueError, match="q: got dtype float32"):
        ct.check_gradients(attn, *(x.astype(np.float32) for x in (q, k, v)))
    with pytest.raises(ValueError, match="need: got 'dscale'"):
        ct.check_gradients(attn, q, k, v, need=("dscale",))
