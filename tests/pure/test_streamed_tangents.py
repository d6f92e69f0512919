"""Tangents of streamed keys and values against the oracle: on the CPU, and by way of a stand-in for a device."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.streaming import calls
from cuflash.testing.tangents import Moved, movable
from tests.fake_cupy import FakeDevice
from tests.pure.test_streamed import CASE, DEVICES, SMALL, chunks_for
from tests.sampling import examples
from tests.second_derivatives import moved_by
from tests.streams import ON_CPU, judge_tangents, through


@settings(max_examples=examples(60))
@given(data=st.data(), case=ct.cases(**SMALL), how=DEVICES)
def test_any_chunks_of_any_case_keep_the_oracle_rule(data, case, how):
    moved = data.draw(moved_by(case))
    with through(how):
        judge_tangents(case, moved, ON_CPU.tangents(case, moved, chunks_for(data, case)))


@pytest.mark.parametrize(
    "options",
    [
        {"score_mean": 3e3, "bias": (1, 1, 13, 1), "dropout": 0.1, "sinks": True, "dlse": True},
        {"bias": (4, 13, 50), "bias_mask": -1e9, "sinks": True, "dlse": True},
        {"dtype": "bfloat16", "score_mean": 5e3, "window": (30, 0)},
    ],
    ids=str,
)
@pytest.mark.parametrize("how", [None, {"late": True, "pinned": False}], ids=["views", "buffers"])
def test_rows_of_large_scores_keep_the_oracle_rule(options, how, monkeypatch):
    """Where what rounding leaves of the lse of a chunk does not say what the chunk weighs."""
    monkeypatch.setattr(calls, "device_of", lambda error: None if how is None else FakeDevice(**how))
    case = ct.Case(**{"seqlen_q": 13, "seqlen_k": 50, "num_heads": 4, "num_heads_kv": 2, "head_dim": 8} | options)
    moved = Moved(names=tuple(movable(case)), cotangents=("tdout", "tdlse") if case.dlse else ("tdout",))
    judge_tangents(case, moved, ON_CPU.tangents(case, moved, 16))


@settings(max_examples=examples(20))
@given(data=st.data(), case=ct.cases(**SMALL))
def test_bits_do_not_depend_on_how_chunks_travel(data, case):
    chunk, moved, found = chunks_for(data, case), data.draw(moved_by(case)), []
    for how in (None, {"late": False, "pinned": True}, {"late": True, "pinned": False}):
        with through(how):
            found.append(ON_CPU.tangents(case, moved, chunk))
    for others in found[1:]:
        for name, x in others.items():
            np.testing.assert_array_equal(x, found[0][name], err_msg=name, strict=True)


@settings(max_examples=examples(15))
@given(data=st.data(), case=ct.cases(**SMALL))
def test_one_chunk_is_the_call_as_it_was(data, case):
    arrays, moved = case.arrays(), data.draw(moved_by(case))
    attn: Any = cuflash.FlashAttention(**case.keywords)
    of_inputs = {name: x for name, x in moved.arrays(case).items() if name not in ("tdout", "tdlse")}
    expected = attn.jvp(*ct.qkv(arrays), **ct.optional(arrays), **case.random, **of_inputs)
    found = ON_CPU.tangents(case, moved, case.seqlen_k)
    for name, x in expected._asdict().items():
        np.testing.assert_array_equal(found[name], x, err_msg=name, strict=True)


@settings(max_examples=examples(15))
@given(data=st.data(), case=ct.cases(**{**SMALL, "features": ("causal", "window", "sinks", "bias", "dropout")}))
def test_linear_in_tangents_to_the_last_bit_for_powers_of_two(data, case):
    """And tv = v alone makes tout = out."""
    arrays, chunk = case.arrays(), chunks_for(data, case)
    q, k, v = ct.qkv(arrays)
    keys = cuflash.streamed(k, v, chunk=chunk)
    attn: Any = cuflash.FlashAttention(**case.keywords)
    tangents = data.draw(moved_by(case)).arrays(case)
    of_inputs: dict[str, Any] = {name: x for name, x in tangents.items() if name not in ("tdout", "tdlse")}
    optional = ct.optional(arrays) | case.random
    one = attn.jvp(q, *keys, **optional, **of_inputs)
    four = attn.jvp(q, *keys, **optional, **{name: (4 * x).astype(x.dtype) for name, x in of_inputs.items()})
    if case.dtype in ("float32", "float64"):
        np.testing.assert_array_equal(four.tout, 4 * one.tout)
        np.testing.assert_array_equal(four.tlse, 4 * one.tlse)
    alone = attn.jvp(q, *keys, **optional, tv=v)
    np.testing.assert_array_equal(alone.tout, alone.out)
    assert not alone.tlse.any()


def gamma_score(s, i, j, *, gamma, x, head):
    return cuflash.where(x[i] > 0, s * x[j], cuflash.tanh(gamma[head] * s))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_functions(dtype):
    """As keys that are not streamed; the tangents of gradients of arrays that functions read are sums over chunks."""
    random = np.random.default_rng(7)
    point: dict[str, Any] = {name: random.standard_normal((2, 2, 33, 8)).astype(dtype) for name in ("q", "k", "v")}
    point |= {"gamma": random.standard_normal(2).astype(dtype), "x": random.standard_normal(33).astype(dtype)}
    t = {f"t{name}": random.standard_normal(x.shape).astype(dtype) for name, x in point.items()}
    dout = random.standard_normal((2, 2, 33, 8)).astype(dtype)
    attn = cuflash.FlashAttention(causal=True, score=gamma_score)
    need = tuple(f"td{name}" for name in point)
    found = []
    for chunk in (None, 8):
        own = dict(point)
        if chunk:
            own |= dict(zip(("k", "v"), cuflash.streamed(point["k"], point["v"], chunk=chunk), strict=True))
        results = attn.jvp(**own, **t)
        found.append((*results, *attn.backward_jvp(dout, **own, **results._asdict(), need=need, **t)))
    bound = {"float16": 2e-2, "float32": 2e-5, "float64": 1e-12}[dtype]
    for x, y in zip(*found, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(y.astype(float), x.astype(float), rtol=bound, atol=bound * np.abs(x).max())


@pytest.mark.parametrize("how", [None, {"late": True, "pinned": False}, {"late": True, "pinned": True}])
def test_results_go_where_the_caller_wants_them(how, monkeypatch, tmp_path):
    monkeypatch.setattr(calls, "device_of", lambda error: None if how is None else FakeDevice(**how))
    arrays, moved = CASE.arrays(), Moved()
    q, k, v = ct.qkv(arrays)
    tangents: dict[str, Any] = moved.arrays(CASE)
    keys, attn = cuflash.streamed(k, v, chunk=16), cuflash.FlashAttention(causal=True)
    tdk = np.memmap(tmp_path / "tdk", k.dtype, "w+", shape=k.shape)
    tout, tdq, tdv = np.empty_like(q), np.empty_like(q), np.full(v.shape[::-1], np.nan, v.dtype).T
    results = attn.jvp(q, *keys, tout=tout, **tangents)
    assert results.tout is tout
    found = attn.backward_jvp(arrays["dout"], q, *keys, *results, tdq=tdq, tdk=tdk, tdv=tdv, **tangents)
    assert (found.tdq is tdq, found.tdk is tdk, found.tdv is tdv) == (True, True, True)
    judge_tangents(CASE, moved, results._asdict() | found._asdict())


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_batch_axes_that_broadcast(dtype):
    """As keys that are not streamed: tangents of gradients are sums over what broadcasts."""
    random = np.random.default_rng(1)
    shapes = {"q": (3, 1, 2, 17, 8), "k": (2, 2, 19, 8), "v": (1, 2, 19, 4), "bias": (3, 2, 1, 17, 19)}
    made = [{f"{p}{n}": random.standard_normal(s).astype(dtype) for n, s in shapes.items()} for p in ("", "t")]
    point, t = made
    dout = random.standard_normal((3, 2, 2, 17, 4)).astype(dtype)
    attn: Any = cuflash.FlashAttention()
    need, found = ("tdq", "tdk", "tdv", "tdbias", "tdscale"), []
    for keys in ((point["k"], point["v"]), cuflash.streamed(point["k"], point["v"], chunk=5)):
        own: dict[str, Any] = point | dict(zip(("k", "v"), keys, strict=True))
        results = attn.jvp(**own, **t)
        found.append((*results, *attn.backward_jvp(dout, **own, **results._asdict(), need=need, **t)))
    bound = 1e-12 if dtype == "float64" else 1e-2
    for x, y in zip(*found, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(y.astype(float), x.astype(float), rtol=bound, atol=bound * np.abs(x).max())


def test_device_memory_does_not_grow_with_the_keys(monkeypatch):
    taken = []
    for seqlen_k in (1000, 4000):
        device = FakeDevice(late=True, pinned=False)
        monkeypatch.setattr(calls, "device_of", lambda error, device=device: device)
        case = replace(CASE, seqlen_k=seqlen_k, causal=False)
        judge_tangents(case, Moved(), ON_CPU.tangents(case, Moved(), 100))
        taken.append(device.allocated)
    assert taken[0] == taken[1] > 0


def test_hessian_vector_products_and_the_double_backward_pass_stream_keys():
    random = np.random.default_rng(0)
    q, k, v, dout, tq, tk, tv = random.standard_normal((7, 2, 40, 8))
    attn, keys = cuflash.FlashAttention(causal=True), cuflash.streamed(k, v, chunk=16)
    given: dict[str, Any] = {"tq": tq, "tk": tk, "tv": tv}
    whole = cuflash.hessian_vector_product(attn, dout, q, k, v, **given)
    found = cuflash.hessian_vector_product(attn, dout, q, *keys, **given)
    for x, y in zip(whole, found, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-10, atol=1e-10)


def test_tangents_of_keys_are_arrays_in_host_memory_of_their_shape():
    arrays = CASE.arrays()
    q, k, v = ct.qkv(arrays)
    keys: Any = cuflash.streamed(k, v, chunk=16)
    attn: Any = cuflash.FlashAttention(causal=True)
    with pytest.raises(TypeError, match=r"^tk: got Streamed, expected an array in host memory$"):
        attn.jvp(q, *keys, tk=keys.k)
    with pytest.raises(ValueError, match=r"^tk: got shape \(1, 2, 49, 8\), expected \(1, 2, 50, 8\)"):
        attn.jvp(q, *keys, tk=k[:, :, 1:])
    with pytest.raises(ValueError, match=r"^tout: got memory shared with q, expected memory of its own$"):
        attn.jvp(q, *keys, tout=q)
