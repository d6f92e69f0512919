"""plan, compile and tune of reductions of the attention weights: what is checked, and what they say of NumPy arrays."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.spec.passes import PREPARED_NAMES, REDUCTIONS
from cuflash.testing import cases
from tests.reductions import attention_of, inputs_of, lse_of
from tests.sampling import examples

NAMES = tuple(pass_.name for pass_ in REDUCTIONS)
FEATURES = (
    "causal",
    "window",
    "scale",
    "softcap",
    "bias",
    "mask",
    "alibi_slopes",
    "kv_lengths",
    "gqa",
    "sinks",
    "layout",
)
WITHOUT_GRADIENTS = NAMES[:3]


def inputs() -> dict[str, Any]:
    q, k = np.random.default_rng(0).standard_normal((2, 2, 5, 4), np.float32)
    return {"q": q, "k": k, "v": None}


@settings(max_examples=examples(60))
@given(
    cases(features=(*FEATURES, "packed"), min_seqlen=0, max_seqlen=40, max_head_dim=32, max_scores=2**12),
    st.sets(st.sampled_from(NAMES), min_size=1),
    st.sets(st.sampled_from(("forward", "backward"))),
    st.booleans(),
)
def test_plans_of_numpy_arrays(case, reductions, others, gives_lse):
    """Of reductions alone and together with passes over values, which they leave as they are."""
    attn, arrays = attention_of(case), inputs_of(case)
    v = case.arrays()["v"] if others else None
    own: dict[str, Any] = {"count": 3} if "top_keys" in reductions else {}
    own |= {"lse": lse_of(attn, arrays)} if gives_lse else {}
    plan: Any = attn.plan(**arrays, v=v, **own, passes={*reductions, *others})
    plans = (plan, *plan.others)
    assert [str(pass_) for one in plans for pass_ in one.passes] == [
        name for name in PREPARED_NAMES if name in reductions | others
    ]
    for one in plans:
        assert (one.problem.head_dim_v == 0) == (str(one.passes[0]) in NAMES)
        for pass_ in one.passes:
            assert f"{pass_.flops(one.problem) / 1e9:.3g} GFLOP {pass_}" in plan.describe(width=0)
    told = re.findall(r"(\w+) by (?:the compiled core|NumPy)", plan.describe(width=0))
    assert told == [name for name in NAMES if name in reductions]
    attn.compile(**arrays, v=v, **own, passes={*reductions, *others})
    with pytest.raises(NotImplementedError, match="q: got an array in host memory, expected one on a GPU"):
        attn.tune(**arrays, v=v, **own, passes={*reductions})


@pytest.mark.parametrize("name", NAMES)
def test_plans_of_streamed_keys(name):
    q, k = np.random.default_rng(0).standard_normal((2, 3, 100, 8), np.float32)
    own: dict[str, Any] = {"count": 3} if name == "top_keys" else {}
    attn, keys = cuflash.FlashAttention(), cuflash.streamed(k, None, chunk=32)
    plan: Any = attn.plan(q, *keys, passes=[name], **own)
    assert len(plan.chunks) == 4 and name in plan.describe(width=0)
    attn.compile(q, *keys, passes=[name], **own)
    with pytest.raises(NotImplementedError, match="expected one on a GPU"):
        attn.tune(q, *keys, passes=[name], **own)
    both: Any = attn.plan(q, *cuflash.streamed(k, k, chunk=32), passes=["forward", name], **own)
    assert [one.problem.head_dim_v > 0 for one in (both, *both.others)] == [True, name == "column_sums_backward"]


@pytest.mark.parametrize("method", ["plan", "compile", "tune"])
@pytest.mark.parametrize(
    ("passes", "own", "error", "message"),
    [
        (["top_keys"], {}, TypeError, "count: got None, expected an integer"),
        (["top_keys"], {"count": 65}, ValueError, "count: got 65, expected 1 to 64"),
        (["column_max"], {"count": 1}, TypeError, "unexpected keyword argument 'count'"),
        (["column_max"], {"weights": 1}, TypeError, "unexpected keyword argument 'weights'"),
        (["column_sums"], {"lse": np.zeros((2, 6), np.float32)}, ValueError, r"lse: got shape \(2, 6\), expected"),
        (["column_sums"], {"weights": np.zeros((2, 6), np.float32)}, ValueError, r"weights: got shape \(2, 6\)"),
        (["column_sums_backward"], {"dsums": np.zeros((2, 6), np.float32)}, ValueError, r"dsums: got shape \(2, 6\)"),
        (["column_sum"], {}, ValueError, "passes: got 'column_sum', expected 'forward'.* or 'column_sums_backward'"),
    ],
)
def test_what_is_wrong_is_named(method, passes, own, error, message):
    with pytest.raises(error, match=message):
        getattr(cuflash.FlashAttention(), method)(**inputs(), passes=passes, **own)


def test_gradients_are_those_of_both_passes():
    """`need` is that of the gradients of all passes."""
    attn, given = cuflash.FlashAttention(softcap=3.0), inputs()
    passes, need = ["backward", "column_sums_backward"], ("dq", "dsoftcap", "dlse", "dweights")
    plan: Any = attn.plan(**given, passes=passes, need=need)
    assert [one.need for one in (plan, *plan.others)] == [("dq", "dsoftcap")] * 2
    for wrong in (["backward"], ["column_sums"]):
        with pytest.raises(ValueError, match="need: got 'dlse', expected 'dq'"):
            attn.plan(**given, passes=["backward", *wrong], need=need)
    with pytest.raises(ValueError, match="need: got 'dsinks', expected 'dq'"):
        attn.plan(**given, passes=["column_sums_backward"], need=["dsinks"])


def test_what_computes_functions():
    """Column sums of functions are gradients of values, whose scores NumPy makes; other reductions are tiles of it."""
    attn: Any = cuflash.FlashAttention(score=lambda s, i, j, *, f: cuflash.tanh(s) * f[i])
    text = attn.plan(**inputs(), f=np.ones(5, np.float32), passes=NAMES, count=2).describe(width=0)
    for name in ("column_max", "top_keys"):
        assert f"{name} by NumPy, and not the compiled core: " in text
    assert "column_sums by" in text and "column_sums_backward by" in text
