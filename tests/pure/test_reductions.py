"""Column sums, the column maximum and the strongest keys: the CPU path, and the interface."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.distributed as cd
import cuflash.testing as ct
from tests.compiled import INSTRUCTION_SETS, NUMPY, way_taken
from tests.reductions import (
    attention_of,
    gradient_problem,
    inputs_of,
    judge,
    judge_gradients,
    lse_of,
    weights_reduced,
)
from tests.sampling import examples
from tests.ways import every_way

# ---- gradients -------------------------------------------------------------------------------------------------------

DIFFERENTIABLE = ("causal", "window", "scale", "softcap", "bias", "mask", "alibi_slopes", "kv_lengths", "gqa", "sinks")


@settings(max_examples=examples(160), deadline=None)
@given(
    case=ct.cases(
        dtypes=("float64",), features=(*DIFFERENTIABLE, "packed"), score_spreads=(1.0,), max_seqlen=33, max_scores=2**10
    )
)
def test_gradients_are_those_of_differences(case):
    """In float64, with respect to all inputs at once, lse among them."""
    case = replace(case, bias_dtype="input", bias_holes=False)
    attn, arrays, rng = attention_of(case), inputs_of(case), np.random.default_rng(case.seed)
    lse = lse_of(attn, arrays)
    weights = rng.standard_normal(lse.shape)
    inputs = {"q": arrays.pop("q"), "k": arrays.pop("k"), "lse": lse, "weights": weights}
    options = {name: arrays[name] for name in ("bias", "alibi_slopes") if name in arrays}
    moved = inputs | options
    dsums = rng.standard_normal((*lse.shape[:-1], case.seqlen_k))
    need = [f"d{name}" for name in moved] + ["dscale"] + (["dsoftcap"] if case.softcap else [])
    found = attn.column_sums_backward(dsums, **inputs, need=need, **arrays)._asdict()
    tangents = {name: np.where(np.isfinite(x), rng.standard_normal(x.shape), 0) for name, x in moved.items()}
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    numbers = {"scale": scale, "softcap": case.softcap}
    steps = {name: rng.standard_normal() * 0.1 for name in ("scale", "softcap") if f"d{name}" in need}

    def value(step):
        own = {name: numbers[name] + step * x for name, x in steps.items()}
        here = {name: x + step * tangents[name] for name, x in moved.items()}
        attn: Any = cuflash.FlashAttention(**case.keywords | own)
        return np.nansum(dsums * attn.column_sums(**arrays | here))

    step = 2.0**-16
    difference = (value(step) - value(-step)) / (2 * step)
    terms = [np.nansum(found[f"d{name}"] * tangents[name]) for name in moved]
    terms += [found[f"d{name}"] * x for name, x in steps.items()]
    sizes = [np.nansum(np.abs(found[f"d{name}"] * tangents[name])) for name in moved]
    np.testing.assert_allclose(sum(terms), difference, rtol=0, atol=1e-6 * (1 + sum(sizes)))


def test_gradients_through_lse_are_those_of_the_softmax():
    """Of column sums as functions of q and k alone; and the gradient of their total, which is constant, is zero."""
    q, k = np.random.default_rng(1).standard_normal((2, 4, 50, 8))
    attn = cuflash.FlashAttention(causal=True)
    lse = attn.forward(q, k, None).lse

    def gradient(dsums):
        dq, dk, dlse = attn.column_sums_backward(dsums, q, k, lse, need=("dq", "dk", "dlse"))
        through = attn.backward(None, q, k, None, None, lse, dlse=dlse)
        return dq + through.dq, dk + through.dk

    for x in gradient(np.ones((4, 50))):
        np.testing.assert_allclose(x, 0, atol=1e-13)
    dsums, tq = np.random.default_rng(2).standard_normal((4, 50)), np.random.default_rng(3).standard_normal(q.shape)
    sums = [attn.column_sums(x, k, attn.forward(x, k, None).lse) for x in (q + 1e-6 * tq, q - 1e-6 * tq)]
    difference = (dsums * (sums[0] - sums[1])).sum() / 2e-6
    np.testing.assert_allclose((gradient(dsums)[0] * tq).sum(), difference, rtol=1e-7)


def test_gradients_of_what_a_score_reads():
    q, k = np.random.default_rng(1).standard_normal((2, 2, 20, 8))
    f, dsums = np.random.default_rng(2).standard_normal((2, 20)), np.random.default_rng(3).standard_normal((2, 20))
    attn: Any = cuflash.FlashAttention(score=lambda s, i, j, *, f: cuflash.tanh(s) * f[i] + f[j])
    lse = attn.forward(q, k, None, f=f[0]).lse
    found = attn.column_sums_backward(dsums, q, k, lse, f[:1] * f, need=("dq", "df", "dweights"), f=f[0])
    assert found._fields == ("dq", "df", "dweights")
    a, b = ((dsums * attn.column_sums(q, k, lse, f[:1] * f, f=f[0] + step * f[1])).sum() for step in (1e-6, -1e-6))
    np.testing.assert_allclose((found.df * f[1]).sum(), (a - b) / 2e-6, rtol=1e-6)


# ---- the interface ---------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((3, 1, 4, 70, 16), np.float32), RNG.standard_normal((2, 2, 90, 16), np.float32)
ATTENTION: Any = cuflash.FlashAttention(causal=True)
LSE = ATTENTION.forward(Q, K, None).lse
WEIGHTS = RNG.standard_normal(LSE.shape, np.float32)
SUMS = ATTENTION.column_sums(Q, K, LSE)


def test_batch_axes_are_those_of_lse():
    sums, largest = ATTENTION.column_sums(Q, K, LSE, WEIGHTS), ATTENTION.column_max(Q, K, LSE)
    top = ATTENTION.top_keys(Q, K, LSE, 5)
    assert sums.shape == largest.shape == (3, 2, 4, 90)
    assert top.indices.shape == top.weights.shape == (3, 2, 4, 70, 5)
    dsums = RNG.standard_normal(sums.shape, np.float32)
    gradients = ATTENTION.column_sums_backward(dsums, Q, K, LSE, WEIGHTS, need=("dk", "dweights"))
    dk = np.zeros_like(K)
    for a in range(3):
        for b in range(2):
            own = (Q[a, 0], K[b], LSE[a, b], WEIGHTS[a, b])
            np.testing.assert_array_equal(sums[a, b], ATTENTION.column_sums(*own))
            np.testing.assert_array_equal(largest[a, b], ATTENTION.column_max(*own[:3]))
            np.testing.assert_array_equal(top.indices[a, b], ATTENTION.top_keys(*own[:3], 5).indices)
            of_one = ATTENTION.column_sums_backward(dsums[a, b], *own, need=("dk", "dweights"))
            dk[b] += of_one.dk
            np.testing.assert_allclose(gradients.dweights[a, b], of_one.dweights, rtol=0, atol=1e-5)
    np.testing.assert_allclose(gradients.dk, dk, rtol=0, atol=1e-4)


@pytest.mark.parametrize("ndim", [2, 3])
@settings(max_examples=examples(80), deadline=None)
@given(length=st.integers(0, 50), count=st.sampled_from((1, 3)))
def test_a_length_without_axes_is_that_of_arrays_without_a_batch(ndim, length, count):
    q, k = RNG.standard_normal((2, *(4,) * (ndim - 2), 50, 8))
    attn = cuflash.FlashAttention(causal="lengths")
    lengths = {"kv_lengths": np.array(length)}
    lse = attn.forward(q, k, None, **lengths).lse
    own = (q, k[..., :length, :], lse)
    sums, largest = attn.column_sums(q, k, lse, **lengths), attn.column_max(q, k, lse, **lengths)
    assert sums.shape == largest.shape == k.shape[:-1]
    assert not sums[..., length:].any()
    bottom_right = cuflash.FlashAttention(causal=True)
    np.testing.assert_allclose(sums[..., :length], bottom_right.column_sums(*own), atol=1e-12)
    np.testing.assert_allclose(largest[..., :length], bottom_right.column_max(*own), atol=1e-12)
    for x, expected in zip(attn.top_keys(q, k, lse, count, **lengths), bottom_right.top_keys(*own, count), strict=True):
        np.testing.assert_allclose(x, expected, atol=1e-12)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@settings(max_examples=examples(160), deadline=None)
@given(
    axes=st.sampled_from(
        [((), (1,)), ((), (2, 1)), ((1,), ()), ((4,), ()), ((2, 4), ()), ((2, 4), (2,)), ((4,), (3, 2))]
    ),
    length=st.none() | st.integers(0, 30),
)
def test_q_and_k_may_have_axes_that_the_other_has_not(layout, axes, length):
    q, k = (RNG.standard_normal((*own, rows, 8)) for own, rows in zip(axes, (20, 30), strict=True))
    optional = {} if length is None else {"kv_lengths": np.array(length)}
    given = [x.swapaxes(-3, -2) if layout == "bshd" and x.ndim > 2 else x for x in (q, k)]
    attn: Any = cuflash.FlashAttention(layout=layout)
    lse = attn.forward(*given, None, **optional).lse
    k = k if k.ndim < 3 or q.ndim < 3 else k.repeat(q.shape[-3] // k.shape[-3], axis=-3)
    weights = np.exp(q @ k.swapaxes(-2, -1) * 8**-0.5 - np.where(lse == -np.inf, 0, lse)[..., None])
    if length is not None:
        weights[..., length:] = 0
    dsums = RNG.standard_normal((*lse.shape[:-1], 30))
    gradients = attn.column_sums_backward(dsums, *given, lse, need=("dq", "dk", "dweights"), **optional)
    assert (gradients.dq.shape, gradients.dk.shape) == (given[0].shape, given[1].shape)
    for got, expected in (
        (attn.column_sums(*given, lse, **optional), weights.sum(axis=-2)),
        (attn.column_max(*given, lse, **optional), weights.max(axis=-2)),
        (attn.top_keys(*given, lse, 3, **optional).weights, -np.sort(-weights, axis=-1)[..., :3]),
        (gradients.dweights, (weights @ dsums[..., None])[..., 0]),
    ):
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, atol=1e-12)


HIDING: dict[str, dict[str, Any]] = {
    "packed": {"cu_seqlens_q": (0, 9, 40), "cu_seqlens_k": (0, 20, 70)},
    "window": {"window": (20, 10)},
    "mask": {"mask": (40, 70)},
    "blocks": {"block_mask": (1,), "block_size": (16, 16)},
}


@pytest.mark.parametrize("hiding", HIDING)
def test_the_first_of_equal_keys_need_not_be_the_first_keys(hiding):
    case = ct.Case(seqlen_q=40, seqlen_k=70, head_dim=8, dtype="float64", distinct_keys=3, **HIDING[hiding])
    weights, _, _, (indices, values) = weights_reduced(case)
    judge(case, weights, top=(indices, values))
    indices[..., -1, :2] = indices[..., -1, 1::-1].copy()
    with pytest.raises(AssertionError, match="of equal scores a later key"):
        judge(case, weights, top=(indices, values))


@settings(max_examples=examples(200), deadline=None)
@given(
    way=st.sampled_from([way for _, way in (NUMPY, *INSTRUCTION_SETS)]),
    head_dim=st.integers(1, 70),
    scale=st.sampled_from((1.0, -0.5, 0.3)) | st.floats(0.01, 2),
    dtype=st.sampled_from(("float16", "float32", "float64")),
    score=st.sampled_from((None, lambda s, i, j: s, lambda s, i, j: s * 2 - s)),
    seed=st.integers(0, 2**16),
)
def test_equal_scores_give_the_lower_index(way, head_dim, scale, dtype, score, seed):
    """Of integers, whose products are exact: BLAS rounds those of equal keys by where they are in a tile."""
    rng = np.random.default_rng(seed)
    q, k = (rng.integers(-2, 3, (rows, head_dim)).astype(dtype) for rows in (5, 150))
    attn: Any = cuflash.FlashAttention(scale=scale, score=score)
    with way_taken(way):
        indices = attn.top_keys(q, k, attn.forward(q, k, None).lse, 60).indices
    products = q.astype(np.float64) @ k.T.astype(np.float64)
    np.testing.assert_array_equal(indices, np.argsort(-scale * products, axis=-1, kind="stable")[:, :60])


@settings(max_examples=examples(80), deadline=None)
@given(row=st.integers(0, 4), count=st.integers(1, 64), dtype=st.sampled_from(("float16", "float32", "float64")))
def test_a_row_of_nan_has_no_strongest_keys(row, count, dtype):
    q, k = (RNG.standard_normal((rows, 8)).astype(dtype) for rows in (5, 40))
    attn = cuflash.FlashAttention()
    expected = attn.top_keys(q, k, attn.forward(q, k, None).lse, count)
    q[row] = np.nan
    indices, weights = attn.top_keys(q, k, attn.forward(q, k, None).lse, count)
    assert (indices[row] == -1).all() and (weights[row] == 0).all()
    others = np.arange(5) != row
    np.testing.assert_array_equal(indices[others], expected.indices[others])
    np.testing.assert_array_equal(weights[others], expected.weights[others])


@every_way
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_above_the_range_of_a_dtype_are_infinite(dtype, way):
    """An lse of other keys may be far below the scores; NaN stays NaN, in its column alone."""
    q = np.ones((1, 40, 8), dtype)
    k = np.ones((1, 40, 8), dtype)
    k[0, 1] = -1e4
    k[0, 3] = np.nan
    lse, attn = np.full((1, 40), -1000, dtype), cuflash.FlashAttention(scale=1.0)
    right = np.full((1, 40), np.inf)
    right[0, 1], right[0, 3] = 0, np.nan
    np.testing.assert_array_equal(attn.column_max(q, k, lse), right)
    np.testing.assert_array_equal(attn.column_sums(q, k, lse), right)


def test_sums_of_some_keys_take_the_lse_of_all():
    attn = cuflash.FlashAttention()
    q, k = RNG.standard_normal((2, 4, 60, 8), np.float32)
    lse = attn.forward(q, k, None).lse
    partials = [attn.column_sums(q, x, lse) for x in np.split(k, 2, axis=1)]
    np.testing.assert_allclose(np.concatenate(partials, axis=-1), attn.column_sums(q, k, lse), rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("hiding", ["packed", "mask", "lengths"])
def test_factors_of_rows_without_keys_reach_no_gradient(hiding, value):
    """As of rows that belong to no packed sequence, whose memory may be uninitialised."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 2, 9, 4))
    optional: dict[str, Any] = {"mask": np.arange(9)[:, None] < 6}
    if hiding == "packed":
        optional = {"cu_seqlens_q": np.array([0, 2, 6], np.int32), "cu_seqlens_k": np.array([0, 5, 9], np.int32)}
    elif hiding == "lengths":
        q, k = q[:, None], k[:, None]
        optional = {"kv_lengths": np.array([9, 0])}
    attn = cuflash.FlashAttention()
    lse = attn.forward(q, k, None, **optional).lse
    hidden = np.isneginf(lse)
    assert hidden.any() and not hidden.all()
    dsums = rng.standard_normal(lse.shape)
    factors = rng.random(lse.shape)
    need = ("dq", "dk", "dlse")
    right = attn.column_sums_backward(dsums, q, k, lse, np.where(hidden, 0, factors), need=need, **optional)
    found = attn.column_sums_backward(dsums, q, k, lse, np.where(hidden, value, factors), need=need, **optional)
    for x, y in zip(found, right, strict=True):
        np.testing.assert_array_equal(x, y)


def test_dropout_does_not_change_weights():
    q, k = RNG.standard_normal((2, 4, 60, 8), np.float32)
    plain, dropped = cuflash.FlashAttention(), cuflash.FlashAttention(dropout=0.5)
    lse = plain.forward(q, k, None).lse
    np.testing.assert_array_equal(plain.column_sums(q, k, lse), dropped.column_sums(q, k, lse))


def _weighted(s, i, j, *, weights):
    return s + weights[j]


def _counted(s, i, j, *, count):
    return s + count[j]


def _summed(s, i, j, *, sums):
    return s + sums[j]


@pytest.mark.parametrize(
    ("score", "call"),
    [
        (_weighted, lambda attn, x: attn.column_sums(Q, K, LSE, weights=x)),
        (_weighted, lambda attn, x: attn.column_sums_backward(SUMS, Q, K, LSE, weights=x, need=("dweights",))),
        (_counted, lambda attn, x: attn.top_keys(Q, K, LSE, count=x)),
        (_summed, lambda attn, x: attn.column_sums_backward(SUMS, Q, K, LSE, sums=x, need=("dsums",))),
    ],
)
def test_arrays_of_a_score_with_names_of_arguments_are_refused(score, call):
    ranks = cd.ContextParallel(cd.threads(1)[0], split="contiguous", score=score)
    for attn in (cuflash.FlashAttention(score=score), ranks):
        with pytest.raises(ValueError, match=r"score: got an array named \w+, expected another name, for "):
            call(attn, np.ones(K.shape[-2], np.float32))


def test_other_reductions_take_arrays_of_a_score_by_these_names():
    x = RNG.standard_normal((1, K.shape[-2]), np.float32)
    attn, plain = cuflash.FlashAttention(score=_weighted), cuflash.FlashAttention()
    for name in ("column_max", "top_keys"):
        own, expected = (
            getattr(a, name)(Q, K, LSE, *([3] if name == "top_keys" else []), **optional)
            for a, optional in ((attn, {"weights": x[0]}), (plain, {"bias": x}))
        )
        np.testing.assert_allclose(own, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ATTENTION.top_keys(Q, K, LSE, 65), ValueError, "count: got 65, expected 1 to 64"),
        (lambda: ATTENTION.top_keys(Q, K, LSE, 1.5), TypeError, "count: got float 1.5, expected an integer"),
        (lambda: ATTENTION.column_sums(Q, K, LSE[0]), ValueError, "lse: got shape"),
        (lambda: ATTENTION.column_sums(Q, K, None), TypeError, "lse: got None, expected an array"),
        (lambda: ATTENTION.column_sums(Q, K, LSE, WEIGHTS[0]), ValueError, "weights: got shape"),
        (lambda: ATTENTION.column_sums(Q, K, LSE, WEIGHTS.astype(float)), TypeError, "weights: got dtype float64"),
        (lambda: ATTENTION.column_sums(Q, K, LSE, bais=K), TypeError, r"column_sums\(\) got an unexpected keyword"),
        (lambda: ATTENTION.column_sums(Q, K, LSE, WEIGHTS.astype(">f4")), TypeError, "weights: got dtype >f4"),
        (lambda: ATTENTION.column_sums_backward(LSE, Q, K, LSE), ValueError, "dsums: got shape"),
        (lambda: ATTENTION.column_sums_backward(SUMS.astype(">f4"), Q, K, LSE), TypeError, "dsums: got dtype >f4"),
        (lambda: ATTENTION.column_sums_backward(SUMS, Q, K, LSE[0]), ValueError, "lse: got shape"),
        (
            lambda: ATTENTION.column_sums_backward(SUMS.astype(float), Q, K, LSE.astype(float), need=("dlse",)),
            TypeError,
            "lse: got dtype float64, expected float32",
        ),
        (
            lambda: ATTENTION.column_sums_backward(SUMS, Q[0, 0, 0, 0], K, LSE),
            ValueError,
            "q: got 1-D shape .*, expected an array of two axes or more",
        ),
        (
            lambda: ATTENTION.column_sums_backward(SUMS, Q, K[:, [0, 1, 0]], LSE),
            ValueError,
            "k: got 3 heads, expected a divisor of the 4 heads of q",
        ),
        (
            lambda: ATTENTION.column_sums_backward(LSE, Q, K, LSE, need=("dsinks",), sinks=LSE[0, 0, :, 0]),
            ValueError,
            "need: got 'dsinks', expected 'dq', 'dk', ",
        ),
        (
            lambda: ATTENTION.column_sums_backward(LSE, Q, K, LSE, need=("dq", "dweight")),
            ValueError,
            "need: got 'dweight', expected 'dq', 'dk', 'dbias', 'dalibi_slopes', 'dscale', 'dsoftcap', 'dlse' or 'dwei",
        ),
        (
            lambda: ATTENTION.column_sums_backward(LSE, Q, cuflash.quantize(K).array, LSE, k_scale=np.float32(1)),
            NotImplementedError,
            "k: got dtype float8_e4m3fn for column_sums_backward",
        ),
    ],
)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    "way", [way for _, way in (NUMPY, *INSTRUCTION_SETS)], ids=[name for name, _ in (NUMPY, *INSTRUCTION_SETS)]
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_keep_the_oracle_rule(dtype, way):
    case, given_arrays, need = gradient_problem(dtype)
    dsums, *_, weights = given_arrays
    with way_taken(way):
        found = attention_of(case).column_sums_backward(*given_arrays, need=need)
    judge_gradients(case, weights, dsums, found._asdict())
