"""Tangents of typed expressions, as expressions: forward mode, for the value of a score and its derivatives.

Forward over reverse gives second derivatives: the tangents of `cuflash.score_mod.derivatives`. One walk serves all
expressions, so that these share subexpressions. At a kink a tangent is one-sided, as the derivative is; a derivative
that jumps there has the tangent 0. In the chain rule 0 times infinity is 0, as it is for derivatives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cuflash.score_mod.derivatives import (
    ZERO,
    add,
    choose,
    is_at_limit,
    local_derivatives,
    made,
    multiply,
    zero_where,
)
from cuflash.score_mod.nodes import Node, in_order, node
from cuflash.score_mod.ranges import ranges

TANGENT_OF_S = node("input", (), "ts", "float")


def tangent_of_load(load: Node) -> Node:
    """What reads the tangent of an array where `load` reads the array."""
    return node("load", load.args, f"t{load.payload}", "float")


def tangents(roots: Sequence[Node], seeds: Mapping[Node, Node]) -> list[Node]:
    """The tangents of real expressions, from those of the nodes in `seeds`; all other inputs stay as they are."""
    found = dict(seeds)
    steep: set[Node] = set()  # nodes whose tangents may be infinite
    known = {at: of for root in roots for at, of in ranges(root).items()}
    for at in in_order(roots):
        if at in seeds or at.type != "float":
            continue
        is_steep = at.op in ("sqrt", "pow") and not known[at.args[0]].is_positive
        total, chosen = ZERO, {}
        for arg, factor in local_derivatives(at):
            own = found.get(arg, ZERO)
            if not isinstance(factor, Node):
                which, takes = factor
                chosen[takes] = own
                total = choose(which, chosen.get(True, ZERO), chosen.get(False, ZERO))
                continue
            if own is ZERO:
                continue
            if at.op == "product":  # 0 wherever its first factor is 0, or has no value because of a choice
                part = made("product", own, factor) if arg is at.args[0] else made("product", factor, own)
            elif arg in steep or is_at_limit(at, arg, known[arg]):
                part = made("product", factor, own)
            else:
                part = multiply(factor, own)
            if is_steep:
                part = zero_where(own, part)
            if is_steep or arg in steep:
                steep.add(at)
            total = add(total, part)
        if total is not ZERO:
            found[at] = total
    return [found.get(root, ZERO) for root in roots]
