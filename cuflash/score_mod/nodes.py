"""Expressions as graphs of nodes. Equal nodes are one object, so that common subexpressions are shared.

A traced expression has untyped nodes, because the dtypes of arrays are known only in a call.
`cuflash.score_mod.types` makes typed nodes from it. Values, derivatives, intervals and CUDA source are made from
those.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

NodeType = Literal["bool", "int", "float"]
Constant = bool | int | float

INPUTS = ("s", "i", "j", "head", "batch")
# Functions of one number, and operations on two numbers with the signs that show them. "sech2", 1 - tanh(x)^2, is the
# derivative of tanh: in none of its digits a difference from 1, of which few are left where tanh is near 1.
FUNCTIONS = ("exp", "log", "sqrt", "tanh", "sech2", "sin", "cos")
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "lt": "<", "le": "<=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
COMPARISONS = ("lt", "le", "eq", "ne")
LOGICAL = ("and", "or", "xor")


class Node:
    """An operation on other nodes. Made by `node` alone, which gives the same object for the same operation."""

    __slots__ = ("__weakref__", "args", "location", "op", "payload", "type")

    # "constant", "input", "load", a name of `FUNCTIONS` or `INFIX`, "neg", "abs", "min", "max", "floor", "not",
    # "where", "cast" (to the node's type), and "product" of derivatives: 0 wherever its first factor is 0.
    op: str
    args: tuple[Node, ...]
    payload: Constant | str | None  # the number of a constant, the name of an input or of the array of a load
    type: NodeType | None  # None before the dtypes of arrays are known
    location: str  # file and line where the expression was first written; no part of what makes nodes equal

    def __reduce__(self) -> tuple[object, ...]:
        """A list of all nodes, because pickle would go down an expression as deep as it is, which Python limits."""
        number = {at: n for n, at in enumerate(in_order([self]))}
        return _last_of, (
            [(at.op, tuple([number[arg] for arg in at.args]), at.payload, at.type, at.location) for at in number],
        )

    def __repr__(self) -> str:
        return f"<{shown([('', self)])}>"


_lock = threading.RLock()  # a handler of a signal may trace a function wherever it comes
if hasattr(os, "register_at_fork"):  # else a child would wait for a thread that it does not have
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_nodes: weakref.WeakValueDictionary[tuple[object, ...], Node] = weakref.WeakValueDictionary()


def node(
    op: str,
    args: tuple[Node, ...] = (),
    payload: Constant | str | None = None,
    type_: NodeType | None = None,
    location: str = "",
) -> Node:
    """The node of an operation."""
    spelled = payload.hex() if isinstance(payload, float) else payload  # tells 0.0 from -0.0, and a NaN equals itself
    key = (op, args, type(payload), spelled, type_)
    with _lock:
        found = _nodes.get(key)
        if found is None:
            found = Node()
            found.op, found.args, found.payload, found.type, found.location = op, args, payload, type_, location
            _nodes[key] = found
    return found


def _last_of(nodes: list[tuple[str, tuple[int, ...], Constant | str | None, NodeType | None, str]]) -> Node:
    """The last of some nodes, whose arguments are given by their numbers, each after its arguments."""
    found: list[Node] = []
    for op, args, payload, type_, location in nodes:
        found.append(node(op, tuple([found[n] for n in args]), payload, type_, location))
    return found[-1]


def constant(value: Constant, type_: NodeType | None = None) -> Node:
    return node("constant", (), value, type_)


def in_order(roots: Iterable[Node], known: Collection[Node] = ()) -> Iterator[Node]:
    """The roots and all nodes that they are made of, each after its arguments; the search stops at `known` nodes."""
    seen: set[Node] = set()
    pending: list[tuple[Node, bool]] = [(root, False) for root in reversed(list(roots))]
    while pending:
        at, is_ready = pending.pop()
        if is_ready:
            yield at
        elif at not in seen:
            seen.add(at)
            pending.append((at, True))
            if at in known:
                continue
            pending += ((arg, False) for arg in reversed(at.args) if arg not in seen)


def shown(named: Iterable[tuple[str, Node]]) -> str:
    """Expressions in Python's words, a line for each named one and for each subexpression that has several uses."""
    named = list(named)
    order = list(dict.fromkeys(in_order(root for _, root in named)))
    uses: dict[Node, int] = dict.fromkeys(order, 0)
    for at in order:
        for arg in at.args:
            uses[arg] += 1
    text: dict[Node, str] = {}
    lines: list[str] = []
    for at in order:
        text[at] = _spelled(at, [text[arg] for arg in at.args])
        if uses[at] > 1 and at.args and at.op not in ("load", "cast"):
            lines.append(f"t{len(lines)} = {text[at]}")
            text[at] = f"t{len(lines) - 1}"
    lines += [f"{name} = {_bare(text[root])}" if name else _bare(text[root]) for name, root in named]
    return "\n".join(lines)


def _spelled(at: Node, args: list[str]) -> str:
    if at.op == "constant":
        return repr(at.payload)
    if at.op == "input":
        return str(at.payload)
    if at.op == "load":
        return f"{at.payload}[{', '.join(map(_bare, args))}]" if args else str(at.payload)
    if at.op == "cast":
        return args[0]
    if at.op in INFIX:
        return f"({args[0]} {INFIX[at.op]} {args[1]})"
    if at.op == "product":
        return f"({args[0]} * {args[1]})"
    if at.op in ("neg", "not"):
        return f"{'-' if at.op == 'neg' else '~'}{args[0]}"
    name = {"min": "minimum", "max": "maximum"}.get(at.op, at.op)
    return f"{name}({', '.join(map(_bare, args))})"


def _bare(text: str) -> str:
    """The text without the parentheses around all of it."""
    if not text.startswith("("):
        return text
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[1:-1] if index == len(text) - 1 else text
    return text
