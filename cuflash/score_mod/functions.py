"""The functions that scores and masks are made of. They take traced values, numbers and NumPy arrays."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import numpy as np

from cuflash.score_mod.tracing import Symbol, operation

LARGEST_FLOOR = 2.0**31  # results of floor stay within 32 bits


def _apply(op: str, function: Any, *args: Any) -> Any:
    return operation(op, *args) if builtins.any(isinstance(x, Symbol) for x in args) else function(*args)


_UNARY_DOC = """{summary}

Parameters
----------
x : traced value, number or numpy.ndarray
    {x}

Returns
-------
traced value, number or numpy.ndarray
    {returns}

Raises
------
TypeError
    `x` is neither a traced value, nor a number, nor an array of numbers.

See Also
--------
{see}
"""


def _unary(
    name: str, summary: str, see: str, *, x: str = "A number.", returns: str = "Of the type and shape of `x`."
) -> Callable[[Any], Any]:
    """The function of this name, as NumPy has it; the other arguments are the parts of its docstring."""
    of_numbers = getattr(np, name)

    def function(x: Any) -> Any:
        return _apply(name, of_numbers, x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = _UNARY_DOC.format(summary=summary, x=x, returns=returns, see=see)
    return function


exp = _unary(
    "exp",
    "The exponential function.",
    "log : Its inverse.\nFlashAttention : The options `score` and `mask`.",
    x="The exponent.",
)
log = _unary(
    "log",
    "The natural logarithm.",
    "exp : Its inverse.\nsqrt",
    x="A number; of a negative one the result is NaN, of 0 it is -inf.",
)
sqrt = _unary(
    "sqrt",
    "The square root; its derivative at 0 is infinite, but that of ``sqrt(x * x)`` is 0.",
    "exp\nlog",
    x="A number; of a negative one the result is NaN.",
)
tanh = _unary(
    "tanh",
    "The hyperbolic tangent.",
    "FlashAttention : The option `softcap`, which is ``c * tanh(s / c)``.\nclip",
    returns="Of the type and shape of `x`, within -1 and 1.",
)
sin = _unary("sin", "The sine.", "cos", x="An angle in radians.")
cos = _unary("cos", "The cosine.", "sin", x="An angle in radians.")
abs = _unary("abs", "The absolute value; its derivative at 0 is 0.", "maximum\nsqrt")


def minimum(x: Any, y: Any) -> Any:
    """The smaller number; where both are equal the derivative is that of `x`.

    Parameters
    ----------
    x, y : traced value, number or numpy.ndarray
        Numbers; NumPy arrays broadcast.

    Returns
    -------
    traced value, number or numpy.ndarray
        NaN where either is NaN.

    Raises
    ------
    TypeError
        A traced value together with something that is neither a traced value nor a number.

    See Also
    --------
    maximum
    clip
    """
    return _apply("min", np.minimum, x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger number; where both are equal the derivative is that of `x`.

    Parameters
    ----------
    x, y : traced value, number or numpy.ndarray
        Numbers; NumPy arrays broadcast.

    Returns
    -------
    traced value, number or numpy.ndarray
        NaN where either is NaN.

    Raises
    ------
    TypeError
        A traced value together with something that is neither a traced value nor a number.

    See Also
    --------
    minimum
    clip
    """
    return _apply("max", np.maximum, x, y)


def clip(x: Any, low: Any, high: Any) -> Any:
    """The number in [low, high] nearest to `x`; at the bounds the derivative is that of `x`.

    Parameters
    ----------
    x : traced value, number or numpy.ndarray
        The number to bound.
    low, high : traced value, number or numpy.ndarray
        The bounds, low <= high; NumPy arrays broadcast.

    Returns
    -------
    traced value, number or numpy.ndarray
        ``minimum(maximum(x, low), high)``.

    Raises
    ------
    TypeError
        A traced value together with something that is neither a traced value nor a number.

    See Also
    --------
    minimum
    maximum
    floor
    """
    return minimum(maximum(x, low), high)


def floor(x: Any) -> Any:
    """The largest integer that is not above `x`, as an integer, so that it can be an index; the derivative is 0.

    An integer has 32 bits, and is 0 for a NaN. Combined with a real number it is that of NumPy's floor.

    Parameters
    ----------
    x : traced value, number or numpy.ndarray
        A number, within the range of 32-bit integers.

    Returns
    -------
    traced value, number or numpy.ndarray
        Integers, with the shape of `x`.

    Raises
    ------
    TypeError
        `x` is neither a traced value, nor a number, nor an array of numbers.

    See Also
    --------
    clip : To keep an index within its array.
    where
    """
    return _apply("floor", floor_of, x)


def where(condition: Any, x: Any, y: Any) -> Any:
    """`x` where the condition holds, else `y`; the other one has no part in derivatives, even if NaN or infinite.

    Parameters
    ----------
    condition : traced value, bool or numpy.ndarray
        A comparison, or comparisons combined by ``&``, ``|`` and ``~``.
    x, y : traced value, number or numpy.ndarray
        The two choices; NumPy arrays broadcast.

    Returns
    -------
    traced value, number or numpy.ndarray
        Of the type of `x` and `y`.

    Raises
    ------
    TypeError
        A traced value together with something that is neither a traced value nor a number.

    See Also
    --------
    minimum
    maximum
    FlashAttention : The option `mask`, which hides pairs instead.
    """
    return _apply("where", np.where, condition, x, y)


def floor_of(x: Any) -> Any:
    """`floor` of numbers and NumPy arrays; NaN becomes 0."""
    x = np.asarray(x)
    if x.dtype.kind in "bi":
        return x.astype(np.int64)[()]
    kept = np.clip(np.where(np.isnan(x), x.dtype.type(0), x), -LARGEST_FLOOR, LARGEST_FLOOR)
    return np.minimum(np.floor(kept).astype(np.int64), int(LARGEST_FLOOR) - 1)[()]
