"""The soft cap, where there is one: scores of scaled products of q and k, and derivatives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.problem import Problem

Array = NDArray[Any]

GRADIENT = "dsoftcap"


def has_cap(problem: Problem) -> bool:
    """Whether a soft cap makes scores of scaled products; otherwise they are the same."""
    return problem.softcap is not None


def largest_score(problem: Problem) -> float:
    """What no score exceeds, whatever the products are."""
    return math.inf if problem.softcap is None else problem.softcap


def factor_of(problem: Problem, scale: float, unit: float) -> float:
    """What products are multiplied by, to be arguments of the tanh or, without a cap, scores times `unit`."""
    return scale * unit if problem.softcap is None else scale / problem.softcap


def apply_cap(problem: Problem, x: Array, unit: float, tanh: Array | None = None) -> None:
    """With a cap, put scores times `unit` in the place of arguments of the tanh; `tanh` gets that."""
    if problem.softcap is not None:
        tanh = np.tanh(x, out=x if tanh is None else tanh)
        np.multiply(tanh, problem.softcap * unit, out=x)


def slope_of(tanh: Array) -> Array:
    """The derivative by the scaled product."""
    slope = tanh * tanh
    return np.subtract(1, slope, out=slope)


def derivative_by_softcap(x: Array, tanh: Array) -> Array:
    """That of ``softcap * tanh(x)``, x = score / softcap: ``tanh(x) - x * (1 - tanh(x) ** 2)``.

    Near 0, where the terms cancel, ``(sinh(2 x) - 2 x) / 2 * (1 - tanh(x) ** 2)`` by the series of the first factor.
    """
    slope, near = 1 - tanh * tanh, np.abs(x) < 0.5
    x2 = np.where(near, x * x, 0)
    series = np.ones_like(x)
    for n in range(18, 3, -2):
        series = 1 + 4 / (n * (n + 1)) * x2 * series
    return np.where(near, 2 / 3 * x * x2 * series * slope, tanh - x * slope)
