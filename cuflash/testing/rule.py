"""The oracle rule: how far from the oracle a result may be, and results judged by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from cuflash import reference
from cuflash.operands import numpy_dtype, view_4d, view_rows
from cuflash.problem import Problem
from cuflash.terms import DEFAULT_NEED, GRADIENTS, OF_FUNCTIONS, OF_OPTIONS, OF_SOFTMAX
from cuflash.testing.arrays import to_numpy
from cuflash.testing.case import Case, optional, optional_backward
from cuflash.testing.leading import Spread

Array = NDArray[Any]

SMALLEST_WEIGHT = {"float32": 2.0**-100, "float64": 2.0**-960}  # by the dtype of the softmax


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What one result should be, and how far from it an implementation may be.

    ``strict_tolerance = factor * plain_error + ulp * scale`` and
    ``tolerance = strict_tolerance + softmax_ulp * noise * scale``, where

    factor
        1 for float32, which has no excuse to be worse than the plain formula; 2 for the others.
    plain_error
        Largest error of the plain formula computed in the dtype of the inputs (`cuflash.reference` in that dtype).
    ulp * scale
        One unit in the last place of the result's scale. Scale is the largest absolute value of the result, or of the
        root of the sum of squares of the terms that it is a sum of: what cancellation leaves of a gradient is no scale.
        For lse it is at least 1. The unit is that of the dtype of the result; of gradients, which are made of out as it
        was rounded, that of the inputs; what is subnormal there counts as the smallest normal number, since its unit is
        that of this number. A weight counts as at least ``SMALLEST_WEIGHT`` over a unit in the last place:
        implementations may take smaller weights for zero, in out and in what is made of out, to stay clear of subnormal
        numbers. The slope ``1 - tanh(x)**2`` of a soft cap counts as at least ``softmax_ulp`` over such a unit: it is a
        difference from 1, with no digits beyond that.
    softmax_ulp * noise
        What the order of summation, not quality, decides about a weight ``exp(S - lse)``: one unit in the last place of
        the exponential, one of lse, and one of the terms of the scores, ``scale * abs(q) @ abs(k)`` (in units of a
        soft cap below 1). Largest errors are a matter of luck, more so where results are few, and this keeps the rule
        from being one: the strict tolerance holds on the average of several seeds, this one always. The difference is
        next to nothing for 16-bit types, whose softmax runs in float32.
    """

    name: str
    expected: Array  # float64, or longdouble for float64
    zero: Array  # where the result is exactly zero: rows that see no key, and keys that no row sees
    plain_error: float
    scale: float
    strict_tolerance: float
    tolerance: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How far one result was from the oracle, in the words of `Yardstick`."""

    name: str
    error: float
    plain_error: float
    strict_tolerance: float
    tolerance: float
    failure: str | None = None

    @property
    def strict_ratio(self) -> float:
        """Error over strict tolerance, whose average over several seeds should not be above 1."""
        return self.error / self.strict_tolerance if self.error else 0.0

    def __str__(self) -> str:
        numbers = f"max error {self.error:.3g}, plain formula {self.plain_error:.3g}, allowed {self.tolerance:.3g}"
        return f"{self.name:<4} {numbers}" + (f"  FAILED: {self.failure}" if self.failure else "")


class Report(tuple[Measurement, ...]):
    """Measurements of the results of one case."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    @property
    def passed(self) -> bool:
        return not any(m.failure for m in self)


def measure(name: str, got: Any, yardstick: Yardstick) -> Measurement:
    """Compare one result, of any library, with what it should be.

    NaN and infinities must be where the oracle has them, and zeros where `Yardstick.zero` says.
    """
    values = to_numpy(got)
    expected = yardstick.expected
    failure = None
    error = math.nan
    if values.shape != expected.shape:
        failure = f"got shape {values.shape}, expected {expected.shape}"
    else:
        values = values.astype(expected.dtype)
        ordinary = np.isfinite(expected)
        same = np.array_equal(values[~ordinary], expected[~ordinary], equal_nan=True)
        differences = np.abs(values[ordinary] - expected[ordinary])
        error = float(differences.max(initial=0))
        if not same:
            failure = "NaN or infinities are not where they should be"
        elif not error <= yardstick.tolerance:  # NaN too
            at = tuple(int(i) for i in np.argwhere(ordinary)[np.argmax(differences)])
            failure = f"at {at} got {values[at]:.9g}, expected {expected[at]:.9g}"
        elif np.any(values[yardstick.zero]):
            failure = "a row that sees no key, or a key that no row sees, is not exactly zero"
    return Measurement(
        name=name,
        error=error,
        plain_error=yardstick.plain_error,
        strict_tolerance=yardstick.strict_tolerance,
        tolerance=yardstick.tolerance,
        failure=failure,
    )


def yardsticks(problem: Problem, arrays: Mapping[str, Array], **random: Any) -> dict[str, Yardstick]:
    """The yardsticks of out and lse, and of all gradients if `dout` is among the NumPy `arrays`.

    With dropout, `random` is the `seed` and the `offset`.
    """
    return _yardsticks(problem, arrays, random, None)


@np.errstate(all="ignore")
def _yardsticks(
    problem: Problem, arrays: Mapping[str, Array], random: Mapping[str, Any], spread: Spread | None
) -> dict[str, Yardstick]:
    """Where problem and arrays are those of a `spread`, the yardsticks are of results for its natural arrays."""
    expected = _compute(problem, arrays, np.longdouble if problem.dtype == "float64" else np.float64, random)
    plain = _compute(problem, arrays, arrays["q"].dtype, random)
    scales, zeros, noise = _scales(problem, arrays, expected, random, spread)
    if spread is not None:
        expected = {name: spread.fold(name, x) for name, x in expected.items()}
        plain = {name: spread.rounded(name, spread.fold(name, x)) for name, x in plain.items()}
        zeros = {name: spread.fold(name, (~x).astype(np.int64)) == 0 for name, x in zeros.items()}
        scales = {name: max(scale, _max_finite(expected[name])) for name, scale in scales.items()}
    with np.errstate(invalid="ignore"):  # -inf in both
        plain_errors = {name: _max_finite(plain[name].astype(x.dtype) - x) for name, x in expected.items()}
    factor = 1 if problem.dtype == "float32" else 2
    softmax_ulp = _ulp(problem.softmax_dtype)

    def yardstick(name: str) -> Yardstick:
        ulp = softmax_ulp if name == "lse" else _ulp(arrays["q"].dtype)
        strict = factor * plain_errors[name] + ulp * scales[name]
        return Yardstick(
            name=name,
            expected=expected[name],
            zero=zeros[name],
            plain_error=plain_errors[name],
            scale=scales[name],
            strict_tolerance=strict,
            tolerance=strict + softmax_ulp * noise * (1 if name == "lse" else scales[name]),
        )

    return {name: yardstick(name) for name in expected}


def _compute(
    problem: Problem, arrays: Mapping[str, Array], dtype: DTypeLike, random: Mapping[str, Any]
) -> dict[str, Array]:
    """Results of the plain formula by name."""
    inputs = (arrays["q"], arrays["k"], arrays["v"])
    keywords = {**_read(problem, arrays), **random}
    out, lse = reference.forward(problem, *inputs, dtype=dtype, **keywords)
    results = {"out": out, "lse": lse}
    if "dout" in arrays:
        keywords |= optional_backward(arrays)
        need = gradients_of(problem)
        gradients = reference.backward(problem, arrays["dout"], *inputs, need=need, dtype=dtype, **keywords)
        results |= zip(need, gradients, strict=True)
    return results


def _read(problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """The terms, and what functions read."""
    return {**optional(arrays), **{name: arrays[name] for name, _ in problem.captured}}


def gradients_of(problem: Problem) -> tuple[str, ...]:
    """All gradients that a problem has, those of what its score reads last."""
    own = (name for name in GRADIENTS if name not in OF_OPTIONS or getattr(problem, OF_OPTIONS[name]) is not None)
    return (*own, *problem.captured_gradients)


def _scales(
    problem: Problem,
    arrays: Mapping[str, Array],
    expected: Mapping[str, Array],
    random: Mapping[str, Any],
    spread: Spread | None,
) -> tuple[dict[str, float], dict[str, Array], float]:
    """Scale of every result, where it is exactly zero, and the noise of the weights in units in the last place."""
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    dout = view_4d(arrays["dout"], problem.layout) if "dout" in arrays else None
    dlse = view_rows(arrays["dlse"] if "dlse" in arrays else np.zeros(problem.lse_shape))
    out = view_4d(expected["out"].astype(np.float64), problem.layout)
    O2 = np.where(out != 0, np.maximum(np.abs(out), float(ml_dtypes.finfo(q.dtype).smallest_normal)), 0) ** 2
    scales = {name: _max_finite(x) for name, x in expected.items()}
    sees_something = np.zeros(out.shape[:3], bool)
    is_seen = np.zeros((problem.array_batch, problem.num_heads_kv, problem.seqlen_k), bool)
    dsinks2 = np.zeros(problem.num_heads)
    of_scores = reference.ScoreSums(problem, arrays, np.dtype(np.float64))
    has_part = reference.ScoreSums(problem, arrays, np.dtype(np.float64))
    reads2 = {f"d{name}": np.zeros(operand.shape) for name, operand in problem.captured}
    scores = 0.0
    smallest = SMALLEST_WEIGHT[problem.softmax_dtype] / _ulp(problem.softmax_dtype)
    least_slope = _ulp(problem.softmax_dtype) / _ulp(q.dtype) if problem.given(OF_FUNCTIONS) else 0.0

    def grow(name: str, squares: Array) -> None:
        scales[name] = max(scales[name], math.sqrt(_max_finite(squares)))

    for head in reference.each_head(problem, q, k, v, np.float64, **random, **_read(problem, arrays)):
        scores = max(scores, _slope_of(problem, head) * _max_finite(np.abs(head.Q) @ np.abs(head.K).T))
        visible = head.P != 0
        P2 = np.where(visible, np.maximum(head.P, smallest), 0) ** 2
        P_sink2 = np.where(head.P_sink != 0, np.maximum(head.P_sink, smallest), 0) ** 2
        lost2 = np.where(visible & (smallest > head.P), smallest, 0) ** 2  # of weights that may be missing from out
        sees_something[head.index] = visible.any(axis=1)
        is_seen[head.index_kv] |= visible.any(axis=0)
        with np.errstate(all="ignore"):
            V2, Z2 = head.V**2, head.Z**2
            grow("out", (P2 * Z2) @ V2)
            if dout is not None:
                dO2 = dout[head.index].astype(np.float64) ** 2
                D2 = (dO2 * (O2[head.index] + (lost2 * Z2) @ V2)).sum(axis=-1, keepdims=True)
                dL2 = dlse[head.index].astype(np.float64)[:, None] ** 2
                dS_bias2 = P2 * ((dO2 @ V2.T) * Z2 + D2 + dL2)
                slope2 = np.maximum(np.abs(head.cap_slope), least_slope) ** 2
                dS2 = problem.scale**2 * slope2 * dS_bias2
                grow("dq", dS2 @ head.K**2)
                grow("dk", dS2.T @ head.Q**2)
                grow("dv", (P2 * Z2).T @ dO2)
                dsinks2[head.index[1]] += (P_sink2 * (D2 + dL2)).sum()
                of_scores.add(head, dS_bias2, dS_bias2 * slope2 * head.QK**2, power=2)
                for name, entry, derivative in head.reads:
                    np.add.at(reads2[f"d{name}"].reshape(-1), entry, dS_bias2 * derivative**2)
                has_part.add(head, visible.astype(np.float64), np.ones(()), power=0)
    sums = {name: total.value for name, total in of_scores.totals.items()}
    for name, squares in {**sums, **reads2, "dsinks": dsinks2}.items():
        if name in expected:
            grow(name, squares if spread is None else spread.fold(name, squares))
    noise = 1 + scales["lse"] + scores / reference.unit_of_scores(problem)
    scales["lse"] = max(scales["lse"], 1.0)
    zeros = _zeros(problem, expected, sees_something, is_seen, has_part.totals["dbias"].value == 0)
    return scales, zeros, noise


def _zeros(
    problem: Problem, expected: Mapping[str, Array], sees_something: Array, is_seen: Array, has_no_part: Array
) -> dict[str, Array]:
    """Where every result is exactly zero."""
    zeros = {name: np.zeros(x.shape, bool) for name, x in expected.items()}
    if "dbias" in expected:
        zeros["dbias"] = has_no_part
    for name, nonzero in (("out", sees_something), ("dq", sees_something), ("dk", is_seen), ("dv", is_seen)):
        if name in expected:
            shape = (*nonzero.shape, view_4d(expected[name], problem.layout).shape[-1])
            zeros[name] = reference.as_caller(problem, np.broadcast_to(~nonzero[..., None], shape))
    return zeros


def _slope_of(problem: Problem, head: reference.Head) -> float:
    """How fast scores follow products of q and k: a soft cap counts in units of its own."""
    return abs(problem.scale) * (1.0 if problem.score is None else max(1.0, _max_finite(head.cap_slope)))


def _ulp(dtype: Any) -> float:
    return float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]


def _max_finite(x: Array) -> float:
    x = np.abs(x)
    return float(np.max(x, where=np.isfinite(x), initial=0))


@lru_cache(maxsize=8)
def yardsticks_of(case: Case) -> dict[str, Yardstick]:
    """Those of the results of a case."""
    spread = case.spread
    arrays = case.arrays() if spread is None else spread.arrays
    return _yardsticks(case.problem, arrays, case.random, spread)


def _always_given(arrays: Mapping[str, Any]) -> tuple[str, ...]:
    return (*DEFAULT_NEED, *(name for name in OF_SOFTMAX if OF_OPTIONS[name] in arrays))


def _judge(case: Case, results: Mapping[str, Any]) -> Report:
    judges = yardsticks_of(case)
    report = Report(measure(name, x, judges[name]) for name, x in results.items())
    if not report.passed:
        raise AssertionError(f"outside the oracle rule\n{report}\n{case}")
    return report


def assert_forward(case: Case, out: Any, lse: Any = None) -> Report:
    """Judge the output of an implementation, of any array library, and its lse if it has one.

    Returns the measurements, or raises AssertionError that shows them.
    """
    return _judge(case, {"out": out} if lse is None else {"out": out, "lse": lse})


def assert_backward(
    case: Case, dq: Any = None, dk: Any = None, dv: Any = None, dsinks: Any = None, **others: Any
) -> Report:
    """Judge gradients of ``sum(dout * out)``, those given, as `assert_forward` judges the output; dlse counts.

    Those beside the four have the names of `cuflash.terms.GRADIENTS`.
    """
    given = {"dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks} | others
    for name in given:
        if name not in GRADIENTS:
            raise TypeError(f"assert_backward() got an unexpected keyword argument {name!r}")
    return _judge(case, {name: given[name] for name in GRADIENTS if given.get(name) is not None})


def check(
    attention: Callable[..., Any],
    case: Case | Problem,
    *,
    gradients: Callable[..., Any] | None = None,
    convert: Callable[[Array], Any] = np.asarray,
) -> Report:
    """Run somebody's attention on a case and judge what it returns.

    Parameters
    ----------
    attention : callable
        Called as ``attention(q, k, v, **options)``, where options are the keyword arguments of `cuflash.attention` that
        the case needs, by those names: static options and terms. With dropout, also that, seed and offset, which drop
        what `cuflash.dropout_mask` says. An implementation without options is checked on cases without `features`.
        Returns out, or a tuple (out, lse), as arrays of any library that speaks DLPack.
    case : Case or Problem
        A problem stands for a case of its sizes and options on random arrays.
    gradients : callable, optional
        Called as ``gradients(dout, q, k, v, **options)``, with dlse among the options if the case has it, unless it
        has pages; returns (dq, dk, dv), and dsinks as a fourth if the case has them.
    convert : callable
        Makes the arrays that `attention` takes of NumPy arrays: ``cupy.asarray``, or
        ``through_dlpack(torch.from_dlpack)``.

    Returns
    -------
    Report
        A tuple of `Measurement`; ``str()`` is a line for each.

    Raises
    ------
    AssertionError
        A result is outside the oracle rule, has not the shape or dtype that it should have, or an input was changed.

    Examples
    --------
    >>> def plain(q, k, v):
    ...     weights = np.exp(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5)
    ...     return weights / weights.sum(axis=-1, keepdims=True) @ v
    >>> check(plain, Case(seqlen_q=113, seqlen_k=203, head_dim=64)).passed
    True
    """
    case = Case.from_problem(case) if isinstance(case, Problem) else case
    arrays = case.arrays(convert)
    inputs = [arrays[name] for name in ("q", "k", "v")]
    keywords = case.keywords | optional(arrays) | case.random
    result = attention(*inputs, **keywords)
    out, lse = result if isinstance(result, tuple) else (result, None)
    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    if gradients is not None and "dout" in arrays:
        keywords |= optional_backward(arrays)
        results |= zip(_always_given(arrays), gradients(arrays["dout"], *inputs, **keywords), strict=True)
    for name, x in results.items():
        dtype = case.problem.softmax_dtype if name in ("lse", "dsinks") else case.dtype
        if to_numpy(x).dtype != numpy_dtype(dtype):
            raise AssertionError(f"{name} has dtype {to_numpy(x).dtype}, expected {dtype}\n{case}")
    for name, before in case.arrays().items():
        if not np.array_equal(to_numpy(arrays[name]).astype(before.dtype), before, equal_nan=before.dtype.kind != "b"):
            raise AssertionError(f"{name} was written to\n{case}")
    return _judge(case, results)
