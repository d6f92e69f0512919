"""Tangents of typed expressions, as expressions: forward mode, for the value of a score and its derivatives.

Forward over reverse gives second derivatives: the tangents of `cuflash.score_mod.derivatives`. One walk serves all
expressions, so that these share subexpressions. At a kink a tangent is one-sided, as the derivative is; a derivative
that jumps there has the tangent 0. In the chain rule 0 times infinity is 0, as it is for derivatives: where these
choose 0 for a product with a factor of 0 (`zero_where`), the other factor times the tangent of this one is left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cuflash.score_mod.derivatives import ZERO, add, choose, is_at_limit, local_derivatives, made, multiply, zero_where
from cuflash.score_mod.nodes import Node, in_order, node
from cuflash.score_mod.ranges import Range, ranges

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
            own, may_be_infinite = found.get(at.args[2], ZERO), at.args[2] in steep
        else:
            own, may_be_infinite = _tangent(at, found, steep, known, is_guarded=at in guarded)
        if own is not ZERO:
            found[at] = own
        if may_be_infinite:
            steep.add(at)
    return [found.get(root, ZERO) for root in roots]


def _tangent(
    at: Node, found: Mapping[Node, Node], steep: Collection[Node], known: Mapping[Node, Range], *, is_guarded: bool
) -> tuple[Node, bool]:
    """The tangent of a node by the chain rule, from those of its arguments, and whether it may be infinite."""
    total, may_be_infinite = ZERO, False
    is_steep = at.op in ("sqrt", "pow") and not known[at.args[0]].is_positive
    for arg, factor in local_derivatives(at):
        own = found.get(arg, ZERO)
        if not isinstance(factor, Node):  # of the first argument of a choice, then of the second
            takes_first, is_first = factor
            total = own if is_first else choose(takes_first, total, own)
        elif own is not ZERO:
            factor_is_0 = is_at_limit(at, arg, known[arg])
            term = _term(at, arg, factor, own, is_guarded=is_guarded, may_be_infinite=arg in steep or factor_is_0)
            total = add(total, zero_where(own, term) if is_steep else term)
            may_be_infinite = may_be_infinite or is_steep or arg in steep
    return total, may_be_infinite


def _term(at: Node, arg: Node, factor: Node, own: Node, *, is_guarded: bool, may_be_infinite: bool) -> Node:
    """The derivative by an argument times the tangent of this."""
    if is_guarded:  # 0 wherever a factor is, however infinite the other one
        return zero_where(factor, made("product", own, factor))
    if at.op == "product":  # 0 wherever its first factor is 0, or has no value because of a choice
        return made("product", own, factor) if arg is at.args[0] else made("product", factor, own)
    return made("product", factor, own) if may_be_infinite else multiply(factor, own)


def _guards(roots: Sequence[Node], score: Node) -> set[Node]:
    """The choices of `zero_where` in derivatives of a score."""
    own = set(in_order([score]))

    def is_guard(at: Node) -> bool:
        if at.op != "where" or at.args[1] is not ZERO or at in own:
            return False
        test = at.args[0]
        return test.op == "eq" and test.args[1] is ZERO

    return {at for at in in_order(roots) if is_guard(at)}
