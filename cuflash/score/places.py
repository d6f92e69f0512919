"""Functions of a part of a longer problem: their indices are those of the whole, whichever part a call computes.

Where a part begins is an array that the functions read, so that all parts have one expression, and one kernel.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from cuflash.score.nodes import COMPARISONS, Node, constant, in_order, node
from cuflash.score.program import Traced

ORIGIN = "part.origin"  # the name of that array; it is no identifier, so that no array of a caller has it
COUNTED = ("i", "j", "head", "batch")  # what its entries are added to
# Entries are no larger, so that 32 bits hold the sum of one and a row or a key; and sums with a head, no larger either.
LARGEST_ORIGIN, LARGEST_SUM = 2**30 - 1, 2**31 - 1


@functools.lru_cache(maxsize=256)
def of_part(traced: Traced, counted: tuple[str, ...] = COUNTED) -> Traced:
    """The function of a part. Of `COUNTED`, inputs that are not `counted` are those of the whole already."""
    if not traced.depends_on(*counted):
        return traced
    done: dict[Node, Node] = {}
    for at in in_order([traced.root]):
        if at.op == "input" and at.payload in counted:
            done[at] = _of_whole(at)
        elif _is_of_pair(at) and {"i", "j"} <= set(counted):
            done[at] = _difference(at)
        else:
            done[at] = node(at.op, tuple(done[arg] for arg in at.args), at.payload, at.kind, at.place)
    return replace(traced, root=done[traced.root], arrays=(*traced.arrays, ORIGIN), function=None)


def _of_whole(at: Node) -> Node:
    total = node("add", (at, _begin(str(at.payload))), place=at.place)
    return total if at.payload in ("i", "j") else node("min", (total, constant(LARGEST_SUM)))


def _is_of_pair(at: Node) -> bool:
    """Whether it subtracts or compares i and j. Kernels know it as what follows from their difference alone."""
    inputs = [arg.payload for arg in at.args if arg.op == "input"]
    return at.op in ("sub", *COMPARISONS) and sorted(map(str, inputs)) == ["i", "j"]


def _difference(at: Node) -> Node:
    first, second = at.args
    offset = node("sub", tuple(_begin(str(arg.payload)) for arg in at.args))
    total = node("add", (node("sub", (first, second), place=at.place), offset))
    return total if at.op == "sub" else node(at.op, (total, constant(0)), place=at.place)


def counts_from_origin(at: Node) -> bool:
    """Whether it adds to an index where the part begins."""
    return at.op == "add" and any(_is_of_origin(arg) for arg in at.args)


def _is_of_origin(at: Node) -> bool:
    return at.op in ("min", "sub") and any(x.op == "load" and x.payload == ORIGIN for x in in_order(at.args))


def _begin(name: str) -> Node:
    """Where the part begins, along one axis."""
    entry = node("load", (constant(COUNTED.index(name)),), ORIGIN)
    return node("min", (node("max", (entry, constant(0))), constant(LARGEST_ORIGIN)))
