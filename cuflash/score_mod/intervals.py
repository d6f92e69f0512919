"""Typed expressions over intervals: bounds of all values that they have while indices run over ranges.

Bounds are arrays, so that one evaluation serves many ranges, such as all tiles. They hold for real numbers rounded to
float32 too. A bound that is NaN says that nothing is known: values may be NaN or of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.score_mod.functions import LARGEST_FLOOR, floor_of
from cuflash.score_mod.nodes import Node, in_order

Array = NDArray[Any]
Bounds = tuple[Any, Any]

ROUNDING = 2.0**-19  # relative error of an operation in float32, functions included, generously
TINY = 2.0**-126
MOST = 2.0**62  # integers of larger magnitude may have wrapped around
EVERY_INTEGER: Bounds = (-(2**63), 2**63 - 1)
UNKNOWN: Bounds = (np.nan, np.nan)

_RISING: Mapping[str, Any] = {"exp": np.exp, "tanh": np.tanh, "log": np.log, "sqrt": np.sqrt}
Load = Callable[[str, Sequence[Bounds]], Bounds]


def bounds_of(root: Node, inputs: Mapping[str, Bounds], load: Load) -> Bounds:
    """The bounds of an expression. `load` gives those of entries of an array within bounds of its indices."""
    return all_bounds(root, inputs, load)[root]


def all_bounds(root: Node, inputs: Mapping[str, Bounds], load: Load) -> dict[Node, Bounds]:
    """The bounds of an expression and of all that it is made of."""
    found: dict[Node, Bounds] = {}
    with np.errstate(all="ignore"):
        for at in in_order([root]):
            args = [found[arg] for arg in at.args]
            if at.op == "constant":
                found[at] = bounds_of_constant(at)
            elif at.op == "input":
                found[at] = inputs[str(at.payload)]
            elif at.op == "load":
                found[at] = load(str(at.payload), args)
            elif at.type == "bool":
                found[at] = _condition(at, args)
            elif at.type == "int":
                found[at] = _integer(at, args)
            else:
                found[at] = _real(at, args)
    return found


def bounds_of_constant(at: Node) -> Bounds:
    """The bounds of a constant and of what it may be rounded to."""
    value: Any = at.payload
    with np.errstate(all="ignore"):
        if at.type != "float" or not math.isfinite(value) or float(np.float32(value)) == value:
            return value, value
    return value - ROUNDING * abs(value) - TINY, value + ROUNDING * abs(value) + TINY


def _hull(values: Sequence[Any]) -> Bounds:
    low = high = values[0]
    for x in values[1:]:
        low, high = np.minimum(low, x), np.maximum(high, x)
    return low, high


def _condition(at: Node, args: list[Bounds]) -> Bounds:
    """The bounds of a bool: (0, 0) for never, (1, 1) for always."""
    if at.op == "cast":
        return _either(_zero(args[0], False), _zero(args[0], True))
    if at.op == "where":
        return _chosen(args)
    if at.op == "not":
        return 1 - args[0][1], 1 - args[0][0]
    if at.op in ("and", "or"):
        pick = np.minimum if at.op == "and" else np.maximum
        return pick(*(int_of(x[0]) for x in args)), pick(*(int_of(x[1]) for x in args))
    (a, b), (c, d) = args
    if at.op == "xor":
        is_known = (int_of(a) == int_of(b)) & (int_of(c) == int_of(d))
        value = int_of(a) ^ int_of(c)
        return np.where(is_known, value, 0), np.where(is_known, value, 1)
    is_known = ~_is_unknown(args[0]) & ~_is_unknown(args[1])
    if at.op == "lt":
        return _either(is_known & (b < c), is_known & (a >= d))
    if at.op == "le":
        return _either(is_known & (b <= c), is_known & (a > d))
    equal = is_known & (a == b) & (c == d) & (a == c)
    disjoint = is_known & ((b < c) | (d < a))
    return _either(equal, disjoint) if at.op == "eq" else _either(disjoint, equal)


def int_of(x: Any) -> Any:
    return np.asarray(x).astype(np.int64)


def _either(always: Any, never: Any) -> Bounds:
    return np.where(always, 1, 0), np.where(never, 0, 1)


def _zero(x: Bounds, wanted: bool) -> Any:
    """Whether a number is always 0 (if `wanted`), or never 0 (if not)."""
    low, high = x
    return (low == 0) & (high == 0) if wanted else (low > 0) | (high < 0)


def _is_unknown(x: Bounds) -> Any:
    return np.isnan(np.asarray(x[0], float)) | np.isnan(np.asarray(x[1], float))


def _chosen(args: list[Bounds]) -> Bounds:
    (always, sometimes), (a, b), (c, d) = args
    low = np.where(int_of(always) == 1, a, np.where(int_of(sometimes) == 0, c, np.minimum(a, c)))
    return low, np.where(int_of(always) == 1, b, np.where(int_of(sometimes) == 0, d, np.maximum(b, d)))


def _integer(at: Node, args: list[Bounds]) -> Bounds:
    if at.op == "cast":
        return int_of(args[0][0]), int_of(args[0][1])
    if at.op == "where":
        return _chosen(args)
    if at.op == "floor":
        low, high = args[0]
        is_known = ~_is_unknown(args[0])
        return np.where(is_known, floor_of(low), int(-LARGEST_FLOOR)), np.where(
            is_known, floor_of(high), int(LARGEST_FLOOR)
        )
    if at.op in ("and", "or", "xor"):
        return _bits(args)
    if at.op in ("min", "max"):
        pick = np.minimum if at.op == "min" else np.maximum
        return pick(args[0][0], args[1][0]), pick(args[0][1], args[1][1])
    # 64 bits may wrap around; float64 tells where.
    low, high = _of_integers(at.op, [(int_of(x), int_of(y)) for x, y in args])
    about = _of_integers(at.op, [(np.asarray(x, float), np.asarray(y, float)) for x, y in args])
    is_known = np.maximum(np.abs(about[0]), np.abs(about[1])) <= MOST
    return np.where(is_known, low, EVERY_INTEGER[0]), np.where(is_known, high, EVERY_INTEGER[1])


def _of_integers(op: str, args: list[Bounds]) -> Bounds:
    if op == "neg":
        return -args[0][1], -args[0][0]
    if op == "abs":
        return _magnitude(args[0])
    (a, b), (c, d) = args
    if op == "add":
        return a + c, b + d
    if op == "sub":
        return a - d, b - c
    if op == "mul":
        return _hull([a * c, a * d, b * c, b * d])
    is_positive = c > 0
    if op == "floordiv":
        # Division by 0 gives 0. A divisor that may be negative gives no larger magnitude than that of the dividend.
        safe_c, safe_d = np.where(is_positive, c, 1), np.where(is_positive, d, 1)
        low, high = _hull([a // safe_c, a // safe_d, b // safe_c, b // safe_d])
        most = np.maximum(np.abs(a), np.abs(b)) + 1
        return np.where(is_positive, low, -most), np.where(is_positive, high, most)
    if op == "mod":
        is_same = is_positive & (a >= 0) & (b < c)
        most = np.maximum(np.abs(c), np.abs(d))
        low = np.where(is_same, a, np.where(c >= 0, 0, -most))
        return low, np.where(is_same, b, np.where(d <= 0, 0, most))
    raise AssertionError(op)


def _magnitude(x: Bounds) -> Bounds:
    low, high = x
    spans = (low <= 0) & (high >= 0)
    return np.where(spans, 0, np.minimum(np.abs(low), np.abs(high))), np.maximum(np.abs(low), np.abs(high))


def _bits(args: list[Bounds]) -> Bounds:
    """Bitwise operations: of numbers that are not negative, no result has a higher bit than they have."""
    (a, b), (c, d) = args
    most = np.maximum(np.asarray(b, float), np.asarray(d, float))
    is_known = (np.asarray(a) >= 0) & (np.asarray(c) >= 0) & (most <= MOST)
    bits = np.where(is_known, 2.0 ** np.ceil(np.log2(np.maximum(most, 1) + 1)), 0).astype(np.int64)
    return np.where(is_known, 0, EVERY_INTEGER[0]), np.where(is_known, np.maximum(bits - 1, 0), EVERY_INTEGER[1])


def _real(at: Node, args: list[Bounds]) -> Bounds:
    if at.op == "where":
        low, high = _chosen(args)
        maybe = _is_unknown(args[1]) | _is_unknown(args[2])
        return np.where(maybe, np.nan, low), np.where(maybe, np.nan, high)
    if at.op == "floor":
        return np.floor(args[0][0]), np.floor(args[0][1])
    low, high = _of_reals(at.op, [(np.asarray(x, float), np.asarray(y, float)) for x, y in args])
    # An infinite value may become NaN in the next operation, so that it counts as NaN.
    maybe = np.isnan(low) | np.isnan(high) | np.isinf(low) | np.isinf(high)
    for x in args:
        maybe = maybe | _is_unknown(x)
    low = low - ROUNDING * np.abs(low) - TINY
    high = high + ROUNDING * np.abs(high) + TINY
    large = np.maximum(np.abs(low), np.abs(high)) > 2.0**127  # it may overflow
    return np.where(maybe | large, np.nan, low), np.where(maybe | large, np.nan, high)


def _of_reals(op: str, args: list[Bounds]) -> Bounds:
    if op == "cast":
        return args[0]
    if op == "neg":
        return -args[0][1], -args[0][0]
    if op == "abs":
        return _magnitude(args[0])
    if op in _RISING:
        return _RISING[op](args[0][0]), _RISING[op](args[0][1])  # NaN for a bound outside of the domain
    if op == "sech2":
        return np.zeros_like(args[0][0]), np.ones_like(args[0][0])
    if op in ("sin", "cos"):
        return _wave(args[0], 0.0 if op == "sin" else math.pi / 2)
    (a, b), (c, d) = args
    if op == "add":
        return a + c, b + d
    if op == "sub":
        return a - d, b - c
    if op in ("mul", "product"):
        return _hull([a * c, a * d, b * c, b * d])
    if op in ("min", "max"):
        pick = np.minimum if op == "min" else np.maximum
        return pick(a, c), pick(b, d)
    if op == "div":
        low, high = _hull([a / c, a / d, b / c, b / d])
        crosses = (c <= 0) & (d >= 0)
        return np.where(crosses, np.nan, low), np.where(crosses, np.nan, high)
    if op == "pow":
        low, high = _hull([np.power(x, y) for x in (a, b) for y in (c, d)])
        return np.where(a > 0, low, np.nan), np.where(a > 0, high, np.nan)
    return np.full(np.shape(a), np.nan), np.full(np.shape(a), np.nan)


def _wave(x: Bounds, shift: float) -> Bounds:
    """The bounds of sin(x + shift): 1 and -1 where x runs over a crest or a trough, elsewhere those of both ends."""
    low, high = x
    ends = np.sin(low + shift), np.sin(high + shift)
    margin = 1e-5 * (1 + np.abs(low) + np.abs(high))  # for the rounding of float32 numbers

    def has(crest: float) -> Any:
        return np.floor((high + shift + margin - crest) / (2 * math.pi)) != np.floor(
            (low + shift - margin - crest) / (2 * math.pi)
        )

    top = np.where(has(math.pi / 2), 1.0, np.maximum(*ends) + margin)
    bottom = np.where(has(-math.pi / 2), -1.0, np.minimum(*ends) - margin)
    return np.maximum(bottom, -1.0), np.minimum(top, 1.0)


@dataclass
class RangeTable:
    """The least and the largest entry of any range along the last axis of an array: a sparse table."""

    lowest: list[Array]
    highest: list[Array]

    @classmethod
    def of(cls, array: Array) -> RangeTable:
        lowest, highest, width = [array], [array], 1
        while 2 * width <= array.shape[-1]:
            for tables, pick in ((lowest, np.minimum), (highest, np.maximum)):
                last = tables[-1]
                tables.append(pick(last[..., :-width], last[..., width:]))
            width *= 2
        return cls(lowest, highest)

    def over(self, first: Array, last: Array) -> Bounds:
        """The bounds of entries first..last, both of which are entries; NaN anywhere among them makes both NaN."""
        first, last = np.broadcast_arrays(np.asarray(first), np.asarray(last))
        level = np.floor(np.log2(last - first + 1)).astype(int)
        low = np.empty((*self.lowest[0].shape[:-1], *first.shape), self.lowest[0].dtype)
        high = np.empty_like(low)
        for at in np.unique(level):
            here = level == at
            start, stop = first[here], last[here] - (1 << int(at)) + 1
            low[..., here] = np.minimum(self.lowest[at][..., start], self.lowest[at][..., stop])
            high[..., here] = np.maximum(self.highest[at][..., start], self.highest[at][..., stop])
        return low, high


class Tables:
    """Bounds of entries of arrays, by tables that are made once for an array and an axis."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self._tables: dict[tuple[Any, ...], RangeTable] = {}

    def load(self, name: str, indices: Sequence[Bounds]) -> Bounds:
        """The bounds of the entries of an array whose indices are within bounds.

        Where two indices or more run over ranges, it gives the bounds of all entries. They are wider than they need be,
        but they hold.
        """
        array = self._arrays[name]
        kind = array.dtype.kind
        array = array.astype(np.int64 if kind in "biu" else np.float64)
        ends = [
            (np.clip(low, 0, n - 1), np.clip(high, 0, n - 1))
            for (low, high), n in zip(indices, array.shape, strict=True)
        ]
        running = [axis for axis, (low, high) in enumerate(ends) if np.any(low != high)]
        if not running:
            found = array[tuple(low for low, _ in ends)]
            return found, found
        fixed = [low for axis, (low, _) in enumerate(ends) if axis not in running]
        if len(running) > 1 or any(np.size(x) > 1 for x in fixed):
            return (array.min(), array.max()) if array.size else UNKNOWN
        (axis,) = running
        index = tuple(int(np.reshape(x, ())) for x in fixed)
        key = (name, axis, index)
        if key not in self._tables:
            self._tables[key] = RangeTable.of(np.moveaxis(array, axis, -1)[index])
        return self._tables[key].over(*ends[axis])
