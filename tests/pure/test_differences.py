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
from tests.sampling import examples
from tests.scored import SCORES, score_args_of
from tests.second_derivatives import FEATURES

SMOOTH = ("distance", "fade", "of_rows")
SIZES = (2, 2, 20, 24)


def inputs(seed):
    batch, heads, seqlen_q, seqlen_k = SIZES
    random = np.random.default_rng(seed)
    q = random.standard_normal((batch, heads, seqlen_q, 8))
    k, v = random.standard_normal((2, batch, heads, seqlen_k, 8))
    return q, k, v


NAMES = {1: {"dq", "dk", "dv"}, 2: {"tout", "tlse", "tdq", "tdk", "tdv"}}


@settings(max_examples=examples(8))
@given(st.sampled_from(SMOOTH), st.integers(0, 2**16), st.booleans(), st.sampled_from((1, 2)))
def test_gradients_of_functions_are_those_of_differences(name, seed, causal, order):
    attn = cuflash.FlashAttention(score=SCORES[name], causal=causal)
    arrays: dict[str, Any] = score_args_of((SCORES[name],), SIZES, "float64", seed)
    found = ct.check_gradients(attn, *inputs(seed), seed=seed, order=order, **arrays)
    assert NAMES[order] < found.keys() and all(own.scale > 0 for own in found.values())


@settings(max_examples=examples(40))
@given(
    ct.cases(
        features=FEATURES,
        dtypes=("float64",),
        score_spreads=(1.0,),
        strides=("contiguous",),
        max_seqlen=20,
        max_head_dim=8,
        max_scores=2**10,
    ),
    st.integers(0, 2**16),
)
def test_second_derivatives_of_options_are_those_of_differences(case, seed):
    arrays = case.arrays()
    random = {f"dropout_{name}": x for name, x in case.random.items()}
    attn = cuflash.FlashAttention(**case.keywords)
    q, k, v = ct.qkv(arrays)
    given_arrays: dict[str, Any] = ct.optional(arrays) | random
    found = ct.check_gradients(attn, q, k, v, order=2, seed=seed, rtol=1e-5, **given_arrays)
    of_terms = {f"td{name}" for name in ("bias", "alibi_slopes", "sinks") if name in arrays}
    assert found.keys() == NAMES[2] | of_terms


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


@pytest.mark.parametrize(
    ("method", "result", "order"), [("backward_jvp", "tdk", 2), ("jvp", "tout", 2), ("jvp", "tlse", 2)]
)
def test_a_wrong_second_derivative_is_named(monkeypatch, method, result, order):
    attn, (q, k, v) = cuflash.FlashAttention(softcap=2.0), inputs(2)
    right = getattr(cuflash.FlashAttention, method)

    def wrong(self, *args, **keywords):
        results = right(self, *args, **keywords)
        return results._replace(**{result: getattr(results, result) * (1 + 1e-4)})

    monkeypatch.setattr(cuflash.FlashAttention, method, wrong)
    assert set(ct.check_gradients(attn, q, k, v)) == NAMES[1]
    with pytest.raises(AssertionError, match=rf"(?m)^{result}: got .* by the gradient, expected .* by differences"):
        ct.check_gradients(attn, q, k, v, order=order)


def test_what_it_cannot_check_is_refused():
    attn, (q, k, v) = cuflash.FlashAttention(), inputs(3)
    with pytest.raises(ValueError, match="q: got dtype float32"):
        ct.check_gradients(attn, *(x.astype(np.float32) for x in (q, k, v)))
    with pytest.raises(ValueError, match="need: got 'dscale'"):
        ct.check_gradients(attn, q, k, v, need=("dscale",))
    dropout = cuflash.FlashAttention(dropout=0.5)
    with pytest.raises(TypeError, match=r"^dropout_seed: got None, expected an integer"):
        ct.check_gradients(dropout, q, k, v, seed=1, offset=2)
    with pytest.raises(TypeError, match=r"^dropout_offset: got None, expected an integer"):
        ct.check_gradients(dropout, q, k, v, dropout_seed=1)
    with pytest.raises(ValueError, match="order: got 0, expected 1 or 2"):
        ct.check_gradients(attn, q, k, v, order=0)
    with pytest.raises(
        NotImplementedError, match="order: got 3, expected 1 or 2: there are no third derivatives; take"
    ):
        ct.check_gradients(attn, q, k, v, order=3)


@pytest.mark.parametrize("order", [1, 2])
def test_no_values(order):
    q, k = np.random.default_rng(0).standard_normal((2, 2, 6, 4))
    arrays: Any = {"bias": np.zeros((6, 6)), "sinks": np.zeros(2)}
    found = ct.check_gradients(cuflash.FlashAttention(causal=True), q, k, None, order=order, **arrays)
    of_inputs = {"dq", "dk", "dbias", "dsinks"}
    assert set(found) == (of_inputs if order == 1 else {"tlse", *(f"t{name}" for name in of_inputs)})
