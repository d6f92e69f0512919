"""What is known of the numbers of a typed expression: their signs, and whether they may be infinite.

The numbers that it reads are taken to be finite, and of any sign. `cuflash.score_mod.intervals` bounds expressions for
ranges of indices; here it is how a number is made, such as a square, that says something of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cuflash.score_mod.nodes import Node, in_order

_MAY_ALL_BE_INFINITE = ("add", "sub", "mul", "min", "max", "where", "neg", "abs", "sqrt", "mod", "floor")


class Range(NamedTuple):
    """What is known of a number."""

    is_least_0: bool = False  # at least 0
    is_most_0: bool = False  # at most 0
    is_nonzero: bool = False
    may_be_infinite: bool = False

    @property
    def is_positive(self) -> bool:
        return self.is_least_0 and self.is_nonzero

    @property
    def negated(self) -> Range:
        return self._replace(is_least_0=self.is_most_0, is_most_0=self.is_least_0)


def ranges(root: Node) -> dict[Node, Range]:
    """What is known of an expression and of all that it is made of."""
    found: dict[Node, Range] = {}
    for at in in_order([root]):
        args = [found[arg] for arg in at.args]
        found[at] = Range(*_sign(at, args), _may_be_infinite(at, args))
    return found


def _sign(at: Node, args: Sequence[Range]) -> tuple[bool, bool, bool]:
    if at.op == "constant":
        value = float(at.payload)  # type: ignore[arg-type]
        return value >= 0, value <= 0, value != 0
    if at.op == "cast":
        return args[0][:3] if at.args[0].type != "bool" else (True, False, False)
    if at.op in ("abs", "sqrt"):
        return True, False, args[0].is_nonzero
    if at.op == "exp":
        return True, False, False  # it may underflow
    if at.op == "neg":
        return args[0].negated[:3]
    if at.op == "where":
        return _of_all(args[1:])
    if at.op == "mul":
        return _sign_of_product(*args, is_square=at.args[0] is at.args[1])
    if at.op == "div":
        x, y = args
        least_0, most_0, is_nonzero = _sign_of_product(x, y, is_square=at.args[0] is at.args[1])
        return least_0, most_0, is_nonzero and not y.may_be_infinite
    if at.op in ("add", "sub"):
        x, y = args
        return _sign_of_sum(x, y if at.op == "add" else y.negated)
    if at.op == "max" and any(x.is_positive for x in args):
        return True, False, True
    return _of_all(args) if at.op in ("min", "max") else (False, False, False)


def _sign_of_product(x: Range, y: Range, *, is_square: bool) -> tuple[bool, bool, bool]:
    have_same_sign = (x.is_least_0 and y.is_least_0) or (x.is_most_0 and y.is_most_0)
    have_opposite_signs = (x.is_least_0 and y.is_most_0) or (x.is_most_0 and y.is_least_0)
    return is_square or have_same_sign, have_opposite_signs, x.is_nonzero and y.is_nonzero


def _sign_of_sum(x: Range, y: Range) -> tuple[bool, bool, bool]:
    least_0, most_0 = x.is_least_0 and y.is_least_0, x.is_most_0 and y.is_most_0
    return least_0, most_0, (least_0 or most_0) and (x.is_nonzero or y.is_nonzero)


def _of_all(args: Sequence[Range]) -> tuple[bool, bool, bool]:
    return tuple(all(x[n] for x in args) for n in range(3))  # type: ignore[return-value]


def _may_be_infinite(at: Node, args: Sequence[Range]) -> bool:
    """Overflow counts for exponentials and powers alone."""
    if at.op == "constant":
        return isinstance(at.payload, float) and not math.isfinite(at.payload)
    if at.op == "exp":
        return not args[0].is_most_0
    if at.op == "log":
        return args[0].may_be_infinite or not args[0].is_positive
    if at.op == "div":
        return args[0].may_be_infinite or not args[1].is_nonzero
    return at.op == "pow" or (at.op in _MAY_ALL_BE_INFINITE and any(x.may_be_infinite for x in args))
