"""Expressions with kinds: every node is a bool, an integer or a real number, and casts stand where these meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from cuflash.arrays.checks import value_error
from cuflash.score_mod.nodes import COMPARISONS, FUNCTIONS, LOGICAL, Kind, Node, in_order, node

MOST_PRODUCTS = 64  # an integer exponent up to this becomes a chain of products
OF_INPUTS: Mapping[str, Kind] = {"s": "float", "i": "int", "j": "int", "head": "int", "batch": "int"}
_RANK = {"bool": 0, "int": 1, "float": 2}


def kind_of_dtype(dtype: str) -> Kind:
    """The kind of the numbers of an array."""
    return "bool" if dtype == "bool" else "int" if dtype.startswith("int") else "float"


def with_kinds(root: Node, arrays: Mapping[str, tuple[int, str]]) -> Node:
    """The expression with kinds, where `arrays` has the number of axes and the dtype of each array.

    Raises TypeError for an operation that these kinds do not have, and ValueError for a wrong number of indices.
    """
    done: dict[Node, Node] = {}
    for at in in_order([root]):
        done[at] = _Typed(at, [done[arg] for arg in at.args], arrays).result()
    return done[root]


def cast(x: Node, kind: Kind) -> Node:
    """The number as one of another kind."""
    if x.kind == kind:
        return x
    if x.op == "constant" and x.payload is not None and not isinstance(x.payload, str):
        value = {"bool": bool, "int": int, "float": float}[kind](x.payload)
        return node("constant", (), value, kind)
    if x.op == "floor" and kind == "float":  # which need not fit an integer, and converts nothing
        return node("floor", x.args, None, kind, x.place)
    return node("cast", (x,), None, kind)


def real(value: float) -> Node:
    """A real constant."""
    return node("constant", (), float(value), "float")


def power(x: Node, exponent: int) -> Node:
    """The product of `exponent` factors x. The exponent is at least 1."""
    result, square = None, x
    while True:
        if exponent % 2:
            result = square if result is None else node("mul", (result, square), None, x.kind)
        exponent //= 2
        if exponent == 0:
            assert result is not None
            return result
        square = node("mul", (square, square), None, x.kind)


class _Typed:
    """One node on its way to one with a kind."""

    def __init__(self, at: Node, args: list[Node], arrays: Mapping[str, tuple[int, str]]) -> None:
        self.at, self.args, self.arrays = at, args, arrays

    def result(self) -> Node:
        at, args = self.at, self.args
        if at.op == "constant":
            kind: Kind = "bool" if isinstance(at.payload, bool) else "int" if isinstance(at.payload, int) else "float"
            return self.made(kind)
        if at.op == "input":
            return self.made(OF_INPUTS[str(at.payload)])
        if at.op == "load":
            return self.load()
        if at.op in FUNCTIONS:
            return self.made("float", cast(args[0], "float"))
        if at.op == "floor":
            return cast(args[0], "int") if args[0].kind != "float" else self.made("int", args[0])
        if at.op in ("neg", "abs"):
            kind = "float" if args[0].kind == "float" else "int"
            return self.made(kind, cast(args[0], kind))
        if at.op in LOGICAL or at.op == "not":
            return self.logical()
        if at.op == "where":
            kind = self.common(args[1:])
            return self.made(kind, cast(args[0], "bool"), cast(args[1], kind), cast(args[2], kind))
        if at.op == "pow":
            return self.power()
        kind = self.common(args)
        if at.op in COMPARISONS:
            return self.made("bool", *(cast(x, kind) for x in args))
        kind = "float" if at.op == "div" or kind == "float" else "int"
        return self.made(kind, *(cast(x, kind) for x in args))

    def made(self, kind: Kind, *args: Node) -> Node:
        return node(self.at.op, args, self.at.payload, kind, self.at.place)

    def common(self, args: list[Node]) -> Kind:
        return max((x.kind for x in args if x.kind is not None), key=lambda kind: _RANK[kind])

    def refuse(self, message: str) -> NoReturn:
        raise TypeError(f"{self.at.place}: {message}")

    def load(self) -> Node:
        name = str(self.at.payload)
        num_axes, dtype = self.arrays[name]
        if len(self.args) != num_axes:
            expected = f"{len(self.args)} axes, which it is indexed by in {self.at.place}"
            raise value_error(name, f"an array of {num_axes} axes", expected)
        for index in self.args:
            if index.kind == "float":
                self.refuse(
                    f"got a real number as an index of {name}, expected an integer, such as cuflash.floor gives"
                )
        return self.made(kind_of_dtype(dtype), *(cast(index, "int") for index in self.args))

    def logical(self) -> Node:
        if any(x.kind == "float" for x in self.args):
            self.refuse(f"got real numbers for {self.at.op!r}, expected conditions or integers")
        if self.at.op == "not":
            kind = self.args[0].kind
            if kind == "int":
                self.refuse("got an integer for ~, expected a condition")
            return self.made("bool", *self.args)
        kind = self.common(self.args)
        return self.made(kind, *(cast(x, kind) for x in self.args))

    def power(self) -> Node:
        base, exponent = self.args
        kind: Kind = "float" if base.kind == "float" else "int"
        number = exponent.payload if exponent.op == "constant" else None
        if isinstance(number, float) and number == int(number) and abs(number) <= MOST_PRODUCTS:
            number, kind = int(number), "float"
        if isinstance(number, int) and abs(number) <= MOST_PRODUCTS:
            if number == 0:
                return cast(node("constant", (), 1, "int"), kind)
            if number > 0:
                return power(cast(base, kind), int(number))
            return node("div", (real(1), power(cast(base, "float"), -int(number))), None, "float")
        if number == 0.5:
            return node("sqrt", (cast(base, "float"),), None, "float")
        return self.made("float", cast(base, "float"), cast(exponent, "float"))
