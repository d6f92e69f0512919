"""Scores and masks as functions, with streamed keys and values, against the oracle."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from tests.pure.test_streamed import DEVICES
from tests.ranks import judge
from tests.sampling import examples
from tests.scored import CONDITIONED, SCORES, Scored, score_args_of, scored
from tests.streams import ON_CPU, through


@settings(max_examples=examples(40))
@given(data=st.data(), case=scored(max_seqlen=130, packs=False, scores=CONDITIONED), how=DEVICES)
def test_any_chunks_of_any_functions_keep_the_oracle_rule(data, case, how):
    step = 64 if "block_mask" in case.arrays else 16 if case.problem.dropout else 1
    chunk = data.draw(st.sampled_from([step * n for n in (1, 2, 3, 5, 16, 100)]), "chunk")
    with through(how):
        judge(case, ON_CPU.results(case, chunk))


def test_the_gradient_of_a_cap_is_summed_over_chunks():
    """Of many pairs, with which luck does not decide (tests/scored.py)."""
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((1, 2, 130, 8)).astype(np.float32) for name in ("q", "k", "v", "dout")}
    arrays |= score_args_of((SCORES["capped"],), (1, 2, 130, 130), "float32", 0)
    case = Scored(cuflash.FlashAttention(score=SCORES["capped"]), arrays, {}, "")
    judge(case, ON_CPU.results(case, 48))


def spelled(s, i, j, *, head, slopes, pairs):
    return 5 * cuflash.tanh(s / 5) - slopes[head] * cuflash.abs(i - j) + pairs[i, j]


def test_functions_that_spell_out_options_are_computed_as_these():
    random = np.random.default_rng(0)
    q, k, v, dout = random.standard_normal((4, 2, 60, 8))
    arrays = {"slopes": np.array([0.1, 0.2]), "pairs": random.standard_normal((60, 60))}
    keys = cuflash.streamed(k, v, chunk=16)
    attn: Any = cuflash.FlashAttention(score=spelled, mask=lambda i, j: (i >= j) & (i - j < 20))
    options: Any = cuflash.FlashAttention(softcap=5.0, window=(19, 0))
    optional = {"alibi_slopes": arrays["slopes"], "bias": arrays["pairs"]}
    out, lse = attn.forward(q, *keys, **arrays)
    for x, y in zip((out, lse), options.forward(q, *keys, **optional), strict=True):
        np.testing.assert_array_equal(x, y)
    need, of_options = ("dq", "dk", "dv", "dslopes", "dpairs"), ("dq", "dk", "dv", "dalibi_slopes", "dbias")
    found = attn.backward(dout, q, *keys, out, lse, need=need, **arrays)
    expected = options.backward(dout, q, *keys, out, lse, need=of_options, **optional)
    for name, of_option in zip(need, of_options, strict=True):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, of_option))
    into = np.full((60, 60), np.nan)
    assert attn.backward(dout, q, *keys, out, lse, need=(), dpairs=into, **arrays).dpairs is into
    np.testing.assert_array_equal(into, found.dpairs)
    text = attn.plan(q, *keys, **arrays).describe(verbose=True, width=0)
    assert "softcap = 5.0, alibi_slopes = slopes, bias = pairs, window = (19, 0)" in text
    assert attn.plan(q, *keys, **arrays).chunks[0].queries == (0, 35)


def test_the_plan_shows_functions():
    x = np.zeros((2, 60, 8))
    attn: Any = cuflash.FlashAttention(score=SCORES["decay"])
    text = attn.plan(x, *cuflash.streamed(x, x, chunk=16), gamma=np.ones(2)).describe(verbose=True, width=0)
    assert "\n  score = s + t0\n" in text


def test_gradients_of_arrays_of_16_bits_are_added_before_they_are_rounded():
    sizes: Any = (1, 2, 60, 60)
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal((1, 2, 60, 8)).astype("float16") for name in ("q", "k", "v", "dout")}
    arrays |= score_args_of((SCORES["t5"],), sizes, "float16", 0)
    attn = cuflash.FlashAttention(score=SCORES["t5"])
    narrow, wide = (
        ON_CPU.results(Scored(attn, arrays | {"table": arrays["table"].astype(dtype)}, {}, ""), 5)["dtable"]
        for dtype in ("float16", "float32")
    )
    np.testing.assert_array_equal(narrow, wide.astype("float16"))
    whole = ON_CPU.results(Scored(attn, arrays, {}, ""), 60)
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    out, lse = attn.forward(q, k, v, table=arrays["table"])
    np.testing.assert_array_equal(whole["out"], out)
    (expected,) = attn.backward(arrays["dout"], q, k, v, out, lse, table=arrays["table"], need=("dtable",))
    np.testing.assert_array_equal(whole["dtable"], expected)
