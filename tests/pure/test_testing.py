"""`cuflash.testing` itself: cases are what they say, right attention passes, and every mutant is found."""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

import cuflash
import cuflash.testing as ct
from cuflash.spec.inputs import NAMES
from cuflash.spec.options import Options
from cuflash.spec.problem import Problem, make_problem
from cuflash.testing import reference
from tests.sampling import examples

BASE = ct.Case(batch=2, num_heads=4, num_heads_kv=2, seqlen_q=23, seqlen_k=37, head_dim=24, head_dim_v=16)


def options_of(keywords):
    names = {field.name for field in dataclasses.fields(Options)} & keywords.keys()
    return Options(**{name: keywords.pop(name) for name in names})


def attend(q, k, v, **keywords):
    """A right attention."""
    options = options_of(keywords)
    return reference.forward(make_problem(options, q, k, v, **keywords), q, k, v, **keywords, dtype=q.dtype)


def differentiate(dout, q, k, v, **keywords):
    options, dlse = options_of(keywords), keywords.pop("dlse", None)
    problem = make_problem(options, q, k, v, **keywords)
    need = ("dq", "dk", "dv", *(("dsinks",) if "sinks" in keywords else ()))
    return reference.backward(problem, dout, q, k, v, **keywords, dlse=dlse, need=need, dtype=q.dtype)


def same(x, y):
    return x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind != "b")


# ---- cases -----------------------------------------------------------------------------------------------------------


@given(ct.cases(min_seqlen=0))
def test_cases_make_valid_problems_and_the_same_arrays_again(case):
    problem, arrays = case.problem, case.arrays()
    assert (problem.seqlen_q, problem.seqlen_k, problem.dtype) == (case.seqlen_q, case.seqlen_k, case.dtype)
    assert hash(case) == hash(dataclasses.replace(case))
    assert {"q", "k", "v", "dout"} <= arrays.keys() <= {"q", "k", "v", "dout", *NAMES}
    assert all(same(arrays[name], again) for name, again in case.arrays().items())
    assert arrays["dout"].shape == problem.out_shape


@settings(max_examples=examples(50))
@given(ct.cases())
def test_strides_change_where_values_lie_and_nothing_else(case):
    contiguous = dataclasses.replace(case, strides="contiguous").arrays()
    for strides in ct.STRIDES:
        for name, x in dataclasses.replace(case, strides=strides).arrays().items():
            assert same(x, contiguous[name])


def test_strides_are_the_ones_asked_for():
    def steps(kind):
        x = dataclasses.replace(BASE, strides=kind).arrays()["q"]
        return np.array(x.strides) // x.itemsize

    assert steps("contiguous").tolist() == [4 * 23 * 24, 23 * 24, 24, 1]
    assert steps("padded").tolist() == [7 * 26 * 27, 26 * 27, 27, 1]
    assert steps("transposed").tolist() == [1, 2, 8, 8 * 23]
    assert steps("flipped").tolist() == [-4 * 23 * 24, -23 * 24, -24, -1]
    padded = dataclasses.replace(BASE, strides="padded").arrays()["v"]
    assert np.isnan(padded.base).sum() == padded.base.size - padded.size


def test_a_case_of_unknown_strides_is_refused():
    with pytest.raises(ValueError, match="strides: got 'odd'"):
        dataclasses.replace(BASE, strides="odd").arrays()


def test_what_lies_behind_a_length_is_nan():
    arrays = dataclasses.replace(BASE, kv_lengths=(5, 30), bias=(37,)).arrays()
    assert np.isnan(arrays["k"][0, :, 5:]).all() and np.isnan(arrays["v"][1, :, 30:]).all()
    assert np.isfinite(arrays["k"][1, :, :30]).all()
    assert np.isnan(arrays["bias"][30:]).all() and np.isfinite(arrays["bias"][:30]).all()


@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize("scale", [None, -2.0])
def test_scores_have_the_spread_asked_for(spread, scale):
    arrays = dataclasses.replace(BASE, num_heads=2, scale=scale, score_spread=spread).arrays()
    scores = (24**-0.5 if scale is None else scale) * arrays["q"] @ arrays["k"].swapaxes(2, 3)
    assert 0.8 * spread < scores.std() < 1.25 * spread


@given(ct.cases())
def test_a_problem_makes_a_case_of_the_same_problem(case):
    problem = dataclasses.replace(case, strides="contiguous").problem
    again = ct.Case.from_problem(problem).problem
    same_bias = None if problem.bias is None else dataclasses.replace(problem.bias)
    assert dataclasses.replace(again, kv_lengths=None) == dataclasses.replace(problem, kv_lengths=None, bias=same_bias)
    assert (again.kv_lengths is None) == (problem.kv_lengths is None)


@pytest.mark.parametrize(
    "condition",
    [
        lambda c: (c.seqlen_q, c.seqlen_k) == (113, 203),
        lambda c: c.seqlen_q == 1 and c.num_heads_kv == 1 < c.num_heads,
        lambda c: c.head_dim == 256 != c.head_dim_v,
        lambda c: c.causal == "top_left" and c.window is not None and c.layout == "bshd",
        lambda c: c.bias is not None and c.bias[-1] == 1 < c.seqlen_k and c.bias_dtype == "input",
        lambda c: c.mask is not None and len(c.mask) < 4 and c.kv_lengths is not None,
        lambda c: c.alibi_slopes is not None and len(c.alibi_slopes) == 2 and c.softcap is not None,
        lambda c: c.ndim == 2 and c.scale == 0,
        lambda c: c.dtype == "bfloat16" and c.score_spread == 30.0,
    ],
)
def test_the_strategy_draws_what_it_promises(condition):
    quick = settings(
        max_examples=20_000, phases=[Phase.generate], derandomize=True, suppress_health_check=list(HealthCheck)
    )
    assert condition(find(ct.cases(), condition, settings=quick))


# ---- the rule passes what is right -----------------------------------------------------------------------------------


@given(ct.cases(min_seqlen=0))
def test_the_plain_formula_passes(case):
    report = ct.check(attend, case, gradients=differentiate)
    assert report.passed
    assert [m.name for m in report] == ["out", "lse", "dq", "dk", "dv"]
    assert all(m.error <= m.tolerance and m.ratio <= 1 for m in report)
    assert "error" in str(report)


def test_check_takes_a_problem_and_an_attention_without_lse():
    q, k, v = (np.zeros((3, 40, 8), np.float32) for _ in range(3))
    problem = make_problem(Options(causal=True, window=(9, None)), q, k, v)
    assert isinstance(problem, Problem)
    report = ct.check(lambda *args, **keywords: attend(*args, **keywords)[0], problem)
    assert [m.name for m in report] == ["out"]


def test_judges_of_results_already_computed():
    arrays = BASE.arrays()
    inputs = ct.qkv(arrays)
    assert ct.assert_forward(BASE, *attend(*inputs)).passed
    assert ct.assert_backward(BASE, *differentiate(arrays["dout"], *inputs)).passed
    with pytest.raises(AssertionError, match=r"out .*FAILED"):
        ct.assert_forward(BASE, attend(*inputs)[0] + 1e-5)
    with pytest.raises(AssertionError, match=r"dk .*FAILED"):
        dq, dk, dv = differentiate(arrays["dout"], *inputs)
        ct.assert_backward(BASE, dq, dk * np.float32(1.0001), dv)


def test_the_strict_tolerance_has_no_allowance_for_noise():
    yardsticks = ct.yardsticks(BASE.problem, BASE.arrays())
    assert yardsticks.keys() == {"out", "lse", "dq", "dk", "dv", "dscale"}
    for y in yardsticks.values():
        assert (y.plain_error + 2.0**-23 * y.scale < y.tolerance).all()
        assert y.strict_tolerance <= (y.plain_error + 2.0**-23 * y.scale).max()
    for measurement in ct.check(attend, BASE, gradients=differentiate):
        assert 0 < measurement.strict_ratio < 1.5  # about what the plain formula should have


def test_float64_is_judged_by_long_double():
    case = dataclasses.replace(BASE, dtype="float64")
    arrays = case.arrays()
    plain, _ = reference.forward(case.problem, *ct.qkv(arrays))
    for y in ct.yardsticks(case.problem, arrays).values():
        assert y.expected.dtype == np.longdouble
        assert (y.plain_error > 0).all() and (y.plain_error < 100 * np.finfo(np.float64).eps * y.scale).all()
        assert (2 * y.plain_error + np.finfo(np.float64).eps * y.scale < y.tolerance).all()
    out = ct.yardsticks(case.problem, arrays)["out"]
    error = np.abs(plain - out.expected)
    assert (out.plain_error >= error.astype(np.float64)).all()
    assert out.strict_tolerance == pytest.approx(float(2 * error.max() + np.finfo(np.float64).eps * out.scale.max()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_passes_through_dlpack(dtype):
    torch = pytest.importorskip("torch")

    def torch_attention(q, k, v, causal=False, scale=None):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), scale=scale)

    def torch_gradients(dout, q, k, v, **keywords):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(torch_attention(*inputs, **keywords), inputs, dout)

    case = ct.Case(num_heads=3, seqlen_q=65, seqlen_k=65, head_dim=32, causal="top_left", scale=0.25, dtype=dtype)
    convert = ct.through_dlpack(torch.from_dlpack)
    assert isinstance(case.arrays(convert)["q"], torch.Tensor)
    assert ct.check(torch_attention, case, gradients=torch_gradients, convert=convert).passed
    for strides in ("padded", "transposed"):
        tensor = dataclasses.replace(case, strides=strides).arrays(convert)["k"]
        assert not tensor.is_contiguous()
        np.testing.assert_array_equal(ct.to_numpy(tensor), case.arrays()["k"])


# ---- and finds what is wrong -----------------------------------------------------------------------------------------


def with_scores(change, **defaults):
    """A wrong attention: everything right except that `change(keywords)` alters the options first."""

    def attention(q, k, v, **keywords):
        return attend(q, k, v, **change(defaults | keywords))

    return attention


def without(name):
    return lambda keywords: {n: x for n, x in keywords.items() if n != name}


def on_result(change):
    """A wrong attention: `change(out, lse)` afterwards."""
    return lambda *args, **keywords: change(*attend(*args, **keywords))


def on_inputs(change):
    """A wrong attention: `change(q, k, v)` before."""
    return lambda q, k, v, **keywords: attend(*change(q, k, v), **keywords)


def interleaved_heads(q, k, v, **keywords):
    group = q.shape[1] // k.shape[1]
    return attend(q, np.tile(k, (1, group, 1, 1)), np.tile(v, (1, group, 1, 1)), **keywords)


def softcap_after_bias(q, k, v, softcap, bias):
    scores = q @ np.repeat(k, 2, axis=1).swapaxes(2, 3) * np.float32(q.shape[3] ** -0.5) + bias
    return attend(q, k, v, scale=0.0, bias=np.float32(softcap) * np.tanh(scores / np.float32(softcap)))


def finite_sentinel(q, k, v, **keywords):
    """The famous one: hidden scores are -1e9, so that a row that attends to nothing becomes a mean."""
    bias = np.where(keywords.pop("mask"), 0, -1e9).astype(np.float32)
    return attend(q, k, v, bias=bias, **keywords)


def reads_past_lengths(q, k, v, kv_lengths, **keywords):
    """Hides what is past a length by a weight of zero, which does not stop a NaN."""
    arange = np.arange(k.shape[2])
    return attend(q, k, v, mask=arange < kv_lengths[:, None, None, None], **keywords)


def bits_kept(n):
    """Rounds float32 to n bits of fraction: 10 is what tf32 keeps."""

    def rounded(x):
        low = np.uint32(1 << (23 - n))
        return ((x.view(np.uint32) + low // 2) & ~(low - np.uint32(1))).view(np.float32)

    return on_inputs(lambda q, k, v: (rounded(q), rounded(k), v))


def in_sixteen_bits_throughout(q, k, v, **keywords):
    s = (q @ k.swapaxes(-1, -2)) * q.dtype.type(q.shape[-1] ** -0.5)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    total = np.zeros((*v.shape[:2], q.shape[2], v.shape[3]), v.dtype)
    for j in range(k.shape[2]):  # sums of rounded sums
        total += p[..., j : j + 1] * v[:, :, None, j]
    return total / p.sum(axis=-1, keepdims=True, dtype=v.dtype)


def drops_last_key(q, k, v, **keywords):
    n = k.shape[2] - 1
    return attend(q, k[:, :, :n], v[:, :, :n], **keywords)


def writes_to_an_input(q, k, v, **keywords):
    result = attend(q, k, v, **keywords)
    q *= q.shape[-1] ** -0.5
    return result


MASKED = {"mask": (2, 1, 23, 37)}
BLOCKS = {"block_mask": (4,), "block_size": (16, 16)}

WRONG: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "no scale": (with_scores(lambda kw: kw | {"scale": 1.0}), {}),
    "scale of head_dim_v": (with_scores(lambda kw: kw | {"scale": 16**-0.5}), {}),
    "absolute value of the scale": (with_scores(lambda kw: kw | {"scale": abs(kw["scale"])}), {"scale": -0.3}),
    "causal ignored": (with_scores(without("causal")), {"causal": True}),
    "causal aligned the other way": (with_scores(lambda kw: kw | {"causal": "top_left"}), {"causal": True}),
    "causal sees one more": (with_scores(lambda kw: {"window": (None, 1)}), {"causal": True}),
    "window one short": (with_scores(lambda kw: kw | {"window": (6, None)}), {"window": (7, None)}),
    "window swapped": (with_scores(lambda kw: kw | {"window": (3, 7)}), {"window": (7, 3)}),
    "softcap ignored": (with_scores(without("softcap")), {"softcap": 2.0}),
    "softcap after the bias": (softcap_after_bias, {"softcap": 2.0, "bias": (37,)}),
    "bias ignored": (with_scores(without("bias")), {"bias": (23, 37)}),
    "bias scaled": (with_scores(lambda kw: kw | {"bias": kw["bias"] * np.float32(24**-0.5)}), {"bias": (23, 37)}),
    "bias of the first head": (with_scores(lambda kw: kw | {"bias": kw["bias"][:1]}), {"bias": (4, 1, 37)}),
    "mask inverted": (with_scores(lambda kw: kw | {"mask": ~kw["mask"]}), MASKED),
    "mask of the first batch entry": (with_scores(lambda kw: kw | {"mask": kw["mask"][:1]}), MASKED),
    "slopes of the other sign": (
        with_scores(lambda kw: kw | {"alibi_slopes": -kw["alibi_slopes"]}),
        {"alibi_slopes": (4,)},
    ),
    "slopes of the first batch entry": (
        with_scores(lambda kw: kw | {"alibi_slopes": kw["alibi_slopes"][0]}),
        {"alibi_slopes": (2, 4)},
    ),
    "sinks ignored": (with_scores(without("sinks")), {"sinks": True}),
    "sinks of the other sign": (with_scores(lambda kw: kw | {"sinks": -kw["sinks"]}), {"sinks": True}),
    "sinks of the wrong head": (with_scores(lambda kw: kw | {"sinks": np.roll(kw["sinks"], 1)}), {"sinks": True}),
    "block mask ignored": (with_scores(without("block_mask")), BLOCKS),
    "block mask transposed": (
        with_scores(lambda kw: kw | {"block_mask": kw["block_mask"].swapaxes(-1, -2)}),
        BLOCKS | {"seqlen_q": 37, "seqlen_k": 37},
    ),
    "block mask of the first head": (with_scores(lambda kw: kw | {"block_mask": kw["block_mask"][:1]}), BLOCKS),
    "blocks of the other size": (
        with_scores(lambda kw: kw | {"block_size": (16, 32), "block_mask": kw["block_mask"][..., :2]}),
        BLOCKS,
    ),
    "length one short": (with_scores(lambda kw: kw | {"kv_lengths": kw["kv_lengths"] - 1}), {"kv_lengths": (37, 20)}),
    "reads past lengths": (reads_past_lengths, {"kv_lengths": (37, 20)}),
    "finite sentinel": (finite_sentinel, MASKED),
    "interleaved heads": (interleaved_heads, {}),
    "last key dropped": (drops_last_key, {}),
    "lse in base 2": (on_result(lambda out, lse: (out, lse / np.log(np.float32(2)))), {}),
    "lse without the maximum": (on_result(lambda out, lse: (out, lse - lse.max())), {}),
    "lse of masked rows finite": (on_result(lambda out, lse: (out, np.maximum(lse, np.float32(-1e30)))), MASKED),
    "out of masked rows tiny": (on_result(lambda out, lse: (out + np.float32(1e-30), lse)), MASKED),
    "out rounded to bfloat16": (
        on_result(lambda out, lse: (out.astype(ml_dtypes.bfloat16).astype(np.float32), lse)),
        {},
    ),
    "tf32 products": (bits_kept(10), {}),
    "products of 16 bits": (bits_kept(15), {}),
    "16 bits throughout": (in_sixteen_bits_throughout, {"dtype": "float16", "num_heads_kv": 4, "seqlen_k": 509}),
    "nan in one place": (on_result(lambda out, lse: (np.where(np.arange(16) == 3, np.nan, out), lse)), {}),
    "out of another dtype": (on_result(lambda out, lse: (out.astype(np.float64), lse)), {}),
    "lse of another dtype": (on_result(lambda out, lse: (out, lse.astype(np.float16))), {}),
    "out of another shape": (on_result(lambda out, lse: (out.swapaxes(1, 2), lse)), {}),
    "writes to an input": (writes_to_an_input, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_error_is_found(name):
    attention, changes = WRONG[name]
    case = dataclasses.replace(BASE, **changes)
    ct.check(attend, case)
    with pytest.raises(AssertionError):
        ct.check(attention, case)


WRONG_GRADIENTS = {
    "dq not scaled": lambda dq, dk, dv: (dq * np.float32(24**0.5), dk, dv),
    "dk not scaled": lambda dq, dk, dv: (dq, dk * np.float32(24**0.5), dv),
    "dk and dq exchanged": lambda dq, dk, dv: (dk[:, :, :23].repeat(2, axis=1), dk, dv),
    "dk of one head of the group": lambda dq, dk, dv: (dq, dk / 2, dv),
    "dv is nan": lambda dq, dk, dv: (dq, dk, dv * np.nan),
    "dv slightly off": lambda dq, dk, dv: (dq, dk, dv * np.float32(1 + 1e-4)),
    "dv of bfloat16 sums": lambda dq, dk, dv: (dq, dk, dv.astype(ml_dtypes.bfloat16).astype(np.float32)),
    "dq of masked rows tiny": lambda dq, dk, dv: (dq + np.float32(1e-30), dk, dv),
}


@pytest.mark.parametrize("name", WRONG_GRADIENTS)
def test_a_planted_error_in_gradients_is_found(name):
    case = dataclasses.replace(BASE, mask=(2, 1, 23, 37))
    ct.check(attend, case, gradients=differentiate)
    with pytest.raises(AssertionError, match="FAILED"):
        ct.check(attend, case, gradients=lambda *args, **kw: WRONG_GRADIENTS[name](*differentiate(*args, **kw)))


def test_causal_ignored_in_backward_is_found():
    case = dataclasses.replace(BASE, causal=True)
    with pytest.raises(AssertionError, match=r"dq .*FAILED"):
        ct.check(attend, case, gradients=lambda *args, **kw: differentiate(*args))


@pytest.mark.parametrize("name", ["causal ignored", "window one short", "interleaved heads", "finite sentinel"])
def test_the_strategy_alone_finds_it(name):
    attention = WRONG[name][0]
    feature = {"causal": "causal", "window": "window", "interleaved": "gqa", "finite": "mask"}[name.split()[0]]

    def fails(case):
        if feature in ("causal", "window") and getattr(case, feature) != {"causal": True, "window": (7, None)}[feature]:
            return False
        if feature == "mask" and case.mask is None:
            return False
        try:
            ct.check(attention, case)
        except AssertionError:
            return True
        return False

    strategy = ct.cases(dtypes=["float32"], ndims=[4], layouts=["bhsd"], features=[feature], max_seqlen=33)
    quick = settings(
        max_examples=5_000, derandomize=True, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    assert fails(find(strategy, fails, settings=quick))


def test_the_public_attention_passes():
    assert ct.check(cuflash.attention, dataclasses.replace(BASE, causal=True)).passed


WRONG_GRADIENTS_OF_SINKS = {
    "the other sign": lambda dq, dk, dv, dsinks: (dq, dk, dv, -dsinks),
    "of the first batch entry": lambda dq, dk, dv, dsinks: (dq, dk, dv, dsinks / 2),
    "of the wrong head": lambda dq, dk, dv, dsinks: (dq, dk, dv, np.roll(dsinks, 1)),
    "slightly off": lambda dq, dk, dv, dsinks: (dq, dk, dv, dsinks * np.float32(1 + 1e-4)),
    "of another dtype": lambda dq, dk, dv, dsinks: (dq, dk, dv, dsinks.astype(np.float64)),
}


@pytest.mark.parametrize("name", WRONG_GRADIENTS_OF_SINKS)
def test_a_planted_error_in_gradients_of_sinks_is_found(name):
    case = dataclasses.replace(BASE, sinks=True, causal=True)
    ct.check(attend, case, gradients=differentiate)
    with pytest.raises(AssertionError, match="dsinks"):
        ct.check(
            attend, case, gradients=lambda *args, **kw: WRONG_GRADIENTS_OF_SINKS[name](*differentiate(*args, **kw))
        )


@pytest.mark.parametrize("factor", [0, -1])
def test_a_gradient_of_lse_that_is_ignored_or_subtracted_is_found(factor):
    case = dataclasses.replace(BASE, sinks=True, dlse=True)
    ct.check(attend, case, gradients=differentiate)
    with pytest.raises(AssertionError, match=r"dq .*FAILED"):
        ct.check(attend, case, gradients=lambda *args, dlse, **kw: differentiate(*args, dlse=factor * dlse, **kw))


@settings(max_examples=examples(100))
@given(ct.cases(features=ct.MORE_FEATURES, max_seqlen=33, strides=["contiguous"]))
def test_what_is_drawn_only_when_asked_for(case):
    arrays = case.arrays()
    present = {name for name in ct.MORE_FEATURES if getattr(case, name) not in (False, None)}
    assert set(ct.optional_backward(arrays)) == present
    assert set(ct.optional(arrays)) == present - {"dlse"}
    again = ct.Case.from_problem(case.problem)
    assert again.sinks == case.sinks
    assert (again.block_mask is None) == (case.block_mask is None)
    assert again.block_size == (case.block_size if case.block_mask is not None else (128, 128))
