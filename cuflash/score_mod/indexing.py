"""Functions of a slice of a longer problem: their indices are those of the whole, whichever slice a call computes.

The functions read from an array where the slice begins, so that all slices have one expression, and one kernel.
"""

from __future__ import annotations

from cuflash.score_mod.nodes import COMPARISONS, Node, constant, in_order, node

ORIGIN = "slice.origin"  # the name of that array; it is no identifier, so that no array of a caller has it
COUNTED = ("i", "j", "head", "batch")  # the inputs that its entries are added to
# An entry is clamped to the first, so that 32 bits hold its sum with a row or a key. Its sum with a head or a batch
# entry is clamped to the second.
LARGEST_ORIGIN, LARGEST_SUM = 2**30 - 1, 2**31 - 1


def of_slice(root: Node) -> Node:
    """The expression of a slice."""
    done: dict[Node, Node] = {}
    for at in in_order([root]):
        if at.op == "input" and at.payload in COUNTED:
            done[at] = _of_whole(at)
        elif is_difference(at):
            done[at] = _difference(at)
        else:
            done[at] = node(at.op, tuple(done[arg] for arg in at.args), at.payload, at.type, at.location)
    return done[root]


def _of_whole(at: Node) -> Node:
    total = node("add", (at, _begin(str(at.payload))), location=at.location)
    return total if at.payload in ("i", "j") else node("min", (total, constant(LARGEST_SUM)))


def is_difference(at: Node) -> bool:
    """Whether the node subtracts or compares i and j. Kernels know that it depends on their difference alone."""
    inputs = [arg.payload for arg in at.args if arg.op == "input"]
    return at.op in ("sub", *COMPARISONS) and sorted(map(str, inputs)) == ["i", "j"]


def _difference(at: Node) -> Node:
    first, second = at.args
    offset = node("sub", tuple(_begin(str(arg.payload)) for arg in at.args))
    total = node("add", (node("sub", (first, second), location=at.location), offset))
    return total if at.op == "sub" else node(at.op, (total, constant(0)), location=at.location)


def counts_from_origin(at: Node) -> bool:
    """Whether the node adds the beginning of the slice to an index."""
    return at.op == "add" and any(_is_of_origin(arg) for arg in at.args)


def _is_of_origin(at: Node) -> bool:
    return at.op in ("min", "sub") and any(x.op == "load" and x.payload == ORIGIN for x in in_order(at.args))


def _begin(name: str) -> Node:
    """Where the slice begins, along one axis."""
    entry = node("load", (constant(COUNTED.index(name)),), ORIGIN)
    return node("min", (node("max", (entry, constant(0))), constant(LARGEST_ORIGIN)))
