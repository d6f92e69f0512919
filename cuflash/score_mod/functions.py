"""The functions that scores and masks are made of. They take traced values, numbers and NumPy arrays alike."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np

from cuflash.score_mod.tracing import Symbol, operation

LARGEST_FLOOR = 2.0**31  # results of floor stay within 32 bits


def _apply(op: str, function: Any, *args: Any) -> Any:
    return operation(op, *args) if builtins.any(isinstance(x, Symbol) for x in args) else function(*args)


def exp(x: Any) -> Any:
    """The exponential function."""
    return _apply("exp", np.exp, x)


def log(x: Any) -> Any:
    """The natural logarithm."""
    return _apply("log", np.log, x)


def sqrt(x: Any) -> Any:
    """The square root; its derivative at 0 is infinite, but that of ``sqrt(x * x)`` is 0."""
    return _apply("sqrt", np.sqrt, x)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return _apply("tanh", np.tanh, x)


def sin(x: Any) -> Any:
    """The sine."""
    return _apply("sin", np.sin, x)


def cos(x: Any) -> Any:
    """The cosine."""
    return _apply("cos", np.cos, x)


def abs(x: Any) -> Any:
    """The absolute value; its derivative at 0 is 0."""
    return _apply("abs", np.abs, x)


def minimum(x: Any, y: Any) -> Any:
    """The smaller number; where both are equal the derivative is that of `x`."""
    return _apply("min", np.minimum, x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger number; where both are equal the derivative is that of `x`."""
    return _apply("max", np.maximum, x, y)


def clip(x: Any, low: Any, high: Any) -> Any:
    """The number in [low, high] nearest to `x`; at the bounds the derivative is that of `x`."""
    return minimum(maximum(x, low), high)


def floor(x: Any) -> Any:
    """The largest integer that is not above `x`, as an integer, so that it can be an index; the derivative is 0.

    An integer has 32 bits, and is 0 for a NaN. Combined with a real number it is that of NumPy's floor.
    """
    return _apply("floor", floor_of, x)


def where(condition: Any, x: Any, y: Any) -> Any:
    """`x` where the condition holds, else `y`; the other one has no part in derivatives, even if NaN or infinite."""
    return _apply("where", np.where, condition, x, y)


def floor_of(x: Any) -> Any:
    """`floor` of numbers and NumPy arrays; NaN becomes 0."""
    x = np.asarray(x)
    if x.dtype.kind in "bi":
        return x.astype(np.int64)[()]
    kept = np.clip(np.where(np.isnan(x), x.dtype.type(0), x), -LARGEST_FLOOR, LARGEST_FLOOR)
    return np.minimum(np.floor(kept).astype(np.int64), int(LARGEST_FLOOR) - 1)[()]
