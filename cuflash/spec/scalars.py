"""Scalars of Python and NumPy that stand for arrays without axes, and the dtypes that these arrays get.

NumPy makes a scalar of every sum and product of arrays without axes. So the second step that trains a parameter of a
score has a scalar where the first had an array.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.arrays.array_info import FLOAT8, numpy_dtype, softmax_dtype_of
from cuflash.arrays.checks import typed, value_error
from cuflash.spec.inputs import BY_NAME, NUMBERS
from cuflash.spec.score_args import score_arg_dtypes


def is_scalar(value: object) -> bool:
    """Whether a value is a number or a bool, of Python or NumPy."""
    return isinstance(value, (bool, int, float, np.generic))


def array_of(name: str, scalar: Any, q_dtype: str) -> NDArray[Any]:
    """The array without axes that a scalar stands for as the argument `name`, with q of a dtype.

    A NumPy scalar keeps its dtype if the argument may have it, and else gets one that holds all values of its own.
    Those of Python have no dtype: a float gets that of the softmax, an int int64 or, if the argument is no integer,
    that of the softmax. ``numpy.float64`` is a float of Python, and counts as one with float32.

    Raises ValueError for a number that is too large for its dtype. A dtype that the argument may not have is left as it
    is: what checks those of arrays refuses it.
    """
    dtype = "bfloat16" if q_dtype in FLOAT8 else q_dtype
    allowed = _dtypes_of(name, dtype)
    own = np.asarray(scalar)
    is_of_python = type(scalar) in (int, float) or (isinstance(scalar, float) and own.dtype.name not in allowed)
    if not is_of_python:
        return own.astype(_holding(own.dtype, allowed))
    wanted = [x for x in (softmax_dtype_of(dtype), "float32") if x in allowed]
    if type(scalar) is int and ("int64" in allowed or not wanted):
        wanted = ["int64"]
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(scalar, wanted[0] if wanted else None)
        is_held = math.isfinite(array) or not math.isfinite(scalar)
    except OverflowError:  # of integers
        is_held = False
    if not is_held:
        raise value_error(name, typed(scalar), f"a number that {wanted[0]} holds")
    return array


def _dtypes_of(name: str, dtype: str) -> tuple[str, ...]:
    """The dtypes that an argument may have next to q of a dtype: a tangent those of its array or number."""
    for model in (name, name.removeprefix("t")):
        if model in BY_NAME:
            return BY_NAME[model].dtypes_with(dtype)
        if model in NUMBERS:
            return (softmax_dtype_of(dtype),)
    return score_arg_dtypes(dtype)


def _holding(dtype: np.dtype[Any], allowed: tuple[str, ...]) -> np.dtype[Any]:
    """The dtype itself if it is allowed, or else the first one that is and holds all its values; itself if none does.

    Integers become integers if they may, and a bool nothing else.
    """
    holding = [
        numpy_dtype(name) for name in allowed if dtype.kind != "b" and np.can_cast(dtype, numpy_dtype(name), "safe")
    ]
    if dtype.name in allowed or not holding:
        return dtype
    return next((x for x in holding if x.kind == "i" and dtype.kind in "iu"), holding[0])
