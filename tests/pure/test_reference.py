"""The oracle against loops over scalars, against finite differences, and against what the semantics say of edges."""

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import cuflash.testing as ct
from cuflash.arrays.array_info import view_4d, view_rows
from cuflash.spec.options import Options
from cuflash.spec.problem import make_problem
from cuflash.testing import reference
from tests.sampling import examples

SMALL: dict[str, Any] = {"max_seqlen": 8, "max_head_dim": 3, "max_scores": 128, "min_seqlen": 0}


def run(case, dtype=np.float64, **replaced):
    """out, lse, dq, dk, dv of the case by the plain formula."""
    arrays = case.arrays() | replaced
    inputs = [arrays[name] for name in ("q", "k", "v")]
    optional = ct.optional(arrays)
    out, lse = reference.forward(case.problem, *inputs, dtype=dtype, **optional)
    return (
        out,
        lse,
        *reference.backward(case.problem, arrays["dout"], *inputs, dtype=dtype, **ct.optional_backward(arrays)),
    )


def by_loops(case):
    """out and lse in scalar arithmetic, straight from the documentation of the options."""
    arrays, p = case.arrays(), case.problem
    q, k, v = (view_4d(arrays[name].astype(np.float64), case.layout).tolist() for name in ("q", "k", "v"))
    scores_shape = (p.batch, p.num_heads, p.seqlen_q, p.seqlen_k)
    bias = np.broadcast_to(arrays.get("bias", 0), scores_shape).astype(np.float64).tolist()
    mask = np.broadcast_to(arrays.get("mask", True), scores_shape).tolist()
    slopes = np.broadcast_to(arrays.get("alibi_slopes", 0), scores_shape[:2]).astype(np.float64).tolist()
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    left, right = case.window or (None, None)
    out, lse = np.zeros((*scores_shape[:3], p.head_dim_v)), np.full(scores_shape[:3], -np.inf)
    for b, h, i in np.ndindex(scores_shape[:3]):
        scores = {}
        num_keys = p.seqlen_k if case.kv_lengths is None else case.kv_lengths[b]
        last = num_keys if case.causal == "lengths" else p.seqlen_k
        diagonal = 0 if case.causal == "top_left" else last - p.seqlen_q
        for j in range(num_keys):
            beyond = j - (i + diagonal)
            too_early = left is not None and beyond < -left
            too_late = (right is not None and beyond > right) or (case.causal and beyond > 0)
            if too_early or too_late or not mask[b][h][i][j]:
                continue
            key_head = h // (case.num_heads // case.num_heads_kv)
            s = scale * math.fsum(x * y for x, y in zip(q[b][h][i], k[b][key_head][j], strict=True))
            s = s if case.softcap is None else case.softcap * math.tanh(s / case.softcap)
            s += bias[b][h][i][j] - slopes[b][h] * abs(beyond)
            if s > -math.inf:
                scores[j] = s
        if scores:
            largest = max(scores.values())
            lse[b, h, i] = largest + math.log(math.fsum(math.exp(s - largest) for s in scores.values()))
            for j, s in scores.items():
                out[b, h, i] += math.exp(s - lse[b, h, i]) * np.array(v[b][key_head][j])
    return out, lse


@given(ct.cases(dtypes=["float64", "float32", "bfloat16"], features=(*ct.FEATURES, "lengths"), **SMALL))
def test_equals_loops_over_scalars(case):
    out, lse = run(case)[:2]
    expected_out, expected_lse = by_loops(case)
    assert out.shape == case.problem.out_shape
    assert lse.shape == case.problem.lse_shape
    np.testing.assert_allclose(view_4d(out, case.layout), expected_out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(view_rows(lse), expected_lse, rtol=1e-12, atol=1e-12)


@settings(max_examples=examples(25))
@given(
    ct.cases(
        dtypes=["float64"], score_spreads=[1.0, 3.0], features=(*ct.FEATURES, *ct.MORE_FEATURES, "lengths"), **SMALL
    )
)
def test_gradients_equal_finite_differences(case):
    """Along random directions, in which every entry counts, and of some entries by themselves."""
    gradients = run(case)[2:]
    arrays = case.arrays()
    step, random = 1e-5, np.random.default_rng(0)
    for name, gradient in zip(("q", "k", "v", "sinks"), gradients, strict=False):
        directions = [random.standard_normal(gradient.shape) for _ in range(3)]
        for at in random.permutation(gradient.size)[:6]:
            directions.append(np.zeros(gradient.shape))
            directions[-1].reshape(-1)[at] = 1
        for direction in directions:
            losses = []
            for sign in (1, -1):
                out, lse = run(case, **{name: arrays[name] + sign * step * direction})[:2]
                dlse = np.where(np.isneginf(lse), 0, arrays.get("dlse", 0))
                losses.append((out * arrays["dout"]).sum() + (np.where(np.isneginf(lse), 0, lse) * dlse).sum())
            difference = (losses[0] - losses[1]) / (2 * step)
            size = np.abs(gradient).max(initial=1) * np.sqrt((direction**2).sum())
            np.testing.assert_allclose((gradient * direction).sum(), difference, rtol=1e-7, atol=1e-7 * max(size, 1))


@pytest.mark.parametrize("bias", [(2, 4, 3, 5), (4, 1, 5), (2, 1, 3, 1), (1, 1, 1, 1)])
def test_gradients_of_what_makes_scores_equal_finite_differences(bias):
    """Of arrays, and of options that are numbers; the window hides pairs of every row."""
    options: dict[str, Any] = {
        "scale": 0.7,
        "softcap": 1.3,
        "window": (1, 1),
        "sinks": True,
        "dlse": True,
        "dropout": 0.3,
    }
    options |= {"alibi_slopes": (2, 4) if len(bias) == 4 else (4,), "kv_lengths": (5, 3)}
    sizes: dict[str, Any] = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 3, "seqlen_k": 5, "head_dim": 4}
    case = ct.Case(**sizes, dtype="float64", bias=bias, **options)
    arrays, dlse = case.arrays(), case.arrays()["dlse"]
    arrays["bias"][np.isnan(arrays["bias"])] = 0  # of keys that do not exist

    def loss(changed=case, **moved):
        inputs = arrays | moved
        problem = changed.problem
        out, lse = reference.forward(problem, *ct.qkv(inputs), **ct.optional(inputs) | case.random)
        return (out * arrays["dout"]).sum() + (lse * dlse).sum()

    need = ("dbias", "dalibi_slopes", "dscale", "dsoftcap")
    inputs = [arrays[name] for name in ("dout", "q", "k", "v")]
    found = reference.backward(case.problem, *inputs, need=need, **ct.optional_backward(arrays) | case.random)
    gradients, step = dict(zip(need, found, strict=True)), 1e-5
    for name in ("bias", "alibi_slopes"):
        differences = np.zeros_like(arrays[name])
        for at in np.ndindex(differences.shape):
            move = np.zeros_like(differences)
            move[at] = step
            differences[at] = (loss(**{name: arrays[name] + move}) - loss(**{name: arrays[name] - move})) / (2 * step)
        assert gradients[f"d{name}"].shape == differences.shape
        np.testing.assert_allclose(gradients[f"d{name}"], differences, rtol=1e-7, atol=1e-7)
    for name in ("scale", "softcap"):
        losses = [loss(replace(case, **{name: options[name] + sign * step})) for sign in (1, -1)]
        np.testing.assert_allclose(gradients[f"d{name}"], (losses[0] - losses[1]) / (2 * step), rtol=1e-7)


@given(ct.cases(features=["causal", "bias", "gqa", "alibi_slopes"], ndims=[3, 4], **SMALL))
def test_grouped_heads_equal_repeated_keys(case):
    arrays = case.arrays()
    group = case.num_heads // case.num_heads_kv
    axis = -2 if case.layout == "bshd" else -3
    repeated = {name: np.repeat(arrays[name], group, axis=axis) for name in "kv"}
    inputs = ct.qkv(arrays | repeated)
    problem = make_problem(case.options, *inputs, **ct.optional(arrays))
    out, lse = reference.forward(problem, *inputs, **ct.optional(arrays))
    _, dk, _ = reference.backward(problem, arrays["dout"], *inputs, **ct.optional(arrays))
    dk = view_4d(dk, case.layout)
    dk = dk.reshape(case.batch, case.num_heads_kv, group, *dk.shape[2:]).sum(axis=2)
    grouped = run(case)
    for got, expected in ((grouped[0], out), (grouped[1], lse), (view_4d(grouped[3], case.layout), dk)):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_is_softmax_on_plain_matrices():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(5, 4)), rng.normal(size=(7, 4)), rng.normal(size=(7, 3))
    weights = np.exp(q @ k.T / 2)
    weights /= weights.sum(axis=1, keepdims=True)
    out, lse = reference.forward(make_problem(Options(), q, k, v), q, k, v)
    np.testing.assert_allclose(out, weights @ v, rtol=1e-14)
    np.testing.assert_allclose(lse, np.log(np.exp(q @ k.T / 2).sum(axis=1)), rtol=1e-14)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_dtype_of_the_computation_and_of_results(name):
    case = ct.Case(seqlen_q=9, seqlen_k=33, head_dim=16, dtype=name)
    dtype = ct.numpy_dtype(name)
    out, lse, *gradients = run(case, dtype=dtype)
    assert {x.dtype for x in (out, *gradients)} == {dtype}
    assert lse.dtype == (np.float64 if name == "float64" else np.float32)
    exact = run(case)
    assert {x.dtype for x in exact} == {np.dtype(np.float64)}
    for got, expected in zip((out, lse, *gradients), exact, strict=True):
        unit = ml_dtypes.finfo(got.dtype).eps
        assert np.abs(got.astype(np.float64) - expected).max() <= 8 * unit * np.abs(expected).max()


def test_sixteen_bit_weights_are_rounded_before_they_meet_v():
    case = ct.Case(seqlen_q=1, seqlen_k=3, head_dim=4, head_dim_v=1, dtype="float16")
    arrays = case.arrays() | {"v": np.ones((1, 1, 3, 1), np.float16)}
    weights = np.exp((arrays["q"].astype("f4") @ arrays["k"].astype("f4").swapaxes(2, 3) / 2).ravel())
    rounded = (weights / weights.sum()).astype(np.float16).astype(np.float32)
    out = run(case, dtype=np.float16, v=arrays["v"])[0]
    assert out.item() == np.float16(rounded.sum())


def test_a_row_that_sees_nothing_is_zero_and_so_is_its_gradient():
    case = ct.Case(seqlen_q=5, seqlen_k=3, head_dim=2, causal=True, dtype="float64")
    out, lse, dq, *_ = run(case)
    assert not out[0, 0, :2].any() and not dq[0, 0, :2].any()
    assert np.all(lse[0, 0, :2] == -np.inf)
    assert np.all(np.isfinite(lse[0, 0, 2:]))


def test_a_bias_of_minus_infinity_is_a_mask():
    case = ct.Case(seqlen_q=4, seqlen_k=6, head_dim=3, mask=(4, 6), dtype="float64", seed=3)
    arrays = case.arrays()
    bias = np.where(arrays["mask"], 0.0, -np.inf)
    problem = make_problem(case.options, *ct.qkv(arrays), bias=bias)
    biased = reference.forward(problem, *ct.qkv(arrays), bias=bias)
    for got, expected in zip(biased, run(case), strict=False):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(0, 4), (4, 0), (0, 0)])
def test_empty_sequences(seqlen_q, seqlen_k):
    out, lse, dq, dk, dv = run(ct.Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=3, head_dim_v=2))
    assert out.shape == (1, 1, seqlen_q, 2) and not out.any()
    assert lse.shape == (1, 1, seqlen_q) and np.all(lse == -np.inf)
    assert dq.shape == (1, 1, seqlen_q, 3) and dk.shape == (1, 1, seqlen_k, 3) and dv.shape == (1, 1, seqlen_k, 2)
    assert not any(x.any() for x in (dq, dk, dv))


def test_keys_past_the_length_are_not_read():
    case = ct.Case(batch=2, seqlen_q=3, seqlen_k=5, head_dim=2, kv_lengths=(2, 0), bias=(5,))
    assert np.isnan(case.arrays()["k"][0, 0, 2:]).all()
    out, lse, dq, dk, dv = run(case)
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))
    assert not dk[0, 0, 2:].any() and not dv[0, 0, 2:].any()
    assert np.all(lse[1] == -np.inf) and not out[1].any()


def test_lengths_out_of_range_are_clamped():
    case = ct.Case(batch=2, seqlen_q=3, seqlen_k=5, head_dim=2, kv_lengths=(5, 0))
    clamped = run(case, kv_lengths=np.array([99, -7]))
    for got, expected in zip(clamped, run(case), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["q", "v"])
def test_what_is_not_finite_reaches_its_rows_only(name, value):
    case = ct.Case(seqlen_q=4, seqlen_k=4, head_dim=2, causal=True)
    arrays = case.arrays()
    arrays[name][0, 0, 3, 1] = value
    out, *_ = run(case, **{name: arrays[name]})
    expected = run(case)[0]
    np.testing.assert_array_equal(out[0, 0, :3, 0], expected[0, 0, :3, 0])
    assert not np.isfinite(out[0, 0, 3]).all()


def test_a_hidden_nan_has_no_weight():
    case = ct.Case(seqlen_q=4, seqlen_k=4, head_dim=2, mask=(1, 4))
    arrays = case.arrays()
    arrays["mask"][:] = [[True, False, True, True]]
    expected = run(case, mask=arrays["mask"])[0]
    arrays["k"][0, 0, 1] = np.nan
    np.testing.assert_array_equal(run(case, mask=arrays["mask"], k=arrays["k"])[0], expected)


@pytest.mark.parametrize("long_product", [0, 2**60])
def test_products_of_long_doubles_are_exact_to_more_bits(long_product, monkeypatch):
    monkeypatch.setattr(reference, "LONG_PRODUCT", long_product)
    a, b = np.random.default_rng(0).integers(-(2**26), 2**26, (2, 70, 70)).astype(np.longdouble)
    exact = a.astype(np.int64) @ b.T.astype(np.int64)  # below 2^59
    np.testing.assert_array_equal(reference.product(a, b.T).astype(np.int64), exact)
    assert np.any((a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.int64) != exact)
