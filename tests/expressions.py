"""Random scores and masks: hypothesis strategies that draw functions, of symbols and of NumPy arrays alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import cuflash
from cuflash.score_mod.evaluation import Clamped

Array = np.ndarray[Any, Any]
Term = Callable[[dict[str, Any]], Any]
T = TypeVar("T")

SEQLEN_Q, SEQLEN_K, HEADS, BATCH = 9, 11, 3, 2


def arrays(seed: int = 0, dtype: Any = np.float64) -> dict[str, Array]:
    """The arrays that drawn functions read."""
    random = np.random.default_rng(seed)
    return {
        "scalar": np.array(random.uniform(0.5, 2), dtype),
        "of_head": random.uniform(0.5, 2, HEADS).astype(dtype),
        "of_row": random.standard_normal((SEQLEN_Q, 2)).astype(dtype),
        "of_key": random.standard_normal((SEQLEN_K, 2)).astype(dtype),
        "table": random.standard_normal((HEADS, 7)).astype(dtype),
        "pairs": random.standard_normal((SEQLEN_Q, SEQLEN_K)).astype(dtype),
        "doc": np.sort(random.integers(0, 4, SEQLEN_K)),
        "flags": random.integers(0, 2, SEQLEN_K).astype(bool),
    }


def _of(function: Callable[..., Any], *terms: Term) -> Term:
    return lambda at: function(*(term(at) for term in terms))


_NUMBERS = st.sampled_from([-2.0, -1.0, 0.5, 1.5, 3.0]).map(lambda x: lambda _: x)
_INTEGERS = st.sampled_from([-3, 0, 1, 2, 5]).map(lambda x: lambda _: x)
_INTEGER_LEAVES = st.one_of(
    st.sampled_from(["i", "j", "head", "batch"]).map(lambda name: lambda at: at[name]),
    _INTEGERS,
    st.just(lambda at: at["doc"][at["j"]]),
)


def _more_integers(inner: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    binary = st.sampled_from([
        lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: x // 3 + y, lambda x, y: x % 4 - y,
        cuflash.minimum, cuflash.maximum,
    ])  # fmt: skip
    unary = st.sampled_from([lambda x: -x, cuflash.abs, lambda x: x**2, lambda x: cuflash.clip(x, -4, 6)])
    return st.one_of(
        st.builds(lambda f, x, y: _of(f, x, y), binary, inner, inner), st.builds(lambda f, x: _of(f, x), unary, inner)
    )


integers = st.recursive(_INTEGER_LEAVES, _more_integers, max_leaves=4)

_REAL_LEAVES = st.one_of(
    st.just(lambda at: at["s"]),
    st.just(lambda at: at["s"]),
    _NUMBERS,
    st.just(lambda at: at["scalar"] * 1.0),
    st.builds(lambda n: lambda at: at["of_head"][n(at)], st.just(lambda at: at["head"])),
    st.builds(lambda n: lambda at: at["of_row"][at["i"], n], st.integers(0, 1)),
    st.builds(lambda n: lambda at: at["of_key"][at["j"], n], st.integers(0, 1)),
    st.just(lambda at: at["table"][at["head"], cuflash.clip(at["i"] - at["j"], -3, 3) + 3]),
    st.just(lambda at: at["pairs"][at["i"], at["j"]]),
    st.builds(lambda n: lambda at: at["table"][at["head"], n(at)], integers),
    st.builds(lambda n: lambda at: n(at) * 0.5, integers),
)


def _real_of(inner: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    unary = st.sampled_from([
        lambda x: -x, cuflash.tanh, cuflash.sin, cuflash.cos, cuflash.abs, lambda x: x**2, lambda x: x**3,
        lambda x: cuflash.exp(-cuflash.abs(x)), lambda x: cuflash.sqrt(x * x + 1), lambda x: cuflash.log(x * x + 2),
        lambda x: x - cuflash.floor(x), lambda x: (x * x + 1) ** 0.7, lambda x: 1 / (x * x + 1),
        lambda x: (x * x + 1) ** -2,
        lambda x: cuflash.where(x > 0, cuflash.log(x), 0.0), lambda x: cuflash.clip(x, -1.3, 2.1),
    ])  # fmt: skip
    binary = st.sampled_from([
        lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: x / (y * y + 1), cuflash.minimum,
        cuflash.maximum, lambda x, y: x % (y * y + 1),
    ])  # fmt: skip
    return st.one_of(
        st.builds(lambda f, x: _of(f, x), unary, inner),
        st.builds(lambda f, x, y: _of(f, x, y), binary, inner, inner),
        st.builds(lambda c, x, y: lambda at: cuflash.where(c(at), x(at), y(at)), _conditions_of(inner), inner, inner),
    )


def _conditions_of(inner: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    compare = st.sampled_from([
        lambda x, y: x < y, lambda x, y: x <= y, lambda x, y: x > y, lambda x, y: x >= y, lambda x, y: x == y,
        lambda x, y: x != y,
    ])  # fmt: skip
    simple = st.one_of(
        st.builds(lambda f, x, y: _of(f, x, y), compare, integers, integers),
        st.builds(lambda f, x, y: _of(f, x, y), compare, inner, inner),
        st.just(lambda at: at["flags"][at["j"]]),
    )
    joined = st.sampled_from([lambda x, y: x & y, lambda x, y: x | y, lambda x, y: x ^ y, lambda x, y: x & (y ^ True)])
    return st.one_of(simple, st.builds(lambda f, x, y: _of(f, x, y), joined, simple, simple))


reals = st.recursive(_REAL_LEAVES, _real_of, max_leaves=6)


_SMALL_LEAVES = st.one_of(
    *(_NUMBERS, st.just(lambda at: at["scalar"]), st.just(lambda at: at["of_head"][at["head"]])),
    st.builds(lambda n: lambda at: at["of_row"][at["i"], n], st.integers(0, 1)),
    st.builds(lambda n: lambda at: at["of_key"][at["j"], n], st.integers(0, 1)),
    st.just(lambda at: at["table"][at["head"], cuflash.clip(at["i"] - at["j"], -3, 3) + 3]),
    st.just(lambda at: at["pairs"][at["i"], at["j"]]),
    st.just(lambda at: cuflash.where(at["i"] - at["j"] < 5, at["scalar"], 0.25)),
)


def _more_small(inner: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    unary = st.sampled_from([
        cuflash.sin, cuflash.cos, cuflash.abs, lambda x: cuflash.exp(-cuflash.abs(x)),
        lambda x: cuflash.sqrt(x * x + 1),
        lambda x: cuflash.log(x * x + 2), lambda x: 1 / (x * x + 1), lambda x: cuflash.clip(x, -1.3, 2.1),
    ])  # fmt: skip
    binary = st.sampled_from(
        [lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, cuflash.minimum, cuflash.maximum]
    )
    return st.one_of(
        st.builds(lambda f, x: _of(f, x), unary, inner), st.builds(lambda f, x, y: _of(f, x, y), binary, inner, inner)
    )


_OF_S = [
    lambda s, x: s, lambda s, x: s * x, lambda s, x: 3 * cuflash.tanh(s * x), lambda s, x: s / (1 + x * x),
    lambda s, x: cuflash.sqrt(s * s + 1 + x * x), lambda s, x: cuflash.sin(s) - x * s, lambda s, x: x,
]  # fmt: skip


_SMALL = st.recursive(_SMALL_LEAVES, _more_small, max_leaves=4)


@st.composite
def smooth_scores(draw: st.DrawFn) -> Callable[..., Any]:
    """A score of moderate numbers without a jump or a kink in s, so that rounding errors of s stay what they are."""
    x, y = draw(_SMALL), draw(_SMALL)
    of_s = draw(st.sampled_from(_OF_S))

    def score(s, i, j, *, head, batch, scalar, of_head, of_row, of_key, table, pairs, doc, flags):  # type: ignore[no-untyped-def]
        at = locals() | {"term": None}
        return of_s(s, cuflash.tanh(x(at))) + 2 * cuflash.tanh(y(at))

    return score


@st.composite
def scores(draw: st.DrawFn) -> Callable[..., Any]:
    """A score, which s is in."""
    term = draw(reals)

    def score(s, i, j, *, head, batch, scalar, of_head, of_row, of_key, table, pairs, doc, flags):  # type: ignore[no-untyped-def]
        return s + term(locals() | {"term": None})

    return score


# Subexpressions of i - j alone, of i or of j: indices, from which numbers and entries are made.
_DIFFERENCES = st.sampled_from([
    lambda at: at["i"] - at["j"], lambda at: at["j"] - at["i"] + 2, lambda at: 3 * (at["i"] + 1) - 3 * at["j"],
    lambda at: -(at["j"] - (at["i"] - 4)), lambda at: cuflash.where(at["i"] + 2 < at["j"], at["i"] - at["j"], 5),
])  # fmt: skip
_OTHER_INDICES = st.sampled_from([lambda at: at["i"], lambda at: at["j"], lambda at: at["j"] // 2])
_INDICES = st.one_of(_DIFFERENCES, _DIFFERENCES, _OTHER_INDICES)
_FEW_VALUES = [
    lambda at, n: at["table"][at["head"], cuflash.clip(n, -3, 3) + 3] * 1.0,
    lambda at, n: cuflash.exp(-at["of_head"][at["head"]] * cuflash.abs(n)),
    lambda at, n: at["of_head"][at["head"]] * cuflash.log(1.0 + cuflash.abs(n)) + at["scalar"],
    lambda at, n: cuflash.sin(n * at["scalar"]) - at["of_key"][n, 1],
    lambda at, n: cuflash.where(n < 2, at["of_row"][cuflash.abs(n), 0], at["scalar"] / (n * n + at["batch"] + 1)),
    lambda at, n: at["table"][cuflash.floor(cuflash.log(cuflash.abs(n) + 1.0)) % 3, at["doc"][at["j"]]],
    lambda at, n: cuflash.where((n % 3 == 1) & (n // 4 < 1), at["pairs"][at["i"], at["j"]], -0.5),
    # There is no derivative by what these read.
    lambda at, n: cuflash.where(at["of_head"][at["head"]] * cuflash.abs(n) > 2, 1.0, -0.5),
    lambda at, n: cuflash.where(at["table"][at["head"], cuflash.clip(n, -3, 3) + 3] > 0, 0.75, -1.0),
    lambda at, n: 0.25 * (cuflash.floor(at["of_head"][at["head"]] * n) % 3),
]  # fmt: skip


@st.composite
def hoistable_scores(draw: st.DrawFn) -> Callable[..., Any]:
    """A score with subexpressions that take few values."""
    summands = [(draw(st.sampled_from(_FEW_VALUES)), draw(_INDICES)) for _ in range(draw(st.integers(1, 3)))]
    of_s = draw(st.sampled_from([lambda s, x: s + x, lambda s, x: s * cuflash.tanh(x), lambda s, x: s / (1 + x * x)]))

    def score(s, i, j, *, head, batch, scalar, of_head, of_row, of_key, table, pairs, doc, flags):  # type: ignore[no-untyped-def]
        at = locals() | {"part": None}
        for few, index in summands:
            s = of_s(s, few(at, index(at)))
        return s

    return score


@st.composite
def masks(draw: st.DrawFn, of: st.SearchStrategy[Term] = reals) -> Callable[..., Any]:
    """A mask, of the same arrays."""
    term = draw(_conditions_of(of))

    def mask(i, j, *, head, batch, scalar, of_head, of_row, of_key, table, pairs, doc, flags):  # type: ignore[no-untyped-def]
        return term(locals() | {"s": scalar * 0.25, "term": None}) | (i < -1)

    return mask


def exact_masks() -> st.SearchStrategy[Callable[..., Any]]:
    """Masks of integers and flags, which rounding changes nothing of."""
    return masks(integers)


def drawn(strategy: st.SearchStrategy[T], number: int) -> T:
    """What a strategy draws, always the same for a number."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=16,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(x: T) -> None:
        found.append(x)

    collect()
    return found[-1]  # the first ones are the simplest


def on_numpy(given: dict[str, Array], dtype: Any) -> dict[str, Any]:
    """Arrays as functions read them."""
    return {name: Clamped(x) if x.ndim else x[()] for name, x in given.items()}
