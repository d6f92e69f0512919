"""The oracle rule: how far from the oracle a result may be, and results judged by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from cuflash.arrays.array_info import numpy_dtype
from cuflash.spec.outputs import (
    DEFAULT_NEED,
    FORWARD_ROWS,
    GRADIENTS,
    INPUT_OF_GRADIENT,
    OUTPUTS,
    OVER_HEAD_DIM,
    OVER_ROWS,
    ROW_REDUCTION_ROWS,
    SOFTMAX_GRADIENTS,
)
from cuflash.spec.problem import Problem
from cuflash.testing import reference
from cuflash.testing.arrays import to_numpy
from cuflash.testing.batch_axes import Spread
from cuflash.testing.case import Case, optional, optional_backward
from cuflash.testing.scales import Squares, scales_of, ulp

Array = NDArray[Any]

FLUSHED = 2.0**-125  # at most what an addition to memory loses: of its two terms, or of the sum, what is subnormal
FEWEST_KEYS = 16  # of a tile
RESULTS = tuple(row.name for row in FORWARD_ROWS)
MOST_READS = 8  # of a pair


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What one result should be, and how far from it an implementation may be, entry by entry.

    ``tolerance = factor * plain_error + ulp * scale + noise``, where

    factor
        1 for float32; 2 for the others.
    plain_error
        Largest error of the plain formula computed in the dtype of the inputs (`cuflash.testing.reference` in that
        dtype). A largest error is random, the more so if it is one of few numbers. So it is not that of the entry: it
        is that of the whole result, counted in what each entry allows by itself
        (`cuflash.testing.reference.error_fractions`).
    ulp * scale
        One unit in the last place of the scale. Scale is the largest absolute value of the entry, or of the root of the
        sum of squares of the terms that it is a sum of: what cancellation leaves of a gradient is no scale. So it is of
        out within D = rowsum(dout o out), which is a term of gradients of scores, and of q k^T as a factor of dscale.
        Of the columns of a row of out, dq, dk or dv it is the largest. D is rounded once for a row: its errors add up
        in dq, and in dbias of a bias without an axis of keys.
        For results of rows it is at least 1. The unit is that of the dtype of the result; of gradients, which are
        made of out as it was rounded, that of the inputs; what is subnormal there counts as the smallest normal number,
        since its unit is that of this number, in results as in the weights and gradients of scores that are rounded on
        the way. A weight counts as at least ``SMALLEST_WEIGHT`` over a unit in the last place: implementations may take
        smaller weights for zero, in out and in what is made of out, to stay clear of subnormal numbers. (In float64 it
        counts as at least ``SMALLEST_SQUARED``, since what adds up are squares.) The slope
        ``1 - tanh(x)**2`` of a soft cap counts as at least ``2 * softmax_ulp`` over such a unit: it is a difference
        from 1, with no digits beyond that. So does the derivative by the cap, in units of x.
    noise
        What the order of summation, not quality, decides about a weight ``exp(S - lse)``: one unit in the last place of
        the exponential, one of lse or of the scores that the row is made of, whichever are larger, and one of the
        terms of the scores: ``scale * abs(q) @ abs(k)`` (in units of a soft cap below 1) and slopes times distances.
        Tensor cores cut off sums of products of half precision every 16 columns: above head dimensions of 256 the sum
        of the sizes of these sums counts where it is larger. lse of half precision has a unit of the difference of the
        row's scores, too, of at most log(2^32) (log(2^14) for float16), by which a lazy maximum may lag.
        A row has one lse: what its rounding changes in P * dlse adds up in dbias of a bias without an axis of keys.
        Noise of an entry is the root of the sum of squares of what that changes in its terms. No weight changes by more
        than 1, and no mean by more than its values differ. Where all scores that a row attends to are equal, rounding
        moves them alike, so that lse counts as at most ``LARGE_LSE``. Row reductions have a unit of themselves
        and what `cuflash.testing.scales.Noise` says. The gradient of a maximum has no weight as a factor: its products
        with keys and queries of float32 have the ``LOST_IN_PRODUCTS`` units that tensor cores lose.
        A largest error is random, and this keeps the rule from being so. It is next to nothing for ordinary rows of
        half precision, whose softmax runs in float32.

    To dq of float32 and bfloat16 comes ``2**-125 * scale`` for each 16 keys: where GPUs add partial dq to memory, in
    tiles of no fewer keys, subnormal numbers become zeros.

    To gradients of arrays that a score reads come the units of their sums in fixed point on GPUs, half of one for a
    term, by the root of the number of pairs (docs/score.md). Those of float64 have a second word.

    So one row says nothing of others: not by its lse, not by its size. Entries of out, lse and dq are what their row
    makes them, those of dk and dv what the rows that attend to the key do.

    ``strict_tolerance`` has no noise. It is for the largest error of a result, which should not be above it on the
    average of several seeds: ``factor`` times the largest error of the plain formula, and one unit in the last place of
    the largest scale.

    ``summed`` is of dv: its sums over the keys. They are sums of dout times what the weights of a row sum to, which is
    1 (less what a sink has and dropout drops), however large lse is and whatever rounding makes of single weights.

    Attributes
    ----------
    name : str
        The result.
    expected : numpy.ndarray
        float64, or long double for float64: what the oracle gives.
    zero : numpy.ndarray
        bool: where the result is exactly zero, in rows that attend to no key and keys that no row attends to.
    plain_error, scale, tolerance : numpy.ndarray
        As above, entry by entry.
    strict_tolerance : float
        As above.
    summed : Summed, optional
        As above.

    See Also
    --------
    yardsticks : Those of all results of a problem.
    measure : Compares a result with one.
    Measurement
    """

    name: str
    expected: Array  # float64, or longdouble for float64
    zero: Array  # where the result is exactly zero: rows that attend to no key, and keys that no row attends to
    plain_error: Array
    scale: Array
    tolerance: Array
    strict_tolerance: float
    summed: Summed | None = None

    def looser(self, factor: float) -> Yardstick:
        """The yardstick of a result that may be so many times as far from what it should be.

        Parameters
        ----------
        factor : float
            1 or more.

        Returns
        -------
        Yardstick
            With tolerances of factor times those of this one.

        See Also
        --------
        measure
        """
        summed = self.summed and replace(self.summed, of=self.summed.of.looser(factor))
        return replace(self, tolerance=factor * self.tolerance, summed=summed)


@dataclass(frozen=True, kw_only=True)
class Summed:
    """The yardstick of the sums of a result along an axis."""

    axis: int
    of: Yardstick


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How far one result was from the oracle, in the words of `Yardstick`, where it came closest to its tolerance.

    Attributes
    ----------
    name : str
        The result.
    at : tuple of int
        The entry that came closest to its tolerance.
    error, plain_error, tolerance : float
        Of this entry.
    ratio : float
        error / tolerance: at most 1 if the result passes.
    strict_tolerance : float
        As of `Yardstick`.
    strict_ratio : float
        The largest error over strict_tolerance: not above 1 on the average of several seeds.
    failure : str, optional
        What is wrong, if something is.

    See Also
    --------
    measure : Makes it.
    Report
    """

    name: str
    at: tuple[int, ...] = ()
    error: float
    plain_error: float
    tolerance: float
    ratio: float  # of error to tolerance
    strict_tolerance: float
    strict_ratio: float  # of the largest error to it: should not be above 1 on the average of several seeds
    failure: str | None = None

    def __str__(self) -> str:
        numbers = f"error {self.error:.3g}, plain formula {self.plain_error:.3g}, allowed {self.tolerance:.3g}"
        return f"{self.name:<4} {numbers}" + (f"  FAILED at {self.at}: {self.failure}" if self.failure else "")


class Report(tuple[Measurement, ...]):
    """Measurements of the results of one case.

    See Also
    --------
    check, assert_forward, assert_backward : Return it.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    @property
    def passed(self) -> bool:
        """Whether no measurement failed."""
        return not any(m.failure for m in self)


def measure(name: str, got: Any, yardstick: Yardstick) -> Measurement:
    """Compare one result, of any library, with what it should be.

    NaN and infinities must be where the oracle has them, and zeros where `Yardstick.zero` says. Where a number may be
    beyond the largest one of its dtype on either side, it may be infinite there.

    Parameters
    ----------
    name : str
        The result, for messages.
    got : array
        The result, of any library with ``__dlpack__``.
    yardstick : Yardstick
        What it should be.

    Returns
    -------
    Measurement
        With a `failure` where it is not within its tolerance.

    See Also
    --------
    check
    Yardstick
    """
    values, expected = to_numpy(got), yardstick.expected
    if values.shape != expected.shape:
        failure = f"got shape {values.shape}, expected {expected.shape}"
        nothing: dict[str, Any] = dict.fromkeys((field.name for field in fields(Measurement)), math.nan)
        return Measurement(**nothing | {"name": name, "at": (), "failure": failure})
    largest = float(ml_dtypes.finfo(values.dtype).max)
    values = values.astype(expected.dtype)
    with np.errstate(invalid="ignore"):
        overflows = np.isinf(values) & (np.sign(values) * expected + yardstick.tolerance >= largest)
    values = np.where(overflows, expected, values)
    measurement = _compare(name, values, yardstick)
    if measurement.failure is None and np.any(values[yardstick.zero]):
        failure = "a row that attends to no key, or a key that no row attends to, is not exactly zero"
        measurement = replace(measurement, failure=failure)
    if measurement.failure is None and yardstick.summed is not None:
        with np.errstate(all="ignore"):
            sums = values.sum(axis=yardstick.summed.axis, keepdims=True)
        of_sums = _compare(f"{name} summed over keys", sums, yardstick.summed.of)
        measurement = of_sums if of_sums.failure else measurement
    return measurement


def _compare(name: str, values: Array, yardstick: Yardstick) -> Measurement:
    expected, ordinary = yardstick.expected, np.isfinite(yardstick.expected)
    with np.errstate(all="ignore"):
        errors = np.where(ordinary, np.abs(values - expected), 0)
        ratios = np.where(errors == 0, 0, errors / yardstick.tolerance)
    at = tuple(int(i) for i in np.unravel_index(np.argmax(ratios), ratios.shape)) if ratios.size else ()
    here = {"error": errors, "ratio": ratios, "plain_error": yardstick.plain_error, "tolerance": yardstick.tolerance}
    numbers: dict[str, Any] = {
        of: float(np.broadcast_to(x, errors.shape)[at]) if errors.size else 0.0 for of, x in here.items()
    }
    failure = None
    if not np.array_equal(values[~ordinary], expected[~ordinary], equal_nan=True):
        failure = "NaN or infinities are not where they should be"
    elif not numbers["ratio"] <= 1:  # NaN too
        failure = f"got {values[at]:.9g}, expected {expected[at]:.9g}"
    largest = float(errors.max(initial=0))
    strict = yardstick.strict_tolerance
    strict_ratio = largest / strict if largest else 0.0
    return Measurement(name=name, at=at, strict_tolerance=strict, strict_ratio=strict_ratio, failure=failure, **numbers)


def yardsticks(problem: Problem, arrays: Mapping[str, Array], **random: Any) -> dict[str, Yardstick]:
    """The yardsticks of out and lse, and of all gradients if `dout` is among the NumPy `arrays`.

    With dropout, `random` is the `seed` and the `offset`.

    Parameters
    ----------
    problem : cuflash.spec.problem.Problem
        Of the arrays.
    arrays : dict of str to numpy.ndarray
        q, k, v, and by their names dout, dlse and the optional inputs.
    **random : int
        With dropout `seed` and `offset`.

    Returns
    -------
    dict of str to Yardstick
        By the names of the results.

    See Also
    --------
    measure
    Yardstick
    """
    return _yardsticks(problem, arrays, random, None)


@np.errstate(all="ignore")
def _yardsticks(
    problem: Problem, arrays: Mapping[str, Array], random: Mapping[str, Any], spread: Spread | None
) -> dict[str, Yardstick]:
    """Where problem and arrays are those of a `spread`, the yardsticks are of results for its natural arrays."""
    dtype = arrays["q"].dtype
    exact = _compute(problem, arrays, np.longdouble if problem.dtype == "float64" else np.float64, random)
    plain_formula = _compute(problem, arrays, dtype, random)
    scales = scales_of(problem, arrays, exact, random)
    squares_of_dv_sums = scales.dv_sums and _at_first_key(problem, scales.dv_sums)

    def folded(name: str, x: Array) -> Array:
        return x if spread is None else spread.fold(name, x)

    found = {}
    for name in exact:
        expected, plain = folded(name, exact[name]), folded(name, plain_formula[name])
        plain = plain if spread is None else spread.rounded(name, plain)
        squares = Squares(*(folded(name, total) for total in vars(scales.squares[name]).values()))
        zero = folded(name, (~scales.zeros[name]).astype(np.int64)) == 0
        found[name], fractions = _yardstick(problem, dtype, name, expected, plain, squares, zero)
        if name == "dv" and squares_of_dv_sums is not None:
            axis = -3 if problem.layout == "bshd" and expected.ndim > 2 else -2
            terms, noise = (folded(name, x).sum(axis=axis, keepdims=True) for x in vars(squares_of_dv_sums).values())
            terms = terms + (found[name].scale ** 2).sum(axis=axis, keepdims=True)  # each of them is rounded
            exact_sums, plain_sums = (x.sum(axis=axis, keepdims=True, dtype=expected.dtype) for x in (expected, plain))
            squares, zero = Squares(terms, noise), np.zeros(exact_sums.shape, bool)
            of_sums, _ = _yardstick(problem, dtype, name, exact_sums, plain_sums, squares, zero, at_least=fractions)
            found[name] = replace(found[name], summed=Summed(axis=axis, of=of_sums))
    return found


def _yardstick(
    problem: Problem,
    dtype: np.dtype[Any],
    name: str,
    expected: Array,
    plain: Array,
    squares: Squares,
    zero: Array,
    *,
    at_least: tuple[float, float] = (0.0, 0.0),
) -> tuple[Yardstick, tuple[float, float]]:
    """The yardstick of one result, and the largest errors of the plain formula as fractions of units and of noise.

    Errors of the plain formula count as `at_least` the fractions given: those of the entries of a sum, since the plain
    formula divides weights by their sum, so that its sums have few.
    """
    scale, noise = _scale_and_noise(name, dtype, expected, squares)
    extra = of_fixed_point(problem, name[1:], scale)
    if name == "dq" and problem.dtype in ("float32", "bfloat16"):
        extra += FLUSHED * abs(problem.scale) * -(-problem.seqlen_k // FEWEST_KEYS)
    unit = ulp(problem.softmax_dtype if name in OVER_ROWS else dtype)
    factor = factor_of(problem)
    return yardstick_of(name, expected, plain, zero, factor, unit, scale, noise, extra=extra, at_least=at_least)


def factor_of(problem: Problem) -> int:
    """The factor by which errors of the plain formula count."""
    return 1 if problem.dtype == "float32" else 2


def yardstick_of(
    name: str,
    expected: Array,
    plain: Array,
    zero: Array,
    factor: int,
    unit: float,
    scale: Array,
    noise: Array,
    *,
    extra: float,
    at_least: tuple[float, float] = (0.0, 0.0),
) -> tuple[Yardstick, tuple[float, float]]:
    """``tolerance = factor * plain_error + unit * scale + noise + extra``, where `plain` is off by plain_error.

    The second result has the largest errors of `plain` as fractions of units and of noise, which are those given
    `at_least`.
    """
    with np.errstate(invalid="ignore"):  # -inf in both
        errors = np.abs(plain.astype(expected.dtype) - expected)
    errors = np.where(np.isfinite(errors), errors, 0)
    units = np.broadcast_to(unit * scale, errors.shape)
    fractions = reference.error_fractions(errors, units, noise)
    of_units, of_noise = fractions = (max(fractions[0], at_least[0]), max(fractions[1], at_least[1]))
    plain_error = of_units * units + of_noise * noise
    yardstick = Yardstick(
        name=name,
        expected=expected,
        zero=zero,
        plain_error=plain_error,
        scale=scale,
        strict_tolerance=float(factor * errors.max(initial=0) + units.max(initial=0)),
        tolerance=factor * plain_error + units + noise + extra,
    )
    return yardstick, fractions


def _scale_and_noise(name: str, dtype: np.dtype[Any], expected: Array, squares: Squares) -> tuple[Array, Array]:
    """What `Yardstick` calls scale and noise, of the sums of squares that add up in each entry."""
    terms, noise = (np.sqrt(x).astype(np.float64) for x in (squares.terms, squares.noise))
    scale = np.maximum(terms, _largest(name, expected))
    if name not in RESULTS:  # equal rows are rounded alike: then what adds up is no random walk
        # There is noise without terms: the logarithm of the one weight of a row, in the gradient of its entropy.
        noise = noise * np.where(terms > 0, scale / np.where(terms > 0, terms, 1), 1)
    least = 1.0 if name in OVER_ROWS else float(ml_dtypes.finfo(dtype).smallest_normal)
    return np.maximum(scale, least), noise


def of_fixed_point(problem: Problem, name: str, scale: Array) -> float:
    """What rounding to the units of its sums makes of the gradient of an array that a score reads; 0 of any other."""
    if name not in dict(problem.score_args) or problem.dtype == "float64":
        return 0.0
    lengths = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    units_of_sums = MOST_READS * math.prod(2.0 ** math.ceil(math.log2(max(1, n))) for n in lengths) * 2.0**-61
    return units_of_sums / 2 * math.sqrt(math.prod(lengths)) * float(scale.max(initial=0))


def _largest(name: str, x: Array) -> Array:
    """Absolute values; of a row of head_dim columns the largest."""
    x = np.where(np.isfinite(x), np.abs(x), 0)
    return x.max(axis=-1, keepdims=True, initial=0) if name in OVER_HEAD_DIM else x


def _at_first_key(problem: Problem, sums: Squares) -> Squares:
    """Sums over keys as a result of the shape of dv, in which the first key has all of them."""

    def of_shape(x: Array) -> Array:
        whole = np.zeros((*x.shape[:2], problem.seqlen_k, x.shape[3]))
        whole[:, :, :1] = x.max(axis=-1, keepdims=True, initial=0)[:, :, : problem.seqlen_k]
        return reference.as_caller(problem, whole)

    return Squares(*(of_shape(x) for x in vars(sums).values()))


def _compute(
    problem: Problem, arrays: Mapping[str, Array], dtype: DTypeLike, random: Mapping[str, Any]
) -> dict[str, Array]:
    """Results of the plain formula by name."""
    inputs = (arrays["q"], arrays["k"], arrays["v"])
    keywords = {**_read(problem, arrays), **random}
    want = tuple(row.name for row in ROW_REDUCTION_ROWS if not row.upstream or row.gradient in arrays)
    found = reference.forward(problem, *inputs, dtype=dtype, want=want, **keywords)
    results = dict(zip((*OUTPUTS, *want), found, strict=True))
    if "dout" in arrays:
        keywords |= optional_backward(arrays)
        need = gradients_of(problem)
        gradients = reference.backward(problem, arrays["dout"], *inputs, need=need, dtype=dtype, **keywords)
        results |= zip(need, gradients, strict=True)
    return results


def _read(problem: Problem, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """The terms, and what functions read."""
    return {**optional(arrays), **{name: arrays[name] for name, _ in problem.score_args}}


def gradients_of(problem: Problem) -> tuple[str, ...]:
    """All gradients that a problem has, those of what its score reads last.

    Parameters
    ----------
    problem : cuflash.spec.problem.Problem
        Of a `Case`, its attribute `problem`.

    Returns
    -------
    tuple of str
        "dq", "dk", "dv", and those of the options that it has.

    See Also
    --------
    yardsticks
    reference.backward : Takes them as `need`.
    """
    own = (
        name
        for name in GRADIENTS
        if name not in INPUT_OF_GRADIENT or getattr(problem, INPUT_OF_GRADIENT[name]) is not None
    )
    return (*own, *problem.score_arg_gradients)


@lru_cache(maxsize=8)
def yardsticks_of(case: Case) -> dict[str, Yardstick]:
    """Those of the results of a case."""
    spread = case.spread
    arrays = case.arrays() if spread is None else spread.arrays
    return _yardsticks(case.problem, arrays, case.random, spread)


def _judge(case: Case, results: Mapping[str, Any]) -> Report:
    judges = yardsticks_of(case)
    report = Report(measure(name, x, judges[name]) for name, x in results.items())
    if not report.passed:
        raise AssertionError(f"outside the oracle rule\n{report}\n{case}")
    return report


def assert_forward(case: Case, out: Any, lse: Any = None, **reductions: Any) -> Report:
    """Judge the output of an implementation, of any array library, and its lse if it has one.

    Returns the measurements, or raises AssertionError that shows them.

    Parameters
    ----------
    case : Case
        The problem.
    out : array
        What the implementation gave, of any library with ``__dlpack__``: shape and dtype of `FlashAttention.forward`.
    lse : array, optional
        The same.
    **reductions : array
        Those of the `row_reductions` of the case, by their names.

    Returns
    -------
    Report
        The measurements of out and lse, and of the reductions.

    Raises
    ------
    AssertionError
        A result is outside the oracle rule; the message holds the measurements and the case.

    See Also
    --------
    assert_backward
    check : Calls the implementation, too.
    """
    return _judge(case, ({"out": out} if lse is None else {"out": out, "lse": lse}) | reductions)


def assert_backward(
    case: Case, dq: Any = None, dk: Any = None, dv: Any = None, dsinks: Any = None, **others: Any
) -> Report:
    """Judge gradients of ``sum(dout * out)``, those given, as `assert_forward` judges the output; dlse counts.

    Those besides the four have the names of `cuflash.spec.outputs.GRADIENTS`.

    Parameters
    ----------
    case : Case
        The problem.
    dq, dk, dv, dsinks : array, optional
        What the implementation gave, of any library with ``__dlpack__``.
    **others : array
        Other gradients by their names: dbias, dalibi_slopes, dscale, dsoftcap.

    Returns
    -------
    Report
        The measurements of the gradients that were given.

    Raises
    ------
    AssertionError
        A result is outside the oracle rule; the message holds the measurements and the case.
    TypeError
        A name that no gradient has.

    See Also
    --------
    assert_forward
    check : Calls the implementation, too.
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

    See Also
    --------
    cases : Draws cases, for hypothesis.
    assert_forward, assert_backward : Judge results that are there.
    check_gradients : Needs no oracle.

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
        need = (*DEFAULT_NEED, *(name for name in SOFTMAX_GRADIENTS if INPUT_OF_GRADIENT[name] in arrays))
        results |= zip(need, gradients(arrays["dout"], *inputs, **keywords), strict=True)
    for name, x in results.items():
        dtype = case.problem.softmax_dtype if name in ("lse", "dsinks") else case.dtype
        if to_numpy(x).dtype != numpy_dtype(dtype):
            raise AssertionError(f"{name} has dtype {to_numpy(x).dtype}, expected {dtype}\n{case}")
    for name, before in case.arrays().items():
        if not np.array_equal(to_numpy(arrays[name]).astype(before.dtype), before, equal_nan=before.dtype.kind != "b"):
            raise AssertionError(f"{name} was written to\n{case}")
    return _judge(case, results)
