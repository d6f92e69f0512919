"""Row max and row sum of rows whose lse is large, for problems whose keys are split.

lse = row max + log(row sum) is rounded: of a row whose scores are all about -1e9, as a finite mask makes them, nothing
is left of the log of the row sum. So where lse is large, the partial results of a problem are weighted by row maxima
and sums, and backward passes of splits make weights by those of all keys.

Such an array has three numbers for each row, on its last axis: the row max, the row sum of exp(score - row max), and
the unit of the row max, because backends keep maxima of products that are not scaled yet, and rounded products would
not cancel. A row sum below 0 says that the row has none, because its lse is not large. A row that attends to no key has
a row max of -inf, and a row sum of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any
NUMBERS = 3  # of a row: row max, row sum, unit
ABSENT, EMPTY = np.array([0.0, -1.0, 1.0]), np.array([-np.inf, 0.0, 1.0])  # no row sum; that of no key
# Of smaller ones, what is rounded off changes weights by 2^-18 at most; the backends have the same bound.
LARGE_LSE = 128.0
LARGE_ON_DEVICE = 1024.0  # where numbers have 16 bits
# How far row sums may be from lse, relative to it, by what rounding a few times makes of it.
ROUNDED_LSE = {"float32": 2.0**-21, "float64": 2.0**-50}


def is_large(lse: Array, bound: float = LARGE_LSE) -> Array:
    """Which rows have an lse that says too little of their row sums."""
    return (abs(lse) >= bound) & (abs(lse) < np.inf)


def has_large(lse: Array, bound: float = LARGE_LSE) -> bool:
    """Whether there is such a row; on a device, this waits for lse."""
    found = is_large(lse, bound).any()
    return bool(found if isinstance(lse, np.ndarray) else found.get())


def bound_of(dtype: Any, *, on_device: bool) -> float:
    """From which |lse| on rows are large, for queries of a dtype."""
    return LARGE_ON_DEVICE if on_device and dtype.itemsize < 4 else LARGE_LSE


def full(shape: tuple[int, ...], numbers: Array) -> Array:
    """An array of the same numbers for each row."""
    return np.broadcast_to(numbers, (*shape, NUMBERS)).copy()


def to_fill(lse: Array, bound: float = LARGE_LSE) -> Array:
    """An array for the row sums of rows whose lse is large; until it is filled, these attend to no key."""
    found = full(lse.shape, ABSENT)
    found[is_large(lse, bound)] = EMPTY
    return found


def of_lse(lse: Array) -> Array:
    """Row sums that say no more than lse does."""
    lse = np.asarray(lse, np.float64)
    return np.stack([lse, np.where(lse == -np.inf, 0.0, 1.0), np.ones_like(lse)], axis=-1)


def explaining(row_sums: Array, lse: Array) -> Array:
    """The row sums, without those that are not of all keys that lse is of: it may be that of more keys."""
    with np.errstate(all="ignore"):
        distance = abs(lse_of(row_sums) - lse)
    is_other = (row_sums[..., 1] >= 0) & ~(distance <= ROUNDED_LSE[lse.dtype.name] * abs(lse))
    return np.where(is_other[..., None], ABSENT, row_sums)


def of_pairs(pairs: Array) -> Array:
    """Row sums of pairs of lse and what its rounding leaves."""
    lse, rest = np.moveaxis(np.asarray(pairs, np.float64), -1, 0)
    return np.stack([lse, np.where(lse == -np.inf, 0, np.exp(rest)), np.ones_like(lse)], axis=-1)


def of_partial(row_sums: Array | None, lse: Array) -> Array:
    """The row sums of a split, of all rows: where its lse is not large, it says enough."""
    plain = of_lse(lse)
    return plain if row_sums is None else np.where(row_sums[..., 1:2] < 0, plain, row_sums)


def merged(partials: Sequence[Array]) -> tuple[Array, list[Array]]:
    """The row sums of all keys, and the fraction of them of each split.

    A row has no sum if it has none in some split.
    """
    unit = partials[0][..., 2]
    for partial in partials[1:]:  # the unit of a row that has a sum of its own, if there is one
        unit = np.where(unit == 1, partial[..., 2], unit)
    maxima = [
        partial[..., 0] if (partial[..., 2] == unit).all() else partial[..., 0] * partial[..., 2] / unit
        for partial in partials
    ]
    row_max = np.maximum.reduce(maxima)
    base = np.where(row_max == -np.inf, 0, row_max)
    sums = [
        np.where(partial[..., 1] == 0, 0, partial[..., 1] * np.exp((own - base) * unit))
        for partial, own in zip(partials, maxima, strict=True)
    ]
    row_sum = sum(sums)
    total = np.where(row_sum == 0, 1, row_sum)
    is_absent = np.logical_or.reduce([partial[..., 1] < 0 for partial in partials])
    found = np.stack([row_max, row_sum, unit], axis=-1)
    found[is_absent] = ABSENT
    return found, [x / total for x in sums]


def with_score(row_sums: Array, scores: Array) -> Array:
    """Row sums with one more key, which has a score for each head."""
    of_key = np.broadcast_to(of_lse(scores)[:, None], row_sums.shape)
    return np.where(row_sums[..., 1:2] < 0, row_sums, merged([row_sums, of_key])[0])


def lse_of(row_sums: Array) -> Array:
    """The lse of rows that have sums."""
    row_max, row_sum, unit = np.moveaxis(row_sums, -1, 0)
    return row_max * unit + np.log(row_sum)


def in_units(row_sums: Array, unit: float, dtype: Any) -> Array:
    """Row max in a backend's unit and dtype, and the inverse of the row sum, negative where there is none."""
    row_max, row_sum, own = np.moveaxis(row_sums, -1, 0)
    converted = np.where(own == unit, row_max, row_max * own / unit)
    largest = np.finfo(dtype).max
    rounded = np.clip(converted, -largest, largest).astype(dtype).astype(np.float64)
    inverse = np.exp((rounded - converted) * unit) / row_sum
    return np.stack([rounded, np.where(row_sum < 0, -1, inverse)], axis=-1)
