"""plan, compile and tune of passes with tangents: what is checked, and what they say of NumPy arrays."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.cpu import core
from cuflash.spec.passes import PASS_NAMES
from cuflash.spec.results import checked_passes
from cuflash.testing import cases, optional
from cuflash.testing.tangents import COTANGENTS
from tests.sampling import examples
from tests.second_derivatives import FEATURES, moved_by

WITH_TANGENTS = ("jvp", "backward_jvp")


def inputs(dtype=np.float32, **others: Any) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal((2, 5, 4)).astype(dtype) for name in ("q", "k", "v", *others)}


@given(st.permutations(PASS_NAMES), st.integers(1, len(PASS_NAMES)))
def test_passes_are_those_named_in_their_order(names, count):
    found = [pass_.name for pass_ in checked_passes(names[:count])]
    assert found == [name for name in PASS_NAMES if name in names[:count]]


@settings(max_examples=examples(60))
@given(
    cases(features=FEATURES, max_seqlen=40, max_head_dim=32, max_scores=2**12),
    st.data(),
    st.sets(st.sampled_from(PASS_NAMES), min_size=1),
)
def test_plans_of_numpy_arrays_count_the_products_of_the_tangents_given(case, data, passes):
    moved = data.draw(moved_by(case))
    tangents = {name: x for name, x in moved.arrays(case).items() if name not in COTANGENTS}
    arrays, attn = case.arrays(), cuflash.FlashAttention(**case.keywords)
    call = {name: arrays[name] for name in ("q", "k", "v")} | optional(arrays)
    if passes & set(WITH_TANGENTS):
        if not tangents:
            with pytest.raises(ValueError, match="tq: got no tangent, expected tq, tk or another tangent"):
                attn.plan(**call, passes=passes)
            return
        call |= tangents
    plan: Any = attn.plan(**call, passes=passes)
    assert [pass_.name for pass_ in plan.passes] == [name for name in PASS_NAMES if name in passes]
    names = tuple(name[1:] for name in tangents) if passes & set(WITH_TANGENTS) else ()
    assert set(plan.problem.moved or ()) == set(names)
    text = plan.describe(width=0)
    for pass_ in plan.passes:
        assert f"{pass_.flops(plan.problem) / 1e9:.3g} GFLOP {pass_}" in text
    told = re.findall(r"(\w*jvp) by (?:the compiled core|NumPy)", text)
    assert told == [name for name in WITH_TANGENTS if name in passes]
    if core.why_not() is None:
        assert "by NumPy" not in text
    attn.compile(**call, passes=passes)
    with pytest.raises(NotImplementedError, match="q: got an array in host memory, expected one on a GPU"):
        attn.tune(**call, passes=passes)


def score(s, i, j, *, gamma, head):
    return cuflash.tanh(gamma[head] * s)


def test_tangents_of_score_args():
    call = inputs() | {"gamma": np.ones(2, np.float32)}
    attn = cuflash.FlashAttention(score=score)
    plan: Any = attn.plan(**call, tgamma=call["gamma"], passes=WITH_TANGENTS)
    assert plan.problem.moved == ("gamma",)
    if core.why_not() is None:
        assert "jvp by the compiled core" in plan.describe(width=0)
    plan = attn.plan(**call, tgamma=call["gamma"], passes=["backward_jvp"], need=("dq", "dgamma"))
    assert plan.need == ("dq", "dgamma")


def test_functions_that_are_options_have_tangents_as_these():
    call = inputs() | {"slopes": np.ones(2, np.float32)}
    attn = cuflash.FlashAttention(score=lambda s, i, j, *, slopes, head: s - slopes[head] * abs(i - j))
    plan: Any = attn.plan(**call, tslopes=call["slopes"], passes=["jvp"])
    assert plan.problem.moved == ("alibi_slopes",) and "alibi_slopes = slopes" in plan.describe()


def test_no_score_arg_has_the_name_of_a_tangent():
    with pytest.raises(ValueError, match="score: got an array named tq, expected another name"):
        cuflash.FlashAttention(score=lambda s, i, j, *, tq: s + tq[i])


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"passes": "jvp"}, TypeError, "passes: got str 'jvp', expected a collection of 'forward', 'backward', 'jvp', "),
    ({"passes": ["third"]}, ValueError, "passes: got 'third', expected 'forward', 'backward', 'jvp', 'backward_jvp', "),
    ({"passes": []}, ValueError, "passes: got [], expected one or more of 'forward'"),
    ({"passes": ["jvp"]}, ValueError, "tq: got no tangent"),
    ({"passes": ["jvp"], "tq": np.zeros((2, 5, 3), np.float32)}, ValueError, "tq: got shape (2, 5, 3)"),
    ({"passes": ["backward_jvp"], "tk": np.zeros((2, 5, 4))}, TypeError, "tk: got dtype float64"),
    ({"passes": ["jvp"], "tbias": np.zeros((5, 5), np.float32)}, ValueError, "tbias: got an array, expected None"),
    ({"passes": ["jvp"], "tmask": np.zeros((5, 5))}, TypeError, "unexpected keyword argument 'tmask'"),
    ({"tq": np.zeros((2, 5, 4), np.float32)}, TypeError, "unexpected keyword argument 'tq'"),
]


@pytest.mark.parametrize("method", ["plan", "compile", "tune"])
@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_arguments_are_named(method, arguments, error, message):
    with pytest.raises(error) as raised:
        getattr(cuflash.FlashAttention(), method)(**inputs(), **arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize("method", ["plan", "compile", "tune"])
def test_streamed_keys_have_no_passes_with_tangents(method):
    given = inputs()
    keys = cuflash.streamed(given["k"], given["v"], chunk=2)
    with pytest.raises(NotImplementedError, match="passes: got 'jvp' with streamed keys"):
        getattr(cuflash.FlashAttention(), method)(given["q"], *keys, tq=given["q"], passes=["jvp"])


def test_one_pass_of_streamed_keys_is_planned():
    x = np.zeros((1, 2, 100, 16), np.float32)
    for passes in (["forward"], ["backward"], ["forward", "backward"]):
        plan: Any = cuflash.FlashAttention(causal=True).plan(x, *cuflash.streamed(x, x, chunk=32), passes=passes)
        assert list(plan.ways) == passes and len(plan.chunks) == 4
