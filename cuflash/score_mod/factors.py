"""Factors of derivatives that are the same for all pairs of a head.

Such a factor is multiplied once with the sum over pairs, and not with each term of it. Then reads of one array at a row
and at a key have common terms where the score depends on their difference: their derivatives differ in sign alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from cuflash.score_mod.derivatives import ONE, ZERO, add, multiply
from cuflash.score_mod.nodes import Node, in_order, node
from cuflash.score_mod.types import real


class Factored(NamedTuple):
    """A real number as the product of a constant, of numbers that all pairs of a head share, and of the rest."""

    constant: float
    of_head: tuple[Node, ...]
    rest: Node

    @property
    def factor(self) -> Node:
        """The constant and the numbers of the head."""
        return functools.reduce(multiply, self.of_head, real(self.constant))


def factored(root: Node) -> Factored:
    """An expression, split into such factors and the rest. Only the multiplication by the factor rounds otherwise."""
    done: dict[Node, Factored] = {}
    varies: dict[Node, bool] = {}
    for at in in_order([root]):
        varies[at] = at.payload in ("s", "i", "j") if at.op == "input" else any(varies[arg] for arg in at.args)
        args = [done[arg] for arg in at.args]
        found = _factored(at, args) if at.type == "float" and varies[at] else None
        if found is None and at.type == "float" and not varies[at]:
            found = _of_head(at)
        done[at] = found or Factored(1.0, (), at)
    return done[root]


def _of_head(at: Node) -> Factored:
    if at.op != "constant":
        return Factored(1.0, (at,), ONE)
    value = float(at.payload)  # type: ignore[arg-type]
    return Factored(value, (), ONE) if math.isfinite(value) and value != 0 else Factored(1.0, (), at)


def _factored(at: Node, args: Sequence[Factored]) -> Factored | None:
    if at.op == "neg":
        return args[0]._replace(constant=-args[0].constant)
    if at.op in ("mul", "product", "div"):
        x, y = args
        if at.op == "div":  # the divisor stays in the rest as a whole
            return x._replace(rest=node("div", (x.rest, at.args[1]), None, "float"))
        rest = multiply(x.rest, y.rest)
        if at.op == "product" and ONE not in (x.rest, y.rest):
            rest = node("product", (x.rest, y.rest), None, "float")
        return Factored(x.constant * y.constant, x.of_head + y.of_head, rest)
    if at.op in ("add", "sub"):
        x, y = args
        sign = 1 if at.op == "add" else -1
        if x.of_head != y.of_head:
            return None
        if x.rest is y.rest and x.constant + sign * y.constant != 0:
            return x._replace(constant=x.constant + sign * y.constant)
        if x.constant == sign * y.constant:
            return x._replace(rest=add(x.rest, y.rest))
        if x.constant == -sign * y.constant:
            return x._replace(rest=node("sub", (x.rest, y.rest), None, "float"))
    if at.op == "where" and ZERO in at.args[1:]:
        chosen = args[2 if at.args[1] is ZERO else 1]
        values = (ZERO, chosen.rest) if at.args[1] is ZERO else (chosen.rest, ZERO)
        return chosen._replace(rest=node("where", (at.args[0], *values), None, "float"))
    return None
