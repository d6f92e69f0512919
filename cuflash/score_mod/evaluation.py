"""Typed expressions, evaluated on NumPy arrays: integers in 64 bits, real numbers in the dtype asked for."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cuflash.score_mod.functions import floor_of
from cuflash.score_mod.nodes import Node, in_order

Array = NDArray[Any]


def sech2(x: Any) -> Any:
    """1 - tanh(x)^2, with the relative accuracy of an exponential."""
    e = np.exp(-2 * np.abs(x))
    return 4 * e / ((1 + e) * (1 + e))


_UFUNCS: Mapping[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.true_divide, "floordiv": np.floor_divide,
    "mod": np.remainder, "pow": np.power, "neg": np.negative, "abs": np.abs, "min": np.minimum, "max": np.maximum,
    "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "tanh": np.tanh, "sech2": sech2, "sin": np.sin, "cos": np.cos,
    "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "not": np.logical_not, "where": np.where, "floor": floor_of,
}  # fmt: skip


def clamped(indices: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
    """Indices, each clamped to its axis: an index outside counts as that of the nearest entry."""
    return tuple([np.minimum(np.maximum(index, 0), n - 1) for index, n in zip(indices, shape, strict=True)])


class Clamped:
    """An array as a function reads it that is called on NumPy arrays: every index is clamped to its axis."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        return self._array[clamped(indices, self._array.shape)]


def as_score_args(array: Array, dtype: DTypeLike) -> Any:
    """An array as a function reads it, with real numbers in `dtype`; an array without axes becomes its only number."""
    if array.dtype.kind not in "biu":
        array = array.astype(dtype)
    return Clamped(array) if array.ndim else array[()]


class Folded(NamedTuple):
    """Expressions without the nodes that follow from known inputs, which are evaluated once."""

    steps: tuple[Node, ...]  # the nodes that are left, each after its arguments
    values: Mapping[Node, Array]  # of the others, those that these or the roots need
    indices: Mapping[Node, tuple[Array, ...]]  # of loads among the steps, clamped, where they follow from known inputs


def fold(
    roots: Sequence[Node], inputs: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], dtype: DTypeLike
) -> Folded:
    """Evaluate what follows from these inputs alone. `shapes` are those of the arrays."""
    known: set[Node] = set()
    for at in _order(tuple(roots)):
        if (at.op == "input" and at.payload in inputs) or (at.args and at.op != "load" and _follow(at.args, known)):
            known.add(at)
    steps = tuple([at for at in in_order(roots, known) if at not in known])
    indexed = [at for at in steps if at.op == "load" and _follow(at.args, known)]
    needed = [*roots, *(arg for at in steps if at not in indexed for arg in at.args)]
    own = [at for at in dict.fromkeys(needed) if at in known]
    indices = {at: clamped(evaluate(at.args, inputs, {}, dtype), shapes[str(at.payload)]) for at in indexed}
    return Folded(steps, dict(zip(own, evaluate(own, inputs, {}, dtype), strict=True)), indices)


def _follow(args: Iterable[Node], known: Collection[Node]) -> bool:
    return all(arg in known or arg.op == "constant" for arg in args)


def evaluate(
    roots: Sequence[Node],
    inputs: Mapping[str, Any],
    arrays: Mapping[str, Array],
    dtype: DTypeLike,
    folded: Folded | None = None,
) -> list[Array]:
    """The values of expressions, in the shapes that those of the inputs broadcast to. `s` is of `dtype`.

    `folded` is what `fold` made of them for some of these inputs.
    """
    real: Any = np.dtype(dtype).type
    values: dict[Node, Any] = {} if folded is None else dict(folded.values)
    indices = {} if folded is None else folded.indices
    with np.errstate(all="ignore"):
        for at in _order(tuple(roots)) if folded is None else folded.steps:
            args = [] if at in indices else [values[arg] for arg in at.args]
            if at.op == "constant":
                values[at] = real(at.payload) if at.type == "float" else at.payload
            elif at.op == "input":
                values[at] = inputs[str(at.payload)]
            elif at.op == "load":
                array = arrays[str(at.payload)]
                if at in indices:
                    found = np.asarray(array[indices[at]])
                elif array.ndim == 1:
                    found = np.asarray(array.take(args[0], mode="clip"))
                else:
                    found = np.asarray(array[clamped(args, array.shape)])
                own_type = {"b": bool, "i": np.int64, "u": np.int64}.get(array.dtype.kind, real)
                values[at] = found if found.dtype == own_type else found.astype(own_type)
            elif at.op == "cast":
                values[at] = np.asarray(args[0]).astype(
                    real if at.type == "float" else np.int64 if at.type == "int" else bool
                )
            elif at.op == "floor" and at.type == "float":
                values[at] = np.floor(args[0])
            elif at.op == "product":
                values[at] = np.where(args[0] == 0, real(0), args[0] * args[1])
            else:
                values[at] = _UFUNCS[at.op](*args)
    return [np.asarray(values[root]) for root in roots]


@functools.lru_cache(maxsize=256)
def _order(roots: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes of expressions, each after its arguments; kept, because a call evaluates the same ones tile by tile."""
    return tuple(in_order(roots))
