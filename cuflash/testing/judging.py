"""What an implementation made of a case, judged by the oracle rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.operands import numpy_dtype
from cuflash.problem import Problem
from cuflash.terms import DEFAULT_NEED
from cuflash.testing.arrays import to_numpy
from cuflash.testing.case import Case, optional, optional_backward
from cuflash.testing.rule import Report, Yardstick, measure, yardsticks

Array = NDArray[Any]


@lru_cache(maxsize=8)
def yardsticks_of(case: Case) -> dict[str, Yardstick]:
    return yardsticks(case.problem, case.arrays(), **case.random)


def _always_given(arrays: Mapping[str, Any]) -> tuple[str, ...]:
    return (*DEFAULT_NEED, "dsinks") if "sinks" in arrays else DEFAULT_NEED


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
    case: Case,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsinks: Any = None,
    *,
    dbias: Any = None,
    dalibi_slopes: Any = None,
    dscale: Any = None,
    dsoftcap: Any = None,
) -> Report:
    """Judge gradients of ``sum(dout * out)``, those given, as `assert_forward` judges the output; dlse counts."""
    gradients = {"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dalibi_slopes": dalibi_slopes, "dscale": dscale}
    gradients |= {"dsoftcap": dsoftcap, "dsinks": dsinks}
    return _judge(case, {name: x for name, x in gradients.items() if x is not None})


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
        the case needs, by those names: causal, scale, window, softcap, layout, block_size, and those of the terms. With
        dropout, also that, seed and offset, which drop what `cuflash.dropout_mask` says. An implementation without
        options is checked on cases without `features`. Returns out, or a tuple (out, lse), as arrays of any library
        that speaks DLPack.
    case : Case or Problem
        A problem stands for a case of its sizes and options on random arrays.
    gradients : callable, optional
        Called as ``gradients(dout, q, k, v, **options)``, with dlse among the options if the case has it, unless it
        has pages; returns (dq, dk, dv), and dsinks as a fourth if the case has sinks.
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
