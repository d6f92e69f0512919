"""Exponentials of scores, as NumPy computes them fastest on this machine."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.lib.introspect import opt_func_info
from numpy.typing import NDArray

Array = NDArray[Any]

# Products of such weights with V are normal numbers too.
LOWEST_WEIGHT: dict[np.dtype[Any], float] = {np.dtype(np.float32): 2.0**-100, np.dtype(np.float64): 2.0**-960}
LOGARITHM = {dtype: math.log(weight) for dtype, weight in LOWEST_WEIGHT.items()}


def _exp2_is_fast() -> bool:
    """Whether NumPy computes exp2 of float32 by vector instructions here, and not one by one."""
    loops = opt_func_info(func_name="^exp2$").get("exp2", {})
    return any(not loop["current"].startswith("baseline") for types, loop in loops.items() if types.startswith("f"))


# exp(x) is EXPONENTIAL(UNIT * x)
EXPONENTIAL: np.ufunc = np.exp2 if _exp2_is_fast() else np.exp
UNIT = math.log2(math.e) if EXPONENTIAL is np.exp2 else 1.0


def exponential(scores: Array, unit: float, *, small: bool) -> None:
    """Exponentials of scores that have been multiplied by `unit`, in place.

    They are zero where they would be less than LOWEST_WEIGHT. With `small`, the caller knows that none would be.
    """
    if unit != UNIT:
        scores *= UNIT / unit
    if small:
        EXPONENTIAL(scores, out=scores)
        return
    lowest = LOGARITHM[scores.dtype] * UNIT
    scores.clip(lowest, math.inf, out=scores)  # three times as fast as np.maximum with a number
    EXPONENTIAL(scores, out=scores)
    np.subtract(scores, _one_exponential(EXPONENTIAL, lowest, scores.dtype), scores)


@cache
def _one_exponential(function: np.ufunc, x: float, dtype: np.dtype[Any]) -> Any:
    """The exponential of x, computed with many others, since NumPy may compute and round a single number differently.

    It is returned as an array, which NumPy subtracts from others in less time than it takes to convert a number.
    """
    return np.array(function(np.full(64, x, dtype))[0])
