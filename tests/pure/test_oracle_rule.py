"""The oracle rule goes by row: what one row may be wrong by says nothing of others, and every row has its bounds.

Each test makes an error that a rule of one number for a whole result does not see.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
import cuflash.testing as ct
from cuflash.spec.options import Options
from cuflash.spec.problem import make_problem
from cuflash.testing import reference
from tests.sampling import examples

ROWS, KEYS, DIM = 30, 34, 16
GRADIENTS = ("dq", "dk", "dv", "dbias")
LARGE = {"float32": -1e9, "float16": -6e4, "bfloat16": -1e9, "float64": -1e18}


def masked(dtype="float32", rows=(-1,), value=None, keys=slice(None), seed=0, **arrays):
    """The arrays of a problem of one head in which a finite bias masks some rows, and its expected results."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.standard_normal((1, 1, *shape)).astype(ct.numpy_dtype(dtype))

    real = "float64" if dtype == "float64" else "float32"
    bias = np.zeros((1, 1, ROWS, KEYS), real)
    every = {"q": normal(ROWS, DIM), "k": normal(KEYS, DIM), "v": normal(KEYS, DIM), "dout": normal(ROWS, DIM)}
    every |= {"bias": bias} | arrays
    for row in rows:
        bias[0, 0, row, keys] = LARGE[dtype] if value is None else value
    return make_problem(Options(), *ct.qkv(every), bias=bias), every


def plain(problem, arrays, dtype=None):
    """Results of the plain formula by name, in the dtype of the inputs."""
    dtype = arrays["q"].dtype if dtype is None else dtype
    inputs, optional = ct.qkv(arrays), ct.optional(arrays)
    names = ("out", "lse", *GRADIENTS)
    gradients = reference.backward(problem, arrays["dout"], *inputs, **optional, need=GRADIENTS, dtype=dtype)
    return dict(zip(names, (*reference.forward(problem, *inputs, **optional, dtype=dtype), *gradients), strict=True))


def failures(problem, arrays, results):
    judges = ct.yardsticks(problem, arrays)
    found = {name: ct.measure(name, x, judges[name]) for name, x in results.items()}
    return {name: measurement for name, measurement in found.items() if measurement.failure}


@pytest.mark.parametrize("dtype", LARGE)
def test_a_masked_row_lets_no_other_row_be_wrong(dtype):
    """Zeros, and rows that are off by a hundredth, in place of rows whose neighbour has scores of -1e9."""
    problem, arrays = masked(dtype)
    results = plain(problem, arrays)
    assert not failures(problem, arrays, results)
    for name in ("out", "lse", "dq"):
        for wrong in (np.zeros_like(results[name]), results[name] * results[name].dtype.type(1.02)):
            wrong[0, 0, -1] = results[name][0, 0, -1]
            assert failures(problem, arrays, {name: wrong}), name


@settings(max_examples=examples(60), deadline=None)
@given(
    dtype=st.sampled_from(sorted(LARGE)),
    value=st.sampled_from([-1e4, -1e7, -1e9, -2.5e38, 1e9, 3e38]),
    some=st.booleans(),
    seed=st.integers(0, 99),
)
def test_tolerances_of_other_rows_are_those_without_it(dtype, value, some, seed):
    """Of dk and dv too, as far as the row contributes nothing: its dout is zero."""
    keys = slice(3, 20) if some else slice(None)
    problem, arrays = masked(dtype, value=value, keys=keys, seed=seed)
    arrays["dout"][..., -1, :] = 0
    ordinary = arrays | {"bias": np.zeros_like(arrays["bias"])}
    with_row, without = ct.yardsticks(problem, arrays), ct.yardsticks(problem, ordinary)
    for name in ("out", "lse", "dq", "dk", "dv", "dbias"):
        rows = slice(None) if name in ("dk", "dv") else slice(-1)
        here = (0, 0, rows)
        # Luck decides how much of its noise an error of the plain formula takes up, in any row: at most all of it.
        noise = without[name].tolerance - without[name].plain_error
        allowed = without[name].tolerance + 2 * noise
        assert (with_row[name].tolerance[here] <= allowed[here] * (1 + 1e-9)).all(), name


@pytest.mark.parametrize("dtype", LARGE)
def test_a_large_row_lets_no_other_row_be_wrong(dtype):
    """Nor do numbers that are large: of values in one head, of q and dout in one row."""
    case = ct.Case(num_heads=2, seqlen_q=ROWS, seqlen_k=KEYS, head_dim=DIM, dtype=dtype)
    arrays = case.arrays()
    arrays["v"][0, 1] *= arrays["v"].dtype.type(1000)
    arrays["dout"][0, 0, -1] *= arrays["dout"].dtype.type(1000)
    problem = make_problem(Options(), *ct.qkv(arrays))
    out, lse = reference.forward(problem, *ct.qkv(arrays), dtype=arrays["q"].dtype)
    dq, *_ = reference.backward(problem, arrays["dout"], *ct.qkv(arrays), dtype=arrays["q"].dtype)
    assert not failures(problem, arrays, {"out": out, "lse": lse, "dq": dq})
    out[0, 0] *= out.dtype.type(1.1)
    dq[0, 0, 0] *= dq.dtype.type(1.1)
    assert failures(problem, arrays, {"out": out, "dq": dq}).keys() == {"out", "dq"}


# ---- Rows of large lse themselves ------------------------------------------------------------------------------------


def backward_by_lse(problem, arrays, rounded_lse=True):
    """dv of weights ``exp(S - lse)`` with lse as one number of float32: of scores below -1e8 each weight is 1."""
    q, k, bias, dout = (arrays[name][0, 0].astype(np.float32) for name in ("q", "k", "bias", "dout"))
    scores = np.float32(problem.scale) * (q @ k.T) + bias
    most = scores.max(axis=1, keepdims=True)
    sums = np.exp(scores - most).sum(axis=1, keepdims=True)
    weights = np.exp(scores - (most + np.log(sums))) if rounded_lse else np.exp(scores - most) / sums
    return (weights.T @ dout)[None, None].astype(arrays["v"].dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("value", [-1e7, -1e9, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("rows", [(-1,), range(ROWS)], ids=["one", "all"])
def test_weights_that_do_not_sum_to_one_are_found(dtype, value, rows):
    """Whatever rounding makes of single weights of such rows."""
    problem, arrays = masked(dtype, rows=rows, value=value)
    right, wrong = (backward_by_lse(problem, arrays, rounded) for rounded in (False, True))
    assert not failures(problem, arrays, {"dv": right})
    assert failures(problem, arrays, {"dv": wrong})


@pytest.mark.parametrize("size", [30.0, 100.0])
def test_weights_of_large_products_that_do_not_sum_to_one_are_found(size):
    """lse of about 1e5, and weights that are neither one nor zero."""
    case = ct.Case(seqlen_q=ROWS, seqlen_k=KEYS, head_dim=DIM, score_mean=1e3 * size, dtype="float32")
    arrays = case.arrays() | {"bias": np.zeros((1, 1, ROWS, KEYS), np.float32)}
    right, wrong = (backward_by_lse(case.problem, arrays, rounded) for rounded in (False, True))
    del arrays["bias"]
    assert not failures(case.problem, arrays, {"dv": right})
    assert "dv" in failures(case.problem, arrays, {"dv": wrong})


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("value", [-1e9, -2.5e38])
def test_equal_scores_with_unequal_weights_are_found(dtype, value):
    """Half of the keys have twice the weight of the others, in rows of any lse."""
    problem, arrays = masked(dtype, rows=range(ROWS), value=value)
    arrays["k"][...] = arrays["k"][:, :, :1]
    problem = make_problem(Options(), *ct.qkv(arrays), bias=arrays["bias"])
    results = plain(problem, arrays)
    assert not failures(problem, arrays, results)
    weights = np.where(np.arange(KEYS) < KEYS // 2, 2.0, 1.0)[:, None]
    weights /= weights.sum()
    for name, right, wrong in (
        ("out", arrays["v"], (weights * arrays["v"].astype(float)).sum(axis=2, keepdims=True)),
        ("dv", None, weights * arrays["dout"].astype(float).sum(axis=2, keepdims=True)),
    ):
        assert right is None or right.shape == arrays["v"].shape
        wrong = np.broadcast_to(wrong, results[name].shape).astype(results[name].dtype)
        assert failures(problem, arrays, {name: wrong}), name


@pytest.mark.parametrize("seed", [0, 11])
def test_where_values_cancel_gradients_have_the_digits_that_out_has(seed):
    """One column, whose mean nearly vanishes in some row: what is left of it says nothing of its error, which D has."""
    case = ct.Case(seqlen_q=2, seqlen_k=128, head_dim=1, batch=2, dtype="float32", seed=seed)
    arrays = case.arrays()
    expected = ct.yardsticks(case.problem, arrays)
    q, k, v, dout = (arrays[name].astype(np.float64) for name in ("q", "k", "v", "dout"))
    scores = q @ k.swapaxes(-1, -2)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    for sign in (-1, 1):  # a unit in the last place of the root of the sum of squares of its terms
        out = weights @ v + sign * 2.0**-23 * np.sqrt(weights**2 @ v**2)
        of_scores = weights * (dout @ v.swapaxes(-1, -2) - (dout * out).sum(axis=-1, keepdims=True))
        for name, x in (("dq", of_scores @ k), ("dk", of_scores.swapaxes(-1, -2) @ q)):
            measurement = ct.measure(name, x, expected[name])
            assert measurement.failure is None, measurement


def test_where_products_cancel_dscale_has_the_digits_that_they_have():
    """One pair, whose q k^T nearly vanishes."""
    case = ct.Case(seqlen_q=1, seqlen_k=1, head_dim=16, dtype="float32", dlse=True)
    arrays = case.arrays()
    q, k = (arrays[name].astype(np.float64) for name in ("q", "k"))
    arrays["q"] = (q - (q * k).sum() / (k * k).sum() * k).astype(np.float32)
    q = arrays["q"].astype(np.float64)
    unit = 2.0**-23 * np.sqrt((q * k) ** 2 @ np.ones(16)).item()
    expected = ct.yardsticks(case.problem, arrays)["dscale"]
    for sign in (-1, 1):
        products = (q * k).sum() + sign * unit
        measurement = ct.measure("dscale", np.array(arrays["dlse"].item() * products), expected)
        assert measurement.failure is None, measurement


@pytest.mark.parametrize("dtype", LARGE)
def test_a_mean_stays_between_the_values(dtype):
    """Where values of a column are one number, rounding of weights is no excuse, however large lse is."""
    problem, arrays = masked(dtype, rows=range(ROWS))
    arrays["v"][..., 3] = 1
    results = plain(problem, arrays)
    assert not failures(problem, arrays, results)
    for factor in (0.9, 1.1):
        wrong = results["out"].copy()
        wrong[..., 3] *= wrong.dtype.type(factor)
        assert failures(problem, arrays, {"out": wrong})


@pytest.mark.parametrize(("bias", "may_be_zero"), [(-712.0, True), (-200.0, False)])
def test_weights_of_float64_may_be_zero_where_they_are_below_the_smallest_that_counts(bias, may_be_zero):
    """exp(-712) is less than 2^-960: a sink, which has the rest of the row, makes weights as small as that."""
    problem, arrays = masked("float64", rows=range(ROWS), value=bias)
    arrays["sinks"] = np.zeros(1)
    problem = make_problem(Options(), *ct.qkv(arrays), **ct.optional(arrays))
    out, _ = reference.forward(problem, *ct.qkv(arrays), **ct.optional(arrays), dtype=np.dtype(np.float64))
    assert out.any()
    assert not failures(problem, arrays, {"out": out})
    assert bool(failures(problem, arrays, {"out": np.zeros_like(out)})) is not may_be_zero


def test_numbers_beyond_the_range_may_be_infinite():
    problem, arrays = masked("float16", rows=())
    arrays["bias"][..., 0] = 20.0  # then dv of the first key is the sum of all rows of dout
    arrays["dout"][...] = np.clip(arrays["dout"], -2, 2) * np.float16(2e4)
    dv = ct.yardsticks(problem, arrays)["dv"]
    beyond = np.abs(dv.expected) > 65504 + dv.tolerance
    assert beyond.any() and not beyond.all()
    with np.errstate(over="ignore"):
        got = dv.expected.astype(np.float16)
    assert np.isinf(got[beyond]).all() and ct.measure("dv", got, dv).failure is None
    for wrong in (-got, np.where(beyond, got, np.inf).astype(np.float16), np.where(beyond, 6e4, got)):
        assert ct.measure("dv", wrong.astype(np.float16), dv).failure


@pytest.mark.parametrize(
    ("expected", "tolerance", "signs"), [(2e4, 1e5, {-1, 1}), (2e4, 7e4, {1}), (-6e4, 1e4, {-1}), (2e4, 1e4, set())]
)
def test_numbers_may_be_infinite_on_the_side_where_the_tolerance_goes_beyond_the_range(expected, tolerance, signs):
    judge = ct.Yardstick(
        name="tdk",
        expected=np.array([expected]),
        zero=np.zeros(1, bool),
        plain_error=np.zeros(1),
        scale=np.ones(1),
        tolerance=np.array([tolerance]),
        strict_tolerance=1.0,
    )
    for sign in (-1, 1):
        got = np.array([sign * np.inf], np.float16)
        assert (ct.measure("tdk", got, judge).failure is None) == (sign in signs)


@pytest.mark.parametrize("factor, fails", [(1.0, False), (1.0 + 2.0**-21, False), (1.0 + 2.0**-17, True)])
def test_what_cancels_is_no_scale(factor, fails):
    """dscale is a sum of products of q and k, dk one of differences from D, which out is in: each may be next to 0."""
    problem, arrays = masked(rows=())
    arrays["k"][..., 1:] = -arrays["k"][..., :1] / (DIM - 1)
    arrays["q"][...] = 1 + 1e-4 * arrays["q"]
    expected = ct.yardsticks(problem, arrays)["dscale"]
    of_terms = expected.scale
    got = np.asarray(expected.expected + (factor - 1) * of_terms, np.float32)
    assert abs(expected.expected) < 1e-2 * of_terms
    assert bool(ct.measure("dscale", got, expected).failure) == fails


@pytest.mark.parametrize("halves, fails", [(2, False), (16, True)])
def test_the_rounding_of_lse_adds_up_in_the_gradient_of_a_bias_of_rows(halves, fails):
    """All weights of a row have it in common, so that without values it is all that dbias is off by."""
    failures = []
    for seed in range(4):
        sizes: dict[str, Any] = {"seqlen_q": 200, "seqlen_k": 210, "head_dim": 32, "num_heads": 3}
        case = ct.Case(**sizes, bias=(200, 1), dlse=True, has_values=False, seed=seed)
        arrays = case.arrays()
        judges = ct.yardsticks(case.problem, arrays)
        lse = judges["lse"].expected
        off = halves * (lse - lse.astype(np.float32))
        dbias = judges["dbias"].expected + (arrays["dlse"] * off).sum(axis=1)[0, :, None]
        failures.append(bool(ct.measure("dbias", dbias.astype(np.float32), judges["dbias"]).failure))
    assert any(failures) == fails


def test_the_index_and_the_ratio_of_the_worst_entry():
    case = ct.Case(seqlen_q=ROWS, seqlen_k=KEYS, head_dim=DIM)
    yardstick = ct.yardsticks(case.problem, case.arrays())["out"]
    got = yardstick.expected.copy()
    got[0, 0, 7, 3] += 2.5 * yardstick.tolerance[0, 0, 7, 3]
    measurement = ct.measure("out", got, yardstick)
    assert measurement.at == (0, 0, 7, 3)
    assert measurement.ratio == pytest.approx(2.5)
    assert measurement.error == pytest.approx(2.5 * measurement.tolerance)
    assert "FAILED at (0, 0, 7, 3): got" in str(measurement)
    assert ct.measure("out", got, yardstick.looser(3)).failure is None


def test_looser_yardsticks_of_sums_are_looser_too():
    yardstick = ct.yardsticks(*masked(rows=range(ROWS)))["dv"]
    assert yardstick.summed is not None
    off = yardstick.expected + 1.5 * yardstick.summed.of.tolerance / KEYS
    assert "summed over keys" in ct.measure("dv", off, yardstick.looser(1)).name
    assert ct.measure("dv", off, yardstick.looser(2)).failure is None


# ---- The plain formula's errors --------------------------------------------------------------------------------------


def plain_errors(errors, unit, noise):
    of_unit, of_noise = reference.error_fractions(errors, unit, noise)
    return of_unit * unit + of_noise * noise


SIZES = st.lists(st.tuples(*[st.floats(0, 1e3, allow_subnormal=False)] * 3), min_size=1, max_size=8)


@given(SIZES)
def test_plain_errors_are_no_less_than_those_of_the_same_entry(entries):
    errors, unit, noise = np.array(entries).T
    assert (plain_errors(errors, unit + 1e-3, noise) >= errors * (1 - 1e-12)).all()


@given(SIZES, st.floats(1e-3, 1e3), st.floats(0, 1e3))
def test_plain_errors_of_entries_alike_are_the_largest_one_if_noise_or_unit_is_all_there_is(entries, unit, noise):
    errors = np.array(entries)[:, 0]
    found = plain_errors(errors, np.full(len(errors), unit), np.full(len(errors), noise))
    assert (found >= errors.max() * (1 - 1e-12)).all()
    assert (found <= errors.max() * (1 + min(unit, noise) / max(unit, noise)) * (1 + 1e-12)).all()


@given(SIZES, st.floats(0, 3), st.floats(1, 1e30))
def test_an_entry_of_large_noise_raises_others_in_proportion_to_theirs(entries, fraction, large):
    errors, unit, noise = np.array(entries).T
    unit = unit + 1e-3
    more = [np.append(x, y) for x, y in ((errors, fraction * large), (unit, 1.0), (noise, large))]
    allowed = plain_errors(errors, unit, noise) + fraction * noise
    assert (plain_errors(*more)[:-1] <= allowed * (1 + 1e-12)).all()


# ---- Cases that have such rows ---------------------------------------------------------------------------------------

FEATURES = (*ct.FEATURES, *ct.MORE_FEATURES, *ct.REGIMES, "hidden_keys", "dropout")


@settings(max_examples=examples(150), deadline=None)
@given(ct.cases(min_seqlen=0, features=FEATURES, max_scores=2**12))
def test_the_plain_formula_is_within_the_rule(case):
    arrays, problem = case.arrays(), case.problem
    inputs, optional = ct.qkv(arrays), ct.optional(arrays) | case.random
    results: dict[str, Any] = dict(
        zip(("out", "lse"), reference.forward(problem, *inputs, **optional, dtype=inputs[0].dtype), strict=True)
    )
    if "dout" in arrays:
        need, optional = ct.gradients_of(problem), ct.optional_backward(arrays) | case.random
        found = reference.backward(problem, arrays["dout"], *inputs, **optional, need=need, dtype=inputs[0].dtype)
        results |= zip(need, found, strict=True)
    judges = ct.yardsticks(problem, arrays, **case.random)
    measured = [ct.measure(name, x, judges[name]) for name, x in results.items()]
    assert not any(m.failure for m in measured), "\n".join(map(str, measured))
    assert all(np.isfinite(judges[name].tolerance).all() for name in judges)


def test_the_plain_formula_rounds_what_a_function_makes_of_integers():
    """They are real numbers in the dtype of the softmax, where NumPy would multiply them in float64."""
    x, rows = np.float32(1.4554425), np.arange(60, dtype=np.float32)
    attn: Any = cuflash.FlashAttention(score=lambda s, i, j, *, x: s + cuflash.sin(x * i))
    arrays: dict[str, Any] = {"q": np.zeros((1, 1, 60, 8), np.float16), "k": np.ones((1, 1, 3, 8), np.float16)}
    arrays |= {"x": np.array(x)}
    problem = make_problem(attn.options, arrays["q"], arrays["k"], arrays["k"], score_args={"x": arrays["x"]})
    judge = ct.yardsticks(problem, arrays | {"v": arrays["k"]})["lse"]
    rounded = (np.log(np.float32(3)) + np.sin(rows * x))[None, None]
    assert np.abs(rounded - judge.expected).max() > 8e-7
    assert judge.plain_error.max() > 8e-7
    assert ct.measure("lse", rounded, judge).failure is None


def test_cases_have_the_values_asked_for():
    base = ct.Case(seqlen_q=40, seqlen_k=50, head_dim=8, bias=(40, 50), mask=(1, 1, 1, 50))
    bias = dataclasses.replace(base, bias_mask=-1.7e308).arrays()["bias"]
    is_lowest = bias == np.finfo(np.float32).min
    assert is_lowest.all(axis=1).any() and (is_lowest.any(axis=1) & ~is_lowest.all(axis=1)).any()
    bias = dataclasses.replace(base, bias_mask=-1e9, bias_dtype="input", dtype="float16").arrays()["bias"]
    assert bias.min() == np.finfo(np.float16).min
    arrays = dataclasses.replace(base, distinct_keys=1).arrays()
    assert (arrays["k"] == arrays["k"][:, :, :1]).all()
    for scale in (None, -0.3):
        arrays = dataclasses.replace(base, score_mean=-3e3, scale=scale).arrays()
        products = (8**-0.5 if scale is None else scale) * arrays["q"] @ arrays["k"].swapaxes(2, 3)
        assert abs(products.mean() + 3e3) < 3 and products.std() < 3
    arrays = dataclasses.replace(base, factors=(("v", 2.0**128), ("q", 2.0**-126))).arrays()
    assert np.abs(arrays["v"]).max() == np.finfo(np.float32).max and np.abs(arrays["q"]).max() < 2.0**-120
    arrays = dataclasses.replace(base, hidden_keys="nan").arrays()
    assert np.array_equal(np.isnan(arrays["k"]).all(axis=3)[0, 0], ~arrays["mask"][0, 0, 0])
    assert "dout" not in arrays and np.isnan(arrays["k"]).any()


@pytest.mark.parametrize("regime", [*ct.REGIMES, "hidden_keys"])
def test_regimes_are_drawn_when_told_to(regime):
    from hypothesis import HealthCheck, Phase, find

    conditions: dict[str, Any] = {"empty": lambda c: c.num_heads == 0 < c.num_heads_kv or c.batch == 0}
    condition = conditions.get(regime, lambda c: getattr(c, regime))
    quick = settings(
        max_examples=2000, phases=[Phase.generate], derandomize=True, suppress_health_check=list(HealthCheck)
    )
    features = ("bias", "mask", regime)
    assert condition(find(ct.cases(features=features, min_seqlen=0), condition, settings=quick))
