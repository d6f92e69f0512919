"""The soft cap, where there is one: it turns scaled products of q and k into scores. Gradients need its derivatives."""

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
    """A bound that no score exceeds, whatever the products are."""
    return math.inf if problem.softcap is None else problem.softcap


def factor_of(problem: Problem, scale: float, unit: float) -> float:
    """The factor that turns products into arguments of the tanh or, without a cap, into scores times `unit`."""
    return scale * unit if problem.softcap is None else scale / problem.softcap


def apply_cap(problem: Problem, x: Array, unit: float, tanh: Array | None = None) -> None:
    """With a cap, replace arguments of the tanh by scores times `unit`; `tanh`, if given, gets the tanh."""
    if problem.softcap is not None:
        tanh = np.tanh(x, out=x if tanh is None else tanh)
        np.multiply(tanh, problem.softcap * unit, out=x)


def slope_of(tanh: Array) -> Array:
    """The derivative of a score by the scaled product, given the tanh."""
    slope = tanh * tanh
    return np.subtract(1, slope, out=slope)


def derivative_by_softcap(x: Array, tanh: Array) -> Array:
    """The derivative of ``softcap * tanh(x)``, x = score / softcap: ``tanh(x) - x * (1 - tanh(x) ** 2)``.

    The terms cancel near 0. There it is ``(sinh(2 x) - 2 x) / 2 * (1 - tanh(x) ** 2)``, by the series of the first
    factor.
    """
    slope, near = 1 - tanh * tanh, np.abs(x) < 0.5
    x2 = np.where(near, x * x, 0)
    series = np.ones_like(x)
    for n in range(18, 3, -2):
        series = 1 + 4 / (n * (n + 1)) * x2 * series
    return np.where(near, 2 / 3 * x * x2 * series * slope, tanh - x * slope)
