"""Reductions of attention weights and of rows of streamed keys against the oracle."""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.streaming import calls
from tests.fake_cupy import FakeDevice
from tests.pure.test_streamed import DEVICES, SMALL, chunks_for
from tests.reductions import attention_of, gradient_problem, inputs_of, judge, judge_gradients, lse_of
from tests.row_reductions import BEHIND_SINKS, gap_is_clear, maxima_are_clear
from tests.row_reductions import results_of as row_reductions_of
from tests.sampling import examples
from tests.streams import through

AXES = ct.with_axes(ct.cases(**{**SMALL, "max_scores": 2**11}, ndims=(4,)))


@settings(max_examples=examples(90), deadline=None)
@given(data=st.data(), case=ct.cases(**SMALL), how=DEVICES, count=st.sampled_from((1, 3, 64)))
def test_any_chunks_keep_the_oracle_rule(data, case, how, count):
    attn, arrays = attention_of(case), inputs_of(case)
    others = {key: x for key, x in arrays.items() if key not in ("q", "k")}
    lse = lse_of(attn, arrays)
    weights = np.random.default_rng(case.seed).standard_normal(lse.shape).astype(lse.dtype)
    k = cuflash.streamed(arrays["k"], None, chunk=chunks_for(data, case))
    with through(how):
        sums = attn.column_sums(arrays["q"], k, lse, weights, **others)
        largest = attn.column_max(arrays["q"], k, lse, **others)
        top = attn.top_keys(arrays["q"], k, lse, count, **others)
    assert sums.dtype == largest.dtype == top.weights.dtype == lse.dtype
    judge(case, weights, sums, largest, top)


@settings(max_examples=examples(60), deadline=None)
@given(case=ct.cases(**SMALL | {"features": ("packed", "lengths", "causal", "gqa", "pages")}))
def test_what_forward_does_not_take_is_refused(case):
    attn, arrays = attention_of(case), inputs_of(case)
    lse = lse_of(attn, arrays)
    q, keys = arrays.pop("q"), cuflash.streamed(arrays.pop("k"), None)
    dsums = np.zeros((*lse.shape[:-1], case.seqlen_k), lse.dtype)
    for compute in (
        functools.partial(attn.forward, q, *keys),
        functools.partial(attn.column_sums, q, keys, lse),
        functools.partial(attn.column_max, q, keys, lse),
        functools.partial(attn.top_keys, q, keys, lse, 3),
        functools.partial(attn.column_sums_backward, dsums, q, keys, lse),
    ):
        if case.cu_seqlens_q or case.page_size or case.causal == "lengths":
            with pytest.raises(NotImplementedError, match="streamed"):
                compute(**arrays)
        else:
            compute(**arrays)


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), case=AXES | ct.cases(**SMALL | {"dtypes": ("float64",)}), how=DEVICES)
def test_all_results_are_those_of_keys_in_one_memory(data, case, how):
    """Gradients, and batch axes of any shape."""
    attn, arrays, rng = attention_of(case), inputs_of(case), np.random.default_rng(case.seed)
    lse = lse_of(attn, arrays)
    q, keys = arrays.pop("q"), arrays.pop("k")
    weights = rng.standard_normal(lse.shape).astype(lse.dtype)
    dsums = rng.standard_normal((*lse.shape[:-1], case.seqlen_k)).astype(lse.dtype)
    need = [name for name in ct.gradients_of(case.problem) if name not in ("dv", "dsinks")] + ["dlse", "dweights"]

    def results(k):
        return (
            attn.column_sums(q, k, lse, weights, **arrays),
            attn.column_max(q, k, lse, **arrays),
            *attn.top_keys(q, k, lse, 5, **arrays),
            *attn.column_sums_backward(dsums, q, k, lse, weights, need=need, **arrays),
        )

    with through(how):
        found = results(cuflash.streamed(keys, None, chunk=chunks_for(data, case)))
    tolerance = {"float64": 1e-11, "float32": 1e-3}.get(case.dtype, 0.05)
    for name, x, expected in zip(("sums", "max", "indices", "weights", *need), found, results(keys), strict=True):
        assert (x.shape, x.dtype) == (expected.shape, expected.dtype), name
        if name != "indices" or case.dtype == "float64":
            size = float(np.abs(expected).max(initial=1))
            np.testing.assert_allclose(x.astype(float), expected.astype(float), 0, tolerance * size, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("how", [None, {"late": True, "pinned": False}], ids=str)
def test_gradients_keep_the_oracle_rule(dtype, how):
    case, (dsums, q, k, lse, weights), need = gradient_problem(dtype)
    with through(how):
        k = cuflash.streamed(k, None, chunk=50)
        found = attention_of(case).column_sums_backward(dsums, q, k, lse, weights, need=need)
    judge_gradients(case, weights, dsums, found._asdict())


def test_results_over_keys_are_in_host_memory_pinned_where_keys_are(monkeypatch):
    class Device(FakeDevice):
        def pinned(self, shape, dtype):
            self.made = super().pinned(shape, dtype)
            return self.made

    q, k = np.random.default_rng(0).standard_normal((2, 4, 50, 8))
    attn = cuflash.FlashAttention()
    lse = attn.forward(q, k, None).lse
    for method in (attn.column_sums, attn.column_max):
        device = Device(late=False, pinned=True)
        monkeypatch.setattr(calls, "device_of", lambda backend, device=device: device)
        found = method(q, cuflash.streamed(k, None, chunk=10), lse)
        assert np.shares_memory(found, device.made)


def test_dsums_are_checked():
    q, k = np.random.default_rng(0).standard_normal((2, 4, 50, 8))
    attn: Any = cuflash.FlashAttention()
    lse = attn.forward(q, k, None).lse
    keys = cuflash.streamed(k, None)
    with pytest.raises(TypeError, match=r"^dsums: got None, expected an array"):
        attn.column_sums_backward(None, q, keys, lse)
    with pytest.raises(ValueError, match=r"^dsums: got shape"):
        attn.column_sums_backward(lse[:, :20], q, keys, lse)


LARGE = ({"bias": -1e9}, {"bias": 3e8, "sinks": 3e8})


@pytest.mark.parametrize("numbers", LARGE, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_chunks_weigh_what_their_keys_do_where_scores_are_large(dtype, numbers):
    """A finite mask of all keys: lse, rounded, does not say what a weight is; of more keys than these, it has to."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((4, rows, 16)).astype(dtype) for rows in (70, 90))
    real = np.float64 if dtype == "float64" else np.float32
    shapes = {"bias": 90, "sinks": 4}
    arrays = {name: np.full(shapes[name], x, real) for name, x in numbers.items()}
    attn: Any = cuflash.FlashAttention()
    lse = attn.forward(q, k, None, **arrays).lse
    keys = cuflash.streamed(k, None, chunk=20)
    units = 64 * float(np.finfo(real).eps)
    for own in (lse, lse + np.abs(lse) * real(0.01)):
        for name in ("column_sums", "column_max"):
            found, expected = (getattr(attn, name)(q, x, own, **arrays) for x in (keys, k))
            np.testing.assert_allclose(found, expected, rtol=units, err_msg=name)
            assert expected.any() == (own is lse)
        (_, found), (_, expected) = (attn.top_keys(q, x, own, 3, **arrays) for x in (keys, k))
        np.testing.assert_allclose(found, expected, rtol=units)


# ---- Maxima and entropies of rows ------------------------------------------------------------------------------------

WANTED = st.sampled_from([("max",), ("entropy",), ("max", "entropy")])


@settings(max_examples=examples(90), deadline=None)
@given(data=st.data(), case=ct.cases(**SMALL) | AXES, how=DEVICES, want=WANTED, has_values=st.booleans())
def test_row_reductions_of_any_chunks_keep_the_oracle_rule(data, case, how, want, has_values):
    case = replace(case, row_reductions=want, has_values=has_values)
    assume("max" not in want or gap_is_clear(case))
    chunk = chunks_for(data, case)
    with through(how):
        found = row_reductions_of(case, keys_of=functools.partial(cuflash.streamed, chunk=chunk))
    ct.assert_forward(case, **found.forward)
    ct.assert_backward(case, **found.gradients)


@settings(max_examples=examples(60), deadline=None)
@given(case=BEHIND_SINKS, dtype=st.sampled_from(("float32", "float64")), chunk=st.integers(7, 64), how=DEVICES)
def test_maxima_of_any_chunks_have_gradients_whatever_a_sink_leaves_of_their_weight(case, dtype, chunk, how):
    assume(maxima_are_clear(case.problem(dtype), case.arrays(dtype)))

    def run(options, arrays, need):
        attn: Any = cuflash.FlashAttention(**case.keywords, deterministic=options.deterministic)
        others = dict(arrays)
        q, k, v, dout, dmax = (others.pop(name) for name in ("q", "k", "v", "dout", "dmax"))
        keys = cuflash.streamed(k, v, chunk=chunk)
        out, lse = attn.forward(q, *keys, **others)
        found = attn.backward(dout, q, *keys, out, lse, dmax=dmax, need=need, **others)
        return out, lse, dict(zip(need, found, strict=True))

    with through(how):
        case.judge(dtype, run)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**16), keys=st.integers(1, 99), chunk=st.sampled_from((1, 7, 20)), how=DEVICES)
def test_the_first_of_equal_scores_gets_the_gradient_of_the_maximum(seed, keys, chunk, how):
    """Integers, whose products are exact, so that many scores are equal; also those of keys of several chunks."""
    rng = np.random.default_rng(seed)
    q, k = (rng.integers(-2, 3, (2, n, 4)).astype(np.float32) for n in (30, keys))
    attn: Any = cuflash.FlashAttention(scale=0.5)
    with through(how):
        _, lse, largest = attn.forward(q, *cuflash.streamed(k, None, chunk=chunk), want=("max",))
        dmax, bias = rng.integers(1, 5, lse.shape).astype(np.float32), np.zeros((2, 30, keys), np.float32)
        given = {"bias": bias, "dmax": dmax, "need": ("dbias",)}
        (dbias,) = attn.backward(None, q, *cuflash.streamed(k, None, chunk=chunk), None, lse, **given)
    scores = 0.5 * (q @ k.swapaxes(1, 2))
    np.testing.assert_array_equal(largest, scores.max(axis=-1))
    expected = np.zeros_like(bias)
    np.put_along_axis(expected, scores.argmax(axis=-1)[..., None], dmax[..., None], axis=-1)
    np.testing.assert_array_equal(dbias, expected)


@pytest.mark.parametrize("numbers", LARGE, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_entropies_of_large_scores(dtype, numbers):
    """All keys have the same weight: the entropy is log(90), or with a sink that of 91 keys."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((4, rows, 16)).astype(dtype) for rows in (70, 90))
    real = np.float64 if dtype == "float64" else np.float32
    shapes = {"bias": 90, "sinks": 4}
    arrays = {name: np.full(shapes[name], x, real) for name, x in numbers.items()}
    attn: Any = cuflash.FlashAttention(scale=1e-9)
    found = attn.forward(q, *cuflash.streamed(k, None, chunk=20), want=("max", "entropy"), **arrays)
    keys = 90 + ("sinks" in numbers)
    np.testing.assert_allclose(found.entropy, np.log(keys), rtol=8 * float(np.finfo(real).eps))
    np.testing.assert_allclose(found.max, numbers["bias"], rtol=2 * float(np.finfo(real).eps))
