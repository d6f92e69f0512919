"""Tangents of traced scores and of their derivatives, against differences, and properties that hold bit for bit."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash.score_mod import Traced, program_of, tangents_of
from cuflash.score_mod.evaluation import evaluate
from tests import expressions
from tests.expressions import scores
from tests.pure.test_score_expressions import AT_POINTS, STEP, S, inputs, of_two
from tests.sampling import examples

MOVED = ("scalar", "of_head", "of_row", "of_key", "table", "pairs")


def both(score, moved=MOVED, *, of_s=True):
    """The score and its derivatives, and their tangents, in the same order."""
    arrays = tuple((name, x.ndim, x.dtype.name) for name, x in expressions.arrays().items())
    traced = Traced.of(score, "score")
    made = program_of(traced, None, arrays)
    own = tuple(name for name in made.differentiable if name in moved)
    found = tangents_of(traced, arrays, own, of_s)
    roots = [made.score, made.by_s, *(load.derivative for loads in made.loads.values() for load in loads)]
    return roots, [found.score, found.by_s, *(x for name in made.loads for x in found.reads[name])]


def values(roots, given, s=S, ts=None):
    at = inputs(s) | ({} if ts is None else {"ts": ts})
    return [np.broadcast_to(x, S.shape) for x in evaluate(roots, at, given, np.float64)]


def directions(seed, unit=1.0):
    random = np.random.default_rng(seed)
    given = expressions.arrays()
    return unit * random.standard_normal(S.shape), {
        f"t{name}": unit * random.standard_normal(given[name].shape) for name in MOVED
    }


@settings(max_examples=examples(60))
@given(scores(), st.integers(0, 99))
def test_tangents_are_those_of_differences(score, seed):
    given, (ts, moved) = expressions.arrays(), directions(seed)
    roots, tangents = both(score)

    def at(h):
        return values(roots, given | {name: given[name] + h * moved[f"t{name}"] for name in MOVED}, S + h * ts)

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for got, left, here, right in zip(
            values(tangents, given | moved, ts=ts), at(-STEP), at(0.0), at(STEP), strict=True
        ):
            after, before = (right - here) / STEP, (here - left) / STEP
            size = np.maximum(1, np.abs(after) + np.abs(here))
            is_smooth = np.abs(after - before) <= 1e-4 * size  # no kink and no step between the two
            assert is_smooth.mean() > 0.2 or not np.isfinite(size).all()
            assert np.all((np.abs(got - (after + before) / 2) <= 1e-4 * size)[is_smooth])


@settings(max_examples=examples(40))
@given(scores(), st.integers(0, 99))
def test_tangents_are_linear_and_exact_zeros(score, seed):
    given, tangents = expressions.arrays(), both(score)[1]
    (ts, moved), (ts4, moved4) = directions(seed), directions(seed, 4.0)
    with np.errstate(all="ignore"):
        once, four = values(tangents, given | moved, ts=ts), values(tangents, given | moved4, ts=ts4)
        none = values(tangents, given | {name: 0 * x for name, x in moved.items()}, ts=0 * ts)
    for one, other, zero in zip(once, four, none, strict=True):
        np.testing.assert_array_equal(other, 4 * one)
        assert not np.any(zero[np.isfinite(one)])


@settings(max_examples=examples(40))
@given(scores(), st.sampled_from(MOVED), st.integers(0, 99))
def test_what_does_not_move_has_no_part(score, name, seed):
    given, (ts, moved) = expressions.arrays(), directions(seed)
    only = {other: x if other == f"t{name}" else 0 * x for other, x in moved.items()}
    with np.errstate(all="ignore"):
        alone = values(both(score, (name,), of_s=False)[1], given | {f"t{name}": moved[f"t{name}"]})
        among = values(both(score)[1], given | only, ts=0 * ts)
    for x, y in zip(alone, among, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("function", "points"), AT_POINTS)
def test_tangents_at_points_where_a_factor_is_infinite(function, points):
    """They are the derivatives along the direction, no NaN; also in a direction along which nothing changes."""
    given = {name: np.array([point[n] for point, _ in points]) for n, name in enumerate("ab")}
    arrays = (("a", 1, "float64"), ("b", 1, "float64"))
    found = tangents_of(Traced.of(of_two(function), "score"), arrays, ("a", "b"), False)
    at = {"s": np.zeros((len(points), 1)), "i": np.arange(len(points))[:, None], "j": np.zeros((1, 1), int)}
    for ta, tb in ((1.0, 0.0), (0.0, 1.0), (0.5, -2.0)):
        moved = {"ta": np.full(len(points), ta), "tb": np.full(len(points), tb)}
        (got,) = evaluate([found.score], at, given | moved, np.float64)
        expected = [ta * of_a + tb * of_b for _, (of_a, of_b) in points]
        np.testing.assert_allclose(np.broadcast_to(got, (len(points), 1))[:, 0], expected, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize(
    "root", [cuflash.sqrt, lambda b: b**1.5, lambda b: cuflash.sqrt(b) ** 0.5], ids=["", "1.5", "2"]
)
@pytest.mark.parametrize("ta", [0.0, 1.0, -3.0])
def test_a_factor_of_0_whose_tangent_is_not_0(root, ta):
    """Derivatives by b of a root(b) are 0 at a = 0, and have the tangent that the slope of the root makes of that of a.

    At b = 0, where that slope may be infinite, they stay 0 where a does.
    """
    b = np.array([0.25, 4.0, 0.0][: 3 if ta == 0 else 2])
    arrays = (("a", 1, "float64"), ("b", 1, "float64"))
    found = tangents_of(Traced.of(of_two(lambda a, b: a * root(b)), "score"), arrays, ("a",), False)
    given = {"a": np.zeros(len(b)), "b": b, "ta": np.full(len(b), ta)}
    at = {"s": np.zeros((len(b), 1)), "i": np.arange(len(b))[:, None], "j": np.zeros((1, 1), int)}
    (got,) = evaluate([*found.reads["b"]], at, given, np.float64)
    step = 1e-6
    slope = [0.0 if ta == 0 else (root(x + step) - root(x - step)) / (2 * step) for x in b]
    np.testing.assert_allclose(np.broadcast_to(got, (len(b), 1))[:, 0], ta * np.array(slope), rtol=1e-8)
