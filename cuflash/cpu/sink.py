"""The sink of each query head, where there are any: what it adds to sums of weights, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

GRADIENT = "dsinks"


class Sink:
    """The score of one more key, whose value is zero, for all rows of a query head; false where no head has one."""

    def __init__(self, arrays: Mapping[str, Array | None]) -> None:
        self._scores: Any = arrays.get("sinks")

    def __bool__(self) -> bool:
        return self._scores is not None

    def is_small(self, limit: float) -> bool:
        """Whether no score of a sink is farther from 0 than a limit, which is an exponent of 2."""
        return self._scores is None or bool(np.all(np.abs(self._scores) * math.log2(math.e) <= limit))

    def begin(self, head: int, m: Array, sums: Array) -> None:
        """Put the maximum and the sum of weights of rows that have seen the sink alone into m and `sums`."""
        m[:], sums[:] = self._scores[head], self._scores[head] != -np.inf

    def raise_maxima(self, heads: slice, unit: float, m: Array) -> None:
        """Raise the maxima (..., heads, rows) of scores times `unit` to the sinks."""
        np.maximum(m, (self._scores[heads] * unit)[:, None], out=m)

    def add_weights(self, heads: slice, unit: float, m: Array, sums: Array) -> None:
        """Add the weights of the sinks to `sums`, after `raise_maxima` has raised m."""
        sums += np.exp(((self._scores[heads] * unit)[:, None] - m) / unit)

    def join(self, heads: Array, unit: float, shift: Array, total: Array) -> Array:
        """Add the weights of the sinks to the last row of `total`, (heads, blocks, rows, queries).

        `shift` was added to scores times `unit`. The maximum m moves up to the sink first, which rescales `total`.
        Returns the new shift.
        """
        sink = self._scores[heads].astype(total.dtype)[:, None, None]
        old = np.where(total[:, :, -1] == 0, -np.inf, -shift / unit)
        m = np.maximum(old, sink)
        m[m == -np.inf] = 0
        total *= np.exp(old - m)[:, :, None]
        total[:, :, -1] += np.exp(sink - m)
        return -m * unit

    def gradient(self, heads: Any, lse: Array, delta: Array) -> Any:
        """The sum of ``-exp(sink - lse) * delta`` over the rows of a head, or of a range of heads."""
        return -(np.exp(self._scores[heads, None] - lse) * delta).sum(axis=-1, where=lse != -math.inf)
