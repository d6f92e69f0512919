"""Tangents of typed expressions, as expressions: forward mode, for the value of a score and its derivatives.

Forward over reverse gives second derivatives: the tangents of `cuflash.score_mod.derivatives`. One walk serves all
expressions, so that these share subexpressions. At a kink a tangent is one-sided, as the derivative is; a derivative
that jumps there has the tangent 0. In the chain rule 0 times infinity is 0, as it is for derivatives: where these
choose 0 for a product with a factor of 0 (`zero_where`), the other factor times the tangent of this one is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cuflash.score_mod.derivatives import ZERO, add, choose, is_at_limit, local_derivatives, made, multiply, zero_where
from cuflash.score_mod.nodes import Node, in_order, node
from cuflash.score_mod.ranges import ranges

TANGENT_OF_S = node("input", (), "ts", "float")


def tangent_of_load(load: Node) -> Node:
    """What reads the tangent of an array where `load` reads the array."""
    return node("load", load.args, f"t{load.payload}", "float")


def tangents(roots: Sequence[Node], seeds: Mapping[Node, Node], score: Node | None = None) -> list[Node]:
    """The tangents of real expressions, from those of the nodes in `seeds`; all other inputs stay as they are.

    `score` is the expression that some of them are derivatives of. What it chooses itself is no product of the chain
    rule.
    """
    found = dict(seeds)
    guards = set() if score is None else _guards(roots, score)
    guarded = {at.args[2] for at in guards if at.args[2].op in ("mul", "product")}
    steep: set[Node] = set()  # nodes whose tangents may be infinite
    known = {at: of for root in roots for at, of in ranges(root).items()}
    for at in in_order(roots):
        if at in seeds or at.type != "float":
            continue
        if at in guards:
            if at.args[2] in found:
                found[at] = found[at.args[2]]
            if at.args[2] in steep:
                steep.add(at)
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
            if at in guarded:  # 0 wherever a factor is, however infinite the other one
                term = zero_where(factor, made("product", own, factor))
            elif at.op == "product":  # 0 wherever its first factor is 0, or has no value because of a choice
                term = made("product", own, factor) if arg is at.args[0] else made("product", factor, own)
            elif arg in steep or is_at_limit(at, arg, known[arg]):
                term = made("product", factor, own)
            else:
                term = multiply(factor, own)
            if is_steep:
                term = zero_where(own, term)
            if is_steep or arg in steep:
                steep.add(at)
            total = add(total, term)
        if total is not ZERO:
            found[at] = total
    return [found.get(root, ZERO) for root in roots]


def _guards(roots: Sequence[Node], score: Node) -> set[Node]:
    """The choices of `zero_where` in derivatives of a score."""
    own = set(in_order([score]))

    def is_guard(at: Node) -> bool:
        if at.op != "where" or at.args[1] is not ZERO or at in own:
            return False
        test = at.args[0]
        return test.op == "eq" and test.args[1] is ZERO

    return {at for at in in_order(roots) if is_guard(at)}
